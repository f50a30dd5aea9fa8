"""The HTTP endpoint of a real master process: opened by a flag, closed by SIGTERM, refused in one line."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.process.test_services import Service, Start

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:
        yield lambda *command: stack.enter_context(Service(*command))


def test_a_master_alone_answers_and_leaves(start: Start, demo_model: Path) -> None:
    base = str(demo_model / "base")
    master = start("specsot_master", "--model", base, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
    url = master.wait_for(r"listening +at=(http://\S+)")[1]
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "waiting")
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        refused = client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 503
        assert "waiting for" in refused.json()["error"]["message"]
        assert client.get("/").headers["content-type"] == "text/html; charset=utf-8"
        status, lines = master.told_to_leave()
    assert (status, [line for line in lines if "Traceback" in line]) == (0, [])


def test_its_port_is_taken(start: Start, demo_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        model = str(demo_model / "base")
        master = start("specsot_master", "--model", model, "--listen", "127.0.0.1:0", "--http", address)
        status, lines = master.ends()
    assert (status, lines[-1]) == (1, f"specsot-master: cannot listen at {address}: address already in use")


def test_an_address_that_is_none(start: Start, demo_model: Path) -> None:
    model = str(demo_model / "base")
    master = start("specsot_master", "--model", model, "--listen", "127.0.0.1:0", "--http", "nowhere")
    assert master.ends()[1][-1] == "specsot-master: nowhere is not an address; write host:port"


def test_api_processes_answer_are_replaced_and_leave(start: Start, demo_model: Path) -> None:
    base = str(demo_model / "base")
    options = ("--model", base, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--api-processes", "1")
    master = start("specsot_master", *options)
    url = master.wait_for(r"listening +at=(http://\S+)")[1]
    first = children(master.process.pid)
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        refused = client.post("/v1/chat/completions", json=body)
        assert (refused.status_code, "waiting for" in refused.json()["error"]["message"]) == (503, True)
    os.kill(first[0], signal.SIGKILL)
    master.wait_for("API process ended +process=0 .*status=-9")
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        assert client.get("/health").json()["status"] == "waiting"
        second = children(master.process.pid)
        status, lines = master.told_to_leave()
    assert (status, [line for line in lines if "Traceback" in line]) == (0, [])
    assert len(second) == 1
    assert second != first
    assert not Path(f"/proc/{second[0]}").exists()


def children(pid: int | None) -> list[int]:
    """The processes that a process has started and that run."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
