"""KV pages: what is written is found, moves may overlap, a copied page is the page."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from specsot.errors import ModelError, WireError
from specsot_model.kv import (
    STAGING_BUFFERS,
    KVPages,
    Staging,
    as_numbers,
    joined,
    round_rows,
    untouched_zeros,
)
from specsot_model.tensor_parallel import SplitPages


@pytest.fixture
def kv() -> KVPages:
    return KVPages(2, 4, 8, 2, 3, torch.float32, "cpu")


def rows_of(count: int, first: float = 1.0) -> torch.Tensor:
    return torch.arange(count * 12, dtype=torch.float32).reshape(count, 2, 2, 3) + first


def test_written_rows_lie_in_page_views(kv: KVPages) -> None:
    written = rows_of(3)
    kv.write(1, torch.tensor([7, 8, 30]), written)
    for row, (page, offset) in enumerate([(0, 7), (1, 0), (3, 6)]):
        assert torch.equal(kv.layers[1][:, page, :, offset], written[row])
    assert not kv.layers[0].any()


@pytest.mark.parametrize("slots", [[5], [6, 7, 8, 9], [9, 8, 1], [0, 2, 4, 6, 8], [30, 31, 0, 1, 16], []])
def test_any_slots_are_found_again(kv: KVPages, slots: list[int]) -> None:
    written = rows_of(len(slots))
    kv.write(0, torch.tensor(slots, dtype=torch.long), written)
    found = [kv.layers[0][:, slot // 8, :, slot % 8] for slot in slots]
    assert torch.equal(torch.stack(found) if found else written, written)
    assert int((kv.layers[0] != 0).sum()) == 12 * len(slots)


def test_move_gathers_before_it_scatters(kv: KVPages) -> None:
    for layer in range(2):
        kv.write(layer, torch.arange(8, 12), rows_of(4, first=100.0 * layer))
    kv.move([(8, 7), (10, 8), (11, 10)])
    for layer in range(2):
        before = rows_of(4, first=100.0 * layer)
        found = [kv.layers[layer][:, slot // 8, :, slot % 8] for slot in (7, 8, 10)]
        assert torch.equal(torch.stack(found), before[[0, 2, 3]])


def test_copy_page_copies_only_the_rows_asked_for(kv: KVPages) -> None:
    kv.write(0, torch.arange(8), rows_of(8))
    kv.copy_page(0, 2, 5)
    assert torch.equal(kv.layers[0][:, 2, :, :5], kv.layers[0][:, 0, :, :5])
    assert not kv.layers[0][:, 2, :, 5:].any()


def test_cleared_pages_are_zero_and_others_stay(kv: KVPages) -> None:
    kv.write(0, torch.arange(24), torch.full((24, 2, 2, 3), torch.nan))
    kv.clear_pages(())
    kv.clear_pages((2, 0))
    assert not kv.layers[0][:, [0, 2]].any()
    assert kv.layers[0][:, 1].isnan().all()


def test_bytes_counts_every_layer(kv: KVPages) -> None:
    assert kv.bytes == 2 * (2 * 4 * 8 * 2 * 3) * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_in_int8_are_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    kv = KVPages(2, 4, 8, 2, 4, dtype, "cpu", "int8")
    assert kv.bytes == 2 * (2 * 4 * 8 * 2) * (4 + 16)
    written = torch.randn(4, 2, 2, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    written[1], written[2, 0] = 0.0, 1e4
    kv.write(1, torch.arange(8, 12), written)
    kv.move([(10, 3), (11, 10)])
    kv.copy_page(1, 2, 4)
    for page, offset, row in ((0, 3, 2), (1, 2, 3), (2, 0, 0), (2, 1, 1)):
        found = as_numbers(kv.layers[1][:, page, :, offset], dtype)
        step = written[row].abs().amax(-1, keepdim=True).float() / 127
        rounding = 0.0 if dtype == torch.float32 else 2**-7 * written[row].abs().float()
        assert found.dtype == dtype
        assert ((found.float() - written[row].float()).abs() <= 0.51 * step + rounding).all()
    kv.clear_pages((1,))
    assert not as_numbers(kv.layers[1][:, 1], dtype).any()


def test_rows_that_are_kept_in_another_way_are_refused(kv: KVPages) -> None:
    """And nothing is written; those of their own kind come as they are."""
    rows = torch.randn(3, 2, 2, 3, generator=torch.Generator().manual_seed(0))
    short, other = (KVPages(2, 4, 8, 2, 3, torch.float16, "cpu") for _ in range(2))
    short.write(1, torch.arange(3), rows.half())
    with pytest.raises(WireError, match=r"24 bytes in torch.float16 do not fit"):
        kv.put_rows_at(1, [5, 6, 7], short.rows_at(1, [0, 1, 2]))
    assert not kv.layers[1].any()
    other.put_rows_at(1, [5, 6, 7], short.rows_at(1, [0, 1, 2]))
    assert torch.equal(other.layers[1][:, 0, :, 5:8], short.layers[1][:, 0, :, :3])


def test_rows_in_int8_that_are_not_finite_show(kv: KVPages) -> None:
    for bad in (torch.nan, torch.inf):
        row = torch.tensor([1.0, bad, 2.0, 3.0])
        assert not as_numbers(round_rows(row), torch.float32).isfinite().all()


def test_the_least_keys_are_kept_as_they_are_in_int8() -> None:
    kv = KVPages(1, 2, 8, 1, 4, torch.float32, "cpu", "int8")
    rows = torch.ones(4, 2, 1, 4) * torch.tensor([3.0, 1.0, 4.0, 2.0]).view(4, 1, 1, 1)
    kv.write(0, torch.arange(4), rows)
    before = kv.layers[0][:, 0, 0, :4].clone()
    kv.keep_smallest_keys(0, torch.arange(4), torch.arange(2))
    assert torch.equal(kv.layers[0][:, 0, 0, :2], before[:, [1, 3]])


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_pages_take_no_memory_before_they_are_used() -> None:
    before = resident()
    kv = KVPages(8, 256, 256, 4, 64, torch.float32, "cpu")
    assert kv.bytes == 1 << 30
    assert not kv.layers[7][0, 255].any(), "reading is not using"
    kv.write(0, torch.arange(3), torch.ones(3, 2, 4, 64))
    kv.clear_pages((0,))
    assert resident() - before < 64 << 20


def test_pages_that_the_system_does_not_reserve_are_refused_in_a_line() -> None:
    with pytest.raises(ModelError, match=r"pages: Cannot allocate memory; set a smaller --kv-memory$"):
        untouched_zeros((1 << 60,), torch.int8, "cpu")


def test_heads_that_are_split_over_devices_keep_the_rows_that_they_keep_together() -> None:
    """Each head keeps its own number of its own rows: the first 2 of rows 0, 2 and 3, the second 3 of 4."""
    rows = (
        torch.ones(4, 2, 2, 4)
        * torch.tensor([[3.0, 1.0], [0.5, 4.0], [1.0, 2.0], [2.0, 3.0]])[:, None, :, None]
    )
    own = torch.tensor([[True, True], [False, True], [True, True], [True, True]])
    counts = torch.tensor([2, 3])
    whole = KVPages(1, 1, 8, 2, 4, torch.float32, "cpu")
    parts = [KVPages(1, 1, 8, 1, 4, torch.float32, "cpu") for _ in range(2)]
    whole.write(0, torch.arange(4), rows)
    for head, part in enumerate(parts):
        part.write(0, torch.arange(4), rows[:, :, head : head + 1])
    for kv in (whole, SplitPages(parts)):
        kv.keep_smallest_keys(0, torch.arange(4), torch.arange(3), own, counts)
    kept = whole.layers[0][0, 0, :, :, 0]  # [heads, rows]
    assert kept[0, :2].tolist() == [1.0, 2.0]
    assert kept[1, :3].tolist() == [1.0, 2.0, 3.0]
    for head, part in enumerate(parts):
        count = int(counts[head])
        assert torch.equal(part.layers[0][0, 0, 0, :count], whole.layers[0][0, 0, head, :count])


def test_joined_arrays_are_sent_as_they_are_one_by_one() -> None:
    parts = [
        np.arange(size, dtype=np.int32).reshape(shape)
        for size, shape in ((3, 3), (6, (2, 3)), (0, 0), (5, 5))
    ]
    one_by_one, together = (torch.zeros(32, dtype=torch.int32) for _ in range(2))
    Staging(32, one_by_one.device).send(parts, one_by_one)
    Staging(32, together.device).send([joined(parts[:3]), parts[3]], together)
    for first, part in ((0, parts[0]), (4, parts[1]), (12, parts[3])):
        for sent in (one_by_one, together):
            assert sent[first : first + part.size].tolist() == part.reshape(-1).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_numbers_on_their_way_to_a_device_are_not_overwritten() -> None:
    """More transfers than there are buffers, while the device is busy with something else."""
    device = torch.device("cuda", 0)
    staging, target = Staging(4, device), torch.zeros(4, dtype=torch.int32, device=device)
    matrix = torch.zeros(8192, 8192, device=device)
    received = list[torch.Tensor]()
    for number in range(3 * STAGING_BUFFERS):
        torch.mm(matrix, matrix)
        staging.send([np.full(4, number, np.int32)], target)
        received.append(target.clone())
    assert [one.tolist() for one in received] == [[number] * 4 for number in range(3 * STAGING_BUFFERS)]
