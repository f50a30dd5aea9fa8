"""Forced calls in the form of every template: whatever the grammar lets a model write is a call that fits."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest

from specsot.grammar.answers import AnswerAutomaton
from specsot.params import Form
from specsot_master.core.dialects.tool_calls.forms import CallForm
from specsot_master.core.dialects.tool_calls.harmony import HARMONY, HarmonyReader
from specsot_master.core.dialects.tool_calls.reading import ToolReader
from specsot_master.http.openai_tools import ToolUse
from tests.constraint.vocabularies import SINGLE
from tests.master.test_call_forms import DERIVED, form_of
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
LIMIT = 400  # Tokens of an answer, which are bytes here; room for several calls.
CLOSING = frozenset(b'"}],')
ONE_FUNCTION = {"set_level": LEVEL}


def written(schema: dict[str, Any], seed: int) -> str:
    """What a model writes that draws any token that the grammar allows, often one that ends something."""
    machine = AnswerAutomaton(SINGLE, Form("json_schema", (json.dumps(schema),)))
    dice = random.Random(seed)
    place = machine.start()
    text = b""
    while not machine.finished(place):
        allowed = np.flatnonzero(machine.mask(place, LIMIT - len(text))).tolist()
        tokens = {token: SINGLE.bytes[token] or b"" for token in allowed}
        closing = [token for token, byte in tokens.items() if set(byte) <= CLOSING]
        token = dice.choice(closing if closing and dice.random() < 0.5 else allowed)
        text += tokens[token]
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


@pytest.mark.parametrize("name", [*DERIVED, "Harmony"])
def test_whatever_a_model_writes_as_a_forced_call_is_a_call_that_fits(name: str) -> None:
    form = HARMONY if name == "Harmony" else form_of(name)
    counts = set[int]()
    own_heads = set[str]()  # Those that the form itself reads as the beginning of a call.
    if form is not HARMONY:
        own_heads |= {form.forced_head(one) for one in SCHEMAS if any(form.head)} | {form.object_head}
        own_heads -= {""}
    for use in uses(form):
        offered = [one for one in FUNCTIONS if one["name"] in use.functions]
        for seed in range(4):
            text = written(use.forced_schema(offered), seed)
            calls = read(use.reader(), text)
            counts.add(len(calls))
            assert len(calls) == 1 or (len(calls) > 1 and use.required and use.parallel)
            for called, arguments in calls:
                assert called == (use.only or called)
                jsonschema.validate(arguments, SCHEMAS[called])
            if use.head in own_heads:
                assert read(ToolReader(form, use.functions), use.head + text) == calls
    assert max(counts) > 1


def test_calls_of_any_function_are_forced_in_the_models_own_marks() -> None:
    heads = {
        "Qwen-Qwen3-0.6B": "<tool_call>\n",
        "unsloth-Apriel-1.5": "<tool_calls>",
        "mistralai-Mistral-Nemo-Instruct-2407": "[TOOL_CALLS]",
        "Command R7B": "<|START_ACTION|>",
        "Llama 3": "",  # Its calls have no marks.
        "Qwen3-Coder": "",  # Its arguments are no JSON.
    }
    for name, head in heads.items():
        assert ToolUse(form_of(name), SCHEMAS, required=True).head == head
