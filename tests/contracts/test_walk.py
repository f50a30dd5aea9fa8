"""docs/walk.md leads where it says: files, functions, the names they use, and how short the ways are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.conftest import REPOSITORY

PROMPT = "From a prompt to stage 0"
LAYERS = "From stage 0 through the layers"
TOKEN = "From a token to its client"
TREE = "From accepted tokens to the next tree"
BRANCHES = "From a plan to its branches"
CORE = "The core, in an evening"
WAYS = (PROMPT, LAYERS, TOKEN, TREE, BRANCHES)
# Files. A way that is too long is not read to its end. The way of a prompt has one file more than before,
# because most readers come from HTTP. The ways through the layers, to the next tree and to the branches exist
# because every step that a stranger forgot after a walk lies in a file that no way named.
MAX_FILES = {PROMPT: 19, LAYERS: 13, TOKEN: 13, TREE: 9, BRANCHES: 5, CORE: 36}
STOP = re.compile(r"^\d+\. `(?P<file>[^`]+)`: (?:`(?P<function>[^`]+)` → (?P<uses>`.*?`)\. )?", re.MULTILINE)


@dataclass(frozen=True)
class Stop:
    """One file of a walk. uses: names that its function uses, which lead on."""

    file: str
    function: str | None
    uses: tuple[str, ...]


def walks() -> dict[str, list[Stop]]:
    text = (REPOSITORY / "docs" / "walk.md").read_text(encoding="utf-8")
    _, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    return {title: list(stops(body)) for title, _, body in (part.partition("\n") for part in parts)}


def stops(body: str) -> Iterator[Stop]:
    for found in STOP.finditer(body):
        yield Stop(found["file"], found["function"], tuple(re.findall(r"`([^`]+)`", found["uses"] or "")))


def function_of(stop: Stop) -> ast.AST | None:
    """Its body in its file; None: it is not there."""
    place: ast.AST | None = ast.parse((REPOSITORY / stop.file).read_text(encoding="utf-8"))
    for name in (stop.function or "").split("."):
        inside = getattr(place, "body", ())
        place = next((one for one in inside if getattr(one, "name", None) == name), None)
    return place


def names_in(place: ast.AST) -> set[str]:
    named = {node.id for node in ast.walk(place) if isinstance(node, ast.Name)}
    return named | {node.attr for node in ast.walk(place) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("title", MAX_FILES)
def test_a_walk_is_as_short_as_it_should_be(title: str) -> None:
    files = [stop.file for stop in walks()[title]]
    assert 0 < len(files) <= MAX_FILES[title]
    assert len(set(files)) == len(files), "one visit each"
    assert [file for file in files if not (REPOSITORY / file).is_file()] == []


@pytest.mark.parametrize("title", WAYS)
def test_every_step_of_a_way_leads_on(title: str) -> None:
    wrong: list[str] = []
    for stop in walks()[title]:
        place = function_of(stop)
        missing = set(stop.uses) - names_in(place) if place and stop.uses else {"such a function"}
        wrong += [f"{stop.file}: {stop.function} has no {name}" for name in sorted(missing)]
    assert wrong == []
