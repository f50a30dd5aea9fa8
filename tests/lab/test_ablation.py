"""`specsot bench ablation`: every row is one setting, on and off, and says what it did to the text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specsot_app.fleet.options import FleetOptions
from specsot_lab.bench.ablation import MEANING, SWITCHES, AblationOptions, measure, page_of

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


def test_every_switch_is_explained_and_changes_something() -> None:
    assert [one.name for one in SWITCHES] == list(MEANING)
    assert all((one.on, one.asked_on) != (one.off, one.asked_off) for one in SWITCHES)


def test_rows_on_the_demo_model_and_files_beside_the_json(tmp_path: Path) -> None:
    file = tmp_path / "ablation.json"
    wanted = FleetOptions(dtype="fp32")
    options = AblationOptions(wanted, ["Explain Photosynthesis."], 1, 12, ("drafting", "ngram"))
    assert measure(options, file) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == ["drafting", "ngram"]
    assert [(row.get("skipped"), row.get("same"), row.get("pairs")) for row in rows] == [(None, 1, 1)] * 2
    assert file.with_suffix(".md").read_text() == page_of(rows)


def test_what_needs_a_head_says_so() -> None:
    options = AblationOptions(FleetOptions(), ["Why?"], only=("drafting",), has_head=False)
    (switch,) = options.switches
    row = {"name": switch.name, "what": MEANING[switch.name], "exact": True, "skipped": "needs --draft-model"}
    assert "not measured: needs --draft-model" in page_of([row])
