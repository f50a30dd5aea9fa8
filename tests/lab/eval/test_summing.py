"""Where a plan pays, by made-up records, and how it is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specsot_lab.eval.aggregate import UNCLEAR_NOTE, CategoryRow, page_of, pairs_of, rows_by_category


def turn(seconds: float, tokens: int = 100) -> dict[str, Any]:
    return {"text": "", "seconds": seconds, "tokens": tokens, "branches": 3}


def record(mode: str, quality: float | None, *turns: dict[str, Any]) -> dict[str, Any]:
    scores = {} if quality is None else {"coverage": quality}
    about = {"task": "planning", "category": "planning/travel", "id": "a", "mode": mode}
    return {**about, "scores": scores, "turns": turns}


def line_of(direct: float | None, sot: float | None, seconds: float) -> CategoryRow:
    pairs = pairs_of([record("direct", direct, turn(2.0)), record("sot", sot, turn(seconds))])
    (line,) = rows_by_category(pairs)
    return line


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        (line_of(0.5, 0.5, 1.0), "sot"),
        (line_of(0.5, 0.4, 1.0), "direct"),
        (line_of(0.5, 0.9, 2.0), "direct"),
        (line_of(0.0, 0.5, 1.0), "sot"),
        (line_of(0.5, 0.0, 1.0), "direct"),
        (line_of(0.0, 0.0, 1.0), "unclear"),
        (line_of(None, None, 1.0), "unclear"),
        (line_of(None, None, 3.0), "unclear"),
    ],
)
def test_a_plan_pays_where_it_is_faster_and_no_worse_by_all_that_is_known(
    line: CategoryRow, verdict: str
) -> None:
    assert line.verdict == verdict
    shown = page_of([line]).splitlines()
    assert shown[2].split("|")[-2].strip() == verdict
    assert (shown[-1] == UNCLEAR_NOTE) == (verdict == "unclear")


def test_only_turns_that_both_have_are_compared() -> None:
    direct = record("direct", 0.5, turn(2.0), turn(2.0), turn(50.0))
    (line,) = rows_by_category(pairs_of([direct, record("sot", 0.5, turn(1.0), turn(1.0))]))
    assert (line.questions, line.direct_seconds, line.sot_seconds, line.speedup) == (1, 4.0, 2.0, 2.0)


def test_a_question_that_was_answered_one_way_only_does_not_count() -> None:
    assert pairs_of([record("direct", 0.5, turn(2.0))]) == []
    assert pairs_of([record("direct", 0.5, turn(2.0)), record("sot", None)]) == []


def test_the_table() -> None:
    plain = CategoryRow("planning", "planning/trip", 99, 0.42, 1.0, 9.0, 5.0, 1234.5, 2345.6, 1.0)
    unscored = CategoryRow("vicuna", "vicuna/x", 80, None, None, 9.0, 5.0, 31.2, 55.0, 0.5)
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in page_of([plain, unscored]).splitlines()
    ]
    assert cells[2] == ["planning", "planning/trip", "99", "0.42", "1.00", "1234.5", "2345.6", "1.90", "sot"]
    assert cells[3] == ["vicuna", "vicuna/x", "80", "-", "-", "31.2", "55.0", "1.76", "unclear"]


@pytest.mark.slow
def test_every_category_is_in_the_plot(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    from specsot_lab.eval.running import draw_panels, plot

    lines = [line_of(0.5, 0.4, 1.0), line_of(None, None, 3.0)]
    panels: Any = Figure().subplots(1, 2)
    draw_panels(panels, lines)
    speed, quality = panels
    assert [one.get_text() for one in speed.get_yticklabels()] == ["planning: travel (1)"] * 2
    assert [round(bar.get_width(), 2) for bar in speed.patches] == [2.0, 0.67]
    assert [bar.get_width() for bar in quality.patches] == [0.5, 0, 0.4, 0]
    assert [one.get_text() for one in quality.texts] == ["not scored"]
    plot(lines, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
