"""The HTTP door of a real master process: opened by a flag, closed by SIGTERM, refused in one line."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2 as httpx
import openai
import pytest

from tests.process.test_services import Service, Start

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

QUESTION = "Give an overview of Stages of Sleep."


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


@pytest.mark.full
@pytest.mark.torch
async def test_a_whole_fleet_by_openais_client(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers; then the master is told to leave in the middle of a stream, which ends with an error."""
    pytest.importorskip("torch")
    from specsot_app.fleet.options import FleetOptions, Models
    from specsot_app.fleet.processes import ProcessFleet, free_port

    monkeypatch.setenv("SPECSOT_GRACE", "0.1")
    models, port = Models(demo_model / "base", demo_model / "eagle3"), free_port()
    wanted = FleetOptions(kind="processes", stages=1, dtype="fp32")
    fleet = await ProcessFleet.start(wanted, models, http_port=port)
    try:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        asking = client.chat.completions.create
        turns = [{"role": "user", "content": QUESTION}]
        planned = {"specsot": {"mode": "sot", "branches": True}}
        whole = await asking(model="demo", messages=turns, max_tokens=160, extra_body=planned)
        again = await asking(model="demo", messages=turns, max_tokens=160, extra_body=planned, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in again])
        assert text == whole.choices[0].message.content
        assert len(whole.choices[0].specsot["branches"]) > 1
        endless = await asking(
            model="demo",
            messages=turns,
            max_tokens=1500,
            extra_body={"specsot": {"mode": "direct"}, "ignore_eos": True},
            stream=True,
        )
        await anext(endless)
        fleet.children[0]._process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            _ = [chunk async for chunk in endless]
        assert await fleet.children[0]._process.wait() == 0
    finally:
        await fleet.close()
