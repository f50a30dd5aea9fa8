"""`specsot bench load`: what clients feel of a fleet when more and more of them ask at once.

Its services are processes of their own, as users run them: in this one
they would wait for the clients, and be measured by them.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specsot.core.info import Info
from specsot.params import Ask, Limits, Mode
from specsot_app.bench.results import Row, write_results
from specsot_app.fleet.options import ClientOptions, FleetOptions, models_of
from specsot_app.fleet.processes import ProcessFleet
from specsot_app.runtime import run_until_signal
from specsot_lab.bench.clients import ask_at_once
from specsot_lab.bench.latencies import LoadLevel

QUESTION = "Question {number}: how would you explain the subject to somebody new to it?"
WARMING = 8  # requests that do not count
PER_CLIENT = 4  # requests at least, or the beginning and the end would be most of it


@dataclass(frozen=True, slots=True)
class LoadOptions:
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


def measure(load: LoadOptions, output: Path | None) -> int:
    """Every level, as a table, and as JSON where asked to. 1 when a level had no answer at all."""
    info, levels = run_until_signal(_measure(load))
    Console().print(table_of(levels))
    if output is not None:
        write_results(output, "load", settings_of(load, info), [level.row() for level in levels])
    return 0 if all(level.answered for level in levels) else 1


async def _measure(load: LoadOptions) -> tuple[Info, list[LoadLevel]]:
    async with master_of(load.wanted) as address:
        trust = load.wanted.client
        info = await info_of(address, trust)
        numbers, levels = itertools.count(), list[LoadLevel]()
        await ask_at_once(address, 1, islice(numbers, WARMING), load.ask, trust)
        console = Console(stderr=True)
        with Progress(console=console, disable=not console.is_terminal) as progress:
            for clients in progress.track(load.clients, description="clients"):
                these = islice(numbers, max(load.requests, PER_CLIENT * clients))
                levels.append(await ask_at_once(address, clients, these, load.ask, trust))
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


def settings_of(load: LoadOptions, info: Info) -> Row:
    """What was asked of whom."""
    return {
        "model": info.models[0].name,
        "workers": sum(member.kind == "worker" for member in info.members),
        "drafters": sum(member.kind == "drafter" for member in info.members),
        "mode": load.mode,
        "drafter": load.wanted.drafter,
        "answer_tokens": load.tokens,
        "requests": load.requests,
        "elsewhere": load.wanted.master is not None,
    }


def table_of(levels: Sequence[LoadLevel]) -> Table:
    """One row a level; waits in milliseconds, p50/p99."""
    table = Table(title="specsot bench load", caption="waits in ms: p50/p99", box=SIMPLE_HEAD)
    table.collapse_padding, table.pad_edge = True, False
    for heading in ("clients", "asked", "req/s", "tok/s", "first text", "between", "per token"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("errors", justify="right", min_width=10)
    for level in levels:
        row = level.row()
        waits = (row["first_text_seconds"], row["between_texts_seconds"], row["per_token_seconds"])
        table.add_row(
            str(level.clients),
            str(len(level.heard)),
            f"{row['requests_per_second']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            *map(in_milliseconds, waits),
            ", ".join(f"{count} {why}" for why, count in level.errors.items()) or "0",
        )
    return table


def in_milliseconds(found: object) -> str:
    """A spread as people read it."""
    assert isinstance(found, dict)
    return "/".join("-" if value is None else f"{value * 1000:.0f}" for value in found.values())
