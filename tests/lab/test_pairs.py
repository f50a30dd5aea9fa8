"""`specsot bench ablation` and `demo`: every row is one way against another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specsot.core.frames import Frame
from specsot_app.cli import main
from specsot_app.fleet.options import FleetOptions
from specsot_bench.asking import questions_of
from specsot_bench.rounds import models_of
from specsot_lab.bench.pairs import DEMO, PairOptions, ablation_of, measure, page_of
from specsot_lab.bench.stage_switches import RowByRowStage, SingleThread
from specsot_master.core.limits import check_plan
from specsot_model.core.kv_plan import KvPlan
from specsot_model.kv import Moves
from specsot_worker.stage import DecoderStage

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


TABLES = {"ablation": ablation_of((3, 5), (64, 256)), "demo": DEMO}


def options_of(table: str, *only: str, lengths: tuple[int, ...] = (12,)) -> PairOptions:
    fleet = FleetOptions(dtype="fp32")
    models = models_of(fleet, None)
    contrasts = [one for one in TABLES[table] if one.name.startswith(only)]
    return PairOptions(table, fleet, models, questions_of(None, True, ()), contrasts, 1, lengths)


@pytest.mark.parametrize("table", TABLES)
def test_every_row_is_explained_and_changes_something(table: str) -> None:
    rows = TABLES[table]
    assert len({one.name for one in rows}) == len(rows)
    assert all(one.explanation and one.a != one.b for one in rows)
    sides = [side for one in rows for side in (one.a, one.b)]
    assert all(replace(FleetOptions(), **dict(side.fleet)) for side in sides), "of options there are"


def test_rows_on_the_demo_model_and_files_alongside_the_json(tmp_path: Path) -> None:
    file = tmp_path / "ablation.json"
    assert measure(options_of("ablation", "drafting", "ngram"), file) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == ["drafting", "ngram"]
    assert [(row.get("skipped"), row.get("same"), row.get("pairs")) for row in rows] == [(None, 1, 1)] * 2
    assert file.with_suffix(".md").read_text() == page_of(rows) + "\n"
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_what_no_option_switches_off_is_compared_in_one_thread(tmp_path: Path) -> None:
    """Accepted rows that are moved one by one give the same text; a CPU has no graphs to compare with."""
    file = tmp_path / "ablation.json"
    assert measure(options_of("ablation", "kv-moves", "graphs", lengths=(40,)), file) == 0
    moves, graphs = json.loads(file.read_text())["rows"]
    assert (moves.get("skipped"), moves["same"], moves["tokens"]) == (None, 1, [40, 40])
    assert "graphs are captured on GPUs alone" in graphs["skipped"]


def test_a_stage_that_moves_row_by_row_leaves_the_rows_of_one_that_moves_all() -> None:
    """Over trees whose accepted nodes are not their first ones."""
    models = options_of("ablation").models
    loop, moves = SingleThread(models), list[tuple[int, int]]()

    class Counting(RowByRowStage):
        def _prepare_pages(self, frame: Frame, plan: KvPlan) -> Moves:
            moves.extend(plan.moves)
            return super()._prepare_pages(frame, plan)

    wanted, _, _ = loop.write("What are the benefits of exercise?", 60, DecoderStage)
    found, _, _ = loop.write("What are the benefits of exercise?", 60, Counting)
    assert found == wanted
    assert len(moves) > 3


@pytest.mark.full
def test_a_plan_is_compared_with_an_answer_as_long_whole_and_by_its_branches(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    assert measure(options_of("demo", "sot (none) /"), file) == 0
    whole, branches = json.loads(file.read_text())["rows"]
    assert (whole["aim"], branches["aim"]) == (3.0, 4.5)
    assert whole["tokens"][0] == whole["tokens"][1] > 64
    assert branches["tokens"] == whole["tokens"]
    assert branches["tokens_per_second"][0] > whole["tokens_per_second"][0], "without the plan"
    assert branches["tokens_per_second"][1] == whole["tokens_per_second"][1]
    assert "aim" in page_of([whole])


def test_every_k_window_and_length_that_is_asked_for_is_a_row() -> None:
    names = [one.name for one in TABLES["ablation"]]
    assert names[-4:] == ["tree, K=3", "tree, K=5", "window 64", "window 256"]
    assert [one.name for one in ablation_of((4,), (64,))][-2:] == ["tree", "window"]
    rows = options_of("demo", "plain / T", "eagle / plain, branch", lengths=(8, 16)).rows
    assert [(one.name, tokens) for one, tokens in rows] == [
        ("plain / Transformers generate, 8 tokens", 8),
        ("plain / Transformers generate, 16 tokens", 16),
        ("eagle / plain, branch turns", 8),
    ]


def test_a_planned_row_is_measured_also_where_fewer_tokens_are_asked_for_than_a_plan_needs() -> None:
    options = options_of("ablation", "drafting", "plan", "parallel", lengths=(32,))
    assert [(one.name, tokens) for one, tokens in options.rows] == [
        ("drafting", 32),
        ("plan", 64),
        ("parallel", 64),
    ]
    for contrast, tokens in options.rows:
        for side in (contrast.a, contrast.b):
            check_plan(options.ask(0, side.request, tokens))
    several = options_of("ablation", "plan", lengths=(16, 32, 128)).rows
    assert [(one.name, tokens) for one, tokens in several] == [
        ("plan, 64 tokens", 64),
        ("plan, 128 tokens", 128),
    ]


def test_what_needs_a_head_says_so() -> None:
    row = {"name": "drafting", "what": "trees", "exact": True, "skipped": "needs --draft-model"}
    assert "not measured: needs --draft-model" in page_of([row])


def test_an_unknown_row_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ablation", "--only", "luck"]) == 2
    assert "got 'luck'" in capsys.readouterr().err
