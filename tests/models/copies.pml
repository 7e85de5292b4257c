/* SPDX-License-Identifier: Apache-2.0 */
/* Copy engines: tdcoll/primitives/copies.py and tdcoll/calls/copies.py, with two ranks.
 *
 *    enter: the next even epoch; entered --> peer; wait until it has entered; stamps[0] = epoch
 *    pushed: data --copy engine--> inbox of the peer;      PULLED: data of the peer --> own buffer
 *    then stamps[hop] --copy of 8 bytes--> arrived[0, hop, r] on the peer
 *    wait_arrivals: wait for the peer's stamp;             PULLED: has the peer given up?
 *    pushed: inbox --copy--> out;  check_peers_alive: has the peer given up?
 *    REDUCE: parts are pushed, sum_copies sums them, says so, waits for the peer's sum, and writes
 *    stamps[1] = epoch + 1; sums are pulled into the result
 *
 * Abstracted: what a copy moves is one cell: any byte. Its value is the call, a sum is 10 more. The
 * steps of a rank are those of its streams, which are joined before each wait. Before a call, and
 * also when it has given up, the caller overwrites its data. Copies that are queued run in any case.
 *
 * Claims: when the checks of a call are behind it and none has found an expired wait or a peer that
 * gave up, its result is of this call, and stays so until the caller begins the next one; nobody
 * waits for ever.
 */
#include "common.h"

#define PEER (1 - r)

byte source[2];     /* of rank r; PULLED: its segment of the buffer, which the peer reads */
byte inbox[2];      /* on rank r, by the peer */
byte sum[2];        /* REDUCE: of rank r, its part of the result */
byte entered[2];    /* on rank r, by the peer */
byte arrived[8];    /* on rank r: row of slot k, hop h, by the peer */
byte gave_up[2];    /* on rank r, by the peer */

#define ARRIVED(r, k, h) arrived[((r) * 2 + (k)) * 2 + (h)]

#ifdef EVERY_EPOCH /* mutant: signals alternate, and captured addresses do not */
#define NEXT (epoch + 1)
#else
#define NEXT (epoch + 2)
#endif
#define ROW_OF(epoch) ((epoch) % 2)

inline tell_gave_up() {
#ifndef NO_TELL /* mutant */
    gave_up[PEER] = 1
#else
    skip
#endif
}

/* May end early; then the launch goes on as if the wait had returned 0. */
#define WAIT(condition) \
    if :: expired[r] :: !expired[r] && (condition) :: MAY_GIVE_UP(r) -> expired[r] = true fi

inline none_gave_up() {
#ifndef NO_CHECK /* mutant */
    if :: gave_up[r] != 0 -> expired[r] = true :: else fi
#else
    skip
#endif
}

inline copy_stamp(hop) {
#ifdef STAMP_ALWAYS /* mutant: the host knows what to send */
    ARRIVED(PEER, 0, hop) = epoch + hop
#else
    ARRIVED(PEER, 0, hop) = stamps[hop]
#endif
}

inline copy_data(destination, origin) {
    atomic { copied = origin };     /* a copy is no single step */
    destination = copied
}

inline enter() {
    d_step { epoch = NEXT; call++; source[r] = call };
    if
    :: !expired[r] ->
        entered[PEER] = epoch;
#ifndef NO_ENTERED /* mutant: copies do not wait for the peer to enter */
        WAIT(HERE(entered[r], epoch))
#endif
    :: else fi;
    if :: !expired[r] -> stamps[0] = epoch :: else -> tell_gave_up() fi
}

inline wait_arrivals(hop, pulled) {
    WAIT(HERE(ARRIVED(r, ROW_OF(epoch), hop), epoch + (pulled -> hop : 0)));
    if :: pulled && !expired[r] -> none_gave_up() :: else fi;
    if :: pulled && expired[r] -> tell_gave_up() :: else fi
}

proctype Rank(byte r) {
    byte epoch, call, out, copied;
    byte stamps[2];
    do
    :: call < CALLS ->
        enter();
#ifdef PULLED
        copy_data(out, source[PEER]);
        copy_stamp(0);
        wait_arrivals(0, true);
#else
#ifdef STAMP_FIRST /* mutant: on a stream of its own */
        copy_stamp(0);
        copy_data(inbox[PEER], source[r]);
#else
        copy_data(inbox[PEER], source[r]);
        copy_stamp(0);
#endif
        wait_arrivals(0, false);
#ifdef REDUCE
        if
        :: !expired[r] -> /* sum_copies */
            out = inbox[r];
            none_gave_up();
            if
            :: !expired[r] ->
                assert(out == call);
                sum[r] = call + 10;
                ARRIVED(PEER, ROW_OF(epoch), 1) = epoch;
                WAIT(HERE(ARRIVED(r, ROW_OF(epoch), 1), epoch));
                if :: !expired[r] -> stamps[1] = epoch + 1 :: else fi
            :: else fi
        :: else fi;
        copy_data(out, sum[PEER]);
        copy_stamp(1);
        wait_arrivals(1, true);
#else
        copy_data(out, inbox[r]);
        none_gave_up();
#endif
#endif
        if /* the caller checks, and uses the result */
        :: expired[r]
#ifdef REDUCE
        :: else -> assert(out == call + 10 && sum[r] == call + 10)
#else
        :: else -> assert(out == call)
#endif
        fi;
        sum[r] = 0  /* the caller's tensor, in which the result is */
    :: else -> break
    od
}

init {
    CHOOSE_EARLY;
    atomic { run Rank(0); run Rank(1) }
}
