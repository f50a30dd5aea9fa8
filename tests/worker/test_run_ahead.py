"""Frames of several forward passes: the device chooses tokens that the host reads later, all at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specsot.core.frames import Frame, Open
from specsot.core.pages import PageTable
from specsot.core.run_ahead import MAX_PASSES
from specsot.members import Configuration, Range, Stage
from specsot_bench.eagle.generation import StepLoop
from specsot_model.decoder import Decoder
from specsot_worker.core.pipeline import DraftTimeout, FrameBudget
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
    engine_of,
    opened,
    orders,
    random_orders,
    steps_of,
    write,
)

Written = dict[int, list[int]]


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


def test_slots_for_passes_do_not_count_as_a_drafter() -> None:
    """A single stage reserves slots for the tokens of several passes, whether or not something is drafted."""
    alone = Configuration(1, "w", (Stage("w", "w", Range(0, 4)),), PAGES, PAGE, slots=1)
    assert (alone.reserved_slots, alone.drafted) == (MAX_PASSES, False)
    assert replace(alone, slots=24).reserved_slots == 24
    two = (Stage("v", "v", Range(0, 2)), Stage("w", "w", Range(2, 4)))
    assert replace(alone, stages=two).reserved_slots == 1
