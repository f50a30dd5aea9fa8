"""A loop in a thread of its own: what becomes of work that nobody waited for."""

from __future__ import annotations

import asyncio
import threading

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
