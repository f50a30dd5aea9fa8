"""Several streams as one: order, ends, errors, and who is left waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from specsot.errors import Overloaded, Unavailable
from specsot.events import MergedText, Numbered
from specsot_master.http.calls import merged_events


class Told:
    """A stream of so many events, a turn before each; then an error, if one is given."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count, self.error = count, error
        self.told, self.closed = 0, False

    async def events(self) -> AsyncGenerator[Numbered, None]:
        try:
            for number in range(self.count):
                self.told += 1
                yield Numbered(number, MergedText(number, "x"))
                await asyncio.sleep(0)
            if self.error:
                raise self.error
        finally:
            self.closed = True


@pytest.mark.parametrize("counts", [(3,), (3, 0), (5, 2, 7), (0, 0), (1,) * 20])
async def test_every_event_is_delivered_once_and_in_order(counts: tuple[int, ...]) -> None:
    streams = [Told(count) for count in counts]
    got = [one async for one in merged_events([stream.events() for stream in streams])]
    for place, count in enumerate(counts):
        assert [numbered.number for index, numbered in got if index == place] == list(range(count))
    assert len(got) == sum(counts)


async def test_a_refusal_comes_before_anything_else() -> None:
    streams = [Told(5), Told(5), Told(0, Overloaded("full"))]
    events = merged_events([stream.events() for stream in streams])
    with pytest.raises(Overloaded):
        await anext(events)
    assert all(stream.closed for stream in streams)


async def test_an_error_ends_all() -> None:
    streams = [Told(100), Told(3, Unavailable("broke"))]
    events = merged_events([stream.events() for stream in streams])
    got = [(await anext(events))[0] for _ in range(6)]
    with pytest.raises(Unavailable):
        await anext(events)
    assert got.count(1) == 3
    assert all(stream.closed for stream in streams)


async def test_no_stream_runs_ahead_of_the_reader() -> None:
    streams = [Told(100), Told(100)]
    events = merged_events([stream.events() for stream in streams])
    for _ in range(10):
        await anext(events)
        await asyncio.sleep(0)
    assert sum(stream.told for stream in streams) <= 12
    await events.aclose()
    assert all(stream.closed for stream in streams)


async def test_a_reader_that_is_cancelled_closes_all() -> None:
    held = [asyncio.Event(), asyncio.Event()]
    closed: list[int] = []

    async def waiting(place: int) -> AsyncGenerator[Numbered, None]:
        try:
            await held[place].wait()
            yield Numbered(0, MergedText(0, "x"))
        finally:
            closed.append(place)

    async def read() -> None:
        async for _ in merged_events([waiting(0), waiting(1)]):
            pass

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert sorted(closed) == [0, 1]
