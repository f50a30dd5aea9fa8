"""What holds a sequence: the skeleton's grammar, or the form its caller asked for.

Refuses to know how either of them works. Forms are compiled on a thread of their own, one at a time: that
may take as long as many laps, and no lap waits for it.
"""

from __future__ import annotations

import functools
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from specsot.constraint.answers import AnswerAutomaton, Mask
from specsot.constraint.automaton import automaton
from specsot.constraint.compiling import COMPILER
from specsot.constraint.habits import Forcing
from specsot.errors import InvalidRequest
from specsot.forms import Form
from specsot.frames import Opening
from specsot.vocabulary import Vocabulary

COMPILED = 8  # forms that are kept, the newest used


class Grammar(Forcing, Protocol):
    """What is asked of a constraint over tokens (TokenAutomaton, AnswerAutomaton); states are opaque."""

    @property
    def vocabulary(self) -> Vocabulary: ...
    def start(self) -> Any: ...
    def mask(self, state: Any, remaining: int, /) -> Mask: ...


def grammar_of(
    vocabulary: Vocabulary, opening: Opening, led: bool = True
) -> Grammar | Future[Grammar] | None:
    """What holds this sequence, or what will be that once it is compiled; None for free text.

    led: forms look at budgets, too. Who only guesses does without.
    """
    if opening.plan:
        return automaton(vocabulary, opening.plan)
    if opening.form is None:
        return None
    coming = _compiling(vocabulary, opening.form, opening.stop_ids, led)
    return coming.result() if coming.done() else coming


@functools.lru_cache(maxsize=COMPILED)
def _compiling(vocabulary: Vocabulary, form: Form, ends: tuple[int, ...], led: bool) -> Future[Grammar]:
    """Shared by everybody in the process."""
    return COMPILER.submit(_compile, vocabulary, form, ends, led)


def _compile(vocabulary: Vocabulary, form: Form, ends: tuple[int, ...], led: bool) -> Grammar:
    """A form that cannot be compiled here, though it could be where it was asked for, lets nothing be
    written: its sequence fails, alone.
    """
    try:
        return AnswerAutomaton(vocabulary, form, ends, led)
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
