/* SPDX-License-Identifier: Apache-2.0 */
/* Joining again after a failure: `generation` of tdcoll/runtime/control.py, `initialize` of
 * tdcoll/job/lifecycle.py, and a first call on new memory (tdcoll/calls/context.py), by two ranks.
 *
 *    each rank: asks[r] = a new token;  rank 0: when both ask, answer[token] = its own token
 *    the answer names the generation: memory is cleared, then key[generation, r] is set
 *    when all keys are there, a call: a store to the peer's memory; wait for the peer's store
 *    a rank that gives up beside its token says so; after a failure, or a job, it joins again
 *
 * Abstracted: a token is a number that is used once. A rank may give up BUDGET times at any wait,
 * as its own process or as a new one, and then whenever a peer that it waits for cannot come any
 * more. Stores to a peer may arrive at any later time.
 *
 * Claims: nothing of an earlier generation is found in a new one: neither keys nor data; a token
 * that rank 0 finds is of a rank that asks now; both ranks get through CALLS jobs, and nobody
 * waits for ever.
 */
#ifndef CALLS
#define CALLS 2
#endif
#define BUDGET 2
#define TOKENS 16
#define PEER (1 - r)
#define JUNK 255

byte asks[2];               /* in the store: last token of each rank */
bool marked[2];             /* beside it: the rank gave up */
byte answer[TOKENS];        /* in the store, by token: the generation */
byte key[TOKENS * 2];       /* in the store, by generation and rank: the token */
byte memory[TOKENS * 2];    /* by generation, on rank r: written by the peer */
byte late[2 * TOKENS];      /* of rank r, by generation: 1 its store is on its way, 2 is there */
byte last;                  /* tokens so far */
byte budget = BUDGET;
byte asking[2];             /* token of a rank that waits for its answer; 0: it doesn't */
byte now[2];                /* token of the present attempt of each rank */
byte left[2];               /* jobs that a rank has yet to make */

#define KEY(g, r) key[(g) * 2 + (r)]

#ifdef REUSED_MEMORY /* mutant: a failed job's memory is given to the next one */
#define MEMORY(g, r) memory[r]
#else
#define MEMORY(g, r) memory[(g) * 2 + (r)]
#endif

#define GIVES_UP atomic { budget > 0 -> budget-- }

/* The peer has gone on: its present attempt is of another generation, or it has left. */
#define ELSEWHERE (now[PEER] != generation && answer[now[PEER]] != generation || left[PEER] == 0)
#define NEVER_CAME (KEY(generation, PEER) == 0 && ELSEWHERE)
#define LEFT (late[PEER * TOKENS + generation] != 1 && ELSEWHERE)

#define DELIVER(g) \
    :: late[r * TOKENS + (g)] == 1 -> d_step { \
        late[r * TOKENS + (g)] = 2; MEMORY(g, PEER) = g }

proctype Link(byte r) {
end:
    do
    DELIVER(1) DELIVER(2) DELIVER(3) DELIVER(4) DELIVER(5) DELIVER(6) DELIVER(7)
    DELIVER(8) DELIVER(9) DELIVER(10) DELIVER(11) DELIVER(12) DELIVER(13) DELIVER(14)
    od
}

/* Rank r gives up. As a new process it begins to count again. */
inline give_up() {
    d_step {
#ifndef NO_MARK /* mutant */
        marked[r] = true;
#endif
        asking[r] = 0 }
    if :: count = 0 :: skip fi;
    goto again
}

#ifdef TAKES_SPENT /* mutant: a token that has its answer may have another */
#define SPENT(token) false
#else
#define SPENT(token) (answer[token] != 0)
#endif

proctype Rank(byte r) {
    byte token, generation, count, found;
again:
    if :: left[r] == 0 || left[PEER] == 0 -> goto end :: else fi;
    d_step {
        last++; assert(last < TOKENS - 1);
        count++; token = last; generation = 0; found = 0;
        now[r] = token; asking[r] = token; asks[r] = token; marked[r] = false }
#ifdef COUNTS_JOINS /* mutant: a generation is named by how often a process has joined */
    generation = count; answer[token] = generation;
#else
    if
    :: r == 0 ->
        do
        :: d_step { asks[PEER] != 0 && !marked[PEER] && !SPENT(asks[PEER]) ->
            found = asks[PEER];
            assert(found == asking[PEER]) }
            break
        :: left[PEER] == 0 -> goto end
        :: GIVES_UP -> give_up()
        od;
        answer[found] = token;
        answer[token] = token
    :: else
    fi;
    if
    :: answer[token] != 0 -> generation = answer[token]
    :: answer[token] == 0 && left[PEER] == 0 -> goto end
    :: GIVES_UP -> give_up()
    fi;
#endif
    asking[r] = 0;
#ifndef NO_BARRIER /* mutant: memory is cleared when the peer may write to it */
    MEMORY(generation, r) = 0;
#endif
    d_step { assert(KEY(generation, r) == 0); KEY(generation, r) = token }
    if
    :: KEY(generation, PEER) != 0
    :: GIVES_UP -> give_up()
    :: NEVER_CAME -> goto again
    fi;
#ifdef NO_BARRIER
    MEMORY(generation, r) = 0;
#endif
    late[r * TOKENS + generation] = 1;
    if
    :: d_step { MEMORY(generation, r) != 0 -> assert(MEMORY(generation, r) == generation) }
        left[r]--
    :: GIVES_UP -> give_up()
    :: MEMORY(generation, r) == 0 && LEFT ->
        assert(late[PEER * TOKENS + generation] == 0); /* it has not been erased */
        goto again
    fi;
    goto again;
end:
    skip
}

init {
    byte i;
    d_step {
        for (i : 0 .. TOKENS * 2 - 1) { memory[i] = JUNK }
        left[0] = CALLS; left[1] = CALLS; i = 0 }
    atomic { run Rank(0); run Rank(1); run Link(0); run Link(1) }
}
