"""Weights that nobody trained: a model of Llama-3.1-8B's shape, a head for it, and a whole step on a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from specsot.checkpoint.config import ModelConfig, make_config
from specsot.core.tree import ancestry, depths
from specsot_drafter.heads.checkpoint import HeadShape
from specsot_drafter.heads.eagle import Eagle3Head, HeadLayers, SummedTaps
from specsot_model.attention import RowSpan
from specsot_model.decoder import Decoder
from specsot_model.layers import Norm
from specsot_model.linear import Linear
from specsot_model.rotary import Rotary
from specsot_model.weights import Fetch, Weights

PAGE = 64  # Rows of a KV page.


class MadeUp(Weights):
    """Weights that have every tensor that is asked for, in the shape that is asked for, but biases and the
    norms of attention heads.
    """

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
        """Ones for norms, else normally distributed numbers, as most models are initialized."""
        if "norm" in name:
            return torch.ones(shape, dtype=dtype, device=device)
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02)

    def __contains__(self, name: str) -> bool:
        return not name.endswith((".bias", "_norm.weight"))


def llama_8b() -> ModelConfig:
    """The published configuration of Llama-3.1-8B, its rotary scaling left out."""
    config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 128256}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
    return make_config({**config, "max_position_embeddings": 131072}, {}, Path("made up"))


def made_up_head(decoder: Decoder) -> Eagle3Head:
    """An EAGLE-3 head as wide as its base, with one layer, 32,000 draft ids and three taps."""
    config, device = decoder.config, decoder.device
    shape = HeadShape(
        hidden=config.hidden,
        inputs=2 * config.hidden,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate,
        vocab=32_000,
        layers=1,
    )
    fetch = Fetch(MadeUp(), decoder.dtype, device, None)
    rotary = Rotary(config.rope, shape.heads, shape.kv_heads, shape.head_dim, device)
    ones = torch.ones(shape.hidden, dtype=decoder.dtype, device=device)
    taps = (2, config.layers // 2, config.layers - 3)
    return Eagle3Head(
        shape=shape,
        positions=config.max_positions,
        fusion=SummedTaps(taps, fetch("fc.weight", (shape.hidden, 3 * config.hidden)), None),
        table=decoder.edges.embedding(),
        token_norm=Norm(ones, config.eps),
        feature_norm=Norm(ones, config.eps),
        decoder=HeadLayers(fetch, shape, rotary, config.eps),
        norm=Norm(ones, config.eps),
        lm_head=Linear(fetch("lm_head.weight", (shape.vocab, shape.hidden)), None),
        offsets=None,
    )


def step_call(decoder: Decoder, context_length: int, rows: int) -> Callable[[], Tensor]:
    """A whole step on the device, which can be captured: embedding, layers, logits and argmax of a tree's
    nodes. Tokens and the rows before them are random.
    """
    pages = -(-(context_length + rows) // PAGE)
    kv = decoder.make_kv(pages, PAGE)
    for layer in kv.layers:
        layer.normal_()
    rng = random.Random(rows)
    parents = (0, *(rng.randrange(max(0, node - 12), node) for node in range(1, rows)))
    positions = torch.tensor([context_length + depth for depth in depths(parents)], device="cuda")
    slots = torch.arange(context_length, context_length + rows, device="cuda")
    span = RowSpan(rows, context_length, rows, tuple(range(pages)), ancestry(parents))
    plan = decoder.plan([span], PAGE, "batched")
    tokens = torch.randint(decoder.config.vocab, (rows,), device="cuda")

    def step() -> Tensor:
        hidden, _ = decoder.forward(decoder.embed(tokens), positions, slots, plan, kv)
        return decoder.logits(hidden).max(-1).indices

    return step
