"""Showing a stream: plain text, JSON lines, live panels."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.live import Live

from specsot.core.view import advance
from specsot.errors import Unavailable
from specsot.events import Event, Forecast, Numbered
from specsot.params import Ask
from specsot_app.terminal.show import LiveView, Streams, drawn, format_for, show, show_live
from tests.app.stories import DIRECT, MERGED, PLANNED, StoryFleet


def tell(story):
    return StoryFleet(story).generate(Ask("Why?"))


@pytest.fixture
def streams() -> Streams:
    return Streams(io.StringIO(), io.StringIO())


async def test_plain_writes_the_answer_to_one_stream_and_a_line_to_the_other(streams: Streams) -> None:
    await show(tell(PLANNED), "plain", streams)
    assert streams.out.getvalue() == MERGED + "\n"
    assert "0.5 s; 3 branches in 24 steps" in streams.err.getvalue()
    assert MERGED not in streams.err.getvalue()


async def test_a_forecast_is_shown_before_the_answer(streams: Streams) -> None:
    story = (replace(DIRECT[0], forecast=Forecast(24.2, None, 22.0, 26.0)), *DIRECT[1:])
    await show(tell(story), "plain", streams)
    assert streams.err.getvalue().startswith("direct ~24 s\n")


async def test_json_is_one_event_a_line_and_finished_comes_last(streams: Streams) -> None:
    await show(tell(PLANNED), "json", streams)
    lines = [json.loads(line) for line in streams.out.getvalue().splitlines()]
    assert [line["number"] for line in lines] == list(range(len(PLANNED)))
    assert lines[0] | {"event": "started", "seed": 7} == lines[0]
    assert lines[3]["points"][2] == {
        "id": 3,
        "length": 40,
        "title": "What both have in common",
        "tool": None,
        "needs": [1, 2],
    }
    assert {line["event"] for line in lines} == {
        "started",
        "skeleton_text",
        "planned",
        "branch_started",
        "branch_text",
        "branch_finished",
        "merged_text",
        "finished",
    }
    last = lines[-1]
    assert (last["event"], last["text"], last["reason"]) == ("finished", MERGED, "stop")
    assert last["statistics"]["phases"] == {"skeleton": 0.2, "branches": 0.3}
    assert "睡眠 🌙" in streams.out.getvalue()


async def test_live_clears_the_panels_and_keeps_the_answer() -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=80, height=24, force_terminal=True, _environ={})
    view = await show_live(tell(DIRECT), console)
    assert view.finished is not None
    assert "Yes, it is." in screen.getvalue()
    assert "2 tokens in 0 steps" in screen.getvalue()


@pytest.mark.parametrize(
    ("story", "kept"),
    [
        (DIRECT[:-1], ["Yes, it is."]),
        (PLANNED[:10], ["1. NREM Stages of Sleep", "Slow", "2. REM", "Dreams."]),
    ],
    ids=("direct", "planned"),
)
@pytest.mark.parametrize("cut", [asyncio.CancelledError(), Unavailable("gone")], ids=("ctrl-c", "lost"))
async def test_live_keeps_the_text_of_an_answer_that_was_cut_off(
    story: tuple[Event, ...], kept: list[str], cut: BaseException
) -> None:
    async def events() -> AsyncIterator[Numbered]:
        async for numbered in tell(story):
            yield numbered
        raise cut

    screen = io.StringIO()
    console = Console(file=screen, width=80, height=24, force_terminal=True, _environ={})
    with pytest.raises(type(cut)):
        await show_live(events(), console)
    last = screen.getvalue().rpartition("\x1b[2K")[2]  # behind what cleared the panels
    assert all(text in last for text in kept)


class Terminal(io.StringIO):
    """A terminal that breaks lines anew when it is narrowed, as most do. It knows what rich's live screen
    needs: text, line breaks, one row up, and erasing a row.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.rows, self._row = [""], 0

    def write(self, text: str) -> int:
        for code, row_break, shown in re.findall(r"(\x1b\[[?0-9;]*[A-Za-z])|([\r\n])|([^\x1b\r\n]+)", text):
            if code == "\x1b[1A":
                self._row = max(self._row - 1, 0)
            elif code == "\x1b[2K":
                self.rows[self._row] = ""
            elif row_break == "\n":
                self._row += 1
                self.rows += [""] * (self._row == len(self.rows))
            elif shown:
                assert cell_len(self.rows[self._row] + shown) <= self.width, (
                    "the picture is as wide as the screen"
                )
                self.rows[self._row] += shown
        return len(text)

    def narrow(self, width: int) -> None:
        """Break every row that is longer than `width`. The cursor stays at the end of its text."""
        parts = [chop_cells(row, width) or [""] for row in self.rows]
        self._row = sum(map(len, parts[: self._row + 1])) - 1
        self.rows, self.width = [part for row in parts for part in row], width


@contextmanager
def live_screen(terminal: Terminal) -> Iterator[tuple[Live, Console]]:
    """A running plan on a terminal that shows a command; drawn when it is refreshed."""
    console = Console(file=terminal, width=terminal.width, height=30, force_terminal=True, _environ={})
    picture = LiveView(console)
    for event in PLANNED[:10]:
        picture.view = advance(picture.view, event)
    console.print("$ specsot chat")
    with drawn(picture, console, refresh=False) as live:
        yield live, console


@pytest.mark.parametrize("width", [99, 60, 41])
def test_a_terminal_that_is_narrowed_keeps_nothing_of_the_wider_picture(width: int) -> None:
    terminal, narrow = Terminal(100), Terminal(width)
    with live_screen(terminal) as (live, console), live_screen(narrow) as (other, _):
        live.refresh()
        other.refresh()
        terminal.narrow(width)
        console.width = width
        for _ in range(2):
            live.refresh()
            assert [row for row in terminal.rows if row] == [row for row in narrow.rows if row]
    assert [row for row in terminal.rows if row] == ["$ specsot chat"]


async def test_after_a_change_of_size_panels_are_drawn_on_the_alternate_screen() -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=80, height=24, force_terminal=True, _environ={})

    async def events() -> AsyncIterator[Numbered]:
        async for numbered in tell(PLANNED):
            if numbered.number in (6, 8):
                console.width -= 20
            yield numbered

    await show_live(events(), console)
    before, after = screen.getvalue().split("\x1b[?1049h")
    panels, answer = after.split("\x1b[?1049l")
    assert "1 NREM" in before
    assert "1 NREM" in panels
    assert MERGED.splitlines()[-1] in answer
    assert "3 branches in 24 steps" in answer


def test_a_pipe_gets_plain_text(streams: Streams) -> None:
    assert format_for(streams, json=False) == "plain"
    assert format_for(streams, json=True) == "json"
