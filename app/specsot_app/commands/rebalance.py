"""`specsot rebalance`: shares a master's layers out anew over all workers that help."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from specsot.service.command import Example, command
from specsot.service.option_table import Option
from specsot_app.commands.info import HERE
from specsot_app.fleet.options import ClientOptions, Reach
from specsot_app.runtime import run_until_signal

if TYPE_CHECKING:
    from specsot.core.info import Info, Rebalanced
    from specsot.transport.grpc_client import MasterClient

PAUSE = 0.1  # seconds between looks at a ring that is not complete yet


@dataclass(frozen=True, slots=True)
class RebalanceOptions:
    HEADING: ClassVar[str] = "Options"

    master: Annotated[str, Option("The master to ask.", metavar="HOST:PORT")] = HERE
    wait: Annotated[float, Option("Seconds the new ring may take.", least=0, metavar="SECONDS")] = 120.0
    client: ClientOptions = field(default_factory=ClientOptions)


@command(RebalanceOptions, examples=[Example("specsot rebalance", "After a worker has joined")])
def rebalance(given: RebalanceOptions) -> int:
    """Share the layers out anew over all workers, those that stand by included.

    Requests go on where they were. Returns when the ring is complete again. Exit status 1 where there is no
    room, or it is not complete in time.
    """
    done = run_until_signal(form_anew(given.master, given.client.reach, given.wait))
    print(f"epoch {done.epoch}{'' if done.changed else ', as it was'} · {done.plan}")
    return 0


async def form_anew(master: str, reach: Reach, wait: float) -> Rebalanced:
    from specsot.transport.grpc_client import connect

    client = await connect(master, tls=reach.tls, token=reach.token)
    try:
        done = await client.rebalance()
        await complete(client, done.epoch, wait)
        return done
    finally:
        await client.close()


def settled(found: Info, epoch: int) -> bool:
    """The newest ring is complete, as are all others that were formed."""
    formed = [one for one in found.replicas if one.plan]
    return found.ready and found.epoch >= epoch and all(one.ready for one in formed)


async def complete(client: MasterClient, epoch: int, wait: float) -> None:
    """Raises Unavailable, naming what is missing."""
    from specsot.errors import Unavailable

    lacking = "the master"
    try:
        async with asyncio.timeout(wait):
            while not settled(found := await client.info(), epoch):
                lacking = ", ".join(found.waiting_for)
                await asyncio.sleep(PAUSE)
    except TimeoutError:
        raise Unavailable(f"after {wait:g} s the ring is still waiting for {lacking}") from None
