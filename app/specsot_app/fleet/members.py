"""Runs several members in one process: `python -m specsot_app.fleet.members MODULE ARGS -- MODULE ARGS`.

The members share a device. Each has the address, registration and health that it would have in a process of
its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specsot.service.member import MemberProgram

# Separates the command lines of two members.
BETWEEN = "--"


def joined_arguments(lines: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the arguments of this module for the members' command lines: [[a, x], [b]] -> (a, x, --, b).

    lines: Command lines, for each member its module and its arguments. No members give ().
    """
    return tuple(word for line in lines for word in (BETWEEN, *line))[1:]


def main(arguments: Sequence[str]) -> int:
    """Run the members in this process until they end; return the exit status.

    The exit status is that of `run_members`. An unknown module raises ModuleNotFoundError.

    arguments: The members' command lines, separated by BETWEEN.
    """
    programs = [_program(*line) for line in _command_lines(arguments)]
    from specsot.service.member import run_members

    return run_members(*programs)


def _command_lines(arguments: Sequence[str]) -> list[list[str]]:
    """Return the members' command lines: (a, x, --, b) -> [[a, x], [b]].

    arguments: The members' command lines, separated by BETWEEN.
    """
    lines = groupby(arguments, BETWEEN.__eq__)
    return [list(words) for is_separator, words in lines if not is_separator]


def _program(module: str, *arguments: str) -> MemberProgram:
    """Return the program of one member.

    module: A service's package, whose `__main__` has `program`, or a module that has it itself.
    arguments: Words of the member's command line.
    """
    spec = find_spec(module)
    is_package = spec is not None and spec.submodule_search_locations is not None
    return import_module(f"{module}.__main__" if is_package else module).program(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
