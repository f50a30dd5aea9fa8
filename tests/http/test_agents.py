"""/v1/responses and /v1/messages, on the wire and through OpenAI's client: events, tools, refusals."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from specsot.transport.security import Tokens
from specsot_master.core.inputs import MasterLeaving
from tests.http.house import Served, served
from tests.http.test_tools import PARIS, WEATHER
from tests.master.letters import SAYS as LETTERS

pytestmark = pytest.mark.timeout(60)

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PARAMETERS = WEATHER["function"]["parameters"]
FLAT = [{"type": "function", **WEATHER["function"]}]
CLAUDES = [{"name": "get_weather", "input_schema": PARAMETERS}]
QUESTION = "What is it like in Paris?"
TALK = [{"role": "user", "content": QUESTION}]
WHAT = [{"role": "user", "content": "What is it?"}]
LONG = [{"role": "user", "content": "sky " * 2100}]
IMAGE = {"type": "input_image", "image_url": "data:,"}
BEGUN = {"role": "assistant", "content": "So"}
WRONG = {"role": "boss", "content": "Hi"}
NAMELESS = [
    *TALK,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": 5, "input": {}}]},
    *TALK,
]
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": []}
LOGPROBS = "message.output_text.logprobs"
BASH = {"type": "bash_20250124", "name": "bash"}
CALLS = {"like in Paris": f"Let me look.\n{PARIS}", "21 degrees": "It is warm.", "What is": "A test."}


async def events(house: Served, path: str, body: Any) -> list[dict[str, Any]]:
    """Each named by its `type`; nothing else is on the wire."""
    text = (await house.post(path, {**body, "stream": True})).text
    told: list[dict[str, Any]] = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n", 1)
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    return told


def kinds(told: list[dict[str, Any]]) -> list[str]:
    """Types, repeated ones once."""
    names = [one["type"].removeprefix("response.") for one in told]
    return [name for n, name in enumerate(names) if n == 0 or name != names[n - 1]]


async def test_a_responses_events_come_in_openais_order() -> None:
    async with served(CALLS) as house:
        told = await events(house, RESPONSES, {"input": QUESTION, "tools": FLAT})
        assert kinds(told) == [
            *("created", "in_progress"),
            *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
            *("content_part.done", "output_item.done"),
            *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
            *("output_item.done", "completed"),
        ]
        assert [one["sequence_number"] for one in told] == list(range(len(told)))
        message, call = told[-1]["response"]["output"]
        assert message["content"][0]["text"] == "Let me look."
        assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Paris"})
        whole = (await house.post(RESPONSES, {"input": QUESTION, "tools": FLAT})).json()
        assert [one["type"] for one in whole["output"]] == ["message", "function_call"]
        assert whole["usage"]["total_tokens"] == sum(
            whole["usage"][name] for name in ("input_tokens", "output_tokens")
        )


async def test_openais_client_continues_after_a_call() -> None:
    async with served(CALLS) as house:
        client = house.openai().responses
        first = await client.create(model="demo", input=QUESTION, tools=FLAT)
        (call,) = [one for one in first.output if one.type == "function_call"]
        said = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
        past = [*TALK, *first.output, said]
        async with client.stream(model="demo", input=past, tools=FLAT, instructions="Be kind.") as stream:
            async for _ in stream:
                pass
            answer = await stream.get_final_response()
        assert (answer.output_text, answer.status) == ("It is warm.", "completed")
        prompt = house.stage.prompts_seen[-1][1]
        assert prompt.index("Be kind.") < prompt.index('"city": "Paris"') < prompt.index("21 degrees")
        cut = await client.create(model="demo", input="What is it?", max_output_tokens=1)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert [one.status for one in cut.output] == ["incomplete"]


async def test_functions_of_a_namespace_keep_it() -> None:
    said = '<tool_call>\n{"name": "crew.hire", "arguments": {}}\n</tool_call>'
    crew = {"type": "namespace", "name": "crew", "tools": [{"type": "function", "name": "hire"}]}
    async with served({"21 degrees": "It is warm.", "like in Paris": said}) as house:
        body = {"input": TALK, "tools": [*FLAT, crew]}
        (call,) = (await house.post(RESPONSES, body)).json()["output"]
        assert (call["namespace"], call["name"]) == ("crew", "hire")
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "21 degrees"}
        await house.post(RESPONSES, {**body, "input": [*TALK, call, output]})
        assert '"name": "crew.hire"' in house.stage.prompts_seen[-1][1].partition("assistant")[2]


async def test_system_and_user_items_in_a_row_are_one_turn_each() -> None:
    roles = ("developer", "system", "user", "user")
    items = [{"role": role, "content": f"What is {n}?"} for n, role in enumerate(roles)]
    async with served(CALLS) as house:
        await house.post(RESPONSES, {"input": items})
        prompt = house.stage.prompts_seen[-1][1]
        assert "What is 0?\n\nWhat is 1?" in prompt
        assert "What is 2?\n\nWhat is 3?" in prompt


async def test_a_messages_events_come_in_anthropics_order() -> None:
    async with served(CALLS) as house:
        body = {"messages": TALK, "max_tokens": 200, "tools": CLAUDES}
        told = await events(house, MESSAGES, body)
        assert kinds(told) == [
            "message_start",
            *("content_block_start", "content_block_delta", "content_block_stop") * 2,
            *("message_delta", "message_stop"),
        ]
        assert told[0]["message"]["usage"]["input_tokens"] > 0
        assert told[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        pieces = [one["delta"].get("partial_json", "") for one in told if "index" in one and "delta" in one]
        assert json.loads("".join(pieces)) == {"city": "Paris"}
        whole = (await house.post(MESSAGES, body)).json()
        text, use = whole["content"]
        assert (text["text"], use["name"], use["input"]) == ("Let me look.", "get_weather", {"city": "Paris"})
        result = {
            "type": "tool_result",
            "tool_use_id": use["id"],
            "content": [{"type": "text", "text": "21 degrees"}],
        }
        past = [
            *TALK,
            {"role": "assistant", "content": whole["content"]},
            {"role": "user", "content": [result]},
        ]
        answer = (await house.post(MESSAGES, {**body, "messages": past, "system": "Be kind."})).json()
        assert (answer["content"][0]["text"], answer["stop_reason"]) == ("It is warm.", "end_turn")
        assert use["id"].removeprefix("toolu_") not in (use["id"], "")


@pytest.mark.parametrize(
    ("more", "reason", "hit"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 1}, "max_tokens", None),
        ({"stop_sequences": ["test"]}, "stop_sequence", "test"),
    ],
)
async def test_why_a_message_ended(more: Any, reason: str, hit: str | None) -> None:
    async with served(CALLS) as house:
        body = {"messages": [{"role": "user", "content": "What is it?"}], "max_tokens": 50, **more}
        answer = (await house.post(MESSAGES, body)).json()
        assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, hit)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
async def test_a_forced_tool_is_held_to_its_schema(choice: Any) -> None:
    said = (
        '{"city": "Rome"}' if "name" in choice else '[{"name": "get_weather", "arguments": {"city": "Rome"}}]'
    )
    async with served({"like in Paris": said}) as house:
        body = {"messages": TALK, "max_tokens": 200, "tools": CLAUDES, "tool_choice": choice}
        answer = (await house.post(MESSAGES, body)).json()
        assert (answer["stop_reason"], answer["content"][0]["input"]) == ("tool_use", {"city": "Rome"})
        assert house.opened()[-1].form is not None


async def test_counted_tokens_are_the_prompts() -> None:
    async with served(CALLS) as house:
        body = {"messages": [{"role": "user", "content": "What is it?"}], "system": "Be kind."}
        counted = (await house.post(f"{MESSAGES}/count_tokens", body)).json()["input_tokens"]
        usage = (await house.post(MESSAGES, {**body, "max_tokens": 9})).json()["usage"]
        assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (RESPONSES, {}, "input", "required"),
        (RESPONSES, {"input": "Hi", "previous_response_id": "r"}, "previous_response_id", "send the whole"),
        (RESPONSES, {"input": "Hi", "background": True}, "background", "not supported"),
        (RESPONSES, {"input": "Hi", "tools": [{"type": "file_search"}]}, "tools.0", "file_search"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "item_reference"),
        (RESPONSES, {"input": [{"role": "user", "content": [IMAGE]}]}, "input.0.content", "only blocks"),
        (RESPONSES, {"input": [*TALK, WRONG], "instructions": "Be brief."}, "input.1", "input.1"),
        (RESPONSES, {"input": [*TALK, *TALK, WRONG]}, "input.2", "input.2"),
        (RESPONSES, {"input": "Hi", "max_output_tokens": 5000}, "input", "context length"),
        (RESPONSES, {"input": "Hi", "max_output_tokens": 0}, "max_output_tokens", "> 0"),
        (RESPONSES, {"input": "Hi", "tool_choice": "required"}, "tool_choice", "needs tools"),
        (RESPONSES, {"input": []}, "input", "must not be empty"),
        (RESPONSES, {"input": "Hi", "tools": FLAT, "tool_choice": ALLOWED}, "tool_choice", "'required'"),
        (RESPONSES, {"input": "Hi", "text": {"verbosity": "low"}}, "text.verbosity", "'medium'"),
        (RESPONSES, {"input": "Hi", "include": [LOGPROBS]}, "include", "not supported"),
        (RESPONSES, {"input": "Hi", "max_tokens": 5}, "max_tokens", "did you mean max_output_tokens?"),
        (MESSAGES, {"messages": TALK}, "max_tokens", "required"),
        (MESSAGES, {"messages": TALK, "max_tokens": 5, "stop": ["x"]}, "stop", "mean stop_sequences?"),
        (MESSAGES, {"messages": [], "max_tokens": 5}, "messages", "must not be empty"),
        (MESSAGES, {"messages": TALK, "max_tokens": 0}, "max_tokens", "> 0"),
        (MESSAGES, {"messages": NAMELESS, "system": "Be brief.", "max_tokens": 5}, "messages.1", "string"),
        (MESSAGES, {"messages": LONG, "max_tokens": 5}, "messages", "prompt is too long"),
        (MESSAGES, {"messages": TALK, "max_tokens": 5, "temperature": 1.5}, "temperature", "less than"),
        (MESSAGES, {"messages": TALK, "max_tokens": 5, "mcp_servers": [{}]}, "mcp_servers", "not supported"),
        (MESSAGES, {"messages": [*TALK, BEGUN], "max_tokens": 5}, "messages.1", "must not be the assistant"),
        (MESSAGES, {"messages": TALK, "max_tokens": 5, "tools": [BASH]}, "tools.0", "bash"),
        (MESSAGES, {"messages": TALK, "max_tokens": 5, "tools": [{"name": "no name"}]}, "tools.0", "match"),
    ],
)  # fmt: skip
@pytest.mark.asyncio(loop_scope="module")
async def test_what_agents_are_refused(
    shared_house: Served, path: str, body: Any, param: str, words: str
) -> None:
    answer = await shared_house.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"]
    assert "literal" not in error["message"], "a name of Python's types"
    assert (answer.json().get("type") == "error") is (path == MESSAGES)


async def test_what_agents_send_by_default_is_taken() -> None:
    usual = {"text": {"verbosity": "medium"}, "include": ["reasoning.encrypted_content"], "max_tool_calls": 3}
    async with served(CALLS) as house:
        assert (await house.post(RESPONSES, {"input": "What is it?", **usual})).status_code == 200


async def test_an_unknown_model_in_anthropics_words() -> None:
    async with served(CALLS) as house:
        answer = await house.post(MESSAGES, {"model": "claude", "messages": TALK, "max_tokens": 5})
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")


@pytest.mark.parametrize(
    ("path", "body"),
    [(RESPONSES, {"input": "What is it?"}), (MESSAGES, {"messages": WHAT, "max_tokens": 32_000})],
)
async def test_an_agents_limit_is_what_the_context_holds(path: str, body: Any) -> None:
    async with served(CALLS) as house:
        answer = await house.post(path, body)
        usage = answer.json()["usage"]
        (opening,) = house.opened()
        assert opening.limit == 2048 - usage["input_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (RESPONSES, {"input": "What is it?"}, "max_output_tokens"),
        (MESSAGES, {"messages": WHAT}, "max_tokens"),
    ],
)
async def test_an_agents_limit_of_minus_1_is_none(path: str, body: Any, field: str) -> None:
    async with served(CALLS) as house:
        answer = await house.post(path, {**body, field: -1, "top_p": 0, "temperature": 1})
        assert answer.status_code == 200
        (opening,) = house.opened()
        assert opening.limit == 2048 - opening.prompt
        assert opening.sampling.temperature == 0


@pytest.mark.parametrize("content", [None, [], ""])
@pytest.mark.parametrize(("path", "field"), [(RESPONSES, "input"), (MESSAGES, "messages")])
async def test_an_agents_turn_without_content_is_an_empty_turn(path: str, field: str, content: Any) -> None:
    async with served(CALLS) as house:
        turns = [*TALK, {"role": "assistant", "content": content}, *WHAT]
        more = {"max_tokens": 5} if path == MESSAGES else {}
        answer = await house.post(path, {field: turns, **more})
        assert answer.status_code == 200, answer.text


async def test_an_agents_search_is_not_offered_and_no_error() -> None:
    async with served(CALLS) as house:
        answer = await house.post(RESPONSES, {"input": "What is it?", "tools": [{"type": "web_search"}]})
        assert answer.json()["output"][0]["content"][0]["text"] == "A test."


async def test_a_token_in_anthropics_header() -> None:
    body = {"messages": TALK, "max_tokens": 50}
    async with served(CALLS, tokens=Tokens(None, "secret-of-mine")) as house:
        for key, status in (("secret-of-mine", 200), ("another", 401)):
            answer = await house.post(MESSAGES, body, headers={"x-api-key": key})
            assert answer.status_code == status
        assert answer.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_what_breaks_on_the_way_is_the_streams_last_event(path: str) -> None:
    async with served(LETTERS) as house:
        house.going.clear()
        asked = [{"role": "user", "content": "Count."}]
        body = {"input": "Count."} if path == RESPONSES else {"messages": asked, "max_tokens": 300}
        reading = asyncio.create_task(events(house, path, body))
        await house.asked()
        await house.steps(6)
        house.stage.engine.handle(MasterLeaving("the master is shutting down"))
        *_, last = await reading
        error = last["response"]["error"] if path == RESPONSES else last["error"]
        assert last["type"] == ("response.failed" if path == RESPONSES else "error")
        assert "shutting down" in error["message"]
