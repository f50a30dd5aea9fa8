"""A worker that is told to load layers ahead: fetched first, loaded bit by bit, then reported."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from structlog.testing import capture_logs

from specsot.errors import ModelError
from specsot.members import Progress, Range, StandBy
from specsot.transport.links import Exchange, LocalDialer
from specsot_worker.worker import Worker


class Loader:
    """room: for so many layers."""

    name = "w"

    def __init__(self, room: int) -> None:
        self.room, self.did = room, list[str]()

    def fetch(self, layers: Range) -> None:
        self.did.append(f"fetch {layers}")

    def preload(self, layers: Range | None = None) -> bool:
        assert layers
        loaded = len(self.did) - 1
        if loaded == len(layers):
            return False
        if loaded == self.room:
            raise ModelError("no room")
        self.did.append(f"load {layers.first + loaded}")
        return True


class Uplink:
    def __init__(self) -> None:
        self.said, self.heard = list[object](), asyncio.Event()

    async def send(self, message: object) -> None:
        self.said.append(message)
        self.heard.set()

    async def close(self) -> None: ...


def worker_of(loader: Any, compute: ThreadPoolExecutor) -> Worker:
    return Worker(loader, LocalDialer("w", Exchange()), compute)


async def test_layers_are_fetched_loaded_and_reported() -> None:
    loader, uplink = Loader(room=3), Uplink()
    with ThreadPoolExecutor(1) as compute:
        await worker_of(loader, compute).prepare(StandBy(4, Range(2, 5)), uplink)
        await uplink.heard.wait()
    assert loader.did == ["fetch 2:5", "load 2", "load 3", "load 4"]
    assert uplink.said == [Progress(4, 3, 3, layers=Range(2, 5))]


async def test_that_there_is_no_room_for_layers_is_reported() -> None:
    loader, uplink = Loader(room=1), Uplink()
    with ThreadPoolExecutor(1) as compute, capture_logs() as lines:
        worker = worker_of(loader, compute)
        await worker.prepare(StandBy(4, Range(2, 5)), uplink)
        assert worker._preloading
        await worker._preloading
    assert (lines[-1]["event"], lines[-1]["reason"]) == ("nothing more is loaded ahead", "no room")
    assert uplink.said == [Progress(4, 0, 3, layers=Range(2, 5))]
