"""Proposes what followed the same tokens before, in the sequence itself and in those of past requests.

How much a suggestion is trusted is learned from every suggestion, whether it was sent or not: afterwards it
is compared with what the sequence wrote.
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
    """The shape of suffix trees. With one place and no past, these are n-grams of the sequence itself.

    levels: Maximum number of levels of a tree, that is, of tokens on a path.
    nodes: Maximum number of nodes of a tree, without its root.
    places: Maximum number of earlier occurrences that a tree is made of, see `grow_suffixes`.
    min_match: Number of a sequence's last tokens that an earlier occurrence must have at least.
    past: Maximum number of tokens of past requests that are kept. 0: none.
    """

    levels: int
    nodes: int
    places: int = 1
    min_match: int = 2
    past: int = 0


@dataclass(slots=True)
class _FollowedTokens:
    """A sequence with its tokens as an array.

    sequence: What the drafter knows of the sequence.
    log: The sequence's tokens as an array, which is brought up to date only when a suggestion is looked for.
    """

    sequence: DraftSequence
    log: SeenTokens = field(default_factory=SeenTokens)

    def repeats(self, size: int) -> bool:
        """Return whether the sequence's last `size` tokens have occurred in it before.

        size: Number of tokens, at least 1.

            # tokens [1 2 3 1 2], size 2 -> True; tokens [1 2 3 1 2 2] -> False; too few tokens -> False

        The bytes of the tokens are searched, which takes a few microseconds for thousands of tokens. There
        must be at least one token.
        """
        tokens = self.update().tokens
        earlier = tokens[:-1].tobytes()
        newest = tokens[-size:].tobytes()
        place = earlier.find(newest)
        # Bytes that begin within a token are no match.
        while place >= 0 and place % tokens.itemsize:
            place = earlier.find(newest, place + 1)
        return place >= 0

    def update(self) -> SeenTokens:
        """Append the tokens that are new since the last call, if any, and return all tokens."""
        self.log.extend(self.sequence.tokens[len(self.log) :])
        return self.log


class SuffixProposer(Proposer):
    """Proposer of the continuations of earlier occurrences of a sequence's last tokens."""

    def __init__(self, shape: SuffixShape, pages: int = 0) -> None:
        """Start without sequences.

        shape: Size of the trees, and how many past tokens are kept.
        pages: The number of free pages to report; this proposer needs none.
        """
        self.widths = (1,) * (shape.levels - 1)
        self._shape = shape
        self._pages = pages
        self._past = SeenTokens(shape.past)
        # Acceptance of suggestions by the bit length of their number of matching tokens: 1, 2-3, 4-7, 8.
        self._trusts = [AcceptanceRates(shape.levels) for _ in range(MAX_MATCH.bit_length() + 1)]
        self._followed: dict[int, _FollowedTokens] = {}
        # By sequence id, the last suggested tree, and before it the number of tokens that were known of the
        # sequence when the tree was suggested. The entry is removed once the tree has been compared with what
        # the sequence wrote, and when the sequence is closed.
        self._suggested = dict[int, tuple[int, SuffixTree]]()

    @property
    def free_pages(self) -> int:
        """The number of pages that the constructor was given; nothing is ever allocated."""
        return self._pages

    def open(self, sequence: DraftSequence) -> None:
        """Follow a sequence.

        sequence: What the drafter knows of the sequence.

        A sequence of the same id is replaced. A fork shares nothing; its tokens are those that the drafter
        knows of it.
        """
        self._followed[sequence.id] = _FollowedTokens(sequence)
        self._suggested.pop(sequence.id, None)

    def observe(self, batch: Features) -> None:
        """Compare the last suggestion of each sequence with what the sequence wrote, and learn from it.
        Sequences without a suggestion are skipped.

        batch: The message; only its feature batches matter.

        How deep the suggestion was right is counted for suggestions with about as many matching tokens. The
        suggestion is then forgotten.
        """
        # Where a device selects the nodes of trees, hardly any step has a suggestion. Then the loop over the
        # feature batches is skipped.
        for feature_batch in batch.feature_batches if self._suggested else ():
            if suggested := self._suggested.pop(feature_batch.sequence, None):
                num_before, tree = suggested
                written = self._followed[feature_batch.sequence].sequence.tokens[num_before:]
                right, num_known = tree.walk(written)
                self._trust(tree).record([(num_known, (), right)])

    def close(self, sequence: int) -> None:
        """Forget a sequence, and keep its tokens for later ones. An unknown sequence is ignored.

        sequence: Id of the sequence.

        Of the tokens that a fork shares with its source, only the last MAX_MATCH are kept, so that the fork's
        first own tokens can be found by what precedes them. The source keeps all of them.

        Nothing is kept if the proposer keeps no past tokens.
        """
        self._suggested.pop(sequence, None)
        followed = self._followed.pop(sequence, None)
        if followed and self._shape.past:
            fork = followed.sequence.opening.fork
            first = max(fork.length - MAX_MATCH, 0) if fork else 0
            self._past.extend([*followed.sequence.tokens[first:], BREAK])

    def propose(
        self, sequences: Sequence[DraftSequence], levels: int, keep_growing: KeepGrowing | None = None
    ) -> Candidates | None:
        """Return the suggested trees as candidates. Return None if nothing was found for any sequence.

        sequences: The sequences to draft for, in the order of the result.
        levels: Maximum number of levels.
        keep_growing: Not called, since deeper levels cost nothing. It may be None.
        """
        trees = [self._suggest(followed, levels) for followed in sequences]
        return align_levels(trees) if any(tree.tokens for tree in trees) else None

    def _suggest(self, sequence: DraftSequence, max_levels: int) -> SuffixTree:
        """Return a tree for one sequence; an empty one if nothing matches, or if no level is allowed.

        sequence: The sequence.
        max_levels: Maximum number of levels.

        An unknown sequence also gets an empty tree. A tree with nodes is remembered for comparison, and its
        scores include how far such suggestions have been right.
        """
        followed = self._followed.get(sequence.id)
        levels = min(max_levels, self.max_levels(sequence))
        if followed is None or levels <= 0:
            return SuffixTree()
        shape = self._shape
        # Without past tokens, most sequences are found not to repeat themselves at nearly no cost.
        if not shape.past and not followed.repeats(shape.min_match):
            return SuffixTree()
        token_arrays = [followed.update().tokens, self._past.tokens]
        tree = grow_suffixes(token_arrays, levels, shape.nodes, shape.places, shape.min_match)
        if tree.tokens:
            tree.trust(self._trust(tree).by_depth())
            self._suggested[sequence.id] = (len(sequence.tokens), tree)
        return tree

    def _trust(self, tree: SuffixTree) -> AcceptanceRates:
        """Return the acceptance rates of suggestions whose match is about as long as that of a tree.

        tree: The tree; `matched` is the number of its matching tokens.
        """
        return self._trusts[tree.matched.bit_length()]
