"""What the drafter is told: every frame, or what a rest left out in one; and how long steps take."""

import random
from itertools import repeat

import pytest
import torch

from specsot.core.frames import (
    FeatureBatch,
    Fork,
    Frame,
    Opening,
    Outcome,
    PromptChunk,
    TreeSegment,
)
from specsot.core.tree import Tree, chain
from specsot_worker.core.pipeline import MAX_ROWS_PER_STEP, StepTimer
from specsot_worker.feature_ring import FeatureRing
from specsot_worker.feature_stream import SOLE_DRAFTER, FeatureStream, with_gathered_rows
from tests.conftest import seeds

WIDTH = 3


class Script:
    """Writes frames of a few sequences; the feature of (sequence, position) is made of both numbers."""

    def __init__(self, size: int = 9999) -> None:
        self.texts: dict[int, list[int]] = {}
        # The ring is written late, as on a GPU.
        self.ring = FeatureRing(WIDTH, torch.float32, "cpu", size, unwritten=16)
        self.teaching = FeatureStream(self.texts, self.ring)
        self.step = 0
        self.committed: dict[int, int] = {}
        self.draft_round: dict[int, int] = {}

    def tell(self, *segments, **more):
        """What the only drafter is sent."""
        return self.advance(*segments, **more).get(SOLE_DRAFTER, ())

    def advance(
        self, *segments, openings=(), closings=(), ends=(), paused=False, accepted=(0,), catching_up=False,
        passes=1,
    ):  # fmt: skip
        self.step += 1
        for opening in openings:
            fork = opening.fork
            self.texts[opening.sequence] = self.texts[fork.sequence][: fork.length] if fork else []
        outcomes, rows = {}, []
        for segment in segments:
            sequence = segment.sequence
            first = self.committed.get(sequence, 0)
            end = "stop" if sequence in ends else None
            if isinstance(segment, PromptChunk):
                rows += [feature(sequence, first + i) for i in range(len(segment.tokens))]
                self.committed[sequence] = first + len(segment.tokens)
                self.texts[sequence] += segment.tokens
                if segment.final:
                    bonus = token(sequence, first + len(segment.tokens))
                    outcomes[sequence] = Outcome(sequence, 0, (), (bonus,), end)
                    self.texts[sequence].append(bonus)
            else:
                nodes = [n for n in accepted if n < len(segment.tree)]
                places = {node: first + at for at, node in enumerate(nodes)}
                rows += [feature(sequence, places.get(node, 999)) for node in range(len(segment.tree))]
                self.committed[sequence] = first + len(nodes)
                written = tuple(token(sequence, first + 1 + at) for at in range(len(nodes)))
                outcomes[sequence] = Outcome(sequence, segment.draft_round, tuple(nodes), written, end)
                self.texts[sequence] += written
        frame = Frame(
            1, self.step, tuple(openings), segments, tuple(closings), None,
            torch.tensor(rows) if rows else None, (0.5,), paused, catching_up=catching_up,
            extra_passes=passes - 1,
        )  # fmt: skip
        return with_gathered_rows(self.teaching.advance(frame, outcomes, float(self.step)))

    def chunk(self, sequence, count, final=True):
        first = self.committed.get(sequence, 0)
        return PromptChunk(sequence, first, tuple(token(sequence, first + i) for i in range(count)), final)

    def grow(self, sequence, others=0):
        """A chain of the true tokens, with so many nodes that are wrong between them."""
        first = self.committed[sequence]
        self.draft_round[sequence] = self.draft_round.get(sequence, 0) + 1
        tree = Tree((token(sequence, first), *[7] * others), (0,) * (others + 1))
        return TreeSegment(sequence, self.draft_round[sequence], first, (), tree)

    def run_ahead(self, sequence, passes):
        """A chain of as many true tokens, one for each pass of a frame."""
        segment = self.grow(sequence)
        tokens = tuple(token(sequence, segment.committed + at) for at in range(passes))
        return segment.with_tree(chain(tokens))


def token(sequence, position):
    return sequence * 1000 + position


def feature(sequence, position):
    return [float(sequence), float(position), 1.0]


def check(told, sequence, start, stop, draft_round):
    """One lesson of these positions, with the true features."""
    rows = iter(told.rows.tolist())
    for feature_batch in told.feature_batches:
        mine = [next(rows) for _ in feature_batch.tokens]
        if feature_batch.sequence == sequence:
            assert (feature_batch.start, feature_batch.draft_round) == (start, draft_round)
            assert feature_batch.tokens == tuple(token(sequence, at) for at in range(start, stop))
            assert feature_batch.bonus == token(sequence, stop)
            assert mine == [feature(sequence, at) for at in range(start, stop)]
            return
    raise AssertionError(f"{sequence} is not told")


def test_every_frame_is_reported_to_the_drafter_as_it_arrives():
    script = Script()
    (told,) = script.tell(script.chunk(1, 4), openings=[Opening(1, 4)])
    assert [one.sequence for one in told.openings] == [1]
    check(told, 1, 0, 4, 1)
    (told,) = script.tell(script.grow(1, others=2))
    check(told, 1, 4, 5, 2)
    assert (told.fed, told.seconds, told.paused_trees) == (3, 0.5, 0)


def test_trees_of_sequences_that_end_do_not_count_as_fed():
    """Else the drafter could not learn what a step takes where a sequence ends in nearly every step."""
    script = Script()
    script.tell(script.chunk(1, 4), script.chunk(2, 4), openings=[Opening(1, 4), Opening(2, 4)])
    (told,) = script.tell(script.grow(1, others=2), script.grow(2, others=4), ends=(2,))
    assert [one.sequence for one in told.feature_batches] == [1]
    assert told.fed == 3


def test_a_step_is_reported_in_the_order_of_its_frame():
    script = Script()
    (told,) = script.tell(script.chunk(2, 9), script.chunk(1, 4), openings=[Opening(1, 4), Opening(2, 9)])
    assert [one.sequence for one in told.feature_batches] == [2, 1], "though the other lacks less"
    check(told, 1, 0, 4, 1)
    check(told, 2, 0, 9, 1)


def test_nothing_is_sent_during_a_pause_and_all_of_it_after():
    script = Script()
    script.tell(script.chunk(1, 4), openings=[Opening(1, 4)])
    for _ in range(9):
        assert script.tell(script.grow(1, others=1), paused=True) == ()
    (told,) = script.tell(script.grow(1))
    check(told, 1, 4, 14, 11)
    assert (told.fed, told.paused_trees) == (1, 9)


def test_after_a_pause_a_drafter_catches_up_before_trees_are_requested():
    script = Script()
    script.tell(script.chunk(1, 4), openings=[Opening(1, 4)])
    script.tell(script.grow(1), paused=True)
    (told,) = script.tell(script.grow(1), catching_up=True)
    ((feature_batch,), root) = told.feature_batches, script.texts[1][-1]  # with that nothing is due any more
    assert (
        feature_batch.start,
        len(feature_batch.tokens),
        feature_batch.bonus,
        feature_batch.draft_round,
    ) == (4, 2, root, None)
    assert told.paused_trees == 2
    (told,) = script.tell(script.grow(1))
    check(told, 1, 6, 7, 4)
    assert told.paused_trees == 0


def test_every_pass_of_a_pause_counts_as_a_step_without_trees():
    """As at stage 0, so that both end the pause together, and the drafter learns what one pass takes."""
    script = Script()
    script.tell(script.chunk(1, 4), script.chunk(2, 4), openings=[Opening(1, 4), Opening(2, 4)])
    ahead = {"passes": 4, "accepted": range(4)}
    for _ in range(3):
        assert script.tell(script.run_ahead(1, 4), script.run_ahead(2, 4), paused=True, **ahead) == ()
    (told,) = script.tell(script.run_ahead(1, 4), script.run_ahead(2, 4), catching_up=True, **ahead)
    assert told.paused_trees == 4 * 4 * 2
    assert told.fed == 2
    assert (told.seconds, told.wall) == (0.5 / 4, 1 / 4)


def test_a_sequence_that_opened_and_closed_during_a_pause_is_never_sent():
    script = Script()
    script.tell(script.chunk(1, 4), openings=[Opening(1, 4)])
    script.tell(script.grow(1), script.chunk(2, 3), openings=[Opening(2, 3)], paused=True)
    script.tell(script.grow(1), script.grow(2), paused=True, ends=[2])
    (told,) = script.tell(script.grow(1), closings=[2])
    assert [one.sequence for one in told.feature_batches] == [1]
    assert (told.openings, told.closings) == ((), ())
    assert told.paused_trees == 3


def test_a_known_sequence_closed_during_a_pause_is_reported_before_others_are_opened():
    """The drafter needs its pages for them."""
    script = Script()
    script.tell(script.chunk(1, 4), openings=[Opening(1, 4)])
    script.tell(script.grow(1), paused=True, ends=[1])
    assert script.tell(closings=[1], paused=True) == ()
    first, told = script.tell(script.chunk(2, 3), openings=[Opening(2, 3)])
    assert (first.openings, first.feature_batches, first.closings) == ((), (), (1,))
    assert ([one.sequence for one in told.feature_batches], told.closings) == ([2], ())


def test_a_step_looks_at_no_sequence_that_the_drafter_has_completely():
    """Most known sequences are prefixes. Of a tree that was paused, tokens are still to be sent."""
    script = Script()
    script.advance(script.chunk(1, 5), openings=(Opening(1, 5),))
    for prefix in range(10, 20):
        script.advance(script.chunk(prefix, 4, final=False), openings=(Opening(prefix, 4, decodes=False),))
    (receiver,) = script.teaching._receivers.values()
    assert not receiver.lagging
    assert not receiver.unopened
    script.advance(script.grow(1), paused=True)
    script.teaching.catch_up()
    assert receiver.lagging == {1}
    check(script.tell()[-1], 1, 5, 6, 2)
    assert not receiver.lagging


def test_forks_of_a_late_sent_prefix_are_sent_after_it():
    """This holds even if the prefix is closed by then."""
    script = Script()
    prefix, branches = Opening(1, 6, decodes=False), [Opening(n, 9, Fork(1, 6)) for n in (2, 3)]
    script.tell(script.chunk(1, 6, final=False), openings=[prefix], paused=True)
    for branch in branches:
        script.committed[branch.sequence] = 6
    script.tell(script.chunk(2, 3), script.chunk(3, 3), openings=branches, paused=True)
    first, second = script.tell(script.grow(2), script.grow(3), closings=[1])
    assert [one.sequence for one in first.openings] == [1]
    assert [one.sequence for one in second.openings] == [2, 3]
    assert (first.closings, second.closings) == ((), (1,))
    check(second, 3, 6, 10, 2)
    assert (first.fed, second.fed) == (0, 2)


def hear(messages, heard):
    """A drafter's own account: by sequence the tokens it knows, each with its feature, or with None if the
    feature was overwritten.
    """
    for told in messages:
        for opening in told.openings:
            assert opening.sequence not in heard
            fork = opening.fork
            assert fork is None or len(heard[fork.sequence]) >= fork.length
            heard[opening.sequence] = list(heard[fork.sequence][: fork.length]) if fork else []
        rows = repeat(None) if told.rows is None else iter(map(tuple, told.rows.tolist()))
        for feature_batch in told.feature_batches:
            mine = heard[feature_batch.sequence]
            assert feature_batch.start == len(mine)
            mine += [(token, next(rows)) for token in feature_batch.tokens]
            assert feature_batch.draft_round is None or feature_batch.bonus is not None
        for sequence in told.closings:
            del heard[sequence]
    return heard


def test_a_returning_drafter_receives_everything_again_and_shared_prefixes_once():
    script = Script()
    prefix, branches = Opening(1, 6, decodes=False), [Opening(n, 9, Fork(1, 6)) for n in (2, 3)]
    known = hear(script.tell(script.chunk(1, 6, final=False), openings=[prefix]), {})
    for branch in branches:
        script.committed[branch.sequence] = 6
    hear(script.tell(script.chunk(2, 3), script.chunk(3, 3), openings=branches), known)
    script.teaching.set_drafters(())
    for _ in range(4):
        assert script.tell(script.grow(2), script.grow(3), openings=[]) == ()
    script.tell(script.chunk(4, 3), openings=[Opening(4, 3)])
    script.teaching.set_drafters((SOLE_DRAFTER,))
    messages = script.tell(script.grow(2), script.grow(3), script.grow(4))
    assert (
        sum(len(feature_batch.tokens) for told in messages for feature_batch in told.feature_batches)
        == 6 + 2 * (3 + 5) + 3 + 1
    )
    again = hear(messages, {})
    assert {one: len(text) for one, text in again.items()} == {1: 6, 2: 14, 3: 14, 4: 4}
    assert all(again[one][: len(text)] == text for one, text in known.items())
    assert [one.draft_round for one in messages[-1].feature_batches] == [6, 6]
    assert messages[-1].fed == 3


def test_features_per_step_are_bounded_and_sequences_that_lack_least_come_first():
    script = Script()
    script.teaching.set_drafters(())
    script.tell(script.chunk(1, 2500), openings=[Opening(1, 2500)])
    script.tell(script.chunk(2, 4), openings=[Opening(2, 4)])
    script.teaching.set_drafters((SOLE_DRAFTER,))
    heard, counts = {}, []
    for _ in range(4):
        messages = script.tell(script.grow(1), script.grow(2))
        hear(messages, heard)
        counts.append([len(heard[1]), len(heard[2])])
        assert (
            sum(len(feature_batch.tokens) for told in messages for feature_batch in told.feature_batches)
            <= MAX_ROWS_PER_STEP
        )
    assert counts == [[507, 5], [1018, 6], [1529, 7], [2040, 8]]


def test_forks_of_a_closed_prefix_that_was_never_sent_are_sent_whole():
    script = Script()
    script.teaching.set_drafters(())
    script.tell(script.chunk(1, 6, final=False), openings=[Opening(1, 6, decodes=False)])
    script.committed[2] = 6
    script.tell(script.chunk(2, 3), openings=[Opening(2, 9, Fork(1, 6))])
    script.tell(closings=[1])
    script.teaching.set_drafters((SOLE_DRAFTER,))
    (told,) = script.tell(script.grow(2))
    assert [(one.sequence, one.fork) for one in told.openings] == [(2, None)]
    assert told.feature_batches[0].start == 0
    assert len(hear([told], {})[2]) == 10


def known_features(heard, sequence):
    """The positions of whose tokens a drafter has features, which must be the true ones."""
    positions = [at for at, (_, row) in enumerate(heard[sequence]) if row is not None]
    for at in positions:
        number, row = heard[sequence][at]
        owner = number // 1000
        assert row == tuple(feature(owner, at)), "of the sequence itself, or of that from which it forks"
    return positions


@pytest.mark.parametrize("pause", [10, 31, 32, 40, 200])
def test_after_a_pause_a_drafter_is_sent_all_tokens_and_the_features_that_the_ring_holds(pause):
    script, heard = Script(size=32), {}
    hear(script.tell(script.chunk(1, 4), openings=[Opening(1, 4)]), heard)
    for _ in range(pause):
        assert script.tell(script.grow(1, others=1), paused=True) == ()
    hear(script.tell(script.grow(1)), heard)
    assert len(heard[1]) == 4 + pause + 1
    lost = max(pause + 1 - 32, 0)
    assert known_features(heard, 1) == [*range(4), *range(4 + lost, 4 + pause + 1)]


def test_the_features_of_a_frame_are_sent_even_if_they_are_more_than_the_ring_holds():
    script, heard = Script(size=32), {}
    chunks = [script.chunk(1, 50), script.chunk(2, 40)]
    hear(script.tell(*chunks, openings=[Opening(1, 50), Opening(2, 40)]), heard)
    assert [known_features(heard, one) for one in (1, 2)] == [[*range(50)], [*range(40)]]
    script = Script(size=32)
    script.teaching.set_drafters(("a", "b"))
    messages = script.advance(
        script.chunk(1, 50), script.chunk(2, 40), openings=[Opening(1, 50), Opening(2, 40)]
    )
    assert [known_features(hear(messages[name], {}), one) for name, one in (("a", 1), ("b", 2))] == [
        [*range(50)],
        [*range(40)],
    ]


def test_a_tree_is_requested_even_if_all_features_of_its_sequence_were_overwritten():
    """The drafter answers with the root, and stage 0 does not wait for more."""
    script, heard = Script(size=8), {}
    script.tell(script.chunk(1, 4), script.chunk(2, 4), openings=[Opening(1, 4), Opening(2, 4)])
    script.tell(script.grow(1), script.grow(2), paused=True)
    for _ in range(8):
        script.tell(script.grow(2), paused=True)
    lost, told = script.tell(script.grow(2))
    hear([lost, told], {1: [None] * 4, 2: [None] * 4})
    (batch, other) = lost.feature_batches
    assert lost.rows is None
    assert batch == FeatureBatch(2, 4, (token(2, 4), token(2, 5)), None, None)
    assert other == FeatureBatch(1, 4, (token(1, 4),), token(1, 5), 2)
    assert (lost.fed, told.fed, told.paused_trees) == (0, 1, 10)
    hear(script.tell(script.chunk(3, 2), openings=[Opening(3, 2)]), heard)
    assert known_features(heard, 3) == [0, 1]


def test_while_a_drafter_catches_up_what_is_overwritten_meanwhile_is_skipped():
    script, heard = Script(size=MAX_ROWS_PER_STEP + 100), {}
    many = range(1, 41)
    hear(
        script.tell(*(script.chunk(n, 2) for n in many), openings=[Opening(n, 2) for n in many]),
        heard,
    )
    for _ in range(30):
        script.tell(*(script.grow(n) for n in many), paused=True)
    for catching_up in (True, True, False):
        messages = script.tell(*(script.grow(n) for n in many), catching_up=catching_up)
        with_rows = [one for one in messages if one.rows is not None]
        assert sum(len(one.rows) for one in with_rows) <= MAX_ROWS_PER_STEP
        hear(messages, heard)
    assert {len(heard[n]) for n in many} == {35}
    for n in many:
        assert known_features(heard, n)[-4:] == [31, 32, 33, 34]


def test_sequences_that_close_while_the_ring_is_overwritten_leave_nothing():
    script, heard = Script(size=8), {}
    hear(script.tell(script.chunk(1, 4), script.chunk(2, 4), openings=[Opening(1, 4), Opening(2, 4)]), heard)
    for _ in range(20):
        script.tell(script.grow(1), script.grow(2), paused=True)
    script.tell(script.grow(1), script.grow(2), paused=True, ends=[2])
    script.tell(script.grow(1), closings=[2], paused=True)
    hear(script.tell(script.grow(1)), heard)
    assert heard.keys() == {1}
    assert known_features(heard, 1)[-3:] == [24, 25, 26]
    hear(script.tell(closings=[1]), heard)
    assert not heard
    assert not script.teaching._sequences


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("steps", [0, 3, 30])
def test_forks_of_a_prefix_that_is_overwritten_in_part_or_whole_begin_with_what_is_left(steps, closed):
    """Also if the prefix has closed, and the forks are sent as sequences of their own."""
    script, heard = Script(size=32), {}
    prefix, branches = Opening(1, 20, decodes=False), [Opening(n, 23, Fork(1, 20)) for n in (2, 3)]
    script.tell(script.chunk(1, 20, final=False), openings=[prefix], paused=True)
    for branch in branches:
        script.committed[branch.sequence] = 20
    script.tell(script.chunk(2, 3), script.chunk(3, 3), openings=branches, paused=True)
    for _ in range(steps):
        script.tell(script.grow(2), script.grow(3), paused=True)
    script.tell(closings=[1] if closed else (), paused=True)
    hear(script.tell(script.grow(2), script.grow(3)), heard)
    num_overwritten = max(20 + 2 * (3 + steps + 1) - 32, 0)
    for sequence in (2, 3):
        assert len(heard[sequence]) == 24 + steps
        first = known_features(heard, sequence)[0]
        assert first == num_overwritten if num_overwritten <= 20 else first >= 20


def test_sequences_of_a_lost_drafter_reach_another_one_with_what_the_ring_holds():
    script, heard = Script(size=16), {"a": {}, "b": {}}
    script.teaching.set_drafters(("a", "b"))

    def run(*segments, **more):
        for name, messages in script.advance(*segments, **more).items():
            hear(messages, heard[name])

    run(script.chunk(1, 6), script.chunk(2, 6), openings=[Opening(1, 6), Opening(2, 6)])
    for _ in range(10):
        run(script.grow(1), script.grow(2))
    assert (heard["a"].keys(), heard["b"].keys()) == ({1}, {2})
    script.teaching.set_drafters(("a",))
    run(script.grow(1), script.grow(2))
    assert known_features(heard["a"], 1) == [*range(17)]
    assert len(heard["a"][2]) == 17
    assert known_features(heard["a"], 2) == [*range(9, 17)]


def test_undrafted_sequences_are_never_sent():
    script = Script()
    assert script.tell(script.chunk(1, 4), openings=[Opening(1, 4, drafted=False)]) == ()
    assert script.tell(script.grow(1), closings=[1]) == ()


@pytest.mark.parametrize("size", [9999, 5])
@pytest.mark.parametrize("seed", seeds(20, quick=6))
def test_whatever_the_pauses_every_committed_token_is_sent_once_in_order(seed, size):
    rng, script, heard = random.Random(seed), Script(size), {}
    live, started, messages, ended = [], 0, [], []
    for _ in range(60):
        segments, openings = [script.grow(one, rng.randrange(3)) for one in live], []
        if len(live) < 4 and rng.random() < 0.3:
            started += 1
            openings.append(Opening(started, 3))
            segments.append(script.chunk(started, 3))
        over, ended = ended, [one for one in live if rng.random() < 0.1]
        live = [*(one for one in live if one not in ended), *(one.sequence for one in openings)]
        if segments:
            paused = rng.random() < 0.7
            messages += script.tell(*segments, openings=openings, ends=ended, closings=over, paused=paused)
    messages += script.tell(*(script.grow(one) for one in live))
    hear(messages, heard)
    for one in live:
        assert [number for number, _ in heard[one]] == [token(one, at) for at in range(script.committed[one])]
        known = known_features(heard, one)
        assert known[-1] == script.committed[one] - 1
        assert size == 5 or len(known) == script.committed[one]


def step(*sizes, paused=False, computed=0.0, extra_passes=0):
    """A frame with one tree of so many nodes each; 0: a prompt's."""
    segments = tuple(
        TreeSegment(n, 1, 9, (), chain([5] * size)) if size else PromptChunk(n, 0, (1, 2), True)
        for n, size in enumerate(sizes)
    )
    return Frame(1, 1, segments=segments, paused=paused, seconds=(computed,), extra_passes=extra_passes)


def test_an_undrafted_step_is_the_median_of_steps_without_waiting():
    pace, now = StepTimer(), 0.0
    assert pace.baseline_step() is None
    for seconds in (3.0, 2.0, 2.0, 90.0, 2.0):
        now += seconds
        assert pace.step_seconds(step(1, 1, paused=True, computed=seconds / 2), now) == (seconds / 2, 0.0)
    assert pace.baseline_step() == (2, 1.0, 2.0), "the ring waited before one of them"
    pace.step_seconds(step(3, 3), now + 14.0)
    assert pace.baseline_step() is None, "those were of another minute"


def test_steps_of_the_most_sequences_tell_what_a_step_takes():
    """Among many sequences, some end and others begin before the pause is over."""
    pace = StepTimer()
    for now, many in ((1.0, 60), (3.0, 60), (5.0, 58), (6.0, 2)):
        pace.step_seconds(step(*[1] * many, paused=True, computed=1.0), now)
    assert pace.baseline_step() == (60, 1.0, 2.0)


def test_the_first_step_of_a_pause_counts_if_it_has_several_passes():
    """A short pause may have no other step, and what preceded it is a small part of its time."""
    pace = StepTimer()
    for now, passes in ((1.0, 1), (9.0, 4)):
        pace.step_seconds(step(passes, passes, paused=passes > 1, computed=4.0, extra_passes=passes - 1), now)
    assert pace.baseline_step() == (2, 1.0, 2.0)


def test_a_step_with_trees_is_itself_and_prompts_are_no_steps():
    pace = StepTimer()
    pace.step_seconds(step(1), 1.0)
    assert pace.step_seconds(step(3, computed=1.0), 4.0) == (1.0, 3.0)
    assert pace.step_seconds(step(3, 0), 5.0)[1] == 0.0
    assert pace.step_seconds(step(3), 7.0)[1] == 2.0
