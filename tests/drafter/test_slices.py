"""A drafter gives stages their slices of its head, over however slow a link, and says how far it is."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from specsot.members import Configuration, Head, Progress, Range, Ready, Stage
from specsot_drafter.drafter import Drafter
from tests.faults.virtual import Labour, run

TAPS, SECONDS = (1, 3, 5), 100.0  # of each slice; a master waits 180 s for news


class SlowLink:
    async def send(self, message: object) -> None: ...

    async def close(self) -> None:
        await asyncio.sleep(SECONDS)


class Dialer:
    async def dial(self, address: str, epoch: int, kind: str = "worker") -> Any:
        return SlowLink()


class Uplink:
    def __init__(self) -> None:
        self.said = list[tuple[float, object]]()

    async def send(self, message: object) -> None:
        self.said.append((asyncio.get_running_loop().time(), message))

    async def close(self) -> None: ...


def test_a_master_hears_of_every_slice_that_a_stage_has() -> None:
    async def form() -> list[tuple[float, object]]:
        slices = dict.fromkeys(TAPS, SimpleNamespace(nbytes=16 << 20))
        engine = SimpleNamespace(free_pages=4)
        loader: Any = SimpleNamespace(
            name="d", tap_slices=lambda: slices, make_engine=lambda configuration: engine
        )
        stages, uplink = (Stage("w", "w:1", Range(0, 8)),), Uplink()
        drafter = Drafter(loader, Dialer(), Labour(lambda work: work()))
        await drafter.configure(Configuration(1, "d", stages, 4, 4, 4, head=Head(TAPS, 8)), uplink)
        return uplink.said

    said = run(form())
    told = [message for _, message in said]
    assert told == [*(Progress(1, done, 4) for done in (0, 1, 2, 4)), Ready(1)]
    times = [at for at, _ in said]
    assert max(late - soon for soon, late in pairwise(times)) <= SECONDS + 2
