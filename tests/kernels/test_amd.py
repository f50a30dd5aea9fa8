"""Kernels are compiled for GPUs of AMD, as far as Triton can without one; they were never run there."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, some

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

pytestmark = pytest.mark.torch

TREES = {"_choose", "_build", "_arrange", "_verify", "_weigh", "_draw"}
LAYERS = {"_read", "_merge", "_norm", "_multiply_one", "_gate", "_round", "_multiply", "add_parts"}


@pytest.mark.parametrize(
    ("target", "head_dim"), some([("gfx942", "32"), ("gfx942", "128"), ("gfx950", "128")], 0)
)
def test_a_program_for_amd_is_made_of_each(target: str, head_dim: str, tmp_path: Path) -> None:
    """In a process of its own: here Triton interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.compiled_for_amd", target, head_dim]
    done = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == TREES | LAYERS
