"""Grows the draft trees of several sequences together, with one forward pass of the head per level.

The algorithm is that of `topK_genrate` in the EAGLE reference implementation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specsot.core.pages import PageTable
from specsot.errors import Overloaded
from specsot_drafter.core.selection import Candidates, KeepGrowing
from specsot_drafter.grammar import GrammarGuide
from specsot_drafter.heads import DraftHead, HeadRows
from specsot_model.attention import AttentionPlan, RowSpan
from specsot_model.kv import KVPages


class TreeRoom(NamedTuple):
    """The KV slots that were reserved for growing one tree.

    Example: page_rows 4, a sequence of 6 rows in the pages [7, 2], 3 rows to grow:
    base 6, pages (7, 2, p) with a new page p, slots [2 * 4 + 2, 2 * 4 + 3, p * 4], position 6.

    base:  Number of slots of `pages`, from the first on, that hold the sequence's own rows; the tree's rows
           follow.
    pages: Page numbers of the sequence, in order, up to the page of the last grown row.
    slots: KV slot of each grown row, in the order in which rows are computed.
    position: Position of the first grown row; equal to `base` unless pages that a window hides were freed.
    """

    base: int
    pages: tuple[int, ...]
    slots: Sequence[int]
    position: int


def reserve_room(table: PageTable, sequence: int, base: int, rows: int) -> TreeRoom | None:
    """Reserve KV rows for growing one tree after the rows of its sequence, and return where they are. Return
    None if there are too few free pages.

    table: The table of the draft model's KV pages.
    sequence: Id of the sequence.
    base: Number of rows that the sequence has.
    rows: Number of rows to reserve.
    """
    try:
        return TreeRoom(*table.place(sequence, base, base + rows), base)
    except Overloaded:
        return None


@dataclass(frozen=True, slots=True)
class GrowthFrontier:
    """The nodes of one level that are fed to the head, so that their children become candidates. B is the
    number of trees, k the number of nodes of each tree's frontier.

    scores:   Cumulative log-probability of each node from the root, [B, k], best first. -inf for a node that
              is not to be fed.
    tokens:   Token id of each node in the vocabulary of the base model, [B, k].
    parents:  Index of each node's parent in the frontier of the level above, [B, k]. 0 for children of the
              root.
    numbers:  Index of each node among all candidates of its tree, [B, k].
    features: The head's output at each node's parent, which is an input of the node's row, [B * k, hidden].
    """

    scores: Tensor
    tokens: Tensor
    parents: Tensor
    numbers: Tensor
    features: Tensor

    @property
    def width(self) -> int:
        """Number of nodes of each tree's frontier."""
        return self.scores.shape[1]

    def cut(self, width: int) -> GrowthFrontier:
        """Return the frontier with the best nodes of each tree only.

        width: Number of nodes that remain of each tree, at most the present width.

        The frontier itself does not change.
        """
        features = self.features.view(len(self.scores), self.width, -1)[:, :width].flatten(0, 1)
        scores, tokens, parents, numbers = (
            one[:, :width] for one in (self.scores, self.tokens, self.parents, self.numbers)
        )
        return GrowthFrontier(scores, tokens, parents, numbers, features)


class LevelGrowth(ABC):
    """Grower of B trees, level by level. An instance grows its trees once, by `grow` or `run`. A subclass
    says how nodes are fed, and which tokens follow them.

    By default the trees have the shape of EAGLE-2: the top_k likeliest children of every frontier node are
    candidates, and the top_k best candidates of a level are the next frontier. `widths` and `floor` change
    the size of the frontier.

    Example: top_k 2, 3 levels. The root has the candidates 0, 1, which are the first frontier. Their children
    are the candidates 2, 3 (below 0) and 4, 5 (below 1). The 2 best of these, for example 4 and 2, are the
    second frontier, with the children 6, 7 (below 4) and 8, 9 (below 2).
    """

    def __init__(
        self,
        head: DraftHead,
        trees: int,
        top_k: int,
        guide: GrammarGuide | None = None,
        widths: Sequence[int] | None = None,
        floor: float = -math.inf,
    ) -> None:
        """Prepare the growth.

        head: The draft head.
        trees: Number of trees.
        top_k: Number of children that every fed node gets.
        guide: Bars the tokens that a sequence's grammar forbids. None: no sequence has a grammar.
        widths: Number of nodes of level 1, 2, ... that are fed. Deeper levels are not fed. None: top_k of
            every level.
        floor: Cumulative log-probability below which a node is not fed. -inf: none is left out for that.
        """
        self._head = head
        self._trees = trees
        self._k = top_k
        self._guide = guide
        self._widths = widths
        self._floor = floor
        # Scores, tokens and parents of the candidates of each level, [B, candidates of the level] each.
        self._levels: list[tuple[Tensor, Tensor, Tensor]] = []

    def run(self, last: Tensor, levels: int, keep_growing: KeepGrowing | None = None) -> Candidates:
        """Grow the trees level by level, and return all candidates.

        last: The head's output at each sequence's last row, [B, hidden].
        levels: Maximum number of levels, at least 1.
        keep_growing: Asked before each further level how many nodes of each tree to feed. Growth stops if it
            returns 0. None: all levels grow.

        Growth also stops if no node of a frontier reaches the floor.

        `keep_growing` gets the cumulative log-probabilities of the frontier, [B, width], and its depth. It
        is not asked if no node is to be fed.
        """
        grown = self.grow(last, levels, keep_growing)
        scores, tokens, parents = (part.cpu().numpy() for part in grown)
        return Candidates(tokens, scores, parents, self._depths())

    def grow(
        self, last: Tensor, levels: int, keep_growing: KeepGrowing | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Grow the trees like `run`. Return the scores, tokens and parents of all candidates on the head's
        device, [B, n] each.

        last: The head's output at each sequence's last row, [B, hidden].
        levels: Maximum number of levels, at least 1.
        keep_growing: As for `run`.

        The candidates have the order of the reference: top_k of level 1, then top_k for each fed node of
        every further level.
        """
        frontier = self._grow_roots(last)
        for level in range(levels - 1):
            width = frontier.width
            if width and keep_growing:
                width = keep_growing(frontier.scores.cpu().numpy(), level + 1)
            if not width:
                break
            frontier = self._grow_level(level, frontier.cut(width))
        scores, tokens, parents = (torch.cat(parts, 1) for parts in zip(*self._levels))
        return scores, tokens, parents

    @abstractmethod
    def _feed(self, level: int, frontier: GrowthFrontier) -> Tensor:
        """Feed a frontier to the head and return its outputs, [B * width, hidden].

        level: Number of the frontier, 0 for that of the roots' children.
        frontier: The nodes to feed.
        """

    def _log_probs(self, outputs: Tensor) -> Tensor:
        """Return the log-probabilities of the tokens that follow each node, fp32 [B * width, draft
        vocabulary].

        outputs: Outputs of the head at the nodes, [B * width, hidden].
        """
        return self._head.log_probs(outputs)

    def _depths(self) -> NDArray[np.int64]:
        """Return the distance of each candidate from the root, [n]; 1 for the roots' children."""
        sizes = [scores.shape[1] for scores, _, _ in self._levels]
        return np.repeat(np.arange(1, len(sizes) + 1), sizes)

    def _grow_roots(self, last: Tensor) -> GrowthFrontier:
        """Add the children of the roots as candidates. Return those of them that are fed next.

        last: The head's output at each sequence's last row, [B, hidden].

        Each root gets top_k children. They are also recorded as the first level of candidates.
        """
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
        """Feed a frontier, add its children as candidates, and return the best of them as the next frontier.

        level: Number of the frontier, 0 for that of the roots' children.
        frontier: The nodes to feed.

        A grammar guide follows the fed nodes first.
        """
        if self._guide:
            self._guide.advance(frontier.parents, frontier.tokens)
        outputs = self._feed(level, frontier)
        more, below = self._top_followers(outputs)
        scores = (more + frontier.scores.unsqueeze(2)).flatten(1)
        tokens = below.flatten(1)
        first = sum(level.shape[1] for level, _, _ in self._levels)
        self._levels.append((scores, tokens, (frontier.numbers + 1).repeat_interleave(self._k, dim=1)))
        best, chosen = self._choose(scores, level + 1)
        # The children of frontier node i are the columns i * k .. i * k + k - 1 of the level.
        # k 2, columns [a0 a1 b0 b1], chosen [2, 1] -> parents [1, 0], that is b and a
        parents = chosen // self._k
        rows = parents + torch.arange(0, len(outputs), frontier.width, device=parents.device).unsqueeze(1)
        return GrowthFrontier(
            best, tokens.gather(1, chosen), parents, chosen + first, outputs[rows.flatten()]
        )

    def _choose(self, scores: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Choose the candidates of a level that are fed. Return their scores and their columns, best first,
        both [B, width]. `width` is the largest number that any tree feeds, 0 if no level is to follow; nodes
        below the floor have the score -inf.

        scores: Cumulative log-probabilities of all candidates of the level, [B, n].
        level: Number of the level, 0 for the roots' children.

        Without `widths`, top_k nodes are fed. Beyond the listed widths, none is fed.
        """
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
        max_alive = int(alive.sum(1).max())
        return best.masked_fill(~alive, -torch.inf)[:, :max_alive], chosen[:, :max_alive]

    def _top_followers(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and token ids of the top_k likeliest next tokens of each node, both [B,
        frontier, top_k]. The ids are those of the base model.

        outputs: Outputs of the head at the nodes, [B * frontier, hidden].

        With a grammar guide, forbidden tokens get the log-probability -inf.
        """
        if self._guide is None and (found := self._head.choose(outputs, self._k)) is not None:
            best, tokens = (one.view(self._trees, -1, self._k) for one in found)
            return best, tokens
        log_probs = self._log_probs(outputs).view(self._trees, -1, self._head.draft_vocab)
        if self._guide:
            log_probs = self._guide.mask(log_probs)
        best, ids = topk(log_probs, self._k)
        return best, self._head.to_target(ids)


class TreeGrowth(LevelGrowth):
    """Grower whose nodes are rows of a head with KV: each attends to its sequence, its ancestors and itself.

    An instance is used for one call of `run`.
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
        """Prepare the growth of one tree per room.

        head: The draft head.
        kv: The KV pages of the head.
        rooms: The KV slots that were reserved for each tree's rows.
        top_k: Number of children that every fed node gets.
        guide: Bars the tokens that a sequence's grammar forbids. None: no sequence has a grammar.
        widths: Number of nodes of level 1, 2, ... that are fed. Deeper levels are not fed. None: top_k of
            every level.
        floor: Cumulative log-probability below which a node is not fed. -inf: none is left out for that.
        """
        super().__init__(head, len(rooms), top_k, guide, widths, floor)
        self._kv = kv
        self._rooms = rooms
        # For each tree, the rows of the tree that each node of the last frontier attends to, as bits.
        self._bits: list[list[int]] = [[] for _ in rooms]
        # Number of rows of each tree that were fed so far; the same for all trees.
        self._fed = 0
        slots = [room.slots for room in rooms]
        bases = [room.position for room in rooms]
        self._slots = torch.tensor(slots, dtype=torch.long, device=head.device)
        self._bases = torch.tensor(bases, device=head.device)

    def _feed(self, level: int, frontier: GrowthFrontier) -> Tensor:
        """Feed a frontier to the head and return its outputs, [B * width, hidden].

        level: Number of the frontier, 0 for that of the roots' children.
        frontier: The nodes to feed.

        All rows of a level have the position base + level. In the KV cache they follow the rows of the levels
        above: with widths 2 and 2, the rows of level 1 take the tree's slots 0, 1 and those of level 2 take
        the slots 2, 3.

        Keys and values of the rows are written to the slots that were reserved for the trees.
        """
        first = self._fed
        width = frontier.width
        self._fed += width
        slots = self._slots[:, first : self._fed].flatten()
        plan = self._plan(first, frontier.parents)
        tokens = frontier.tokens.flatten()
        positions = self._bases.repeat_interleave(width) + level
        return self._head.forward(tokens, frontier.features, HeadRows(positions, slots, plan, self._kv))

    def _plan(self, first: int, parents: Tensor) -> AttentionPlan:
        """Return the attention plan of a level: each row attends to its sequence, its ancestors and itself.

        first: Number of the tree's rows before this level.
        parents: Index of each node's parent in the frontier of the level above, [B, width].

        Bit i of a row's mask is row i of the tree. Level 1 has the rows 0, 1 with the masks 0b01, 0b10. Level
        2 begins at row 2; with the parents [1, 0], its masks are 0b0110 and 0b1001.

        The masks are remembered for the next level.
        """
        width = parents.shape[1]
        spans: list[RowSpan] = []
        for row, (room, before) in enumerate(zip(self._rooms, parents.tolist())):
            above = self._bits[row]
            bits = [(above[parent] if first else 0) | 1 << (first + i) for i, parent in enumerate(before)]
            self._bits[row] = bits
            spans.append(RowSpan(width, room.base, first + width, room.pages, tuple(bits)))
        return self._head.plan(spans, self._kv.page_rows)


# Values. The size of a block in the first of the two steps of `topk`. Untuned.
TOPK_BLOCK = 64
# Values of the whole tensor. From this size on, `topk` on a CPU takes two steps. Untuned.
TWO_STEP_VALUES = 1 << 15


def topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values of the last dimension and their columns, both [..., k], in falling order,
    as `values.topk(k, dim=-1)` does. Of equal values, other columns may be returned.

    values: [..., n].
    k: Number of values, at most n.

    On a CPU, large inputs take two steps: choose the k blocks with the largest maxima, then the k best values
    of those blocks. Each of the k best values lies in one of these blocks, so the returned values are exact.

    On a GPU, for small inputs, and if n is no multiple of TOPK_BLOCK or less than k blocks, one step is
    taken.
    """
    columns = values.shape[-1]
    if values.is_cuda or values.numel() < TWO_STEP_VALUES or columns % TOPK_BLOCK or columns < k * TOPK_BLOCK:
        best, where = values.topk(k, dim=-1)
        return best, where
    blocks = values.unflatten(-1, (-1, TOPK_BLOCK))
    best_blocks = blocks.amax(-1).topk(k, dim=-1).indices
    index = best_blocks.unsqueeze(-1).expand(*best_blocks.shape, TOPK_BLOCK)
    best, where = blocks.gather(-2, index).flatten(-2).topk(k, dim=-1)
    return best, best_blocks.gather(-1, where // TOPK_BLOCK) * TOPK_BLOCK + where % TOPK_BLOCK
