"""config.json: what is read of it, and one clear line for what is wrong with it."""

from __future__ import annotations

import json
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest

from specsot.checkpoint.config import ModelConfig, read_config
from specsot.checkpoint.families import FAMILIES, Latent, Routing
from specsot.checkpoint.rope import Rope
from specsot.errors import ModelError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(directory: Path, **changes: Any) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return read_config(directory)


def test_what_is_absent_has_the_published_defaults(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.kv_heads, config.head_dim, config.max_positions) == (4, 16, 2048)
    assert (config.eps, config.rope, config.eos) == (1e-6, Rope(), ())
    flags = (config.tied, config.qkv_bias, config.out_bias, config.mlp_bias, config.qk_norm)
    assert not any(flags)


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_theta": 5e5}, Rope(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, Rope(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, Rope(1e6)),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}}, Rope(1e4, "linear", 4.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            Rope(5e5, "llama3", 8.0, 1.0, 4.0, 8192),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            Rope(5e5, "llama3", 8.0, 1.0, 4.0, 8192),
        ),
        (
            {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 500, "rope_theta": 9},
            Rope(500, share=0.5),
        ),
        (
            {"model_type": "gpt_neox", "rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 7}},
            Rope(7, share=1.0),
        ),
        ({"model_type": "gpt_neox"}, Rope(share=0.25)),
    ],
)
def test_rope_is_read_in_its_old_and_new_spelling(tmp_path: Path, fields: Any, rope: Rope) -> None:
    assert read(tmp_path, **fields).rope == rope


@pytest.mark.torch  # Transformers looks for it
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"beta_fast": 8, "beta_slow": 2, "truncate": False},
        {"attention_factor": 0.75, "original_max_position_embeddings": 7},
        {"mscale": 2.0, "mscale_all_dim": 0.5},
        {"factor": 1.0},
    ],
)
def test_yarn_turns_and_stretches_as_transformers_has_it(tmp_path: Path, more: dict[str, Any]) -> None:
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from specsot_model.rotary import frequencies

    given = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    given |= more
    theirs = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=dict(given))
    turns, stretch = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    rope = read(tmp_path, rope_parameters=given).rope
    torch.testing.assert_close(frequencies(rope, 16), turns)
    assert rope.stretch == pytest.approx(stretch)


def test_families_bring_their_biases_and_norms(tmp_path: Path) -> None:
    qwen2 = read(tmp_path, model_type="qwen2", num_key_value_heads=4)
    assert (qwen2.qkv_bias, qwen2.out_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = read(tmp_path, model_type="qwen3", num_key_value_heads=4, attention_bias=True, head_dim=32)
    assert (qwen3.qkv_bias, qwen3.out_bias, qwen3.qk_norm, qwen3.head_dim) == (True, True, True, 32)


@pytest.mark.parametrize(
    ("kind", "fields", "window", "layers"),
    [
        ("llama", {"sliding_window": 512}, None, ()),  # Llama's attention knows none
        ("mistral", {"sliding_window": 512}, 512, (0, 1, 2)),
        ("mistral", {"sliding_window": 8192}, None, ()),  # more than its positions
        ("mistral", {"sliding_window": None}, None, ()),
        ("mixtral", {}, None, ()),
        ("qwen2", {"sliding_window": 512}, None, ()),
        ("qwen2", {"sliding_window": 512, "use_sliding_window": True}, None, ()),
        ("qwen2", {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 1}, 512, (1, 2)),
        ("qwen3", {"sliding_window": None, "use_sliding_window": True}, None, ()),
        ("gpt_oss", {}, 128, (0, 2)),
        ("gpt_oss", {"layer_types": ["full_attention"] * 3}, None, ()),
    ],
)
def test_some_layers_have_a_window(
    tmp_path: Path, kind: str, fields: Any, window: int | None, layers: tuple[int, ...]
) -> None:
    given = {"model_type": kind, "max_position_embeddings": 4096, "num_key_value_heads": 2, **fields}
    config = read(tmp_path, num_hidden_layers=3, **given)
    assert (config.window, config.windowed, config.max_positions) == (window, set(layers), 4096)


@pytest.mark.parametrize("kinds", ["full_attention", ["full_attention"], ["chunked_attention"] * 3])
def test_other_kinds_of_layers_are_refused(tmp_path: Path, kinds: Any) -> None:
    with pytest.raises(ModelError, match="layer_types must be"):
        read(tmp_path, model_type="mistral", num_hidden_layers=3, layer_types=kinds, num_key_value_heads=2)


# What a config of these families must have: their defaults are models that are refused.
REQUIRED: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"layer_types": ["attention"] * 3, "num_local_experts": 0},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
}
# DeepSeek V3 by another name, which Transformers does not know.
ALIAS = "kimi_k2"


@pytest.mark.torch  # Transformers looks for it
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != ALIAS])
def test_defaults_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(kind, hidden_size=4096, num_attention_heads=32)
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_local_experts": None}
    ours = read(tmp_path, model_type=kind, **sizes | REQUIRED.get(kind, {}))
    theirs.allow_global_per_layer_attribute_access = True
    turns = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    assert ours.rope.theta == turns["rope_theta"]
    if ours.latent is None:
        assert ours.rope.share * ours.rope.proportion == turns.get("partial_rotary_factor", 1.0)
    if ours.sliding_rope:
        assert ours.sliding_rope.theta == theirs.rope_parameters["sliding_attention"]["rope_theta"]
    assert ours.attention_softcap == getattr(theirs, "attn_logit_softcapping", None)
    assert ours.logit_softcap == getattr(theirs, "final_logit_softcapping", None)
    # Granite and Gemma 4 name no scalar: they do not divide scores at all.
    scalar = 1 if kind.startswith(("granite", "gemma4")) else getattr(theirs, "qk_head_dim", None)
    assert ours.query_scalar == getattr(theirs, "query_pre_attn_scalar", scalar)
    assert ours.eps == (getattr(theirs, "rms_norm_eps", None) or theirs.layer_norm_eps)
    if ours.latent:
        names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "q_lora_rank")
        assert ours.latent == Latent(*(getattr(theirs, name) for name in names))
        assert (ours.kv_heads, ours.head_dim) == (1, theirs.kv_lora_rank + theirs.qk_rope_head_dim)
        assert ours.rope.rotated(ours.head_dim) == theirs.qk_rope_head_dim
    else:
        assert ours.kv_heads == getattr(theirs, "num_key_value_heads", 32)
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 128)
    positions = theirs.max_position_embeddings
    assert ours.max_positions == min(positions, getattr(theirs, "index_topk", positions))
    assert ours.window == getattr(theirs, "sliding_window", None)
    assert ours.tied == getattr(theirs, "tie_word_embeddings", False)
    assert ours.qkv_bias == getattr(theirs, "attention_bias", kind == "qwen2")
    if ours.routing:
        counts = ours.routing.experts, ours.routing.chosen
        experts = getattr(theirs, "num_local_experts", None) or theirs.num_experts
        # DeepSeek V2's code has no default for the second; ours is what all of its checkpoints say.
        assert counts == (experts, theirs.num_experts_per_tok or 6)
        assert ours.routing.scale == getattr(theirs, "routed_scaling_factor", 1.0)
    if kind == "smollm3":
        unrotated = {layer for layer, rotates in enumerate(theirs.no_rope_layers) if not rotates}
        assert ours.unrotated == {layer for layer in unrotated if layer < ours.layers}
    if kind.startswith("gemma4"):
        assert ours.rope.kind == turns["rope_type"]
        assert ours.wide == (theirs.num_key_value_heads, theirs.per_layer_config["full_attention"].head_dim)
    if ours.delta:
        kinds = [
            "linear_attention" if ours.recurrent(layer) else "full_attention" for layer in range(ours.layers)
        ]
        assert kinds == theirs.layer_types[: ours.layers]


def test_kimi_k2_is_deepseek_v3(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0,
               "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}  # fmt: skip
    kimi, deepseek = (
        read(tmp_path, model_type=kind, n_routed_experts=384, rope_scaling=scaling)
        for kind in (ALIAS, "deepseek_v3")
    )
    assert kimi == replace(deepseek, model_type=ALIAS)
    assert kimi.query_scalar == pytest.approx(192 / (0.1 * log(32) + 1) ** 4)


def test_sparse_attention_ends_where_a_token_no_longer_attends_to_all(tmp_path: Path) -> None:
    fields = {"max_position_embeddings": 4096, "mlp_layer_types": ["dense", "sparse", "dense"]}
    sparse = read(tmp_path, model_type="deepseek_v32", **fields)
    assert sparse.max_positions == 2048
    assert read(tmp_path, model_type="deepseek_v32", **fields, index_topk=8192).max_positions == 4096
    assert sparse.routing is not None
    assert sparse.routing.dense == {0, 2}


@pytest.mark.parametrize(
    ("fields", "dense"),
    [
        ({}, set()),
        ({"mlp_only_layers": [0, 3]}, {0, 3}),
        ({"decoder_sparse_step": 2}, {0, 2, 4}),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, {0, 1, 2, 4}),
    ],
)
def test_some_layers_of_a_sparse_model_are_dense(tmp_path: Path, fields: Any, dense: set[int]) -> None:
    config = read(tmp_path, model_type="qwen3_moe", num_hidden_layers=5, num_experts=60, **fields)
    assert config.routing == Routing(60, 8, 768, normalised=False, dense=frozenset(dense))
    assert {layer for layer in range(5) if not config.sparse(layer)} == dense


def test_end_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert read(tmp_path, eos_token_id=7).eos == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert read(tmp_path, eos_token_id=7).eos == (5, 6)
    (tmp_path / "generation_config.json").write_text("{}")
    assert read(tmp_path, eos_token_id=7).eos == (7,)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": None},
            "model_type None is not one of llama, mistral, ministral3, mixtral, qwen2, qwen3, ",
        ),
        ({"model_type": "t5", "is_encoder_decoder": True}, "'t5' is an encoder-decoder, whose layers need"),
        ({"model_type": "llava", "text_config": {}}, "'llava', which reads more than text, the text part"),
        ({"hidden_size": None}, "hidden_size must be a number > 0, got None"),
        ({"hidden_size": "64"}, "hidden_size must be a number > 0, got '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a number > 0, got 0"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers must be an integer, got 2.5"),
        ({"vocab_size": True}, "vocab_size must be a number > 0, got True"),
        ({"num_key_value_heads": 3}, "4 heads do not divide into 3 key-value heads"),
        ({"head_dim": 15}, "head_dim must be even, got 15"),
        (
            {"model_type": "smollm3", "no_rope_layers": [1, 0]},
            "no_rope_layers must be 0 or 1 for each of 3 layers",
        ),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention", "mamba"]},
            "Mamba layers are not supported, only attention in every layer",
        ),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["attention"] * 3, "num_local_experts": 8},
            "num_local_experts must be 0, experts of this family are not supported",
        ),
        (
            {
                "model_type": "gemma4_text",
                "num_kv_shared_layers": 2,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            },
            "num_kv_shared_layers is 2 of 3 layers, and the others do not have both kinds of attention",
        ),
        (
            {"model_type": "gemma4_text", "vocab_size_per_layer_input": 9},
            "vocab_size_per_layer_input is 9, less than vocab_size",
        ),
        (
            {"model_type": "gemma4_unified_text", "use_bidirectional_attention": "all"},
            "use_bidirectional_attention 'all' is not supported",
        ),
        (
            {"model_type": "gemma4_unified_text", "per_layer_config": {"1": {"head_dim": 16}, "2": {}}},
            "per_layer_config must have the same numbers for all its layers",
        ),
        (
            {"model_type": "youtu", "attention_bias": True},
            "attention_bias is not supported with latent attention",
        ),
        ({"model_type": "youtu", "qk_rope_head_dim": 7}, "qk_rope_head_dim must be even, got 7"),
        ({"model_type": "youtu", "kv_lora_rank": 0}, "kv_lora_rank must be a number > 0, got 0"),
        (
            {"model_type": "youtu", "rope_scaling": {**LLAMA3, "type": "yarn", "mscale_all_dim": -1}},
            "mscale_all_dim must be a number > 0, got -1",
        ),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not one of silu, swish, gelu"),
        ({"hidden_act": ["silu"]}, "hidden_act ['silu'] is not one of"),
        ({"hidden_size": float("inf")}, "hidden_size must be a number > 0, got inf"),
        ({"hidden_size": float("nan")}, "hidden_size must be a number > 0, got nan"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
        ({"attention_bias": 1}, "attention_bias must be true or false, got 1"),
        ({"intermediate_size": None}, "intermediate_size must be a number > 0, got None"),
        (
            {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 0},
            "num_local_experts must",
        ),
        (
            {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 1},
            "num_experts_per_tok is 2, num_local_experts only 1",
        ),
        (
            {"model_type": "qwen3_moe", "num_key_value_heads": 2, "num_experts": 4},
            "num_experts_per_tok is 8, num_experts only 4",
        ),
        (
            {"model_type": "glm4_moe", "num_key_value_heads": 2, "n_group": 8, "topk_group": 0},
            "topk_group must be a number > 0, got 0",
        ),
        (
            {"model_type": "glm4_moe", "num_key_value_heads": 2, "n_group": 32, "num_experts_per_tok": 5},
            "1 of 32 groups (topk_group, n_group) of 128 experts do not hold 5 to choose",
        ),
        (
            {"model_type": "qwen3_moe", "num_key_value_heads": 2, "mlp_only_layers": "1"},
            "mlp_only_layers must be numbers of layers, got '1'",
        ),
        ({"model_type": "gpt_neox", "hidden_size": 66}, "hidden_size 66 does not divide into 4 heads"),
        ({"model_type": "gpt_neox", "hidden_size": 60}, "hidden_size / num_attention_heads must be even"),
        ({"model_type": "gpt_neox", "rotary_pct": 0.1}, "rotary_pct 0.1 turns 1 of a head's 16 dimensions"),
        ({"model_type": "gpt_neox", "rotary_pct": 1.5}, "partial_rotary_factor 1.5 is not supported"),
        (
            {"model_type": "gpt_neox", "rope_scaling": {"type": "3d", "factor": 2}},
            "rope type '3d' is not one of",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        (
            {"rope_scaling": {"type": "longrope"}, "max_position_embeddings": 9},
            "short_factor must be numbers > 0",
        ),
        ({"rope_scaling": {"type": "yarn"}}, "factor must be a number > 0, got None"),
        ({"rope_scaling": {"type": "linear"}}, "factor must be a number > 0, got None"),
        ({"rope_scaling": "linear"}, "rope settings must be an object, got 'linear'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not supported"),
        ({"quantization_config": {}}, "quant_method None is not one of awq, gptq, bitsandbytes, fp8, comp"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be token ids, got '</s>'"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(tmp_path: Path, fields: Any, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, **fields)
    assert message in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no config.json in it"),
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("\xff", "not valid JSON"),
    ],
)
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=message):
        read_config(tmp_path)
