"""Sums of what several devices computed: each adds all parts in one order; counts let nobody pass early."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
from specsot_kernels.gpu.exchange import OPEN, PLACES, PeerSums, reach_each_other  # noqa: E402

ROUNDS = 5


def test_every_part_adds_all_parts() -> None:
    """The last one finds that the others have counted; for them nobody waits here, one after the other."""
    parts, rows, size = 3, 4, 40
    exchange = PeerSums([DEVICE] * parts, rows, size, torch.float16)
    hidden = [torch.ones(rows, size, dtype=torch.float16, device=DEVICE) for _ in range(parts)]
    for turn in range(ROUNDS):
        for part in range(parts):
            exchange.own(part, turn % PLACES, rows).normal_()
        addends = [exchange.own(part, turn % PLACES, rows).float() for part in range(parts)]
        wanted = (sum(addends[1:], addends[0]) + hidden[0]).half()
        for part in range(parts):
            if part < parts - 1:
                exchange.peer_counts[part].fill_(OPEN)
            exchange.add(part, turn % PLACES, hidden[part])
        assert all(each.equal(wanted) for each in hidden)
    assert exchange.peer_counts[2][:2].eq(ROUNDS).all()


def test_one_that_was_alone_leaves_counts_at_zero() -> None:
    exchange = PeerSums([DEVICE] * 2, 2, 8, torch.float16)
    with exchange.alone(0):
        exchange.add(0, 0, torch.zeros(2, 8, dtype=torch.float16, device=DEVICE))
    assert not any(each.any() for each in (*exchange.peer_counts, *exchange.counts))


class Driver:
    """CUDA's, of GPUs 0 to 2; 0 and 1 are behind a link that has atomics. status: of what is asked last."""

    status = 0

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = 10 + number
        return 0

    def cuDeviceGetP2PAttribute(self, able: Any, attribute: int, source: Any, target: Any) -> int:
        assert attribute == 3
        able._obj.value = {source.value, target.value} == {10, 11}
        return self.status


def test_gpus_that_cannot_count_in_one_another_s_memory_do_not_wait_there() -> None:
    """As over PCIe, where they do read it."""
    gpus, driver = [torch.device("cuda", number) for number in range(3)], Driver()

    def none() -> Driver:
        raise OSError("libcuda.so.1: no such file")

    def reach(*numbers: int, read: bool = True, asked: Callable[[], Driver] = lambda: driver) -> bool:
        return reach_each_other([gpus[one] for one in numbers], lambda *pair: read, asked)

    assert reach(0, 1)
    assert not reach(0, 1, 2)
    assert not reach(0, 1, read=False)
    assert not reach(0, 1, asked=none)
    driver.status = 1
    assert not reach(0, 1)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_wait_for_one_another() -> None:
    """Hundreds of sums, launched on one GPU long before the other, of other rows each time."""
    devices = [torch.device("cuda", number) for number in (0, 1)]
    exchange = PeerSums(devices, 64, 4096, torch.bfloat16)
    addends = [torch.randn(100, 64, 4096, device=device).bfloat16() for device in devices]
    for part in (0, 1):
        with exchange.alone(part):  # compiles
            exchange.add(part, 0, torch.zeros(64, 4096, dtype=torch.bfloat16, device=devices[part]))
    hidden = [torch.zeros(64, 4096, dtype=torch.bfloat16, device=device) for device in devices]
    for part in (0, 1):
        for turn in range(100):
            rows = 1 + turn * 7 % 64
            exchange.own(part, turn % PLACES, rows).copy_(addends[part][turn, :rows])
            exchange.add(part, turn % PLACES, hidden[part][:rows])
    wanted = torch.zeros_like(hidden[0])
    for turn in range(100):
        rows = 1 + turn * 7 % 64
        both = addends[0][turn, :rows].float() + addends[1][turn, :rows].to(devices[0]).float()
        wanted[:rows] = (both + wanted[:rows].float()).bfloat16()
    assert hidden[0].equal(wanted)
    assert hidden[1].cpu().equal(wanted.cpu())
