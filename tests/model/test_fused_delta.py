"""Gated delta layers in kernels: what PyTorch's operations give, row by row, in graphs too."""

from __future__ import annotations

import random
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from specsot.core.tree import ancestry, depths
from specsot.members import Range
from specsot_model import delta_pages, linear
from specsot_model.attention import RowSpan
from specsot_model.core import replays, walks
from specsot_model.core.walks import BLOCK_ROWS, in_blocks
from specsot_model.cuda_graphs import CapturedSteps, GraphCapture, StepRows
from specsot_model.decoder import Decoder
from specsot_model.delta_pages import WalkedPages
from specsot_model.fused import capture_block
from tests.conftest import some
from tests.model.test_delta import near
from tests.model.tiny import PAGE_ROWS, Ring, load, write_model
from tests.there import there

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
from tests.model.test_steps import again

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FEW: dict[str, Any] = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
TREE = (0, 0, 1, 1, 0, 4, 5)


@pytest.fixture(autouse=True)
def plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels read weights as they are; a CPU's library would pack them."""
    monkeypatch.setattr(linear, "_product_for", lambda dtype, device: linear._torch_product)


class Walking(Decoder):
    """Its layers as a GPU has them, wherever it is."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._fused_blocks = tuple(map(capture_block, self._blocks))


def walking(directory: Path, cuts: tuple[int, ...] = (2,)) -> list[Decoder]:
    ranges = [Range(*each) for each in zip((0, *cuts[:-1]), cuts)]
    return [Walking.load(directory, each, torch.float32, DEVICE) for each in ranges]


def forget(ring: Ring) -> None:
    """All states that are kept."""
    for kv in ring.kvs:
        if isinstance(kv, WalkedPages):
            for page in range(kv.pages):
                kv._cached_states.discard_from(page)


@pytest.mark.parametrize(
    ("kind", "changes"),
    some(
        [("qwen3_next", {}), ("qwen3_5_text", {"linear_conv_kernel_dim": 3, "linear_value_head_dim": 18})], 1
    ),
)
def test_rows_and_trees_are_those_of_pytorch(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    """A prompt, single rows, a tree of which a path is kept, and a fork inside a page."""
    write_model(tmp_path, kind, **FEW, **changes)
    plain, ring = Ring.of(load(tmp_path, (2,))), Ring.of(walking(tmp_path, (1, 2)))
    draw, start = random.Random(1), 0
    tokens = [draw.randrange(3, 100) for _ in range(40)]
    for rows in (10, len(TREE), 1):
        tree = rows == len(TREE)
        at = [start + depth for depth in depths(TREE)] if tree else None
        step = tokens[start : start + rows], start, at, ancestry(TREE) if tree else None
        near(ring.feed(*step)[0].cpu(), plain.feed(*step)[0])
        if tree:
            moved = list(zip((start + node for node in (0, 4, 5, 6)), range(start, start + 4)))
            for one in (ring, plain):
                for kv in one.kvs:
                    kv.move([(slot(one, source), slot(one, target)) for source, target in moved])
            rows = 4
        start += rows
    assert start == 15 < PAGE_ROWS
    for one in (ring, plain):
        for kv in one.kvs:
            kv.copy_page(one.pages[0], 12, 14)
    own = (12, 13)
    branches = (Ring(one.decoders, one.kvs, pages=own) for one in (ring, plain))
    found, wanted = (branch.feed(tokens[30:36], 14)[0].cpu() for branch in branches)
    near(found, wanted)
    near(ring.feed(tokens[36:38], start)[0].cpu(), plain.feed(tokens[36:38], start)[0])


def slot(ring: Ring, row: int) -> int:
    return ring.pages[row // PAGE_ROWS] * PAGE_ROWS + row % PAGE_ROWS


def test_a_step_is_the_same_bit_for_bit_wherever_its_run_began(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From a kept state, or from the first row on, in one block or in several."""
    write_model(tmp_path, "qwen3_next", **FEW)
    ring, draw, start = Ring.of(walking(tmp_path)), random.Random(1), 0
    tokens = [draw.randrange(3, 100) for _ in range(20)]
    for rows in (3, len(TREE), 1):
        tree = rows == len(TREE)
        at = [start + depth for depth in depths(TREE)] if tree else None
        step = tokens[start : start + rows], start, at, ancestry(TREE) if tree else None
        found, _ = ring.feed(*step)
        (kv,) = ring.kvs
        assert isinstance(kv, WalkedPages)
        assert [walk.lines for walk in kv.walks] <= [rows + 1], (
            "what is behind the last state is not run again"
        )
        for most in (BLOCK_ROWS, len(TREE) + 1):
            forget(ring)
            with monkeypatch.context() as patched:
                patched.setattr(delta_pages, "in_blocks", partial(in_blocks, max_rows=most))
                again, _ = ring.feed(*step)
            lines = [walk.lines for walk in kv.walks]
            assert sum(lines) == start + rows
            assert max(lines) <= most
            assert torch.equal(found, again)
        start += 1 if tree else rows


@torch.inference_mode()
def test_steps_in_graphs_are_what_layers_do_one_by_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The steps are a prompt in chunks, trees whose accepted rows the graph moves, a single row, and two
    sequences. The model has no experts, because no graph captures experts in fp32.
    """
    for module in (replays, walks):
        monkeypatch.setattr(module, "CHUNKED_ROWS", 9)
    write_model(tmp_path, "qwen3_5_text", **FEW)
    (plain,), (fused,) = load(tmp_path, (2,)), walking(tmp_path)
    kvs = [one.make_kv(6, PAGE_ROWS) for one in (plain, fused)]
    steps = CapturedSteps(fused, kvs[1], {}, GraphCapture() if DEVICE == "cuda" else again, (2, 10))
    texts = {(3, 1): 0, (4, 5): 0}
    moves: list[tuple[int, int]] = []
    for parents in (((0,) * 9, None), (TREE, None), (TREE, (0, 0)), ((0,), (0,)), (None, TREE)):
        spans, tokens, at, slots = list[RowSpan](), list[int](), list[int](), list[int]()
        prompt = parents[0] == (0,) * 9
        for (pages, base), tree in zip(list(texts.items()), parents):
            if tree is None:
                continue
            rows = range(base, base + len(tree))
            spans.append(RowSpan(len(tree), base, len(tree), pages, None if prompt else ancestry(tree)))
            at += rows if prompt else [base + depth for depth in depths(tree)]
            tokens += [3 + row * 7 % 90 for row in rows]
            slots += [pages[row // PAGE_ROWS] * PAGE_ROWS + row % PAGE_ROWS for row in rows]
        kvs[0].move(moves)
        entry, turns = plain.embed(torch.tensor(tokens)), torch.tensor(at)
        wanted, _ = plain.forward(
            entry, turns, torch.tensor(slots), plain.plan(spans, PAGE_ROWS, "packed"), kvs[0]
        )
        found = there(steps.run(StepRows(tokens, at, slots, spans, moves)))
        near(found[0].cpu(), wanted)
        moves, first = [], 0
        for pages, tree in zip(list(texts), parents):
            kept = () if tree is None else range(9) if prompt else (0, 4, 5, 6) if tree == TREE else (0,)
            own = slots[first : first + len(tree or ())]
            moves += [(own[node], own[place]) for place, node in enumerate(kept) if node != place]
            texts[pages] += len(kept)
            first += len(own)


def test_a_frame_for_which_a_graph_has_no_room_changes_nothing(tmp_path: Path) -> None:
    """Too much of the text runs again: the same frame runs kernel by kernel, from the same state."""
    write_model(tmp_path, "qwen3_next", **FEW)
    (decoder,) = walking(tmp_path, (1,))
    kv = decoder.make_kv(40, PAGE_ROWS)
    assert isinstance(kv, WalkedPages)
    room, pages = kv.table_sizes(1), tuple(range(40))
    assert kv.fill([RowSpan(1, 600, 1, pages, (1,))], (), room) is None
    filled = there(kv.fill([RowSpan(1, 200, 1, pages, (1,))], (), room))
    assert filled[0].tolist() == [1, 201, 0, 0]
    kv.commit()
    again = there(kv.fill([RowSpan(1, 201, 1, pages, (1,))], (), room))
    assert again[0].tolist() == [1, 2, 0, 0]
