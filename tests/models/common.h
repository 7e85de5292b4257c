/* SPDX-License-Identifier: Apache-2.0 */
/* What the models share: ranks, calls, deadlines, slots, and how a wait compares.
 *
 * RANKS and CALLS are given on the command line. A wait ends when its word is there or when its
 * deadline expires, which may be at any time. Rank `early` may give up at any of its waits. When it
 * has, the others may give up too, because they may wait in vain. In some executions no rank is
 * early (early == RANKS): none gives up then, so a wait that never ends is an invalid end state.
 *
 * A rank that has given up is `expired`: the check of its results raises, so they are not asserted,
 * and its later launches do nothing (tdcoll.primitives.group.start). Its stores and puts that are
 * on their way still arrive, or don't, because every delivery may be later than all that is looked
 * at.
 */

bool expired[RANKS];
byte early = RANKS;

/* Ranks may be renamed in most models, so that it is enough if rank 0 is early. */
#define CHOOSE_EARLY if :: early = 0 :: skip fi
#define CHOOSE_ANY_EARLY early = 0; do :: early < RANKS -> early++ :: break od
#define MAY_GIVE_UP(r) (early == (r) || (early < RANKS && expired[early]))

#ifdef SENDS_AFTER_EXPIRY /* mutant: `alive` is not looked at when a launch begins */
#define ALIVE(r) true
#else
#define ALIVE(r) (!expired[r])
#endif

#ifdef ONE_SLOT /* mutant: one half of the memory */
#define SLOT(epoch) 0
#else
#define SLOT(epoch) ((epoch) % 2)
#endif

#ifdef REUSED_ROW /* mutant: the same signals in every epoch */
#define ROW(epoch) 0
#else
#define ROW(epoch) ((epoch) % 2)
#endif

#ifdef EQUAL_FOR_AT_LEAST /* mutant */
#define HERE(word, epoch) ((word) == (epoch))
#else
#define HERE(word, epoch) ((word) >= (epoch))
#endif

#define BIT(i) (1 << (i))
#define ALL (BIT(RANKS) - 1)
#define OTHERS(r) (ALL - BIT(r))

#if RANKS > 2
#define IF_THREE(text) text
#else
#define IF_THREE(text)
#endif

/* Starts every rank, and a link from each to each; `s` and `d` are bytes of init. */
#define RUN_ALL atomic { \
    for (s : 0 .. RANKS - 1) { \
        run Rank(s); \
        for (d : 0 .. RANKS - 1) { if :: s != d -> run Link(s, d) :: else fi } } }
