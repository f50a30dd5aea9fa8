"""Sequences are divided over several drafters: who is sent what, and how long stage 0 waits for whom."""

from __future__ import annotations

from specsot.core.frames import Draft, Drafts, Fork, Open, Opening, Outcome, Result
from specsot.core.pages import PageTable
from specsot.core.tree import chain
from specsot_worker.core.pipeline import DraftTimeout, FrameBudget
from specsot_worker.core.sequencer import Sequencer
from tests.worker.test_teaching import Script, token

BOTH = ("a", "b")


class SeveralDrafters(Script):
    """Collects what each drafter is sent, and checks that every message follows what it was sent before."""

    def __init__(self, drafters: tuple[str, ...] = BOTH) -> None:
        super().__init__()
        self.known: dict[str, dict[int, list[int]]] = {}
        self.opened: dict[str, list[int]] = {name: [] for name in ("a", "b", "c")}
        self.must_answer = dict[str, bool]()
        self.fed = dict[str, int]()  # by drafter, the rows that its last step is said to have had
        self.present(drafters)

    def present(self, drafters: tuple[str, ...]) -> None:
        self.teaching.set_drafters(drafters)
        self.known = {name: self.known.get(name, {}) for name in drafters}

    def run(self, *segments, **more):  # type: ignore[no-untyped-def]
        for name, messages in self.advance(*segments, **more).items():
            for told in messages:
                self._learn(name, told)
            self.must_answer[name] = messages[-1].must_answer
            self.fed[name] = messages[-1].fed

    def _learn(self, name: str, told) -> None:  # type: ignore[no-untyped-def]
        known = self.known[name]
        for opening in told.openings:
            self.opened[name].append(opening.sequence)
            source = known[opening.fork.sequence] if opening.fork else []
            known[opening.sequence] = source[: opening.forked]
        rows = iter(told.rows.tolist() if told.rows is not None else ())
        for feature_batch in told.feature_batches:
            assert feature_batch.start == len(known[feature_batch.sequence])
            for place, number in enumerate(feature_batch.tokens):
                own, at = int(next(rows)[0]), feature_batch.start + place
                assert number == token(own, at)
                known[feature_batch.sequence].append(number)
        for sequence in told.closings:
            del known[sequence]


def two_each() -> SeveralDrafters:
    """Sequences 1 to 4, two of each drafter."""
    script = SeveralDrafters()
    numbers = (1, 2, 3, 4)
    script.run(*(script.chunk(n, 5) for n in numbers), openings=[Opening(n, 5) for n in numbers])
    return script


def test_sequences_are_divided_and_each_is_sent_to_its_drafter_alone() -> None:
    script = two_each()
    assert {name: sorted(known) for name, known in script.known.items()} == {"a": [1, 3], "b": [2, 4]}
    assert script.must_answer == {"a": True, "b": True}
    script.run(script.grow(1), script.grow(2), closings=[1])
    assert {name: sorted(known) for name, known in script.known.items()} == {"a": [3], "b": [2, 4]}
    script.run(script.chunk(5, 5), openings=[Opening(5, 5)])
    assert 5 in script.known["a"], "the drafter with the fewest sequences gets the next one"


def test_each_drafter_learns_the_cost_of_its_own_rows_alongside_those_of_the_others() -> None:
    script = two_each()
    assert script.fed == {"a": 20, "b": 20}, "of a step with prompts nothing is learned"
    script.run(script.grow(1, others=2), script.grow(2), script.grow(3), script.grow(4))
    assert script.fed == {"a": 4, "b": 2}
    script.present(("a",))
    script.run(script.grow(1, others=2), script.grow(2), script.grow(3), script.grow(4))
    assert script.fed["a"] == 6


def test_sequences_of_a_lost_drafter_move_to_the_other_with_all_their_features() -> None:
    script = two_each()
    script.run(*(script.grow(n) for n in (1, 2, 3, 4)))
    script.present(("b",))
    script.run(*(script.grow(n) for n in (1, 2, 3, 4)))
    assert {n: len(text) for n, text in script.known["b"].items()} == {1: 7, 2: 7, 3: 7, 4: 7}
    assert not script.must_answer["b"], "it is the only one, and may pause again"
    script.present(BOTH)
    script.run(script.chunk(5, 5), script.chunk(6, 5), openings=[Opening(5, 5), Opening(6, 5)])
    assert sorted(script.known["a"]) == [5, 6], "new sequences go to the one that is back"


def test_a_shared_prefix_is_sent_to_every_drafter_of_its_forks() -> None:
    script = SeveralDrafters()
    script.run(script.chunk(1, 6, final=False), openings=[Opening(1, 6, decodes=False)])
    branches = [Opening(n, 9, Fork(1, 6)) for n in (2, 3)]
    for branch in branches:
        script.committed[branch.sequence] = 6
    script.run(script.chunk(2, 3), script.chunk(3, 3), openings=branches)
    lengths = {name: {n: len(text) for n, text in known.items()} for name, known in script.known.items()}
    assert lengths == {"a": {1: 6, 2: 9}, "b": {1: 6, 3: 9}}
    before = list(script.known["b"][1])
    script.present(("b",))
    script.run(script.grow(2), script.grow(3))
    assert script.opened["b"].count(1) == 1, "the drafter of the prefix is lost, but this one has it"
    assert script.known["b"][1] == before
    script.run(closings=[1, 2, 3])
    assert script.known == {"b": {}}


def test_a_fork_of_another_drafters_sequence_is_sent_as_one_of_its_own() -> None:
    script = SeveralDrafters()
    script.run(script.chunk(1, 6), openings=[Opening(1, 6)])
    for number, drafter in ((2, "b"), (3, "a")):
        script.committed[number] = 6
        script.run(script.chunk(number, 3), openings=[Opening(number, 9, Fork(1, 6))])
        assert len(script.known[drafter][number]) == 9


def test_without_any_drafter_nothing_is_sent_and_who_comes_is_sent_all() -> None:
    script = two_each()
    script.present(())
    script.run(*(script.grow(n) for n in (1, 2, 3, 4)))
    script.present(("c",))
    script.run(*(script.grow(n) for n in (1, 2, 3, 4)))
    assert {n: len(text) for n, text in script.known["c"].items()} == {1: 7, 2: 7, 3: 7, 4: 7}


# --- stage 0 ---


class StageZero:
    """Sequences 1 and 2, each in its own family, whose drafters are "a" and "b". One second of patience."""

    def __init__(self) -> None:
        self.stage = Sequencer(1, FrameBudget(64, 1, 9), PageTable(64, 16), DraftTimeout(1.0))
        for number in (1, 2):
            self.stage.apply_order(Open(Opening(number, 2, limit=99), (5, 6), lease=99))
        self.draft_round = 0

    def turn(self, now: float) -> list[int]:
        """Compose, and return its result; returns how many nodes each tree had."""
        frame = self.stage.compose(now)
        assert frame is not None
        sizes = [len(one.tree) for one in frame.segments if hasattr(one, "tree")]
        outcomes = tuple(
            Outcome(one.sequence, self.draft_round, (0,) if self.draft_round else (), (7,))
            for one in frame.segments
        )
        self.stage.apply_result(Result(1, frame.number, outcomes), now)
        self.draft_round += 1
        return sizes

    def drafts(self, sequence: int, drafter: str, now: float) -> None:
        draft = Draft(sequence, self.draft_round, chain((7, 8, 9)))
        self.stage.add_drafts(Drafts(1, (draft,), drafter=drafter), now)


def both_drafted() -> StageZero:
    """Either drafter has sent its first tree, after a tenth of a second; the second ones are awaited."""
    ring = StageZero()
    ring.turn(0.0)
    ring.drafts(1, "a", 0.1)
    ring.drafts(2, "b", 0.1)
    assert ring.turn(0.1) == [3, 3]
    return ring


def test_a_drafter_that_is_silent_is_waited_for_once_though_the_other_is_on_time() -> None:
    ring = both_drafted()
    ring.drafts(1, "a", 0.2)
    assert ring.stage.compose(0.2) is None, "b may still answer"
    assert ring.turn(1.2) == [3, 1]
    for now in (1.3, 1.4, 1.5):
        ring.drafts(1, "a", now)
        assert ring.turn(now) == [3, 1], "b has missed, and costs a no second wait"


def test_sequences_of_a_lost_drafter_wait_for_nothing_until_another_answers_for_them() -> None:
    ring = both_drafted()
    ring.stage.lose_drafter("a")
    ring.drafts(2, "b", 0.2)
    assert ring.turn(0.2) == [1, 3]
    ring.drafts(2, "b", 0.3)
    ring.drafts(1, "b", 0.3)
    assert ring.turn(0.3) == [3, 3]
    ring.drafts(2, "b", 0.4)
    assert ring.stage.compose(0.4) is None, "b drafts for both now, and is waited for"


def test_without_any_drafter_left_nothing_waits() -> None:
    ring = both_drafted()
    ring.stage.lose_drafter("a")
    ring.stage.lose_drafter("b")
    assert ring.turn(0.1) == [1, 1]
    assert ring.turn(0.1) == [1, 1]
