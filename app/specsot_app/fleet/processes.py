"""Starts a fleet of processes, waits until its ring is complete, and ends it."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from specsot.core.info import Info
from specsot.errors import Cancelled, ModelError, SpecsotError, Unavailable
from specsot.events import Numbered
from specsot.params import Ask
from specsot.transport.grpc_client import MasterClient
from specsot.transport.grpc_server import check_free
from specsot_app.core.device_map import address_of
from specsot_app.fleet.options import ClientOptions, FleetOptions, Models
from specsot_app.fleet.service_specs import LOOPBACK, PRIVATE, Service, Serving, processes_of, services_of

# Called with a service's name and a line of its output.
OnLine = Callable[[str, str], None]

# Exit status of a service that was given an unusable argument or model.
WRONG_INPUT = 2


class ChildProcess:
    """A running service, whose newest lines of output are kept."""

    def __init__(self, service: Service, process: Process, tell: OnLine) -> None:
        self.service = service
        self._process = process
        self._tell = tell
        self._lines: deque[str] = deque(maxlen=20)
        self._listening = asyncio.create_task(self._listen())

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        return self._process.returncode

    async def wait_ended(self) -> SpecsotError:
        """Wait until the child has ended; return an error with its last line of output.

        The error is a ModelError if the child's input was unusable, else Unavailable.
        """
        status = await self._process.wait()
        # `wait` does not cancel the reading if this waiter is cancelled, so that the next waiter gets the
        # last lines.
        await asyncio.wait([self._listening])
        last = self._lines[-1] if self._lines else f"exit status {status}"
        # A process that a signal ended could not print a reason.
        if status < 0:
            last = f"ended by signal {-status}"
        line = last.removeprefix(f"specsot-{self.service.name.split('-')[0]}: ")
        kind = ModelError if status == WRONG_INPUT else Unavailable
        return kind(f"{self.service.name}: {line}")

    async def end(self) -> None:
        """Ask the child to end (SIGTERM), wait for the grace period, then kill it."""
        if self._process.returncode is None:
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), self.service.grace)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._listening

    async def _listen(self) -> None:
        """Read the child's output to its end, so that the child never blocks on a full pipe."""
        assert self._process.stdout is not None
        async for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            if line:
                self._lines.append(line)
                self._tell(self.service.name, line)


async def start(service: Service, tell: OnLine) -> ChildProcess:
    """Start one service in a session of its own, so that Ctrl-C reaches only this process, which ends the
    services in order.

    tell: receives each line of output.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "specsot_app.fleet.die_with_parent",
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


T = TypeVar("T")

# Called with a kind of thing, how many of them are present, and of how many.
Watch = Callable[[str, int, int], None]
# Called with the services of other machines that have not joined yet.
Absent = Callable[[Sequence[Service]], None]

# Ends, and seconds. A member that ends ENDS times in a row, each time within SOON seconds of its start, is
# not started
# again. Untuned.
ENDS = 3
SOON = 1800.0
# Seconds between checks of a ring that is not complete yet. Untuned.
PAUSE = 0.05
# Seconds that a child has to end after a call to it failed, so that its reason can be reported. Untuned.
LAST_WORDS = 2.0


def keep_quiet(service: str, line: str) -> None:
    """Ignore a line of output; `ChildProcess` keeps the last lines anyway."""


def require_members(absent: Sequence[Service]) -> None:
    """Ignore which services have not joined."""


class ProcessFleet:
    """Processes of a master, workers and drafters, and a client of the master.

    children: the processes on this machine, the master first.
    """

    def __init__(
        self, children: list[ChildProcess], client: MasterClient, stack: AsyncExitStack, tell: OnLine
    ) -> None:
        self.children = children
        self._client = client
        self._stack = stack
        self._tell = tell

    @classmethod
    async def start(
        cls,
        options: FleetOptions,
        models: Models,
        port: int | None = None,
        tell: OnLine = keep_quiet,
        http_port: int | None = None,
        serving: Serving = PRIVATE,
        watch: Watch | None = None,
        absent: Absent = require_members,
    ) -> ProcessFleet:
        """Start every service that runs on this machine, and wait until the ring is complete.

        port: port of the master; None takes a free one.
        http_port: port of the master's HTTP server; None starts none.
        watch: receives progress. absent: receives the services of other machines that are missing.
        Raises what a service died of, in one line; then no process is left running.
        """
        port = port or free_port()
        # If another process listened there, the members would join it.
        check_free(serving.listens(port))
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specsot-")))
            children: list[ChildProcess] = []
            stack.push_async_callback(end_all, children)
            services = services_of(options, models, port, folder, http_port, serving)
            for service in processes_of(services):
                if service.host is None:
                    children.append(await start(service, tell))
            whole = ready_client(services, serving.client, watch, absent)
            client = await unless_one_ends(children, whole)
            stack.push_async_callback(client.close)
            return cls(children, client, stack.pop_all(), tell)
        raise AssertionError("unreachable: the stack passes errors on")

    def generate(self, ask: Ask) -> AsyncIterator[Numbered]:
        """Yield the events of one request, in order."""
        return self._client.generate(ask)

    async def cancel(self, request: str) -> bool:
        """Cancel a request."""
        return await self._client.cancel(request)

    async def info(self) -> Info:
        """Return the state of the fleet."""
        return await self._client.info()

    async def keep_running(self) -> SpecsotError:
        """Restart members that end, until the master ends or a member cannot be restarted; return why."""
        return await keep_running(self.children, self._tell, 1)

    async def close(self) -> None:
        """Close the client and end all processes."""
        await self._stack.aclose()


def free_port() -> int:
    """Return a TCP port that no process listens on at this moment.

    The port lies below the ports that Linux gives to outgoing connections (32768 and up), so that no
    connection takes it in the second that a master needs until it listens.
    """
    drawn = (secrets.choice(range(20_000, 32_768)) for _ in range(64))
    return next(port for port in drawn if is_free(port))


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Return whether no process listens at this port at this moment."""
    try:
        check_free(address_of(host, port))
    except Unavailable:
        return False
    return True


async def ready_client(
    services: Sequence[Service], trust: ClientOptions, watch: Watch | None, absent: Absent
) -> MasterClient:
    """Return a client of the master, the first of `services`, once all rings are complete and all members
    have joined.

    absent: called at first, and whenever the set of missing services of other machines changes.
    """
    master, *members = services
    missing = [one for one in members if one.host is not None]
    absent(missing)
    while True:
        try:
            client = await trust.connect(master.address)
            info = await client.info()
            joined = {member.name for member in info.members}
            if watch:
                watch("services", 1 + len(info.members) - (not info.ready), len(services))
            if not info.waiting_for and joined.issuperset(one.name for one in members):
                return client
            await client.close()
            if missing != (missing := [one for one in missing if one.name not in joined]):
                absent(missing)
        except (Unavailable, Cancelled):
            # The master is still starting; or it has ended, which `unless_one_ends` notices.
            pass
        await asyncio.sleep(PAUSE)


async def unless_one_ends(children: list[ChildProcess], work: Coroutine[Any, Any, T]) -> T:
    """Return the work's result. Raises why a child ended, if one ends first, or what the work raises."""
    working = asyncio.ensure_future(work)
    ending = asyncio.ensure_future(first_end(children))
    try:
        await asyncio.wait([working, ending], return_when=asyncio.FIRST_COMPLETED)
        # The work may have failed because a child is about to end, whose last line says why.
        if working.done() and working.exception():
            await asyncio.wait([ending], timeout=LAST_WORDS)
        if ending.done() and not (working.done() and working.exception() is None):
            raise ending.result()[1]
        return working.result()
    finally:
        working.cancel()
        ending.cancel()


async def end_all(children: list[ChildProcess]) -> None:
    """End the master first, so that answers can finish while members still run; then end the members
    concurrently.
    """
    await asyncio.gather(*(child.end() for child in children[:1]))
    await asyncio.gather(*(child.end() for child in children[1:]))


async def keep_running(children: list[ChildProcess], tell: OnLine, vital: int = 0) -> SpecsotError:
    """Restart members that end, while the others continue.

    Return an error when one of the first `vital` children ends, or a member ends that cannot be restarted:
    one with unusable input, or one that ended ENDS times in a row soon after its start.
    """
    now = asyncio.get_running_loop().time
    lives = Lives()
    started = [now()] * len(children)
    while True:
        place, error = await first_end(children)
        service = children[place].service
        often = lives.too_short(place, now() - started[place])
        if place < vital or isinstance(error, ModelError):
            return error
        if often:
            told = f"{ENDS} times in a row within {SOON / 60:.0f} minutes of its start"
            tell(service.name, f"{error}, {told}: it is given up")
            return error
        tell(service.name, f"{error}: it is started again")
        children[place], started[place] = await start(service, tell), now()


class Lives:
    """Counts each member's short lives in a row. Loading alone may take minutes and then run out of
    memory.
    """

    def __init__(self) -> None:
        self._short = Counter[int]()

    def too_short(self, member: int, seconds: float) -> bool:
        """Record an end; return whether restarting the member is pointless.

        member: place among the children. seconds: how long it ran.
        """
        self._short[member] = self._short[member] + 1 if seconds < SOON else 0
        return self._short[member] == ENDS


async def first_end(children: list[ChildProcess]) -> tuple[int, SpecsotError]:
    """Wait until a child ends; return its place and why it ended."""
    endings = [asyncio.ensure_future(child.wait_ended()) for child in children]
    try:
        await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        return next((place, one.result()) for place, one in enumerate(endings) if one.done())
    finally:
        for ending in endings:
            ending.cancel()
