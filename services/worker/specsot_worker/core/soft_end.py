"""Ends a sequence of free text after a sentence, once it has nearly as many tokens as it may have."""

from __future__ import annotations

from collections.abc import Sequence

from specsot.core.frames import Opening
from specsot.core.tree import Tree, children, shape_of
from specsot.grammar import Prose, SentenceEnds


class SoftEndRule:
    """The soft end of one sequence, see `specsot.core.soft_end`.

    It changes target tokens after they were chosen: a target that would begin something new, where a sentence
    has ended, becomes the end token. So the probability of the end token is its own and that of all tokens
    which would begin something new, at any temperature. Since a target token is a function of (logits, seed,
    ordinal, position), and the change one of the tokens before it, the sequence is the same with any tree,
    drafter and batch.
    """

    def __init__(self, opening: Opening, sentences: SentenceEnds) -> None:
        """opening: of the sequence. It must have a soft end, whose token is one of its stop ids."""
        assert opening.soft_end is not None
        self._sentences = sentences
        self._token = opening.soft_end.token
        self._after = max(opening.soft_end.after, opening.min_tokens)
        self._stop_ids = opening.stop_ids
        # What the first `_num_read` tokens of the sequence have written.
        self._prose = sentences.start()
        self._num_read = 0

    def change(self, generated: Sequence[int], tree: Tree, targets: list[int | None]) -> list[int | None]:
        """Return the targets of a tree, of which one may have become the end token.

        generated: all tokens that the sequence has generated; the last one is the root. Empty for the first
            target after a prompt.
        targets: target token at each node, None where acceptance does not reach. Not changed.

            # after 3, generated [It rains .], tree [. -> The -> sun], targets [The, sun, shines]
            #   -> [end, sun, shines], of which acceptance reaches only the first
        """
        written = len(generated)
        if written + max_depth(tree) < self._after:
            return targets
        prose = self._read(generated)
        below = children(tree.parents)
        node: int | None = 0
        while node is not None and (target := targets[node]) is not None:
            if written >= self._after and self._ends(prose, target):
                return [*targets[:node], self._token, *targets[node + 1 :]]
            prose = self._sentences.advance(prose, target)
            written += 1
            node = next((child for child in below[node] if tree.tokens[child] == target), None)
        return targets

    def _ends(self, prose: Prose, target: int) -> bool:
        return target not in self._stop_ids and self._sentences.ends_before(prose, target)

    def _read(self, generated: Sequence[int]) -> Prose:
        """Return what all generated tokens have written. Each of them is read once."""
        for token in generated[self._num_read :]:
            self._prose = self._sentences.advance(self._prose, token)
        self._num_read = len(generated)
        return self._prose


def max_depth(tree: Tree) -> int:
    """Return the depth of the deepest node."""
    return max(shape_of(tree.parents).depths)


def make_rule(opening: Opening, sentences: SentenceEnds | None) -> SoftEndRule | None:
    """Return the rule of a sequence. Return None if it has no soft end or cannot have one: the model has no
    tokenizer, a grammar leads the sequence to its end, or the end token would not end it.
    """
    soft = opening.soft_end
    if (
        soft is None
        or sentences is None
        or opening.plan
        or opening.form
        or soft.token not in opening.stop_ids
    ):
        return None
    return SoftEndRule(opening, sentences)
