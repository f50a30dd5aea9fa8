"""Before anything is loaded: what it takes and what there is, in one line, or a refusal in one."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import structlog

from specsot.checkpoint.config import read_config
from specsot.errors import ModelError
from specsot.members import Configuration, Head, Quantization, Range, Stage
from specsot.service.host_memory import free_memory
from specsot.service.options import DraftModelOptions, ModelOptions
from specsot_drafter import loader as drafting
from specsot_model import linear
from specsot_model.decoder import Decoder
from specsot_model.linear import describe_rounding
from specsot_model.memory_fit import WeightForm, free_on, memory_in_words, weights_of
from specsot_model.weights import HeldWeights, WeightFiles, Weights
from specsot_worker import loader as working
from tests.model.test_quantization import held_bytes

MIB = 1 << 20


def worker(base: Path, free: int | None, layers: Range | None = None) -> working.StageLoader:
    options = ModelOptions(base, dtype="fp32", kv_memory=4 * MIB)
    return working.StageLoader(options, "w", layers=layers, free_memory=lambda device: free)


def configuration(layers: Range, pages: int = 16) -> Configuration:
    return Configuration(1, "w", (Stage("w", "w", layers),), pages=pages, page_rows=64, slots=8)


class Counting(Weights):
    """Counts what is really fetched."""

    def __init__(self, files: Weights) -> None:
        self._files, self.numbers = files, 0

    def names(self) -> tuple[str, ...]:
        return self._files.names()

    def where(self, name: str) -> str:
        return self._files.where(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files.shape(name)

    def tensor(self, name, dtype, device):
        found = self._files.tensor(name, dtype, device)
        self.numbers += found.numel()
        return found


@pytest.mark.parametrize("layers", [Range(0, 3), Range(3, 5), Range(5, 8), Range(0, 8)], ids=str)
def test_what_is_counted_is_what_is_loaded(demo_model: Path, layers: Range) -> None:
    import torch

    config, files = read_config(demo_model / "base"), WeightFiles(demo_model / "base")
    counting = Counting(files)
    Decoder(config, counting, layers, torch.float32, torch.device("cpu"))
    again = config.vocab * config.hidden if layers == Range(0, 8) else 0  # read once, packed a second time
    assert weights_of(files, config, layers, WeightForm.on_device("cpu", 4, None)) == 4 * (
        counting.numbers + again
    )


@pytest.mark.parametrize("layers", [Range(5, 8), Range(0, 8)], ids=str)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_what_is_counted_is_what_is_held_in_fewer_bits(
    demo_model: Path, kind: Quantization, layers: Range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of a tied model once."""
    pytest.importorskip("numba")
    import torch

    config, files = read_config(demo_model / "base"), WeightFiles(demo_model / "base")
    counting, held = Counting(files), list[int]()

    rounded = linear.quantize

    def quantise(
        weight: torch.Tensor, kind: Quantization, bias: torch.Tensor | None = None
    ) -> linear.Multiply:
        counting.numbers -= weight.numel()
        found = rounded(weight, kind, bias)
        held.append(held_bytes(found))
        return found

    monkeypatch.setattr(linear, "quantize", quantise)
    Decoder(config, counting, layers, torch.float32, torch.device("cpu"), quantization=kind)
    form = WeightForm.on_device("cpu", 4, kind)
    assert weights_of(files, config, layers, form) == sum(held) + 4 * counting.numbers


@pytest.mark.parametrize(
    ("held", "row", "words"),
    [
        ({"kv_cache_dtype": "int8"}, 64 + 16, "int8 KV"),
        ({"quantization": "int8"}, 2 * 64, f"{describe_rounding('int8', 'cpu')}, fp16 KV"),
    ],
)
def test_rows_in_fewer_bits_take_the_registered_number_of_bytes(
    demo_model: Path, held: dict[str, Any], row: int, words: str
) -> None:
    """So more pages go into the same memory."""
    options = ModelOptions(demo_model / "base", dtype="fp32", kv_memory=MIB, **held)
    source = working.StageLoader(options, "w", free_memory=lambda device: 1 << 30)
    told = source.registration()
    assert (told.row_bytes, told.quantization) == (2 * 2 * row, words)
    with structlog.testing.capture_logs() as lines:
        stage = source.make_stage(configuration(Range(0, 2), pages=4), Range(0, 2))
    assert stage._kv.bytes == 2 * told.row_bytes * 4 * 64
    assert stage._log, "the stage before the last one logs what it passes on"
    assert [one["pages"] for one in lines if one["event"] == "memory checked"] == [
        memory_in_words(stage._kv.bytes + stage._log._rows.nbytes)
    ]


def test_slices_of_a_head_count_also_those_of_an_earlier_epoch(demo_model: Path) -> None:
    """A GPU gets them anew in each epoch; here a name stands in for one."""
    source, layers = worker(demo_model / "base", 1 << 30), Range(0, 4)
    stages = Stage("w", "w", layers), Stage("v", "v", Range(4, 8))
    told = replace(configuration(layers), stages=stages, drafter="d", head=Head((1, 3, 8), 16))
    later = replace(told, epoch=2, head=Head((), 16))
    plain = source._counted.pages(replace(told, head=None), layers)
    slices = 2 * 16 * read_config(demo_model / "base").hidden * 4
    assert source._counted.pages(source._naming_taps(told), layers) == plain + slices
    assert source._counted.pages(source._naming_taps(later), layers) == plain, "read where they are"
    source._device = "cuda:0"
    assert source._counted.pages(source._naming_taps(later), layers) == plain + slices
    with pytest.raises(ModelError, match="layers 0:4 need"):
        worker(demo_model / "base", 256 * MIB).make_stage(replace(told, head=Head((1, 3), 1 << 20)), layers)


def test_a_range_that_fits_is_reported_and_loaded(demo_model: Path) -> None:
    with structlog.testing.capture_logs() as lines:
        stage = worker(demo_model / "base", 1 << 30).make_stage(configuration(Range(0, 4)), Range(0, 4))
    assert len(stage.layers) == 4
    (line,) = [one for one in lines if one["event"] == "memory checked"]
    assert (line["what"], line["free"]) == ("layers 0:4", "1.0 GiB")
    assert line["weights"].endswith("MiB")


def test_a_device_without_room_to_measure_is_refused_in_one_line(demo_model: Path) -> None:
    """As `--device cuda` is on a GPU that another process has filled."""
    line = r"^cpu has 3.0 MiB free, and measuring one layer takes [\d.]+ MiB: stop what else runs there"
    with pytest.raises(ModelError, match=line):
        worker(demo_model / "base", 3 * MIB).registration()


def test_a_range_that_does_not_fit_is_refused_before_it_is_read(demo_model: Path) -> None:
    source = worker(demo_model / "base", 3 * MIB)
    line = (
        r"^layers 0:8 need \d+(\.\d)? MiB of weights and \d\S* MiB of KV pages, cpu has 3.0 MiB free: fewer"
    )
    with pytest.raises(ModelError, match=line):
        source.make_stage(configuration(Range(0, 8)), Range(0, 8))
    assert source._decoder is None


def test_a_worker_that_brings_its_range_does_not_even_join(demo_model: Path) -> None:
    with pytest.raises(ModelError, match="layers 0:4 need"):
        worker(demo_model / "base", 3 * MIB, Range(0, 4)).registration()


def test_a_range_that_is_here_takes_no_more(demo_model: Path) -> None:
    free = [1 << 30, 8 * MIB]
    source = worker(demo_model / "base", None)
    source._free_memory = lambda device: free.pop(0)
    for _ in range(2):
        source.make_stage(configuration(Range(0, 4)), Range(0, 4))
    assert free == []


def test_if_the_free_memory_is_unknown_a_range_is_loaded(demo_model: Path) -> None:
    assert worker(demo_model / "base", None).make_stage(configuration(Range(0, 1)), Range(0, 1))


def test_another_range_loads_only_what_it_has_besides(demo_model: Path) -> None:
    source = worker(demo_model / "base", 1 << 30)
    with structlog.testing.capture_logs() as lines:
        for layers in (Range(0, 4), Range(2, 6), Range(0, 8), Range(0, 8)):
            kept = dict(source._parts.blocks)
            source.make_stage(configuration(layers), layers)
            now = source._parts.blocks
            assert set(now) == set(range(layers.first, layers.last))
            assert all(now[index] is kept[index] for index in kept.keys() & now.keys())
    weights = weights_of(
        WeightFiles(demo_model / "base"), read_config(demo_model / "base"), Range(0, 8), WeightForm(4)
    )
    assert [one["weights"] for one in lines if one["event"] == "memory checked"][-1] == "0 B"
    assert source._loaded_bytes(range(8)) == weights


@pytest.mark.parametrize(("free", "all_of_it"), [(1 << 30, True), (12 * MIB, False), (None, False)])
def test_who_stands_by_loads_ahead_what_half_of_the_free_memory_holds(
    demo_model: Path, free: int | None, all_of_it: bool
) -> None:
    """free: bytes, before anything is loaded."""
    source = worker(demo_model / "base", free)
    if free is not None:
        source._free_memory = lambda device: free - source._loaded_bytes(range(8))
    while source.preload():
        pass
    held = source._loaded_bytes(range(8))
    assert (len(source._parts.blocks) == 8) is all_of_it
    assert held <= (free or 0) // 2
    assert bool(held) is (free is not None)
    with structlog.testing.capture_logs() as lines:
        source.make_stage(configuration(Range(0, 1)), Range(0, 1))
    checked = [line["weights"] for line in lines if line["event"] == "memory checked"]
    assert (checked[-1] == "0 B") is (free is not None)


@pytest.mark.parametrize(("free", "fits"), [(1 << 30, True), (None, True), (MIB, False)])
def test_layers_asked_for_are_loaded_ahead_as_far_as_there_is_room(
    demo_model: Path, free: int | None, fits: bool
) -> None:
    source, wanted = worker(demo_model / "base", free), Range(2, 4)
    if fits:
        while source.preload(wanted):
            pass
    else:
        with pytest.raises(
            ModelError, match="no room for layer 2 of layers 2:4 in addition to the running layers"
        ):
            source.preload(wanted)
    assert set(source._parts.blocks) == (set(range(2, 4)) if fits else set())


@pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")
@pytest.mark.parametrize(
    ("kind", "layers", "compiles", "loaded"),
    [
        ("int8", None, True, 8),
        ("int8", None, False, 1),
        ("int8", Range(2, 4), True, 2),
        (None, None, True, 1),
    ],
)
def test_while_the_kernel_is_compiled_the_other_layers_are_loaded(
    demo_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Quantization | None,
    layers: Range | None,
    compiles: bool,
    loaded: int,
) -> None:
    """loaded: layers that are loaded once one was measured, of which the first stage needs two."""
    options = ModelOptions(demo_model / "base", dtype="fp32", quantization=kind, kv_memory=4 * MIB)
    source = working.StageLoader(options, "w", layers=layers, free_memory=lambda device: 1 << 30)
    monkeypatch.setattr(working, "is_compiling", lambda: compiles)
    source.registration()
    assert len(source._parts.blocks) == loaded
    kept = dict(source._parts.blocks)
    source.make_stage(configuration(Range(2, 4)), Range(2, 4))
    assert all(source._parts.blocks[index] is kept[index] for index in (2, 3) if index in kept)
    assert set(source._parts.blocks) == {2, 3}


def test_a_drafter_that_does_not_fit(demo_model: Path) -> None:
    options = DraftModelOptions(demo_model / "base", kv_memory=MIB, draft_model=demo_model / "eagle3")
    with pytest.raises(ModelError, match=r"^eagle drafts need .* of KV pages, cpu has 1.0 MiB free"):
        drafting.DraftLoader(options, "d", free_memory=lambda device: MIB).registration()


def test_less_of_machine_and_container_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  4096 kB\nMemAvailable:  2048 kB\n")
    assert free_memory(meminfo, tmp_path / "nowhere") == 2 * MIB
    for name, text in (("max", "1000000"), ("current", "600000"), ("stat", "anon 1\ninactive_file 100000")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_memory(meminfo, tmp_path) == 500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(meminfo, tmp_path) == 2 * MIB
    assert free_memory(tmp_path / "nowhere", tmp_path) is None


def test_this_machine_has_some() -> None:
    assert (free_on("cpu") or 0) > MIB
    assert free_on("meta") is None


def test_sizes_in_words() -> None:
    assert [memory_in_words(size) for size in (0, 1023, 1536, 200 * MIB, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "200 MiB",
        "3.0 TiB",
    ]


def test_a_tied_head_counts_as_the_table_it_is(demo_model: Path) -> None:
    import torch

    config = read_config(demo_model / "base")
    held = HeldWeights({f"{config.names.embedding}.weight": torch.zeros(7, 3)}, "a test")
    assert weights_of(held, config, Range(config.layers - 1, config.layers), WeightForm(2)) == 2 * 21
