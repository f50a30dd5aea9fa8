"""Token masks that hold an answer to the form its caller asked for, and end it within its budget.

Forms (schema, regex, JSON) are compiled to llguidance matchers, which move along a text and its drafts.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from specsot.core.vocabulary import Spelling, Vocabulary, spelling_of
from specsot.grammar.paths import PathCheck
from specsot.grammar.reasons import reason_in
from specsot.grammar.schemas import read_schema
from specsot.params import Form, refuse

Mask = NDArray[np.bool_]


class Choices:
    """The texts, and in how few tokens what is left of each can be written: counted now, not within a lap."""

    def __init__(
        self, vocabulary: Vocabulary, texts: Iterable[str], spelling: Spelling | None = None
    ) -> None:
        self._bytes = vocabulary.bytes
        self._texts = [text.encode() for text in texts]
        spelling = spelling or spelling_of(vocabulary)
        self._counts = {text: spelling.counts(text, ceiling=len(text) + 1) for text in self._texts}

    def fewest(self) -> int:
        """Tokens of the text that takes the fewest."""
        return min(counts[0] for counts in self._counts.values())

    def fit(self, allowed: Mask, written: bytes, remaining: int) -> Mask:
        """Those of the allowed tokens behind which a text can be ended with remaining - 1 more."""
        open = [text for text in self._texts if text.startswith(written)]
        if all(len(text) - len(written) <= remaining for text in open):
            return allowed
        tokens = np.flatnonzero(allowed).tolist()
        begun = len(written)
        sizes = {len(self._bytes[token] or b"") for token in tokens}
        near = {
            text[begun : begun + size]
            for text in open
            for size in sizes
            if begun + size <= len(text) and self._counts[text][begun + size] < remaining
        }
        fitting = np.zeros_like(allowed)
        fitting[[token for token in tokens if (self._bytes[token] or b"") in near]] = True
        return fitting


FARTHEST = 128  # tokens of a budget below which the closing of a text is planned; not measured
_WATCHED = 48  # tokens to spare below which nothing is begun that cannot be closed; not measured
_SPARE = 8  # tokens to spare below which only closing tokens are allowed; not measured
_TRIED = 16  # tokens at a place that begin something and whose closings are computed; not measured

# What brings a JSON text nearer to its end comes first.
_ORDER = b'}]":,0123456789[{-'
_BEGINNING = frozenset(b'{[",')


@functools.lru_cache(maxsize=4)
def closing_of(vocabulary: Vocabulary) -> Closing:
    """The one of this vocabulary, shared by all forms."""
    return Closing(vocabulary)


class Closing:
    """Shortest ways to the end, over the tokens of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        texts = vocabulary.bytes
        ids = {text: token for token, text in reversed(list(enumerate(texts))) if text}
        self._order = _ids(ids, _ORDER)
        self._string = _ids(ids, b'":')
        self._sizes = np.array([len(text or b"") for text in texts], dtype=np.int32)
        self._begin = np.array([not _BEGINNING.isdisjoint(text or b"") for text in texts], dtype=np.bool_)
        self._quote = np.array([b'"' in (text or b"") for text in texts], dtype=np.bool_)

    def lead(self, place: MatcherNode, allowed: Mask, remaining: int, may_stop: bool) -> Mask:
        """Of the allowed tokens those behind which the end can be reached in time, as far as is known.

        may_stop: there are tokens that end a text which may go on.
        """
        way = self.find(place)
        if way is None or remaining > len(way) + _WATCHED or not (way or may_stop):
            return allowed
        if remaining > len(way) + _SPARE:
            return self._without_the_endless(place, allowed, remaining)
        only = np.zeros_like(allowed)
        only[list(way[:1])] = True
        return only

    def _without_the_endless(self, place: MatcherNode, allowed: Mask, remaining: int) -> Mask:
        """Without the tokens that begin more than can be ended; within a string that takes a quote."""
        begin = self._quote if self._in_string(place.walker.bits(place)) else self._begin
        fitting = allowed & ~begin
        for token in np.flatnonzero(allowed & begin)[:_TRIED].tolist():
            ahead = place.walker.step(place, token)
            way = None if ahead is None else self.find(ahead)
            fitting[token] = way is not None and len(way) < remaining
        return fitting

    def find(self, place: MatcherNode) -> tuple[int, ...] | None:
        """Tokens from `place` to where the text may end; None where no such way was found."""
        if place.behind and place.behind.way and place.behind.way[0] == place.token:
            place.way = place.behind.way[1:]
        if place.way is None:
            place.way = self.search(place) or ()
        return place.way if place.way or place.walker.accepts(place) else None

    def search(self, place: MatcherNode, most: int = FARTHEST) -> tuple[int, ...] | None:
        """The same of at most so many tokens, whatever was found before."""
        way: list[int] = []
        walker = place.walker
        here = place
        while not (here.over or walker.accepts(here)):
            token = self._next(walker, here) if len(way) < most else None
            ahead = None if token is None else walker.step(here, token)
            if token is None or ahead is None:
                return None
            way.append(token)
            here = ahead
        return tuple(way)

    def _next(self, walker: MatcherCursor, place: MatcherNode) -> int | None:
        """What JSON ends with, if it may follow; else the longest token, which ends what is spelled out."""
        bits = walker.bits(place)
        if self._in_string(bits):
            return self._string[0]
        for token in self._order:
            if _may(bits, token):
                return token
        raw = np.frombuffer(bits, dtype=np.uint8)
        ids = np.flatnonzero(np.unpackbits(raw, count=len(self._sizes), bitorder="little"))
        return int(ids[self._sizes[ids].argmax()]) if len(ids) else None

    def _in_string(self, bits: bytes) -> bool:
        """Only there both a quote and a colon may follow."""
        return len(self._string) == 2 and all(_may(bits, token) for token in self._string)


def _ids(ids: dict[bytes, int], singles: bytes) -> list[int]:
    """Tokens of one byte each, as far as there are any."""
    return [ids[text] for text in (bytes([byte]) for byte in singles) if text in ids]


def _may(bits: bytes, token: int) -> int:
    return bits[token >> 3] >> (token & 7) & 1


_JSON = ("json_object", "json_schema")
# Tokens of one byte that are tried first: two that may follow begin differently, so that nothing is forced.
_PROBES = (b"a", b" ", b'"', b",")
_MOST_FORCED = 64  # tokens that may follow where all of them spell one text; not measured


class AnswerAutomaton:
    """One form over the tokens of one vocabulary. Different texts may be walked by different threads.

    ends: tokens that end an answer; they may follow where the form is complete.
    led:  the answer is led to its end when its budget gets small, which takes looking ahead.
    Raises InvalidRequest when the library cannot make sense of the form.
    """

    def __init__(
        self, vocabulary: Vocabulary, form: Form, ends: tuple[int, ...] = (), led: bool = True
    ) -> None:
        self.vocabulary = vocabulary
        self.form = form
        self._matchers = Matchers(functools.partial(compile_form, vocabulary, form), COMPILER)
        self._end_ids = frozenset(end for end in ends if end < len(vocabulary))
        self._ends = np.array(sorted(self._end_ids), dtype=np.int64)
        self._writes = _writing(vocabulary)
        self._probes = {text: token for token, text in enumerate(vocabulary.bytes) if text in _PROBES}
        self._choices = Choices(vocabulary, form.texts) if led and form.kind == "choice" else None
        self._closing = closing_of(vocabulary) if led and form.kind in _JSON else None

    def start(self) -> MatcherNode:
        return MatcherCursor(self._matchers).root

    def finished(self, place: MatcherNode) -> bool:
        return place.over

    def advance(self, place: MatcherNode, token: int) -> MatcherNode | None:
        """The place behind `token`, or None when the form forbids it. Budgets are not looked at."""
        if place.over or not self._is_text(token):
            return None
        ahead = place.walker.step(place, token)
        if ahead is not None and not len(self._ends):
            ahead.over = ahead.over or self._full(ahead)
        return ahead

    def path_check(self, place: MatcherNode) -> PathCheck:
        """See `Grammar.path_check`. The matcher stays where it is, which is what makes this cheap."""
        return lambda path: self._is_text(path[-1]) and place.walker.accepts_path(place, path)

    def allows(self, place: MatcherNode, token: int, remaining: int) -> bool:
        """What `mask` says of one token; without one, where budgets and ends have no say."""
        near = remaining <= FARTHEST and self._closing is not None
        if self._choices or near or token in self._end_ids:
            return bool(self.mask(place, remaining)[token])
        return self.path_check(place)((token,))

    def _is_text(self, token: int) -> bool:
        return 0 <= token < len(self._writes) and bool(self._writes[token])

    def mask(self, place: MatcherNode, remaining: int) -> Mask:
        """[V] which tokens may follow; read-only. All False when finished, and where the form got too
        complex to go on.

        remaining: tokens the answer may still have, this one included. When they become few, JSON is led
        to its end where a way there is known, and a choice to one that fits.
        """
        allowed = self._allowed(place)
        ends = self._may_end(place)
        if self._choices:
            written = b"".join(self.vocabulary.bytes[token] or b"" for token in place.tokens)
            fitting = self._choices.fit(allowed, written, remaining)
            allowed = fitting if ends or fitting.any() else allowed
        if self._closing and remaining <= FARTHEST and (ends or allowed.any()):
            allowed = self._closing.lead(place, allowed, remaining, len(self._ends) > 0)
        if ends:
            allowed[self._ends] = True
        allowed.flags.writeable = False
        return allowed

    def forced(self, place: MatcherNode) -> tuple[int, ...]:
        """A token for the bytes about which the form leaves no choice from here; () when it does.

        The longest there is; the model may spell the same bytes in another way.
        """
        may_follow = self.path_check(place)
        if sum(may_follow((token,)) for token in self._probes.values()) > 1:
            return ()
        allowed = self._allowed(place)
        if np.count_nonzero(allowed) > _MOST_FORCED or self._may_end(place):
            return ()
        tokens = np.flatnonzero(allowed)[::-1].tolist()
        texts = {self.vocabulary.bytes[token] or b"": token for token in tokens}
        longest = max(texts, key=len, default=b"")
        return (texts[longest],) if texts and all(map(longest.startswith, texts)) else ()

    def way(self, place: MatcherNode) -> tuple[int, ...] | None:
        """Tokens with which JSON can be ended from here; None where no way is known."""
        return self._closing.find(place) if self._closing else None

    def fewest(self, most: int) -> int | None:
        """Tokens of the shortest answer to which a small budget leads, its end token with them; None where no
        such answer of at most so many is known.
        """
        if self._choices:
            return self._choices.fewest() + 1
        way = self._closing.search(self.start(), most) if self._closing else None
        return None if way is None else len(way) + 1

    def _allowed(self, place: MatcherNode) -> Mask:
        """What the form alone allows, ends left out."""
        if place.over:
            return np.zeros(len(self._writes), dtype=np.bool_)
        bits = np.frombuffer(place.walker.bits(place), dtype=np.uint8)
        allowed = np.unpackbits(bits, count=len(self._writes), bitorder="little").view(np.bool_)
        return allowed & self._writes

    def _may_end(self, place: MatcherNode) -> bool:
        return len(self._ends) > 0 and not place.over and place.walker.accepts(place)

    def _full(self, place: MatcherNode) -> bool:
        """Complete, and nothing may follow: the library does not always see it at once."""
        return place.walker.accepts(place) and not self._allowed(place).any()


@functools.lru_cache(maxsize=4)
def _writing(vocabulary: Vocabulary) -> Mask:
    """[V] which tokens are text."""
    return np.array([bool(text) for text in vocabulary.bytes], dtype=np.bool_)


class Matchers:
    """For any thread. A matcher comes with the number of its batch."""

    def __init__(self, compile_one: Callable[[], LLMatcher], later: Executor) -> None:
        """later: where the next batches are compiled. Raises what compiling raises."""
        self._compile = compile_one
        self._later = later
        self._batch = 0
        self._original = compile_one()
        self._next = later.submit(compile_one)
        self._lock = threading.Lock()

    def take(self, worn: int | None = None) -> tuple[int, LLMatcher]:
        """A matcher before its first token, of a batch that is not the worn one."""
        with self._lock:
            if worn == self._batch:
                self._renew()
            return self._batch, self._original.deep_copy()

    def _renew(self) -> None:
        """Waits for the next one only if it is being compiled right now; one that still waits for others is
        sooner compiled here.
        """
        self._original = self._compile() if self._next.cancel() else self._next.result()
        self._batch, self._next = self._batch + 1, self._later.submit(self._compile)


STACK = 16 << 20  # bytes of the compiling thread's stack: schemas nest deeply; not measured
COMPILER = ThreadPoolExecutor(1, "forms")  # whoever compiles for laps does it here, one form at a time

# The model chooses its own spelling of what is forced; the library's default is one spelling only.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
# JSON on one line, a space where the model wants one: indented, most tokens are white space;
# without any space SmolLM2 writes worse values.
_JSON_STYLE = {"whitespace_pattern": " "}
_SCHEMA_STYLE = {**_JSON_STYLE, "coerce_one_of": True}  # See `schemas.ONE_OF`.


@functools.lru_cache(maxsize=4)
def library_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """The library's view of a vocabulary, with one more id that stands for the end."""
    return LLTokenizer(TokenizerWrapper(_Words(vocabulary)), n_vocab=len(vocabulary) + 1)


def compile_form(vocabulary: Vocabulary, form: Form, stack: int = STACK) -> LLMatcher:
    """A matcher before its first token. Raises InvalidRequest with the library's reason, on one line."""
    grammar, tokenizer = lark_of(form), library_tokenizer(vocabulary)
    made: list[LLMatcher] = []
    _run_on_stack(stack, lambda: made.append(LLMatcher(tokenizer, grammar, log_level=0, limits=_limits())))
    matcher = made[0]
    if matcher.is_error():
        raise refuse(f"{form.kind}: {reason_in(matcher.get_error())}")
    return matcher


def lark_of(form: Form) -> str:
    """The form in the library's Lark. Raises InvalidRequest for a schema that is no JSON."""
    match form.kind:
        case "json_object":
            rule = "start: %json " + json.dumps({"type": "object", "x-guidance": _JSON_STYLE})
        case "json_schema":
            schema = read_schema(form.texts[0])
            rule = "start: %json " + json.dumps(
                {**(schema if isinstance(schema, dict) else {}), "x-guidance": _SCHEMA_STYLE}
            )
        case "regex":
            quoted = json.loads(LLMatcher.grammar_from_regex(form.texts[0]))
            rule = quoted["grammars"][0]["lark_grammar"]
        case "choice":
            rule = "start: " + " | ".join(map(json.dumps, form.texts))
    return _OPTIONS + rule


class _Words:
    """What the library asks of a tokenizer. It never has text to split: nothing is forced."""

    bos_token_id: None = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = len(vocabulary)
        self.special_token_ids = [self.eos_token_id]
        self.tokens: Sequence[bytes] = [*(text or b"" for text in vocabulary.bytes), b"<end>"]

    def __call__(self, text: bytes | str) -> list[int]:
        return []


def _limits() -> LLParserLimits:
    """Rows as wide as a thousand optional properties make them; time goes with the square of it."""
    return LLParserLimits(
        max_items_in_row=6_000, step_max_items=100_000, max_lexer_states=20_000, verbose_errors=False
    )


_starting = threading.Lock()  # the size is the process's until the thread has started


def _run_on_stack(size: int, work: Any) -> None:
    thread = threading.Thread(target=work)
    with _starting:
        usual = threading.stack_size(size)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()


T = TypeVar("T")


class MatcherNode:
    """Behind `token`, which follows `behind`; the root has neither.

    over: nothing may follow. way: tokens to the end, for those who look for one (`closing`).
    """

    __slots__ = ("behind", "depth", "over", "token", "walker", "way")

    def __init__(
        self, walker: MatcherCursor, behind: MatcherNode | None = None, token: int = -1, over: bool = False
    ):
        self.walker = walker
        self.behind = behind
        self.token = token
        self.over = over
        self.depth: int = behind.depth + 1 if behind else 0
        self.way: tuple[int, ...] | None = None

    @property
    def tokens(self) -> list[int]:
        """The way here from the root."""
        return _tokens(self, 0)


class MatcherCursor:
    """Used by one thread at a time. Where even a matcher of a new batch fails, the form is too complex."""

    def __init__(self, matchers: Matchers) -> None:
        self._matchers = matchers
        self._batch, self._matcher = matchers.take()
        self.root = self._here = MatcherNode(self)

    def step(self, place: MatcherNode, token: int) -> MatcherNode | None:
        """The place behind `token`, or None when it is forbidden there or too complex."""
        taken = self._ask(place, lambda matcher: matcher.try_consume_tokens([token]))
        if not taken or self._matcher.is_error():
            return None
        self._here = MatcherNode(self, place, token, over=self._matcher.is_stopped())
        return self._here

    def accepts_path(self, place: MatcherNode, path: Sequence[int]) -> bool:
        return self._ask(place, lambda matcher: matcher.validate_tokens(list(path))) == len(path)

    def bits(self, place: MatcherNode) -> bytes:
        """A bit for each token that may follow, the first one lowest; none where it is too complex."""
        bits = self._ask(place, LLMatcher.compute_bitmask)
        return bytes(len(bits)) if self._matcher.is_error() else bits

    def accepts(self, place: MatcherNode) -> bool:
        return self._ask(place, LLMatcher.is_accepting)

    def _ask(self, place: MatcherNode, question: Callable[[LLMatcher], T]) -> T:
        """The matcher's answer at `place`; where it fails, that of a renewed one."""
        if self._matcher.is_error():
            self._renew()
        self._move(place)
        answer = question(self._matcher)
        if self._matcher.is_error():
            self._renew()
            self._move(place)
            answer = question(self._matcher)
        return answer

    def _renew(self) -> None:
        self._batch, self._matcher = self._matchers.take(worn=self._batch)
        self._here = self.root

    def _move(self, place: MatcherNode) -> None:
        """Roll back to what both places share, and go on from there."""
        shared = _shared(self._here, place)
        if back := self._here.depth - shared.depth:
            self._matcher.rollback(back)
        if ahead := _tokens(place, shared.depth):
            self._matcher.consume_tokens(ahead)
        self._here = place


def _shared(one: MatcherNode, other: MatcherNode) -> MatcherNode:
    """The deepest place that both come through."""
    while one is not other:
        if one.depth >= other.depth:
            assert one.behind is not None, "places of two texts"
            one = one.behind
        else:
            assert other.behind is not None, "places of two texts"
            other = other.behind
    return one


def _tokens(place: MatcherNode, depth: int) -> list[int]:
    """Tokens from behind `depth` to `place`."""
    found: list[int] = []
    while place.depth > depth and place.behind is not None:
        found.append(place.token)
        place = place.behind
    return found[::-1]
