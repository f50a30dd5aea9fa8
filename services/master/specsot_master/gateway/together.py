"""Several streams of events as one.

Refuses to know what the events say.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from specsot.events import Numbered

RequestEvents = AsyncGenerator[Numbered, None]


async def merge_streams(streams: Sequence[RequestEvents]) -> AsyncGenerator[tuple[int, Numbered], None]:
    """Events as they come, each with its stream's place; never more than one ahead of the reader.

    An error in one ends all. What is refused at once is refused before any event of the others is told.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for numbered in only:
                yield 0, numbered
        return
    waiting = {asyncio.ensure_future(anext(stream)): place for place, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in done if _has_ended(task)]:
                del waiting[task]
            for task in sorted(done & waiting.keys(), key=waiting.__getitem__):
                place = waiting.pop(task)
                yield place, task.result()
                waiting[asyncio.ensure_future(anext(streams[place]))] = place
    finally:
        await _close_streams(list(waiting), streams)


def _has_ended(task: asyncio.Future[Numbered]) -> bool:
    """Whether the stream behind it has ended. Raises what it ended with, if that is an error."""
    error = task.exception()
    if error is not None and not isinstance(error, StopAsyncIteration):
        raise error
    return error is not None


async def _close_streams(waiting: list[asyncio.Future[Numbered]], streams: Sequence[RequestEvents]) -> None:
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for stream in streams:
        await stream.aclose()
