"""Verification of one sequence: accepts nodes along the target tokens, writes tokens, finds what ends it.

Holds what the last stage remembers of a decoding sequence, and the grammar's masks for the nodes of a tree.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import overload

import numpy as np

from specsot.core.frames import End, Opening, Outcome, PromptChunk, TreeSegment
from specsot.core.tree import Tree, accept, shape_of, single
from specsot.grammar import LONGEST_STRETCH, Grammar, IsolatedGrammar, SpellingHabits
from specsot_worker.core.pipeline import place_of

_DRAW = struct.Struct("<QQQ")
_RULE = b"specsot-draw-v1"
_WORD = 2**64 - 1


@lru_cache(4096)  # nodes of one depth are drawn by the same key; the number is not measured
def draw_key(seed: int, ordinal: int, position: int) -> int:
    """53 random bits, which a float64 holds, for the token at `position` of branch `ordinal`."""
    digest = hashlib.blake2b(_DRAW.pack(seed & _WORD, ordinal, position), digest_size=8, person=_RULE)
    return int.from_bytes(digest.digest(), "little") >> 11


def uniform(key: int, half: int) -> float:
    """A number in [0, 1) with 53 random bits, for a token's bit of this value: splitmix64's (Steele 2014)."""
    word = key + half * 0x9E3779B97F4A7C15 & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return ((word ^ word >> 31) >> 11) * 2.0**-53


class TokenCounts:
    """One sequence's past. Tokens of the prompt count as standing there, not as written."""

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        self._counts = dict.fromkeys(prompt, 0)

    def add_prompt(self, tokens: Iterable[int]) -> None:
        """More of the prompt."""
        for token in tokens:
            self._counts.setdefault(token, 0)

    def add(self, token: int) -> None:
        self._counts[token] = self._counts.get(token, 0) + 1

    def counts(self, trail: Iterable[int] = ()) -> dict[int, int]:
        """How often each token there was written, as if `trail` had been written too."""
        counts = self._counts.copy()
        for token in trail:
            counts[token] = counts.get(token, 0) + 1
        return counts


@dataclass(slots=True)
class DecodeState:
    """What the last stage remembers of a decoding sequence.

    tokens: everything it wrote, the newest (not fed yet) included.
    state:  the grammar's state behind those tokens; None without a grammar.
    habits: how the base spells what grammars force, shared by all it writes.
    history: what penalties look at; None where none is asked for.
    retried: its newest token had no target, and is fed once more.
    processed: logits change before a token is chosen. greedy: an argmax is all that it wants.
    place:  among those of a frame, if its next tree is the drafter's, whatever it writes.
    """

    opening: Opening
    grammar: Grammar | None = None
    habits: SpellingHabits = field(default_factory=SpellingHabits)
    history: TokenCounts | None = None
    tokens: list[int] = field(default_factory=list)
    state: object | None = None
    retried: bool = False
    processed: bool = field(init=False)
    greedy: bool = field(init=False)
    place: tuple[int, int] | None = field(init=False)

    def __post_init__(self) -> None:
        sampling = self.opening.sampling
        self.processed = sampling.penalises or bool(sampling.logit_bias)
        self.greedy = sampling.temperature <= 0 and not self.processed
        self.place = place_of(self.opening) if self.opening.drafted else None
        if self.grammar:
            self.set_grammar(self.grammar)

    def set_grammar(self, grammar: Grammar) -> None:
        """To this grammar, also what it wrote already, in an epoch before."""
        self.grammar = grammar
        self.state = grammar.start()
        self.place = self.place if self.greedy else None
        for token in self.tokens:
            self.state = None if self.state is None else grammar.advance(self.state, token)

    @property
    def failure(self) -> str | None:
        """Why it cannot go on, whatever the logits say."""
        return self.grammar.failure if isinstance(self.grammar, IsolatedGrammar) else None

    @property
    def remaining(self) -> int:
        """How many tokens it may still write."""
        return self.opening.limit - len(self.tokens)

    def must_go_on(self, ahead: int = 0) -> bool:
        """No stop token may be written yet, `ahead` tokens further on."""
        return len(self.tokens) + ahead < self.opening.min_tokens

    def goes_on(self, resting: bool) -> bool:
        """Whether it is fed the one token that it writes now, whichever, unless that ends it.

        resting: its drafter does, or is only told of it.
        """
        asked = self.opening
        forced = self.grammar is not None and asked.drafted  # stretches of its form may come with it
        return not forced and asked.logprobs is None and (resting or not asked.drafted)

    def write(self, tokens: tuple[int, ...]) -> End | None:
        """Append tokens up to the first that ends the sequence; returns why, or None."""
        watched = self.grammar or self.history or len(tokens) >= self.remaining
        if not watched and set(tokens).isdisjoint(self.opening.stop_ids):
            self.tokens += tokens
            return None
        for token in tokens:
            self.tokens.append(token)
            if self.history:
                self.history.add(token)
            if end := self._end_at(token):
                return end
        return None

    def forced(self) -> tuple[int, ...]:
        """What must follow, as far as it is worth drafting: up to the last token that may be written."""
        if self.grammar is None or not self.opening.drafted:
            return ()
        return self.habits.forced(self.grammar, self.state, min(self.remaining - 1, LONGEST_STRETCH))

    def read_prompt(self, start: int, tokens: tuple[int, ...]) -> None:
        """Take prompt tokens fed at `start`; the last of a prompt it may have written before a repair."""
        given = max(self.opening.prompt - self.opening.generated - start, 0)
        if self.history:
            self.history.add_prompt(tokens[:given])
        self.write(tokens[given:])

    def _end_at(self, token: int) -> End | None:
        if token in self.opening.stop_ids:
            return End.STOP
        if self.grammar:
            self.habits.note(self.grammar, self.state, token)
            self.state = self.grammar.advance(self.state, token)
            if self.state is None:
                return End.FAILED
            if self.grammar.finished(self.state):
                return End.GRAMMAR
        return End.LENGTH if self.remaining <= 0 else None


def accept_prompt(state: DecodeState, target: int | None) -> Outcome:
    """The first token behind a prompt."""
    if target is None:
        return Outcome(state.opening.sequence, 0, (), (), End.FAILED)
    end = state.write((target,))
    return Outcome(state.opening.sequence, 0, (), (target,), end, forced=() if end else state.forced())


def accept_tree(
    state: DecodeState, step: int, tree: Tree, targets: list[int | None], rested: bool = False
) -> Outcome:
    """Accept along the targets, write the accepted tokens and the bonus, cut at an end.

    A draft whose own logits are not numbers is not accepted: its token is the bonus, and decides as a root.
    It may have spoilt the root's logits too: then nothing is accepted, and the root is fed once more, alone.
    """
    sequence = state.opening.sequence
    accepted = accept(tree, targets)
    if len(accepted) > 1 and targets[accepted[-1]] is None:
        accepted = accepted[:-1]
    if (bonus := targets[accepted[-1]]) is None:
        again = not state.retried
        state.retried = True
        if again:
            return Outcome(sequence, step, (), (), rested=rested)
        return Outcome(sequence, step, (0,), (), End.FAILED, rested=rested)
    state.retried = False
    before = len(state.tokens)
    end = state.write((*[tree.tokens[node] for node in accepted[1:]], bonus))
    tokens = tuple(state.tokens[before:])
    forced = () if end else state.forced()
    return Outcome(sequence, step, accepted[: len(tokens)], tokens, end, forced=forced, rested=rested)


Masks = Sequence[np.ndarray | None]


def grammar_masks(segment: PromptChunk | TreeSegment, state: DecodeState) -> Masks:
    """Allowed tokens behind each judged row, or None where anything goes; none at all where all is free."""
    if state.grammar is None or state.state is None:
        return ()
    tree = single(segment.tokens[-1]) if isinstance(segment, PromptChunk) else segment.tree
    return TreeMasks(state.grammar, state.state, state.remaining, tree)


class TreeMasks(Masks):
    """Made when they are looked at: acceptance comes by few of a tree's nodes.

    root: the state behind the root, which is written; other nodes advance from their parent.
    """

    def __init__(self, grammar: Grammar, root: object, remaining: int, tree: Tree) -> None:
        self._grammar = grammar
        self._tree = tree
        self._left = [remaining - depth for depth in shape_of(tree.parents).depths]
        self._states: dict[int, object | None] = {0: root}
        self._masks: dict[int, np.ndarray | None] = {}

    def __len__(self) -> int:
        return len(self._tree)

    @overload
    def __getitem__(self, index: int) -> np.ndarray | None: ...
    @overload
    def __getitem__(self, index: slice) -> Masks: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | Masks | None:
        if isinstance(index, slice):
            return [self[node] for node in range(*index.indices(len(self)))]
        node = range(len(self))[index]
        if node not in self._masks:
            self._masks[node] = self._make(node)
        return self._masks[node]

    def allows(self, node: int, token: int) -> bool:
        """Whether `token` may follow a node; asked of one token, which takes no mask."""
        state = self._held(node)
        return state is None or self._grammar.allows(state, token, self._left[node])

    def _make(self, node: int) -> np.ndarray | None:
        state = self._held(node)
        return None if state is None else self._grammar.mask(state, self._left[node])

    def _held(self, node: int) -> object | None:
        """The state behind a node; None where anything goes."""
        state = self._state(node)
        over = state is None or self._left[node] < 1 or self._grammar.finished(state)
        return None if over else state

    def _state(self, node: int) -> object | None:
        if node not in self._states:
            above = self._state(self._tree.parents[node])
            token = self._tree.tokens[node]
            self._states[node] = None if above is None else self._grammar.advance(above, token)
        return self._states[node]
