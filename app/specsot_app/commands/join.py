"""Implements `specsot join CODE`: this machine runs layers of a fleet that another machine shares."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from specsot.checkpoint.cache import state_folder
from specsot.checkpoint.config import require_torch
from specsot.service.command import Example, command
from specsot.service.option_table import MEMORY, Option, arguments_of, option
from specsot_app.runtime import run_until_signal

if TYPE_CHECKING:
    from specsot.transport.security import Tls
    from specsot_app.fleet.joining import JoinedFleet
    from specsot_app.fleet.service_specs import Service


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """Options of `specsot join`.

    code: The code that `specsot serve --share` printed.
    device: Torch device of the worker; "auto": a GPU where there is one.
    kv_memory: Bytes of memory for KV pages; None: 1 GiB.
    advertise: Host at which others reach this machine; None: as the first machine sees it.
    """

    HEADING: ClassVar[str] = "Joining"

    code: Annotated[str, Option("What `specsot serve --share` printed.", positional=True)]
    device: str = option(
        "auto", "Torch device, such as cpu, cuda or cuda:0; `auto`: an NVIDIA GPU where one is."
    )
    kv_memory: int | None = option(None, "Memory for KV pages, such as 512M or 4G.", kind=MEMORY, unset="1G")
    advertise: str | None = option(
        None,
        "Address at which the others reach this machine.",
        metavar="HOST",
        unset="as the first machine sees it",
    )


EXAMPLES = (
    Example("specsot join 10.0.0.1:50059/7Qm3...", "On the second machine, with the code of the first"),
    Example("specsot join --device cpu 10.0.0.1:50059/7Qm3...", "Without its GPU"),
)


@command(JoinOptions, examples=EXAMPLES)
def join(options: JoinOptions) -> int:
    """Run layers of a model that another machine shares with `specsot serve --share`. Ctrl-C leaves.

    Certificates come with the code, layers from the other machine; no files have to be copied.

    \f The exit status is 0 after Ctrl-C or SIGTERM; what the worker ended with, or what joining raises, is
    passed on. Log lines and the worker's output go to stderr.
    """
    from specsot_app.fleet.devices import local_device

    require_torch()
    options = replace(options, device=local_device(options.device, sys.stderr))
    # Ctrl-C is the normal end of a member.
    with suppress(KeyboardInterrupt):
        run_until_signal(run_worker(options))
    return 0


async def run_worker(options: JoinOptions) -> None:
    """Join the fleet, then run a worker until it is stopped, or until it ends and cannot be restarted.

    The worker's output goes to stderr. The worker is ended in every case; the call never returns normally.

    options: Options of the command; its device is chosen, so that it is not "auto".
    Raises why the worker ended, and what joining raises.
    """
    from specsot_app.commands.serve import print_output
    from specsot_app.fleet.joining import join_fleet
    from specsot_app.fleet.processes import end_all, keep_running, start

    joined_fleet, tls = await join_fleet(options.code, state_folder() / "joined")
    worker = [await start(worker_service(options, joined_fleet, tls), print_output)]
    try:
        raise await keep_running(worker, print_output)
    finally:
        await end_all(worker)


def worker_service(options: JoinOptions, joined_fleet: JoinedFleet, tls: Tls) -> Service:
    """Return the worker's service. It has no model files: the layers come from workers that have them.

    The port is the first free one of the 100 from FIRST_PORT on, or any free one if the fleet is on this
    same machine (the host is the loopback address). Raises StopIteration if none of the 100 is free.

    options: Options of the command.
    joined_fleet: The addresses and flags that the first machine sent.
    tls: Paths of this machine's certificate and key, and of the fleet's CA.
    """
    from specsot_app.core.device_map import FIRST_PORT, address_of
    from specsot_app.fleet.processes import free_port, is_free
    from specsot_app.fleet.service_specs import LOOPBACK, UNCONFIGURED, Service, flags_of

    host = options.advertise or joined_fleet.own_host
    # On one machine, the fleet's own members may be about to take the first ports.
    if host == LOOPBACK:
        port = free_port()
    else:
        port = next(port for port in range(FIRST_PORT, FIRST_PORT + 100) if is_free(port, host))
    address = address_of(host, port)
    flags = flags_of(
        device=options.device, kv_memory=options.kv_memory, master=joined_fleet.master, listen=address
    )
    arguments = (*joined_fleet.flags, *flags, *arguments_of(tls))
    return Service("worker", "specsot_worker", address, arguments, UNCONFIGURED)
