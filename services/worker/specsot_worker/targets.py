"""The target token at every node that matters: by one argmax, or along the accepted path.

Refuses to know what acceptance leads to. Where nothing but argmax is asked for, one for all rows is
cheapest; whatever costs more per row is done only where acceptance comes by. Under a grammar the argmax of
the whole row comes first: where the grammar allows it, no masked row has another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from specsot.core.tree import Tree, children
from specsot_worker.judge import DecodeState
from specsot_worker.penalties import apply_penalties
from specsot_worker.sampling import DrawRequest, argmax_tokens, choose_tokens

Targets = list[int | None]


@dataclass(frozen=True, slots=True)
class TargetQuery:
    """What one segment wants to know.

    row:   of its root in the logits; the other nodes follow. A prompt's last row is a tree of one node.
    place: position of the token behind the root.
    masks: allowed tokens behind each node, or None where anything goes.
    """

    state: DecodeState
    row: int
    tree: Tree
    position: int
    masks: Sequence[np.ndarray | None]

    @property
    def greedy(self) -> bool:
        """An argmax is all it wants, of what its masks allow."""
        sampling = self.state.opening.sampling
        return not (sampling.temperature > 0 or sampling.penalises or sampling.logit_bias)

    @property
    def unmasked(self) -> bool:
        """Anything goes, behind every node."""
        return all(mask is None for mask in self.masks)


def find_targets(logits: torch.Tensor, queries: Sequence[TargetQuery]) -> list[Targets]:
    """For each question the target at each node. logits: [rows, V], left as they are.

    None: the node's logits are not numbers, or acceptance does not come by.
    """
    best = argmax_tokens(logits) if any(question.greedy for question in queries) else []
    found: list[Targets | _PathWalk] = []
    for one in queries:
        if one.greedy and one.unmasked:
            found.append(best[one.row : one.row + len(one.tree)])
        else:
            found.append(_PathWalk(one, best if one.greedy else None))
    _walk(logits, [one for one in found if isinstance(one, _PathWalk)])
    return [one.targets if isinstance(one, _PathWalk) else one for one in found]


@dataclass(slots=True)
class _PathWalk:
    """Acceptance in one tree, step by step. node: where it stands; None when it is over.

    best:  the argmax of every row of the frame, without masks; None where more than that is asked for.
    trail: tokens of the nodes below the root it came through.
    """

    query: TargetQuery
    best: Targets | None = None
    node: int | None = 0
    trail: list[int] = field(default_factory=list[int])
    targets: Targets = field(init=False)
    _children: Sequence[Sequence[int]] = field(init=False)

    def __post_init__(self) -> None:
        tree = self.query.tree
        self.targets, self._children = [None] * len(tree), children(tree.parents)

    def follow_argmax(self) -> None:
        """As far as the argmax of whole rows is allowed: that needs no logits."""
        while self.node is not None and self.best is not None:
            target, mask = self.best[self.query.row + self.node], self.query.masks[self.node]
            if mask is not None and (target is None or not mask[target]):
                return
            self.step(target)

    def apply_processors(self, logits: torch.Tensor) -> None:
        """Everything that comes before drawing, on its node's row [V], in place."""
        assert self.node is not None
        state, mask = self.query.state, self.query.masks[self.node]
        if mask is not None:
            forbidden = torch.from_numpy(~mask[: len(logits)])  # the cached mask itself is read-only
            logits[forbidden.to(logits.device)] = float("-inf")
        times = state.history.counts(self.trail) if state.history else {}
        apply_penalties(logits, state.opening.sampling, times)

    def draw_request(self) -> DrawRequest:
        opening, position = self.query.state.opening, self.query.position + len(self.trail)
        return DrawRequest(opening.sampling, opening.seed, opening.ordinal, position)

    def step(self, target: int | None) -> None:
        """The target at its node is known: on to the first of its children that is it."""
        assert self.node is not None
        self.targets[self.node], tokens = target, self.query.tree.tokens
        self.node = next((child for child in self._children[self.node] if tokens[child] == target), None)
        if self.node is not None:
            self.trail.append(tokens[self.node])


def _walk(logits: torch.Tensor, walks: Sequence[_PathWalk]) -> None:
    """All walks side by side, one node of each at a time."""
    for walk in walks:
        walk.follow_argmax()
    while going := [walk for walk in walks if walk.node is not None]:
        rows = logits[[walk.query.row + (walk.node or 0) for walk in going]].float()
        for walk, row in zip(going, rows):
            walk.apply_processors(row)
        for walk, target in zip(going, choose_tokens(rows, [walk.draw_request() for walk in going])):
            walk.step(target)
            walk.follow_argmax()
