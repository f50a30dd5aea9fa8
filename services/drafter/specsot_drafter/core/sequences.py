"""Every open sequence as the drafter knows it: its tokens, its grammar's state, what it may still write."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from specsot.core.frames import FeatureBatch, Opening
from specsot.core.vocabulary import Vocabulary
from specsot.errors import NotFound
from specsot.grammar import Grammar, IsolatedGrammar, grammar_of
from specsot.params import MAX_TOKENS


@dataclass(slots=True)
class GrammarState:
    """The grammar state of one sequence. state: None once it broke its grammar."""

    grammar: Grammar
    state: Any

    def advance(self, tokens: Sequence[int]) -> None:
        """Go on behind tokens the sequence wrote itself."""
        for token in tokens:
            if self.state is not None:
                self.state = self.grammar.advance(self.state, token)


def own_tokens(opening: Opening, first: int, tokens: Sequence[int]) -> Sequence[int]:
    """Those of the tokens at positions first, first + 1, ... that the sequence wrote itself."""
    return tokens[max(opening.prompt - opening.generated - first, 0) :]


@dataclass(slots=True)
class DraftSequence:
    """What is known of one sequence.

    tokens:    known tokens, the newest (the root of the next tree) not fed to the base yet.
    committed: how many of them were fed.
    compiling: its grammar, until that is compiled.
    """

    opening: Opening
    tokens: list[int] = field(default_factory=list)
    committed: int = 0
    compiling: Future[Grammar] | None = None
    id: int = field(init=False)
    _grammar_state: GrammarState | None = None

    def __post_init__(self) -> None:
        self.id = self.opening.sequence

    @property
    def grammar_state(self) -> GrammarState | None:
        """Its grammar's state after the newest token; None for free text, and while that is coming."""
        if self.compiling and self.compiling.done():
            self.set_grammar(IsolatedGrammar(self.compiling.result))
        return self._grammar_state

    def set_grammar(self, grammar: Grammar) -> None:
        """To this grammar, also what it wrote already."""
        self._grammar_state = GrammarState(grammar, grammar.start())
        self.compiling = None
        self._grammar_state.advance(own_tokens(self.opening, 0, self.tokens))

    @property
    def root(self) -> int | None:
        """The token that a tree grows from; None in the middle of a prompt."""
        return self.tokens[-1] if len(self.tokens) > self.committed else None

    @property
    def remaining(self) -> int:
        """Tokens this sequence may still write behind its root."""
        written = self.opening.generated + self.committed + 1 - self.opening.prompt
        return self.opening.limit - written

    def max_tokens(self, positions: int) -> int:
        """Tokens it may hold in all, where so many are known to a model; behind a window there is no end."""
        return MAX_TOKENS if self.opening.window else positions

    def follows(self, lesson: FeatureBatch) -> bool:
        """Whether the lesson continues what is known; false after a missed one."""
        continues = bool(lesson.tokens) and lesson.start == self.committed
        known = self.tokens
        return continues and (len(known) == lesson.start or known[-1] == lesson.tokens[0])

    def observe(self, lesson: FeatureBatch) -> None:
        """Take in committed tokens, and the one behind them."""
        tokens = lesson.tokens if lesson.bonus is None else (*lesson.tokens, lesson.bonus)
        first = len(self.tokens)
        fresh = tokens[first - lesson.start :]
        self.tokens += fresh
        self.committed += len(lesson.tokens)
        if self._grammar_state:
            self._grammar_state.advance(own_tokens(self.opening, first, fresh))


class DraftSequences:
    """The texts of one epoch. One that cannot be followed any more is dropped."""

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        """vocabulary: to follow grammars with; without it all text counts as free."""
        self._vocabulary = vocabulary
        self._sequences: dict[int, DraftSequence] = {}

    @property
    def drafted(self) -> int:
        """How many write, and are drafted for."""
        return sum(one.opening.drafted and one.opening.decodes for one in self._sequences.values())

    def find(self, sequence: int) -> DraftSequence | None:
        return self._sequences.get(sequence)

    def open(self, opening: Opening) -> DraftSequence:
        """Follow a sequence from its start, or from its fork. Raises NotFound for a fork of the unknown."""
        opened = DraftSequence(opening)
        if opening.fork and opening.fork.length:
            source = self.find(opening.fork.sequence)
            if source is None or source.committed < opening.fork.length:
                raise NotFound(f"sequence {opening.sequence} forks what is not followed so far")
            opened.committed = opening.fork.length
            opened.tokens = source.tokens[: opened.committed]
        opened.compiling = grammar_of(self._vocabulary, opening, led=False) if self._vocabulary else None
        self._sequences[opening.sequence] = opened
        return opened

    def observe(self, lessons: Sequence[FeatureBatch]) -> list[int]:
        """Take in what was committed. Returns the sequences that missed something: they are dropped."""
        missed: list[int] = []
        for lesson in lessons:
            if (known := self._sequences.get(lesson.sequence)) is None:
                continue
            if known.follows(lesson):
                known.observe(lesson)
            else:
                missed.append(lesson.sequence)
                self.close(lesson.sequence)
        return missed

    def close(self, sequence: int) -> None:
        self._sequences.pop(sequence, None)


def common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens two texts have in common, from their beginning on."""
    for place, (one, other) in enumerate(zip(ours, theirs)):
        if one != other:
            return place
    return min(len(ours), len(theirs))
