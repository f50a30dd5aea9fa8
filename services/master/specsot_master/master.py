"""Builds a master for one or several rings, counts its running requests, and reports its state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Protocol

import structlog

from specsot.checkpoint.config import ModelConfig, read_config, read_heads, read_importance
from specsot.checkpoint.fingerprint import fingerprint
from specsot.checkpoint.resolving import folder_of_model, name_of_model
from specsot.core.info import Info, MemberInfo, ModelInfo, Rebalanced
from specsot.errors import InvalidRequest, Unavailable
from specsot.events import Event, Numbered
from specsot.members import Head
from specsot.params import Ask
from specsot_master.core.inputs import MasterLeaving
from specsot_master.core.ring.epoch import EpochNumbers
from specsot_master.core.ring.ring_state import RingConfig, RingOptions
from specsot_master.engine import ANONYMOUS, Caller, Engine, EngineConfig, RequestJournal
from specsot_master.engine.event_stream import LoopClock, Subscription, Subscriptions
from specsot_master.engine.forecast_memory import ForecastMemory
from specsot_master.engine.grammar_sandbox import GrammarSandbox, measure_with
from specsot_master.fleet import Fleet
from specsot_master.members import Membership, RefusedMembers
from specsot_master.prompts import Prompts
from specsot_master.replicas import MemberRouter, Replica, RequestRouter, total_info
from specsot_master.text import Text

log = structlog.get_logger()


class RequestObserver(Protocol):
    """Observes the events of one request. Called on the event loop, so its methods must be quick."""

    def on_event(self, event: Event) -> None:
        """Observe an event before the client receives it.

        event: the event, without its number.
        """

    def on_end(self) -> None:
        """Observe the end, whether the request has finished, failed or been closed: no events follow."""


class RequestSource(Protocol):
    """Opens and cancels requests: the engine of a single ring, or the router over several rings."""

    async def open(self, ask: Ask | None, caller: Caller, offset: int | None = None) -> Subscription:
        """Open a new request, or resume a known one. Return a subscription that yields its events, which the
        caller must close.

        ask: what the client asks for; None if a known request is resumed, which `offset` then names.
        caller: who asks: the request id that the client chose, its name for fairness, its time limit, and the
            owner.
        offset: number of the first event to yield of the caller's known request; None for a new request.

        Raises the errors of `Engine.open`, such as InvalidRequest and Unavailable.
        """

    def cancel(self, request_id: str, owner: str = "") -> bool:
        """Cancel a request; the text so far becomes its answer. Return False if no such request of this owner
        waits or runs.

        request_id: the id under which the request was opened.
        owner: the owner of the caller's token; "" for a caller without a token.
        """


class RequestCounter:
    """The single entry point of requests from gRPC, HTTP and the same process; counts and observes them.

    The count lets the master wait for running requests before it shuts down.

    The attribute `closing` is set once new requests are refused.
    """

    def __init__(self, source: RequestSource, info: Callable[[], Info]) -> None:
        """Create an entry point without running requests.

        source: opens and cancels the requests: the engine of a single ring, or the router over several.
        info: a function that returns the present state of the ring; it becomes the attribute of the same
            name.
        """
        self._source = source
        self.info = info
        self._running = 0
        self.closing = False
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._watches: list[Callable[[Ask], RequestObserver]] = []

    def watch(self, create_observer: Callable[[Ask], RequestObserver]) -> None:
        """Observe every new request from now on.

        create_observer: called with what the client asks for, once per new request; returns the object that
            receives the request's events and its end.
        """
        self._watches.append(create_observer)

    async def generate(
        self, ask: Ask | None, caller: Caller = ANONYMOUS, offset: int | None = None, join_text: bool = False
    ) -> AsyncGenerator[Numbered, None]:
        """Yield the events of a new request, or the rest of a resumable one. Closing the generator cancels
        the request, unless the request is resumable. Events come with their numbers, from 0 or from `offset`
        on; the last one is Finished. Observers see each event, joined or not, before the client gets it.

        ask: what the client asks for. When a request is resumed, either None or the same as before; a resumed
            request is not observed again.
        caller: who asks: the request id that the client chose, its name for fairness, its time limit in
            seconds, and the owner.
        offset: number of the first event to yield of the caller's known request; None for a new request.
        join_text: True to join pieces of answer text that wait for the client, so that a client that reads
            slowly costs one message for several steps. Ignored for a resumable or resumed request, whose
            events keep their numbers.

        Raises what `Engine.open` and its events raise, and Unavailable for a new request while the master
        shuts down.
        """
        join_text = join_text and offset is None and ask is not None and not ask.resumable
        async with self.opened(ask, caller, offset) as (events, watches):
            async for numbered in events:
                if join_text:
                    numbered = events.join(numbered)
                for watch in watches:
                    watch.on_event(numbered.event)
                yield numbered

    @asynccontextmanager
    async def opened(
        self, ask: Ask | None, caller: Caller = ANONYMOUS, offset: int | None = None
    ) -> AsyncGenerator[tuple[Subscription, list[RequestObserver]]]:
        """Open a new request, or resume one, for the block. Yield its events, and the observers to which the
        block passes each event before the client receives it. At the end of the block the request is
        cancelled, unless it has ended or is resumable.

        ask: what the client asks for; see `generate`.
        caller: who asks.
        offset: number of the first event of the caller's known request; None for a new request.

        Raises what `Engine.open` raises, and Unavailable for a new request while the master shuts down.
        """
        new = ask if offset is None else None
        if new and self.closing:
            raise Unavailable("the master is shutting down")
        watches: list[RequestObserver] = []
        # `drain` waits until no request is counted.
        self._running += 1
        self._quiet.clear()
        try:
            watches += (begin(new) for begin in self._watches if new)
            async with aclosing(await self._source.open(ask, caller, offset)) as events:
                yield events, watches
        finally:
            for watch in watches:
                watch.on_end()
            self._running -= 1
            if not self._running:
                self._quiet.set()

    def cancel(self, request_id: str, owner: str = "") -> bool:
        """Cancel a request; the text so far becomes its answer. Return False if no such request of this owner
        waits or runs.

        request_id: the id under which the request was opened.
        owner: the owner of the caller's token; "" for a caller without a token.
        """
        return self._source.cancel(request_id, owner)

    async def drain(self, grace_seconds: float) -> bool:
        """Refuse new requests from now on, and wait for the running ones. Return True if all of them ended in
        time, at once if none runs; return False, and leave them running, if some did not. Requests that a
        client resumes are still accepted.

        grace_seconds: the longest time to wait, in seconds.
        """
        self.closing = True
        try:
            async with asyncio.timeout(grace_seconds):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class ServingState:
    """What status endpoints report of a master at one moment.

    info: The state of all rings and members.
    serving: True if a ring is complete, and makes progress if it has work.
    closing: True once new requests are refused because the master shuts down.
    head: The draft head of the first ring that drafts, or None.
    """

    info: Info
    serving: bool
    closing: bool = False
    head: Head | None = None


@dataclass(slots=True)
class Master:
    """A master without its ports: one or several rings, what they share, and the entry point of requests.

    text: Tokenizer and chat template of the model.
    model: Name, fingerprint and limits of the model, as clients see them.
    replicas: The rings, each with its engine and its fleet.
    leader: Opens requests: the engine of a single ring, or the router over several.
    members: Admits members: the fleet of a single ring, or the router over several.
    changed: Set whenever a ring becomes complete or breaks. A task clears it before it waits for it.
    serving: True while a ring is complete, and makes progress if it has work; the health checks set it.
    leaving: True once the master shuts down.
    refused_members: Members that were refused, with the reasons.
    requests: The entry point of all requests.
    """

    text: Text
    model: ModelInfo
    replicas: tuple[Replica, ...]
    leader: Engine | RequestRouter
    members: Membership
    changed: asyncio.Event
    serving: bool = False
    leaving: bool = False
    refused_members: RefusedMembers = field(default_factory=RefusedMembers)
    requests: RequestCounter = field(init=False)

    def __post_init__(self) -> None:
        """Create the entry point of all requests."""
        self.requests = RequestCounter(self.leader, self.info)

    def info(self) -> Info:
        """Return the present state of all rings and members. While a ring waits for members, the state's
        `waiting_for` also says why members were refused; once all rings are complete, it is empty. The model
        is a member of the state, too.
        """
        total = total_info([one.info() for one in self.replicas])
        members = tuple(member for one in self.replicas for member in self._members_of(one))
        waiting = (*total.waiting_for, *self.refused_members.lines()) if total.waiting_for else ()
        return replace(total, models=(self.model,), members=members, waiting_for=waiting)

    def state(self) -> ServingState:
        """Return what status endpoints report of this master now."""
        rings = [one.fleet.ring for one in self.replicas if one.drafts]
        head = next((ring.head for ring in rings if ring), None)
        return ServingState(self.info(), self.serving, self.requests.closing, head)

    def waiting_for(self) -> str:
        """Return in words what each incomplete ring waits for; empty if all rings are complete."""
        return "; ".join(self.info().waiting_for)

    async def rebalance(self) -> Rebalanced:
        """Split the layers of every formed ring anew over its workers, and return when all of them run again.
        The result covers all rings: changed if one of them has changed, the largest epoch number, and the
        rings' plans in words. Rings that are not formed are left out; if none is formed, the first one raises
        Unavailable.

        Raises the errors of `Fleet.rebalance`: Unavailable without a ring or if it breaks meanwhile, and
        Refused if KV memory is too small.
        """
        formed = [one for one in self.replicas if one.fleet.formed] or self.replicas[:1]
        done = await asyncio.gather(*(one.fleet.rebalance() for one in formed))
        plans = "; ".join(one.plan for one in done)
        return Rebalanced(any(one.changed for one in done), max(one.epoch for one in done), plans)

    async def complete(self, with_drafter: bool = False) -> None:
        """Return once all rings are complete. The rings are waited for one after the other.

        Return at once if all are complete already; otherwise wait without a time limit.

        with_drafter: True to wait until each ring also has a drafter.

        Raises Unavailable with the reason if an epoch failed because a member cannot take part.
        """
        for one in self.replicas:
            while not one.fleet.ready or (with_drafter and not one.drafts):
                if one.fleet.complaint:
                    raise Unavailable(one.fleet.complaint)
                self.changed.clear()
                await self.changed.wait()

    def end(self, reason: str) -> None:
        """Fail all requests of all rings, and refuse further ones.

        reason: the error message that clients receive.
        """
        for one in self.replicas:
            one.engine.handle(MasterLeaving(reason))

    def _members_of(self, replica: Replica) -> Iterable[MemberInfo]:
        """Yield the members of a ring for status pages; with the ring's number, if there are several rings. A
        master with a single ring leaves the number out.

        replica: one of the master's rings.
        """
        members = replica.fleet.members()
        if len(self.replicas) == 1:
            return members
        return (replace(member, replica=replica.number) for member in members)


def assemble(
    base: Path,
    ring: RingOptions,
    newest_epoch: int = 0,
    request_journal: RequestJournal | None = None,
    forecast_directory: Path | None = None,
) -> Master:
    """Read the model's tokenizer and config (no weights), and create a master with its engines and fleets.
    With several rings, idle workers and stranded requests are moved between the rings after every change.

    The returned master's `leader` and `members` are the engine and the fleet of a single ring, or routers
    over several rings.

    base: the model's directory.
    ring: the options of the rings.
    newest_epoch: the largest epoch number that an earlier master may have used; new epochs get larger
        numbers.
    request_journal: the journal that survives a restart, or None to keep nothing.
    forecast_directory: the directory with the measured costs for forecasts, one file per model; None to save
        none.

    Raises ModelError if the model's files cannot be used, and InvalidRequest if workers or stages do not suit
    its number of layers.
    """
    width = read_config(base).vocab
    text = Text(base, width)
    prompts = Prompts(base, text, ring.conduct.plan_style)
    model = _describe(base, ring, prompts.style, text.has_template)
    shape = read_config(base)
    _check(ring, model, shape.tail)
    config = _engine_config(base, ring, model)
    journal = request_journal or RequestJournal()
    sandbox = GrammarSandbox(measure=measure_with(base, width, text.end_ids))
    rings = _ring_config(ring, model, shape)
    numbers = EpochNumbers(newest_epoch)
    memory = ForecastMemory(forecast_directory and forecast_directory / f"{model.fingerprint}.json")
    readers = Subscriptions(config, LoopClock(), journal)
    several, event, replicas = ring.replicas > 1, asyncio.Event(), list[Replica]()
    router = RequestRouter(replicas)

    def settle() -> None:
        """Move idle workers to rings that lack one, and requests to rings that can continue them."""
        members.lend_workers()
        router.move_parked()

    def changed() -> None:
        """Handle that a ring has become complete or has broken, or that members have joined or left."""
        event.set()
        # Deferred, so that the fleet first does what it can by itself.
        if several:
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


def _check(ring: RingOptions, model: ModelInfo, tail: int) -> None:
    """Raise InvalidRequest if the numbers of workers, stages and layers do not fit together. There must be at
    least one worker, at most one per layer, where layers that one stage must hold count once, and
    `max_stages` must not be below the workers.

    ring: the options of the rings.
    model: what is known of the model; only its number of layers is used.
    tail: how many of the last layers one stage must hold.
    """
    if model.layers - tail + 1 < ring.workers <= model.layers:
        raise InvalidRequest(
            f"{ring.workers} workers cannot share {model.layers} layers, of which the last {tail} share keys "
            "and values and cannot be apart",
            "workers",
        )
    if not 0 < ring.workers <= model.layers:
        raise InvalidRequest(f"{ring.workers} workers cannot share {model.layers} layers", "workers")
    if ring.max_stages is not None and ring.max_stages < ring.workers:
        raise InvalidRequest(f"max_stages {ring.max_stages} < workers {ring.workers}", "max_stages")


def _describe(base: Path, ring: RingOptions, plan_style: str, has_template: bool) -> ModelInfo:
    """Return what clients learn of the model; log a warning if the model has no chat template. The public
    name is the option's, else that of the model's directory.

    base: the model's directory.
    ring: the options of the rings, which may give the model a public name.
    plan_style: the model's way to plan, as `--plan-style` names it.
    has_template: True if the model's files hold a chat template.
    """
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
    return ModelInfo(name, fingerprint(base), layers, positions, plan_style, not has_template)


def _engine_config(base: Path, ring: RingOptions, model: ModelInfo) -> EngineConfig:
    """Return the engine's options, completed by what is known of the model. `heads` and `importance` are None
    if the model's directory holds no measurement of its attention heads.

    base: the model's directory.
    ring: the options of the rings; its part `conduct` says how requests are treated.
    model: what clients learn of the model; only its public name is used.

    Raises ModelError if the model's files cannot be read.
    """
    config = read_config(base)
    folder = folder_of_model(base)
    heads = read_heads(folder, config)
    importance = read_importance(folder, config)
    known = replace(ring.conduct, model=model.name, vocabulary=config.vocab, heads=heads)
    others = config.transformers is not None
    known = replace(known, importance=importance, transformers=others)
    return replace(known, allows_policies=config.allows_policies)


def _ring_config(ring: RingOptions, model: ModelInfo, shape: ModelConfig) -> RingConfig:
    """Return the fleet's options, completed by what is known of the model. The first ring waits
    `ring.drafter_wait` seconds for a drafter, or not at all if the options want none.

    ring: the options of the rings.
    model: what clients learn of the model; its fingerprint and number of layers are used.
    shape: the model's config, which says where the model can be cut and whether every stage embeds.
    """
    wished = {one.name: getattr(ring, one.name) for one in fields(ring)}
    grace = ring.drafter_wait if ring.drafts else 0
    return RingConfig(
        **wished,
        fingerprint=model.fingerprint,
        model_layers=model.layers,
        tail_layers=shape.tail,
        embeds_everywhere=shape.layer_input_size > 0,
        drafter_grace=grace,
    )
