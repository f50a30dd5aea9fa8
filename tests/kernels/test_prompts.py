"""Attention of prompts' rows by a kernel of their own, against a softmax written out in double precision."""

from __future__ import annotations

import random
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from specsot_kernels.attention_tables import tabulate_prompts
from specsot_kernels.segments import RowSpan

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
from specsot_kernels.gpu import attention, lines  # noqa: E402
from specsot_kernels.gpu.prompts import suits  # noqa: E402
from tests.kernels.test_attention import KINDS, NEAR, written_out  # noqa: E402


def prompts(seed: int, page_rows: int, sizes: list[tuple[int, int]]) -> list[RowSpan]:
    """Of so many rows behind so many others, on pages in any order."""
    needed = [-(-(base + rows) // page_rows) for rows, base in sizes]
    pages = iter(random.Random(seed).sample(range(1, sum(needed) + 3), sum(needed)))
    spans = zip(sizes, needed)
    return [
        RowSpan(rows, base, rows, tuple(next(pages) for _ in range(many))) for (rows, base), many in spans
    ]


def made(
    spans: list[RowSpan], page_rows: int, g: int, dim: int, kind: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Queries among other heads, and one layer's pages, of which the first is nobody's."""
    torch.manual_seed(g)
    rows, many = sum(span.rows for span in spans), max(page for span in spans for page in span.pages) + 1
    q = (torch.randn(rows, 2 * g + 3, dim) / dim**0.5).to(DEVICE, kind)[:, : 2 * g].unflatten(1, (2, g))
    kv = torch.randn(2, many, 2, page_rows, dim).to(DEVICE, kind)
    kv[:, 0] = torch.nan
    return q, kv


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.itemsize == 2])
@pytest.mark.parametrize(("g", "page_rows", "dim"), [(4, 16, 64), (7, 64, 128)])
def test_prompts_of_any_length_after_any_number_of_cached_tokens(
    monkeypatch: pytest.MonkeyPatch, g: int, page_rows: int, dim: int, kind: torch.dtype
) -> None:
    monkeypatch.setattr(attention, "MIN_PROMPT_ROWS", 2)
    spans = prompts(g, page_rows, [(37, 0), (1, 70), (21, 43)])
    q, kv = made(spans, page_rows, g, dim, kind)
    plan = attention.plan_attention(spans, page_rows, g, DEVICE)
    assert plan.prompts is not None
    assert suits(q.dtype, kv)
    found, wanted = attention.attend(q, kv, plan), written_out(q, kv, spans)
    assert np.linalg.norm(found.double().cpu().numpy() - wanted) / np.linalg.norm(wanted) < NEAR[kind]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize(("rows", "base"), [(2048, 0), (1000, 5003)])
def test_many_rows_on_a_gpu_are_those_of_the_other_kernel(rows: int, base: int) -> None:
    spans = prompts(rows, 64, [(rows, base)])
    q, kv = made(spans, 64, 4, 128, torch.bfloat16)
    plan = attention.plan_attention(spans, 64, 4, DEVICE)
    assert plan.prompts is not None
    found = attention.attend(q, kv, plan).float()
    wanted = lines.attend_lines(q.float(), kv.float(), lines.plan_lines(spans, 64, 4, DEVICE))
    assert (found - wanted).norm() / wanted.norm() < NEAR[torch.bfloat16]


def test_trees_and_few_rows_are_not_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    few = prompts(1, 16, [(5, 3)])
    assert attention.plan_attention(few, 16, 4, DEVICE).prompts is None
    monkeypatch.setattr(attention, "MIN_PROMPT_ROWS", 2)
    assert attention.plan_attention(few, 16, 4, DEVICE).prompts is not None
    tree = RowSpan(3, 2, 3, (5,), (1, 3, 5))
    for spans, window in (([*few, tree], None), (few, 4)):
        assert attention.plan_attention(spans, 16, 4, DEVICE, window).prompts is None


def test_what_the_kernel_does_not_read_is_read_by_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MIN_PROMPT_ROWS", 2)
    spans = prompts(2, 16, [(5, 3)])
    q, kv = made(spans, 16, 4, 64, torch.float16)
    assert suits(q.dtype, kv)
    for other in (kv.float(), torch.zeros(*kv.shape[:-1], 66, dtype=torch.int8), kv[..., :48], kv[:, :, :1]):
        assert not suits(q.dtype, other)
    for page_rows, fits in ((16, True), (24, False), (48, False), (128, True), (96, False)):
        assert suits(q.dtype, torch.zeros(2, 3, 2, page_rows, 64, dtype=q.dtype)) is fits
    plan, sinks = attention.plan_attention(spans, 16, 4, DEVICE), torch.zeros(2, 4, device=DEVICE)
    found = attention.attend(q, kv, plan, sinks, 2.0).double().cpu().numpy()
    wanted = written_out(q, kv, spans, None, sinks, 2.0)
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < NEAR[torch.float16]


def test_every_row_has_a_tile_and_those_that_read_most_come_first() -> None:
    spans = prompts(3, 16, [(70, 0), (40, 500), (1, 9)])
    tiles, pages = tabulate_prompts(spans, 16, 32, 120)
    assert tiles[:-1, 2].tolist() == sorted(tiles[:-1, 2], reverse=True)
    rows = sorted(
        (row, base - top, where) for top, high, base, where in tiles for row in range(top, top + high)
    )
    assert [row for row, _, _ in rows] == list(range(120)), "padded rows read something, too"
    starts = np.cumsum([0, *(len(span.pages) for span in spans)])
    for (first, span), where in zip(((0, spans[0]), (70, spans[1]), (110, spans[2])), starts):
        assert {each[1:] for each in rows[first : first + span.rows]} == {(span.base - first, where)}
        assert pages[where : where + len(span.pages)].tolist() == list(span.pages)
