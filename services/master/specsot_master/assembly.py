"""Puts a master together from its rooms: text, prompts, and for each ring a conductor and a fleet.

Refuses to know doors (gRPC, HTTP) and processes; both the service and the embedded fleet use it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from specsot.errors import InvalidRequest
from specsot.frames import Result
from specsot.info import ModelInfo
from specsot.members import CommMode, Layout, Transport, TreeShape
from specsot.model.config import read_config
from specsot.model.fingerprint import fingerprint
from specsot.model.heads import read_heads
from specsot_master.conductor import Conductor, ConductorConfig, Notes
from specsot_master.conductor.clock import LoopClock
from specsot_master.conductor.readers import Readers
from specsot_master.conductor.trying import Forms
from specsot_master.fleet import Fleet, Placement, Wishes
from specsot_master.fleet.epochs import Numbers
from specsot_master.fleet.wishes import TAKE_OVER_AFTER
from specsot_master.laps import Laps
from specsot_master.master import Master
from specsot_master.prompts import Prompts
from specsot_master.replicas import Enrolment, Replica, Router
from specsot_master.text import Text


@dataclass(frozen=True, slots=True)
class MasterSettings:
    """What a master is started with. `workers`: how many share the layers, unless they bring ranges.

    replicas: how many rings; workers and a drafter are of each. conduct: how requests are treated; its model
              and vocabulary are found out.
    """

    model: Path
    name: str = ""
    workers: int = 1
    drafter: bool = True
    page_rows: int | None = None
    rows: int = 512
    layout: Layout = "batched"
    shape: TreeShape = field(default_factory=TreeShape)
    draft_timeout: float = 1.0
    transport: Transport = "grpc"
    comm_mode: CommMode = "p2p"
    placement: Placement = "measured"
    max_stages: int | None = None
    take_over_after: float = TAKE_OVER_AFTER
    replicas: int = 1
    conduct: ConductorConfig = field(default_factory=ConductorConfig)


@dataclass(frozen=True, slots=True)
class Shared:
    """What all rings of a master have in common."""

    wishes: Wishes
    conduct: ConductorConfig
    text: Text
    prompts: Prompts
    notes: Notes
    forms: Forms
    numbers: Numbers

    def ring(self, number: int, changed: Callable[[], None], readers: Readers | None = None) -> Replica:
        """changed: the ring is complete, or broke."""
        laps = Laps(time.monotonic)

        def hear(result: Result) -> None:
            conductor.received(result)
            laps.heard(result)

        def end(reason: str) -> None:
            conductor.epoch_ended(reason)
            changed()

        def begin() -> None:
            conductor.epoch_began()
            changed()

        fleet = Fleet(self.wishes, hear, begin, end, lambda: conductor.idle, self.numbers)
        conductor = Conductor(
            fleet, self.text, self.prompts, self.conduct, forms=self.forms, notes=self.notes, readers=readers
        )
        return Replica(number, conductor, fleet, laps)


def assemble(settings: MasterSettings, after: int = 0, notes: Notes | None = None) -> Master:
    """Read the model's tokenizer and config (no weights) and wire the rooms. Raises ModelError.

    after: the newest epoch that a master before this one may have begun. notes: what outlives this one.
    """
    model, text = _describe(settings), Text(settings.model, read_config(settings.model).vocab)
    _check(settings, model)
    shared = Shared(
        _wishes(settings, model),
        _conduct(settings, model),
        text,
        Prompts(settings.model, text),
        notes or Notes(),
        Forms(),
        Numbers(after),
    )
    if settings.replicas > 1:
        return _several(shared, model, settings.replicas)
    changed = asyncio.Event()
    only = shared.ring(0, changed.set)
    return Master(text, model, (only,), only.conductor, only.fleet, changed)


def _several(shared: Shared, model: ModelInfo, count: int) -> Master:
    """Readers are of requests, wherever those go."""
    changed, replicas = asyncio.Event(), list[Replica]()
    router = Router(replicas)

    def settle() -> None:
        enrolment.lend()
        router.relieve()

    def change() -> None:
        changed.set()
        asyncio.get_running_loop().call_soon(settle)  # once the fleet has done what it can by itself

    readers = Readers(shared.conduct, LoopClock(), router.drop, router.renew, shared.notes)
    replicas += (shared.ring(number, change, readers) for number in range(count))
    enrolment = Enrolment([one.fleet for one in replicas], change)
    return Master(shared.text, model, tuple(replicas), router, enrolment, changed)


def _check(settings: MasterSettings, model: ModelInfo) -> None:
    """Raises InvalidRequest."""
    if not 0 < settings.workers <= model.layers:
        raise InvalidRequest(f"{settings.workers} workers cannot share {model.layers} layers", "workers")
    if settings.max_stages is not None and settings.max_stages < settings.workers:
        raise InvalidRequest(f"max_stages {settings.max_stages} < workers {settings.workers}", "max_stages")


def _describe(settings: MasterSettings) -> ModelInfo:
    config = read_config(settings.model)
    name = settings.name or settings.model.resolve().name
    layers, positions = config.layers, config.max_positions
    return ModelInfo(name, fingerprint(settings.model), layers, positions)


def _conduct(settings: MasterSettings, model: ModelInfo) -> ConductorConfig:
    config = read_config(settings.model)
    heads = read_heads(settings.model, config)
    return replace(settings.conduct, model=model.name, vocabulary=config.vocab, heads=heads)


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
