"""Command line flags, each also an environment variable and a key of a file, each refused in one line.

Refuses to know which flags there are.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from specsot import __version__
from specsot.errors import InvalidRequest
from specsot.members import Range
from specsot.process.sources import CONFIG, Found, find_all, in_environment, variable_of
from specsot.process.spellings import spellings_of

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
SWITCH = ("on", "off")
_SWITCHES = {"true": ("on", "yes"), "1": ("on", "yes"), "false": ("off", "no"), "0": ("off", "no")}


@dataclass(frozen=True, slots=True)
class _Flag:
    kind: Callable[[str], Any]
    default: Any
    choices: Sequence[str] | None
    required: bool

    def read(self, found: Found) -> Any:
        """What somebody wrote elsewhere than on the command line. Raises what `kind` raises."""
        text = ",".join(found.words)
        if self.choices is None:
            return self.kind(text)
        switched = next((word for word in _SWITCHES.get(text, ()) if word in self.choices), text)
        if switched not in self.choices:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(self.choices)}")
        return self.kind(switched)


class Flags(argparse.ArgumentParser):
    """`--page-rows` may come as SPECSOT_PAGE_ROWS too, or as page-rows in --config's file.

    The command line wins, then the environment, then the file. program: "specsot-worker" is "worker" there.
    """

    def __init__(self, program: str, about: str, environment: Mapping[str, str] = os.environ) -> None:
        super().__init__(program, description=about, allow_abbrev=False)
        self._environment = environment
        self._flags: dict[str, _Flag] = {}
        self._names: dict[str, str] = {}  # other systems' among them
        version = f"{program} {__version__}"
        self.add_argument("--version", action="version", version=version, help="tell the version and end")
        told = f"TOML file with flags as its keys [{variable_of(CONFIG)}]"
        self.add_argument(f"--{CONFIG}", metavar="FILE", default=None, help=told)

    def flag(
        self,
        name: str,
        kind: Callable[[str], Any] = str,
        default: Any = None,
        help: str = "",
        choices: Sequence[str] | None = None,
        required: bool = False,
        spelled: bool = True,
    ) -> None:
        """spelled: other systems' names of it count too. A SWITCH may stand without a value: on."""
        self._flags[name] = _Flag(kind, default, choices, required)
        names = (name, *spellings_of(name)) if spelled else (name,)
        bare: dict[str, Any] = {"nargs": "?", "const": "on"} if choices == SWITCH else {}
        self._names |= dict.fromkeys(names, name)
        self.add_argument(
            *(f"--{one}" for one in names),
            dest=_place(name),
            type=kind,
            default=argparse.SUPPRESS,
            choices=choices,
            metavar=None if choices else name.rsplit("-", 1)[-1].upper(),
            help=f"{help} [{variable_of(name)}]",
            **bare,
        )

    def secret(self, name: str) -> str | None:
        """From the environment alone: everybody on a machine may read command lines, and files travel."""
        found = in_environment(name, self._environment)
        return found and found.words[0]

    def read(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Every flag's value. Exits with status 2 and one line when something is wrong."""
        given = self.parse_args(arguments)
        file: str | None = vars(given).pop(CONFIG)
        try:
            found = find_all(self.prog.removeprefix("specsot-"), self._names, self._environment, file)
        except InvalidRequest as error:
            self.error(str(error))
        for name, flag in self._flags.items():
            if not hasattr(given, _place(name)):
                setattr(given, _place(name), self._value(flag, found.get(name)))
        missing = [f"--{name}" for name, flag in self._flags.items() if _lacks(given, name, flag)]
        if missing:
            self.error(f"the following arguments are required: {', '.join(missing)}")
        return given

    def _value(self, flag: _Flag, found: Found | None) -> Any:
        """Only what counts is checked: a service's parent may have set variables it overrides."""
        if found is None:
            return flag.default
        try:
            return flag.read(found)
        except (ValueError, argparse.ArgumentTypeError) as error:
            self.error(f"{found.source}: {error}")

    def error(self, message: str) -> NoReturn:
        """One line, status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def _place(name: str) -> str:
    return name.replace("-", "_")


def _lacks(given: argparse.Namespace, name: str, flag: _Flag) -> bool:
    return flag.required and getattr(given, _place(name)) is None


def layers(text: str) -> Range:
    """ "0:4" -> layers 0, 1, 2, 3."""
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no layer range; write first:last, such as 0:4")
    return Range(int(found[1]), int(found[2]))


def host_names(text: str) -> tuple[str, ...]:
    """ "fleet.example,other" -> those names; without ports."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252})", name):
            raise argparse.ArgumentTypeError(f"{name!r} is no host's name")
    return names


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
