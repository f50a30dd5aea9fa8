"""A fleet of this machine as processes: master, workers, drafter; started, waited for, ended.

Refuses to know what they do; it talks to the master like any other client.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from specsot.drafting import DraftOptions
from specsot.errors import SpecsotError, Unavailable
from specsot.events import Numbered
from specsot.info import Info
from specsot.members import Overrides
from specsot.params import Ask
from specsot.rpc.client import MasterClient, connect
from specsot.rpc.serve import check_free
from specsot_app.children import Child, Service, Tell, start
from specsot_app.fleets import Models, Wanted, Watch, options_of, overrides_of, public_name

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
STAGES = 2  # so that a lap really crosses processes
# What the `specsot` command is configured with is for that command; a fleet within one machine needs neither
# certificates nor tokens.
FORGOTTEN = ("CONFIG", "TOKEN", "TOKEN_FILE", "TLS_CA", "TLS_CERT", "TLS_KEY")
UNCONFIGURED = tuple((f"SPECSOT_{name}", "") for name in FORGOTTEN)
PAUSE = 0.05  # seconds between looks at a ring that is not complete yet


@dataclass(frozen=True, slots=True)
class Serving:
    """How a fleet serves, whatever it is made of.

    host: where the master's doors listen. master, members: further flags of theirs, as on a command line.
    """

    host: str = LOOPBACK
    master: tuple[str, ...] = ()
    members: tuple[str, ...] = ()

    def listens(self, port: int) -> str:
        return f"{self.host}:{port}"

    def reached(self, port: int) -> str:
        """Where this machine reaches it: everywhere is here too."""
        return f"{LOOPBACK if self.host in ('', '0.0.0.0', '[::]') else self.host}:{port}"


PRIVATE = Serving()


def keep_quiet(service: str, line: str) -> None:
    """Nobody listens; the child's last words are kept anyway."""


class ProcessFleet:
    """Three kinds of processes and a client of their master."""

    def __init__(self, children: list[Child], client: MasterClient, stack: AsyncExitStack) -> None:
        self.children, self._client, self._stack = children, client, stack

    @classmethod
    async def start(
        cls,
        wanted: Wanted,
        models: Models,
        port: int | None = None,
        tell: Tell = keep_quiet,
        http_port: int | None = None,
        serving: Serving = PRIVATE,
        watch: Watch | None = None,
    ) -> ProcessFleet:
        """Start everything and wait until the ring is complete.

        port: where the master listens; None takes a free one. http_port: the same for HTTP; None: nowhere.
        Raises what a service died of, in one line; then nothing is left running.
        """
        port = port or free_port()
        check_free(serving.listens(port))  # else the members would join whoever is there
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specsot-")))
            children: list[Child] = []
            stack.push_async_callback(end_all, children)
            for service in services_of(wanted, models, port, folder, http_port, serving):
                children.append(await start(service, tell))
            whole = ready_client(children[0].service.address, len(children) - 1, watch)
            client = await unless_one_ends(children, whole)
            stack.push_async_callback(client.close)
            return cls(children, client, stack.pop_all())
        raise AssertionError("unreachable: the stack passes errors on")

    def generate(self, ask: Ask) -> AsyncIterator[Numbered]:
        return self._client.generate(ask)

    async def cancel(self, request: str) -> bool:
        return await self._client.cancel(request)

    async def info(self) -> Info:
        return await self._client.info()

    async def ended(self) -> SpecsotError:
        """Wait until any of the processes is gone, and say why."""
        return await first_end(self.children)

    async def close(self) -> None:
        """End every process."""
        await self._stack.aclose()


def services_of(
    wanted: Wanted,
    models: Models,
    port: int,
    folder: Path,
    http_port: int | None = None,
    serving: Serving = PRIVATE,
) -> list[Service]:
    """The master first. Workers and drafter listen on unix sockets: nothing else is in the way."""
    master, base = serving.reached(port), str(models.base)
    stages = len(models.layers) or wanted.stages or STAGES
    drafter = models.drafts
    steer = ("--model", base, "--workers", str(stages), "--drafter", drafter, "--name", public_name(wanted))
    steer += ("--branch-layout", wanted.layout, "--tree", wanted.tree, "--listen", serving.listens(port))
    steer += () if http_port is None else ("--http", serving.listens(http_port))
    steer += serving.master
    services = [Service("master", "specsot_master", master, steer, UNCONFIGURED)]
    weights = ("--model", base, "--model-format", wanted.model_format)
    compute = (*weights, "--master", master, "--dtype", wanted.dtype, "--device", wanted.device)
    compute += serving.members
    threads = share_of(stages + (drafter != "none"))
    for stage in range(stages):
        chosen = ("--layers", str(models.layers[stage])) if models.layers else ()
        services.append(member(f"worker-{stage}", "specsot_worker", folder, (*compute, *chosen), threads))
    if drafter != "none":
        head = ("--draft-model", str(models.draft)) if models.draft else ()
        how = (*override_flags(overrides_of(wanted)), *drafting_flags(options_of(wanted)))
        draft = (*compute, "--drafter", drafter, *head, "--draft-format", wanted.draft_format, *how)
        services.append(member("drafter", "specsot_drafter", folder, draft, threads))
    return services


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


def member(name: str, module: str, folder: Path, arguments: tuple[str, ...], threads: int) -> Service:
    address = f"unix:{folder / name}"
    own = (*arguments, "--name", name, "--listen", address, "--advertise", address)
    return Service(name, module, address, own, (("OMP_NUM_THREADS", str(threads)), *UNCONFIGURED))


def share_of(members: int) -> int:
    """Compute threads of each member: all share this machine's cores. What the environment says, wins."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() else max((os.cpu_count() or 1) // members, 1)


def free_port() -> int:
    """A TCP port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def is_free(port: int) -> bool:
    """Nobody listens there at this moment."""
    try:
        check_free(f"{LOOPBACK}:{port}")
    except Unavailable:
        return False
    return True


async def ready_client(address: str, members: int, watch: Watch | None = None) -> MasterClient:
    """A client of the master at `address`, once its ring is complete and all `members` have joined."""
    while True:
        try:
            client = await connect(address)
            info = await client.info()
            if watch:
                watch("services", 1 + len(info.members) - (not info.ready), 1 + members)
            if info.ready and len(info.members) == members:
                return client
            await client.close()
        except Unavailable:
            pass  # the master is still starting
        await asyncio.sleep(PAUSE)


async def unless_one_ends(children: list[Child], work: Coroutine[Any, Any, T]) -> T:
    """The work's result; raises why a child ended, if one does first."""
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(first_end(children))
    try:
        await asyncio.wait([working, ending], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ending.result()
        return working.result()
    finally:
        working.cancel()
        ending.cancel()


async def end_all(children: list[Child]) -> None:
    """Members first, side by side; the master last, so that none misses it."""
    await asyncio.gather(*(child.end() for child in children[1:]))
    await asyncio.gather(*(child.end() for child in children[:1]))


async def first_end(children: list[Child]) -> SpecsotError:
    endings = [asyncio.ensure_future(child.ended()) for child in children]
    try:
        done, _ = await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for ending in endings:
            ending.cancel()
