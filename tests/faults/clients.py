"""Clients of every habit: they read, dawdle, hang up and come back, cancel, have little time, or are hostile.

Whatever they see goes into the history.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace

from specsot.errors import Cancelled, Overloaded, SpecsotError, Unavailable
from specsot.events import Finished
from specsot.params import Ask
from specsot_master.engine import Caller
from tests.faults.history import Asked, Ended, Got, Resumed, Stopped
from tests.faults.world import World

PATIENT = 90.0  # seconds for which a call is tried again while nobody can take it


@dataclass(frozen=True, slots=True)
class Habit:
    """pause: seconds between two reads. leave: after so many events hangs up; back: seconds until it returns.
    stop: after so many events cancels. timeout: seconds it gives.
    once: does not try again. storm: cancels so often. twin: seconds until it makes the same call a second
    time, while it goes on reading. pries: reads what others asked, by their ids. refused: must be.
    """

    pause: float = 0.0
    leave: int | None = None
    back: float | None = None
    stop: int | None = None
    timeout: float | None = None
    once: bool = False
    storm: int = 1
    twin: float | None = None
    pries: bool = False
    refused: bool = False


class Client:
    def __init__(self, world: World, id: str, ask: Ask, habit: Habit, name: str = "") -> None:
        """name: under which the history has it, where that is not the request's id."""
        self._world, self._request, self._ask, self._habit = world, id, ask, habit
        self._id = name or id
        self._note = world.recorder.note
        self._got = 0

    async def live(self) -> None:
        """From the first call to the last word."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._live())
            if self._habit.twin is not None:
                group.create_task(self._call_twice(self._habit.twin))
            if self._habit.pries:
                group.create_task(self._pry())

    async def _call_twice(self, later: float) -> None:
        await asyncio.sleep(later)
        habit = replace(self._habit, once=True)
        await Client(self._world, self._request, self._ask, habit, f"{self._id} again")._live()

    async def _pry(self) -> None:
        """Whoever knows an id may read along; nobody is disturbed by it."""
        for other in ("r0", "r1", "nobody"):
            house = self._world.house
            events = house.desk.generate(None, Caller(other), 0)
            with suppress(SpecsotError):
                for _ in range(3):
                    await house.next(events)
            house.close(events)
            await asyncio.sleep(1.0)

    async def _live(self) -> None:
        habit = self._habit
        self._note(Asked(self._id, self._ask, habit.timeout, habit.twin is not None, habit.refused))
        until = self._now + PATIENT
        while True:
            try:
                if await self._read():
                    return
                if self._habit.back is None or not self._ask.resumable:
                    self._note(Ended(self._id, left=True))
                    return
                await asyncio.sleep(self._habit.back)
            except (Unavailable, Overloaded) as error:
                again = not self._habit.once and (self._got == 0 or self._ask.resumable)
                if not again or self._now > until or self._habit.timeout:
                    self._end(error)
                    return
                await asyncio.sleep(1.0)
            except Cancelled as error:  # somebody else reads it
                if habit.once or self._now > until:
                    self._end(error)
                    return
                await asyncio.sleep(1.0)
            except SpecsotError as error:
                self._end(error)
                return

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _end(self, error: SpecsotError) -> None:
        self._note(Ended(self._id, type(error).__name__, str(error)))

    async def _read(self) -> bool:
        """One call; whether it was the last."""
        house, habit = self._world.house, self._habit
        if house.dead.is_set():
            raise Unavailable("nobody is there")
        if self._got:
            self._note(Resumed(self._id, self._got))
            events = house.desk.generate(None, Caller(self._request), self._got)
        else:
            events = house.desk.generate(self._ask, Caller(self._request, self._request, habit.timeout))
        try:
            while (numbered := await house.next(events)) is not None:
                self._got += 1
                for one in self._world.between.told(numbered):
                    self._note(Got(self._id, one))
                if isinstance(numbered.event, Finished):
                    break
                if habit.pause:
                    await asyncio.sleep(habit.pause)
                if self._got == habit.stop:
                    self._note(Stopped(self._id))
                    for _ in range(habit.storm):
                        house.cancel(self._request)
                if self._got == habit.leave:
                    return False
        finally:
            house.close(events)
        self._note(Ended(self._id))
        return True
