"""Grows the trees of several sequences together: one pass of the head per level for all of them.

Refuses to know which nodes are sent, sequences, and what growing costs. `topK_genrate` of the EAGLE
reference is the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specsot.errors import Overloaded
from specsot.model.attention import AttentionPlan, Span, plan_attention
from specsot.model.kv import KVPages
from specsot.pages import PageTable
from specsot_drafter.heads import DraftHead
from specsot_drafter.selection import Deserves, Offer
from specsot_drafter.tops import tops


@dataclass(frozen=True, slots=True)
class Ground:
    """Where one tree grows.

    base:  columns in front of it, of `pages`.
    pages: of the sequence, covering the grown rows.
    slots: of the grown rows, base and onward.
    position: of the first grown row; the base, unless pages behind a window were given back.
    """

    base: int
    pages: tuple[int, ...]
    slots: Sequence[int]
    position: int


def find_ground(table: PageTable, sequence: int, base: int, rows: int) -> Ground | None:
    """Room for `rows` grown rows behind a sequence's first `base` ones, or None where there is none."""
    try:
        table.reserve(sequence, base + rows)
    except Overloaded:
        return None
    column = table.column(sequence, base)
    pages = table.pages(sequence)[: table.pages_for(column + rows)]
    return Ground(column, pages, table.slots(sequence, base, base + rows), base)


class Guide(Protocol):
    """What a grammar adds: candidates it forbids, as the frontier moves."""

    def bar(self, log_probs: Tensor) -> Tensor:
        """[B, frontier, draft vocabulary] log-probabilities of what may follow each frontier node."""
        ...

    def follow(self, parents: Tensor, tokens: Tensor) -> None:
        """The new frontier: for each its number in the frontier before and its token, both [B, k]."""
        ...


@dataclass(frozen=True, slots=True)
class Frontier:
    """The candidates of one level that are fed, [B, k] each but the features.

    parents:  number of each one's parent in the frontier before.
    numbers:  of each one in the pool.
    features: [B * k, hidden] outputs of their parents, which they are fed with.
    """

    scores: Tensor
    tokens: Tensor
    parents: Tensor
    numbers: Tensor
    features: Tensor

    @property
    def width(self) -> int:
        return self.scores.shape[1]


class Growth:
    """The frontier of B trees, level by level. Used once.

    The shape is EAGLE-2's unless `widths` and `floor` say otherwise: each frontier node offers its top_k
    children, and the frontier is the top_k best of its level.
    """

    def __init__(
        self,
        head: DraftHead,
        kv: KVPages,
        grounds: Sequence[Ground],
        top_k: int,
        guide: Guide | None = None,
        widths: Sequence[int] | None = None,
        floor: float = -math.inf,
    ) -> None:
        """widths: how many nodes of level 1, 2, ... are fed. floor: log-probability below which none is."""
        self._head, self._kv, self._grounds, self._k, self._guide = head, kv, grounds, top_k, guide
        self._widths, self._floor = widths, floor
        self._bits: list[list[int]] = [[] for _ in grounds]
        self._pool = Pool()
        self._fed = 0  # rows of each tree
        slots, bases = [ground.slots for ground in grounds], [ground.position for ground in grounds]
        self._slots = torch.tensor(slots, dtype=torch.long, device=head.device)
        self._bases = torch.tensor(bases, device=head.device)

    def run(self, last: Tensor, levels: int, deserves: Deserves | None = None) -> Offer:
        """Grow `levels` levels, or fewer where `deserves` or the floor says so.

        last: [B, hidden], the head's output at each sequence's last row.
        """
        frontier = self._begin(last)
        for level in range(levels - 1):
            if frontier.width == 0 or (deserves and not deserves(frontier.scores.cpu().numpy(), level + 1)):
                break
            frontier = self._descend(level, frontier)
        return self._pool.close()

    def _begin(self, last: Tensor) -> Frontier:
        """The children of the roots."""
        scores, tokens = (best[:, 0] for best in self._best(last))
        origins = torch.zeros_like(tokens)
        self._pool.add(scores, tokens, origins)
        scores, chosen = self._choose(scores, 0)
        return Frontier(
            scores,
            tokens.gather(1, chosen),
            origins[:, : chosen.shape[1]],
            chosen,
            last.repeat_interleave(chosen.shape[1], dim=0),
        )

    def _descend(self, level: int, frontier: Frontier) -> Frontier:
        """Feed a frontier; the next one is the best of all its children."""
        if self._guide:
            self._guide.follow(frontier.parents, frontier.tokens)
        outputs = self._pass(level, frontier)
        more, below = self._best(outputs)
        scores = (more + frontier.scores.unsqueeze(2)).flatten(1)
        tokens = below.flatten(1)
        first = self._pool.add(scores, tokens, (frontier.numbers + 1).repeat_interleave(self._k, dim=1))
        best, chosen = self._choose(scores, level + 1)
        parents = chosen // self._k
        rows = parents + torch.arange(0, len(outputs), frontier.width, device=parents.device).unsqueeze(1)
        return Frontier(best, tokens.gather(1, chosen), parents, chosen + first, outputs[rows.flatten()])

    def _choose(self, scores: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Scores and numbers of the candidates [B, n] of a level that are worth feeding, best first."""
        width = self._k
        if self._widths is not None:
            width = min(self._widths[level] if level < len(self._widths) else 0, scores.shape[1])
        if level == 0 and width == scores.shape[1]:
            best, chosen = scores, torch.arange(width, device=scores.device).expand_as(scores)
        else:
            best, chosen = scores.topk(width, dim=1)
        if self._floor == -math.inf:
            return best, chosen
        alive = best >= self._floor
        most = int(alive.sum(1).max())
        return best.masked_fill(~alive, -torch.inf)[:, :most], chosen[:, :most]

    def _best(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and base token ids of the top_k followers of each node, [B, frontier, k]."""
        log_probs = self._head.log_probs(outputs).view(len(self._grounds), -1, self._head.draft_vocab)
        if self._guide:
            log_probs = self._guide.bar(log_probs)
        best, ids = tops(log_probs, self._k)
        return best, self._head.to_target(ids)

    def _pass(self, level: int, frontier: Frontier) -> Tensor:
        """Feed the frontier: rows at position base + level, behind the rows of the levels before."""
        first, width = self._fed, frontier.width
        self._fed += width
        slots = self._slots[:, first : self._fed].flatten()
        plan = self._plan(first, frontier.parents)
        tokens, positions = frontier.tokens.flatten(), self._bases.repeat_interleave(width) + level
        return self._head.forward(tokens, frontier.features, positions, slots, plan, self._kv)

    def _plan(self, first: int, parents: Tensor) -> AttentionPlan:
        """Each row sees its tree's ground and its own ancestors."""
        width = parents.shape[1]
        spans: list[Span] = []
        for row, (ground, before) in enumerate(zip(self._grounds, parents.tolist())):
            above = self._bits[row]
            bits = [(above[parent] if first else 0) | 1 << (first + i) for i, parent in enumerate(before)]
            self._bits[row] = bits
            spans.append(Span(width, ground.base, first + width, ground.pages, tuple(bits)))
        head = self._head
        return plan_attention(spans, self._kv.page_rows, head.group, "batched", head.dtype, head.device)


class Pool:
    """All candidates so far, in the reference's order: level 1, then k * k of each further level."""

    def __init__(self) -> None:
        self._scores: list[Tensor] = []
        self._tokens: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._size = 0

    def add(self, scores: Tensor, tokens: Tensor, parents: Tensor) -> int:
        """One level's candidates [B, n]; parents as in `Offer`. Returns the number of the first."""
        first = self._size
        self._scores.append(scores)
        self._tokens.append(tokens)
        self._parents.append(parents)
        self._size += scores.shape[1]
        return first

    def close(self) -> Offer:
        depths = [np.full(scores.shape[1], above + 1) for above, scores in enumerate(self._scores)]
        scores, tokens, parents = (_join(parts) for parts in (self._scores, self._tokens, self._parents))
        return Offer(tokens, scores, parents, np.concatenate(depths))


def _join(parts: list[Tensor]) -> NDArray[Any]:
    return torch.cat(parts, dim=1).cpu().numpy()
