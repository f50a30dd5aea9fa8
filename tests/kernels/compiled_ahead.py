"""Compiles kernels ahead for a Hopper GPU, without one.

`python -m tests.kernels.compiled_ahead` prints, for each phase, how many kernels were compiled, loaded and
launched so far. Triton's interpreter must be off.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from specsot_kernels.gpu import launching
from specsot_kernels.gpu.growing import grow
from specsot_kernels.growing import CandidatePool, LevelPlace

compiled, loaded, launched = list[object](), list[object](), list[object]()


class Launcher:
    """What Triton makes for each compiled kernel in order to launch it."""

    def __init__(self, source: object, metadata: object) -> None:
        pass

    def __call__(self, *arguments: object) -> None:
        launched.append(arguments)


def load(name: str, *binary: object) -> tuple[int, ...]:
    """Load nothing; return a module, a function, registers, spills, and the threads that fit."""
    loaded.append(name)
    return 1, 2, 3, 0, 1024


class Hopper:
    """What Triton asks of a driver."""

    launcher_cls = Launcher
    utils = SimpleNamespace(load_binary=load, get_device_properties=lambda _: {"max_shared_mem": 232448})

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def grow_levels() -> None:
    """Launch two kernels twice; `_choose` has another form for the roots."""
    tokens, scores, parents = torch.zeros(2, 20).long(), torch.zeros(2, 20), torch.zeros(2, 20).long()
    pool = CandidatePool(tokens, scores, parents)
    roots = grow(torch.zeros(2, 512), 4, LevelPlace(0, 0, 4), 1, pool, None, None)
    grow(torch.zeros(8, 512), 4, LevelPlace(4, 4, 4), 1, pool, roots, None)


def show(phase: str) -> None:
    """Print the numbers so far."""
    print(phase, len(compiled), len(loaded), len(launched))


if __name__ == "__main__":
    cuda: Any = torch.cuda
    cuda.current_device, cuda.device = lambda: 0, lambda _: nullcontext()
    driver.set_active(Hopper())
    triton.knobs.runtime.jit_post_compile_hook = lambda **given: compiled.append(given)
    for _ in range(2):
        launching.compile_ahead(grow_levels)
    assert not launched
    reports = list[tuple[int, int]]()
    assert launching.await_compiled(lambda done, total: reports.append((done, total))) == 3
    assert reports == [(1, 3), (2, 3), (3, 3)]
    show("awaited")
    grow_levels()
    show("launched")
    launching.compile_ahead(grow_levels)
    assert launching.await_compiled() == 0
    show("again")
