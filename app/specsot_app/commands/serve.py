"""`specsot serve`: master, workers and drafter as processes, here and on other machines, until told to stop.

Refuses to know how a service works; it starts them and passes their lines on. Of those elsewhere it says how.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specsot.members import CommMode, Transport
from specsot.model.config import read_config
from specsot.params import Mode
from specsot_app.commands import options
from specsot_app.event_loop import run_until_signal
from specsot_app.fleets import Models, Wanted, models_of
from specsot_app.places import check_stages, places_of
from specsot_app.ranges import ranges_between

if TYPE_CHECKING:
    from specsot_app.child_process import Service
    from specsot_app.lineup import Serving
    from specsot_app.processes import Absent

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
    default_mode: Annotated[
        Mode | None, typer.Option(help="How OpenAI's clients are answered that name no mode. [direct]")
    ] = None,
    http_names: Annotated[
        str | None,
        typer.Option(help="What browsers may call it beside localhost, this host's name, addresses."),
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that running answers have to end once it is told to stop.")
    ] = 5.0,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let other machines in, whoever they are.")
    ] = False,
    devices: Annotated[
        str | None,
        typer.Option(help="A place for each stage, ring by ring: HOST#GPU or HOST#cpu, with commas."),
    ] = None,
    layer_splits: Annotated[
        str | None, typer.Option("--layer-splits", "--layer_splits", help="Where stages begin: 14,28.")
    ] = None,
    comm_mode: Annotated[
        CommMode | None,
        typer.Option("--comm-mode", "--comm_mode", help="p2p, or ring: stages talk to neighbours only."),
    ] = None,
    transport: Annotated[
        Transport | None, typer.Option(help="What carries messages between members.")
    ] = None,
    fleet_listen: Annotated[
        str | None, typer.Option(help="Where members elsewhere come in: HOST:PORT of this machine.")
    ] = None,
    certificates: Annotated[
        Path | None, typer.Option(help="Folder of docker/certificates.sh: TLS, and tokens of clients.")
    ] = None,
    kv_memory: options.KvMemory = None,
    journal: Annotated[
        Path | None, typer.Option(help="Directory in which resumable requests outlive a restart.")
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=1, help="Complete rings, each with workers and a drafter of its own.")
    ] = 1,
    stages: Annotated[
        int | None, typer.Option(help="Layer ranges of a ring, one worker each; two if not given.")
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
    preset: options.AnyPreset = None,
    dtype: options.Numbers = "auto",
    quantization: options.Rounding = None,
    kv_cache_dtype: options.KvNumbers = None,
    batch_invariant: options.BatchInvariant = False,
    draft_dtype: options.DraftNumbers = None,
    draft_quantization: options.DraftRounding = None,
    device: options.Device = "cpu",
) -> int:
    """Start a whole fleet; Ctrl-C ends it. For --devices elsewhere it prints commands, and waits for them."""
    from specsot_app.lineup import Serving, flags_of
    from specsot_app.spreading import hosts_here, spread

    wanted = replace(options.wanted_by(ctx.params), kind="processes", devices=None)  # some may be elsewhere
    models = cut(models_of(wanted), layer_splits)
    places = places_of(devices) if devices else ()
    check_stages(len(models.layers) or wanted.stages, places, replicas)
    open = flags_of(insecure="on" if insecure else None)
    conduct = flags_of(name=name, max_requests=max_requests, max_queue=max_queue)
    conduct += flags_of(journal=journal, default_mode=default_mode, http_names=http_names) + open
    members = open
    here = hosts_here(place.host for place in places)
    serving = Serving(host, conduct, members, grace, replicas, places, here, certificates=certificates)
    with suppress(KeyboardInterrupt):  # being told to stop is how a fleet ends well
        run_until_signal(
            keep(wanted, models, port, http_port_of(http_port), spread(serving, fleet_listen, insecure))
        )
    return 0


def cut(models: Models, splits: str | None) -> Models:
    """Raises InvalidRequest."""
    if splits is None:
        return models
    return replace(models, layers=ranges_between(splits, read_config(models.base).layers))


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

    fleet = await ProcessFleet.start(wanted, models, port, pass_on, http_port, serving, absent=asking())
    try:
        for child in fleet.children:
            print(f"{child.service.name:<10} {child.service.address}  process {child.pid}", flush=True)
        papers = " ".join(("", *serving.shown))
        print(f'ready: specsot infer --master {fleet.children[0].service.address}{papers} "..."', flush=True)
        if http_port is not None:
            page = f"{'https' if serving.certificates else 'http'}://{serving.reached(http_port)}/"
            print(f"or by a browser, or an OpenAI client: {page}", flush=True)
        raise await fleet.ended()
    finally:
        await fleet.close()


def asking() -> Absent:
    """Says how those elsewhere are started, once; then who of them is still missing."""
    from specsot_app.lineup import command_of

    told: set[str] = set()

    def ask(absent: Sequence[Service]) -> None:
        for service in absent:
            if service.name not in told:
                print(f"on {service.host}: {command_of(service)}", flush=True)
        told.update(service.name for service in absent)
        if absent:
            missing = ", ".join(f"{service.name} on {service.host}" for service in absent)
            print(f"waiting for {missing}", flush=True)

    return ask


def pass_on(service: str, line: str) -> None:
    """A service's own words."""
    print(f"{service} | {line}", file=sys.stderr, flush=True)
