"""Compiles kernels for GPUs, without one, and runs the kernel for CPUs, without Numba.

`python -m tests.kernels.compiled_apart "gfx942 64"` prints what came of it as JSON: whether the kernel for
CPUs chose the right tokens, what was compiled ahead for a Hopper GPU (`compiled_ahead`), and which kernels
were compiled for each of AMD's GPUs, named with the size of an attention head (see `compiled_for_amd`).
Triton's interpreter must be off.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from typing import Any


def choose_tokens() -> dict[str, bool]:
    """Return whether the five best tokens are right, and whether Numba was loaded for that."""
    import torch

    from specsot_kernels.cpu import running

    torch.manual_seed(0)
    weight = running.PackedWeight(torch.randn(64, 128), None, 8)
    x = torch.randn(3, 128)
    numba = "numba" in sys.modules
    chances, tokens = running.choose(x, weight, None, 5, None)
    expected = running.multiply(x, weight).log_softmax(-1).topk(5)
    correct = torch.allclose(chances, expected.values, atol=1e-5) and bool((tokens == expected.indices).all())
    return {"correct": correct, "numba": numba}


def main(targets: list[str]) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    if find_spec("numba"):
        shown["cpu"] = choose_tokens()
    if find_spec("triton"):
        from tests.kernels import compiled_ahead, compiled_for_amd

        shown["ahead"] = compiled_ahead.compile_phases()
        for target in targets:
            name, head_dim = target.split()
            shown[target] = compiled_for_amd.compile_all(name, int(head_dim))
    return shown


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
