"""Kernels of several calls are compiled in one batch, by threads or by processes, and loaded with their
launchers, before any is launched.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

pytestmark = pytest.mark.torch


def compile_in(cache: Path, *arguments: str) -> list[str]:
    """What `tests.kernels.compiled_ahead` prints, in a process of its own: here Triton interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "tests.kernels.compiled_ahead", *arguments]
    done = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_all_kernels_are_compiled_and_loaded_before_the_first_launch(tmp_path: Path) -> None:
    assert compile_in(tmp_path) == ["awaited 5 5 0 0", "launched 5 5 6 0", "again 5 5 6 0"]


def test_what_processes_compile_is_found_in_the_cache(tmp_path: Path) -> None:
    """The keys are the same in each process, whichever kernel it compiles first."""
    assert compile_in(tmp_path, "processes") == ["awaited 5 5 0 5", "launched 5 5 6 5", "again 5 5 6 5"]
    assert len(list(tmp_path.glob("specsot-*"))) == 1
