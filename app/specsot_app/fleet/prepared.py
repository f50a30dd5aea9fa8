"""Starts processes of a fleet, and one of them before its command line is known.

To choose a GPU and the KV memory, `specsot serve` imports torch, which takes seconds. A prepared process
imports torch and the packages of members at the same time, and is given its command line afterwards.
Importing this module imports neither torch nor gRPC.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from specsot_app.runtime import new_loop

if TYPE_CHECKING:
    from specsot_app.fleet.service_specs import Service

# Environment variables that are added to those of this process, as (name, value).
Variables = tuple[tuple[str, str], ...]


async def launch(words: Sequence[str], environment: Variables, stdin: int = DEVNULL) -> Process:
    """Start a process that runs a module and ends with this process; return it.

    The process has a session of its own, so that Ctrl-C reaches only this process, which ends the services in
    order. Its output is a pipe.

    words: The module to run, and its arguments. Without words, the process imports what members need, and
        then reads the words from its standard input.
    environment: Variables that are added to this process's environment.
    stdin: The process's standard input, a file number or a constant of `subprocess`.
    """
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "specsot_app.fleet.die_with_parent",
        str(os.getpid()),
        *words,
        stdin=stdin,
        stdout=PIPE,
        stderr=STDOUT,
        env={**os.environ, **dict(environment)},
        start_new_session=True,
        limit=1 << 20,
    )


class PreparedProcess:
    """A process that imports what members need, and then waits for the service that it will run. Close it in
    every case.

    environment: Variables that are added to this process's environment. They cannot be changed later, since
        torch reads some of them while it is imported.
    """

    def __init__(self, environment: Variables) -> None:
        """Start the process, and wait until the system has started it. Raises OSError if the system cannot.

        environment: See the class.
        """
        self._environment = environment
        # The process belongs to the loop that started it, so the fleet must run on this loop, too.
        self.loop: asyncio.AbstractEventLoop = new_loop()
        self._process: Process | None = self.loop.run_until_complete(launch((), environment, PIPE))

    def suits(self, service: Service) -> bool:
        """Return whether this process can run the service: their environments are equal, and no service was
        given before.

        service: A service of this machine.
        """
        return self._process is not None and service.environment == self._environment

    async def run(self, service: Service) -> Process:
        """Let the process run a service that suits it; return the process, which `close` leaves alone from
        now on. If the process has ended by itself, it is returned, too.

        service: The service to run.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        self._process = None
        with suppress(ConnectionError):
            process.stdin.write(json.dumps([service.module, *service.arguments]).encode() + b"\n")
            await process.stdin.drain()
        process.stdin.close()
        return process

    async def end(self) -> None:
        """End the process if it was given no service."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def close(self) -> None:
        """End the process if it was given no service, and close the loop unless it is closed."""
        if not self.loop.is_closed():
            self.loop.run_until_complete(self.end())
            self.loop.close()
