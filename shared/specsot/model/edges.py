"""What stands before a base's first layer and behind its last: embedding, final norm, lm_head.

Refuses to know layers; draft heads that borrow from their base find it here too.
"""

from __future__ import annotations

from torch import Tensor

from specsot.model.config import ModelConfig
from specsot.model.linear import Linear
from specsot.model.norms import AnyNorm, fetch_norm
from specsot.model.weights import Fetch


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
    return Linear(_fetch_table(fetch, config, other if config.tied and f"{own}.weight" not in fetch else own))


def _fetch_table(fetch: Fetch, config: ModelConfig, name: str) -> Tensor:
    return fetch(f"{name}.weight", (config.vocab, config.hidden))
