"""A member's tensor work: off the event loop, one job at a time, and not for ever.

Refuses to know what is computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from specsot.errors import Hung, SpecsotError, Unavailable

TICK = 1.0  # seconds


@dataclass(slots=True)
class _Job:
    """begun: its turn has come."""

    work: Callable[..., Any]
    begun: bool = False

    def __call__(self, *arguments: Any) -> Any:
        self.begun = True
        return self.work(*arguments)


class Compute:
    """name: whose work it is, for the one clear line about what goes wrong."""

    def __init__(self, name: str, executor: Executor) -> None:
        self._name, self._executor = name, executor

    async def run(self, work: Callable[..., Any], *arguments: Any, within: float | None = None) -> Any:
        """within: seconds it may take once its turn has come. Raises Hung, Unavailable."""
        job = _Job(work)
        done = asyncio.get_running_loop().run_in_executor(self._executor, job, *arguments)
        try:
            if within is not None:
                await self._wait(job, done, within)
            return await done
        except SpecsotError:
            raise
        except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError for out of memory too
            raise Unavailable(f"{self._name} failed: {str(error).splitlines()[0]}") from error

    async def _wait(self, job: _Job, done: asyncio.Future[Any], seconds: float) -> None:
        """Tick by tick: of the time for which a whole process is frozen one tick counts."""
        left = seconds
        while left > 0:
            await asyncio.wait((done,), timeout=min(TICK, left))
            if done.done():
                return
            left -= TICK * job.begun
        raise Hung(f"{self._name} hangs: what it computes should have been done after {seconds:.0f} s")
