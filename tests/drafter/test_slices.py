"""A drafter gives stages their slices of its head, over however slow a link, and says how far it is."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from specsot.errors import Unavailable
from specsot.members import Configuration, Head, Progress, Range, Ready, Stage
from specsot_drafter.drafter import Drafter
from tests.faults.virtual import Labour, run

TAPS, SECONDS = (1, 3, 5), 100.0  # of each slice; a master waits 180 s for news


class SlowLink:
    delivers = True

    async def send(self, message: object) -> None: ...

    async def close(self) -> bool:
        await asyncio.sleep(SECONDS)
        return self.delivers

    async def dial(self, address: str, epoch: int, kind: str = "worker") -> Any:
        return self


class Uplink:
    def __init__(self) -> None:
        self.said = list[tuple[float, object]]()

    async def send(self, message: object) -> None:
        self.said.append((asyncio.get_running_loop().time(), message))

    async def close(self) -> None: ...


async def form(link: SlowLink, uplink: Uplink) -> None:
    slices = dict.fromkeys(TAPS, SimpleNamespace(nbytes=16 << 20))
    engine = SimpleNamespace(free_pages=4)
    loader: Any = SimpleNamespace(
        name="d", tap_slices=lambda: slices, make_engine=lambda configuration: engine
    )
    drafter = Drafter(loader, link, Labour(lambda work: work()))
    stages = (Stage("w", "w:1", Range(0, 8)),)
    await drafter.configure(Configuration(1, "d", stages, 4, 4, 4, head=Head(TAPS, 8)), uplink)


def test_a_master_receives_every_slice_that_a_stage_has() -> None:
    uplink = Uplink()
    run(form(SlowLink(), uplink))
    told = [message for _, message in uplink.said]
    assert told == [*(Progress(1, done, 4) for done in (0, 1, 2, 4)), Ready(1)]
    times = [at for at, _ in uplink.said]
    assert max(late - soon for soon, late in pairwise(times)) <= SECONDS + 2


def test_a_slice_that_a_stage_did_not_take_is_not_counted_and_the_epoch_ends_at_once() -> None:
    link, uplink = SlowLink(), Uplink()
    link.delivers = False
    with pytest.raises(Unavailable, match="w did not take its slice of the head, of layer 1"):
        run(form(link, uplink))
    assert [message for _, message in uplink.said] == [Progress(1, 0, 4)]
