"""Models of published shapes with made-up weights: right in bytes, wrong in all they say.

Refuses to know what is measured with them. Time depends on shapes alone; acceptance does not, so nobody
tells any.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from specsot.errors import InvalidRequest
from specsot.model.config import ModelConfig, make_config
from specsot.model.fields import Json
from specsot.model.weights import Weights

SPREAD = 0.02  # of the weights, as most models begin
FAINT = 1e-4  # of their usual size: what layers add, so that a token says which one follows

_LLAMA_ROPE: Json = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA_8B: Json = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {**_LLAMA_ROPE, "factor": 8.0},
    "tie_word_embeddings": False,
}
_LLAMA_70B: Json = {
    **_LLAMA_8B,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}
_LLAMA_1B: Json = {
    **_LLAMA_8B,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "intermediate_size": 8192,
    "rope_scaling": {**_LLAMA_ROPE, "factor": 32.0},
    "tie_word_embeddings": True,
}

SHAPES: Mapping[str, Json] = {
    "Llama-3.1-8B": _LLAMA_8B,
    "Llama-3.1-70B": _LLAMA_70B,
    "Llama-3.2-1B": _LLAMA_1B,
    "Qwen3-4B": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
}

ASSISTANTS: Mapping[str, str] = {"Llama-3.1-8B": "Llama-3.2-1B"}  # of the same family, with the same tokens


def config_of(name: str) -> ModelConfig:
    """One of SHAPES. Raises InvalidRequest."""
    if name not in SHAPES:
        raise InvalidRequest(f"no shape is called {name!r}, only {', '.join(SHAPES)}", field="models")
    return make_config(SHAPES[name], {}, Path(name))


class MadeUp(Weights):
    """Every tensor anybody asks for, in the shape it is asked for."""

    def names(self) -> tuple[str, ...]:
        return ()

    def where(self, name: str) -> str:
        return "made up"

    def shape(self, name: str) -> tuple[int, ...]:
        raise KeyError(name)

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        raise KeyError(name)

    def expect(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        if "norm" in name:
            return torch.ones(shape, dtype=dtype, device=device)
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, SPREAD)

    def __contains__(self, name: str) -> bool:
        return not name.endswith((".bias", "_norm.weight"))


class Telling(MadeUp):
    """Weights of the right sizes with which every token says the next: its number and one more.

    What layers add is small, and lm_head is the embedding moved by one row. Where both are one matrix
    nothing is told.
    """

    def __init__(self) -> None:
        self._table: Tensor | None = None

    def expect(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        made = super().expect(name, shape, dtype, device)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            made *= FAINT
        if name.endswith("embed_tokens.weight"):
            self._table = made
        if name.endswith("lm_head.weight") and self._table is not None and self._table.shape == made.shape:
            made.copy_(self._table.roll(1, 0))
        return made


def bytes_of_a_token(config: ModelConfig, itemsize: int) -> int:
    """Weights that one decoded token must read: all but the embedding's other rows."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer = config.hidden * (2 * q + 2 * kv + 3 * config.intermediate + 2)
    return itemsize * (config.layers * layer + config.hidden * (config.vocab + 1))


def bytes_of_kv(config: ModelConfig, rows: int, itemsize: int) -> int:
    """Keys and values of so many rows."""
    return 2 * config.layers * config.kv_heads * config.head_dim * rows * itemsize
