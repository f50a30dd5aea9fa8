"""Frames from which policies hide something run in graphs of their own, captured when the first one comes."""

from __future__ import annotations

import random
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from specsot.core.frames import Frame, Opening, rows_of
from specsot.members import Range
from specsot.params import HeadWindows, Pruning, Window
from specsot_kernels.segments import HeadColumns, RowSpan
from specsot_model.cuda_graphs import Captured, CapturedSteps, GraphCapture, StepRows, Work
from specsot_worker.stage import DecoderStage
from tests.conftest import some
from tests.worker.writers import PAGE, Writer

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
from tests.model.test_steps import DEVICE, KIND, NEAR, Fused, Plain, later
from tests.model.tiny import write_model

pytestmark = pytest.mark.torch

PAGES, PROMPT, CHUNK, BUCKETS = 60, 48, 16, (32, 64)
OPENINGS = (
    Opening(0, PROMPT, window=Window(4, 24)),
    Opening(1, PROMPT),
    Opening(2, PROMPT, window=Window(20, 16)),
    Opening(3, PROMPT, pruning=Pruning(0.5, 24, 0)),
)


class Counted:
    """Captures, and counts."""

    def __init__(self) -> None:
        self._capture, self.times = GraphCapture() if DEVICE == "cuda" else later, 0

    def __call__(self, work: Work) -> Captured:
        self.times += 1
        return self._capture(work)


def stages_of(path: Path, kind: str, layers: int = 2) -> tuple[DecoderStage, DecoderStage, Counted]:
    """Without graphs and with, and what captures those."""
    windowed = NEAR | {"sliding_window": 40} if kind == "gemma2" else {}
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": layers, **windowed}
    write_model(path, kind, **shape)
    plain, fused = (each.load(path, Range(0, layers), KIND, DEVICE) for each in (Plain, Fused))
    slow, fast = (DecoderStage(each, PAGES, PAGE, "packed") for each in (plain, fused))
    capture = Counted()
    fast.run_by(CapturedSteps(fused, fast._kv, {}, capture, BUCKETS, short_sizes=()))
    return slow, fast, capture


def frames_of(openings: tuple[Opening, ...]) -> list[Frame]:
    """Prompts in pieces, then a few trees."""
    writers = [Writer(one.sequence, random.Random(one.sequence), every=24) for one in openings]
    frames = [
        Frame(1, number, openings if number == 0 else (),
              tuple(writer.chunk(CHUNK, number * CHUNK + CHUNK == PROMPT)[0] for writer in writers))
        for number in range(PROMPT // CHUNK)
    ]  # fmt: skip
    for number in range(len(frames), len(frames) + 2):
        frames.append(Frame(1, number, (), tuple(writer.tree()[0] for writer in writers)))
    return frames


@pytest.mark.parametrize("kind", some(["llama", "gemma2"], 1))
def test_policies_side_by_side_write_what_they_write_without_graphs(tmp_path: Path, kind: str) -> None:
    """Over layers that see windows of the text, too. Which rows are pruned may hang on a key's last bit: what
    follows is not compared.
    """
    slow, fast, capture = stages_of(tmp_path, kind)
    begun = capture.times
    for frame in frames_of(OPENINGS):
        rows = sum(map(rows_of, frame.segments[:-1]))
        wanted, found = (stage.run(frame).hidden[:rows] for stage in (slow, fast))
        assert (found - wanted).norm() < 1e-2 * wanted.norm()
    assert fast.uncaptured == 0
    assert capture.times == begun + 2, "once for each bucket"


def test_frames_without_policies_capture_nothing_more(tmp_path: Path) -> None:
    _, fast, capture = stages_of(tmp_path, "llama", layers=1)
    begun = capture.times
    for frame in frames_of((Opening(0, PROMPT), Opening(1, PROMPT, window=Window(4, 200)))):
        fast.run(frame)
    assert (fast.uncaptured, capture.times) == (0, begun), "nor do windows that hide nothing yet"


@pytest.mark.parametrize("layers", some([1, 2], 1))
def test_layers_that_see_different_rows_run_without_a_graph(tmp_path: Path, layers: int) -> None:
    """And heads that do. Pruning that skips the only layer hides nothing."""
    _, fast, capture = stages_of(tmp_path, "llama", layers)
    begun, steps = capture.times, fast._graphs
    each = HeadWindows((((4, 16),),) * layers)
    openings = (replace(OPENINGS[3], pruning=Pruning(0.5, 24, 1)), Opening(4, PROMPT, heads=each))
    for number, opening in enumerate(openings):
        for frame in frames_of((opening,)):
            fast.run(frame)
        assert (fast.uncaptured > 0) == (layers == 2 or number == 1)
    own = RowSpan(1, 20, 1, (0, 1), (1,), HeadColumns(((4, 16),), (20,)))
    assert isinstance(steps, CapturedSteps)
    assert steps.run(StepRows([7], [20], [20], [own])) is None
    assert capture.times == begun


def test_prompts_that_no_graph_has_room_for_are_read_as_they_are_without_graphs(tmp_path: Path) -> None:
    """By kernels, where there is a GPU."""
    slow, fast, _ = stages_of(tmp_path, "llama")
    writers = [Writer(number, random.Random(number)) for number in (0, 1)]
    openings = (Opening(0, 70, window=Window(20, 40)), Opening(1, 70))
    prompts = tuple(writer.chunk(70, final=True)[0] for writer in writers)
    wanted, found = (stage.run(Frame(1, 0, openings, prompts)).hidden for stage in (slow, fast))
    assert (found - wanted).norm() < 1e-2 * wanted.norm()
    assert fast.uncaptured == 1
