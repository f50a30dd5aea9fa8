"""What is loaded of a model, so that a new range or another epoch loads nothing twice."""

from __future__ import annotations

from dataclasses import dataclass, field

from specsot.members import Range
from specsot.model.config import ModelConfig
from specsot.model.delta import DeltaBlock
from specsot.model.layers import AnyNorm, Block, fetch_embedding, fetch_final_norm, fetch_lm_head
from specsot.model.linear import Linear, Table
from specsot.model.tensor_parallel import MakeBlock
from specsot.model.weights import Fetch


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
        """Let go of what this range does not need."""
        kept = range(layers.first, layers.last)
        self.blocks = {index: block for index, block in self.blocks.items() if index in kept}
        if layers.first:
            self.embedding = None
        if layers.last < config.layers:
            self.norm = self.head = None
