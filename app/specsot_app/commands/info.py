"""`specsot info`: one look at what a master serves and how its ring stands."""

from __future__ import annotations

import dataclasses
import json as notation
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from specsot.core.info import Info
from specsot.service.command import Example, command
from specsot.service.option_table import Option
from specsot_app.fleet.options import ClientOptions, Reach
from specsot_app.runtime import run_until_signal

HERE = "127.0.0.1:50050"


@dataclass(frozen=True, slots=True)
class InfoOptions:
    HEADING: ClassVar[str] = "Options"

    master: Annotated[str, Option("The master to ask.", metavar="HOST:PORT")] = HERE
    json: Annotated[bool, Option("Print one JSON object.")] = False
    client: ClientOptions = field(default_factory=ClientOptions)


@command(InfoOptions, examples=[Example("specsot info --master 10.0.0.1:50050 --json", "For a script")])
def info(given: InfoOptions) -> int:
    """Show models, members, layer ranges, pages, requests and laps of a fleet.

    Exit status 1 while its ring is not complete.
    """
    return show(given.master, given.client.reach, given.json)


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
