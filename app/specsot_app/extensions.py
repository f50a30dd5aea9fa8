"""Commands that other distributions bring, by entry points of `specsot.commands`.

An entry point is named after its command, `eval`, or `bench.load` for `specsot bench load`, and names a
command (see `specsot.service.command.command`). The lab's are known by name, so that a plain install can say
what to install.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from specsot.errors import InvalidRequest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "specsot.commands"
LAB_BENCHES = ("demo", "load", "gpu", "ring", "policies", "precision", "ablation", "laps")
LAB = ("train", "eval", *(f"bench.{name}" for name in LAB_BENCHES))
ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True}


def command_of(path: str) -> click.Command:
    """The command with this path; where nobody brings it, one that says what to install."""
    point = _points().get(path)
    return (point and _load(point)) or _refusing(path)


def paths_below(group: str) -> Iterator[str]:
    """Paths of the commands of a group, the lab's first."""
    yield from dict.fromkeys(path for path in (*LAB, *_points()) if path.startswith(f"{group}."))


def _points() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # a probe, which needs no other commands, does not pay for it

    return {point.name: point for point in entry_points(group=GROUP)}


def _load(point: EntryPoint) -> click.Command | None:
    """None: its distribution is still registered, but gone."""
    try:
        return point.load()
    except ModuleNotFoundError as error:
        if error.name != point.module.partition(".")[0]:
            raise
        return None


def _refusing(path: str) -> click.Command:
    said = f"`specsot {path.replace('.', ' ')}` needs the lab: pip install ./lab, in SpecSoT's repository"

    def refuse() -> int:
        raise InvalidRequest(said)

    name = path.rpartition(".")[2]
    return click.Command(name, callback=refuse, help=said, context_settings=ANYTHING, add_help_option=False)
