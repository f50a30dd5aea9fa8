"""Lists the services of a fleet, on this machine and on others, with the command line of each."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specsot.checkpoint.cache import state_folder
from specsot.checkpoint.resolving import address_of_model
from specsot.errors import InvalidRequest
from specsot.service.option_table import arguments_of
from specsot.service.options import OF_DRAFTER, OF_WORKER, MemberOptions
from specsot.transport.security import exposed
from specsot_app.core.device_map import HostDevice, address_of, ports_of
from specsot_app.fleet.members import joined_arguments
from specsot_app.fleet.options import (
    OWN_DRAFTER_WAIT,
    OWN_TAKE_OVER,
    ClientOptions,
    FleetOptions,
    Models,
    public_name,
    resolved,
)

# Seconds. Time that a child has to end by itself, in addition to its --grace. Untuned.
EXIT_GRACE = 10.0
# Host of servers that only this machine reaches.
LOOPBACK = "127.0.0.1"
# Default port of the master's --fleet-listen.
FLEET_PORT = 50060
# Default number of stages. On one machine, more stages only add hops. Chosen by measurement on two cores.
STAGES = 1
# Environment variables that configure the `specsot` command are hidden from services, which are configured by
# flags.
HIDDEN_VARIABLES = ("CONFIG", "TOKEN", "TOKEN_FILE", "TLS_CA", "TLS_CERT", "TLS_KEY")
# Environment of a service in which these variables are empty.
UNCONFIGURED = tuple((f"SPECSOT_{name}", "") for name in HIDDEN_VARIABLES)


@dataclass(frozen=True, slots=True)
class Service:
    """What to start: `python -m module arguments...`, at an address.

    name: The member's name.
    module: The Python module to run.
    address: Address at which the service listens, host:port or a unix socket.
    arguments: Its command line.
    environment: Variables that are added to this process's environment, as (name, value).
    host: Name of another machine, on which the user starts the service; None: this machine.
    grace: Seconds it may take to end by itself.
    host_service: Name of the service in whose process this one runs; None: a process of its own.
    """

    name: str
    module: str
    address: str
    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    host: str | None = None
    grace: float = EXIT_GRACE
    host_service: str | None = None


@dataclass(frozen=True, slots=True)
class Serving:
    """How a fleet serves clients and members, whatever it consists of.

    host: Host at which the master's servers listen.
    master: Further command-line flags of the master.
    members: Further command-line flags of all members.
    grace: Seconds that answers have to end once the master is asked to stop; None: as its environment says.
    replicas: Number of rings.
    places: Place of each stage, ring by ring; empty if not chosen.
    own_hosts: Hosts among `places` that are this machine.
    fleet: Address of a separate server for members, host:port; None: members use the master's server.
    certificates: Folder as docker/certificates.sh makes it; None: no TLS.
    joining: Number of stages that are left to machines which join later.
    private: True if certificates are used by members alone, and clients are on this machine.
    token_file: The tokens that clients send; None: those of the certificates' folder, if any.
    """

    host: str = LOOPBACK
    master: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    grace: float | None = None
    replicas: int = 1
    places: tuple[HostDevice, ...] = ()
    own_hosts: frozenset[str] = frozenset()
    fleet: str | None = None
    certificates: Path | None = None
    joining: int = 0
    private: bool = False
    token_file: Path | None = None

    @property
    def spread(self) -> bool:
        """Return whether some stages run on other machines."""
        return self.joining > 0 or any(place.host not in self.own_hosts for place in self.places)

    def listen_address(self, port: int) -> str:
        """Return the address at which a server of the master listens.

        port: The server's port.
        """
        return address_of(self.host, port)

    def reachable_address(self, port: int) -> str:
        """Return the address at which this machine reaches a server of the master; a wildcard host is reached
        by the loopback address.

        port: The server's port.
        """
        return address_of(LOOPBACK if self.host in ("", "0.0.0.0", "::", "[::]") else self.host, port)

    @property
    def client(self) -> ClientOptions:
        """Return the options of a client of this fleet: the CA that it trusts and the file of its token. Both
        are None if clients need no TLS and no token.
        """
        folder = self.tls_files_of_clients
        return ClientOptions(folder and folder / "ca.pem", self.token_file or (folder and folder / "token"))

    @property
    def tls_files_of_clients(self) -> Path | None:
        """Return the folder with the clients' TLS files and tokens, or None if clients need none."""
        return None if self.private else self.certificates

    def tls_files(self, role: str) -> tuple[str, ...]:
        """Return the TLS flags of a service; no flags without certificates. On another machine the folder has
        the same name.

        The flags name the CA (ca.pem), the certificate (own.pem) and the key (own.key) in the role's folder.

        role: Subfolder of the certificates for this kind of service: "master", "worker" or "drafter".
        """
        if self.certificates is None:
            return ()
        role_folder = self.certificates / role
        return flags_of(
            tls_ca=role_folder / "ca.pem", tls_cert=role_folder / "own.pem", tls_key=role_folder / "own.key"
        )


# A fleet on this machine alone, without TLS.
PRIVATE = Serving()


@dataclass(frozen=True, slots=True)
class Role:
    """One member of the fleet.

    kind: Kind of the member: "worker" or "drafter".
    name: The member's name.
    stage: A worker's stage within its ring; None for a drafter.
    """

    kind: str
    name: str
    stage: int | None = None


def services_of(
    options: FleetOptions,
    models: Models,
    port: int,
    folder: Path,
    http_port: int | None = None,
    serving: Serving = PRIVATE,
) -> list[Service]:
    """Return all services of a fleet: the master first; then, for each ring, its workers in order and its
    drafter.

    The number of stages is that of the chosen layer ranges, else that of the places of one ring and of the
    stages left to joining machines, else `options.stages`, else STAGES. Stages that are left to joining
    machines get no service. Places in `models` replace those of `serving`. Members listen at unix sockets in
    `folder` if all run on this machine, else at TCP ports. A drafter shares a worker's process if it is on
    this machine and the fleet has one worker only, or the stages take turns. Services of other machines have
    `host` set.

    options: Options of the fleet.
    models: The model directories to load.
    port: The master's port for gRPC.
    folder: Folder for the members' unix sockets.
    http_port: The master's port for HTTP; None: no HTTP.
    serving: Addresses, TLS files and flags.
    """
    if models.places:
        serving = replace(
            serving, places=models.places, own_hosts=frozenset(place.host for place in models.places)
        )
    num_places = len(serving.places) // serving.replicas
    stages = len(models.layers) or (num_places and num_places + serving.joining) or options.stages or STAGES
    loaded_options = resolved(options, models)
    roles = roles_of(serving.replicas, stages - serving.joining, models.drafts != "none")
    places = places_of_roles(serving, options.device, roles)
    stages_take_turns = do_stages_take_turns(serving, places)
    services = [master_of(options, models, stages, port, http_port, serving, stages_take_turns)]
    ports = ports_of([place.host for place in places])
    # With several workers, the master may give each a GPU of its own, so that the drafter cannot share a
    # process.
    is_only_worker = stages * serving.replicas == 1
    for role, place, member_port in zip(roles, places, ports):
        address = address_of(place.host, member_port) if serving.spread else f"unix:{folder / role.name}"
        member_options = replace(loaded_options, device=place.device)
        model_flags = (
            drafter_flags(member_options)
            if role.stage is None
            else worker_flags(member_options, models, role.stage)
        )
        membership = MemberOptions(serving.fleet or serving.reachable_address(port), address, role.name)
        arguments = (
            *model_flags,
            *serving.members,
            *serving.tls_files(role.kind),
            *arguments_of(membership),
            "--listen",
            address,
        )
        remote_host = place.host if serving.spread and place.host not in serving.own_hosts else None
        service = Service(role.name, f"specsot_{role.kind}", address, arguments, host=remote_host)
        shares_process = role.stage is None and (is_only_worker or stages_take_turns) and not remote_host
        services.append(replace(service, host_service=services[-1].name) if shares_process else service)
    return with_cores(services, serving.replicas if stages_take_turns else None)


def processes_of(services: Sequence[Service]) -> list[Service]:
    """Return the processes to start, in the order of the services.

    A drafter runs in the process of a worker that has all layers, or that takes turns with others: what they
    exchange with every step then stays on the device and is not serialized, and neither waits for cores.

    services: All services of the fleet, of which those with `host_service` share a process.
    """
    return [
        _with_guests(service, [guest for guest in services if guest.host_service == service.name])
        for service in services
        if service.host_service is None
    ]


def _with_guests(service: Service, guests: Sequence[Service]) -> Service:
    """Return a service that runs the guests in its process, too; the service itself if there are no guests.

    The result's command runs the service first, then the guests in their order.

    service: The service that has the process.
    guests: The services that share this process.
    """
    if not guests:
        return service
    command_lines = [(member.module, *member.arguments) for member in (service, *guests)]
    return replace(service, module="specsot_app.fleet.members", arguments=joined_arguments(command_lines))


def roles_of(replicas: int, stages: int, with_drafter: bool) -> list[Role]:
    """Return the members of all rings, ring by ring: workers in the order of their stages, then the drafter.

    Workers are numbered through all rings: the second ring of two stages has worker-2 and worker-3. The
    first drafter is called "drafter", that of ring n "drafter-n".

    replicas: Number of rings.
    stages: Number of workers of each ring.
    with_drafter: True if each ring has a drafter.
    """
    roles: list[Role] = []
    for ring in range(replicas):
        roles += (Role("worker", f"worker-{ring * stages + stage}", stage) for stage in range(stages))
        roles += [Role("drafter", f"drafter-{ring}" if ring else "drafter")] * with_drafter
    return roles


def master_of(
    options: FleetOptions,
    models: Models,
    stages: int,
    port: int,
    http_port: int | None,
    serving: Serving,
    stages_take_turns: bool,
) -> Service:
    """Return the master's service.

    Flags whose value is None are left out. With `private` certificates, clients need no TLS. The grace
    period is EXIT_GRACE plus `serving.grace`, in seconds.

    options: The fleet's options.
    models: The directories to load.
    stages: Number of workers of each ring.
    port: The master's gRPC port.
    http_port: The master's HTTP port; None for no HTTP.
    serving: Addresses, TLS files and flags of the services.
    stages_take_turns: True if the stages compute one after the other, so that one frame is in flight; see
        `do_stages_take_turns`.
    """
    flags = flags_of(
        model=address_of_model(models.base),
        workers=stages,
        drafter=models.drafts,
        drafter_wait=None if models.drafts == "none" else OWN_DRAFTER_WAIT,
        replicas=serving.replicas if serving.replicas > 1 else None,
        served_model_name=public_name(options),
        branch_layout=options.layout,
        tuner="fixed" if options.tree == "fixed" else "measured",
        listen=serving.listen_address(port),
        http=None if http_port is None else serving.listen_address(http_port),
        transport=options.transport,
        comm_mode=options.comm_mode,
        hop_dtype=options.hop_dtype,
        plan_style=options.plan_style,
        max_in_flight=1 if stages_take_turns else None,
        take_over_after=OWN_TAKE_OVER if stages_take_turns else None,
        fleet_listen=serving.fleet,
    )
    tls_files = serving.tls_files_of_clients
    of_clients = flags_of(
        token_file=serving.token_file or (tls_files and tls_files / "master" / "tokens"),
        client_tls="off" if serving.private else None,
        grace=serving.grace,
    )
    flags += serving.tls_files("master") + serving.master + of_clients
    grace = EXIT_GRACE + (serving.grace or 0)
    return Service(
        "master", "specsot_master", serving.reachable_address(port), flags, UNCONFIGURED, grace=grace
    )


def places_of_roles(serving: Serving, device: str, roles: Sequence[Role]) -> list[HostDevice]:
    """Return where each member runs; a drafter runs at the place of the worker before it.

    Unless places were chosen, all members run on `device` of this machine.

    Workers for which no place is left run on `device` of this machine.

    serving: The chosen places, ring by ring.
    device: A torch device.
    roles: The members, ring by ring.
    """
    chosen = iter(serving.places)
    places: list[HostDevice] = []
    for role in roles:
        previous = places[-1] if places else HostDevice(LOOPBACK, device)
        places.append(previous if role.stage is None else next(chosen, HostDevice(LOOPBACK, device)))
    return places


def worker_flags(options: FleetOptions, models: Models, stage: int) -> tuple[str, ...]:
    """Return the command-line flags of the worker of one stage.

    Without chosen layer ranges there is no --layers, and the master decides.

    options: Options with which the worker loads its layers.
    models: The model directories, with the layer range of each stage, if chosen.
    stage: The stage's number within its ring.
    """
    layers = flags_of(layers=models.layers[stage] if models.layers else None)
    return (*arguments_of(options, OF_WORKER), *layers)


def drafter_flags(options: FleetOptions) -> tuple[str, ...]:
    """Return the command-line flags of a drafter.

    options: Options with which the drafter loads.
    """
    own = replace(
        options,
        draft_dtype=options.drafter_dtype,
        draft_quantization=options.drafter_quantization,
        kv_memory=options.kv_memory if options.draft_kv_memory is None else options.draft_kv_memory,
    )
    return arguments_of(own, OF_DRAFTER)


def flags_of(**values: object) -> tuple[str, ...]:
    """Return flags as on a command line; values that are None are left out: (layers="0:4") -> ("--layers",
    "0:4").

    values: Values by the flag's name, with underscores for dashes.
    """
    pairs = [
        (f"--{name.replace('_', '-')}", str(value)) for name, value in values.items() if value is not None
    ]
    return tuple(word for pair in pairs for word in pair)


def do_stages_take_turns(serving: Serving, places: Sequence[HostDevice]) -> bool:
    """Return whether the stages of a ring compute one after the other, each with all cores of the machine.

    For many sequences, that is as fast as all stages at once with a share of the cores each, and for few
    sequences it is faster. It requires that all places are this machine's CPU, that no
    other machine can join, and that OMP_NUM_THREADS is not set.

    serving: Addresses of the services.
    places: Place of each member, ring by ring.
    """
    is_local = not serving.spread and all(place.device == "cpu" for place in places)
    # Members that join from other machines have cores of their own.
    is_exposed = exposed(serving.fleet or address_of(serving.host, 0))
    return is_local and not is_exposed and not os.environ.get("OMP_NUM_THREADS")


def with_cores(services: Sequence[Service], num_rings: int | None) -> list[Service]:
    """Return the services with the number of threads that each member process may use in its environment.

    OMP_NUM_THREADS of this process's environment takes precedence.

    Members on other machines get the same variable. The variables of the `specsot` command
    (HIDDEN_VARIABLES) are emptied for members; the master is returned unchanged.

    services: All services, the master first.
    num_rings: Number of rings among which the cores are divided, if stages take turns; None: the cores are
        divided among the member processes of this machine.
    """
    num_processes = sum(service.host is None and service.host_service is None for service in services[1:])
    environment = environment_of_members(num_rings or num_processes)
    return [*services[:1], *(replace(service, environment=environment) for service in services[1:])]


def environment_of_members(num_processes: int) -> tuple[tuple[str, str], ...]:
    """Return the environment of each of several member processes; see `with_cores`.

    num_processes: Number of processes that compute at the same time.
    """
    return ("OMP_NUM_THREADS", str(threads_per_process(num_processes))), *UNCONFIGURED


def threads_per_process(num_processes: int) -> int:
    """Return the threads of each of several processes that share this machine's cores: OMP_NUM_THREADS if it
    is set, else at least 1.

    Otherwise the machine's cores are divided by the number of processes, rounded down. A value of
    OMP_NUM_THREADS that is no whole number is ignored.

    num_processes: Number of processes that compute at the same time.
    """
    configured = os.environ.get("OMP_NUM_THREADS", "")
    return (
        int(configured) if configured.isdecimal() else max((os.cpu_count() or 1) // max(num_processes, 1), 1)
    )


def command_of(service: Service) -> str:
    """Return the command line with which a user starts a service, quoted for a shell.

    service: The service.
    """
    return shlex.join([service.module.replace("_", "-"), *service.arguments])


def with_join_server(serving: Serving, stages: int | None, device: str, fleet_listen: str | None) -> Serving:
    """Return a serving with a server for members, and with stages left to machines that join.

    The given places are replaced by the address under which other machines reach this one. Without
    certificates, a folder of this user's state is used, and only members need TLS. InvalidRequest is also
    raised for several rings and for places on other machines.

    serving: Addresses and flags of the services, without stages on other machines.
    stages: Number of stages; None: one more than the places of this machine.
    device: Torch device of the stages on this machine, if no places are chosen.
    fleet_listen: Address of the members' server; None: this machine's address.
    Raises InvalidRequest if no stage is left to others.
    """
    from specsot_app.fleet.joining import own_address

    devices = [place.device for place in serving.places] or [device]
    joining = (stages or len(devices) + 1) - len(devices)
    if joining < 1 or serving.replicas > 1 or serving.spread:
        raise InvalidRequest(
            "share needs one ring, --devices of this machine, and fewer of them than --stages",
            "share",
        )
    host = fleet_listen.rpartition(":")[0] if fleet_listen else own_address()
    places = tuple(HostDevice(host, device) for device in devices)
    return replace(
        serving,
        places=places,
        own_hosts=frozenset({host}),
        fleet=fleet_listen or address_of(host, FLEET_PORT),
        joining=joining,
        certificates=serving.certificates or state_folder() / "share",
        private=serving.certificates is None,
    )


# Remedy that errors name if TLS files are missing.
_TLS_FILES = (
    "give --certificates FOLDER (docker/certificates.sh makes one), or --insecure in a private network"
)


def with_member_server(serving: Serving, fleet_listen: str | None, insecure: bool) -> Serving:
    """Return a serving with a server for members that other machines reach, if some stages run there.

    If all stages are on this machine, the server exists only with `fleet_listen` or with certificates.
    Otherwise every place must be an address that other machines can reach: a loopback address raises
    InvalidRequest.

    serving: Addresses and places of the services.
    fleet_listen: Address of the server, if chosen.
    insecure: True: other machines may connect without certificates.
    Raises InvalidRequest, naming what is missing, if other machines could connect without certificates or
    cannot reach a place.
    """
    if exposed(address_of(serving.host, 0)) and serving.certificates is None and not insecure:
        raise InvalidRequest(f"--host {serving.host} is open to other machines: {_TLS_FILES}", "certificates")
    if not serving.spread:
        default_address = address_of(LOOPBACK, FLEET_PORT) if serving.certificates else None
        return replace(serving, fleet=fleet_listen or default_address)
    hosts = [place.host for place in serving.places]
    remote_host = next(host for host in hosts if host not in serving.own_hosts)
    for host in hosts:
        if not exposed(address_of(host, 0)):
            raise InvalidRequest(
                f"devices name {host}, which {remote_host} cannot reach: write this machine's address",
                field="devices",
            )
    if serving.certificates is None and not insecure:
        raise InvalidRequest(f"{remote_host} is another machine: {_TLS_FILES}", "certificates")
    return replace(serving, fleet=fleet_listen or _endpoint(hosts, serving.own_hosts, remote_host))


def _endpoint(hosts: Iterable[str], own_hosts: frozenset[str], remote_host: str) -> str:
    """Return the address of the members' server: that of the first host that is this machine.

    The port is FLEET_PORT.

    hosts: The hosts of all stages.
    own_hosts: The hosts that are this machine.
    remote_host: A host that is another machine, which the error names.
    Raises InvalidRequest if none of the hosts is this machine.
    """
    own_host = next((host for host in hosts if host in own_hosts), None)
    if own_host is None:
        raise InvalidRequest(
            f"no device is on this machine: give --fleet-listen HOST:{FLEET_PORT}, "
            f"which {remote_host} can reach",
            field="fleet_listen",
        )
    return address_of(own_host, FLEET_PORT)
