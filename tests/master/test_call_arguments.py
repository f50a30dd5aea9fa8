"""Arguments as models write them become JSON objects: nothing is lost, in pieces of any size."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsot_master.core.dialects.tool_calls.arguments import (
    ArgumentStream,
    JsonRewriter,
    arguments_of,
    read_arguments,
)
from tests.conftest import examples

CHARACTERS = st.characters(exclude_categories=["Cs"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(CHARACTERS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(CHARACTERS), inner, max_size=4),
    max_leaves=12,
)
SIZES = st.integers(1, 9)
END = "</tool_call>"


def rewrite(text: str, size: int, *marks: Any) -> tuple[str, str]:
    """The rewritten value, and the text after it."""
    rewriter, written = JsonRewriter(*marks), ""
    for at in range(0, len(text), size):
        written += rewriter.feed(text[at : at + size])
        if rewriter.done:
            return written, rewriter.rest + text[at + size :]
    return written + rewriter.feed("", last=True), rewriter.rest


@settings(max_examples=examples(300), deadline=None)
@given(VALUES, SIZES, st.booleans(), st.sampled_from([None, 1]), st.sampled_from([(), (END,)]))
def test_json_comes_back_unchanged(
    value: Any, size: int, ascii_only: bool, indent: int | None, stops: tuple[str, ...]
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert rewrite(text, size, stops) == (text, "")


PARTS = [*"{}[]:,\"'\\ \n\tuabd8390d<|>/TrueNone", "\\ud83d", '{"a": ', "</t>", "\ud800", "C:\\u"]


@settings(max_examples=examples(1000), deadline=None)
@given(
    st.lists(st.sampled_from(PARTS)), SIZES, st.sampled_from([(), ("</t>",)]), st.sampled_from(["", '<|"|>'])
)
def test_whatever_was_written_becomes_json_the_same_in_pieces_of_any_size(
    parts: list[str], size: int, stops: tuple[str, ...], quote: str
) -> None:
    text = "".join(parts)
    whole = rewrite(text, 10**6, stops, quote)
    assert rewrite(text, size, stops, quote) == whole
    json.dumps(json.loads(whole[0]), ensure_ascii=False).encode()


@settings(max_examples=examples(300), deadline=None)
@given(VALUES, st.data())
def test_what_a_limit_cut_off_is_closed(value: Any, data: st.DataObject) -> None:
    text = json.dumps({"a": value})
    cut = text[: data.draw(st.integers(0, len(text)))]
    stream = ArgumentStream()
    written = stream.feed(cut) + stream.feed("", last=True)
    assert json.loads(written) == read_arguments(cut)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"a": "two\nlines"}', {"a": "two\nlines"}),
        ('{"a": "C:\\users"}', {"a": "C:\\users"}),
        ('{"a": "C:\\users\\name\\temp"}', {"a": "C:\\users\\name\\temp"}),
        ('{"a": "\\d+ \\s"}', {"a": "\\d+ \\s"}),
        ('{"a": "x\\ud83d"}', {"a": "x\\ud83d"}),
        ('{"a": "\\ud83d\\ude00"}', {"a": "😀"}),
        ('{"a": "\\ude00\\ud83d!"}', {"a": "\\ude00\\ud83d!"}),
        ('{"a": "1"', {"a": "1"}),
        ('{"a": {"b": [1, 2}', {"a": {"b": [1, 2]}}),
        ('{"a": "1"}}', {"a": "1"}),
        ('{{"a": "1"}}', {"a": "1"}),
        ('{"a": "x}}', {"a": "x"}),
        ('{"a": 1, "b": 2,}', {"a": 1, "b": 2}),
        ('{"a": 1 "b": 2}', {"a": 1, "b": 2}),
        ('{"a": "say "hi" now", "b": 1}', {"a": 'say "hi" now', "b": 1}),
        ("{'a': 'it's', 'b': True, c: None}", {"a": "it's", "b": True, "c": None}),
        ('{"a": NaN, "b": 1e999, "c": 0123}', {"a": "NaN", "b": "1e999", "c": "0123"}),
        ('{"a": ' + "1" * 5000 + "}", {"a": "1" * 5000}),
        ("null", {}),
        ("", {}),
        ("[]", {}),
        ("[1, 2]", {"arguments": [1, 2]}),
        ('[{"a": 1}]', {"a": 1}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ("Paris", {"arguments": "Paris"}),
        ("the city of Paris", {"arguments": "the city of Paris"}),
        ("7", {"arguments": 7}),
    ],
)
def test_arguments_that_are_not_quite_json(text: str, arguments: dict[str, Any]) -> None:
    assert read_arguments(text) == arguments


def test_the_end_of_a_call_within_a_string_is_text_if_the_string_is_closed() -> None:
    assert rewrite('{"a": "x </tool_call> y"}\n</tool_call>', 3, (END,)) == (
        '{"a": "x </tool_call> y"}',
        "\n</tool_call>",
    )
    unclosed = '{"a": "x}}\n</tool_call>\n<tool_call>{"name": "b"}'
    assert rewrite(unclosed, 3, (END,)) == ('{"a": "x"}', '</tool_call>\n<tool_call>{"name": "b"}')


def test_nesting_without_end_is_read() -> None:
    deep = '{"a": ' + "[" * 100_000
    assert isinstance(read_arguments(deep), dict)
    assert arguments_of(None) == {}


@pytest.mark.parametrize("text", ["{}", "{ }", "{\n}"])
def test_no_arguments_are_an_empty_object_without_white_space(text: str) -> None:
    assert rewrite(text, 1) == ("{}", "")
    assert rewrite('{ "a": 1 }', 1) == ('{ "a": 1 }', "")
