"""The three services as real processes: start in any order, leave on SIGTERM, fail in one line.

Knows nothing of answers; a ring that becomes complete is enough.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Timer

import pytest

from tests import forked
from tests.conftest import some
from tests.contracts.grpcurl import parse, replay

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


class Service:
    """A process of which every line is read."""

    def __init__(self, module: str, *arguments: str) -> None:
        self.process, self._lines = forked.started(module, *arguments)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        self._lines.close()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Read on until a line matches; a process that never writes one is killed, its lines are shown."""
        seen: list[str] = []
        patience = Timer(60, self.process.kill)
        patience.start()
        try:
            for line in self._lines:
                seen.append(line)
                if match := re.search(pattern, line):
                    return match
        finally:
            patience.cancel()
        raise AssertionError(f"no line matches {pattern}: {seen}")

    def ends(self) -> tuple[int | None, list[str]]:
        """Exit status and the lines not read yet."""
        rest = self._lines.read()
        self.process.join(60)
        return self.process.exitcode, rest.splitlines()

    def told_to_leave(self, number: int = signal.SIGTERM) -> tuple[int | None, list[str]]:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        return self.ends()


Start = Callable[..., Service]
QUESTION = "Give an overview of Stages of Sleep."


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:
        yield lambda *command: stack.enter_context(Service(*command))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_they_find_each_other_in_any_order_and_leave_in_order(
    start: Start, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker has no files: it takes them from the other one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    base, master = str(demo_model / "base"), f"127.0.0.1:{free_port()}"
    member = ("--model", base, "--master", master, "--kv-memory", "64M")
    drafter = start("specsot_drafter", *member, "--draft-model", str(demo_model / "eagle3"))
    first = start("specsot_worker", *member, "--layers", "4:8")
    first.wait_for(f"waiting for the master .*no process answers at {master}")
    leader = start("specsot_master", "--model", base, "--listen", master)
    leader.wait_for("missing='?a worker for layers 0:4")
    second = start("specsot_worker", *member[2:])
    address = drafter.wait_for(r"listening +at=(\S+)")[1]
    workers_address = second.wait_for(r"listening +at=(\S+)")[1]
    second.wait_for("fetched from members .*what='config and tokenizer'")
    second.wait_for("fetched from members .*what='layers 0:4'")
    leader.wait_for(rf"ring complete.*drafter={re.escape(address)}")
    for service, at in (("specsot.v1.Worker", workers_address), ("specsot.v1.Drafter", address)):
        assert {service, "specsot.v1.Ring"} <= set(replay(parse(f"grpcurl -plaintext {at} list"), at))
        assert replay(parse(f"grpcurl -plaintext {at} list {service}"), at) == [
            f"{service}.Carry",
            f"{service}.Meet",
        ]
        health = start("specsot_app", "health", at, "--service", service).ends()
        assert health[0] == 0, health

    assert second.told_to_leave()[0] == 0
    leader.wait_for("member lost.*shutting down")
    status, lines = leader.told_to_leave()
    assert (status, [line for line in lines if "Traceback" in line]) == (0, [])
    first.wait_for("the master leaves")
    assert first.told_to_leave(signal.SIGINT)[0] == 0
    assert drafter.told_to_leave()[0] == 0


def test_a_second_worker_of_one_name_is_reported_and_joins_once_the_name_is_free(
    start: Start, demo_model: Path
) -> None:
    base, master = str(demo_model / "base"), f"127.0.0.1:{free_port()}"
    worker = ("specsot_worker", "--model", base, "--master", master, "--kv-memory", "64M", "--name", "w")
    leader = start("specsot_master", "--model", base, "--listen", master, "--workers", "2")
    first = start(*worker)
    first.wait_for("joined")
    second = start(*worker)
    reason = second.wait_for("not let in .*(a member named w has joined already, at [^ ']+)")[1]
    leader.wait_for(f"member not let in .*{reason}")
    told = start("specsot_app", "info", "--master", master).ends()
    assert told[0] == 1
    assert [line for line in told[1] if re.search(f"waiting +worker w at .* is not let in: {reason}", line)]
    assert first.told_to_leave()[0] == 0
    second.wait_for("joined")


@pytest.mark.full
@pytest.mark.parametrize("held", [("--dtype", "fp32"), ("--quantization", "int8")])
def test_a_faster_worker_without_files_takes_over_amid_an_answer(
    held: tuple[str, str], start: Start, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is interrupted only once all layers are loaded, and goes on with the same text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    base, master = str(demo_model / "base"), f"127.0.0.1:{free_port()}"
    member = ("--master", master, "--kv-memory", "64M", *held)

    asked = ("infer", "--master", master, "--mode", "sot", "--max-new-tokens", "600", "--json", QUESTION)
    leader = start("specsot_master", "--model", base, "--listen", master, "--drafter", "none")
    start("tests.process.slow_worker", "--model", base, "--name", "slow", *member)
    leader.wait_for("ring complete.*slow=0:8")
    client = start("specsot_app", *asked)
    client.wait_for("started")
    quick = start("specsot_worker", "--name", "quick", *member)
    quick.wait_for("fetched from members .*what='layers 0:8'")
    quick.wait_for("loaded ahead +layers=0:8")
    quick.wait_for("fits .*weights='0 B' what='layers 0:8'")
    leader.wait_for("ring complete.*quick=0:8")
    leader.wait_for("finished ")
    interrupted, undisturbed = (
        json.loads(one.ends()[1][-1]) for one in (client, start("specsot_app", *asked))
    )
    assert interrupted["text"] == undisturbed["text"]


@pytest.mark.parametrize(
    ("module", "more", "line"),
    some(
        [
            ("specsot_master", [], r"specsot-master: .*nowhere.*"),
            ("specsot_worker", [], r"specsot-worker: .*nowhere.*"),
            ("specsot_drafter", ["--draft-model", "nowhere"], r"specsot-drafter: .*nowhere.*"),
        ],
        0,
        1,
    ),
)
def test_a_model_that_is_not_there(start: Start, module: str, more: list[str], line: str) -> None:
    status, lines = start(module, "--model", "nowhere", *more, "--listen", f"127.0.0.1:{free_port()}").ends()
    assert status == 2
    assert re.fullmatch(line, lines[-1])
    assert not any("Traceback" in said for said in lines)


def test_a_port_in_use(start: Start, demo_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        status, lines = start(
            "specsot_worker", "--model", str(demo_model / "base"), "--listen", address
        ).ends()
    assert (status, lines) == (1, [f"specsot-worker: cannot listen at {address}: address already in use"])


def test_a_probe_needs_neither_torch_nor_many_modules() -> None:
    """It is to be done in a fraction of a second; modules are counted, as a busy machine changes times."""
    code = (
        "import sys; from specsot.transport.grpc_channel import probe; "
        "answer = probe('127.0.0.1:1', timeout=2); "
        "heavy = [m for m in ('torch', 'transformers', 'numpy') if m in sys.modules]; "
        "print(answer, heavy, len(sys.modules) < 300)"  # it was 242
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert said.stdout.strip() == "no process answers [] True"
