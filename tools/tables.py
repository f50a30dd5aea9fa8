"""A table of tools/moves, and what it means for the tree of the moment: a plan of references."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from house import House
from references import Plan


@dataclass(frozen=True)
class Word:
    files: tuple[str, ...]
    old: str
    new: str


@dataclass(frozen=True)
class Table:
    """One file of tools/moves."""

    path: Path
    applied: tuple[str, ...] = ()
    names: dict[str, str] = field(default_factory=dict[str, str])
    modules: dict[str, str] = field(default_factory=dict[str, str])
    docstrings: dict[str, str] = field(default_factory=dict[str, str])
    words: tuple[Word, ...] = ()
    keep_strings: tuple[str, ...] = ()

    @staticmethod
    def read(path: Path) -> Table:
        raw: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        if unknown := raw.keys() - {"applied", "names", "modules", "docstrings", "words", "options"}:
            raise SystemExit(f"{path}: no such part: {', '.join(sorted(unknown))}")
        words = tuple(Word(tuple(one["files"]), one["old"], one["new"]) for one in raw.get("words", []))
        keep = tuple(raw.get("options", {}).get("keep_strings", []))
        parts = {part: dict(raw.get(part, {})) for part in ("names", "modules", "docstrings")}
        return Table(path, tuple(raw.get("applied", [])), **parts, words=words, keep_strings=keep)

    def mark(self, kind: str) -> None:
        """Write at the table's top what of it is applied."""
        text = re.sub(r"\Aapplied = .*\n+", "", self.path.read_text(encoding="utf-8"))
        done = [*self.applied, *([kind] if kind not in self.applied else [])]
        listed = ", ".join(f'"{one}"' for one in done)
        self.path.write_text(f"applied = [{listed}]\n\n{text}", encoding="utf-8")


def plan_of(house: House, table: Table, kind: str, *, late: bool = False) -> Plan:
    if kind == "modules":
        modules = expanded(house, table.modules, late)
        return Plan(house, modules=modules, late=late, keep_strings=table.keep_strings)
    names, attributes, refused = named(house, table.names, late)
    return Plan(
        house, names=names, attributes=attributes, late=late, keep_strings=table.keep_strings, refused=refused
    )


def expanded(house: House, table: dict[str, str], late: bool) -> dict[str, str]:
    """Old module -> new module, prefixes written out; late ones only where nothing has the old name today."""
    modules = house.modules
    found: dict[str, str] = {}
    for old, new in table.items():
        if old.endswith(".*"):
            stem, into = old[:-2], new.removesuffix(".*")
            here, there = (into, stem) if late else (stem, into)
            inside = [name for name in modules if name == here or name.startswith(here + ".")]
            pairs = {name: there + name.removeprefix(here) for name in inside}
            found |= (
                {o: n for n, o in pairs.items()}
                if late
                else {o: n for o, n in pairs.items() if o not in table}
            )
        else:
            found[old] = new
    if late:
        return {old: new for old, new in found.items() if old not in modules and old != new}
    if missing := [old for old in found if old not in modules]:
        raise SystemExit("no such module: " + ", ".join(missing))
    return found


def named(
    house: House, table: dict[str, str], late: bool
) -> tuple[dict[tuple[str, str], str], dict[str, tuple[str, set[str]]], list[str]]:
    names: dict[tuple[str, str], str] = {}
    attributes: dict[str, tuple[str, set[str]]] = {}
    refused: list[str] = []
    for key, new in table.items():
        module, _, name = key.partition(":")
        if key.startswith("*."):
            attributes[key[2:]] = (new, set())
        elif "." in name:
            owner, _, member = name.partition(".")
            attributes.setdefault(member, (new, set()))[1].add(owner)
            if attributes[member][0] != new:
                refused.append(f"{key}: {member} becomes {attributes[member][0]} elsewhere; use [[words]]")
        elif late or house.tops(module).get(name, "no") is None:
            if not (late and name in house.tops(module)):
                names[module, name] = new
            if (
                not late
                and new in house.tops(module)
                and (module, new) not in names
                and f"{module}:{new}" not in table
            ):
                refused.append(f"{key}: {module} has {new} already")
        else:
            refused.append(f"{key}: not defined there")
    if not late:
        refused += alone(house, attributes)
    return names, attributes, refused


def alone(house: House, attributes: dict[str, tuple[str, set[str]]]) -> Iterator[str]:
    """Members that classes besides the table's have too: their uses cannot be told apart."""
    owners = owners_of(house, set(attributes))
    for member, (new, classes) in attributes.items():
        if classes and (others := owners.get(member, set()) - classes):
            yield f'{member} -> {new}: {", ".join(sorted(others))} has it too; list them, or "*.{member}"'
        if missing := classes - owners.get(member, set()):
            yield f"{member}: not in {', '.join(sorted(missing))}"
        if not owners.get(member):
            yield f"{member}: no class has it"


def owners_of(house: House, members: set[str]) -> dict[str, set[str]]:
    """Member -> names of the classes that define it, as method, field or `self.member`."""
    found: dict[str, set[str]] = {}
    for _, text in house.python():
        if not any(member in text for member in members):
            continue
        for node in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)):
            for member in members_of(node) & members:
                found.setdefault(member, set()).add(node.name)
    return found


def members_of(node: ast.ClassDef) -> set[str]:
    found: set[str] = set()
    for part in node.body:
        match part:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.Assign(targets=targets):
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
            case _:
                pass
    for part in ast.walk(node):
        match part:
            case ast.Attribute(ctx=ast.Store(), value=ast.Name(id="self"), attr=name):
                found.add(name)
            case _:
                pass
    return found
