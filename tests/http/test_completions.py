"""/v1/completions and /v1/models through OpenAI's own client.

Scripts say what is written.
"""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.http.house import Served, served
from tests.master.fake_ring import chance_of

pytestmark = pytest.mark.timeout(60)

SAYS = {"Once upon": " a time, 你好.", "Twice": " told", "Thrice": " gone by and by"}


async def go_on(house: Served, prompt: Any = "Once upon", **more: Any) -> Any:
    return await house.openai().completions.create(model="demo", prompt=prompt, **more)


async def test_a_text_goes_on_as_it_stands() -> None:
    async with served(SAYS) as house:
        answer = await go_on(house)
        assert (answer.object, answer.choices[0].text) == ("text_completion", SAYS["Once upon"])
        assert answer.choices[0].finish_reason == "stop"
        assert answer.id.startswith("cmpl-")
        assert house.stage.prompts_seen[0][1] == "Once upon", "no chat template"
        assert answer.usage.prompt_tokens == len(house.stage.text.encode("Once upon"))
        await house.quiet()
        house.stage.assert_clean()


async def test_a_streamed_one() -> None:
    async with served(SAYS) as house:
        stream = await go_on(house, stream=True, stream_options={"include_usage": True})
        told = [chunk async for chunk in stream]
        choices = [choice for chunk in told for choice in chunk.choices]
        assert "".join(choice.text for choice in choices) == SAYS["Once upon"]
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
        assert told[-1].usage.completion_tokens == len(house.stage.text.encode(SAYS["Once upon"])) + 1


async def test_sixteen_tokens_unless_told_otherwise() -> None:
    async with served({"Once upon": "word " * 40}) as house:
        assert (await go_on(house)).usage.completion_tokens == 16
        assert (await go_on(house, max_tokens=20)).usage.completion_tokens == 20


async def test_several_prompts_and_several_answers_to_each() -> None:
    async with served(SAYS) as house:
        answer = await go_on(house, ["Once upon", "Twice"], n=2)
        texts = [choice.text for choice in answer.choices]
        assert texts == [SAYS["Once upon"]] * 2 + [SAYS["Twice"]] * 2
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        sizes = [len(house.stage.text.encode(prompt)) for prompt in ("Once upon", "Twice")]
        assert answer.usage.prompt_tokens == sum(sizes)


async def test_prompts_in_tokens() -> None:
    async with served(SAYS) as house:
        once, twice = (list(house.stage.text.encode(prompt)) for prompt in ("Once upon", "Twice"))
        assert (await go_on(house, once)).choices[0].text == SAYS["Once upon"]
        both = await go_on(house, [once, twice])
        assert [choice.text for choice in both.choices] == [SAYS["Once upon"], SAYS["Twice"]]


async def test_echo() -> None:
    async with served(SAYS) as house:
        assert (await go_on(house, echo=True)).choices[0].text == "Once upon" + SAYS["Once upon"]
        stream = await go_on(house, echo=True, stream=True)
        told = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in told) == "Once upon" + SAYS["Once upon"]


async def test_logprobs() -> None:
    async with served(SAYS) as house:
        answer = await go_on(house, logprobs=2)
        told, text = answer.choices[0].logprobs, answer.choices[0].text
        tokens = house.stage.text.encode(SAYS["Once upon"])
        assert told.token_logprobs == [pytest.approx(chance_of(token, 2).logprob) for token in tokens]
        assert len(told.tokens) == len(told.text_offset) == len(told.top_logprobs) == len(tokens)
        whole = [
            (place, token) for place, token in zip(told.text_offset, told.tokens) if token[:6] != "bytes:"
        ]
        assert all(text[place:].startswith(token) for place, token in whole)
        assert len(whole) > 3
        streamed = [chunk async for chunk in await go_on(house, logprobs=2, stream=True)]
        pieces = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices[0].logprobs]
        assert [place for piece in pieces for place in piece.text_offset] == told.text_offset


async def test_models(house: Served) -> None:
    client = house.openai()
    listed = await client.models.list()
    assert [model.id for model in listed.data] == ["demo", "demo:auto", "demo:sot"]
    assert (await house.get("/v1/models/")).json() == (await house.get("/v1/models")).json()
    assert (await client.models.retrieve("demo")).owned_by == "specsot"
    with pytest.raises(openai.NotFoundError, match="no model named 'other'"):
        await client.models.retrieve("other")
