"""The compiled kernel of `steps`, whose machine code is kept, so that later processes load it without Numba.

Importing Numba and defining what the kernel is made of takes a second of processor time, loading its machine
code some milliseconds.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import os
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

from llvmlite import binding

from specsot_kernels.cpu.compiling import FOLDER, compilation_lock, source_digest
from specsot_kernels.cpu.layout import AMX, is_configured

# The kind of an ELF section that lists symbols.
SYMBOLS: Final = 2
# The beginnings of the names of Numba's functions that raise exceptions, count references and call Python.
# The machine code names some of them, but never calls one: an exception could only follow a division by zero,
# and the kernel never divides by zero.
RAISING: Final = ("numba_", "NRT_")
# LLVM's engines that hold loaded machine code. If one was deleted, its code would be unloaded.
_engines: list[object] = []


def _object_file() -> Path | None:
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


def outside_names(code: bytes) -> tuple[str, ...] | None:
    """Return the names of functions and variables that machine code uses but does not define; () if there are
    none. Return None for code that is no ELF object of 64 bits in little-endian order, such as that of macOS.

    code: machine code of one module, complete.
    """
    if code[:6] != b"\x7fELF\x02\x01":
        return None
    # The ELF header says where the table of sections begins, how large an entry is, and how many there are.
    (table,) = struct.unpack_from("<Q", code, 0x28)
    size, count = struct.unpack_from("<HH", code, 0x3A)
    # Of each section its kind, where it begins, its bytes, and the section that it refers to.
    sections = [struct.unpack_from("<4xI16xQQI", code, table + size * number) for number in range(count)]
    names: list[str] = []
    for kind, begin, length, link in sections:
        if kind != SYMBOLS:
            continue
        # An entry of 24 bytes has the place of its name among the strings of the linked section, and the
        # section that defines the symbol: 0 if none does.
        strings = sections[link][1]
        for symbol in range(begin, begin + length, 24):
            name, section = struct.unpack_from("<I2xH", code, symbol)
            if name and not section:
                first = strings + name
                names.append(code[first : code.index(b"\0", first)].decode())
    return tuple(names)


def _address_of(name: str) -> int | None:
    """Return the address of a function or variable of this process. None if there is none of this name.

    name: its name. Functions with which Numba raises exceptions get the address of `abort`.
    """
    if name.startswith(RAISING):
        name = "abort"
    library = ctypes.CDLL(None)
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value if hasattr(library, name) else None


def load_code(name: str, code: bytes) -> int | None:
    """Load machine code into this process, and return the address of the function; 0 if the code has no
    function of this name. The code is never unloaded. Return None, and load nothing, if the code uses a name
    that this process lacks, since LLVM would load the code all the same, and a call of the missing function
    would end the process. Return None also for code that is no ELF object (`outside_names`).

    name: name of the function.
    code: machine code that Numba made of it.
    """
    outside = outside_names(code)
    if outside is None:
        return None
    # Names that Numba has defined stay as they are, since other functions of this process may use them.
    addresses = {one: _address_of(one) for one in outside if not binding.address_of_symbol(one)}
    if None in addresses.values():
        return None
    for one, place in addresses.items():
        binding.add_symbol(one, place)
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    empty = binding.parse_assembly(f'target triple = "{binding.get_process_triple()}"')
    engine = binding.create_mcjit_compiler(empty, machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return engine.get_function_address(name)


def _load_object_file(file: Path | None) -> int | None:
    """Load the kernel that a file keeps, and return its address. Return None if there is no file, or if it is
    damaged or cannot be loaded.

    file: the file, or None.
    """
    kept = read_code(file) if file else None
    return load_code(*kept) if kept else None


@cache
def kernel_address() -> int:
    """Return the address of the compiled function `steps._run`, a C function whose only argument is an int64:
    the address of its tables. The first call of a process loads the machine code that an earlier process has
    kept, in milliseconds. If there is none, it compiles the function, in about ten seconds of processor time,
    and keeps the code; other processes that need it meanwhile wait.
    """
    file = _object_file()
    if found := _load_object_file(file):
        return found
    with compilation_lock():
        # Another process may have compiled it while this one waited.
        if found := _load_object_file(file):
            return found
        from specsot_kernels.cpu.steps import compile_run

        found, name, code = compile_run()
        if file and code:
            write_code(file, name, code)
    return found


@cache
def kernel_function() -> Callable[[int], None]:
    """Return the kernel as a function, for a call by one thread. It releases the GIL."""
    return ctypes.CFUNCTYPE(None, ctypes.c_int64)(kernel_address())
