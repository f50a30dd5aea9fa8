"""Runs several members in one process: `python -m specsot_app.fleet.members MODULE ARGS -- MODULE ARGS`.

The members share a device. Each has the address, registration and health that it would have in a process of
its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specsot.service.member import MemberProgram

# Separates the command lines of two members.
BETWEEN = "--"


def words_of(lines: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the arguments of this module for the members' command lines: [[a, x], [b]] -> (a, x, --, b)."""
    return tuple(word for line in lines for word in (BETWEEN, *line))[1:]


def main(words: Sequence[str]) -> int:
    """Run the members until they end; return the exit status."""
    programs = [_program(*line) for line in _lines(words)]
    from specsot.service.member import run_members

    return run_members(*programs)


def _lines(words: Sequence[str]) -> list[list[str]]:
    """Split the arguments into the members' command lines."""
    lines = list[list[str]]([[]])
    for word in words:
        if word == BETWEEN:
            lines.append([])
        else:
            lines[-1].append(word)
    return lines


def _program(module: str, *arguments: str) -> MemberProgram:
    """Return the program of a service's package, or of a module in place of one."""
    found = find_spec(module)
    package = found is not None and found.submodule_search_locations is not None
    return import_module(f"{module}.__main__" if package else module).program(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
