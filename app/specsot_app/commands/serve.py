"""`specsot serve`: master, workers and drafter as processes of this machine, until told to stop.

Refuses to know how a service works; it starts them and passes their lines on.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import Annotated

import typer

from specsot.drafting import DraftMode, TunerName
from specsot.members import WeightFormat
from specsot.params import DrafterName
from specsot_app.fleets import Dtype, Models, Wanted, models_of
from specsot_app.running import run

HTTP_PORT = 8000


def serve(
    port: Annotated[int, typer.Option(help="Where the master listens; 0 for a free port.")] = 50050,
    http_port: Annotated[
        int | None,
        typer.Option(help="Where it serves HTTP; 8000, or a free port if that is taken."),
    ] = None,
    stages: Annotated[
        int | None, typer.Option(help="Layer ranges, one worker each; two if not given.")
    ] = None,
    layers: Annotated[str | None, typer.Option(help="The ranges themselves, such as 0:4,4:8.")] = None,
    model: Annotated[str | None, typer.Option(help="Model directory; the demo if not given.")] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="Directory of the EAGLE head, or of the small model.")
    ] = None,
    draft_format: Annotated[
        WeightFormat, typer.Option(help="bin: the head's pytorch_model.bin.")
    ] = "safetensors",
    drafter: Annotated[
        DrafterName | None, typer.Option(help="Who drafts; if not given, a head where there is one.")
    ] = None,
    model_format: Annotated[
        WeightFormat, typer.Option(help="bin: the model's pytorch_model.bin.")
    ] = "safetensors",
    drafter_rope_theta: Annotated[
        float | None, typer.Option(help="The head's rotary base, if its config is wrong.")
    ] = None,
    aux_layers: Annotated[
        str | None, typer.Option(help="Layers whose input the head reads, such as 2,16,29.")
    ] = None,
    draft_mode: Annotated[
        DraftMode | None, typer.Option(help="A chain, a tree, or (of a model) a pruned tree.")
    ] = None,
    draft_tokens: Annotated[int | None, typer.Option(help="How deep drafts go at most.")] = None,
    draft_breadth: Annotated[int | None, typer.Option(help="Children of every node of a tree.")] = None,
    draft_nodes: Annotated[int | None, typer.Option(help="Nodes of a tree at most.")] = None,
    draft_threshold: Annotated[
        float | None, typer.Option(help="Pruned: nothing below nodes less likely than this.")
    ] = None,
    tuner: Annotated[
        TunerName, typer.Option(help="Who decides how much is drafted; seed and fixed are for comparisons.")
    ] = "measured",
    blend: Annotated[bool, typer.Option(help="Let what the text suggests join the drafts.")] = True,
    dtype: Annotated[Dtype, typer.Option(help="Numbers to compute with.")] = "auto",
    device: Annotated[str, typer.Option(help="Torch device of workers and drafter.")] = "cpu",
) -> int:
    """Start a whole fleet here; Ctrl-C ends it."""
    wanted = Wanted(
        kind="processes",
        model=model,
        draft_model=draft_model,
        draft_format=draft_format,
        model_format=model_format,
        drafter_rope_theta=drafter_rope_theta,
        aux_layers=aux_layers,
        dtype=dtype,
        device=device,
        stages=stages,
        layers=layers,
        drafter=drafter,
        draft_mode=draft_mode,
        draft_tokens=draft_tokens,
        draft_breadth=draft_breadth,
        draft_nodes=draft_nodes,
        draft_threshold=draft_threshold,
        tuner=tuner,
        blend=blend,
    )
    with suppress(KeyboardInterrupt):  # being told to stop is how a fleet ends well
        run(keep(wanted, models_of(wanted), port, http_port_of(http_port)))
    return 0


def http_port_of(asked: int | None) -> int | None:
    """Where the master serves HTTP; None where nobody asked and the packages are not there."""
    from specsot_app.processes import free_port, is_free

    if asked is None and not all(map(find_spec, ("fastapi", "uvicorn", "prometheus_client"))):
        return None
    if asked is None:
        return HTTP_PORT if is_free(HTTP_PORT) else free_port()
    return asked or free_port()


async def keep(wanted: Wanted, models: Models, port: int, http_port: int | None) -> None:
    """Run the fleet until it is told to stop, or one of its processes ends."""
    from specsot_app.processes import ProcessFleet

    fleet = await ProcessFleet.start(wanted, models, port, pass_on, http_port)
    try:
        for child in fleet.children:
            print(f"{child.service.name:<10} {child.service.address}  process {child.pid}", flush=True)
        print(f'ready: specsot infer --master {fleet.children[0].service.address} "..."', flush=True)
        if http_port is not None:
            print(f"or by a browser, or an OpenAI client: http://127.0.0.1:{http_port}/", flush=True)
        raise await fleet.ended()
    finally:
        await fleet.close()


def pass_on(service: str, line: str) -> None:
    """A service's own words."""
    print(f"{service} | {line}", file=sys.stderr, flush=True)
