"""A drafter that knows the tokens, is wrong as often as a published head is, and costs what that head costs.

The head runs alongside for its true cost, on the true features. Its candidates are discarded; the known
tokens, mistakes included, take their places, with scores of their own.

There are two ways to be wrong. *tau told*: a level is right with one chance, and always by its likeliest
path, so that a tree of few nodes yields what one of many nodes does. *by node rank*: each rank of a node's
children is right with a chance of its own, as recorded of a real head and scaled to the published tau at 60
nodes, so that nodes are worth what they add.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain, islice
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specsot.core.device_verification import DeviceVerification
from specsot.core.frames import Features
from specsot_drafter.core.async_growth import AsyncGrowth
from specsot_drafter.core.selection import Candidates, Flags, Floats, Ints, KeepGrowing
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.grammar import filter_candidates
from specsot_drafter.overlap.device_selection import DeviceChoice
from specsot_drafter.proposers import ChosenTrees, Offer, Proposer
from specsot_drafter.proposers.eagle import EagleProposer
from specsot_lab.bench.acceptance import even_ranks, even_runs
from specsot_model.kv import indices

# Scores of each child of a node, best first, as probabilities, if acceptance is given by level. Untuned.
LEVEL_CHANCES: Final = (0.62, 0.14, 0.07, 0.05, 0.04, 0.03, 0.02, 0.015, 0.01, 0.005)
# A prime that is added to wrong tokens, so that they are far from the right one.
WRONG_OFFSET: Final = 7919


# Probability that each rank of a node's children is right, for a head of SmolLM2-135M-Instruct, all levels,
# MT-bench: lab/results/raw/ranks-smollm2.json.
RECORDED_RANKS: Final = (0.6211, 0.0999, 0.0392, 0.0297, 0.0155, 0.0139, 0.0103, 0.0075, 0.0083, 0.0048)

# Probability that each rank of a node's children is right, the best rank first.
Ranks = tuple[float, ...]


class Replay(Proposer):
    """A proposer that drafts what an EAGLE head would draft if its drafts were right with given chances."""

    def __init__(
        self, inner: EagleProposer, chances: float | Ranks, vocabulary: int, top_k: int, max_constrained: int
    ) -> None:
        """Draw the mistakes of the first trees, so that no measurement includes them.

        inner: The proposer with the real head, which runs for its cost.
        chances: A number: the probability that a level contains the right token if the level above does. A
            tuple: the probability that each rank of a node's children is right.
        vocabulary: Number of token ids.
        top_k: Children of a node.
        max_constrained: Maximum number of candidates of a tree that are considered if a grammar constrains
            its sequence.

        With a number as `chances`, the scores of children are LEVEL_CHANCES; with a tuple, the tuple is the
        scores, too.
        """
        self.widths = inner.widths
        self.positions = inner.positions
        self._inner = inner
        self.at_once = inner.at_once
        self._vocabulary = vocabulary
        self._top_k = top_k
        self._max_constrained = max_constrained
        # What was drawn for the trees that grow asynchronously; None if there are none.
        self._drawn: DrawnTrees | None = None
        by_rank = isinstance(chances, tuple)
        self._chances = chances if by_rank else LEVEL_CHANCES
        draws = _draws_by_rank(chances, len(self.widths) + 1) if by_rank else _draws_by_level(chances)
        # Drawing and growing happen here, so that no measurement includes them.
        self._draws = chain([*islice(draws, DRAWN_AHEAD)], draws)
        self._last_tree = grow_tree(top_k, len(self.widths) + 1, self._chances)
        for levels in range(1, len(self.widths) + 2):
            repeat_tree(grow_tree(top_k, levels, self._chances), 1)

    @property
    def free_pages(self) -> int:
        """Return the number of KV pages that no sequence owns."""
        return self._inner.free_pages

    def due_rows(self, sequences: Sequence[DraftSequence]) -> int:
        """Return the number of rows of committed tokens that the head must compute before trees can grow.

        sequences: The sequences whose trees are to grow.
        """
        return self._inner.due_rows(sequences)

    def open(self, sequence: DraftSequence) -> None:
        """Open a sequence for the head.

        sequence: The sequence, of which nothing has been read.
        """
        self._inner.open(sequence)

    def observe(self, batch: Features) -> None:
        """Give the head a message of feature batches.

        batch: The features of committed tokens.
        """
        self._inner.observe(batch)

    def close(self, sequence: int) -> None:
        """Free everything that a sequence holds; an unknown sequence has no effect.

        sequence: Id of the sequence.
        """
        self._inner.close(sequence)

    def follows(self, sequence: int) -> bool:
        """Return whether the head still follows a sequence.

        sequence: Id of the sequence.
        """
        return self._inner.follows(sequence)

    def catch_up(self) -> None:
        """Compute the head's outstanding rows, at a time when no sequence waits for a tree."""
        self._inner.catch_up()

    def propose(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Candidates | None:
        """Return the known candidates of one tree per sequence; None if the head has no candidates.

        sequences: The sequences to draft for, in the order of the result.
        levels: Number of levels to grow.
        keep_growing: Asked before each further level how many nodes of each tree to feed. None: all levels
            grow.
        """
        return self.begin(sequences, levels, keep_growing)()

    def begin(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Offer:
        """Launch the head's own growth, for its time, and return a function that waits for it and returns the
        known candidates. They are prepared while the device computes.

        sequences: The sequences to draft for, in the order of the result.
        levels: Number of levels to grow.
        keep_growing: As for `propose`.

        If the head's own tree has the shape that the tree before had, the prepared tokens are used, else they
        are made anew. The returned function returns None if the head has no candidates. A constrained
        sequence keeps only candidates that its grammar allows, at most `max_constrained`. What `start_growth`
        drew is used if it fits these sequences, and then forgotten.
        """
        offer = self._inner.begin(sequences, levels, keep_growing)
        drawn = self._draw([sequence.id for sequence in sequences], self._last_tree)
        self._drawn = None
        roots = [sequence.tokens[-1] for sequence in sequences]
        expected_tree = self._last_tree
        expected_tokens = self._tokens(roots, drawn.offsets)

        def known_candidates() -> Candidates | None:
            """Wait for the head's own candidates, and return the known ones in their place; None if the head
            has none.
            """
            if (real := offer()) is None:
                return None
            self._last_tree = tree = self._tree_like(real.levels, real.tokens.shape[1])
            if tree is expected_tree:
                tokens = expected_tokens
            else:
                tokens = self._tokens(roots, _offsets(tree, drawn.draws))
            scores, parents = repeat_tree(tree, len(sequences))
            return filter_candidates(
                Candidates(tokens, scores, parents, tree.depths), sequences, self._max_constrained
            )

        return known_candidates

    def start_growth(self, verification: DeviceVerification, ids: int, levels: int) -> AsyncGrowth | None:
        """Launch the head's own growth before the host has read the verification result. Return None if
        nothing was launched.

        The tokens that replace the head's candidates are drawn, and sent to the device, while the device
        computes the step before.

        verification: The trees that are being verified, and their results on the device.
        ids: Number of token ids that may be fed to the head.
        levels: Levels of the trees that grow.

        Returns the head's own growth. What was drawn before is forgotten, also if nothing was launched.
        """
        growth = self._inner.start_growth(verification, ids, levels)
        self._drawn = None
        if growth:
            drawn = self._draw([tree.sequence for tree in verification.trees], self._last_tree)
            device = verification.targets.device
            sent = indices(drawn.offsets, device)
            self._drawn = drawn._replace(sent=sent)
        return growth

    def select(
        self, growth: AsyncGrowth, sequences: Sequence[int], nodes: int, max_levels: int, trust: Floats
    ) -> ChosenTrees | None:
        """Let the device select nodes of the trees that are growing, after the known tokens have replaced the
        head's candidates. Return None if the device cannot select.

        growth: What `start_growth` has returned.
        sequences: Ids of the sequences, in the order of the trees in the next frame.
        nodes: Maximum number of nodes per tree, root included.
        max_levels: Maximum number of levels that every one of the sequences can have.
        trust: What is added to a candidate's log-probability at each depth, [levels].

        Returns None also for a selection that is not on the device. The mistakes that `start_growth` drew are
        kept if they fit the sequences and the shape.
        """
        chosen = self._inner.select(growth, sequences, nodes, max_levels, trust)
        if not isinstance(chosen, DeviceChoice):
            return None
        tree = self._last_tree = self._tree_like(chosen.grown.levels, len(chosen.grown.depths))
        self._drawn = drawn = self._draw(chosen.sequences, tree)
        return ReplayedChoice(chosen, drawn)

    def _draw(self, sequences: Sequence[int], tree: ReplayedTree) -> DrawnTrees:
        """Return which nodes are right in one tree per sequence. What `start_growth` drew is used if it was
        drawn for these sequences and for trees of this shape.

        sequences: Ids of the sequences, in the order of the trees.
        tree: The shape of all trees.

        If the sequences are some of those that were drawn for, or in another order, their draws are
        reordered. Otherwise new mistakes are drawn, one draw for each sequence.
        """
        drawn = self._drawn
        places = {} if drawn is None else {sequence: place for place, sequence in enumerate(drawn.sequences)}
        if drawn is None or drawn.tree is not tree or not places.keys() >= set(sequences):
            draws = [next(self._draws) for _ in sequences]
            return DrawnTrees(tuple(sequences), tree, draws, _offsets(tree, draws))
        if drawn.sequences == tuple(sequences):
            return drawn
        rows = [places[sequence] for sequence in sequences]
        return DrawnTrees(tuple(sequences), tree, [drawn.draws[row] for row in rows], drawn.offsets[rows])

    def _tree_like(self, levels: int, candidates: int) -> ReplayedTree:
        """Return a tree with as many levels and candidates as the head's own. The same number of nodes is fed
        at each level, top_k if none fits the number of candidates.

        levels: Number of levels.
        candidates: Number of candidates of one tree.

        With top_k 10, 8 levels and 710 candidates, (710 - 10) / (10 * 7) = 10 nodes are fed at each level.

        A tree of one level has top_k candidates.
        """
        fed_nodes, remainder = divmod(candidates - self._top_k, self._top_k * max(levels - 1, 1))
        return grow_tree(
            self._top_k, levels, self._chances, fed_nodes if fed_nodes and not remainder else None
        )

    def _tokens(self, roots: Sequence[int], offsets: Ints) -> Ints:
        """Return the token of every candidate, [trees, candidates]. The right token at depth d is the root's
        token + d.

        roots: Token id of each tree's root.
        offsets: What is added to a root's token, [trees, candidates], see `_offsets`.
        """
        return (np.array(roots)[:, None] + offsets) % self._vocabulary


# Trees whose mistakes are drawn when the drafter is made. Drawing them for 64 sequences at a time took 0.2
# ms.
DRAWN_AHEAD: Final = 1 << 14
# For each level, the rank of the child that is right. None, or no further level: none is.
Draw = tuple[int | None, ...]


def _draws_by_level(chance: float) -> Iterator[Draw]:
    """Yield, without end, draws in which a number of levels are right by their likeliest node, and no further
    level is.

    chance: Probability that a level is right if the level above is.
    """
    for num_right in even_runs(chance):
        yield (0,) * num_right


def _draws_by_rank(ranks: Ranks, levels: int) -> Iterator[Draw]:
    """Yield, without end, draws in which each rank of a node's children is right with a chance of its own.

    ranks: Probability that each rank is right, the best rank first.
    levels: Levels of a tree.
    """
    return zip(*(even_ranks(ranks, level) for level in range(levels)))


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedTree:
    """A tree's candidates without tokens. All arrays have one entry for each candidate, level by level.

    scores: Cumulative log-probability of each candidate.
    parents: Number of each candidate's parent: 0 is the root, p + 1 is candidate p.
    depths: Depth of each candidate; 1 for children of the root.
    wrong_offsets: What is added to a root's token to make a candidate's token wrong.
    first_child: By the number of each node that was fed (0 for the root, p + 1 for candidate p): its first
        child among the candidates. Its other children follow.
    """

    scores: Floats
    parents: Ints
    depths: Ints
    wrong_offsets: Ints
    first_child: dict[int, int]

    def follow(self, draw: Draw) -> list[int]:
        """Return the candidates that are right, from the first level on; [] if the first level has none. The
        path ends at a node that has no children.

        draw: For each level, the rank of the child that is right.

        The path also ends at the first None in the draw. A rank is not checked against the number of
        children.
        """
        path: list[int] = []
        for rank in draw:
            children_start = self.first_child.get(path[-1] + 1 if path else 0)
            if rank is None or children_start is None:
                break
            path.append(children_start + rank)
        return path


def _offsets(tree: ReplayedTree, draws: Sequence[Draw]) -> Ints:
    """Return what is added to a root's token for every candidate, [trees, candidates]: the depth of those
    that are right, a larger number for those that are wrong.

    tree: The shape of all trees.
    draws: For each tree, which children are right; at least one tree.
    """
    return np.stack([_offsets_of(tree, draw) for draw in draws])


# Cached, because a head would not spend this time.
@lru_cache(65536)
def _offsets_of(tree: ReplayedTree, draw: Draw) -> Ints:
    """Return what is added to a root's token for every candidate of one tree, [candidates], see `_offsets`.

    tree: The shape of the tree.
    draw: For each level, the rank of the child that is right.

    The same array is returned for the same tree and draw, and must not be written to. Candidates that are
    right get their depth; the others get `wrong_offsets`.
    """
    right_nodes = tree.follow(draw)
    offsets = tree.wrong_offsets.copy()
    offsets[right_nodes] = tree.depths[right_nodes]
    return offsets


class DrawnTrees(NamedTuple):
    """What was drawn for the trees of some sequences.

    sequences: Ids of the sequences, in the order of the trees.
    tree: The shape of all trees.
    draws: For each tree, which children are right.
    offsets: What is added to a root's token for every candidate, [trees, candidates].
    sent: The same on a device; None if it has not been sent.
    """

    sequences: tuple[int, ...]
    tree: ReplayedTree
    draws: Sequence[Draw]
    offsets: Ints
    sent: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ReplayedChoice:
    """A selection on the device among known candidates, which replace those of the head.

    chosen: The head's own selection.
    drawn: What was drawn for the trees, in the order of the head's selection.
    """

    chosen: DeviceChoice
    drawn: DrawnTrees

    @property
    def sequences(self) -> tuple[int, ...]:
        """Return the sequence id of each tree, in the order of the trees."""
        return self.chosen.sequences

    @property
    def nodes(self) -> int:
        """Return the number of nodes of each tree, its root included."""
        return self.chosen.nodes

    def choose(self, tokens: Tensor, positions: Tensor, bits: Tensor, vocabulary: int) -> None:
        """Replace the head's own candidates by the known ones, select among these, and write the trees into
        the tensors from which the next step reads its batch.

        tokens: int tensor that gets the token id of every node. It contains the roots' tokens already.
        positions: int tensor that gets the position of every node.
        bits: int tensor that gets the ancestors of every node as a bit set.
        vocabulary: Number of token ids of the base model.

        The step's tokens at the roots are read, all other entries of the three tensors are written. The
        mistakes are sent to the device if they have not been sent yet.
        """
        pool = self.chosen.grown.pool
        trees = len(self.drawn.offsets)
        offsets = self.drawn.sent
        if offsets is None:
            offsets = indices(self.drawn.offsets, tokens.device)
        known_tokens = (tokens[: trees * self.nodes : self.nodes].long().unsqueeze(1) + offsets) % vocabulary
        if self.chosen.places == tuple(range(trees)):
            pool.tokens[:trees].copy_(known_tokens)
        else:
            pool.tokens.index_copy_(0, indices(self.chosen.places, tokens.device), known_tokens)
        scores, parents = _on_device(self.drawn.tree, tokens.device)
        pool.scores.copy_(scores.expand(pool.scores.shape))
        pool.parents.copy_(parents.expand(pool.parents.shape))
        self.chosen.choose(tokens, positions, bits, vocabulary)

    @property
    def confirmed(self) -> bool:
        """Return whether the drafter has read these trees and its drafts consist of them."""
        return self.chosen.confirmed

    def take(self) -> Flags | None:
        """Wait for the device, and return [trees, candidates] flags of the selected candidates; None if no
        step used these trees.
        """
        return self.chosen.take()


def _on_device(tree: ReplayedTree, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return scores and parents of a tree on a device, [1, candidates] each. They are sent once.

    tree: The tree, from `grow_tree`.
    device: The device.

    Scores are fp32. The tensors are kept for good, and must not be written to.
    """
    if (key := (id(tree), device)) not in _sent:
        scores = torch.from_numpy(tree.scores.astype(np.float32)).to(device)
        _sent[key] = scores.unsqueeze(0), torch.from_numpy(tree.parents).to(device).unsqueeze(0)
    return _sent[key]


# Scores and parents of a tree on a device, by the tree's id. Ids stay valid, because `grow_tree` keeps all
# trees.
_sent: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}


@cache
def grow_tree(top_k: int, levels: int, ranks: Ranks, fed_nodes: int | None = None) -> ReplayedTree:
    """Return a tree as EAGLE-2 grows it: the best nodes of each level are fed, and have top_k children each.

    top_k: Children of a node.
    levels: Levels of the tree, at least 1.
    ranks: Probability of each child, the best rank first; at least top_k of them.
    fed_nodes: Number of nodes that are fed at each level; None: top_k.

    With top_k 2 and 2 levels, the candidates are [a b | a1 a2 b1 b2], their parents [0 0 | 1 1 2 2].

    The result is cached for the same arguments, and must not be written to. Scores are cumulative
    log-probabilities, so that nodes with the best products are fed.
    """
    width = fed_nodes or top_k
    chances = np.log(np.array(ranks[:top_k]))
    scores = [chances]
    parents = [np.zeros(top_k, np.int64)]
    depths = [np.ones(top_k, np.int64)]
    first_child = {0: 0}
    fed = np.arange(width)
    level_start = 0
    for level in range(1, levels):
        parent_scores = scores[-1][fed]
        parents.append((level_start + fed + 1).repeat(top_k))
        fed_numbers = level_start + fed + 1
        level_start = level_start + len(scores[-1])
        first_child |= {int(number): level_start + place * top_k for place, number in enumerate(fed_numbers)}
        scores.append((parent_scores[:, None] + chances).reshape(-1))
        depths.append(np.full(width * top_k, level + 1))
        fed = np.argsort(-scores[-1], kind="stable")[:width]
    all_scores = np.concatenate(scores)
    all_depths = np.concatenate(depths)
    ranks_of_nodes = np.arange(len(all_scores)) % top_k
    return ReplayedTree(
        all_scores,
        np.concatenate(parents),
        all_depths,
        all_depths + WRONG_OFFSET * (1 + ranks_of_nodes),
        first_child,
    )


@cache
def repeat_tree(tree: ReplayedTree, sequences: int) -> tuple[Floats, Ints]:
    """Return scores and parents of equal trees, [sequences, candidates] each. They are cached, and must not
    be written to.

    tree: The tree.
    sequences: Number of trees.
    """
    return np.tile(tree.scores, (sequences, 1)), np.tile(tree.parents, (sequences, 1))


def tau_of(ranks: Ranks, top_k: int, levels: int, nodes: int) -> float:
    """Return the mean tokens per step of a tree that consists of its best nodes, the bonus token included.

    ranks: Probability that each rank of a node's children is right.
    top_k: Children of a node.
    levels: Levels of the tree from which the nodes are selected.
    nodes: Number of selected nodes, root included.
    """
    return 1 + float(np.sort(np.exp(grow_tree(top_k, levels, ranks).scores))[::-1][: nodes - 1].sum())


def scaled_ranks(tau: float, top_k: int, levels: int, nodes: int) -> Ranks:
    """Return the first top_k of RECORDED_RANKS, sharpened so that trees of `nodes` nodes yield `tau` tokens
    per step. If even the sharpest ranks yield fewer, return nearly the sharpest.

    tau: Mean tokens per step, the bonus token included.
    top_k: Children of a node.
    levels: Levels of the tree from which the nodes are selected.
    nodes: Number of selected nodes, root included.

    The exponent is searched between 1 and 8. If the recorded ranks as they are yield `tau` or more already,
    they are returned as good as unchanged.
    """
    lower, upper = 1.0, 8.0
    for _ in range(30):
        power = (lower + upper) / 2
        lower, upper = (
            (power, upper)
            if tau_of(_sharpened(power)[:top_k], top_k, levels, nodes) < tau
            else (lower, power)
        )
    return _sharpened(lower)[:top_k]


def _sharpened(power: float) -> Ranks:
    """Return RECORDED_RANKS with the probability of every outcome raised to a power, then scaled so that all
    outcomes, "no rank is right" included, sum to 1.

    power: The exponent; 1 leaves the probabilities as they are.
    """
    chances = np.array([*RECORDED_RANKS, 1 - sum(RECORDED_RANKS)]) ** power
    return tuple((chances / chances.sum())[:-1].tolist())
