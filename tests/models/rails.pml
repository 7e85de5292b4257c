/* SPDX-License-Identifier: Apache-2.0 */
/* Two dimensions: all_gather_2d of tdcoll/collectives/all_gather/kernels_puts.py, on two nodes of
 * two ranks.
 *
 *    source --stores--> inbox[slot, r] on the other rank of the node, then a release
 *    source --> own inbox[slot, r] --nbi put+signal--> inbox[slot, r] on r's rail
 *    inbox[slot, rail] --stores--> the same on the other rank of the node, when it is there
 *    inbox[slot, s] --copy--> out[s], for every other rank s, when it is there
 *
 * Abstracted: a segment is one chunk and one cell: any of its bytes. Its value is the call that has
 * written it. A store and its release, or a put and its signal, arrive in one step: bytes that come
 * earlier are as both, with a reader that looks later. A rank reads all segments in one step, with
 * which the call ends and the next one begins: that is as late as it may be. Nothing else is
 * ordered. With EARLY rank 0 may give up, and then the others may wait for ever; for what they send
 * it is the same as if they gave up. Without, nobody gives up.
 *
 * Claims: what is forwarded and read is of this call, unless the rank has given up; nobody waits
 * for ever, without EARLY; a put is complete when its signal row is used again.
 */
#include "common.h"

byte inbox[4 * 2 * 4];      /* on rank r: segment s of slot k */
byte arrived[4 * 2 * 4];    /* on rank r: signal of rank s in row k */
byte way[4 * 2 * 3];        /* what rank r sends: epoch of put, own store or forwarded store */

#define AT(r, k, s) (((r) * 2 + (k)) * 4 + (s))
#define WAY(r, k, what) way[((r) * 2 + (k)) * 3 + (what)]
#define PUT 0
#define STORE 1
#define FORWARD 2
#define MATE(r) ((r) ^ 1)
#define RAIL(r) ((r) ^ 2)

#ifdef RELAXED /* mutant: the forwarded bytes need not be there when their signal is */
#define BYTES(what) (what != FORWARD)
#else
#define BYTES(what) true
#endif

/* Delivers, to rank d, segment `origin` of what rank s sends. */
#define DELIVER(k, what, d, origin) \
    :: WAY(s, k, what) != 0 -> d_step { epoch = WAY(s, k, what); WAY(s, k, what) = 0; \
        if :: BYTES(what) -> inbox[AT(d, SLOT(epoch), origin)] = \
            (what == PUT -> inbox[AT(s, SLOT(epoch), origin)] : epoch) :: else fi; \
        arrived[AT(d, ROW(epoch), origin)] = epoch; epoch = 0 }

proctype Link(byte s) {
    byte epoch;
end:
    do
    DELIVER(0, PUT, RAIL(s), s)
    DELIVER(1, PUT, RAIL(s), s)
    DELIVER(0, STORE, MATE(s), s)
    DELIVER(1, STORE, MATE(s), s)
    DELIVER(0, FORWARD, MATE(s), RAIL(s))
    DELIVER(1, FORWARD, MATE(s), RAIL(s))
    od
}

#define IS_HERE(s) HERE(arrived[AT(r, ROW(epoch), s)], epoch)

#ifdef NO_FORWARD_WAIT /* mutant */
#define MAY_FORWARD true
#else
#define MAY_FORWARD IS_HERE(RAIL(r))
#endif

#ifdef HEARS_RAIL_ONLY /* mutant: a call ends without having heard from every peer */
#define ALL_HERE IS_HERE(RAIL(r))
#else
#define ALL_HERE (IS_HERE(MATE(r)) && IS_HERE(RAIL(r)) && IS_HERE(3 - r))
#endif

#define CHECK(s) assert(!IS_HERE(s) || inbox[AT(r, SLOT(epoch), s)] == epoch)

/* A thread block that sends later is as a message that arrives later. */
inline begin() {
    epoch++; forwarded = false;
    assert(WAY(r, epoch % 2, PUT) == 0 && WAY(r, epoch % 2, STORE) == 0);
    inbox[AT(r, SLOT(epoch), r)] = epoch;
    WAY(r, epoch % 2, PUT) = epoch;
    WAY(r, epoch % 2, STORE) = epoch
}

proctype Rank(byte r) {
    byte epoch;
    bool forwarded;
    d_step { begin() };
#ifdef EARLY
end:
#endif
    do
    :: !expired[r] && !forwarded && MAY_FORWARD -> d_step {
        assert(inbox[AT(r, SLOT(epoch), RAIL(r))] == epoch);
        assert(WAY(r, epoch % 2, FORWARD) == 0);
        WAY(r, epoch % 2, FORWARD) = epoch; forwarded = true }
    :: !expired[r] && forwarded && ALL_HERE -> d_step { /* the end of a call, and the next one */
        CHECK(MATE(r)); CHECK(RAIL(r)); CHECK(3 - r);
        if
        :: epoch < CALLS -> begin()
        :: else -> forwarded = false; epoch = CALLS + 1
        fi }
    :: epoch == CALLS + 1 -> break
    :: !expired[r] && epoch <= CALLS && early == r -> expired[r] = true
    :: expired[r] -> d_step {
        if
        :: ALIVE(r) && epoch < CALLS -> begin()
        :: else -> forwarded = false; epoch = CALLS + 1
        fi }
    od
}

init {
#ifdef EARLY
    early = 0;
#endif
    atomic {
        run Rank(0); run Rank(1); run Rank(2); run Rank(3);
        run Link(0); run Link(1); run Link(2); run Link(3)
    }
}
