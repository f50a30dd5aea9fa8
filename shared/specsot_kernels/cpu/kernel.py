"""The compiled kernel of `steps`, whose machine code is kept, so that later processes load it without Numba.

Importing Numba and defining what the kernel is made of takes a second of processor time, loading its machine
code some milliseconds.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from llvmlite import binding

from specsot_kernels.cpu.compiling import FOLDER, one_process_at_a_time, source_digest
from specsot_kernels.cpu.layout import AMX, is_configured

# What runs loaded machine code, which must not be deleted.
_engines: list[object] = []


def _kept_file() -> Path | None:
    """Return the file that keeps the kernel's machine code for this processor and these versions; None if
    the user has configured Numba, so that it might have to be compiled otherwise.
    """
    if is_configured():
        return None
    versions = sys.version, *map(importlib.metadata.version, ("numba", "llvmlite"))
    host = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten(), AMX
    described = repr((source_digest(), versions, host, binding.get_process_triple()))
    return FOLDER / "__pycache__" / f"kernel-{hashlib.sha256(described.encode()).hexdigest()[:16]}.o"


def read_code(file: Path) -> tuple[str, bytes] | None:
    """Return the name of the kernel's function and its machine code, as `write_code` wrote them. None if
    there is no such file, or if it is damaged.

    file: the file.
    """
    try:
        head, _, code = file.read_bytes().partition(b"\n")
        name, digest = head.decode().split()
    except (OSError, ValueError):
        return None
    return (name, code) if _digest(name, code) == digest else None


def write_code(file: Path, name: str, code: bytes) -> None:
    """Write a file completely or not at all. Nothing happens if it cannot be written.

    file: the file.
    name: name of the kernel's function.
    code: its machine code, an ELF object.
    """
    written = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        written.write_bytes(f"{name} {_digest(name, code)}\n".encode() + code)
        written.replace(file)


def _digest(name: str, code: bytes) -> str:
    """Return a digest of the function's name and its machine code, in hexadecimal.

    name: name of the function.
    code: its machine code.
    """
    return hashlib.sha256(name.encode() + b"\n" + code).hexdigest()


def load_code(name: str, code: bytes) -> int:
    """Load machine code into this process, and return the address of the function. It is never unloaded.

    name: name of the function.
    code: machine code that Numba made of it, an ELF object.
    """
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    # Numba's own function that frees memory. The code names it, and never calls it: it allocates nothing.
    free = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p).value
    binding.add_symbol("NRT_Free", free)
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    empty = binding.parse_assembly(f'target triple = "{binding.get_process_triple()}"')
    engine = binding.create_mcjit_compiler(empty, machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return engine.get_function_address(name)


@cache
def address() -> int:
    """Return the address of `steps._run`, a C function of one int64: the address of its tables. At the first
    call it is compiled, if no process has kept it; processes that need it meanwhile wait.
    """
    file = _kept_file()
    if file and (kept := read_code(file)):
        return load_code(*kept)
    with one_process_at_a_time():
        # Another process may have compiled it while this one waited.
        if file and (kept := read_code(file)):
            return load_code(*kept)
        from specsot_kernels.cpu.steps import compile_run

        found, name, code = compile_run()
        if file and code:
            write_code(file, name, code)
    return found


@cache
def function() -> Callable[[int], None]:
    """Return the kernel as a function, for a call by one thread. It releases the GIL."""
    return ctypes.CFUNCTYPE(None, ctypes.c_int64)(address())
