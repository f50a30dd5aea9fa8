"""What is remembered of forced stretches: the newest, and no more than is worth it."""

from __future__ import annotations

from collections.abc import Sequence

from specsot.grammar.state import MAX_FORCED_RUNS, SpellingHabits


class Numbers:
    """State n forces token n, then nothing."""

    def advance(self, state: int, token: int) -> int:
        return -1

    def finished(self, state: int) -> bool:
        return state < 0

    def forced(self, state: int) -> Sequence[int]:
        return (state,)


def test_forced_runs_of_other_grammars_do_not_accumulate() -> None:
    habits, rules = SpellingHabits(), Numbers()
    for state in range(MAX_FORCED_RUNS):
        habits.record(rules, state, state + 1)
    habits.record(rules, 0, 7)  # noted again, so the newest
    for state in range(MAX_FORCED_RUNS, MAX_FORCED_RUNS + 10):
        habits.record(rules, state, state + 1)
    assert len(habits._firsts) == MAX_FORCED_RUNS
    assert [habits.forced(rules, state) for state in (0, 1, 10, 11)] == [(7,), (1,), (10,), (12,)]
