"""The grammar that one sequence is held to: the skeleton language, or the form its caller asked for.

And how a base spells what grammars force.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import numpy as np

from specsot.core.frames import Opening
from specsot.core.skeleton import MAX_LIST_POINTS, PlanRules
from specsot.core.vocabulary import Vocabulary
from specsot.grammar.answers import COMPILER, AnswerAutomaton, Mask
from specsot.grammar.automaton import automaton
from specsot.grammar.paths import PathCheck
from specsot.params import Form

T = TypeVar("T")

LONGEST_STRETCH = 16  # forced tokens that are looked up at a time; not measured
# Cached forced texts; bounds memory, as clients' forms bring ever new ones; not measured.
MAX_STRETCHES = 4096
MAX_CACHED_FORMS = 8  # compiled forms that are kept, least recently used dropped; not measured
LISTED = PlanRules(False, max_points=MAX_LIST_POINTS, listed=True)  # a list by a request's defaults
MAX_CACHED_AUTOMATA = 8  # automata of skeletons that are kept, likewise; not measured


class Grammar(Protocol):
    """What is asked of a constraint over tokens (TokenAutomaton, AnswerAutomaton); states are opaque."""

    @property
    def vocabulary(self) -> Vocabulary: ...
    def start(self) -> Any: ...
    def advance(self, state: Any, token: int, /) -> Any: ...
    def finished(self, state: Any, /) -> bool: ...
    def path_check(self, state: Any, /) -> PathCheck:
        """For many paths from one state, such as those of a tree of drafts."""
        ...

    def forced(self, state: Any, /) -> Sequence[int]: ...
    def mask(self, state: Any, remaining: int, /) -> Mask: ...
    def allows(self, state: Any, token: int, remaining: int, /) -> bool:
        """What `mask` says of one token."""
        ...


def grammar_of(vocabulary: Vocabulary, opening: Opening, led: bool = True) -> Future[Grammar] | None:
    """What holds this sequence, done once it is built; None for free text.

    led: forms look at budgets, too. Who only guesses does without.
    """
    if opening.plan:
        return _building(vocabulary, opening.plan, opening.stop_ids)
    if opening.form is None:
        return None
    return _compiling(vocabulary, opening.form, opening.stop_ids, led)


def prebuild(vocabulary: Vocabulary) -> None:
    """Begin to build what most requests are held by."""
    for rules in (LISTED, PlanRules(True), PlanRules(False)):
        _building(vocabulary, rules, ())


@functools.lru_cache(maxsize=MAX_CACHED_AUTOMATA)
def _building(vocabulary: Vocabulary, rules: PlanRules, ends: tuple[int, ...] = ()) -> Future[Grammar]:
    """Shared by everybody in the process. Fails where the vocabulary cannot write a skeleton."""
    return COMPILER.submit(_build, vocabulary, rules, ends)


def _build(vocabulary: Vocabulary, rules: PlanRules, ends: tuple[int, ...]) -> Grammar:
    """With its first mask, which is the dearest."""
    built = automaton(vocabulary, rules, ends)
    built.mask(built.start(), rules.plan_tokens)
    return built


@functools.lru_cache(maxsize=MAX_CACHED_FORMS)
def _compiling(vocabulary: Vocabulary, form: Form, ends: tuple[int, ...], led: bool) -> Future[Grammar]:
    """Shared by everybody in the process. Fails for a form that cannot be compiled here, though it could be
    where it was asked for: its sequence fails, alone.
    """
    return COMPILER.submit(AnswerAutomaton, vocabulary, form, ends, led)


def fewest_tokens(vocabulary: Vocabulary, form: Form, ends: tuple[int, ...], most: int) -> int | None:
    """Tokens of the shortest answer of this form, where one of at most so many is known; None otherwise, and
    for a form that cannot be compiled here: its sequence fails, alone. Takes a while: not for a loop.
    """
    try:
        built = _compiling(vocabulary, form, ends, True).result()
        return built.fewest(most) if isinstance(built, AnswerAutomaton) else None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a library's panic is no Exception
        return None


class IsolatedGrammar:
    """One sequence's grammar. What goes wrong with it ends that sequence, and nobody else hears of it.

    failure: what went wrong first; None while all is well. From then on no answer means anything.
    """

    def __init__(self, find: Callable[[], Grammar]) -> None:
        """find: may raise."""
        self.failure: str | None = None
        self._grammar = self._ask(find, None)

    def start(self) -> Any:
        return self._ask(lambda: self._known.start(), None)

    def advance(self, state: Any, token: int) -> Any:
        return self._ask(lambda: self._known.advance(state, token), None)

    def path_check(self, state: Any) -> PathCheck:
        check = self._ask(lambda: self._known.path_check(state), lambda path: False)
        return lambda path: self._ask(lambda: check(path), False)

    def finished(self, state: Any) -> bool:
        return self._ask(lambda: self._known.finished(state), False)

    def forced(self, state: Any) -> Sequence[int]:
        return self._ask(lambda: self._known.forced(state), ())

    def allows(self, state: Any, token: int, remaining: int) -> bool:
        return self._ask(lambda: self._known.allows(state, token, remaining), False)

    def mask(self, state: Any, remaining: int) -> Mask:
        found = self._ask(lambda: self._known.mask(state, remaining), None)
        return np.zeros(len(self.vocabulary), dtype=np.bool_) if found is None else found

    @property
    def vocabulary(self) -> Vocabulary:
        return self._known.vocabulary

    @property
    def _known(self) -> Grammar:
        assert self._grammar is not None
        return self._grammar

    def _ask(self, question: Callable[[], T], otherwise: T) -> T:
        if self.failure is not None:
            return otherwise
        try:
            return question()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a library's panic is no Exception
            self.failure = f"{type(error).__name__}: {error}".splitlines()[0]
            return otherwise


class SpellingHabits:
    """With which token one base begins each forced stretch. Shared by all its texts; those that were noted
    longest ago are forgotten.
    """

    def __init__(self) -> None:
        self._firsts: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._firsts)

    def note(self, rules: Grammar, state: Any, token: int) -> None:
        """The base wrote `token` in this state."""
        if stretch := _stretch(rules, state):
            self._firsts[stretch] = token
            self._firsts.move_to_end(stretch)
            if len(self._firsts) > MAX_STRETCHES:
                self._firsts.popitem(last=False)

    def forced(self, rules: Grammar, state: Any, most: int = LONGEST_STRETCH) -> tuple[int, ...]:
        """What must follow this state, as far as there is no choice; at most `most` tokens."""
        chain: list[int] = []
        while len(chain) < most and (stretch := _stretch(rules, state)):
            chain.append(self._firsts.get(stretch, stretch[0]))
            state = rules.advance(state, chain[-1])
        return tuple(chain)


def _stretch(rules: Grammar, state: Any) -> tuple[int, ...]:
    return () if state is None or rules.finished(state) else tuple(rules.forced(state))
