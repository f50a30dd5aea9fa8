"""`python -m specsot_app.fleet.members MODULE ARGS -- MODULE ARGS`: members on one device, in one process.

Each is what it would be in a process of its own, with its own address, registration and health.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specsot.service.member import MemberProgram

BETWEEN = "--"  # the command lines of two members


def words_of(lines: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The arguments of this module, of modules with their arguments."""
    return tuple(word for line in lines for word in (BETWEEN, *line))[1:]


def main(words: Sequence[str]) -> int:
    programs = [_program(*line) for line in _lines(words)]
    from specsot.service.member import run_members

    return run_members(*programs)


def _lines(words: Sequence[str]) -> list[list[str]]:
    lines = list[list[str]]([[]])
    for word in words:
        if word == BETWEEN:
            lines.append([])
        else:
            lines[-1].append(word)
    return lines


def _program(module: str, *arguments: str) -> MemberProgram:
    """Of a service's package, or of a module that stands for it."""
    found = find_spec(module)
    package = found is not None and found.submodule_search_locations is not None
    return import_module(f"{module}.__main__" if package else module).program(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
