"""Tools at /v1/chat/completions, through OpenAI's own client: what the model is told, and what it calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specsot_master.chat_template import ChatTemplate
from specsot_master.core.dialects.tool_calls.harmony import HARMONY, HarmonyReader
from specsot_master.engine.grammar_sandbox import GrammarSandbox, measure_with
from specsot_master.text import Text
from tests.http.house import CONFIG, Served, served
from tests.master.stage import BASE, END_OF_TEXT
from tests.there import there

pytestmark = pytest.mark.timeout(60)

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "How it is outside.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
ASKED = [{"role": "user", "content": "What is it like in Paris?"}]
SAYS = {"like in Paris": f"Let me look.\n{PARIS}\n{NOW}", "tool_response": "It is sunny."}


async def ask(house: Served, messages: Any = ASKED, **more: Any) -> Any:
    tools = more.pop("tools", [WEATHER, TIME])
    return await house.openai().chat.completions.create(model="demo", messages=messages, tools=tools, **more)


async def test_calls_in_parallel_whole_and_streamed() -> None:
    async with served(SAYS) as house:
        choice = (await ask(house)).choices[0]
        called = [
            (one.function.name, json.loads(one.function.arguments)) for one in choice.message.tool_calls
        ]
        assert called == [("get_weather", {"city": "Paris"}), ("get_time", {})]
        assert (choice.message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
        assert len({one.id for one in choice.message.tool_calls}) == 2
        prompt = house.stage.prompts_seen[-1][1]
        assert '"name": "get_weather"' in prompt
        assert "How it is outside." in prompt
        told = [chunk.choices[0] async for chunk in await ask(house, stream=True)]
        assert "".join(one.delta.content or "" for one in told) == "Let me look."
        names, arguments = dict[int, str](), dict[int, str]()
        for delta in (call for one in told for call in one.delta.tool_calls or ()):
            names[delta.index] = names.get(delta.index, "") + (delta.function.name or "")
            arguments[delta.index] = arguments.get(delta.index, "") + (delta.function.arguments or "")
        assert [(names[n], json.loads(arguments[n])) for n in names] == called
        assert told[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_without_parallel_calls_has_the_first_one_only(streams: bool) -> None:
    async with served(SAYS) as house:
        answer = await ask(house, stream=streams, parallel_tool_calls=False)
        told = [one.choices[0] async for one in answer] if streams else answer.choices
        deltas = [one.delta if streams else one.message for one in told]
        calls = [call.function for one in deltas for call in one.tool_calls or ()]
        assert "".join(one.name or "" for one in calls) == "get_weather"
        assert json.loads("".join(one.arguments or "" for one in calls)) == {"city": "Paris"}
        assert "".join(one.content or "" for one in deltas) == "Let me look."
        assert told[-1].finish_reason == "tool_calls"


class InTags(Text):
    """The demo's tokenizer with a template like that of MiniCPM5, which writes each argument in tags."""

    def __init__(self) -> None:
        super().__init__(BASE)
        argument = '<param name="{{ k }}">{{ v if v is string else v | tojson }}</param>'
        arguments = f"{{% for k, v in c.function.arguments.items() %}}{argument}{{% endfor %}}"
        call = f'<function name="{{{{ c.function.name }}}}">{arguments}</function>'
        self._template = ChatTemplate(
            "{% if tools %}<|system|>{{ tools | tojson }}{% endif %}"
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
            f"{{% for c in m.tool_calls %}}{call}{{% endfor %}}<|end|>"
            "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
        )


@pytest.mark.parametrize("streams", [False, True])
async def test_a_call_in_tags_is_forced_and_read_in_tags(streams: bool) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    written = '<param name="city">Paris, "here"</param></function>'
    for choice, said, begun in (
        (named, written, '<function name="get_weather">'),
        ("required", f'get_weather">{written}', '<function name="'),
    ):
        async with served({"like in Paris": said}, text=InTags()) as house:
            answer = await ask(house, tool_choice=choice, stream=streams)
            told = [one.choices[0] async for one in answer] if streams else answer.choices
            deltas = [one.delta if streams else one.message for one in told]
            calls = [call.function for one in deltas for call in one.tool_calls or ()]
            assert "".join(one.name or "" for one in calls) == "get_weather"
            assert json.loads("".join(one.arguments or "" for one in calls)) == {"city": 'Paris, "here"'}
            assert not any(one.content for one in deltas)
            assert house.stage.prompts_seen[-1][1].endswith(f"<|assistant|>{begun}")
            assert there(house.opened()[-1].form).kind == "structural_tag"


@pytest.mark.parametrize("streams", [False, True])
async def test_generation_ends_after_the_first_call_if_calls_must_not_be_parallel(streams: bool) -> None:
    endless = PARIS + "\n" + f"{NOW}\nand more " * 40
    async with served({"like in Paris": endless}) as house:
        usage = {"stream_options": {"include_usage": True}} if streams else {}
        answer = await ask(house, stream=streams, parallel_tool_calls=False, max_tokens=1500, **usage)
        chunks = [one async for one in answer] if streams else [answer]
        told = [choice for one in chunks for choice in one.choices]
        deltas = [one.delta if streams else one.message for one in told]
        assert (
            "".join(call.function.name or "" for one in deltas for call in one.tool_calls or ())
            == "get_weather"
        )
        assert not any(one.content for one in deltas)
        assert told[-1].finish_reason == "tool_calls"
        assert chunks[-1].usage.completion_tokens < 300


async def test_a_forced_call_of_any_function_begins_with_the_models_own_mark() -> None:
    called = '{"name": "get_time", "arguments": {}}'
    for parallel, said in ((True, f"[{called}]"), (False, called)):
        async with served({"like in Paris": said}) as house:
            answer = await ask(house, tool_choice="required", parallel_tool_calls=parallel)
            (call,) = answer.choices[0].message.tool_calls
            assert (call.function.name, call.function.arguments) == ("get_time", "{}")
            assert house.stage.prompts_seen[-1][1].endswith("<tool_call>\n")


async def test_the_conversation_continues_after_the_result_of_a_tool() -> None:
    async with served(SAYS) as house:
        first = (await ask(house)).choices[0].message
        said = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny, 21 degrees"}
        past = [*ASKED, first.model_dump(exclude_none=True), said]
        for more in ({}, {"tools": None}, {"tool_choice": "none"}):
            choice = (await ask(house, past, **more)).choices[0]
            assert (choice.message.content, choice.message.tool_calls) == ("It is sunny.", None)
            assert choice.finish_reason == "stop"
            prompt = house.stage.prompts_seen[-1][1]
            assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}' in prompt
            assert "sunny, 21 degrees" in prompt
            assert ("How it is outside." in prompt) is not bool(more)


@pytest.mark.parametrize("streams", [False, True])
async def test_forced_calls_are_held_to_the_functions_schema(streams: bool) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    listed = '[{"name": "get_time", "arguments": {}}]'
    for choice, said, name, arguments, reason in (
        (named, '{"city": "Rome"}', "get_weather", {"city": "Rome"}, "stop"),
        ("required", listed, "get_time", {}, "tool_calls"),
    ):
        async with served({"like in Paris": said}) as house:
            answer = await ask(house, tool_choice=choice, stream=streams)
            told = [one.choices[0] async for one in answer] if streams else answer.choices
            deltas = [one.delta if streams else one.message for one in told]
            calls = [call.function for one in deltas for call in one.tool_calls or ()]
            assert "".join(one.name or "" for one in calls) == name
            assert json.loads("".join(one.arguments or "" for one in calls)) == arguments
            assert told[-1].finish_reason == reason
            assert not any(one.content for one in deltas)
            (opening,) = house.opened()
            assert opening.form is not None
            schema = json.loads(opening.form.texts[0])
            assert ("city" in schema["properties"]) if choice is named else schema["minItems"] == 1


FORCED: dict[str, tuple[str, dict[str, Any]]] = {
    "required": (CHAT, {"messages": ASKED, "tools": [WEATHER], "tool_choice": "required"}),
    "any": (
        MESSAGES,
        {
            "messages": ASKED,
            "tools": [{"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}],
            "tool_choice": {"type": "any"},
        },
    ),
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("choice", FORCED)
async def test_a_forced_call_that_cannot_fit_is_refused_before_anything_is_computed(
    choice: str, streams: bool
) -> None:
    """Refused is a limit that every call exceeds. The shortest call has 52 bytes, of which one token per byte
    was counted where no token is certain: with 32 tokens, it was refused, although it fits."""
    path, body = FORCED[choice]
    said = {"like in Paris": '[{"name": "get_weather", "arguments": {"city": ""}}]'}
    measured = GrammarSandbox(lambda form: "", measure_with(BASE, CONFIG.vocabulary, (END_OF_TEXT,)))
    async with served(said, forms=measured) as house:
        answer = await house.post(path, {**body, "max_tokens": 15, "stream": streams})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], "max_tokens must be at least 16" in error["message"]) == ("max_tokens", True)
        assert house.opened() == []
        answer = await house.post(path, {**body, "max_tokens": 32, "stream": streams})
        assert answer.status_code == 200
        assert "get_weather" in answer.text


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("choice", FORCED)
async def test_what_a_limit_cuts_off_a_forced_call_is_no_content(choice: str, streams: bool) -> None:
    path, body = FORCED[choice]
    async with served({"like in Paris": '[{"name": "get_weather", "arguments": {"city": "Rome"}}]'}) as house:
        answer = await house.post(path, {**body, "max_tokens": 5, "stream": streams})
        assert "name" not in answer.text
        assert '"length"' in answer.text or '"max_tokens"' in answer.text


async def test_a_stream_with_tools_has_no_empty_deltas() -> None:
    async with served(SAYS) as house:
        told = [chunk.choices[0] async for chunk in await ask(house, stream=True)]
        said = [one.delta.model_dump(exclude_none=True, exclude_defaults=True) for one in told[:-1]]
        assert all(said)
        assert all(
            len({call["index"] for call in calls}) == len(calls)
            for one in said
            if (calls := one.get("tool_calls"))
        )


THINKS = "<|channel|>analysis<|message|>Where?<|end|>"
LOOKS = "<|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
WEATHER_CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Paris", "as": "<|x"}<|call|>'
)
TIME_CALL = (
    "<|start|>assistant to=functions.get_time<|channel|>commentary <|constrain|>json<|message|>{}<|call|>"
)
FINAL = "<|start|>assistant<|channel|>final<|message|>It is <b>sunny</b> <|:<|return|>"


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"{THINKS}{LOOKS}{WEATHER_CALL}{TIME_CALL}", "Let me look.", ["get_weather", "get_time"]),
        (f"{THINKS}{LOOKS}{FINAL}", "Let me look.\n\nIt is <b>sunny</b> <|:", []),
        (" to=functions.unknown<|channel|>commentary json<|message|>{}", "", ["unknown"]),
        ("<|channel|>commentary to=get_time<|message|>{}<|call|>", "", ["get_time"]),
        (f"<|channel|>commentary to=python<|message|>1+1<|call|>{TIME_CALL}", "", ["get_time"]),
        (f"{THINKS}<|start|>assistant<|channel|>commentary to=functions.get_", "", []),
        (f"No header <|{THINKS}", "No header <|", []),
    ],
)
def test_harmony_is_read_the_same_in_pieces_of_any_size(
    text: str, content: str, calls: list[str], size: int
) -> None:
    reader = HarmonyReader(("get_time", "get_weather"))
    told = [reader.feed(text[at : at + size]) for at in range(0, len(text), size)] + [reader.feed("", True)]
    assert "".join(said for said, _ in told) == content
    deltas = [one for _, some in told for one in some]
    assert [one.name for one in deltas if one.name] == calls
    for n in range(len(calls)):
        assert isinstance(json.loads("".join(one.arguments for one in deltas if one.index == n)), dict)


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_harmony_tells_thoughts_and_closes_arguments_that_a_limit_cut_off(size: int) -> None:
    text = f"{THINKS}{LOOKS}{THINKS}{WEATHER_CALL.partition('Paris')[0]}"
    reader, thought, arguments = HarmonyReader(()), "", ""
    for at in range(0, len(text) + size, size):
        said = reader.feed(text[at : at + size], last=at >= len(text))
        thought += reader.thought
        arguments += "".join(one.arguments for one in said[1])
    assert (thought, arguments, reader.calls) == ("Where?\n\nWhere?", '{"city": ""}', 1)


class Harmony(Text):
    """The demo's tokenizer with a template like that of gpt-oss."""

    def __init__(self) -> None:
        super().__init__(BASE)
        self._template = ChatTemplate(
            "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
            "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>"
            "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
        )


@pytest.mark.parametrize("streams", [False, True])
async def test_a_model_of_harmony_at_the_chat_endpoint(streams: bool) -> None:
    said = {"like in Paris": f"{THINKS}{LOOKS}{WEATHER_CALL}{TIME_CALL}"}
    async with served(said, text=Harmony()) as house:
        answer = await ask(house, stream=streams)
        told = [one.choices[0] async for one in answer] if streams else answer.choices
        deltas = [(one.delta if streams else one.message).model_dump() for one in told]
        assert "".join(one["content"] or "" for one in deltas) == "Let me look."
        assert "".join(one.get("reasoning_content") or "" for one in deltas) == "Where?"
        calls = [call["function"] for one in deltas for call in one["tool_calls"] or ()]
        assert [one["name"] for one in calls if one["name"]] == ["get_weather", "get_time"]
        arguments = "".join(one["arguments"] or "" for one in calls)
        assert arguments == '{"city": "Paris", "as": "<|x"}{}'
        assert told[-1].finish_reason == "tool_calls"
        assert house.stage.prompts_seen[-1][1].endswith("<|start|>assistant")


async def test_a_forced_call_begins_as_harmony_writes_it() -> None:
    named = {"type": "function", "function": {"name": "get_time"}}
    async with served({"like in Paris": "{}"}, text=Harmony()) as house:
        (call,) = (await ask(house, tool_choice=named)).choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("get_time", "{}")
        assert house.stage.prompts_seen[-1][1].endswith(f"assistant{HARMONY.forced_head('get_time')}")
