"""From a form to a matcher of llguidance, the library that knows schemas and regexes, or why there is none.

Refuses to know vocabularies, budgets and where a text stands.

The library crashes where its stack ends, for example on a long chain of references. So it compiles in a
thread whose stack is known, and a stranger's form is tried in a process of its own first (`trial`), with
an eighth of that stack.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from specsot.forms import Form, refuse
from specsot.vocabulary import Vocabulary

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
