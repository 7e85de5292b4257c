/* SPDX-License-Identifier: Apache-2.0 */
/* Stores into the caller's memory: exchange_direct in place, of
 * tdcoll/collectives/exchange/kernels_direct.py, and tdcoll/primitives/stores.py.
 *
 *    block (chunk, step) of rank r:    to = r + step, src = r - step
 *        chunk 0: entered[r] --> src;   wait until `to` has entered the call
 *        own segment --stores--> the same segment on `to`; then a release of arrived[chunk, r]
 *        wait for arrived[chunk, src]
 *
 * Abstracted: a chunk is one cell: any of its bytes. Its value is the call that has written it.
 * Before a call the caller overwrites its whole buffer. With ONE_RESIDENT a rank runs one thread
 * block after the other, in the order of their numbers.
 * Network: a block's stores arrive before its release, nothing else is ordered.
 *
 * Claims: from the end of a call until the caller begins the next one, the whole buffer is of this
 * call, unless the rank has given up; nobody waits for ever; with ONE_RESIDENT, too.
 */
#include "common.h"

#define CHUNKS 2
#define STEPS (RANKS - 1)

byte buffer[RANKS * RANKS * CHUNKS];        /* on rank r: chunk c of segment s */
byte arrived[RANKS * 2 * RANKS * CHUNKS];   /* on rank r, in row k */
byte entered[RANKS * RANKS];                /* on rank r, by rank s */
byte announced[RANKS * RANKS];              /* to rank r, by rank s, on its way; 0: nothing */
byte stored[RANKS * RANKS * CHUNKS];        /* to rank r, by rank s, on its way: data, then signal */
byte released[RANKS * RANKS * CHUNKS];

#define AT(r, s, c) (((r) * RANKS + (s)) * CHUNKS + (c))
#define ARRIVED(r, epoch, s, c) arrived[((r) * 2 + ROW(epoch)) * RANKS * CHUNKS + (s) * CHUNKS + (c)]
#define PAIR(r, s) ((r) * RANKS + (s))

#ifdef RELAXED /* mutant: the signal is no release, or has no barrier before it */
#define RELEASED(s, d, c) true
#else
#define RELEASED(s, d, c) (stored[AT(d, s, c)] == 0)
#endif

#define DELIVER(c) \
    :: stored[AT(d, s, c)] != 0 -> d_step { \
        buffer[AT(d, s, c)] = stored[AT(d, s, c)]; stored[AT(d, s, c)] = 0 } \
    :: released[AT(d, s, c)] != 0 && RELEASED(s, d, c) -> d_step { \
        ARRIVED(d, released[AT(d, s, c)], s, c) = released[AT(d, s, c)]; released[AT(d, s, c)] = 0 }

proctype Link(byte s, d) {
end:
    do
    DELIVER(0)
    DELIVER(1)
    :: announced[PAIR(d, s)] != 0 -> d_step {
        entered[PAIR(d, s)] = announced[PAIR(d, s)]; announced[PAIR(d, s)] = 0 }
    od
}

#ifdef NO_ENTERED /* mutant */
#define MAY_WRITE(d) true
#else
#define MAY_WRITE(d) HERE(entered[PAIR(r, d)], epoch)
#endif

#ifdef LAST_ANNOUNCES /* mutant: the thread blocks of another chunk tell that the rank has entered */
#define ANNOUNCER (CHUNKS - 1)
#else
#define ANNOUNCER 0
#endif

#ifdef ONE_RESIDENT
#define RESIDENT(b) (b == 0 || at[(b == 0 -> 0 : b - 1)] == 3)
#else
#define RESIDENT(b) true
#endif

#define TO(step) ((r + (step)) % RANKS)
#define SRC(step) ((r + RANKS - (step)) % RANKS)

/* Thread block b, of chunk c. */
#define BLOCK(b, c, step) \
    :: at[b] == 0 && RESIDENT(b) -> d_step { \
        if :: c == ANNOUNCER -> announced[PAIR(SRC(step), r)] = epoch :: else fi; at[b] = 1 } \
    :: !expired[r] && at[b] == 1 && MAY_WRITE(TO(step)) -> d_step { \
        assert(stored[AT(TO(step), r, c)] == 0 && released[AT(TO(step), r, c)] == 0); \
        assert(buffer[AT(r, r, c)] == epoch); \
        stored[AT(TO(step), r, c)] = epoch; released[AT(TO(step), r, c)] = epoch; at[b] = 2 } \
    :: !expired[r] && at[b] == 2 && HERE(ARRIVED(r, epoch, SRC(step), c), epoch) -> at[b] = 3 \
    :: (at[b] == 1 || at[b] == 2) && MAY_GIVE_UP(r) -> expired[r] = true; break

#define ALL_DONE (at[0] == 3 && at[1] == 3 IF_THREE(&& at[2] == 3 && at[3] == 3))

proctype Rank(byte r) {
    byte epoch, i;
    byte at[STEPS * CHUNKS];    /* 0 not begun, 1 waits to write, 2 has written, 3 done */
    do
    :: epoch < CALLS && ALIVE(r) ->
        d_step { /* the caller writes to its buffer; then the launch begins */
            epoch++;
            for (i : 0 .. RANKS * CHUNKS - 1) { buffer[AT(r, 0, i)] = 0 }
            for (i : 0 .. CHUNKS - 1) { buffer[AT(r, r, i)] = epoch }
            for (i : 0 .. STEPS * CHUNKS - 1) { at[i] = 0 }
            i = 0
        }
        do
#if RANKS == 2
        BLOCK(0, 0, 1)
        BLOCK(1, 1, 1)
#else
        BLOCK(0, 0, 1)
        BLOCK(1, 0, 2)
        BLOCK(2, 1, 1)
        BLOCK(3, 1, 2)
#endif
        :: ALL_DONE -> break
        :: expired[r] -> break
        od;
        if /* the caller uses the whole buffer, whenever it likes */
        :: expired[r]
        :: else -> d_step {
            for (i : 0 .. RANKS * CHUNKS - 1) { assert(buffer[AT(r, 0, i)] == epoch) }
            i = 0 }
        fi
    :: else -> break
    od
}

init {
    byte s, d;
    CHOOSE_EARLY;
    RUN_ALL
}
