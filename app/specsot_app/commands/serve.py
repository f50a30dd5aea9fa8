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
from specsot.errors import InvalidRequest
from specsot.service.command import Example, command
from specsot.service.option_table import Offer, arguments_of, option
from specsot.service.options import OF_WORKER, LogLevel
from specsot.service.runtime_env import return_freed_memory
from specsot_app.core.device_map import check_stages, split_ranges
from specsot_app.fleet.devices import (
    CHOSEN_DEVICE,
    DEVICE_HELP,
    choose_for,
    may_use_gpu,
    num_stages,
    print_choice,
    print_shared_gpus,
    with_kv_memory,
)
from specsot_app.fleet.opening import with_demo
from specsot_app.fleet.options import (
    FleetOptions,
    Models,
    check_cuts,
    models_of,
    places_of,
    why_undrafted,
)
from specsot_app.runtime import new_loop, run_until_signal
from specsot_master.config import MasterConfig

if TYPE_CHECKING:
    from specsot_app.fleet.prepared import PreparedProcess
    from specsot_app.fleet.processes import OnMissing
    from specsot_app.fleet.service_specs import Service, Serving

# Default HTTP port; any free port if it is taken. Precedent: vLLM, 8000.
HTTP_PORT = 8000
# Port number. The largest TCP port.
MAX_PORT = 65535
# Host of servers that only this machine reaches.
LOOPBACK = "127.0.0.1"


# Options that are passed to the master as they are, in addition to those that follow from the fleet.
REQUESTS = {"conduct": Offer(only=("live", "queue", "plan_style"))}
# The options that are passed on to the master as they are.
CONDUCT = Offer(
    only=(
        "ring",
        "api_processes",
        "http_names",
        "allowed_origins",
        "default_mode",
        "sse_ping_interval",
        "metrics_prefix",
        "journal",
    ),
    inner={"ring": Offer(only=("transport", "comm_mode", "hop_dtype", "conduct"), inner=REQUESTS)},
)
# The options of the fleet that `serve` offers.
OF_SERVED = Offer(
    without=("kind", "master", "client", "transport", "comm_mode", "hop_dtype", "plan_style"),
    defaults=CHOSEN_DEVICE,
    help={"stages": "Layer ranges of each ring, one worker each.", **DEVICE_HELP},
    unset={"stages": "1; 2 with --share"},
)
# The options of the master that `serve` offers.
OF_MASTER = Offer(
    only=(
        *("ring", "api_processes", "http_names", "allowed_origins", "default_mode", "sse_ping_interval"),
        *("metrics_prefix", "fleet_listen", "journal", "service", "token_file"),
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
    """Options of `specsot serve`.

    host: Address that the master listens at.
    port: The master's port for gRPC; 0: any free one.
    http_port: The master's port for HTTP; None: 8000, or any free one if that is taken.
    certificates: Folder with TLS files and tokens of clients; None: no TLS.
    share: True: print a code with which other machines join.
    log_level: Minimum severity of log lines of all services; None: info.
    browser: True: open the page in a browser once the fleet is ready.
    master: Options of the master.
    fleet: Options of the fleet.
    layer_splits: First layer of each stage after the first one, such as "14,28"; None: not given.
    """

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
    """Return the options with `port` as the HTTP port, as systems mean it that serve HTTP alone.

    Returned unchanged if `http-port` is given or `port` is not.

    given: Values by flag, such as "http-port", under the names of another system.
    """
    if given.get("http-port") is not None or "port" not in given:
        return given
    return {**given, "http-port": given["port"], "port": 0}


@command(ServeOptions, examples=EXAMPLES, spelled=on_http_port)
def serve(options: ServeOptions) -> int:
    """Start a fleet of processes: master, workers and drafter. Ctrl-C ends it.

    With --devices on other machines, prints the commands to run there and waits for them; with --share, waits
    for machines that join with a code.

    \f The exit status is 0 after Ctrl-C or SIGTERM; what keeps the fleet from starting, or ends it, is
    raised. A taken port, an unreadable token file and options that contradict each other are reported before
    any service starts. Each process's output goes to stderr, after its name.
    """
    prepared = prepare_member(options)
    try:
        serve_fleet(options, prepared)
    finally:
        if prepared is not None:
            prepared.close()
    return 0


def prepare_member(options: ServeOptions) -> PreparedProcess | None:
    """Start the process of the only member before anything is known about the model, so that it imports torch
    while this process does. Return None if this process will not import torch, or if there are several
    members, whose number of threads depends on the model.

    options: Options of the command.
    """
    from specsot_app.fleet.prepared import PreparedProcess
    from specsot_app.fleet.service_specs import environment_of_members

    fleet = options.fleet
    num_members = num_stages(fleet) * options.master.ring.replicas
    is_only_member = num_members == 1 and not (options.share or fleet.devices)
    if is_only_member and may_use_gpu(fleet):
        return PreparedProcess(environment_of_members(1))
    return None


def serve_fleet(options: ServeOptions, prepared: PreparedProcess | None) -> None:
    """Start the fleet and run it until it is stopped. Raises what keeps it from starting, or ends it.

    options: Options of the command.
    prepared: A process for one of the members; None: every member gets a new one.
    """
    from specsot.transport.grpc_server import check_free
    from specsot.transport.security import first_token
    from specsot_app.core.device_map import address_of
    from specsot_app.fleet.options import local_hosts
    from specsot_app.fleet.processes import free_port
    from specsot_app.fleet.service_specs import Serving, flags_of, with_join_server, with_member_server

    # Check the ports before a demo model is fetched or a process is started.
    check_ports(port=options.port, http_port=options.http_port)
    if options.master.token_file:
        first_token(options.master.token_file)
    rings = options.master.ring.replicas
    fleet, choice = choose_for(with_demo(options.fleet, sys.stderr), rings)
    # Devices are left out here, because some may be on other machines.
    fleet_options = replace(fleet, kind="processes", devices=None)
    models = with_layer_splits(models_of(fleet_options), options.layer_splits)
    master = options.master
    ring = options.master.ring
    places = places_of(options.fleet)
    master_flags = arguments_of(master, CONDUCT) + flags_of(served_model_name=ring.name or None)
    common = ("--insecure", "on") if master.service.insecure else ()
    common += flags_of(log_level=options.log_level)
    own_hosts = local_hosts(place.host for place in places)
    serving = Serving(
        options.host,
        master_flags + common,
        common,
        master.service.grace,
        ring.replicas,
        places,
        own_hosts,
        certificates=options.certificates,
        token_file=master.token_file,
    )
    stages = len(models.layers) or fleet_options.stages
    if options.share:
        serving = with_join_server(serving, stages, fleet_options.device, master.fleet_listen)
    else:
        check_stages(stages, places, ring.replicas)
        serving = with_member_server(serving, master.fleet_listen, master.service.insecure)
    # Members send no tokens, so that they need a server of their own.
    if serving.token_file and serving.fleet is None:
        serving = replace(serving, fleet=address_of(LOOPBACK, free_port()))
    if options.port:
        # Checked before the device is announced, so that a taken port gives one line of output.
        check_free(serving.listen_address(options.port))
    if choice:
        print_choice(choice, sys.stderr)
    for line in why_undrafted(models):
        print(f"specsot: {line}", file=sys.stderr, flush=True)
    if not options.share:
        placed = replace(fleet, kind="processes", stages=stages)
        print_shared_gpus(placed, sys.stderr, rings)
        found = with_kv_memory(placed, sys.stderr, rings, ring.conduct.live)
        fleet_options = replace(
            fleet_options, kv_memory=found.kv_memory, draft_kv_memory=found.draft_kv_memory
        )
    # Making a directory of a GGUF file leaves tens of megabytes of freed memory.
    return_freed_memory()
    # Ctrl-C is the normal end of a fleet.
    with suppress(KeyboardInterrupt):
        open_page = webbrowser.open if options.browser else None
        run_until_signal(
            run_fleet(
                fleet_options,
                models,
                options.port,
                http_port_of(options.http_port),
                serving,
                open_page,
                prepared,
            ),
            new_loop if prepared is None else lambda: prepared.loop,
        )


def check_ports(**ports: int | None) -> None:
    """Raise InvalidRequest, with the option's name as its field, for the first port outside 0..MAX_PORT.

    ports: The ports by the names of their options. None: the option was not given, and is not checked.
    """
    for name, port in ports.items():
        if port is not None and not 0 <= port <= MAX_PORT:
            raise InvalidRequest(f"{name} must be in 0..{MAX_PORT}, got {port}", field=name)


def with_layer_splits(models: Models, layer_splits: str | None) -> Models:
    """Return the models with the layer ranges of --layer-splits; unchanged if it is not given.

    InvalidRequest is also raised for a part that is no number.

    models: The model directories to load.
    layer_splits: First layer of each stage after the first, such as "14,28"; None if not given.
    Raises InvalidRequest if a range would be empty, or part layers that one stage must hold.
    """
    if layer_splits is None:
        return models
    config = read_config(models.base)
    return replace(models, layers=check_cuts(split_ranges(layer_splits, config.layers), config))


def http_port_of(requested: int | None) -> int | None:
    """Return the master's HTTP port; None if no port was asked for and the HTTP packages are not installed.

    A port that was asked for is returned even if it is taken.

    requested: Value of the option; None: HTTP_PORT, or any free port if that is taken; 0: any free port.
    """
    from specsot_app.fleet.processes import free_port, is_free

    if requested is None and not all(map(find_spec, ("fastapi", "msgspec", "uvicorn", "prometheus_client"))):
        return None
    if requested is None:
        return HTTP_PORT if is_free(HTTP_PORT) else free_port()
    return requested or free_port()


async def run_fleet(
    options: FleetOptions,
    models: Models,
    port: int,
    http_port: int | None,
    serving: Serving,
    open_page: Callable[[str], object] | None = None,
    prepared: PreparedProcess | None = None,
) -> None:
    """Run the fleet until it is stopped, or its master ends; print how to use it once it is ready.

    With machines that join later, the ports are checked before the code is printed. The fleet is closed in
    every case; the call never returns normally.

    options: Options of the fleet.
    models: The model directories to load.
    port: The master's port for gRPC; 0: any free one.
    http_port: The master's port for HTTP; None: no HTTP.
    serving: Addresses, TLS files and flags of the services.
    open_page: Opens the page's address in a browser; None: nothing is opened.
    prepared: A process of the running event loop, for one of the members; None: each gets a new one.
    Raises why the fleet could not start, or why it ended.
    """
    from specsot.transport.grpc_server import check_free
    from specsot_app.fleet.processes import ProcessFleet

    async with AsyncExitStack() as stack:
        if serving.joining:
            # Checked before an invitation is printed.
            for wanted_port in filter(None, (port, http_port)):
                check_free(serving.listen_address(wanted_port))
            await stack.enter_async_context(join_server_of(options, serving))
        fleet = await ProcessFleet.start(
            options,
            models,
            port,
            print_output,
            http_port,
            serving,
            on_missing=announce_missing(),
            prepared=prepared,
        )
        stack.push_async_callback(fleet.close)
        name = (await fleet.info()).models[0].name
        print(
            "\n".join(closing_lines(name, serving, fleet.children[0].service.address, http_port)), flush=True
        )
        if open_page and http_port is not None:
            await asyncio.to_thread(open_page, page_of(serving, http_port))
        raise await fleet.keep_running()


def join_server_of(options: FleetOptions, serving: Serving) -> AbstractAsyncContextManager[object]:
    """Return the context in which the join server runs, with which other machines join.

    If the certificates are used by members alone, those of master, worker and drafter are made anew;
    otherwise only that of the join server.

    options: Options of the fleet, whose flags for workers are passed on as far as all workers share them.
    serving: Addresses of the services; it has certificates and the address of the members' server.
    """
    from specsot_app.core.device_map import address_of
    from specsot_app.fleet.joining import PORT, SHARED, open_join_server

    assert serving.certificates is not None
    assert serving.fleet is not None
    worker_flags = arguments_of(options, OF_WORKER)
    flags = tuple(
        word for pair in zip(worker_flags[::2], worker_flags[1::2]) if pair[0] in SHARED for word in pair
    )
    address = address_of(serving.fleet.rpartition(":")[0], PORT)
    roles = ("master", "worker", "drafter") if serving.private else ()
    return open_join_server(
        serving.certificates, roles, address, serving.fleet, flags, partial(print, flush=True)
    )


def page_of(serving: Serving, http_port: int) -> str:
    """Return the address of the web page.

    serving: Addresses of the services, which decide on the host, and on https if clients need TLS, else http.
    http_port: The master's port for HTTP.
    """
    return f"{'https' if serving.tls_files_of_clients else 'http'}://{serving.reachable_address(http_port)}/"


# The question of the printed examples.
QUESTION = "How can I sleep better?"
# With tokens, reflection is off, and grpcurl reads this repository's protos instead.
PROTOS = "-import-path protos -proto specsot/v1/master.proto"


def closing_lines(model: str, serving: Serving, master_address: str, http_port: int | None) -> list[str]:
    """Return the lines that say what a user can do now. Each works as it is, in the folder where `serve` was
    started.

    The first line is "ready: " and the model; then follow page, API and curl (with HTTP), terminal and
    grpcurl. Each shows the CA and the token if clients need them.

    model: The model's public name.
    serving: Addresses, TLS files and tokens.
    master_address: The master's host:port for gRPC.
    http_port: The master's port for HTTP; None if there is no HTTP.
    """
    client = serving.client
    token_file = quote(str(client.token_file))
    token_command = f"awk 'NF {{print $1; exit}}' {token_file}" if serving.token_file else f"cat {token_file}"
    bearer = f'-H "Authorization: Bearer $({token_command})" ' if client.token_file else ""
    ca = quote(str(client.tls_ca)) if client.tls_ca else ""
    request_json = json.dumps({"prompt": QUESTION})
    secured = f"-cacert {ca} " if ca else "-plaintext "
    secured += f"{PROTOS} {bearer}" if bearer else ""
    rows = {
        "terminal": " ".join(
            ["specsot infer --master", *map(quote, (master_address, *arguments_of(client))), f'"{QUESTION}"']
        ),
        "grpcurl": f"grpcurl {secured}-d '{request_json}' {quote(master_address)} specsot.v1.Master/Generate",
    }
    if http_port is not None:
        page = page_of(serving, http_port)
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": QUESTION}]})
        curl_options = (f"--cacert {ca} " if ca else "") + bearer + "-H 'Content-Type: application/json'"
        rows = {
            "page": page,
            "API": f"{page}v1",
            "curl": f"curl {curl_options} -d {quote(body)} {quote(f'{page}v1/chat/completions')}",
            **rows,
        }
    return [f"ready: {model}", *(f"  {name:<9} {line}" for name, line in rows.items())]


def announce_missing() -> OnMissing:
    """Return a callback that prints, once for each service, how services of other machines are started, and
    each time which are still missing. It prints nothing if none is missing.

    Each service is announced by "on HOST: COMMAND" once; the last line is "waiting for NAME on HOST, ..." at
    every call with missing services.
    """
    from specsot_app.fleet.service_specs import command_of

    announced: set[str] = set()

    def ask(absent: Sequence[Service]) -> None:
        """Print the commands of services that were not printed before, and which services are missing.

        absent: The services of other machines that have not joined. Empty: nothing is printed.
        """
        for service in absent:
            if service.name not in announced:
                print(f"on {service.host}: {command_of(service)}", flush=True)
        announced.update(service.name for service in absent)
        if absent:
            missing = ", ".join(f"{service.name} on {service.host}" for service in absent)
            print(f"waiting for {missing}", flush=True)

    return ask


def print_output(service_name: str, line: str) -> None:
    """Print a service's line of output to stderr, after its name.

    service_name: Name of the service that wrote the line.
    line: The line without its end.
    """
    print(f"{service_name:<8} | {line}", file=sys.stderr, flush=True)
