"""Helpers for launching kernels: the typed compiler, tile sizes, the device, programmatic early starts.

An early start (NVIDIA, from Hopper on): a kernel's programs begin while those of the kernel before end.
They may read what no kernel writes, such as weights; then each calls `await_before`, all of them and
always, or a kernel two places back might not be over. `let_next_begin` lets the kernel behind do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.language.extra import cuda

kernel: Callable[[Callable[..., Any]], Any] = triton.jit
HERE: AbstractContextManager[None] = nullcontext()
HOPPER = (9, 0)  # compute capability of H100 and H200


def kernel_for_any(*numbers: str) -> Callable[[Callable[..., Any]], Any]:
    """A kernel that is compiled once for all values of these arguments: else 1 and multiples of 16 have forms
    of their own.
    """
    return triton.jit(do_not_specialize=list(numbers))


def kernel_of_any(*arrays: str, numbers: tuple[str, ...]) -> Callable[[Callable[..., Any]], Any]:
    """The same for these arrays, too, wherever they lie in memory: for what reads one element at a time."""
    return triton.jit(do_not_specialize=list(numbers), do_not_specialize_on_alignment=list(arrays))


_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    run: Any, grid: tuple[int, int, int], kind: tuple[Any, ...], given: tuple[Any, ...], **options: int
) -> None:
    """run[grid](*given); from the second time on without Triton's look at each argument, most of a launch.

    kind: hashable; all that a compiled form depends on: the device, the types of arrays that may differ, the
    constants, whatever of a number or an address is specialized on. options: the same at every launch.
    """
    key = (run.fn, *kind)
    known = _compiled.get(key)
    if known is not None:
        known[grid](*given)
        return
    made = run[grid](*given, **options)
    if isinstance(made, CompiledKernel):  # Triton's interpreter compiles nothing
        _compiled[key] = made


def power_of_two(size: int) -> int:
    """The least that is not below `size`: tiles come in these."""
    return 1 << (size - 1).bit_length()


def on_device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Nothing to enter on one device, or in Triton's interpreter; a switch costs microseconds."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return HERE
    return torch.cuda.device(tensor.device)


def early_start(tensor: Tensor) -> dict[str, bool]:
    """What a kernel that calls `await_before` is launched with, on the device of this tensor."""
    return {"early": True, "launch_pdl": True} if _starts_early(tensor.device) else {"early": False}


def copies_blocks(device: torch.device) -> bool:
    """Whether kernels copy blocks of memory by descriptors there; Triton's interpreter has its own."""
    return device.type != "cuda" or _starts_early(device)


@cache
def _starts_early(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= HOPPER


@kernel
def let_next_begin(early: tl.constexpr):
    if early:
        cuda.gdc_launch_dependents()


@kernel
def await_before(early: tl.constexpr):
    if early:
        cuda.gdc_wait()
