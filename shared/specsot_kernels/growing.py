"""What `gpu.growing`, `gpu.accepting` and `gpu.choosing` read and write: levels of trees that grow, and trees
that grow and are chosen before the host has read what they grow from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

WORD = 32  # bits of a mask's word


@dataclass(frozen=True, slots=True)
class CandidatePool:
    """All candidates of B trees, int64 and fp32 [B, n], parents first: see `selection.Candidates`."""

    tokens: Tensor
    scores: Tensor
    parents: Tensor


@dataclass(frozen=True, slots=True)
class LevelPlace:
    """Of a level of a tree.

    first: its candidates' place in the pool. fed: rows of the tree that are fed before its frontier.
    width: nodes of its frontier, no more than it has candidates.
    """

    first: int
    fed: int
    width: int


@dataclass(frozen=True, slots=True)
class LevelFrontier:
    """The candidates that are fed next, [B, width] each but the bits.

    scores, tokens, numbers: as in the pool, and each one's place in it.
    origins: rows of the head's last outputs that they are fed with.
    bits:    [B * width, words] int32: which rows of the tree, itself included, each one sees.
    """

    scores: Tensor
    tokens: Tensor
    numbers: Tensor
    origins: Tensor
    bits: Tensor


class VerifiedTrees(NamedTuple):
    """Trees of a frame, row behind row; all int32, [rows] or [trees, n].

    targets: the token behind each node; negative: none, its logits are not numbers.
    tokens, parents: of the nodes; a parent's number in its tree is lower, and the root is its own.
    told:  of each tree its first row, its nodes, and how many tokens its text has before the root.
    slots: of the text's draft rows from that many on.
    """

    targets: Tensor
    tokens: Tensor
    parents: Tensor
    told: Tensor
    slots: Tensor


class DueNumbers(NamedTuple):
    """What a graph of growth reads, int32, of all trees it has room for; see `graph_growth`.

    due:    [4, n] tokens, positions, slots, origins of the rows that are due, `most` places a tree.
    asked:  [trees] the place of each tree's last one. leads: [trees, attending] columns before it are seen.
    grown:  [3, m] positions, slots, bases of grown rows. places: [trees, g] where a tree's are among them.
    below:  [g] how far below the root's child each is.
    said:   [trees, 1 + most] how many rows are due, and their tokens.
    """

    due: Tensor
    asked: Tensor
    leads: Tensor
    grown: Tensor
    places: Tensor
    below: Tensor
    said: Tensor


class ChoiceNumbers(NamedTuple):
    """What says which candidates of a pool become trees, and is told so.

    places: int32 [trees], each one's row in the pool. depths: int32 [n] of candidates, at least 1.
    trust:  fp32 [levels], what is added to a score at a depth; never rising.
    ranks:  int32 [trees, n], written over. chosen: int32 [trees, nodes - 1], candidates in the tree's order.
    """

    places: Tensor
    depths: Tensor
    trust: Tensor
    ranks: Tensor
    chosen: Tensor


class TreeRows(NamedTuple):
    """What a lap's graph reads of trees, int32: tokens and positions [rows], and bits [rows, words] of the
    tree's rows that a row sees, itself included; see `AttentionTables`.
    """

    tokens: Tensor
    positions: Tensor
    bits: Tensor
