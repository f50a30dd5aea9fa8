"""Helps to launch Triton kernels: the typed compiler, cached launches, tile sizes, the device, early starts.

An early start is NVIDIA's programmatic dependent launch, from Hopper on: the programs of a kernel begin while
those of the preceding kernel are still running. Until `await_preceding_kernel`, they may read only what no
kernel writes, such as weights. Every program of every kernel must call `await_preceding_kernel`, or the
kernel before the preceding one might not have finished. `let_next_begin` lets the following kernel start
early in the same way.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import cache, partial
from itertools import count
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import AsyncCompileMode
from triton.compiler import CompiledKernel
from triton.language.extra import cuda
from triton.runtime.jit import JITFunction

from specsot_kernels import gpu_compilers
from specsot_kernels.gpu_compilers import KernelRequest

# Threads. Largest number that compile kernels at the same time. Untuned.
COMPILING_THREADS: Final = 16
# True while kernels are compiled instead of launched; see `compile_ahead`.
_only_compiles: ContextVar[bool] = ContextVar("only_compiles", default=False)


class Kernel(JITFunction[Any]):
    """A Triton kernel that is compiled and not launched within `compile_ahead`, or a function that kernels
    call.

    The key of a `Kernel` in Triton's cache is the same in all processes, so that one process finds what
    another has compiled. The key of Triton's own `JITFunction` depends on which kernel was launched first: of
    the functions that a kernel calls, only those whose own keys are computed already add their constants.

        # kernels a and b call the function c, which reads the constant WIDE
        # JITFunction: the first launched kernel's key lacks WIDE, the second kernel's key has WIDE
        # Kernel:      both keys have WIDE
    """

    @property
    def used_global_vals(self) -> dict[Any, Any]:
        """The global constants that this function and the functions that it calls read, as Triton stores
        them: {(name, id of the module's globals): (value, the module's globals)}. Triton adds them to the
        constants of each caller, and raises RuntimeError at a launch if a value has changed.
        """
        if self.hash is None:
            # Computing the key sets the constants. Meanwhile, `hash` is not None, so that a function that
            # calls itself does not compute its key again.
            _ = self.cache_key
        return self._used_global_vals

    @used_global_vals.setter
    def used_global_vals(self, found: dict[Any, Any]) -> None:
        """Store the constants. Triton sets {} when a function is decorated, and the constants when it has
        computed the function's key.

        found: the constants, in the form that the property returns.
        """
        self._used_global_vals = found

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """Return a function that launches the kernel, or only compiles it within `compile_ahead`.

        grid: number of programs in each dimension.
        """
        return partial(self.run, grid=grid, warmup=_only_compiles.get())


def _decorate(function: Callable[..., Any], **options: Any) -> Any:
    """Return a function as a kernel; in Triton's interpreter as Triton's own kind.

    function: the kernel's Python function.
    options: options of `triton.jit`.
    """
    interpreted_or_compiled = triton.jit(function, **options)
    is_compiled = isinstance(interpreted_or_compiled, JITFunction)
    return Kernel(function, **options) if is_compiled else interpreted_or_compiled


# Decorator of a Triton kernel, with a type that type checkers understand.
kernel: Callable[[Callable[..., Any]], Any] = _decorate


class CompileBatch(AsyncCompileMode):
    """Kernels that are compiled in parallel.

    If `gpu_compilers` has started processes, these compile the kernels, and each thread of the batch waits
    for one process, then reads the kernel from Triton's cache. Otherwise, and if a process fails, the threads
    compile. In both cases the threads load each kernel to the device, and make its launcher, for which Triton
    3.6 runs a C compiler: a quarter of a second for each kind of arguments.
    """

    def __init__(self) -> None:
        """Start without kernels."""
        threads = min(os.cpu_count() or 1, COMPILING_THREADS)
        super().__init__(ThreadPoolExecutor(threads), ignore_errors=True)
        # The request for the kernel that Triton submits next. None between kernels, and if there are no
        # compiler processes.
        self._request: KernelRequest | None = None

    def describe(self, *, fn: Any, compile: Mapping[str, Any], **others: object) -> None:
        """Store the request with which a process can compile the kernel that Triton submits next. Triton
        calls this as its `jit_cache_hook`, directly before `submit`. Returning None lets Triton continue.

        fn: Triton's `JitFunctionInfo`, with the names of the kernel and of its module.
        compile: what the kernel is compiled from; the value of "specialization_data" is JSON, see
            `KernelRequest`.
        others: further arguments of Triton's hook, which are ignored.
        """
        driver: Any = triton.runtime.driver.active
        target = driver.get_current_target()
        self._request = KernelRequest(
            fn.module,
            fn.name,
            (target.backend, target.arch, target.warp_size),
            compile["specialization_data"],
        )

    def submit(
        self,
        key: Any,
        compile_fn: Callable[[], CompiledKernel],
        finalize_fn: Callable[[CompiledKernel], None],
    ) -> Any:
        """Begin to compile a kernel for the current device, and return its future. Triton calls this for each
        kernel that is not compiled yet.

        key: identifies the kernel and its kind of arguments. If the batch has a kernel with the same key,
            nothing is compiled, and the future of that kernel is returned.
        compile_fn: compiles the kernel, or reads it from Triton's cache on disk.
        finalize_fn: makes the compiled kernel known for later launches.
        """
        device = torch.cuda.current_device()
        request = self._request
        self._request = None
        processes = gpu_compilers.running()

        def compile_and_load() -> CompiledKernel:
            """Compile the kernel, load it to the device, and return it. If a process has compiled the kernel,
            `compile_fn` only reads it from Triton's cache. Raises the error of a kernel that cannot be
            compiled.
            """
            if processes and request:
                processes.compile(request)
            with torch.cuda.device(device):
                compiled = compile_fn()
                # Reading this property makes the launcher and loads the kernel.
                _ = compiled.run
                return compiled

        return super().submit(key, compile_and_load, finalize_fn)


# The batch to which `compile_ahead` adds kernels on this thread. None before its first call, and after
# `await_compiled`.
_batch: ContextVar[CompileBatch | None] = ContextVar("batch", default=None)


def compile_ahead(work: Callable[[], object]) -> None:
    """Begin to compile in parallel all kernels that some work launches, and launch none of them. Call
    `await_compiled` afterwards on the same thread; several calls of `compile_ahead` before that share one
    batch.

    Otherwise, kernels are compiled one after the other, each for about a second, before their first launch.
    All other operations of the work run, on memory that no kernel has filled, so the work must not index
    anything by what a kernel writes. A kernel that cannot be compiled raises its error when it is launched. A
    launch of a kernel before `await_compiled` waits for that kernel. Nothing happens in Triton's interpreter.

    work: launches the kernels.
    """
    if triton.knobs.runtime.interpret:
        return
    batch = _batch.get()
    if batch is None:
        batch = CompileBatch()
        _batch.set(batch.__enter__())
    token = _only_compiles.set(True)
    hook = triton.knobs.runtime.jit_cache_hook
    try:
        if gpu_compilers.running():
            triton.knobs.runtime.jit_cache_hook = batch.describe
        work()
    finally:
        triton.knobs.runtime.jit_cache_hook = hook
        _only_compiles.reset(token)


def await_compiled(report: Callable[[int, int], None] | None = None) -> int:
    """Wait for all kernels that `compile_ahead` has begun to compile on this thread, and return their number;
    0 if there are none. Kernels that could not be compiled count, too. Afterwards, `gpu_compilers.stop` ends
    the compiler processes of the whole process, even if other threads still compile; these then compile
    without processes. If `compile_ahead` was not called before on this thread, nothing happens.

    report: called after each kernel, with the number of kernels that are compiled and the number of all.
        None: not called.
    """
    batch = _batch.get()
    if batch is None:
        return 0
    _batch.set(None)
    for num_done, _ in enumerate(as_completed(batch.raw_futures), 1):
        if report:
            report(num_done, len(batch.raw_futures))
    batch.__exit__(None, None, None)
    batch.executor.shutdown()
    gpu_compilers.stop()
    return len(batch.raw_futures)


# A context that changes nothing.
HERE: AbstractContextManager[None] = nullcontext()
# Compute capability of H100 and H200.
HOPPER = (9, 0)


def kernel_for_any(*numbers: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator for kernels that are compiled once for all values of the named arguments.

    Without it, Triton compiles separate forms for the value 1 and for multiples of 16.

    numbers: names of arguments that are integers.
    """
    return partial(_decorate, do_not_specialize=list(numbers))


def kernel_of_any(*arrays: str, numbers: tuple[str, ...]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator like `kernel_for_any` that also ignores the alignment of the named arrays.

    It suits kernels that read one element at a time.

    arrays: names of arguments that are arrays.
    numbers: names of arguments that are integers.
    """
    return partial(_decorate, do_not_specialize=list(numbers), do_not_specialize_on_alignment=list(arrays))


# Compiled kernels by (the kernel's Python function, *specialization); see `launch`.
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    run: Any,
    grid: tuple[int, int, int],
    specialization: tuple[Any, ...],
    arguments: tuple[Any, ...],
    addresses: tuple[int, ...] = (),
    /,
    **options: int,
) -> None:
    """Launch a kernel on the current device, and remember the compiled kernel by its specialization. If the
    kernel was launched before with the same specialization, Triton's inspection of each argument is skipped,
    which is most of the cost of a launch.

    In Triton's interpreter nothing is compiled, and nothing is remembered. Triton's launch hooks
    (`triton.knobs.runtime.launch_enter_hook`) are called only at the first launch of a specialization.

    run: the kernel, a function that `kernel` decorated.
    grid: number of programs in each dimension.
    specialization: hashable; everything that may differ between two launches and for which Triton compiles
        separate kernels: the device, the types and alignments of arrays (`array_specialization`), the values
        of constants, and the values of numbers for which the kernel's decorator does not turn off Triton's
        specialization. If something is missing here, a kernel that was compiled for other arguments is
        launched.
    arguments: the kernel's arguments in order, constants included.
    addresses: the addresses of the arrays with which `arguments` begins, as many as the caller knows; they
        spare a remembered kernel's launch the question for each address. Empty: Triton asks each array for
        its address, and the driver whether the device can read there.
    options: Triton's launch options, such as `num_warps`. They are used only at the first launch of a
        specialization, so that they must follow from the specialization.
    """
    key = (run.fn, *specialization)
    compiled = None if _only_compiles.get() else _compiled.get(key)
    if compiled is not None:
        driver: Any = triton.runtime.driver.active
        stream = driver.get_current_stream(driver.get_current_device())
        # `compiled[grid]` launches in the same way. But for each launch it also makes a dictionary for
        # profilers and calls their lists of hooks, even if these are empty. Here, the three None stand for
        # the dictionary and the two lists.
        compiled.run(
            *(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None),
            *(*addresses, *arguments[len(addresses) :]),
        )
        return
    launched = run[grid](*arguments, **options)
    # Triton's interpreter returns no compiled kernel.
    if isinstance(launched, CompiledKernel):
        _compiled[key] = launched


# The number of each part of a specialization for which `kind_of` was asked. Nothing is ever removed. Two
# threads that ask for a part at the same time may get different numbers, but no number stands for two parts.
_kinds = defaultdict[tuple[Any, ...], int](count().__next__)


def kind_of(*specialization: Any) -> int:
    """Return a number that stands for a part of a `launch` specialization: the same number for equal parts,
    and different numbers for different parts. A launch that is prepared for many steps asks for the number
    once and uses it as its specialization, because hashing the part itself in each launch would take the host
    longer.

    specialization: the part: what may differ between launches, see `launch`.
    """
    return _kinds[specialization]


def array_specialization(*arrays: Tensor) -> tuple[Any, ...]:
    """Return the part of a `launch` specialization that arrays determine: their device, then the type of each
    array and whether its address is a multiple of 16 bytes, for which Triton compiles separate kernels.

    arrays: arrays of one device, at least one.

        # an aligned int32 array, and a view of a bf16 array from its second number on, on cuda:0
        # -> (device("cuda:0"), (int32, True), (bfloat16, False))
    """
    types = [(array.dtype, array.data_ptr() % 16 == 0) for array in arrays]
    return arrays[0].device, *types


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`; Triton's tiles have such sizes.

    size: a number, at least 1.
    """
    return 1 << (size - 1).bit_length()


def on_device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Return a context that makes the tensor's device current.

    The context does nothing if that device is current already, or in Triton's interpreter, since a switch
    costs microseconds.

    tensor: a tensor on any device.
    """
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return HERE
    return torch.cuda.device(tensor.device)


def pdl_options(tensor: Tensor) -> dict[str, bool]:
    """Return the launch options, for the tensor's device, of a kernel that calls `await_preceding_kernel`.

    tensor: one of the kernel's arguments.
    """
    return {"early": True, "launch_pdl": True} if _has_pdl(tensor.device) else {"early": False}


def copies_blocks(device: torch.device) -> bool:
    """Return whether kernels on this device copy blocks of memory by tensor descriptors (TMA).

    Triton's interpreter implements descriptors too.

    device: the torch device in question.
    """
    return device.type != "cuda" or _has_pdl(device)


@cache
def _has_pdl(device: torch.device) -> bool:
    """Return whether the device is an NVIDIA GPU of Hopper or later; False for all other devices.

    device: the torch device in question.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= HOPPER


@kernel
def let_next_begin(early: tl.constexpr):
    """Let the following kernel start before this one ends.

    early: whether the device starts kernels early (see `launching`).
    """
    if early:
        cuda.gdc_launch_dependents()


@kernel
def await_preceding_kernel(early: tl.constexpr):
    """Wait until the preceding kernel has ended and its writes are visible.

    early: whether the device starts kernels early (see `launching`).
    """
    if early:
        cuda.gdc_wait()
