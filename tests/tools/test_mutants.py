"""Small faults are planted one at a time, each within one line."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tools"))

import mutants
from mutants import Mutant, edits_of, failure_with

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


def test_a_sample_is_the_same_for_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [("a.py", SOURCE), ("b.py", SOURCE)]
    monkeypatch.setattr(mutants, "sources", lambda root: iter(files))
    one, other = mutants.sample(5, 3), mutants.sample(5, 3)
    assert one == other
    lines = SOURCE.splitlines()
    assert all(each.new != lines[each.line - 1] for each in one)
    assert {each.path for each in mutants.sample(9, 3, within="b")} == {"b.py"}


def test_a_planted_mutant_is_removed_after_its_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tests are an empty folder, which pytest reports as no tests."""
    monkeypatch.setattr(mutants, "COPY", tmp_path)
    (tmp_path / "b.py").write_text(SOURCE)
    assert failure_with(Mutant("loop", "b.py", 13, "                continue"), ["."]) == "pytest ends with 5"
    assert (tmp_path / "b.py").read_text() == SOURCE
