"""A drafter that knows the text, errs as a published head does, and costs what that head costs.

The head runs beside for its true cost, on the true features; its candidates
are thrown away, and the known text with mistakes takes their places, scores and all.

Two ways to err. *tau told*: a level is right with one chance, and always by its likeliest path, so that a
tree of few nodes brings what one of many brings. *by node rank*: each guess of a node is right with a chance
of its own, as recorded of a real head and scaled to the published tau at 60 nodes, so that nodes are worth
what they add.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain, islice
from typing import NamedTuple

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

# Probability of each child of a node, best first.
CHANCES = (0.62, 0.14, 0.07, 0.05, 0.04, 0.03, 0.02, 0.015, 0.01, 0.005)
# A prime that is added to wrong tokens, so that they are far from the right one.
STEP = 7919


# Probability by rank of a head of SmolLM2-135M-Instruct, all levels, MT-bench:
# docs/results/ranks-smollm2.json.
RECORDED = (0.6211, 0.0999, 0.0392, 0.0297, 0.0155, 0.0139, 0.0103, 0.0075, 0.0083, 0.0048)

Ranks = tuple[float, ...]


class Replay(Proposer):
    """A proposer that drafts what an EAGLE head would draft if it were right as often as is said."""

    def __init__(
        self, inner: EagleProposer, right: float | Ranks, vocabulary: int, k: int, most: int
    ) -> None:
        """Prepare the drafts.

        inner: the real head, which runs for its cost. right: the probability that a level holds the right
            token, where the level above did; or, as a tuple, that each guess of a node is right. vocabulary:
            token ids are below it. k: children of a node. most: candidates of a tree that are looked at if a
            grammar constrains its sequence.
        """
        self.widths = inner.widths
        self.positions = inner.positions
        self._inner = inner
        self.at_once = inner.at_once
        self._vocabulary = vocabulary
        self._k = k
        self._most = most
        self._drawn: DrawnTrees | None = None  # of trees that grow early
        by_rank = isinstance(right, tuple)
        self._chances = right if by_rank else CHANCES
        draws = _by_rank(right, len(self.widths) + 1) if by_rank else _by_tau(right)
        self._right = chain([*islice(draws, DRAWN)], draws)  # before anybody looks at a clock
        self._tree = grown(k, len(self.widths) + 1, self._chances)  # as the last ones grew
        for levels in range(1, len(self.widths) + 2):  # before anybody looks at a clock
            repeated(grown(k, levels, self._chances), 1)

    @property
    def free_pages(self) -> int:
        """See `Proposer.free_pages`."""
        return self._inner.free_pages

    def due_rows(self, sequences: Sequence[DraftSequence]) -> int:
        """See `Proposer.due_rows`."""
        return self._inner.due_rows(sequences)

    def open(self, sequence: DraftSequence) -> None:
        """See `Proposer.open`."""
        self._inner.open(sequence)

    def observe(self, batch: Features) -> None:
        """See `Proposer.observe`."""
        self._inner.observe(batch)

    def close(self, sequence: int) -> None:
        """See `Proposer.close`."""
        self._inner.close(sequence)

    def follows(self, sequence: int) -> bool:
        """See `Proposer.follows`."""
        return self._inner.follows(sequence)

    def catch_up(self) -> None:
        """See `Proposer.catch_up`."""
        self._inner.catch_up()

    def propose(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Candidates | None:
        """See `Proposer.propose`."""
        return self.begin(sequences, levels, keep_growing)()

    def begin(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Offer:
        """Begin the head's own offer, for its time; the candidates that replace it are found while a device
        computes. The arguments are those of `propose`.
        """
        offer = self._inner.begin(sequences, levels, keep_growing)
        drawn = self._draw([text.id for text in sequences], self._tree)
        self._drawn = None
        roots = [text.tokens[-1] for text in sequences]
        before, told = self._tree, self._tokens(roots, drawn.offsets)

        def replay() -> Candidates | None:
            """Wait for the head's own offer, and return the known candidates in its place."""
            if (real := offer()) is None:
                return None
            self._tree = tree = self._grown(real.levels, real.tokens.shape[1])
            tokens = told if tree is before else self._tokens(roots, _offsets(tree, drawn.draws))
            scores, parents = repeated(tree, len(sequences))
            return filter_candidates(Candidates(tokens, scores, parents, tree.depths), sequences, self._most)

        return replay

    def start_growth(self, verification: DeviceVerification, ids: int, levels: int) -> AsyncGrowth | None:
        """Start the head's own growth; see `Proposer.start_growth`.

        The tokens that replace its candidates are drawn, and sent to the device, while the device computes
        the step before.
        """
        growth = self._inner.start_growth(verification, ids, levels)
        self._drawn = None
        if growth:
            drawn = self._draw([tree.sequence for tree in verification.trees], self._tree)
            device = verification.targets.device
            sent = indices(drawn.offsets, device)  # pyrefly: ignore[bad-argument-type]
            self._drawn = drawn._replace(sent=sent)
        return growth

    def select(
        self, growth: AsyncGrowth, sequences: Sequence[int], nodes: int, room: int, trust: Floats
    ) -> ChosenTrees | None:
        """Select among the head's own trees, after the known tokens have replaced its candidates."""
        chosen = self._inner.select(growth, sequences, nodes, room, trust)
        if not isinstance(chosen, DeviceChoice):
            return None
        tree = self._tree = self._grown(chosen.grown.levels, len(chosen.grown.depths))
        self._drawn = drawn = self._draw(chosen.sequences, tree)
        return ReplayedChoice(chosen, drawn)

    def _draw(self, texts: Sequence[int], tree: ReplayedTree) -> DrawnTrees:
        """Return what was drawn for these sequences, if it was for such trees; else draw now. texts: ids.
        tree: the shape.
        """
        drawn = self._drawn
        places = {} if drawn is None else {text: place for place, text in enumerate(drawn.texts)}
        if drawn is None or drawn.tree is not tree or not places.keys() >= set(texts):
            draws = [next(self._right) for _ in texts]
            return DrawnTrees(tuple(texts), tree, draws, _offsets(tree, draws))
        if drawn.texts == tuple(texts):
            return drawn
        rows = [places[text] for text in texts]
        return DrawnTrees(tuple(texts), tree, [drawn.draws[row] for row in rows], drawn.offsets[rows])

    def _grown(self, levels: int, candidates: int) -> ReplayedTree:
        """Return a tree of so many levels and candidates, with as many of each level fed; as EAGLE-2 feeds
        them, if that is impossible.
        """
        fed, rest = divmod(candidates - self._k, self._k * max(levels - 1, 1))
        return grown(self._k, levels, self._chances, fed if fed and not rest else None)

    def _tokens(self, roots: Sequence[int], offsets: Ints) -> Ints:
        """Return tokens [trees, candidates]: right ones where the draws say, wrong ones everywhere else.
        roots: tokens. offsets: [trees, candidates].
        """
        return (np.array(roots)[:, None] + offsets) % self._vocabulary


# Trees whose mistakes are drawn beforehand: for 64 sequences, drawing took a fifth of a millisecond.
DRAWN = 1 << 14
# Which guess of each level is right; None, or no further level: none is.
Draw = tuple[int | None, ...]


def _by_tau(chance: float) -> Iterator[Draw]:
    """Yield draws of which a level is right with one chance, by its likeliest node. chance: of a level."""
    for right in even_runs(chance):
        yield (0,) * right


def _by_rank(ranks: Ranks, levels: int) -> Iterator[Draw]:
    """Yield draws of which each rank is right with a chance of its own. levels: of a tree."""
    return zip(*(even_ranks(ranks, level) for level in range(levels)))


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedTree:
    """A tree's candidates without tokens, as `Candidates` has them.

    below: of each candidate that is fed (p + 1), and of the root (0), the first of its children.
    wrong: what is added to a root's token to miss every right one.
    """

    scores: Floats
    parents: Ints
    depths: Ints
    wrong: Ints
    below: dict[int, int]

    def follow(self, draw: Draw) -> list[int]:
        """Return the candidates that are right by a draw, from the first level on."""
        found: list[int] = []
        for rank in draw:
            first = self.below.get(found[-1] + 1 if found else 0)
            if rank is None or first is None:
                break
            found.append(first + rank)
        return found


def _offsets(tree: ReplayedTree, draws: Sequence[Draw]) -> Ints:
    """Return [trees, candidates] what is added to a root's token: the depth of those that are right, more for
    the others.
    """
    return np.stack([_offsets_of(tree, draw) for draw in draws])


@lru_cache(65536)  # no head would spend the time
def _offsets_of(tree: ReplayedTree, draw: Draw) -> Ints:
    """Return the offsets of one tree; see `_offsets`."""
    right = tree.follow(draw)
    told = tree.wrong.copy()
    told[right] = tree.depths[right]
    return told


class DrawnTrees(NamedTuple):
    """What was drawn for the trees of some sequences.

    texts: ids of the sequences. tree: the shape of all trees. draws: which guesses are right, for each tree.
        offsets: [trees, candidates] what is added to a root's token. sent: the same on a device; None: not
        sent yet.
    """

    texts: tuple[int, ...]
    tree: ReplayedTree
    draws: Sequence[Draw]
    offsets: Ints
    sent: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ReplayedChoice:
    """A choice among known candidates, which take the places of the head's."""

    chosen: DeviceChoice
    drawn: DrawnTrees

    @property
    def sequences(self) -> tuple[int, ...]:
        """See `ChosenTrees`."""
        return self.chosen.sequences

    @property
    def nodes(self) -> int:
        """See `DeviceTrees`."""
        return self.chosen.nodes

    def choose(self, tokens: Tensor, positions: Tensor, bits: Tensor, vocabulary: int) -> None:
        """Replace the head's own candidates by the known ones, and select among these."""
        pool = self.chosen.grown.pool
        trees = len(self.drawn.offsets)
        offsets = self.drawn.sent
        if offsets is None:
            offsets = indices(self.drawn.offsets, tokens.device)  # pyrefly: ignore[bad-argument-type]
        told = (tokens[: trees * self.nodes : self.nodes].long().unsqueeze(1) + offsets) % vocabulary
        if self.chosen.places == tuple(range(trees)):
            pool.tokens[:trees].copy_(told)
        else:
            pool.tokens.index_copy_(0, indices(self.chosen.places, tokens.device), told)
        scores, parents = _on_device(self.drawn.tree, tokens.device)
        pool.scores.copy_(scores.expand(pool.scores.shape))
        pool.parents.copy_(parents.expand(pool.parents.shape))
        self.chosen.choose(tokens, positions, bits, vocabulary)

    @property
    def confirmed(self) -> bool:
        """See `DeviceTrees`."""
        return self.chosen.confirmed

    def take(self) -> Flags | None:
        """See `ChosenTrees.take`."""
        return self.chosen.take()


def _on_device(tree: ReplayedTree, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return [1, candidates] scores and parents of a tree, sent to the device once."""
    if (key := (id(tree), device)) not in _sent:
        scores = torch.from_numpy(tree.scores.astype(np.float32)).to(device)
        _sent[key] = scores.unsqueeze(0), torch.from_numpy(tree.parents).to(device).unsqueeze(0)
    return _sent[key]


_sent: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}  # trees are kept by `grown`


@cache
def grown(k: int, levels: int, ranks: Ranks, fed_nodes: int | None = None) -> ReplayedTree:
    """Return a tree as EAGLE-2 grows it: the k best of a level, or `fed_nodes`, have k children each.

    k: children of a node. levels: of the tree. ranks: probability of each child, best first. fed_nodes: nodes
        of a level that have children; None: k.
    """
    width = fed_nodes or k
    chances = np.log(np.array(ranks[:k]))
    scores = [chances]
    parents = [np.zeros(k, np.int64)]
    depths = [np.ones(k, np.int64)]
    below = {0: 0}
    fed = np.arange(width)
    first = 0
    for level in range(1, levels):
        above = scores[-1][fed]
        parents.append((first + fed + 1).repeat(k))
        numbers = first + fed + 1
        first = first + len(scores[-1])
        below |= {int(number): first + place * k for place, number in enumerate(numbers)}
        scores.append((above[:, None] + chances).reshape(-1))
        depths.append(np.full(width * k, level + 1))
        fed = np.argsort(-scores[-1], kind="stable")[:width]
    whole = np.concatenate(scores)
    far = np.concatenate(depths)
    guesses = np.arange(len(whole)) % k
    return ReplayedTree(whole, np.concatenate(parents), far, far + STEP * (1 + guesses), below)


@cache
def repeated(tree: ReplayedTree, texts: int) -> tuple[Floats, Ints]:
    """Return scores and parents [texts, candidates] of the same tree for so many sequences; they must not be
    written to.
    """
    return np.tile(tree.scores, (texts, 1)), np.tile(tree.parents, (texts, 1))


def tau_of(ranks: Ranks, k: int, levels: int, nodes: int) -> float:
    """Return the tokens that a tree of its `nodes` best nodes brings a step, the root's own one included. The
    others are those of `grown`.
    """
    return 1 + float(np.sort(np.exp(grown(k, levels, ranks).scores))[::-1][: nodes - 1].sum())


def scaled_ranks(tau: float, k: int, levels: int, nodes: int) -> Ranks:
    """Return the first k of RECORDED, as much surer as it takes for trees of `nodes` nodes to bring `tau`.
    levels: of a tree.
    """
    low, high = 1.0, 8.0
    for _ in range(30):
        power = (low + high) / 2
        low, high = (power, high) if tau_of(_surer(power)[:k], k, levels, nodes) < tau else (low, power)
    return _surer(low)[:k]


def _surer(power: float) -> Ranks:
    """Return RECORDED with the probability of every outcome raised to this power, and scaled to a sum of one
    with "none is right".
    """
    chances = np.array([*RECORDED, 1 - sum(RECORDED)]) ** power
    return tuple((chances / chances.sum())[:-1].tolist())
