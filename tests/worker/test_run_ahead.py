"""Frames of several forward passes: the device chooses tokens that the host reads later, all at once."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specsot.core.frames import End, Fork, Frame, Open, Opening, Outcome, Result, TreeSegment
from specsot.core.pages import PageTable
from specsot.core.run_ahead import (
    MAX_PASSES,
    MAX_SECONDS,
    OPENING_PASSES,
    OPENING_TOKENS,
    next_max_passes,
    num_passes,
)
from specsot.core.skeleton import PlanRules
from specsot.core.soft_end import SoftEnd
from specsot.grammar.state import Grammar
from specsot.members import Configuration, Curve, Range, Stage
from specsot.params import Form, Sampling
from specsot_bench.eagle.generation import StepLoop
from specsot_model.decoder import Decoder
from specsot_model.step_rows import FilledStep, Outputs
from specsot_worker import stage_timers, verifier
from specsot_worker.core.pipeline import DraftTimeout, FrameBudget, PipelineDepth
from specsot_worker.core.sequencer import Sequencer
from specsot_worker.stage import DecoderStage
from specsot_worker.verifier import Verifier
from tests.conftest import some
from tests.eager_steps import EagerSteps
from tests.models import write_base
from tests.worker.test_next_step import (
    FEW_PAGES,
    FLAT,
    PAGE,
    PAGES,
    WINDOW,
    Dozing,
    Erring,
    Orders,
    engine_of,
    opened,
    orders,
    random_orders,
    steps_of,
    write,
)

Written = dict[int, list[int]]
VOCABULARY = FLAT.vocabulary


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    base = write_base(tmp_path_factory.mktemp("base"), FLAT)
    return Decoder.load(base, None, torch.float32, "cpu")


@pytest.fixture(scope="module")
def wanted(decoder: Decoder) -> Written:
    """What single passes write: greedy and drawn tokens, and a fork. No sequence is closed by an order."""
    at_once = [order for due in orders().values() for order in due if isinstance(order, Open)]
    return write(decoder, False, {0: at_once})[0]


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[Frame]:
    """The frames that a stage runs."""
    seen, run = list[Frame](), DecoderStage.run
    monkeypatch.setattr(DecoderStage, "run", lambda self, one: seen.append(one) or run(self, one))
    return seen


def trees_of(frame: Frame) -> list[TreeSegment]:
    return [one for one in frame.segments if isinstance(one, TreeSegment)]


def check(found: Written, wanted: Written) -> None:
    """Sequence 2 is closed by an order at some time; sequence 4 is rejected if its source has ended."""
    assert found.keys() >= {1, 3, 5}
    assert found == {one: wanted[one][: len(tokens) if one == 2 else None] for one, tokens in found.items()}


def test_law_1_passes_that_follow_each_other_write_what_single_passes_write(
    decoder: Decoder, wanted: Written, frames: list[Frame]
) -> None:
    due = {2 * number: orders_of_turn for number, orders_of_turn in enumerate(orders().values())}
    found, stage, _, number = write(decoder, True, due, passes=True)
    assert found.keys() == wanted.keys()
    check(found, wanted)
    assert stage.table.free == PAGES, "nothing is kept for passes after a sequence's end"
    assert stage.table.sequences == frozenset()
    assert sum(one.extra_passes == MAX_PASSES - 1 for one in frames) > number / 3


@pytest.mark.parametrize("seed", some(range(6), 0, 1))
def test_law_1_passes_write_the_same_as_sequences_come_and_go(
    decoder: Decoder, wanted: Written, seed: int, frames: list[Frame]
) -> None:
    """On few pages, and with leases that end."""
    pages = PAGES if seed % 2 else FEW_PAGES
    found, stage, *_ = write(
        decoder, True, random_orders(seed, None, drafted=False), pages=pages, passes=True
    )
    check(found, wanted)
    assert stage.table.free == pages
    assert any(one.extra_passes for one in frames)


@pytest.mark.parametrize("seed", some(range(6), 0, 1))
def test_law_1_passes_write_the_same_while_drafting_pauses(
    decoder: Decoder, wanted: Written, seed: int, frames: list[Frame]
) -> None:
    engine = engine_of(Erring(wanted), Dozing(seed))
    found, stage, *_ = write(decoder, True, random_orders(seed, None), engine, passes=True)
    check(found, wanted)
    assert stage.table.free == PAGES
    # The first frame after a pause may have been launched during the pause.
    resting = [one.paused or one.catching_up for one in frames]
    assert all(
        now or before for before, now, one in zip(resting, resting[1:], frames[1:]) if one.extra_passes
    )


class Sparse:
    """Forbids a fifth of all tokens, others after each token. Its state is the number of tokens."""

    def start(self) -> int:
        return 0

    def advance(self, state: int, token: int) -> int | None:
        return state + 1 if self.allows(state, token, 1) else None

    def finished(self, state: int) -> bool:
        return False

    def forced(self, state: int) -> tuple[int, ...]:
        return ()

    def mask(self, state: int, remaining: int) -> np.ndarray:
        return (np.arange(VOCABULARY) + state) % 5 > 0

    def allows(self, state: int, token: int, remaining: int) -> bool:
        return (token + state) % 5 > 0


def test_law_1_sequences_with_a_grammar_write_the_same_in_frames_of_several_passes(
    decoder: Decoder, frames: list[Frame]
) -> None:
    """Greedy and drawn tokens, next to a sequence without a grammar."""
    form, warm = Form("json_object"), Sampling(temperature=0.9)

    def orders_of_all() -> Orders:
        return {0: [opened(1, form=form), opened(2), opened(3, form=form, sampling=warm)]}

    def find(opening: Opening) -> Grammar | None:
        return Sparse() if opening.form else None

    wanted, *_, steps_of_single_passes = write(decoder, False, orders_of_all(), find_grammar=find)
    frames.clear()
    found, stage, _, number = write(decoder, True, orders_of_all(), passes=True, find_grammar=find)
    assert found == wanted
    assert stage.table.free == PAGES
    assert {one.extra_passes + 1 for one in frames} >= {1, 2, 4}, (
        "fewer after a token that the grammar changed"
    )
    assert number < steps_of_single_passes


class Forcing(Sparse):
    """Leaves no choice about every fourth token."""

    def forced(self, state: int) -> tuple[int, ...]:
        return (7 + state,) if state % 4 == 3 else ()

    def mask(self, state: int, remaining: int) -> np.ndarray:
        forced = self.forced(state)
        return np.isin(np.arange(VOCABULARY), forced) if forced else super().mask(state, remaining)

    def allows(self, state: int, token: int, remaining: int) -> bool:
        forced = self.forced(state)
        return token in forced if forced else super().allows(state, token, remaining)


@pytest.mark.parametrize("listed", [True, False])
def test_law_1_forced_tokens_of_a_list_are_written_by_passes_of_their_own(
    decoder: Decoder, frames: list[Frame], listed: bool
) -> None:
    """A frame with forced tokens, and the one after it, could not be launched before its results are made.

    listed: False for a plan in markers, which forces many tokens.
    """
    plan = PlanRules(direct=False, listed=listed)

    def find(opening: Opening) -> Grammar | None:
        return Forcing() if opening.plan else None

    wanted = write(decoder, False, {0: [opened(1, plan=plan), opened(2)]}, find_grammar=find)[0]
    frames.clear()
    found = write(decoder, True, {0: [opened(1, plan=plan), opened(2)]}, passes=True, find_grammar=find)[0]
    assert found == wanted
    plans = [one for one in frames if any(segment.sequence == 1 for segment in trees_of(one))]
    assert all(one.extra_passes == 0 for one in plans)
    assert listed == all(len(segment.tree.tokens) == 1 for one in plans for segment in trees_of(one))


def test_a_frame_takes_no_more_passes_than_the_one_before_had_accepted_tokens() -> None:
    assert next_max_passes(MAX_PASSES, MAX_PASSES, 3) == 3
    assert next_max_passes(3, 3, 3) == 6
    assert next_max_passes(6, 6, 6) == MAX_PASSES
    # One pass says nothing about more of them.
    assert next_max_passes(MAX_PASSES, 1, 1) == MAX_PASSES


@pytest.mark.parametrize(
    "special",
    [{"window": WINDOW}, {"min_tokens": 3}, {"logprobs": 0}],
    ids=["window", "min_tokens", "logprobs"],
)
def test_every_frame_has_one_pass_if_a_sequence_cannot_run_ahead(
    decoder: Decoder, special: dict[str, object], frames: list[Frame]
) -> None:
    write(decoder, True, {0: [opened(1), opened(2, **special)]}, passes=True)
    both = [one for one in frames if len(one.segments) == 2]
    assert len(both) > 20
    assert not any(one.extra_passes for one in both)


def test_law_1_passes_write_the_same_under_biases_and_without_a_first_token(
    decoder: Decoder, wanted: Written, frames: list[Frame]
) -> None:
    """As branches do, which must not announce lists, and are opened again with another first token."""
    lowered = Sampling(logit_bias=tuple((token, -100.0) for token in sorted(set(wanted[1][2:9]))))
    biases = sorted({wanted[2][1]: 3.0, wanted[2][4]: -2.0}.items())
    drawn = Sampling(temperature=0.9, logit_bias=tuple(biases))
    openings = [
        opened(1, sampling=lowered, excluded_first=(wanted[1][0],)),
        opened(2),
        opened(3, sampling=drawn, seed=5),
    ]
    single = write(decoder, False, {0: [*openings]})[0]
    frames.clear()
    assert write(decoder, True, {0: [*openings]}, passes=True)[0] == single
    assert single[1] != wanted[1]
    assert any(len(one.segments) == 3 and one.extra_passes for one in frames)


def test_a_first_token_waits_for_no_further_pass(decoder: Decoder, frames: list[Frame]) -> None:
    _, _, steps, number = write(decoder, True, {0: [opened(1)]}, passes=True)
    assert [1 + one.extra_passes for one in frames[:3]] == [1, MAX_PASSES, MAX_PASSES]
    assert steps.launched == number + sum(one.extra_passes for one in frames), "every step was used"


@pytest.mark.parametrize(("few", "passes"), [(1, 1), (0, OPENING_PASSES)])
def test_a_branch_takes_few_passes_until_its_first_words_are_known(
    few: int,
    passes: int,
    decoder: Decoder,
    wanted: Written,
    frames: list[Frame],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be closed and opened again because of them, and a new prompt waits for frames of passes.

    few: So many sequences count as few.
    passes: Passes of frames with its first tokens.
    """
    monkeypatch.setattr("specsot_worker.core.sequencer.FEW_SEQUENCES", few)
    unwritten = max(wanted[1]) + 1
    branch = opened(1, stop_ids=(unwritten,), soft_end=SoftEnd(20, unwritten))
    write(decoder, True, {0: [branch]}, passes=True)
    trees = [segment for one in frames for segment in one.segments if isinstance(segment, TreeSegment)]
    sizes = {one.committed - branch.opening.prompt: len(one.tree.tokens) for one in trees}
    assert max(size for generated, size in sizes.items() if generated < OPENING_TOKENS) == passes
    assert list(sizes.values()).count(MAX_PASSES) >= 2


def test_outcomes_count_their_passes(decoder: Decoder) -> None:
    """So that statistics count forward passes and no drafts."""
    stage = DecoderStage(decoder, PAGES, PAGE, "packed")
    steps = EagerSteps(decoder, stage._kv, stage._taps)
    steps.accepts_device_tokens = True
    stage.run_by(steps)
    budget, table = FrameBudget(64, 1, MAX_PASSES), PageTable(PAGES, PAGE)
    waits = DraftTimeout(0.0, present=False)
    sequencer = Sequencer(1, budget, table, waits, runs_ahead=lambda: True)
    loop = StepLoop(stage, Verifier(decoder.logits, lambda _: None, None, stage), sequencer)
    results = list[tuple[int, int]]()
    for step in steps_of(loop, {0: [opened(1), opened(3)]}):
        result = step.result
        assert result.drafts == result.drafted == 0
        results += [(result.passes, len(outcome.tokens)) for outcome in result.outcomes if not outcome.end]
    assert (MAX_PASSES, MAX_PASSES) in results
    assert all(passes == num_tokens for passes, num_tokens in results)


def test_a_frame_is_not_charged_for_the_passes_that_are_launched_before_its_result(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for the device when it launches passes, 1 second for each here, and nowhere else."""
    now, launch = [0.0], EagerSteps.launch

    def launch_slowly(self: EagerSteps, filled: FilledStep, entry: Any) -> Outputs:
        now[0] += 1.0
        return launch(self, filled, entry)

    monkeypatch.setattr(EagerSteps, "launch", launch_slowly)
    for module in (stage_timers, verifier):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    results, turn = list[Result](), StepLoop.turn
    monkeypatch.setattr(StepLoop, "turn", lambda loop: results.append((step := turn(loop)).result) or step)
    write(decoder, True, {0: [opened(1), opened(3)]}, passes=True)
    assert max(one.passes for one in results) == MAX_PASSES
    assert [sum(one.seconds) for one in results if one.rows] == [one.passes for one in results if one.rows]


@pytest.mark.parametrize(
    ("seconds", "passes"), [(0.0, MAX_PASSES), (1e-4, MAX_PASSES), (0.00156, 8), (0.00228, 5), (0.05, 1)]
)
def test_passes_take_about_as_long_whatever_the_model(seconds: float, passes: int) -> None:
    assert num_passes(seconds) == passes


def test_slots_for_passes_do_not_count_as_a_drafter() -> None:
    """A single stage reserves slots for the tokens of several passes, whether or not something is drafted."""
    alone = Configuration(1, "w", (Stage("w", "w", Range(0, 4)),), PAGES, PAGE, slots=1)
    assert (alone.reserved_slots, alone.drafted) == (MAX_PASSES, False)
    assert replace(alone, slots=24).reserved_slots == 24
    two = (Stage("v", "v", Range(0, 2)), Stage("w", "w", Range(2, 4)))
    assert replace(alone, stages=two).reserved_slots == 1


# Seconds of a step by its tokens: all prompts of a test take next to nothing, or a token takes 5 ms.
QUICK, SLOW = ((1, 0.001), (256, 0.002)), ((1, 0.005), (256, 1.28))


# What a plan in a list may contain.
LIST = PlanRules(direct=False, listed=True)


class Ring:
    """A stage 0 whose frames' results this test makes up."""

    def __init__(self, curve: Curve, present: bool = False) -> None:
        self.drafting = DraftTimeout(0.0, present)
        self.sequencer = Sequencer(
            1,
            FrameBudget(64, 1, MAX_PASSES),
            PageTable(PAGES, PAGE),
            self.drafting,
            PipelineDepth(1, curve),
            runs_ahead=lambda: True,
        )

    def step(self, *ended: int, now: float = 0.0) -> str:
        """Run the next frame; return its passes and its segments: each one's kind, and its sequence.

        ended: Sequences that end with it.
        now: Time in seconds at which the frame is composed, and its result arrives.
        """
        frame = self.sequencer.compose(now)
        assert frame is not None
        outcomes, kinds = list[Outcome](), list[str]()
        for one in frame.segments:
            tree = isinstance(one, TreeSegment)
            kinds.append(f"{'tree' if tree else 'prompt'} {one.sequence}")
            size = len(one.tree.tokens) if tree else 0
            end = End.GRAMMAR if one.sequence in ended else None
            if tree or (one.final and self.sequencer._sequences[one.sequence].opening.decodes):
                tokens = (3,) * max(size, 1)
                outcome = Outcome(
                    one.sequence, one.draft_round if tree else 0, tuple(range(size)), tokens, end
                )
                outcomes.append(replace(outcome, extra_passes=frame.extra_passes))
        self.sequencer.apply_result(Result(1, frame.number, tuple(outcomes)), now)
        return f"{1 + frame.extra_passes} x " + ", ".join(kinds)

    def open_plan(self, rules: PlanRules = LIST) -> None:
        """The orders of a request with a plan beside its direct answer."""
        for order in (
            opened(1, family=9),
            opened(2, family=9, decodes=False),
            opened(3, Fork(2, 5), family=9, plan=rules),
        ):
            self.sequencer.apply_order(order)


def test_a_plan_is_fed_after_the_first_token_of_the_direct_answer_and_written_one_pass_a_frame() -> None:
    ring = Ring(QUICK)
    ring.open_plan()
    assert [ring.step() for _ in range(5)] == [
        "1 x prompt 1",
        "1 x tree 1, prompt 2",
        "1 x tree 1, prompt 3",
        "1 x tree 1, tree 3",
        "1 x tree 1, tree 3",
    ]


def test_a_plan_whose_prefix_is_in_the_ring_waits_for_the_first_token_of_the_direct_answer() -> None:
    ring = Ring(QUICK)
    ring.sequencer.apply_order(opened(2, decodes=False))
    assert ring.step() == "1 x prompt 2"
    ring.sequencer.apply_order(opened(1, Fork(2, 5), family=9))
    ring.sequencer.apply_order(opened(3, Fork(2, 5), family=9, plan=LIST))
    assert [ring.step() for _ in range(3)] == ["1 x prompt 1", "1 x tree 1, prompt 3", "1 x tree 1, tree 3"]


def test_a_frame_has_as_many_passes_as_were_launched_for_it() -> None:
    """One pass, although more are allowed again: the plan ended a while ago."""
    ring = Ring(QUICK)
    ring.open_plan()
    for ended in ((), (), (), (3,)):
        ring.step(*ended)
    frame = ring.sequencer.compose(1.0, launched=1)
    assert frame is not None
    assert (len(frame.segments), frame.extra_passes, ring.sequencer.passes_ahead()) == (1, 0, MAX_PASSES)


def test_a_plan_that_may_become_a_direct_answer_takes_several_passes() -> None:
    ring = Ring(QUICK)
    ring.open_plan(PlanRules(direct=True))
    assert [ring.step() for _ in range(4)][-1] == "8 x tree 1, tree 3"


def test_more_than_few_sequences_take_several_passes_beside_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where passes save most."""
    monkeypatch.setattr("specsot_worker.core.sequencer.FEW_SEQUENCES", 1)
    ring = Ring(QUICK)
    ring.open_plan()
    assert [ring.step() for _ in range(5)][-2:] == ["8 x tree 1, tree 3"] * 2


def test_passes_neither_exceed_a_pause_of_drafting_nor_delay_the_trees_after_it() -> None:
    """Pauses of ten steps, of one sequence and of two. One more pass runs while the drafter catches up."""
    ring = Ring(QUICK, present=True)
    for sequences in (1, 2):
        ring.sequencer.apply_order(opened(sequences, drafted=True))
        ring.step()
        ring.drafting.start_pause(10 * sequences, sequences)
        trees = ", ".join(f"tree {one}" for one in range(1, 1 + sequences))
        assert [ring.step() for _ in range(3)] == [f"8 x {trees}", f"2 x {trees}", f"1 x {trees}"]


def test_long_prompts_and_passes_take_turns() -> None:
    ring = Ring(SLOW)
    ring.open_plan(PlanRules(direct=True))
    assert [ring.step() for _ in range(7)] == [
        "1 x prompt 1",
        "1 x prompt 2",
        "2 x tree 1",
        "1 x prompt 2",
        "2 x tree 1",
        "1 x prompt 3",
        "2 x tree 1",
    ]


def test_frames_have_one_pass_until_a_plan_has_had_time_to_open_its_branches() -> None:
    ring = Ring(QUICK)
    ring.open_plan()
    for _ in range(4):
        ring.step()
    assert ring.step(3, now=1.0) == "1 x tree 1, tree 3"
    assert ring.step(now=1.0 + MAX_SECONDS / 2) == "1 x tree 1"
    assert ring.step(now=1.0 + MAX_SECONDS) == "8 x tree 1"
