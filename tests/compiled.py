"""Compiles files of tests as pytest does, the last ones first: one core's work while the other collects them.

`.ci/run` does so beside the tests of a fresh clone.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _pytest.assertion import rewrite


def compile_tests(folder: Path) -> None:
    quiet: Any = SimpleNamespace(trace=lambda text: None)  # told what cannot be written
    for file in sorted(folder.rglob("test_*.py"), reverse=True):
        compiled = compiled_of(file)
        if not compiled.exists():
            source, code = rewrite._rewrite_test(file, None)  # type: ignore[arg-type]
            rewrite.try_makedirs(compiled.parent)
            rewrite._write_pyc(quiet, code, source, compiled)


def compiled_of(file: Path) -> Path:
    return rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"


if __name__ == "__main__":
    compile_tests(Path(__file__).parent)
