/* SPDX-License-Identifier: Apache-2.0 */
/* LL: exchange_ll of tdcoll/collectives/exchange/kernels_ll.py, and tdcoll/primitives/ll.py.
 *
 *    source --{data, flag} words--> words[slot, r] on every other rank
 *    words[slot, s] --data--> out[s], when the word has the flag of this epoch
 *
 * Abstracted: a segment has up to WORDS words, each one cell of data and its flag. Calls carry 0 to
 * WORDS words, the same on all ranks, and a call of none sends one all the same. Flags have FLAGS
 * values instead of 2^32, of which 0 is none, so they come round within the calls that are made.
 * Network: stores to one word arrive in their order, all others in any.
 *
 * Claims: a word that is read is of this call, unless the rank has given up; nobody waits for ever;
 * a word has arrived when the same one is sent again.
 */
#include "common.h"

#define WORDS 2
#define FLAGS 4

typedef Word { byte data; byte flag }

Word words[RANKS * RANKS * 2 * WORDS];  /* on rank r: segment s of slot k */
Word sent[RANKS * RANKS * 2 * WORDS];   /* on its way from s to d; flag 0: nothing */
byte carried[CALLS + 1];                /* words of each call */

#define AT(r, k, s, w) ((((r) * 2 + (k)) * RANKS + (s)) * WORDS + (w))

#ifdef ZERO_FLAG /* mutant: a word that was never written has the flag of some epochs */
#define FLAG(epoch) ((epoch) % FLAGS)
#else
#define FLAG(epoch) ((epoch) % FLAGS == 0 -> 1 : (epoch) % FLAGS)
#endif

#ifdef SKIPS_EMPTY /* mutant: a call of no bytes hears from no peer */
#define CARRY(epoch) carried[epoch]
#else
#define CARRY(epoch) (carried[epoch] == 0 -> 1 : carried[epoch])
#endif

/* Delivers word w of slot k that rank s sends to rank d. */
#define DELIVER(k, w) \
    :: sent[AT(s, k, d, w)].data != 0 -> STORED_WHOLE { \
        words[AT(d, k, s, w)].flag = sent[AT(s, k, d, w)].flag; \
        words[AT(d, k, s, w)].data = sent[AT(s, k, d, w)].data; \
        sent[AT(s, k, d, w)].flag = 0; \
        sent[AT(s, k, d, w)].data = 0 }

#ifdef SPLIT_WORD /* mutant: data and flag are stores of their own */
#define STORED_WHOLE
#else
#define STORED_WHOLE d_step
#endif

proctype Link(byte s, d) {
end:
    do
    DELIVER(0, 0)
    DELIVER(0, 1)
    DELIVER(1, 0)
    DELIVER(1, 1)
    od
}

/* Reads word w of rank s when it has the flag. */
#define RECEIVE(s, w) \
    :: !expired[r] && s != r && w < CARRY(epoch) && !(received & BIT(WORDS * s + w)) && \
            words[AT(r, SLOT(epoch), s, w)].flag == FLAG(epoch) -> d_step { \
        assert(words[AT(r, SLOT(epoch), s, w)].data == epoch); \
        received = received | BIT(WORDS * s + w); \
        missing-- }

proctype Rank(byte r) {
    byte epoch, received, missing, d, w;
    do
    :: epoch < CALLS && ALIVE(r) ->
        d_step { /* a thread block that sends later is as a word that arrives later */
            epoch++;
            received = 0;
            missing = (RANKS - 1) * CARRY(epoch);
            for (d : 0 .. RANKS - 1) {
                w = 0;
                do
                :: d != r && w < CARRY(epoch) ->
                    assert(sent[AT(r, SLOT(epoch), d, w)].data == 0);
                    sent[AT(r, SLOT(epoch), d, w)].data = epoch;
                    sent[AT(r, SLOT(epoch), d, w)].flag = FLAG(epoch);
                    w++
                :: else -> break
                od
            }
            d = 0; w = 0
        }
        do
        RECEIVE(0, 0)
        RECEIVE(0, 1)
        RECEIVE(1, 0)
        RECEIVE(1, 1)
        IF_THREE(RECEIVE(2, 0) RECEIVE(2, 1))
        :: missing == 0 -> break
        :: missing > 0 && MAY_GIVE_UP(r) -> expired[r] = true; break
        :: expired[r] -> break
        od
    :: else -> break
    od
}

init {
    byte s, d;
    for (s : 1 .. CALLS) {
        if :: carried[s] = 0 :: carried[s] = 1 :: carried[s] = WORDS fi
    }
    CHOOSE_EARLY;
    RUN_ALL
}
