"""What is compiled for pytest."""

from __future__ import annotations

from pathlib import Path

from _pytest.assertion import rewrite

from tests.compiled import compile_tests, compiled_of


def test_pytest_takes_it_for_its_own(tmp_path: Path) -> None:
    file = tmp_path / "room" / "test_one.py"
    file.parent.mkdir()
    file.write_text("def test_one():\n    assert 1 + 1 == 2\n")
    compile_tests(tmp_path)
    found = rewrite._read_pyc(file, compiled_of(file))
    assert found is not None
    assert found.co_filename == str(file)
    assert "@pytest_ar" in found.co_names, "asserts that tell what they compare"
