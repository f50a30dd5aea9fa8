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
# Requests that do not count.
WARMING = 8  # requests that do not count
STEPS = (500, 1000, 1500, 2000)  # requests after which memory is looked at
AIM = 16 << 20  # bytes a process may have grown from the first look to the last
# clients, and tokens of an answer, while it is
AT_ONCE = 8
SHORT = 4
# Requests of a client at least; with fewer, the beginning and the end would be most of a level.
PER_CLIENT = 4  # requests at least, or the beginning and the end would be most of it


@dataclass(frozen=True, slots=True)
class LoadTest:
    """What is asked of a fleet.

    clients: how many at once, one level after the other. requests: of each level, but at least PER_CLIENT for
        each client. tokens: of each answer. mode: how answers are planned. wanted: the fleet; its master, if
        it names one, is asked instead.
    """

    clients: tuple[int, ...]
    requests: int
    tokens: int
    mode: Mode
    wanted: FleetOptions

    def ask(self, number: int) -> Ask:
        """Return the request of this number. No two are alike, so that they share no more than the template;
        direct answers are equally long.
        """
        return Ask(
            prompt=QUESTION.format(number=number),
            mode=self.mode,
            drafter=self.wanted.drafter,
            limits=Limits(max_new_tokens=self.tokens),
            seed=number,
            ignore_eos=self.mode == "direct",
        )


def measure(loads: Sequence[LoadTest], output: Path | None) -> int:
    """Measure every level of each test, publish a table, and return 1 if a level had no answer at all, else
    0.

    loads: differ in their tokens alone. output: the JSON file; None: only print.
    """
    info, levels = run_until_signal(_measure(loads))
    rows = [{"answer_tokens": load.tokens} | level.row() for load, level in levels]
    if len(loads) > 1:
        rows = named(rows, "clients", "answer_tokens")
    settings = {**settings_of(loads[0], info), "answer_tokens": [load.tokens for load in loads]}
    publish("load", settings, rows, page_of(rows), output)
    return 0 if all(level.answered for _, level in levels) else 1


async def _measure(loads: Sequence[LoadTest]) -> tuple[Info, list[tuple[LoadTest, LoadLevel]]]:
    """Return the fleet's state, and each level with its test."""
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
    """Yield the address of a master: a running one, or that of a fleet that is started here and ended."""
    if wanted.master is not None:
        yield wanted.master
        return
    fleet = await ProcessFleet.start(wanted, models_of(wanted))
    try:
        yield fleet.children[0].service.address
    finally:
        await fleet.close()


async def info_of(address: str, trust: ClientOptions) -> Info:
    """Return the state of a master's fleet. address: of the master. trust: TLS and token."""
    async with trust.connected(address) as client:
        return await client.info()


def settings_of(load: LoadTest, info: Info) -> Row:
    """Return the settings of the run, by name. info: state of the fleet."""
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
    """Return a column of milliseconds, p50/p99. heading: of the column. key: of the entry in a row."""

    def cell(row: Row) -> str:
        """Return both figures of a row as text, "-" for unknown ones."""
        return "/".join("-" if value is None else f"{value * 1000:.0f}" for value in row[key].values())

    return Column(heading, cell)


def error_summary(row: Row) -> str:
    """Return a row's errors in words; "0" without errors."""
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
    """Return the table with one row a level, and the answers' length if there are several lengths."""
    several = len({row.get("answer_tokens") for row in rows}) > 1
    columns = (figure("tokens", "answer_tokens", 0), *COLUMNS) if several else COLUMNS
    return f"{markdown(columns, rows)}\n\nfirst text, between texts, per token: ms, p50/p99"


def measure_memory(load: LoadTest, output: Path | None) -> int:
    """Measure how much memory the processes hold after many requests, publish a table, and return 1 if a
    process grew by more than AIM, else 0.

    output: the JSON file; None: only print. Raises InvalidRequest for a fleet that runs elsewhere.
    """
    if load.wanted.master is not None:
        raise InvalidRequest("memory: only of a fleet that is started here, not of --master", "memory")
    load = replace(load, tokens=SHORT, clients=(AT_ONCE,), requests=STEPS[-1])
    info, looks = run_until_signal(_look(load))
    growth = {"name": "growth", "grown_bytes": grown(looks), "allowed_bytes": AIM}
    publish("memory", settings_of(load, info), [*looks, growth], memory_page(looks), output)
    return 0 if max(grown(looks).values()) <= AIM else 1


async def _look(load: LoadTest) -> tuple[Info, list[Row]]:
    """Start the fleet, and return its state and what its processes hold after each number of requests."""
    fleet = await ProcessFleet.start(load.wanted, models_of(load.wanted))
    try:
        address, numbers = fleet.children[0].service.address, itertools.count()

        async def ask(requests: int) -> int:
            """Make so many requests, and return how many were not answered."""
            level = await ask_at_once(address, AT_ONCE, islice(numbers, requests), load.ask)
            return len(level.requests) - len(level.answered)

        return await info_of(address, load.wanted.client), await looks_at(fleet.children, ask)
    finally:
        await fleet.close()


async def looks_at(children: Sequence[ChildProcess], ask: Callable[[int], Awaitable[int]]) -> list[Row]:
    """Return the resident bytes of every process after each number of STEPS, once all is quiet.

    children: the processes. ask: makes so many requests, and returns how many were not answered.
    Raises InvalidRequest without /proc.
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
    """Return the resident bytes of a process. Raises InvalidRequest without /proc."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        raise InvalidRequest("memory: cannot be read without /proc", field="memory") from None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def grown(looks: Sequence[Row]) -> dict[str, int]:
    """Return by how many bytes each process grew from the first look to the last."""
    first, last = looks[0]["resident_bytes"], looks[-1]["resident_bytes"]
    return {name: last[name] - first[name] for name in first}


def memory_page(looks: Sequence[Row]) -> str:
    """Return the table of resident MiB after so many requests, and of the growth."""
    by_step = {str(look["requests"]): look["resident_bytes"] for look in looks}
    held = by_step | {"grown": (grew := grown(looks)), "allowed": dict.fromkeys(grew, AIM)}
    rows = [{"process": name} | {key: each[name] for key, each in held.items()} for name in grew]
    columns = text("process", "process"), *(figure(key, key, int(key != "allowed"), 2**-20) for key in held)
    return f"{markdown(columns, rows)}\n\nresident MiB after so many requests"
