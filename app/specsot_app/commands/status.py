"""Implements `specsot info`, `status`, `rebalance`: report on a running master, or redistribute its
layers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from specsot.errors import Unavailable
from specsot.service.command import Example, command
from specsot.service.option_table import option
from specsot_app.fleet.options import ClientOptions
from specsot_app.runtime import run_until_signal

if TYPE_CHECKING:
    from specsot.core.info import Info, Rebalanced
    from specsot.transport.grpc_client import MasterClient

# Seconds between checks of a ring that is not complete yet. Untuned.
PAUSE = 0.1


@dataclass(frozen=True, slots=True)
class MasterOptions:
    """Options that all commands for a running master have."""

    HEADING: ClassVar[str] = "Options"

    master: str = option("127.0.0.1:50050", "The master to ask.", metavar="HOST:PORT")
    client: ClientOptions = field(default_factory=ClientOptions)


@dataclass(frozen=True, slots=True)
class InfoOptions(MasterOptions):
    """Options of `specsot info`."""

    HEADING: ClassVar[str] = "Options"

    json: bool = option(False, "Print one JSON object.")


@command(InfoOptions, examples=[Example("specsot info --master 10.0.0.1:50050 --json", "For a script")])
def info(given: InfoOptions) -> int:
    """Show models, members, layer ranges, pages, requests and steps of a fleet.

    Exit status 1 if the ring is not complete.
    """
    return show(given, given.json)


def show(given: MasterOptions, as_json: bool) -> int:
    """Print the state once; return 0 if the ring is complete, else 1."""
    from specsot_app.terminal.status_view import lines_of

    found = run_until_signal(ask(given))
    print(json.dumps(dataclasses.asdict(found)) if as_json else "\n".join(lines_of(found)))
    return 0 if found.ready else 1


async def ask(given: MasterOptions) -> Info:
    """Return the master's state."""
    async with given.client.connected(given.master) as master:
        return await master.info()


@dataclass(frozen=True, slots=True)
class StatusOptions(MasterOptions):
    """Options of `specsot status`."""

    HEADING: ClassVar[str] = "Options"

    every: float = option(1.0, "Seconds between refreshes.", least=0.1, most=3600, metavar="SECONDS")
    once: bool = option(False, "Print the state once, as `specsot info` does.")
    json: bool = option(False, "Print the state once, as one JSON object.")


@command(
    StatusOptions, examples=[Example("specsot status --master 10.0.0.1:50050", "Another machine's fleet")]
)
def status(given: StatusOptions) -> int:
    """Show members, layer ranges, pages, requests and steps per second, live until Ctrl-C.

    Prints the state once with --once or --json, or if the output is not a terminal; the exit status is
    then 1 if the ring is not complete.
    """
    if given.once or given.json or not sys.stdout.isatty():
        return show(given, given.json)
    with suppress(KeyboardInterrupt):
        run_until_signal(keep_looking(given))
    return 0


async def keep_looking(given: StatusOptions) -> None:
    """Show the state until cancelled."""
    from rich.console import Console

    from specsot_app.terminal.status_view import watch

    async with given.client.connected(given.master) as master:
        await watch(master.info, lambda: asyncio.sleep(given.every), Console())


@dataclass(frozen=True, slots=True)
class RebalanceOptions(MasterOptions):
    """Options of `specsot rebalance`."""

    HEADING: ClassVar[str] = "Options"

    wait: float = option(120.0, "Seconds to wait for the new ring.", least=0, metavar="SECONDS")


@command(RebalanceOptions, examples=[Example("specsot rebalance", "After a worker has joined")])
def rebalance(given: RebalanceOptions) -> int:
    """Redistribute the layers over all workers, standby workers included.

    Running requests continue. Returns when the ring is complete again. Exit status 1 if there is not
    enough memory, or the ring is not complete in time.
    """
    done = run_until_signal(form_anew(given))
    print(f"epoch {done.epoch}{'' if done.changed else ', as it was'} · {done.plan}")
    return 0


async def form_anew(given: RebalanceOptions) -> Rebalanced:
    """Redistribute the layers, and wait for the new ring. Raises Unavailable if it is not complete
    in time.
    """
    async with given.client.connected(given.master) as master:
        try:
            async with asyncio.timeout(given.wait):
                done = await master.rebalance()
        except TimeoutError:
            raise Unavailable(f"after {given.wait:g} s layers or KV rows are still on their way") from None
        await complete(master, done.epoch, given.wait)
        return done


def settled(found: Info, epoch: int) -> bool:
    """Return whether the ring of this epoch, and all other rings that were formed, are complete."""
    formed = [one for one in found.replicas if one.plan]
    return found.ready and found.epoch >= epoch and all(one.ready for one in formed)


async def complete(master: MasterClient, epoch: int, wait: float) -> None:
    """Wait until the ring of this epoch is complete. Raises Unavailable, naming what is missing."""
    lacking = "the master"
    try:
        async with asyncio.timeout(wait):
            while not settled(found := await master.info(), epoch):
                lacking = ", ".join(found.waiting_for)
                await asyncio.sleep(PAUSE)
    except TimeoutError:
        raise Unavailable(f"after {wait:g} s the ring is still waiting for {lacking}") from None
