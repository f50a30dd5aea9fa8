"""Draws a request with rich: the plan, a panel for each branch, the merged answer, a summary line. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import ClassVar

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.console import ConsoleDimensions as Size
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.panel import Panel as Frame
from rich.segment import Segment
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from specsot.core.view import Panel, View
from specsot.events import NO_PLAN, Finished, Forecast, Reason, Statistics

# Columns. Minimum width of a panel, since narrower prose is hard to read. Untuned.
PANEL_WIDTH = 38
# Lines. Minimum number of text lines in a panel. Untuned.
MIN_PANEL_LINES = 3
# A console that only measures text and is never written to.
SCREEN = Console(width=PANEL_WIDTH)

# Colour of a branch by the reason of its end; None while it is written.
STYLES = {
    None: "cyan",
    Reason.STOP: "green",
    Reason.LENGTH: "yellow",
    Reason.CANCELLED: "magenta",
    Reason.FAILED: "red",
    Reason.PARENT_FAILED: "red",
}

# The words for each reason of an end.
ENDS = {
    Reason.STOP: "done",
    Reason.LENGTH: "cut",
    Reason.CANCELLED: "stopped",
    Reason.FAILED: "failed",
    Reason.PARENT_FAILED: "left out, because a point that it needs failed",
}
# Tokens per step and branch. Below it, the summary does not mention drafts: 1.04 would be shown as 1.0, which
# is the value without drafts.
MIN_SHOWN_PACE = 1.05
# Fraction of steps. If drafting was paused in at least so many, the summary says so. Untuned.
MIN_PAUSED_SHARE = 0.5


def draw(view: View, size: Size) -> RenderableType:
    """Return the picture of a running request.

    Without branches so far: a heading line and, if a plan is being written, its points. While branches are
    written: the heading, their panels, a status line. Once only the merged text grows: the heading and the
    end of that text.

    If the terminal is too low for both texts before the branches, only the answer's text is shown (the
    plan's, if the answer has none yet).

    view: The state after the newest event.
    size: The terminal's size.
    """
    if not view.planned:
        texts = [(name, text) for name, text in (("answer", view.merged), ("plan", view.titles)) if text]
        if len(texts) * (MIN_PANEL_LINES + 2) > size.height - 2:
            texts = texts[:1]
        size_of_text = Size(size.width, size.height // max(len(texts), 1))
        return Group(heading(view), *(text_frame(name, text, size_of_text) for name, text in texts))
    if is_merging(view):
        return Group(heading(view), text_frame("answer", view.merged, size))
    return Group(heading(view), *panels(view.panels, size), status(view))


def is_merging(view: View) -> bool:
    """Return whether every branch has ended and only the merged text grows. A request without branches gives
    True.

    While the merged text is no longer than its introduction, or while a branch has not ended, the result is
    False.

    view: The state after the newest event.
    """
    written = len(view.merged) > view.introduced
    return not view.panels or (written and all(panel.reason for panel in view.panels))


def heading(view: View) -> Text:
    """Return the dim first line: what happens until there is text, the forecast, and the model. Before the
    request has started, the line says "waiting". A model without a name is called "model".

    The line ends in an ellipsis if the terminal is too narrow.

    view: The state after the newest event.
    """
    if view.started is None:
        parts = ["waiting"]
    else:
        parts = ["" if view.merged or view.panels else "reading the question"]
        parts += [describe_forecast(view.forecast)] if view.forecast else []
        parts += [view.started.model or "model"]
    return Text(" · ".join(filter(None, parts)), style="dim", no_wrap=True, overflow="ellipsis")


# Ratio of maximum to minimum. A narrower range is shown as one figure, which is then right within about a
# fifth. Untuned.
MIN_RANGE_RATIO = 1.5


def describe_forecast(forecast: Forecast) -> str:
    """Return a forecast in words, such as "direct 6-25 s, planned ~8 s"; empty if neither way has a predicted
    time.

    A range is shown if it is known and its maximum is more than MIN_RANGE_RATIO times its minimum.

    forecast: The predicted seconds of a direct and of a planned answer, with their likely ranges.
    """
    direct = _span(forecast.direct, forecast.direct_min, forecast.direct_max)
    planned = _span(forecast.planned, forecast.planned_min, forecast.planned_max)
    return ", ".join(f"{way} {span}" for way, span in (("direct", direct), ("planned", planned)) if span)


def _span(seconds: float | None, low: float | None, high: float | None) -> str | None:
    """Return predicted seconds in words, such as "~8 s" or "6-25 s"; None if `seconds` is None.

    A range is shown only if both bounds are known and `high` is more than MIN_RANGE_RATIO times `low`;
    otherwise the expected duration is shown with "~".

    seconds: The expected duration; None if the way has no prediction.
    low, high: Its likely range in seconds; None if unknown.
    """
    if seconds is None:
        return None
    if low is None or high is None or high <= MIN_RANGE_RATIO * low:
        return f"~{_figure(seconds)} s"
    return f"{_figure(low)}-{_figure(high)} s"


def _figure(seconds: float) -> str:
    """Return seconds as digits, with one decimal below 5: 3.14 -> "3.1", 12.3 -> "12".

    seconds: A duration of at least 0.
    """
    return f"{seconds:.1f}" if seconds < 5 else f"{seconds:.0f}"


def text_frame(title: str, text: str, size: Size) -> Frame:
    """Return a frame as wide as the terminal that shows the last lines of a text.

    Lines are wrapped at the terminal's width minus 4 columns. The limit is the terminal's height minus 4
    lines, or MIN_PANEL_LINES if that is more; a shorter text gives a lower frame.

    title: Written into the frame's upper border.
    text: The whole text so far.
    size: The terminal's size, which bounds the number of lines. At least MIN_PANEL_LINES lines are shown.
    """
    lines = max(MIN_PANEL_LINES, size.height - 4)
    body = last_lines(text, size.width - 4, lines)
    return Frame(body, title=title, title_align="left", border_style="cyan", box=box.ROUNDED)


def panels(branches: tuple[Panel, ...], size: Size) -> list[RenderableType]:
    """Return all branches as one grid if it fits; else a grid of the branches being written and a line for
    each other branch.

    If even that does not fit, return a line for each branch, those being written first, and leave out those
    that exceed the terminal's height.

    One grid needs at least MIN_PANEL_LINES text lines for each branch. The grid of the branches being
    written needs only 1 line each. In the last case at least one line is returned, and at most the
    terminal's height minus 2.

    branches: The branches in the plan's order, at least one.
    size: The terminal's size.
    """
    busy = tuple(panel for panel in branches if panel.writing)
    idle = tuple(panel for panel in branches if not panel.writing)
    if lines_per_panel(len(branches), size) >= MIN_PANEL_LINES:
        return [grid(branches, lines_per_panel(len(branches), size), size)]
    remaining = Size(size.width, size.height - len(idle))
    if busy and lines_per_panel(len(busy), remaining) >= 1:
        return [grid(busy, lines_per_panel(len(busy), remaining), size), *map(one_line, idle)]
    return [one_line(panel) for panel in (busy + idle)[: max(1, size.height - 2)]]


def columns_for(count: int, width: int) -> int:
    """Return how many panels are drawn side by side: no more rows than needed, and rows of about equal
    length.

    7 panels where 3 fit side by side need 3 rows, so that there are 3 columns; 4 panels need 2 rows of 2.

    count: Number of panels, at least 1.
    width: The terminal's width in columns.
    """
    rows = -(-count // max(1, width // PANEL_WIDTH))
    return -(-count // rows)


def lines_per_panel(count: int, size: Size) -> int:
    """Return the text lines of each of `count` panels that share the height below the heading: at most 12,
    and 0 or fewer if the panels do not fit.

    count: Number of panels, at least 1.
    size: The terminal's size.
    """
    rows = -(-count // columns_for(count, size.width))
    return min(12, (size.height - 3) // rows - 2)


def grid(branches: tuple[Panel, ...], lines: int, size: Size) -> RenderableType:
    """Return the panels of these branches as a grid that fills the width.

    The last row may have fewer panels than the others.

    branches: The branches in the order in which rows are filled.
    lines: Text lines of each panel.
    size: The terminal's size.
    """
    columns = columns_for(len(branches), size.width)
    table = Table.grid(expand=True)
    for _ in range(columns):
        table.add_column(ratio=1)
    text_width = size.width // columns - 4
    frames = [frame(panel, text_width, lines) for panel in branches]
    for start in range(0, len(frames), columns):
        table.add_row(*frames[start : start + columns])
    return table


def frame(panel: Panel, text_width: int, lines: int) -> Frame:
    """Return the panel of one branch: its title at the top, the end of its text, its state at the bottom. A
    branch that has not started has a dim border.

    The border has the colour of the branch's state (STYLES); a title that is too long ends in an ellipsis.

    panel: The branch.
    text_width: Number of columns for text inside the border.
    lines: Number of text lines inside the border.
    """
    return Frame(
        last_lines(panel.text, text_width, lines),
        title=Text(f"{panel.point.id} {title_of(panel)}", overflow="ellipsis", no_wrap=True),
        subtitle=Text(state(panel)),
        title_align="left",
        subtitle_align="right",
        height=lines + 2,
        box=box.ROUNDED,
        border_style=STYLES[panel.reason] if panel.started else "dim",
    )


def title_of(panel: Panel) -> str:
    """Return the title of a branch, or "closing" for the closing of an answer, which has no title of its own.

    panel: The branch.
    """
    return clean(panel.point.title) or "closing"


def one_line(panel: Panel) -> Text:
    """Return one branch as a line: number, state, title, and the end of its text while it is written.

    The text's end is made of its last 200 characters, with every run of white space as one space; it is
    shown only while the branch is written. A branch that has not started is dim.

    panel: The branch.
    """
    style = STYLES[panel.reason] if panel.started else "dim"
    line = f"{panel.point.id:>3} {state(panel):<12} {title_of(panel)}"
    if panel.writing:
        line += f": {' '.join(clean(panel.text[-200:]).split())}"
    return Text(line, style=style, no_wrap=True, overflow="ellipsis")


def state(panel: Panel) -> str:
    """Return the state of a branch in words.

    A branch that has not started says which points it waits for, or "waiting"; one that is written says its
    tokens, and tokens per step; one that ended says its tokens or why it ended.

    Examples: "after 1, 2" (waits for points 1 and 2), "12 tokens · 1.8 a step" (being written; without the
    pace if no step has run), "✓ 40 tokens" (ended by itself), "cut at 40 tokens" (reached its limit), else
    the words of ENDS.

    panel: The branch.
    """
    if not panel.started:
        return f"after {', '.join(map(str, panel.point.needs))}" if panel.point.needs else "waiting"
    if panel.reason is Reason.STOP:
        return f"✓ {with_noun(panel.tokens, 'token')}"
    if panel.reason is not None:
        return describe_end(panel.reason, panel.tokens)
    pace = f" · {panel.tokens / panel.steps:.1f} a step" if panel.steps else ""
    return f"{with_noun(panel.tokens, 'token')}{pace}"


def status(view: View) -> Text:
    """Return the line below the panels: how many branches are being written, wait and are done, and their
    tokens together.

    A branch that ended counts as done, whatever the reason of its end.

    view: The state after the newest event.
    """
    branches = view.panels
    writing = sum(panel.writing for panel in branches)
    waiting = sum(not panel.started for panel in branches)
    tokens = sum(panel.tokens for panel in branches)
    counts = f"{writing} writing · {waiting} waiting · {len(branches) - writing - waiting} done"
    return Text(f"{counts} · {with_noun(tokens, 'token')}", style="dim", no_wrap=True, overflow="ellipsis")


def final_picture(view: View, line: str) -> RenderableType:
    """Return the picture that stays on the screen after an answer: the merged text, if there is any, then the
    summary line.

    view: The state after the last event.
    line: The summary line, as `summary` returns it.
    """
    written = (answer(view.merged), Text("")) if view.merged else ()
    return Group(*written, Text(f"{line}\n", style="dim"))


def interrupted_picture(view: View) -> RenderableType:
    """Return the picture that stays on the screen after an answer was interrupted: the merged text, or, while
    branches were written, each branch's heading and text.

    The result is empty if nothing was written.

    Branches without text are left out, and the introduction of the answer, if there is one, comes first.

    view: The state after the last event that arrived.
    """
    text = view.merged
    if not is_merging(view):
        written = [panel for panel in view.panels if panel.text]
        texts = (_headed(panel, number) for number, panel in enumerate(written, 1))
        text = "\n\n".join(filter(None, (view.merged[: view.introduced], *texts)))
    return answer(text) if text else Group()


def _headed(panel: Panel, number: int) -> str:
    """Return the text of a branch below its heading. A closing has no heading, and its text is returned
    alone.

    panel: The branch.
    number: The number in the heading, which counts only branches with text, as in a complete answer.
    """
    title = panel.point.title
    return f"## {number}. {title}\n{panel.text}" if title else panel.text


class _Title(Heading):
    """A heading that is left-aligned instead of centred."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the heading's text, left-aligned; console and options are rich's, and are not used.

        console, options: Arguments that rich passes; they are not used.
        """
        self.text.justify = "left"
        yield self.text


class _Code(CodeBlock):
    """A code block that begins in the first column. Where it has the whole width, its lines are not wrapped,
    so that code copied from the terminal keeps its own indentation and line breaks.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the block with highlighted syntax, without indentation.

        White space at the end of the code is dropped. The terminal breaks a line that is longer than it is
        wide, on the screen alone; so the caller must print without cropping. In lists, quotations and panels
        lines are wrapped, because rich would crop them.

        console, options: Arguments that rich passes.
        """
        code = str(self.text).rstrip()
        syntax = Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, padding=(1, 0))
        if options.max_width < console.width:
            yield syntax
        else:
            yield from syntax.highlight(code).render(console)


class _Answer(Markdown):
    """An answer's Markdown with left-aligned headings, plain code blocks and kept indentation."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _Title,
        **dict.fromkeys(("fence", "code_block"), _Code),
    }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the segments of the Markdown, with KEPT_SPACE replaced by a space, so that copied text has
        usual spaces.

        console, options: Arguments that rich passes; they are passed on to Markdown.
        """
        for segment in super().__rich_console__(console, options):
            yield (
                segment._replace(text=segment.text.replace(KEPT_SPACE, " "))
                if isinstance(segment, Segment)
                else segment
            )


def answer(text: str) -> RenderableType:
    """Return the Markdown of an answer's text with its line breaks kept, and without links that hide their
    target.

    text: The text that the model wrote; control characters are removed.
    """
    return _Answer("\n".join(_lines(clean(text))), hyperlinks=False, code_theme="ansi_dark")


# Stands for a space that Markdown must not drop: a no-break space.
KEPT_SPACE = "\xa0"
# Matches the beginning of a line that Markdown treats as a heading, table row, code fence, list item or empty
# line.
_MARKUP = re.compile(r"\s*(#|\||```|[-*+] |\d+[.)] |$)")


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of a text as Markdown that keeps them apart.

    Markdown would join lines, and drop the indentation of code that is not fenced. A line outside of fenced
    code, lists, tables and headings therefore ends in two spaces, which is Markdown's line break, and its
    indentation is made of KEPT_SPACE. Other lines are yielded unchanged. An empty text yields nothing.

    A line that begins or ends fenced code (```) is itself yielded unchanged; a fence that is never closed
    makes all following lines code.

    text: The answer's text, without control characters.
    """
    fenced = False
    for line in text.splitlines():
        fenced ^= line.lstrip().startswith("```")
        if fenced or _MARKUP.match(line):
            yield line
        else:
            words = line.lstrip()
            yield f"{KEPT_SPACE * (len(line) - len(words))}{words}  "


def summary(
    view: View, drafter: bool = False, other_end: Finished | None = None, comparing_command: str = ""
) -> str:
    """Return one line about an answer: seconds, tokens and steps, what drafts added, and an unusual end.

    Returns "the answer did not end" if there was no last event.

    The parts are separated by "; ": the duration (with the tokens if there is a comparison), how the way was
    decided (left out if unknown), the comparison (left out without `other_end`), the work, the cost of
    polishing, and an end other than the model's own.

    view: The state after the last event.
    drafter: True if the fleet has a drafter.
    other_end: The last event of the same question answered the other way (planned or direct); None: no
        comparison.
    comparing_command: The command that asked for the comparison, such as "/compare".
    """
    if view.finished is None:
        return "the answer did not end"
    measured = view.finished.statistics
    compared = [comparison_line(other_end, comparing_command)] if other_end else []
    time = describe_duration_and_tokens(measured) if other_end else describe_duration(measured)
    way = [measured.decision] if measured.decision else []
    ending = [*describe_polishing(measured), *unusual_end(view, view.finished)]
    return "; ".join([time, *way, *compared, *describe_work(measured, drafter), *ending])


def comparison_line(other: Finished, comparing_command: str) -> str:
    """Return the comparison with the same question answered the other way. If the other answer's plan was
    dropped, the line says that there is nothing to compare; if it ended otherwise than by itself or at its
    limit, the line says why.

    The line is the other way ("planned" or "direct"), the command, and the other answer's seconds and
    tokens.

    other: The last event of the other answer.
    comparing_command: The command that asked for the other answer, such as "/compare".
    """
    if has_no_plan(other):
        return f"nothing to compare by {comparing_command}: {NO_PLAN}"
    compared = f"{way_of(other)}, by {comparing_command}: {describe_duration_and_tokens(other.statistics)}"
    return compared if other.reason in (Reason.STOP, Reason.LENGTH) else f"{compared}, {ENDS[other.reason]}"


def has_no_plan(finished: Finished | None) -> bool:
    """Return whether a plan was tried and dropped. None gives False.

    finished: The request's last event; None if the answer did not end.
    """
    return finished is not None and finished.statistics.decision.endswith(NO_PLAN)


def describe_polishing(statistics: Statistics) -> list[str]:
    """Return one text that says what polishing cost, or no text if the answer was not polished.

    statistics: Statistics of the finished request.
    """
    if "polish" not in statistics.phases:
        return []
    return [
        f"polished in {statistics.phases['polish']:.1f} s, {with_noun(statistics.polish_tokens, 'token')}"
    ]


def way_of(finished: Finished) -> str:
    """Return "planned" or "direct", which is how this answer was written.

    An answer that was stopped before its first branch counts as what the router had decided.

    finished: The request's last event.
    """
    planned = finished.statistics.branches or finished.statistics.decision.startswith("planned")
    return "planned" if planned else "direct"


def describe_duration(statistics: Statistics) -> str:
    """Return the duration of a request in words, such as "12.3 s".

    statistics: Statistics of the finished request.
    """
    return f"{statistics.seconds:.1f} s"


def describe_duration_and_tokens(statistics: Statistics) -> str:
    """Return duration and tokens of the merged text in words, such as "12.3 s (820 tokens)".

    statistics: Statistics of the finished request.
    """
    return f"{describe_duration(statistics)} ({with_noun(statistics.merged_tokens, 'token')})"


def with_noun(count: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun: (1, "step") -> "1 step", (2, "step") -> "2 steps".

    count: The number.
    singular: The noun for a count of 1.
    plural: The noun for other counts; empty: the singular with an s.
    """
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def describe_work(statistics: Statistics, drafter: bool) -> list[str]:
    """Return the work in words, such as "6 branches in 71 steps, drafts brought 1.8 tokens a step", as the
    only element; no element if nothing was written.

    The tokens are those of each branch, 1.0 without drafts. If drafting was paused in at least
    MIN_PAUSED_SHARE of the steps, the text says that instead.

    If a plan was tried and dropped, its tokens are named too. If there is no branch, the merged tokens stand
    in the place of the branches. Drafts are mentioned if they brought at least MIN_SHOWN_PACE tokens per
    step and branch, and, with a drafter, whenever a step ran.

    statistics: Statistics of the finished request.
    drafter: True if the fleet has a drafter.
    """
    branches = with_noun(statistics.branches, "branch", "branches")
    tokens = with_noun(statistics.merged_tokens, "token")
    if not (statistics.branches or statistics.merged_tokens):
        return []
    if statistics.decision.endswith(NO_PLAN):
        tokens = f"{tokens} and a dropped plan of {statistics.plan_tokens:,}"
    line = f"{branches if statistics.branches else tokens} in {with_noun(statistics.steps, 'step')}"
    if drafter and statistics.paused_share >= MIN_PAUSED_SHARE:
        return [line, "drafting paused: not profitable here"]
    drafts_helped = statistics.mean_accepted >= MIN_SHOWN_PACE or (drafter and statistics.steps)
    return [f"{line}, drafts brought {statistics.mean_accepted:.1f} tokens a step" if drafts_helped else line]


def unusual_end(view: View, finished: Finished) -> list[str]:
    """Return one text that says why the answer ended, or no text if the model ended it.

    The text is "ended in time" if the answer was shortened to end in its time. If branches ended for the
    same reason as the answer, the text counts them, unless the answer was cancelled. An answer that was
    cancelled before any branch or merged text gives "stopped before anything was written".

    view: The state after the last event, whose branches are counted by their ends.
    finished: The last event.
    """
    if finished.reason is Reason.STOP:
        return []
    if finished.statistics.in_time:
        return ["ended in time"]
    num_branches = sum(panel.reason is finished.reason for panel in view.panels)
    if num_branches and finished.reason is not Reason.CANCELLED:
        return [
            f"{num_branches} of {with_noun(len(view.panels), 'branch', 'branches')} {ENDS[finished.reason]}"
        ]
    statistics = finished.statistics
    if finished.reason is Reason.CANCELLED and not (statistics.branches or statistics.merged_tokens):
        return ["stopped before anything was written"]
    return [describe_end(finished.reason, statistics.completion_tokens)]


def describe_end(reason: Reason, tokens: int) -> str:
    """Return an end in plain words: "cut at 1,024 tokens", "stopped".

    reason: Reason of the end of an answer or branch.
    tokens: Number of tokens of that answer or branch.
    """
    return f"cut at {with_noun(tokens, 'token')}" if reason is Reason.LENGTH else ENDS[reason]


def last_lines(text: str, width: int, lines: int) -> Text:
    """Return the end of a text, wrapped to `width` cells, at most `lines` lines.

    Wrapping begins at a place that moves in jumps, so that lines do not reflow as the text grows. At a width
    of 40 cells and 10 lines, a jump is 800 characters: while the text grows from 1,600 to 2,399 characters,
    it is wrapped from character 800.

    An empty text gives an empty result. Control characters are removed.

    text: The whole text so far.
    width: Cells of a line; fewer than 8 count as 8.
    lines: Maximum number of lines, at least 1.
    """
    jump = max(width, 8) * lines * 2
    start = max(0, len(text) // jump - 1) * jump
    wrapped = Text(clean(text[start:])).wrap(SCREEN, max(width, 8))
    return Text("\n").join(wrapped[-lines:])


def clean(text: str) -> str:
    """Return a text without control characters other than newline and tab, so that a model cannot control the
    terminal.

    text: Text that the model wrote.
    """
    return "".join(
        character for character in text if character in "\n\t" or unicodedata.category(character) != "Cc"
    )
