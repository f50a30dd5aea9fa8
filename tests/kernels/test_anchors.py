"""Kernels behind policies, windows with sinks and pruned rows, against what PyTorch's own operations give."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from specsot.core.frames import Frame, Opening
from specsot.core.pages import PageTable
from specsot.params import Pruning, Window
from specsot_kernels.anchors import anchor_runs
from specsot_kernels.attention_tables import PageRun, room_for
from specsot_kernels.segments import RowSpan, VisibleColumns
from specsot_model import attention as plain
from specsot_model.core.kv_plan import plan_frame
from specsot_model.graph_tables import FrameTables
from specsot_model.kv import as_numbers, round_rows, size_of, views
from tests.there import there
from tests.worker.writers import PAGE, Writer

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
from specsot_kernels.gpu.attention import attend, plan_attention  # noqa: E402
from tests.kernels.spans import branches  # noqa: E402
from tests.kernels.test_attention import KINDS, NEAR  # noqa: E402

PAGES, PROMPT, ROWS = 90, 60, 200
POLICIES = (Window(4, 24), None, Window(0, 16), Window(20, 40), Pruning(0.5, 24, 0))


def frames(seed: int) -> Iterator[list[RowSpan]]:
    """Of texts with all policies side by side, and of one with none: prompts in pieces, then trees."""
    table = PageTable(PAGES, PAGE)
    openings = tuple(
        Opening(number, PROMPT, window=one if isinstance(one, Window) else None,
                pruning=one if isinstance(one, Pruning) else None)
        for number, one in enumerate(POLICIES)
    )  # fmt: skip
    writers = [Writer(number, random.Random(seed + number), every=24) for number in range(len(POLICIES))]
    for number in range(60):
        growing = [writer for writer in writers if writer.reach]
        segments = tuple(writer.next(PROMPT)[0] for writer in growing)
        frame = Frame(1, number, openings if number == 0 else (), segments)
        yield list(plan_frame(table, frame).spans)
        if len(growing) < len(writers):
            return


def rates_of(dim: int) -> torch.Tensor:
    """The last pairs do not turn."""
    pairs = torch.arange(dim // 2, device=DEVICE)
    return torch.where(pairs < dim // 2 - 4, 0.7**pairs, 0.0).float()


def fill(tables: FrameTables, flat: torch.Tensor, spans: list[RowSpan]) -> None:
    filled = there(tables.fill(spans))
    flat.zero_()
    for target, told in zip(views(flat, tables.shapes), filled):
        target.view(-1)[: told.size] = torch.from_numpy(told.reshape(-1)).to(DEVICE)
    if tables.prepare:
        tables.prepare()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("g", "dim", "window", "eight"), [(1, 64, None, False), (2, 80, 20, False), (2, 64, None, True)]
)
def test_policies_are_read_as_pytorch_reads_them(
    g: int, dim: int, window: int | None, eight: bool, kind: torch.dtype
) -> None:
    """By the tables of one frame, and by a graph's. window: of the layer."""
    torch.manual_seed(dim + g)
    rates, met = rates_of(dim), 0
    kv = torch.randn(2, PAGES, 2, PAGE, dim).to(DEVICE, kind)
    kept, kv = (round_rows(kv), as_numbers(round_rows(kv), kind)) if eight else (kv, kv)
    tables = FrameTables(room_for(ROWS, PAGES, g, anchored=True), PAGE, window, rates)
    flat = torch.zeros(size_of(tables.shapes), dtype=torch.int32, device=DEVICE)
    graph = tables.plan(flat, g)
    for number, spans in enumerate(frames(g)):
        if number not in (4, 14):
            continue
        rows = sum(span.rows for span in spans)
        q = (torch.randn(ROWS, 2, g, dim) / dim**0.5).to(DEVICE, kind)
        looks = spans
        if window is not None:
            looks = [part for span in spans for part in plain.look_back(span, window, drafts=False)]
        wanted = plain.plan_readings(looks, PAGE, g, "packed", kind, DEVICE, rates)
        wanted = plain.attend(q[:rows], kv, wanted).double()
        fill(tables, flat, spans)
        assert graph.kernel is not None
        for found in (
            attend(q[:rows], kept, plan_attention(spans, PAGE, g, DEVICE, window, rates)),
            graph.kernel(q, kept)[:rows],
        ):
            assert (found.double() - wanted).norm() < NEAR[kind] * wanted.norm()
        met += sum(span.sight is not None for span in spans)
    assert met > 3, "policies must have hidden something"


def test_rows_without_a_policy_get_the_same_bits_from_a_graph_for_both() -> None:
    torch.manual_seed(1)
    spans = branches(random.Random(1), 2, 3, 6)
    rows, (q, kv) = (
        sum(span.rows for span in spans),
        (torch.randn(32, 1, 4, 64), torch.randn(2, 40, 1, 16, 64)),
    )
    found = list[torch.Tensor]()
    for anchored in (False, True):
        room = room_for(32, 40, 4, anchored=anchored)
        tables = FrameTables(room, 16, None, rates_of(64) if anchored else None)
        flat = torch.zeros(size_of(tables.shapes), dtype=torch.int32, device=DEVICE)
        fill(tables, flat, spans)
        kernel = there(tables.plan(flat, 4).kernel)
        found.append(kernel(q.to(DEVICE), kv.to(DEVICE))[:rows])
    assert torch.equal(*found)


def test_neighbours_on_the_same_pages_read_their_sinks_at_once() -> None:
    def behind(sinks: int, pages: tuple[int, ...]) -> RowSpan:
        sight = VisibleColumns((sinks, sinks), (40, 40), (9, 9))
        return RowSpan(2, 50, 2, pages, (1, 2), sight)

    spans = [behind(20, (1, 2, 3)), behind(20, (1, 2, 5)), RowSpan(3, 9, 3, (7,)), behind(20, (1, 8, 9)),
             behind(0, (1, 8, 9)), behind(3, (1, 8, 9))]  # fmt: skip
    assert list(anchor_runs(spans, PAGE)) == [
        PageRun(0, 4, 0, 20, (1, 2)),
        PageRun(7, 2, 0, 20, (1, 8)),
        PageRun(11, 2, 0, 3, (1,)),
    ]


def test_the_same_pages_may_be_read_through_another_window() -> None:
    tables = FrameTables(room_for(1, 9, 4, anchored=True), PAGE, None, rates_of(64))
    for sinks in (4, 0, 9):
        filled = there(
            tables.fill([RowSpan(1, 40, 1, (1, 2, 3), (1,), VisibleColumns((sinks,), (20,), (9,)))])
        )
        pieces = filled[3]
        assert pieces[pieces[:, 5] < 0, 3].tolist() == [sinks] * bool(sinks)


def test_a_graph_has_room_for_sinks_in_addition_to_everything_else() -> None:
    """As many texts as rows, each behind a window."""
    for rows in (1, 16, 64, 256):
        spans = [
            RowSpan(1, 40, 1, tuple(range(3 * row, 3 * row + 3)), (1,), VisibleColumns((4,), (20,), (9,)))
            for row in range(rows)
        ]
        tables = FrameTables(room_for(rows, 4 * rows, 4, anchored=True), PAGE, None, rates_of(64))
        filled = there(tables.fill(spans))
        sinces, anchors, turns, pieces = filled[:4]
        assert [set(each.tolist()) for each in (sinces, anchors, turns)] == [{20}, {4}, {9}]
        behind = pieces[:, 5] < 0
        assert np.count_nonzero(behind) == rows
        assert set(pieces[(pieces[:, 1] > 0) & ~behind, 4].tolist()) == {PAGE}, (
            "no page before what is recent"
        )
