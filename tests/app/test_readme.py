"""Runs as printed, by the small model: docs/python.md, and the questions of README and docs/serve.md."""

from __future__ import annotations

import asyncio
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from specsot_app.cli import main
from tests.conftest import REPOSITORY, some
from tests.endpoints.front import front

pytestmark = [pytest.mark.torch, pytest.mark.processes]

README = (REPOSITORY / "README.md").read_text()
PAGE = (REPOSITORY / "docs" / "python.md").read_text()
# What follows that heading is run by tests/eagle/test_document.py.
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE.partition("\n## EAGLE ")[0], re.MULTILINE | re.DOTALL)
CLI = (REPOSITORY / "docs" / "serve.md").read_text()
SECTIONS = (("Ask", README), ("Questions", CLI))
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


@pytest.mark.parametrize("snippet", [s for s in PYTHON if MASTER not in s], ids=("ask",))
def test_a_python_snippet_prints_an_answer(
    snippet: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has loaded already what each of them would load anew."""
    monkeypatch.chdir(place)
    snippet = snippet.replace("from_pretrained()", 'from_pretrained(demo="small")')
    exec(compile(snippet, "docs/python.md", "exec"), {"__name__": "__main__"})
    assert len(capsys.readouterr().out) > 100


async def test_the_snippet_that_asks_a_fleet_prints_its_events(place: Path) -> None:
    (snippet,) = (s for s in PYTHON if MASTER in s)
    async with front({"": "It is so."}) as one:
        asked = snippet.replace(MASTER, one.address)
        told = await asyncio.to_thread(run, sys.executable, "-c", asked, place=place)
    assert "It is so." in told
    assert told.splitlines()[-1].startswith("Finished")


def questions() -> list[str]:
    """The lines below README's "Ask", and those below "Questions" in docs/serve.md."""
    parts = (re.search(rf"^## {name}\n(.*?)^## ", page, re.M | re.S) for name, page in SECTIONS)
    lines = [line for part in parts if part for line in part[1].splitlines()]
    return [line for line in lines if re.match(r"(specsot infer|echo) ", line)]


@pytest.mark.full  # the next test answers it, too
def test_the_first_question_is_answered_in_a_shell(place: Path) -> None:
    command = f"PATH={Path(sys.executable).parent}:$PATH; set -euo pipefail\n{questions()[0]}"
    assert len(run("bash", "-c", command, place=place).split()) > 5


def test_there_are_some() -> None:
    assert len(questions()) >= 7


@pytest.mark.parametrize("line", some(questions(), 0, 3, 6))
def test_each_is_answered(
    line: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, too."""
    monkeypatch.chdir(place)
    words = shlex.split(line, comments=True)
    question, words = (words[1], words[3:]) if words[0] == "echo" else ("", words)
    file, words = (words[-1], words[:-2]) if ">" in words else (None, words)
    monkeypatch.setattr(sys, "stdin", io.StringIO(question))
    assert words[0] == "specsot"
    assert main(words[1:]) == 0
    told = capsys.readouterr().out
    assert len(told) > 1
    if file:
        assert told.startswith("## 1. ")
    assert ('"finished"' in told) == ("--json" in words)
