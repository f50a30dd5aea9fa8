"""Defines the device arrays that the tree growing, accepting and choosing kernels read and write.

`gpu.growing` grows draft trees level by level; `gpu.accepting` finds the rows that a draft head computes
next, and `gpu.choosing` selects a tree's nodes, both before the host has read the verification result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

# Bits. Width of one word of a visibility mask.
WORD = 32


@dataclass(frozen=True, slots=True)
class CandidatePool:
    """All candidates of B trees, parents before children: [B, n] each; see `selection.Candidates` in the
    drafter.

    tokens: int64, the token id of each candidate.
    scores: fp32, the score of each candidate.
    parents: int64, one more than the number of the candidate's parent in the pool; 0 is the root.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor


@dataclass(frozen=True, slots=True)
class LevelPlace:
    """Where one level of a tree lies.

    first: number in the pool of the level's first candidate.
    fed: number of the tree's rows that are fed to the head before the level's frontier.
    width: number of nodes of the level's frontier, at most as many as the level has candidates.
    """

    first: int
    fed: int
    width: int


@dataclass(frozen=True, slots=True)
class LevelFrontier:
    """The candidates that are fed to the draft head next: [B, width] each except `bits`.

    scores: fp32, the score of each candidate.
    tokens: int64, the token id of each candidate.
    numbers: int64, each candidate's number in the pool.
    origins: int64, the rows of the head's last outputs whose features the candidates are fed with.
    bits: int32 [B * width, words]; which rows of its tree, itself included, each candidate attends to.
    """

    scores: Tensor
    tokens: Tensor
    numbers: Tensor
    origins: Tensor
    bits: Tensor


class VerifiedTrees(NamedTuple):
    """The trees of a frame, whose rows are concatenated, as int32 arrays.

    windows: [trees, 1 + n]: a column of each tree's sequence, at which a page begins, and the numbers of n
        pages from there on, padded with 0. The pages of the first due draft row, and of all rows that are
        computed after it, are among them.
    trees: [4, trees]: each tree's first row, its number of nodes, and the number and the column of its
        sequence's first due draft row, which is fed the root's target. With n tokens before the root, that is
        row n of a head with features, whose row j is fed token j + 1, and row n + 1 of a language model.
    tokens: [rows]: the token of each node.
    parents: [rows]: the number of each node's parent within its tree; a parent's number is lower than its
        child's, and the root is its own parent.

    Two trees of 3 and 2 nodes, whose sequences have 10 and 7 tokens; the second one has skipped 3 draft rows.
    A page has 4 rows, and the sequences have the pages (5, 2, 7, 1) and (4, 6, 3): rows [r a b | r c],
    windows [[8, 7, 1], [4, 6, 3]], trees [[0, 3], [3, 2], [10, 7], [10, 4]] for a head with features. The
    slot of the first sequence's column 10 is 7 * 4 + 2.
    """

    windows: Tensor
    trees: Tensor
    tokens: Tensor
    parents: Tensor


class DueNumbers(NamedTuple):
    """The inputs of a captured graph that grows trees, int32, for all trees that it has room for; see
    `graph_growth`.

    A row is due if its token was accepted, and the head has not computed it yet.

    due: [4, n]: tokens, positions, KV slots and feature origins of the due rows, max_due places a tree.
    asked: [trees]: the place of each tree's last due row, whose output starts the next draft.
    leads: [trees, attending]: the row sees the columns before this one.
    grown: [3, m]: positions, KV slots and bases of the rows that are grown afterwards.
    places: [trees, g]: where in `grown` the rows of each tree are.
    depths: [g]: depth of each grown row in the next tree, 0 for a child of its root.
    due_tokens: [trees, 1 + max_due]: the number of due rows of each tree, then their tokens.
    """

    due: Tensor
    asked: Tensor
    leads: Tensor
    grown: Tensor
    places: Tensor
    depths: Tensor
    due_tokens: Tensor


class ChoiceNumbers(NamedTuple):
    """The inputs, and outputs, of choosing which candidates of a pool become nodes of trees.

    places: int32 [trees]: each tree's row in the pool.
    depths: int32 [n]: depth of each candidate, at least 1.
    trust: fp32 [levels]: what is added to a score at each depth; never rises with depth.
    ranks: int32 [trees, n]: scratch, overwritten: each candidate's node number in the tree, 0 if it is not
        chosen.
    chosen: int32 [trees, 2, nodes - 1]: output, the tokens of the chosen candidates in node order, and the
        node numbers of their parents. `nodes` is the number of nodes of a tree, root included.
    masses: fp32 [trees, levels]: output, the probability of the chosen candidates, which is the exponential
        of their scores, summed per depth. `levels` is the number of levels of the candidates here; `trust`
        may have more.
    """

    places: Tensor
    depths: Tensor
    trust: Tensor
    ranks: Tensor
    chosen: Tensor
    masses: Tensor


class TreeRows(NamedTuple):
    """The rows of trees that a captured graph of a verification step reads, all int32.

    tokens: [rows], the token of each row.
    positions: [rows], the position of each row.
    bits: [rows, words]: which rows of its tree, itself included, each row sees; see `AttentionTables`.
    """

    tokens: Tensor
    positions: Tensor
    bits: Tensor
