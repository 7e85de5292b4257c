/* SPDX-License-Identifier: Apache-2.0 */
/* The Lamport protocol: tdcoll/primitives/lamport.py, as all_reduce_one_shot of
 * tdcoll/collectives/all_reduce/kernels_words.py uses it, between calls of other algorithms.
 *
 *    call k        peers write slot k        this rank polls slot k, and clears slot k - 1
 *    call k + 1    peers write slot k + 1    ... clears slot k
 *    call k + 2    peers write slot k - 1
 *
 * Abstracted: a segment has up to WORDS parts of 32 bits, each one cell: 0 is the sentinel, other
 * values are the call that has written it. Calls carry 1 to WORDS of them, or are of another
 * algorithm, which advances the epoch, and in which ranks hear from each other by signals. All
 * ranks make the same calls. A thread block that sends later is as a word that arrives later.
 * Network: stores to one cell arrive in their order, all others in any.
 *
 * Claims: a word that is taken for data is of this call, unless the rank has given up; nobody waits
 * for ever; a word has arrived when the same one is sent or cleared again.
 */
#include "common.h"

#define WORDS 2

byte inbox[RANKS * RANKS * 3 * WORDS];  /* on rank r: segment s of slot k */
byte sent[RANKS * RANKS * 3 * WORDS];   /* on its way from s to d; 0: nothing */
byte arrived[RANKS * RANKS * 2];        /* of the other algorithm: on rank r, by rank s */
byte carried[CALLS + 1];                /* words of each call; 0: another algorithm */
byte written[RANKS * 3];                /* on rank r: words of each segment of slot k */

#define AT(r, k, s, w) ((((r) * 3 + (k)) * RANKS + (s)) * WORDS + (w))
#define SIGNAL(r, s) arrived[((r) * 2 + epoch % 2) * RANKS + (s)]

#ifdef TWO_SLOTS /* mutant */
#define OF_CALL(call) ((call) % 2)
#else
#define OF_CALL(call) ((call) % 3)
#endif

#ifdef COUNTS_EPOCHS /* mutant: calls of other algorithms count */
#define CALL epoch
#else
#define CALL call
#endif

#ifdef CLEARS_ITS_SIZE /* mutant: what this call writes, and not what the last one wrote */
#define STALE carried[epoch]
#else
#define STALE written[r * 3 + OF_CALL(CALL + 2)]
#endif

#ifdef NO_CLEAR /* mutant */
#define CLEARED(r) ALL
#else
#define CLEARED(r) BIT(r)
#endif

#define DELIVER(k, w) \
    :: sent[AT(s, k, d, w)] != 0 -> d_step { \
        inbox[AT(d, k, s, w)] = sent[AT(s, k, d, w)]; \
        sent[AT(s, k, d, w)] = 0 }

proctype Link(byte s, d) {
end:
    do
    DELIVER(0, 0) DELIVER(0, 1)
    DELIVER(1, 0) DELIVER(1, 1)
    DELIVER(2, 0) DELIVER(2, 1)
    od
}

#define RECEIVE(s, w) \
    :: !expired[r] && s != r && w < carried[epoch] && !(received & BIT(WORDS * s + w)) && \
            inbox[AT(r, OF_CALL(CALL), s, w)] != 0 -> d_step { \
        assert(inbox[AT(r, OF_CALL(CALL), s, w)] == epoch); \
        received = received | BIT(WORDS * s + w); \
        missing-- }

/* Segment by segment, at any time until the launch ends. */
#define CLEAR(s) \
    :: carried[epoch] != 0 && !(cleared & BIT(s)) -> d_step { \
        w = 0; \
        do \
        :: w < STALE -> inbox[AT(r, OF_CALL(CALL + 2), s, w)] = 0; w++ \
        :: else -> w = 0; break \
        od; \
        cleared = cleared | BIT(s) }

#define HEAR(s) \
    :: !expired[r] && s != r && carried[epoch] == 0 && !(received & BIT(s)) && HERE(SIGNAL(r, s), epoch) -> \
        d_step { received = received | BIT(s); missing-- }

proctype Rank(byte r) {
    byte epoch, call, received, cleared, missing, d, w;
    do
    :: epoch < CALLS && ALIVE(r) ->
        d_step {
            epoch++;
            received = 0;
            if
            :: carried[epoch] == 0 ->
                cleared = ALL;
                missing = RANKS - 1;
                for (d : 0 .. RANKS - 1) { SIGNAL(d, r) = epoch }
            :: else ->
                call++;
                cleared = CLEARED(r);
                missing = (RANKS - 1) * carried[epoch];
                written[r * 3 + OF_CALL(CALL)] = carried[epoch];
                for (d : 0 .. RANKS - 1) {
                    w = 0;
                    do
                    :: d != r && w < carried[epoch] ->
                        assert(sent[AT(r, OF_CALL(CALL), d, w)] == 0);
                        sent[AT(r, OF_CALL(CALL), d, w)] = epoch;
                        w++
                    :: else -> break
                    od
                }
            fi;
            d = 0; w = 0
        }
        do
        RECEIVE(0, 0) RECEIVE(0, 1) HEAR(0) CLEAR(0)
        RECEIVE(1, 0) RECEIVE(1, 1) HEAR(1) CLEAR(1)
        IF_THREE(RECEIVE(2, 0) RECEIVE(2, 1) HEAR(2) CLEAR(2))
        :: missing == 0 && cleared == ALL -> break
        :: missing > 0 && MAY_GIVE_UP(r) -> expired[r] = true; break
        :: expired[r] -> break
        od
    :: else -> break
    od
}

init {
    byte s, d;
    for (s : 1 .. CALLS) {
#ifdef ONE_SIZE
        carried[s] = 1
#else
        if :: carried[s] = WORDS :: carried[s] = 1 :: carried[s] = 0 fi
#endif
    }
    CHOOSE_EARLY;
    RUN_ALL
}
