"""What can be typed, and what comes of it: every flag of every command is tried, not looked up.

Knows flags as users do: from --help, by typing them, as variables and as keys of a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.golden.surface import Refused, help_of, parse

Program = tuple[str, ...]
Tried = tuple[str, dict[str, Any]]  # the name of what a flag sets, and what it makes of each text

NEEDED: Mapping[Program, Sequence[str]] = {  # without which a command says nothing else
    ("master",): ["--model=m"],
    ("worker",): ["--model=m"],
    ("drafter",): ["--model=m"],
    ("health",): ["127.0.0.1:1"],
    ("join",): ["a:1/code"],
    ("train",): ["--model=m", "--output=o"],
    ("bench", "ranks"): ["--texts=t"],
    ("bench", "chains"): ["--record=r"],
    ("bench", "llamacpp"): ["--peer=p", "--gguf=g"],
}
OF_ALL = ("config", "help", "version")
NUMBERS = ("3", "1", "0", "-1", "0.5")
SHAPES = ("0:4", "2,16", "512M", "a,b", "hang@3")
FLAG = r"--[A-Za-z][\w-]*"
TRIED: dict[tuple[str, str], Tried] = {}  # by spelling, and what --help says of it


def record(program: Program, folder: Path) -> dict[str, Any]:
    """One command: whether it needs more, what stands where nothing is said, and each of its flags.

    folder: an empty one, for the files that are written on the way.
    """
    needed = [*NEEDED.get(program, ())]
    usual = parse(program, needed)
    found: dict[str, dict[str, Any]] = {}
    for spelling, said in flags_in(help_of(program)).items():
        if spelling.removeprefix("--") not in OF_ALL:
            tried = tried_before(program, needed, spelling, said)
            tried = tried or try_flag(program, needed, usual, spelling)
            if tried:
                TRIED[spelling, said] = name, how = tried
                found.setdefault(name, {"default": usual[name]}).setdefault("flags", {})[spelling] = how
    flags = {name: told(program, needed, usual, name, one, folder) for name, one in sorted(found.items())}
    return {
        "needs": needed if needed and not taken(program, []) else [],
        "arguments": {name: value for name, value in usual.items() if name not in found},
        "flags": flags,
    }


def flags_in(said: str) -> dict[str, str]:
    """Every spelling in what --help prints, with the lines that it stands in."""
    found: dict[str, str] = {}
    for block in re.split(r"\n(?=  -)", said):
        for spelling in re.findall(FLAG, block):
            found.setdefault(spelling, block)
    return found


def tried_before(program: Program, needed: Sequence[str], spelling: str, said: str) -> Tried | None:
    """Of a flag that another program's --help describes in the same words, one text is enough."""
    if (spelling, said) not in TRIED:
        return None
    name, how = TRIED[spelling, said]
    text, value = next(iter(how["takes"].items()), (None, how.get("alone")))
    given = taken(program, [*needed, spelling if text is None else f"{spelling}={text}"])
    return (name, how) if given and given.get(name) == value else None


def try_flag(
    program: Program, needed: Sequence[str], usual: Mapping[str, Any], spelling: str
) -> Tried | None:
    """The name of what it sets, and what it makes of each text; None: there is no such flag."""
    tries: dict[str, Any] = {}
    refusal = ""
    for text in ("x", *NUMBERS, *SHAPES):
        try:
            tries[text] = parse(program, [*needed, f"{spelling}={text}"])
        except Refused as refused:
            if refused.unknown:
                return None
            refusal = refusal or str(refused)
        if text == "3" and "x" in tries:  # it takes any text
            break
    if not tries:
        for word in sorted(set(re.findall(r"'(\w[\w.-]*)'", refusal)) - {"x"}):
            if (given := taken(program, [*needed, f"{spelling}={word}"])) is not None:
                tries[word] = given
    alone = taken(program, [*needed, spelling])
    names = {
        name for given in (*tries.values(), alone or usual) for name in given if given[name] != usual[name]
    }
    if not names:  # it can only say what is so anyway
        names = {spelling.removeprefix("--").replace("_", "-")}
    (name,) = names
    how: dict[str, Any] = {"takes": {text: given[name] for text, given in tries.items()}}
    if alone is not None:
        how["alone"] = alone[name]
    return name, how


def told(
    program: Program,
    needed: Sequence[str],
    usual: Mapping[str, Any],
    name: str,
    found: Mapping[str, Any],
    folder: Path,
) -> dict[str, Any]:
    """What is said of one flag, for the record."""
    first, *others = found["flags"].items()
    spellings = [first[0], *(spelling for spelling, how in others if how == first[1])]
    odd = {spelling: how for spelling, how in others if how != first[1]}
    takes = first[1]["takes"]
    line: dict[str, Any] = {"flags": spellings, "default": found["default"], "takes": shortened(takes)}
    line |= {key: value for key, value in first[1].items() if key == "alone"}
    line |= {"others": odd} if odd else {}
    text, value = next(
        ((text, value) for text, value in takes.items() if value != usual[name]),
        ("true", first[1].get("alone")),
    )
    variable = "SPECSOT_" + name.upper().replace("-", "_")
    needed = [word for word in needed if not word.startswith(f"--{name}=")]
    if (given := taken(program, needed, {variable: text})) and given[name] == value:
        line["variable"] = variable
    keys = [one.removeprefix("--") for one in spellings]
    line["keys"] = [key for key in keys if in_file(program, needed, key, text, folder).get(name) == value]
    if isinstance(value, list):
        twice = taken(program, [*needed, f"{spellings[0]}={text}", f"{spellings[0]}={text}"])
        line["twice"] = twice and twice[name]
    return line


def shortened(takes: Mapping[str, Any]) -> list[str]:
    """ "0.5" where it stays as it is, "512M -> 536870912" where it does not."""
    return [text if str(value) == text else f"{text} -> {value}" for text, value in takes.items()]


def in_file(program: Program, needed: Sequence[str], key: str, text: str, folder: Path) -> dict[str, Any]:
    """What a file's own table for this program makes of it."""
    file = folder / "config.toml"
    file.write_text(f'["{"-".join(program)}"]\n"{key}" = "{text}"\n', encoding="utf-8")
    return taken(program, [*needed, f"--config={file}"]) or {}


def taken(
    program: Program, words: Sequence[str], variables: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    try:
        return parse(program, words, variables)
    except Refused:
        return None
