"""Compiles forms (schema, regex, JSON) to llguidance matchers, and moves one along a text and drafts."""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from specsot.core.vocabulary import Vocabulary
from specsot.params import Form, refuse


class Matchers:
    """For any thread. A matcher comes with the number of its batch."""

    def __init__(self, compile_one: Callable[[], LLMatcher], later: Executor) -> None:
        """later: where the next batches are compiled. Raises what compiling raises."""
        self._compile, self._later = compile_one, later
        self._batch, self._original = 0, compile_one()
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


STACK = 16 << 20  # bytes
COMPILER = ThreadPoolExecutor(1, "forms")  # whoever compiles for laps does it here, one form at a time

# The model chooses its own spelling of what is forced; the library's default is one spelling only.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
# Compact, spaced and indented JSON; without a bound a model may write white space for ever.
_JSON_STYLE = {"whitespace_pattern": r"[ \t]{1,4}|\r?\n[ \t]{0,40}"}
_LONGEST_REASON = 300  # characters
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")
_EXCERPT = re.compile(r"\n\s+\d+ \| ")


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
        raise refuse(f"{form.kind}: {reason_of(matcher)}")
    return matcher


def lark_of(form: Form) -> str:
    """The form in the library's Lark. Raises InvalidRequest for a schema that is no JSON."""
    match form.kind:
        case "json_object":
            rule = "start: %json " + json.dumps({"type": "object", "x-guidance": _JSON_STYLE})
        case "json_schema":
            rule = "start: %json " + json.dumps(_read_schema(form.texts[0]))
        case "regex":
            quoted = json.loads(LLMatcher.grammar_from_regex(form.texts[0]))
            rule = quoted["grammars"][0]["lark_grammar"]
        case "choice":
            rule = "start: " + " | ".join(map(json.dumps, form.texts))
    return _OPTIONS + rule


def reason_of(matcher: LLMatcher) -> str:
    """What the library complains about, without its excerpts and places, on one line."""
    told = _EXCERPT.split(matcher.get_error())[0].replace("<non-verbose/>", "")
    line = " ".join(_PLACE.sub("", told).split())
    return line if len(line) <= _LONGEST_REASON else line[:_LONGEST_REASON] + "..."


class _Words:
    """What the library asks of a tokenizer. It never has text to split: nothing is forced."""

    bos_token_id = None

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


def _read_schema(text: str) -> Any:
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise refuse("json_schema is nested too deeply") from None
    except ValueError as error:
        raise refuse(f"json_schema is not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise refuse("json_schema must be a JSON object")
    if schema is False:
        raise refuse("json_schema allows nothing")
    return {"x-guidance": _JSON_STYLE, **schema} if isinstance(schema, dict) else {"x-guidance": _JSON_STYLE}


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


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
        self.walker, self.behind, self.token, self.over = walker, behind, token, over
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

    def bits(self, place: MatcherNode) -> bytes:
        """A bit for each token that may follow, the first one lowest; none where it is too complex."""
        bits = self._ask(place, LLMatcher.compute_bitmask)
        return bytes(len(bits)) if self._matcher.is_error() else bits

    def accepts(self, place: MatcherNode) -> bool:
        """Whether the text may end here."""
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
