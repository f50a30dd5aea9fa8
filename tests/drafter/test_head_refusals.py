"""Heads that do not fit, or are none: refused in one line, with both shapes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from specsot.errors import HeadMismatch, InvalidRequest, ModelError
from tests.drafter.heads import IDS, Edit, change, configure, drop, load, put
from tests.models import Shape, write_base


@pytest.mark.parametrize("layers", [(), (4, 2, 6), (2, 2, 6), (2, 4, 10)])
def test_layers_that_cannot_be_are_refused(folder: Path, layers: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match="aux_layers must be"):
        load(folder, None, layers)


def test_an_eagle_1_head_has_no_layers_to_name(first: Path) -> None:
    with pytest.raises(InvalidRequest, match="an EAGLE-1 head has no aux_layers"):
        load(first, None, (2, 4, 6))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (put("fc.weight", 64, 128), r"fc.weight is \[64, 128\].*\[64, 192\]"),
        (put("fc.weight", 64, 256), r"fc.weight is \[64, 256\].*\[64, 192\]"),
        (put("fc.bias", 63), r"fc.bias is \[63\].*\[64\]"),
        (put("midlayer.self_attn.q_proj.weight", 64, 64), r"midlayer.* is \[64, 64\].*\[64, 128\]"),
        (put("midlayer.self_attn.k_proj.weight", 40, 128), "64 rows for 4 heads.*40"),
        (put("midlayer.self_attn.v_proj.weight", 16, 128), r"\[16, 128\].*\[32, 128\]"),
        (put("midlayer.self_attn.o_proj.weight", 64), r"o_proj.weight is \[64\], which is no matrix"),
        (put("midlayer.self_attn.q_norm.weight", 8), r"q_norm.weight is \[8\].*\[16\]"),
        (put("midlayer.self_attn.q_proj.bias", 8), r"q_proj.bias is \[8\].*\[64\]"),
        (put("midlayer.mlp.down_proj.weight", 64, 95), r"\[64, 95\].*\[64, 96\]"),
        (put("midlayer.hidden_norm.weight", 63), r"\[63\].*\[64\]"),
        (put("layers.1.self_attn.q_proj.weight", 64, 128), r"\[64, 128\].*\[64, 64\]"),
        (put("norm.weight", 63), r"\[63\].*\[64\]"),
        (put("input_norm.weight", 64), r"input_norm.weight is \[64\].*\[192\]"),
        (put("fc_norm.0.weight", 192), r"fc_norm.0.weight is \[192\].*\[64\]"),
        (put("d2t", 119), r"d2t is \[119\].*\[120\]"),
        (lambda tensors: tensors.update(d2t=torch.full((120,), 100)), "ids 100..219, the base has 200"),
        (lambda tensors: tensors.update(d2t=torch.full((120,), -1)), "ids -1..118, the base has 200"),
        (drop("d2t"), r"lm_head.weight is \[120, 64\].*\[200, 64\]"),
        (put("lm_head.weight", 120, 48), r"lm_head.weight is \[120, 48\].*\[120, 64\]"),
        (put("embed_tokens.weight", 200, 48), r"\[200, 48\].*\[200, 64\]"),
        (put("embed_tokens.weight", 199, 64), r"\[199, 64\].*\[200, 64\]"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_shapes(folder: Path, edit: Edit, words: str) -> None:
    change(folder, edit)
    with pytest.raises(HeadMismatch, match=words):
        load(folder)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (put("fc.weight", 64, 192), r"fc.weight is \[64, 192\].*\[64, 128\]"),
        (put("fc.weight", 48, 128), r"fc.weight is \[48, 128\].*\[64, 128\]"),
        (put("fc.bias", 1), r"fc.bias is \[1\].*\[64\]"),
        (put("embedding_layernorm.weight", 63), r"\[63\].*\[64\]"),
        (put("layers.0.self_attn.q_proj.weight", 64, 65), r"\[64, 65\].*\[64, 64\]"),
        (put("layers.0.mlp.gate_proj.weight", 96, 65), r"\[96, 65\].*\[96, 64\]"),
    ],
)
def test_an_eagle_1_head_that_does_not_fit_is_refused(first: Path, edit: Edit, words: str) -> None:
    change(first, edit)
    with pytest.raises(HeadMismatch, match=words):
        load(first)


@pytest.mark.parametrize("kind", ["folder", "first"])
def test_a_head_of_another_base_is_refused(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    write_base(folder / "base", Shape(hidden=96, layers=9))
    words = r"\[64, 192\].*\[64, 288\]" if kind == "folder" else r"\[64, 128\].*\[96, 192\]"
    with pytest.raises(HeadMismatch, match=words):
        load(folder)


def test_a_narrow_head_needs_embeddings_and_lm_head_of_its_own(folder: Path) -> None:
    """Its base is wider than it is."""
    write_base(folder / "base", Shape(hidden=96, layers=9))
    change(folder, put("fc.weight", 64, 288))
    with pytest.raises(HeadMismatch, match=r"embed_tokens.weight.*\[200, 64\].*\[200, 96\]"):
        load(folder)
    change(folder, put("embed_tokens.weight", 200, 64))
    assert load(folder).hidden == 64
    change(folder, drop("lm_head.weight", "d2t"))
    configure(folder, "draft_vocab_size")
    with pytest.raises(HeadMismatch, match=r"lm_head.weight.*64.*\[200, 96\]"):
        load(folder)
    configure(folder, eagle_config={"use_aux_hidden_state": False})
    with pytest.raises(HeadMismatch, match=r"last state.*\[96\].*\[64\]"):
        load(folder)


def test_a_base_with_too_few_layers_is_refused_unless_the_tapped_layers_are_given(folder: Path) -> None:
    write_base(folder / "base", Shape(layers=6))
    with pytest.raises(HeadMismatch, match="6 layers"):
        load(folder)
    assert load(folder, None, (1, 3, 6)).taps == (1, 3, 6)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([2, 4, 10], r"must be in 0..9, as the base has 9 layers, got \[2, 4, 10\]"),
        ([1, 3, 9], r"must be in 0..9.*got \[2, 4, 10\]"),
        ([-1, 3, 5], r"must be in 0..9"),
        ([2, 2, 5], "must be different layers"),
        ([], "must be different layers"),
        ([2, 4], r"fc.weight is \[64, 192\].*\[64, 128\]"),
        ([2, "4", 6], "must be layer numbers"),
        ("2,4,6", "must be layer numbers"),
    ],
)
def test_layer_ids_that_cannot_be_are_refused(folder: Path, ids: object, words: str) -> None:
    configure(folder, **{IDS: ids})
    with pytest.raises(HeadMismatch, match=words):
        load(folder)


@pytest.mark.parametrize("heads", [None, 3, 0, -4, "four", True])
def test_a_number_of_heads_that_cannot_be_is_refused(folder: Path, heads: object) -> None:
    configure(folder, num_attention_heads=heads)
    with pytest.raises(HeadMismatch, match="64 rows"):
        load(folder)


@pytest.mark.parametrize(
    "name",
    [
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "midlayer.self_attn.o_proj.weight",
        "midlayer.mlp.up_proj.weight",
        "midlayer.hidden_norm.weight",
        "midlayer.input_layernorm.weight",
        "midlayer.post_attention_layernorm.weight",
    ],
)
def test_a_missing_tensor_is_named_as_the_file_would(folder: Path, name: str) -> None:
    change(folder, drop(name))
    with pytest.raises(ModelError, match=name):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"norm_before_fc": True}, "input_norm.weight"),
        ({"fc_norm": True}, "fc_norm.0.weight"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"norm_output": "yes"}, "norm_output must be true or false"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {}}, "quant_method None is not one of"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a number > 0"),
        ({"rope_theta": "large"}, "rope_theta must be a number > 0"),
        ({"rope_scaling": {"type": "longrope"}}, "short_factor must be numbers > 0"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window must be a number > 0, got None"),
        ({"sliding_window": "far", "layer_types": ["sliding_attention"]}, "sliding_window must be a number"),
        ({"transformer_layer_config": 3}, "transformer_layer_config must be an object"),
        ({"eagle_config": []}, "eagle_config must be an object"),
    ],
)
def test_a_config_that_asks_for_what_is_not_there_is_refused(
    folder: Path, fields: dict[str, object], words: str
) -> None:
    configure(folder, **fields)
    with pytest.raises(ModelError, match=words):
        load(folder)


def test_two_names_of_one_tensor_are_refused(folder: Path) -> None:
    change(folder, put("layers.0.hidden_norm.weight", 64))
    with pytest.raises(ModelError, match=r"are both layers\.0\.hidden_norm\.weight"):
        load(folder)


def test_an_ordinary_model_is_no_head(folder: Path) -> None:
    shutil.rmtree(folder / "head")
    write_base(folder / "head", Shape(layers=1))
    with pytest.raises(ModelError, match=r"fc\.weight"):
        load(folder)
    change(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers" in name])
    with pytest.raises(ModelError, match="no EAGLE head"):
        load(folder)


def test_a_broken_or_absent_head_is_one_clear_line(folder: Path) -> None:
    (folder / "head" / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(folder)
    shutil.rmtree(folder / "head")
    with pytest.raises(ModelError):
        load(folder)
