"""`specsot info`: what a master serves and how its ring stands.

Refuses to know how the master found out.
"""

from __future__ import annotations

import dataclasses
import json as notation
from typing import Annotated

import typer

from specsot.info import Info, MemberInfo, PagesInfo, RequestsInfo
from specsot_app.commands import options
from specsot_app.reaching import Reach, reach_of
from specsot_app.running import run


def info(
    master: Annotated[str, typer.Option(help="host:port of the master.")] = "127.0.0.1:50050",
    tls_ca: options.TlsCa = None,
    token_file: options.TokenFile = None,
    json: Annotated[bool, typer.Option("--json", help="The same as one JSON object.")] = False,
) -> int:
    """Models, members, layer ranges, pages, epoch. Exit status 1 while the ring is not complete."""
    found = run(ask(master, reach_of(tls_ca, token_file)))
    print(notation.dumps(dataclasses.asdict(found)) if json else "\n".join(lines_of(found)))
    return 0 if found.ready else 1


async def ask(master: str, reach: Reach) -> Info:
    from specsot.rpc.client import connect

    client = await connect(master, tls=reach.tls, token=reach.token)
    try:
        return await client.info()
    finally:
        await client.close()


def lines_of(found: Info) -> list[str]:
    """For people: one fact a line."""
    models = [
        f"model     {one.name} · {one.layers} layers · {one.max_positions} positions" for one in found.models
    ]
    members = [line_of(member) for member in found.members]
    waiting = [f"waiting   {line}" for line in found.waiting_for]
    pages = [pages_line(found.pages)] if found.pages else []
    requests = [requests_line(found.requests)] if found.requests else []
    state = f"epoch     {found.epoch} · {'ready' if found.ready else 'not ready'}"
    return [*models, *members, *pages, *requests, state, *waiting, f"version   {found.version}"]


def pages_line(pages: PagesInfo) -> str:
    return f"pages     {pages.free} of {pages.total} free · {pages.kept} hold beginnings of prompts"


def requests_line(requests: RequestsInfo) -> str:
    """Of this moment; the prompt tokens since the master began."""
    share = requests.cached_tokens / requests.prompt_tokens if requests.prompt_tokens else 0.0
    now = f"{requests.running} running · {requests.waiting} waiting"
    return f"requests  {now} · {share:.0%} of prompt tokens were there"


def line_of(member: MemberInfo) -> str:
    layers = f" · layers {member.layers}" if member.layers else ""
    return f"{member.kind:<9} {member.name} at {member.address}{layers}"
