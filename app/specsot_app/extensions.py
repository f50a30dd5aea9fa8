"""Words of the `specsot` command that other distributions bring, by entry points of `specsot.commands`.

An entry point is named after its word, `eval`, or `bench.load` for `specsot bench load`, and names a function
whose signature holds the word's options. The lab's words are known by name, so that a plain install can say
where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import typer

from specsot.errors import InvalidRequest
from specsot_app.words import Word

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "specsot.commands"
BENCHES = ("demo", "load", "gpu", "ring", "policies", "precision", "ablation", "laps")
LAB = ("train", "eval", *(f"bench.{name}" for name in BENCHES))
ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True}


def add_word(command: typer.Typer, path: str) -> None:
    """Add the word with this path; where nobody brings it, one that says what to install."""
    name, point = path.rpartition(".")[2], _points().get(path)
    found = point and _load(point)
    if found:
        command.command(name, cls=Word)(found)
    else:
        said = f"`specsot {path.replace('.', ' ')}` needs the lab: pip install ./lab, in SpecSoT's repository"
        command.command(name, help=said, context_settings=ANYTHING, add_help_option=False)(_refusing(said))


def paths_below(group: str) -> Iterator[str]:
    """Paths of the words of a group, the lab's first, in the order of their help."""
    yield from dict.fromkeys(path for path in (*LAB, *_points()) if path.startswith(f"{group}."))


def _points() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # a probe, which needs no other words, does not pay for it

    return {point.name: point for point in entry_points(group=GROUP)}


def _load(point: EntryPoint) -> Callable[..., int] | None:
    """None: its distribution is still registered, but gone."""
    try:
        return point.load()
    except ModuleNotFoundError as error:
        if error.name != point.module.partition(".")[0]:
            raise
        return None


def _refusing(said: str) -> Callable[[], int]:
    def refuse() -> int:
        raise InvalidRequest(said)

    return refuse
