"""Ends a sequence of free text after a sentence, once it has nearly as many tokens as it may have."""

from __future__ import annotations

from collections.abc import Sequence

from specsot.core.frames import Opening
from specsot.core.tree import Tree, children, shape_of
from specsot.grammar import Prose, SentenceEnds


class SoftEndRule:
    """Rule that ends one sequence softly: once the sequence is nearly long enough, it ends after a sentence,
    see `specsot.core.soft_end`.

    The rule changes target tokens after they were chosen: where a sentence has ended, a target that would
    begin something new becomes the end token. So at any temperature, the probability of the end token is the
    sum of its own and of the probabilities of all tokens that would begin something new. A target token is a
    function of (logits, seed, ordinal, position), and its change is a function of the tokens before it, so
    the sequence is the same with any tree, drafter and batch.
    """

    def __init__(self, opening: Opening, sentences: SentenceEnds) -> None:
        """Start before the first token of the sequence.

        opening: Opening of the sequence. It must have a soft end, whose token is one of its stop ids.
        sentences: Recognizes the ends of sentences in the model's tokens.

        The sequence may end softly after the larger of the soft end's `after` and the request's
        `min_tokens`.
        """
        assert opening.soft_end is not None
        self._sentences = sentences
        self._token = opening.soft_end.token
        self._after = max(opening.soft_end.after, opening.min_tokens)
        self._stop_ids = opening.stop_ids
        # What the first `_num_read` tokens of the sequence have written.
        self._prose = sentences.start()
        self._num_read = 0

    def change(self, generated: Sequence[int], tree: Tree, targets: list[int | None]) -> list[int | None]:
        """Return the target tokens of a tree. At most one of them has become the end token: the first along
        the accepted path that would begin something new after a sentence, once the sequence is long enough.
        Return `targets` itself if no target changes.

        generated: Ids of all tokens that the sequence has generated; the last one is the root. Empty for the
            first target after a prompt.
        tree: Token id and parent of each node. Node 0 is the root.
        targets: Target token id at each node. None: acceptance does not reach the node, or its logits are not
            finite. The list is not changed.

        For example:

            # after 3, generated [It rains .], tree [. -> The -> sun], targets [The, sun, shines]
            #   -> [end, sun, shines], of which acceptance reaches only the first

        The targets also stay if even the deepest node is too early, or if acceptance ends before such a
        token.
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
        """Return whether the sequence ends before a target token: a sentence has ended, and the token would
        begin something new. Return False for a stop id, which ends the sequence anyway.

        prose: What the tokens before the target have written.
        target: Id of the target token.
        """
        return target not in self._stop_ids and self._sentences.ends_before(prose, target)

    def _read(self, generated: Sequence[int]) -> Prose:
        """Return what all generated tokens have written. Only the tokens that followed since the last call
        are read.

        generated: Ids of all tokens that the sequence has generated so far. Empty: the start of the sequence
            is returned.
        """
        for token in generated[self._num_read :]:
            self._prose = self._sentences.advance(self._prose, token)
        self._num_read = len(generated)
        return self._prose


def max_depth(tree: Tree) -> int:
    """Return the depth of the deepest node. Return 0 for a tree that is its root alone.

    tree: Token id and parent of each node.
    """
    return max(shape_of(tree.parents).depths)


def make_rule(opening: Opening, sentences: SentenceEnds | None) -> SoftEndRule | None:
    """Return the soft-end rule of a sequence. Return None if the sequence has no soft end or cannot have one:
    the model has no tokenizer, a grammar leads the sequence to its end, or the end token would not end it.

    opening: Opening of the sequence, with its soft end, stop ids and grammar.
    sentences: Recognizes the ends of sentences in the model's tokens. None: the model has no tokenizer.

    A plan and a format both count as grammar.
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
