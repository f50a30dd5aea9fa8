"""Tree attention against a softmax written out in double precision, sequence by sequence."""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import count

import numpy as np
import pytest
import torch

from specsot_kernels import attention_tables
from specsot_kernels.attention_tables import room_for, sinces_of, tabulate
from specsot_kernels.segments import RowSpan
from specsot_model.kv import as_numbers, round_rows

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
from specsot_kernels.gpu import attention  # noqa: E402
from specsot_kernels.gpu.attention import are_copied, attend, plan_attention  # noqa: E402
from specsot_kernels.gpu.launching import copies_blocks  # noqa: E402
from tests.conftest import some  # noqa: E402
from tests.kernels.spans import PAGE, PAGES, a_tree, branches, filled  # noqa: E402

NEAR = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
# Triton's interpreter multiplies no bf16, and is slow
KINDS = (torch.float16,) if DEVICE == "cpu" else tuple(NEAR)


def written_out(
    q: torch.Tensor,
    kv: torch.Tensor,
    spans: Sequence[RowSpan],
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> np.ndarray:
    """[rows, kv_heads * g * dim] in double precision. A row's columns are its line, in order."""
    queries, (keys, values) = q.double().cpu().numpy(), kv.double().cpu().numpy()
    out, row = np.zeros(queries.shape), 0
    for span in spans:
        lines = [np.concatenate(each[list(span.pages)].swapaxes(1, 2)) for each in (keys, values)]
        for seen in span.seen:
            columns = [*range(span.base), *(span.base + j for j in range(span.tail) if seen >> j & 1)]
            k, v = (each[columns[-(window or len(columns)) :]] for each in lines)
            scores = np.einsum("hgd,chd->hgc", queries[row], k)
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores)
            total = weights.sum(-1, keepdims=True)
            if sinks is not None:
                total += np.exp(sinks.double().cpu().numpy())[..., None]
            out[row] = np.einsum("hgc,chd->hgd", weights / total, v)
            row += 1
    return out.reshape(row, -1)


def check(
    spans: Sequence[RowSpan],
    kv_heads: int,
    g: int,
    dim: int,
    kind: torch.dtype,
    window: int | None = None,
    sunk: bool = False,
    softcap: float | None = None,
    eight: bool = False,
    values_from: int = 0,
) -> None:
    torch.manual_seed(dim + g)
    rows = sum(span.rows for span in spans)
    q = (torch.randn(rows, kv_heads, g + 1, dim) / dim**0.5).to(DEVICE, kind)[:, :, :g]  # strided
    tensors = 1 if values_from else 2
    kv = torch.randn(tensors, 2, PAGES, kv_heads, PAGE, dim).to(DEVICE, kind)[:, 1]  # one layer of two
    kv[:, 0] = torch.nan  # nobody's page
    kept, kv = (round_rows(kv), as_numbers(round_rows(kv), kind)) if eight else (kv, kv)
    sinks = torch.randn(kv_heads, g, device=DEVICE) if sunk else None
    plan = plan_attention(spans, PAGE, g, DEVICE, window)
    found = attend(q, kept, plan, sinks, softcap, values_from=values_from)
    if values_from:
        values = torch.nn.functional.pad(kv[0, ..., values_from:], (0, values_from))
        kv = torch.stack((kv[0], values))
    wanted = written_out(q, kv, spans, window, sinks, softcap)
    wanted = wanted.reshape(rows, -1, dim)[..., : dim - values_from].reshape(rows, -1)
    assert (found.dtype, tuple(found.shape)) == (kind, wanted.shape)
    error = np.linalg.norm(found.double().cpu().numpy() - wanted) / np.linalg.norm(wanted)
    assert error < NEAR[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("kv_heads", "g", "dim"), some([(2, 1, 64), (1, 4, 80), (1, 7, 96), (1, 8, 128)], 0, 2)
)
def test_trees_after_a_shared_prefix(kv_heads: int, g: int, dim: int, kind: torch.dtype) -> None:
    check(branches(random.Random(g), 2, 5, 6), kv_heads, g, dim, kind)


@pytest.mark.parametrize("g", some(range(1, 9), 0, 2, 5))
def test_any_number_of_heads_shares_a_kv_head(g: int) -> None:
    check(branches(random.Random(g), 1, 1, 3), 1, g, 64, torch.float32)


@pytest.mark.parametrize(("shared", "rows"), [(0, 1), (3, 35)])
def test_trees_of_many_rows_or_one(shared: int, rows: int) -> None:
    check(branches(random.Random(rows), 2, shared, rows), 1, 2, 64, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("window", "g", "dim", "sunk", "softcap"),
    [(3, 2, 64, True, None), (40, 4, 64, False, 1.5), (70, 2, 256, True, 2.0)],
)
def test_windows_sinks_and_softcaps(
    window: int, g: int, dim: int, sunk: bool, softcap: float | None, kind: torch.dtype
) -> None:
    """Within a tree and a page, within a prefix, and over several pages; causal rows, too."""
    check(branches(random.Random(window), 2, 5, 6), 1, g, dim, kind, window, sunk, softcap)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_int8(kind: torch.dtype) -> None:
    check(branches(random.Random(8), 1, 3, 3), 2, 2, 64, kind, eight=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eight", [False, True])
def test_rows_that_are_keys_and_values_at_once(eight: bool, kind: torch.dtype) -> None:
    """Latent attention: values are the rows without their rotated elements."""
    check(branches(random.Random(3), 2, 3, 4), 1, 3, 16 + 40, kind, eight=eight, values_from=16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("g", "values_from", "eight"), [(68, 16, False), (128, 16, True), (66, 0, False)])
def test_more_heads_than_a_tile_has_queries(g: int, values_from: int, eight: bool, kind: torch.dtype) -> None:
    """Two blocks of heads over the same KV: latent attention, and a single KV head."""
    spans = branches(random.Random(g), 2, 3, 2)
    check(spans, 1, g, 16 + 32, kind, eight=eight, values_from=values_from, sunk=not values_from)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("kind", NEAR)
@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize(("g", "rows"), [(16, 1), (20, 2), (20, 40), (64, 8), (128, 1), (128, 40)])
def test_rows_of_published_sizes(g: int, rows: int, eight: bool, kind: torch.dtype) -> None:
    """Of Youtu-LLM and DeepSeek V2-Lite, GLM-4.7-Flash, Kimi K2, and DeepSeek V3; one row, few, and many."""
    check(branches(random.Random(g), 2, 3, rows), 1, g, 64 + 512, kind, eight=eight, values_from=64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "short", "tile", "sunk"),
    [(48, True, 5, False), (80, True, 10, False), (80, True, 10, True), (48, False, 21, False)],
)
def test_pieces_are_taken_one_after_another(
    size: int, short: bool, tile: int, sunk: bool, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one piece and of two, more rows than a short tile has; columns and rows that nobody fills; some
    heads of a row merged together, and those that are left.
    """
    monkeypatch.setattr(attention, "MAX_UNLOOPED_PIECES", 2)
    monkeypatch.setattr(attention, "LOOPING_PROGRAMS", 2)
    monkeypatch.setattr(attention, "MAX_MERGE_PROGRAMS", size * 2)
    torch.manual_seed(3)
    spans = [*branches(random.Random(3), 3, 2, 10), RowSpan(2, 20, 2, (30, 31))]
    room = room_for(size, PAGES, 3, short=short)
    assert (room.tile_rows, room.short) == (tile, short)
    numbers = filled(room, tabulate(spans, PAGE, room.tile_rows))
    assert numbers is not None
    plan = attention.plan_over([torch.from_numpy(each).to(DEVICE) for each in numbers], room, PAGE, 3)
    rows, q = sum(span.rows for span in spans), torch.randn(size, 1, 3, 64).to(DEVICE, kind) / 8
    kv = torch.randn(2, PAGES, 1, PAGE, 64).to(DEVICE, kind)
    sinks = torch.randn(1, 3, device=DEVICE) if sunk else None
    found = attend(q, kv, plan, sinks)[:rows].double().cpu().numpy()
    wanted = written_out(q[:rows], kv, spans, sinks=sinks)
    assert np.linalg.norm(found - wanted) < NEAR[kind] * np.linalg.norm(wanted)


def test_time_of_a_window_does_not_grow_with_the_sequence() -> None:
    window = 3 * PAGE
    for pages in (10, 40):
        spans = [RowSpan(3, (pages - 1) * PAGE + 5, 3, tuple(range(pages)), (1, 3, 5))]
        tables = tabulate(spans, PAGE, 64, window, sinces_of(spans, window))
        assert tables.pages.tolist() == list(range(pages - 4, pages)), "no page before it is read"
        assert sum(piece[3] for piece in tables.pieces.tolist()) == 3 * PAGE + 8


def test_a_shared_prefix_is_read_once() -> None:
    spans = branches(random.Random(1), 4, 8, 3)
    tables = tabulate(spans, PAGE, 64)
    assert tables.pages.tolist().count(3 + 6) == 1, "all five sequences"
    assert tables.pages.tolist().count(3 + 7) == 1, "the four that share it"
    read = {int(row): 0 for row in range(sum(span.rows for span in spans))}
    for top, high, _, columns, *_ in tables.pieces.tolist():
        for row in range(top, top + high):
            read[row] += columns
    totals = [span.total for span in spans for _ in range(span.rows)]
    assert list(read.values()) == totals, "every row meets every column of its sequence once"


@pytest.mark.parametrize("rows", [4, 20], ids=lambda rows: f"{rows} rows")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.itemsize == 2])
def test_keys_and_values_that_are_copied_in_blocks(rows: int, kind: torch.dtype) -> None:
    """Whole pages, of which the last columns nobody sees."""
    torch.manual_seed(4)
    spans = [
        RowSpan(rows, 130, rows, (5, 2, 4), a_tree(random.Random(1), rows, 0)),
        RowSpan(rows, 140, rows, (5, 2, 3), a_tree(random.Random(2), rows, 0)),
    ]
    q = torch.randn(2 * rows, 2, 4, 64).to(DEVICE, kind) / 8
    kv = torch.randn(2, 6, 2, 64, 64).to(DEVICE, kind)
    plan = plan_attention(spans, 64, 4, DEVICE)
    assert are_copied(plan, kind, kv) == copies_blocks(kv.device)
    found, wanted = attend(q, kv, plan).double().cpu().numpy(), written_out(q, kv, spans)
    assert np.linalg.norm(found - wanted) < NEAR[kind] * np.linalg.norm(wanted)


def texts(rows: int, columns: Sequence[int], page_rows: int, shared: int = 0) -> list[RowSpan]:
    """Of so many rows each behind so many columns each, whose first pages are all texts'."""
    fresh = count(shared)
    own = [-(-(base + rows) // page_rows) - shared for base in columns]
    pages = [(*range(shared), *(next(fresh) for _ in range(many))) for many in own]
    return [RowSpan(rows, base, rows, each) for base, each in zip(columns, pages)]


def longest(spans: Sequence[RowSpan], g: int, kv_heads: int) -> tuple[int, int]:
    """Columns of the longest piece, and how many are that long or nearly, in a graph of an H100.

    An H100 runs 264 programs at once.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_tables, "PROGRAMS", 264)
        room = room_for(sum(span.rows for span in spans), 10**6, g, kv_heads=kv_heads)
    tables = tabulate(spans, 64, room.tile_rows, places=room.places)
    assert filled(room, tables) is not None
    columns = tables.pieces[:, 3]
    return int(columns.max()), int((columns * 2 > columns.max()).sum())


def test_a_long_prefix_is_cut_however_many_branches_follow_it() -> None:
    """Twelve tiles of rows: whole, they are 96 programs of eight heads on 132 multiprocessors."""
    columns, pieces = longest(texts(32, [8200] * 6, 64, 128), 4, 8)
    assert columns <= 2048
    assert pieces * 8 >= 2 * 132


def test_fewer_heads_are_read_by_more_pieces_each() -> None:
    spans = texts(24, [8192] * 8, 64)
    assert longest(spans, 4, 8) == (4160, 32)
    columns, pieces = longest(spans, 4, 4)
    assert columns <= 4160
    assert pieces * 4 >= 132


def test_a_long_sequence_is_split_among_short_ones() -> None:
    for spans in (texts(1, [*[300] * 40, 32768], 64), texts(32, [32768, *[300] * 11], 64)):
        assert longest(spans, 4, 8)[0] <= 4096


def test_sequences_are_not_split_for_a_second_wave_that_saves_little() -> None:
    assert longest(texts(60, [8192] * 8, 64), 4, 8) == (8252, 32)


def test_a_short_sequence_is_split_finely() -> None:
    assert longest(texts(24, [256], 64), 4, 8)[0] == 128
