"""Grows the trees of several sequences together: one pass of the head per level for all of them.

Refuses to know which nodes are sent, sequences, and what growing costs. The shape of the growth is
EAGLE-2's (`topK_genrate` of the reference): the frontier is the top_k best of each level, and every
frontier node offers its top_k children.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specsot.model.attention import AttentionPlan, Span, plan_attention
from specsot.model.kv import KVPages
from specsot_drafter.heads import DraftHead
from specsot_drafter.selection import Floats, Offer
from specsot_drafter.tops import tops


@dataclass(frozen=True, slots=True)
class Ground:
    """Where one tree grows.

    base:  draft rows in front of it; the first grown row has position `base`.
    pages: of the sequence, covering the grown rows.
    slots: of the grown rows, base and onward.
    """

    base: int
    pages: tuple[int, ...]
    slots: Sequence[int]


Deserves = Callable[[Floats, int], bool]  # whether a frontier [B, k] of scores at a depth is worth going on


class Guide(Protocol):
    """What a grammar adds: candidates it forbids, as the frontier moves."""

    def bar(self, log_probs: Tensor) -> Tensor:
        """[B, frontier, draft vocabulary] log-probabilities of what may follow each frontier node."""
        ...

    def follow(self, parents: Tensor, tokens: Tensor) -> None:
        """The new frontier: for each its number in the frontier before and its token, both [B, k]."""
        ...


class Growth:
    """The frontier of B trees, level by level. Used once."""

    def __init__(self, head: DraftHead, kv: KVPages, grounds: Sequence[Ground], top_k: int) -> None:
        self._head, self._kv, self._grounds, self._k = head, kv, grounds, top_k
        self._bits: list[list[int]] = [[] for _ in grounds]
        device = head.device
        rows = [ground.slots for ground in grounds]
        self._slots = torch.tensor(rows, dtype=torch.long, device=device)
        self._bases = torch.tensor([ground.base for ground in grounds], device=device).repeat_interleave(
            top_k
        )

    def run(
        self, last: Tensor, levels: int, guide: Guide | None = None, deserves: Deserves | None = None
    ) -> Offer:
        """Grow `levels` levels, or fewer where `deserves` says so.

        last: [B, hidden], the head's output at each sequence's last row.
        """
        k, trees = self._k, len(self._grounds)
        scores, tokens = self._best(last, guide)
        scores, tokens = scores[:, 0], tokens[:, 0]
        offered = _Pool(trees, scores, tokens)
        features = last.repeat_interleave(k, dim=0)
        frontier = torch.arange(k, device=last.device).expand(trees, k)
        parents = torch.zeros_like(frontier)
        for level in range(levels - 1):
            if deserves and not deserves(_to_numpy(scores), level + 1):
                break
            if guide:
                guide.follow(parents, tokens)
            outputs = self._pass(level, parents, tokens, features)
            more, below = self._best(outputs, guide)
            more = (more + scores.unsqueeze(2)).view(trees, -1)
            below = below.view(trees, -1)
            frontier_pool = offered.add(more, below, frontier)
            scores, frontier = more.topk(k, dim=1)
            tokens, parents = below.gather(1, frontier), frontier // k
            frontier = frontier + frontier_pool
            features = outputs.view(trees, k, -1).gather(
                1, parents.unsqueeze(2).expand(-1, -1, outputs.shape[1])
            )
            features = features.view(trees * k, -1)
        return offered.close(k)

    def _best(self, outputs: Tensor, guide: Guide | None) -> tuple[Tensor, Tensor]:
        """Log-probabilities and base token ids of the top_k followers of each node, [B, frontier, k]."""
        log_probs = self._head.log_probs(outputs).view(len(self._grounds), -1, self._head.draft_vocab)
        if guide:
            log_probs = guide.bar(log_probs)
        best, ids = tops(log_probs, self._k)
        return best, self._head.to_target(ids)

    def _pass(self, level: int, parents: Tensor, tokens: Tensor, features: Tensor) -> Tensor:
        """Feed the frontier: rows at position base + level, behind the rows of the levels before."""
        k = self._k
        slots = self._slots[:, level * k : (level + 1) * k].reshape(-1)
        plan = self._plan(level, parents)
        return self._head.forward(tokens.reshape(-1), features, self._bases + level, slots, plan, self._kv)

    def _plan(self, level: int, parents: Tensor) -> AttentionPlan:
        first = level * self._k
        spans: list[Span] = []
        for row, (ground, before) in enumerate(zip(self._grounds, parents.tolist())):
            above = self._bits[row]
            bits = [(above[parent] if level else 0) | 1 << (first + i) for i, parent in enumerate(before)]
            self._bits[row] = bits
            spans.append(Span(self._k, ground.base, first + self._k, ground.pages, tuple(bits)))
        head = self._head
        return plan_attention(spans, self._kv.page_rows, head.group, "batched", head.dtype, head.device)


class _Pool:
    """All candidates so far, in the reference's order: level 1, then k * k of each further level."""

    def __init__(self, trees: int, scores: Tensor, tokens: Tensor) -> None:
        self._scores, self._tokens = [scores], [tokens]
        self._parents = [torch.zeros_like(tokens)]
        self._size = scores.shape[1]

    def add(self, scores: Tensor, tokens: Tensor, frontier: Tensor) -> int:
        """Children [B, k * k] of the frontier, whose own pool numbers are given [B, k]."""
        first = self._size
        self._scores.append(scores)
        self._tokens.append(tokens)
        self._parents.append((frontier + 1).repeat_interleave(frontier.shape[1], dim=1))
        self._size += scores.shape[1]
        return first

    def close(self, top_k: int) -> Offer:
        levels = [np.full(scores.shape[1], level + 1) for level, scores in enumerate(self._scores)]
        scores, tokens, parents = (_gather(part) for part in (self._scores, self._tokens, self._parents))
        return Offer(tokens, scores, parents, np.concatenate(levels))


def _gather(parts: list[Tensor]) -> NDArray[Any]:
    return _to_numpy(torch.cat(parts, dim=1))


def _to_numpy(values: Tensor) -> NDArray[Any]:
    return values.cpu().numpy()
