"""Starts a fleet of processes, waits until its ring is complete, and ends it."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from asyncio.subprocess import Process
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
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
from specsot_app.fleet.prepared import PreparedProcess, launch
from specsot_app.fleet.service_specs import LOOPBACK, PRIVATE, Service, Serving, processes_of, services_of

# Called with a service's name and a line of its output.
OutputCallback = Callable[[str, str], None]

# Exit status of a service that was given an unusable argument or model.
WRONG_INPUT = 2


class ChildProcess:
    """A running service, whose newest 20 lines of output are kept. Make it on a running event loop.

    service: The service that was started.
    process: The process of the service; its output is a pipe.
    on_line: Called with the service's name and each line of its output.
    """

    def __init__(self, service: Service, process: Process, on_line: OutputCallback) -> None:
        self.service = service
        self._process = process
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=20)
        self._reading = asyncio.create_task(self._read_output())

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

        The error is a ModelError if the child's input was unusable, else Unavailable. Its text is the exit
        status if the child printed nothing, and the signal's number if a signal ended it.

        A signal takes precedence over the last line. The text begins with the service's name, and the
        program's own prefix "specsot-KIND: " is removed from the line. Calling it again after the end
        returns an equal error.
        """
        status = await self._process.wait()
        # `wait` does not cancel the reading if this waiter is cancelled, so that the next waiter gets the
        # last lines.
        await asyncio.wait([self._reading])
        last = self._lines[-1] if self._lines else f"exit status {status}"
        # A process that a signal ended could not print a reason.
        if status < 0:
            last = f"ended by signal {-status}"
        line = last.removeprefix(f"specsot-{self.service.name.split('-')[0]}: ")
        error_class = ModelError if status == WRONG_INPUT else Unavailable
        return error_class(f"{self.service.name}: {line}")

    async def end(self) -> None:
        """Ask the child to end (SIGTERM), wait for the service's grace period, then kill it. Returns at once
        if it has ended.

        The call returns once the output has been read to its end.
        """
        if self._process.returncode is None:
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), self.service.grace)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._reading

    async def _read_output(self) -> None:
        """Read the child's output to its end, so that the child never blocks on a full pipe; empty lines are
        dropped.

        Bytes that are not UTF-8 are replaced. Each line is kept among the newest 20 and passed to the
        callback.
        """
        assert self._process.stdout is not None
        async for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            if line:
                self._lines.append(line)
                self._on_line(self.service.name, line)


async def start(
    service: Service, on_line: OutputCallback, prepared: PreparedProcess | None = None
) -> ChildProcess:
    """Start one service as a process and return it; whether the service works is not awaited.

    service: The service to start.
    on_line: Called with the service's name and each line of its output.
    prepared: A process that runs the service if it suits; None, or if it does not: a new process.
    """
    if prepared is not None and prepared.suits(service):
        return ChildProcess(service, await prepared.run(service), on_line)
    process = await launch((service.module, *service.arguments), service.environment)
    return ChildProcess(service, process, on_line)


T = TypeVar("T")

# Reports progress: called with a kind of thing, how many of them are ready, and their total.
Watch = Callable[[str, int, int], None]
# Called with the services of other machines that have not joined yet.
OnMissing = Callable[[Sequence[Service]], None]

# Number of ends. A member that ends so often in a row, each time within SHORT_LIFE seconds of its start, is
# not started again. Untuned.
MAX_SHORT_LIVES = 3
# Seconds. An end within this time of the start counts towards MAX_SHORT_LIVES. Untuned.
SHORT_LIFE = 1800.0
# Seconds between checks of a ring that is not complete yet. Untuned.
PAUSE = 0.05
# Seconds. If the others have not begun to take over the layers of a lost member so long after its loss, the
# ring waits for that member. They begin after half a second by default (`--take-over-after`), and may then
# need seconds until the ring is complete. Untuned.
TAKE_OVER_SECONDS = 1.5
# Seconds. A lost member is started no later than this after its end. Untuned.
REPAIR_SECONDS = 30.0
# Seconds between checks of a ring that is being repaired. Untuned.
REPAIR_PAUSE = 0.2
# Seconds that a child has to end after a call to it failed, so that its reason can be reported. Untuned.
EXIT_REPORT_TIMEOUT = 2.0


def ignore_output(service_name: str, line: str) -> None:
    """Ignore a line of output; `ChildProcess` keeps the last lines anyway.

    service_name: Name of the service that wrote the line.
    line: The line without its end.
    """


def ignore_missing(missing: Sequence[Service]) -> None:
    """Ignore which services have not joined.

    missing: The services of other machines that have not joined.
    """


class ProcessFleet:
    """Processes of a master, workers and drafters, and a client of the master.

    children: The processes on this machine, the master first.
    client: Client that is connected to the master.
    stack: Exit stack that closes the client and ends the processes.
    on_line: Called with a service's name and each line of its output.
    """

    def __init__(
        self,
        children: list[ChildProcess],
        client: MasterClient,
        stack: AsyncExitStack,
        on_line: OutputCallback,
    ) -> None:
        self.children = children
        self._client = client
        self._stack = stack
        self._on_line = on_line

    @classmethod
    async def start(
        cls,
        options: FleetOptions,
        models: Models,
        port: int | None = None,
        on_line: OutputCallback = ignore_output,
        http_port: int | None = None,
        serving: Serving = PRIVATE,
        on_progress: Watch | None = None,
        on_missing: OnMissing = ignore_missing,
        prepared: PreparedProcess | None = None,
    ) -> ProcessFleet:
        """Start every service that runs on this machine, and wait until the ring is complete and all members
        have joined.

        Raises Unavailable if another process listens at the master's address. Services of other machines are
        not started but awaited, without limit. If this call fails, all processes that it started are ended.
        The sockets' temporary folder is removed when the fleet is closed.

        options: Options of the fleet.
        models: The model directories to load.
        port: Port of the master; None takes a free one.
        on_line: Called with a service's name and each line of its output.
        http_port: Port of the master's HTTP server; None starts none.
        serving: Addresses, TLS files, places and flags of the services.
        on_progress: Called with "services", how many have joined, and their total; None: nothing is reported.
        on_missing: Called with the services of other machines that have not joined, at first and whenever
            they change.
        prepared: A process that was started on the running event loop, for the first service that suits it.
            It is ended if none does. None: every service gets a new process.
        Raises what a service died of, in one line; then no process is left running.
        """
        port = port or free_port()
        # If another process listened there, the members would join it.
        check_free(serving.listen_address(port))
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specsot-")))
            children: list[ChildProcess] = []
            stack.push_async_callback(end_all, children)
            services = services_of(options, models, port, folder, http_port, serving)
            for service in processes_of(services):
                if service.host is None:
                    children.append(await start(service, on_line, prepared))
            if prepared is not None:
                await prepared.end()
            connecting = ready_client(services, serving.client, on_progress, on_missing)
            client = await unless_one_ends(children, connecting)
            stack.push_async_callback(client.close)
            return cls(children, client, stack.pop_all(), on_line)
        raise AssertionError("unreachable: the stack passes errors on")

    def generate(self, ask: Ask) -> AsyncIterator[Numbered]:
        """Yield the events of one request, in order. Closing the iterator cancels the request.

        ask: The request.
        """
        return self._client.generate(ask)

    async def cancel(self, request: str) -> bool:
        """Cancel a request, which then ends with the reason CANCELLED. Return whether the master knew the
        request.

        request: The request's id, which its `Started` event has.
        """
        return await self._client.cancel(request)

    async def info(self) -> Info:
        """Return the state of the fleet."""
        return await self._client.info()

    async def keep_running(self) -> SpecsotError:
        """Restart members that end, until the master ends or a member cannot be restarted; return why.

        A member whose work others take over is started once the ring has generated a token again; see
        `wait_for_repair`.
        """

        async def wait(name: str) -> None:
            """Wait until the ring runs without a lost member.

            name: Name of the member.
            """
            await wait_for_repair(name, self.info)

        return await keep_running(self.children, self._on_line, 1, wait)

    async def close(self) -> None:
        """Close the client and end all processes, the master first."""
        await self._stack.aclose()


def free_port() -> int:
    """Return a TCP port that no process listens on at this moment.

    The port lies below the ports that Linux gives to outgoing connections (32768 and up), so that no
    connection takes it in the second that a master needs until it listens.

    The port is 20,000 to 32,767. Raises StopIteration if 64 random ports are all taken.
    """
    random_ports = (secrets.choice(range(20_000, 32_768)) for _ in range(64))
    return next(port for port in random_ports if is_free(port))


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Return whether no process listens at this port at this moment.

    An address that cannot be bound counts as taken.

    port: A TCP port.
    host: Address to try, without a port.
    """
    try:
        check_free(address_of(host, port))
    except Unavailable:
        return False
    return True


async def ready_client(
    services: Sequence[Service],
    client_options: ClientOptions,
    on_progress: Watch | None,
    on_missing: OnMissing,
) -> MasterClient:
    """Return a client of the master once all rings are complete and all members have joined; wait without
    limit.

    `on_progress` is called after every answered query; the master counts as joined once the ring is ready. A
    master that does not answer is asked again after PAUSE seconds; other errors are passed on. `on_missing`
    is called once at first even if no service is missing.

    services: All services of the fleet, the master first.
    client_options: Options of the client: what it trusts, and the token that it sends.
    on_progress: Called with "services", how many have joined, and their total; None: nothing is reported.
    on_missing: Called with the services of other machines that have not joined, at first and whenever they
        change.
    """
    master, *members = services
    missing = [service for service in members if service.host is not None]
    on_missing(missing)
    while True:
        try:
            client = await client_options.connect(master.address)
            info = await client.info()
            joined_names = {member.name for member in info.members}
            if on_progress:
                on_progress("services", 1 + len(info.members) - (not info.ready), len(services))
            if not info.waiting_for and joined_names.issuperset(service.name for service in members):
                return client
            await client.close()
            if missing != (missing := [service for service in missing if service.name not in joined_names]):
                on_missing(missing)
        except (Unavailable, Cancelled):
            # The master is still starting; or it has ended, which `unless_one_ends` notices.
            pass
        await asyncio.sleep(PAUSE)


async def unless_one_ends(children: list[ChildProcess], coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the coroutine's result, unless a child ends first; the coroutine is then cancelled.

    If the coroutine succeeds at the same time as a child ends, its result is returned. If it fails, children
    get EXIT_REPORT_TIMEOUT seconds to end, and the error of one that does is raised instead of the
    coroutine's.

    children: The processes to watch.
    coroutine: The coroutine to run meanwhile.
    Raises what a child reported as the reason of its end, or what the coroutine raises.
    """
    working = asyncio.ensure_future(coroutine)
    ending = asyncio.ensure_future(first_end(children))
    try:
        await asyncio.wait([working, ending], return_when=asyncio.FIRST_COMPLETED)
        # The work may have failed because a child is about to end, whose last line says why.
        if working.done() and working.exception():
            await asyncio.wait([ending], timeout=EXIT_REPORT_TIMEOUT)
        if ending.done() and not (working.done() and working.exception() is None):
            raise ending.result()[1]
        return working.result()
    finally:
        working.cancel()
        ending.cancel()


async def end_all(children: list[ChildProcess]) -> None:
    """End the master first, so that answers can finish while members still run; then end the members
    concurrently.

    children: The processes, the master first; an empty list is allowed.
    """
    await asyncio.gather(*(child.end() for child in children[:1]))
    await asyncio.gather(*(child.end() for child in children[1:]))


async def wait_for_repair(name: str, read_info: Callable[[], Awaitable[Info]]) -> None:
    """Wait until the ring has generated a token without a lost member. A process that starts needs seconds of
    processor time, for which requests would wait that others can continue.

    Return at once if nothing runs, or if no other worker is left; after TAKE_OVER_SECONDS if no ring without
    the member has been planned, so that the ring needs the member; after REPAIR_SECONDS in any case; and if
    the master does not answer.

    name: Name of the member.
    read_info: Returns the master's state.
    """
    now = asyncio.get_running_loop().time
    began = now()
    tokens: int | None = None
    while now() - began < REPAIR_SECONDS:
        try:
            info = await read_info()
        except SpecsotError:
            return
        others = [member.name for member in info.members if member.kind == "worker" and member.name != name]
        requests = info.requests
        if not others or requests is None or not requests.running + requests.waiting:
            return
        taken_over = info.plan and name not in (member.name for member in info.members)
        if not taken_over and now() - began >= TAKE_OVER_SECONDS:
            return
        if taken_over and info.ready:
            generated = info.steps.tokens if info.steps else 0
            if tokens is not None and generated > tokens:
                return
            tokens = generated if tokens is None else tokens
        await asyncio.sleep(REPAIR_PAUSE)


async def start_at_once(name: str) -> None:
    """Do not wait before a member is started again.

    name: Name of the member.
    """


async def keep_running(
    children: list[ChildProcess],
    on_line: OutputCallback,
    num_vital: int = 0,
    before_restart: Callable[[str], Awaitable[None]] = start_at_once,
) -> SpecsotError:
    """Restart members that end, while the others continue.

    Return an error when one of the first `num_vital` children ends, or a member ends that cannot be
    restarted: one with unusable input, or one that ended MAX_SHORT_LIVES times in a row,
    each time within SHORT_LIFE seconds of its start.

    The reason of every restart, and of giving up, is passed to `on_line`.

    children: The processes; a restarted one takes the place of its predecessor in this list.
    on_line: Called with a service's name and each line of its output, and with a line for each restart.
    num_vital: Number of the first children that are never restarted: 1 if the first one is the master.
    before_restart: Called with the name of a service that will be restarted, which is started when the call
        has ended. Other members that end meanwhile are restarted afterwards.
    """
    now = asyncio.get_running_loop().time
    short_lives = ShortLives()
    started = [now()] * len(children)
    while True:
        index, error = await first_end(children)
        service = children[index].service
        is_hopeless = short_lives.record_end(index, now() - started[index])
        if index < num_vital or isinstance(error, ModelError):
            return error
        if is_hopeless:
            description = (
                f"{MAX_SHORT_LIVES} times in a row within {SHORT_LIFE / 60:.0f} minutes of its start"
            )
            on_line(service.name, f"{error}, {description}: it is not started again")
            return error
        on_line(service.name, f"{error}: it is started again")
        await before_restart(service.name)
        children[index], started[index] = await start(service, on_line), now()


class ShortLives:
    """Counts for each member how often in a row it ended soon after its start.

    "Soon" is long, since loading alone may take minutes and then run out of memory.
    """

    def __init__(self) -> None:
        self._short = Counter[int]()

    def record_end(self, index: int, seconds: float) -> bool:
        """Record that a member ended; return whether restarting it is pointless, since it ended
        MAX_SHORT_LIVES times in a row within SHORT_LIFE seconds of its start.

        A member that ran for SHORT_LIFE seconds or longer begins again at 0. True only at exactly
        MAX_SHORT_LIVES short lives in a row.

        index: The member's index among the children.
        seconds: Seconds for which the member ran.
        """
        self._short[index] = self._short[index] + 1 if seconds < SHORT_LIFE else 0
        return self._short[index] == MAX_SHORT_LIVES


async def first_end(children: list[ChildProcess]) -> tuple[int, SpecsotError]:
    """Wait until a child ends; return its index among the children, and why it ended.

    If several children have ended, the first of them in the list is returned. No child is ended by this
    call.

    children: At least one process.
    """
    endings = [asyncio.ensure_future(child.wait_ended()) for child in children]
    try:
        await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        return next((index, ending.result()) for index, ending in enumerate(endings) if ending.done())
    finally:
        for ending in endings:
            ending.cancel()
