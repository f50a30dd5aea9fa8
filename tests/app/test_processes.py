"""`specsot` with real processes: an answer, and one line when a part cannot be used."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest

from specsot.events import Finished
from specsot.params import Ask, Limits
from specsot_app.api import fleet_of, translate
from specsot_app.cli import main
from specsot_app.fleet.opening import open_fleet
from specsot_app.fleet.options import ClientOptions, FleetOptions, models_of
from specsot_app.fleet.processes import (
    ChildProcess,
    end_all,
    free_port,
    ignore_missing,
    ignore_output,
    ready_client,
    start,
    unless_one_ends,
)
from specsot_app.fleet.service_specs import UNCONFIGURED, processes_of, services_of
from tests.conftest import some
from tests.contracts.grpcurl import parse, replay
from tests.forked import started

pytestmark = pytest.mark.processes

QUESTION = "Give an overview of Stages of Sleep."


def specsot(*words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specsot_app", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.full  # tests/laws/test_processes.py says more of what is written
def test_three_kinds_of_processes_answer(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "infer", "--fleet", "processes", "--layers", "0:3,3:8", "--json", "--mode", "sot",
        "--max-new-tokens", "128", "--temperature", "0.8", "--seed", "3", "--repetition-penalty", "1.2",
        "--logit-bias", "5=-3", "--logprobs", "2", QUESTION
    )  # fmt: skip
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    *before, last = map(json.loads, out.splitlines())
    assert last["event"] == "finished"
    assert 0 < last["statistics"]["completion_tokens"] <= 128
    told = [one for event in before if event["event"] == "merged_text" for one in event.get("logprobs", [])]
    assert [one["chosen"]["token"] for one in told] == last["tokens"]
    assert all(len(one["top"]) == 2 and one["top"][0]["logprob"] <= 0 for one in told)
    assert all(bytes(one["chosen"]["raw"]) for one in told)


def test_stages_run_the_layers_they_are_given(demo_model: Path, tmp_path: Path) -> None:
    wanted = FleetOptions(kind="processes", model=str(demo_model / "base"), layers="0:3,3:")
    _, first, second = services_of(wanted, models_of(wanted), 1, tmp_path)
    for service, layers in ((first, "0:3"), (second, "3:8")):
        assert service.arguments[service.arguments.index("--layers") + 1] == layers


@pytest.mark.torch
async def test_stages_of_this_process_run_the_layers_they_are_given() -> None:
    fleet = await open_fleet(fleet_of(translate({"layer_splits": "1,6", "world_size": 3})))
    try:
        workers = [one for one in (await fleet.info()).members if one.kind == "worker"]
        assert sorted(str(one.layers) for one in workers) == ["0:1", "1:6", "6:8"]
    finally:
        await fleet.close()


def test_a_broken_head_is_one_line_and_nothing_is_left_running(
    tmp_path: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = tmp_path / "head"
    shutil.copytree(demo_model / "eagle3", head)
    (head / "model.safetensors").write_bytes(b"not at all")
    before = set(active_children())
    words = ["infer", "--fleet", "processes", "--stages", "1", "--draft-model", str(head), QUESTION]
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"specsot: {head / 'model.safetensors'}: "), "it is read before anything starts"
    assert err.count("\n") == 1
    left = subprocess.run(["pgrep", "-f", str(head)], capture_output=True, text=True, check=False)
    assert left.stdout == ""
    assert set(active_children()) <= before, "those that tests fork have no command line of their own"


SMALL = ("serve", "--stages", "1", "--drafter", "none")


def test_a_fleet_serves_until_it_is_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a journal, which no second one gets."""
    words = [*SMALL, "--port", "0", "--journal", str(tmp_path)]
    fleet, output = started("specsot_app", *words)
    heads = ("ready:", "page", "API", "curl", "terminal", "grpcurl")
    lines = [next(line for line in output if line.split()[:1] == [head]) for head in heads]
    master = shlex.split(lines[4])[4]
    header, said, url = (word for word in shlex.split(lines[3])[2:] if word not in ("-H", "-d"))
    body = json.dumps({**json.loads(said), "max_tokens": 5}).encode()
    asked = urllib.request.Request(url, body, dict([header.split(": ")]))
    with urllib.request.urlopen(asked) as answer:
        assert json.load(answer)["choices"][0]["message"]["content"]
    assert main([*shlex.split(lines[4])[2:], "--mode", "direct", "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out
    call = parse(lines[5].split(maxsplit=1)[1])
    few = json.dumps({**json.loads(call.data), "mode": "MODE_DIRECT", "limits": {"max_new_tokens": 5}})
    assert replay(replace(call, data=few), call.address)[-1]["finished"]["text"]
    assert main(["health", master, "--service", "specsot.v1.Master"]) == 0
    with urllib.request.urlopen(lines[1].split()[-1] + "health") as answer:
        assert json.load(answer)["status"] == "healthy"
    assert main(["info", "--master", master]) == 0
    assert "layers 0:8" in capsys.readouterr().out
    assert main(["infer", "--master", master, "--mode", "direct", "--max-new-tokens", "5", QUESTION]) == 0
    capsys.readouterr()
    assert main([*SMALL, "--port", master.rpartition(":")[2]]) == 1
    assert capsys.readouterr().err == f"specsot: cannot listen at {master}: address already in use\n"
    assert main(words) == 2
    refusal = f"no journal in {tmp_path}: another master has it open, and only one may"
    assert capsys.readouterr().err.splitlines()[-1] == f"specsot: master: {refusal}"
    fleet.terminate()
    with output:
        output.read()
    fleet.join()
    assert fleet.exitcode == 0
    assert main(["health", master]) == 1


@pytest.mark.full
def test_running_requests_end_before_a_fleet_that_is_being_stopped(tmp_path: Path) -> None:
    """The master goes first: its members stay until the answer is written, and nothing is formed anew.

    The worker stands still until the fleet is leaving, so that the answer cannot be written before.
    """
    said = tmp_path / "said"
    serve = [sys.executable, "-m", "specsot_app", *SMALL, "--port", "0", "--grace", "60"]
    patient = {**os.environ, "SPECSOT_SILENCE": "100"}
    with (
        said.open("w") as log,
        subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=log, text=True, env=patient) as fleet,
    ):
        assert fleet.stdout is not None
        lines = [fleet.stdout.readline() for _ in range(6)]
        master = shlex.split(lines[4])[4]
        asking = ["infer", "--master", master, "--json", "--mode", "sot", "--max-new-tokens", "600", QUESTION]
        undisturbed = json.loads(specsot(*asking).stdout.splitlines()[-1])
        found = subprocess.run(
            ["pgrep", "-P", str(fleet.pid), "-f", "specsot_worker"], capture_output=True, check=True
        )
        worker = int(found.stdout)
        os.kill(worker, signal.SIGSTOP)
        command = [sys.executable, "-m", "specsot_app", *asking]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert json.loads(client.stdout.readline())["event"] == "started"
            fleet.send_signal(signal.SIGTERM)
            with said.open() as log:
                while "leaving" not in log.readline():
                    time.sleep(0.01)
            fleet.send_signal(signal.SIGTERM)  # as `timeout` does
            os.kill(worker, signal.SIGCONT)
            *_, last = client.stdout
    assert (client.returncode, fleet.returncode) == (0, 0)
    assert json.loads(last)["text"] == undisturbed["text"]
    told = said.read_text().splitlines()
    after = told[next(number for number, line in enumerate(told) if "leaving" in line) :]
    assert any("finished" in line for line in after), "it was written before the fleet was told to stop"
    assert [line.split()[0] for line in after[:2]] == ["master", "master"]
    noise = ("memory checked", "ring complete", "lost", "epoch", "waiting for the ring", "warning", "error")
    assert [line for line in after if any(word in line for word in noise)] == []


@pytest.mark.torch
@pytest.mark.parametrize("stages", some([1, 2], 1))
async def test_a_drafter_may_be_a_part_of_its_workers_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    """All are in the ring, and what is written is the same."""
    wanted = FleetOptions(kind="processes", stages=stages, tree="fixed")
    with monkeypatch.context() as nothing_said:
        nothing_said.delenv("OMP_NUM_THREADS", raising=False)
        services = services_of(wanted, models_of(wanted), free_port(), tmp_path)
    services = [replace(one, environment=UNCONFIGURED) for one in services]  # threads as the tests have them
    assert [one.host_service for one in services] == [None, *[None] * stages, f"worker-{stages - 1}"]
    children: list[ChildProcess] = []
    asks = [
        Ask(QUESTION, mode="direct", drafter=drafter, limits=Limits(max_new_tokens=40))
        for drafter in ("none", "eagle")
    ]
    try:
        for service in processes_of(services):
            children.append(await start(service, ignore_output))
        assert len(children) == 1 + stages
        whole = ready_client(services, ClientOptions(), None, ignore_missing)
        client = await unless_one_ends(children, whole)
        plain, drafted = [[one.event async for one in client.generate(ask)][-1] for ask in asks]
        assert {one.kind for one in (await client.info()).members} == {"worker", "drafter"}
        await client.close()
    finally:
        await end_all(children)
    assert [one.status for one in children] == [0] * (1 + stages)
    assert isinstance(plain, Finished)
    assert isinstance(drafted, Finished)
    assert plain.tokens == drafted.tokens
    assert drafted.statistics.mean_accepted > 1.2


def test_a_drafter_of_the_only_worker_or_of_workers_in_turn_runs_within_the_worker_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def within(**given: Any) -> list[str | None]:
        wanted = FleetOptions(kind="processes", **given)
        return [one.host_service for one in services_of(wanted, models_of(wanted), 1, tmp_path)]

    assert within(stages=1, device="cuda") == [None, None, "worker-0"]
    assert within(stages=2, device="cuda") == [None] * 4
    assert within(device="cpu") == [None, None, "worker-0"]
    assert within(stages=2, device="cpu") == [None, None, None, "worker-1"]
