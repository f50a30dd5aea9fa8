"""The HTTP endpoint on a real port, before a conductor on a fake ring whose steps a task plays.

Time stands still: alarms ring when a test passes time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2 as httpx
import uvicorn.server
from openai import AsyncOpenAI
from starlette.types import ASGIApp

from specsot.core.frames import Open, Opening
from specsot.core.info import Info, MemberInfo, ModelInfo, PagesInfo, StepsInfo
from specsot.members import Head, Range
from specsot.params import Mode
from specsot.transport.security import PLAIN, Tls, Tokens
from specsot_master.engine import EngineConfig
from specsot_master.http.app import build_app
from specsot_master.http.calls import PING_SECONDS, HttpContext
from specsot_master.http.server import HttpServer
from specsot_master.master import RequestCounter, ServingState
from specsot_master.telemetry import Metrics, RequestMetrics
from tests.master.letters import SAYS
from tests.master.stage import PlayedStage, Stage, turn


class Brisk:
    """asyncio for uvicorn, which looks ten times a second whether to end, and sleeps once more then."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 20)


uvicorn.server.asyncio = Brisk()  # type: ignore[assignment]

INFO = Info(
    models=(ModelInfo("demo", "0123456789abcdef", 8, 2048),),
    members=(
        MemberInfo("worker", "w0", "127.0.0.1:1", "0123456789abcdef", Range(0, 4)),
        MemberInfo("worker", "w1", "127.0.0.1:2", "0123456789abcdef", Range(4, 8)),
        MemberInfo("drafter", "d0", "127.0.0.1:3", "0123456789abcdef"),
    ),
    epoch=3,
    ready=True,
    pages=PagesInfo(64, 60, 64),
    steps=StepsInfo(10, 25, 4.0, 2.5, 6.0, (0.012, 0.015)),
)

HEAD = Head((1, 4, 6), 384)
CONFIG = EngineConfig(model="demo", vocabulary=8192)


@dataclass
class Standing:
    """How the ring stands, in the test's hands."""

    info: Info = INFO
    healthy: bool = True
    head: Head | None = HEAD


@dataclass
class Served(PlayedStage):
    stage: Stage
    desk: RequestCounter
    endpoint: HttpServer
    standing: Standing
    metrics: Metrics
    app: ASGIApp
    context: HttpContext
    going: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.endpoint.port}"

    def client(self, **more: Any) -> httpx.AsyncClient:
        """Without the machine's certificates, which nobody here shows and which take a while to be read."""
        kept = {"verify": False, "timeout": 20, "trust_env": False} | more
        return httpx.AsyncClient(base_url=self.url, **kept)

    def openai(self) -> AsyncOpenAI:
        """OpenAI's own client, which tries everything once."""
        return AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=self.client()
        )

    def opened(self) -> list[Opening]:
        """Every writing sequence that the ring was told to open."""
        openings = [order.opening for order in self.stage.ring.orders if isinstance(order, Open)]
        return [opening for opening in openings if opening.decodes]

    async def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        async with self.client() as client:
            return await client.post(path, json=body, **more)

    async def get(self, path: str) -> httpx.Response:
        async with self.client() as client:
            return await client.get(path)

    async def asked(self) -> None:
        """A request is in the ring."""
        while not self.stage.ring.live:
            await turn()

    async def steps(self, count: int) -> None:
        """So many steps by hand, while nobody else plays them."""
        assert not self.going.is_set()
        for _ in range(count):
            await self.stage.step()

    async def reopen(self) -> None:
        """The endpoint again, where it was before it was closed."""
        self.endpoint = HttpServer(self.app, address=f"127.0.0.1:{self.endpoint.port}")


@asynccontextmanager
async def served(
    says: Mapping[str, str] = SAYS,
    tokens: Tokens | None = None,
    tls: Tls = PLAIN,
    mode: Mode = "direct",
    kind: type[Stage] = Stage,
    ping_every: float = PING_SECONDS,
    **more: Any,
) -> AsyncIterator[Served]:
    """`more` goes to the Stage, which is of this kind."""
    stage, standing = kind(says, **({"config": CONFIG} | more)), Standing()

    def info() -> Info:
        return replace(standing.info, requests=standing.info.requests or stage.engine.requests())

    async def state() -> ServingState:
        return ServingState(info(), standing.healthy, desk.closing, standing.head)

    async def figures() -> bytes:
        return metrics.written()

    desk, metrics = RequestCounter(stage.engine, info), Metrics(info)
    desk.watch(lambda _: RequestMetrics(lambda _: metrics, stage.time.now))
    house = HttpContext(
        desk,
        replace(INFO.models[0], plan_style=stage.style or ""),
        stage.text,
        state=state,
        figures=figures,
        began=1_700_000_000,
        mode=mode,
        ping_every=ping_every,
    )
    app = build_app(house, tokens)
    one = Served(stage, desk, HttpServer(app, tls, "127.0.0.1:0"), standing, metrics, app, house)
    one.going.set()
    playing = asyncio.create_task(one.play())
    try:
        yield one
    finally:
        playing.cancel()
        await one.endpoint.close(0)
