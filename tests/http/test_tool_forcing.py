"""Forced calls in the form of every template: whatever the grammar lets a model write is a call that fits."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from specsot.core.frames import Opening
from specsot.core.vocabulary import Vocabulary, describe
from specsot.grammar import fewest_tokens
from specsot.grammar.answers import AnswerAutomaton
from specsot.grammar.state import grammar_of
from specsot.params import Form
from specsot_master.core.dialects.tool_calls.forms import CallForm
from specsot_master.core.dialects.tool_calls.harmony import HARMONY, HarmonyReader
from specsot_master.core.dialects.tool_calls.reading import ToolReader
from specsot_master.http.openai_tools import ToolUse
from tests.conftest import examples, is_full
from tests.constraint.vocabularies import SINGLE
from tests.json_values import check_value
from tests.master.test_call_forms import DIFFERENT, form_of
from tests.there import there

LEVEL: dict[str, Any] = {
    "type": "object",
    "properties": {"level": {"type": "integer"}, "room": {"enum": ["hall", "attic"]}},
    "required": ["level"],
    "additionalProperties": False,
}
NOTE: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["text", "tags"],
    "additionalProperties": False,
}
SCHEMAS = {"set_level": LEVEL, "note": NOTE}
FUNCTIONS = [{"name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
LIMIT = 400
CLOSING = frozenset(b'"}],')
ONE_FUNCTION = {"set_level": LEVEL}


def automaton(form: Form, words: Vocabulary = SINGLE) -> AnswerAutomaton:
    """The automaton of a form, as every service compiles it."""
    grammar = grammar_of(words, Opening(1, 100, form=form))
    built = there(grammar).result()
    assert isinstance(built, AnswerAutomaton)
    return built


@cache
def words_of(form: CallForm) -> Vocabulary:
    """A vocabulary of all bytes and of what the template writes around names and values."""
    texts = form.texts
    if texts is None:
        return SINGLE
    marks = [
        mark
        for part in (texts.before, texts.opening, texts.closing, texts.between or (), texts.end)
        for mark in part
    ]
    arguments = texts.arguments
    if arguments:
        marks += [arguments.begin, arguments.middle, arguments.end, arguments.between, arguments.quote]
    written = dict.fromkeys(mark.encode() for mark in marks if isinstance(mark, str) and mark)
    return describe([*SINGLE.bytes, *written])


@cache
def likely_in(words: Vocabulary) -> np.ndarray:
    """Return which tokens a drawn answer prefers, bool [vocabulary]: those that end something, and marks."""
    return np.array([set(byte or b"") <= CLOSING or len(byte or b"") > 1 for byte in words.bytes])


def written(form: Form, seed: int, words: Vocabulary = SINGLE, limit: int = LIMIT) -> str:
    """What a model writes that draws any token that the grammar allows, often one that ends something."""
    machine = automaton(form, words)
    dice = random.Random(seed)
    place = machine.start()
    count = 0
    text = b""
    likely = likely_in(words)
    while not machine.finished(place):
        allowed = machine.mask(place, limit - count)
        closing = np.flatnonzero(allowed & likely)
        token = int(dice.choice(closing if len(closing) and dice.random() < 0.5 else np.flatnonzero(allowed)))
        text += words.bytes[token] or b""
        count += 1
        place = there(machine.advance(place, token))
    return text.decode()


def read(reader: ToolReader | HarmonyReader, text: str) -> list[tuple[str, Any]]:
    content, deltas = reader.feed(text, last=True)
    assert content == ""
    return [(there(one.name), json.loads(one.arguments)) for one in deltas]


def uses(form: CallForm) -> Sequence[ToolUse]:
    """Every way in which a request forces calls."""
    return (
        ToolUse(form, SCHEMAS, required=True),
        ToolUse(form, SCHEMAS, required=True, parallel=False),
        ToolUse(form, ONE_FUNCTION, required=True, parallel=False),
        ToolUse(form, SCHEMAS, named="note"),
    )


@pytest.mark.parametrize("name", [*DIFFERENT, "Harmony"])
def test_whatever_a_model_writes_as_a_forced_call_is_a_call_that_fits(name: str) -> None:
    form = HARMONY if name == "Harmony" else form_of(name)
    counts = set[int]()
    own_heads = set[str]()  # Those that the form itself reads as the beginning of a call.
    if form is not HARMONY:
        own_heads |= {form.forced_head(one) for one in SCHEMAS if any(form.head)} | {form.object_head}
        own_heads -= {""}
    for use in uses(form):
        offered = [one for one in FUNCTIONS if one["name"] in use.functions]
        for seed in range(examples(12)):
            text = written(use.forced_form(offered), seed, words_of(form))
            calls = read(use.reader(), text)
            counts.add(len(calls))
            assert len(calls) == 1 or (len(calls) > 1 and use.required and use.parallel)
            for called, arguments in calls:
                assert called == (use.only or called)
                check_value(arguments, SCHEMAS[called])
            if use.head in own_heads:
                assert read(ToolReader(form, use.functions), use.head + text) == calls
    assert max(counts) > 1


def defining(value: Any, keyword: str) -> dict[str, Any]:
    """The schema of a tool that defines "Value", and uses it by every kind of reference."""
    properties = {
        "v": {"$ref": f"#/{keyword}/Value"},
        "same": {"$ref": "#/properties/v"},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
    }
    closed = {"required": ["v"], "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed, keyword: {"Value": value}}


COLLIDING = {
    "set_color": defining({"enum": ["red", "green"]}, "$defs"),
    "set_level": defining({"type": "integer", "minimum": 0, "maximum": 9}, "$defs"),
    "set_size": defining({"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "definitions"),
}


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(
    "name", ["Llama 3", "Qwen-Qwen3-0.6B", "Qwen3-Coder", "LFM2.5", "moonshotai-Kimi-K2"]
)
def test_definitions_of_one_name_hold_for_the_function_that_has_them(name: str, parallel: bool) -> None:
    form = form_of(name)
    use = ToolUse(form, COLLIDING, required=True, parallel=parallel)
    given = use.forced_form([{"name": one, "parameters": schema} for one, schema in COLLIDING.items()])
    called = set[str]()
    for seed in range(examples(20)):
        for one, arguments in read(use.reader(), written(given, seed, words_of(form))):
            check_value(arguments, COLLIDING[one])
            called.add(one)
    assert called == COLLIDING.keys(), "every function was drawn"


HEADS = {
    "Qwen-Qwen3-0.6B": ("<tool_call>\n", '<tool_call>\n{"name": "note", "arguments": '),
    "unsloth-Apriel-1.5": ("<tool_calls>", '<tool_calls>[{"name": "note", "arguments": '),
    "Llama 3": ("", '{"name": "note", "parameters": '),  # Its calls have no marks.
    "Qwen3-Coder": ("<tool_call>\n<function=", "<tool_call>\n<function=note>\n"),
    "GLM-4.7-Flash": ("<tool_call>", "<tool_call>note"),
    "MiniMax-M2": ('\n<minimax:tool_call>\n<invoke name="', '\n<minimax:tool_call>\n<invoke name="note">\n'),
    "deepseek-ai-DeepSeek-V3.1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>note<｜tool▁sep｜>",
    ),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("[TOOL_CALLS]", "[TOOL_CALLS]note[ARGS]"),
    "LFM2.5": ("<|calls_start|>[", "<|calls_start|>[note("),
    # The number of the call is the model's to write.
    "moonshotai-Kimi-K2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.note:",
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_prompt_ends_with_the_beginning_of_a_forced_call_in_the_models_own_marks(name: str) -> None:
    some = ToolUse(form_of(name), SCHEMAS, required=True)
    one = ToolUse(form_of(name), SCHEMAS, named="note")
    assert (some.head, one.head) == HEADS[name]


FORCED_TEXTS = {
    "Qwen3-Coder": (
        "<tool_call>\n<function=note>\n<parameter=text>\nA <b>.\n\n\n</parameter>\n"
        '<parameter=tags>\n["x </parameter> y"]\n</parameter>\n</function>\n</tool_call>',
        ("note", {"text": "A <b>.\n\n", "tags": ["x </parameter> y"]}),
    ),
    "GLM-4.7-Flash": (
        "<tool_call>note<arg_key>text</arg_key><arg_value> 12 </arg_value>"
        '<arg_key>tags</arg_key><arg_value>["<tool_call>"]</arg_value></tool_call>',
        ("note", {"text": " 12 ", "tags": ["<tool_call>"]}),
    ),
    "moonshotai-Kimi-K2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.set_level:0<|tool_call_argument_begin|>"
        '{"level": 3}<|tool_call_end|><|tool_calls_section_end|>',
        ("set_level", {"level": 3}),
    ),
    "deepseek-ai-DeepSeek-V3.2": (
        '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="set_level">\n'
        '<｜DSML｜parameter name="level" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="room" string="true">hall</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        ("set_level", {"level": 3, "room": "hall"}),
    ),
    "LFM2.5": (
        '<|calls_start|>[note(text="a) \\\\", tags=["b"])]<|calls_end|>',
        ("note", {"text": "a) \\", "tags": ["b"]}),
    ),
    "Gemma 4": (
        '<|tool_call>call:note{text:<|"|>say "no"<|"|>,tags:["b"]}<tool_call|>',
        ("note", {"text": 'say "no"', "tags": ["b"]}),
    ),
}


@pytest.mark.parametrize("name", FORCED_TEXTS)
def test_a_call_as_the_template_writes_it_is_allowed_and_read_with_the_types_of_the_schema(name: str) -> None:
    text, call = FORCED_TEXTS[name]
    use = ToolUse(form_of(name), SCHEMAS, required=True)
    machine = automaton(use.forced_form(FUNCTIONS))
    place = machine.start()
    assert text.startswith(use.head)
    for byte in text[len(use.head) :].encode():
        place = there(machine.advance(place, byte + 1))
    assert machine.mask(place, LIMIT).any() or machine.finished(place)
    assert read(use.reader(), text[len(use.head) :]) == [call]


UNWRITABLE: dict[str, dict[str, Any]] = {
    "a pattern": {"properties": {"a": {"type": "string", "pattern": "^[ab]+$"}}},
    "a text with a mark": {"properties": {"a": {"enum": ["</parameter>", "b"]}}},
    "any argument": {"additionalProperties": {"type": "string"}},
    "alternatives": {"anyOf": [{"required": ["a"]}], "properties": {"a": {"type": "string"}}},
    "a name with a space": {"properties": {"a b": {"type": "string"}}},
    "a bounded text or null": {"properties": {"a": {"type": ["string", "null"], "maxLength": 3}}},
}


@pytest.mark.parametrize("kind", UNWRITABLE)
def test_what_a_form_cannot_express_is_forced_as_plain_json(kind: str) -> None:
    schema = {"type": "object", **UNWRITABLE[kind]}
    use = ToolUse(form_of("Qwen3-Coder"), {"f": schema}, named="f")
    form = use.forced_form([{"name": "f", "parameters": schema}])
    assert (form.kind, use.head) == ("json_schema", '{"name": "f", "arguments": ')
    assert [name for name, _ in read(use.reader(), written(form, 0))] == ["f"]


RICH: dict[str, Any] = {
    "type": "object",
    "$defs": {"Level": {"type": "integer", "minimum": 1, "maximum": 9}},
    "properties": {
        "text": {"type": "string", "minLength": 2, "maxLength": 6},
        "kind": {"type": "string", "enum": ["a", "a b", "a b c"]},
        "level": {"$ref": "#/$defs/Level"},
        "other": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "flag": {"type": "boolean"},
        "share": {"type": "number", "minimum": 0, "maximum": 1},
        "point": {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/Level"}, "note": {"type": "string"}},
            "required": ["x"],
            "additionalProperties": False,
        },
        "free": {},
    },
    "required": ["kind", "level", "point"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", [name for name in DIFFERENT if form_of(name).texts is not None])
def test_arguments_of_all_types_are_read_as_the_schema_wants_them(name: str) -> None:
    form = form_of(name)
    use = ToolUse(form, {"f": RICH}, required=True)
    given = use.forced_form([{"name": "f", "parameters": RICH}])
    assert given.kind == "structural_tag"
    for seed in range(examples(5)):
        calls = read(use.reader(), written(given, seed, words_of(form)))
        for _, arguments in calls:
            check_value(arguments, RICH)
        assert calls


def test_a_forced_call_may_be_written_with_the_models_own_tokens() -> None:
    """Special tokens have no text of their own in a vocabulary; a structural tag gives them theirs."""
    special = describe([*SINGLE.bytes, None])
    mark = len(special) - 1
    tokens = {mark: "</parameter>", 2: "no text of a byte", 9999: "no token"}
    use = ToolUse(form_of("Qwen3-Coder"), {"set_level": LEVEL}, named="set_level", tokens=tokens)
    form = use.forced_form(FUNCTIONS[:1])
    begun = "<parameter=level>\n3\n"
    for ends, allowed in (((), True), ((mark,), False)):
        machine = there(grammar_of(special, Opening(1, 100, form=form, stop_ids=ends))).result()
        place = machine.start()
        for byte in begun.encode():
            place = there(machine.advance(place, byte + 1))
        assert bool(machine.mask(place, LIMIT)[mark]) is allowed


@pytest.mark.parametrize("name", ["Qwen3-Coder", "GLM-4.7-Flash", "deepseek-ai-DeepSeek-V3.2", "LFM2.5"])
def test_a_forced_call_is_complete_whatever_the_budget(name: str) -> None:
    form = form_of(name)
    use = ToolUse(form, SCHEMAS, named="note")
    given = use.forced_form(FUNCTIONS)
    machine = automaton(given, words_of(form))
    least = len(there(there(machine._closing).search_ending(machine.start(), LIMIT)))
    needed = there(fewest_tokens(words_of(form), given, ()))
    assert needed - 1 <= least
    for limit in range(least, least + 60, 1 if is_full() else 13):
        ((called, arguments),) = read(use.reader(), written(given, limit, words_of(form), limit))
        assert called == "note"
        check_value(arguments, NOTE)
