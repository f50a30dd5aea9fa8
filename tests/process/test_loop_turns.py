"""A burst of coroutines takes turns, each in an iteration of the event loop of its own."""

from __future__ import annotations

import asyncio

from specsot.tasks import LoopTurns


class Iterations:
    """Counts the iterations of the running event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._count()

    def _count(self) -> None:
        self.count += 1
        self._next = asyncio.get_running_loop().call_soon(self._count)

    def stop(self) -> None:
        self._next.cancel()


async def test_each_turn_has_an_iteration_of_its_own() -> None:
    turns = LoopTurns()
    iterations = Iterations()
    seen: list[tuple[int, int]] = []

    async def take(number: int) -> None:
        await turns.wait()
        seen.append((number, iterations.count))

    await asyncio.gather(*(take(number) for number in range(5)))
    iterations.stop()
    assert [number for number, _ in seen] == [0, 1, 2, 3, 4]
    assert len({count for _, count in seen}) == 5


async def test_alone_nothing_waits() -> None:
    turns = LoopTurns()
    iterations = Iterations()
    before = iterations.count
    await turns.wait()
    assert iterations.count == before
    iterations.stop()


async def test_a_turn_of_what_was_cancelled_goes_to_the_next() -> None:
    turns = LoopTurns()
    done: list[int] = []

    async def take(number: int) -> None:
        await turns.wait()
        done.append(number)

    tasks = [asyncio.create_task(take(number)) for number in range(4)]
    await asyncio.sleep(0)
    for number in (1, 2):
        tasks[number].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done == [0, 3]
    await asyncio.wait_for(take(4), 60)
    assert done == [0, 3, 4]
