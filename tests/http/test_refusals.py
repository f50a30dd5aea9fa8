"""What the HTTP endpoint refuses: the status, and one clear line in OpenAI's shape with the field's name.

Scripts say what is written.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
import pytest_asyncio

from specsot.errors import SpecsotError
from specsot_master.engine import EngineConfig
from specsot_master.http.errors import body_of, response_of
from tests.http.house import Served, served
from tests.master.letters import SAYS
from tests.master.stage import turn

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio(loop_scope="module")]

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "What is it?"}]}
HI = [{"role": "user", "content": "What is it?"}]
PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
NAMED = {"type": "function", "function": {"name": "hear"}}


@pytest_asyncio.fixture(loop_scope="module")
async def house(shared_house: Served) -> Served:
    return shared_house


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "messages", "required"),
        ({"messages": []}, "messages", "messages: must not be empty"),
        ({"messages": "Hi"}, "messages", "list"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "string"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages.0.content", "string"),
        ({"messages": [5]}, "messages.0", "messages.0: must be an object"),
        ({"messages": [{"role": "boss", "content": "Hi"}]}, "messages.0.role", "'developer', 'user'"),
        ({"messages": [{"role": "user", "content": None}]}, "messages", "the last message must not be empty"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages", "the last message must not be empty"),
        ({"messages": [{"role": "user", "content": [{}] * 4097}]}, "messages", "at most 4096 parts"),
        ({"messages": PICTURE}, "messages.0.content", "only parts of type text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content", "only parts"),
        ({"messages": [{**HI[0], "function_call": {"a": 1}}]}, "messages.0.function_call", "not supported"),
        ({"messages": HI, "temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"messages": HI, "temperature": 2.5}, "temperature", "less than or equal to 2"),
        ({"messages": HI, "temperature": "hot"}, "temperature", "number"),
        ({"messages": HI, "temperature": True}, "temperature", "number"),
        ({"messages": HI, "top_p": -0.1}, "top_p", "[0, 1]"),
        ({"messages": HI, "n": 0}, "n", "greater than or equal to 1"),
        ({"messages": HI, "n": 129}, "n", "less than or equal to 128"),
        ({"messages": HI, "max_tokens": 0}, "max_tokens", "max_tokens must be whole, > 0"),
        ({"messages": HI, "max_tokens": "5"}, "max_tokens", "integer"),
        ({"messages": HI, "max_completion_tokens": -3}, "max_completion_tokens", "must be whole, > 0"),
        ({"messages": HI, "max_tokens": 5000}, "messages", "context length is 2048"),
        ({"messages": HI, "presence_penalty": 3}, "presence_penalty", "[-2, 2]"),
        ({"messages": HI, "logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"messages": HI, "logit_bias": {"99999": 1}}, "logit_bias", "names token 99999"),
        ({"messages": HI, "logit_bias": {"1": 101}}, "logit_bias", "[-100, 100]"),
        ({"messages": HI, "top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "[0, 20]"),
        ({"messages": HI, "stop": [""]}, "stop", "must not hold an empty string"),
        ({"messages": HI, "stop": ["x"] * 17}, "stop", "at most 16"),
        ({"messages": HI, "seed": 2**64}, "seed", ""),
        ({"messages": HI, "tools": [{"type": "web_search"}]}, "tools.0.type", "function"),
        ({"messages": HI, "tools": TOOLS, "tool_choice": NAMED}, "tool_choice", "no tool is called 'hear'"),
        ({"messages": HI, "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"messages": HI, "tools": TOOLS, "specsot": {"mode": "sot"}}, "tools", "a plan calls no tools"),
        ({"messages": HI, "tools": TOOLS, "guided_regex": "a+"}, "tools", "calls none"),
        ({"messages": HI, "functions": [{}]}, "functions", 'set function_call to "none"'),
        ({"messages": HI, "chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs", "not"),
        (
            {"messages": HI, "chat_template_kwargs": {"style": "terse"}},
            "chat_template_kwargs",
            "not supported",
        ),
        ({"messages": HI, "reasoning_effort": "high"}, "reasoning_effort", "not supported"),
        ({"messages": HI, "thinking_token_budget": 10}, "thinking_token_budget", "not supported"),
        ({"messages": HI, "verbosity": "low"}, "verbosity", "not supported"),
        ({"messages": HI, "echo": True}, "echo", "not supported"),
        ({"messages": HI, "max_token": 9}, "max_token", "did you mean max_tokens?"),
        ({"messages": HI, "maxTokens": 9}, "maxTokens", "did you mean max_tokens?"),
        ({"messages": HI, "temperatuer": 1}, "temperatuer", "did you mean temperature?"),
        ({"messages": HI, "presense_penalty": 1}, "presense_penalty", "did you mean presence_penalty?"),
        ({"messages": HI, "max_new_tokens": 9}, "max_new_tokens", "did you mean max_tokens?"),
        ({"messages": HI, "mode": "sot"}, "mode", "did you mean specsot.mode?"),
        ({"messages": HI, "structural_tag": "{}"}, "structural_tag", "not supported"),
        ({"messages": HI, "min_tokens": 3, "max_tokens": 2}, "min_tokens", "in [0, 2]"),
        ({"messages": HI, "min_tokens": 3, "guided_regex": "a+"}, "min_tokens", "where the answer ends"),
        ({"messages": HI, "stop_token_ids": [9000]}, "stop_token_ids", "names token 9000"),
        ({"messages": HI, "prompt_logprobs": 1}, "prompt_logprobs", "not supported"),
        ({"messages": HI, "specsot": {"mode": "best"}}, "specsot.mode", "'auto', 'sot' or 'direct'"),
        ({"messages": HI, "specsot": {"max_parallel": 0}}, "specsot.max_parallel", "> 0"),
        ({"messages": HI, "specsot": {"tools": ["no name"]}}, "specsot.tools", "identifiers"),
        ({"messages": HI, "specsot": {"branch": True}}, "specsot.branch", "not permitted"),
        ({"messages": HI, "response_format": {"type": "yaml"}}, "response_format.type", "json_object"),
        (
            {"messages": HI, "response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "given",
        ),
        (
            {
                "messages": HI,
                "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "circle"}}},
            },
            "response_format",
            "response_format: ",
        ),
        (
            {"messages": HI, "guided_regex": "a+", "response_format": {"type": "json_object"}},
            "guided_regex",
            "one form",
        ),
        ({"messages": HI, "guided_regex": "(", "specsot": {"mode": "sot"}}, "guided_regex", "not a plan"),
        ({"messages": HI, "model": "demo:sot", "guided_regex": "a", "specsot": {}}, "guided_regex", "a plan"),
        ({"messages": HI, "model": "demo:sot", "tools": TOOLS, "specsot": {}}, "tools", "calls no tools"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None, "surrogate"),
        ([], "body", ""),
    ],
)
async def test_a_wrong_chat(house: Served, body: Any, param: str | None, words: str) -> None:
    if isinstance(body, dict) and "model" not in body:
        body = {**body, "specsot": {"mode": "direct", **body.get("specsot", {})}}
    answer = await post(house, CHAT, body)
    told = answer.json()["error"]
    assert answer.status_code == 400, told
    assert told["type"] == "invalid_request_error"
    assert words in told["message"]
    if param not in (None, "body"):
        assert told["param"] == param
    assert len(told["message"]) < 1200
    assert "Traceback" not in answer.text
    assert house.opened() == []


async def post(house: Served, path: str, body: Any) -> Any:
    """JSON as strange clients write it: halves of characters, NaN."""
    async with house.client() as client:
        headers = {"content-type": "application/json"}
        return await client.post(path, content=json.dumps(body).encode(), headers=headers)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "prompt", "required"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "0 prompts"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": [1, "two"]}, "prompt", "string"),
        ({"prompt": "a", "stop": 5}, "stop", "string"),
        ({"prompt": [9000]}, "prompt", "names token 9000"),
        ({"prompt": [-1]}, "prompt", "whole"),
        ({"prompt": [1] * 2048}, "prompt", "context length is 2048"),
        ({"prompt": "x" * 600_000}, "prompt", "600000 characters in the prompt, which cannot fit"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "[0, 20]"),
        ({"prompt": "a", "echo": True, "logprobs": 21}, "logprobs", "[0, 20]"),
        ({"prompt": "a", "suffix": "z"}, "suffix", "not supported"),
        ({"prompt": "a", "logprob": 1}, "logprob", "did you mean logprobs?"),
        ({"prompt": "a", "best_of": 3}, "best_of", "not supported"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt", "130 answers"),
        ({"prompt": "a", "max_tokens": -2}, "max_tokens", "> 0"),
        ({"prompt": "a", "specsot": {"mode": "sot"}}, "specsot.mode", "have no plan"),
    ],
)
async def test_a_wrong_completion(house: Served, body: Any, param: str | None, words: str) -> None:
    answer = await house.post(PLAIN, body)
    told = answer.json()["error"]
    assert answer.status_code == 400, told
    assert words in told["message"]
    assert param is None or told["param"] == param
    assert house.opened() == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "the body is not JSON: Expecting"),
        (b"", "required"),
        (b"\xff", "it is not UTF-8"),
        (b"nonsense", "the body is not JSON: Expecting"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"1e999", "must be an object"),
        (b"9" * 5000, "too many digits"),
    ],
)
async def test_what_is_no_json(house: Served, body: bytes, words: str) -> None:
    async with house.client() as client:
        answer = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert words in answer.json()["error"]["message"]


async def test_numbers_that_are_none(house: Served) -> None:
    for value in ("NaN", "Infinity", "-Infinity"):
        body = f'{{"messages":[{{"role":"user","content":"Hi"}}],"temperature":{value}}}'
        async with house.client() as client:
            answer = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
        told = answer.json()["error"]
        assert (answer.status_code, told["message"]) == (400, "temperature: Input should be a finite number")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", CHAT, 405), ("POST", "/health", 405), ("DELETE", CHAT, 405)],
)
async def test_no_such_place(house: Served, method: str, path: str, status: int) -> None:
    async with house.client() as client:
        answer = await client.request(method, path, json={})
    assert answer.status_code == status
    assert path in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "asked", "part"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "word " * 3000}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 600_000}]}, "messages"),
        (PLAIN, {"prompt": "word " * 3000}, "prompt"),
        (PLAIN, {"prompt": [1] * 3000}, "prompt"),
        (PLAIN, {"prompt": "x" * 600_000}, "prompt"),
    ],
)
async def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for(
    house: Served, path: str, asked: dict[str, Any], part: str
) -> None:
    told = (await house.post(path, {**asked, "max_tokens": 15})).json()["error"]
    assert (told["code"], told["param"]) == ("context_length_exceeded", part)
    assert told["message"].startswith("This model's maximum context length is 2048 tokens. However, you")
    assert told["message"].endswith(f"reduce the length of the {part} or completion.")
    assert "skeleton" not in told["message"]
    if "x" not in str(asked):
        assert f"in the {part}, 15 in the completion)" in told["message"]


async def test_another_model(house: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await house.openai().chat.completions.create(model="gpt-9", messages=HI)
    assert caught.value.code == "model_not_found"
    assert "only 'demo'" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        await house.openai().chat.completions.create(model="gpt-9", messages=HI, stream=True)


async def test_no_room() -> None:
    async with served(config=EngineConfig(model="demo", live=1, queue=0, retry_after=2.5)) as full:
        answer = await full.post(CHAT, {"messages": HI})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "3"
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        with pytest.raises(openai.RateLimitError):
            await full.openai().chat.completions.create(model="demo", messages=HI, stream=True)


async def test_more_answers_than_there_is_room_for_are_refused_together() -> None:
    async with served(config=EngineConfig(model="demo", live=1, queue=2)) as house:
        body = {"messages": HI, "n": 5, "specsot": {"mode": "direct"}}
        assert (await house.post(CHAT, body)).status_code == 429
        assert (await house.post(CHAT, {**body, "stream": True})).status_code == 429
        await house.quiet()
        house.stage.assert_clean()


async def test_no_ring() -> None:
    async with served() as house:
        house.stage.ring.now = None
        for path, body in (
            (CHAT, {"messages": HI}),
            (PLAIN, {"prompt": "a"}),
            ("/generate", {"prompt": "a"}),
        ):
            answer = await house.post(path, body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
            assert "waiting for 1 of 2 workers" in answer.json()["error"]["message"]


async def test_a_deadline(house: Served) -> None:
    house.going.clear()
    headers = {"x-request-timeout": "5"}
    asking = asyncio.create_task(house.post(CHAT, {"messages": HI}, headers=headers))
    while not house.stage.time.alarms:
        await turn()
    house.stage.time.advance(1000)
    answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    house.going.set()


@pytest.mark.parametrize("timeout", ["soon", "0", "-1", "nan", "1e10", "5e-324", "0.0009"])
async def test_a_deadline_that_is_none(house: Served, timeout: str) -> None:
    answer = await house.post(CHAT, {"messages": HI}, headers={"x-request-timeout": timeout})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-timeout")


@pytest.mark.parametrize("id", ["x" * 129, "two\tparts"])
async def test_an_id_that_is_none(house: Served, id: str) -> None:
    answer = await house.post(CHAT, {"messages": HI}, headers={"x-request-id": id})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-id")


async def test_a_plan_without_a_line() -> None:
    async with served({**SAYS, "Write the plan.": "[PLAN]\nno line at all\n[END]"}) as house:
        body = {"messages": HI, "specsot": {"mode": "sot", "constraint": False}}
        answer = await house.post(CHAT, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "no_valid_plan")
        assert "no line at all" in answer.json()["error"]["plan"]
        stream = await house.openai().chat.completions.create(
            model="demo", messages=HI, stream=True, extra_body={"specsot": body["specsot"]}
        )
        with pytest.raises(openai.APIError, match="plan"):
            _ = [chunk async for chunk in stream]
        await house.quiet()
        house.stage.assert_clean()


async def test_every_error_has_a_status() -> None:
    def all_kinds(kind: type[SpecsotError]) -> list[type[SpecsotError]]:
        return [kind, *(one for child in kind.__subclasses__() for one in all_kinds(child))]

    import specsot.errors

    for kind in all_kinds(SpecsotError):
        if kind.__module__ == specsot.errors.__name__:
            error = kind("words", "text") if kind is specsot.errors.PlanError else kind("words")
            answer = response_of(error)
            assert 400 <= answer.status_code < 600
            assert json.loads(bytes(answer.body))["error"]["message"] == "words"


async def test_nothing_of_python_reaches_a_client() -> None:
    assert response_of(KeyError("/home/somebody/secret")).status_code == 500
    assert body_of(KeyError("/home/somebody/secret"))["error"]["message"] == "internal error"


async def test_an_internal_error_is_reported_as_such() -> None:
    class Broken:
        async def open(self, *_: Any) -> Any:
            raise KeyError("/home/somebody/secret")

    async with served() as house:
        house.desk._source = Broken()
        answer = await house.post(CHAT, {"messages": HI})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "internal error"
