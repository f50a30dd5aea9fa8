"""A process that imports torch before it is known what it will run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specsot_app.commands.serve import ServeOptions, prepare_member
from specsot_app.core.device_choice import FoundGpu
from specsot_app.fleet import devices
from specsot_app.fleet.options import FleetOptions
from specsot_app.fleet.prepared import PreparedProcess
from specsot_app.fleet.processes import start
from specsot_app.fleet.service_specs import Service, environment_of_members
from tests.app.test_children import Ear, is_running, little

pytestmark = [pytest.mark.processes, pytest.mark.torch]

ENVIRONMENT = (("OMP_NUM_THREADS", "1"), ("COLOUR", "green"))


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let processes that are started fail to import torch, since importing it takes two seconds."""
    (tmp_path / "torch.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), *sys.path)))


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[PreparedProcess]:
    monkeypatch.chdir(request.config.rootpath)
    process = PreparedProcess(ENVIRONMENT)
    yield process
    process.close()
    assert process.loop.is_closed()


def pid_of(prepared: PreparedProcess) -> int:
    assert prepared._process is not None
    return prepared._process.pid


def fitting(service: Service) -> Service:
    return replace(service, environment=ENVIRONMENT)


def test_it_runs_the_first_service_with_its_environment(prepared: PreparedProcess) -> None:
    reporting = replace(little("report"), arguments=("report", "--a", "\udc80 ü"))
    pid = pid_of(prepared)

    async def run() -> None:
        ear = Ear()
        other = await start(replace(little("fall"), environment=()), Ear(), prepared)
        child = await start(fitting(reporting), ear, prepared)
        second = await start(fitting(little("fall")), Ear(), prepared)
        assert child.pid == pid
        assert pid not in (other.pid, second.pid)
        await asyncio.gather(*(one.wait_ended() for one in (other, child, second)))
        assert child.status == 0
        _, words, started = (line for _, line in ear.lines)
        assert words == r"['--a', '\udc80 ü'] green [True, True]"
        assert '"awaited_the_command_line_s"' in started
        assert '"imported_s"' in started

    prepared.loop.run_until_complete(run())


@pytest.mark.usefixtures("without_torch")
def test_it_ends_like_any_other_child(prepared: PreparedProcess) -> None:
    async def run() -> None:
        ear = Ear()
        child = await start(fitting(little("wait")), ear, prepared)
        await ear.first.wait()
        await child.end()
        assert ear.lines == [("little-0", "here I am"), ("little-0", "leaving")]
        assert not is_running(child.pid)

    prepared.loop.run_until_complete(run())


@pytest.mark.usefixtures("without_torch")
def test_it_is_ended_if_nothing_was_given_to_it(prepared: PreparedProcess) -> None:
    pid = pid_of(prepared)
    assert is_running(pid)
    prepared.close()
    assert not is_running(pid)


@pytest.mark.usefixtures("without_torch")
def test_if_it_has_died_the_service_has(prepared: PreparedProcess) -> None:
    os.kill(pid_of(prepared), signal.SIGKILL)

    async def run() -> str:
        child = await start(fitting(little("wait")), Ear(), prepared)
        return str(await child.wait_ended())

    assert prepared.loop.run_until_complete(run()) == "little-0: ended by signal 9"


@pytest.mark.usefixtures("without_torch")
def test_without_a_parent_that_writes_it_ends() -> None:
    command = [sys.executable, "-m", "specsot_app.fleet.die_with_parent", str(os.getpid())]
    ended = subprocess.run(command, input=b"", capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


@pytest.mark.parametrize(
    ("fleet", "share", "gpus", "prepares"),
    [
        ({}, False, 1, True),
        ({"device": "cuda:1"}, False, 2, True),
        ({}, False, 0, False),
        ({"device": "cpu"}, False, 1, False),
        ({"stages": 2}, False, 2, False),
        ({"layers": "0:3,3:"}, False, 2, False),
        ({"devices": "127.0.0.1#0"}, False, 1, False),
        ({}, True, 1, False),
    ],
)
def test_serve_prepares_the_only_member_if_there_is_a_gpu(
    fleet: dict[str, Any], share: bool, gpus: int, prepares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ServeOptions(fleet=FleetOptions(**{"device": "auto", **fleet}), share=share)
    found = [(f"GPU-{number}", FoundGpu(number, "NVIDIA H200")) for number in range(gpus)]
    monkeypatch.setattr(devices, "_installed_gpus", lambda: found)
    monkeypatch.setattr("specsot_app.fleet.prepared.PreparedProcess", lambda environment: environment)
    assert prepare_member(options) == (environment_of_members(1) if prepares else None)


# Stands for NVIDIA's library: one GPU, of which torch may know nothing.
PYNVML = """
from types import SimpleNamespace
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(number): return number
def nvmlDeviceGetUUID(handle): return "GPU-0"
def nvmlDeviceGetName(handle): return "NVIDIA H200"
def nvmlDeviceGetMemoryInfo(handle): return SimpleNamespace(free=1 << 30, total=1 << 37, used=0)
"""


@pytest.mark.full  # the parts are tested above
def test_a_fleet_is_served_by_a_prepared_process(tmp_path: Path, demo_model: Path) -> None:
    """On a machine whose GPU is too small, so that the CPU serves."""
    (tmp_path / "pynvml.py").write_text(PYNVML)
    paths = os.pathsep.join((str(tmp_path), *sys.path))
    words = ("serve", "--port", "0", "--http-port", "0", "--model", str(demo_model / "base"))
    fleet = subprocess.Popen(
        (sys.executable, "-m", "specsot_app", *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert fleet.stdout is not None
    lines = []
    for line in fleet.stdout:
        lines.append(line)
        if line.startswith("ready:"):
            break
    (started,) = (line for line in lines if "awaited_the_command_line_s=" in line)
    assert "worker-0" in started
    fleet.terminate()
    fleet.stdout.read()
    assert fleet.wait() == 0
