"""Answers with calls in them: what is a call, what stays text, and that nothing is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsot_master.core.dialects.tool_calls.forms import HERMES, PLAIN, CallForm
from specsot_master.core.dialects.tool_calls.reading import ForcedReader, ToolReader
from tests.conftest import examples

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTIONS: dict[str, dict[str, Any]] = {"f": SCHEMA, "now": {"type": "object", "properties": {}}}
Calls = list[tuple[str, Any]]


def read(text: str, size: int, reader: ToolReader | None = None) -> tuple[str, Calls]:
    """Content and calls of a text that comes in pieces of this size."""
    reader = reader or ToolReader(HERMES, FUNCTIONS)
    content, calls = "", dict[int, list[str]]()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    for n, piece in enumerate([*pieces, ""]):
        said, deltas = reader.feed(piece, last=n == len(pieces))
        content += said
        for one in deltas:
            told = calls.setdefault(one.index, ["", ""])
            told[0] += one.name or ""
            told[1] += one.arguments
    return content, [(name, json.loads(arguments)) for name, arguments in calls.values()]


def call(value: str, name: str = "f") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": "{value}"}}}}\n</tool_call>'


ONE, TWO = ("f", {"a": "1"}), ("f", {"a": "2"})
LISTED = ("f", {"l": [1, 2]})
LIST = '<tool_call>{"name": "f", "arguments": {"l": %s</tool_call>'
BARE = '{"name": "f", "arguments": {"a": "1"}}'
FENCED = f"```json\n{BARE}\n```"


TAG_PROSE = "Use the <tool_call> tag, then </tool_call>  to end.\n"
CUT = '<tool_call>\n{"name": "f", "arg'
EXAMPLE = f"Example:\n```xml\n{call('1')}\n```\nThat is it."
NESTED = '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": "1"}}}</tool_call>'
NOTED = '{"name": "f", "arguments": {"a": "1"}, "note": "x"}'
IN_OBJECT = f'{{"example": {BARE}}}'
IN_LIST = f"[1, {BARE}]"
IN_LINES = f'{{\n  "steps": [\n    {BARE}\n  ]\n}}'
IN_ARGUMENTS = f'{{"name": "f", "arguments": {BARE}}}'
AFTER_STRING = f'{{"text": "}}\\" {{", "call": {BARE}}}'
HALF = '<tool_call>{"arguments": {"a": "\\ud83d"}, "name": "f"}</tool_call>'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (call("1"), "", [ONE]),
        (f"Sure!\n{call('1')}\nDone.", "Sure!\n\nDone.", [ONE]),
        (f"Sure!{call('1')}Done.", "Sure!\nDone.", [ONE]),
        (f"{call('1')}\n\n Done.  ", "Done.  ", [ONE]),
        (f"{call('1')}\n{call('2')}", "", [ONE, TWO]),
        # A brace too few, and a brace too many.
        (call("1").replace("}}", "}") + f"\n{call('2')}\nBoth.", "Both.", [ONE, TWO]),
        (call("1").replace("}}", "") + f"\n{call('2')}\nBoth.", "Both.", [ONE, TWO]),
        (call("1").replace("}}", "}}}") + f"\n{call('2')}\nBoth.", "Both.", [ONE, TWO]),
        (call("1").replace('"}}', "}}") + f"\n{call('2')}\nBoth.", "Both.", [ONE, TWO]),
        (call("1").replace("</tool_call>", "\nBoth."), "Both.", [ONE]),
        # Arguments that are not quite an object.
        (call("1").replace('{"a": "1"}', "null"), "", [("f", {})]),
        (call("1").replace('{"a": "1"}', "[1]"), "", [("f", {"arguments": [1]})]),
        (call("1").replace('{"a": "1"}', '"{\\"a\\": \\"1\\"}"'), "", [ONE]),
        (call("two\nlines"), "", [("f", {"a": "two\nlines"})]),
        (call("C:\\users"), "", [("f", {"a": "C:\\users"})]),
        (call("x\\ud83d"), "", [("f", {"a": "x\\ud83d"})]),
        (call("1", name="f\\ud83d"), "", [("f\\ud83d", {"a": "1"})]),
        (call("see </tool_call> there"), "", [("f", {"a": "see </tool_call> there"})]),
        # Other orders and members.
        ('<tool_call>{"arguments": {"a": "1"}, "name": "f"}</tool_call>', "", [ONE]),
        (HALF, "", [("f", {"a": "\\ud83d"})]),
        ('<tool_call>{"name": "f", "arguments": {"a": "1"}, "id": "x"}</tool_call> So.', "So.", [ONE]),
        ('<tool_call>{"id": "x", "name": "f", "arguments": {"a": "1"}}</tool_call>', "", [ONE]),
        (NESTED, "", [ONE]),
        (f"<tool_call>[{BARE}, {BARE}]</tool_call>", "", [ONE, ONE]),
        (f"<tool_call>{{{BARE}}}</tool_call>", "", [ONE]),
        # Arguments under other keys, or without a key of their own.
        ('<tool_call>{"name": "f", "input": {"a": "1"}}</tool_call>', "", [ONE]),
        ('<tool_call>{"name": "f", "a": "1"}</tool_call>', "", [ONE]),
        ('<tool_call>{"function": {"name": "f", "args": {"a": "1"}}}</tool_call>', "", [ONE]),
        ('<tool_call>{"name": "f", "input": "x"}</tool_call>', "", [("f", {"input": "x"})]),
        ('{"name": "f", "input": {"a": "1"}}', '{"name": "f", "input": {"a": "1"}}', []),
        # Comments.
        (call("1").replace('{"a"', '{ // the "first"\n/* and {only} */ "a"'), "", [ONE]),
        (call("1").replace('"1"}', '"1", // the end: }\n}'), "", [ONE]),
        (LIST % "[1, // one\n 2 /* two */]}}", "", [LISTED]),
        (LIST % "[1, 2 // two]}}" + call("1"), "", [LISTED, ONE]),
        ('<tool_call>{"name": "f", "arguments": {"a": //x/y}}</tool_call>', "", [("f", {"a": "//x/y"})]),
        # A code fence around the object.
        (f"<tool_call>\n{FENCED}\n</tool_call>\nSo.", "So.", [ONE]),
        (f"<tool_call>{FENCED}</tool_call>\n{call('2')}", "", [ONE, TWO]),
        (f"<tool_call>\n```\n[{BARE}]```", "", [ONE]),
        ("<tool_call>```json\nno\n```</tool_call>", "<tool_call>```json\nno\n```</tool_call>", []),
        # What a limit cut off.
        (call("one two")[:50], "", [("f", {"a": "one "})]),
        (CUT, CUT, []),
        # Text.
        ("a < b, <tool_call", "a < b, <tool_call", []),
        (TAG_PROSE, TAG_PROSE, []),
        ("<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
        ('<tool_call>{"foo": 1}</tool_call> So.', '<tool_call>{"foo": 1}</tool_call> So.', []),
        (EXAMPLE, EXAMPLE, []),
        (f"```xml\n{call('1')}\n```", f"```xml\n{call('1')}\n```", []),
        (f"```\ncode\n```\n{call('1')}", "```\ncode\n```", [ONE]),
        (f"Write `{call('1')}` so.", f"Write `{call('1')}` so.", []),
        (f"Use `x`: {call('1')}", "Use `x`:", [ONE]),
        # Objects without marks: the whole tail of the message, known names, fitting arguments.
        (BARE, "", [ONE]),
        (FENCED, "", [ONE]),
        (f"{FENCED}\n", "", [ONE]),
        (f"```\n{BARE}\n```", "", [ONE]),
        (f"{{{BARE}}}", "", [ONE]),
        (f"I will look.\n{FENCED}", "I will look.", [ONE]),
        (f"{FENCED}\n{FENCED}", "", [ONE, ONE]),
        (f"{BARE}; {BARE}", "", [ONE, ONE]),
        (f"[{BARE}, {BARE}]", "", [ONE, ONE]),
        ('{"name": "now", "arguments": {}}', "", [("now", {})]),
        ('{"name": "f", "parameters": {"a": "1"}}', "", [ONE]),
        ('{"arguments": {"a": "1"}, "name": "f"}', "", [ONE]),
        (BARE[:-1], "", [ONE]),
        (f"{FENCED}\nDone.", f"{FENCED}\nDone.", []),
        (f"{BARE} is an example.", f"{BARE} is an example.", []),
        (f"An example: {BARE}\nand more: {{}}", f"An example: {BARE}\nand more: {{}}", []),
        (f"```python\ncall({BARE})\n```", f"```python\ncall({BARE})\n```", []),
        ('{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
        ('{"name": "f"}', '{"name": "f"}', []),
        ('{"name": "g", "arguments": {"a": "1"}}', '{"name": "g", "arguments": {"a": "1"}}', []),
        ('{"name": "f", "arguments": {"b": "1"}}', '{"name": "f", "arguments": {"b": "1"}}', []),
        ('{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "arguments": {"a": 1}}', []),
        (NOTED, NOTED, []),
        # An object within another value is a part of that value.
        *((one, one, []) for one in (IN_OBJECT, IN_LIST, IN_LINES, IN_ARGUMENTS, AFTER_STRING)),
        (f'{{"x": {{}}, "y": [1]}}, so {BARE}', '{"x": {}, "y": [1]}, so', [ONE]),
        (f"Use {{x}}, [y] and {{}}: {BARE}", "Use {x}, [y] and {}:", [ONE]),
        (f'The brace {{"\n\n{BARE}', 'The brace {"', [ONE]),
        ("```json\n[1, 2]\n```", "```json\n[1, 2]\n```", []),
        ("  hi  \n\n", "  hi  \n\n", []),
    ],
)  # fmt: skip
def test_an_answer(text: str, content: str, calls: Calls, size: int) -> None:
    assert read(text, size) == (content, calls)


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "\n", " ", "{", "}", "```", "`", '"name": "f"', '"arguments": ',
     '{"a": "1"}', ",", call("1"), BARE, FENCED, "word", "[", "]", '"', "\\"]
)  # fmt: skip
LLAMA = CallForm("object", openers=("<|python_tag|>",), arguments_key="parameters")


@settings(max_examples=examples(600), deadline=None)
@given(st.lists(PIECES, max_size=12), st.integers(1, 9), st.sampled_from([HERMES, LLAMA, PLAIN]))
def test_any_text_is_read_alike_in_pieces_of_any_size(parts: list[str], size: int, form: CallForm) -> None:
    text = "".join(parts)
    whole = read(text, 10**6, ToolReader(form, FUNCTIONS))
    assert read(text, size, ToolReader(form, FUNCTIONS)) == whole
    assert all(isinstance(arguments, dict) for _, arguments in whole[1])


@settings(max_examples=examples(300), deadline=None)
@given(st.text(st.sampled_from("ab <>{}[]`\"'\n/.,:"), max_size=40), st.integers(1, 9))
def test_text_without_calls_comes_back_as_it_was(text: str, size: int) -> None:
    assert read(text, size) == (text, [])


@pytest.mark.parametrize(
    "text", ["Say {x}: ", "f(x) { return `y`; } and", "if a < b", "{'set'} of", "- [ ] to do, [1]"]
)
def test_text_is_held_back_only_while_it_can_become_a_call(text: str) -> None:
    content, _ = ToolReader(HERMES, FUNCTIONS).feed(f"{text} x")
    assert content == f"{text} x"


def test_arguments_come_while_they_are_written() -> None:
    reader = ToolReader(HERMES, FUNCTIONS)
    reader.feed('<tool_call>\n{"name": "f", "arguments": {"a": "')
    assert "".join(one.arguments for one in reader.feed("one two")[1]) == "one two"


def test_forced_calls_have_no_content() -> None:
    two = '[{"name": "f", "arguments": {"a": "1"}}, {"name": "now", "arguments": {}}]'
    for size in (1, 1000):
        assert read(two, size, ForcedReader(FUNCTIONS, None)) == ("", [ONE, ("now", {})])
        assert read('{"a": "1"}', size, ForcedReader(FUNCTIONS, "f")) == ("", [ONE])
        assert read(two[:12], size, ForcedReader(FUNCTIONS, None)) == ("", [])
        assert read('{"a": "1', size, ForcedReader(FUNCTIONS, "f")) == ("", [ONE])


def test_a_model_that_begins_calls_without_end_is_read_in_bounded_time() -> None:
    """Read anew from each brace, this text would take many minutes."""
    text = '{"arguments": ' * 20_000 + "end"
    assert read(text, 4096) == (text, [])
