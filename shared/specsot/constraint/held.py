"""What holds a sequence: the skeleton's grammar, or the form its caller asked for.

Refuses to know how either of them works.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from specsot.constraint.answers import Mask, answer_automaton
from specsot.constraint.automaton import automaton
from specsot.constraint.habits import Forcing
from specsot.errors import InvalidRequest
from specsot.frames import Opening
from specsot.vocabulary import Vocabulary


class Grammar(Forcing, Protocol):
    """What is asked of a constraint over tokens (TokenAutomaton, AnswerAutomaton); states are opaque."""

    @property
    def vocabulary(self) -> Vocabulary: ...
    def start(self) -> Any: ...
    def mask(self, state: Any, remaining: int, /) -> Mask: ...


def grammar_of(vocabulary: Vocabulary, opening: Opening, led: bool = True) -> Grammar | None:
    """What holds this sequence, None for free text. A form that cannot be compiled here, though it could
    be where it was asked for, lets nothing be written: its sequence fails, alone.

    led: forms look at budgets, too. Who only guesses does without.
    """
    if opening.plan:
        return automaton(vocabulary, opening.plan)
    if opening.form is None:
        return None
    try:
        return answer_automaton(vocabulary, opening.form, opening.stop_ids, led)
    except InvalidRequest:
        return Nothing(vocabulary)


@dataclass(frozen=True, slots=True)
class Nothing:
    """A grammar without a text."""

    vocabulary: Vocabulary

    def start(self) -> str:
        return "start"

    def advance(self, state: str, token: int) -> None:
        return None

    def finished(self, state: str) -> bool:
        return False

    def forced(self, state: str) -> tuple[int, ...]:
        return ()

    def mask(self, state: str, remaining: int) -> Mask:
        return np.zeros(len(self.vocabulary), dtype=np.bool_)
