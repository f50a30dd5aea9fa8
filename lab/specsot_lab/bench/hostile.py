"""`specsot bench load --hostile`: what well-behaved clients feel while somebody attacks the doors.

Every attack and the probe of the master's event loop are processes of their own (`attacks`); the clients are
in this one. Each attack stands between two levels without one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median

from specsot.core.info import Info
from specsot.errors import InvalidRequest
from specsot_app.bench.core.tables import Column, figure, markdown, text
from specsot_app.bench.results import Row, publish
from specsot_app.fleet.options import models_of
from specsot_app.fleet.processes import ProcessFleet, free_port
from specsot_app.runtime import run_until_signal
from specsot_app.terminal.show import counting_bar
from specsot_lab.bench.attacks import KINDS, Target
from specsot_lab.bench.clients import LoadLevel, ask_at_once
from specsot_lab.bench.load import (
    LoadTest,
    info_of,
    looks_at,
    report,
    settings_of,
    told_errors,
)

CLIENTS = 16
ENDLESS = 1 << 30  # attempts
MOST_SLOWER = 3.0  # times the wait between texts without an attack, at the 99th percentile
WARMING = 16  # requests that do not count
TIMES = 2  # as many requests a level as a level of `bench load` has: the 99th percentile is of few waits
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class AttackResult:
    """What `clients` well-behaved clients felt under one attack. calm: the levels before and behind it.

    epochs: rings that were formed meanwhile. probe: the waits of a quick call, seconds.
    """

    kind: str
    calm: tuple[LoadLevel, LoadLevel]
    level: LoadLevel
    attacked: Row
    probe: Row
    epochs: int

    @property
    def slower(self) -> float | None:
        """The 99th percentile of waits between texts, over the median of both calm levels'."""
        *calm, waited = (one.row()["between_texts_seconds"]["p99"] for one in (*self.calm, self.level))
        usual = [wait for wait in calm if wait is not None]
        return None if waited is None or not usual else waited / median(usual)

    @property
    def holds(self) -> bool:
        whole = not self.level.errors and self.epochs == 0
        return whole and self.slower is not None and self.slower <= MOST_SLOWER

    def row(self) -> Row:
        named = {"name": self.kind, "slower": self.slower, "allowed": MOST_SLOWER, "epochs": self.epochs}
        named["holds"] = self.holds
        levels = {"calm": [level.row() for level in self.calm], "attacked": self.level.row()}
        return named | levels | {"attack": self.attacked, "probe": self.probe}


def measure(load: LoadTest, kinds: Sequence[str], memory: bool, output: Path | None) -> int:
    """A table, and JSON where asked to. 1 when a client had an error, waited too long, or memory grew.

    memory: instead, what the processes hold after 500 to 2,000 hostile requests. Raises InvalidRequest.
    """
    if load.wanted.master is not None:
        raise InvalidRequest("hostile: only against a fleet that is started here, not --master", "hostile")
    if strange := set(kinds) - set(KINDS):
        raise InvalidRequest(f"hostile: no attack is called {min(strange)}: {', '.join(KINDS)}", "hostile")
    load = replace(load, clients=(CLIENTS,), requests=TIMES * load.requests)
    if memory:
        return report("hostile-memory", load, *run_until_signal(_look(load, kinds)), output)
    info, found = run_until_signal(_measure(load, kinds))
    rows = [one.row() for one in found]
    publish("hostile", settings_of(load, info), rows, page_of(rows), output)
    return 0 if all(one.holds for one in found) else 1


async def _measure(load: LoadTest, kinds: Sequence[str]) -> tuple[Info, list[AttackResult]]:
    async with attacked_fleet(load) as (_, doors):
        numbers, found = itertools.count(), list[AttackResult]()
        await ask_at_once(doors.grpc, CLIENTS, islice(numbers, WARMING), load.ask)
        with counting_bar(sys.stderr, "attacks", len(kinds)) as done:
            calm = await level_of(load, doors, numbers)
            for kind in kinds:
                found.append(one := await under(kind, load, doors, numbers, calm))
                calm = one.calm[1]
                done()
        return await info_of(doors.grpc, load.wanted.client), found


async def under(
    kind: str, load: LoadTest, doors: Target, numbers: Iterator[int], calm: LoadLevel
) -> AttackResult:
    """One attack and a calm level behind it."""
    before = await formed(doors, load)
    attacker = await start(kind, doors)
    probe = await start("probe", doors)
    level = await level_of(load, doors, numbers)
    came, waits = await end(attacker), await end(probe)
    after = await formed(doors, load)
    return AttackResult(
        kind, (calm, await level_of(load, doors, numbers)), level, came, waits, int(before != after)
    )


async def level_of(load: LoadTest, doors: Target, numbers: Iterator[int]) -> LoadLevel:
    return await ask_at_once(doors.grpc, CLIENTS, islice(numbers, load.requests), load.ask)


async def formed(doors: Target, load: LoadTest) -> object:
    """Who is in the ring: another epoch has another number."""
    info = await info_of(doors.grpc, load.wanted.client)
    return info.epoch, sorted(member.name for member in info.members)


@asynccontextmanager
async def attacked_fleet(load: LoadTest) -> AsyncGenerator[tuple[ProcessFleet, Target]]:
    port, http_port = free_port(), free_port()
    fleet = await ProcessFleet.start(load.wanted, models_of(load.wanted), port, http_port=http_port)
    try:
        yield fleet, Target(f"{LOOPBACK}:{port}", f"{LOOPBACK}:{http_port}")
    finally:
        await fleet.close()


async def start(kind: str, doors: Target, count: int = ENDLESS) -> Process:
    leashed = ("-m", "specsot_app.fleet.die_with_parent", str(os.getpid()), "specsot_lab.bench.attacks")
    asked = (kind, doors.grpc, doors.http, str(count))
    return await asyncio.create_subprocess_exec(sys.executable, *leashed, *asked, stdout=PIPE)


async def end(process: Process) -> Row:
    """Have it stop; what it tells."""
    process.terminate()
    return await told_by(process)


async def told_by(process: Process) -> Row:
    told, _ = await process.communicate()
    return json.loads(told or b"{}")


async def _look(load: LoadTest, kinds: Sequence[str]) -> tuple[Info, list[Row]]:
    """Attempts of every kind in turn; slow clients make as many as the others."""
    async with attacked_fleet(load) as (fleet, doors):

        async def attack(requests: int) -> int:
            for kind in kinds:
                await told_by(await start(kind, doors, requests // len(kinds)))
            return 0

        return await info_of(doors.grpc, load.wanted.client), await looks_at(fleet.children, attack)


def _calm(row: Row) -> str:
    waits = [level["between_texts_seconds"]["p99"] for level in row["calm"]]
    return _ms(median([wait for wait in waits if wait is not None] or [0.0]))


def _ms(seconds: float | None) -> str:
    return f"{(seconds or 0.0) * 1000:.0f}"


COLUMNS = (
    text("attack", "name"),
    Column("attempts", lambda row: str(row["attack"].get("attempts", "-"))),
    Column("errors", lambda row: told_errors(row["attacked"])),
    Column("calm", _calm),
    Column("attacked", lambda row: _ms(row["attacked"]["between_texts_seconds"]["p99"])),
    figure("slower", "slower"),
    Column("probe", lambda row: _ms(row["probe"].get("longest"))),
    figure("epochs", "epochs", 0),
    Column("holds", lambda row: "yes" if row["holds"] else "NO"),
)


def page_of(rows: Sequence[Row]) -> str:
    """One row an attack."""
    said = f"{CLIENTS} clients beside each attack. calm, attacked: ms between texts, p99, without and"
    return f"{markdown(COLUMNS, rows)}\n\n{said} under it\nprobe: the longest of a quick call's waits"
