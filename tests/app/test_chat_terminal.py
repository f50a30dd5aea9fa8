"""`specsot chat` at a pseudo-terminal and in a pipe, as a program of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.app.screen import Screen
from tests.forked import ran

pytestmark = pytest.mark.processes

ECHO = "tests.app.talkative"
PROMPT = ">\b"  # then the cursor moves on


@pytest.fixture(autouse=True)
def _in_the_repository(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    monkeypatch.chdir(request.config.rootpath)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def test_a_person_asks_stops_and_leaves() -> None:
    with Screen(ECHO) as screen:
        screen.wait_for("echo · 100 positions · /help")
        screen.wait_for(PROMPT)
        screen.type("short?\n")
        screen.wait_for("yes, short?")
        screen.wait_for("3 tokens in 0 steps")
        screen.wait_for(PROMPT)
        screen.type("/mode sot\n")
        screen.wait_for("sot>")
        screen.type("long one\n")
        screen.wait_for("yes, long one")  # in its frame, as it is written
        screen.type("/stop\n")
        screen.wait_for("stopped")
        screen.wait_for("sot>")
        screen.type("long two\n")
        screen.wait_for("yes, long two")
        screen.type("\x03")
        screen.wait_for("stopped")
        screen.wait_for("sot>")
        screen.type("\x04")
        assert screen.ends() == 0
        assert "/stop" not in screen.seen  # it would have torn the picture


def test_a_prompt_can_be_edited_and_left_by_ctrl_d() -> None:
    with Screen(ECHO) as screen:
        screen.wait_for(PROMPT)
        screen.type("whx\x7fy?\n")
        screen.wait_for("yes, why?")
        screen.wait_for(PROMPT)
        screen.type("\x1b[A\n")  # the line before
        screen.wait_for("yes, why?")
        screen.wait_for(PROMPT)
        screen.type("\x04")
        assert screen.ends() == 0


def test_what_is_pasted_is_one_question_and_kept_for_the_next_conversation(tmp_path: Path) -> None:
    with Screen(ECHO) as screen:
        screen.wait_for(PROMPT)
        screen.type("\x1b[200~one\n\n/two\x1b[201~")
        screen.wait_for("/two")
        screen.type("\x1b\r3?\r")  # Alt-Enter, then Enter
        screen.wait_for("yes, one")
        screen.wait_for("3?")
        screen.wait_for("3 tokens in 0 steps")
        screen.wait_for(PROMPT)
        screen.type("\x04")
        assert screen.ends() == 0
        assert screen.seen.count("3 tokens") == 1
    assert "+one\n+\n+/two\n+3?\n" in (tmp_path / "questions").read_text()
    assert (tmp_path / "questions").stat().st_mode & 0o077 == 0


def test_it_ends_if_it_is_terminated_during_an_answer() -> None:
    with Screen(ECHO) as screen:
        screen.wait_for(PROMPT)
        screen.type("long one\n")
        screen.wait_for("yes, long one")
        screen.process.terminate()
        assert screen.ends() != 0


def test_a_pipe_gets_plain_text() -> None:
    done = subprocess.run(
        [sys.executable, "-m", ECHO], input="a?\n/mode direct\nb?", capture_output=True, text=True, check=True
    )
    assert done.stdout == "yes, a?\nyes, b?\n"
    assert done.stderr.startswith("0.0 s; 3 tokens in 0 steps\nmode direct\n")
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.torch
def test_the_demo_model_talks(demo_model: Path) -> None:
    words = ["--mode", "direct", "--max-new-tokens", "8", "--drafter", "none"]
    status, told = ran("specsot_app", "chat", *words, typed="Explain Photosynthesis.\nMore?\n")
    lines = [line for line in told if " steps" in line]
    assert (status, len(lines)) == (0, 2), told
    assert all(line.endswith("; 8 tokens in 8 steps; cut at 8 tokens") for line in lines)
