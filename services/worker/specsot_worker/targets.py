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

from specsot.tree import Tree, children
from specsot_worker.judge import Written
from specsot_worker.penalties import adjust
from specsot_worker.sampling import Wish, choose, most_likely

Targets = list[int | None]


@dataclass(frozen=True, slots=True)
class Question:
    """What one segment wants to know.

    row:   of its root in the logits; the other nodes follow. A prompt's last row is a tree of one node.
    place: position of the token behind the root.
    masks: allowed tokens behind each node, or None where anything goes.
    """

    written: Written
    row: int
    tree: Tree
    place: int
    masks: Sequence[np.ndarray | None]

    @property
    def greedy(self) -> bool:
        """An argmax is all it wants, of what its masks allow."""
        sampling = self.written.opening.sampling
        return not (sampling.temperature > 0 or sampling.penalises or sampling.logit_bias)

    @property
    def free(self) -> bool:
        """Anything goes, behind every node."""
        return all(mask is None for mask in self.masks)


def find_targets(logits: torch.Tensor, questions: Sequence[Question]) -> list[Targets]:
    """For each question the target at each node. logits: [rows, V], left as they are.

    None: the node's logits are not numbers, or acceptance does not come by.
    """
    best = most_likely(logits) if any(question.greedy for question in questions) else []
    found: list[Targets | _Walk] = []
    for one in questions:
        if one.greedy and one.free:
            found.append(best[one.row : one.row + len(one.tree)])
        else:
            found.append(_Walk(one, best if one.greedy else None))
    _walk(logits, [one for one in found if isinstance(one, _Walk)])
    return [one.targets if isinstance(one, _Walk) else one for one in found]


@dataclass(slots=True)
class _Walk:
    """Acceptance in one tree, step by step. node: where it stands; None when it is over.

    best:  the argmax of every row of the frame, without masks; None where more than that is asked for.
    trail: tokens of the nodes below the root it came through.
    """

    question: Question
    best: Targets | None = None
    node: int | None = 0
    trail: list[int] = field(default_factory=list[int])
    targets: Targets = field(init=False)
    _below: Sequence[Sequence[int]] = field(init=False)

    def __post_init__(self) -> None:
        tree = self.question.tree
        self.targets, self._below = [None] * len(tree), children(tree.parents)

    def advance(self) -> None:
        """As far as the argmax of whole rows is allowed: that needs no logits."""
        while self.node is not None and self.best is not None:
            target, mask = self.best[self.question.row + self.node], self.question.masks[self.node]
            if mask is not None and (target is None or not mask[target]):
                return
            self.learn(target)

    def shape(self, logits: torch.Tensor) -> None:
        """Everything that comes before drawing, on its node's row [V], in place."""
        assert self.node is not None
        written, mask = self.question.written, self.question.masks[self.node]
        if mask is not None:
            forbidden = torch.from_numpy(~mask[: len(logits)])  # the cached mask itself is read-only
            logits[forbidden.to(logits.device)] = float("-inf")
        times = written.history.times(self.trail) if written.history else {}
        adjust(logits, written.opening.sampling, times)

    def wish(self) -> Wish:
        opening, place = self.question.written.opening, self.question.place + len(self.trail)
        return Wish(opening.sampling, opening.seed, opening.ordinal, place)

    def learn(self, target: int | None) -> None:
        """The target at its node is known: on to the first of its children that is it."""
        assert self.node is not None
        self.targets[self.node], tokens = target, self.question.tree.tokens
        self.node = next((child for child in self._below[self.node] if tokens[child] == target), None)
        if self.node is not None:
            self.trail.append(tokens[self.node])


def _walk(logits: torch.Tensor, walks: Sequence[_Walk]) -> None:
    """All walks side by side, one node of each at a time."""
    for walk in walks:
        walk.advance()
    while going := [walk for walk in walks if walk.node is not None]:
        rows = logits[[walk.question.row + (walk.node or 0) for walk in going]].float()
        for walk, row in zip(going, rows):
            walk.shape(row)
        for walk, target in zip(going, choose(rows, [walk.wish() for walk in going])):
            walk.learn(target)
            walk.advance()
