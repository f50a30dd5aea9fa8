"""KV pages: what is written is found, moves may overlap, a copied page is the page."""

from __future__ import annotations

import pytest
import torch

from specsot.model.kv import KVPages

pytestmark = pytest.mark.torch


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


def test_clear_page_leaves_zeros(kv: KVPages) -> None:
    kv.write(0, torch.arange(16), torch.full((16, 2, 2, 3), torch.nan))
    kv.clear_page(0)
    assert not kv.layers[0][:, 0].any()
    assert kv.layers[0][:, 1].isnan().all()


def test_bytes_counts_every_layer(kv: KVPages) -> None:
    assert kv.bytes == 2 * (2 * 4 * 8 * 2 * 3) * 4
