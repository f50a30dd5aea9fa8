"""Compiles kernels ahead for a Hopper GPU, without one.

`python -m tests.kernels.compiled_ahead` prints as JSON what `compile_phases` returns if two other processes
compile the kernels. Triton's interpreter must be off.
"""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from specsot_kernels import gpu_compilers
from specsot_kernels.gpu import launching
from specsot_kernels.gpu.growing import grow
from specsot_kernels.gpu.small_attention import attend_small, plan_small_step
from specsot_kernels.growing import CandidatePool, LevelPlace
from tests.kernels.spans import PAGE, PAGES, branches

compiled, loaded, launched, found = list[object](), list[object](), list[object](), list[object]()


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


def attend_and_grow() -> None:
    """Launch also the two kernels of small attention, which call the same functions."""
    spans = branches(random.Random(2), 2, 5, 6)
    plan = plan_small_step(spans, PAGE, 2, torch.device("cpu"))
    queries, kv = torch.zeros(17, 1, 2, 32), torch.zeros(2, PAGES, 1, PAGE, 32)
    attend_small(queries.bfloat16(), kv.bfloat16(), plan)
    grow_levels()


def note_compilation(*, cache_hit: bool, **given: object) -> None:
    """Triton calls this for each kernel that this process compiles, or finds in the cache."""
    if cache_hit:
        found.append(given)


def compile_phases() -> list[tuple[str, int, int, int, int]]:
    """Return, for each phase, how many kernels were compiled, loaded and launched so far, and how many of
    them were found in Triton's cache on disk.
    """
    phases = list[tuple[str, int, int, int, int]]()

    def end(phase: str) -> None:
        phases.append((phase, len(compiled), len(loaded), len(launched), len(found)))

    cuda: Any = torch.cuda
    cuda.current_device, cuda.device = lambda: 0, lambda _: nullcontext()
    driver.set_active(Hopper())
    triton.knobs.runtime.jit_post_compile_hook = lambda **given: compiled.append(given)
    triton.knobs.compilation.listener = note_compilation
    for _ in range(2):
        launching.compile_ahead(attend_and_grow)
    assert not launched
    reports = list[tuple[int, int]]()
    assert launching.await_compiled(lambda done, total: reports.append((done, total))) == 5
    assert reports == [(done, 5) for done in range(1, 6)]
    end("awaited")
    attend_and_grow()
    end("launched")
    launching.compile_ahead(attend_and_grow)
    assert launching.await_compiled() == 0
    end("again")
    assert gpu_compilers.running() is None
    triton.knobs.runtime.jit_post_compile_hook = None
    triton.knobs.compilation.listener = None
    return phases


if __name__ == "__main__":
    compilers: Any = gpu_compilers
    compilers.MIN_PROCESSORS = compilers.MAX_PROCESSES = 2
    gpu_compilers.start_unless_compiled("these")
    assert gpu_compilers.running()
    print(json.dumps(compile_phases()))
