"""Hidden rows in 8 bits between stages, as they leave one and reach the next."""

from __future__ import annotations

import pytest
import torch

from specsot.core.frames import Frame
from specsot_worker.rounded_rows import RoundedRows, RoundedRowsLink, round_off, with_numbers
from tests.worker.test_riding import Recorder

CPU = torch.device("cpu")


def rows_of(count: int, width: int = 576) -> torch.Tensor:
    """With one number far larger than the others, as models have it."""
    rows = torch.randn(count, width, generator=torch.Generator().manual_seed(count))
    rows[:, 17] *= 100
    return rows


@pytest.mark.parametrize(("count", "width"), [(5, 576), (5, 48), (5, 7), (1, 7)])
def test_each_number_is_within_half_a_step_of_its_block(count: int, width: int) -> None:
    rows = torch.randn(count, width)
    again = RoundedRows(round_off(rows)).to(CPU, torch.float32)
    block = round_off(rows).shape[2] - 2
    step = rows.unflatten(-1, (-1, block)).abs().amax(-1, keepdim=True) / 127
    assert again.shape == rows.shape
    assert ((again - rows).unflatten(-1, (-1, block)).abs() <= 0.51 * step).all()


def test_a_row_is_the_same_in_any_company() -> None:
    rows = rows_of(64)
    assert torch.equal(round_off(rows)[7:9], round_off(rows[7:9]))


def test_what_is_not_finite_does_not_become_a_number() -> None:
    rows = rows_of(2)
    rows[1, 3] = torch.inf
    again = RoundedRows(round_off(rows)).to(CPU, torch.float32)
    assert again[0].isfinite().all()
    assert not again[1].isfinite().all()


def test_rows_of_frames_travel_so_and_all_else_as_it_was() -> None:
    sent = Recorder()
    link = RoundedRowsLink(sent)
    link.post(Frame(1, 1, hidden=rows_of(3), fused=rows_of(2)))
    link.post("something else")
    frame, other = sent.sent
    assert other == "something else"
    assert frame.hidden.nbytes * 3.8 < rows_of(3).nbytes
    came = with_numbers(frame)
    assert came.hidden.to(CPU, torch.bfloat16).dtype is torch.bfloat16
    assert torch.allclose(came.fused.to(CPU, torch.float32), rows_of(2), atol=2.0, rtol=0.01)
    assert with_numbers(Frame(1, 1, hidden=rows_of(3))).hidden.shape == (3, 576), "as they are"
