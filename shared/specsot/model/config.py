"""A base model's shape, read from its config.json, and per-head KV windows, read from a file beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specsot.errors import InvalidRequest, ModelError
from specsot.model.hf_config import (
    ACTIVATIONS,
    FAMILIES,
    LLAMA,
    Activation,
    Family,
    Fields,
    Json,
    MlpKind,
    Names,
    NormKind,
    Rope,
    read_json,
    read_rope,
    require_model_directory,
)
from specsot.params import MAX_TOKENS, HeadWindows

__all__ = ["ModelConfig", "Rope", "make_config", "read_config", "read_json", "read_rope"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only model with rotary positions and grouped-query attention.

    heads = kv_heads * g; query head h reads KV head h // g. eos: ids that end a text, may be empty.
    max_positions is also bounded by a sliding window, behind which full attention would differ.
    parallel: attention and MLP both read the layer's input. experts: how many, `chosen` a row.
    """

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float
    max_positions: int
    tied: bool
    rope: Rope
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos: tuple[int, ...] = ()
    names: Names = LLAMA.names
    norm: NormKind = "rms"
    mlp: MlpKind = "gated"
    activation: Activation = "silu"
    parallel: bool = False
    experts: int = 0
    chosen: int = 0


def read_config(directory: Path) -> ModelConfig:
    """The config of a model directory. ModelError names the file and what is wrong with it."""
    require_model_directory(directory)
    source, generation = directory / "config.json", directory / "generation_config.json"
    return make_config(read_json(source), read_json(generation) if generation.exists() else {}, source)


def make_config(values: Json, generation: Json, source: Path) -> ModelConfig:
    """The same from the fields themselves; `source` says for people whose they are."""
    family = FAMILIES.get(str(values.get("model_type")))
    if family is None:
        known = ", ".join(FAMILIES)
        raise ModelError(f"{source}: model_type {values.get('model_type')!r} is not one of {known}")
    if "quantization_config" in values:
        raise ModelError(f"{source}: quantized weights (quantization_config) are not supported")
    return _read(Fields(source, values), family, _eos(values, generation, source))


def _read(fields: Fields, family: Family, eos: tuple[int, ...]) -> ModelConfig:
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads, head_dim = _heads(fields, family, hidden, heads)
    rope = _rope(fields, family, head_dim)
    experts, chosen = _experts(fields) if family.mlp == "experts" else (0, 0)
    bias = fields.flag("attention_bias", family.attention_bias)
    return ModelConfig(
        model_type=str(fields.values["model_type"]),
        hidden=hidden,
        layers=fields.count("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=fields.count("intermediate_size"),
        vocab=fields.count("vocab_size"),
        eps=fields.number(family.eps_field, family.eps),
        max_positions=_max_positions(fields, family),
        tied=fields.flag("tie_word_embeddings"),
        rope=rope,
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=bias if family.out_bias is None else family.out_bias,
        mlp_bias=fields.flag("mlp_bias") if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        eos=eos,
        names=family.names,
        norm=family.norm,
        mlp=family.mlp,
        activation=_activation(fields, family),
        parallel=family.parallel and fields.flag("use_parallel_residual", True),
        experts=experts,
        chosen=chosen,
    )


def _heads(fields: Fields, family: Family, hidden: int, heads: int) -> tuple[int, int]:
    """Key-value heads, and the dimensions of each head."""
    if not family.own_head_dim:
        if hidden % heads:
            raise ModelError(f"{fields.source}: hidden_size {hidden} does not divide into {heads} heads")
        return heads, _even(fields, "hidden_size / num_attention_heads", hidden // heads)
    kv_heads = fields.count("num_key_value_heads", family.kv_heads or heads)
    if heads % kv_heads:
        raise ModelError(f"{fields.source}: {heads} heads do not divide into {kv_heads} key-value heads")
    head_dim = fields.count("head_dim", family.head_dim or hidden // heads or None)
    return kv_heads, _even(fields, "head_dim", head_dim)


def _even(fields: Fields, name: str, value: int) -> int:
    if value % 2:
        raise ModelError(f"{fields.source}: {name} must be even, got {value}")
    return value


def _rope(fields: Fields, family: Family, head_dim: int) -> Rope:
    rope = read_rope(fields.values, fields.source, family)
    rotated = rope.rotated(head_dim)
    if rotated < 2 or rotated % 2:
        raise ModelError(
            f"{fields.source}: {family.share_field} {rope.share} turns {rotated} of a head's {head_dim} "
            "dimensions; that must be an even number > 0"
        )
    return rope


def _experts(fields: Fields) -> tuple[int, int]:
    """How many experts, and how many of them a row goes to."""
    experts, chosen = fields.count("num_local_experts", 8), fields.count("num_experts_per_tok", 2)
    if chosen > experts:
        raise ModelError(
            f"{fields.source}: num_experts_per_tok is {chosen}, num_local_experts only {experts}"
        )
    return experts, chosen


def _activation(fields: Fields, family: Family) -> Activation:
    name = fields.values.get("hidden_act") or family.activation
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ModelError(f"{fields.source}: hidden_act {name!r} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _max_positions(fields: Fields, family: Family) -> int:
    positions = fields.count("max_position_embeddings", family.positions)
    window = _window(fields, family)
    return positions if window is None else min(positions, window)


def _window(fields: Fields, family: Family) -> int | None:
    """Rows behind which some layer no longer sees; None: every layer sees all."""
    asked = family.window == "asked" and fields.flag("use_sliding_window")
    if not asked and family.window != "always":
        return None
    kinds = fields.values.get("layer_types")
    if asked and isinstance(kinds, list) and "sliding_attention" not in kinds:
        return None
    window = fields.values.get("sliding_window", family.window_rows)
    return None if window is None else fields.count("sliding_window", window)


def _eos(values: Json, generation: Json, source: Path) -> tuple[int, ...]:
    """End-of-sequence ids: of generation_config.json where it names some, else of config.json."""
    named = generation.get("eos_token_id")
    found = values.get("eos_token_id") if named is None else named
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise ModelError(f"{source}: eos_token_id must be token ids, got {found!r}")
    return tuple(ids)


HEADS_FILE = "kv_heads.json"


def read_heads(directory: Path, config: ModelConfig) -> HeadWindows | None:
    """None where nothing was measured. Raises ModelError, also for another model's heads."""
    path = directory / HEADS_FILE
    if not path.is_file():
        return None
    try:
        layers = tuple(tuple(map(_head_window, heads)) for heads in read_json(path)["layers"])
        found = HeadWindows(layers)
    except (KeyError, TypeError, AttributeError, InvalidRequest) as error:
        raise ModelError(f"{path}: {type(error).__name__}: {error}") from None
    there, wanted = (len(layers), len(layers[0])), (config.layers, config.kv_heads)
    if there != wanted:
        raise ModelError(f"{path}: {there[0]} layers of {there[1]} KV heads, the model has {wanted}")
    return found


def write_heads(
    path: Path, layers: Sequence[Sequence[Mapping[str, Any]]], measured: Mapping[str, Any]
) -> None:
    """layers: of every KV head `sinks` and `recent` (None: all), and whatever else people should know."""
    lines = ",\n".join(f"    {json.dumps(list(heads))}" for heads in layers)
    path.write_text(f'{{\n  "measured": {json.dumps(dict(measured))},\n  "layers": [\n{lines}\n  ]\n}}\n')


def _head_window(head: Mapping[str, Any]) -> tuple[int, int]:
    recent = head["recent"]
    return head["sinks"], MAX_TOKENS if recent is None else recent
