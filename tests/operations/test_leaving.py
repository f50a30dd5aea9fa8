"""A service that is told to leave while it still loads."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

LOADING = """
import asyncio, threading
from specsot.service.lifecycle import run_service

async def work(leaving):
    load = asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    print("loading", flush=True)
    await load

run_service("a service", work, within=0.1)
"""


def test_a_service_leaves_though_a_thread_of_it_still_fetches() -> None:
    service = subprocess.Popen([sys.executable, "-c", LOADING], stdout=subprocess.PIPE, text=True)
    with service:
        assert service.stdout is not None
        assert service.stdout.readline() == "loading\n"
        service.send_signal(signal.SIGTERM)
        assert service.wait(timeout=100) == 0
