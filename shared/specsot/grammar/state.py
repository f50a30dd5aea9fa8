"""The grammar that constrains one sequence: the skeleton language, or the form that its caller asked for.

Also the record of how a base model tokenizes the bytes that grammars determine.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np

from specsot.core.frames import Opening
from specsot.core.skeleton import MAX_LIST_POINTS, PlanRules
from specsot.core.vocabulary import Vocabulary
from specsot.errors import ModelError
from specsot.grammar.answers import COMPILER, AnswerAutomaton, Mask
from specsot.grammar.automaton import MAX_CACHED_TABLES, PlanTables, TokenAutomaton, tables_of
from specsot.grammar.paths import PathCheck
from specsot.grammar.tag_automaton import TagAutomaton
from specsot.params import Form

T = TypeVar("T")

# Tokens. Bounds the forced tokens that are looked up at a time. Untuned.
LONGEST_FORCED_RUN = 16
# Entries. Bounds the recorded forced stretches, because clients' forms bring new ones without end. Untuned.
MAX_FORCED_RUNS = 4096
# Forms. Bounds the cache of compiled forms; the least recently used is dropped. Untuned.
MAX_CACHED_FORMS = 8
# The rules of a list with the default options of a request.
LISTED = PlanRules(False, max_points=MAX_LIST_POINTS, listed=True)


class Grammar(Protocol):
    """The interface of a constraint over tokens (TokenAutomaton, AnswerAutomaton).

    The type of a state is private to the constraint. `advance` returns the state after a token, or None if
    the token is forbidden. `mask` returns which tokens may follow if so many may still be generated. `forced`
    returns the tokens for the bytes that the grammar determines, and () if it leaves a choice.
    """

    @property
    def vocabulary(self) -> Vocabulary: ...
    def start(self) -> Any: ...
    def advance(self, state: Any, token: int, /) -> Any: ...
    def finished(self, state: Any, /) -> bool: ...
    def path_check(self, state: Any, /) -> PathCheck:
        """Return a check for many paths from one state, such as the paths of a draft tree."""
        ...

    def forced(self, state: Any, /) -> Sequence[int]: ...
    def mask(self, state: Any, remaining: int, /) -> Mask: ...
    def allows(self, state: Any, token: int, remaining: int, /) -> bool:
        """Return the entry of `mask` for one token."""
        ...


def grammar_of(vocabulary: Vocabulary, opening: Opening, led: bool = True) -> Future[Grammar] | None:
    """Return the grammar of a sequence as a future that is done once the grammar is built.

    Returns None for free text.

    led: True if the grammar of a form must also lead the answer to its end within its budget. A drafter,
        whose tokens are verified anyway, does not need that.
    """
    if opening.plan:
        return _planning(vocabulary, opening.plan, opening.stop_ids)
    if opening.form is None:
        return None
    return _compiling(vocabulary, opening.form, opening.stop_ids, led)


@functools.lru_cache(maxsize=MAX_CACHED_TABLES)
def prebuild(vocabulary: Vocabulary) -> Future[None]:
    """Start computing what the grammars of most requests need, so that their first steps do not wait for it.

    Returns a future that is done once everything is computed; the grammars can be used before. First come the
    tables, for all rules; then what the masks of lists of any length are made of. Of plans in markers, whose
    lines have more places, only the first line is computed: its titles serve all lines.
    """
    tables = _tables(vocabulary, ())
    explored: Future[None] = Future()
    places = _explore(vocabulary)

    def explore_next() -> None:
        if next(places, explored) is explored:
            explored.set_result(None)
            return
        # The pool refuses new work once the process ends.
        with suppress(RuntimeError):
            COMPILER.submit(explore_next)

    tables.add_done_callback(lambda _: explore_next())
    return explored


def _explore(vocabulary: Vocabulary) -> Iterator[None]:
    """Explore the places of the usual skeletons, and yield after each place, so that the forms of other
    requests need not wait for all of them.
    """
    lists = [replace(LISTED, max_points=points) for points in range(MAX_LIST_POINTS, 1, -1)]
    # A vocabulary that cannot spell a skeleton has nothing to explore; its sequences fail one by one.
    with suppress(ModelError):
        for rules in (*lists, PlanRules(direct=True, max_points=1), PlanRules(direct=False, max_points=1)):
            yield from TokenAutomaton(vocabulary, rules).explore()


@functools.lru_cache(maxsize=MAX_CACHED_TABLES)
def _tables(vocabulary: Vocabulary, tools: tuple[str, ...]) -> Future[PlanTables]:
    """Start building the tables of a tokenizer, which the whole process shares."""
    return COMPILER.submit(tables_of, vocabulary, tools)


def _planning(vocabulary: Vocabulary, rules: PlanRules, ends: tuple[int, ...]) -> Future[Grammar]:
    """Return the grammar of a skeleton. It is done at once if the tables of its tokenizer exist.

    The future fails if the vocabulary cannot spell a skeleton.
    """
    tables = _tables(vocabulary, rules.tools)
    if not tables.done():
        return COMPILER.submit(TokenAutomaton, vocabulary, rules, ends)
    found: Future[Grammar] = Future()
    try:
        found.set_result(TokenAutomaton(vocabulary, rules, ends, tables.result()))
    except ModelError as error:
        found.set_exception(error)
    return found


@functools.lru_cache(maxsize=MAX_CACHED_FORMS)
def _compiling(vocabulary: Vocabulary, form: Form, ends: tuple[int, ...], led: bool) -> Future[Grammar]:
    """Compile a form, which the whole process shares.

    The future fails if the form cannot be compiled in this process, although the master could compile it;
    then only the sequence fails.
    """
    kind = TagAutomaton if form.kind == "structural_tag" else AnswerAutomaton
    return COMPILER.submit(kind, vocabulary, form, ends, led)


def fewest_tokens(vocabulary: Vocabulary, form: Form, ends: tuple[int, ...], most: int) -> int | None:
    """Return the number of tokens of the shortest answer of a form, its end token included.

    Returns None if no answer of at most `most` tokens is known, and if the form cannot be compiled in this
    process. Blocks while the form is compiled, so it must not be called on an event loop.
    """
    try:
        built = _compiling(vocabulary, form, ends, True).result()
        return built.fewest(most) if isinstance(built, AnswerAutomaton) else None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # A panic of the library is not an Exception.
        return None


class IsolatedGrammar:
    """The grammar of one sequence, whose errors end only that sequence.

    The methods are those of `Grammar`.

    failure: the first error in words, or None. After an error, methods return values that forbid every token,
        which have no meaning.
    """

    def __init__(self, find: Callable[[], Grammar]) -> None:
        """find: returns the grammar. An error that it raises is recorded as the failure."""
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
        except BaseException as error:  # A panic of the library is not an Exception.
            self.failure = f"{type(error).__name__}: {error}".splitlines()[0]
            return otherwise


class SpellingHabits:
    """Records with which token one base model begins each forced stretch of text.

    A grammar determines bytes, but the model chooses how to tokenize them. If the grammar determines `.<`,
    the greedy tokenization may be the token ".<", while the model writes "." first; drafts then follow the
    model. All sequences of the model share the record. The least recently recorded stretches are dropped.
    """

    def __init__(self) -> None:
        self._firsts: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._firsts)

    def note(self, rules: Grammar, state: Any, token: int) -> None:
        """Record that the base model generated `token` in this state."""
        if stretch := _stretch(rules, state):
            self._firsts[stretch] = token
            self._firsts.move_to_end(stretch)
            if len(self._firsts) > MAX_FORCED_RUNS:
                self._firsts.popitem(last=False)

    def forced(self, rules: Grammar, state: Any, most: int = LONGEST_FORCED_RUN) -> tuple[int, ...]:
        """Return the tokens, at most `most`, that the grammar determines from this state on.

        Each stretch begins with the token that the model chose for it last, or with the greedy one.
        """
        chain: list[int] = []
        while len(chain) < most and (stretch := _stretch(rules, state)):
            chain.append(self._firsts.get(stretch, stretch[0]))
            state = rules.advance(state, chain[-1])
        return tuple(chain)


def _stretch(rules: Grammar, state: Any) -> tuple[int, ...]:
    """Return the greedy tokens of the bytes that the grammar determines; empty after the end."""
    return () if state is None or rules.finished(state) else tuple(rules.forced(state))
