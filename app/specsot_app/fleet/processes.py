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

OnLine = Callable[[str, str], None]  # (service, line)

WRONG_INPUT = 2  # the exit status of a service that was given something unusable


class ChildProcess:
    """A running service. `last` is its newest line of output."""

    def __init__(self, service: Service, process: Process, tell: OnLine) -> None:
        self.service = service
        self._process = process
        self._tell = tell
        self._lines: deque[str] = deque(maxlen=20)
        self._listening = asyncio.create_task(self._listen())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        return self._process.returncode

    async def wait_ended(self) -> SpecsotError:
        """Wait until the child is gone; the error says what its last words were."""
        status = await self._process.wait()
        await asyncio.wait([self._listening])  # who waits may give up; whoever asks next hears it all
        last = self._lines[-1] if self._lines else f"exit status {status}"
        if status < 0:  # it could not say why
            last = f"ended by signal {-status}"
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

Watch = Callable[[str, int, int], None]  # (what, how many of them are there, of how many)
Absent = Callable[[Sequence[Service]], None]  # hears who of the other machines has not joined yet

# A member that ended so often in a row, each time so many seconds after its start, is given up; not measured.
ENDS = 3
SOON = 1800.0
PAUSE = 0.05  # seconds between checks of a ring that is not complete yet; not measured
LAST_WORDS = 2.0  # seconds that a child has to end after it cut off a call; not measured


def keep_quiet(service: str, line: str) -> None:
    """Nobody listens; the child's last words are kept anyway."""


def miss_nobody(absent: Sequence[Service]) -> None:
    """Everybody is here."""


class ProcessFleet:
    """Three kinds of processes and a client of their master. children: those of this machine, the master
    first.
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
        absent: Absent = miss_nobody,
    ) -> ProcessFleet:
        """Start everything that is to run here and wait until the ring is complete.

        port: where the master listens; None takes a free one. http_port: the same for HTTP; None: nowhere.
        Raises what a service died of, in one line; then nothing is left running.
        """
        port = port or free_port()
        check_free(serving.listens(port))  # else the members would join whoever is there
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
        return self._client.generate(ask)

    async def cancel(self, request: str) -> bool:
        return await self._client.cancel(request)

    async def info(self) -> Info:
        return await self._client.info()

    async def keep_running(self) -> SpecsotError:
        """Until the master ends, or a member that cannot be helped: why."""
        return await keep_running(self.children, self._tell, 1)

    async def close(self) -> None:
        await self._stack.aclose()


def free_port() -> int:
    """A TCP port nobody listens on at this moment.

    It lies below the ports that Linux gives to outgoing connections (32768 and up): none of these takes it
    in the second that a master needs until it listens.
    """
    drawn = (secrets.choice(range(20_000, 32_768)) for _ in range(64))
    return next(port for port in drawn if is_free(port))


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Nobody listens there at this moment."""
    try:
        check_free(address_of(host, port))
    except Unavailable:
        return False
    return True


async def ready_client(
    services: Sequence[Service], trust: ClientOptions, watch: Watch | None, absent: Absent
) -> MasterClient:
    """A client of the master, the first of `services`, once its rings are complete and the others are in."""
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
            pass  # the master is still starting; or it ends, which whoever watches the processes tells
        await asyncio.sleep(PAUSE)


async def unless_one_ends(children: list[ChildProcess], work: Coroutine[Any, Any, T]) -> T:
    """The work's result; raises why a child ended, if one does first, or as the work fails."""
    working = asyncio.ensure_future(work)
    ending = asyncio.ensure_future(first_end(children))
    try:
        await asyncio.wait([working, ending], return_when=asyncio.FIRST_COMPLETED)
        if working.done() and working.exception():  # perhaps because one is about to end, which says why
            await asyncio.wait([ending], timeout=LAST_WORDS)
        if ending.done() and not (working.done() and working.exception() is None):
            raise ending.result()[1]
        return working.result()
    finally:
        working.cancel()
        ending.cancel()


async def end_all(children: list[ChildProcess]) -> None:
    """The master first, which lets answers end that its members still write; then those, side by side."""
    await asyncio.gather(*(child.end() for child in children[:1]))
    await asyncio.gather(*(child.end() for child in children[1:]))


async def keep_running(children: list[ChildProcess], tell: OnLine, vital: int = 0) -> SpecsotError:
    """Start members again that end: the others go on meanwhile. Until one of the first `vital` ends, or one
    that cannot be helped: why.
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
    """Short ones in a row, by member: loading alone may take minutes, and end with the memory."""

    def __init__(self) -> None:
        self._short = Counter[int]()

    def too_short(self, member: int, seconds: float) -> bool:
        """One more ended; whether it is of no use to start it again."""
        self._short[member] = self._short[member] + 1 if seconds < SOON else 0
        return self._short[member] == ENDS


async def first_end(children: list[ChildProcess]) -> tuple[int, SpecsotError]:
    """Which ended, and why."""
    endings = [asyncio.ensure_future(child.wait_ended()) for child in children]
    try:
        await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        return next((place, one.result()) for place, one in enumerate(endings) if one.done())
    finally:
        for ending in endings:
            ending.cancel()
