"""`specsot serve`: master, workers and drafter as processes of this machine, until told to stop.

Refuses to know how a service works; it starts them and passes their lines on.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from specsot_app.commands import options
from specsot_app.fleets import Models, Wanted, models_of
from specsot_app.running import run

if TYPE_CHECKING:
    from specsot_app.processes import Serving

HTTP_PORT = 8000


def serve(
    ctx: typer.Context,
    host: Annotated[
        str, typer.Option(help="Where the master listens: an address of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Its port for gRPC; 0 for a free one.")] = 50050,
    http_port: Annotated[
        int | None,
        typer.Option(help="Its port for HTTP; 8000, or a free one if that is taken."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The model's public name.")] = None,
    max_requests: Annotated[int | None, typer.Option(min=1, help="Requests in the ring at once.")] = None,
    max_queue: Annotated[
        int | None, typer.Option(min=1, help="Requests that may wait for that; more are refused.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let other machines in, whoever they are.")
    ] = False,
    kv_memory: Annotated[
        str | None, typer.Option(help="Memory for KV pages of each worker and the drafter, such as 4G.")
    ] = None,
    stages: Annotated[
        int | None, typer.Option(help="Layer ranges, one worker each; two if not given.")
    ] = None,
    layers: options.Layers = None,
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    draft_format: options.DraftFormat = "safetensors",
    drafter: options.Drafter = None,
    model_format: options.ModelFormat = "safetensors",
    drafter_rope_theta: options.RopeTheta = None,
    aux_layers: options.AuxLayers = None,
    draft_mode: options.DraftShape = None,
    draft_tokens: options.DraftTokens = None,
    draft_breadth: options.DraftBreadth = None,
    draft_nodes: options.DraftNodes = None,
    draft_threshold: options.DraftThreshold = None,
    tuner: options.Tuner = "measured",
    blend: options.Blend = True,
    dtype: options.Numbers = "auto",
    device: options.Device = "cpu",
) -> int:
    """Start a whole fleet here; Ctrl-C ends it."""
    from specsot_app.processes import Serving, flags_of

    wanted = replace(options.wanted_by(ctx.params), kind="processes")
    conduct = flags_of(
        name=name, max_requests=max_requests, max_queue=max_queue, insecure="on" if insecure else None
    )
    serving = Serving(host, conduct, flags_of(kv_memory=kv_memory))
    with suppress(KeyboardInterrupt):  # being told to stop is how a fleet ends well
        run(keep(wanted, models_of(wanted), port, http_port_of(http_port), serving))
    return 0


def http_port_of(asked: int | None) -> int | None:
    """Where the master serves HTTP; None where nobody asked and the packages are not there."""
    from specsot_app.processes import free_port, is_free

    if asked is None and not all(map(find_spec, ("fastapi", "uvicorn", "prometheus_client"))):
        return None
    if asked is None:
        return HTTP_PORT if is_free(HTTP_PORT) else free_port()
    return asked or free_port()


async def keep(wanted: Wanted, models: Models, port: int, http_port: int | None, serving: Serving) -> None:
    """Run the fleet until it is told to stop, or one of its processes ends."""
    from specsot_app.processes import ProcessFleet

    fleet = await ProcessFleet.start(wanted, models, port, pass_on, http_port, serving)
    try:
        for child in fleet.children:
            print(f"{child.service.name:<10} {child.service.address}  process {child.pid}", flush=True)
        print(f'ready: specsot infer --master {fleet.children[0].service.address} "..."', flush=True)
        if http_port is not None:
            print(f"or by a browser, or an OpenAI client: http://{serving.reached(http_port)}/", flush=True)
        raise await fleet.ended()
    finally:
        await fleet.close()


def pass_on(service: str, line: str) -> None:
    """A service's own words."""
    print(f"{service} | {line}", file=sys.stderr, flush=True)
