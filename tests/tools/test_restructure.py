"""The script that moves the house, on a made-up one: references follow, and nothing else does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tools"))

from restructure import main  # noqa: E402

TREE = {
    "shared/specsot/__init__.py": "",
    "shared/specsot/rows.py": '''
        """Rows."""

        from __future__ import annotations

        from dataclasses import dataclass

        from specsot.sizes import MOST

        # how many
        LEAST = 2


        @dataclass
        class Rows:
            """Some."""

            count: int = MOST

            def hear(self, told: int) -> int:
                return self.count + told


        def bounded(rows: Rows, LEAST: int = 3) -> int:
            return min(LEAST, rows.hear(told=1))
    ''',
    "shared/specsot/sizes.py": '"""Sizes."""\n\nMOST = 4\nFEW = MOST // 2\n',
    "app/specsot_app/__init__.py": "",
    "app/specsot_app/use.py": '''
        """Uses them; see `specsot.rows`."""

        from __future__ import annotations

        import specsot.rows
        from specsot import sizes
        from specsot.rows import LEAST, Rows
        from specsot.rows import Rows as Lines

        PATH = "specsot.rows:Rows"


        def lazily() -> int:
            from specsot.rows import bounded

            sizes.MOST, specsot.rows.LEAST
            return bounded(Rows(count=LEAST)) + Lines().hear(1)


        def shadowed(Rows: int) -> str:
            return f"{Rows} of {sizes.MOST}"


        def shown() -> str:
            return f"{Rows().hear(1)} {{Rows}}"
    ''',
    "docs/page.md": "`Rows` stands in `shared/specsot/rows.py`, that is `specsot.rows`.\n",
    "pyproject.toml": 'source_modules = [\n    "specsot.rows",\n    "specsot.sizes",\n]\n',
}


@pytest.fixture
def house(tmp_path: Path) -> Path:
    for path, text in TREE.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(dedent(text).lstrip("\n"))
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return tmp_path


def applied(house: Path, table: str, verb: str = "apply") -> int:
    path = house / "tools" / "moves" / "table.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(table))
    return main([verb, str(path)] if verb != "refs" else ["refs"], root=house)


def read(house: Path, path: str) -> str:
    return (house / path).read_text()


def runs(house: Path, code: str) -> str:
    """What the changed house prints, in a Python of its own."""
    path = f"{house / 'shared'}:{house / 'app'}"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True
    )
    return done.stdout.strip() or done.stderr


USED = "from specsot_app.use import *; print(lazily(), shadowed(7), shown())"


def test_the_made_up_house_runs_as_it_is(house: Path) -> None:
    assert runs(house, USED) == "8 7 of 4 5 {Rows}"


def test_a_name_is_renamed_where_it_is_meant_and_not_where_a_parameter_hides_it(house: Path) -> None:
    before = runs(house, USED)
    assert applied(house, '[names]\n"specsot.rows:Rows" = "Batch"\n"specsot.rows:LEAST" = "MIN_ROWS"\n') == 0
    rows, use = read(house, "shared/specsot/rows.py"), read(house, "app/specsot_app/use.py")
    assert "class Batch:" in rows
    assert "def bounded(rows: Batch, LEAST: int = 3)" in rows
    assert "min(LEAST," in rows
    assert "def shadowed(Rows: int)" in use
    assert "specsot.rows.MIN_ROWS" in use
    assert '"specsot.rows:Batch"' in use
    assert "{Batch().hear(1)} {{Rows}}" in use
    assert "import Batch as Lines" in use
    assert "`Batch` stands" in read(house, "docs/page.md")
    assert runs(house, USED) == before


def test_a_module_moves_with_strings_documents_and_lists(house: Path) -> None:
    before = runs(house, USED)
    table = '[modules]\n"specsot.rows" = "specsot.core.batches"\n[docstrings]\n"specsot.core" = "Pure."\n'
    assert applied(house, table) == 0
    use = read(house, "app/specsot_app/use.py")
    assert "import specsot.core.batches\n" in use
    assert "specsot.core.batches.LEAST" in use
    assert "see `specsot.core.batches`" in use
    assert read(house, "shared/specsot/core/__init__.py") == '"""Pure."""\n'
    assert "`shared/specsot/core/batches.py`, that is `specsot.core.batches`" in read(house, "docs/page.md")
    assert '"specsot.core.batches"' in read(house, "pyproject.toml")
    assert not (house / "shared/specsot/rows.py").exists()
    assert runs(house, USED) == before


def test_modules_merge_and_what_is_needed_at_import_comes_first(house: Path) -> None:
    before = runs(house, USED)
    assert applied(house, '[modules]\n"specsot.sizes" = "specsot.rows"\n') == 0
    rows = read(house, "shared/specsot/rows.py")
    assert rows.startswith('"""Rows."""')
    assert rows.index("MOST = 4") < rows.index("class Rows")
    assert "import MOST" not in rows
    assert "# how many\nLEAST" in rows
    assert "rows.MOST" in read(house, "app/specsot_app/use.py")
    assert read(house, "pyproject.toml").count("specsot.rows") == 1
    assert runs(house, USED) == before


def test_what_two_modules_define_is_refused_and_nothing_is_written(
    house: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (house / "shared/specsot/sizes.py").write_text('"""Sizes."""\n\nMOST = 4\nLEAST = 9\n')
    assert applied(house, '[modules]\n"specsot.sizes" = "specsot.rows"\n') == 1
    assert "both define LEAST" in capsys.readouterr().err
    assert (house / "shared/specsot/sizes.py").exists()


def test_a_member_is_renamed_in_its_class_and_at_its_uses_or_refused(
    house: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = runs(house, USED)
    table = '[names]\n"specsot.rows:Rows.hear" = "receive"\n"specsot.rows:Rows.count" = "size"\n'
    assert applied(house, table) == 0
    assert "Rows(size=LEAST)" in read(house, "app/specsot_app/use.py")
    assert "{Rows().receive(1)}" in read(house, "app/specsot_app/use.py")
    assert runs(house, USED) == before
    with (house / "shared/specsot/sizes.py").open("a") as sizes:
        sizes.write("\n\nclass Ear:\n    def receive(self) -> None: ...\n")
    assert applied(house, '[names]\n"specsot.rows:Rows.receive" = "take"\n') == 1
    assert "Ear has it too" in capsys.readouterr().err


def test_words_are_renamed_in_the_named_files_only_and_never_in_strings(house: Path) -> None:
    words = '[[words]]\nfiles = ["shared/specsot/rows.py"]\nold = "told"\nnew = "more"\n'
    assert applied(house, words) == 0
    assert "def hear(self, more: int)" in read(house, "shared/specsot/rows.py")
    assert "hear(more=1)" in read(house, "shared/specsot/rows.py")


def test_references_of_a_branch_follow_tables_that_were_applied_before_it_came(house: Path) -> None:
    table = '[names]\n"specsot.rows:Rows" = "Batch"\n[modules]\n"specsot.rows" = "specsot.core.batches"\n'
    assert applied(house, table) == 0
    late = "from __future__ import annotations\n\nfrom specsot.rows import Rows\n\nprint(Rows().count)\n"
    (house / "app/specsot_app/late.py").write_text(late)
    assert main(["refs"], root=house) == 0
    assert "from specsot.core.batches import Batch" in read(house, "app/specsot_app/late.py")
    assert runs(house, "import specsot_app.late") == "4"
    after = read(house, "app/specsot_app/late.py")
    assert main(["refs"], root=house) == 0
    assert read(house, "app/specsot_app/late.py") == after


def test_a_circle_by_a_lazy_import_is_found(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["circles"], root=house) == 0
    sizes = house / "shared/specsot/sizes.py"
    sizes.write_text(sizes.read_text() + "\n\ndef late() -> None:\n    import specsot.rows\n")
    assert main(["circles"], root=house) == 1
    assert "specsot.rows -> specsot.sizes -> specsot.rows" in capsys.readouterr().out
