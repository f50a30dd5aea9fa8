"""Latent attention: what its pages hold, in which forms its layers run, and what is refused for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specsot.checkpoint.config import make_config, read_config
from specsot.errors import InvalidRequest
from specsot.members import Range
from specsot_model.decoder import Decoder
from specsot_model.kv import KVPages
from specsot_model.loaded_parts import AbsentWeights
from specsot_model.memory_fit import WeightForm, kv_page_bytes, weights_of
from specsot_model.published import open_weights
from tests.model.other_families import load_other
from tests.model.tiny import PAGE_ROWS, Ring, load, write_model

PROMPT = [7, 99, 3, 50, 21, 21, 64, 8, 15, 30, 77, 41, 5, 90, 13, 2, 66, 38, 4, 19]
# Shapes of published models, as far as pages depend on them: family, layers, heads, and the bytes of a token.
PUBLISHED = [
    ("youtu", 32, 16, 36_864),
    ("deepseek_v2", 27, 16, 31_104),  # Lite
    ("glm4_moe_lite", 47, 20, 54_144),  # GLM-4.7-Flash
    ("mistral4", 36, 32, 23_040),  # Small 4
    ("kimi_k2", 61, 64, 70_272),
]


@pytest.mark.parametrize(("kind", "layers", "heads", "expected"), PUBLISHED)
def test_a_token_takes_one_row_for_all_heads(kind: str, layers: int, heads: int, expected: int) -> None:
    fields = {"model_type": kind, "hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 100}
    fields |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    config = make_config(fields, {}, Path("config.json"))
    assert kv_page_bytes(config, Range(0, layers), 1, 2) == expected


@pytest.mark.parametrize("form", ["auto", "int8"])
def test_pages_take_what_was_counted(form: Any, tmp_path: Path) -> None:
    write_model(tmp_path, "deepseek_v3")
    decoder = Decoder.load(tmp_path, Range(1, 3), torch.bfloat16, "cpu", kv_dtype=form)
    counted = kv_page_bytes(decoder.config, decoder.layers, 4 * PAGE_ROWS, 2, form)
    assert decoder.make_kv(4, PAGE_ROWS).bytes == counted


def test_weights_take_what_was_counted(tmp_path: Path) -> None:
    """From the files, and from the config before there are files; what selects tokens is not loaded."""
    for kind in ("deepseek_v32", "deepseek_v2"):
        write_model(tmp_path / kind, kind)
        config, files = read_config(tmp_path / kind), open_weights(tmp_path / kind)
        absent = AbsentWeights(("model.embed_tokens.weight",), config)
        for form in (WeightForm(4), WeightForm(4, "int8", packed=True)):
            counts = [weights_of(source, config, Range(0, 3), form) for source in (files, absent)]
            assert counts[0] == counts[1] > 0


def test_the_logits_are_those_of_keys_and_values_of_each_head(tmp_path: Path) -> None:
    """The family through Transformers' own modules, which store keys and values of all heads."""
    write_model(tmp_path, "glm4_moe_lite")
    ours, expanded = Ring.of(load(tmp_path, (1, 3))), Ring.of(load_other(tmp_path, (1, 3)))
    told, _ = ours.feed(PROMPT, 0)
    torch.testing.assert_close(told, expanded.feed(PROMPT, 0)[0], atol=1e-4, rtol=0)
    assert sum(kv.bytes for kv in ours.kvs) < sum(kv.bytes for kv in expanded.kvs) / 4


def test_rows_move_between_slots_pages_and_stages(tmp_path: Path) -> None:
    write_model(tmp_path, "youtu")
    (decoder,) = load(tmp_path)
    ring = Ring.of([decoder])
    expected, _ = ring.feed(PROMPT, 0)
    (kv,) = ring.kvs
    slots = [ring.pages[row // PAGE_ROWS] * PAGE_ROWS + row % PAGE_ROWS for row in range(len(PROMPT))]
    other = decoder.make_kv(16, PAGE_ROWS)
    for layer in range(3):
        other.put_rows_at(layer, slots, kv.rows_at(layer, slots))
    last = slots[-1]
    other.move([(last, last + 3), (slots[-2], last)])  # rows 18 and 19 of page 2 go to its offsets 3 and 6
    other.copy_page(ring.pages[1], 12, 7)
    other.move([(12 * PAGE_ROWS + 3, slots[-2]), (12 * PAGE_ROWS + 6, last)])
    assert all(torch.equal(theirs, ours) for theirs, ours in zip(rows_of(other, slots), rows_of(kv, slots)))
    again = Ring([decoder], [other])
    torch.testing.assert_close(again.feed(PROMPT[-1:], 19)[0], expected[-1:], atol=1e-5, rtol=0)


def rows_of(kv: KVPages, slots: list[int]) -> list[torch.Tensor]:
    return [kv.rows_at(layer, slots) for layer in range(3)]


@pytest.mark.parametrize("layout", ["packed", "batched"])
def test_in_8_bits_logits_stay_near(layout: Any, tmp_path: Path) -> None:
    """Matrices and pages; the expansion of latent vectors stays in floats."""
    write_model(tmp_path, "deepseek_v3", hidden_size=64, moe_intermediate_size=32, kv_lora_rank=32)
    exact, _ = Ring.of(load(tmp_path)).feed(PROMPT, 0)
    options: list[dict[str, Any]] = [{"kv_dtype": "int8"}, {"quantization": "int8"}]
    for option in options:
        rounded = Decoder.load(tmp_path, None, torch.float32, "cpu", **option)
        rough, _ = Ring.of([rounded], layout).feed(PROMPT, 0)
        assert torch.nn.functional.cosine_similarity(rough, exact, dim=-1).median() > 0.98
        assert not torch.equal(rough, exact)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("heads", "rotated"), [(4, 16), (68, 16), (128, 16), (4, 8)], ids=["tile", "34s", "64s", "pytorch"]
)
def test_a_gpu_computes_the_logits_of_a_cpu(heads: int, rotated: int, tmp_path: Path) -> None:
    """A prompt, and a tree after it: by the kernel with one, and with two blocks of heads, and by PyTorch."""
    sizes = {"qk_rope_head_dim": rotated, "kv_lora_rank": 48, "num_attention_heads": heads}
    write_model(tmp_path, "deepseek_v3", **sizes, num_key_value_heads=heads)
    nodes, positions, visible = [12, 44, 55, 66], [20, 21, 21, 22], (1, 3, 5, 13)
    told = list[torch.Tensor]()
    for device in ("cpu", "cuda"):
        ring = Ring.of(load(tmp_path, (1, 3), device))
        prompt, _ = ring.feed(PROMPT, 0)
        tree, _ = ring.feed(nodes, len(PROMPT), positions, visible)
        told.append(torch.cat((prompt, tree)).cpu())
    torch.testing.assert_close(told[1], told[0], atol=1e-4, rtol=0)


def test_what_its_layers_do_not_do_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "youtu")
    assert not read_config(tmp_path).allows_policies
    with pytest.raises(InvalidRequest, match="tensor_parallel"):
        Decoder.load(tmp_path, None, torch.float32, "cpu", tensor_parallel=2)
    with pytest.raises(InvalidRequest, match="--batch-invariant"):
        Decoder.load(tmp_path, None, torch.float32, "cpu", batch_invariant=True)
