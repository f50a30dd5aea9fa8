"""Translates a GGUF header to the fields of a config.json and to the places of Transformers' tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsot.checkpoint.families import FAMILIES, Names
from specsot.checkpoint.gguf.header import Header
from specsot.errors import ModelError

# The model_type by general.architecture. "llama" means Llama, Mistral and, with experts, Mixtral.
ARCHITECTURES = {
    "llama": "llama",
    "mistral3": "ministral3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "qwen3vl": "qwen3_vl_text",
    "qwen3vlmoe": "qwen3_vl_moe_text",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "granite": "granite",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "glm4moe": "glm4_moe",
    "deepseek2": "deepseek_v2",
    "minimax-m2": "minimax_m2",
    "gpt-oss": "gpt_oss",
    "gptneox": "gpt_neox",
}
# Tensor with the divisor of each rotary frequency, computed by Llama 3's scaling.
ROPE_FREQS = "rope_freqs.weight"
# Tensor with the factors of longrope for contexts that are longer than the original one.
LONG = "rope_factors_long.weight"
# Tensor with the factors of longrope for contexts that are not longer.
SHORT = "rope_factors_short.weight"
# Tensors that a layer has only if it predicts further tokens (MTP), by their GGUF names: the names within a
# layer of DeepSeek's and GLM's checkpoints, which stand for those of all families.
OF_MTP = {
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.eh_proj": "eh_proj",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
}
# GGUF's names of the tensors of latent attention, and the names within the attention module. The expansion of
# latent vectors is one tensor in older files; in others it is one for keys, transposed, and one for values.
OF_LATENT = {
    "attn_q_a": "q_a_proj",
    "attn_q_a_norm": "q_a_layernorm",
    "attn_q_b": "q_b_proj",
    "attn_kv_a_mqa": "kv_a_proj_with_mqa",
    "attn_kv_a_norm": "kv_a_layernorm",
    "attn_kv_b": "kv_b_proj",
    "attn_k_b": "k_b_proj",
    "attn_v_b": "v_b_proj",
}
# The value of expert_gating_func that means that scores are sigmoids.
SIGMOID = 2
# Number of token ids of GLM-4.7-Flash, of whose files some do not say that scores are sigmoids.
GLM_FLASH_TOKENS = 154880
# Layers of the Gemma models whose query_pre_attn_scalar is not head_dim.
LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}

# The axes that the rows are split into, and the order in which these axes should be, see `_order`.
Order = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a tensor in a GGUF file, and the form in which it is stored there.

    file: Path of the GGUF file.
    kind: ggml's number of the tensor's type.
    shape: Shape of the tensor, rows first.
    begin: Offset in the file, in bytes.
    bytes: Size of the tensor in bytes.
    order: How to reorder the rows: the axes that the rows are split into, and the order in which these axes
        should be; None: rows stay as stored. See `_order`.
    more: Number that the converter added to all elements of the tensor; the reader subtracts it. 0 for most
        tensors.
    kept: Number of first rows that stay; `order` says how to reorder those after them.
    columns: How to reorder the columns, as `order` does the rows; None: columns stay as stored.
    log: True if the file has -exp of the tensor's elements.
    """

    file: str
    kind: int
    shape: tuple[int, ...]
    begin: int
    bytes: int
    order: Order | None = None
    more: float = 0.0
    kept: int = 0
    columns: Order | None = None
    log: bool = False


def model_type_of(header: Header) -> str:
    """Return the model_type of a GGUF file. Raises ModelError for an unsupported architecture.

    header: the header of the GGUF file.

    A Llama file with experts is "mixtral", and an OLMo 2 file with sliding windows "olmo3". Files of all
    families with latent attention have one architecture: without experts they are "youtu", and with experts
    whose scores are sigmoids "deepseek_v3", also those of GLM-4.7-Flash.
    """
    header.require(
        header.architecture in ARCHITECTURES,
        f"a GGUF of architecture {header.architecture!r}, not one of {', '.join(ARCHITECTURES)}",
    )
    found = ARCHITECTURES[header.architecture]
    if found == "llama" and header.get("expert_count"):
        return "mixtral"
    if found == "deepseek_v2":
        return _latent_type_of(header)
    return "olmo3" if found == "olmo2" and header.get("attention.sliding_window") else found


def _latent_type_of(header: Header) -> str:
    """Return the model_type of a GGUF file with latent attention; see `model_type_of`.

    header: the header of the GGUF file.
    """
    if not header.get("expert_count"):
        return "youtu"
    of_flash = _vocabulary(header) == GLM_FLASH_TOKENS
    return "deepseek_v3" if of_flash or header.get("expert_gating_func") == SIGMOID else "deepseek_v2"


def config_of(header: Header) -> dict[str, Any]:
    """Return the fields that the model's config.json would have.

    header: the header of the GGUF file.

    Raises ModelError for an architecture or a feature that is not supported.

    Raises ModelError also if a number that every model needs is missing, and for keys and values of different
    lengths. A value that the file does not have is None or has llama.cpp's default.
    """
    kind = model_type_of(header)
    heads = header.count("attention.head_count")
    head_dim = header.get("attention.key_length", header.count("embedding_length") // heads)
    rotated = header.get("rope.dimension_count", head_dim)
    header.require(
        bool(FAMILIES[kind].latent) or header.get("attention.value_length", head_dim) == head_dim,
        "keys and values of different lengths are not supported",
    )
    eps = "layer_norm_epsilon" if kind == "gpt_neox" else "layer_norm_rms_epsilon"
    return {
        "model_type": kind,
        "vocab_size": _vocabulary(header),
        "hidden_size": header.count("embedding_length"),
        "intermediate_size": _width(header),
        "num_hidden_layers": _layers(header),
        "num_attention_heads": heads,
        "num_key_value_heads": header.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": header.count("context_length"),
        FAMILIES[kind].eps_field: header.get(f"attention.{eps}"),
        FAMILIES[kind].theta_field: header.get("rope.freq_base", 10000.0),
        FAMILIES[kind].share_field: rotated / head_dim,
        "rope_scaling": _rope_scaling(header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
        **PARTICULARS.get(kind, lambda header: {})(header),
    }


def _width(header: Header) -> int:
    """Return the width of the MLPs, or of the experts of a file that names no other; of a file that has a
    width for each layer, that of the first one.

    header: the header of the GGUF file.

    Raises ModelError if the file has no width.
    """
    widths = header.get("feed_forward_length")
    if isinstance(widths, list) and widths and isinstance(widths[0], int):
        return widths[0]
    return header.count("feed_forward_length" if widths else "expert_feed_forward_length")


def _layers(header: Header) -> int:
    """Return the number of layers, without the last ones that predict further tokens (MTP).

    header: the header of the GGUF file.
    """
    return header.count("block_count") - header.get("nextn_predict_layers", 0)


def _of_qwen_experts(header: Header) -> dict[str, Any]:
    """Return the config fields of the experts of Qwen's models.

    header: the header of the GGUF file.

    Raises ModelError if the number or the width of experts is missing.
    """
    shared = header.get("expert_shared_feed_forward_length")
    return {
        "num_experts": header.count("expert_count"),
        "num_experts_per_tok": header.count("expert_used_count"),
        "moe_intermediate_size": header.count("expert_feed_forward_length"),
        # GGUF has no such field; llama.cpp always normalizes the weights of these models.
        "norm_topk_prob": True,
        **({} if shared is None else {"shared_expert_intermediate_size": shared}),
    }


def _of_delta(header: Header) -> dict[str, Any]:
    """Return the config fields of gated delta layers.

    header: the header of the GGUF file.

    Raises ModelError if one of their sizes is missing.
    """
    value_heads = header.count("ssm.time_step_rank")
    return {
        "linear_num_key_heads": header.count("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": header.count("ssm.state_size"),
        "linear_value_head_dim": header.count("ssm.inner_size") // value_heads,
        "linear_conv_kernel_dim": header.count("ssm.conv_kernel"),
        "full_attention_interval": header.get("full_attention_interval", 4),
    }


def _of_delta_and_experts(header: Header) -> dict[str, Any]:
    """Return the config fields of gated delta layers, and of the experts of Qwen's models.

    header: the header of the GGUF file.

    Raises ModelError if a number is missing.
    """
    return _of_delta(header) | _of_qwen_experts(header)


def _of_mixtral(header: Header) -> dict[str, Any]:
    """Return the config fields of Mixtral's experts. Its files name no window.

    header: the header of the GGUF file.

    Raises ModelError if the number of experts is missing.
    """
    return {
        "num_local_experts": header.count("expert_count"),
        "num_experts_per_tok": header.count("expert_used_count"),
        "sliding_window": None,
    }


def _of_local_experts(header: Header) -> dict[str, Any]:
    """Return the config fields of MiniMax-M2 and gpt-oss: experts in every layer, biases, and a window.

    header: the header of the GGUF file.

    Raises ModelError if the number or the width of experts is missing.
    """
    return {
        **_of_mixtral(header),
        "intermediate_size": header.count("expert_feed_forward_length"),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        **_window(header),
    }


def _window(header: Header) -> dict[str, Any]:
    """Return the config field of a window: None if the file names no window, or 0.

    header: the header of the GGUF file.
    """
    return {"sliding_window": header.get("attention.sliding_window") or None}


def _window_and_kinds(header: Header) -> dict[str, Any]:
    """Return the config fields of a window, and of the layers that have it.

    header: the header of the GGUF file.
    """
    return {**_window(header), "layer_types": _kinds_of_layers(header)}


def _biases(header: Header) -> dict[str, Any]:
    """Return the config fields that say which matrices have a bias: those whose biases are in the file.

    header: the header of the GGUF file.
    """
    biased = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    return {field: name in header.tensors for field, name in biased.items()}


def _of_granite(header: Header) -> dict[str, Any]:
    """Return Granite's multipliers, and which matrices have a bias.

    header: the header of the GGUF file.
    """
    factors = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    return {**{field: header.get(key, 1.0) for field, key in factors.items()}, **_biases(header)}


def _of_gpt_neox(header: Header) -> dict[str, Any]:
    """Return the config field that says whether attention and MLP of a layer read the same input.

    header: the header of the GGUF file.
    """
    return {"use_parallel_residual": header.get("use_parallel_residual", True)}


def _kinds_of_layers(header: Header) -> list[str] | None:
    """Return the kind of every layer, as `layer_types` of a config names it. Return None if the file does not
    tell which layers have a sliding window.

    header: the header of the GGUF file.
    """
    pattern = header.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        return None
    return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in pattern]


def _of_gemma(header: Header) -> dict[str, Any]:
    """Return the config fields that only Gemma models have.

    header: the header of the GGUF file, of Gemma 2 or 3.

    Values that the file does not have are those of the published models. Scores are divided by the square
    root of hidden size / heads in the largest model of each generation, and of the head's length in the
    others. Raises ModelError if a number that has no such default is missing, and KeyError for an
    architecture that is not in LARGEST_GEMMAS.
    """
    heads = header.count("attention.head_count")
    caps = (50.0, 30.0) if header.architecture == "gemma2" else (None, None)
    width = header.count("embedding_length")
    head_dim = header.count("attention.key_length")
    largest = header.count("block_count") == LARGEST_GEMMAS[header.architecture]
    return {
        "sliding_window": header.get("attention.sliding_window", 4096),
        "attn_logit_softcapping": header.get("attn_logit_softcapping", caps[0]),
        "final_logit_softcapping": header.get("final_logit_softcapping", caps[1]),
        "query_pre_attn_scalar": width // heads if largest else head_dim,
        "rope_local_base_freq": header.get("rope.freq_base_swa", 10000.0),
    }


def _of_gemma4(header: Header) -> dict[str, Any]:
    """Return the config fields that only Gemma 4 models have, and those of heads, which differ from layer to
    layer.

    header: the header of the GGUF file.

    Raises ModelError if a number is missing, if the file does not tell which layers have a window, and if the
    widths of the MLPs are not supported: they must all be equal, or twice as large in just those layers that
    read the keys and values of others.
    """
    kinds = _kinds_of_layers(header)
    if kinds is None:
        raise ModelError(f"{header.file}: gemma4.attention.sliding_window_pattern must be a list")
    kv_heads = header.get("attention.head_count_kv")
    by_layer = kv_heads if isinstance(kv_heads, list) else [kv_heads] * len(kinds)
    by_kind = dict(zip(kinds, by_layer))
    table = header.tensors.get("per_layer_token_embd.weight")
    readers = header.get("attention.shared_kv_layers", 0)
    widths = header.get("feed_forward_length")
    wide = isinstance(widths, list) and len(widths) == len(kinds) and widths[-1] == 2 * widths[0]
    header.require(
        not isinstance(widths, list)
        or widths
        == [widths[0] * (1 + (wide and layer >= len(kinds) - readers)) for layer in range(len(kinds))],
        f"gemma4.feed_forward_length {widths} is not supported",
    )
    whole_layers = [
        layer for layer, kind in enumerate(kinds[: len(kinds) - readers]) if kind == "full_attention"
    ]
    experts = header.get("expert_count")
    return {
        "layer_types": kinds,
        "head_dim": header.count("attention.key_length_swa"),
        "global_head_dim": header.count("attention.key_length"),
        "num_key_value_heads": by_kind.get("sliding_attention"),
        "num_global_key_value_heads": by_kind.get("full_attention"),
        "attention_k_eq_v": any(f"blk.{layer}.attn_v.weight" not in header.tensors for layer in whole_layers),
        "sliding_window": header.count("attention.sliding_window"),
        "rope_local_base_freq": header.get("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": header.get("final_logit_softcapping"),
        "hidden_size_per_layer_input": header.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": table.shape[0] if table else None,
        "num_kv_shared_layers": readers,
        "use_double_wide_mlp": wide,
        "enable_moe_block": bool(experts),
        **(
            {
                "num_experts": experts,
                "top_k_experts": header.count("expert_used_count"),
                "moe_intermediate_size": header.count("expert_feed_forward_length"),
            }
            if experts
            else {}
        ),
    }


def _of_glm(header: Header) -> dict[str, Any]:
    """Return the config fields that only GLM models have.

    header: the header of the GGUF file.
    """
    return {
        "n_routed_experts": header.count("expert_count"),
        "num_experts_per_tok": header.count("expert_used_count"),
        "moe_intermediate_size": header.count("expert_feed_forward_length"),
        "n_shared_experts": header.get("expert_shared_count", 0),
        "first_k_dense_replace": header.get("leading_dense_block_count", 0),
        "norm_topk_prob": header.get("expert_weights_norm", True),
        "routed_scaling_factor": header.get("expert_weights_scale", 1.0),
        "n_group": header.get("expert_group_count", 1),
        "topk_group": header.get("expert_group_used_count", 1),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
    }


def _of_latent(header: Header) -> dict[str, Any]:
    """Return the config fields of latent attention, and of experts if the file has any.

    header: the header of the GGUF file.

    Raises ModelError if a number is missing.
    """
    rotated = header.count("rope.dimension_count")
    key_length, value_length = (
        header.get(f"attention.{name}_length_mla") or header.count(f"attention.{name}_length")
        for name in ("key", "value")
    )
    experts = _of_glm(header) if header.get("expert_count") else {}
    return {
        **experts,
        "norm_topk_prob": header.get("expert_weights_norm", False),
        "kv_lora_rank": header.count("attention.kv_lora_rank"),
        "q_lora_rank": header.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_length - rotated,
        "v_head_dim": value_length,
        "partial_rotary_factor": 1.0,
    }


# By model_type: the function that returns the config fields that only some families have. Each raises
# ModelError if a number that the family needs is missing.
PARTICULARS: Mapping[str, Callable[[Header], dict[str, Any]]] = {
    "llama": _biases,
    "smollm3": _biases,
    "mixtral": _of_mixtral,
    "minimax_m2": _of_local_experts,
    "gpt_oss": _of_local_experts,
    "qwen3_moe": _of_qwen_experts,
    "qwen3_vl_moe_text": _of_qwen_experts,
    "qwen3_next": _of_delta_and_experts,
    "qwen3_5_text": _of_delta,
    "qwen3_5_moe_text": _of_delta_and_experts,
    "glm4_moe": _of_glm,
    "deepseek_v2": _of_latent,
    "deepseek_v3": _of_latent,
    "youtu": _of_latent,
    "gemma2": _of_gemma,
    "gemma3_text": _of_gemma,
    "gemma4_text": _of_gemma4,
    "phi3": _window,
    "ministral3": _window,
    "olmo3": _window_and_kinds,
    "granite": _of_granite,
    "gpt_neox": _of_gpt_neox,
}


def _vocabulary(header: Header) -> int:
    """Return the number of token ids: the rows of the embedding. A file with MTP layers alone may have no
    embedding; then the tokens of its tokenizer are counted.

    header: the header of the GGUF file.

    Raises ModelError for any other file without an embedding.
    """
    if embedding := header.tensors.get("token_embd.weight"):
        return embedding.shape[0]
    if any(".nextn." in name for name in header.tensors):
        return len(header.metadata.get("tokenizer.ggml.tokens", ()))
    raise ModelError(f"{header.file}: no tensor token_embd.weight")


def _rope_scaling(header: Header) -> dict[str, Any] | None:
    """Return the `rope_scaling` of the config, or None if positions are not scaled.

    header: the header of the GGUF file.

    Raises ModelError for an unsupported kind.

    The tensors of the file have precedence over its metadata: frequency divisors mean Llama 3's scaling, or
    in Gemma 4 which pairs rotate; long and short factors mean longrope. A linear scaling with a factor of 1,
    of 0 or without a factor counts as none.
    """
    kind = header.get("rope.scaling.type", "none")
    factor = header.get("rope.scaling.factor")
    if ROPE_FREQS in header.tensors and header.architecture == "gemma4":
        # Pairs that do not rotate have a divisor of 1e30.
        rotating = _numbers(header, ROPE_FREQS) == 1
        return {"rope_type": "proportional", "partial_rotary_factor": float(rotating.mean())}
    if ROPE_FREQS in header.tensors:
        return _llama3_scaling(header)
    if LONG in header.tensors and SHORT in header.tensors:
        return _longrope(header)
    if kind == "yarn":
        return _yarn(header, factor)
    if kind == "none" or (kind == "linear" and factor in (None, 0.0, 1.0)):
        return None
    header.require(
        kind == "linear", f"rope scaling {kind!r} is not one of none, linear, yarn, llama3, longrope"
    )
    return {"rope_type": "linear", "factor": factor}


def _longrope(header: Header) -> dict[str, Any]:
    """Return the fields of a config's `rope_scaling` for the kind longrope; the factors are tensors of the
    file. The original context is left out if the file does not name it.

    header: the header of the GGUF file.
    """
    found: dict[str, Any] = {
        "long_factor": _numbers(header, LONG).tolist(),
        "short_factor": _numbers(header, SHORT).tolist(),
        "original_max_position_embeddings": header.get("rope.scaling.original_context_length"),
    }
    return {"rope_type": "longrope", **{name: value for name, value in found.items() if value is not None}}


def _yarn(header: Header, factor: float | None) -> dict[str, Any]:
    """Return yarn's settings. Those that the file does not name are left out.

    llama.cpp has one number for both mscale and mscale_all_dim, and in files of DeepSeek a tenth of it.
    gpt-oss does not round the range that is blended to whole pairs.

    header: the header of the GGUF file.
    factor: the factor of the context extension, or None if the file names none.

    A value of 0 counts as not named.
    """
    scale = header.get("rope.scaling.yarn_log_multiplier")
    if scale and header.architecture == "deepseek2":
        scale = 10 * scale
    scaling = "rope.scaling"
    found: dict[str, Any] = {
        "factor": factor,
        "original_max_position_embeddings": header.get(f"{scaling}.original_context_length"),
        "beta_fast": header.get(f"{scaling}.yarn_beta_fast"),
        "beta_slow": header.get(f"{scaling}.yarn_beta_slow"),
        "mscale": scale,
        "mscale_all_dim": scale,
        "llama_4_scaling_beta": header.get("attention.temperature_scale"),
    }
    whole = {"truncate": False} if header.architecture == "gpt-oss" else {}
    return {"rope_type": "yarn", **whole, **{name: value for name, value in found.items() if value}}


def _numbers(header: Header, name: str) -> NDArray[np.float32]:
    """Return the numbers of an fp32 tensor, in the order of the file.

    header: the header of the GGUF file.
    name: name of the tensor in the file, which must exist.

    Raises KeyError if the file has no such tensor. The type is not checked.
    """
    found = header.tensors[name]
    with found.file.open("rb") as file:
        file.seek(found.begin)
        return np.frombuffer(file.read(4 * prod(found.shape)), "<f4")


def _llama3_scaling(header: Header) -> dict[str, Any]:
    """Return the settings of Llama 3's rotary scaling, recovered from the frequency divisors that the file
    has.

    Llama 3.1 to 3.3 all use the same low and high factors and original context; only `factor` differs.

    header: the header of a GGUF file with the tensor ROPE_FREQS.

    Raises ModelError if the divisors do not follow from these settings.

    The result has the fields of a config's `rope_scaling`. Raises ModelError also if the tensor is not fp32.
    """
    factors = _numbers(header, ROPE_FREQS)
    theta = header.get("rope.freq_base", 10000.0)
    low = 1.0
    high = 4.0
    original = 8192
    waves = 2 * np.pi * theta ** (np.arange(len(factors)) / len(factors))
    factor = float(factors.max(initial=1.0))
    smooth = (original / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    expected = np.where(waves < original / high, 1.0, np.where(waves > original / low, factor, between))
    header.require(
        header.tensors[ROPE_FREQS].kind == 0 and np.allclose(factors, expected, rtol=1e-4),
        f"{ROPE_FREQS} is not the scaling of Llama 3, others are not supported",
    )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def places_of(header: Header, config: Mapping[str, Any]) -> dict[str, Place]:
    """Return the place of every tensor by the name that Transformers gives it.

    Rotary factors are left out, and of layers that predict further tokens (MTP) those tensors that the family
    does not have.

    header: the header of the GGUF file.
    config: the fields of config.json, see `config_of`.

    Raises ModelError for an unknown tensor, or a type that cannot be dequantized.

    A stacked tensor of experts gives one entry for each expert. Raises ModelError also if the file is too
    short for a tensor.
    """
    found = dict[str, Place]()
    mtp_layers = _mtp_prefixes(header)
    for stored_name, stored in header.tensors.items():
        if stored_name in (ROPE_FREQS, LONG, SHORT):
            continue
        size = _size_of(header, stored_name)
        place = Place(str(stored.file), stored.kind, stored.shape, stored.begin, size)
        named = list(_named(stored_name, place, config))
        header.require(
            bool(named) or stored_name.startswith(mtp_layers),
            f"{stored_name}: {header.architecture} has no such tensor here",
        )
        found |= named
    return found


def _mtp_prefixes(header: Header) -> tuple[str, ...]:
    """Return the prefixes of the tensors of layers that predict further tokens (MTP). Empty if there are no
    such layers.

    header: the header of the GGUF file.
    """
    first = _layers(header)
    return tuple(f"blk.{layer}." for layer in range(first, header.count("block_count")))


def _named(stored: str, place: Place, config: Mapping[str, Any]) -> Iterator[tuple[str, Place]]:
    """Yield Transformers' name and the place of a stored tensor; of stacked experts, those of each expert.

    Yields nothing if the family has no such tensor, and for a name that is neither a tensor outside of layers
    nor "blk.<layer>.<name>".

    stored: name of the tensor in the file.
    place: where the tensor is stored.
    config: the fields of config.json.

        # "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"

    The place has what a reader must undo: an offset that was added to the weights of norms, and the order of
    the rows of rotary projections.
    """
    family = FAMILIES[config["model_type"]]
    names = family.names
    # The only tensor of a layer whose name has no suffix.
    stored = f"{stored}.weight" if stored.endswith(".ssm_a") else stored
    tables = ("per_layer_token_embd", "per_layer_model_proj", "per_layer_proj_norm")
    outer = {
        "token_embd": names.embedding,
        "output_norm": names.norm,
        "output": names.head,
        **dict(zip(tables, names.layer_tables or ())),
    }
    stem, _, suffix = stored.rpartition(".")
    # Gemma's norms are stored with the offset already added to their weights.
    if stem.endswith("norm"):
        place = replace(place, more=family.norm_offset)
    if stem in outer:
        yield f"{outer[stem]}.{suffix}", place
        return
    split = re.fullmatch(r"blk\.(\d+)\.((?:nextn\.)?\w+?)(?:\.(\d+))?", stem)
    if split is None:
        return
    layer = names.layer.format(split[1])
    part = split[2]
    expert_names = names.experts if names.router else ()
    expert = _experts(names).get(part.removesuffix("_exps"))
    if family.delta and (named := _named_in_delta(part, place, config)):
        yield f"{layer}.linear_attn.{named[0]}", named[1]
    elif part.endswith("_exps") and expert and suffix != "scale":
        for number, one in enumerate(_split_experts(place)):
            yield f"{layer}.{expert.format(number)}.{suffix}", one
    elif expert and split[3]:
        yield f"{layer}.{expert.format(split[3])}.{suffix}", place
    elif part == "ffn_gate_up_exps" and expert_names:
        for half, name in zip(_split_rows(place), expert_names):
            for number, one in enumerate(half):
                yield f"{layer}.{name.format(number)}.{suffix}", one
    elif suffix == "scale" and (scale := _scales(names).get(part)):
        yield f"{layer}.{scale}", place
    elif part == "ffn_gate_inp_shexp" and names.shared_gate:
        yield f"{layer}.{names.shared_gate}.{suffix}", replace(place, shape=(1, place.shape[-1]))
    elif bare := _bare(names).get(part):
        yield f"{layer}.{bare}", place
    elif family.latent and part in OF_LATENT:
        yield f"{layer}.{names.attention}.{OF_LATENT[part]}.{suffix}", place
    elif name := _inner(names).get(part):
        yield f"{layer}.{name}.{suffix}", replace(place, order=_order(part, place, config))


def _named_in_delta(part: str, place: Place, config: Mapping[str, Any]) -> tuple[str, Place] | None:
    """Return the name within the mixer of a gated delta layer, and the place, of a stored tensor. Return None
    for other tensors of a layer.

    part: name of the tensor inside its layer, without suffix, as GGUF has it.
    place: where the tensor is stored.
    config: the fields of config.json.

    For Qwen3.5, llama.cpp orders value heads by their number within the key head, so that the value heads of
    all key heads take turns:

        # 2 key heads a and b of 2 value heads each: a0 a1 b0 b1 is stored as a0 b0 a1 b1
    """
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    value_dim = config["linear_value_head_dim"]
    first_rows = 2 * keys * config["linear_key_head_dim"]
    tiled = config["model_type"] != "qwen3_next"
    heads: Order | None = ((values // keys, keys, value_dim), (1, 0, 2)) if tiled else None
    single: Order | None = ((values // keys, keys), (1, 0)) if tiled else None
    if part == "ssm_conv1d":
        place = replace(place, shape=(place.shape[0], 1, place.shape[-1]))
    found: dict[str, tuple[str, Place]] = {
        "attn_qkv": ("in_proj_qkv.weight", replace(place, order=heads, kept=first_rows)),
        "attn_gate": ("in_proj_z.weight", replace(place, order=heads)),
        "ssm_ba": ("in_proj_ba.weight", place),
        "ssm_alpha": ("in_proj_a.weight", replace(place, order=single)),
        "ssm_beta": ("in_proj_b.weight", replace(place, order=single)),
        "ssm_conv1d": ("conv1d.weight", replace(place, order=heads, kept=first_rows)),
        "ssm_a": ("A_log", replace(place, order=single, log=True)),
        "ssm_dt": ("dt_bias", replace(place, order=single)),
        "ssm_norm": ("norm.weight", replace(place, more=0.0)),
        "ssm_out": ("out_proj.weight", replace(place, columns=heads)),
    }
    return found.get(part)


def _experts(names: Names) -> dict[str, str]:
    """Return the names of an expert's tensors by their GGUF names; empty without experts.

    names: the family's names of tensors.
    """
    return dict(zip(("ffn_gate", "ffn_up", "ffn_down"), names.experts)) if names.router else {}


def _bare(names: Names) -> dict[str, str]:
    """Return the names of tensors that have no suffix in Transformers, by their GGUF names.

    names: the family's names of tensors. An empty name means that the family has no such tensor.

    The values are full names within a layer, or "".
    """
    sinks = names.sinks and f"{names.attention}.{names.sinks}"
    return {
        "attn_sinks": sinks,
        "exp_probs_b": names.correction,
        "layer_output_scale": names.layer_scale,
    }


def _scales(names: Names) -> dict[str, str]:
    """Return the names of tensors whose GGUF names end with ".scale", by these names without it.

    An empty name means that the family has no such tensor.

    names: the family's names of tensors.
    """
    return {"ffn_gate_inp": names.router_scale, "ffn_down_exps": names.expert_scale}


def _inner(names: Names) -> dict[str, str]:
    """Return the names of the other tensors inside a layer, by their GGUF names.

    names: the family's names of tensors. An empty name means that the family has no such tensor.

    The result maps GGUF names such as "attn_norm" to Transformers' names within the layer. An entry whose
    name is empty is a tensor that the family does not have. If the family has one tensor for queries, keys
    and values, the separate projections and their norms are left out.
    """
    shared = dict(zip(("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"), names.shared or ()))
    parallel = ("ffn_norm", "post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2")
    own = {
        "attn_norm": names.input_norm,
        "ffn_norm": names.mlp_norm,
        "post_attention_norm": names.after_attention or names.mlp_norm,
        "post_ffw_norm": names.after_mlp,
        "attn_output": f"{names.attention}.{names.out}",
        "attn_qkv": names.qkv and f"{names.attention}.{names.qkv}",
        "ffn_gate_inp": names.router,
        "ffn_gate": names.gate,
        "ffn_up": names.gate_up or names.up,
        "ffn_down": names.down,
        **shared,
        **dict(zip(parallel, names.parallel_norms or ())),
        **dict(zip(("inp_gate", "proj", "post_norm"), names.layer_input or ())),
    }
    heads = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")
    apart = {f"attn_{one.removesuffix('_proj')}": f"{names.attention}.{one}" for one in heads}
    return {**own, **OF_MTP, **({} if names.qkv else apart)}


def _split_experts(place: Place) -> Iterator[Place]:
    """Yield the place of each expert in a tensor of all experts, which are stored one after another.

    place: the place of the tensor, whose first axis counts the experts.

    The places have the shape and the bytes of one expert; they are yielded in the order of the experts'
    numbers.
    """
    count = place.shape[0]
    shape = place.shape[1:]
    size = place.bytes // count
    return (replace(place, shape=shape, begin=place.begin + n * size, bytes=size) for n in range(count))


def _split_rows(place: Place) -> Iterator[Iterator[Place]]:
    """Yield for gates and for ups the places of all experts, of a tensor in which the gate of each expert
    precedes its up.

    place: the place of the tensor [experts, 2 * width, hidden].
    """
    _, rows, columns = place.shape
    experts = list(_split_experts(place))
    for half in range(2):
        size = experts[0].bytes // 2
        yield (
            replace(one, shape=(rows // 2, columns), begin=one.begin + half * size, bytes=size)
            for one in experts
        )


def _order(part: str, place: Place, config: Mapping[str, Any]) -> Order | None:
    """Return how the rows of a stored projection must be reordered for Transformers; None: they stay.

    llama.cpp rotates neighbouring rows of Llama's query and key heads, Transformers rows of the two halves of
    a head:

        # one head of 4 rows, stored [a0 b0 a1 b1], axes (1, 2, 2), order (0, 2, 1) -> [a0 a1 b0 b1]

    For GPT-NeoX, llama.cpp stores all queries, then all keys, then all values; Transformers expects the three
    of head 0, then those of head 1, and so on.

    part: name of the tensor inside its layer, without suffix, as GGUF has it.
    place: where the tensor is stored.
    config: the fields of config.json.

    Returns None for every other tensor and every other family.
    """
    heads = config["num_attention_heads"]
    kind = config["model_type"]
    if kind in ("llama", "mixtral", "ministral3", "smollm3", "granite") and part in ("attn_q", "attn_k"):
        heads = heads if part == "attn_q" else config["num_key_value_heads"]
        return (heads, place.shape[0] // heads // 2, 2), (0, 2, 1)
    if part == "attn_qkv" and FAMILIES[kind].names.qkv_by_head:
        return (3, heads, place.shape[0] // heads // 3), (1, 0, 2)
    return None


def _size_of(header: Header, name: str) -> int:
    """Return the size of a tensor in bytes.

    header: the header of the GGUF file.
    name: the tensor's name there.

    Raises ModelError if its type cannot be dequantized, if its rows are no whole blocks, or if the file is
    too short.

    A tensor without dimensions has no whole blocks, so that ModelError is raised.
    """
    stored = header.tensors[name]
    block, size = _block_of(stored.kind)
    header.require(size > 0, f"{name}: ggml type {stored.kind} is none that the package gguf dequantizes")
    header.require(
        bool(stored.shape) and stored.shape[-1] % block == 0,
        f"{name}: rows of shape {list(stored.shape)} are not blocks of {block}",
    )
    total = prod(stored.shape) // block * size
    file_size = stored.file.stat().st_size
    header.require(
        stored.begin + total <= file_size,
        f"{name} ends at byte {stored.begin + total}, {stored.file.name} at {file_size}: truncated",
    )
    return total


@cache
def _block_of(kind: int) -> tuple[int, int]:
    """Return how many elements and how many bytes a block of a ggml type has, by the tables of the package
    gguf. Return (0, 0) if the type is unknown or cannot be dequantized.

    kind: ggml's number of the type.

    Types that are not quantized have blocks of one element.
    """
    from gguf import constants, quants

    try:
        named = constants.GGMLQuantizationType(kind)
        block, size = constants.GGML_QUANT_SIZES[named]
        quants.dequantize(np.zeros((1, size), np.uint8), named)
    except (ValueError, KeyError, NotImplementedError):
        return 0, 0
    return block, size
