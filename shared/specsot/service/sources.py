"""What a flag's value is where the command line does not say: the environment's word, else that of a file."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from specsot.errors import InvalidRequest

CONFIG = "config"  # the flag that names the file
PROGRAMS = (
    *("master", "worker", "drafter"),
    *("infer", "chat", "serve", "status", "info", "health", "rebalance", "verify"),
    *("train", "eval"),
    *("bench-quick", "bench-full", "bench-policies", "bench-precision"),
    *("bench-demo", "bench-load", "bench-ring", "bench-gpu", "bench-ablation", "bench-laps"),
)  # each may have a table in a file


@dataclass(frozen=True, slots=True)
class Found:
    """A value as a command line would have it, in one word or several, and where it was found."""

    words: tuple[str, ...]
    source: str


def variable_of(flag: str) -> str:
    """ "max-parallel" -> SPECSOT_MAX_PARALLEL, whichever program has it."""
    return "SPECSOT_" + flag.upper().replace("-", "_")


def in_environment(flag: str, environment: Mapping[str, str]) -> Found | None:
    """A variable that is empty says nothing."""
    variable = variable_of(flag)
    text = environment.get(variable)
    return Found((text,), variable) if text else None


def find_all(
    program: str, flags: Mapping[str, str], environment: Mapping[str, str], file: str | None
) -> dict[str, Found]:
    """What environment and file say, by flag; the environment wins.

    flags: by every name they have, the one that counts. file: the one that the command line names.
    Raises InvalidRequest: a file that cannot be read, or holds what is no flag of this program.
    """
    named = in_environment(CONFIG, environment) if file is None else Found((file,), f"--{CONFIG}")
    found = read_file(named, program, flags) if named else {}
    said = {flag: in_environment(flag, environment) for flag in flags.values()}
    return found | {flag: one for flag, one in said.items() if one}


def read_file(named: Found, program: str, flags: Mapping[str, str]) -> dict[str, Found]:
    """A TOML file's keys: flags of this program, then those of its own table, which win.

    Tables of other programs are theirs. Raises InvalidRequest.
    """
    path, written = named.words[0], _parsed(named)
    tables = {key: cast("dict[str, Any]", value) for key, value in written.items() if isinstance(value, dict)}
    for table in tables:
        if table not in PROGRAMS:
            raise InvalidRequest(f"{path}: no program has a table [{table}]; they are {', '.join(PROGRAMS)}")
    top = {key: value for key, value in written.items() if key not in tables}
    own = tables.get(program, {})
    return _flags(path, "", top, program, flags) | _flags(path, f"{program}.", own, program, flags)


def _parsed(named: Found) -> dict[str, Any]:
    path = named.words[0]
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"{named.source}: {path}: {error.strerror or error}") from None
    except ValueError as error:  # TOML's errors, and bytes that are no text
        raise InvalidRequest(f"{path}: {error}") from None


def _flags(
    path: str, table: str, keys: Mapping[str, Any], program: str, flags: Mapping[str, str]
) -> dict[str, Found]:
    found: dict[str, Found] = {}
    for key, value in keys.items():
        source = f"{path}: {table}{key}"
        flag = flags.get(key.replace("_", "-"))
        if flag is None:
            raise InvalidRequest(f"{source} is no flag of {program}{_nearest(key, flags)}")
        found[flag] = Found(_words(value, source), source)
    return found


def _nearest(key: str, flags: Collection[str]) -> str:
    near = get_close_matches(key.replace("_", "-"), flags, 1)
    return f"; did you mean {near[0]}?" if near else ""


def _words(value: Any, source: str) -> tuple[str, ...]:
    listed = cast("Sequence[Any]", value) if isinstance(value, list) else (value,)
    return tuple(_word(one, source) for one in listed)


def _word(value: Any, source: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise InvalidRequest(f"{source} must be text, a number, true, false, or a list of these")
