"""Every open sequence as tokens, as the last stage tells them: what is known, what may still be written.

Refuses to know features, drafters and trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from specsot.constraint import Grammar, Isolated, grammar_of
from specsot.errors import NotFound
from specsot.frames import Lesson, Opening
from specsot.params import MAX_TOKENS
from specsot.vocabulary import Vocabulary
from specsot_drafter.standing import Standing, own_tokens


@dataclass(slots=True)
class Text:
    """What is known of one sequence.

    tokens:    known tokens, the newest (the root of the next tree) not fed to the base yet.
    committed: how many of them were fed.
    coming:    its grammar, while that is still compiled.
    """

    opening: Opening
    tokens: list[int] = field(default_factory=list)
    committed: int = 0
    coming: Future[Grammar] | None = None
    _standing: Standing | None = None

    @property
    def sequence(self) -> int:
        return self.opening.sequence

    @property
    def standing(self) -> Standing | None:
        """Where its grammar stands behind the newest token; None for free text, and while that is coming."""
        if self.coming and self.coming.done():
            self.hold(Isolated(self.coming.result))
        return self._standing

    def hold(self, grammar: Grammar) -> None:
        """To this grammar, also what it wrote already."""
        self._standing, self.coming = Standing(grammar, grammar.start()), None
        self._standing.write(own_tokens(self.opening, 0, self.tokens))

    @property
    def root(self) -> int | None:
        """The token that a tree grows from; None in the middle of a prompt."""
        return self.tokens[-1] if len(self.tokens) > self.committed else None

    @property
    def room(self) -> int:
        """Tokens this sequence may still write behind its root."""
        written = self.opening.generated + self.committed + 1 - self.opening.prompt
        return self.opening.limit - written

    def reach(self, positions: int) -> int:
        """Tokens it may hold in all, where so many are known to a model; behind a window there is no end."""
        return MAX_TOKENS if self.opening.window else positions

    def follows(self, lesson: Lesson) -> bool:
        """Whether the lesson continues what is known; false after a missed one."""
        continues = bool(lesson.tokens) and lesson.start == self.committed
        return continues and self.root in (None, lesson.tokens[0])

    def hear(self, lesson: Lesson) -> None:
        """Take in committed tokens, and the one behind them."""
        told = lesson.tokens if lesson.bonus is None else (*lesson.tokens, lesson.bonus)
        first = len(self.tokens)
        fresh = told[first - lesson.start :]
        self.tokens += fresh
        self.committed += len(lesson.tokens)
        if self._standing:
            self._standing.write(own_tokens(self.opening, first, fresh))


class Texts:
    """The texts of one epoch. One that cannot be followed any more is dropped."""

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        """vocabulary: to follow grammars with; without it all text counts as free."""
        self._vocabulary = vocabulary
        self._texts: dict[int, Text] = {}

    def find(self, sequence: int) -> Text | None:
        return self._texts.get(sequence)

    def open(self, opening: Opening) -> Text:
        """Follow a sequence from its start, or from its fork. Raises NotFound for a fork of the unknown."""
        text = Text(opening)
        if opening.fork and opening.fork.length:
            source = self.find(opening.fork.sequence)
            if source is None or source.committed < opening.fork.length:
                raise NotFound(f"sequence {opening.sequence} forks what is not followed so far")
            text.committed = opening.fork.length
            text.tokens = source.tokens[: text.committed]
        text.coming = grammar_of(self._vocabulary, opening, led=False) if self._vocabulary else None
        self._texts[opening.sequence] = text
        return text

    def hear(self, lessons: Sequence[Lesson]) -> list[int]:
        """Take in what was committed. Returns the sequences that missed something: they are dropped."""
        missed: list[int] = []
        for lesson in lessons:
            text = self.find(lesson.sequence)
            if text is None:
                continue
            if text.follows(lesson):
                text.hear(lesson)
            else:
                missed.append(lesson.sequence)
                self.close(lesson.sequence)
        return missed

    def close(self, sequence: int) -> None:
        self._texts.pop(sequence, None)
