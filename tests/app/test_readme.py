"""README's own snippets, run as they are printed: Python blocks, and the lines under "Ask"."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.conftest import REPOSITORY
from tests.doors.front import front

pytestmark = [pytest.mark.torch, pytest.mark.processes]

README = (REPOSITORY / "README.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
ASK = re.search(r"^## Ask\n(.*?)^## ", README, re.MULTILINE | re.DOTALL)
MASTER = "127.0.0.1:50050"  # where README's fleet listens


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the models where README's reader has them."""
    (tmp_path / "models").symlink_to(REPOSITORY / "models")
    return tmp_path


def run(*command: str, place: Path) -> str:
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("snippet", [s for s in PYTHON if MASTER not in s], ids=("ask", "eagle"))
def test_a_python_snippet_prints_an_answer(snippet: str, place: Path) -> None:
    assert len(run(sys.executable, "-c", snippet, place=place)) > 100


async def test_the_snippet_that_asks_a_fleet_prints_its_events(place: Path) -> None:
    (snippet,) = (s for s in PYTHON if MASTER in s)
    async with front({"": "It is so."}) as one:
        asked = snippet.replace(MASTER, one.address)
        told = await asyncio.to_thread(run, sys.executable, "-c", asked, place=place)
    assert "It is so." in told
    assert told.splitlines()[-1].startswith("Finished")


def test_the_lines_under_ask_answer(place: Path) -> None:
    assert ASK is not None
    blocks = re.findall(r"^```\n(.*?)^```", ASK[1], re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if ".venv" not in line]
    command = f"PATH={Path(sys.executable).parent}:$PATH; set -euo pipefail\n" + "\n".join(lines)
    told = run("bash", "-c", command, place=place)
    assert sum("specsot infer" in line for line in lines) >= 6
    assert told.startswith("## 1. Septa of the Heart")
    assert '"finished"' in told
    assert (place / "answer.md").read_text().startswith("## 1. ")
