"""What the lab makes of scores: a threshold that lets few single answers through, a table, a file."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from specsot.errors import InvalidRequest
from specsot_lab.eval import threshold
from specsot_lab.eval.threshold import ScoredPrompt, auc, rows_of, threshold_of
from specsot_master.prompts import read_threshold


def scored(several: list[float], one: list[float], rule: bool | None = None) -> list[ScoredPrompt]:
    return [ScoredPrompt("list", True, rule, score) for score in several] + [
        ScoredPrompt("chat", False, rule, score) for score in one
    ]


def test_a_threshold_stands_between_what_it_lets_through_and_what_it_does_not() -> None:
    found = scored([3.0, 2.0, -1.0], [-2.0] * 60 + [5.0, -0.5])
    assert threshold_of(found) == pytest.approx(0.75), "one of 62 may pass"
    assert auc(found) == pytest.approx((61 + 61 + 60) / 3 / 62)


def test_a_score_that_separates_nothing_has_no_threshold() -> None:
    assert threshold_of(scored([0.0, 1.0] * 20, [0.0, 1.0, 2.0] * 20)) is None
    assert threshold_of(scored([], [1.0])) is None
    assert auc(scored([1.0], [1.0])) == 0.5


def test_rules_come_first_and_the_score_decides_the_remaining_cases() -> None:
    found = [
        ScoredPrompt("list", True, None, 2.0),
        ScoredPrompt("list", True, True, -9.0),
        ScoredPrompt("list", True, False, 9.0),
        ScoredPrompt("list", True, None, None),
    ]
    (row,) = rows_of(found, 1.0)
    assert (row["rules"], row["undecided"], row["score"], row["router"]) == (0.25, 0.5, 0.5, 0.5)


def test_what_was_measured_is_what_the_master_reads(tmp_path: Path) -> None:
    out = io.StringIO()
    threshold.write_result(scored([3.0] * 9, [-2.0] * 9), tmp_path / "router.json", out)
    assert read_threshold(tmp_path) == 0.5
    assert "AUC of 1.000" in out.getvalue()
    threshold.write_result(scored([1.0], [1.0]), tmp_path / "router.json", out)
    assert read_threshold(tmp_path) is None


def test_the_bundled_prompts_are_labelled_and_others_may_be_given(tmp_path: Path) -> None:
    bundled = threshold.read_labelled(None)
    assert {planned for _, planned, _ in bundled} == {True, False}
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"category": "a", "planned": True, "question": "b"}) + "\n\n")
    assert threshold.read_labelled(file) == [("a", True, "b")]
    file.write_text("{}")
    with pytest.raises(InvalidRequest, match="KeyError"):
        threshold.read_labelled(file)
