"""The gate against import circles and rooms above their budgets, on made-up trees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from budgets import Budget, parse_budgets, python_size
from house import main, read_budgets


def test_a_circle_by_a_lazy_import_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = tmp_path / "shared" / "specsot"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "rows.py").write_text("from specsot.sizes import MOST\n")
    (package / "sizes.py").write_text("MOST = 4\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert main(["gate"], root=tmp_path) == 0
    (package / "sizes.py").write_text("MOST = 4\n\n\ndef late() -> None:\n    import specsot.rows\n")
    assert main(["gate"], root=tmp_path) == 1
    assert "specsot.rows -> specsot.sizes -> specsot.rows" in capsys.readouterr().out


def tree(root: Path, **files: str) -> Path:
    """A repository with these files, by their names with __ for / and no ending."""
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    for name, text in files.items():
        write(root, name, text)
    return root


def write(root: Path, name: str, text: str) -> None:
    ending = ".toml" if name.endswith("words") else ".py"
    file = root / (name.replace("__", "/") + ending)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_a_long_file_and_a_long_core_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree(tmp_path, lab__specsot_lab__long="\n" * 501, app__specsot_app__usual="\n" * 500)
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "walk.md"
    page.write_text("# Walk\n\n## The core, in an evening\n\n1. `core.py`: all of it.\n\n## After\n")
    (tmp_path / "core.py").write_text("\n" * 9001)
    assert main(["gate"], root=tmp_path) == 0
    assert capsys.readouterr().out == (
        "warning: files with more than 500 lines: 1\n"
        "warning: the core path in docs/walk.md has 9,001 lines, more than 9,000\n"
    )


ROOM = "services/master/specsot_master/core"
FILE = "services__master__specsot_master__core__a"


def test_a_room_above_its_budget_fails_the_gate_and_a_reason_raises_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree(tmp_path, **{FILE: "a = 1\n" * 100})
    assert main(["budgets", "--write", "--reason", "first count"], root=tmp_path) == 0
    write(tmp_path, FILE, "a = 1\n" * 102)  # 2 % more
    assert main(["gate"], root=tmp_path) == 0
    write(tmp_path, FILE, "a = 1\n" * 103)
    assert main(["gate"], root=tmp_path) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"{ROOM} has 103 statements, 1 above its budget of 102: ")
    assert "budgets --write --reason" in said
    assert main(["budgets", "--write"], root=tmp_path) == 2
    assert main(["budgets", "--write", "--reason", 'a "new" rule'], root=tmp_path) == 0
    assert main(["gate"], root=tmp_path) == 0
    kept = parse_budgets((tmp_path / "tools" / "house.toml").read_text())
    assert kept == {ROOM: Budget(105, ("first count", 'a "new" rule'))}


def test_a_room_that_becomes_smaller_keeps_no_room_to_grow_again(tmp_path: Path) -> None:
    tree(tmp_path, **{FILE: "a = 1\n" * 100})
    assert main(["budgets", "--write", "--reason", "first count"], root=tmp_path) == 0
    write(tmp_path, FILE, "a = 1\n" * 50)
    assert main(["budgets", "--write"], root=tmp_path) == 0
    assert main(["gate"], root=tmp_path) == 0
    write(tmp_path, FILE, "a = 1\n" * 52)
    assert main(["gate"], root=tmp_path) == 1


def test_code_that_moves_to_a_new_package_or_to_a_table_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree(tmp_path, **{FILE: "a = 1\n" * 100})
    assert main(["budgets", "--write", "--reason", "first count"], root=tmp_path) == 0
    write(tmp_path, "shared__specsot_new__a", "a = 1\n")
    assert main(["gate"], root=tmp_path) == 1
    assert "shared/specsot_new has 1 statements and no budget" in capsys.readouterr().out
    (tmp_path / "shared" / "specsot_new" / "a.py").unlink()
    write(tmp_path, "services__master__specsot_master__core__words", "[a]\nb = ['c', 'd']\ne = 1\n")
    assert main(["gate"], root=tmp_path) == 1
    assert f"{ROOM} has 103 statements" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("a, b = 1, 2", 2),
        ("a = 1\nb = 2", 2),
        ("self.a = b[0] = 1", 2),
        ("(a, *b), [c] = d", 3),
        ("a: int = 1", 1),
        ("a += 1", 1),
        ("if (a := f()):\n    pass", 3),
        ("with a as b, c as d:\n    pass", 3),
        ("del a, b", 2),
        ('"""Words."""\n# more words\ndef f():\n    """Words."""', 1),
        ("x = 1; y = 2", 2),
    ],
)
def test_packing_makes_no_difference_and_words_are_free(text: str, size: int) -> None:
    assert python_size(text) == size


def test_words_of_the_dialect_are_counted_by_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree(tmp_path, **{FILE: "told_rows = 1  # told by nobody, beside folding\n", "tests__a": "# told\n"})
    assert main(["words"], root=tmp_path) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split()[:2] == [ROOM, "4"]
    assert printed[-1].split() == ["ALL", "4"]


def test_every_room_of_this_repository_has_a_budget_with_a_reason() -> None:
    budgets = read_budgets(Path(__file__).resolve().parents[2])
    assert budgets
    assert all(one.reasons for one in budgets.values())


def test_every_module_belongs_to_a_feature(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/results/house.toml; and a feature without files would be a line of nothing."""
    assert main(["features"]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("| feature | files |")
    assert [row for row in rows if row.endswith("is of no feature")] == []
    assert [row for row in rows if row.split("|")[2].strip() == "0"] == []
