"""Families that run through Transformers' own modules, against Transformers' whole models in fp32."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from specsot.checkpoint.config import read_config
from specsot.errors import InvalidRequest, ModelError
from specsot.members import Range
from specsot_model.decoder import Decoder
from specsot_model.loaded_parts import AbsentWeights
from specsot_model.memory_fit import kv_page_bytes, tensors_of
from specsot_model.published import open_weights
from specsot_model.transformers_layers.layers import TransformersLayers
from specsot_model.transformers_layers.shapes import layer_shapes
from tests.conftest import some
from tests.model.other_families import (
    ABSENT,
    CLEAR,
    EXPERTS,
    KINDS,
    LATENT,
    NEAR,
    PAGE,
    PROMPT,
    WINDOW,
    compare,
    load_other,
    logits_of,
    only_through_transformers,
    write_other,
)
from tests.model.tiny import PAGE_ROWS, SHAPE, Ring

# Sinks of a window in half of the layers, of other KV heads; experts; latent attention; a norm of embeddings.
IN_CI = ("mimo_v2_flash", "cohere2_moe", "axk1", "granitemoe_swa")
LONG = {"rope_type": "longrope", "rope_theta": 5e3, "long_factor": [1.1, 2.0, 3.0, 5.0],
        "short_factor": [1.0, 1.0, 1.5, 2.0], "original_max_position_embeddings": 16}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 5e3, "factor": 4.0}


@pytest.mark.parametrize("kind", some(KINDS, *(n for n, kind in enumerate(KINDS) if kind in IN_CI)))
def test_prompts_branches_and_trees_have_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    likeness = compare(kind, tmp_path)
    assert likeness.difference < NEAR
    assert likeness.gap > CLEAR


def test_the_page_lists_the_families_that_are_tested() -> None:
    rows = re.findall(r"^\| `([a-z0-9_-]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert rows == list(KINDS)


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "layers of kinds conv"),
        ("bamba", {"mamba_n_heads": 4, "mamba_d_head": 16}, "keep a recurrent state"),
        ("deepseek_v32", {**LATENT, "index_topk": 4}, "compute with their attention mask"),
        ("llama4_text", {"attention_chunk_size": 8, "layer_types": ["chunked_attention"] * 3}, "layer 0"),
        ("gemma4_text", {}, "embeddings besides its tokens': embed_tokens, embed_tokens_per_layer"),
        ("diffllama", {}, "calls attention 2 times"),
        ("stablelm", {}, "does not take other attention functions"),
        (
            "hrm_text",
            {"num_hidden_layers": ABSENT},
            "layers in the list model.layers, and has model.L_module",
        ),
        ("t5", {}, "'t5' is no causal language model"),
        ("martian", {}, "'martian' is known neither here nor to Transformers; remote code is never run"),
    ],
)
def test_layers_that_need_more_than_a_hidden_state_are_refused(
    kind: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    given = {name: value for name, value in {**SHAPE, **fields}.items() if value is not ABSENT}
    if kind == "martian":
        values = given
    else:
        values = AutoConfig.for_model(kind, **given).to_dict() | {"is_encoder_decoder": False}
    values = {"num_hidden_layers": 3, **given, **values}
    (tmp_path / "config.json").write_text(json.dumps({**values, "model_type": kind}, default=str))
    with pytest.raises(ModelError, match=re.escape(reason)) as refused, only_through_transformers():
        layer_shapes(read_config(tmp_path))
    assert "\n" not in str(refused.value)


def test_a_layer_that_mixes_rows_elsewhere_than_in_attention_is_refused(tmp_path: Path) -> None:
    write_other(tmp_path, "olmo")
    (decoder,) = load_other(tmp_path, (3,))
    layers = decoder._transformers
    assert isinstance(layers, TransformersLayers)
    layer = layers._layers[0]
    layers._check_rows()
    layer.register_forward_hook(lambda _, args, out: out + args[0].cumsum(1))
    with pytest.raises(ModelError, match="layer 0 of model_type 'olmo' mixes rows"):
        layers._check_rows()


@pytest.mark.parametrize("kind", ["granitemoe", "mimo_v2_flash"])
def test_taps_add_the_inputs_of_their_layers(kind: str, tmp_path: Path) -> None:
    model = write_other(tmp_path, kind)
    inputs: dict[int, torch.Tensor] = {}
    for index, part in enumerate([*model.model.layers, model.model.norm]):
        part.register_forward_pre_hook(lambda _, args, index=index: inputs.__setitem__(index, args[0][0]))
    logits_of(model, PROMPT)
    taps = dict(zip((0, 2, 3), torch.eye(96).view(3, 32, 96).transpose(1, 2)))
    _, fused = Ring.of(load_other(tmp_path, (1, 3))).feed(PROMPT, 0, taps=taps)
    torch.testing.assert_close(fused, torch.cat([inputs[i] for i in (0, 2, 3)], 1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("rope", [LONG, DYNAMIC], ids=["longrope", "dynamic"])
def test_a_sequence_keeps_its_rotary_embedding_as_it_grows(rope: dict[str, Any], tmp_path: Path) -> None:
    """Its first eight rows, which are shorter than the original context, are read alone."""
    model = write_other(tmp_path, "seed_oss", rope_parameters=rope)
    ring = Ring.of(load_other(tmp_path, (2, 3)))
    pieces = [ring.feed(PROMPT[:8], 0)[0], ring.feed(PROMPT[8:], 8)[0]]
    torch.testing.assert_close(torch.cat(pieces), logits_of(model, PROMPT), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "changes", [{"dtype": torch.bfloat16}, {"quantization": "int8"}, {"kv_dtype": "int8"}]
)
def test_fewer_bits_stay_near_fp32(changes: dict[str, Any], tmp_path: Path) -> None:
    model = write_other(tmp_path, "exaone4")
    options = {"dtype": torch.float32, "device": "cpu", **changes}
    rough, _ = Ring.of([Decoder.load(tmp_path, Range(0, 3), **options)]).feed(PROMPT, 0)
    likeness = torch.nn.functional.cosine_similarity(rough.float(), logits_of(model, PROMPT), dim=-1)
    assert 0.99 < likeness.median() < 0.9999999


def test_experts_in_one_tensor_are_not_quantized(tmp_path: Path) -> None:
    write_other(tmp_path, "olmoe")
    with pytest.raises(InvalidRequest, match="no products, such as mlp"):
        Decoder.load(tmp_path, Range(0, 1), torch.float32, "cpu", quantization="int8")


def test_code_in_a_models_directory_is_never_run(tmp_path: Path) -> None:
    write_other(tmp_path, "olmo")
    source = tmp_path / "config.json"
    own = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    source.write_text(json.dumps({**json.loads(source.read_text()), "auto_map": own}))
    (tmp_path / "evil.py").write_text("raise SystemExit('remote code ran')")
    load_other(tmp_path, (3,))


def test_weights_that_are_not_here_have_the_shapes_of_those_that_are(tmp_path: Path) -> None:
    """Experts are one tensor in the modules and several in the files: their bytes agree."""
    write_other(tmp_path, "granitemoe_swa")
    config, files = read_config(tmp_path), open_weights(tmp_path)
    absent = AbsentWeights((), config)
    for layers in (Range(0, 1), Range(1, 3)):
        numbers = [
            sum(torch.Size(source.shape(name)).numel() for name in tensors_of(source, config, layers))
            for source in (files, absent)
        ]
        assert numbers[0] == numbers[1] > 0


@pytest.mark.parametrize("kind", ["mimo_v2_flash", "minicpm3"])
def test_pages_take_what_was_counted(kind: str, tmp_path: Path) -> None:
    write_other(tmp_path, kind)
    (first, second) = load_other(tmp_path, (2, 3))
    for decoder in (first, second):
        counted = kv_page_bytes(decoder.config, decoder.layers, 4 * PAGE_ROWS, 4)
        assert decoder.make_kv(4, PAGE_ROWS).bytes == counted


def test_a_window_is_the_one_of_the_mask(tmp_path: Path) -> None:
    write_other(tmp_path, "cohere2")
    assert [shape.window for shape in layer_shapes(read_config(tmp_path))] == [WINDOW, None, WINDOW]


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_other(tmp_path, "olmoe", **EXPERTS)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.2.self_attn.q_norm.weight"
    del tensors[name]
    save_file(tensors, file)
    load_other(tmp_path, (2,))
    with pytest.raises(ModelError, match=re.escape(name)):
        load_other(tmp_path, (2, 3))
