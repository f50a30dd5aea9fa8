"""A loop in a thread of its own: what becomes of work that nobody waited for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator

import pytest

from specsot_app.runtime import BackgroundLoop


def test_what_still_runs_is_ended_before_the_loop_is() -> None:
    """Else its `finally` runs when the interpreter ends, where another thread may hold what it needs."""
    background, begun, ended = BackgroundLoop(), threading.Event(), list[str]()

    async def write_on() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            ended.append(threading.current_thread().name)

    background.start(write_on())
    begun.wait()
    background.stop()
    assert ended == ["specsot"]


async def test_cancelling_a_step_closes_its_source() -> None:
    """A cancelled step may still have to close a connection."""
    background, begun, ended = BackgroundLoop(), asyncio.Event(), list[str]()
    loop = asyncio.get_running_loop()

    async def write_on() -> AsyncGenerator[int]:
        try:
            loop.call_soon_threadsafe(begun.set)
            await asyncio.Event().wait()
            yield 1
        finally:
            for _ in range(3):
                await asyncio.sleep(0)
            ended.append("in order")

    async def read() -> None:
        async for _ in background.iterate(write_on()):
            pass

    reading = asyncio.ensure_future(read())
    await begun.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert ended == ["in order"]
    await asyncio.to_thread(background.stop)
