"""Grows the trees of DSpark heads: one pass drafts a block, and the Markov head then reads level by level."""

from __future__ import annotations

import torch
from torch import Tensor

from specsot_drafter.grammar import GrammarGuide
from specsot_drafter.growth import GrowthFrontier, LevelGrowth
from specsot_drafter.heads.dspark import DSparkHead

# Nodes. The most that a captured graph feeds at each level of a tree. Without a graph, all nodes are fed that
# the tree may need. Untuned.
CAPTURED_FRONTIER = 8


def frontier_widths(levels: int, top_k: int, nodes: int) -> tuple[int, ...]:
    """Return the largest number of nodes of level 1, 2, ... that may have children in a tree of the likeliest
    paths, for all levels but the last.

    levels: Number of levels of the tree.
    top_k: Number of children of each node.
    nodes: Maximum number of nodes, without the root.

    A node of level d that has a child leaves room for `nodes` - d likelier nodes of its level at most, itself
    included: the others are its d - 1 ancestors and the child.

        # 4 levels, 4 children, 24 nodes -> (4, 16, 21)
    """
    widths = list[int]()
    for level in range(1, levels):
        widths.append(max(min(top_k**level, nodes - level), 0))
    return tuple(widths)


class MarkovGrowth(LevelGrowth):
    """Grower of trees from the outputs of a DSpark head's blocks.

    The candidates include the `nodes` likeliest paths of which every token is one of the `top_k` likeliest
    after the path before it; nodes that cannot have children among them are not fed. A captured graph feeds
    the CAPTURED_FRONTIER likeliest nodes of a level only, so that paths below other nodes are missed.
    """

    def __init__(
        self,
        head: DSparkHead,
        outputs: Tensor,
        roots: Tensor,
        levels: int,
        top_k: int,
        nodes: int,
        guide: GrammarGuide | None = None,
        captured: bool = False,
    ) -> None:
        """Compute the logits that the head's layers give for every place of the block that is needed, without
        the Markov head's part.

        head: The DSpark head.
        outputs: Outputs of the head's layers (the body) at all rows of the blocks, [B, rows, hidden].
        roots: Token id of each root, [B].
        levels: Maximum number of levels; one place of the block each.
        top_k: Number of children that every fed node gets.
        nodes: Maximum number of nodes of a tree, without its root.
        guide: Bars the tokens that a sequence's grammar forbids. None: no sequence has a grammar.
        captured: True in a captured graph: then every level has the same size in every run, at most
            CAPTURED_FRONTIER nodes.
        """
        places = outputs[:, head.block.first :][:, :levels]
        widths = frontier_widths(places.shape[1], top_k, nodes)
        if captured:
            widths = tuple(min(width, CAPTURED_FRONTIER) for width in widths)
        super().__init__(head, len(outputs), top_k, guide, widths)
        self._markov = head.markov
        self._places = places
        self._nodes = nodes
        self._captured = captured
        # The body's logits of every place, [B, places, draft vocabulary].
        self._base = head.logits(places.flatten(0, 1)).view(*places.shape[:2], -1)
        self._last = head.begin(roots, outputs)

    @property
    def last(self) -> Tensor:
        """The Markov head's rows at the roots, [B, columns]: the argument of `run`."""
        return self._last

    def _feed(self, level: int, frontier: GrowthFrontier) -> Tensor:
        """Return the Markov head's rows at the nodes of a frontier, [B * width, columns].

        level: Number of the frontier, 0 for that of the roots' children.
        frontier: The nodes to feed.
        """
        outputs = self._places[:, level + 1].repeat_interleave(frontier.width, 0)
        return self._markov.read(frontier.tokens.flatten(), outputs, frontier.features)

    def _log_probs(self, outputs: Tensor) -> Tensor:
        """Return the log-probabilities of the tokens that follow each node, fp32 [B * width, draft
        vocabulary].

        outputs: The Markov head's rows at the nodes, [B * width, columns].

        The place that follows is that of the level which is to grow next.
        """
        base = self._base[:, len(self._levels)].unsqueeze(1)
        logits = self._markov.logits(outputs).view(self._trees, -1, base.shape[-1]) + base
        return torch.log_softmax(logits.flatten(0, 1).float(), -1)

    def _choose(self, scores: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Return the scores and the indices of the candidates of a level that are fed, [B, width] each, the
        likeliest first. In a captured graph, width is that of the base class. Otherwise it is the largest
        number, over all trees, of candidates that are no less likely than their tree's `nodes`-th likeliest
        candidate so far.

        scores: Cumulative log-probabilities of all candidates of the level, [B, n].
        level: Number of the level, 0 for the roots' children.

        No descendant of a node that is left out can be among the `nodes` likeliest.
        """
        best, chosen = super()._choose(scores, level)
        found = torch.cat([level_scores for level_scores, _, _ in self._levels], 1)
        if self._captured or found.shape[1] <= self._nodes or not best.shape[1]:
            return best, chosen
        least = found.topk(self._nodes, 1).values[:, -1:]
        width = int((best >= least).sum(1).max())
        return best[:, :width], chosen[:, :width]
