"""Kernels of several calls are compiled in one batch, and loaded with their launchers, before any is
launched.
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


def test_all_kernels_are_compiled_and_loaded_before_the_first_launch(tmp_path: Path) -> None:
    """In a process of its own: here Triton interprets, and no GPU is needed there."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.compiled_ahead"]
    done = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["awaited 3 3 0", "launched 3 3 4", "again 3 3 4"]
