"""`specsot bench load`: the answer times of a fleet with more and more simultaneous clients, and the memory
of its processes.

The services are processes of their own, as users run them: within this process they would compete with the
clients, and distort the measurement. Memory is read from /proc, so it is measured on Linux only.
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
from typing import Final

from specsot.core.info import Info
from specsot.errors import InvalidRequest
from specsot.params import Ask, Limits, Mode
from specsot.service.member import IDLE_SECONDS
from specsot_app.fleet.options import ClientOptions, FleetOptions, models_of
from specsot_app.fleet.processes import ChildProcess, ProcessFleet
from specsot_app.runtime import run_until_signal
from specsot_bench.asking import counting_bar
from specsot_bench.core.tables import Column, figure, markdown, text
from specsot_bench.results import Row, named, publish
from specsot_lab.bench.clients import LoadLevel, ask_at_once

# The question of a request; its number makes it differ from all others.
QUESTION: Final = "Question {number}: how would you explain the subject to somebody new to it?"
# Requests that are not counted. Untuned.
WARM_REQUESTS: Final = 8
# Numbers of requests after which memory is read.
STEPS: Final = (500, 1000, 1500, 2000)
# Bytes. How much a process may grow between the first and the last reading. Untuned.
MAX_GROWTH: Final = 16 << 20
# Simultaneous clients while memory is measured.
MEMORY_CLIENTS: Final = 8
# Tokens of an answer while memory is measured.
MEMORY_TOKENS: Final = 4
# Requests of a client, at least. With fewer, most of a level would be its beginning and its end. Untuned.
PER_CLIENT: Final = 4


@dataclass(frozen=True, slots=True)
class LoadTest:
    """What is requested from a fleet.

    clients: Numbers of simultaneous clients, one level after another.
    requests: Requests of each level; at least PER_CLIENT for each client are sent.
    tokens: Tokens of each answer.
    mode: How answers are planned.
    fleet: Options of the fleet that is started; if they name a running master, requests are sent to that.
    """

    clients: tuple[int, ...]
    requests: int
    tokens: int
    mode: Mode
    fleet: FleetOptions

    def ask(self, number: int) -> Ask:
        """Return a request. No two requests have the same question, so they share only the template's tokens.
        Direct answers are equally long.

        number: The request's number.
        """
        return Ask(
            prompt=QUESTION.format(number=number),
            mode=self.mode,
            drafter=self.fleet.drafter,
            limits=Limits(max_new_tokens=self.tokens),
            seed=number,
            ignore_eos=self.mode == "direct",
        )


def measure(loads: Sequence[LoadTest], output: Path | None) -> int:
    """Measure every level of each test, and publish a table. Return the exit status: 1 if a level had no
    answer at all, otherwise 0.

    loads: The tests, at least one; they differ only in the tokens of an answer.
    output: The JSON file; None: the table is only printed.

    With several tests, the length is part of each row's name. Raises Unavailable if the master does not
    answer, and what starting a fleet raises.
    """
    info, levels = run_until_signal(_measure(loads))
    rows = [{"answer_tokens": load.tokens} | level.row() for load, level in levels]
    if len(loads) > 1:
        rows = named(rows, "clients", "answer_tokens")
    settings = {**settings_of(loads[0], info), "answer_tokens": [load.tokens for load in loads]}
    publish("load", settings, rows, page_of(rows), output)
    return 0 if all(level.answered for _, level in levels) else 1


async def _measure(loads: Sequence[LoadTest]) -> tuple[Info, list[tuple[LoadTest, LoadLevel]]]:
    """Return the fleet's state, and each level with its test.

    loads: The tests.

    All tests use the fleet of the first one. WARM_REQUESTS requests before are not counted. A level has the
    test's number of requests, but at least PER_CLIENT for each client.
    """
    trust = loads[0].fleet.client
    async with master_of(loads[0].fleet) as address:
        info = await info_of(address, trust)
        numbers = itertools.count()
        levels = list[tuple[LoadTest, LoadLevel]]()
        await ask_at_once(address, 1, islice(numbers, WARM_REQUESTS), loads[0].ask, trust)
        steps = [(load, clients) for load in loads for clients in load.clients]
        with counting_bar(sys.stderr, "clients", len(steps)) as count:
            for load, clients in steps:
                level_numbers = islice(numbers, max(load.requests, PER_CLIENT * clients))
                levels.append((load, await ask_at_once(address, clients, level_numbers, load.ask, trust)))
                count()
        return info, levels


@asynccontextmanager
async def master_of(options: FleetOptions) -> AsyncGenerator[str]:
    """Yield the address of a master: that of a running one, if the options name it, or that of a fleet which
    is started for the context.

    options: The fleet.

    A running master is neither started nor ended here. Raises what starting a fleet raises.
    """
    if options.master is not None:
        yield options.master
        return
    fleet = await ProcessFleet.start(options, models_of(options))
    try:
        yield fleet.children[0].service.address
    finally:
        await fleet.close()


async def info_of(address: str, trust: ClientOptions) -> Info:
    """Return the state of a master's fleet.

    address: The master's address.
    trust: TLS files and token with which to connect.

    Raises Unavailable if the master does not answer.
    """
    async with trust.connected(address) as client:
        return await client.info()


def settings_of(load: LoadTest, info: Info) -> Row:
    """Return the settings of the run, by name.

    load: The test.
    info: The state of the fleet.

    "elsewhere" is True if a running master was asked; "workers" and "drafters" are numbers of members.
    """
    return {
        "model": info.models[0].name,
        "workers": sum(member.kind == "worker" for member in info.members),
        "drafters": sum(member.kind == "drafter" for member in info.members),
        "mode": load.mode,
        "drafter": load.fleet.drafter,
        "quantization": load.fleet.quantization,
        "answer_tokens": load.tokens,
        "requests": load.requests,
        "elsewhere": load.fleet.master is not None,
    }


def _waits(heading: str, key: str) -> Column:
    """Return a column of milliseconds, "p50/p99".

    heading: Heading of the column.
    key: Entry of a row that has both figures, in seconds.

    A missing figure (None) is shown as "-".
    """

    def cell(row: Row) -> str:
        """Return both figures of a row as text, "-" for a missing one.

        row: A row of the table.
        """
        return "/".join("-" if value is None else f"{value * 1000:.0f}" for value in row[key].values())

    return Column(heading, cell)


def error_summary(row: Row) -> str:
    """Return a row's errors in words, such as "2 Overloaded, 1 failed"; "0" without errors.

    row: A row of the table.
    """
    return ", ".join(f"{count} {why}" for why, count in row["errors"].items()) or "0"


# The columns of the table; waits are in milliseconds.
COLUMNS: Final = (
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
    """Return the table in Markdown, with one row for each level, and a line that explains its waits. There is
    a column for the answers' length if it differs. Without rows, the table has only its heading.

    rows: The rows of all levels.

    The wait columns are milliseconds, the median and the 99th percentile.
    """
    has_several_lengths = len({row.get("answer_tokens") for row in rows}) > 1
    columns = (figure("tokens", "answer_tokens", 0), *COLUMNS) if has_several_lengths else COLUMNS
    return f"{markdown(columns, rows)}\n\nfirst text, between texts, per token: ms, p50/p99"


def measure_memory(load: LoadTest, output: Path | None) -> int:
    """Measure how much memory the processes hold after many requests, and publish a table. Return the exit
    status: 1 if a process grew by more than MAX_GROWTH, otherwise 0.

    load: The test, of which the number of clients, requests and tokens are replaced.
    output: The JSON file; None: the table is only printed.

    Raises InvalidRequest for a master that runs elsewhere, and if there is no /proc.

    The status is that of the worst process. MEMORY_CLIENTS clients send STEPS[-1] requests of MEMORY_TOKENS
    tokens. A process that shrank counts as not grown.
    """
    if load.fleet.master is not None:
        raise InvalidRequest("memory: only of a fleet that is started here, not of --master", "memory")
    load = replace(load, tokens=MEMORY_TOKENS, clients=(MEMORY_CLIENTS,), requests=STEPS[-1])
    info, memory_rows = run_until_signal(_measure_memory(load))
    growth = {"name": "growth", "grown_bytes": memory_growth(memory_rows), "allowed_bytes": MAX_GROWTH}
    publish("memory", settings_of(load, info), [*memory_rows, growth], memory_page(memory_rows), output)
    return 0 if max(memory_growth(memory_rows).values()) <= MAX_GROWTH else 1


async def _measure_memory(load: LoadTest) -> tuple[Info, list[Row]]:
    """Start the fleet, and return its state and the memory of its processes after each number of requests in
    STEPS.

    load: The test.

    The fleet is closed at the end. Raises InvalidRequest if there is no /proc.
    """
    fleet = await ProcessFleet.start(load.fleet, models_of(load.fleet))
    try:
        address, numbers = fleet.children[0].service.address, itertools.count()

        async def ask(requests: int) -> int:
            """Send requests, and return how many were not answered.

            requests: Number of requests.
            """
            level = await ask_at_once(address, MEMORY_CLIENTS, islice(numbers, requests), load.ask)
            return len(level.requests) - len(level.answered)

        return await info_of(address, load.fleet.client), await memory_after(fleet.children, ask)
    finally:
        await fleet.close()


async def memory_after(children: Sequence[ChildProcess], ask: Callable[[int], Awaitable[int]]) -> list[Row]:
    """Return a row with the resident bytes of every process after each number of requests in STEPS. Before
    reading, wait until the services are idle.

    children: The processes.
    ask: Sends so many requests, and returns how many were not answered.

    Raises InvalidRequest if there is no /proc.

    "unanswered" in a row is the number of requests that failed since the row before.
    """
    rows: list[Row] = []
    with counting_bar(sys.stderr, "looks", len(STEPS)) as count:
        for previous, step in pairwise((0, *STEPS)):
            unanswered = await ask(step - previous)
            await asyncio.sleep(2 * IDLE_SECONDS)
            resident_bytes = {child.service.name: resident_of(child.pid) for child in children}
            row = {"name": f"after {step} requests", "requests": step, "unanswered": unanswered}
            rows.append(row | {"resident_bytes": resident_bytes})
            count()
    return rows


def resident_of(pid: int) -> int:
    """Return the resident bytes of a process.

    pid: The id of the process.

    Raises InvalidRequest if its memory cannot be read from /proc.

    The error is also raised if the process has ended.
    """
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        raise InvalidRequest("memory: cannot be read without /proc", field="memory") from None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def memory_growth(memory_rows: Sequence[Row]) -> dict[str, int]:
    """Return by how many bytes each process grew from the first row to the last; negative if it shrank.

    memory_rows: The rows of `memory_after`, at least one.
    """
    first, last = memory_rows[0]["resident_bytes"], memory_rows[-1]["resident_bytes"]
    return {name: last[name] - first[name] for name in first}


def memory_page(memory_rows: Sequence[Row]) -> str:
    """Return the table of resident MiB after each number of requests, and of the growth.

    memory_rows: The rows of `memory_after`, at least one.

    The columns are those of the rows' numbers of requests, then "grown" and "allowed" (MAX_GROWTH).
    """
    growth = memory_growth(memory_rows)
    by_column: dict[str, dict[str, int]] = {
        **{str(row["requests"]): row["resident_bytes"] for row in memory_rows},
        "grown": growth,
        "allowed": dict.fromkeys(growth, MAX_GROWTH),
    }
    rows = [{"process": name} | {key: memory[name] for key, memory in by_column.items()} for name in growth]
    figures = (figure(key, key, int(key != "allowed"), 2**-20) for key in by_column)
    columns = (text("process", "process"), *figures)
    return f"{markdown(columns, rows)}\n\nresident MiB after so many requests"
