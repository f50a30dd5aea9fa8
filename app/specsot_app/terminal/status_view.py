"""Draws the screen of `specsot status` and the lines of `specsot info`: members, pages, requests, steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from specsot.core.info import Info, MemberInfo, PagesInfo, ReplicaInfo, RequestsInfo, StepsInfo
from specsot.errors import SpecsotError, Unavailable

CURVE_SIGNS = "▁▂▃▄▅▆▇█"
# Columns of a bar.
BAR_WIDTH = 24
# Columns of the longest name, so that a narrow terminal cuts values instead of names.
LABEL_WIDTH = 8


@dataclass(frozen=True, slots=True)
class StatusView:
    """What is known after some queries.

    info: the newest state.
    pace: steps per second at each query, the newest last.
    lost: why the newest query failed, or None.
    """

    info: Info
    pace: tuple[float, ...] = ()
    lost: str | None = None


def lines_of(found: Info) -> list[str]:
    """Return the state as lines."""
    return [f"{name:<9} {value}" for name, value in facts(found)]


def facts(found: Info) -> list[tuple[str, str]]:
    """Return names and values of everything to show."""
    models = [
        ("model", f"{one.name} · {one.layers} layers · {one.max_positions} positions") for one in found.models
    ]
    members = [(one.kind, describe_member(one, found)) for one in found.members]
    pages = [("pages", describe_pages(found.pages))] if found.pages else []
    plan = [("plan", found.plan)] if found.plan else []
    requests = [("requests", describe_requests(found.requests))] if found.requests else []
    steps = [("steps", describe_steps(found.steps))] if found.steps else []
    epoch = ("epoch", f"{found.epoch} · {'ready' if found.ready else 'not ready'}")
    rings = [("replica", describe_replica(one)) for one in found.replicas]
    waiting = [("waiting", line) for line in found.waiting_for]
    last = [*rings, *waiting, ("version", found.version)]
    return [*models, *members, *plan, *pages, *requests, *steps, epoch, *last]


def describe_member(member: MemberInfo, found: Info) -> str:
    """Return a member's address, its layers, and the duration of a step there."""
    layers = f" · layers {member.layers}" if member.layers else ""
    seconds = stage_seconds(member, found)
    least = f", at least {member.min_seconds * 1e3:.1f}" if member.min_seconds else ""
    pace = f" · {seconds * 1e3:.1f} ms a step{least}" if seconds else ""
    ring = "" if member.replica is None else f" · replica {member.replica}"
    return (
        f"{member.name} at {member.address}{layers}{pace}{ring}{' · stands by' if member.is_standby else ''}"
    )


def stage_seconds(member: MemberInfo, found: Info) -> float | None:
    """Return a worker's seconds per step; None before the first step, and for other members."""
    ring = [one for one in found.members if one.layers and one.replica == member.replica]
    ranges = sorted(one.layers.first for one in ring if one.layers)
    steps = next((one.steps for one in found.replicas if one.number == member.replica), found.steps)
    if member.layers is None or steps is None or len(steps.stages) != len(ranges):
        return None
    return steps.stages[ranges.index(member.layers.first)]


def describe_replica(ring: ReplicaInfo) -> str:
    """Return the state of one of several rings."""
    parts = [f"{ring.number} · epoch {ring.epoch} · {'ready' if ring.ready else 'not ready'}"]
    parts += [f"{ring.pages.free} of {ring.pages.total} pages free"] if ring.pages else []
    requests = ring.requests
    parts += [f"{requests.running} running, {requests.waiting} waiting"] if requests else []
    parts += [f"{ring.steps.per_second:.1f} steps/s"] if ring.steps else []
    return " · ".join(parts)


def describe_pages(pages: PagesInfo) -> str:
    """Return the state of the KV pages."""
    return f"{pages.free} of {pages.total} free · {pages.kept} hold beginnings of prompts"


def describe_requests(requests: RequestsInfo) -> str:
    """Return the current requests, and ends and prompt tokens since the master began."""
    share = requests.cached_tokens / requests.prompt_tokens if requests.prompt_tokens else 0.0
    ended = " · ".join(f"{count} {why}" for why, count in requests.ended)
    parts = [
        f"{requests.running} running in {requests.writing} sequences",
        f"{requests.waiting} waiting",
        *([ended] if ended else []),
        *([f"{requests.refused} refused"] if requests.refused else []),
        f"{share:.0%} of prompt tokens were there",
    ]
    return " · ".join(parts)


def describe_steps(steps: StepsInfo) -> str:
    """Return the steps of the last seconds, and the totals."""
    tokens = steps.per_second * steps.tokens_per_step
    each = f"{steps.tokens_per_step:.1f} tokens and {steps.rows_per_step:.1f} rows each"
    pace = f"{steps.per_second:.1f}/s with {each}"
    return f"{pace} · {tokens:.0f} tokens/s · {steps.steps} steps, {steps.tokens} tokens in all"


def draw_status(standing: StatusView) -> RenderableType:
    """Return the facts as a table, with used pages as a bar and the pace as a curve."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True, min_width=LABEL_WIDTH)
    table.add_column(overflow="ellipsis", no_wrap=True)
    for name, value in facts(standing.info):
        table.add_row(name, value)
        if name == "pages" and standing.info.pages:
            pages = standing.info.pages
            table.add_row("", ProgressBar(pages.total, pages.total - pages.free, width=BAR_WIDTH))
        if name == "steps":
            table.add_row("", Text(curve(standing.pace), style="cyan"))
    return Group(table, Text(standing.lost or "Ctrl-C leaves", style="red" if standing.lost else "dim"))


def curve(values: Sequence[float]) -> str:
    """Return one character for each value, as high as the value relative to the highest: [1, 2, 4]
    -> "▃▅█".
    """
    highest = max(values, default=0.0)
    if not highest:
        return CURVE_SIGNS[0] * len(values)
    return "".join(CURVE_SIGNS[round(value / highest * (len(CURVE_SIGNS) - 1))] for value in values)


# Seconds for one query. Untuned.
INFO_TIMEOUT = 5.0
# Queries that the curve shows.
CURVE_LENGTH = 48

Look = Callable[[], Awaitable[Info]]
Pause = Callable[[], Awaitable[None]]


async def watch(look: Look, pause: Pause, console: Console) -> None:
    """Show the state until cancelled.

    A master that is lost is queried again. Raises SpecsotError if the first query fails.
    """
    with Live(console=console, auto_refresh=False) as live:
        async for standing in status_views(look, pause):
            live.update(draw_status(standing), refresh=True)


async def status_views(look: Look, pause: Pause) -> AsyncIterator[StatusView]:
    """Yield what is known after each query. Raises what the first query raises."""
    standing = with_pace(StatusView(await get_info(look)))
    while True:
        yield standing
        await pause()
        try:
            standing = with_pace(replace(standing, info=await get_info(look), lost=None))
        except SpecsotError as error:
            standing = replace(standing, lost=f"{error}; looking again. Ctrl-C leaves")


async def get_info(look: Look) -> Info:
    """Query the master. Raises Unavailable if it does not answer in time."""
    try:
        async with asyncio.timeout(INFO_TIMEOUT):
            return await look()
    except TimeoutError:
        raise Unavailable(f"the master did not answer within {INFO_TIMEOUT:g} s") from None


def with_pace(standing: StatusView) -> StatusView:
    """Return the view with the newest pace appended."""
    steps = standing.info.steps
    return replace(standing, pace=(*standing.pace, steps.per_second if steps else 0.0)[-CURVE_LENGTH:])
