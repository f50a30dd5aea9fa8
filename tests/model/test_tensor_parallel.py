"""Layers that are split over devices compute what whole ones do; a CPU, taken twice, is two devices."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specsot.checkpoint.config import read_config
from specsot.core.frames import Opening
from specsot.core.tree import ancestry
from specsot.errors import InvalidRequest
from specsot.members import Range
from specsot.service.options import ModelOptions
from specsot_model.decoder import Decoder
from specsot_model.loaded_parts import LoadedParts
from specsot_model.tensor_parallel import SplitBlock, SplitPages, devices_of
from specsot_model.weights import WeightFiles
from specsot_worker.memory import LayerMemory
from specsot_worker.stage import DecoderStage
from tests.conftest import some
from tests.model.tiny import PAGE_ROWS, Ring, greedy_reference, load, write_model
from tests.models import write_base
from tests.worker.test_heads import HEADS
from tests.worker.writers import PAGE, Writer, feed, rows_of

PROMPT = [7, 99, 3, 50, 21, 21, 64, 8, 15, 30, 77, 41, 5, 90, 13, 2, 66, 38, 4, 19]
TWO_GPUS = pytest.param(
    "cuda:0", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
)


def split(directory: Path, cuts: tuple[int, ...], device: str = "cpu", parts: int = 2) -> list[Decoder]:
    ranges = [Range(*each) for each in zip((0, *cuts), cuts)]
    return [Decoder.load(directory, each, torch.float32, device, tensor_parallel=parts) for each in ranges]


@pytest.mark.parametrize("device", ["cpu", TWO_GPUS])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt_neox"])
def test_split_layers_in_ranges_write_what_transformers_write(kind: str, device: str, tmp_path: Path) -> None:
    """Biases of products that are summed count once; a fused projection and parallel layers too."""
    model = write_model(tmp_path, kind)
    ring = Ring.of(split(tmp_path, (1, 3), device))
    written, logits = ring.write(PROMPT, 12)
    assert written == greedy_reference(model, PROMPT, 12)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT + written[:-1]])).logits[0]
    torch.testing.assert_close(logits.cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("device", ["cpu", TWO_GPUS])
def test_a_tree_and_taps_see_what_they_see_in_whole_layers(device: str, tmp_path: Path) -> None:
    write_model(tmp_path)
    parents, positions = (0, 0, 0, 1, 1, 2, 3), [20, 21, 21, 22, 22, 22, 23]
    taps = {layer: torch.randn(5, 32, generator=torch.Generator().manual_seed(layer)) for layer in (0, 2)}
    passed: list[Any] = []
    for decoders in (split(tmp_path, (3,), device), load(tmp_path, (3,), device)):
        ring = Ring.of(decoders)
        ring.feed(PROMPT, 0)
        here = {layer: tap.to(device) for layer, tap in taps.items()}
        passed.append(ring.feed([11, 12, 13, 14, 15, 16, 17], 20, positions, ancestry(parents), here))
    torch.testing.assert_close(passed[0], passed[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("heads", some([None, HEADS], 1))
def test_a_stage_keeps_pages_of_all_parts_alike(heads: Any, tmp_path: Path) -> None:
    """Trees, accepted rows that move, and windows of single heads."""
    base, rows = write_base(tmp_path / "base"), []
    for parts in (1, 2):
        decoder = Decoder.load(base, Range(0, 2), torch.float32, "cpu", tensor_parallel=parts)
        stage = DecoderStage(decoder, 40, PAGE)
        writers = [Writer(sequence, random.Random(sequence)) for sequence in (1, 2)]
        feed(writers, stage, 60, (Opening(1, 60, heads=heads), Opening(2, 60)))
        rows.append([rows_of(writer) for writer in writers])
    torch.testing.assert_close(rows[0], rows[1], atol=1e-4, rtol=1e-4)


def test_each_part_holds_its_share(tmp_path: Path) -> None:
    write_model(tmp_path)
    parts = LoadedParts()
    decoder = Decoder.load(tmp_path, None, torch.float32, "cpu", tensor_parallel=2, parts=parts)
    block, kv = parts.blocks[0], decoder.make_kv(4, PAGE_ROWS)
    assert isinstance(block, SplitBlock)
    assert isinstance(kv, SplitPages)
    shapes = [(tuple(part.qkv.shape), tuple(part.out.shape)) for part in block.parts]
    assert shapes == [((32, 32), (32, 16))] * 2  # of 64 and 32: four heads, and two of keys and of values
    whole = load(tmp_path)[0].make_kv(4, PAGE_ROWS)
    assert [2 * part.bytes for part in kv.parts] == [whole.bytes] * 2
    assert kv.bytes == whole.bytes


def test_memory_is_counted_for_each_gpu(tmp_path: Path) -> None:
    write_model(tmp_path)
    config, files = read_config(tmp_path), WeightFiles(tmp_path)
    one, two = (
        LayerMemory(
            ModelOptions(tmp_path, dtype="bf16", device="cuda:0", tensor_parallel=parts), config, files
        )
        for parts in (1, 2)
    )
    inner = Range(1, 2)
    assert (two.weights(inner), two.row_in()) == (one.weights(inner) // 2, one.row_in() // 2)
    assert (one.parts.first, one.parts.last) == (two.parts.first, two.parts.last)
    assert 0 < two.graphs(kernels=True) < one.graphs(kernels=True), "no frames of prompts of more rows"
    assert replace(two, config=replace(config, mlp="plain")).graphs(kernels=True) == 0


@pytest.mark.parametrize(
    ("kind", "parts", "line"),
    [
        ("llama", 3, "tensor_parallel 3 does not divide 4 heads"),
        ("llama", 4, "tensor_parallel 4 does not divide 2 key-value heads"),
        ("llama", 0, "tensor_parallel must be 1 or more, got 0"),
        ("mixtral", 2, "tensor_parallel does not work with layers with experts"),
    ],
)
def test_what_cannot_be_split_is_refused(kind: str, parts: int, line: str, tmp_path: Path) -> None:
    write_model(tmp_path, kind)
    with pytest.raises(InvalidRequest, match=line):
        split(tmp_path, (3,), parts=parts)


def test_other_forms_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    given = tmp_path, None, torch.float32, "cpu"
    with pytest.raises(InvalidRequest, match="does not work with quantized weights"):
        Decoder.load(*given, quantization="int8", tensor_parallel=2)
    with pytest.raises(InvalidRequest, match="--device cuda:0"):
        devices_of("cuda", 2)
