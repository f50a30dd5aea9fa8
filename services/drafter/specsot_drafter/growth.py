"""Grows the trees of several sequences together: one pass of the head per level for all of them.

`topK_genrate` of the EAGLE reference is the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specsot.core.pages import PageTable
from specsot.errors import Overloaded
from specsot_drafter.core.selection import Candidates, KeepGrowing
from specsot_drafter.grammar import GrammarGuide
from specsot_drafter.heads import DraftHead, HeadRows
from specsot_model.attention import AttentionPlan, RowSpan
from specsot_model.kv import KVPages


class TreeRoom(NamedTuple):
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


def reserve_room(table: PageTable, sequence: int, base: int, rows: int) -> TreeRoom | None:
    """Room for `rows` grown rows behind a sequence's first `base` ones, or None where there is none."""
    try:
        return TreeRoom(*table.place(sequence, base, base + rows), base)
    except Overloaded:
        return None


@dataclass(frozen=True, slots=True)
class GrowthFrontier:
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

    def cut(self, width: int) -> GrowthFrontier:
        """Its best ones."""
        features = self.features.view(len(self.scores), self.width, -1)[:, :width].flatten(0, 1)
        scores, tokens, parents, numbers = (
            one[:, :width] for one in (self.scores, self.tokens, self.parents, self.numbers)
        )
        return GrowthFrontier(scores, tokens, parents, numbers, features)


class TreeGrowth:
    """The frontier of B trees, level by level. Used once.

    The shape is EAGLE-2's unless `widths` and `floor` say otherwise: each frontier node offers its top_k
    children, and the frontier is the top_k best of its level.
    """

    def __init__(
        self,
        head: DraftHead,
        kv: KVPages,
        rooms: Sequence[TreeRoom],
        top_k: int,
        guide: GrammarGuide | None = None,
        widths: Sequence[int] | None = None,
        floor: float = -math.inf,
    ) -> None:
        """widths: how many nodes of level 1, 2, ... are fed. floor: log-probability below which none is."""
        self._head = head
        self._kv = kv
        self._rooms = rooms
        self._k = top_k
        self._guide = guide
        self._widths = widths
        self._floor = floor
        self._bits: list[list[int]] = [[] for _ in rooms]
        self._levels: list[tuple[Tensor, Tensor, Tensor]] = []  # scores, tokens, parents of all candidates
        self._fed = 0  # rows of each tree
        slots = [ground.slots for ground in rooms]
        bases = [ground.position for ground in rooms]
        self._slots = torch.tensor(slots, dtype=torch.long, device=head.device)
        self._bases = torch.tensor(bases, device=head.device)

    def run(self, last: Tensor, levels: int, keep_growing: KeepGrowing | None = None) -> Candidates:
        """Grow `levels` levels, or fewer where `keep_growing` or the floor says so.

        last: [B, hidden], the head's output at each sequence's last row.
        """
        frontier = self._grow_roots(last)
        for level in range(levels - 1):
            width = frontier.width
            if width and keep_growing:
                width = keep_growing(frontier.scores.cpu().numpy(), level + 1)
            if not width:
                break
            frontier = self._grow_level(level, frontier.cut(width))
        return self._candidates()

    def _grow_roots(self, last: Tensor) -> GrowthFrontier:
        """The children of the roots."""
        scores, tokens = (best[:, 0] for best in self._top_followers(last))
        origins = torch.zeros_like(tokens)
        self._levels.append((scores, tokens, origins))
        scores, chosen = self._choose(scores, 0)
        return GrowthFrontier(
            scores,
            tokens.gather(1, chosen),
            origins[:, : chosen.shape[1]],
            chosen,
            last.repeat_interleave(chosen.shape[1], dim=0),
        )

    def _grow_level(self, level: int, frontier: GrowthFrontier) -> GrowthFrontier:
        """Feed a frontier; the next one is the best of all its children."""
        if self._guide:
            self._guide.advance(frontier.parents, frontier.tokens)
        outputs = self._feed(level, frontier)
        more, below = self._top_followers(outputs)
        scores = (more + frontier.scores.unsqueeze(2)).flatten(1)
        tokens = below.flatten(1)
        first = sum(level.shape[1] for level, _, _ in self._levels)
        self._levels.append((scores, tokens, (frontier.numbers + 1).repeat_interleave(self._k, dim=1)))
        best, chosen = self._choose(scores, level + 1)
        parents = chosen // self._k
        rows = parents + torch.arange(0, len(outputs), frontier.width, device=parents.device).unsqueeze(1)
        return GrowthFrontier(
            best, tokens.gather(1, chosen), parents, chosen + first, outputs[rows.flatten()]
        )

    def _choose(self, scores: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Scores and numbers of the candidates [B, n] of a level that are worth feeding, best first."""
        width = self._k
        if self._widths is not None:
            width = min(self._widths[level] if level < len(self._widths) else 0, scores.shape[1])
        if level == 0 and width == scores.shape[1]:
            best = scores
            chosen = torch.arange(width, device=scores.device).expand_as(scores)
        else:
            best, chosen = scores.topk(width, dim=1)
        if self._floor == -math.inf:
            return best, chosen
        alive = best >= self._floor
        most = int(alive.sum(1).max())
        return best.masked_fill(~alive, -torch.inf)[:, :most], chosen[:, :most]

    def _top_followers(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and base token ids of the top_k followers of each node, [B, frontier, k]."""
        if self._guide is None and (found := self._head.choose(outputs, self._k)) is not None:
            best, tokens = (one.view(len(self._rooms), -1, self._k) for one in found)
            return best, tokens
        log_probs = self._head.log_probs(outputs).view(len(self._rooms), -1, self._head.draft_vocab)
        if self._guide:
            log_probs = self._guide.mask(log_probs)
        best, ids = topk(log_probs, self._k)
        return best, self._head.to_target(ids)

    def _feed(self, level: int, frontier: GrowthFrontier) -> Tensor:
        """Feed the frontier: rows at position base + level, behind the rows of the levels before."""
        first = self._fed
        width = frontier.width
        self._fed += width
        slots = self._slots[:, first : self._fed].flatten()
        plan = self._plan(first, frontier.parents)
        tokens = frontier.tokens.flatten()
        positions = self._bases.repeat_interleave(width) + level
        return self._head.forward(tokens, frontier.features, HeadRows(positions, slots, plan, self._kv))

    def _plan(self, first: int, parents: Tensor) -> AttentionPlan:
        """Each row sees its tree's ground and its own ancestors."""
        width = parents.shape[1]
        spans: list[RowSpan] = []
        for row, (ground, before) in enumerate(zip(self._rooms, parents.tolist())):
            above = self._bits[row]
            bits = [(above[parent] if first else 0) | 1 << (first + i) for i, parent in enumerate(before)]
            self._bits[row] = bits
            spans.append(RowSpan(width, ground.base, first + width, ground.pages, tuple(bits)))
        return self._head.plan(spans, self._kv.page_rows)

    def _candidates(self) -> Candidates:
        """In the reference's order: level 1, then k * k of each further level."""
        sizes = [scores.shape[1] for scores, _, _ in self._levels]
        scores, tokens, parents = (torch.cat(parts, 1).cpu().numpy() for parts in zip(*self._levels))
        return Candidates(tokens, scores, parents, np.repeat(np.arange(1, len(sizes) + 1), sizes))


TOPK_BLOCK = 64  # values of a block whose best are chosen first; no measurement recorded
# Values of a row from which choosing in two steps is faster; no measurement recorded.
TWO_STEP_VALUES = 1 << 15


def topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`values.topk(k, dim=-1)` of [..., n]: values and columns, [..., k], falling."""
    columns = values.shape[-1]
    if values.is_cuda or values.numel() < TWO_STEP_VALUES or columns % TOPK_BLOCK or columns < k * TOPK_BLOCK:
        best, where = values.topk(k, dim=-1)
        return best, where
    blocks = values.unflatten(-1, (-1, TOPK_BLOCK))
    near = blocks.amax(-1).topk(k, dim=-1).indices
    index = near.unsqueeze(-1).expand(*near.shape, TOPK_BLOCK)
    best, where = blocks.gather(-2, index).flatten(-2).topk(k, dim=-1)
    return best, near.gather(-1, where // TOPK_BLOCK) * TOPK_BLOCK + where % TOPK_BLOCK
