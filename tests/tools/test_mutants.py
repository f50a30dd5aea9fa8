"""Small faults are planted where they lie today, each within one line."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tools"))

import mutants
from mutants import Mutant, edits_of, find

SOURCE = '''"""Says nothing."""

import os


class Box:
    def put(self, count: int = 1) -> int:
        """Kept as it is."""
        if count < 3 and count:
            self.fill(count)
            return count - 1
        for one in range(count):
            if not one:
                break
        assert count
        return 0
'''


def test_every_edit_is_another_line_that_still_compiles() -> None:
    lines = SOURCE.splitlines()
    edits = list(edits_of(SOURCE))
    for _, line, new in edits:
        assert new != lines[line - 1]
        ast.parse("\n".join([*lines[: line - 1], new, *lines[line:]]))
    assert {operator for operator, _, _ in edits} == {
        "and-or", "arithmetic", "comparison", "loop", "negation", "number", "removed", "returned",
    }  # fmt: skip
    assert not {line for _, line, _ in edits} & {1, 3, 8, 15}, "words, imports and assertions stay"


@pytest.mark.parametrize(
    ("old", "function", "place"),
    [
        ("    return count - 1", "Box.put", ("b.py", 10)),  # moved, and indented otherwise
        ("break", "Elsewhere.go", ("b.py", 13)),  # by its text alone
        ("return 0", "Elsewhere.go", None),  # there are two of them
        ("gone()", "Box.put", None),
    ],
)
def test_a_mutant_is_found_where_its_line_went(
    old: str, function: str, place: tuple[str, int] | None
) -> None:
    files = {"b.py": SOURCE, "c.py": "def other():\n    return 0\n"}
    assert find(Mutant(0, "x", "a.py", function, old, ""), files) == place


def test_a_sample_is_the_same_for_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "sources", lambda root: iter([("b.py", SOURCE)]))
    one, other = mutants.sample(5, 3), mutants.sample(5, 3)
    assert one == other
    assert all(SOURCE.splitlines().count(each.old) and each.function == "Box.put" for each in one)


def test_the_kept_ones_are_read() -> None:
    kept = mutants.read()
    assert len(kept) == 100
    assert all(one.old != one.new and Path(one.path).suffix == ".py" for one in kept)
