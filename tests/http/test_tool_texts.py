"""What models write as calls, at all three endpoints: the same arguments, and histories that are accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specsot_master.chat_template import ChatTemplate
from specsot_master.text import Text
from tests.http.house import Served, served
from tests.http.test_agents import CLAUDES, FLAT, MESSAGES, RESPONSES
from tests.http.test_tools import CHAT, WEATHER
from tests.master.stage import BASE
from tests.master.test_call_forms import NAMES, source_of

pytestmark = pytest.mark.timeout(60)

QUESTION = "What is it like in Paris?"
TALK = [{"role": "user", "content": QUESTION}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>'
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TALK, "tools": [WEATHER]},
    RESPONSES: {"input": QUESTION, "tools": FLAT},
    MESSAGES: {"messages": TALK, "tools": CLAUDES, "max_tokens": 200},
}


def calls_in(path: str, answer: Any) -> list[Any]:
    """The arguments of the calls in a whole answer."""
    if path == CHAT:
        calls = answer["choices"][0]["message"].get("tool_calls") or []
        return [json.loads(one["function"]["arguments"]) for one in calls]
    if path == RESPONSES:
        return [json.loads(one["arguments"]) for one in answer["output"] if one["type"] == "function_call"]
    return [one["input"] for one in answer["content"] if one["type"] == "tool_use"]


async def streamed_calls(house: Served, path: str, body: Any) -> list[Any]:
    """The same of a stream."""
    text = (await house.post(path, {**body, "stream": True})).text
    lines = (line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {"))
    parts: dict[int, str] = {}
    for told in map(json.loads, lines):
        if path == CHAT:
            for choice in told["choices"]:
                for call in choice["delta"].get("tool_calls") or ():
                    before = parts.get(call["index"], "")
                    parts[call["index"]] = before + (call["function"].get("arguments") or "")
        elif told["type"] == "response.function_call_arguments.delta":
            parts[told["output_index"]] = parts.get(told["output_index"], "") + told["delta"]
        elif told.get("delta", {}) and "partial_json" in told["delta"]:
            parts[told["index"]] = parts.get(told["index"], "") + told["delta"]["partial_json"]
    return [json.loads(one) for one in parts.values()]


WRITTEN: tuple[tuple[str, Any], ...] = (
    ('{"city": "Paris\nand Rome"}', {"city": "Paris\nand Rome"}),
    ('{"city": "C:\\users"}', {"city": "C:\\users"}),
    ('{"city": "x\\ud83d"}', {"city": "x\\ud83d"}),
    ('{"city": "Paris"', {"city": "Paris"}),
    ("null", {}),
    ("[1]", {"arguments": [1]}),
)


def asking(path: str, question: str) -> dict[str, Any]:
    """The body that asks another question."""
    talk = {"input": question} if path == RESPONSES else {"messages": [{"role": "user", "content": question}]}
    return BODIES[path] | talk


@pytest.mark.parametrize("path", BODIES)
async def test_arguments_are_the_same_object_at_every_endpoint(path: str) -> None:
    async with served({f"in town {n}?": CALL % written for n, (written, _) in enumerate(WRITTEN)}) as house:
        for n, (written, arguments) in enumerate(WRITTEN):
            body = asking(path, f"What is it like in town {n}?")
            answer = await house.post(path, body)
            assert answer.status_code == 200
            assert calls_in(path, answer.json()) == [arguments], written
            assert await streamed_calls(house, path, body) == [arguments], written


@pytest.mark.parametrize("name", ["get_weather\\ud83d", "get_weather"])
@pytest.mark.parametrize("path", BODIES)
async def test_half_a_surrogate_pair_is_text_wherever_it_stands(path: str, name: str) -> None:
    said = f'<tool_call>{{"arguments": {{"city": "\\ud83d"}}, "name": "{name}"}}</tool_call>'
    async with served({"like in Paris": said}) as house:
        answer = await house.post(path, BODIES[path])
        assert calls_in(path, answer.json()) == [{"city": "\\ud83d"}]


HISTORIES: dict[str, Any] = {
    CHAT: lambda written: {
        "messages": [
            *TALK,
            {
                "role": "assistant",
                "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": written}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "warm"},
        ]
    },
    RESPONSES: lambda written: {
        "input": [
            {"role": "user", "content": QUESTION},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": written},
            {"type": "function_call_output", "call_id": "c1", "output": "warm"},
        ]
    },
}


UNREADABLE: tuple[Any, ...] = (
    '{"city": "Pa', '{"city": "a\nb"}', "[1]", "null", "Paris", '{"a": "\\ud83d"}',
    {"city": "ü"}, [1], None, 3,
)  # fmt: skip


@pytest.mark.parametrize("path", HISTORIES)
async def test_a_conversation_continues_after_a_call_that_is_not_json_text(path: str) -> None:
    async with served({"warm": "It is warm."}) as house:
        for written in UNREADABLE:
            answer = await house.post(path, HISTORIES[path](written) | {"tools": BODIES[path]["tools"]})
            assert answer.status_code == 200, (written, answer.text)


async def test_a_call_that_a_limit_cut_off_is_accepted_as_history() -> None:
    says = {"like in Paris": CALL % '{"city": "Paris, the capital of France"}', "warm": "It is warm."}
    async with served(says) as house:
        answer = await house.post(CHAT, BODIES[CHAT] | {"max_tokens": 40})
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "length"
        call = choice["message"]["tool_calls"][0]
        assert json.loads(call["function"]["arguments"])["city"].startswith("Pa")
        said = {"role": "tool", "tool_call_id": call["id"], "content": "warm"}
        again = await house.post(CHAT, {"messages": [*TALK, choice["message"], said], "tools": [WEATHER]})
        assert again.status_code == 200


@pytest.mark.parametrize("path", BODIES)
async def test_a_fenced_object_is_a_call_if_nothing_follows_it(path: str) -> None:
    fenced = '```json\n{{"name": "get_weather", "arguments": {"city": "Paris"}}}\n```'
    async with served({"like in Paris": fenced}) as house:
        assert calls_in(path, (await house.post(path, BODIES[path])).json()) == [{"city": "Paris"}]
        assert await streamed_calls(house, path, BODIES[path]) == [{"city": "Paris"}]
    async with served({"like in Paris": f"{fenced}\nThat is how."}) as house:
        assert calls_in(path, (await house.post(path, BODIES[path])).json()) == []


async def test_text_around_calls_keeps_its_white_space() -> None:
    said = f"Use the <tool_call> tag.\n{CALL % '{}'}\nDone."
    async with served({"like in Paris": said}) as house:
        message = (await house.post(CHAT, BODIES[CHAT])).json()["choices"][0]["message"]
        assert message["content"] == "Use the <tool_call> tag.\n\nDone."


class Silent(Text):
    """The demo's tokenizer with a template that offers tools and leaves calls out."""

    def __init__(self) -> None:
        super().__init__(BASE)
        self._template = ChatTemplate(
            "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
        )


async def test_auto_is_refused_if_the_template_does_not_show_calls() -> None:
    async with served({"like in Paris": "[]"}, text=Silent()) as house:
        answer = await house.post(CHAT, BODIES[CHAT])
        assert answer.status_code == 400
        assert "does not show how the model writes calls" in answer.json()["error"]["message"]
        assert (await house.post(CHAT, BODIES[CHAT] | {"tool_choice": "none"})).status_code == 200
        named = {"type": "function", "function": {"name": "get_weather"}}
        assert (await house.post(CHAT, BODIES[CHAT] | {"tool_choice": named})).status_code == 200


class Calling(Text):
    """The demo's tokenizer with a published template that writes calls and has no place for tools."""

    def __init__(self, name: str) -> None:
        super().__init__(BASE)
        self._template = ChatTemplate(source_of(name), NAMES)


BEGIN = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
DEEPSEEKS = {
    "deepseek-ai-DeepSeek-V3.1": BEGIN + "%s<｜tool▁sep｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": BEGIN
    + "function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", DEEPSEEKS)
async def test_calls_are_asked_for_and_read_as_a_template_without_place_for_tools_writes_them(
    name: str, path: str
) -> None:
    called = DEEPSEEKS[name] % ("get_weather", '{"city": "Paris"}')
    async with served({"like in Paris": called}, text=Calling(name)) as house:
        answer = await house.post(path, BODIES[path])
        assert calls_in(path, answer.json()) == [{"city": "Paris"}]
        prompt = house.stage.prompts_seen[-1][1]
        assert DEEPSEEKS[name] % ("function-name", '{"argument-name": "argument-value"}') in prompt
        assert '"name": "get_weather"' in prompt
        assert "<tool_call>" not in prompt


@pytest.mark.parametrize("name", DEEPSEEKS)
async def test_a_template_without_place_for_tools_writes_past_calls_itself(name: str) -> None:
    said = {"begin｜>warm": "It is warm.", "like in Paris": DEEPSEEKS[name] % ("get_weather", "{}")}
    async with served(said, text=Calling(name)) as house:
        answer = await house.post(CHAT, BODIES[CHAT])
        message = answer.json()["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "warm"}
        again = await house.post(CHAT, {"messages": [*TALK, message, result], "tools": [WEATHER]})
        assert again.json()["choices"][0]["message"]["content"] == "It is warm."
        prompt = house.stage.prompts_seen[-1][1]
        assert DEEPSEEKS[name] % ("get_weather", "{}") in prompt
        assert "<｜tool▁output▁begin｜>warm" in prompt
        assert prompt.count("<｜Assistant｜>") == 1
        assert "<tool_response>" not in prompt


SCHEMA = {"type": "object", "properties": {"zzz": {"type": "integer"}}, "required": ["zzz"]}


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "json_schema"),
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"json_schema": SCHEMA}, "json_schema"),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema"),
        ({"format": SCHEMA}, "json_schema"),
        ({"format": "json"}, "json_object"),
        ({"regex": "yes|no"}, "regex"),
    ],
)
async def test_forms_of_other_servers_are_served(form: dict[str, Any], kind: str) -> None:
    async with served({"like in Paris": "yes"}) as house:
        answer = await house.post(CHAT, {"messages": TALK, **form})
        assert answer.status_code == 200
        (opening,) = house.opened()
        assert opening.form is not None
        assert opening.form.kind == kind
        assert kind != "json_schema" or "zzz" in opening.form.texts[0]


async def test_limits_and_penalties_of_other_servers_are_served() -> None:
    async with served({"like in Paris": "one two three four"}) as house:
        for limit in ({"n_predict": 2}, {"num_predict": 2}):
            answer = (await house.post(CHAT, {"messages": TALK, **limit})).json()
            assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (
                2,
                "length",
            )
        await house.post(CHAT, {"messages": TALK, "n_predict": -1, "repeat_penalty": 1.5})
        assert house.opened()[-1].sampling.repetition_penalty == 1.5


@pytest.mark.parametrize(
    ("path", "body", "field", "instead"),
    [
        *(
            (CHAT, {"messages": TALK, name: 'root ::= "yes"'}, name, "json_schema")
            for name in ("grammar", "ebnf")
        ),
        (CHAT, {"messages": TALK, "n_predict": 5, "max_tokens": 6}, "n_predict", "max_tokens"),
        (CHAT, {"messages": TALK, "prefix": "So"}, "prefix", "leave it out"),
        (CHAT, {"messages": TALK, "format": "yaml"}, "format", "json"),
        (
            CHAT,
            {"messages": [*TALK, {"role": "assistant", "content": "So", "prefix": True}]},
            "messages.1.prefix",
            "leave it out",
        ),
        (CHAT, {"messages": TALK, "regex": "a", "json_schema": SCHEMA}, "regex", "one form"),
        (RESPONSES, {"input": QUESTION, "grammar": "x"}, "grammar", "text.format"),
        (
            RESPONSES,
            {"input": QUESTION, "response_format": {"type": "json_object"}},
            "response_format",
            "text.format",
        ),
        (MESSAGES, {"messages": TALK, "max_tokens": 9, "regex": "a"}, "regex", "output_config.format"),
        ("/v1/completions", {"prompt": "x", "grammar": "x"}, "grammar", "json_schema"),
    ],
)
async def test_forms_that_are_not_served_are_refused_by_name(
    path: str, body: dict[str, Any], field: str, instead: str
) -> None:
    async with served() as house:
        answer = await house.post(path, body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == field
        assert instead in error["message"]


FORM = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize("given", [{"output_config": {"format": FORM}}, {"output_format": FORM}])
async def test_messages_serve_a_form_by_both_of_its_names(given: dict[str, Any]) -> None:
    async with served() as house:
        body = {"messages": TALK, "max_tokens": 9, **given}
        assert (await house.post(MESSAGES, body)).status_code == 200
        (opening,) = house.opened()
        assert opening.form is not None
        assert opening.form.kind == "json_schema"
        assert "zzz" in opening.form.texts[0]


LOOSE = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "n": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    },
}
STRICT = {"oneOf": [{"type": "integer"}, {"type": "string"}], "properties": {"format": {"type": "string"}}}


@pytest.mark.parametrize("streams", [False, True])
async def test_what_a_schema_asks_for_in_vain_is_a_warning(streams: bool) -> None:
    async with served({"like in Paris": "{}"}) as house:
        for schema, number in ((LOOSE, 2), (STRICT, 0)):
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            answer = await house.post(CHAT, {"messages": TALK, "response_format": form, "stream": streams})
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            told = [json.loads(line) for line in lines] if streams else [answer.json()]
            warnings = [warning for one in told for warning in one.get("warnings", ())]
            assert len(warnings) == number
            assert all("not enforced" in one or "read as anyOf" in one for one in warnings)


@pytest.mark.parametrize("path", BODIES)
async def test_forced_calls_warn_as_forms_do(path: str) -> None:
    tools: dict[str, Any] = {
        CHAT: [{"type": "function", "function": {"name": "f", "parameters": LOOSE}}],
        RESPONSES: [{"type": "function", "name": "f", "parameters": LOOSE}],
        MESSAGES: [{"name": "f", "input_schema": LOOSE}],
    }
    choice = {"type": "any"} if path == MESSAGES else "required"
    async with served({"like in Paris": '[{"name": "f", "arguments": {}}]'}) as house:
        answer = await house.post(path, BODIES[path] | {"tools": tools[path], "tool_choice": choice})
        assert len(answer.json()["warnings"]) == 2
