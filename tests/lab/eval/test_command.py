"""The command itself, on the small pair: options as typed, a fleet, records and a summary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specsot_app.cli import main
from specsot_lab.eval.records import read_records

BASE = Path(__file__).parents[3] / "models" / "demo" / "base"


def test_every_prompt_is_asked_directly_and_with_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"eval --task planning --num_samples 1 --max-new-tokens 64 --model {BASE}"
    assert main([*line.split(), "--output", str(tmp_path)]) == 0
    records = read_records(tmp_path / "records.jsonl")
    assert {one["mode"] for one in records} == {"direct", "sot"}
    assert all(turn["tokens"] > 0 for one in records for turn in one["turns"])
    assert json.loads((tmp_path / "summary.json").read_text())["settings"]["max_new_tokens"] == 64
    assert "planning" in capsys.readouterr().out
