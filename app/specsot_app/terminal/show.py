"""Follows one request's events to a terminal, a pipe or as JSON lines; progress bars while models load."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from specsot.core.event_json import line_of
from specsot.core.info import memory_in_words
from specsot.core.view import View, advance
from specsot.events import MergedText, Numbered, Started
from specsot_app.core.answer_view import Size, conclude, draw, foresee, summary, unfinished
from specsot_app.fleet.demo import small_pair
from specsot_app.fleet.opening import FleetClient, Opener, open_fleet
from specsot_app.fleet.options import FleetOptions

Summary = Callable[[View], str]  # the line that stays below an answer
OutputFormat = Literal["live", "plain", "json"]
FRAMES_PER_SECOND = 8  # of the live view; more flickers in slow terminals; not measured


@dataclass(frozen=True, slots=True)
class Streams:
    """Where answers (out) and remarks (err) are written."""

    out: TextIO
    err: TextIO


def format_for(streams: Streams, json: bool) -> OutputFormat:
    """JSON when asked for, panels on a terminal that can move its cursor, plain text otherwise."""
    if json:
        return "json"
    console = Console(file=streams.out)
    return "live" if console.is_terminal and not console.is_dumb_terminal else "plain"


async def show(
    events: AsyncIterator[Numbered], manner: OutputFormat, streams: Streams, line: Summary = summary
) -> View:
    """Read the events to their end, showing each; returns what was seen."""
    match manner:
        case "json":
            return await show_json(events, streams)
        case "plain":
            return await show_plain(events, streams, line)
        case "live":
            return await show_live(events, Console(file=streams.out), line)


async def show_json(events: AsyncIterator[Numbered], streams: Streams) -> View:
    """One JSON object a line; the last is `finished`."""
    view = View()
    async for numbered in events:
        view = advance(view, numbered.event)
        print(line_of(numbered), file=streams.out, flush=True)
    return view


async def show_plain(events: AsyncIterator[Numbered], streams: Streams, line: Summary = summary) -> View:
    """The merged answer as it grows; a forecast and the summary on the other stream."""
    view = View()
    written = 0
    async for numbered in events:
        view = advance(view, numbered.event)
        if isinstance(numbered.event, Started) and view.forecast and (told := foresee(view.forecast)):
            print(told, file=streams.err, flush=True)
        if isinstance(numbered.event, MergedText) or view.finished:
            print(view.merged[written:], end="", file=streams.out, flush=True)
            written = len(view.merged)
    if written and not view.merged.endswith("\n"):
        print(file=streams.out, flush=True)
    print(line(view), file=streams.err, flush=True)
    return view


class LiveView:
    """What the live screen asks for at its own pace: the newest view, at the screen's present size."""

    def __init__(self, console: Console) -> None:
        self.view = View()
        self._console = console

    def __rich__(self) -> RenderableType:
        return draw(self.view, Size(self._console.width, self._console.height))


async def show_live(events: AsyncIterator[Numbered], console: Console, line: Summary = summary) -> View:
    """Panels while the request runs; then the answer and the summary stay, or what there is of it."""
    picture = LiveView(console)
    try:
        with Live(picture, console=console, transient=True, refresh_per_second=FRAMES_PER_SECOND):
            async for numbered in events:
                picture.view = advance(picture.view, numbered.event)
    except BaseException:  # Ctrl-C, or nobody answers any more: the text stays
        console.print(unfinished(picture.view))
        raise
    console.print(conclude(picture.view, line(picture.view)))
    return picture.view


class _Count(MofNCompleteColumn):
    """ "3/30", once the 30 are known."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


def bars(err: TextIO) -> Progress:
    """Gone when they are done."""
    console = Console(file=err)
    columns = TextColumn("{task.description}"), BarColumn(20), _Count(), TimeElapsedColumn()
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


@contextmanager
def counting_bar(err: TextIO, what: str, total: int) -> Generator[Callable[[], None]]:
    """A bar that the yielded function moves on by one."""
    with bars(err) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def weights_of(wanted: FleetOptions) -> str:
    """What is loaded, and its size: "model.safetensors, 513 MiB"."""
    model = Path(wanted.model or small_pair() / "base")
    files = [model] if model.is_file() else [*model.glob("*.safetensors"), *model.glob("*.gguf")]
    if not files:
        return model.name
    named = files[0].name if len(files) == 1 else f"{len(files)} files of {model.name}"
    return f"{named}, {memory_in_words(sum(file.stat().st_size for file in files))}"


def open_with_progress(err: TextIO) -> Opener:
    """open_fleet, with a bar while it loads."""

    async def opener(wanted: FleetOptions) -> FleetClient:
        if wanted.master is not None:
            return await open_fleet(wanted)
        with bars(err) as progress:
            named = f"loading {weights_of(wanted)}"
            task = progress.add_task(named, total=None)

            def watch(what: str, there: int, total: int) -> None:
                progress.update(task, description=f"{named}: {what}", completed=there, total=total)

            return await open_fleet(wanted, watch)

    return opener
