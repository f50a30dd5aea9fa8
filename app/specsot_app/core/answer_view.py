"""Draws a request with rich: the plan, a panel for each branch, the merged answer, a summary line. Pure."""

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

# Columns. Least width of a panel, since narrower prose is hard to read. Untuned.
PANEL_WIDTH = 38
# Lines. Least height of a panel.
LEAST_LINES = 3
# Only measures text.
SCREEN = Console(width=PANEL_WIDTH)

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
# Tokens per step and branch. Fewer would be rounded to the 1.0 of decoding without drafts.
WORTHWHILE = 1.05
# Share of steps. If drafting was paused in so many, the summary says so.
MOSTLY = 0.5


@dataclass(frozen=True, slots=True)
class Size:
    """Size of the terminal, in character cells."""

    width: int
    height: int


def draw(view: View, size: Size) -> RenderableType:
    """Draw a running request."""
    if not view.planned:
        texts = [(name, text) for name, text in (("answer", view.merged), ("plan", view.titles)) if text]
        if len(texts) * (LEAST_LINES + 2) > size.height - 2:
            texts = texts[:1]
        each = Size(size.width, size.height // max(len(texts), 1))
        return Group(heading(view), *(text_frame(name, text, each) for name, text in texts))
    if merges(view):
        return Group(heading(view), text_frame("answer", view.merged, size))
    return Group(heading(view), *panels(view.panels, size), status(view))


def merges(view: View) -> bool:
    """Return whether only the merged answer is still being written."""
    written = len(view.merged) > view.introduced
    return not view.panels or (written and all(panel.reason for panel in view.panels))


def heading(view: View) -> Text:
    """Return the line above: forecast, model, mode, seed."""
    parts = [apply_forecast(view.forecast)] if view.forecast else []
    parts += [introduce(view.started)] if view.started else ["waiting"]
    return Text(" · ".join(filter(None, parts)), style="dim", no_wrap=True, overflow="ellipsis")


# Ratio of most to least. A narrower range is shown as one figure, which is then right within about a fifth.
WIDE = 1.5


def apply_forecast(forecast: Forecast) -> str:
    """Return a forecast such as "direct 6-25 s, planned ~8 s"; a range is shown if it is known and wide."""
    direct = _span(forecast.direct, forecast.direct_min, forecast.direct_max)
    planned = _span(forecast.planned, forecast.planned_min, forecast.planned_max)
    return ", ".join(f"{way} {span}" for way, span in (("direct", direct), ("planned", planned)) if span)


def _span(seconds: float | None, least: float | None, most: float | None) -> str | None:
    """Return a duration or a range of durations; None if unknown."""
    if seconds is None:
        return None
    if least is None or most is None or most <= WIDE * least:
        return f"~{_figure(seconds)} s"
    return f"{_figure(least)}-{_figure(most)} s"


def _figure(seconds: float) -> str:
    """Return seconds with a decimal if they are few."""
    return f"{seconds:.1f}" if seconds < 5 else f"{seconds:.0f}"


def introduce(started: Started) -> str:
    """Return what is known of a request that has started."""
    model = started.model or "model"
    return f"{model} · mode {started.mode} · seed {started.seed} · {started.prompt_tokens} prompt tokens"


def text_frame(title: str, text: str, size: Size) -> Frame:
    """Return a frame over the whole width with the end of a text."""
    lines = max(LEAST_LINES, size.height - 4)
    body = last_lines(text, size.width - 4, lines)
    return Frame(body, title=title, title_align="left", border_style="cyan", box=box.ROUNDED)


def panels(shown: tuple[Panel, ...], size: Size) -> list[RenderableType]:
    """Return all panels as a grid if they fit; else a grid of the branches being written and a line for each
    other branch.

    If even that does not fit, return a line for each branch.
    """
    busy = tuple(panel for panel in shown if panel.writing)
    rest = tuple(panel for panel in shown if not panel.writing)
    if lines_each(len(shown), size) >= LEAST_LINES:
        return [grid(shown, lines_each(len(shown), size), size)]
    small = Size(size.width, size.height - len(rest))
    if busy and lines_each(len(busy), small) >= 1:
        return [grid(busy, lines_each(len(busy), small), size), *map(one_line, rest)]
    return [one_line(panel) for panel in (busy + rest)[: max(1, size.height - 2)]]


def columns_for(count: int, width: int) -> int:
    """Return how many panels are drawn side by side: no more rows than needed, and rows of about equal
    length.

    7 panels where 3 fit side by side need 3 rows, so that there are 3 columns; 4 panels need 2 rows of 2.
    """
    rows = -(-count // max(1, width // PANEL_WIDTH))
    return -(-count // rows)


def lines_each(count: int, size: Size) -> int:
    """Return the text lines of each of `count` panels that share the height below the heading."""
    rows = -(-count // columns_for(count, size.width))
    return min(12, (size.height - 3) // rows - 2)


def grid(shown: tuple[Panel, ...], lines: int, size: Size) -> RenderableType:
    """Return the panels as a grid."""
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
    """Return one branch: its title at the top, the end of its text, its state at the bottom."""
    return Frame(
        last_lines(panel.text, inner, lines),
        title=Text(f"{panel.point.id} {title_of(panel)}", overflow="ellipsis", no_wrap=True),
        subtitle=Text(state(panel)),
        title_align="left",
        subtitle_align="right",
        height=lines + 2,
        box=box.ROUNDED,
        border_style=STYLES[panel.reason] if panel.started else "dim",
    )


def title_of(panel: Panel) -> str:
    """Return the title of a branch; the closing of an answer has none of its own."""
    return clean(panel.point.title) or "closing"


def one_line(panel: Panel) -> Text:
    """Return one branch as a line."""
    style = STYLES[panel.reason] if panel.started else "dim"
    line = f"{panel.point.id:>3} {state(panel):<12} {title_of(panel)}"
    if panel.writing:
        line += f": {' '.join(clean(panel.text[-200:]).split())}"
    return Text(line, style=style, no_wrap=True, overflow="ellipsis")


def state(panel: Panel) -> str:
    """Return the state of a branch in words."""
    if not panel.started:
        return f"after {', '.join(map(str, panel.point.needs))}" if panel.point.needs else "waiting"
    if panel.reason is Reason.STOP:
        return f"✓ {counted(panel.tokens, 'token')}"
    if panel.reason is not None:
        return ended(panel.reason, panel.tokens)
    pace = f" · {panel.tokens / panel.steps:.1f} a step" if panel.steps else ""
    return f"{counted(panel.tokens, 'token')}{pace}"


def status(view: View) -> Text:
    """Return how many branches are being written, wait and are done, and how many tokens they have."""
    shown = view.panels
    writing = sum(panel.writing for panel in shown)
    waiting = sum(not panel.started for panel in shown)
    tokens = sum(panel.tokens for panel in shown)
    counts = f"{writing} writing · {waiting} waiting · {len(shown) - writing - waiting} done"
    return Text(f"{counts} · {counted(tokens, 'token')}", style="dim", no_wrap=True, overflow="ellipsis")


def conclude(view: View, line: str) -> RenderableType:
    """Return what stays on the screen: the merged answer, then the summary line."""
    written = (answer(view.merged), Text("")) if view.merged else ()
    return Group(*written, Text(f"{line}\n", style="dim"))


def unfinished(view: View) -> RenderableType:
    """Return what stays of an answer that did not end; of a plan, everything that its branches wrote."""
    text = view.merged
    if not merges(view):
        texts = (_headed(one) for one in view.panels if one.text)
        text = "\n\n".join(filter(None, (view.merged[: view.introduced], *texts)))
    return answer(text) if text else Group()


def _headed(panel: Panel) -> str:
    """Return the text of a branch below its heading. A closing has none."""
    title = panel.point.title
    return f"## {panel.point.id}. {title}\n{panel.text}" if title else panel.text


class _Title(Heading):
    """A heading that is left-aligned instead of centred."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _Code(CodeBlock):
    """A code block that begins in the first column, so that code copied from the terminal keeps its own
    indentation.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        yield Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, padding=(1, 0))


class _Answer(Markdown):
    """An answer's Markdown with left-aligned headings, plain code blocks and kept indentation."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _Title,
        **dict.fromkeys(("fence", "code_block"), _Code),
    }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for one in super().__rich_console__(console, options):
            yield one._replace(text=one.text.replace(KEPT_SPACE, " ")) if isinstance(one, Segment) else one


def answer(text: str) -> RenderableType:
    """Return the answer's Markdown with its line breaks kept, and without links that hide their target."""
    return _Answer("\n".join(_lines(clean(text))), hyperlinks=False, code_theme="ansi_dark")


KEPT_SPACE = "\xa0"
_MARKUP = re.compile(r"\s*(#|\||```|[-*+] |\d+[.)] |$)")


def _lines(text: str) -> Iterator[str]:
    """Yield the lines; outside of fenced code, lists and headings, each is made to end where the model ended
    it.

    Markdown would join such lines, and drop the indentation of code that is not fenced.
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
    """Return one line about an answer: seconds, tokens and steps, what drafts added, and an unusual end.

    drafter: whether the fleet has a drafter.
    other: the end of the same question answered the other way (planned or direct).
    by: the command that asked for that.
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
    """Return the comparison with the same question answered the other way; a plan that failed is no
    comparison.
    """
    if has_no_plan(other):
        return f"nothing to compare by {by}: {NO_PLAN}"
    told = f"{way_of(other)}, by {by}: {seconds_and_tokens(other.statistics)}"
    return told if other.reason in (Reason.STOP, Reason.LENGTH) else f"{told}, {ENDS[other.reason]}"


def has_no_plan(finished: Finished | None) -> bool:
    """Return whether a plan was tried and dropped."""
    return finished is not None and finished.statistics.decision.endswith(NO_PLAN)


def polished(told: Statistics) -> list[str]:
    """Return what polishing cost, if the answer was polished."""
    if "polish" not in told.phases:
        return []
    return [f"polished in {told.phases['polish']:.1f} s, {counted(told.polish_tokens, 'token')}"]


def way_of(finished: Finished) -> str:
    """Return "planned" or "direct"; an answer that was stopped before its first point counts as it was
    decided.
    """
    planned = finished.statistics.branches or finished.statistics.decision.startswith("planned")
    return "planned" if planned else "direct"


def in_seconds(told: Statistics) -> str:
    """Return the duration in words."""
    return f"{told.seconds:.1f} s"


def seconds_and_tokens(told: Statistics) -> str:
    """Return duration and tokens in words."""
    return f"{in_seconds(told)} ({counted(told.merged_tokens, 'token')})"


def counted(count: int, one: str, more: str = "") -> str:
    """Return a number with its noun: (1, "step") -> "1 step", (2, "step") -> "2 steps"."""
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def work(told: Statistics, drafter: bool) -> list[str]:
    """Return such as "6 branches in 71 steps, drafts brought 1.8 tokens a step", or nothing if no text was
    written.

    The tokens are those of each branch, 1.0 without drafts. drafter: whether the fleet has a drafter.
    """
    branches = counted(told.branches, "branch", "branches")
    tokens = counted(told.merged_tokens, "token")
    if not (told.branches or told.merged_tokens):
        return []
    if told.decision.endswith(NO_PLAN):
        tokens = f"{tokens} and a dropped plan of {told.plan_tokens:,}"
    line = f"{branches if told.branches else tokens} in {counted(told.steps, 'step')}"
    if drafter and told.paused_share >= MOSTLY:
        return [line, "drafting rests: it does not pay here"]
    brought = told.mean_accepted >= WORTHWHILE or (drafter and told.steps)
    return [f"{line}, drafts brought {told.mean_accepted:.1f} tokens a step" if brought else line]


def unusual_end(view: View, finished: Finished) -> list[str]:
    """Return why the answer ended, or nothing if it ended by itself."""
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
    """Return an end in plain words: "cut at 1,024 tokens", "stopped"."""
    return f"cut at {counted(tokens, 'token')}" if reason is Reason.LENGTH else ENDS[reason]


def last_lines(text: str, width: int, lines: int) -> Text:
    """Return the end of a text, wrapped to `width` cells, at most `lines` lines.

    Long texts are wrapped from a start that moves in jumps, so that lines do not reflow as the text grows.
    """
    jump = max(width, 8) * lines * 2
    start = max(0, len(text) // jump - 1) * jump
    wrapped = Text(clean(text[start:])).wrap(SCREEN, max(width, 8))
    return Text("\n").join(wrapped[-lines:])


def clean(text: str) -> str:
    """Return the text without control characters, so that a model cannot control the terminal."""
    return "".join(sign for sign in text if sign in "\n\t" or unicodedata.category(sign) != "Cc")
