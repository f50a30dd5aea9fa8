"""`specsot info`: one look at what a master serves and how its ring stands.

Refuses to know how the master found out.
"""

from __future__ import annotations

import dataclasses
import json as notation
from typing import Annotated

import typer

from specsot.core.info import Info
from specsot_app.commands import options
from specsot_app.event_loop import run_until_signal
from specsot_app.reaching import Reach, reach_of

HERE = "127.0.0.1:50050"

Master = Annotated[str, typer.Option(help="host:port of the master.")]
Json = Annotated[bool, typer.Option("--json", help="The same as one JSON object.")]


def info(
    master: Master = HERE,
    tls_ca: options.TlsCa = None,
    token_file: options.TokenFile = None,
    json: Json = False,
) -> int:
    """Models, members, layer ranges, pages, requests, laps. Exit status 1 while the ring is not complete."""
    return show(master, reach_of(tls_ca, token_file), json)


def show(master: str, reach: Reach, json: bool) -> int:
    """Print what the master tells."""
    from specsot_app.terminal.status_view import lines_of

    found = run_until_signal(ask(master, reach))
    print(notation.dumps(dataclasses.asdict(found)) if json else "\n".join(lines_of(found)))
    return 0 if found.ready else 1


async def ask(master: str, reach: Reach) -> Info:
    from specsot.transport.grpc_client import connect

    client = await connect(master, tls=reach.tls, token=reach.token)
    try:
        return await client.info()
    finally:
        await client.close()
