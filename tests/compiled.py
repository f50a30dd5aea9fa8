"""Compiles test files as pytest does: `python -m tests.compiled`.

`.ci/run` runs it in a fresh clone, where nothing is compiled yet, before the installation ends.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _pytest.assertion import rewrite


def compile_tests(folder: Path) -> None:
    quiet: Any = SimpleNamespace(trace=lambda text: None)  # Gets a message if a file cannot be written.
    for file in sorted(folder.rglob("test_*.py")):
        compiled = compiled_of(file)
        if not compiled.exists():
            source, code = rewrite._rewrite_test(file, None)  # type: ignore[arg-type]
            rewrite.try_makedirs(compiled.parent)
            rewrite._write_pyc(quiet, code, source, compiled)


def compiled_of(file: Path) -> Path:
    return rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"


if __name__ == "__main__":
    compile_tests(Path(__file__).parent)
