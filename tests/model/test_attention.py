"""Attention over pages against attention with one dense mask."""

from __future__ import annotations

import random

import pytest
import torch

from specsot.core.tree import ancestry
from specsot.members import Layout
from specsot_kernels.segments import ReadGroup, look_back, plan_reads
from specsot_model.attention import RowSpan, attend, plan_attention, plan_readings
from specsot_model.kv import KVPages
from tests.conftest import seeds

KV_HEADS, G, DIM, PAGE = 2, 3, 8, 8
PAGES = 64


def filled_pages(seed: int) -> KVPages:
    kv = KVPages(1, PAGES, PAGE, KV_HEADS, DIM, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(seed)
    kv.layers[0].normal_(generator=generator)
    return kv


def dense(
    q: torch.Tensor, layer: torch.Tensor, spans: list[RowSpan], sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """The plain truth: gather each span's rows, mask, softmax. sinks: one more column, without a value."""
    outputs, first = [], 0
    for span in spans:
        slots = [(span.pages[c // PAGE], c % PAGE) for c in range(span.total)]
        keys = torch.stack([layer[0, page, :, row] for page, row in slots], 1)
        values = torch.stack([layer[1, page, :, row] for page, row in slots], 1)
        rows = q[first : first + span.rows]
        first += span.rows
        visible = span.visible or [(2 << i) - 1 for i in range(span.rows)]
        for row, bits in zip(rows, visible):
            seen = [c < span.base or bool(bits >> (c - span.base) & 1) for c in range(span.total)]
            hidden = torch.tensor([0.0 if yes else -torch.inf for yes in seen])
            scores = row @ keys.transpose(1, 2) + hidden
            if sinks is not None:
                scores = torch.cat((scores, sinks[..., None]), -1)
            weights = torch.softmax(scores, -1)[..., : span.total]
            outputs.append((weights @ values).reshape(-1))
    return torch.stack(outputs)


def random_tree(rng: random.Random, nodes: int) -> tuple[int, ...]:
    return ancestry([0, *(rng.randrange(node) for node in range(1, nodes))])


def random_span(rng: random.Random, pages: tuple[int, ...], base: int, rows: int) -> RowSpan:
    if rng.random() < 0.4:
        return RowSpan(rows, base, rows, pages)
    extra = rng.randrange(3)  # tail rows that belong to earlier levels of a draft
    return RowSpan(rows, base, rows + extra, pages, random_tree(rng, rows + extra)[extra:])


def random_frame(rng: random.Random) -> list[RowSpan]:
    """Several requests; the spans of one may share its first pages and may lie side by side."""
    spans: list[RowSpan] = []
    page = 0
    for _ in range(rng.randrange(1, 4)):
        prefix = tuple(range(page, page + rng.randrange(3)))
        page += len(prefix)
        rows = rng.randrange(1, 6)
        strided = rng.random() < 0.5
        family = rng.randrange(1, 5)
        own = [rng.randrange(1, 3) for _ in range(family)]
        for member, count in enumerate(own):
            rows = rows if strided else rng.randrange(1, 6)
            first = page + member if strided else page
            pages = prefix + tuple(first + family * i if strided else first + i for i in range(2))
            page += 0 if strided else 2
            top = (len(prefix) + count) * PAGE - rows - 2
            spans.append(random_span(rng, pages, rng.randrange(len(prefix) * PAGE, top + 1), rows))
        page += 2 * family if strided else 0
    return spans


def compare(seed: int, layout: Layout, device: str) -> None:
    spans = random_frame(random.Random(seed))
    layer = filled_pages(seed).layers[0]
    rows = sum(span.rows for span in spans)
    q = torch.randn(rows, KV_HEADS, G, DIM, generator=torch.Generator().manual_seed(seed))
    expected = dense(q, layer, spans)
    plan = plan_attention(spans, PAGE, G, layout, torch.float32, device)
    for _ in range(2):  # a plan serves every layer of a frame
        found = attend(q.to(device), layer.to(device), plan).cpu()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    sinks = torch.linspace(-3, 5, KV_HEADS * G).view(KV_HEADS, G)
    plan = plan_readings(spans, PAGE, G, layout, torch.float32, device)
    found = attend(q.to(device), layer.to(device), plan, sinks.to(device)).cpu()
    torch.testing.assert_close(found, dense(q, layer, spans, sinks), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["packed", "batched"])
@pytest.mark.parametrize("seed", seeds(40, quick=10))
def test_pages_give_what_one_dense_mask_gives(seed: int, layout: Layout) -> None:
    compare(seed, layout, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", ["packed", "batched"])
def test_cuda_gives_what_one_dense_mask_gives(layout: Layout) -> None:
    for seed in range(20):
        compare(seed, layout, "cuda")


def _is_uniform(group: ReadGroup) -> bool:
    """Every reading is of all rows, in the same cells."""
    rows, cells = group.readings[0].rows, group.readings[0].cells
    return rows * cells == group.rows and all(
        (each.first, each.rows, each.cells) == (0, rows, cells) for each in group.readings
    )


def test_random_frames_reach_every_kind_of_group() -> None:
    arranged = [plan_reads(random_frame(random.Random(seed)), PAGE, "batched") for seed in range(40)]
    groups = [group for arrangement in arranged for group in arrangement.groups]
    assert {_is_uniform(group) for group in groups} == {True, False}
    assert any(_is_uniform(group) and len(group.readings) > 1 for group in groups)
    assert any(reading.cells > 1 and reading.at for group in groups for reading in group.readings)
    assert any(group.lead == group.width for group in groups)
    assert any(arrangement.source_rows is None for arrangement in arranged)
    padded = [arrangement.source_rows for arrangement in arranged if arrangement.source_rows is not None]
    assert any(len(set(take)) < len(take) for take in padded)


def test_a_shared_page_is_read_once_for_all_rows() -> None:
    spans = [RowSpan(2, 20, 2, (7, 3, 10 + i)) for i in range(4)]
    (group,) = plan_reads(spans, PAGE, "packed").groups
    shared = [reading for reading in group.readings if reading.page in (7, 3)]
    assert [(r.rows, r.cells, r.columns) for r in shared] == [(8, 1, PAGE), (8, 1, PAGE)]
    assert len(group.readings) == 6


def test_batched_reads_consecutive_pages_as_one_product() -> None:
    spans = [RowSpan(2, 3 + i, 2, (10 + i,)) for i in range(4)]
    arrangement = plan_reads(spans, PAGE, "batched")
    ((reading,),) = [group.readings for group in arrangement.groups]
    assert (reading.cells, reading.rows, reading.page, reading.columns) == (4, 2, 10, 8)
    assert arrangement.source_rows is None
    assert len(plan_reads(spans, PAGE, "packed").groups) == 4


def test_batched_sorts_and_pads_what_then_lies_side_by_side() -> None:
    spans = [RowSpan(2, 3, 2, (11,)), RowSpan(3, 3, 3, (10,))]
    arrangement = plan_reads(spans, PAGE, "batched")
    (group,) = arrangement.groups
    assert arrangement.source_rows == (2, 3, 4, 0, 1, 1)
    assert [span.seen for span in group.spans] == [(1, 3, 7), (1, 3, 3)]


def test_one_token_alongside_a_long_prompt_is_not_padded() -> None:
    spans = [RowSpan(1, 3, 1, (0,)), RowSpan(90, 0, 90, tuple(range(1, 14)))]
    assert len(plan_reads(spans, PAGE, "batched").groups) == 2


def test_a_page_still_being_written_is_not_shared() -> None:
    spans = [RowSpan(1, 6, 1, (4,)), RowSpan(1, 7, 1, (4,))]
    assert len(plan_reads(spans, PAGE, "packed").groups) == 2


def test_a_long_prompt_is_cut_into_blocks_of_bounded_scores() -> None:
    arrangement = plan_reads([RowSpan(3000, 1000, 3000, tuple(range(16)))], 256, "packed")
    assert sum(group.rows for group in arrangement.groups) == 3000
    assert all(group.rows * group.width <= 1 << 20 for group in arrangement.groups)
    assert arrangement.source_rows is None


def test_a_long_prompt_within_a_window_is_not_planned_a_second_time() -> None:
    """Layers with the window and without have one plan."""
    span = RowSpan(3000, 1000, 3000, tuple(range(16)))
    assert list(look_back(span, 4000)) == [span]
    assert len(list(look_back(span, 3999))) > 1


def test_a_row_that_sees_everything_needs_no_mask() -> None:
    assert (
        plan_attention([RowSpan(1, 5, 1, (0,))], PAGE, G, "packed", torch.float32, "cpu").first_passes[0].mask
        is None
    )
