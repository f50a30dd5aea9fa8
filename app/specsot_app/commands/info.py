"""`specsot info`: what a master serves and how its ring stands.

Refuses to know the ring; it prints what the master says.
"""

from __future__ import annotations

from typing import Annotated

import typer

from specsot_app.running import run


def info(
    master: Annotated[str, typer.Option(help="host:port of the master.")] = "127.0.0.1:50050",
) -> int:
    """Models, members, layer ranges, pages, epoch."""
    return run(tell(master))


async def tell(master: str) -> int:
    from specsot.rpc.client import connect

    client = await connect(master)
    try:
        print(await client.info())
    finally:
        await client.close()
    return 0
