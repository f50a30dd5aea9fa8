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


async def test_a_completion_continues_the_prompt_as_it_stands() -> None:
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


async def test_sixteen_tokens_unless_another_limit_is_given() -> None:
    async with served({"Once upon": "word " * 40}) as house:
        assert (await go_on(house)).usage.completion_tokens == 16
        assert (await go_on(house, max_tokens=20)).usage.completion_tokens == 20


async def test_fewer_where_the_context_holds_no_more() -> None:
    """Nobody asked for sixteen."""
    long = "%" * (2048 - 3)
    async with served({long: "word " * 40}) as house:
        (token,) = house.stage.text.encode("%")
        assert (await go_on(house, [token] * len(long))).usage.completion_tokens == 3


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


@pytest.mark.parametrize("tokens", [0, 1])
async def test_echo_with_logprobs_tells_those_of_the_prompt(tokens: int) -> None:
    """As lm-eval asks for them: token ids, several prompts, one token behind them or none."""
    async with served(SAYS) as house:
        asked = [list(house.stage.text.encode(prompt)) for prompt in ("Once upon", "Twice")]
        answer = await go_on(house, asked, echo=True, logprobs=2, max_tokens=tokens)
        for choice, prompt, name in zip(answer.choices, asked, ("Once upon", "Twice")):
            told = choice.logprobs
            written = list(house.stage.text.encode(SAYS[name]))[:tokens]
            expected = [pytest.approx(chance_of(token, 2).logprob) for token in [*prompt[1:], *written]]
            assert told.token_logprobs == [None, *expected]
            assert told.top_logprobs[0] is None
            assert all(len(top) in (2, 3) for top in told.top_logprobs[1:])
            assert choice.text == name + house.stage.text.decode(written)
            assert "".join(told.tokens) == choice.text
            assert told.text_offset == [len("".join(told.tokens[:n])) for n in range(len(told.tokens))]
            assert choice.finish_reason == "length"
        assert answer.usage.completion_tokens == 2 * tokens
        stream = await go_on(house, asked[0], echo=True, logprobs=2, max_tokens=tokens, stream=True)
        pieces = [chunk.choices[0] async for chunk in stream]
        whole = answer.choices[0]
        assert "".join(piece.text for piece in pieces) == whole.text
        for field in ("tokens", "token_logprobs", "text_offset"):
            found = [one for piece in pieces if piece.logprobs for one in getattr(piece.logprobs, field)]
            assert found == getattr(whole.logprobs, field)
        assert pieces[-1].finish_reason == "length"
        await house.quiet()
        house.stage.assert_clean()


async def test_an_echo_is_the_prompt_itself_and_offsets_refer_to_the_text() -> None:
    """Special tokens show in the echo of a text that holds them, and not in that of ids."""
    prompt = "<|im_start|>Once upon"
    async with served({prompt: SAYS["Once upon"], "Once upon": SAYS["Once upon"]}) as house:
        ids = list(house.stage.text.encode_prompt(prompt))
        for asked, shown in ((prompt, prompt), (ids, "Once upon")):
            choice = (await go_on(house, asked, echo=True, logprobs=1)).choices[0]
            assert choice.text == shown + SAYS["Once upon"]
            told = choice.logprobs
            places = [
                (place, token)
                for place, token in zip(told.text_offset, told.tokens)
                if token[:6] != "bytes:" and not (token == "<|im_start|>" and asked is ids)
            ]
            assert all(choice.text[place:].startswith(token) for place, token in places)
            stream = await go_on(house, asked, echo=True, logprobs=1, stream=True)
            pieces = [chunk.choices[0] async for chunk in stream]
            found = [one for piece in pieces if piece.logprobs for one in piece.logprobs.text_offset]
            assert found == told.text_offset


async def test_offsets_of_a_stream_whose_first_text_is_held_back() -> None:
    async with served({"Once upon": " there, the end"}) as house:
        whole = (await go_on(house, logprobs=0, stop="there is")).choices[0]
        stream = await go_on(house, logprobs=0, stop="there is", stream=True)
        pieces = [chunk.choices[0] async for chunk in stream]
        assert "".join(piece.text for piece in pieces) == whole.text == " there, the end"
        found = [one for piece in pieces if piece.logprobs for one in piece.logprobs.text_offset]
        assert found == whole.logprobs.text_offset


async def test_no_token_at_all() -> None:
    async with served(SAYS) as house:
        answer = await go_on(house, max_tokens=0)
        assert (answer.choices[0].text, answer.usage.completion_tokens) == ("", 0)


async def test_stop_tokens_and_what_ended_it() -> None:
    """Token ids end it beside the model's own end; either may be part of the text."""
    async with served(SAYS) as house:
        said = SAYS["Once upon"]
        tokens = house.stage.text.encode(said)
        stop = {"extra_body": {"stop_token_ids": [tokens[3]]}}
        shown = {"extra_body": {**stop["extra_body"], "include_stop_str_in_output": True}}
        late = {"extra_body": {**stop["extra_body"], "min_tokens": 4}}
        strings = {"stop": "你", "extra_body": {"include_stop_str_in_output": True}}
        early = {"stop": [" a", "你"], "extra_body": {"min_tokens": 4}}
        before, after = (house.stage.text.decode(tokens[:n]) for n in (3, 4))
        expected = [(before, tokens[3]), (after, tokens[3]), (said, None), (" a time, 你", "你")]
        expected += [(" a time, ", "你"), (said, None)]
        for wish, (text, reason) in zip((stop, shown, late, strings, early, {}), expected):
            choice = (await go_on(house, **wish)).choices[0]
            assert (choice.text, choice.stop_reason, choice.finish_reason) == (text, reason, "stop")
        told = [chunk.choices[0] async for chunk in await go_on(house, stream=True, **shown)]
        assert "".join(choice.text for choice in told) == after
        assert told[-1].stop_reason == tokens[3]
        count = (await go_on(house, **shown)).usage.completion_tokens
        assert (count, (await go_on(house, **stop)).usage.completion_tokens) == (4, 4)


async def test_models(house: Served) -> None:
    client = house.openai()
    listed = await client.models.list()
    assert [model.id for model in listed.data] == ["demo", "demo:auto", "demo:sot"]
    assert (await house.get("/v1/models/")).json() == (await house.get("/v1/models")).json()
    assert (await client.models.retrieve("demo")).owned_by == "specsot"
    with pytest.raises(openai.NotFoundError, match="no model named 'other'"):
        await client.models.retrieve("other")
