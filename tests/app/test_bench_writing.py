"""What writes for the tables: within the time given, with the models there are, and as rows in files."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from specsot.errors import Unavailable
from specsot_app.fleet.demo import small_pair
from specsot_app.fleet.options import FleetOptions
from specsot_bench.core.aggregate import Recording, StepSample
from specsot_bench.core.methods import HEAD, PLAINLY, Method, MethodTable, linear, windowed
from specsot_bench.runners import ModelSet

pytestmark = pytest.mark.timeout(120)


@pytest.mark.torch
def test_a_model_that_transformers_cannot_load_is_reported_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    import torch

    from specsot_bench import hf_baseline

    with ThreadPoolExecutor(1) as here:  # in place of the other process
        monkeypatch.setattr(hf_baseline, "ProcessPoolExecutor", lambda *_: here)
        monkeypatch.setattr(hf_baseline, "_held", [])
        hf_baseline._load(tmp_path / "none", torch.float32, "cpu", None)
        with pytest.raises(Unavailable, match="Transformers: ModelError: "):
            hf_baseline.HfBaseline(tmp_path, torch.float32).write((1,), 2)


@pytest.mark.torch
def test_transformers_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    import torch

    from specsot_bench import hf_baseline

    with ThreadPoolExecutor(1) as here:
        monkeypatch.setattr(hf_baseline, "ProcessPoolExecutor", lambda *_: here)
        monkeypatch.setattr(hf_baseline, "_held", [])
        hf_baseline._load(small_pair() / "base", torch.float32, "cpu", small_pair() / "small")
        rival = hf_baseline.HfBaseline(small_pair() / "base", torch.float32)
        for assisted in (False, True):
            assert len(rival.write((1,), 4, assisted, timeout=600.0).tokens) == 4
            with pytest.raises(TimeoutError):
                rival.write((1,), 64, assisted, timeout=0.0)


@pytest.mark.torch
async def test_an_answer_ends_in_time_and_the_next_is_whole() -> None:
    from specsot_bench.rounds import models_of
    from specsot_bench.runners import Runners

    async with Runners(models_of(FleetOptions(dtype="fp32"), None)) as stands:
        with pytest.raises(TimeoutError):
            await stands.write(PLAINLY, "Explain Photosynthesis.", 200, seconds=0.0)
        said = await stands.write(PLAINLY, "Explain Photosynthesis.", 12)
        assert len(said.token_ids) == 12


@pytest.mark.torch
@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (9, [3, 3, 3]),
        (6, [2, 2, 2]),
        (5, [1, 1, 1]),
        (2.5, [1, 1, None]),
        (1, [1, None, None]),
        (0, [1, None, None]),
    ],
)
def test_what_time_allows_is_written(seconds: float, written: list[int | None]) -> None:
    """Three methods in three rounds, each answer a second."""
    from specsot_bench.rounds import TableRun, write_rounds

    methods, passed = (PLAINLY, linear(4), linear(5)), [0.0]

    class Slow:
        async def write(
            self, method: Method, question: str, tokens: int, seconds: float | None = None
        ) -> Recording:
            passed[0] += 1
            if seconds is not None and seconds < 1:
                raise TimeoutError
            return Recording((StepSample(1.0, 4, 3, 1),), (1, 2, 3, 4), 1.0)

    task = TableRun(MethodTable(methods, (4,), 3), ModelSet(Path()), ("why",), "", seconds)
    wanted = [(method, 4) for method in methods]
    answers, broken = asyncio.run(write_rounds(task, Slow(), wanted, lambda: passed[0]))
    assert [
        len(answers[key]) if (key := (method.name, 4)) in answers else None for method in methods
    ] == written
    assert set(broken.values()) <= {"not reached in time", "not finished in time"}
    assert ("not finished in time" in broken.values()) == (seconds in (2.5, 1))
    assert len(answers) + len(broken) == 3


@pytest.mark.torch
def test_methods_of_every_kind_write(tmp_path: Path) -> None:
    """The demo model, drafts in int8; Transformers left out: a process of its own takes seconds."""
    from specsot_bench.rounds import TableRun, models_of, publish, read_reference

    methods = (PLAINLY, linear(4, lengthy=True), replace(HEAD[1], lengthy=False))
    wanted = FleetOptions(dtype="fp32", draft_quantization="int8")
    models, reference = replace(models_of(wanted, None), head=None), read_reference(None)[:200]
    task = TableRun(MethodTable(methods, (64, 66), 1), models, ("Explain Photosynthesis.",), reference)
    output = tmp_path / "run.json"
    assert publish(task, "quick", output) == 0
    told = json.loads(output.read_text())
    assert (told["bench"], told["settings"]["draft_quantization"]) == ("quick", "int8")
    rows = {row["name"]: row for row in told["rows"]}
    assert len(rows) == 5
    assert not [row for row in rows.values() if "skipped" in row]
    plain, drafted = (rows[f"{name}, 66 tokens"] for name in ("plain", "linear K=4"))
    assert plain["tokens_per_round"] == 1
    assert drafted["as_plain"] == 1, "fp32"
    assert drafted["accept_percent"] is not None
    assert drafted["memory_mib"] > plain["memory_mib"]
    assert drafted["ppl"] == plain["ppl"] < plain["ppl_reference"]
    assert rows["SoT, 64 tokens"]["tokens_per_round"] > 1
    page = output.with_suffix(".md").read_text(encoding="utf-8")
    assert "demo, float32, drafts int8, cpu" in page
    assert "## Recommended settings" in page
    assert "tabular" in output.with_suffix(".tex").read_text(encoding="utf-8")
    assert output.with_name("run-speed.png").read_bytes().startswith(b"\x89PNG")
    assert output.with_name("run-memory.png").exists()


def test_what_is_missing_is_reported(tmp_path: Path) -> None:
    models = ModelSet(tmp_path)
    assert models.lacks(linear(4)) == "needs --small-model"
    assert models.lacks(HEAD[0]) == "needs --draft-model, an EAGLE head"
    assert models.lacks(windowed(256)) is None
    assert replace(models, small=tmp_path).lacks(linear(4)) is None
    assert replace(models, small=tmp_path).drafts_with("model") == tmp_path
    assert models.drafts_with("none") is None
