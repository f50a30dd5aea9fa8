"""Builds a master for one or several rings, counts its running requests, and reports its state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Protocol

import structlog

from specsot.checkpoint.config import read_config, read_heads, read_importance
from specsot.checkpoint.fingerprint import fingerprint
from specsot.checkpoint.resolving import folder_of_model, name_of_model
from specsot.core.info import Info, MemberInfo, ModelInfo, Rebalanced
from specsot.errors import InvalidRequest, Unavailable
from specsot.events import Event, Numbered
from specsot.params import Ask
from specsot_master.core.inputs import MasterLeaving
from specsot_master.core.ring.epoch import EpochNumbers
from specsot_master.core.ring.ring_state import RingConfig, RingOptions
from specsot_master.engine import ANYBODY, Caller, Engine, EngineConfig, RequestJournal
from specsot_master.engine.event_stream import LoopClock, Subscription, Subscriptions
from specsot_master.engine.forecast_memory import ForecastMemory
from specsot_master.engine.grammar_sandbox import GrammarSandbox, measure_with
from specsot_master.fleet import Fleet
from specsot_master.members import Membership, TurnedAway
from specsot_master.prompts import Prompts
from specsot_master.replicas import MemberRouter, Replica, RequestRouter, total_info
from specsot_master.text import Text

log = structlog.get_logger()

DRAFTER_GRACE_SECONDS = 5.0  # see RingConfig: processes that start together; not measured


class RequestObserver(Protocol):
    """Follows one request; what it does must be quick."""

    def on_event(self, event: Event) -> None: ...

    def on_end(self) -> None:
        """No more events, for whatever reason."""
        ...


class RequestSource(Protocol):
    """An engine, or what deals requests out to several."""

    async def open(self, ask: Ask | None, caller: Caller, offset: int | None = None) -> Subscription:
        """A new request, or a resumable one of this id that is known. Whoever opens it closes it.

        Raises what is wrong with the call; the events raise what ends the request.
        """
        ...

    def cancel(self, request_id: str, owner: str = "") -> bool: ...


class RequestCounter:
    """The one entrance of requests, whether they come by gRPC, by HTTP or within the process: those that run
    are counted and watched. `info` reports the ring's state when it is called.
    """

    def __init__(self, leader: RequestSource, info: Callable[[], Info]) -> None:
        self._leader = leader
        self.info = info
        self._running = 0
        self.closing = False
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._watches: list[Callable[[Ask], RequestObserver]] = []

    def watch(self, begin: Callable[[Ask], RequestObserver]) -> None:
        """From now on every request is watched by what `begin` makes for it."""
        self._watches.append(begin)

    async def generate(
        self, ask: Ask | None, caller: Caller = ANYBODY, offset: int | None = None
    ) -> AsyncGenerator[Numbered, None]:
        """A request's events. offset: the rest of the caller's resumable one, and the ask may be left out.

        Raises what `open` does, and Unavailable for what is new once the master is closing.
        """
        new = ask if offset is None else None
        if new and self.closing:
            raise Unavailable("the master is shutting down")
        with self._counted(), self._watched(new) as watches:
            async with aclosing(await self._leader.open(ask, caller, offset)) as events:
                async for numbered in events:
                    for watch in watches:
                        watch.on_event(numbered.event)
                    yield numbered

    def cancel(self, request_id: str, owner: str = "") -> bool:
        return self._leader.cancel(request_id, owner)

    async def drain(self, grace: float) -> bool:
        """Refuse new requests; whether those that run ended by themselves within `grace` seconds."""
        self.closing = True
        try:
            async with asyncio.timeout(grace):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True

    @contextmanager
    def _counted(self) -> Generator[None]:
        self._running += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._quiet.set()

    @contextmanager
    def _watched(self, ask: Ask | None) -> Generator[list[RequestObserver]]:
        watches = [begin(ask) for begin in self._watches] if ask else []
        try:
            yield watches
        finally:
            for watch in watches:
                watch.on_end()


@dataclass(slots=True)
class Master:
    """`serving`: a ring is complete, and moves when there is work. changed: a ring came or broke."""

    text: Text
    model: ModelInfo
    replicas: tuple[Replica, ...]
    leader: Engine | RequestRouter
    members: Membership
    changed: asyncio.Event
    serving: bool = False
    leaving: bool = False
    turned_away: TurnedAway = field(default_factory=TurnedAway)
    requests: RequestCounter = field(init=False)

    def __post_init__(self) -> None:
        self.requests = RequestCounter(self.leader, self.info)

    def info(self) -> Info:
        told = total_info([one.info() for one in self.replicas])
        members = tuple(member for one in self.replicas for member in self._members_of(one))
        waiting = (*told.waiting_for, *self.turned_away.lines()) if told.waiting_for else ()
        return replace(told, models=(self.model,), members=members, waiting_for=waiting)

    def waiting_for(self) -> str:
        return "; ".join(self.info().waiting_for)

    async def rebalance(self) -> Rebalanced:
        """Every ring that is formed shares its layers out anew: see `Fleet.rebalance`."""
        formed = [one for one in self.replicas if one.fleet.formed] or self.replicas[:1]
        done = await asyncio.gather(*(one.fleet.rebalance() for one in formed))
        plans = "; ".join(one.plan for one in done)
        return Rebalanced(any(one.changed for one in done), max(one.epoch for one in done), plans)

    async def complete(self, with_drafter: bool = False) -> None:
        """Return once all rings are complete (and draft, if asked for).

        Raises Unavailable with the member's own words when one cannot take part.
        """
        for one in self.replicas:
            while not one.fleet.ready or (with_drafter and not one.drafts):
                if one.fleet.complaint:
                    raise Unavailable(one.fleet.complaint)
                self.changed.clear()
                await self.changed.wait()

    def end(self, reason: str) -> None:
        for one in self.replicas:
            one.engine.handle(MasterLeaving(reason))

    def _members_of(self, one: Replica) -> Iterable[MemberInfo]:
        members = one.fleet.members()
        if len(self.replicas) == 1:
            return members
        return (replace(member, replica=one.number) for member in members)


def assemble(
    base: Path,
    ring: RingOptions,
    after: int = 0,
    notes: RequestJournal | None = None,
    forecasts: Path | None = None,
) -> Master:
    """Read the model's tokenizer and config (no weights) and wire the rooms. Raises ModelError.

    after: the newest epoch that a master before this one may have begun. notes: what outlives this one.
    forecasts: folder of what forecasts are made of, a file for each model.
    """
    width = read_config(base).vocab
    text = Text(base, width)
    prompts = Prompts(base, text, ring.conduct.plan_style)
    model = _describe(base, ring, prompts.style, text.has_template)
    _check(ring, model)
    config = _engine_config(base, ring, model)
    journal = notes or RequestJournal()
    sandbox = GrammarSandbox(fewest=measure_with(base, width, text.end_ids))
    rings = _ring_config(ring, model)
    numbers = EpochNumbers(after)
    memory = ForecastMemory(forecasts and forecasts / f"{model.fingerprint}.json")
    readers = Subscriptions(config, LoopClock(), journal)
    several, event, replicas = ring.replicas > 1, asyncio.Event(), list[Replica]()
    router = RequestRouter(replicas)

    def settle() -> None:
        members.lend_workers()
        router.move_stranded()

    def changed() -> None:
        event.set()
        if several:  # once the fleet has done what it can by itself
            asyncio.get_running_loop().call_soon(settle)

    for number in range(ring.replicas):
        fleet = Fleet(rings, changed, numbers)
        fleet.user = engine = Engine(
            fleet, text, prompts, config, forms=sandbox, journal=journal, readers=readers, memory=memory
        )
        replicas.append(Replica(number, engine, fleet))
    members = MemberRouter([one.fleet for one in replicas], changed)
    if several:
        return Master(text, model, tuple(replicas), router, members, event)
    return Master(text, model, tuple(replicas), replicas[0].engine, replicas[0].fleet, event)


def _check(ring: RingOptions, model: ModelInfo) -> None:
    """Raises InvalidRequest."""
    if not 0 < ring.workers <= model.layers:
        raise InvalidRequest(f"{ring.workers} workers cannot share {model.layers} layers", "workers")
    if ring.max_stages is not None and ring.max_stages < ring.workers:
        raise InvalidRequest(f"max_stages {ring.max_stages} < workers {ring.workers}", "max_stages")


def _describe(base: Path, ring: RingOptions, style: str, has_template: bool) -> ModelInfo:
    config = read_config(base)
    name = ring.name or name_of_model(base)
    layers = config.layers
    positions = config.max_positions
    if not has_template:
        log.warning(
            "the model has no chat template, so conversations are written as user: ... assistant: ...; "
            "a base model may continue the question instead of answering it",
            model=name,
        )
    return ModelInfo(name, fingerprint(base), layers, positions, style, not has_template)


def _engine_config(base: Path, ring: RingOptions, model: ModelInfo) -> EngineConfig:
    config = read_config(base)
    folder = folder_of_model(base)
    heads = read_heads(folder, config)
    importance = read_importance(folder, config)
    known = replace(ring.conduct, model=model.name, vocabulary=config.vocab, heads=heads)
    return replace(known, importance=importance, recurrent=config.delta is not None)


def _ring_config(ring: RingOptions, model: ModelInfo) -> RingConfig:
    wished = {one.name: getattr(ring, one.name) for one in fields(ring)}
    grace = DRAFTER_GRACE_SECONDS if ring.drafts else 0
    return RingConfig(**wished, fingerprint=model.fingerprint, model_layers=model.layers, drafter_grace=grace)
