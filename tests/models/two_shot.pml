/* SPDX-License-Identifier: Apache-2.0 */
/* All-reduce in two shots, by stores: all_reduce_direct of
 * tdcoll/collectives/all_reduce/kernels_direct.py, in place (out is source).
 *
 *    source[p] --stores--> first half of inbox[slot, r] on rank p; then a release of arrived
 *    first halves, source[r] --sum--> out[r], and --stores--> second half of inbox[slot, r] on every
 *    other rank; then a release of summed
 *    second half of inbox[slot, p] --> out[p]
 *    ZERO_COPY: sums are stored into out[r] of every rank, and nothing is copied out
 *
 * Abstracted: a part is one chunk and one cell: any of its bytes. A part of call e is 2 e, and its
 * sum 2 e + 1. Thread blocks of a launch are steps in any order.
 * Network: a block's stores arrive before its release, nothing else is ordered.
 * Claims: what is sent, summed and copied is of this call; from the end of the call until the
 * caller begins the next one, `out` has the sums of this call; unless the rank has given up; nobody
 * waits for ever.
 */
#include "common.h"

byte memory[RANKS * RANKS];             /* on rank r: part p of source and out */
byte inbox[RANKS * 2 * 2 * RANKS];      /* on rank r: half h of segment s of slot k */
byte arrived[RANKS * 2 * 2 * RANKS];    /* on rank r: for half h, in row k, by rank s */
byte data[RANKS * 2 * 2 * RANKS];       /* epoch of what is on its way to rank r; 0: nothing */
byte signal[RANKS * 2 * 2 * RANKS];

#define AT(r, k, h, s) ((((r) * 2 + (k)) * 2 + (h)) * RANKS + (s))
#define OUT(r, p) memory[(r) * RANKS + (p)]

#ifdef ONE_HALF /* mutant: sums arrive where parts have arrived */
#define SECOND 0
#else
#define SECOND 1
#endif

#ifdef SAME_SIGNALS /* mutant: a sum is told by the words that tell the parts */
#define SUMMED 0
#else
#define SUMMED 1
#endif

#ifdef RELAXED /* mutant: the signal is no release, or has no barrier before it */
#define RELEASED(r, k, h, s) true
#else
#define RELEASED(r, k, h, s) (data[AT(r, k, h, s)] == 0)
#endif

/* Delivers, to rank d, what rank s has stored for half h: k is the parity of its epoch. */
#define DELIVER(k, h) \
    :: data[AT(d, k, h, s)] != 0 -> d_step { epoch = data[AT(d, k, h, s)]; data[AT(d, k, h, s)] = 0; \
        if :: h == 0 -> inbox[AT(d, SLOT(epoch), 0, s)] = 2 * epoch \
        LAND(h) fi; epoch = 0 } \
    :: signal[AT(d, k, h, s)] != 0 && RELEASED(d, k, h, s) -> d_step { \
        arrived[AT(d, ROW(signal[AT(d, k, h, s)]), (h == 0 -> 0 : SUMMED), s)] = \
            signal[AT(d, k, h, s)]; \
        signal[AT(d, k, h, s)] = 0 }

#ifdef ZERO_COPY
#define LAND(h) :: h == 1 -> OUT(d, s) = 2 * epoch + 1
#else
#define LAND(h) :: h == 1 -> inbox[AT(d, SLOT(epoch), SECOND, s)] = 2 * epoch + 1
#endif

proctype Link(byte s, d) {
    byte epoch;
end:
    do
    DELIVER(0, 0)
    DELIVER(0, 1)
    DELIVER(1, 0)
    DELIVER(1, 1)
    od
}

inline store(d, h) {
    assert(data[AT(d, epoch % 2, h, r)] == 0 && signal[AT(d, epoch % 2, h, r)] == 0);
    data[AT(d, epoch % 2, h, r)] = epoch;
    signal[AT(d, epoch % 2, h, r)] = epoch
}

#define IS_HERE(h, s) ((s) == r || HERE(arrived[AT(r, ROW(epoch), h, s)], epoch))

#ifdef NO_SUM_WAIT /* mutant: the sum does not wait for all parts */
#define ALL_HERE(h) true
#else
#define ALL_HERE(h) (IS_HERE(h, 0) && IS_HERE(h, 1) IF_THREE(&& IS_HERE(h, 2)))
#endif

#define SEND(p) \
    :: !(sent & BIT(p)) -> d_step { \
        assert(OUT(r, p) == 2 * epoch); store(p, 0); sent = sent | BIT(p) }

#define CHECK_PART(s) assert(s == r || inbox[AT(r, SLOT(epoch), 0, s)] == 2 * epoch)

#define SEND_SUM(p) if :: p != r -> store(p, 1) :: else fi

#define SUM \
    :: !expired[r] && !summed && ALL_HERE(0) -> d_step { \
        assert(OUT(r, r) == 2 * epoch); \
        CHECK_PART(0); CHECK_PART(1); IF_THREE(CHECK_PART(2);) \
        OUT(r, r) = 2 * epoch + 1; \
        SEND_SUM(0); SEND_SUM(1); IF_THREE(SEND_SUM(2);) \
        summed = 1 }

#ifdef ZERO_COPY
#define COPY_OUT(p) \
    :: !expired[r] && !(copied & BIT(p)) && IS_HERE(SUMMED, p) -> copied = copied | BIT(p)
#else
#define COPY_OUT(p) \
    :: !expired[r] && !(copied & BIT(p)) && IS_HERE(SUMMED, p) -> d_step { \
        assert(inbox[AT(r, SLOT(epoch), SECOND, p)] == 2 * epoch + 1); \
        OUT(r, p) = 2 * epoch + 1; copied = copied | BIT(p) }
#endif

#define EACH(OPTION) OPTION(0) OPTION(1) IF_THREE(OPTION(2))
#define DONE (sent == ALL && summed && copied == ALL)

proctype Rank(byte r) {
    byte epoch, sent, summed, copied, p;
    do
    :: epoch < CALLS && ALIVE(r) ->
        d_step { /* the caller writes its tensor; then the launch begins */
            epoch++;
            sent = BIT(r); summed = 0; copied = BIT(r);
            for (p : 0 .. RANKS - 1) { OUT(r, p) = 2 * epoch }
            p = 0
        }
        do
        EACH(SEND)
        SUM
        EACH(COPY_OUT)
        :: DONE -> break
        :: !DONE && MAY_GIVE_UP(r) -> expired[r] = true; break
        :: expired[r] && sent == ALL -> break
        od;
        if /* the caller uses the result, whenever it likes */
        :: expired[r]
        :: else -> d_step {
            for (p : 0 .. RANKS - 1) { assert(OUT(r, p) == 2 * epoch + 1) }
            p = 0 }
        fi
    :: else -> break
    od
}

init {
    byte s, d;
    CHOOSE_EARLY;
    RUN_ALL
}
