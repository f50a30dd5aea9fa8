"""The import contracts hold the rooms they name; here: that no pure file is forgotten.

`lint-imports` itself checks who imports what.
"""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

from tests.conftest import REPOSITORY

ROOMS = ("shared", "lab", "app", "services/master", "services/worker", "services/drafter")
# What stands at the top of shared/ and does things: has a loop, a clock, a socket, or re-exports who has.
DOERS = {
    "specsot.service.compute",
    "specsot.aiter",
    "specsot.eagle",
    "specsot.transport.links",
    "specsot.service.membership",
    "specsot.phases",
    "specsot.tasks",
}
# What only makes values of values.
VALUES = {
    *(
        "__future__",
        "bisect",
        "codecs",
        "collections",
        "dataclasses",
        "enum",
        "functools",
        "hashlib",
        "heapq",
    ),
    *("heapq", "itertools", "json", "math", "numpy", "operator", "re", "statistics", "struct", "typing"),
}
# What needs no syntax tree to be seen.
WAITS = re.compile(r"^\s*async def ", re.MULTILINE)
IMPORTED = re.compile(r"^(?:import (\w+)|from (\w+)[\w.]* import )", re.MULTILINE)


@cache
def pure_rooms() -> frozenset[str]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    (found,) = [one for one in project["tool"]["importlinter"]["contracts"] if "Pure rooms" in one["name"]]
    return frozenset(found["source_modules"])


@cache
def is_pure(module: str) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in pure_rooms())


@cache
def modules() -> dict[str, Path]:
    """Every module we wrote, by name; generated ones and packages without code of their own left out."""
    found: dict[str, Path] = {}
    for room in ROOMS:
        for path in (REPOSITORY / room).rglob("*.py"):
            parts = path.relative_to(REPOSITORY / room).with_suffix("").parts
            if path.stem not in ("__init__", "__main__") and "v1" not in parts:
                found[".".join(parts)] = path
    return found


def needs(source: str) -> set[str]:
    """What a file imports: our modules by their names, others by their first."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names} & modules().keys()
            found |= inside or {node.module}
    return {name if name.startswith("specsot") else name.partition(".")[0] for name in found}


def could_be_pure(path: Path) -> bool:
    """It waits for nobody, and needs nothing but values and pure rooms."""
    source = path.read_text()
    plainly = {name for names in IMPORTED.findall(source) for name in names if name} - VALUES
    if WAITS.search(source) or any(not name.startswith("specsot") for name in plainly):
        return False
    return all(name in VALUES or is_pure(name) for name in needs(source))


def test_every_shared_value_is_in_the_pure_rooms() -> None:
    shared = {name for name in modules() if name.startswith("specsot.") and name.count(".") == 1}
    assert {name for name in shared - DOERS if not is_pure(name)} == set(), "the contract, or DOERS here"
    assert not any(map(is_pure, DOERS))


def test_no_pure_file_is_forgotten() -> None:
    forgotten = [name for name, path in modules().items() if not is_pure(name) and could_be_pure(path)]
    assert forgotten == [], "each has a line in the contract of the pure rooms, in pyproject.toml"


def test_every_pure_room_is_there() -> None:
    gone = {room for room in pure_rooms() if not any(f"{name}.".startswith(f"{room}.") for name in modules())}
    assert gone == set()
