"""Shows one request's events on a terminal, in a pipe or as JSON lines; progress bars while models load."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from rich.cells import chop_cells
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.control import Control
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeElapsedColumn
from rich.segment import ControlType, SegmentLines
from rich.text import Text

from specsot.core.event_json import line_of
from specsot.core.info import memory_in_words
from specsot.core.view import View, advance
from specsot.events import MergedText, Numbered, Started
from specsot_app.core.answer_view import (
    describe_forecast,
    draw,
    final_picture,
    interrupted_picture,
    summary,
)
from specsot_app.fleet.demo import small_pair
from specsot_app.fleet.opening import FleetClient, Opener, open_fleet
from specsot_app.fleet.options import FleetOptions

# Makes the line that stays below an answer from its last view.
Summary = Callable[[View], str]
# `live`: panels on a terminal; `plain`: text; `json`: one object for each event.
OutputFormat = Literal["live", "plain", "json"]
# Frames per second of the live view. More flicker in slow terminals. Untuned.
FRAMES_PER_SECOND = 8


@dataclass(frozen=True, slots=True)
class Streams:
    """Where output goes.

    out: Stream of the answers.
    err: Stream of remarks.
    """

    out: TextIO
    err: TextIO


def format_for(streams: Streams, json: bool) -> OutputFormat:
    """Return JSON if it is asked for, panels on a terminal that can move its cursor, and plain text
    otherwise.

    JSON takes precedence over a terminal. A terminal that cannot move its cursor (TERM=dumb) gets plain
    text.

    streams: The streams of the output, of which `out` may be a terminal.
    json: True if JSON was asked for.
    """
    if json:
        return "json"
    console = Console(file=streams.out)
    return "live" if console.is_terminal and not console.is_dumb_terminal else "plain"


async def show(
    events: AsyncIterator[Numbered],
    output_format: OutputFormat,
    streams: Streams,
    make_summary: Summary = summary,
) -> View:
    """Read the events to their end, and show each; return the view after the last one.

    Raises what the events raise.

    events: Events of one request.
    output_format: Format in which the events are shown: live panels, plain text or JSON lines.
    streams: The streams of answers and of remarks.
    make_summary: Makes the line below the answer, which JSON does not have.
    """
    match output_format:
        case "json":
            return await show_json(events, streams)
        case "plain":
            return await show_text(events, streams, make_summary)
        case "live":
            return await show_live(events, Console(file=streams.out), make_summary)


async def show_json(events: AsyncIterator[Numbered], streams: Streams) -> View:
    """Print one JSON object a line; the last one is `finished`. Return the view after the last event.

    If the events raise, the lines so far stay and the exception is passed on. There is no summary.

    events: Events of one request.
    streams: The streams of answers and of remarks; only the first is used.
    """
    view = View()
    async for numbered in events:
        view = advance(view, numbered.event)
        print(line_of(numbered), file=streams.out, flush=True)
    return view


async def show_text(
    events: AsyncIterator[Numbered], streams: Streams, make_summary: Summary = summary
) -> View:
    """Print the merged answer as it grows; a forecast and the summary go to the error stream. Return the view
    after the last event.

    The forecast is printed when the request starts, if there is one. A line break follows an answer that
    does not end in one; without any text, nothing is printed to the answer's stream. If the events raise, no
    summary is printed.

    events: Events of one request.
    streams: The streams of answers and of remarks.
    make_summary: Makes the summary from the last view.
    """
    view = View()
    num_printed = 0
    async for numbered in events:
        view = advance(view, numbered.event)
        if (
            isinstance(numbered.event, Started)
            and view.forecast
            and (forecast := describe_forecast(view.forecast))
        ):
            print(forecast, file=streams.err, flush=True)
        if isinstance(numbered.event, MergedText) or view.finished:
            print(view.merged[num_printed:], end="", file=streams.out, flush=True)
            num_printed = len(view.merged)
    if num_printed and not view.merged.endswith("\n"):
        print(file=streams.out, flush=True)
    print(make_summary(view), file=streams.err, flush=True)
    return view


class LiveView(RenderHook):
    """What the live screen draws at its own pace: the newest view, at the screen's current size.

    Most terminals break lines that are longer than a width to which they are narrowed. The picture then takes
    more rows than rich has counted, so that rich would erase only its end: as a hook, this class erases the
    additional rows first. Rows that have left the screen cannot be erased, so `show_live` goes on drawing on
    the alternate screen.

    console: Console of the terminal. The attribute `view` is replaced after each event.
    """

    def __init__(self, console: Console) -> None:
        self.view = View()
        self._console = console
        # Lines of the picture that was drawn last, without colours.
        self._drawn_lines: tuple[str, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the picture of the newest view, which rich draws several times a second."""
        picture = draw(self.view, self._console.size)
        lines = console.render_lines(picture, options, pad=False)
        texts = ("".join(segment.text for segment in line) for line in lines[: self._console.height])
        self._drawn_lines = tuple(texts)
        yield SegmentLines(lines, new_lines=True)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Return what rich is about to print, after a control that erases the rows that were added to the
        picture by breaking its lines.

        renderables: Begin with rich's own control, which erases as many rows as the picture had.
        """
        added = count_added_rows(self._drawn_lines, self._console.width)
        up = ((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)) * added
        return [Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), *up), *renderables]


def count_added_rows(lines: Sequence[str], width: int) -> int:
    """Return how many rows a terminal of this width needs in addition to one for each line.

    lines: Lines without control characters, such as ["abcdef", "ab"]: with a width of 4, the result is 1.
    width: Number of columns.
    """
    return sum(max(len(chop_cells(line, width)) - 1, 0) for line in lines)


async def show_live(
    events: AsyncIterator[Numbered], console: Console, make_summary: Summary = summary
) -> View:
    """Show panels while the request runs, then the answer and the summary; return the view after the last
    event.

    After a change of the terminal's size, the panels are drawn on its alternate screen.

    If the request is interrupted or fails, print what was written so far, and re-raise.

    Nothing is printed for an interrupted request that has not written anything.

    events: Events of one request.
    console: Console of the terminal.
    make_summary: Makes the summary from the last view.
    """
    picture = LiveView(console)
    size = console.size
    try:
        with ExitStack() as screen:
            screen.enter_context(drawn(picture, console))
            async for numbered in events:
                picture.view = advance(picture.view, numbered.event)
                if size and console.size != size:
                    size = None
                    screen.close()
                    screen.enter_context(drawn(picture, console, alternate=True))
    # After Ctrl-C or a lost connection, the text stays on the screen.
    except BaseException:
        console.print(interrupted_picture(picture.view), crop=False)
        raise
    # Lines of code may be longer than the terminal is wide.
    console.print(final_picture(picture.view, make_summary(picture.view)), crop=False)
    return picture.view


@contextmanager
def drawn(
    picture: LiveView, console: Console, alternate: bool = False, refresh: bool = True
) -> Generator[Live]:
    """Draw a picture several times a second until the context ends, which erases it.

    picture: What is drawn.
    console: Console of the terminal.
    alternate: True: on the terminal's alternate screen, whose lines no terminal breaks anew when its size
        changes. The text before the picture is then invisible meanwhile.
    refresh: False: draw only when the returned `Live` is told to.
    """
    live = Live(
        picture,
        console=console,
        screen=alternate,
        transient=True,
        auto_refresh=refresh,
        refresh_per_second=FRAMES_PER_SECOND,
    )
    with live:
        if not alternate:
            console.push_render_hook(picture)
        try:
            yield live
        finally:
            if not alternate:
                console.pop_render_hook()


class _Count(MofNCompleteColumn):
    """A column such as "3/30", shown once the total is known."""

    def render(self, task: Task) -> Text:
        """Return the count, or empty text while the total is unknown.

        task: The task whose progress is shown.
        """
        return Text() if task.total is None else super().render(task)


def bars(err: TextIO) -> Progress:
    """Return progress bars that disappear when they are done, and that only a terminal shows.

    err: Stream to draw on.
    """
    console = Console(file=err)
    columns = TextColumn("{task.description}"), BarColumn(20), _Count(), TimeElapsedColumn()
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


def weights_of(options: FleetOptions) -> str:
    """Return names and size of the weight files that are loaded, such as "model.safetensors, 513 MiB". Return
    the model's name alone if there are no weight files.

    Several files are shown by their number and the model's name. `model` may be a file itself. The size is
    that of all files together.

    options: Options of the fleet; without a model, the bundled small model is meant.
    """
    model = Path(options.model or small_pair() / "base")
    files = [model] if model.is_file() else [*model.glob("*.safetensors"), *model.glob("*.gguf")]
    if not files:
        return model.name
    file_names = files[0].name if len(files) == 1 else f"{len(files)} files of {model.name}"
    return f"{file_names}, {memory_in_words(sum(file.stat().st_size for file in files))}"


def open_with_progress(err: TextIO) -> Opener:
    """Return `open_fleet` with a progress bar while the fleet loads.

    The returned function raises what `open_fleet` raises; the bar is then removed.

    err: Stream to draw on.
    """

    async def opener(options: FleetOptions) -> FleetClient:
        """Open the fleet; a bar is shown unless the fleet belongs to a running master.

        options: Options of the fleet.
        """
        if options.master is not None:
            return await open_fleet(options)
        with bars(err) as progress:
            description = f"loading {weights_of(options)}"
            task = progress.add_task(description, total=None)

            def report(unit: str, count: int, total: int) -> None:
                """Show progress on the bar.

                unit: Name of what is with_noun, such as "layers".
                count: Number of these that are ready.
                total: Their total.
                """
                progress.update(task, description=f"{description}: {unit}", completed=count, total=total)

            return await open_fleet(options, report)

    return opener
