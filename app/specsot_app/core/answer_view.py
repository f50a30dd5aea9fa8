"""Draws a request with rich: the plan, a panel for each branch, the merged answer, a line about it. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.panel import Panel as Frame
from rich.segment import Segment
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from specsot.core.view import Panel, View
from specsot.events import NO_PLAN, Finished, Forecast, Reason, Started, Statistics

PANEL_WIDTH = 38  # columns of a panel at least: narrower prose is hard to read; not measured
LEAST_LINES = 3  # lines of a panel at least
SCREEN = Console(width=PANEL_WIDTH)  # only measures text

STYLES = {
    None: "cyan",
    Reason.STOP: "green",
    Reason.LENGTH: "yellow",
    Reason.CANCELLED: "magenta",
    Reason.FAILED: "red",
    Reason.PARENT_FAILED: "red",
}

ENDS = {
    Reason.STOP: "done",
    Reason.LENGTH: "cut",
    Reason.CANCELLED: "stopped",
    Reason.FAILED: "failed",
    Reason.PARENT_FAILED: "left out, for what it needs failed",
}
WORTHWHILE = 1.05  # tokens a lap and branch; fewer round to the 1.0 of plain decoding
MOSTLY = 0.5  # of the trees, from which on drafting rests


@dataclass(frozen=True, slots=True)
class Size:
    """Of the terminal, in character cells."""

    width: int
    height: int


def draw(view: View, size: Size) -> RenderableType:
    if not view.planned:
        plan = [text_frame("plan", view.titles, size)] if view.titles else []
        return Group(heading(view), *plan)
    if merges(view):
        return Group(heading(view), text_frame("answer", view.merged, size))
    return Group(heading(view), *panels(view.panels, size), status(view))


def merges(view: View) -> bool:
    """Nothing is written but the answer itself."""
    return not view.panels or (bool(view.merged) and all(panel.reason for panel in view.panels))


def heading(view: View) -> Text:
    parts = [foresee(view.forecast)] if view.forecast else []
    parts += [introduce(view.started)] if view.started else ["waiting"]
    return Text(" · ".join(filter(None, parts)), style="dim", no_wrap=True, overflow="ellipsis")


WIDE = 1.5  # times the least; what is narrower is told as one figure, which then is within a fifth or so


def foresee(forecast: Forecast) -> str:
    """ "direct 6-25 s, planned ~8 s"; a range where it is known and wide."""
    direct = _span(forecast.direct, forecast.direct_least, forecast.direct_most)
    planned = _span(forecast.planned, forecast.planned_least, forecast.planned_most)
    return ", ".join(f"{way} {span}" for way, span in (("direct", direct), ("planned", planned)) if span)


def _span(seconds: float | None, least: float | None, most: float | None) -> str | None:
    if seconds is None:
        return None
    if least is None or most is None or most <= WIDE * least:
        return f"~{_figure(seconds)} s"
    return f"{_figure(least)}-{_figure(most)} s"


def _figure(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 5 else f"{seconds:.0f}"


def introduce(started: Started) -> str:
    model = started.model or "model"
    return f"{model} · mode {started.mode} · seed {started.seed} · {started.prompt_tokens} prompt tokens"


def text_frame(title: str, text: str, size: Size) -> Frame:
    """One frame over the whole width with the end of a text."""
    lines = max(LEAST_LINES, size.height - 4)
    body = last_lines(text, size.width - 4, lines)
    return Frame(body, title=title, title_align="left", border_style="cyan", box=box.ROUNDED)


def panels(shown: tuple[Panel, ...], size: Size) -> list[RenderableType]:
    """All panels as a grid; else those that write, and a line for each other; else a line for each."""
    busy = tuple(panel for panel in shown if panel.writing)
    rest = tuple(panel for panel in shown if not panel.writing)
    if lines_each(len(shown), size) >= LEAST_LINES:
        return [grid(shown, lines_each(len(shown), size), size)]
    small = Size(size.width, size.height - len(rest))
    if busy and lines_each(len(busy), small) >= 1:
        return [grid(busy, lines_each(len(busy), small), size), *map(one_line, rest)]
    return [one_line(panel) for panel in (busy + rest)[: max(1, size.height - 2)]]


def columns_for(count: int, width: int) -> int:
    """How many panels stand side by side: no more rows than needed, and those about equally long."""
    rows = -(-count // max(1, width // PANEL_WIDTH))
    return -(-count // rows)


def lines_each(count: int, size: Size) -> int:
    """Text lines of each of `count` panels, when they share the height below the heading."""
    rows = -(-count // columns_for(count, size.width))
    return min(12, (size.height - 3) // rows - 2)


def grid(shown: tuple[Panel, ...], lines: int, size: Size) -> RenderableType:
    columns = columns_for(len(shown), size.width)
    table = Table.grid(expand=True)
    for _ in range(columns):
        table.add_column(ratio=1)
    inner = size.width // columns - 4
    frames = [frame(panel, inner, lines) for panel in shown]
    for start in range(0, len(frames), columns):
        table.add_row(*frames[start : start + columns])
    return table


def frame(panel: Panel, inner: int, lines: int) -> Frame:
    """One branch: its title above, the end of its text, its state below."""
    return Frame(
        last_lines(panel.text, inner, lines),
        title=Text(f"{panel.point.id} {clean(panel.point.title)}", overflow="ellipsis", no_wrap=True),
        subtitle=Text(state(panel)),
        title_align="left",
        subtitle_align="right",
        height=lines + 2,
        box=box.ROUNDED,
        border_style=STYLES[panel.reason] if panel.started else "dim",
    )


def one_line(panel: Panel) -> Text:
    style = STYLES[panel.reason] if panel.started else "dim"
    line = f"{panel.point.id:>3} {state(panel):<12} {clean(panel.point.title)}"
    if panel.writing:
        line += f": {' '.join(clean(panel.text[-200:]).split())}"
    return Text(line, style=style, no_wrap=True, overflow="ellipsis")


def state(panel: Panel) -> str:
    if not panel.started:
        return f"after {', '.join(map(str, panel.point.needs))}" if panel.point.needs else "waiting"
    if panel.reason is Reason.STOP:
        return f"✓ {counted(panel.tokens, 'token')}"
    if panel.reason is not None:
        return ended(panel.reason, panel.tokens)
    pace = f" · {panel.tokens / panel.laps:.1f} a lap" if panel.laps else ""
    return f"{counted(panel.tokens, 'token')}{pace}"


def status(view: View) -> Text:
    """How many branches write, wait, are done; what they wrote so far."""
    shown = view.panels
    writing = sum(panel.writing for panel in shown)
    waiting = sum(not panel.started for panel in shown)
    tokens = sum(panel.tokens for panel in shown)
    counts = f"{writing} writing · {waiting} waiting · {len(shown) - writing - waiting} done"
    return Text(f"{counts} · {counted(tokens, 'token')}", style="dim", no_wrap=True, overflow="ellipsis")


def conclude(view: View, line: str) -> RenderableType:
    """What stays on the screen: the merged answer, then the line about it."""
    written = (answer(view.merged), Text("")) if view.merged else ()
    return Group(*written, Text(f"{line}\n", style="dim"))


def unfinished(view: View) -> RenderableType:
    """What stays of an answer that did not end: of a plan all that its branches wrote."""
    text = view.merged
    if not merges(view):
        written = (f"## {one.point.id}. {one.point.title}\n{one.text}" for one in view.panels if one.text)
        text = "\n\n".join(written)
    return answer(text) if text else Group()


class _Title(Heading):
    """Where the text begins, not in the middle of the screen."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _Code(CodeBlock):
    """Begins in the first column, so that code copied from the terminal has its own indentation."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        yield Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, padding=(1, 0))


class _Answer(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _Title,
        **dict.fromkeys(("fence", "code_block"), _Code),
    }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for one in super().__rich_console__(console, options):
            yield one._replace(text=one.text.replace(KEPT_SPACE, " ")) if isinstance(one, Segment) else one


def answer(text: str) -> RenderableType:
    """The answer's Markdown, with its lines as they are, and without links that hide where they lead."""
    return _Answer("\n".join(_lines(clean(text))), hyperlinks=False, code_theme="ansi_dark")


KEPT_SPACE = "\xa0"
_MARKUP = re.compile(r"\s*(#|\||```|[-*+] |\d+[.)] |$)")


def _lines(text: str) -> Iterator[str]:
    """Outside of marked code and lists, lines end and begin where the model let them.

    Markdown would join them, and drop what indents code that is not marked.
    """
    fenced = False
    for line in text.splitlines():
        fenced ^= line.lstrip().startswith("```")
        if fenced or _MARKUP.match(line):
            yield line
        else:
            words = line.lstrip()
            yield f"{KEPT_SPACE * (len(line) - len(words))}{words}  "


def summary(view: View, drafter: bool = False, other: Finished | None = None, by: str = "") -> str:
    """One line about an answer: its seconds, its tokens and laps, what drafts brought, an unusual end.

    drafter: something drafts here. other: the same question answered the other way, as `by` was told to.
    """
    if view.finished is None:
        return "the answer did not end"
    told = view.finished.statistics
    compared = [beside(other, by)] if other else []
    time = seconds_and_tokens(told) if other else in_seconds(told)
    way = [told.decision] if told.decision else []
    last = [*polished(told), *unusual_end(view, view.finished)]
    return "; ".join([time, *way, *compared, *work(told, drafter), *last])


def beside(other: Finished, by: str) -> str:
    """The same question answered the other way; a plan that came to nothing is no other way."""
    if has_no_plan(other):
        return f"nothing to compare by {by}: {NO_PLAN}"
    told = f"{way_of(other)}, by {by}: {seconds_and_tokens(other.statistics)}"
    return told if other.reason in (Reason.STOP, Reason.LENGTH) else f"{told}, {ENDS[other.reason]}"


def has_no_plan(finished: Finished | None) -> bool:
    """A plan was tried, and dropped."""
    return finished is not None and finished.statistics.decision.endswith(NO_PLAN)


def polished(told: Statistics) -> list[str]:
    if "polish" not in told.phases:
        return []
    return [f"polished in {told.phases['polish']:.1f} s, {counted(told.polish_tokens, 'token')}"]


def way_of(finished: Finished) -> str:
    """Of one that was stopped before its first point, as it was decided."""
    planned = finished.statistics.branches or finished.statistics.decision.startswith("planned")
    return "planned" if planned else "direct"


def in_seconds(told: Statistics) -> str:
    return f"{told.seconds:.1f} s"


def seconds_and_tokens(told: Statistics) -> str:
    return f"{in_seconds(told)} ({counted(told.merged_tokens, 'token')})"


def counted(count: int, one: str, more: str = "") -> str:
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def work(told: Statistics, drafter: bool) -> list[str]:
    """ "6 branches in 71 laps, drafts brought 1.8 tokens a lap": to each branch, 1.0 without drafts.

    drafter: something drafts here. Nothing, where nothing was written.
    """
    branches = counted(told.branches, "branch", "branches")
    tokens = counted(told.merged_tokens, "token")
    if not (told.branches or told.merged_tokens):
        return []
    if told.decision.endswith(NO_PLAN):
        tokens = f"{tokens} and a dropped plan of {told.plan_tokens:,}"
    line = f"{branches if told.branches else tokens} in {counted(told.laps, 'lap')}"
    if drafter and told.rested >= MOSTLY:
        return [line, "drafting rests: it does not pay here"]
    brought = told.mean_accepted >= WORTHWHILE or (drafter and told.laps)
    return [f"{line}, drafts brought {told.mean_accepted:.1f} tokens a lap" if brought else line]


def unusual_end(view: View, finished: Finished) -> list[str]:
    """Nothing for an answer that ended by itself."""
    if finished.reason is Reason.STOP:
        return []
    if finished.statistics.in_time:
        return ["ended in time"]
    such = sum(panel.reason is finished.reason for panel in view.panels)
    if such and finished.reason is not Reason.CANCELLED:
        return [f"{such} of {counted(len(view.panels), 'branch', 'branches')} {ENDS[finished.reason]}"]
    told = finished.statistics
    if finished.reason is Reason.CANCELLED and not (told.branches or told.merged_tokens):
        return ["stopped before anything was written"]
    return [ended(finished.reason, told.completion_tokens)]


def ended(reason: Reason, tokens: int) -> str:
    """In plain words: "cut at 1,024 tokens", "stopped"."""
    return f"cut at {counted(tokens, 'token')}" if reason is Reason.LENGTH else ENDS[reason]


def last_lines(text: str, width: int, lines: int) -> Text:
    """The end of a text, wrapped to `width` cells, at most `lines` lines of it.

    Long texts are wrapped from a start that moves in jumps, so that lines stand still as text grows.
    """
    jump = max(width, 8) * lines * 2
    start = max(0, len(text) // jump - 1) * jump
    wrapped = Text(clean(text[start:])).wrap(SCREEN, max(width, 8))
    return Text("\n").join(wrapped[-lines:])


def clean(text: str) -> str:
    """Without control characters: a model must not steer the terminal."""
    return "".join(sign for sign in text if sign in "\n\t" or unicodedata.category(sign) != "Cc")
