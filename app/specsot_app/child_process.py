"""A service as a child process: started, its lines passed on, ended with a grace period."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from collections.abc import Callable

from specsot.errors import ModelError, SpecsotError, Unavailable
from specsot_app.service_specs import Service

OnLine = Callable[[str, str], None]  # (service, line)

WRONG_INPUT = 2  # the exit status of a service that was given something unusable


class ChildProcess:
    """A running service. `last` is its newest line of output."""

    def __init__(self, service: Service, process: Process, tell: OnLine) -> None:
        self.service = service
        self._process, self._tell = process, tell
        self._lines: deque[str] = deque(maxlen=20)
        self._listening = asyncio.create_task(self._listen())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, once it is gone."""
        return self._process.returncode

    async def ended(self) -> SpecsotError:
        """Wait until the child is gone; the error says what its last words were."""
        status = await self._process.wait()
        await self._listening
        last = self._lines[-1] if self._lines else f"exit status {status}"
        line = last.removeprefix(f"specsot-{self.service.name.split('-')[0]}: ")
        kind = ModelError if status == WRONG_INPUT else Unavailable
        return kind(f"{self.service.name}: {line}")

    async def end(self) -> None:
        """Ask it to end, wait, and insist after the grace period."""
        if self._process.returncode is None:
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), self.service.grace)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._listening

    async def _listen(self) -> None:
        """Read its output to the end, so that it never blocks on a full pipe."""
        assert self._process.stdout is not None
        async for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            if line:
                self._lines.append(line)
                self._tell(self.service.name, line)


async def start(service: Service, tell: OnLine) -> ChildProcess:
    """Start one service in a session of its own: Ctrl-C reaches only us, and we end it in order."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "specsot_app.die_with_parent",
        str(os.getpid()),
        service.module,
        *service.arguments,
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        env={**os.environ, **dict(service.environment)},
        start_new_session=True,
        limit=1 << 20,
    )
    return ChildProcess(service, process, tell)
