/* SPDX-License-Identifier: Apache-2.0 */
/* Sparse all-reduce inside one node: the sequence of launches of
 * tdcoll/collectives/sparse_all_reduce/__init__.py, with numbered lists (kernels_lists.py).
 *
 *    pack       own ids --> lists[rank], with a header: the signature of its kind and its number
 *    exchange   lists[rank] --> lists[rank] on every rank that has `entered`         epoch e
 *    prepare    own rows --> stage[rank], if the lists of all ranks are fit to be used
 *    reduce     begun --> all;  own row, stage[...] of others, when they have begun --> out of all;
 *               stored --> all;  wait until all have stored                          epoch e + 1
 *    GATHER: rows lie behind the ids, and a rank sums them itself; prepare and reduce are left out
 *
 * Abstracted: lists, stage and what a rank reduces of out are one cell each: any byte. Its value is
 * the call. Calls are of KINDS kinds, whose lists lie at different places. With MISUSE a rank may
 * make a call of another kind than its peers. After a call the caller uses `out`.
 * Network: stores of a launch arrive before the signal that it sends behind them; nothing else is
 * ordered.
 *
 * Claims: a rank that finds all lists fit to be used has those of this call, rows of this call, and
 * an `out` of this call until it begins the next one, unless it has given up; nobody waits
 * for ever; a list has arrived when the next one is sent.
 */
#include "common.h"

#define KINDS 2
#define PEER (1 - r)

byte list[2 * KINDS];   /* on rank r, at the place of a kind: number of the peer's list */
byte stage[2];          /* of rank r: call of its rows */
byte out[2 * 2];        /* on rank r: what rank s reduces */
byte entered[2];        /* on rank r, by the peer */
byte arrived[2 * 2 * 2];/* on rank r, in a row and of a phase, by the peer */
byte sent[2], sent_kind[2]; /* list on its way to rank r; 0: nothing */
byte rows[2];           /* rows on their way to rank r */

#define LIST(r, kind) list[(r) * KINDS + (kind)]
#define OUT(r, s) out[(r) * 2 + (s)]
#define ARRIVED(r, epoch, phase) arrived[((r) * 2 + ROW(epoch)) * 2 + (phase)]

#ifdef GATHER
#define FIRST(call) (call)
#else
#define FIRST(call) (2 * (call) - 1)
#endif

#define WAIT(condition) \
    if :: expired[r] :: !expired[r] && (condition) :: MAY_GIVE_UP(r) -> expired[r] = true fi

/* Delivers what the peer has sent to rank r: data, and then its signal. */
proctype Link(byte r) {
end:
    do
    :: d_step { sent[r] != 0 -> LIST(r, sent_kind[r]) = sent[r];
        ARRIVED(r, FIRST(sent[r]), 0) = FIRST(sent[r]); sent[r] = 0; sent_kind[r] = 0 }
    :: d_step { rows[r] != 0 -> OUT(r, PEER) = rows[r];
        ARRIVED(r, 2 * rows[r], 1) = 2 * rows[r]; rows[r] = 0 }
    od
}

inline exchange() {
    if
    :: ALIVE(r) ->
        entered[PEER] = epoch;
#ifndef NO_ENTERED /* mutant */
        WAIT(HERE(entered[r], epoch));
#endif
        if
        :: !expired[r] -> d_step { assert(sent[PEER] == 0); sent[PEER] = call; sent_kind[PEER] = kind }
        :: else
        fi;
        WAIT(HERE(ARRIVED(r, epoch, 0), epoch))
    :: else fi
}

#ifdef NO_NUMBER /* mutant: a list is known by its kind alone */
#define FIT (LIST(r, kind) != 0)
#else
#define FIT (LIST(r, kind) == call)
#endif

inline prepare() {
    fit = FIT;
    assert(!fit || expired[r] || LIST(r, kind) == call);
#ifdef STAGE_AFTER_EXPIRY /* mutant: of a rank that is not alive */
    if :: fit -> stage[r] = call :: else fi
#else
    if :: fit && !expired[r] -> stage[r] = call :: else fi
#endif
}

inline reduce() {
    if
    :: ALIVE(r) ->
        ARRIVED(PEER, epoch + 1, 0) = epoch + 1;
#ifndef NO_BEGUN /* mutant: the peer's rows are read when they may not be combined */
        WAIT(HERE(ARRIVED(r, epoch + 1, 0), epoch + 1));
#endif
        if
        :: !expired[r] ->
            if :: fit -> assert(stage[PEER] == call); OUT(r, r) = call :: else fi;
            if
            :: fit -> d_step { assert(rows[PEER] == 0); rows[PEER] = call }
            :: else -> ARRIVED(PEER, epoch + 1, 1) = epoch + 1
            fi;
#ifndef NO_MEETING /* mutant: a rank is done when it has stored */
            WAIT(HERE(ARRIVED(r, epoch + 1, 1), epoch + 1))
#else
            skip
#endif
        :: else fi
    :: else fi
}

proctype Rank(byte r) {
    byte call, epoch, kind;
    bool fit;
    do
    :: call < CALLS ->
        d_step {
            call++; epoch = FIRST(call); fit = false;
            OUT(r, 0) = 0; OUT(r, 1) = 0 } /* the caller has overwritten the result */
#ifdef MISUSE
        if :: kind = 0 :: kind = 1 fi;
#else
        kind = call / 2 % KINDS;
#endif
#ifdef STAGE_EARLY /* mutant: rows are put into the stage before the peer has begun the call */
        if :: !expired[r] -> stage[r] = call :: else fi;
#endif
        exchange();
#ifdef GATHER
        fit = FIT;  /* merge */
        if :: expired[r] || !fit :: else -> assert(LIST(r, kind) == call); OUT(r, PEER) = call fi;
        OUT(r, r) = call;
#else
        prepare();
        reduce();
#endif
        if /* the caller checks, and uses the result, whenever it likes */
        :: expired[r] || !fit
        :: else -> assert(OUT(r, 0) == call && OUT(r, 1) == call)
        fi
    :: else -> break
    od
}

init {
    CHOOSE_EARLY;
    atomic { run Rank(0); run Rank(1); run Link(0); run Link(1) }
}
