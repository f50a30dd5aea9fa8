"""Puts a master together from its rooms: text, prompts, conductor and fleet, wired to each other.

Refuses to know doors (gRPC, HTTP) and processes; both the service and the embedded fleet use it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from specsot.errors import InvalidRequest, Unavailable
from specsot.frames import Result
from specsot.info import Info, ModelInfo, PagesInfo
from specsot.members import CommMode, Layout, Transport, TreeShape
from specsot.model.config import read_config
from specsot.model.fingerprint import fingerprint
from specsot_master.conductor import Conductor, ConductorConfig, Notes, RingState
from specsot_master.fleet import Fleet, Placement, Wishes
from specsot_master.laps import Laps
from specsot_master.prompts import Prompts
from specsot_master.text import Text


@dataclass(frozen=True, slots=True)
class MasterSettings:
    """What a master is started with. `workers`: how many share the layers, unless they bring ranges.

    conduct: how requests are treated; its model and vocabulary are found out.
    """

    model: Path
    name: str = ""
    workers: int = 1
    drafter: bool = True
    page_rows: int = 256
    rows: int = 512
    layout: Layout = "batched"
    shape: TreeShape = field(default_factory=TreeShape)
    draft_timeout: float = 1.0
    transport: Transport = "grpc"
    comm_mode: CommMode = "p2p"
    placement: Placement = "measured"
    max_stages: int | None = None
    take_over_after: float = 10.0
    conduct: ConductorConfig = field(default_factory=ConductorConfig)


class FleetRing:
    """The conductor's view of the fleet (its Ring protocol)."""

    def __init__(self) -> None:
        self.fleet: Fleet | None = None

    def state(self) -> RingState | None:
        assert self.fleet is not None
        ring = self.fleet.ring
        if ring is None:
            return None
        return RingState(
            epoch=ring.epoch,
            pages=ring.pages,
            page_rows=ring.page_rows,
            slots=ring.slots,
            max_positions=self.fleet.max_positions,
            has_drafter=ring.drafter is not None,
            drafters=self.fleet.drafters,
        )

    async def order(self, order: object) -> None:
        assert self.fleet is not None
        await self.fleet.order(order)  # type: ignore[arg-type]

    def waiting_for(self) -> str:
        assert self.fleet is not None
        return self.fleet.waiting_for()


@dataclass(slots=True)
class Master:
    """A master without doors. `serving`: the ring is complete, and moves when there is work."""

    settings: MasterSettings
    text: Text
    conductor: Conductor
    fleet: Fleet
    model: ModelInfo
    changed: asyncio.Event
    laps: Laps
    serving: bool = False
    leaving: bool = False

    @property
    def drafts(self) -> bool:
        """The running ring has a drafter."""
        ring = self.fleet.ring
        return ring is not None and ring.drafter is not None

    def info(self) -> Info:
        """How everything stands, for people and GetInfo."""
        fleet, ring, waiting = self.fleet, self.fleet.ring, self.fleet.waiting_for()
        free = self.conductor.free_pages
        return Info(
            models=(self.model,),
            members=fleet.members(),
            epoch=fleet.epoch,
            ready=fleet.ready,
            waiting_for=(waiting,) if waiting else (),
            pages=PagesInfo(ring.pages, free, ring.page_rows, self.conductor.kept_pages) if ring else None,
            laps=self.laps.info(),
            requests=self.conductor.requests(),
            plan=fleet.plan,
        )

    async def complete(self, with_drafter: bool = False) -> None:
        """Return once the ring is complete (and drafts, if asked for).

        Raises Unavailable with the member's own words when one cannot take part.
        """
        while not self.fleet.ready or (with_drafter and not self.drafts):
            if self.fleet.complaint:
                raise Unavailable(self.fleet.complaint)
            self.changed.clear()
            await self.changed.wait()


def assemble(settings: MasterSettings, after: int = 0, notes: Notes | None = None) -> Master:
    """Read the model's tokenizer and config (no weights) and wire the rooms. Raises ModelError.

    after: the newest epoch that a master before this one may have begun. notes: what outlives this one.
    """
    text, ring, changed = Text(settings.model), FleetRing(), asyncio.Event()
    model = _describe(settings)
    if not 0 < settings.workers <= model.layers:
        raise InvalidRequest(f"{settings.workers} workers cannot share {model.layers} layers", "workers")
    if settings.max_stages is not None and settings.max_stages < settings.workers:
        raise InvalidRequest(f"max_stages {settings.max_stages} < workers {settings.workers}", "max_stages")
    config = replace(settings.conduct, model=model.name, vocabulary=read_config(settings.model).vocab)
    conductor = Conductor(ring, text, Prompts(settings.model, text), config, notes=notes)
    wishes, laps = _wishes(settings, model), Laps(time.monotonic)

    def hear(result: Result) -> None:
        conductor.received(result)
        laps.heard(result)

    def end(reason: str) -> None:
        conductor.epoch_ended(reason)
        changed.set()

    def begin() -> None:
        conductor.epoch_began()
        changed.set()

    fleet = Fleet(wishes, hear, begin, end, lambda: conductor.idle, itertools.count(after + 1))
    ring.fleet = fleet
    return Master(settings, text, conductor, fleet, model, changed, laps)


def _describe(settings: MasterSettings) -> ModelInfo:
    config = read_config(settings.model)
    name = settings.name or settings.model.resolve().name
    layers, positions = config.layers, config.max_positions
    return ModelInfo(name, fingerprint(settings.model), layers, positions)


def _wishes(settings: MasterSettings, model: ModelInfo) -> Wishes:
    return Wishes(
        fingerprint=model.fingerprint,
        model_layers=model.layers,
        workers=settings.workers,
        drafter=settings.drafter,
        page_rows=settings.page_rows,
        rows=settings.rows,
        layout=settings.layout,
        shape=settings.shape,
        draft_timeout=settings.draft_timeout,
        placement=settings.placement,
        max_stages=settings.max_stages,
        take_over_after=settings.take_over_after,
        transport=settings.transport,
        comm_mode=settings.comm_mode,
    )
