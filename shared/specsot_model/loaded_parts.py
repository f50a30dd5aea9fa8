"""A cache of loaded layers, so that a new range or another epoch loads nothing twice; and what stands for
weights that are not here yet: it counts and measures a model by what its config asks for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from specsot.checkpoint.config import ModelConfig
from specsot.members import Quantization, Range
from specsot_model.delta import DeltaBlock
from specsot_model.layers import AnyNorm, Block, fetch_embedding, fetch_final_norm, fetch_lm_head
from specsot_model.linear import Linear, Table
from specsot_model.published import open_weights, published_of
from specsot_model.tensor_parallel import MakeBlock
from specsot_model.weights import Fetch, Weights, has_files


@dataclass(slots=True)
class LoadedParts:
    """What is loaded of one model, in one form, on one device: layers by index, and the edges."""

    blocks: dict[int, Block] = field(default_factory=dict[int, Block])
    embedding: Table | None = None
    norm: AnyNorm | None = None
    head: Linear | None = None

    def fetch(self, fetch: Fetch, config: ModelConfig, index: int, make: MakeBlock = Block) -> Block:
        """A layer, and the parts before the first and after the last one; nothing is loaded twice."""
        if index not in self.blocks:
            delta = config.delta if config.recurrent(index) else None
            self.blocks[index] = (
                DeltaBlock(fetch, index, config, delta) if delta else make(fetch, index, config)
            )
        if index == 0 and self.embedding is None:
            self.embedding = fetch_embedding(fetch, config, self.head)
        if index == config.layers - 1 and self.head is None:
            self.norm = fetch_final_norm(fetch, config)
            self.head = fetch_lm_head(fetch, config, self.embedding)
        return self.blocks[index]

    def keep(self, layers: Range, config: ModelConfig) -> None:
        kept = range(layers.first, layers.last)
        self.blocks = {index: block for index, block in self.blocks.items() if index in kept}
        if layers.first:
            self.embedding = None
        if layers.last < config.layers:
            self.norm = self.head = None


SPREAD = 0.02  # of random weights; as models are initialised, so that no product overflows


class AbsentWeights(Weights):
    """Random tensors in the shapes that are asked for; `shape` knows those of every tensor a model reads."""

    def __init__(self, names: tuple[str, ...], config: ModelConfig) -> None:
        """names: of the tensors there are."""
        self._names = frozenset(names)
        self._shapes = dict[str, tuple[int, ...]]()
        parts = LoadedParts()
        fetch = Fetch(self, torch.float32, "meta")
        for layer in range(config.layers):
            parts.fetch(fetch, config, layer)

    def names(self) -> tuple[str, ...]:
        """Of those that are read: files may hold others."""
        return tuple(self._shapes)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def where(self, name: str) -> str:
        return "weights that are not here"

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def expect(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        self._shapes[name] = shape
        return self.tensor(name, dtype, device)

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        made = torch.empty(self._shapes[name], dtype=dtype, device=device)
        return made if made.is_meta else made.normal_(std=SPREAD)  # 2 ms each for shapes alone


def open_shapes(
    directory: Path, config: ModelConfig, bin_too: bool = False, quantization: Quantization | None = None
) -> Weights:
    """A base's tensors for whoever asks for shapes alone: as its files have them where all are here, else as
    its config has them. Nothing is fetched. Raises as `open_weights`.
    """
    published_of(directory, quantization)
    if has_files(directory, bin_too):
        return open_weights(directory, bin_too, quantization)
    return AbsentWeights((f"{config.names.embedding}.weight",), config)  # of a tied model the only table


def measured_range(config: ModelConfig) -> Range:
    """One layer, of those with experts where there are any; not the first or the last where there are others,
    which come with tables."""
    every = *range(1, config.layers - 1), *range(config.layers)
    layer = next(filter(config.sparse, every), every[0])
    return Range(layer, layer + 1)
