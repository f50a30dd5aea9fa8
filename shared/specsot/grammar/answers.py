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
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from specsot.core.vocabulary import Spelling, Vocabulary, spelling_of
from specsot.grammar.name_patterns import read_enforceable
from specsot.grammar.paths import PathCheck
from specsot.grammar.reasons import reason_in
from specsot.grammar.structural_tag import lark_of_tag, read_tag
from specsot.params import Form, refuse

# [vocabulary size], True for each token that may follow.
Mask = NDArray[np.bool_]


class Choices:
    """The texts of a form of the kind "choice", and how many tokens each rest of each text needs.

    The tokens are counted when the form is compiled, and not during a step.
    """

    def __init__(
        self, vocabulary: Vocabulary, texts: Iterable[str], spelling: Spelling | None = None
    ) -> None:
        """Count the tokens that every rest of every text needs.

        vocabulary: the bytes of every token id.
        texts: the texts of the choice, at least one.
        spelling: the spelling of the vocabulary, if the caller has it. With None, it is looked up.

        The entry for the empty rest of a text is 0. A rest that the vocabulary cannot spell counts as one
        token more than the text has bytes.
        """
        self._bytes = vocabulary.bytes
        self._texts = [text.encode() for text in texts]
        spelling = spelling or spelling_of(vocabulary)
        self._counts = {text: spelling.counts(text, ceiling=len(text) + 1) for text in self._texts}

    def min_tokens(self) -> int:
        """Return the number of tokens of the text that needs the fewest, without an end token.

        A text that the vocabulary cannot spell counts as one more token than it has bytes.
        """
        return min(counts[0] for counts in self._counts.values())

    def fit(self, allowed: Mask, written: bytes, remaining: int) -> Mask:
        """Return the allowed tokens after which one of the texts can be completed within the budget.

        All allowed tokens are returned if every text that may still follow fits even with one token per byte,
        or if no text begins with `written`. The result has no token if no text can be completed in time.

        allowed: [vocabulary size], the tokens that the form allows.
        written: the bytes of the answer so far.
        remaining: number of tokens that may still be generated, this one included.

        The given mask itself is returned if nothing has to be left out; otherwise a new one. A token fits if
        some text continues with the token's bytes and its rest needs fewer than `remaining` tokens, so that
        an end token has room.
        """
        candidates = [text for text in self._texts if text.startswith(written)]
        if all(len(text) - len(written) <= remaining for text in candidates):
            return allowed
        tokens = np.flatnonzero(allowed).tolist()
        num_written = len(written)
        sizes = {len(self._bytes[token] or b"") for token in tokens}
        continuations = {
            text[num_written : num_written + size]
            for text in candidates
            for size in sizes
            if num_written + size <= len(text) and self._counts[text][num_written + size] < remaining
        }
        fitting = np.zeros_like(allowed)
        fitting[[token for token in tokens if (self._bytes[token] or b"") in continuations]] = True
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
# Bytes that begin something that an ending must close or continue.
_BEGINNING = frozenset(b'{[",')


@functools.lru_cache(maxsize=4)
def closing_of(vocabulary: Vocabulary) -> Closing:
    """Return the `Closing` of a vocabulary, which all forms share. The last four results are cached.

    vocabulary: the bytes of every token id.
    """
    return Closing(vocabulary)


class Closing:
    """Finds short endings of JSON texts over the tokens of one vocabulary.

    horizon: the remaining budget in tokens below which an ending is planned.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Find the tokens of which endings consist, and the tokens that may begin a JSON value.

        vocabulary: the bytes of every token id. Tokens without text are never part of an ending.
        """
        self.horizon = FARTHEST
        texts = vocabulary.bytes
        ids = spelling_of(vocabulary).ids
        self._order = _ids(ids, _ORDER)
        self._string = _ids(ids, b'":')
        self._sizes = np.array([len(text or b"") for text in texts], dtype=np.int32)
        self._begin = np.array([not _BEGINNING.isdisjoint(text or b"") for text in texts], dtype=np.bool_)
        self._quote = np.array([b'"' in (text or b"") for text in texts], dtype=np.bool_)

    def guide(self, place: MatcherNode, allowed: Mask, remaining: int, may_stop: bool) -> Mask:
        """Return the allowed tokens after which the text can be ended in time, as far as is known.

        If no ending is known, or if the budget is much larger than the ending needs, all allowed tokens are
        returned. If hardly any token is to spare, only the next token of the ending is returned; no token if
        the text is complete, so that only an end token may follow.

        place: the place in the answer, before the next token.
        allowed: [vocabulary size], the tokens that the form allows.
        remaining: number of tokens that may still be generated, this one included.
        may_stop: True if there are end tokens, which may end a text that could continue.

        "Much larger" means by more than _WATCHED tokens; then, or without end tokens for a text that is
        complete, nothing is forbidden. Down to _SPARE tokens more than the ending needs, only tokens are left
        out that begin something which cannot be ended in time. The given mask itself is returned if nothing
        is left out.
        """
        ending = self.find_ending(place)
        if ending is None or remaining > len(ending) + _WATCHED or not (ending or may_stop):
            return allowed
        if remaining > len(ending) + _SPARE:
            return self._without_unendable(place, allowed, remaining)
        ending_only = np.zeros_like(allowed)
        ending_only[list(ending[:1])] = True
        return ending_only

    def _without_unendable(self, place: MatcherNode, allowed: Mask, remaining: int) -> Mask:
        """Return the allowed tokens without those that begin something that cannot be ended in time.

        Outside a string, these are tokens with a bracket, a brace, a comma or a quote; within a string,
        tokens with a quote. Only the first _TRIED of them are tried; the others are left out.

        place: the place in the answer, before the next token.
        allowed: [vocabulary size], the tokens that the form allows.
        remaining: number of tokens that may still be generated, this one included.

        Returns a new mask. A token is also left out if no ending is known after it.
        """
        beginnings = self._beginnings(place)
        fitting = allowed & ~beginnings
        for token in np.flatnonzero(allowed & beginnings)[:_TRIED].tolist():
            following = place.walker.step(place, token)
            ending = None if following is None else self.find_ending(following)
            fitting[token] = ending is not None and len(ending) < remaining
        return fitting

    def _beginnings(self, place: MatcherNode) -> Mask:
        """Return the tokens that may begin something that lengthens the ending: [vocabulary size].

        place: the place in the answer, before the next token.
        """
        return self._quote if self._in_string(place.walker.bits(place)) else self._begin

    def find_ending(self, place: MatcherNode) -> tuple[int, ...] | None:
        """Return the tokens of an ending from a place, or None if no ending was found. Empty if the answer is
        complete at the place.

        The ending is cached in the place. If the place follows its parent's ending, the rest of that ending
        is used.

        place: the place where the ending begins.

        A failed search is cached too, as (), so that the search is not repeated.
        """
        if place.parent and place.parent.ending and place.parent.ending[0] == place.token:
            place.ending = place.parent.ending[1:]
        if place.ending is None:
            place.ending = self.search_ending(place) or ()
        return place.ending if place.ending or place.walker.accepts(place) else None

    def search_ending(self, place: MatcherNode, max_tokens: int | None = None) -> tuple[int, ...] | None:
        """Search an ending without the cache; return its tokens, or None if none was found within
        `max_tokens` tokens.

        The result is empty if the answer is complete at the place.

        place: the place where the ending begins.
        max_tokens: the largest number of tokens of the ending. None means the horizon.

        Returns None also if no token may follow although the answer is not complete. The matcher moves along
        the ending.
        """
        max_tokens = self.horizon if max_tokens is None else max_tokens
        ending: list[int] = []
        walker = place.walker
        current = place
        while not (current.ended or walker.accepts(current)):
            token = self._next(walker, current) if len(ending) < max_tokens else None
            following = None if token is None else walker.step(current, token)
            if token is None or following is None:
                return None
            ending.append(token)
            current = following
        return tuple(ending)

    def _next(self, walker: MatcherCursor, place: MatcherNode) -> int | None:
        """Return the next token of an ending, or None if no token may follow.

        This is the first byte of `_ORDER` that may follow. If none may, the longest allowed token is taken,
        which completes a determined text, such as a property's name, in the fewest tokens.

        walker: the cursor that visits the places of the answer.
        place: the place before the token.

        Within a JSON string, the token of a quote is returned. The token is among those that the form allows;
        tokens of more than one byte are taken only if no single byte of `_ORDER` may follow.
        """
        bits = walker.bits(place)
        if self._in_string(bits):
            return self._string[0]
        for token in self._order:
            if _has_bit(bits, token):
                return token
        raw = np.frombuffer(bits, dtype=np.uint8)
        ids = np.flatnonzero(np.unpackbits(raw, count=len(self._sizes), bitorder="little"))
        return int(ids[self._sizes[ids].argmax()]) if len(ids) else None

    def _in_string(self, bits: bytes) -> bool:
        """Return whether the position is within a string: only there, both a quote and a colon may follow.

        False if the vocabulary has no token for a quote or for a colon alone.

        bits: one bit per token that may follow, see `MatcherCursor.bits`.
        """
        return len(self._string) == 2 and all(_has_bit(bits, token) for token in self._string)


def _ids(ids: dict[bytes, int], singles: bytes) -> list[int]:
    """Return the tokens of single bytes, in their order. Bytes without a token of their own are left out.

    ids: token id by the token's bytes.
    singles: the bytes to look up, each on its own.
    """
    return [ids[text] for text in (bytes([byte]) for byte in singles) if text in ids]


def _has_bit(bits: bytes, token: int) -> int:
    """Return the token's bit in a bit mask, 1 or 0: token 10 is bit 2 of byte 1.

    bits: one bit per token, token 0 in the lowest bit of byte 0.
    token: token id.
    """
    return bits[token >> 3] >> (token & 7) & 1


# The kinds of forms whose answers are JSON, so that `Closing` finds their endings.
_JSON = ("json_object", "json_schema")
# Bytes that are tried first to find out whether a form leaves a choice: if two of them may follow, it does.
_PROBES = (b"a", b" ", b'"', b",")
# Tokens. With more allowed tokens, a form is taken to leave a choice. Untuned.
_MAX_FORCED = 64


class AnswerAutomaton:
    """A `Grammar` of one form over the tokens of one vocabulary. Its states are places (`MatcherNode`).

    Different threads may use it for different sequences at the same time. See `TagAutomaton` for structural
    tags.
    """

    def __init__(
        self, vocabulary: Vocabulary, form: Form, ends: tuple[int, ...] = (), guided: bool = True
    ) -> None:
        """Compile the form.

        vocabulary: the bytes of every token id.
        form: the caller's constraint on the answer.
        ends: tokens that end an answer. They may follow if the form is complete. Ids outside of the
            vocabulary are ignored. Without end tokens, the answer ends where no token may follow.
        guided: True if masks must lead the answer to its end when its budget gets small. That needs a search.

        Raises InvalidRequest if the library cannot compile the form.

        Raises InvalidRequest also for an invalid schema. Budgets make a difference only for JSON and for a
        choice, and only if `guided`.
        """
        self.vocabulary = vocabulary
        self.form = form
        self._matchers = Matchers(functools.partial(compile_form, vocabulary, form), COMPILER)
        self._end_ids = frozenset(end for end in ends if end < len(vocabulary))
        self._ends = np.array(sorted(self._end_ids), dtype=np.int64)
        self._has_text = _tokens_with_text(vocabulary)
        self._probes = {text: token for token, text in enumerate(vocabulary.bytes) if text in _PROBES}
        self._choices = Choices(vocabulary, form.texts) if guided and form.kind == "choice" else None
        self._closing = self._closing_of(form) if guided else None

    def _closing_of(self, form: Form) -> Closing | None:
        """Return what finds the endings of the form, or None if nothing does.

        form: the constraint. Endings of JSON are found; those of regular expressions are not, and a choice
            has `Choices`.
        """
        return closing_of(self.vocabulary) if form.kind in _JSON else None

    def start(self) -> MatcherNode:
        """Return the place before the first token, with a matcher of its own."""
        return MatcherCursor(self._matchers).root

    def finished(self, place: MatcherNode) -> bool:
        """Return whether no token may follow.

        place: a place that `start` or `advance` returned.
        """
        return place.ended

    def advance(self, place: MatcherNode, token: int) -> MatcherNode | None:
        """Return the place after a token, or None if the form forbids the token. Ignores budgets.

        Also None for tokens without text, such as end tokens, and if the answer has ended at `place` already.

        place: the place before the token.
        token: token id, which may be outside of the vocabulary.

        Without end tokens, the returned place is marked as ended if the form is complete there and no token
        may follow.
        """
        if place.ended or not self._is_text(token):
            return None
        following = place.walker.step(place, token)
        if following is not None and not len(self._ends):
            following.ended = following.ended or self._is_complete(following)
        return following

    def path_check(self, place: MatcherNode) -> PathCheck:
        """Return a check for many paths from one place, see `Grammar.path_check`.

        The matcher validates a path without moving, which makes the check cheap.

        place: the place before the first token of every path.
        """
        return lambda path: self._is_text(path[-1]) and place.walker.accepts_path(place, path)

    def allows(self, place: MatcherNode, token: int, remaining: int) -> bool:
        """Return the entry of `mask` for one token.

        The mask is computed only if the budget or end tokens make a difference.

        place: the place before the token.
        token: token id. A token outside of the vocabulary raises IndexError if its mask must be computed.
        remaining: number of tokens that the answer may still have, this one included.

        False for every token once no token may follow.
        """
        is_watched = self._closing is not None and remaining <= self._closing.horizon
        if self._choices or is_watched or token in self._end_ids:
            return bool(self.mask(place, remaining)[token])
        return self.path_check(place)((token,))

    def _is_text(self, token: int) -> bool:
        """Return whether a token has text. False for ids outside of the vocabulary.

        token: token id.
        """
        return 0 <= token < len(self._has_text) and bool(self._has_text[token])

    def mask(self, place: MatcherNode, remaining: int) -> Mask:
        """Return which tokens may follow: [vocabulary size], read-only.

        All False if the answer is complete, and if the form has become too complex for the library. End
        tokens are allowed where the form is complete.

        place: the place before the token.
        remaining: number of tokens that the answer may still have, this one included. When few remain, JSON
            is led to an ending if one is known, and a choice to a text that fits.

        Never empty only because of the budget: if no text of a choice fits any more, and the answer cannot
        end, the tokens that the form allows are returned.
        """
        allowed = self._allowed(place)
        ends = self._may_end(place)
        if self._choices:
            written = b"".join(self.vocabulary.bytes[token] or b"" for token in place.tokens)
            fitting = self._choices.fit(allowed, written, remaining)
            allowed = fitting if ends or fitting.any() else allowed
        if self._closing and remaining <= self._closing.horizon and (ends or allowed.any()):
            allowed = self._closing.guide(place, allowed, remaining, len(self._ends) > 0)
        if ends:
            allowed[self._ends] = True
        allowed.flags.writeable = False
        return allowed

    def forced(self, place: MatcherNode) -> tuple[int, ...]:
        """Return one token for the bytes that the form determines from this place on; () if it leaves a
        choice.

        The longest possible token is returned. The model may tokenize the same bytes differently. () is also
        returned where the answer may end, and where more than _MAX_FORCED tokens may follow.

        place: the place before the token.

        () is also returned if the tokens that may follow are not all beginnings of the longest one.
        """
        may_follow = self.path_check(place)
        if sum(may_follow((token,)) for token in self._probes.values()) > 1:
            return ()
        allowed = self._allowed(place)
        if np.count_nonzero(allowed) > _MAX_FORCED or self._may_end(place):
            return ()
        tokens = np.flatnonzero(allowed)[::-1].tolist()
        texts = {self.vocabulary.bytes[token] or b"": token for token in tokens}
        longest = max(texts, key=len, default=b"")
        return (texts[longest],) if texts and all(map(longest.startswith, texts)) else ()

    def _allowed(self, place: MatcherNode) -> Mask:
        """Return the tokens that the form allows, regardless of budgets and without end tokens: [vocabulary
        size].

        All False if the answer has ended.

        place: the place before the token.

        All False also if the form has become too complex for the library.
        """
        if place.ended:
            return np.zeros(len(self._has_text), dtype=np.bool_)
        bits = np.frombuffer(place.walker.bits(place), dtype=np.uint8)
        allowed = np.unpackbits(bits, count=len(self._has_text), bitorder="little").view(np.bool_)
        return allowed & self._has_text

    def _may_end(self, place: MatcherNode) -> bool:
        """Return whether an end token may follow. False if there are no end tokens.

        place: the place before the end token.
        """
        return len(self._ends) > 0 and not place.ended and place.walker.accepts(place)

    def _is_complete(self, place: MatcherNode) -> bool:
        """Return whether the form is complete and no token may follow.

        The library does not always report this immediately.

        place: the place to check.
        """
        return place.walker.accepts(place) and not self._allowed(place).any()


@functools.lru_cache(maxsize=4)
def _tokens_with_text(vocabulary: Vocabulary) -> Mask:
    """Return which tokens have text: [vocabulary size]. The last four results are cached.

    vocabulary: the bytes of every token id.
    """
    return np.array([bool(text) for text in vocabulary.bytes], dtype=np.bool_)


class Matchers:
    """Copies of one form's compiled matcher, for any thread.

    The copies of one compiled matcher form a batch. If a copy fails, the batch is worn out: it is replaced by
    a newly compiled matcher, once for all whose copies fail.
    """

    def __init__(self, compile_matcher: Callable[[], LLMatcher], executor: Executor) -> None:
        """Compile the first matcher, and start to compile the next one.

        compile_matcher: compiles the form; returns a matcher before its first token.
        executor: compiles the next matcher in advance.

        Raises what compiling raises.
        """
        self._compile = compile_matcher
        self._executor = executor
        self._batch = 0
        self._original = compile_matcher()
        self._next = executor.submit(compile_matcher)
        self._lock = threading.Lock()

    def copy_matcher(self, failed_batch: int | None = None) -> tuple[int, LLMatcher]:
        """Return the number of the present batch, and a matcher of it before its first token.

        failed_batch: number of a batch whose matchers fail. If it is the present batch, a new batch is
            started; a number of an earlier batch changes nothing. None if no matcher failed.

        Raises what compiling raises if a new batch is needed and its matcher cannot be compiled.
        """
        with self._lock:
            if failed_batch == self._batch:
                self._renew()
            return self._batch, self._original.deep_copy()

    def _renew(self) -> None:
        """Begin a new batch.

        If the next matcher is being compiled, this waits for it. If its compilation is still queued after
        that of other forms, compiling the matcher in this thread is faster.

        Raises what compiling raises. The number of the batch is then one higher, and the next matcher is
        being compiled.
        """
        self._original = self._compile() if self._next.cancel() else self._next.result()
        self._batch, self._next = self._batch + 1, self._executor.submit(self._compile)


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
    """Return the library's tokenizer of a vocabulary, with one more token id for the end. The last four
    results are cached.

    vocabulary: the bytes of every token id.
    """
    return LLTokenizer(TokenizerWrapper(_Words(vocabulary)), n_vocab=len(vocabulary) + 1)


def compile_form(vocabulary: Vocabulary, form: Form, stack: int = STACK) -> LLMatcher:
    """Compile a form and return a matcher before its first token.

    vocabulary: the bytes of every token id.
    form: the constraint to compile.
    stack: bytes of the stack of the thread that compiles.

    Raises InvalidRequest, with the library's reason on one line, if the form cannot be compiled.

    Raises InvalidRequest also if a schema is invalid, and what the library raises if it fails instead of
    reporting an error.
    """
    grammar, tokenizer = lark_of(form), library_tokenizer(vocabulary)
    matcher = run_on_stack(stack, lambda: LLMatcher(tokenizer, grammar, log_level=0, limits=_limits()))
    if matcher.is_error():
        raise refuse(f"{form.title}: {reason_in(matcher.get_error())}")
    return matcher


def lark_of(form: Form) -> str:
    """Return the form as a grammar in the library's dialect of Lark.

    form: the constraint. The schema `true` allows any JSON value.

    Raises InvalidRequest if a schema is invalid.

    A choice becomes alternatives of its texts, and a regular expression must match the whole answer. Raises
    InvalidRequest for a malformed structural tag too.
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
    """The interface of a tokenizer that the library needs: the bytes of all tokens, and the id of the end
    token.

    The library never tokenizes text with it, because determined tokens are not forced.

    eos_token_id: the id after the vocabulary's last one.
    special_token_ids: `eos_token_id` alone.
    tokens: by token id, the bytes of the token's text; empty for tokens without text.
    bos_token_id: None, because answers have no token that begins a text.
    """

    bos_token_id: None = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Collect the bytes of all tokens, and add an end token after the last id.

        vocabulary: the bytes of every token id.
        """
        self.eos_token_id = len(vocabulary)
        self.special_token_ids = [self.eos_token_id]
        self.tokens: Sequence[bytes] = [*(text or b"" for text in vocabulary.bytes), b"<end>"]

    def __call__(self, text: bytes | str) -> list[int]:
        """Return no tokens, because the library never tokenizes text.

        text: ignored.
        """
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


T = TypeVar("T")


def run_on_stack(size: int, work: Callable[[], T]) -> T:
    """Run a function in a thread with a stack of its own, wait for it, and return its result.

    size: bytes of the stack.
    work: the function, which is called without arguments.

    Raises what the function raises, also what is no Exception, such as a panic of a library.

    Threads that are started elsewhere meanwhile may get the same stack size.
    """
    with ThreadPoolExecutor(1) as executor:
        with _starting:
            usual = threading.stack_size(size)
            try:
                result = executor.submit(work)
            finally:
                threading.stack_size(usual)
        return result.result()


class MatcherNode:
    """A place in an answer with a form: a node in the tree of all token paths that were visited.

    walker: the cursor that visits the places of this answer.
    parent: the preceding place. None at the root.
    token: the token that leads from the preceding place to this one. -1 at the root.
    ended: True if no token may follow.
    depth: number of tokens from the root.
    ending: the tokens of an ending, as `Closing.find_ending` caches them. None if not searched, () if none
        was found or if the answer is complete here.
    """

    __slots__ = ("depth", "ended", "ending", "parent", "token", "walker")

    def __init__(
        self, walker: MatcherCursor, parent: MatcherNode | None = None, token: int = -1, ended: bool = False
    ):
        """Create a place, whose ending was not searched yet.

        walker: the cursor that visits the places of this answer.
        parent: the preceding place. None at the root.
        token: the token that leads from the preceding place to this one. -1 at the root.
        ended: True if no token may follow.
        """
        self.walker = walker
        self.parent = parent
        self.token = token
        self.ended = ended
        self.depth: int = parent.depth + 1 if parent else 0
        self.ending: tuple[int, ...] | None = None

    @property
    def tokens(self) -> list[int]:
        """The tokens from the root to this place. Empty at the root."""
        return _tokens(self, 0)


class MatcherCursor:
    """Moves one matcher between the places of an answer. Used by one thread at a time.

    If the matcher fails, a matcher of a new batch is tried once. If that one fails too, the form is too
    complex, and the methods answer as if nothing were allowed.

    root: the place before the first token.

    Worked example: the matcher is at the tokens [a b c], and is asked about [a d]. The deepest shared place
    is [a], so the matcher is rolled back by 2 tokens and consumes d.
    """

    def __init__(self, matchers: Matchers) -> None:
        """Begin before the first token of an answer, with a matcher of its own.

        matchers: copies of the compiled form, of which the cursor takes one.
        """
        self._matchers = matchers
        self._batch, self._matcher = matchers.copy_matcher()
        self.root = self._current = MatcherNode(self)

    def step(self, place: MatcherNode, token: int) -> MatcherNode | None:
        """Return the place after a token, or None if the token is forbidden or the form is too complex.

        place: the place before the token.
        token: token id, which has text.

        The matcher stays at the new place, which is marked as ended if the library allows no token after it.
        After None for a forbidden token, it stays before the token.
        """
        num_consumed = self._ask(place, lambda matcher: matcher.try_consume_tokens([token]))
        if not num_consumed or self._matcher.is_error():
            return None
        self._current = MatcherNode(self, place, token, ended=self._matcher.is_stopped())
        return self._current

    def accepts_path(self, place: MatcherNode, path: Sequence[int]) -> bool:
        """Return whether all tokens of a path may follow a place, without moving along the path.

        place: the place before the first token of the path.
        path: token ids, in order.
        """
        return self._ask(place, lambda matcher: matcher.validate_tokens(list(path))) == len(path)

    def bits(self, place: MatcherNode) -> bytes:
        """Return one bit per token that may follow, token 0 in the lowest bit of byte 0.

        All bits are 0 if the form is too complex.

        place: the place before the token.
        """
        bits = self._ask(place, LLMatcher.compute_bitmask)
        return bytes(len(bits)) if self._matcher.is_error() else bits

    def accepts(self, place: MatcherNode) -> bool:
        """Return whether the answer is complete at a place, although more tokens may be allowed.

        place: the place to check.
        """
        return self._ask(place, LLMatcher.is_accepting)

    def _ask(self, place: MatcherNode, query: Callable[[LLMatcher], T]) -> T:
        """Move the matcher to a place, and return what a query returns for it. If the matcher fails, ask a
        matcher of a new batch.

        If that one fails too, its response is returned, and the matcher's `is_error` is true.

        place: the place to which the matcher is moved.
        query: called with the matcher at `place`. It must not move the matcher, except from `step`.

        A matcher that failed in an earlier call is replaced before the query. Each call makes at most two
        attempts.
        """
        if self._matcher.is_error():
            self._renew()
        self._move(place)
        response = query(self._matcher)
        if self._matcher.is_error():
            self._renew()
            self._move(place)
            response = query(self._matcher)
        return response

    def _renew(self) -> None:
        """Replace the failed matcher by one of a new batch, which is at the root."""
        self._batch, self._matcher = self._matchers.copy_matcher(failed_batch=self._batch)
        self._current = self.root

    def _move(self, place: MatcherNode) -> None:
        """Move the matcher to a place: roll back to the deepest place on both paths, then consume the other
        tokens. Do nothing if it is there already.

        place: the place to which the matcher is moved.

        After an error of the matcher, its position has no meaning; `_ask` then tries a new one.
        """
        shared = _shared(self._current, place)
        if num_back := self._current.depth - shared.depth:
            self._matcher.rollback(num_back)
        if missing_tokens := _tokens(place, shared.depth):
            self._matcher.consume_tokens(missing_tokens)
        self._current = place


def _shared(first: MatcherNode, second: MatcherNode) -> MatcherNode:
    """Return the deepest place on the paths from the root to both places. The places must be of the same
    answer.

    first: a place.
    second: another place, or the same one.

    Raises AssertionError for places of different answers. The root is shared by all places of an answer.
    """
    while first is not second:
        if first.depth >= second.depth:
            assert first.parent is not None, "places of two texts"
            first = first.parent
        else:
            assert second.parent is not None, "places of two texts"
            second = second.parent
    return first


def _tokens(place: MatcherNode, depth: int) -> list[int]:
    """Return the tokens of a place's path after its first `depth` tokens. Empty if the path has no more
    tokens.

    place: the last place of the path.
    depth: number of the path's first tokens that are left out.

    The tokens are in the order of the path.
    """
    found: list[int] = []
    while place.depth > depth and place.parent is not None:
        found.append(place.token)
        place = place.parent
    return found[::-1]
