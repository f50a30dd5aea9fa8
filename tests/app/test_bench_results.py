"""What every measurement leaves behind, lab/results/raw included: one shape, rows with names of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specsot_bench.results import named, write_results

STORED = sorted((Path(__file__).resolve().parents[2] / "lab" / "results" / "raw").glob("*.json"))


def test_rows_are_called_after_what_they_are_of(tmp_path: Path) -> None:
    rows = named([{"what": "verify", "rows": 8, "ms": 0.5}, {"what": "plain", "ms": 0.25}], "what", "rows")
    assert [row["name"] for row in rows] == ["verify, rows 8", "plain"]
    assert rows[0]["ms"] == 0.5
    file = tmp_path / "deep" / "run.json"
    write_results(file, "gpu", {"device": "none"}, rows)
    check(json.loads(file.read_text()))


@pytest.mark.parametrize("file", STORED, ids=lambda file: file.name)
def test_what_is_stored_has_the_one_shape(file: Path) -> None:
    check(json.loads(file.read_text()))


def check(told: dict[str, object]) -> None:
    assert list(told) == ["bench", "version", "machine", "settings", "rows"]
    rows = told["rows"]
    assert isinstance(rows, list)
    names = [row["name"] for row in rows]
    assert names
    assert len(set(names)) == len(names)
