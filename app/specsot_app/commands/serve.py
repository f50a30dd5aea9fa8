"""Implements `specsot serve`: master, workers and drafter as processes, here or on other machines, until
stopped.

The command starts this machine's processes and passes their output on; for other machines it prints the
commands.
"""

from __future__ import annotations

import asyncio
import json
import sys
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from specsot.checkpoint.config import read_config
from specsot.service.command import Example, command
from specsot.service.option_table import Offer, arguments_of, option
from specsot.service.options import OF_WORKER, LogLevel
from specsot_app.core.device_map import check_stages, split_ranges
from specsot_app.fleet.devices import CHOSEN_DEVICE, DEVICE_HELP, announce, choose_for
from specsot_app.fleet.opening import with_demo
from specsot_app.fleet.options import FleetOptions, Models, models_of, places_of
from specsot_app.runtime import run_until_signal
from specsot_master.config import MasterConfig

if TYPE_CHECKING:
    from specsot_app.fleet.processes import Absent
    from specsot_app.fleet.service_specs import Service, Serving

# Default HTTP port; any free port if it is taken. Precedent: vLLM, 8000.
HTTP_PORT = 8000
LOOPBACK = "127.0.0.1"


# Options that are passed to the master as they are, in addition to those that follow from the fleet.
REQUESTS = {"conduct": Offer(only=("live", "queue", "plan_style"))}
CONDUCT = Offer(
    only=(
        "ring",
        "http_names",
        "allowed_origins",
        "default_mode",
        "sse_ping_interval",
        "metrics_prefix",
        "journal",
    ),
    inner={"ring": Offer(only=("transport", "comm_mode", "hop_dtype", "conduct"), inner=REQUESTS)},
)
OF_SERVED = Offer(
    without=("kind", "master", "client", "transport", "comm_mode", "hop_dtype", "plan_style"),
    defaults=CHOSEN_DEVICE,
    help={"stages": "Layer ranges of each ring, one worker each.", **DEVICE_HELP},
    unset={"stages": "1; 2 with --share"},
)
OF_MASTER = Offer(
    only=(
        *("ring", "http_names", "allowed_origins", "default_mode", "sse_ping_interval", "metrics_prefix"),
        *("fleet_listen", "journal", "service", "token_file"),
    ),
    defaults={"model": Path()},
    inner={
        "ring": Offer(
            only=("name", "replicas", "transport", "comm_mode", "hop_dtype", "conduct"), inner=REQUESTS
        ),
        "service": Offer(only=("grace", "insecure")),
    },
    help={"token_file": "File of tokens, one per line, of which clients must show one."},
    unset={"token_file": "those of --certificates, else none"},
)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of `specsot serve`."""

    HEADING: ClassVar[str] = "Addresses"

    host: str = option(LOOPBACK, "Address that the master listens on.")
    port: int = option(50050, "The master's port for gRPC; 0 for any free one.", metavar="PORT")
    http_port: int | None = option(
        None, "The master's port for HTTP.", metavar="PORT", unset="8000, or any free one if that is taken"
    )
    certificates: Path | None = option(
        None,
        "Use TLS and the clients' tokens from this folder, made by docker/certificates.sh.",
        metavar="DIR",
    )
    share: bool = option(False, "Print a code with which other machines join: `specsot join CODE`.")
    log_level: LogLevel | None = option(
        None,
        "Minimum severity of the log lines of all services.",
        tier="common",
        unset="info",
    )
    browser: bool = option(False, "Open the page in a browser once the fleet is ready.", tier="expert")
    master: Annotated[MasterConfig, OF_MASTER] = field(default_factory=lambda: MasterConfig(Path()))
    fleet: Annotated[FleetOptions, OF_SERVED] = field(default_factory=FleetOptions)
    layer_splits: str | None = option(
        None,
        "First layer of each stage after the first one, such as 14,28.",
        metavar="LAYERS",
        tier="expert",
    )


EXAMPLES = (
    Example("specsot serve", "SmolLM2, at http://127.0.0.1:8000/"),
    Example(
        "specsot serve --model models/llama --draft-model models/llama-eagle3", "Your model with its head"
    ),
    Example('specsot serve --devices "127.0.0.1#0,127.0.0.1#1"', "Two GPUs of this machine"),
    Example("specsot serve --share", "Two machines: prints the command for the other one"),
    Example(
        'specsot serve --devices "10.0.0.1#0,10.0.0.2#0" --certificates certificates',
        "Two machines; prints the commands for the other one",
    ),
)


def on_http_port(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options with `port` as the HTTP port, as systems mean it that serve HTTP alone."""
    if given.get("http-port") is not None or "port" not in given:
        return given
    return {**given, "http-port": given["port"], "port": 0}


@command(ServeOptions, examples=EXAMPLES, spelled=on_http_port)
def serve(given: ServeOptions) -> int:
    """Start a fleet of processes: master, workers and drafter. Ctrl-C ends it.

    With --devices on other machines, prints the commands to run there and waits for them; with --share,
    waits for machines that join with a code.
    """
    from specsot.transport.grpc_server import check_free
    from specsot.transport.security import first_token
    from specsot_app.core.device_map import address_of
    from specsot_app.fleet.options import local_hosts
    from specsot_app.fleet.processes import free_port
    from specsot_app.fleet.service_specs import Serving, flags_of, inviting, spread

    fleet, choice = choose_for(with_demo(given.fleet, sys.stderr), given.master.ring.replicas)
    # Devices are left out here, because some may be on other machines.
    wanted = replace(fleet, kind="processes", devices=None)
    models = cut(models_of(wanted), given.layer_splits)
    master = given.master
    ring = given.master.ring
    places = places_of(given.fleet)
    conduct = arguments_of(master, CONDUCT) + flags_of(served_model_name=ring.name or None)
    common = ("--insecure", "on") if master.service.insecure else ()
    common += flags_of(log_level=given.log_level)
    here = local_hosts(place.host for place in places)
    serving = Serving(
        given.host,
        conduct + common,
        common,
        master.service.grace,
        ring.replicas,
        places,
        here,
        certificates=given.certificates,
        token_file=master.token_file,
    )
    if master.token_file:
        # An unreadable token file is reported before any process is started.
        first_token(master.token_file)
    stages = len(models.layers) or wanted.stages
    if given.share:
        serving = inviting(serving, stages, wanted.device, master.fleet_listen)
    else:
        check_stages(stages, places, ring.replicas)
        serving = spread(serving, master.fleet_listen, master.service.insecure)
    # Members send no tokens, so that they need a server of their own.
    if serving.token_file and serving.fleet is None:
        serving = replace(serving, fleet=address_of(LOOPBACK, free_port()))
    if given.port:
        # Checked before the device is announced, so that a taken port gives one line of output.
        check_free(serving.listens(given.port))
    if choice:
        announce(choice, sys.stderr)
    # Ctrl-C is the normal end of a fleet.
    with suppress(KeyboardInterrupt):
        show = webbrowser.open if given.browser else None
        run_until_signal(keep(wanted, models, given.port, http_port_of(given.http_port), serving, show))
    return 0


def cut(models: Models, splits: str | None) -> Models:
    """Return the models with the layer ranges of --layer-splits. Raises InvalidRequest."""
    if splits is None:
        return models
    return replace(models, layers=split_ranges(splits, read_config(models.base).layers))


def http_port_of(asked: int | None) -> int | None:
    """Return the master's HTTP port; None if no port was asked for and the HTTP packages are not
    installed.
    """
    from specsot_app.fleet.processes import free_port, is_free

    if asked is None and not all(map(find_spec, ("fastapi", "msgspec", "uvicorn", "prometheus_client"))):
        return None
    if asked is None:
        return HTTP_PORT if is_free(HTTP_PORT) else free_port()
    return asked or free_port()


async def keep(
    wanted: FleetOptions,
    models: Models,
    port: int,
    http_port: int | None,
    serving: Serving,
    show: Callable[[str], object] | None = None,
) -> None:
    """Run the fleet until it is stopped, or its master ends. show: opens the page in a browser."""
    from specsot.transport.grpc_server import check_free
    from specsot_app.fleet.processes import ProcessFleet

    async with AsyncExitStack() as stack:
        if serving.joining:
            # Checked before an invitation is printed.
            for taken in filter(None, (port, http_port)):
                check_free(serving.listens(taken))
            await stack.enter_async_context(open_to_machines(wanted, serving))
        fleet = await ProcessFleet.start(wanted, models, port, pass_on, http_port, serving, absent=asking())
        stack.push_async_callback(fleet.close)
        name = (await fleet.info()).models[0].name
        print("\n".join(closing(name, serving, fleet.children[0].service.address, http_port)), flush=True)
        if show and http_port is not None:
            await asyncio.to_thread(show, page_of(serving, http_port))
        raise await fleet.keep_running()


def open_to_machines(wanted: FleetOptions, serving: Serving) -> AbstractAsyncContextManager[object]:
    """Return the context in which the join server runs."""
    from specsot_app.core.device_map import address_of
    from specsot_app.fleet.joining import PORT, SHARED, open_join_server

    assert serving.certificates is not None
    assert serving.fleet is not None
    words = arguments_of(wanted, OF_WORKER)
    flags = tuple(word for pair in zip(words[::2], words[1::2]) if pair[0] in SHARED for word in pair)
    address = address_of(serving.fleet.rpartition(":")[0], PORT)
    roles = ("master", "worker", "drafter") if serving.private else ()
    return open_join_server(
        serving.certificates, roles, address, serving.fleet, flags, partial(print, flush=True)
    )


def page_of(serving: Serving, http_port: int) -> str:
    """Return the address of the web page."""
    return f"{'https' if serving.tls_files_of_clients else 'http'}://{serving.reached(http_port)}/"


QUESTION = "How can I sleep better?"
# With tokens, reflection is off, and grpcurl reads this repository's protos instead.
PROTOS = "-import-path protos -proto specsot/v1/master.proto"


def closing(model: str, serving: Serving, master: str, http_port: int | None) -> list[str]:
    """Return the lines that say what a user can do now. Each works as it is, in the folder where `serve` was
    started.
    """
    shown = serving.client
    file = quote(str(shown.token_file))
    read = f"awk 'NF {{print $1; exit}}' {file}" if serving.token_file else f"cat {file}"
    bearer = f'-H "Authorization: Bearer $({read})" ' if shown.token_file else ""
    ca = quote(str(shown.tls_ca)) if shown.tls_ca else ""
    asked = json.dumps({"prompt": QUESTION})
    secured = f"-cacert {ca} " if ca else "-plaintext "
    secured += f"{PROTOS} {bearer}" if bearer else ""
    rows = {
        "terminal": " ".join(
            ["specsot infer --master", *map(quote, (master, *serving.shown)), f'"{QUESTION}"']
        ),
        "grpcurl": f"grpcurl {secured}-d '{asked}' {quote(master)} specsot.v1.Master/Generate",
    }
    if http_port is not None:
        page = page_of(serving, http_port)
        said = json.dumps({"model": model, "messages": [{"role": "user", "content": QUESTION}]})
        how = (f"--cacert {ca} " if ca else "") + bearer + "-H 'Content-Type: application/json'"
        rows = {
            "page": page,
            "API": f"{page}v1",
            "curl": f"curl {how} -d {quote(said)} {quote(f'{page}v1/chat/completions')}",
            **rows,
        }
    return [f"ready: {model}", *(f"  {what:<9} {line}" for what, line in rows.items())]


def asking() -> Absent:
    """Return a callback that prints, once, how services of other machines are started, then which are still
    missing.
    """
    from specsot_app.fleet.service_specs import command_of

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
    """Print a service's line of output."""
    print(f"{service:<8} | {line}", file=sys.stderr, flush=True)
