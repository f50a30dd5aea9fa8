"""Which services a fleet is made of, here and elsewhere, and the command line of each.

Refuses to know how a service is started, and what it does.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specsot.drafting import DraftOptions
from specsot.members import Overrides
from specsot_app.child_process import EXIT_GRACE, Service
from specsot_app.fleets import Models, Wanted, options_of, overrides_of, public_name
from specsot_app.places import Place, address_of, ports_of
from specsot_app.reaching import Reach, reach_of

LOOPBACK = "127.0.0.1"
STAGES = 2  # so that a lap really crosses processes
# What the `specsot` command is configured with is for that command; a fleet's services get theirs as flags.
FORGOTTEN = ("CONFIG", "TOKEN", "TOKEN_FILE", "TLS_CA", "TLS_CERT", "TLS_KEY")
UNCONFIGURED = tuple((f"SPECSOT_{name}", "") for name in FORGOTTEN)


@dataclass(frozen=True, slots=True)
class Serving:
    """How a fleet serves, whatever it is made of.

    host: where the master's doors listen. master, members: further flags of theirs, as on a command line.
    grace: seconds that answers have to end once the master is told to; None: as its environment says.
    replicas: how many rings. places: of each stage, ring by ring, if chosen; `here` are those hosts among
    them that are this machine.
    fleet: the door of members, if they have one apart. certificates: a folder of docker/certificates.sh.
    """

    host: str = LOOPBACK
    master: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    grace: float | None = None
    replicas: int = 1
    places: tuple[Place, ...] = ()
    here: frozenset[str] = frozenset()
    fleet: str | None = None
    certificates: Path | None = None

    @property
    def spread(self) -> bool:
        """Some members are on other machines."""
        return any(place.host not in self.here for place in self.places)

    def listens(self, port: int) -> str:
        return address_of(self.host, port)

    def reached(self, port: int) -> str:
        """Where this machine reaches it: everywhere is here too."""
        return address_of(LOOPBACK if self.host in ("", "0.0.0.0", "[::]") else self.host, port)

    @property
    def reach(self) -> Reach:
        """What a client trusts and shows."""
        if self.certificates is None:
            return Reach()
        return reach_of(self.certificates / "ca.pem", self.certificates / "token")

    @property
    def shown(self) -> tuple[str, ...]:
        """The same, as flags of a client."""
        if self.certificates is None:
            return ()
        return flags_of(tls_ca=self.certificates / "ca.pem", token_file=self.certificates / "token")

    def papers(self, role: str) -> tuple[str, ...]:
        """Flags that say who a service is. On another machine the folder has the same name."""
        if self.certificates is None:
            return ()
        own = self.certificates / role
        return flags_of(tls_ca=own / "ca.pem", tls_cert=own / "own.pem", tls_key=own / "own.key")


PRIVATE = Serving()


@dataclass(frozen=True, slots=True)
class Role:
    """What one member is. stage: of its ring, of a worker."""

    kind: str
    name: str
    stage: int | None = None


def services_of(
    wanted: Wanted,
    models: Models,
    port: int,
    folder: Path,
    http_port: int | None = None,
    serving: Serving = PRIVATE,
) -> list[Service]:
    """The master first; then of each ring its workers in order, and its drafter beside the last one."""
    if models.places:
        serving = replace(serving, places=models.places, here=frozenset(one.host for one in models.places))
    stages = len(models.layers) or len(serving.places) // serving.replicas or wanted.stages or STAGES
    services = [master_of(wanted, models, stages, port, http_port, serving)]
    weights = ("--model", str(models.base), "--model-format", wanted.model_format)
    compute = (*weights, "--master", serving.fleet or serving.reached(port))
    compute += flags_of(kv_memory=wanted.kv_memory)
    roles = roles_of(serving.replicas, stages, models.drafts != "none")
    places = placed(serving, wanted.device, roles)
    ports = ports_of([place.host for place in places])
    for role, place, port in zip(roles, places, ports):
        own = (*compute, "--device", place.device, *serving.members, *serving.papers(role.kind))
        own += drafts_with(wanted, models) if role.stage is None else runs(wanted, models, role.stage)
        address = address_of(place.host, port) if serving.spread else f"unix:{folder / role.name}"
        services.append(member(role.name, f"specsot_{role.kind}", address, own, place.host, serving))
    return shared(services)


def roles_of(replicas: int, stages: int, drafts: bool) -> list[Role]:
    """Ring by ring."""
    roles: list[Role] = []
    for ring in range(replicas):
        roles += (Role("worker", f"worker-{ring * stages + stage}", stage) for stage in range(stages))
        roles += [Role("drafter", f"drafter-{ring}" if ring else "drafter")] * drafts
    return roles


def master_of(
    wanted: Wanted, models: Models, stages: int, port: int, http_port: int | None, serving: Serving
) -> Service:
    steer = ("--model", str(models.base), "--workers", str(stages), "--drafter", models.drafts)
    steer += flags_of(replicas=serving.replicas if serving.replicas > 1 else None)
    steer += ("--name", public_name(wanted), "--branch-layout", wanted.layout, "--tree", wanted.tree)
    steer += ("--listen", serving.listens(port))
    steer += () if http_port is None else ("--http", serving.listens(http_port))
    steer += flags_of(transport=wanted.transport, comm_mode=wanted.comm_mode)
    steer += flags_of(fleet_listen=serving.fleet) + serving.papers("master") + serving.master
    if serving.certificates:
        steer += ("--token-file", str(serving.certificates / "master" / "tokens"))
    steer += flags_of(grace=serving.grace)
    grace = EXIT_GRACE + (serving.grace or 0)
    return Service("master", "specsot_master", serving.reached(port), steer, UNCONFIGURED, grace=grace)


def placed(serving: Serving, device: str, roles: Sequence[Role]) -> list[Place]:
    """Where each member runs, a drafter beside the worker before it; unless somebody chose, on one device of
    this machine.
    """
    chosen = iter(serving.places)
    places: list[Place] = []
    for role in roles:
        beside = places[-1] if places else Place(LOOPBACK, device)
        places.append(beside if role.stage is None else next(chosen, Place(LOOPBACK, device)))
    return places


def runs(wanted: Wanted, models: Models, number: int) -> tuple[str, ...]:
    held = flags_of(
        dtype=wanted.dtype,
        quantization=wanted.quantization,
        kv_cache_dtype=wanted.kv_cache_dtype,
        batch_invariant="on" if wanted.batch_invariant else None,
    )
    return (*held, *flags_of(layers=models.layers[number] if models.layers else None))


def drafts_with(wanted: Wanted, models: Models) -> tuple[str, ...]:
    head = ("--draft-model", str(models.draft)) if models.draft else ()
    held = flags_of(dtype=wanted.draft_dtype or wanted.dtype, quantization=wanted.draft_quantization)
    how = (*held, *override_flags(overrides_of(wanted)), *drafting_flags(options_of(wanted)))
    return ("--drafter", models.drafts, *head, "--draft-format", wanted.draft_format, *how)


def override_flags(overrides: Overrides) -> tuple[str, ...]:
    layers = overrides.aux_layers
    listed = None if layers is None else ",".join(map(str, layers))
    return flags_of(drafter_rope_theta=overrides.rope_theta, aux_layers=listed)


def drafting_flags(options: DraftOptions) -> tuple[str, ...]:
    return flags_of(
        draft_mode=options.mode,
        draft_tokens=options.tokens,
        draft_breadth=options.breadth,
        draft_nodes=options.nodes,
        draft_threshold=options.threshold,
        tuner=options.tuner,
        blend="yes" if options.blend else "no",
    )


def flags_of(**given: object) -> tuple[str, ...]:
    """As on a command line; what is None is left out."""
    named = [
        (f"--{name.replace('_', '-')}", str(value)) for name, value in given.items() if value is not None
    ]
    return tuple(word for pair in named for word in pair)


def member(
    name: str, module: str, address: str, arguments: tuple[str, ...], host: str, serving: Serving
) -> Service:
    """Of a spread fleet it listens where the others reach it; else a unix socket is all it takes."""
    own = (*arguments, "--name", name, "--listen", address, "--advertise", address)
    elsewhere = host if serving.spread and host not in serving.here else None
    return Service(name, module, address, own, host=elsewhere)


def shared(services: Sequence[Service]) -> list[Service]:
    """Members of this machine share its cores. What the environment says, wins."""
    here = sum(service.host is None for service in services[1:])
    environment = (("OMP_NUM_THREADS", str(share_of(here))), *UNCONFIGURED)
    return [*services[:1], *(replace(service, environment=environment) for service in services[1:])]


def share_of(members: int) -> int:
    """Compute threads of each of so many members."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() else max((os.cpu_count() or 1) // max(members, 1), 1)


def command_of(service: Service) -> str:
    """What a person types to start it."""
    return shlex.join([service.module.replace("_", "-"), *service.arguments])
