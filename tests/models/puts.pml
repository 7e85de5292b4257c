/* SPDX-License-Identifier: Apache-2.0 */
/* Puts with a signal: all_gather_1d of tdcoll/collectives/all_gather/kernels_puts.py, and
 * tdcoll/primitives/puts.py.
 *
 *    source --put+signal--> inbox[slot, r] on every rank of this node
 *    source --> own inbox --nbi put+signal--> inbox[slot, r] on every rank of other nodes
 *    IN_PLACE: own segment of the caller's buffer --put+signal--> the same on every other rank,
 *    when that has `entered`; nbi puts are complete (quiet) when the launch ends
 *
 * Abstracted: a segment is one chunk, and one cell of memory: any of its bytes. Its value is the
 * call that has written it. Thread blocks of a launch are steps in any order. A wait and the read
 * behind it are one step, which may come at any time after the signal. Of 2 ranks
 * each is a node, of 3 ranks 0 and 1 are one: a local put reads its source at once, an nbi put when it is delivered.
 * Network: a put delivers its bytes and then its signal; nothing else is ordered.
 *
 * Claims: what a rank reads is of this call, and so is the whole result until the rank enters the
 * next call, unless the rank has given up; nobody waits for ever; a put is complete when its signal
 * row is used again.
 */
#include "common.h"

mtype = {NONE, DATA, SIGNAL};
typedef Put { mtype stage = NONE; byte epoch; byte value }

Put put[RANKS * RANKS * 2];          /* on its way from s to d */
byte inbox[RANKS * RANKS * 2];       /* on rank r: segment s of slot k */
byte arrived[RANKS * RANKS * 2];     /* on rank r: signal of rank s in row k */
byte entered[RANKS * RANKS];         /* on rank r: call that rank s has begun */
byte announced[RANKS * RANKS];       /* the same on its way from s to d; 0 if there is none */

#define AT(r, k, s) (((r) * 2 + (k)) * RANKS + (s))
#define PAIR(r, s) ((r) * RANKS + (s))
#define PUT(s, d) put[AT(s, ROW(epoch), d)]
#define NODE(r) (RANKS == 2 -> (r) : (r) / 2)

#ifdef IN_PLACE
#define WHERE(epoch) 0
#else
#define WHERE(epoch) SLOT(epoch)
#endif

#ifdef SIGNAL_FIRST /* mutant: the signal does not wait for the bytes */
#define FIRST SIGNAL
#define SECOND DATA
#else
#define FIRST DATA
#define SECOND SIGNAL
#endif

/* Delivers what rank s sends to rank d. */
#define DELIVER(k) \
    :: put[AT(s, k, d)].stage == DATA -> d_step { \
        value = put[AT(s, k, d)].value; \
        if :: value == 0 -> value = inbox[AT(s, WHERE(put[AT(s, k, d)].epoch), s)] :: else fi; \
        inbox[AT(d, WHERE(put[AT(s, k, d)].epoch), s)] = value; value = 0; \
        put[AT(s, k, d)].value = 0; \
        put[AT(s, k, d)].stage = (SECOND == SIGNAL -> SIGNAL : NONE) } \
    :: put[AT(s, k, d)].stage == SIGNAL -> d_step { \
        arrived[AT(d, k, s)] = put[AT(s, k, d)].epoch; \
        put[AT(s, k, d)].stage = (SECOND == SIGNAL -> NONE : DATA); \
        if :: SECOND == SIGNAL -> put[AT(s, k, d)].epoch = 0 :: else fi }

proctype Link(byte s, d) {
    byte value;
end:
    do
    DELIVER(0)
    DELIVER(1)
    :: announced[PAIR(s, d)] != 0 -> d_step {
        entered[PAIR(d, s)] = announced[PAIR(s, d)]; announced[PAIR(s, d)] = 0 }
    od
}

#ifdef NO_ENTERED /* mutant: peers write into a buffer whose owner has not entered the call */
#define MAY_WRITE(d) true
#elif defined(IN_PLACE)
#define MAY_WRITE(d) HERE(entered[PAIR(r, d)], epoch)
#else
#define MAY_WRITE(d) true
#endif

#if defined(IN_PLACE) && !defined(NO_QUIET) /* mutant NO_QUIET: the launch ends before nbi puts have */
#define QUIET(d) (NODE(r) == NODE(d) || PUT(r, d).stage == NONE)
#else
#define QUIET(d) true
#endif

#define SEND(d) \
    :: !(sent & BIT(d)) && MAY_WRITE(d) -> d_step { \
        assert(PUT(r, d).stage == NONE); \
        PUT(r, d).epoch = epoch; \
        PUT(r, d).value = (NODE(r) == NODE(d) -> epoch : 0); /* 0: read when it is delivered */ \
        PUT(r, d).stage = FIRST; \
        sent = sent | BIT(d) }

#define RECEIVE(s) \
    :: !expired[r] && !(received & BIT(s)) && HERE(arrived[AT(r, ROW(epoch), s)], epoch) -> d_step { \
        assert(inbox[AT(r, WHERE(epoch), s)] == epoch); \
        received = received | BIT(s) }

#define EACH(OPTION) OPTION(0) OPTION(1) IF_THREE(OPTION(2))

proctype Rank(byte r) {
    byte epoch, sent, received, s;
    do
    :: epoch < CALLS && ALIVE(r) ->
        d_step { /* the caller writes its segment, or into its buffer; then the launch begins */
            epoch++;
            sent = BIT(r);
            received = BIT(r);
#ifdef IN_PLACE
            for (s : 0 .. RANKS - 1) {
                inbox[AT(r, 0, s)] = 0;
                if :: s != r -> announced[PAIR(r, s)] = epoch :: else fi
            }
            s = 0;
#endif
            inbox[AT(r, WHERE(epoch), r)] = epoch
        }
        do
        EACH(SEND)
        EACH(RECEIVE)
        :: sent == ALL && received == ALL && QUIET(0) && QUIET(1) IF_THREE(&& QUIET(2)) -> break
        :: MAY_GIVE_UP(r) && (sent != ALL || received != ALL) -> expired[r] = true; break
        :: expired[r] -> break
        od;
#ifdef IN_PLACE
        if /* the caller uses its buffer, whenever it likes */
        :: expired[r]
        :: else -> d_step {
            for (s : 0 .. RANKS - 1) { assert(inbox[AT(r, 0, s)] == epoch) }
            s = 0 }
        fi
#endif
    :: else -> break
    od
}

init {
    byte s, d;
    CHOOSE_ANY_EARLY;
    RUN_ALL
}
