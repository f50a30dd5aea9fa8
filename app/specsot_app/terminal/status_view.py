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

# Characters of a curve, from lowest to highest.
CURVE_SIGNS = "▁▂▃▄▅▆▇█"
# Columns. Width of a bar. Untuned.
BAR_WIDTH = 24
# Columns. Width of the longest name, so that a narrow terminal cuts values instead of names.
LABEL_WIDTH = 8


@dataclass(frozen=True, slots=True)
class StatusView:
    """What is known after some queries.

    info: State that the newest successful query returned.
    pace: Steps per second at each query, the newest last.
    lost: Reason for which the newest query failed; None if it succeeded.
    """

    info: Info
    pace: tuple[float, ...] = ()
    lost: str | None = None


def lines_of(info: Info) -> list[str]:
    """Return the fleet's state as lines of a name and a value.

    info: State of the fleet.
    """
    return [f"{name:<9} {value}" for name, value in status_rows(info)]


def status_rows(info: Info) -> list[tuple[str, str]]:
    """Return (name, value) of everything to show, in order; what the fleet does not have is left out.

    Always shown are the models, the members and the epoch (with "ready" or "not ready"), and the version
    last; pages, plan, requests, steps, rings ("replica") and what the fleet waits for only if they exist.

    info: State of the fleet.
    """
    rows: list[tuple[str, str | None]] = [
        *(
            ("model", f"{entry.name} · {entry.layers} layers · {entry.max_positions} positions")
            for entry in info.models
        ),
        *((entry.kind, describe_member(entry, info)) for entry in info.members),
        ("plan", info.plan or None),
        ("pages", describe_pages(info.pages) if info.pages else None),
        ("requests", describe_requests(info.requests) if info.requests else None),
        ("steps", describe_steps(info.steps) if info.steps else None),
        ("epoch", f"{info.epoch} · {'ready' if info.ready else 'not ready'}"),
        *(("replica", describe_replica(entry)) for entry in info.replicas),
        *(("waiting", line) for line in info.waiting_for),
        ("version", info.version),
    ]
    return [(name, value) for name, value in rows if value is not None]


def describe_member(member: MemberInfo, info: Info) -> str:
    """Return a member in one line: name and address, then, as far as they exist, its layers, milliseconds of
    a step, head, and ring, and whether it is a standby.

    The milliseconds are those of the stage's part of a step; "at least" follows if a minimum was measured. A
    member of the only ring has no ring number.

    member: The member.
    info: State of the member's fleet.
    """
    layers = f" · layers {member.layers}" if member.layers else ""
    seconds = stage_seconds(member, info)
    minimum = f", at least {member.min_seconds * 1e3:.1f}" if member.min_seconds else ""
    pace = f" · {seconds * 1e3:.1f} ms a step{minimum}" if seconds else ""
    head = f" · drafts with {member.head}" if member.head else ""
    ring = "" if member.replica is None else f" · replica {member.replica}"
    standby = " · stands by" if member.is_standby else ""
    return f"{member.name} at {member.address}{layers}{pace}{head}{ring}{standby}"


def stage_seconds(member: MemberInfo, info: Info) -> float | None:
    """Return a worker's seconds per step; None before the first step, and for members without layers.

    The steps of the member's own ring are used; a member whose ring is not among `info.replicas` uses those
    of the whole fleet. None also if the number of measured stages differs from the number of workers that
    have layers in the ring.

    member: The member.
    info: State of the member's fleet, which has the times of each ring's stages in order.
    """
    workers = [entry for entry in info.members if entry.layers and entry.replica == member.replica]
    ranges = sorted(entry.layers.first for entry in workers if entry.layers)
    steps = next((entry.steps for entry in info.replicas if entry.number == member.replica), info.steps)
    if member.layers is None or steps is None or len(steps.stages) != len(ranges):
        return None
    return steps.stages[ranges.index(member.layers.first)]


def describe_replica(replica: ReplicaInfo) -> str:
    """Return the state of one of several rings in one line: number, epoch, free pages, requests, steps per
    second. Values that the ring does not have yet are left out.

    An example is "0 · epoch 3 · ready · 20 of 64 pages free · 2 running, 0 waiting · 41.0 steps/s".

    replica: State of the ring.
    """
    parts = [f"{replica.number} · epoch {replica.epoch} · {'ready' if replica.ready else 'not ready'}"]
    parts += [f"{replica.pages.free} of {replica.pages.total} pages free"] if replica.pages else []
    requests = replica.requests
    parts += [f"{requests.running} running, {requests.waiting} waiting"] if requests else []
    parts += [f"{replica.steps.per_second:.1f} steps/s"] if replica.steps else []
    return " · ".join(parts)


def describe_pages(pages: PagesInfo) -> str:
    """Return the state of the KV pages in words, such as "20 of 64 free · 3 hold beginnings of prompts".

    pages: Numbers of free and kept pages, and their total.
    """
    return f"{pages.free} of {pages.total} free · {pages.kept} hold beginnings of prompts"


def describe_requests(requests: RequestsInfo) -> str:
    """Return in one line the current requests, and ends and reused prompt tokens since the master began.

    The share of cached prompt tokens is 0 % before the first prompt token. Ends are counted by reason.
    Refused requests are named only if there are any.

    requests: Counts of requests, sequences and prompt tokens.
    """
    share = requests.cached_tokens / requests.prompt_tokens if requests.prompt_tokens else 0.0
    ended = " · ".join(f"{count} {reason}" for reason, count in requests.ended)
    parts = [
        f"{requests.running} running in {requests.writing} sequences",
        f"{requests.waiting} waiting",
        *([ended] if ended else []),
        *([f"{requests.refused} refused"] if requests.refused else []),
        f"{share:.0%} of prompt tokens were cached",
    ]
    return " · ".join(parts)


def describe_steps(steps: StepsInfo) -> str:
    """Return in one line the steps of the last seconds, and the totals since the master began.

    The line has steps per second, tokens and rows of a step, tokens per second, and the numbers of all steps
    and tokens.

    steps: Counts and speeds of steps.
    """
    tokens = steps.per_second * steps.tokens_per_step
    work_per_step = f"{steps.tokens_per_step:.1f} tokens and {steps.rows_per_step:.1f} rows each"
    pace = f"{steps.per_second:.1f}/s with {work_per_step}"
    return f"{pace} · {tokens:.0f} tokens/s · {steps.steps} steps, {steps.tokens} tokens in all"


def draw_status(status: StatusView) -> RenderableType:
    """Return the facts as a table, with used pages as a bar and the pace as a curve; the last line says how
    to leave, or why the newest query failed.

    Without pages there is no bar, and without steps no curve.

    status: The view after the newest query.
    """
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True, min_width=LABEL_WIDTH)
    table.add_column(overflow="ellipsis", no_wrap=True)
    for name, value in status_rows(status.info):
        table.add_row(name, value)
        if name == "pages" and status.info.pages:
            pages = status.info.pages
            table.add_row("", ProgressBar(pages.total, pages.total - pages.free, width=BAR_WIDTH))
        if name == "steps":
            table.add_row("", Text(curve(status.pace), style="cyan"))
    return Group(table, Text(status.lost or "Ctrl-C leaves", style="red" if status.lost else "dim"))


def curve(values: Sequence[float]) -> str:
    """Return one character for each value, as high as the value relative to the highest: [1, 2, 4] -> "▃▅█".

    The highest value gets the highest character.

    values: Numbers that are not negative; if all are 0, every character is the lowest; no values give an
        empty text.
    """
    highest = max(values, default=0.0)
    if not highest:
        return CURVE_SIGNS[0] * len(values)
    return "".join(CURVE_SIGNS[round(value / highest * (len(CURVE_SIGNS) - 1))] for value in values)


# Seconds for one query. Untuned.
INFO_TIMEOUT = 5.0
# Number of queries that the curve shows. Untuned.
CURVE_LENGTH = 48

# Asks a master for its state.
Query = Callable[[], Awaitable[Info]]
# Waits until the next query.
Wait = Callable[[], Awaitable[None]]


async def watch(query: Query, wait: Wait, console: Console) -> None:
    """Show the state until cancelled.

    A master that is lost is queried again.

    The screen is drawn anew after each query; the call never returns.

    query: Asks the master for its state.
    wait: Waits until the next query.
    console: Console of the terminal.
    Raises SpecsotError if the first query fails.
    """
    with Live(console=console, auto_refresh=False) as live:
        async for status in status_views(query, wait):
            live.update(draw_status(status), refresh=True)


async def status_views(query: Query, wait: Wait) -> AsyncIterator[StatusView]:
    """Yield the fleet's state, with its recent speeds, after each query, without end.

    If a later query fails, the last state is yielded again with the reason.

    With a failed query the pace stays as it was; the reason also says that the query is repeated and how to
    leave.

    query: Asks the master for its state.
    wait: Waits until the next query.
    Raises what the first query raises.
    """
    status = with_pace(StatusView(await get_info(query)))
    while True:
        yield status
        await wait()
        try:
            status = with_pace(replace(status, info=await get_info(query), lost=None))
        except SpecsotError as error:
            status = replace(status, lost=f"{error}; retrying. Ctrl-C leaves")


async def get_info(query: Query) -> Info:
    """Return the master's state.

    Raises also what the query raises, unchanged.

    query: Asks the master for its state.
    Raises Unavailable if there is no answer within INFO_TIMEOUT.
    """
    try:
        async with asyncio.timeout(INFO_TIMEOUT):
            return await query()
    except TimeoutError:
        raise Unavailable(f"the master did not answer within {INFO_TIMEOUT:g} s") from None


def with_pace(status: StatusView) -> StatusView:
    """Return the view with the state's steps per second appended to its pace, of which the newest
    CURVE_LENGTH are kept. A state without steps counts as 0 steps per second.

    status: A view with a new state.
    """
    steps = status.info.steps
    return replace(status, pace=(*status.pace, steps.per_second if steps else 0.0)[-CURVE_LENGTH:])
