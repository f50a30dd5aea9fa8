"""The machine code of the kernel for CPUs is kept, and later processes load it without Numba."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")

ASKS = (
    "import sys; from specsot_kernels.cpu import kernel;"
    " kernel.kernel_address(); sys.exit('numba' in sys.modules)"
)


def test_a_later_process_runs_the_kernel_without_numba() -> None:
    from specsot_kernels.cpu import kernel

    assert kernel.kernel_address()
    file = kernel._object_file()
    assert file is not None
    assert kernel.read_code(file) is not None, "this process has compiled or loaded it"
    assert subprocess.run([sys.executable, "-c", ASKS]).returncode == 0


def test_machine_code_that_is_damaged_or_missing_is_not_loaded(tmp_path: Path) -> None:
    from specsot_kernels.cpu.kernel import read_code, write_code

    file = tmp_path / "kernel.o"
    assert read_code(file) is None
    write_code(file, "run", b"\x7fELF\n code")
    assert read_code(file) == ("run", b"\x7fELF\n code")
    assert [*tmp_path.iterdir()] == [file]
    whole = file.read_bytes()
    for part in (b"", whole[:-1], whole[1:], b"\xff\n", whole[:4]):
        file.write_bytes(part)
        assert read_code(file) is None
    write_code(tmp_path / "missing" / "kernel.o", "run", b"")


def test_machine_code_that_needs_what_is_missing_is_not_loaded() -> None:
    """LLVM loads it all the same, and calls address 0."""
    from specsot_kernels.cpu import kernel

    assert kernel.kernel_address()
    file = kernel._object_file()
    assert file is not None
    kept = kernel.read_code(file)
    assert kept is not None
    name, code = kept
    assert "logf" in (kernel.outside_names(code) or ())
    assert kernel.load_code(name, code)
    assert kernel.load_code(name, code.replace(b"\0logf\0", b"\0logx\0")) is None
    assert kernel.load_code(name, b"\xcf\xfa\xed\xfe" + code[4:]) is None


def test_another_processor_or_source_has_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from specsot_kernels.cpu import kernel

    file = kernel._object_file()
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "source_digest", lambda: "another")
        assert kernel._object_file() != file
    with monkeypatch.context() as patch:
        patch.setattr(kernel.binding, "get_host_cpu_name", lambda: "another")
        assert kernel._object_file() != file
    monkeypatch.setenv("NUMBA_CPU_NAME", "haswell")
    assert kernel._object_file() is None


def test_a_part_is_optimised_only_within_the_function_that_python_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Numba optimises each other function with all that it calls, so that the end of a chain comes often."""
    import numba
    from numba.core.codegen import JITCodeLibrary

    from specsot_kernels.cpu.vectors import inlined_part, part

    optimised = list[str]()
    optimise = JITCodeLibrary._optimize_final_module

    def record(library: JITCodeLibrary) -> None:
        optimised.append(library.name)
        optimise(library)

    @inlined_part
    def one(x):
        return x + 1

    @part
    def two(x):
        return one(x) + one(x)

    @part
    def three(x):
        return two(x) // one(x)

    def whole(x):
        return three(x) + two(x)

    kind = numba.int64(numba.int64)
    assert numba.cfunc(kind)(lambda x: x // 2).ctypes(5) == 2, "Numba is ready"
    monkeypatch.setattr(JITCodeLibrary, "_optimize_final_module", record)
    assert numba.cfunc(kind)(whole).ctypes(4) == 12
    assert optimised == [whole.__qualname__]
