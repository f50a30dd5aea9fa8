"""Computes token masks that constrain an answer to its caller's form, and end the answer within its budget.

Forms (JSON schema, regular expression, JSON, choice) are compiled to matchers of the llguidance library. A
matcher has one current position. It is moved along the accepted tokens of a sequence and along the paths of
its draft trees by rolling back and consuming tokens, see `MatcherCursor`.
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
from specsot.grammar.name_patterns import read_enforceable
from specsot.grammar.paths import PathCheck
from specsot.grammar.reasons import reason_in
from specsot.grammar.structural_tag import lark_of_tag, read_tag
from specsot.params import Form, refuse

Mask = NDArray[np.bool_]


class Choices:
    """The texts of a choice, and how many tokens each rest of each text needs.

    The tokens are counted when the form is compiled, and not during a step.
    """

    def __init__(
        self, vocabulary: Vocabulary, texts: Iterable[str], spelling: Spelling | None = None
    ) -> None:
        self._bytes = vocabulary.bytes
        self._texts = [text.encode() for text in texts]
        spelling = spelling or spelling_of(vocabulary)
        self._counts = {text: spelling.counts(text, ceiling=len(text) + 1) for text in self._texts}

    def fewest(self) -> int:
        """Return the number of tokens of the text that needs the fewest."""
        return min(counts[0] for counts in self._counts.values())

    def fit(self, allowed: Mask, written: bytes, remaining: int) -> Mask:
        """Return the allowed tokens after which one of the texts can be completed within the budget.

        allowed: [vocabulary size], the tokens that the form allows.
        written: the bytes of the answer so far.
        remaining: number of tokens that may still be generated, this one included.
        """
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


# Tokens. The remaining budget below which the ending of a JSON text is planned. Untuned.
FARTHEST = 128
# Tokens to spare beyond the ending, below which nothing may begin that cannot be ended in time. Untuned.
_WATCHED = 48
# Tokens to spare beyond the ending, below which only tokens of the ending are allowed. Untuned.
_SPARE = 8
# Tokens. Bounds the tokens at one position that begin something and whose endings are computed. Untuned.
_TRIED = 16

# The bytes that an ending tries, in this order: those that bring a JSON text nearer to its end come first.
_ORDER = b'}]":,0123456789[{-'
_BEGINNING = frozenset(b'{[",')


@functools.lru_cache(maxsize=4)
def closing_of(vocabulary: Vocabulary) -> Closing:
    """Return the `Closing` of a vocabulary, which all forms share."""
    return Closing(vocabulary)


class Closing:
    """Finds short endings of JSON texts over the tokens of one vocabulary.

    horizon: the remaining budget in tokens below which an ending is planned.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.horizon = FARTHEST
        texts = vocabulary.bytes
        ids = {text: token for token, text in reversed(list(enumerate(texts))) if text}
        self._order = _ids(ids, _ORDER)
        self._string = _ids(ids, b'":')
        self._sizes = np.array([len(text or b"") for text in texts], dtype=np.int32)
        self._begin = np.array([not _BEGINNING.isdisjoint(text or b"") for text in texts], dtype=np.bool_)
        self._quote = np.array([b'"' in (text or b"") for text in texts], dtype=np.bool_)

    def lead(self, place: MatcherNode, allowed: Mask, remaining: int, may_stop: bool) -> Mask:
        """Return the allowed tokens after which the text can be ended in time, as far as is known.

        If no ending is known, or if the budget is much larger than the ending needs, all allowed tokens are
        returned. If hardly any token is to spare, only the next token of the ending is returned.

        remaining: number of tokens that may still be generated, this one included.
        may_stop: True if there are end tokens, which may end a text that could continue.
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
        """Return the allowed tokens without those that begin something that cannot be ended in time.

        Outside a string, these are tokens with a bracket, a brace, a comma or a quote; within a string,
        tokens with a quote.
        """
        begin = self._beginnings(place)
        fitting = allowed & ~begin
        for token in np.flatnonzero(allowed & begin)[:_TRIED].tolist():
            ahead = place.walker.step(place, token)
            way = None if ahead is None else self.find(ahead)
            fitting[token] = way is not None and len(way) < remaining
        return fitting

    def _beginnings(self, place: MatcherNode) -> Mask:
        """Return the tokens that may begin something that lengthens the ending."""
        return self._quote if self._in_string(place.walker.bits(place)) else self._begin

    def find(self, place: MatcherNode) -> tuple[int, ...] | None:
        """Return the tokens of an ending from `place`, or None if no ending was found. Cached in the
        place.
        """
        if place.behind and place.behind.way and place.behind.way[0] == place.token:
            place.way = place.behind.way[1:]
        if place.way is None:
            place.way = self.search(place) or ()
        return place.way if place.way or place.walker.accepts(place) else None

    def search(self, place: MatcherNode, most: int | None = None) -> tuple[int, ...] | None:
        """Search an ending of at most `most` tokens (the horizon by default), without the cache."""
        most = self.horizon if most is None else most
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
        """Return the next token of an ending, or None if no token may follow.

        This is the first byte of `_ORDER` that may follow. If none may, the longest allowed token is taken,
        which completes a determined text, such as a property's name, in the fewest tokens.
        """
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
        """Return whether the position is within a string: only there, both a quote and a colon may follow."""
        return len(self._string) == 2 and all(_may(bits, token) for token in self._string)


def _ids(ids: dict[bytes, int], singles: bytes) -> list[int]:
    """Return the tokens of single bytes, in their order. Bytes without a token of their own are left out."""
    return [ids[text] for text in (bytes([byte]) for byte in singles) if text in ids]


def _may(bits: bytes, token: int) -> int:
    """Return the token's bit in a bit mask: token 10 is bit 2 of byte 1."""
    return bits[token >> 3] >> (token & 7) & 1


_JSON = ("json_object", "json_schema")
# Bytes that are tried first to find out whether a form leaves a choice: if two of them may follow, it does.
_PROBES = (b"a", b" ", b'"', b",")
# Tokens. With more allowed tokens, a form is taken to leave a choice. Untuned.
_MOST_FORCED = 64


class AnswerAutomaton:
    """One form over the tokens of one vocabulary. See `TagAutomaton` for structural tags.

    Different threads may use it for different sequences at the same time.
    """

    def __init__(
        self, vocabulary: Vocabulary, form: Form, ends: tuple[int, ...] = (), led: bool = True
    ) -> None:
        """ends: tokens that end an answer. They may follow if the form is complete.

        led: True if masks must lead the answer to its end when its budget gets small. That needs a search.

        Raises InvalidRequest if the library cannot compile the form.
        """
        self.vocabulary = vocabulary
        self.form = form
        self._matchers = Matchers(functools.partial(compile_form, vocabulary, form), COMPILER)
        self._end_ids = frozenset(end for end in ends if end < len(vocabulary))
        self._ends = np.array(sorted(self._end_ids), dtype=np.int64)
        self._writes = _writing(vocabulary)
        self._probes = {text: token for token, text in enumerate(vocabulary.bytes) if text in _PROBES}
        self._choices = Choices(vocabulary, form.texts) if led and form.kind == "choice" else None
        self._closing = self._closing_of(form) if led else None

    def _closing_of(self, form: Form) -> Closing | None:
        """Return what finds the endings of the form, or None if nothing does."""
        return closing_of(self.vocabulary) if form.kind in _JSON else None

    def start(self) -> MatcherNode:
        """Return the place before the first token, with a matcher of its own."""
        return MatcherCursor(self._matchers).root

    def finished(self, place: MatcherNode) -> bool:
        """Return whether no token may follow."""
        return place.over

    def advance(self, place: MatcherNode, token: int) -> MatcherNode | None:
        """Return the place after `token`, or None if the form forbids the token. Ignores budgets."""
        if place.over or not self._is_text(token):
            return None
        ahead = place.walker.step(place, token)
        if ahead is not None and not len(self._ends):
            ahead.over = ahead.over or self._full(ahead)
        return ahead

    def path_check(self, place: MatcherNode) -> PathCheck:
        """See `Grammar.path_check`. The matcher validates a path without moving, which makes this cheap."""
        return lambda path: self._is_text(path[-1]) and place.walker.accepts_path(place, path)

    def allows(self, place: MatcherNode, token: int, remaining: int) -> bool:
        """Return the entry of `mask` for one token.

        The mask is computed only if the budget or end tokens make a difference.
        """
        near = self._closing is not None and remaining <= self._closing.horizon
        if self._choices or near or token in self._end_ids:
            return bool(self.mask(place, remaining)[token])
        return self.path_check(place)((token,))

    def _is_text(self, token: int) -> bool:
        return 0 <= token < len(self._writes) and bool(self._writes[token])

    def mask(self, place: MatcherNode, remaining: int) -> Mask:
        """Return which tokens may follow: [vocabulary size], read-only.

        All False if the answer is complete, and if the form has become too complex for the library.

        remaining: number of tokens that the answer may still have, this one included. When few remain, JSON
            is led to an ending if one is known, and a choice to a text that fits.
        """
        allowed = self._allowed(place)
        ends = self._may_end(place)
        if self._choices:
            written = b"".join(self.vocabulary.bytes[token] or b"" for token in place.tokens)
            fitting = self._choices.fit(allowed, written, remaining)
            allowed = fitting if ends or fitting.any() else allowed
        if self._closing and remaining <= self._closing.horizon and (ends or allowed.any()):
            allowed = self._closing.lead(place, allowed, remaining, len(self._ends) > 0)
        if ends:
            allowed[self._ends] = True
        allowed.flags.writeable = False
        return allowed

    def forced(self, place: MatcherNode) -> tuple[int, ...]:
        """Return one token for the bytes that the form determines from this place on; () if it leaves a
        choice.

        The longest possible token is returned. The model may tokenize the same bytes differently.
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
        """Return the tokens of an ending of JSON from this place, or None if none is known."""
        return self._closing.find(place) if self._closing else None

    def fewest(self, most: int) -> int | None:
        """Return the number of tokens of the shortest known answer, its end token included.

        Returns None if no answer of JSON with at most `most` tokens before its end token is known.
        """
        if self._choices:
            return self._choices.fewest() + 1
        way = self._closing.search(self.start(), most) if self._closing else None
        return None if way is None else len(way) + 1

    def _allowed(self, place: MatcherNode) -> Mask:
        """Return the tokens that the form allows, regardless of budgets and without end tokens."""
        if place.over:
            return np.zeros(len(self._writes), dtype=np.bool_)
        bits = np.frombuffer(place.walker.bits(place), dtype=np.uint8)
        allowed = np.unpackbits(bits, count=len(self._writes), bitorder="little").view(np.bool_)
        return allowed & self._writes

    def _may_end(self, place: MatcherNode) -> bool:
        """Return whether an end token may follow."""
        return len(self._ends) > 0 and not place.over and place.walker.accepts(place)

    def _full(self, place: MatcherNode) -> bool:
        """Return whether the form is complete and no token may follow.

        The library does not always report this immediately.
        """
        return place.walker.accepts(place) and not self._allowed(place).any()


@functools.lru_cache(maxsize=4)
def _writing(vocabulary: Vocabulary) -> Mask:
    """Return which tokens have text: [vocabulary size]."""
    return np.array([bool(text) for text in vocabulary.bytes], dtype=np.bool_)


class Matchers:
    """Copies of one compiled matcher, for any thread.

    The copies of one compiled matcher form a batch. If a copy fails, the batch is worn out: it is replaced by
    a newly compiled matcher, once for all whose copies fail.
    """

    def __init__(self, compile_one: Callable[[], LLMatcher], later: Executor) -> None:
        """compile_one: compiles the form.

        later: the executor that compiles the next matcher in advance.

        Raises what compiling raises.
        """
        self._compile = compile_one
        self._later = later
        self._batch = 0
        self._original = compile_one()
        self._next = later.submit(compile_one)
        self._lock = threading.Lock()

    def take(self, worn: int | None = None) -> tuple[int, LLMatcher]:
        """Return the number of the batch, and a matcher before its first token.

        worn: number of a batch whose matchers fail. If it is the present batch, a new one is begun.
        """
        with self._lock:
            if worn == self._batch:
                self._renew()
            return self._batch, self._original.deep_copy()

    def _renew(self) -> None:
        """Begin a new batch.

        If the next matcher is being compiled, this waits for it. If its compilation is still queued after
        that of other forms, compiling the matcher in this thread is faster.
        """
        self._original = self._compile() if self._next.cancel() else self._next.result()
        self._batch, self._next = self._batch + 1, self._later.submit(self._compile)


# Bytes. Stack of the thread that compiles, because schemas are nested deeply. Untuned.
STACK = 16 << 20
# Workers and drafters compile forms on this thread, one at a time.
COMPILER = ThreadPoolExecutor(1, "forms")

# The model may choose how to tokenize determined bytes. By default, the library allows one tokenization only.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
# JSON is written on one line with optional single spaces. With indentation, most tokens would be white space;
# without spaces, SmolLM2 generates worse values.
_JSON_STYLE = {"whitespace_pattern": " "}
_SCHEMA_STYLE = {**_JSON_STYLE, "coerce_one_of": True}  # See `schemas.ONE_OF`.


@functools.lru_cache(maxsize=4)
def library_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """Return the library's tokenizer of a vocabulary, with one more token id for the end."""
    return LLTokenizer(TokenizerWrapper(_Words(vocabulary)), n_vocab=len(vocabulary) + 1)


def compile_form(vocabulary: Vocabulary, form: Form, stack: int = STACK) -> LLMatcher:
    """Compile a form and return a matcher before its first token.

    stack: bytes of the stack of the thread that compiles.

    Raises InvalidRequest, with the library's reason on one line, if the form cannot be compiled.
    """
    grammar, tokenizer = lark_of(form), library_tokenizer(vocabulary)
    made: list[LLMatcher] = []
    _run_on_stack(stack, lambda: made.append(LLMatcher(tokenizer, grammar, log_level=0, limits=_limits())))
    matcher = made[0]
    if matcher.is_error():
        raise refuse(f"{form.title}: {reason_in(matcher.get_error())}")
    return matcher


def lark_of(form: Form) -> str:
    """Return the form as a grammar in the library's dialect of Lark.

    Raises InvalidRequest if a schema is invalid.
    """
    match form.kind:
        case "json_object":
            rule = "start: %json " + json.dumps({"type": "object", "x-guidance": _JSON_STYLE})
        case "json_schema":
            schema = read_enforceable(form.texts[0])
            rule = "start: %json " + json.dumps(
                {**(schema if isinstance(schema, dict) else {}), "x-guidance": _SCHEMA_STYLE}
            )
        case "regex":
            quoted = json.loads(LLMatcher.grammar_from_regex(form.texts[0]))
            rule = quoted["grammars"][0]["lark_grammar"]
        case "choice":
            rule = "start: " + " | ".join(map(json.dumps, form.texts))
        case "structural_tag":
            rule = lark_of_tag(read_tag(form.texts[0]), _SCHEMA_STYLE)
    return _OPTIONS + rule


class _Words:
    """The interface of a tokenizer that the library needs.

    The library never tokenizes text with it, because determined tokens are not forced.
    """

    bos_token_id: None = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = len(vocabulary)
        self.special_token_ids = [self.eos_token_id]
        self.tokens: Sequence[bytes] = [*(text or b"" for text in vocabulary.bytes), b"<end>"]

    def __call__(self, text: bytes | str) -> list[int]:
        return []


def _limits() -> LLParserLimits:
    """Return limits of the library that allow a thousand optional properties.

    The time grows with the square of their number.
    """
    return LLParserLimits(
        max_items_in_row=6_000, step_max_items=100_000, max_lexer_states=20_000, verbose_errors=False
    )


# Held while the stack size, which applies to the whole process, is changed.
_starting = threading.Lock()


def _run_on_stack(size: int, work: Any) -> None:
    """Run `work` in a thread with a stack of `size` bytes, and wait for it."""
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
    """A place in an answer: a node in the tree of all token paths that were visited.

    walker: the matcher that visits the places of this answer.
    behind: the preceding place. None at the root.
    token: the token that leads from the preceding place to this one. -1 at the root.
    over: True if no token may follow.
    depth: number of tokens from the root.
    way: the tokens of an ending, as `Closing.find` caches them. None if not searched, () if none was found.
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
        """The tokens from the root to this place."""
        return _tokens(self, 0)


class MatcherCursor:
    """Moves one matcher between the places of an answer. Used by one thread at a time.

    If the matcher fails, a matcher of a new batch is tried once. If that one fails too, the form is too
    complex, and the methods answer as if nothing were allowed.

    Worked example: the matcher is at the tokens [a b c], and is asked about [a d]. The deepest shared place
    is [a], so the matcher is rolled back by 2 tokens and consumes d.
    """

    def __init__(self, matchers: Matchers) -> None:
        self._matchers = matchers
        self._batch, self._matcher = matchers.take()
        self.root = self._here = MatcherNode(self)

    def step(self, place: MatcherNode, token: int) -> MatcherNode | None:
        """Return the place after `token`, or None if the token is forbidden or the form is too complex."""
        taken = self._ask(place, lambda matcher: matcher.try_consume_tokens([token]))
        if not taken or self._matcher.is_error():
            return None
        self._here = MatcherNode(self, place, token, over=self._matcher.is_stopped())
        return self._here

    def accepts_path(self, place: MatcherNode, path: Sequence[int]) -> bool:
        """Return whether all tokens of a path may follow a place, without moving along the path."""
        return self._ask(place, lambda matcher: matcher.validate_tokens(list(path))) == len(path)

    def bits(self, place: MatcherNode) -> bytes:
        """Return a bit per token that may follow, token 0 in the lowest bit of byte 0.

        All bits are 0 if the form is too complex.
        """
        bits = self._ask(place, LLMatcher.compute_bitmask)
        return bytes(len(bits)) if self._matcher.is_error() else bits

    def accepts(self, place: MatcherNode) -> bool:
        """Return whether the answer is complete at a place, although more tokens may be allowed."""
        return self._ask(place, LLMatcher.is_accepting)

    def _ask(self, place: MatcherNode, question: Callable[[LLMatcher], T]) -> T:
        """Move the matcher to `place` and return its answer. If it fails, ask a matcher of a new batch."""
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
        """Move the matcher: roll back to the deepest place on both paths, then consume the other tokens."""
        shared = _shared(self._here, place)
        if back := self._here.depth - shared.depth:
            self._matcher.rollback(back)
        if ahead := _tokens(place, shared.depth):
            self._matcher.consume_tokens(ahead)
        self._here = place


def _shared(one: MatcherNode, other: MatcherNode) -> MatcherNode:
    """Return the deepest place on the paths from the root to both places."""
    while one is not other:
        if one.depth >= other.depth:
            assert one.behind is not None, "places of two texts"
            one = one.behind
        else:
            assert other.behind is not None, "places of two texts"
            other = other.behind
    return one


def _tokens(place: MatcherNode, depth: int) -> list[int]:
    """Return the tokens of a place's path after its first `depth` tokens."""
    found: list[int] = []
    while place.depth > depth and place.behind is not None:
        found.append(place.token)
        place = place.behind
    return found[::-1]
