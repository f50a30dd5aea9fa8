"""What computes here, how fast it copies, and that processes of one machine measure in turn."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from specsot_model import device_speed
from specsot_model.device_speed import alone_on, copy_speed, device_name


def test_a_processor_is_named_with_the_cores_that_are_ours(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nmodel name\t: AMD EPYC 7B13\nflags\t: fpu\n\nmodel name\t: AMD EPYC 7B13\n"
    )
    cores = len(os.sched_getaffinity(0))
    assert device_name("cpu", cpuinfo) == f"AMD EPYC 7B13, {cores} core{'s' * (cores > 1)}"
    assert device_name("cpu", tmp_path / "none").startswith("CPU, ")


def test_a_copy_has_a_speed_that_is_measured_once() -> None:
    assert copy_speed("cpu") > 1e6
    assert copy_speed("cpu") == copy_speed("cpu")


def test_measurements_take_turns(tmp_path: Path) -> None:
    order: list[str] = []
    with alone_on("cpu", tmp_path):
        other = threading.Thread(target=lambda: measure_there(tmp_path, order))
        other.start()
        order.append("first")
    other.join()
    assert order == ["first", "second"]


def measure_there(folder: Path, order: list[str]) -> None:
    with alone_on("cpu", folder):
        order.append("second")


def test_a_measurement_does_not_wait_for_a_process_that_keeps_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_speed, "WAIT_SECONDS", 0.0)
    with (tmp_path / "specsot-measuring-cpu").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with alone_on("cpu", tmp_path):
            pass
    with alone_on("cpu", tmp_path / "missing"):
        pass
