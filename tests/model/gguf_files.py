"""Writes tiny GGUF files by the gguf package, as llama.cpp's converter would of Transformers' models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFWriter,
    RopeScalingType,
    TensorNameMap,
    get_tensor_name_map,
)
from gguf.quants import quantize

# What the package can quantize, too; the others can be read only.
KINDS = tuple(
    GGMLQuantizationType[one] for one in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
)
ARCHS = {
    "llama": MODEL_ARCH.LLAMA,
    "mixtral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "ministral3": MODEL_ARCH.MISTRAL3,
    "phi3": MODEL_ARCH.PHI3,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "gemma4_text": MODEL_ARCH.GEMMA4,
    "glm4_moe": MODEL_ARCH.GLM4_MOE,
    "minimax_m2": MODEL_ARCH.MINIMAXM2,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
    "gpt_neox": MODEL_ARCH.GPTNEOX,
    "qwen3_vl": MODEL_ARCH.QWEN3VL,
    "qwen3_vl_moe": MODEL_ARCH.QWEN3VLMOE,
    "qwen3_next": MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_text": MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": MODEL_ARCH.QWEN35MOE,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "olmo2": MODEL_ARCH.OLMO2,
    "olmo3": MODEL_ARCH.OLMO2,
    "granite": MODEL_ARCH.GRANITE,
    **dict.fromkeys(("youtu", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"), MODEL_ARCH.DEEPSEEK2),
}
LATENT_EXPERTS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
QWEN_EXPERTS = ("qwen3_moe", "qwen3_vl_moe_text", "qwen3_next", "qwen3_5_moe_text")
DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


@dataclass
class Words:
    """A vocabulary as GGUF files tell of it."""

    model: str = "gpt2"
    pre: str | None = "gpt-2"
    tokens: list[str] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    merges: list[str] | None = None
    scores: list[float] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None

    def write(self, writer: GGUFWriter) -> None:
        writer.add_tokenizer_model(self.model)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.pre:
            writer.add_tokenizer_pre(self.pre)
        if self.merges is not None:
            writer.add_token_merges(self.merges)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
        if self.template is not None:
            writer.add_chat_template(self.template)
        for name, value in self.more.items():
            add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
            add(f"tokenizer.ggml.{name}", value)


def no_words(count: int) -> Words:
    """As many tokens as a model has, of which only the bytes mean something."""
    names = [f"<{number}>" for number in range(count)]
    return Words(tokens=names, types=[1] * count, merges=[], more={"bos_token_id": 1, "eos_token_id": 2})


def write_gguf(
    file: Path,
    model: torch.nn.Module,
    kinds: Iterable[GGMLQuantizationType] = (GGMLQuantizationType.F32,),
    words: Words | None = None,
    split: int = 0,
    arch: str = "",
    also: Callable[[GGUFWriter], None] = lambda writer: None,
    tensors: bool = True,
) -> Path:
    """kinds: of its matrices, in turn. split: tensors of one part; 0: one file. arch: another name for it.

    also: writes what else shall be in it. tensors: whether the model's own are in it. Parts
    have names of their own; the first one's is returned.
    """
    config: Any = model.config.get_text_config()
    family = ARCHS[model.config.model_type]
    writer = GGUFWriter(file, arch or MODEL_ARCH_NAMES[family], split_max_tensors=split)
    _write_shape(writer, config)
    also(writer)
    (words or no_words(config.vocab_size)).write(writer)
    turn = cycle(kinds)
    for name, values in _stored(model, family) if tensors else ():
        kind = next(turn) if values.ndim > 1 else GGMLQuantizationType.F32
        if family is MODEL_ARCH.GPT_OSS and name.endswith("_exps.weight"):
            kind = GGMLQuantizationType.MXFP4
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(file.parent.glob(f"{file.stem}-*.gguf"))
    return parts[0] if parts else file


def _write_shape(writer: GGUFWriter, config: Any) -> None:
    if config.model_type == "gemma4_text":
        _write_gemma4(writer, config)
        return
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if config.model_type != "gemma2":
        writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if config.model_type == "gpt_neox":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_parallel_residual(config.use_parallel_residual)
        return
    if ARCHS.get(config.model_type) is MODEL_ARCH.DEEPSEEK2:
        _write_latent(writer, config)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.model_type in (*QWEN_EXPERTS, *LATENT_EXPERTS, "glm4_moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type in (*QWEN_EXPERTS, *LATENT_EXPERTS, "mixtral", "glm4_moe", "minimax_m2", "gpt_oss"):
        writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    _write_particulars(writer, config, rope)


def _write_particulars(writer: GGUFWriter, config: Any, rope: Mapping[str, Any]) -> None:
    if config.model_type in DELTA:
        _write_delta(writer, config)
    if config.model_type == "olmo3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type in ("minimax_m2", "gpt_oss"):
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if config.model_type == "glm4_moe":
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if config.model_type in ("phi3", "gemma2", "gemma3_text", "gpt_oss"):
        writer.add_sliding_window(config.sliding_window or 0)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    kind = rope.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(256 / 16) / math.log(16)))
        for name in ("long", "short"):
            factors = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    if "mscale_all_dim" in rope and "llama_4_scaling_beta" not in rope:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    elif "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _write_latent(writer: GGUFWriter, config: Any) -> None:
    """Lengths are those of the absorbed form; the published ones have names of their own."""
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    if config.model_type not in LATENT_EXPERTS:
        return
    writer.add_expert_shared_count(config.n_shared_experts)
    types = getattr(config, "mlp_layer_types", None)
    writer.add_leading_dense_block_count(types.count("dense") if types else config.first_k_dense_replace)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    sigmoid = config.model_type != "deepseek_v2"
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID if sigmoid else ExpertGatingFuncType.SOFTMAX)


def _of_latent(name: str, values: np.ndarray, config: Any) -> Iterable[tuple[str, np.ndarray]]:
    """Keys and values are expanded by tensors of their own, the first one transposed."""
    sizes = config.num_attention_heads, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank
    keys, parts = np.split(values.reshape(sizes), [config.qk_nope_head_dim], 1)
    yield name.replace("kv_b_proj", "k_b_proj"), np.ascontiguousarray(keys.swapaxes(1, 2))
    yield name.replace("kv_b_proj", "v_b_proj"), np.ascontiguousarray(parts)


def _write_gemma4(writer: GGUFWriter, config: Any) -> None:
    config.allow_global_per_layer_attribute_access = True
    whole = config.per_layer_config["full_attention"]
    is_sliding = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    readers = config.num_kv_shared_layers
    widths = [config.intermediate_size] * (config.num_hidden_layers - readers)
    widths += [config.intermediate_size * (1 + config.use_double_wide_mlp)] * readers
    writer.add_feed_forward_length(widths if config.use_double_wide_mlp else config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    kv_heads = [
        config.num_key_value_heads if sliding else whole.num_key_value_heads for sliding in is_sliding
    ]
    writer.add_head_count_kv(kv_heads)
    for add, size in (
        (writer.add_key_length, whole.head_dim),
        (writer.add_value_length, whole.head_dim),
        (writer.add_key_length_swa, config.head_dim),
        (writer.add_value_length_swa, config.head_dim),
        (writer.add_rope_dimension_count, whole.head_dim),
        (writer.add_rope_dimension_count_swa, config.head_dim),
    ):
        add(size)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(is_sliding)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_shared_kv_layers(readers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    pairs = whole.head_dim // 2
    turning = int(pairs * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    factors = np.array([1.0] * turning + [1e30] * (pairs - turning), np.float32)
    writer.add_tensor("rope_freqs.weight", factors)


def _of_gemma4(name: str, values: np.ndarray, kind: str) -> Iterable[tuple[str, np.ndarray]]:
    """Scales have names of their own; gates and ups of all experts stay in one tensor."""
    layer = name.split(".")[2] if ".layers." in name else ""
    if name.endswith("router.scale"):
        return [(f"blk.{layer}.ffn_gate_inp.scale", values)]
    if name.endswith("per_expert_scale"):
        return [(f"blk.{layer}.ffn_down_exps.scale", values)]
    bare = name.endswith("layer_scalar") or ".experts." in name
    return [(f"{name}.weight" if bare else name, values)]


def _write_delta(writer: GGUFWriter, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
    if config.model_type != "qwen3_5_text":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _stored(model: torch.nn.Module, arch: MODEL_ARCH) -> Iterable[tuple[str, np.ndarray]]:
    config: Any = model.config.get_text_config()
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    for whole_name, tensor in model.state_dict().items():
        name = whole_name.replace("model.language_model.", "model.")
        if name.startswith("model.visual."):
            continue
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("kv_b_proj.weight"):
            found = _of_latent(name, tensor.detach().numpy(), config)
        else:
            parts = {"gpt_oss": _of_gpt_oss, "gemma4_text": _of_gemma4}.get(config.model_type, _apart)
            found = parts(name, tensor.detach().numpy(), config.model_type)
        for one, values in found:
            if one.startswith("blk."):
                yield one, values
                continue
            if ".linear_attn." in one:
                yield from _of_delta(one, values, config, names)
                continue
            stem, _, suffix = one.rpartition(".")
            stored = names.get_name(stem)
            assert stored is not None, one
            offset = config.model_type in ("gemma2", "gemma3_text") or config.model_type in DELTA
            raised = values + 1 if offset and one.endswith("norm.weight") else values
            yield f"{stored}.{suffix}", _permuted(one, raised, config)


def _of_delta(
    name: str, values: np.ndarray, config: Any, names: TensorNameMap
) -> Iterable[tuple[str, np.ndarray]]:
    """Value heads of Qwen3.5 take turns by key head; those of Qwen3-Next stay, and its gates leave them."""
    layer, _, part = name.partition(".linear_attn.")
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    first = 2 * keys * key_dim

    def in_turns(rows: np.ndarray, dim: int) -> np.ndarray:
        if config.model_type == "qwen3_next":
            return rows
        return rows.reshape(keys, heads // keys, dim, -1).swapaxes(0, 1).reshape(rows.shape)

    match part:
        case "in_proj_qkvz.weight":
            each = heads // keys * value_dim
            by_head = np.split(
                values.reshape(keys, -1, values.shape[1]), [key_dim, 2 * key_dim, 2 * key_dim + each], 1
            )
            q, k, v, z = (one.reshape(-1, values.shape[1]) for one in by_head)
            number = layer.rpartition(".")[2]
            yield f"blk.{number}.attn_qkv.weight", np.concatenate((q, k, v))
            yield f"blk.{number}.attn_gate.weight", z
            return
        case "in_proj_qkv.weight" | "conv1d.weight":
            rows = values.squeeze(1) if values.ndim == 3 else values
            values = np.concatenate((rows[:first], in_turns(rows[first:], value_dim)))
        case "in_proj_z.weight":
            values = in_turns(values, value_dim)
        case "in_proj_a.weight" | "in_proj_b.weight" | "dt_bias":
            values = in_turns(values, 1)
        case "A_log":
            values = in_turns(-np.exp(values), 1)
        case "out_proj.weight":
            values = np.ascontiguousarray(in_turns(np.ascontiguousarray(values.T), value_dim).T)
    if part == "A_log":
        yield str(names.get_name(name)), values
        return
    stem, _, suffix = name.replace("dt_bias", "dt_proj.bias").rpartition(".")
    yield f"{names.get_name(stem)}.{suffix}", values


def _of_gpt_oss(name: str, values: np.ndarray, kind: str) -> Iterable[tuple[str, np.ndarray]]:
    """Gates and ups take turns in Transformers, whose experts' matrices are [inputs, outputs]."""
    if name.endswith(".sinks"):
        return [(f"{name}.weight", values)]
    stem, _, part = name.rpartition(".")
    if not stem.endswith(".experts"):
        return [(name, values)]
    matrix, suffix = part.removesuffix("_bias"), "bias" if part.endswith("_bias") else "weight"
    values = values if suffix == "bias" else values.swapaxes(1, 2)
    if matrix == "down_proj":
        return [(f"{stem}.down_proj.{suffix}", np.ascontiguousarray(values))]
    halves = {"gate_proj": values[:, ::2], "up_proj": values[:, 1::2]}
    return [(f"{stem}.{half}.{suffix}", np.ascontiguousarray(one)) for half, one in halves.items()]


def _apart(name: str, values: np.ndarray, kind: str) -> Iterable[tuple[str, np.ndarray]]:
    """Transformers holds gate and up of all experts as one; llama.cpp stores them apart."""
    mixtral = kind in ("mixtral", "minimax_m2")
    stem = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
    parts = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    if name.endswith("experts.gate_up_proj"):
        stem = stem.removesuffix("gate_up_proj")
        return [(f"{stem}{part}.weight", half) for part, half in zip(parts, np.split(values, 2, axis=1))]
    if name.endswith("experts.down_proj"):
        return [(f"{stem.removesuffix('down_proj')}{parts[2]}.weight", values)]
    stem = stem.replace("e_score_correction_bias", "e_score_correction.bias")
    return [(stem if ".mlp.gate." in name or "e_score" in name else name, values)]


def _permuted(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    heads = config.num_attention_heads
    kinds = ("llama", "mixtral", "ministral3", "smollm3", "granite")
    if config.model_type in kinds and (".q_proj." in name or ".k_proj." in name):
        heads = heads if ".q_proj." in name else config.num_key_value_heads
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)
    if "query_key_value" in name:
        return np.concatenate([*values.reshape(heads, 3, -1, *values.shape[1:]).swapaxes(0, 1)]).reshape(
            values.shape
        )
    return values
