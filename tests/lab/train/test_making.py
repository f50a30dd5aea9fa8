"""Kept rows are used for what they were made of, and for nothing else."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specsot.errors import ModelError
from specsot.members import Range
from specsot_lab.train import rows as stock
from specsot_lab.train.running import ROWS_FILE, make_rows, stored_rows_of, train
from specsot_lab.train.settings import AnswerOptions, HeadPlan, Learning, TrainOptions
from specsot_model.decoder import Decoder
from tests.models import Shape, write_base

SHAPE = Shape(layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, inner=48, vocabulary=8192)
WANTED = TrainOptions(
    model=Path("base"),
    output=Path("head"),
    questions=(Path("questions.txt"),),
    phrasings=("Explain {}.",),
    data=(Path("data.txt"),),
    start=None,
    plan=HeadPlan(),
    learning=Learning(length=64),
    asking=AnswerOptions(direct=1, plan_tokens=2, answer_tokens=2),
    dtype="fp32",
    device="cpu",
)
ALONE = {"questions": (), "phrasings": ("{}",), "data": (), "asking": AnswerOptions()}
OTHER = (Path("other.txt"),)


def deaf(what: str, done: int, total: int) -> Callable[[int], object]:
    return lambda more: None


@pytest.fixture(scope="module")
def folder(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bases and texts, and a head's directory with the rows that WANTED makes."""
    folder = tmp_path_factory.mktemp("making")
    for seed, name in enumerate(("base", "retrained")):
        base = write_base(folder / name, SHAPE, seed)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo_model / "base" / file, base / file)
    (folder / "questions.txt").write_text("tides\nice\n")
    (folder / "copy.txt").write_text("tides\nice\n")
    (folder / "data.txt").write_text("The moon pulls at the sea.\n")
    (folder / "other.txt").write_text("The moon pulls at the sea!\n")
    with pytest.MonkeyPatch.context() as there:
        there.chdir(folder)
        make_rows(WANTED, Decoder.load(WANTED.model, Range(0, 1), torch.float32, "cpu"), deaf)
    return folder


@pytest.fixture(autouse=True)
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("changes", [{}, ALONE, {"questions": (Path("copy.txt"),)}])
def test_rows_of_what_is_given_or_with_nothing_given_are_used(changes: dict[str, Any]) -> None:
    assert len(stored_rows_of(replace(WANTED, **changes)) or ()) >= 5  # two plans, two answers, a text


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"questions": OTHER}, "--questions"),
        ({"phrasings": ("{}?",)}, "--phrasing"),
        ({"asking": AnswerOptions(direct=0.5, plan_tokens=2, answer_tokens=2)}, "--direct"),
        ({"asking": AnswerOptions(direct=1, plan_tokens=3, answer_tokens=2)}, "--plan-tokens"),
        ({"asking": AnswerOptions(direct=1, plan_tokens=2, answer_tokens=3)}, "--answer-tokens"),
        ({"data": OTHER}, "--data"),
        ({"data": ()}, "--data, --length"),
        ({"learning": Learning(length=32)}, "--length"),
        ({"model": Path("retrained")}, "--model"),
        ({"model": Path("retrained"), **ALONE}, "--model"),
    ],
)
def test_rows_of_something_else_are_refused(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(ModelError, match=rf"{ROWS_FILE} was made with other {names}; name another --output"):
        train(replace(WANTED, **changes), io.StringIO(), io.StringIO())


def test_rows_of_unknown_making_are_used_only_where_no_sources_are_given(tmp_path: Path) -> None:
    wanted = replace(WANTED, output=tmp_path)
    assert stored_rows_of(wanted) is None
    stock.save([stock.row_of([((1, 2, 3), True)], 0)], wanted.training / ROWS_FILE)
    assert len(stored_rows_of(replace(wanted, **ALONE)) or ()) == 1
    with pytest.raises(ModelError, match=f"{ROWS_FILE} does not say what it was made of"):
        train(wanted, io.StringIO(), io.StringIO())
