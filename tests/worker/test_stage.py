"""A layer range with its pages: what one sequence leaves in a page, and who may read it."""

from __future__ import annotations

import pytest
import structlog
import torch
from prometheus_client import CollectorRegistry

from specsot.core.frames import Frame, Opening, PromptChunk
from specsot.members import Configuration, Layout, Range, Stage
from specsot.service.telemetry import Observation
from specsot_worker.telemetry import WorkerTelemetry
from tests.models import write_base

PAGE, LAYERS = 16, Range(1, 3)


@pytest.fixture
def stages(tmp_path):
    """Makes stages of the same weights, without an embedding: rows come in as the test likes."""
    from specsot_model.decoder import Decoder
    from specsot_worker.stage import DecoderStage

    decoder = Decoder.load(write_base(tmp_path / "base"), LAYERS, torch.float32, "cpu")
    return lambda layout: (DecoderStage(decoder, 4, PAGE, layout), decoder.config.hidden)


def prompts(number: int, lengths: dict[int, int], hidden: torch.Tensor, closings: tuple[int, ...] = ()):
    """A frame that opens sequences of these lengths and feeds them `hidden`."""
    return Frame(
        1,
        number,
        tuple(Opening(sequence, length) for sequence, length in lengths.items()),
        tuple(PromptChunk(sequence, 0, (5,) * length, True) for sequence, length in lengths.items()),
        closings,
        hidden=hidden,
    )


@pytest.mark.parametrize("layout", ["packed", "batched"])
def test_law_6_numbers_that_broke_in_a_page_never_reach_its_next_owner(stages, layout: Layout):
    used, hidden = stages(layout)
    fresh, _ = stages(layout)
    used.run(prompts(1, {1: PAGE, 2: PAGE}, torch.full((2 * PAGE, hidden), torch.nan), closings=(1, 2)))
    rows = torch.randn(12 + 3, hidden, generator=torch.Generator().manual_seed(0))
    later = [stage.run(prompts(2, {3: 12, 4: 3}, rows.clone())).hidden for stage in (used, fresh)]
    assert torch.equal(later[0], later[1])


def test_this_test_would_notice(stages):
    """Side by side, the short one is read as far as the long one: unwiped pages do break it."""
    used, hidden = stages("batched")
    used._kv.clear_pages = lambda pages: None
    used.run(prompts(1, {1: PAGE, 2: PAGE}, torch.full((2 * PAGE, hidden), torch.nan), closings=(1, 2)))
    assert used.run(prompts(2, {3: 12, 4: 3}, torch.zeros(15, hidden))).hidden.isnan().any()


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_token_that_the_base_lacks_is_an_error_of_the_frame_not_of_the_process(tmp_path, token: int):
    from specsot.errors import WireError
    from specsot_model.decoder import Decoder
    from specsot_worker.stage import DecoderStage

    stage = DecoderStage(
        Decoder.load(write_base(tmp_path / "base"), Range(0, 1), torch.float32, "cpu"), 4, PAGE
    )
    frame = Frame(1, 1, (Opening(1, 2),), (PromptChunk(1, 0, (5, token), True),))
    with pytest.raises(WireError, match="token ids beyond"):
        stage.run(frame)


def test_a_frame_that_fits_no_graph_is_counted_and_logged_once(stages):
    """And runs all the same."""

    class NoRoom:
        def run(self, rows: object) -> None:
            return None

    slow, hidden = stages("packed")
    plain, _ = stages("packed")
    rows = torch.randn(5, hidden, generator=torch.Generator().manual_seed(1))
    wanted = plain.run(prompts(1, {1: 5}, rows.clone())).hidden
    assert plain.uncaptured == 0, "where there are no graphs none is missed"
    slow._graphs = NoRoom()
    with structlog.testing.capture_logs() as told:
        for number in (1, 2, 3):
            assert torch.equal(slow.run(prompts(number, {number: 5}, rows.clone())).hidden, wanted)
    assert slow.uncaptured == 3
    assert [entry["tokens"] for entry in told] == [5]
    registry = CollectorRegistry()
    stage = Stage("w0", "127.0.0.1:1", slow.layers)
    WorkerTelemetry(Observation(registry), 16).formed(Configuration(1, "w0", (stage,), 4, PAGE, 9), slow)
    assert registry.get_sample_value("specsot:worker_uncaptured_frames") == 3
