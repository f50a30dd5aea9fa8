"""What no process of the tests can show, because Triton interprets there, and Numba is loaded: kernels are
compiled ahead for a Hopper GPU and for GPUs of AMD, as far as Triton can without one, where they were never
run; and the kernel for CPUs runs without Numba.

One process shows most of it: a fifth of its time goes into importing torch and Triton.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.torch

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
NEEDS_NUMBA = pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")
TREES = {"_choose", "_build", "_arrange", "_verify", "_weigh", "_draw"}
LAYERS = {
    "_read",
    "_merge",
    "_norm",
    "_multiply_one",
    "_gate",
    "_round",
    "_multiply",
    "add_parts",
    "_add_and_norm",
}
USUAL = "gfx942 32"
MORE = "gfx942 128", "gfx950 128"  # A larger head takes longer to compile.


def printed(cache: Path, module: str, *arguments: str) -> Any:
    """What a module of this folder prints as JSON, in a process of its own."""
    # LLVM's optimizer takes a fifth of the time, and what it makes runs nowhere.
    known = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "DISABLE_LLVM_OPT": "1"}
    command = [sys.executable, "-m", f"tests.kernels.{module}", *arguments]
    done = subprocess.run(
        command, env=os.environ | known, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What one process shows, by subject."""
    targets = (USUAL, *(MORE if request.config.getoption("--full") else ()))
    return printed(tmp_path_factory.mktemp("cache"), "compiled_apart", *targets)


@NEEDS_NUMBA
def test_best_tokens_have_their_log_probabilities_without_numba(shown: dict[str, Any]) -> None:
    """The only function of the kernel that calls one outside of it: the logarithm."""
    assert shown["cpu"] == {"correct": True, "numba": False}


@NEEDS_TRITON
def test_all_kernels_are_compiled_and_loaded_before_the_first_launch(shown: dict[str, Any]) -> None:
    """Kernels of several calls are compiled in one batch, and loaded with their launchers."""
    assert shown["ahead"] == [["awaited", 5, 5, 0, 0], ["launched", 5, 5, 6, 0], ["again", 5, 5, 6, 0]]


@NEEDS_TRITON
def test_what_processes_compile_is_found_in_the_cache(tmp_path: Path) -> None:
    """The keys are the same in each process, whichever kernel it compiles first."""
    phases = printed(tmp_path, "compiled_ahead")
    assert phases == [["awaited", 5, 5, 0, 5], ["launched", 5, 5, 6, 5], ["again", 5, 5, 6, 5]]
    assert len(list(tmp_path.glob("specsot-*"))) == 1


@NEEDS_TRITON
@pytest.mark.parametrize("target", [USUAL, *(pytest.param(one, marks=pytest.mark.full) for one in MORE)])
def test_a_program_for_amd_is_made_of_each(shown: dict[str, Any], target: str) -> None:
    assert set(shown[target]) == TREES | LAYERS
