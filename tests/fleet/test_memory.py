"""What a worker tells of its memory, and how that grows with its layers."""

from dataclasses import replace
from pathlib import Path

import pytest

from specsot.checkpoint.config import read_config
from specsot.members import Configuration, Range, Stage
from specsot.service.options import ModelOptions
from specsot_model.memory_fit import WeightForm, weight_bytes_of, weights_of
from specsot_model.weights import WeightFiles
from specsot_worker.loader import StageLoader

pytestmark = pytest.mark.torch

FREE = 1 << 30


def configuration(layers: Range) -> Configuration:
    return Configuration(1, "w", (Stage("w", "w", layers),), pages=2, page_rows=64, slots=8)


@pytest.mark.parametrize(
    "layers", [Range(1, 2), Range(1, 4), Range(2, 7), Range(0, 3), Range(5, 8), Range(0, 8)]
)
def test_weights_grow_with_layers_and_nothing_else(demo_model: Path, layers: Range) -> None:
    """That all of this, and no more, is loaded: tests/operations/test_fitting.py."""
    files, config = WeightFiles(demo_model / "base"), read_config(demo_model / "base")
    each = weight_bytes_of(files, config, WeightForm(4))
    edges = each.first * (layers.first == 0) + each.last * (layers.last == 8)
    assert weights_of(files, config, layers, WeightForm(4)) == each.layer * len(layers) + edges


def test_memory_is_reported_as_if_nothing_were_loaded(demo_model: Path) -> None:
    source = StageLoader(
        ModelOptions(demo_model / "base", dtype="fp32"), "w", free_memory=lambda device: FREE
    )
    first = source.registration()
    assert (first.memory, bool(first.host), first.gpus) == (FREE, True, ())
    source.make_stage(configuration(Range(1, 4)), Range(1, 4))
    assert source.loaded == 3, "what the master is told while a range is loaded"
    assert first.weights
    assert source.registration().memory == FREE + 3 * first.weights.layer


def test_a_worker_runs_where_the_master_says(demo_model: Path) -> None:
    """Devices stand in for GPUs here: "cpu:0" is as good as "cpu", but a name of its own."""
    asked: list[str] = []

    def room(device: str) -> int:
        asked.append(device)
        return FREE

    source = StageLoader(
        ModelOptions(demo_model / "base", dtype="fp32"),
        "w",
        free_memory=room,
        gpus=lambda device: {"A": "cpu", "B": "cpu:0"},
    )
    assert source.registration().gpus == ("A", "B")
    source.make_stage(replace(configuration(Range(1, 2)), gpu="B"), Range(1, 2))
    assert asked[-1] == "cpu:0"
    assert set(asked[:-1]) == {"cpu"}
