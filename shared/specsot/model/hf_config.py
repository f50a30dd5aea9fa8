"""Reads Hugging Face config.json files: required fields, families' spellings, rotary settings old and new."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any, Literal

from specsot.errors import ModelError

Json = Mapping[str, Any]

LAYOUT = "SpecSoT reads Hugging Face directories (config.json, tokenizer.json, *.safetensors)"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")  # as in meta-llama/Llama-3.1-8B-Instruct
SHOWN = 5  # names of a directory that an error repeats


def require_model_directory(directory: Path) -> Path:
    """The directory, when it has a config.json. ModelError says what is there instead, and what to do."""
    if directory.is_file():
        kind = "a GGUF file" if directory.suffix == ".gguf" else "a file"
        raise ModelError(f"{directory}: {kind}, not a model directory; {LAYOUT}")
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such model directory{_hub_hint(directory)}")
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"{directory}: no config.json in it, so this is no model directory; {_held(directory)}"
        )
    return directory


def require_torch() -> None:
    """ModelError where PyTorch or safetensors is missing; imports neither."""
    missing = [name for name in ("torch", "safetensors") if find_spec(name) is None]
    if missing:
        raise ModelError(f"{' and '.join(missing)} not installed: pip install 'specsot[model]'")


def _hub_hint(directory: Path) -> str:
    named = str(directory)
    if not HUB_NAME.fullmatch(named):
        return ""
    download = f"hf download {named} --local-dir models/{directory.name}"
    return f"; if this is a name on the Hugging Face Hub: {download}"


def _held(directory: Path) -> str:
    """What it holds, so that a wrong folder is recognised."""
    names = sorted(path.name for path in directory.iterdir())
    if not names:
        return "it is empty"
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    gguf = any(name.endswith(".gguf") for name in names)
    return f"it holds {shown}" + (f" (a GGUF file is not read; {LAYOUT})" if gguf else "")


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


@dataclass(frozen=True, slots=True)
class Fields:
    """Checked access to one JSON object; null counts as absent, `default` None as required."""

    source: Path
    values: Json

    def number(self, name: str, default: float | None = None) -> float:
        """A number > 0."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
            raise ModelError(f"{self.source}: {name} must be a number > 0, got {value!r}")
        return float(value)

    def count(self, name: str, default: int | None = None) -> int:
        """An integer > 0."""
        value = self.number(name, default)
        if value != int(value):
            raise ModelError(f"{self.source}: {name} must be an integer, got {value!r}")
        return int(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelError(f"{self.source}: {name} must be true or false, got {value!r}")
        return value


NormKind = Literal["rms", "layer"]
MlpKind = Literal["gated", "plain", "experts"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True, slots=True)
class Names:
    """Tensors of one family, without `.weight` and `.bias`.

    layer: of layer {}; what follows it here stands inside a layer, and under `attention` the projections.
    qkv:   one tensor whose rows are [heads, 3, head_dim]; empty where q_proj, k_proj, v_proj are apart.
    gate, up, down: of an MLP, or of expert {}; gate is empty where there is none.
    """

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}"
    input_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attention: str = "self_attn"
    qkv: str = ""
    out: str = "o_proj"
    router: str = ""
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"


@dataclass(frozen=True, slots=True)
class Family:
    """One model_type. Llama's, where nothing else is said.

    qkv_bias, out_bias: fixed by the family; None reads attention_bias (attention_bias: its default).
    kv_heads: where the config names none; None: as many as heads. head_dim: None: hidden / heads.
    own_head_dim: whether heads need not fill the hidden width.
    share: part of each head that is rotated, where the config does not say.
    partial: whether it may be less than all.
    window: whether attention slides: never, always, or when use_sliding_window asks for it.
    window_rows: its width where the config does not say; None: whole.
    parallel: whether use_parallel_residual is read.
    """

    names: Names = Names()
    norm: NormKind = "rms"
    mlp: MlpKind = "gated"
    mlp_bias: bool | None = False
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    attention_bias: bool = False
    qk_norm: bool = False
    kv_heads: int | None = None
    head_dim: int | None = None
    own_head_dim: bool = True
    activation: str = "silu"
    eps: float = 1e-6
    eps_field: str = "rms_norm_eps"
    theta: float = 10000.0
    theta_field: str = "rope_theta"
    share: float = 1.0
    share_field: str = "partial_rotary_factor"
    partial: bool = False
    positions: int = 2048
    window: Literal["never", "always", "asked"] = "never"
    window_rows: int | None = None
    parallel: bool = False


LLAMA = Family(mlp_bias=None)

FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,
    "mistral": Family(
        qkv_bias=False, out_bias=False, kv_heads=8, positions=131072, window="always", window_rows=4096
    ),
    "mixtral": Family(
        names=Names(
            router="block_sparse_moe.gate",
            gate="block_sparse_moe.experts.{}.w1",
            up="block_sparse_moe.experts.{}.w3",
            down="block_sparse_moe.experts.{}.w2",
        ),
        mlp="experts",
        qkv_bias=False,
        out_bias=False,
        kv_heads=8,
        eps=1e-5,
        theta=1e6,
        positions=131072,
        window="always",
    ),
    "qwen2": Family(
        qkv_bias=True, out_bias=False, kv_heads=32, positions=32768, window="asked", window_rows=4096
    ),
    "qwen3": Family(
        qk_norm=True, kv_heads=32, head_dim=128, positions=32768, window="asked", window_rows=4096
    ),
    "gpt_neox": Family(
        names=Names(
            embedding="gpt_neox.embed_in",
            norm="gpt_neox.final_layer_norm",
            head="embed_out",
            layer="gpt_neox.layers.{}",
            attention="attention",
            qkv="query_key_value",
            out="dense",
            gate="",
            up="mlp.dense_h_to_4h",
            down="mlp.dense_4h_to_h",
        ),
        norm="layer",
        mlp="plain",
        mlp_bias=True,
        attention_bias=True,
        own_head_dim=False,
        activation="gelu",
        eps=1e-5,
        eps_field="layer_norm_eps",
        theta_field="rotary_emb_base",
        share=0.25,
        share_field="rotary_pct",
        partial=True,
        parallel=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. kind: default, linear (positions / factor) or llama3 (by wavelength).

    low, high, original: llama3's low_freq_factor, high_freq_factor, original_max_position_embeddings.
    share: the part of each head that turns, its first dimensions; the rest stays as it is.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192
    share: float = 1.0

    def rotated(self, head_dim: int) -> int:
        """Dimensions of a head that turn."""
        return int(head_dim * self.share)


def read_rope(fields: Json, source: Path, family: Family = LLAMA) -> Rope:
    """Rotary settings from `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old).

    ModelError names what is wrong, and a kind that is not supported.
    """
    settings = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(settings, dict):
        raise ModelError(f"{source}: rope settings must be an object, got {settings!r}")
    old = {
        "rope_theta": fields.get(family.theta_field),
        "partial_rotary_factor": fields.get(family.share_field),
    }
    reader = Fields(source, {**old, **settings})
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(f"{source}: rope type {kind!r} is not one of default, linear, llama3")
    share, theta = _share(reader, family), reader.number("rope_theta", family.theta)
    if kind == "default":
        return Rope(theta, share=share)
    if kind == "linear":
        return Rope(theta, kind, reader.number("factor"), share=share)
    return Rope(
        theta,
        kind,
        reader.number("factor"),
        reader.number("low_freq_factor"),
        reader.number("high_freq_factor"),
        reader.count("original_max_position_embeddings", fields.get("max_position_embeddings")),
        share,
    )


def _share(reader: Fields, family: Family) -> float:
    share = reader.number("partial_rotary_factor", family.share)
    if share > 1 or (share < 1 and not family.partial):
        raise ModelError(f"{reader.source}: partial_rotary_factor {share!r} is not supported")
    return share
