"""The HTTP endpoint of API processes, which run as tasks of the test's own process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specsot_master.core.ring.ring_state import EngineConfig
from specsot_master.http.processes.api_process import ApiProcess
from specsot_master.http.processes.messages import Welcome
from specsot_master.http.processes.request_host import RequestHost
from specsot_master.http.processes.supervisor import ApiProcesses, Spawn, open_api_processes
from specsot_master.master import RequestCounter, ServingState
from specsot_master.telemetry import Metrics, RequestMetrics
from tests.http.house import CONFIG, INFO, Served, Standing
from tests.master.letters import SAYS
from tests.master.stage import BASE, Stage


class TaskProcess:
    """An API process that is a task: `kill` ends it as SIGKILL would, without a last message."""

    def __init__(self, link: socket.socket, handover: socket.socket) -> None:
        self._link = link
        self.task = asyncio.create_task(self._run(handover))

    async def wait(self) -> int:
        await asyncio.wait([self.task])
        return -9 if self.task.cancelled() else 0

    def kill(self) -> None:
        if self.task.done():
            raise ProcessLookupError
        self.task.cancel()

    async def _run(self, handover: socket.socket) -> None:
        process = ApiProcess()
        server: Any = None
        try:
            if welcome := await process.join(self._link):
                server = process.open_server(welcome)
                await process.serve(server, handover)
        except asyncio.CancelledError:
            for connection in list(server._server.server_state.connections if server else ()):
                connection.transport.abort()
            if server:
                await server.close(0)
            process._link.close()
            raise
        finally:
            handover.close()


@dataclass
class Apart(Served):
    """A served demo whose HTTP endpoint is that of API processes."""

    processes: list[TaskProcess] = field(default_factory=list)


@asynccontextmanager
async def served_apart(
    count: int = 2, config: EngineConfig = CONFIG, spawn: Spawn | None = None, **options: Any
) -> AsyncIterator[Apart]:
    """The same demo as `served`, before `count` API processes.

    spawn: starts a process; None for one that is a task. `options` are members of the processes' Welcome.
    """
    stage = Stage(SAYS, config=config)
    standing = Standing()
    desk = RequestCounter(stage.engine, lambda: standing.info)
    metrics = Metrics(lambda: standing.info)
    desk.watch(lambda _: RequestMetrics(lambda _: metrics, stage.time.now))
    processes: list[TaskProcess] = []

    async def start_task(link: socket.socket, handover: socket.socket) -> TaskProcess:
        processes.append(TaskProcess(link.dup(), handover.dup()))
        return processes[-1]

    def state() -> ServingState:
        return ServingState(standing.info, standing.healthy, desk.closing, standing.head)

    defaults: dict[str, Any] = {
        "base": str(Path(BASE)),
        "vocabulary": config.vocabulary,
        "model": INFO.models[0],
        "plan_style": "auto",
        "began": 1_700_000_000,
        "mode": "direct",
        "ping_every": 10.0,
        "names": (),
        "origins": (),
        "certificate": None,
        "key": None,
        "token_file": None,
        "token": None,
        "num_processes": count,
        "log_format": "console",
        "log_level": "info",
    }
    server: ApiProcesses = await open_api_processes(
        "127.0.0.1:0",
        count,
        Welcome(**defaults | options),
        lambda: RequestHost(desk, state, metrics.written),
        spawn or start_task,
    )
    one: Any = Apart(stage, desk, server, standing, metrics, None, None, processes=processes)  # type: ignore[arg-type]
    one.going.set()
    playing = asyncio.create_task(one.play())
    try:
        yield one
    finally:
        playing.cancel()
        await server.close(0)
