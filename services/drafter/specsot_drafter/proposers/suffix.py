"""Proposes what followed the same tokens before: in the text itself, and in those of past requests.

How far to trust it is learned in hindsight, from every suggestion, whether it was sent or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specsot.core.frames import Features
from specsot_drafter.core.acceptance import AcceptanceRates
from specsot_drafter.core.selection import Candidates, KeepGrowing, align_levels
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.core.suffixes import BREAK, MAX_MATCH, SeenTokens, SuffixTree, grow_suffixes
from specsot_drafter.proposers import Proposer


@dataclass(frozen=True, slots=True)
class SuffixShape:
    """levels, nodes: of a tree at most. places, least_match: see `grow_suffixes`. past: tokens of past
    requests that are kept.

    One place, and no past: n-grams of the text alone.
    """

    levels: int
    nodes: int
    places: int = 1
    least_match: int = 2
    past: int = 0


@dataclass(slots=True)
class _Text:
    """A text as an array, made when something is looked for. suggested: a tree, and how many tokens were in
    front of it, until what became of it is known.
    """

    sequence: DraftSequence
    log: SeenTokens = field(default_factory=SeenTokens)
    suggested: tuple[int, SuffixTree] | None = None

    def update(self) -> SeenTokens:
        self.log.extend(self.sequence.tokens[len(self.log) :])
        return self.log


class SuffixProposer(Proposer):
    """See `Proposer`."""

    def __init__(self, shape: SuffixShape, pages: int = 0) -> None:
        """pages: what it reports, since it needs none."""
        self.widths = (1,) * (shape.levels - 1)
        self._shape = shape
        self._pages = pages
        self._past = SeenTokens(shape.past)
        self._trusts = [AcceptanceRates(shape.levels) for _ in range(MAX_MATCH.bit_length() + 1)]
        self._texts: dict[int, _Text] = {}

    @property
    def free_pages(self) -> int:
        return self._pages

    def follows(self, sequence: int) -> bool:
        return sequence in self._texts

    def open(self, sequence: DraftSequence) -> None:
        self._texts[sequence.id] = _Text(sequence)

    def observe(self, batch: Features) -> None:
        """Compare what was suggested with what was written."""
        for lesson in batch.lessons:
            text = self._texts.get(lesson.sequence)
            if text and text.suggested:
                before, tree = text.suggested
                right, told = tree.walk(text.sequence.tokens[before:])
                self._trust(tree).record([(told, (), right)])
                text.suggested = None

    def close(self, sequence: int) -> None:
        """What a text wrote itself is kept for later ones; what a fork shares came with its source."""
        text = self._texts.pop(sequence, None)
        if text and self._shape.past:
            fork = text.sequence.opening.fork
            first = max(fork.length - MAX_MATCH, 0) if fork else 0
            self._past.extend([*text.sequence.tokens[first:], BREAK])

    def propose(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Candidates | None:
        """Trees where something was found; nobody has to be asked whether they deserve to grow."""
        trees = [self._suggest(text, levels) for text in sequences]
        return align_levels(trees) if any(tree.tokens for tree in trees) else None

    def _suggest(self, sequence: DraftSequence, most: int) -> SuffixTree:
        text = self._texts.get(sequence.id)
        levels = min(most, self.max_levels(sequence))
        if text is None or levels <= 0:
            return SuffixTree()
        shape = self._shape
        texts = [text.update().tokens, self._past.tokens]
        tree = grow_suffixes(texts, levels, shape.nodes, shape.places, shape.least_match)
        if tree.tokens:
            tree.trust(self._trust(tree).by_depth())
            text.suggested = (len(sequence.tokens), tree)
        return tree

    def _trust(self, tree: SuffixTree) -> AcceptanceRates:
        """By how much of the text agreed."""
        return self._trusts[tree.matched.bit_length()]
