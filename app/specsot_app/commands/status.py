"""`specsot status`: how a master's ring stands, live; in a pipe the one look that `specsot info` takes.

Refuses to know how it is drawn.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from typing import Annotated

import typer

from specsot_app.commands import info, options
from specsot_app.event_loop import run_until_signal
from specsot_app.reaching import Reach, reach_of


def status(
    master: info.Master = info.HERE,
    tls_ca: options.TlsCa = None,
    token_file: options.TokenFile = None,
    every: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One look, as specsot info takes it.")] = False,
    json: info.Json = False,
) -> int:
    """Members, layer ranges, pages, requests, laps per second, again and again until Ctrl-C.

    One look with --once, with --json, and where nobody watches; then exit status 1 while the ring is not
    complete.
    """
    reach = reach_of(tls_ca, token_file)
    if once or json or not sys.stdout.isatty():
        return info.show(master, reach, json)
    with suppress(KeyboardInterrupt):
        run_until_signal(keep_looking(master, reach, every))
    return 0


async def keep_looking(master: str, reach: Reach, every: float) -> None:
    from rich.console import Console

    from specsot.transport.grpc_client import connect
    from specsot_app.terminal.status_view import watch

    client = await connect(master, tls=reach.tls, token=reach.token)
    try:
        await watch(client.info, lambda: asyncio.sleep(every), Console())
    finally:
        await client.close()
