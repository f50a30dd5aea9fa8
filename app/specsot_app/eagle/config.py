"""`EagleConfig`: how trees are drafted and tokens drawn, as one frozen value that refuses what cannot be.

Refuses to know models and tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from specsot.errors import InvalidRequest
from specsot.kernels.contract import TreeMaskMode, check_mode, check_nodes
from specsot.members import TreeShape
from specsot.params import Sampling


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Raises InvalidRequest, whose `field` says which of these cannot be.

    topk:             candidates below each drafted node, and how many of a level are drafted from.
    num_steps:        levels of drafting: so many drafts may be accepted at once.
    num_draft_tokens: nodes of a tree, the root included: rows that the target verifies at once.
    temperature:      0: the likeliest token.
    top_p, top_k, min_p: cuts, in effect above temperature 0; None means no cut.
    tree_mask_mode:   how `Eagle.propose` lays out its trees' attention mask.
    """

    topk: int = 4
    num_steps: int = 3
    num_draft_tokens: int = 8
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    tree_mask_mode: TreeMaskMode = TreeMaskMode.FULL_MASK

    def __post_init__(self) -> None:
        for name in ("topk", "num_steps", "num_draft_tokens"):
            value = getattr(self, name)
            least = 2 if name == "num_draft_tokens" else 1
            if type(value) is not int or value < least:
                raise InvalidRequest(f"{name} must be an integer >= {least}, got {value!r}", name)
        check_nodes(self.topk, self.num_steps, self.num_draft_tokens)
        check_mode(self.tree_mask_mode, self.num_draft_tokens)
        _ = self.sampling

    @property
    def shape(self) -> TreeShape:
        """The same tree in the drafter's words, which count expansions behind the first level."""
        return TreeShape(self.num_steps - 1, self.topk, self.num_draft_tokens, fixed=True)

    @property
    def sampling(self) -> Sampling:
        """How the target's tokens are drawn."""
        return Sampling(
            self.temperature,
            1.0 if self.top_p is None else self.top_p,
            self.top_k or 0,
            self.min_p or 0.0,
        )
