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
    """Options that all commands for a running master have.

    master: Address of the master, host:port.
    client: Options of the connection to that master.
    """

    HEADING: ClassVar[str] = "Options"

    master: str = option("127.0.0.1:50050", "The master to ask.", metavar="HOST:PORT")
    client: ClientOptions = field(default_factory=ClientOptions)


@dataclass(frozen=True, slots=True)
class InfoOptions(MasterOptions):
    """Options of `specsot info`.

    json: True: print one JSON object instead of lines.
    """

    HEADING: ClassVar[str] = "Options"

    json: bool = option(False, "Print one JSON object.")


@command(InfoOptions, examples=[Example("specsot info --master 10.0.0.1:50050 --json", "For a script")])
def info(options: InfoOptions) -> int:
    """Show models, members, layer ranges, pages, requests and steps of a fleet.

    Exit status 1 if the ring is not complete.
    """
    return show(options, options.json)


def show(options: MasterOptions, as_json: bool) -> int:
    """Print the state once; return 0 if the ring is complete, else 1.

    Raises Unavailable if the master does not answer.

    options: Options of the command, which say which master to ask.
    as_json: True: print one JSON object instead of lines.
    """
    from specsot_app.terminal.status_view import lines_of

    info = run_until_signal(get_state(options))
    print(json.dumps(dataclasses.asdict(info)) if as_json else "\n".join(lines_of(info)))
    return 0 if info.ready else 1


async def get_state(options: MasterOptions) -> Info:
    """Return the master's state.

    options: Options of the command, which say which master to ask.
    Raises Unavailable if the master does not answer.
    """
    async with options.client.connected(options.master) as master:
        return await master.info()


@dataclass(frozen=True, slots=True)
class StatusOptions(MasterOptions):
    """Options of `specsot status`.

    every: Seconds between two queries.
    once: True: print the state once.
    json: True: print the state once, as one JSON object.
    """

    HEADING: ClassVar[str] = "Options"

    every: float = option(1.0, "Seconds between refreshes.", min_value=0.1, max_value=3600, metavar="SECONDS")
    once: bool = option(False, "Print the state once, as `specsot info` does.")
    json: bool = option(False, "Print the state once, as one JSON object.")


@command(
    StatusOptions, examples=[Example("specsot status --master 10.0.0.1:50050", "Another machine's fleet")]
)
def status(options: StatusOptions) -> int:
    """Show members, layer ranges, pages, requests and steps per second, live until Ctrl-C.

    Prints the state once with --once or --json, or if the output is not a terminal; the exit status is then 1
    if the ring is not complete.

    \f Raises Unavailable if the first query fails; later ones are repeated. Ctrl-C gives the exit status 0.
    """
    if options.once or options.json or not sys.stdout.isatty():
        return show(options, options.json)
    with suppress(KeyboardInterrupt):
        run_until_signal(show_live(options))
    return 0


async def show_live(options: StatusOptions) -> None:
    """Show the state until cancelled.

    Raises Unavailable if the master does not answer the first query.

    options: Options of the command, which say which master to ask, and how often.
    """
    from rich.console import Console

    from specsot_app.terminal.status_view import watch

    async with options.client.connected(options.master) as master:
        await watch(master.info, lambda: asyncio.sleep(options.every), Console())


@dataclass(frozen=True, slots=True)
class RebalanceOptions(MasterOptions):
    """Options of `specsot rebalance`.

    wait: Seconds to wait for the new ring.
    """

    HEADING: ClassVar[str] = "Options"

    wait: float = option(120.0, "Seconds to wait for the new ring.", min_value=0, metavar="SECONDS")


@command(RebalanceOptions, examples=[Example("specsot rebalance", "After a worker has joined")])
def rebalance(options: RebalanceOptions) -> int:
    """Redistribute the layers over all workers, standby workers included.

    Running requests continue. Returns when the ring is complete again. Exit status 1 if there is not enough
    memory, or the ring is not complete in time.

    \f Prints one line with the epoch and the plan on stdout, "as it was" if nothing changed, and returns 0.
    What the master refuses is raised, and Unavailable if the ring is not complete in `wait` seconds.
    """
    rebalanced = run_until_signal(rebalance_and_wait(options))
    print(f"epoch {rebalanced.epoch}{'' if rebalanced.changed else ', as it was'} · {rebalanced.plan}")
    return 0


async def rebalance_and_wait(options: RebalanceOptions) -> Rebalanced:
    """Redistribute the layers, wait for the new ring, and return what the master reported.

    Waits at most `wait` seconds for the master's answer, and again as long for the ring. Raises what the
    master refuses.

    options: Options of the command, which say which master to ask, and how long to wait.
    Raises Unavailable if the ring is not complete in time.
    """
    async with options.client.connected(options.master) as master:
        try:
            async with asyncio.timeout(options.wait):
                rebalanced = await master.rebalance()
        except TimeoutError:
            raise Unavailable(
                f"after {options.wait:g} s layers or KV rows are still being transferred"
            ) from None
        await wait_complete(master, rebalanced.epoch, options.wait)
        return rebalanced


def is_complete(info: Info, epoch: int) -> bool:
    """Return whether the ring of this epoch or a later one, and all other rings that were formed, are
    complete.

    info: The master's state.
    epoch: The epoch to wait for.
    """
    formed = [replica for replica in info.replicas if replica.plan]
    return info.ready and info.epoch >= epoch and all(replica.ready for replica in formed)


async def wait_complete(master: MasterClient, epoch: int, timeout: float) -> None:
    """Wait until the ring of this epoch is complete.

    What is missing is what the master named last, or "the master" if it has not answered.

    master: A client of the master.
    epoch: The epoch to wait for; a later one counts as well.
    timeout: Seconds to wait at most.
    Raises Unavailable after that time, naming what is missing.
    """
    missing = "the master"
    try:
        async with asyncio.timeout(timeout):
            while not is_complete(info := await master.info(), epoch):
                missing = ", ".join(info.waiting_for)
                await asyncio.sleep(PAUSE)
    except TimeoutError:
        raise Unavailable(f"after {timeout:g} s the ring is still waiting for {missing}") from None
