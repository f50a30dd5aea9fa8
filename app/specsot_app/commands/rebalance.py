"""`specsot rebalance`: shares a master's layers out anew over all workers that help.

Refuses to know how they are shared.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from specsot_app.commands import info, options
from specsot_app.event_loop import run_until_signal
from specsot_app.reaching import Reach, reach_of

if TYPE_CHECKING:
    from specsot.core.info import Info, Rebalanced
    from specsot.transport.grpc_client import MasterClient

PAUSE = 0.1  # seconds between looks at a ring that is not complete yet


def rebalance(
    master: info.Master = info.HERE,
    tls_ca: options.TlsCa = None,
    token_file: options.TokenFile = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds the new ring may take.")] = 120.0,
) -> int:
    """Share the layers out anew, workers that stand by included; what is being answered goes on where it was.

    Returns when the ring is complete again. Exit status 1 where it has no room, or is not complete in time.
    """
    done = run_until_signal(form_anew(master, reach_of(tls_ca, token_file), wait))
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
