"""`specsot bench precision`: what is put side by side, and one base with its head, whole and in 8 bits."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

from specsot.members import QUANTIZATIONS  # noqa: E402
from specsot.service.options import ModelOptions  # noqa: E402
from specsot_lab.bench.policies import ReadingOptions  # noqa: E402
from specsot_lab.bench.precision import Precision, head_trial_of, line_of, measure, precisions, rows_of  # noqa: E402

EIGHT = Precision("fp32", draft_quantization="fp8")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_base_once_and_the_whole_one_first(dtype: str) -> None:
    found = list(precisions(dtype, dict.fromkeys(QUANTIZATIONS, "fp32")))
    names = [one.name for one in found]
    assert len(set(names)) == len(names)
    assert (found[0], found[0].name) == (Precision("fp32"), "fp32")
    assert (
        {one.quantization for one in found}
        == {one.draft_quantization for one in found}
        == {None, *QUANTIZATIONS}
    )
    bases = [one.base for one in found]
    assert len(list(groupby(bases))) == len(set(bases)), "each is loaded once"
    assert Precision("bf16", "int4", "int8", "fp8").name == "int4, int8 KV, head fp8"


def test_every_precision_is_shown_as_soon_as_it_is_measured(
    demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is broken off has shown its figures; what cannot be had is named, and the others follow."""
    text = tmp_path / "text"
    text.write_text("The heart is a muscle that pumps blood through the body. " * 12)
    reading = ReadingOptions(ModelOptions(demo_model / "base", dtype="fp32"), text, 100, 1)
    assert measure([reading], None, None) == 0
    shown, names = (
        capsys.readouterr(),
        [one.name for one in precisions("fp32", dict.fromkeys(QUANTIZATIONS, "fp32")) if one == one.base],
    )
    assert [line.partition(":")[0] for line in shown.err.splitlines()] == names
    assert "perplexity" in shown.err.splitlines()[0]
    row = {"name": "int4", "weight_bytes": 1 << 20, "skipped": "int4 weights need numba"}
    assert line_of(row) == "int4: 1.0 MiB, skipped: int4 weights need numba"


def test_a_head_in_eight_bits_leaves_the_base_alone(demo_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("The heart is a muscle that pumps blood through the body. " * 12)
    weights = ModelOptions(demo_model / "base", dtype="fp32")
    reading = ReadingOptions(weights, text, 100, 1)
    writing = head_trial_of(weights.base, demo_model / "eagle3", 12, of_demo=True)
    assert writing is not None
    few = replace(writing, prompts=writing.prompts[:2])
    whole, eight = rows_of(reading, few, (EIGHT.base, EIGHT))
    assert (whole["perplexity"], whole["weight_bytes"]) == (eight["perplexity"], eight["weight_bytes"])
    for one in (whole, eight):
        assert 1.3 < one["tokens_per_step"] <= 24 / one["steps"] + 8
    (alone,) = rows_of(
        replace(reading, weights=replace(weights, kv_cache_dtype="int8")),
        None,
        (Precision("fp32", kv_dtype="int8"),),
    )
    assert "tokens_per_step" not in alone
    assert alone["perplexity"] == pytest.approx(whole["perplexity"], rel=0.02)
    assert alone["kv_bytes"] < whole["kv_bytes"] / 3
