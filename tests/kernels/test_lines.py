"""What a row gets does not depend on its company: the tables that say so, and the kernels, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from specsot.core.tree import ancestry
from specsot_kernels.line_tables import BLOCK, LineCut, cut_lines, line_room, line_sights
from specsot_kernels.segments import RowSpan
from tests.conftest import some
from tests.there import there

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
from specsot_kernels.gpu.lines import attend_lines, plan_lines  # noqa: E402
from specsot_model.graph_tables import LineFrames  # noqa: E402
from specsot_model.kv import size_of  # noqa: E402
from tests.kernels.spans import branches  # noqa: E402
from tests.kernels.test_attention import KINDS, NEAR, written_out  # noqa: E402

PAGE, PAGES, DIM, GROUP = 16, 90, 16, 2
TEXT = 571  # behind the first cut; five more columns cross the edge of a block
FIRST, SECOND = (tuple(random.Random(seed).sample(range(PAGES), 38)) for seed in range(2))


def cut_of(spans: Sequence[RowSpan], tile_rows: int) -> tuple[LineCut, np.ndarray]:
    sights = line_sights(spans)
    return cut_lines(spans, sights.leads, PAGE, tile_rows), sights.leads


def test_a_row_is_in_pieces_that_begin_at_the_same_places_up_to_its_lead() -> None:
    """Trees up to the last whole block before them, prompts up to each row's own column."""
    spans = [
        RowSpan(5, TEXT, 5, FIRST, ancestry((0, 0, 0, 2, 3))),
        RowSpan(3, 1023, 3, range(100, 180)),
        RowSpan(1, 40, 1, (7, 8, 9), (1,)),
    ]
    cut, leads = cut_of(spans, 2)
    assert leads.tolist() == [TEXT // BLOCK * BLOCK] * 5 + [1024, 1025, 1026, 0]
    seen: list[list[tuple[int, int]]] = [[] for _ in leads]
    for top, high, where, at, stop in cut.pieces.tolist():
        assert high <= 2
        for row in range(top, top + high):
            own = min(stop, int(leads[row]))
            if own > at:
                assert at % 512 == 0
                assert cut.pages[where + at // PAGE] == spans[(row > 4) + (row > 7)].pages[at // PAGE]
                seen[row].append((at, own))
    whole = [(0, 512), (512, 1024)]
    assert seen == [whole[:1]] * 5 + [whole, [*whole, (1024, 1025)], [*whole, (1024, 1026)], []]
    assert cut.starts.tolist() == [0, 2, 4, 6, 8, 10, 12, 15, 18], "room for their own columns, too"
    assert cut.slots == 19


def test_whole_pieces_that_neighbours_share_are_read_once() -> None:
    common = tuple(range(70))  # 1,120 columns: two whole pieces
    texts = [RowSpan(2, 1200, 2, (*common, *range(100 + 9 * own, 109 + 9 * own)), (1, 3)) for own in range(3)]
    other = RowSpan(1, 600, 1, tuple(range(40)), (1,))  # and one of them again
    cut, _ = cut_of([*texts, other], 16)
    assert cut.pieces[:, [0, 1, 3, 4]].tolist() == [
        [0, 7, 0, 512],
        [0, 6, 512, 1024],
        *([2 * own, 2, 1024, 1152] for own in range(3)),
        [6, 1, 512, 576],
    ]
    apart = (*texts[:1], RowSpan(2, 1200, 2, tuple(range(200, 279)), (1, 3)), *texts[2:])
    assert len(cut_of(apart, 16)[0].pieces) == 9, "nobody's neighbour"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 40])
def test_lines_are_attended_to_as_trees_are(kind: torch.dtype, window: int | None) -> None:
    spans = branches(random.Random(3), 2, 7, 5)
    torch.manual_seed(5)
    q = torch.randn(sum(span.rows for span in spans), 1, 3, DIM).div(4).to(DEVICE, kind)
    kv = torch.randn(2, 40, 1, PAGE, DIM).to(DEVICE, kind)
    found = attend_lines(q, kv, plan_lines(spans, PAGE, 3, DEVICE, window))
    wanted = torch.from_numpy(written_out(q, kv, spans, window))
    assert (found.cpu().double() - wanted).norm() <= NEAR[kind] * wanted.norm()


def laid(columns: Sequence[int], pages: Sequence[int], keys: torch.Tensor, kv: torch.Tensor) -> None:
    for place, column in enumerate(columns):
        kv[:, pages[column // PAGE], 0, column % PAGE] = keys[:, place]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("text", "page"), some([(TEXT, 16), (509, 16), (30, 16), (1030, 16)], 0))
def test_a_row_gets_the_same_bits_in_any_company(kind: torch.dtype, text: int, page: int) -> None:
    """Rows of one text: each alone, as a prompt, as a tree whose other nodes lie between them, beside a text
    that is read with it; in tables that have room for more, too. Over the edge of a block, and of a piece.
    """
    torch.manual_seed(7)
    deep = 7
    first, second, third = (
        tuple(random.Random(seed).sample(range(PAGES), (text + 20) // PAGE + 1)) for seed in range(3)
    )
    keys = torch.randn(2, text + deep, DIM).to(DEVICE, kind)
    kv = torch.randn(2, PAGES, 1, PAGE, DIM).to(DEVICE, kind)
    q = torch.randn(deep + 7, 1, GROUP, DIM).to(DEVICE, kind)

    def read(spans: list[RowSpan], rows: list[int]) -> torch.Tensor:
        return attend_lines(q[rows], kv, plan_lines(spans, PAGE, GROUP, DEVICE)).cpu()

    laid(range(text + deep), first, keys, kv)
    alone = torch.cat([read([RowSpan(1, text + row, 1, first, (1,))], [row]) for row in range(deep)])
    assert torch.equal(read([RowSpan(deep, text, deep, first)], [*range(deep)]), alone)
    # node i of the chain is node 2 i of the tree; the others hang somewhere
    tree = ancestry(
        [0, 0, *(parent for row in range(1, deep) for parent in (2 * row - 2, 2 * row - 1))][: 2 * deep - 1]
    )
    laid([*range(text), *range(text, text + 2 * deep, 2)], second, keys, kv)
    spans = [RowSpan(2, 20, 2, third), RowSpan(2 * deep - 1, text, 2 * deep - 1, second, tree)]
    rows = [deep, deep + 1, *(row // 2 if row % 2 == 0 else deep + 2 for row in range(2 * deep - 1))]
    assert torch.equal(read(spans, rows)[2::2], alone)

    frames = LineFrames(line_room(32, PAGES, GROUP), PAGE)
    flat = torch.zeros(size_of(frames.shapes), dtype=torch.int32, device=DEVICE)
    plan, begun = frames.plan(flat, GROUP), 0
    for part, shape in zip(there(frames.fill(spans)), frames.shapes):
        flat[begun : begun + part.size] = torch.from_numpy(part.reshape(-1))
        begun += size_of([shape])
    there(frames.prepare)()
    padded = torch.cat((q[rows], q.new_zeros((32 - len(rows), 1, GROUP, DIM))))
    found = there(plan.kernel)(padded, kv).cpu()
    assert torch.equal(found[: len(rows)][2::2], alone)
    assert not found[len(rows) :].any()
