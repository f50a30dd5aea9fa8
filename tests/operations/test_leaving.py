"""How a service ends: told to leave while it still loads, and with which status."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest

from specsot.errors import Refused, SpecsotError, Unavailable
from specsot.service.lifecycle import FAILED, WRONG_INPUT, run_service

pytestmark = pytest.mark.processes

LOADING = """
import asyncio, threading
from specsot.service.lifecycle import run_service

async def work(leaving):
    load = asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    print("loading", flush=True)
    await load

run_service("a service", work, leave_seconds=0.1)
"""


def test_a_service_leaves_though_a_thread_of_it_still_fetches() -> None:
    service = subprocess.Popen([sys.executable, "-c", LOADING], stdout=subprocess.PIPE, text=True)
    with service:
        assert service.stdout is not None
        assert service.stdout.readline() == "loading\n"
        service.send_signal(signal.SIGTERM)
        assert service.wait(timeout=100) == 0


@pytest.mark.parametrize(
    ("error", "status"), [(Refused("w has another model"), WRONG_INPUT), (Unavailable("w fell"), FAILED)]
)
def test_its_status_says_whether_it_may_be_started_again(
    error: SpecsotError, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    async def work(leaving: asyncio.Event) -> None:
        raise error

    assert run_service("a service", work) == status
    assert capfd.readouterr().err == f"a service: {error}\n"
