"""Runs a member's tensor work off the event loop, one job at a time, with a deadline; a bug ends an epoch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import structlog

from specsot.errors import Hung, SpecsotError, Unavailable

log = structlog.get_logger()

TICK_SECONDS = 1.0  # seconds between checks of a computation's deadline, which is at least ten of them
RUST_PANIC = "PanicException"  # of Rust's: no Exception, and of no module one could import it from


@dataclass(slots=True)
class _Job:
    """begun: its turn has come."""

    name: str
    work: Callable[..., Any]
    begun: bool = False

    def __call__(self, *arguments: Any) -> Any:
        """Raises SpecsotError, whatever the work raises."""
        self.begun = True
        try:
            return self.work(*arguments)
        except SpecsotError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != RUST_PANIC:
                raise
            raise explain_failure(self.name, error) from error


def explain_failure(name: str, error: BaseException) -> Unavailable:
    """What went wrong in this member, as one line for everybody; its log has the rest.

    torch's RuntimeError and a MemoryError say in words what is missing. Anything else is a bug of ours, whose
    words might show a prompt.
    """
    log.error("a bug", name=name, exc_info=error)
    if isinstance(error, RuntimeError | MemoryError) and str(error):
        return Unavailable(f"{name} failed: {str(error).splitlines()[0]}")
    return Unavailable(f"{name} failed: {type(error).__name__} (its log says where)")


class Compute:
    """name: whose work it is, for the one clear line about what goes wrong."""

    def __init__(self, name: str, executor: Executor) -> None:
        self._name, self._executor = name, executor

    async def run(self, work: Callable[..., Any], *arguments: Any, within: float | None = None) -> Any:
        """within: seconds it may take once its turn has come. Raises Hung, Unavailable."""
        job = _Job(self._name, work)
        try:
            done = asyncio.get_running_loop().run_in_executor(self._executor, job, *arguments)
            if within is not None:
                await self._wait(job, done, within)
            return await done
        except RuntimeError as error:
            raise explain_failure(self._name, error) from error

    async def _wait(self, job: _Job, done: asyncio.Future[Any], seconds: float) -> None:
        """Tick by tick: of the time for which a whole process is frozen one tick counts."""
        left = seconds
        while left > 0:
            await asyncio.wait((done,), timeout=min(TICK_SECONDS, left))
            if done.done():
                return
            left -= TICK_SECONDS * job.begun
        raise Hung(f"{self._name} hangs: what it computes should have been done after {seconds:.0f} s")
