"""Opens a fleet: in this process, as child processes, or behind a remote master."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast

from specsot.checkpoint.cache import cache_folder
from specsot.checkpoint.config import read_config
from specsot.core.info import Info
from specsot.core.view import View, advance
from specsot.errors import SpecsotError
from specsot.events import Numbered
from specsot.members import TreeShape
from specsot.params import Ask
from specsot_app.fleet import demo
from specsot_app.fleet.devices import with_device
from specsot_app.fleet.options import (
    FleetOptions,
    Models,
    check_without_model,
    models_of,
    public_name,
    resolved,
    warn_of_fleet_elsewhere,
)

if TYPE_CHECKING:
    from specsot_master.core.ring.ring_state import RingOptions

# Seconds. How long stage 0 waits for a draft tree if every step has to carry a whole tree. With the default
# of one second, nearly all steps went without trees on two cores with 14 busy processes. A bound; untuned.
WHOLE_TREE_TIMEOUT = 60.0

# Reports progress: called with a kind of thing, how many of them are ready, and their total.
Watch = Callable[[str, int, int], None]


class FleetClient(Protocol):
    """A client that answers requests. Events of one request come in order, `Finished` last."""

    def generate(self, ask: Ask) -> AsyncIterator[Numbered]:
        """Yield the request's events in order, `Finished` last. Closing the iterator early cancels the
        request.

        ask: The request.
        """

    async def cancel(self, request: str) -> Any:
        """Cancel a running request; it then ends with the reason CANCELLED.

        request: The request's id, which its `Started` event has. An unknown id has no effect.
        """

    async def info(self) -> Info:
        """Return the state of the fleet: models, members, pages, requests, steps."""

    async def close(self) -> None:
        """End the fleet, or only the connection if the fleet belongs to a running master."""


async def final_view(fleet: FleetClient, ask: Ask) -> View:
    """Send a request to the fleet, wait for its end, and return the view after the last event.

    Raises what the fleet raises. If the events end early, `finished` of the view is None. If this call is
    cancelled, so is the request.

    fleet: The client that answers.
    ask: The request.
    """
    view = View()
    async with aclosing(cast("AsyncGenerator[Numbered]", fleet.generate(ask))) as events:
        async for numbered in events:
            view = advance(view, numbered.event)
    return view


def with_demo(options: FleetOptions, out: TextIO) -> FleetOptions:
    """Return options that name a model: SmolLM2 and its head if none is named.

    Options with a master, a model or demo="small" are returned unchanged; so are options for which SmolLM2
    cannot be fetched, and then the small bundled model is used.

    A `draft_model` that is given is kept. The bundled head is named only if `drafter` is None or "eagle".
    Log lines go to stderr from now on, unless this process has configured its logs.

    options: As the user gave them.
    out: Stream that gets a line if SmolLM2 is being fetched, or cannot be fetched.
    Raises what `check_without_model` raises, before anything is fetched.
    """
    from specsot_app.runtime import log_to_stderr

    log_to_stderr()
    if options.master is not None or options.model is not None or options.demo == "small":
        return options
    check_without_model(options)
    try:
        model = demo.fetch(cache_folder(), out)
    except (SpecsotError, OSError) as error:
        print(f"specsot: no SmolLM2 ({error}): {demo.SMALL_MODEL_NOTICE}", file=out)
        return options
    draft_model = options.draft_model or (demo.head_folder() if options.drafter in (None, "eagle") else None)
    return replace(options, model=model, draft_model=draft_model)


def prepared(options: FleetOptions, out: TextIO) -> FleetOptions:
    """Return the options with model and device chosen, after a check of everything that can be checked before
    anything is loaded.

    With a `master`, no model is looked up, the device becomes "cpu" if it is "auto", and a warning names the
    options that have no effect on that master's fleet.

    options: As the user gave them.
    out: Stream that gets a line about the model or the device that was chosen.
    Raises ModelError, InvalidRequest.
    """
    if options.master is not None:
        warn_of_fleet_elsewhere(options)
    options = with_device(with_demo(options, out), out)
    if options.master is None:
        models_of(options)
    return options


def has_drafter(info: Info) -> bool:
    """Return whether a drafter is among the members of the fleet.

    info: State of the fleet.
    """
    return any(member.kind == "drafter" for member in info.members)


def print_template_notice(info: Info, out: TextIO) -> None:
    """Print a line if the fleet's first model has no chat template: the model is then probably a base model,
    which may continue the question instead of answering it. The master logs this, too, but a fleet in this
    process logs only errors.

    info: State of the fleet. Without a model, nothing is printed.
    out: The stream for notices, which is not that of the answer.
    """
    if info.models and info.models[0].no_chat_template:
        reason = "a base model may continue the question instead of answering it"
        print(f"specsot: {info.models[0].name} has no chat template: {reason}", file=out, flush=True)


# Opens the fleet that the options describe.
Opener = Callable[[FleetOptions], Coroutine[Any, Any, FleetClient]]


async def open_fleet(options: FleetOptions, on_progress: Watch | None = None) -> FleetClient:
    """Open the fleet that the options describe: connect to a master, start processes, or load it into this
    process.

    A `master` takes precedence over `kind`. The call returns once the ring is complete and all members have
    joined, or, with a `master`, once it answers.

    options: Options of the fleet, with model and device chosen, as `prepared` returns them.
    on_progress: Called with what is counted ("layers" or "services"), how many are ready, and their total,
        perhaps on another thread; None: nothing is reported.
    Raises Unavailable (no master answers), ModelError, HeadMismatch.
    """
    from specsot_app.runtime import log_to_stderr

    log_to_stderr()
    if options.master is not None:
        return await options.client.connect(options.master)
    if options.kind == "processes":
        from specsot_app.fleet.processes import ProcessFleet

        return await ProcessFleet.start(options, models_of(options), on_progress=on_progress)
    return await open_embedded(options, models_of(options), on_progress)


async def open_embedded(
    options: FleetOptions, models: Models, on_progress: Watch | None = None
) -> FleetClient:
    """Load a fleet into this process, and return it once its ring is complete.

    Without `stages` and places, the layer ranges decide on the number of workers, else one worker has all
    layers. From now on only errors are logged. Raises what loading raises.

    options: Options of the fleet, with model and device chosen, as `prepared` returns them.
    models: The directories to load.
    on_progress: Called with "layers", how many are loaded, and their total, on another thread; None: nothing
        is reported.
    """
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
    loaded = summed_progress(on_progress, read_config(models.base).layers) if on_progress else None
    return await EmbeddedFleet.start(local, on_loaded=loaded)


def ring_of(options: FleetOptions) -> RingOptions:
    """Return the ring's options. If trees are fixed, stage 0 waits for each tree, however busy the machine
    is.

    A fixed tuner (`drafting.tuner`) also makes stage 0 wait for each tree, at most WHOLE_TREE_TIMEOUT
    seconds.

    options: Options of the fleet, of which tree, layout, plan style and drafting are read.
    """
    from specsot_master.core.ring.ring_state import EngineConfig, RingOptions

    fixed = options.tree == "fixed"
    ring = RingOptions(
        name=public_name(options),
        layout=options.layout,
        shape=TreeShape(fixed=fixed),
        conduct=EngineConfig(plan_style=options.plan_style or "auto"),
    )
    waits_for_trees = fixed or options.drafting.tuner == "fixed"
    return replace(ring, draft_timeout=WHOLE_TREE_TIMEOUT) if waits_for_trees else ring


def summed_progress(on_progress: Watch, layers: int) -> Callable[[str, int], None]:
    """Return a callback, which returns None, that adds up the layers that all workers have loaded, and
    reports the sum.

    A worker's newer count replaces its older one.

    on_progress: Called with "layers", the sum so far, and `layers`.
    layers: Number of layers of the model; a larger sum is reported as this number.
    """
    loaded_layers: dict[str, int] = {}

    def loaded(worker: str, count: int) -> None:
        """Record how many layers a worker has loaded, and report the sum of all workers.

        worker: The worker's name.
        count: Its number of loaded layers so far.
        """
        loaded_layers[worker] = count
        on_progress("layers", min(sum(loaded_layers.values()), layers), layers)

    return loaded
