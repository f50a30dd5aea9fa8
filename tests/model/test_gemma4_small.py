"""Gemma 4 E2B and E4B against Transformers: layers with inputs of their own, and layers that read the keys
and values of earlier ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from specsot.checkpoint.config import read_config
from specsot.checkpoint.resolving import resolve_model
from specsot.core.tree import ancestry, depths
from specsot.errors import InvalidRequest, ModelError
from specsot.members import Quantization, Range
from specsot_model.attention import RowSpan
from specsot_model.cuda_graphs import measure_rows
from specsot_model.decoder import Decoder
from specsot_model.loaded_parts import AbsentWeights, LoadedParts, measured_range
from specsot_model.memory_fit import WeightForm, kv_page_bytes, tensors_of, weights_of
from specsot_model.published import open_weights
from tests import trees
from tests.conftest import some
from tests.model.gguf_files import write_gguf
from tests.model.test_families import NEAR, PROMPT, answer
from tests.model.tiny import PAGE_ROWS, Ring, load, write_model

S, F = "sliding_attention", "full_attention"
# Layers 4 and 5 read those of layers 2 and 3, so that the model can be cut before layers 1 and 2.
E2B: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": [S, F] * 3,
    "hidden_size_per_layer_input": 10,
    "vocab_size_per_layer_input": 120,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "enable_moe_block": False,
    "attention_k_eq_v": False,
    "num_key_value_heads": 1,
    "final_logit_softcapping": 30.0,
    "initializer_range": 0.2,  # of 0.25 Transformers itself is 7e-5 from its answer in fp64
}
# What each has and the other has not; another kind alone reads, and the first reader is the second layer.
KINDS: dict[str, dict[str, Any]] = {
    "e2b": {},
    "e4b": {"use_double_wide_mlp": False, "num_key_value_heads": 2, "layer_types": [S, S, F] * 2},
    "inputs alone": {"num_kv_shared_layers": 0},
    "readers alone": {"hidden_size_per_layer_input": 0, "enable_moe_block": True},
    "mostly readers": {"num_kv_shared_layers": 4},
    "values as keys": {"attention_k_eq_v": True, "tie_word_embeddings": True},
}
CUTS = {"e2b": (1, 2, 6), "e4b": (1, 6), "inputs alone": (1, 2, 3, 4, 5, 6), "readers alone": (2, 6),
        "mostly readers": (6,), "values as keys": (2, 6)}  # fmt: skip


def write(directory: Path, name: str = "e2b", **changes: Any) -> torch.nn.Module:
    model = write_model(directory, "gemma4_text", **{**E2B, **KINDS[name], **changes})
    # Without this, Transformers fails for readers in a model without per-layer inputs.
    model.config.output_hidden_states = True
    return model


@pytest.mark.parametrize("name", some(KINDS, 0, 1, 3))
def test_logits_and_greedy_tokens_are_those_of_transformers_over_allowed_cuts(
    name: str, tmp_path: Path
) -> None:
    model = write(tmp_path, name)
    written, told = Ring.of(load(tmp_path, CUTS[name])).write(PROMPT, 13)
    expected = answer(model, PROMPT + written[:-1])
    torch.testing.assert_close(told, expected, atol=1e-4, rtol=0)
    first, second = expected.topk(2).values.unbind(-1)
    assert (first - second).median() > 0.1, "near ties would hide a difference"
    wrong = torch.tensor(written) != expected[len(PROMPT) - 1 :].argmax(-1)
    assert not (wrong & ((first - second)[len(PROMPT) - 1 :] >= NEAR)).any()
    whole, _ = Ring.of(load(tmp_path, (6,))).feed(PROMPT, 0)
    # In fp32 a product with fewer columns may differ in its last bits: on AMD's processors it does, by 1e-5.
    torch.testing.assert_close(
        Ring.of(load(tmp_path, CUTS[name])).feed(PROMPT, 0)[0], whole, atol=1e-4, rtol=0
    )


def test_trees_in_branches_of_a_prefix_give_the_logits_of_transformers(tmp_path: Path) -> None:
    """One frame holds both trees, of which every stage reads the token ids. The branches share a page."""
    model = write(tmp_path)
    prefix, drafted, parents = PROMPT[:PAGE_ROWS], [11, 40, 52, 63, 70], (0, 0, 0, 2, 3)
    ring = Ring.of(load(tmp_path, CUTS["e2b"]))
    ring.feed(prefix, 0)
    starts = {(5, 2): [8, 15, 30], (5, 3): [77, 41, 13]}
    for pages, start in starts.items():
        replace(ring, pages=pages).feed(start, PAGE_ROWS)
    base, rows = PAGE_ROWS + 3, len(drafted)
    spans = [RowSpan(rows, base, rows, pages, ancestry(parents)) for pages in starts]
    positions = torch.tensor([base + depth for depth in depths(parents)] * 2)
    slots = torch.tensor([pages[1] * PAGE_ROWS + 3 + row for pages in starts for row in range(rows)])
    plan = ring.decoders[0].plan(spans, PAGE_ROWS, "batched")
    ids = torch.tensor(drafted * 2)
    hidden = ring.decoders[0].embed(ids)
    for decoder, kv in zip(ring.decoders, ring.kvs):
        hidden, _ = decoder.forward(hidden, positions, slots, plan, kv, tokens=ids)
    told = ring.decoders[-1].logits(hidden).view(2, rows, -1)
    for branch, start in enumerate(starts.values()):
        for leaf in (1, 4):
            nodes = trees.path(parents, leaf)
            wanted = answer(model, [*prefix, *start, *(drafted[node] for node in nodes)])
            torch.testing.assert_close(told[branch, list(nodes)], wanted[base:], atol=1e-4, rtol=0)


def test_what_each_stage_gets_changes_what_it_computes(tmp_path: Path) -> None:
    """Other token ids on the last stage alone, whose layers read them."""
    write(tmp_path)
    last = Decoder.load(tmp_path, Range(2, 6), torch.float32, "cpu")
    at, plan = torch.arange(3), last.plan([RowSpan(3, 0, 3, (0,))], PAGE_ROWS, "packed")
    rows = torch.randn(3, 32, generator=torch.Generator().manual_seed(2))
    told = [
        last.forward(rows.clone(), at, at, plan, last.make_kv(1, PAGE_ROWS), tokens=torch.tensor(ids))[0]
        for ids in ([5, 6, 7], [5, 6, 8])
    ]
    assert torch.equal(told[0][:2], told[1][:2])
    assert (told[0][2] - told[1][2]).abs().max() > 1e-2
    with pytest.raises(ModelError, match="layers 2:6 of gemma4_text read token ids"):
        last.forward(rows, at, at, plan, last.make_kv(1, PAGE_ROWS))


@pytest.mark.parametrize(
    ("name", "layers", "reason"),
    [
        ("e2b", Range(3, 6), "layers 4:6 read the keys and values of layer 2 and layer 3, so that one stage "
         "must hold layers 2:6, and 3:6 cannot be a stage: the model can be cut before layers 1 to 2"),
        ("mostly readers", Range(1, 6),
         "one stage must hold layers 0:6, and 1:6 cannot be a stage: the model cannot be cut"),
    ],
)  # fmt: skip
def test_a_cut_between_a_layer_and_one_that_reads_its_keys_is_refused(
    name: str, layers: Range, reason: str, tmp_path: Path
) -> None:
    write(tmp_path, name)
    with pytest.raises(InvalidRequest) as refused:
        Decoder.load(tmp_path, layers, torch.float32, "cpu")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_allowed_cuts_are_those_that_no_reader_spans(tmp_path: Path) -> None:
    """Against the definition: a cut is allowed if no layer after it reads one before it."""
    for name in KINDS:
        write(tmp_path / name, name)
        config = read_config(tmp_path / name)
        for cut in range(1, config.layers):
            spans = any(config.kv_source(layer) < cut for layer in range(cut, config.layers)) and any(
                config.kv_source(layer) != layer and config.kv_source(layer) < cut <= layer
                for layer in range(config.layers)
            )
            refused = config.why_not_split(0, cut) or config.why_not_split(cut, config.layers)
            assert bool(refused) == spans, (name, cut)
            assert (cut > config.layers - config.tail) == spans


def test_taps_and_int8_and_bf16_know_the_inputs_too(tmp_path: Path) -> None:
    model = write(tmp_path)
    inputs = dict[int, torch.Tensor]()
    for index, part in enumerate(model.base_model.layers):
        part.register_forward_pre_hook(lambda _, args, index=index: inputs.__setitem__(index, args[0][0]))
    exact = answer(model, PROMPT)
    ring = Ring.of(load(tmp_path, CUTS["e2b"]))
    taps = {layer: ring.decoders[0].hold_tap(torch.eye(32)) for layer in (1, 5)}
    _, fused = ring.feed(PROMPT, 0, taps=taps)
    torch.testing.assert_close(fused, inputs[1] + inputs[5], atol=1e-4, rtol=0)
    for dtype, quantization in ((torch.bfloat16, None), (torch.float32, "int8")):
        rough = Ring.of([Decoder.load(tmp_path, None, dtype, "cpu", quantization=quantization)])
        found = torch.nn.functional.cosine_similarity(rough.feed(PROMPT, 0)[0].float(), exact, dim=-1)
        assert found.median() > 0.99, (dtype, quantization)


def test_in_8_bits_cuts_change_no_bit(tmp_path: Path) -> None:
    """From safetensors, and from the blocks of a GGUF file."""
    model = write(tmp_path / "hf", hidden_size_per_layer_input=32, intermediate_size=64)
    made = resolve_model(write_gguf(tmp_path / "m.gguf", model, (GGMLQuantizationType.Q8_0,)))
    for directory in (tmp_path / "hf", made):
        told = list[torch.Tensor]()
        for ranges in ((Range(0, 6),), (Range(0, 1), Range(1, 2), Range(2, 6))):
            stages = [
                Decoder.load(directory, one, torch.float32, "cpu", quantization="int8") for one in ranges
            ]
            told.append(Ring.of(stages).feed(PROMPT, 0)[0])
        assert torch.equal(*told)
        inputs = list[torch.Tensor]()
        forms: tuple[Quantization | None, ...] = (None, "int8")
        for form in forms:
            parts = LoadedParts()
            Decoder.load(directory, None, torch.float32, "cpu", quantization=form, parts=parts)
            assert parts.layer_inputs is not None
            inputs.append(parts.layer_inputs.of_tokens(torch.tensor(PROMPT)).flatten())
        assert torch.nn.functional.cosine_similarity(*inputs, dim=0) > 0.999


def test_a_model_with_images_and_layers_of_equal_heads_is_read_too(tmp_path: Path) -> None:
    model = write(tmp_path, global_head_dim=8, num_global_key_value_heads=1)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4", "text_config": fields}))
    file = tmp_path / "model.safetensors"
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    told, _ = Ring.of(load(tmp_path, (2, 6))).feed(PROMPT, 0)
    torch.testing.assert_close(told, answer(model, PROMPT), atol=1e-4, rtol=0)


def test_layers_that_read_other_keys_take_no_pages(tmp_path: Path) -> None:
    write(tmp_path)
    config, whole = read_config(tmp_path), Range(0, 6)
    pages = Decoder.load(tmp_path, whole, torch.float32, "cpu").make_kv(3, PAGE_ROWS)
    assert pages.bytes == kv_page_bytes(config, whole, 3 * PAGE_ROWS, 4)
    assert pages.layers[4].data_ptr() == pages.layers[2].data_ptr()
    assert pages.layers[5].data_ptr() == pages.layers[3].data_ptr()
    assert kv_page_bytes(config, Range(0, 4), PAGE_ROWS, 4) == kv_page_bytes(config, whole, PAGE_ROWS, 4)


def test_every_stage_counts_and_loads_what_its_layers_read(tmp_path: Path) -> None:
    write(tmp_path, tie_word_embeddings=True)
    config, files = read_config(tmp_path), open_weights(tmp_path)
    form = WeightForm(4, shared=True)
    read = set(tensors_of(files, config, Range(1, 2)))
    assert {"model.embed_tokens.weight", "model.embed_tokens_per_layer.weight"} <= read
    assert "model.layers.1.per_layer_input_gate.weight" in read
    parts = LoadedParts()
    middle = Decoder.load(tmp_path, Range(1, 2), torch.float32, "cpu", parts=parts)
    inputs = parts.layer_inputs
    assert inputs is not None
    assert inputs.table.shape == (120, 10), "of one layer"
    assert middle.reads_tokens
    held = 4 * sum(
        load_file(tmp_path / "model.safetensors")[name].numel() for name in files.under("model.layers.1")
    )
    held += 4 * (101 * 32 + 120 * 10 + 10 * 32) + 4 * 10 // 6
    assert weights_of(files, config, Range(1, 2), form) == held
    known = AbsentWeights(("model.embed_tokens.weight",), config)
    assert weights_of(known, config, Range(0, 6), form) == weights_of(files, config, Range(0, 6), form)
    parts.drop_all_but(Range(1, 2), config)
    assert parts.embedding is not None


def test_a_layer_is_timed_that_needs_no_other(tmp_path: Path) -> None:
    for name in KINDS:
        write(tmp_path / name, name)
        config = read_config(tmp_path / name)
        timed = measured_range(config)
        assert config.kv_source(timed.first) == timed.first
        assert measure_rows(
            Decoder.load(tmp_path / name, timed, torch.float32, "cpu"), sizes=(1,), seconds=0.0
        )
