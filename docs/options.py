"""Writes docs/options.md, the reference of every option, from the table. Run by `make docs`; a test holds it.

An option is listed once, with the programs that have it; twice if programs describe it differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from specsot.service.command import TableCommand, shown_default, variable_of
from specsot.service.option_table import Entry, entries_of
from specsot_app.cli import specsot
from specsot_drafter.config import DrafterConfig
from specsot_master.config import MasterConfig
from specsot_worker.config import WorkerConfig

PAGE = Path(__file__).with_name("options.md")
HEAD = """# Options

Written by `make docs` from the options table. Values come from the command line, the environment, or a file
([configuration](serve.md#configuration)).
Every option is also an environment variable and a key of a file, by its name. Switches take no value
in `specsot`'s commands, and `on` or `off` in services. A program with more than 22 options shows those marked
"common" in `--help`, and all of them in `--help=all`.

"""
SERVICES = (
    ("specsot-master", MasterConfig),
    ("specsot-worker", WorkerConfig),
    ("specsot-drafter", DrafterConfig),
)


def programs(group: click.Group, before: str = "") -> Iterator[tuple[str, tuple[Entry, ...]]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from programs(command, f"{name} ")
        elif isinstance(command, TableCommand):
            yield before + name, command.entries


def written() -> str:
    rows: dict[str, dict[tuple[str, ...], list[str]]] = {}
    services = ((name, entries_of(kind)) for name, kind in SERVICES)
    for program, entries in (*programs(specsot()), *services):
        for entry in entries:
            if not entry.option.keyword_only and not entry.option.positional:
                rows.setdefault(entry.heading, {}).setdefault(row_of(entry), []).append(f"`{program}`")
    return HEAD + "\n".join(section(heading, found) for heading, found in rows.items())


def row_of(entry: Entry) -> tuple[str, ...]:
    names = " ".join(f"`--{name}`" for name in entry.names)
    kind = " ".join(f"`{choice}`" for choice in entry.kind.choices) or entry.kind.metavar
    if entry.option.secret:
        names, kind = f"`{variable_of(entry.flag)}` (a variable alone)", entry.kind.metavar
    default = "required" if entry.required else shown_default(entry) or ""
    return names, kind, default, entry.tier, entry.option.help


def section(heading: str, found: dict[tuple[str, ...], list[str]]) -> str:
    lines = [
        f"## {heading}",
        "",
        "| option | value | default | tier | | programs |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} | {', '.join(programs)} |"
        for row, programs in found.items()
    ]
    return "\n".join((*lines, ""))


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
