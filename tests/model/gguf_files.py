"""Writes tiny GGUF files by the gguf package, as llama.cpp's converter would of Transformers' models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
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
    "gpt_neox": MODEL_ARCH.GPTNEOX,
}


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
) -> Path:
    """kinds: of its matrices, in turn. split: tensors of one part; 0: one file. arch: another name for it.

    also: writes what else shall be in it. Parts have names of their own; the first one's is returned.
    """
    config: Any = model.config
    family = ARCHS[config.model_type]
    writer = GGUFWriter(file, arch or MODEL_ARCH_NAMES[family], split_max_tensors=split)
    _write_shape(writer, config)
    also(writer)
    (words or no_words(config.vocab_size)).write(writer)
    turn = cycle(kinds)
    for name, values in _stored(model, family):
        kind = next(turn) if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(file.parent.glob(f"{file.stem}-*.gguf"))
    return parts[0] if parts else file


def _write_shape(writer: GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if config.model_type == "gpt_neox":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_parallel_residual(config.use_parallel_residual)
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type in ("mixtral", "qwen3_moe"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)


def _stored(model: torch.nn.Module, arch: MODEL_ARCH) -> Iterable[tuple[str, np.ndarray]]:
    config: Any = model.config
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for one, values in _apart(name, tensor.detach().numpy(), config.model_type):
            stem, _, suffix = one.rpartition(".")
            stored = names.get_name(stem)
            assert stored is not None, one
            yield f"{stored}.{suffix}", _permuted(one, values, config)


def _apart(name: str, values: np.ndarray, kind: str) -> Iterable[tuple[str, np.ndarray]]:
    """Transformers holds gate and up of all experts as one; llama.cpp stores them apart."""
    mixtral = kind == "mixtral"
    stem = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
    parts = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    if name.endswith("experts.gate_up_proj"):
        stem = stem.removesuffix("gate_up_proj")
        return [(f"{stem}{part}.weight", half) for part, half in zip(parts, np.split(values, 2, axis=1))]
    if name.endswith("experts.down_proj"):
        return [(f"{stem.removesuffix('down_proj')}{parts[2]}.weight", values)]
    return [(stem if ".mlp.gate.weight" in name else name, values)]


def _permuted(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    heads = config.num_attention_heads
    if config.model_type in ("llama", "mixtral") and (".q_proj." in name or ".k_proj." in name):
        heads = heads if ".q_proj." in name else config.num_key_value_heads
        halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)
    if "query_key_value" in name:
        return np.concatenate([*values.reshape(heads, 3, -1, *values.shape[1:]).swapaxes(0, 1)]).reshape(
            values.shape
        )
    return values
