"""Puts a master together from its rooms: text, prompts, and for each ring a conductor and a fleet.

Refuses to know doors (gRPC, HTTP) and processes; both the service and the embedded fleet use it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from specsot.errors import InvalidRequest
from specsot.frames import Result
from specsot.info import ModelInfo
from specsot.model.config import read_config
from specsot.model.fingerprint import fingerprint
from specsot.model.heads import read_heads
from specsot_master.conductor import Conductor, ConductorConfig, Notes
from specsot_master.conductor.clock import LoopClock
from specsot_master.conductor.readers import Readers
from specsot_master.conductor.trying import Forms
from specsot_master.config import RingOptions
from specsot_master.fleet import Fleet, Wishes
from specsot_master.fleet.epochs import Numbers
from specsot_master.laps import Laps
from specsot_master.master import Master
from specsot_master.prompts import Prompts
from specsot_master.replicas import Enrolment, Replica, Router
from specsot_master.text import Text


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


def assemble(base: Path, ring: RingOptions, after: int = 0, notes: Notes | None = None) -> Master:
    """Read the model's tokenizer and config (no weights) and wire the rooms. Raises ModelError.

    after: the newest epoch that a master before this one may have begun. notes: what outlives this one.
    """
    model, text = _describe(base, ring), Text(base, read_config(base).vocab)
    _check(ring, model)
    shared = Shared(
        _wishes(ring, model),
        _conduct(base, ring, model),
        text,
        Prompts(base, text),
        notes or Notes(),
        Forms(),
        Numbers(after),
    )
    if ring.replicas > 1:
        return _several(shared, model, ring.replicas)
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


def _check(ring: RingOptions, model: ModelInfo) -> None:
    """Raises InvalidRequest."""
    if not 0 < ring.workers <= model.layers:
        raise InvalidRequest(f"{ring.workers} workers cannot share {model.layers} layers", "workers")
    if ring.max_stages is not None and ring.max_stages < ring.workers:
        raise InvalidRequest(f"max_stages {ring.max_stages} < workers {ring.workers}", "max_stages")


def _describe(base: Path, ring: RingOptions) -> ModelInfo:
    config = read_config(base)
    name = ring.name or base.resolve().name
    layers, positions = config.layers, config.max_positions
    return ModelInfo(name, fingerprint(base), layers, positions)


def _conduct(base: Path, ring: RingOptions, model: ModelInfo) -> ConductorConfig:
    config = read_config(base)
    heads = read_heads(base, config)
    return replace(ring.conduct, model=model.name, vocabulary=config.vocab, heads=heads)


def _wishes(ring: RingOptions, model: ModelInfo) -> Wishes:
    return Wishes(
        fingerprint=model.fingerprint,
        model_layers=model.layers,
        workers=ring.workers,
        drafter=ring.drafts,
        page_rows=ring.page_rows,
        rows=ring.rows,
        layout=ring.layout,
        shape=ring.shape,
        draft_timeout=ring.draft_timeout,
        placement=ring.placement,
        max_stages=ring.max_stages,
        take_over_after=ring.take_over_after,
        transport=ring.transport,
        comm_mode=ring.comm_mode,
    )
