"""One level of a tree's growth in plain torch: what `gpu.growing` does in two launches. Also the inputs
of `gpu.accepting` and `gpu.choosing`, which grow and choose trees before the host has read what they grow
from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
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


def grow(
    logits: Tensor,
    k: int,
    place: LevelPlace,
    words: int,
    pool: CandidatePool,
    before: LevelFrontier | None,
    offsets: Tensor | None,
) -> LevelFrontier:
    """The k best followers of every node of a level join the pool; the best of those are the next frontier.

    logits:  [B * nodes, draft vocabulary] behind the roots (one node) or the frontier before.
    words:   of the bits.
    offsets: what is added to an id of the draft vocabulary to get the base's.

    A tie goes to the lower id, or the lower number in the pool.
    """
    trees = pool.tokens.shape[0]
    chances = torch.log_softmax(logits.float(), -1).view(trees, -1, logits.shape[-1])
    more, ids = _tops(chances, k)
    tokens = ids if offsets is None else ids + offsets[ids]
    nodes = more.shape[1]
    scores = more if before is None else more + before.scores.unsqueeze(2)
    parents = (
        torch.zeros_like(tokens) if before is None else (before.numbers + 1).unsqueeze(2).expand_as(tokens)
    )
    own = slice(place.first, place.first + nodes * k)
    pool.tokens[:, own], pool.parents[:, own] = tokens.flatten(1), parents.flatten(1)
    pool.scores[:, own] = scores.flatten(1)
    best, chosen = _tops(scores.flatten(1), place.width)
    above = chosen // k
    origins = above + nodes * torch.arange(trees, device=above.device).unsqueeze(1)
    bits = _own_bits(place.fed, place.width, words, above.device).repeat(trees, 1)
    if before is not None:
        bits |= before.bits[origins.flatten()]
    return LevelFrontier(best, tokens.flatten(1).gather(1, chosen), chosen + place.first, origins, bits)


def _tops(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    best, order = values.sort(dim=-1, descending=True, stable=True)
    return best[..., :k], order[..., :k]


def _own_bits(first: int, width: int, words: int, device: torch.device) -> Tensor:
    """[width, words]: row first + i sees bit first + i."""
    number = torch.arange(first, first + width, device=device).unsqueeze(1)
    word = torch.arange(words, device=device).unsqueeze(0)
    bit = torch.ones_like(number) << (number % WORD)
    bit = torch.where(bit >= 1 << (WORD - 1), bit - (1 << WORD), bit)  # as a signed word has it
    return torch.where(number // WORD == word, bit, 0).to(torch.int32)
