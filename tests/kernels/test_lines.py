"""What a row gets does not depend on its company: the tables that say so, and the kernels, bit for bit."""

from __future__ import annotations

import random
from importlib.util import find_spec

import pytest
import torch

from specsot.core.segments import RowSpan
from specsot.core.tree import ancestry
from specsot.kernels.attention_tables import tabulate_lines

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
from specsot.kernels.gpu.attention import attend, plan_attention  # noqa: E402
from specsot.kernels.gpu.products import multiply_rows  # noqa: E402
from tests.kernels.test_attention import KINDS, NEAR, branches, written_out  # noqa: E402

PAGE, PAGES, DIM, GROUP = 16, 90, 16, 2
TEXT = 521  # behind the first cut, which a row of it crosses
FIRST, SECOND, THIRD = (tuple(random.Random(seed).sample(range(PAGES), 34)) for seed in range(3))


def test_a_row_reads_its_line_in_order_cut_at_the_same_places() -> None:
    """A node's line is that of plain decoding: the text, the nodes above it, itself."""
    parents = (0, 0, 0, 2, 3)  # the last node's line: 0, 2, 3, 4
    spans = [RowSpan(5, TEXT, 5, FIRST, ancestry(parents)), RowSpan(3, 600, 3, range(40, 80))]
    tables = tabulate_lines(spans, PAGE, 2)
    lines: list[list[int]] = [[] for _ in range(8)]
    cuts: list[list[int]] = [[] for _ in range(8)]
    for top, high, where, columns, at, common, _ in tables.pieces.tolist():
        assert common == 0, "one way to sum, whoever sees all"
        for row in range(top, top + high):
            own = max(min(columns, int(tables.leads[row]) - at), 0)
            assert at == len(lines[row])
            lines[row] += tables.pages[where : where + own].tolist()
            cuts[row].append(at)
    slots = [[page * PAGE + offset for page in span.pages for offset in range(PAGE)] for span in spans]
    for node, above in enumerate(((0,), (0, 1), (0, 2), (0, 2, 3), (0, 2, 3, 4))):
        assert lines[node] == slots[0][:TEXT] + [slots[0][TEXT + each] for each in above]
    assert lines[5:] == [slots[1][: 601 + row] for row in range(3)]
    assert cuts == [[0, 512]] * 8


@pytest.mark.parametrize("kind", KINDS)
def test_lines_are_attended_to_as_trees_are(kind: torch.dtype) -> None:
    spans = branches(random.Random(3), 1, 2, 5)
    torch.manual_seed(5)
    q = torch.randn(sum(span.rows for span in spans), 1, 3, DIM).div(4).to(DEVICE, kind)
    kv = torch.randn(2, 40, 1, PAGE, DIM).to(DEVICE, kind)
    found = attend(q, kv, plan_attention(spans, PAGE, 3, DEVICE, invariant=True))
    wanted = torch.from_numpy(written_out(q, kv, spans))
    assert (found.cpu().double() - wanted).norm() <= NEAR[kind] * wanted.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_gets_the_same_bits_in_any_company(kind: torch.dtype) -> None:
    """Three rows of one text: each alone, as a prompt, as a tree whose other nodes lie between them, beside a
    text that is read with it.
    """
    torch.manual_seed(7)
    keys = torch.randn(2, TEXT + 3, DIM).to(DEVICE, kind)
    kv = torch.randn(2, PAGES, 1, PAGE, DIM).to(DEVICE, kind)
    q = torch.randn(7, 1, GROUP, DIM).to(DEVICE, kind)

    def read(spans: list[RowSpan], rows: list[int]) -> torch.Tensor:
        return attend(q[rows], kv, plan_attention(spans, PAGE, GROUP, DEVICE, invariant=True)).cpu()

    def lay(pages: tuple[int, ...], columns: list[int]) -> None:
        for place, column in enumerate(columns):
            kv[:, pages[column // PAGE], 0, column % PAGE] = keys[:, place]

    lay(FIRST, list(range(TEXT + 3)))
    alone = [read([RowSpan(1, TEXT + row, 1, FIRST, (1,))], [row]) for row in range(3)]
    assert torch.equal(read([RowSpan(3, TEXT, 3, FIRST)], [0, 1, 2]), torch.cat(alone))
    lay(SECOND, [*range(TEXT + 1), TEXT + 3, TEXT + 4])
    tree = RowSpan(5, TEXT, 5, SECOND, ancestry((0, 0, 0, 0, 3)))
    found = read([RowSpan(2, 40, 2, THIRD), tree], [5, 6, 0, 3, 4, 1, 2])
    assert torch.equal(found[[2, 5, 6]], torch.cat(alone))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_gives_a_row_the_same_bits_in_any_company(kind: torch.dtype, gated: bool) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(70, 150).to(DEVICE, kind), torch.randn(80, 150).div(9).to(DEVICE, kind)
    bias = None if gated else torch.randn(80).to(DEVICE, kind)
    whole = multiply_rows(x, weight, bias, gated, invariant=True)
    inside = (slice(69, 70), slice(5, 22)) if DEVICE == "cuda" else ()  # NumPy's sums feel where a row lies
    for rows in (slice(0, 1), slice(0, 22), slice(64, 70), *inside):
        assert torch.equal(multiply_rows(x[rows], weight, bias, gated, invariant=True), whole[rows])
