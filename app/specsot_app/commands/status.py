"""`specsot status`: how a master's ring stands, live; in a pipe the one look that `specsot info` takes."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from specsot.service.command import Example, command
from specsot.service.option_table import Option
from specsot_app.commands.info import HERE, show
from specsot_app.fleet.options import ClientOptions, Reach
from specsot_app.runtime import run_until_signal


@dataclass(frozen=True, slots=True)
class StatusOptions:
    HEADING: ClassVar[str] = "Options"

    master: Annotated[str, Option("The master to ask.", metavar="HOST:PORT")] = HERE
    every: Annotated[float, Option("Seconds between looks.", least=0.1, most=3600, metavar="SECONDS")] = 1.0
    once: Annotated[bool, Option("Look once, as `specsot info` does.")] = False
    json: Annotated[bool, Option("Look once, and print one JSON object.")] = False
    client: ClientOptions = field(default_factory=ClientOptions)


@command(
    StatusOptions, examples=[Example("specsot status --master 10.0.0.1:50050", "Another machine's fleet")]
)
def status(given: StatusOptions) -> int:
    """Show members, layer ranges, pages, requests and laps per second, live until Ctrl-C.

    Looks once with --once, with --json, and where the output is no terminal; then the exit status is 1 while
    the ring is not complete.
    """
    reach = given.client.reach
    if given.once or given.json or not sys.stdout.isatty():
        return show(given.master, reach, given.json)
    with suppress(KeyboardInterrupt):
        run_until_signal(keep_looking(given.master, reach, given.every))
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
