"""Starts API processes, restarts those that end, and hands each new connection to the least busy one."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol

import structlog

from specsot.errors import Unavailable
from specsot.tasks import start
from specsot_master.http.listener import bind
from specsot_master.http.processes.link import EngineLink, open_link
from specsot_master.http.processes.messages import ConnectionEnded, Leave, ReadyToServe, ToEngine, Welcome
from specsot_master.http.processes.request_host import RequestHost

log = structlog.get_logger()

# Seconds for which an API process may take to start, which is mostly its imports and the tokenizer. Untuned.
START_SECONDS: Final = 120.0
# Seconds before an API process that has ended is started again; the wait doubles up to MAX_RESTART_SECONDS
# while it does not serve. Untuned.
RESTART_SECONDS: Final = 0.5
MAX_RESTART_SECONDS: Final = 30.0
# Seconds before connections are accepted again after the system had no descriptor, or no process had room.
# Untuned.
ACCEPT_RETRY_SECONDS: Final = 0.1
# Seconds that an API process has to end after its responses have been ended. Untuned.
EXIT_SECONDS: Final = 2.0


class Process(Protocol):
    """A started process, as `asyncio.subprocess` describes it."""

    async def wait(self) -> int:
        """Wait until the process has ended, and return its exit status."""

    def kill(self) -> None:
        """End the process at once. Raises ProcessLookupError if it has ended."""


# Starts an API process, which inherits two connected sockets: that of its link, and the one over which
# connections are handed to it.
Spawn = Callable[[socket.socket, socket.socket], Awaitable[Process]]


async def spawn_process(link: socket.socket, handover: socket.socket) -> Process:
    """Start an API process as a new interpreter, and return it.

    link: the process's end of its link to the engine.
    handover: the process's end of the socket over which connections are handed to it.
    """
    numbers = link.fileno(), handover.fileno()
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "specsot_master.http.processes", *map(str, numbers)),
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=numbers,
    )


class _ApiProcess:
    """One API process, as the engine sees it.

    The attribute `serving` is set while the process takes connections. `num_connections` counts those that
    were handed to it and have not ended, and `number` names the process in log lines.
    """

    def __init__(self, number: int, welcome: Welcome, make_host: Callable[[], RequestHost]) -> None:
        """Create a process that is not started.

        number: its number, for log lines.
        welcome: its options.
        make_host: creates what runs the requests of a process.
        """
        self.number = number
        self._welcome = welcome
        self._make_host = make_host
        self._link: EngineLink[ToEngine] | None = None
        self._handover: socket.socket | None = None
        self.serving = asyncio.Event()
        self.num_connections = 0

    async def run(self, spawn: Spawn, on_serving: Callable[[], object]) -> int:
        """Start the process, run its requests until it ends, and return its exit status. Its requests are
        cancelled when it has ended. If this call is cancelled, the process is killed.

        spawn: starts a process.
        on_serving: called once the process takes connections.
        """
        host = self._make_host()
        ours, theirs = socket.socketpair()
        ours_handover, theirs_handover = socket.socketpair()
        ours_handover.setblocking(False)
        self._handover = ours_handover

        def handle(message: ToEngine) -> None:
            """Handle a message of the process: its start and the ends of connections here, others in its
            host.

            message: a message of the API process.
            """
            match message:
                case ReadyToServe():
                    self.serving.set()
                    on_serving()
                case ConnectionEnded():
                    self.num_connections -= 1
                case _:
                    host.handle(message)

        def on_lost() -> None:
            """Hand no further connections to the process, and cancel its requests."""
            self.serving.clear()
            host.close()

        link = EngineLink[ToEngine](ToEngine, handle, on_lost, host.on_unblocked)
        process: Process | None = None
        has_ended = False
        try:
            with theirs, theirs_handover:
                process = await spawn(theirs, theirs_handover)
            await open_link(link, ours)
            self._link = host.link = link
            link.send(self._welcome)
            status = await process.wait()
            has_ended = True
            return status
        finally:
            self.serving.clear()
            self.num_connections = 0
            self._handover = self._link = None
            ours_handover.close()
            link.close()
            if process is None:
                ours.close()
            elif not has_ended:
                with suppress(ProcessLookupError):
                    process.kill()

    def hand_over(self, connection: socket.socket) -> bool:
        """Hand a connection to the process; return False if the process takes none at the moment.

        connection: the accepted socket. The caller closes its own descriptor of it.
        """
        if self._handover is None or not self.serving.is_set():
            return False
        try:
            socket.send_fds(self._handover, [b"c"], [connection.fileno()])
        except OSError:  # BlockingIOError if the process is too busy to take those that were handed over.
            return False
        self.num_connections += 1
        return True

    def leave(self, grace: float) -> None:
        """Tell the process to end, if it runs.

        grace: seconds for which its responses may continue.
        """
        self.serving.clear()
        if self._link is not None:
            self._link.send(Leave(grace))


class ApiProcesses:
    """The HTTP server of a master whose connections are served by API processes.

    The attribute `port` is the port on which it listens.
    """

    def __init__(self, listener: socket.socket, processes: Sequence[_ApiProcess], spawn: Spawn) -> None:
        """Create a server that accepts no connections yet; see `open_api_processes`.

        listener: the listening socket, which this object closes.
        processes: the processes, which are not started.
        spawn: starts a process.
        """
        self._listener = listener
        self._processes = processes
        self._spawn = spawn
        self._loop = asyncio.get_running_loop()
        # True once a process has taken connections.
        self._has_served = False
        self._is_accepting = False
        self._is_closing = False
        self._running = [start(self._keep_running(one)) for one in processes]
        self.port: int = listener.getsockname()[1]

    async def wait_until_serving(self) -> None:
        """Return once one of the processes takes connections.

        Raises Unavailable if none does within START_SECONDS, or if the first one ends before.
        """
        serving = [asyncio.ensure_future(one.serving.wait()) for one in self._processes]
        try:
            done, _ = await asyncio.wait(
                [*serving, *self._running], timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for waiting in serving:
                waiting.cancel()
        if not any(one.serving.is_set() for one in self._processes):
            reason = "one of them has ended" if done else f"none was ready after {START_SECONDS:g} s"
            raise Unavailable(f"the API processes could not be started: {reason}")

    async def close(self, grace_seconds: float) -> None:
        """Accept no further connections, and end the processes. Return when all have ended.

        grace_seconds: seconds for which responses may continue.
        """
        self._is_closing = True
        self._stop_accepting()
        self._listener.close()
        for one in self._processes:
            one.leave(grace_seconds)
        await asyncio.wait(self._running, timeout=grace_seconds + EXIT_SECONDS)
        for running in self._running:
            running.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _keep_running(self, process: _ApiProcess) -> None:
        """Run a process, and start it again whenever it ends, until this server is closed. A process that
        ends before it has served is not started again while none has served, because the reason is likely to
        be the same for all.

        process: the process, which is not started.
        """
        seconds = RESTART_SECONDS
        while not self._is_closing:
            served = False

            def on_serving() -> None:
                """Accept connections, as there is a process for them."""
                nonlocal served
                served = True
                self._start_accepting()

            try:
                status: int | str = await process.run(self._spawn, on_serving)
            except OSError as error:  # The system has no room for a process or a socket at the moment.
                status = str(error)
            if self._is_closing:
                return
            seconds = RESTART_SECONDS if served else min(seconds * 2, MAX_RESTART_SECONDS)
            if not self._has_served:
                log.error("API process could not start", process=process.number, status=status)
                return
            log.error("API process ended", process=process.number, status=status, restart_after=seconds)
            await asyncio.sleep(seconds)

    def _start_accepting(self) -> None:
        """Accept connections from now on."""
        self._has_served = True
        if not (self._is_accepting or self._is_closing):
            self._is_accepting = True
            self._loop.add_reader(self._listener, self._accept)

    def _stop_accepting(self) -> None:
        """Leave further connections in the system's queue."""
        if self._is_accepting:
            self._is_accepting = False
            self._loop.remove_reader(self._listener)

    def _accept(self) -> None:
        """Accept one connection, and hand it to the process with the fewest connections. Without a process
        that takes it, the connection is closed, and no further one is accepted for ACCEPT_RETRY_SECONDS.
        """
        serving = (one for one in self._processes if one.serving.is_set())
        ready = sorted(serving, key=lambda one: one.num_connections)
        if not ready:
            self._stop_accepting()  # The next process that serves accepts them.
            return
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            log.error("no connection could be accepted", reason=str(error))
            self._pause_accepting()
            return
        with connection:
            if not any(one.hand_over(connection) for one in ready):
                self._pause_accepting()

    def _pause_accepting(self) -> None:
        """Accept no connection for ACCEPT_RETRY_SECONDS."""
        self._stop_accepting()
        self._loop.call_later(ACCEPT_RETRY_SECONDS, self._start_accepting)


async def open_api_processes(
    address: str,
    count: int,
    welcome: Welcome,
    make_host: Callable[[], RequestHost],
    spawn: Spawn = spawn_process,
) -> ApiProcesses:
    """Listen at an address, start the API processes, and return the server once one of them serves.

    address: host:port on which it listens; port 0 stands for any free port.
    count: how many processes are started.
    welcome: the options of the processes.
    make_host: creates what runs the requests of one process.
    spawn: starts a process.

    Raises Unavailable if the address cannot be used, or if the processes cannot be started.
    """
    listener = bind(address)
    processes = [_ApiProcess(number, welcome, make_host) for number in range(count)]
    server = ApiProcesses(listener, processes, spawn)
    try:
        await server.wait_until_serving()
    except BaseException:
        await server.close(0)
        raise
    return server
