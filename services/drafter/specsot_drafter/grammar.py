"""Grammars in drafting: bars candidates that a grammar forbids, while a tree grows or afterwards.

This only avoids drafts that would be rejected anyway: the last stage applies the grammar to its own target
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specsot.grammar import Grammar
from specsot_drafter.core.selection import Candidates, Flags
from specsot_drafter.core.sequences import DraftSequence, GrammarState
from specsot_drafter.heads import DraftHead


class GrammarGuide:
    """Guide of growing trees: follows the grammars along the frontiers, and bars the tokens that they forbid.

    Trees of sequences without a grammar are left alone.
    """

    def __init__(
        self, head: DraftHead, states: Sequence[GrammarState | None], remaining: Sequence[int]
    ) -> None:
        """Start at the roots.

        head: The draft head, whose ids are converted to those of the base model.
        states: The grammar state of each tree's sequence. None: it has no grammar.
        remaining: Number of tokens that each sequence may still write after its root.
        """
        self._grammar_states = states
        self._remaining = remaining
        self._targets: NDArray[np.int64] = (
            head.to_target(torch.arange(head.draft_vocab, device=head.device)).cpu().numpy()
        )
        self._states = [[standing.state if standing else None] for standing in states]
        self._depth = 0

    def mask(self, log_probs: Tensor) -> Tensor:
        """Bar forbidden tokens (-inf), and normalise the other probabilities to the sum 1, in place. Return
        the same tensor.

        log_probs: Log-probabilities after each frontier node, [B, frontier, draft vocabulary].

        A node after which every token is forbidden has -inf everywhere. Trees without a grammar are not
        changed.
        """
        for tree, standing in enumerate(self._grammar_states):
            if standing is not None:
                allowed = torch.from_numpy(self._allowed(standing.grammar, tree)).to(log_probs.device)
                log_probs[tree] = _renormalise(log_probs[tree].masked_fill(~allowed, -torch.inf))
        return log_probs

    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        """Move every constrained frontier down by one level.

        parents: Index of each new node's parent in the frontier before, [B, k].
        tokens: Token id of each new node, in the base model's vocabulary, [B, k].

        Frontiers of trees without a grammar stay as they are. The state of a node that breaks the grammar
        becomes None.
        """
        self._depth += 1
        below = zip(self._grammar_states, self._states, parents.tolist(), tokens.tolist())
        self._states = [
            [_advance(standing, states[parent], token) for parent, token in zip(origins, chosen)]
            if standing
            else states
            for standing, states, origins, chosen in below
        ]

    def _allowed(self, grammar: Grammar, tree: int) -> Flags:
        """Return flags of the tokens that may follow each frontier node, bool [frontier, draft vocabulary].
        Nothing may follow a node whose path breaks the grammar, or at which the sequence must end.

        grammar: The grammar of the tree's sequence.
        tree: Index of the tree.
        """
        spare = self._remaining[tree] - self._depth
        nothing = np.zeros(len(self._targets), np.bool_)
        return np.stack(
            [
                nothing if state is None or spare < 1 else grammar.mask(state, spare)[self._targets]
                for state in self._states[tree]
            ]
        )


def _advance(grammar_state: GrammarState, state: Any, token: int) -> Any:
    """Return the grammar's state after a token. None if the token, or an earlier one, is forbidden.

    grammar_state: Gives the grammar.
    state: The state before the token; None after a forbidden one.
    token: Token id.
    """
    return None if state is None else grammar_state.grammar.advance(state, token)


def _renormalise(log_probs: Tensor) -> Tensor:
    """Return log-probabilities whose last dimension is normalised to the sum 1. Rows in which everything is
    barred stay at -inf.

    log_probs: [..., n].
    """
    total = log_probs.logsumexp(-1, keepdim=True)
    return log_probs - total.masked_fill(total == -torch.inf, 0.0)


def make_guide(head: DraftHead, sequences: Sequence[DraftSequence]) -> GrammarGuide | None:
    """Return the guide that bars forbidden tokens while trees grow. Return None if no sequence has a grammar.

    head: The draft head.
    sequences: The sequence of each tree.
    """
    if not any(sequence.grammar_state for sequence in sequences):
        return None
    return GrammarGuide(
        head,
        [sequence.grammar_state for sequence in sequences],
        [sequence.remaining for sequence in sequences],
    )


def filter_candidates(
    candidates: Candidates, sequences: Sequence[DraftSequence], max_nodes: int
) -> Candidates:
    """Return candidates with those barred that the grammars forbid, for trees that grew without a guide.

    candidates: Candidates of the grown trees.
    sequences: The sequence of each tree. If none has a grammar, the candidates are returned unchanged.
    max_nodes: How many of the best allowed candidates of each constrained tree remain. That bounds the number
        of candidates for which the grammar is asked.

    Trees of sequences without a grammar keep all their candidates.
    """
    if not any(sequence.grammar_state for sequence in sequences):
        return candidates
    scores = candidates.scores.copy()
    for row, sequence in enumerate(sequences):
        if sequence.grammar_state:
            scores[row, ~_allowed_candidates(candidates, row, sequence, max_nodes)] = -np.inf
    return replace(candidates, scores=scores)


def _allowed_candidates(candidates: Candidates, row: int, sequence: DraftSequence, max_nodes: int) -> Flags:
    """Return flags of at most `max_nodes` allowed candidates of one tree, bool [n]. None is allowed if the
    sequence itself has left its grammar.

    candidates: Candidates of all trees.
    row: Index of the tree.
    sequence: Its sequence, which has a grammar.
    max_nodes: Maximum number of allowed candidates.

    Candidates are examined best first. A parent is examined before its children, since no candidate is better
    than its parent. The number of tokens that the sequence may still write is not considered.

    A stop token is always allowed. Nothing may follow a stop token that the grammar itself forbids.

    Candidates that are barred already, or whose parent is not allowed, are not allowed.
    """
    grammar_state = sequence.grammar_state
    ends = sequence.opening.stop_ids
    assert grammar_state is not None
    tokens = candidates.tokens[row].tolist()
    parents = candidates.parents[row].tolist()
    scores = candidates.scores[row]
    found = np.zeros(len(tokens), dtype=np.bool_)
    if grammar_state.state is None:
        return found
    may_follow = grammar_state.grammar.path_check(grammar_state.state)
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for each in np.argsort(-scores, kind="stable")[: np.count_nonzero(scores > -np.inf)].tolist():
        if max_nodes <= 0:
            break
        above = paths.get(parents[each])
        if above is None:
            continue
        if follows := may_follow(path := (*above, tokens[each])):
            paths[each + 1] = path
        if follows or tokens[each] in ends:
            found[each] = True
            max_nodes -= 1
    return found


def bar_after_ends(candidates: Candidates, sequences: Sequence[DraftSequence]) -> Candidates:
    """Return the candidates with those barred that would begin something new where a sequence with a soft end
    ends. If there are none, or if no sequence has a soft end, the candidates are returned unchanged.

    candidates: Candidates of the grown trees.
    sequences: The sequence of each tree, in the order of the trees.

    The last stage generates the end token there, so that such drafts would be rejected. Only candidates whose
    parent may complete a sentence, or which begin a new line, are examined. The descendants of a barred
    candidate are barred as well.

    Sequences without a soft end, without a root, or without a tokenizer's sentence ends are left alone, and
    so is a tree that is too shallow to reach the first position at which its sequence may end.
    """
    if not any(sequence.opening.soft_end for sequence in sequences):
        return candidates
    barred = np.zeros(candidates.scores.shape, dtype=np.bool_)
    for row, sequence in enumerate(sequences):
        soft = sequence.opening.soft_end
        ends = sequence.sentences
        root = sequence.root
        if soft is None or ends is None or root is None:
            continue
        first = max(soft.after, sequence.opening.min_tokens) - sequence.written
        if first >= candidates.levels:
            continue
        tokens = candidates.tokens[row]
        parents = candidates.parents[row]
        above = np.where(parents > 0, tokens[parents - 1], root)
        examined = (ends.closes[above] | ends.breaks[tokens]) & (candidates.depths > first)
        examined &= candidates.scores[row] > -np.inf
        for each in np.flatnonzero(examined).tolist():
            prose = sequence.read_prose()
            for token in _path_to(tokens, parents, int(parents[each])):
                prose = ends.advance(prose, token)
            barred[row, each] = ends.ends_before(prose, int(tokens[each]))
        # Parents come before children.
        for each in range(len(tokens)) if barred[row].any() else ():
            barred[row, each] |= parents[each] > 0 and barred[row, parents[each] - 1]
    if not barred.any():
        return candidates
    return replace(candidates, scores=np.where(barred, -np.inf, candidates.scores))


def _path_to(tokens: NDArray[np.int64], parents: NDArray[np.int64], number: int) -> list[int]:
    """Return the token ids on the path from below the root to a candidate, the candidate's own included.
    Return [] for the root.

    tokens: Token id of each candidate of the tree, [n].
    parents: Number of each candidate's parent, [n]: 0 is the root, p + 1 is candidate p.
    number: Number of the candidate, counted like `parents`.

    For example:

        # tokens [a b c], parents [0 1 1]: number 3 is c, whose parent is a -> [a c]
    """
    path: list[int] = []
    while number:
        path.append(int(tokens[number - 1]))
        number = int(parents[number - 1])
    return path[::-1]
