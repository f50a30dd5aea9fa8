"""What stands before a base's first layer and behind its last: embedding, final norm, lm_head.

Refuses to know layers. Draft heads that borrow from their base find it here, stored or held in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from specsot.errors import ModelError
from specsot.model.config import ModelConfig
from specsot.model.linear import Linear
from specsot.model.norms import AnyNorm, fetch_norm
from specsot.model.quantization import of_lm_head
from specsot.model.weights import Fetch

Part = TypeVar("Part")


class Edges(Protocol):
    """A base as its draft head sees it. Raises ModelError for what is not there."""

    @property
    def config(self) -> ModelConfig: ...

    def embedding(self) -> Tensor:
        """[vocab, hidden]."""
        ...

    def final_norm(self) -> AnyNorm:
        """The norm between the last layer and lm_head."""
        ...

    def lm_head(self) -> Linear:
        """[hidden] -> vocab."""
        ...


@dataclass(frozen=True, slots=True)
class StoredEdges:
    """Edges of a base that is somewhere else: each is read when asked for."""

    config: ModelConfig
    fetch: Fetch

    def embedding(self) -> Tensor:
        return fetch_embedding(self.fetch, self.config)

    def final_norm(self) -> AnyNorm:
        return fetch_final_norm(self.fetch, self.config)

    def lm_head(self) -> Linear:
        return fetch_lm_head(self.fetch, self.config)


@dataclass(frozen=True, slots=True)
class HeldEdges:
    """Edges of a base in this process: shared, not copied. None: its range of layers has no such edge."""

    config: ModelConfig
    table: Tensor | None
    norm: AnyNorm | None
    head: Linear | None

    def embedding(self) -> Tensor:
        return _present(self.table, "embedding")

    def final_norm(self) -> AnyNorm:
        return _present(self.norm, "final norm")

    def lm_head(self) -> Linear:
        return _present(self.head, "lm_head")


def _present(part: Part | None, name: str) -> Part:
    if part is None:
        raise ModelError(f"this range of layers holds no {name}")
    return part


def fetch_embedding(fetch: Fetch, config: ModelConfig) -> Tensor:
    """[vocab, hidden]. Tied models may be published with either of the two tables."""
    own, other = config.names.embedding, config.names.head
    return _fetch_table(fetch, config, other if config.tied and f"{own}.weight" not in fetch else own)


def fetch_final_norm(fetch: Fetch, config: ModelConfig) -> AnyNorm:
    """The norm between the last layer and lm_head."""
    return fetch_norm(fetch, config.names.norm, config)


def fetch_lm_head(fetch: Fetch, config: ModelConfig) -> Linear:
    """[hidden] -> vocab. A table of its own counts, whatever the config says of tying, as in Transformers."""
    own, other = config.names.head, config.names.embedding
    name = other if config.tied and f"{own}.weight" not in fetch else own
    return Linear(_fetch_table(fetch, config, name), None, of_lm_head(fetch.quantization))


def _fetch_table(fetch: Fetch, config: ModelConfig, name: str) -> Tensor:
    return fetch(f"{name}.weight", (config.vocab, config.hidden))
