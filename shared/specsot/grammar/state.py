"""The grammar that constrains one sequence: the skeleton language, or the form that its caller asked for.

Also the record of how a base model tokenizes the bytes that grammars determine.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from specsot.core.frames import Opening
from specsot.core.skeleton import MAX_LIST_POINTS, PlanRules
from specsot.core.vocabulary import Vocabulary
from specsot.errors import InvalidRequest, ModelError
from specsot.grammar.answers import COMPILER, AnswerAutomaton, Choices, Mask
from specsot.grammar.automaton import MAX_CACHED_TABLES, PlanTables, TokenAutomaton, tables_of
from specsot.grammar.lower_bound import LowerBound
from specsot.grammar.name_patterns import read_enforceable
from specsot.grammar.paths import PathCheck
from specsot.grammar.sentences import sentence_ends
from specsot.grammar.structural_tag import extended, read_tag
from specsot.grammar.tag_automaton import TagAutomaton
from specsot.params import Form

T = TypeVar("T")

# Tokens. Bounds the forced tokens that are looked up at a time. Untuned.
LONGEST_FORCED_RUN = 16
# Entries. Bounds the recorded forced stretches, because clients' forms bring new ones without end. Untuned.
MAX_FORCED_RUNS = 4096
# Forms. Bounds the cache of compiled forms; the least recently used is dropped. Untuned.
MAX_CACHED_FORMS = 8
# Points. The lengths of lists, in the order in which their places are explored: first those of plans to
# questions that name no number, then what questions ask for. A list of 6 points has 46 places, and all lists
# together have 600: the longest first, the usual one would be ready last.
LIST_LENGTHS: Final = (7, 8, 5, 3, 10, 4, 6, 2, 9, 12, 11)
# Seconds. How long the compiler's thread rests after each place that it explores ahead of requests: while
# nothing is computed in the process, and otherwise. Exploring a place takes 3 to 8 ms, most of it with
# Python's lock, and the vocabulary of Qwen has 1,500 places. With rests of 50 ms at all times, a fifth of the
# slow steps of a GPU in the first minute after a start were found beside it (64 clients, 1.5B, H200). A place
# that a sequence needs earlier is explored at once. Untuned.
IDLE_REST_SECONDS: Final = 0.005
BUSY_REST_SECONDS: Final = 1.0
# Seconds. If nothing was computed for so long, no sequence is being written. Untuned.
QUIET_SECONDS: Final = 0.2
# Seconds. How long `prebuild` waits before it computes anything: longer than an answer's first token takes
# after a ring of a small model has formed on two cores (1.5B in 8 bits: about one second). The tables take a
# second of processor time, most of it with Python's lock, so that they would double that time. Untuned.
BEGIN_SECONDS: Final = 3.0
# The rules of a list with the default options of a request.
LISTED = PlanRules(False, max_points=MAX_LIST_POINTS, listed=True)


class Grammar(Protocol):
    """The interface of a constraint over tokens; `TokenAutomaton` and `AnswerAutomaton` have it.

    The type of a state is private to the constraint; states are immutable for callers and may be kept.
    """

    @property
    def vocabulary(self) -> Vocabulary:
        """The bytes of every token id. Masks have one entry per id."""
        ...

    def start(self) -> Any:
        """Return the state before the first token of the output."""
        ...

    def advance(self, state: Any, token: int, /) -> Any:
        """Return the state after a token, or None if the constraint forbids the token. Ignores budgets.

        state: the state before the token.
        token: token id.
        """
        ...

    def finished(self, state: Any, /) -> bool:
        """Return whether the output is complete, so that no token may follow.

        state: the state after the tokens so far.
        """
        ...

    def path_check(self, state: Any, /) -> PathCheck:
        """Return a check for many paths from one state, such as the paths of a draft tree.

        The check returns whether the constraint allows a path, regardless of budgets. A path may be checked
        only after the path without its last token.

        state: the state before the first token of every path.
        """
        ...

    def forced(self, state: Any, /) -> Sequence[int]:
        """Return tokens for the bytes that the constraint determines from a state on, or no tokens if it
        leaves a choice.

        state: the state before the first of these tokens.
        """
        ...

    def mask(self, state: Any, remaining: int, /) -> Mask:
        """Return which tokens may follow: [vocabulary size], read-only. All False after the end.

        state: the state before the token.
        remaining: number of tokens that the sequence may still generate, this one included.
        """
        ...

    def allows(self, state: Any, token: int, remaining: int, /) -> bool:
        """Return the entry of `mask` for one token. False for every token after the end.

        state: the state before the token.
        token: token id.
        remaining: number of tokens that the sequence may still generate, this one included.
        """
        ...


def grammar_of(vocabulary: Vocabulary, opening: Opening, guided: bool = True) -> Future[Grammar] | None:
    """Return the grammar of a sequence as a future that is done once the grammar is built.

    Returns None for free text. The future fails with ModelError if the vocabulary cannot spell a skeleton,
    and with InvalidRequest if the form cannot be compiled in this process.

    vocabulary: the bytes of every token id.
    opening: the sequence, whose `plan` or `form` is the constraint, and whose `stop_ids` may end the output.
    guided: True if the grammar of a form must also lead the answer to its end within its budget. A drafter,
        whose tokens are verified anyway, does not need that.

    If the sequence has both a `plan` and a `form`, the plan counts. Compiling runs on another thread unless
    the result is cached.
    """
    if opening.plan:
        return _planning(vocabulary, opening.plan, opening.stop_ids)
    if opening.form is None:
        return None
    return _compiling(vocabulary, opening.form, opening.stop_ids, guided)


@functools.lru_cache(maxsize=MAX_CACHED_TABLES)
def prebuild(vocabulary: Vocabulary, idle_seconds: Callable[[], float] | None = None) -> Future[None]:
    """Compute what the grammars of most requests need, so that their first steps do not wait for it. Return a
    future that is done at the end.

    The grammars can be used before the future is done: a request that needs them earlier lets them be built
    at once. Further calls with the same arguments return the same future; all calls of a process should have
    the same `idle_seconds`. The future is never done if the process ends before. First come the tables, for
    all rules; then what the masks of lists of any length are made of. Of plans in markers, whose lines have
    more places, only the first line is computed: its titles serve all lines.

    vocabulary: the bytes of every token id.
    idle_seconds: returns for how long nothing was computed in this process. The computation begins after
        BEGIN_SECONDS, and rests after each place: IDLE_REST_SECONDS while the process has been idle for
        QUIET_SECONDS, and BUSY_REST_SECONDS otherwise. With None, it begins at once and never rests.

    Only tables without tools are computed. If the vocabulary cannot spell a skeleton, the future is done all
    the same.
    """
    explored: Future[None] = Future()
    places = _explore(vocabulary)

    def rest_seconds() -> float:
        """Return how long to rest now."""
        if idle_seconds is None:
            return 0.0
        return IDLE_REST_SECONDS if idle_seconds() >= QUIET_SECONDS else BUSY_REST_SECONDS

    def explore_next() -> None:
        """Explore one more place on the compiler's thread, and submit the next call after a rest; or, if no
        place is left, complete the future.
        """
        if next(places, explored) is explored:
            explored.set_result(None)
        else:
            run_later(rest_seconds(), submit_next)

    def submit_next() -> None:
        """Submit the next call, unless the process ends: then the pool refuses new work."""
        with suppress(RuntimeError):
            COMPILER.submit(explore_next)

    def begin() -> None:
        """Build the tables, then explore place after place. Nothing happens if the process ends."""
        with suppress(RuntimeError):
            _tables(vocabulary, ()).add_done_callback(lambda _: submit_next())

    run_later(BEGIN_SECONDS if idle_seconds else 0, begin)
    return explored


def run_later(seconds: float, call: Callable[[], None]) -> None:
    """Call a function after some seconds, on a thread of its own. If the process ends before, it is never
    called.

    seconds: how long to wait.
    call: the function.
    """
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()


def _explore(vocabulary: Vocabulary) -> Iterator[None]:
    """Find the tokens that close sentences, then explore the places of the usual skeletons, and yield None
    after each of these, so that the forms of other requests need not wait for all of them.

    Yields None only once if the vocabulary cannot spell a skeleton.

    vocabulary: the bytes of every token id.

    The skeletons are lists of all LIST_LENGTHS, and plans of one point with and without a direct answer.
    """
    sentences = sentence_ends(vocabulary)
    _ = sentences.closes, sentences.breaks
    yield
    lists = [replace(LISTED, max_points=points) for points in LIST_LENGTHS]
    # A vocabulary that cannot spell a skeleton has nothing to explore; its sequences fail one by one.
    with suppress(ModelError):
        for rules in (*lists, PlanRules(direct=True, max_points=1), PlanRules(direct=False, max_points=1)):
            yield from TokenAutomaton(vocabulary, rules).explore()


@functools.lru_cache(maxsize=MAX_CACHED_TABLES)
def _tables(vocabulary: Vocabulary, tools: tuple[str, ...]) -> Future[PlanTables]:
    """Start building the tables of a tokenizer, and return them as a future. The whole process shares them.

    vocabulary: the bytes of every token id.
    tools: the names that may be written in TOOL besides None.
    """
    return COMPILER.submit(tables_of, vocabulary, tools)


def _planning(vocabulary: Vocabulary, rules: PlanRules, ends: tuple[int, ...]) -> Future[Grammar]:
    """Return the grammar of a skeleton as a future, which is done at once if the tables of its tokenizer
    exist.

    The future fails with ModelError if the vocabulary cannot spell a skeleton.

    vocabulary: the bytes of every token id.
    rules: the rules of the skeleton.
    ends: tokens that may end a numbered list.

    If the tables do not exist, they are built on the compiler's thread.
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
def _compiling(vocabulary: Vocabulary, form: Form, ends: tuple[int, ...], guided: bool) -> Future[Grammar]:
    """Start compiling a form, and return its grammar as a future, which the whole process shares.

    The future fails if the form cannot be compiled in this process, although the master could compile it;
    then only the sequence fails.

    vocabulary: the bytes of every token id.
    form: the constraint on the answer.
    ends: tokens that may end the answer.
    guided: True if masks must lead the answer to its end when its budget gets small.
    """
    kind = TagAutomaton if form.kind == "structural_tag" else AnswerAutomaton
    return COMPILER.submit(kind, vocabulary, form, ends, guided)


@functools.lru_cache(maxsize=MAX_CACHED_FORMS)
def fewest_tokens(vocabulary: Vocabulary, form: Form, ends: tuple[int, ...]) -> int | None:
    """Return a number of tokens, an end token included, which every answer of a form needs at least.

    Returns None if nothing is known, which is so for regular expressions, and if the form is invalid. Takes
    up to a second for the largest forms, so it must not be called on an event loop.

    vocabulary: the bytes of every token id.
    form: the constraint on the answer.
    ends: tokens that may end the answer.

    The shortest answer may need more tokens, except of a choice, whose texts are known. A text that the
    vocabulary cannot spell counts with one token more than it has bytes.
    """
    try:
        match form.kind:
            case "choice":
                return Choices(vocabulary, form.texts).min_tokens() + 1
            case "json_object":
                bound = 1
            case "json_schema":
                bound = LowerBound(vocabulary).of_schema(read_enforceable(form.texts[0]))
            case "structural_tag":
                tag = read_tag(form.texts[0])
                tokens = {token: text for token, text in tag.tokens.items() if token not in ends}
                bound = LowerBound(extended(vocabulary, tokens)).of_parts(tag.parts)
            case _:
                return None
    except (InvalidRequest, RecursionError, UnicodeError):
        return None
    return max(bound, 1) + 1


class IsolatedGrammar:
    """The grammar of one sequence, whose errors end only that sequence. Has the methods of `Grammar`.

    failure: the first error in words, on one line, or None. After an error, methods return values that forbid
        every token, which have no meaning.
    """

    def __init__(self, find_grammar: Callable[[], Grammar]) -> None:
        """Find the grammar.

        find_grammar: returns the grammar. An error that it raises is recorded as the failure.
        """
        self.failure: str | None = None
        self._grammar = self._ask(find_grammar, None)

    def start(self) -> Any:
        """Return the state before the first token of the output; None after a failure."""
        return self._ask(lambda: self._known.start(), None)

    def advance(self, state: Any, token: int) -> Any:
        """Return the state after a token, or None if the grammar forbids the token or has failed.

        state: the state before the token.
        token: token id.
        """
        return self._ask(lambda: self._known.advance(state, token), None)

    def path_check(self, state: Any) -> PathCheck:
        """Return a check for many paths from one state. After a failure, the check allows no path.

        state: the state before the first token of every path.

        An error in the check becomes the failure, and the path is not allowed.
        """
        check = self._ask(lambda: self._known.path_check(state), lambda path: False)
        return lambda path: self._ask(lambda: check(path), False)

    def finished(self, state: Any) -> bool:
        """Return whether the output is complete, so that no token may follow; False after a failure.

        state: the state after the tokens so far.
        """
        return self._ask(lambda: self._known.finished(state), False)

    def forced(self, state: Any) -> Sequence[int]:
        """Return tokens for the bytes that the grammar determines; () if it leaves a choice or has failed.

        state: the state before the first of these tokens.
        """
        return self._ask(lambda: self._known.forced(state), ())

    def allows(self, state: Any, token: int, remaining: int) -> bool:
        """Return the entry of `mask` for one token; False after a failure.

        state: the state before the token.
        token: token id.
        remaining: number of tokens that the sequence may still generate, this one included.
        """
        return self._ask(lambda: self._known.allows(state, token, remaining), False)

    def mask(self, state: Any, remaining: int) -> Mask:
        """Return which tokens may follow: [vocabulary size]. All False after the end and after a failure.

        state: the state before the token.
        remaining: number of tokens that the sequence may still generate, this one included.
        """
        found = self._ask(lambda: self._known.mask(state, remaining), None)
        return np.zeros(len(self.vocabulary), dtype=np.bool_) if found is None else found

    @property
    def vocabulary(self) -> Vocabulary:
        """The bytes of every token id. Must not be read if the grammar was not found."""
        return self._known.vocabulary

    @property
    def _known(self) -> Grammar:
        """Return the grammar. Raises AssertionError if it was not found."""
        assert self._grammar is not None
        return self._grammar

    def _ask(self, query: Callable[[], T], default: T) -> T:
        """Return what a query of the grammar returns; after a failure, and if the query raises an error,
        `default`.

        The first error becomes the failure. KeyboardInterrupt and SystemExit are not caught.

        query: called without arguments unless the grammar has failed.
        default: what to return after a failure.

        The failure has the error's class and the first line of its message. Later calls do not ask the
        grammar any more.
        """
        if self.failure is not None:
            return default
        try:
            return query()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # A panic of the library is not an Exception.
            self.failure = f"{type(error).__name__}: {error}".splitlines()[0]
            return default


class SpellingHabits:
    """Records with which token one base model begins each forced run of bytes.

    A grammar determines bytes, but the model chooses how to tokenize them. If the grammar determines `.<`,
    the greedy tokenization may be the token ".<", while the model writes "." first; drafts then follow the
    model. All sequences of the model share the record. The least recently recorded runs are dropped, so that
    at most MAX_FORCED_RUNS remain.
    """

    def __init__(self) -> None:
        """Start with an empty record."""
        self._firsts: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def record(self, grammar: Grammar, state: Any, token: int) -> None:
        """Record that the base model generated `token` in this state. Nothing is recorded if the grammar
        leaves a choice.

        grammar: the grammar of the sequence.
        state: the state before the token.
        token: the token that the base model generated.

        A later record of the same run replaces the earlier one. Beyond MAX_FORCED_RUNS, the run that was
        recorded longest ago is dropped.
        """
        if run := _forced_run(grammar, state):
            self._firsts[run] = token
            self._firsts.move_to_end(run)
            if len(self._firsts) > MAX_FORCED_RUNS:
                self._firsts.popitem(last=False)

    def forced(self, grammar: Grammar, state: Any, max_tokens: int = LONGEST_FORCED_RUN) -> tuple[int, ...]:
        """Return the tokens, at most `max_tokens`, that the grammar determines from this state on; () if it
        leaves a choice.

        Each run begins with the token that the model chose for it last, or with the greedy one.

        grammar: the grammar of the sequence.
        state: the state from which on tokens are determined. None, after a forbidden token, yields ().
        max_tokens: the largest number of tokens to return.

        The result may continue over several runs. Nothing is recorded. A recorded token that the grammar
        forbids in this state is still returned, as the last one.
        """
        chain: list[int] = []
        while len(chain) < max_tokens and (run := _forced_run(grammar, state)):
            chain.append(self._firsts.get(run, run[0]))
            state = grammar.advance(state, chain[-1])
        return tuple(chain)


def _forced_run(grammar: Grammar, state: Any) -> tuple[int, ...]:
    """Return the greedy tokens of the bytes that the grammar determines; empty if it leaves a choice, and
    after the end.

    grammar: the grammar of the sequence.
    state: the state before the first of these tokens, or None after a forbidden token, for which the result
        is empty.
    """
    return () if state is None or grammar.finished(state) else tuple(grammar.forced(state))
