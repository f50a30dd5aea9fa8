"""`specsot bench load --memory`: what a fleet's processes hold after ever more short requests.

Reads /proc, so it works on Linux alone.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from specsot.core.info import Info
from specsot.errors import InvalidRequest
from specsot.service.member import QUIET
from specsot_app.bench.results import Row, write_results
from specsot_app.fleet.options import models_of
from specsot_app.fleet.processes import ChildProcess, ProcessFleet
from specsot_app.runtime import run_until_signal
from specsot_app.terminal.show import counting_bar
from specsot_lab.bench.clients import ask_at_once
from specsot_lab.bench.load import LoadOptions, info_of, settings_of

STEPS = (500, 1000, 1500, 2000)  # requests after which is looked
AIM = 16 << 20  # bytes a process may have grown from the first look to the last
AT_ONCE, SHORT = 8, 4  # clients, and tokens of an answer


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Resident bytes of every process after so many requests, once all is quiet. unanswered: of those since
    the last look.
    """

    requests: int
    unanswered: int
    held: dict[str, int]

    def row(self) -> Row:
        return {
            "name": f"after {self.requests} requests",
            "requests": self.requests,
            "unanswered": self.unanswered,
            "resident_bytes": self.held,
        }


def measure(load: LoadOptions, output: Path | None) -> int:
    """A table, and JSON where asked to. 1 when a process grew more than it may."""
    if load.wanted.master is not None:
        raise InvalidRequest("memory: only of a fleet that is started here, not of --master", "memory")
    load = replace(load, tokens=SHORT, clients=(AT_ONCE,), requests=STEPS[-1])
    info, looks = run_until_signal(_measure(load))
    return report("memory", settings_of(load, info), looks, output)


def report(bench: str, settings: Row, looks: Sequence[MemorySample], output: Path | None) -> int:
    """A table, and JSON where asked to. 1 when a process grew more than it may."""
    Console().print(table_of(looks))
    if output is not None:
        growth = {"name": "growth", "grown_bytes": grown(looks), "allowed_bytes": AIM}
        write_results(output, bench, settings, [*(look.row() for look in looks), growth])
    return 0 if max(grown(looks).values()) <= AIM else 1


async def _measure(load: LoadOptions) -> tuple[Info, list[MemorySample]]:
    fleet = await ProcessFleet.start(load.wanted, models_of(load.wanted))
    try:
        address, numbers, looks = fleet.children[0].service.address, itertools.count(), list[MemorySample]()
        with counting_bar(sys.stderr, "asking", len(STEPS)) as looked:
            for before, step in pairwise((0, *STEPS)):
                level = await ask_at_once(address, AT_ONCE, islice(numbers, step - before), load.ask)
                unanswered = len(level.heard) - len(level.answered)
                await asyncio.sleep(2 * QUIET)
                looks.append(MemorySample(step, unanswered, resident(fleet.children)))
                looked()
        return await info_of(address, load.wanted.client), looks
    finally:
        await fleet.close()


def resident(children: Sequence[ChildProcess]) -> dict[str, int]:
    """Bytes by process name. Raises InvalidRequest where there is no /proc."""
    return {child.service.name: resident_of(child.pid) for child in children}


def resident_of(pid: int) -> int:
    """Bytes of one process that lie in memory."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        raise InvalidRequest("memory: cannot be read without /proc", field="memory") from None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def grown(looks: Sequence[MemorySample]) -> dict[str, int]:
    """Bytes from the first look to the last, by process."""
    first, last = looks[0].held, looks[-1].held
    return {name: last[name] - first[name] for name in first}


def table_of(looks: Sequence[MemorySample]) -> Table:
    """One row a process, in MiB."""
    table = Table(
        title="specsot bench load --memory", caption="resident MiB after so many requests", box=SIMPLE_HEAD
    )
    for heading in ("process", *(str(look.requests) for look in looks), "grown", "allowed"):
        table.add_column(heading, justify="left" if heading == "process" else "right")
    for name, growth in grown(looks).items():
        held = (look.held[name] for look in looks)
        table.add_row(name, *(f"{value / 2**20:.1f}" for value in (*held, growth)), f"{AIM >> 20}")
    return table
