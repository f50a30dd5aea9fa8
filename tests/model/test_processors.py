"""Packed kernels on other processors than this one: one line of an error, or the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from platform import machine

import pytest

from tests.conftest import is_full

pytestmark = [pytest.mark.processes, pytest.mark.slow]
PACK = """
import torch
from specsot.errors import ModelError
from specsot_model.linear import quantize
try:
    quantize(torch.zeros(16, 64), "int8")
except ModelError as error:
    print(error)
"""


@pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")
@pytest.mark.skipif(machine().lower() not in ("x86_64", "amd64"), reason="other processors run every kernel")
def test_weights_in_8_bits_need_avx2() -> None:
    env = os.environ | {"NUMBA_CPU_NAME": "core2"}
    done = subprocess.run([sys.executable, "-c", PACK], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "int8 and int4 weights need a processor with AVX2\n", done.stderr


@pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")
@pytest.mark.parametrize("kind", ["avxvnni", "avx512vnni", "amx"] if is_full() else ["avx512vnni"])
def test_products_have_the_same_bits_with_the_instructions_of_other_processors(
    kind: str, tmp_path: Path
) -> None:
    """Every form of weights that this processor's kernel knows; the instructions are emulated, as the
    processor may lack them.
    """
    from specsot_kernels.cpu.layout import FORMATS
    from tests.model.emulated import digests

    parts = ["whole"] if is_full() else []
    found = subprocess.run(
        [sys.executable, "-m", "tests.model.emulated", kind, *parts],
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert found == [*digests()]
    assert len(found) == len(FORMATS)
