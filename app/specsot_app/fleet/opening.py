"""Opens a fleet: in this process, as child processes, or behind a remote master."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast

from specsot.checkpoint.config import read_config
from specsot.core.info import Info
from specsot.core.view import View, advance
from specsot.errors import SpecsotError, Unavailable
from specsot.events import Finished, Numbered, Reason
from specsot.members import TreeShape
from specsot.params import Ask
from specsot_app.fleet import demo
from specsot_app.fleet.devices import with_device
from specsot_app.fleet.options import FleetOptions, Models, models_of, public_name, resolved

if TYPE_CHECKING:
    from specsot_master.core.ring.ring_state import RingOptions

# Seconds that stage 0 waits for a draft tree where every lap is to have a whole one. At the usual second,
# nearly all laps went without, with 14 busy processes on two cores. A bound, not tuned.
WHOLE_TREE_TIMEOUT = 60.0

Watch = Callable[[str, int, int], None]  # (what, how many of them are there, of how many)


class FleetClient(Protocol):
    """Something that answers requests. Events of one request come in order, `Finished` last."""

    def generate(self, ask: Ask) -> AsyncIterator[Numbered]:
        """Closing the iterator early cancels the request."""
        ...

    async def cancel(self, request: str) -> Any: ...

    async def info(self) -> Info: ...

    async def close(self) -> None: ...


async def hear(fleet: FleetClient, ask: Ask) -> View:
    view = View()
    async with aclosing(cast("AsyncGenerator[Numbered]", fleet.generate(ask))) as events:
        async for numbered in events:
            view = advance(view, numbered.event)
    return view


async def finish(fleet: FleetClient, ask: Ask) -> Finished:
    """The end of one request. Raises Unavailable where it is not that of an answer."""
    end = (await hear(fleet, ask)).finished
    if end is None or end.reason not in (Reason.STOP, Reason.LENGTH):
        raise Unavailable(f"the answer ended with {end.reason.value if end else 'nothing'}")
    return end


def with_demo(options: FleetOptions, out: TextIO) -> FleetOptions:
    """Options that name a model: SmolLM2 and its head where none is named. out: hears why that cannot be."""
    from specsot_app.runtime import log_to_stderr

    log_to_stderr()
    if options.master is not None or options.model is not None or options.demo == "small":
        return options
    try:
        model = demo.smollm2(out)
    except (SpecsotError, OSError) as error:
        print(f"specsot: no SmolLM2 ({error}): {demo.SMALL}", file=out)
        return options
    drafts = options.draft_model or (demo.head() if options.drafter in (None, "eagle") else None)
    return replace(options, model=model, draft_model=drafts)


def prepared(options: FleetOptions, out: TextIO) -> FleetOptions:
    """The same with a device; what cannot be is told before anything is loaded. Raises ModelError,
    InvalidRequest.
    """
    options = with_device(with_demo(options, out), out)
    if options.master is None:
        models_of(options)
    return options


def has_drafter(known: Info) -> bool:
    return any(member.kind == "drafter" for member in known.members)


Opener = Callable[[FleetOptions], Coroutine[Any, Any, FleetClient]]


async def open_fleet(options: FleetOptions, watch: Watch | None = None) -> FleetClient:
    """Raises Unavailable (no master there), ModelError, HeadMismatch.

    watch: hears what is there already, perhaps on another thread.
    """
    from specsot_app.runtime import log_to_stderr

    log_to_stderr()
    if options.master is not None:
        return await options.client.connect(options.master)
    if options.kind == "processes":
        from specsot_app.fleet.processes import ProcessFleet

        return await ProcessFleet.start(options, models_of(options), watch=watch)
    return await open_embedded(options, models_of(options), watch)


async def open_embedded(options: FleetOptions, models: Models, watch: Watch | None = None) -> FleetClient:
    from specsot_app.fleet.embedded import EmbeddedFleet, EmbeddedOptions
    from specsot_app.runtime import quiet_logs

    quiet_logs()
    local = EmbeddedOptions(
        resolved(options, models),
        ring_of(options),
        stages=options.stages or len(models.places) or None,
        layers=models.layers,
        devices=tuple(place.device for place in models.places),
    )
    loaded = adding_up(watch, read_config(models.base).layers) if watch else None
    return await EmbeddedFleet.start(local, loaded=loaded)


def ring_of(options: FleetOptions) -> RingOptions:
    """Whole trees in every lap are waited for, however busy the machine is."""
    from specsot_master.core.ring.ring_state import EngineConfig, RingOptions

    fixed = options.tree == "fixed"
    ring = RingOptions(
        name=public_name(options),
        layout=options.layout,
        shape=TreeShape(fixed=fixed),
        conduct=EngineConfig(plan_style=options.plan_style or "auto"),
    )
    whole = fixed or options.drafting.tuner == "fixed"
    return replace(ring, draft_timeout=WHOLE_TREE_TIMEOUT) if whole else ring


def adding_up(watch: Watch, layers: int) -> Callable[[str, int], None]:
    """Every worker tells of its own layers; `watch` hears of all."""
    there: dict[str, int] = {}

    def loaded(worker: str, count: int) -> None:
        there[worker] = count
        watch("layers", min(sum(there.values()), layers), layers)

    return loaded
