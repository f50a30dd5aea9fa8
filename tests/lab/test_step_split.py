"""`specsot bench steps`: phases and kinds of work add up to steps that write what plain decoding writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specsot_app.fleet.options import FleetOptions
from specsot_bench.rounds import models_of
from specsot_lab.bench.step_split import KINDS, PHASES, kind_of, measure_models

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


def test_the_demo_s_steps_by_phase_and_by_kind(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    assert (
        measure_models(models_of(FleetOptions(dtype="fp32"), None), "Explain Photosynthesis.", 2, (2,), file)
        == 0
    )
    told = json.loads(file.read_text())
    rows = {row["name"]: row for row in told["rows"]}
    assert list(rows) == ["plain", "plain, 2 branches", "eagle", "eagle, 2 branches"]
    for row in rows.values():
        assert list(row["phases"]) == list(PHASES)
        assert list(row["kinds"]) == list(KINDS)
        assert sum(row["phases"].values()) == pytest.approx(row["step_ms"], rel=0.01)
    assert (rows["plain"]["tokens_per_step"], rows["plain, 2 branches"]["tokens_per_step"]) == (1.0, 2.0)
    assert rows["plain"]["phases"]["draft"] == 0.0 < rows["eagle"]["phases"]["draft"]
    assert rows["eagle"]["rows_per_step"] > 8
    assert {path.name for path in tmp_path.iterdir()} >= {"steps.json", "steps.md"}


def test_operations_have_a_kind() -> None:
    names = (
        "mkldnn::_linear_pointwise",
        "aten::mm",
        "aten::scaled_dot_product_attention",
        "aten::index_put_",
        "aten::topk",
    )
    assert [kind_of(name) for name in names] == ["products", "products", "attention", "copies", "other ops"]
