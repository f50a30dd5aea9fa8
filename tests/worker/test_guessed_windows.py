"""Steps behind a window that are begun before their frame comes: pages, and trees that no host has read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specsot.core.frames import Frame, Opening, PromptChunk, TreeSegment
from specsot.core.tree import single
from specsot.params import Window
from specsot_model.decoder import Decoder
from specsot_worker.stage import DecoderStage
from tests.eager_steps import EagerSteps
from tests.models import Shape, write_base

PAGES, PAGE = 20, 4
WINDOW = Window(2, 18)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    base = write_base(tmp_path_factory.mktemp("base"), Shape(layers=1))
    return Decoder.load(base, None, torch.float32, "cpu")


class Unknown:
    """Trees of three nodes that nobody knows."""

    nodes, confirmed = 3, False

    def choose(self, tokens: Any, positions: Any, bits: Any, vocabulary: int) -> None: ...


def writing(decoder: Decoder, count: int) -> tuple[DecoderStage, list[TreeSegment]]:
    """A stage on which a text behind a window writes token after token, and what comes behind so many."""
    stage = DecoderStage(decoder, PAGES, PAGE, "packed")
    stage.run_by(EagerSteps(decoder, stage._kv, accepts_device_trees=True))
    opening, prompt = Opening(1, 5, window=WINDOW), PromptChunk(1, 0, (1, 2, 3, 4, 5), True)
    stage.run(Frame(1, 1, (opening,), (prompt,)))
    trees = [TreeSegment(1, 1 + row - 5, row, (0,) * (row > 5), single(7)) for row in range(5, count + 1)]
    for number, tree in enumerate(trees[:-1], 2):
        stage.run(Frame(1, number, (), (tree,)))
        free = stage._kv.layers[0][:, stage.table._free]
        assert not free.any(), "pages that are given back are wiped"
    return stage, trees[-1:]


@pytest.mark.parametrize(("rows", "launched"), [(18, True), (19, False)])
def test_trees_that_a_window_may_hide_something_from_are_not_launched_unread(
    decoder: Decoder, rows: int, launched: bool
) -> None:
    """The third of three nodes may be two positions behind the first."""
    stage, following = writing(decoder, rows)
    trees: Any = Unknown()
    assert stage.next_step
    assert stage.next_step.launch_selected(following, trees) == launched


def test_pages_that_a_window_leaves_are_given_back_wiped_before_its_next_frame_is_there(
    decoder: Decoder,
) -> None:
    stage, _ = writing(decoder, 40)
    assert PAGES - stage.table.free <= 1 + 5 + 1, "sinks; what is recent, wherever it begins; a token more"
