"""Command line flags, each also an environment variable, each refused in one line.

Refuses to know which flags there are.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from specsot.members import Range

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Flags(argparse.ArgumentParser):
    """`--page-rows` may come as SPECSOT_PAGE_ROWS too; the command line wins."""

    def __init__(self, program: str, about: str, environment: Mapping[str, str] = os.environ) -> None:
        super().__init__(program, description=about, allow_abbrev=False)
        self._environment = environment

    def flag(
        self,
        name: str,
        kind: Callable[[str], Any] = str,
        default: Any = None,
        help: str = "",
        choices: Sequence[str] | None = None,
        required: bool = False,
    ) -> None:
        variable = "SPECSOT_" + name.upper().replace("-", "_")
        given = self._environment.get(variable)
        self.add_argument(
            f"--{name}",
            type=kind,
            default=default if given is None else self._checked(variable, given, kind, choices),
            choices=choices,
            required=required and given is None,
            metavar=None if choices else name.rsplit("-", 1)[-1].upper(),
            help=f"{help} [{variable}]",
        )

    def _checked(
        self, variable: str, given: str, kind: Callable[[str], Any], choices: Sequence[str] | None
    ) -> Any:
        """argparse checks choices of arguments only, not of defaults."""
        try:
            value = kind(given)
        except (ValueError, argparse.ArgumentTypeError) as error:
            self.error(f"{variable}: {error}")
        if choices and value not in choices:
            self.error(f"{variable}: {given!r} is none of {', '.join(choices)}")
        return value

    def error(self, message: str) -> NoReturn:
        """One line, status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def layers(text: str) -> Range:
    """ "0:4" -> layers 0, 1, 2, 3."""
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no layer range; write first:last, such as 0:4")
    return Range(int(found[1]), int(found[2]))


def layer_numbers(text: str) -> tuple[int, ...]:
    """ "2,16,29" -> those layers; ascending."""
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text):
        raise argparse.ArgumentTypeError(f"{text!r} are no layers; write their numbers, such as 2,16,29")
    found = tuple(map(int, text.split(",")))
    if list(found) != sorted(set(found)):
        raise argparse.ArgumentTypeError(f"{text!r} must be different layers in ascending order")
    return found


def above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number > 0")
    return value


def memory(text: str) -> int:
    """ "512M" -> bytes; K, M, G, T are powers of 1024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no amount of memory; write 512M or 2G")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number > 0")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value
