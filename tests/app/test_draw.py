"""The picture of a view, at several sizes of a terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.console import ConsoleDimensions as Size

from specsot.core.skeleton import Point
from specsot.core.view import Panel, View
from specsot.events import (
    NO_PLAN,
    BranchStarted,
    BranchText,
    Finished,
    Forecast,
    Planned,
    Reason,
    Started,
    Statistics,
)
from specsot_app.core.answer_view import (
    answer,
    columns_for,
    describe_forecast,
    draw,
    final_picture,
    interrupted_picture,
    summary,
)
from tests.app.stories import DIRECT, PLANNED, watch

SIZES = [Size(60, 24), Size(100, 30), Size(160, 40), Size(24, 9)]


def render(picture: RenderableType, size: Size) -> str:
    console = Console(width=size.width, height=size.height, file=io.StringIO(), record=True)
    console.print(picture)
    return console.export_text()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("story", [PLANNED, DIRECT], ids=["planned", "direct"])
def test_every_moment_fits_the_terminal(story: Sequence[Any], size: Size) -> None:
    for seen in range(len(story) + 1):
        lines = render(draw(watch(story[:seen]), size), size).splitlines()
        assert len(lines) <= size.height
        assert max(map(cell_len, lines)) <= size.width


def test_sixteen_branches_fit_a_small_terminal() -> None:
    points = tuple(Point(number, 40, f"Point {number}") for number in range(1, 17))
    story = [Planned(points), *(BranchStarted(point.id, point.title, 40) for point in points[:8])]
    story += [BranchText(1, 0, "word " * 200)]
    for size in SIZES[:3]:
        assert len(render(draw(watch(story), size), size).splitlines()) <= size.height


def test_a_plan_is_shown_as_titles_as_it_is_written() -> None:
    text = render(draw(watch(PLANNED[:2]), SIZES[1]), SIZES[1])
    assert "1. NREM" in text
    assert "<" not in text
    assert "[" not in text


@pytest.mark.parametrize(
    "written", ["", "[", "[PLAN]\n", "[PLAN]\n1.<8", "[PLAN]\n1.<80><None>[-", "[DIRECT]\nYes"]
)
def test_there_is_no_panel_before_there_is_a_title(written: str) -> None:
    assert "╭" not in render(draw(View(skeleton=written), SIZES[0]), SIZES[0])


def test_a_numbered_list_is_a_plan_too() -> None:
    assert View(skeleton="1. Sleep\n2) Eat [well]\n").titles == "1. Sleep\n2. Eat [well]"


def test_panels_stand_side_by_side_where_there_is_room() -> None:
    assert [columns_for(3, width) for width in (60, 100, 160)] == [1, 2, 3]
    assert columns_for(6, 200) == 3, "two rows of three, not five and one"
    text = render(draw(watch(PLANNED[:10]), SIZES[2]), SIZES[2])
    assert "1 NREM Stages of Sleep" in text
    side_by_side = next(line for line in text.splitlines() if "Slow" in line)
    assert "Dreams." in side_by_side


def test_a_waiting_branch_says_what_it_waits_for() -> None:
    assert "after 1, 2" in render(draw(watch(PLANNED[:10]), SIZES[2]), SIZES[2])


def test_a_direct_answer_is_one_frame() -> None:
    text = render(draw(watch(DIRECT[:4]), SIZES[0]), SIZES[0])
    assert "answer" in text
    assert "Yes, it is." in text


def test_the_end_keeps_the_answer_and_the_line_about_it() -> None:
    view = watch(PLANNED)
    text = render(final_picture(view, summary(view)), SIZES[1])
    assert "\n2. REM 睡眠 🌙" in text
    assert text.rstrip().splitlines()[-1] == "0.5 s; 3 branches in 24 steps, drafts brought 2.5 tokens a step"


def test_an_answers_markdown_is_shown_with_its_lines_and_where_its_links_lead() -> None:
    told = "Roses are red\n**Violets** [x](http://e.x)\nif so:\n    go\n\n```\na  **b**\n\x1b[2J```"
    lines = [line.rstrip() for line in render(answer(told), Size(40, 20)).splitlines()]
    assert lines[:4] == ["Roses are red", "Violets x (http://e.x)", "if so:", "    go"]
    assert "a  **b**" in lines


def ended(reason: Reason, panels: Sequence[Reason] = (), drafts: float = 1.0, **told: Any) -> View:
    figures = Statistics(seconds=8.06, mean_accepted=drafts, branches=len(panels), **told)
    shown = tuple(Panel(Point(number, 40, "T"), reason=one) for number, one in enumerate(panels, 1))
    return View(panels=shown, finished=Finished(reason, "", (), figures))


SIX = [Reason.STOP] * 6
PLAN = ended(Reason.STOP, SIX, 1.8, steps=71, merged_tokens=392)
CUT = ended(Reason.LENGTH, paused_share=0.97, merged_tokens=1020, completion_tokens=1024, steps=1019)
ONE_CUT = ended(Reason.LENGTH, [*SIX[:4], Reason.LENGTH], steps=71)
STOPPED = ended(Reason.CANCELLED, [*SIX[:4], Reason.CANCELLED], steps=9)
POLISHED = ended(Reason.STOP, SIX, steps=71, polish_tokens=60, phases={"polish": 2.5})
BARELY = ended(Reason.STOP, paused_share=0.1, merged_tokens=9, steps=9)
TIMED = ended(Reason.LENGTH, merged_tokens=8, steps=8, in_time=True)
DROPPED: dict[str, Any] = {"merged_tokens": 216, "plan_tokens": 84, "completion_tokens": 300, "steps": 262}
UNPLANNED = ended(Reason.LENGTH, decision=f"direct: {NO_PLAN}", **DROPPED)
LEFT = "216 tokens and a dropped plan of 84 in 262 steps"
RESTED = ended(Reason.STOP, paused_share=0.6, drafts=1.4, merged_tokens=9, steps=9)
NOTHING = ended(Reason.CANCELLED, steps=16, decision="planned: asked for")
PAUSED = "drafting paused: not profitable here"


@pytest.mark.parametrize(
    ("view", "drafter", "line"),
    [
        (ended(Reason.STOP, merged_tokens=1, steps=1), False, "1 token in 1 step"),
        (NOTHING, True, "planned: asked for; stopped before anything was written"),
        (RESTED, True, f"9 tokens in 9 steps; {PAUSED}"),
        (ended(Reason.STOP, merged_tokens=3), True, "3 tokens in 0 steps"),
        (PLAN, True, "6 branches in 71 steps, drafts brought 1.8 tokens a step"),
        (CUT, True, f"1,020 tokens in 1,019 steps; {PAUSED}; cut at 1,024 tokens"),
        (BARELY, True, "9 tokens in 9 steps, drafts brought 1.0 tokens a step"),
        (ONE_CUT, False, "5 branches in 71 steps; 1 of 5 branches cut"),
        (POLISHED, False, "6 branches in 71 steps; polished in 2.5 s, 60 tokens"),
        (STOPPED, False, "5 branches in 9 steps; stopped"),
        (TIMED, False, "8 tokens in 8 steps; ended in time"),
        (UNPLANNED, False, f"direct: {NO_PLAN}; {LEFT}; cut at 300 tokens"),
    ],
)
def test_one_line_tells_about_an_answer(view: View, drafter: bool, line: str) -> None:
    assert summary(view, drafter) == f"8.1 s; {line}"


def test_an_answer_by_the_other_method_is_reported_alongside_the_first() -> None:
    assert summary(PLAN, True, CUT.finished, "/compare") == (
        "8.1 s (392 tokens); direct, by /compare: 8.1 s (1,020 tokens); "
        "6 branches in 71 steps, drafts brought 1.8 tokens a step"
    )


def test_a_plan_that_came_to_nothing_is_not_compared_with() -> None:
    line = summary(TIMED, False, UNPLANNED.finished, "--compare")
    assert f"8.1 s (8 tokens); nothing to compare by --compare: {NO_PLAN}; 8 tokens in 8 steps;" in line
    line = summary(TIMED, False, NOTHING.finished, "/compare")
    assert "; planned, by /compare: 8.1 s (0 tokens), stopped; " in line


CODE = """class Account:
    def __init__(self, balance: int = 0) -> None:
        self.balance = balance

    def add(self, amount: int) -> int:
        self.balance += amount
        return self.balance"""


@pytest.mark.parametrize("fence", ["```python", "```", "~~~"])
def test_code_copied_from_the_terminal_runs(fence: str) -> None:
    said = f"Here it is:\n\n{fence}\n{CODE}\n{fence[:3]}\n\nThat is all."
    lines = [
        line.rstrip() for line in render(final_picture(View(merged=said), "8.1 s"), SIZES[1]).splitlines()
    ]
    begin, end = lines.index("class Account:"), lines.index("That is all.")
    assert "\n".join(lines[begin:end]).rstrip() == CODE


LONG_LINE = ("x = 1; " * 20).rstrip()
LONG_CODE = View(merged=f"```\n{LONG_LINE}\n```")


@pytest.mark.parametrize("picture", [final_picture(LONG_CODE, "8.1 s"), interrupted_picture(LONG_CODE)])
def test_a_long_line_of_code_stays_one_line_when_it_is_copied(picture: RenderableType) -> None:
    written = io.StringIO()
    Console(file=written, width=40).print(picture, crop=False)
    assert LONG_LINE in written.getvalue().splitlines()


def test_a_long_line_of_code_in_a_list_is_shown_whole() -> None:
    text = render(final_picture(View(merged=f"1. It is\n   ```\n   {LONG_LINE}\n   ```"), ""), SIZES[0])
    assert "".join(text.split()).count("x=1;") == 20


def test_lines_that_do_not_fit_say_so() -> None:
    started = Started("r-1", "a-model-of-a-long-name", "auto", 7, 21)
    assert render(draw(watch([started]), Size(30, 20)), Size(30, 20)).splitlines()[0].rstrip().endswith("…")


def test_a_forecast_stands_above_what_is_written() -> None:
    started = Started("r-1", "demo", "auto", 7, 21, Forecast(24.2, 4.96, 20.0, 25.0, 4.9, 5.1))
    assert "direct ~24 s, planned ~5.0 s · demo" in render(draw(watch([started]), SIZES[1]), SIZES[1])
    planned = watch([started, Planned((), Forecast(None, 8.4, None, None, 7.9, 9.2))])
    assert "planned ~8 s · demo" in render(draw(planned, SIZES[1]), SIZES[1])


def test_a_wide_range_is_reported_in_place_of_one_figure() -> None:
    assert describe_forecast(Forecast(9.0, 6.0, 4.6, 25.0, 5.2, 8.9)) == "direct 4.6-25 s, planned 5-9 s"


def test_a_model_cannot_steer_the_terminal() -> None:
    view = View(planned=True, merged="\x1b[2Jgone\x9b31m\x07")
    text = render(draw(view, SIZES[0]), SIZES[0]) + render(final_picture(view, ""), SIZES[0])
    assert not set("\x1b\x9b\x07") & set(text)
    assert "gone" in text


def test_a_direct_answer_and_a_plan_that_are_written_together_are_both_shown() -> None:
    view = View(merged="Letters are signs.", skeleton="1. Alpha\n2. Beta")
    for size in SIZES:
        picture = render(draw(view, size), size)
        assert len(picture.splitlines()) <= size.height
        assert "Letters are signs." in picture
        assert ("2. Beta" in picture) == (size.height > 12)


def test_what_stays_of_an_answer_that_broke_has_its_introduction_and_a_closing_without_heading() -> None:
    alpha, empty = Panel(Point(2, 9, "Alpha"), "First."), Panel(Point(1, 9, "Nothing"))
    panels = (empty, alpha, Panel(Point(3, 0, ""), "So there is one."))
    view = View(merged="Letters are signs.", introduced=18, planned=True, panels=panels)
    left = render(interrupted_picture(view), SIZES[0])
    assert "Nothing" not in left
    assert left.index("Letters are signs.") < left.index("1. Alpha") < left.index("So there is one.")
    assert "closing" in render(draw(view, SIZES[0]), SIZES[0])
