"""Rows of a small step have the same bits whatever the other rows are: tables, products and attention.

Without a GPU, products are of whole numbers, whose sums are exact in any order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.core.tree import ancestry
from specsot_kernels.line_tables import (
    EQUAL_PIECES,
    MAX_SMALL_ROWS,
    SMALL_STEP_PIECES,
    PieceSizes,
    cut_lines,
    line_sights,
    small_step_room,
    small_tile_of,
)
from specsot_kernels.segments import RowSpan
from tests.conftest import some
from tests.there import there

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
from specsot_kernels.gpu.rows import Turning, norm_rows, turn_and_store  # noqa: E402
from specsot_kernels.gpu.small_attention import attend_small, plan_small_step  # noqa: E402
from specsot_kernels.gpu.small_products import (  # noqa: E402
    SmallTile,
    add_and_norm,
    has_parts,
    multiply_small,
    small_tile_for,
    suits,
    sum_in_parts,
)
from specsot_model.graph_tables import SmallStepFrames  # noqa: E402
from specsot_model.kv import size_of  # noqa: E402
from specsot_model.linear import (  # noqa: E402
    InvariantRowProduct,
    PartSums,
    RowProduct,
    SmallStepProduct,
)
from tests.kernels.spans import branches  # noqa: E402
from tests.kernels.test_attention import KINDS, NEAR, written_out  # noqa: E402

PAGE, DIM, GROUP = 16, 16, 3
ODD_SIZES = PieceSizes(2, 6, 3, 12, 4)
ROWS = (1, 2, 3, 5, 8, 16, 17, 25, 31, 32)
# Outputs (both halves if gated), inputs, and whether the product is gated: the matrices of Qwen2.5-Coder-1.5B
# and 0.5B, then those of Llama-3.1-8B.
MATRICES = (
    (2048, 1536, False), (1536, 1536, False), (17920, 1536, True), (1536, 8960, False), (151936, 1536, False),
    (1152, 896, False), (9728, 896, True), (896, 4864, False),
    (6144, 4096, False), (28672, 4096, True), (4096, 14336, False),
)  # fmt: skip


def test_lines_are_cut_at_columns_that_no_step_changes() -> None:
    starts = ODD_SIZES.start_of(np.arange(7))
    assert starts.tolist() == [0, 2, 4, 6, 9, 12, 16]
    assert ODD_SIZES.number_of(np.arange(20)).tolist() == [
        0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6,
    ]  # fmt: skip
    for sizes in (ODD_SIZES, SMALL_STEP_PIECES, EQUAL_PIECES._replace(block=None)):
        for base in (0, 1, 5, 7, 11, 13, 127, 128, 4095, 4097, 32_767, 32_769, 70_000):
            lead = sizes.start_of(sizes.number_of(np.array(base)))
            assert sizes.lead_of(base) == lead
            assert lead <= base < sizes.limit_of(lead)


def test_a_tree_reads_together_the_pieces_before_its_root() -> None:
    """Then each row reads what is left of its line: room is kept for the next lead and the whole tail."""
    pages = tuple(range(320))
    other_pages = tuple(range(400, 420))
    spans = [RowSpan(3, 5_000, 3, pages, ancestry((0, 0, 0))), RowSpan(2, 300, 2, other_pages)]
    sights = line_sights(spans, SMALL_STEP_PIECES)
    assert sights.leads.tolist() == [4_608] * 3 + [301, 302]
    cut = cut_lines(spans, sights.leads, PAGE, 2, SMALL_STEP_PIECES)
    edges = [*range(0, 4_096, 128), 4_096, 4_608]
    for first, high, until in ((0, 2, 4_608), (2, 1, 4_608), (3, 2, 302)):
        own = [piece for piece in cut.pieces.tolist() if piece[0] == first]
        inside = [edge for edge in edges if edge < until]
        assert [piece[3] for piece in own] == inside
        assert [piece[4] for piece in own] == [*inside[1:], until]
        assert all(piece[1] == high for piece in own)
    assert np.diff(cut.starts).tolist() == [35, 35, 35, 3], (
        "32 + 2 pieces up to the next lead, one for the tail"
    )


def test_a_graph_has_room_for_every_tree_of_one_sequence() -> None:
    for rows in (1, 4, 16, 32):
        for columns in (64, 4_096, 40_000):
            room = small_step_room(rows, columns // PAGE + 1, 6, columns)
            for base in (0, 127, columns // 2, columns - rows):
                pages = tuple(range(-(-columns // PAGE)))
                spans = [RowSpan(rows, base, rows, pages, tuple(1 << row for row in range(rows)))]
                leads = line_sights(spans, SMALL_STEP_PIECES).leads
                cut = cut_lines(spans, leads, PAGE, room.tile_rows, SMALL_STEP_PIECES)
                assert room.fill_lines(cut) is not None, (rows, columns, base)


def test_the_rows_of_a_small_step_are_few_and_of_16_bits() -> None:
    rows = torch.zeros(MAX_SMALL_ROWS + 1, 32, dtype=torch.bfloat16)
    assert suits(rows[:1])
    assert suits(rows[:-1])
    assert not suits(rows)
    assert not suits(rows[:0])
    assert not suits(rows[:1].float())
    assert not suits(rows[:1, :24])


@pytest.mark.parametrize("rows", some([1, 3, 16, 17, 32], 1, 3))
@pytest.mark.parametrize(
    ("outputs", "inputs", "parts"), [(80, 160, 1), (48, 272, 1), (48, 384, 3), (80, 256, 2)]
)
@pytest.mark.parametrize("gated", [False, True])
def test_it_is_the_product(rows: int, outputs: int, inputs: int, parts: int, gated: bool) -> None:
    torch.manual_seed(outputs + rows)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape).to(DEVICE, torch.float32)

    x, weight, tile = (
        whole(rows, inputs),
        whole(outputs * (1 + gated), inputs),
        SmallTile(16, 64, 4, 2, 1 if gated else parts),
    )
    wanted = x.double() @ weight.double().T
    if gated:
        opened, up = wanted.chunk(2, 1)
        found = multiply_small(x, weight, gated=True, tile=tile)
        torch.testing.assert_close(found.double(), F.silu(opened) * up, rtol=1e-6, atol=1e-6)
        return
    bias, residual = whole(outputs), whole(rows, outputs)
    assert torch.equal(multiply_small(x, weight, None, bias, tile=tile).double(), wanted + bias)
    into = residual.clone()
    assert multiply_small(x, weight, into=into, tile=tile) is into
    assert torch.equal(into.double(), wanted + residual)


@pytest.mark.parametrize(("rows", "inputs"), [(3, 384), (17, 384), (3, 272), (MAX_SMALL_ROWS + 1, 384)])
@pytest.mark.parametrize("kind", [SmallStepProduct, RowProduct, InvariantRowProduct])
@pytest.mark.parametrize("earlier", [False, True], ids=["alone", "added"])
def test_products_are_added(kind: type[RowProduct], rows: int, inputs: int, earlier: bool) -> None:
    """In a small step of three parts: in three kernels, and one that adds up the parts."""
    seeded = torch.Generator().manual_seed(rows)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=seeded).to(DEVICE, torch.float16)

    sums: Tensor | PartSums | None = whole(rows, 48) if earlier else None
    given, wanted = sums, sums.double() if isinstance(sums, Tensor) else torch.zeros(rows, 48).to(DEVICE)
    for _ in range(3):
        x, weight = whole(rows, inputs), whole(48, inputs)
        wanted = wanted + x.double() @ weight.double().T
        sums = kind(weight).plus(sums, x)
    apart = kind is SmallStepProduct and rows <= MAX_SMALL_ROWS and inputs % 128 == 0 and not earlier
    assert isinstance(sums, PartSums) == apart
    found = sums.total() if isinstance(sums, PartSums) else there(sums)
    assert not earlier or found is given
    assert found.dtype == torch.float16
    assert torch.equal(found.double(), wanted)


@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
@pytest.mark.parametrize("gated", [False, True])
def test_the_norm_before_a_product_is_an_rms_norm(kind: torch.dtype, gated: bool) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(5, 272).to(DEVICE, kind), torch.randn(64, 272).to(DEVICE, kind)
    scale, bias = torch.rand(272).to(DEVICE, kind), torch.randn(64).to(DEVICE, kind)
    normed = F.rms_norm(x.double(), (272,), scale.double(), 1e-5) @ weight.double().T
    wanted = F.silu(normed[:, :32]) * normed[:, 32:] if gated else normed + bias.double()
    found = multiply_small(x, weight, (scale, 1e-5), None if gated else bias, gated)
    assert (found.double() - wanted).norm() <= NEAR[kind] * wanted.norm()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("kind", "outputs", "inputs", "gated"),
    [
        *((torch.bfloat16, *matrix) for matrix in MATRICES),
        *((torch.float16, *matrix) for matrix in MATRICES[:3]),
    ],
)
def test_a_row_of_a_product_has_the_same_bits_among_any_rows(
    kind: torch.dtype, outputs: int, inputs: int, gated: bool
) -> None:
    """Alone, among up to 31 others, and at every place among them; normed, added and in fp32."""
    torch.manual_seed(outputs)
    weight = torch.randn(outputs, inputs, device=DEVICE, dtype=kind) / inputs**0.5
    x = 3 * torch.randn(MAX_SMALL_ROWS, inputs, device=DEVICE, dtype=kind)
    norm = torch.rand(inputs, device=DEVICE, dtype=kind), 1e-6
    wanted = outputs // 2 if gated else outputs
    bias = None if gated else torch.randn(wanted, device=DEVICE, dtype=kind)
    residual = torch.randn(MAX_SMALL_ROWS, wanted, device=DEVICE, dtype=kind)

    def multiply(rows: Tensor) -> list[Tensor]:
        found = [
            multiply_small(x[rows], weight, gated=gated),
            multiply_small(x[rows], weight, norm, bias, gated),
            multiply_small(x[rows], weight, gated=gated, into=residual[rows].clone()),
        ]
        return found if gated else [*found, multiply_small(x[rows], weight, norm, dtype=torch.float32)]

    order = torch.arange(MAX_SMALL_ROWS, device=DEVICE)
    alone = [torch.cat(each) for each in zip(*(multiply(order[row : row + 1]) for row in order.tolist()))]
    dense = x.float() @ weight.float().T
    if not gated:
        assert (alone[0].float() - dense).norm() <= 1e-2 * dense.norm()
    for seed, rows in enumerate(ROWS):
        chosen = torch.tensor(random.Random(seed).sample(range(MAX_SMALL_ROWS), rows), device=DEVICE)
        for found, single in zip(multiply(chosen), alone):
            assert torch.equal(found, single[chosen]), rows


def check_added_and_normed(kind: torch.dtype, rows: int, outputs: int, inputs: int, parts: int) -> None:
    """One kernel that adds up the parts and norms the row gives the bits of two kernels."""
    torch.manual_seed(outputs + rows)
    x, weight = torch.randn(rows, inputs).to(DEVICE, kind), torch.randn(outputs, inputs).to(DEVICE, kind)
    scale, residual = torch.rand(outputs).to(DEVICE, kind), torch.randn(rows, outputs).to(DEVICE, kind)
    tile = small_tile_for(outputs, inputs, 2, False)._replace(parts=parts)
    wanted, found = residual.clone(), residual.clone()
    multiply_small(x, weight, into=wanted, tile=tile)
    normed = add_and_norm(sum_in_parts(x, weight, tile=tile), found, (scale, 1e-5))
    assert torch.equal(found, wanted), rows
    assert torch.equal(normed, norm_rows(wanted, scale, 1e-5)), rows


@pytest.mark.parametrize("rows", some([1, 3, 17, 32], 1))
@pytest.mark.parametrize(("outputs", "inputs", "parts"), [(80, 384, 3), (200, 256, 2), (64, 128, 1)])
def test_a_product_is_added_and_normed_with_the_bits_of_two_kernels(
    rows: int, outputs: int, inputs: int, parts: int
) -> None:
    check_added_and_normed(torch.float16, rows, outputs, inputs, parts)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [
        (896, 896), (896, 4864), (1536, 1536), (1536, 8960), (2048, 2048), (2048, 11008), (3584, 3584),
        (3584, 18944), (4096, 4096), (4096, 14336), (1000, 1280),
    ],
)  # fmt: skip
def test_products_of_real_models_are_added_and_normed_with_the_bits_of_two_kernels(
    kind: torch.dtype, outputs: int, inputs: int
) -> None:
    parts = small_tile_for(outputs, inputs, 2, False).parts
    assert parts > 1
    for rows in ROWS:
        check_added_and_normed(kind, rows, outputs, inputs, parts)


def check_turned(
    kind: torch.dtype,
    rows: int,
    heads: tuple[int, int],
    dim: int,
    sizes: tuple[int, int],
    biased: bool,
) -> None:
    """The kernel that turns heads without norms adds up the parts of their product with the bits of a kernel
    before it.

    heads: number of query heads and of KV heads.
    sizes: inputs of the product, and parts.
    """
    queries, kv_heads = heads
    inputs, parts = sizes
    outputs = (queries + 2 * kv_heads) * dim
    torch.manual_seed(outputs + rows)
    x, weight = torch.randn(rows, inputs).to(DEVICE, kind), torch.randn(outputs, inputs).to(DEVICE, kind)
    norm = torch.rand(inputs).to(DEVICE, kind), 1e-6
    bias = torch.randn(outputs).to(DEVICE, kind) if biased else None
    turns = torch.linspace(1, 0.1, dim // 2).to(DEVICE)
    turning = Turning(queries, kv_heads, turns, dim**-0.5, None, 1e-6)
    at = torch.arange(rows, device=DEVICE)
    slots = at.clone()
    slots[-1] = -1
    layers = torch.zeros(2, 2, 3, kv_heads, PAGE, dim).to(DEVICE, kind)
    tile = small_tile_for(outputs, inputs, 2, False)._replace(parts=parts)
    wanted = multiply_small(x, weight, norm, bias, tile=tile).view(rows, -1, dim)
    turn_and_store(wanted, at, slots, layers[0], turning)
    found = torch.empty(rows, queries, dim, dtype=kind, device=DEVICE)
    sums = sum_in_parts(x, weight, norm, tile)
    turn_and_store(found, at, slots, layers[1], turning, sums=(sums, bias))
    assert torch.equal(found, wanted[:, :queries]), rows
    assert torch.equal(layers[1], layers[0]), rows
    assert rows == 1 or bool(layers[0].any())


@pytest.mark.parametrize("rows", some([1, 3, 17], 1))
@pytest.mark.parametrize(
    ("heads", "dim", "biased"),
    [((6, 2), 16, True), ((3, 1), 20, False), ((4, 1), 24, True), ((9, 3), 16, False)],
)
def test_heads_are_turned_with_the_bits_of_a_kernel_that_adds_up_the_parts(
    rows: int, heads: tuple[int, int], dim: int, biased: bool
) -> None:
    check_turned(torch.float16, rows, heads, dim, (384, 3), biased)


def test_heads_with_norms_are_not_turned_in_parts() -> None:
    sums, weight = torch.zeros(2, 1, 3 * 16, device=DEVICE), torch.ones(16, device=DEVICE)
    heads, kv_layer = torch.zeros(1, 1, 16, device=DEVICE), torch.zeros(2, 1, 1, PAGE, 16, device=DEVICE)
    turning = Turning(1, 1, weight[:8], 1.0, (weight, weight), 1e-6)
    at = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(AssertionError, match="heads with norms"):
        turn_and_store(heads, at, at, kv_layer, turning, sums=(sums, None))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "dim", "inputs", "biased"),
    [
        ((14, 2), 64, 896, True),
        ((12, 2), 128, 1536, True),
        ((16, 2), 128, 2048, True),
        ((16, 8), 128, 1024, False),
        ((4, 1), 256, 1152, False),
        ((5, 1), 80, 640, True),
    ],
)
def test_heads_of_real_models_are_turned_with_the_bits_of_a_kernel_that_adds_up_the_parts(
    kind: torch.dtype, heads: tuple[int, int], dim: int, inputs: int, biased: bool
) -> None:
    parts = small_tile_for((heads[0] + 2 * heads[1]) * dim, inputs, 2, False).parts
    assert parts > 1
    for rows in ROWS:
        check_turned(kind, rows, heads, dim, (inputs, parts), biased)


def test_only_matrices_of_few_outputs_have_parts() -> None:
    wide, narrow = (torch.empty(size, 1536, dtype=torch.bfloat16) for size in (8960, 1536))
    assert has_parts(narrow)
    assert not has_parts(wide)


def test_the_tile_of_a_product_depends_on_its_matrix_alone() -> None:
    for outputs, inputs, gated in MATRICES:
        tile = small_tile_for(outputs // 2 if gated else outputs, inputs, 2, gated)
        assert inputs % (tile.inputs * tile.parts) == 0
        assert tile.parts == 1 or not gated
    assert small_tile_for(1536, 8960, 2, False).parts == 5
    assert small_tile_for(1536, 8968, 2, False).parts == 1, "parts are whole tiles"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("window", "g"), some([(None, 1), (40, 3), (None, 3), (40, 1)], 0, 1))
def test_small_steps_are_attended_to_as_trees_are(kind: torch.dtype, window: int | None, g: int) -> None:
    spans = branches(random.Random(3), 2, 7, 5)
    torch.manual_seed(5)
    q = torch.randn(sum(span.rows for span in spans), 1, g, DIM).div(4).to(DEVICE, kind)
    kv = torch.randn(2, 40, 1, PAGE, DIM).to(DEVICE, kind)
    found = attend_small(q, kv, plan_small_step(spans, PAGE, g, DEVICE, window))
    wanted = torch.from_numpy(written_out(q, kv, spans, window))
    assert (found.cpu().double() - wanted).norm() <= NEAR[kind] * wanted.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("base", "dim", "g"),
    some([(125, 16, 3), (30, 16, 3), (260, 64, 1), (4_090, 128, 6), (4_700, 128, 4)], 0),
)
def test_a_row_of_attention_has_the_same_bits_alone_and_in_any_tree(
    kind: torch.dtype, base: int, dim: int, g: int
) -> None:
    """Rows of one sequence: each alone, as a prompt's end, and as a tree whose other nodes lie between them,
    in addition to another sequence; also in the tables of a graph. The path crosses the edge of a piece.
    """
    deep, page = 7, 64
    held = (base + 40) // page + 1
    num_pages = 3 * held
    torch.manual_seed(7)
    pages = [tuple(random.Random(seed).sample(range(num_pages), held)) for seed in range(3)]
    keys = torch.randn(2, base + deep, dim).to(DEVICE, kind)
    q = torch.randn(deep + 7, 1, g, dim).to(DEVICE, kind)

    def pages_with(columns: Sequence[int], own: tuple[int, ...]) -> Tensor:
        kv = torch.randn(2, num_pages, 1, page, dim).to(DEVICE, kind)
        for place, column in enumerate(columns):
            kv[:, own[column // page], 0, column % page] = keys[:, place]
        return kv

    def read(kv: Tensor, spans: list[RowSpan], rows: list[int]) -> Tensor:
        return attend_small(q[rows], kv, plan_small_step(spans, page, g, DEVICE)).cpu()

    kv = pages_with(range(base + deep), pages[0])
    alone = torch.cat([read(kv, [RowSpan(1, base + row, 1, pages[0], (1,))], [row]) for row in range(deep)])
    assert torch.equal(read(kv, [RowSpan(deep, base, deep, pages[0])], [*range(deep)]), alone), "as a prompt"
    # Row i of the path is node 2 i of the tree, whose other nodes hang anywhere.
    links = [parent for row in range(1, deep) for parent in (2 * row - 2, 2 * row - 1)]
    nodes = 2 * deep - 1
    tree = ancestry([0, 0, *links][:nodes])
    kv = pages_with([*range(base), *range(base, base + 2 * deep, 2)], pages[1])
    spans = [RowSpan(2, 20, 2, pages[2]), RowSpan(nodes, base, nodes, pages[1], tree)]
    rows = [deep, deep + 1, *(row // 2 if row % 2 == 0 else deep + 2 for row in range(nodes))]
    assert torch.equal(read(kv, spans, rows)[2::2], alone)

    frames = SmallStepFrames(small_step_room(32, num_pages, g, num_pages * page), page)
    flat = torch.zeros(size_of(frames.shapes), dtype=torch.int32, device=DEVICE)
    plan = frames.plan(flat, g)
    begun = 0
    for part, shape in zip(there(frames.fill(spans)), frames.shapes):
        flat[begun : begun + part.size] = torch.from_numpy(part.reshape(-1))
        begun += size_of([shape])
    padded = torch.cat((q[rows], q.new_zeros((32 - len(rows), 1, g, dim))))
    found = there(plan.kernel)(padded, kv).cpu()
    assert torch.equal(found[: len(rows)][2::2], alone)
    assert not found[len(rows) :].any()


def test_a_tile_holds_all_heads_of_a_row() -> None:
    assert [small_tile_of(g) for g in (1, 3, 16, 17, 32)] == [16, 16, 16, 32, 32]
