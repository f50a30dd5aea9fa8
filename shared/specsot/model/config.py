"""A base model's shape, read from a Hugging Face directory's config.json.

Refuses to know tensors, weights and torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specsot.errors import ModelError

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """What sets one model_type apart from Llama; biases named here override the config's flags."""

    qkv_bias: bool | None = None
    out_bias: bool | None = None
    qk_norm: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(qkv_bias=False, out_bias=False),
    "qwen2": Family(qkv_bias=True, out_bias=False),
    "qwen3": Family(qk_norm=True),
}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. kind: default, linear (positions / factor) or llama3 (by wavelength).

    low, high, original: llama3's low_freq_factor, high_freq_factor, original_max_position_embeddings.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only model with RMSNorm, rotary positions, grouped-query attention and a SiLU-gated MLP.

    heads = kv_heads * g; query head h reads KV head h // g. eos: ids that end a text, may be empty.
    max_positions is also bounded by a sliding window, behind which full attention would differ.
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


def read_config(directory: Path) -> ModelConfig:
    """The config of a model directory. ModelError names the file and what is wrong with it."""
    source = directory / "config.json"
    fields = read_json(source)
    family = FAMILIES.get(str(fields.get("model_type")))
    if family is None:
        known = ", ".join(FAMILIES)
        raise ModelError(f"{source}: model_type {fields.get('model_type')!r} is not one of {known}")
    return _Reader(source, fields).config(family, _eos(directory, fields))


def read_json(source: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError when it is not one."""
    try:
        value = json.loads(source.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{source}: no such file") from None
    except OSError as error:
        raise ModelError(f"{source}: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{source}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelError(f"{source}: not a JSON object")
    return value


def read_rope(fields: Json, source: Path) -> Rope:
    """Rotary settings from `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old)."""
    settings = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(settings, dict):
        raise ModelError(f"{source}: rope settings must be an object, got {settings!r}")
    partial = settings.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ModelError(f"{source}: partial_rotary_factor {partial!r} is not supported")
    reader = _Reader(source, {"rope_theta": fields.get("rope_theta"), **settings})
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(f"{source}: rope type {kind!r} is not one of default, linear, llama3")
    theta = reader.number("rope_theta", 10000.0)
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, reader.number("factor"))
    return Rope(
        theta,
        kind,
        reader.number("factor"),
        reader.number("low_freq_factor"),
        reader.number("high_freq_factor"),
        reader.count("original_max_position_embeddings"),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Checked access to the fields of one JSON object."""

    source: Path
    fields: Json

    def number(self, name: str, default: float | None = None) -> float:
        value = self.fields.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ModelError(f"{self.source}: {name} must be a number > 0, got {value!r}")
        return float(value)

    def count(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value):
            raise ModelError(f"{self.source}: {name} must be an integer, got {value!r}")
        return int(value)

    def flag(self, name: str) -> bool:
        return bool(self.fields.get(name, False))

    def config(self, family: Family, eos: tuple[int, ...]) -> ModelConfig:
        self._refuse_what_differs()
        hidden, heads = self.count("hidden_size"), self.count("num_attention_heads")
        kv_heads = self.count("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ModelError(f"{self.source}: {heads} heads do not divide into {kv_heads} key-value heads")
        head_dim = self.count("head_dim", hidden // heads or None)
        if head_dim % 2:
            raise ModelError(f"{self.source}: head_dim must be even, got {head_dim}")
        bias = self.flag("attention_bias")
        return ModelConfig(
            model_type=str(self.fields["model_type"]),
            hidden=hidden,
            layers=self.count("num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=self.count("intermediate_size"),
            vocab=self.count("vocab_size"),
            eps=self.number("rms_norm_eps", 1e-6),
            max_positions=self._max_positions(),
            tied=self.flag("tie_word_embeddings"),
            rope=read_rope(self.fields, self.source),
            qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
            out_bias=bias if family.out_bias is None else family.out_bias,
            mlp_bias=self.flag("mlp_bias"),
            qk_norm=family.qk_norm,
            eos=eos,
        )

    def _refuse_what_differs(self) -> None:
        activation = self.fields.get("hidden_act", "silu")
        if activation != "silu":
            raise ModelError(f"{self.source}: hidden_act {activation!r} is not supported, only silu")
        if "quantization_config" in self.fields:
            raise ModelError(f"{self.source}: quantized weights (quantization_config) are not supported")

    def _max_positions(self) -> int:
        positions = self.count("max_position_embeddings", 2048)
        window = self.fields.get("sliding_window")
        used = self.fields.get("use_sliding_window", True)
        return min(positions, self.count("sliding_window")) if used and window is not None else positions


def _eos(directory: Path, fields: Json) -> tuple[int, ...]:
    """End-of-sequence ids: of generation_config.json where it names some, else of config.json."""
    source = directory / "generation_config.json"
    named = read_json(source).get("eos_token_id") if source.exists() else None
    found = fields.get("eos_token_id") if named is None else named
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise ModelError(f"{directory / 'config.json'}: eos_token_id must be token ids, got {found!r}")
    return tuple(ids)
