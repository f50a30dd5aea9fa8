"""The kernel for CPUs is compiled once, however many processes need it at the same time."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from specsot_kernels.cpu import compiling
from specsot_kernels.cpu.compiling import compilation_lock, is_compiling, start_compiling


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that was never compiled, of one source file."""
    (tmp_path / "kernel.py").write_text("one = 1")
    monkeypatch.setattr(compiling, "FOLDER", tmp_path)
    return tmp_path


def test_others_wait_for_the_first_to_compile_and_then_for_nobody() -> None:
    with compilation_lock():
        (path,) = compiling.FOLDER.glob("__pycache__/*.lock")
        with path.open("ab") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    compiled = list[bool]()
    with compilation_lock(), compilation_lock():
        compiled.append(True)
    assert compiled


def test_it_is_under_way_until_it_has_ended(folder: Path) -> None:
    """So that layers are loaded meanwhile, and nothing else is delayed."""
    assert not is_compiling()
    with compilation_lock():
        assert is_compiling()
    assert not is_compiling()
    (folder / "kernel.py").write_text("one = 2")
    with pytest.raises(RuntimeError), compilation_lock():
        raise RuntimeError
    assert not is_compiling()


def test_what_failed_is_compiled_by_the_next() -> None:
    with pytest.raises(RuntimeError), compilation_lock():
        raise RuntimeError
    with compilation_lock():
        assert next(compiling.FOLDER.glob("__pycache__/*.lock")).stat().st_size == 0


def test_another_source_is_compiled_anew(folder: Path) -> None:
    with compilation_lock():
        pass
    (folder / "kernel.py").write_text("one = 2")
    with compilation_lock():
        pass
    assert len(list(folder.glob("__pycache__/*.lock"))) == 2


def test_a_folder_that_cannot_be_written_to_is_no_error(folder: Path) -> None:
    (folder / "__pycache__").write_text("a file, and no folder")
    with compilation_lock():
        start_compiling()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The commands of the processes that are started from now on; none of them runs."""
    commands = list[object]()
    monkeypatch.setattr(compiling.subprocess, "Popen", lambda command, **_: commands.append(command))
    monkeypatch.setattr(compiling, "find_spec", lambda name: True)
    return commands


def test_a_process_is_started_only_if_nothing_was_compiled(
    monkeypatch: pytest.MonkeyPatch, started: list[object]
) -> None:
    monkeypatch.setattr(compiling.platform, "machine", lambda: "x86_64")
    start_compiling()
    with compilation_lock():
        pass
    start_compiling()
    assert len(started) == 1


def test_other_processors_start_no_process(monkeypatch: pytest.MonkeyPatch, started: list[object]) -> None:
    monkeypatch.setattr(compiling.platform, "machine", lambda: "arm64")
    start_compiling()
    assert not started
