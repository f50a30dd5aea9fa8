"""`specsot bench load`: what clients feel of a fleet when more of them ask at once, and what it holds.

Its services are processes of their own, as users run them: in this one they would wait for the clients, and
be measured by them. Memory is read from /proc, so on Linux alone.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path

from specsot.core.info import Info
from specsot.errors import InvalidRequest
from specsot.params import Ask, Limits, Mode
from specsot.service.member import IDLE_SECONDS
from specsot_app.fleet.options import ClientOptions, FleetOptions, models_of
from specsot_app.fleet.processes import ChildProcess, ProcessFleet
from specsot_app.runtime import run_until_signal
from specsot_app.terminal.show import counting_bar
from specsot_bench.core.tables import Column, figure, markdown, text
from specsot_bench.results import Row, named, publish
from specsot_lab.bench.clients import LoadLevel, ask_at_once

QUESTION = "Question {number}: how would you explain the subject to somebody new to it?"
WARMING = 8  # requests that do not count
STEPS = (500, 1000, 1500, 2000)  # requests after which memory is looked at
AIM = 16 << 20  # bytes a process may have grown from the first look to the last
# clients, and tokens of an answer, while it is
AT_ONCE = 8
SHORT = 4
PER_CLIENT = 4  # requests at least, or the beginning and the end would be most of it


@dataclass(frozen=True, slots=True)
class LoadTest:
    """clients: how many at once, one level after the other. requests: of each level, but at least four a
    client. tokens: of each answer.

    wanted: the fleet; its master, if it names one, is asked instead.
    """

    clients: tuple[int, ...]
    requests: int
    tokens: int
    mode: Mode
    wanted: FleetOptions

    def ask(self, number: int) -> Ask:
        """No two alike, so that they share no more than the template. Direct answers are equally long."""
        return Ask(
            prompt=QUESTION.format(number=number),
            mode=self.mode,
            drafter=self.wanted.drafter,
            limits=Limits(max_new_tokens=self.tokens),
            seed=number,
            ignore_eos=self.mode == "direct",
        )


def measure(loads: Sequence[LoadTest], output: Path | None) -> int:
    """Every level of each, as a table, and as JSON where asked to. loads: they differ in their tokens.

    1 when a level had no answer at all.
    """
    info, levels = run_until_signal(_measure(loads))
    rows = [{"answer_tokens": load.tokens} | level.row() for load, level in levels]
    if len(loads) > 1:
        rows = named(rows, "clients", "answer_tokens")
    settings = {**settings_of(loads[0], info), "answer_tokens": [load.tokens for load in loads]}
    publish("load", settings, rows, page_of(rows), output)
    return 0 if all(level.answered for _, level in levels) else 1


async def _measure(loads: Sequence[LoadTest]) -> tuple[Info, list[tuple[LoadTest, LoadLevel]]]:
    trust = loads[0].wanted.client
    async with master_of(loads[0].wanted) as address:
        info = await info_of(address, trust)
        numbers = itertools.count()
        levels = list[tuple[LoadTest, LoadLevel]]()
        await ask_at_once(address, 1, islice(numbers, WARMING), loads[0].ask, trust)
        steps = [(load, clients) for load in loads for clients in load.clients]
        with counting_bar(sys.stderr, "clients", len(steps)) as count:
            for load, clients in steps:
                these = islice(numbers, max(load.requests, PER_CLIENT * clients))
                levels.append((load, await ask_at_once(address, clients, these, load.ask, trust)))
                count()
        return info, levels


@asynccontextmanager
async def master_of(wanted: FleetOptions) -> AsyncGenerator[str]:
    """The address of a master: one elsewhere, or of a fleet that is started here and ended."""
    if wanted.master is not None:
        yield wanted.master
        return
    fleet = await ProcessFleet.start(wanted, models_of(wanted))
    try:
        yield fleet.children[0].service.address
    finally:
        await fleet.close()


async def info_of(address: str, trust: ClientOptions) -> Info:
    async with trust.connected(address) as client:
        return await client.info()


def settings_of(load: LoadTest, info: Info) -> Row:
    return {
        "model": info.models[0].name,
        "workers": sum(member.kind == "worker" for member in info.members),
        "drafters": sum(member.kind == "drafter" for member in info.members),
        "mode": load.mode,
        "drafter": load.wanted.drafter,
        "quantization": load.wanted.quantization,
        "answer_tokens": load.tokens,
        "requests": load.requests,
        "elsewhere": load.wanted.master is not None,
    }


def _waits(heading: str, key: str) -> Column:
    """Milliseconds, p50/p99."""

    def cell(row: Row) -> str:
        return "/".join("-" if value is None else f"{value * 1000:.0f}" for value in row[key].values())

    return Column(heading, cell)


def error_summary(row: Row) -> str:
    return ", ".join(f"{count} {why}" for why, count in row["errors"].items()) or "0"


COLUMNS = (
    figure("clients", "clients", 0),
    figure("asked", "requests", 0),
    figure("req/s", "requests_per_second"),
    figure("tok/s", "tokens_per_second", 0),
    _waits("first", "first_text_seconds"),
    _waits("between", "between_texts_seconds"),
    _waits("per token", "per_token_seconds"),
    Column("errors", error_summary),
)


def page_of(rows: Sequence[Row]) -> str:
    """One row a level; with its answers' length, where there are several."""
    several = len({row.get("answer_tokens") for row in rows}) > 1
    columns = (figure("tokens", "answer_tokens", 0), *COLUMNS) if several else COLUMNS
    return f"{markdown(columns, rows)}\n\nfirst text, between texts, per token: ms, p50/p99"


def measure_memory(load: LoadTest, output: Path | None) -> int:
    """A table, and JSON where asked to. 1 when a process grew more than it may."""
    if load.wanted.master is not None:
        raise InvalidRequest("memory: only of a fleet that is started here, not of --master", "memory")
    load = replace(load, tokens=SHORT, clients=(AT_ONCE,), requests=STEPS[-1])
    info, looks = run_until_signal(_look(load))
    growth = {"name": "growth", "grown_bytes": grown(looks), "allowed_bytes": AIM}
    publish("memory", settings_of(load, info), [*looks, growth], memory_page(looks), output)
    return 0 if max(grown(looks).values()) <= AIM else 1


async def _look(load: LoadTest) -> tuple[Info, list[Row]]:
    fleet = await ProcessFleet.start(load.wanted, models_of(load.wanted))
    try:
        address, numbers = fleet.children[0].service.address, itertools.count()

        async def ask(requests: int) -> int:
            level = await ask_at_once(address, AT_ONCE, islice(numbers, requests), load.ask)
            return len(level.heard) - len(level.answered)

        return await info_of(address, load.wanted.client), await looks_at(fleet.children, ask)
    finally:
        await fleet.close()


async def looks_at(children: Sequence[ChildProcess], ask: Callable[[int], Awaitable[int]]) -> list[Row]:
    """Resident bytes of every process after so many requests, once all is quiet. ask: makes so many, and says
    how many were not answered. Raises InvalidRequest where there is no /proc.
    """
    looks: list[Row] = []
    with counting_bar(sys.stderr, "looks", len(STEPS)) as count:
        for before, step in pairwise((0, *STEPS)):
            unanswered = await ask(step - before)
            await asyncio.sleep(2 * IDLE_SECONDS)
            held = {child.service.name: resident_of(child.pid) for child in children}
            row = {"name": f"after {step} requests", "requests": step, "unanswered": unanswered}
            looks.append(row | {"resident_bytes": held})
            count()
    return looks


def resident_of(pid: int) -> int:
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        raise InvalidRequest("memory: cannot be read without /proc", field="memory") from None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def grown(looks: Sequence[Row]) -> dict[str, int]:
    first, last = looks[0]["resident_bytes"], looks[-1]["resident_bytes"]
    return {name: last[name] - first[name] for name in first}


def memory_page(looks: Sequence[Row]) -> str:
    by_step = {str(look["requests"]): look["resident_bytes"] for look in looks}
    held = by_step | {"grown": (grew := grown(looks)), "allowed": dict.fromkeys(grew, AIM)}
    rows = [{"process": name} | {key: each[name] for key, each in held.items()} for name in grew]
    columns = text("process", "process"), *(figure(key, key, int(key != "allowed"), 2**-20) for key in held)
    return f"{markdown(columns, rows)}\n\nresident MiB after so many requests"
