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

# Seconds. How long stage 0 waits for a draft tree if every step has to carry a whole tree. With the default
# of one
# second, nearly all steps went without trees on two cores with 14 busy processes. A bound; untuned.
WHOLE_TREE_TIMEOUT = 60.0

# Called with a kind of thing, how many of them are present, and of how many.
Watch = Callable[[str, int, int], None]


class FleetClient(Protocol):
    """A client that answers requests. Events of one request come in order, `Finished` last."""

    def generate(self, ask: Ask) -> AsyncIterator[Numbered]:
        """Yield the request's events. Closing the iterator early cancels the request."""
        ...

    async def cancel(self, request: str) -> Any: ...

    async def info(self) -> Info: ...

    async def close(self) -> None: ...


async def hear(fleet: FleetClient, ask: Ask) -> View:
    """Ask the fleet, and return the view after the last event."""
    view = View()
    async with aclosing(cast("AsyncGenerator[Numbered]", fleet.generate(ask))) as events:
        async for numbered in events:
            view = advance(view, numbered.event)
    return view


async def finish(fleet: FleetClient, ask: Ask) -> Finished:
    """Return the end of one request. Raises Unavailable if the request ended without an answer."""
    end = (await hear(fleet, ask)).finished
    if end is None or end.reason not in (Reason.STOP, Reason.LENGTH):
        raise Unavailable(f"the answer ended with {end.reason.value if end else 'nothing'}")
    return end


def with_demo(options: FleetOptions, out: TextIO) -> FleetOptions:
    """Return options that name a model: SmolLM2 and its head if none is named.

    out: gets a line if SmolLM2 cannot be fetched; the small bundled model is used then.
    """
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
    """Return the options with model and device chosen, and check them before anything is loaded.

    Raises ModelError, InvalidRequest.
    """
    options = with_device(with_demo(options, out), out)
    if options.master is None:
        models_of(options)
    return options


def has_drafter(known: Info) -> bool:
    """Return whether the fleet has a drafter."""
    return any(member.kind == "drafter" for member in known.members)


Opener = Callable[[FleetOptions], Coroutine[Any, Any, FleetClient]]


async def open_fleet(options: FleetOptions, watch: Watch | None = None) -> FleetClient:
    """Open the fleet that the options describe: connect to a master, start processes, or load it into this
    process.

    watch: receives progress, perhaps on another thread.
    Raises Unavailable (no master answers), ModelError, HeadMismatch.
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
    """Load a fleet into this process."""
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
    """Return the ring's options. If trees are fixed, stage 0 waits for each tree, however busy the machine
    is.
    """
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
    """Return a callback that adds up the layers that each worker has loaded, and passes the sum to
    `watch`.
    """
    there: dict[str, int] = {}

    def loaded(worker: str, count: int) -> None:
        there[worker] = count
        watch("layers", min(sum(there.values()), layers), layers)

    return loaded
