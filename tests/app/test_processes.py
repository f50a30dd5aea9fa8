"""`specsot` with real processes: an answer, and one line when a part cannot be used."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

QUESTION = "Give an overview of Stages of Sleep."


def specsot(*words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specsot_app", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_three_kinds_of_processes_answer() -> None:
    done = specsot(
        "infer", "--fleet", "processes", "--json", "--mode", "sot", "--max-new-tokens", "40", QUESTION
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["event"] == "finished"
    assert 0 < last["statistics"]["merged_tokens"] <= 40


def test_a_broken_head_is_one_line_and_nothing_is_left_running(tmp_path: Path, demo_model: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(demo_model / "eagle3", head)
    (head / "model.safetensors").write_bytes(b"not at all")
    done = specsot("infer", "--fleet", "processes", "--draft-model", str(head), QUESTION)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"specsot: drafter: {head / 'model.safetensors'}")
    assert done.stderr.count("\n") == 1
    left = subprocess.run(["pgrep", "-f", str(head)], capture_output=True, text=True, check=False)
    assert left.stdout == ""


def test_a_fleet_serves_until_it_is_told_to_stop() -> None:
    words = ["serve", "--port", "0", "--stages", "1", "--drafter", "none"]
    fleet = subprocess.Popen(
        [sys.executable, "-m", "specsot_app", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert fleet.stdout is not None
    lines = [fleet.stdout.readline() for _ in range(3)]
    master = lines[0].split()[1]
    assert [line.split()[0] for line in lines] == ["master", "worker-0", "ready:"]
    assert f"--master {master} " in lines[2]
    assert specsot("health", master, "--service", "specsot.v1.Master").returncode == 0
    assert "layers 0:8" in specsot("info", "--master", master).stdout
    asked = specsot("infer", "--master", master, "--mode", "direct", "--max-new-tokens", "5", QUESTION)
    assert asked.returncode == 0, asked.stderr
    taken = specsot("serve", "--port", master.rpartition(":")[2])
    assert taken.stderr == f"specsot: cannot listen at {master}: address already in use\n"
    fleet.send_signal(signal.SIGTERM)
    assert fleet.wait(60) == 0
    assert specsot("health", master).returncode == 1
