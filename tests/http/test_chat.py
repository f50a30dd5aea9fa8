"""/v1/chat/completions through OpenAI's own client, whole and streamed.

Scripts say what is written.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from specsot.params import Message, Sampling
from specsot_master.prompts import Prompts
from tests.http.house import Served, served
from tests.master.fake_ring import chance_of
from tests.master.letters import ANSWER, PLAN, SAYS
from tests.master.stage import BASE, repeat, turn

pytestmark = pytest.mark.timeout(60)

WHAT = [{"role": "user", "content": "What is it?"}]
LETTERS = [{"role": "user", "content": "Tell me about letters."}]
COUNT = [{"role": "user", "content": "Count."}]
SAID = SAYS["What is"]


def planning(mode: str, **more: Any) -> dict[str, Any]:
    return {"specsot": {"mode": mode, **more}}


async def ask(house: Served, messages: Any = WHAT, mode: str = "direct", **more: Any) -> Any:
    extra = more.pop("extra_body", planning(mode))
    chat = house.openai().chat.completions
    return await chat.create(model="demo", messages=messages, extra_body=extra, **more)


async def chunks(house: Served, messages: Any = WHAT, mode: str = "direct", **more: Any) -> list[Any]:
    stream = await ask(house, messages, mode, stream=True, **more)
    return [chunk async for chunk in stream]


def text_of(told: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in told for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


async def test_a_whole_answer(house: Served) -> None:
    answer = await ask(house)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", SAID, "stop")
    assert choice.logprobs is None
    assert (answer.object, answer.model) == ("chat.completion", "demo")
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint == "fp_0123456789ab"
    usage = answer.usage
    assert usage.completion_tokens == len(house.stage.text.encode(SAID)) + 1, "the end token counts"
    assert usage.completion_tokens_details.reasoning_tokens == 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 <= usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens


async def test_a_streamed_answer(house: Served) -> None:
    told = await chunks(house)
    assert text_of(told) == SAID
    assert (told[0].choices[0].delta.role, told[0].choices[0].delta.content) == ("assistant", "")
    assert [chunk.choices[0].finish_reason for chunk in told] == [None] * (len(told) - 1) + ["stop"]
    assert {chunk.object for chunk in told} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in told}) == 1
    assert all(chunk.usage is None for chunk in told)


async def test_a_stream_with_its_bill(house: Served) -> None:
    told = await chunks(house, stream_options={"include_usage": True})
    assert told[-1].choices == []
    assert told[-1].usage.completion_tokens == len(house.stage.text.encode(SAID)) + 1
    assert all(chunk.usage is None for chunk in told[:-1])


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_limit(house: Served, name: str) -> None:
    answer = await ask(house, COUNT, **{name: 5})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5
    assert (await chunks(house, COUNT, **{name: 5}))[-1].choices[0].finish_reason == "length"


async def test_without_a_limit_a_long_prompt_is_answered_with_what_the_context_holds(house: Served) -> None:
    answer = await ask(house, [{"role": "user", "content": "word " * 1500 + "What is it?"}])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (SAID, "stop")


async def test_the_newer_limit_counts(house: Served) -> None:
    answer = await ask(house, COUNT, max_tokens=50, max_completion_tokens=5)
    assert answer.usage.completion_tokens == 5


@pytest.mark.parametrize("stop", ["naïve", ["nothing", "naïve"]])
async def test_a_stop_string(house: Served, stop: Any) -> None:
    answer = await ask(house, stop=stop)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("It is ", "stop")
    assert text_of(await chunks(house, stop=stop)) == "It is "


async def test_several_answers_draw_from_seeds_that_follow_from_one(house: Served) -> None:
    answer = await ask(house, n=3, seed=2**63 - 2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {SAID}
    assert [opening.seed for opening in house.opened()] == [2**63 - 2, 2**63 - 1, 0]
    tokens = len(house.stage.text.encode(SAID)) + 1
    assert answer.usage.completion_tokens == 3 * tokens
    assert answer.usage.prompt_tokens == house.opened()[0].prompt, "the prompt is counted once"


async def test_several_streamed_answers(house: Served) -> None:
    told = await chunks(house, n=3)
    assert [text_of(told, index) for index in range(3)] == [SAID] * 3
    ends = [choice for chunk in told for choice in chunk.choices if choice.finish_reason]
    assert sorted(choice.index for choice in ends) == [0, 1, 2]
    assert len({opening.seed for opening in house.opened()}) == 3, "each draws its own"


@pytest.mark.parametrize("seed", [-1, -2, -(2**63), -(2**90)])
async def test_a_negative_seed_is_random(house: Served, seed: int) -> None:
    for _ in range(3):
        await ask(house, seed=seed)
    await ask(house, seed=seed, n=2)
    drawn = [opening.seed for opening in house.opened()]
    assert len(set(drawn)) == 5
    assert 2**63 - 1 not in drawn


async def test_top_p_0_is_greedy(house: Served) -> None:
    await ask(house, top_p=0, temperature=1.5)
    sampling = house.opened()[0].sampling
    assert (sampling.temperature, sampling.top_p) == (0, 1)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_a_limit_of_minus_1_is_none(house: Served, field: str) -> None:
    await ask(house, extra_body={field: -1})
    await ask(house)
    without, minus = (opening.limit for opening in house.opened())
    assert minus == without


async def test_a_turn_without_content_and_calls_is_an_empty_turn(house: Served) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}]
    await ask(house, [*turns, *WHAT])
    await ask(house, [turns[0], {"role": "assistant", "content": ""}, *WHAT])
    (_, without), (_, empty) = house.stage.prompts_seen
    assert without == empty


async def test_every_parameter_arrives(house: Served) -> None:
    await ask(
        house,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"7": 1, "3": -100},
        user="somebody",
        extra_body={"top_k": 12, "min_p": 0.125, "repetition_penalty": 1.5, **planning("direct")},
    )
    wanted = Sampling(0.5, 0.9, 12, 0.125, 1.5, 0.25, -0.5, ((3, -100.0), (7, 1.0)))
    assert house.opened()[0].sampling == wanted


async def test_nulls_and_unknown_names_are_tolerated(house: Served) -> None:
    nulls = dict.fromkeys(
        ("n", "stop", "seed", "temperature", "top_p", "logit_bias", "logprobs", "stream", "max_tokens")
    )
    idle = {"tools": [], "tool_choice": "none", "best_of": 1, "modalities": ["text"]}
    body = {"messages": WHAT, "metadata": {"a": "b"}, "store": True, **nulls, **idle, **planning("direct")}
    answer = await house.post("/v1/chat/completions", body)
    assert answer.json()["choices"][0]["message"]["content"] == SAID
    assert house.opened()[0].sampling == Sampling()


async def test_an_unknown_field_is_named_in_the_log_once(house: Served) -> None:
    """What says nothing about an answer is not; nor is anything refused beside what it resembles."""
    idle = {"prediction": {"type": "content", "content": "x"}, "safety_identifier": "a", "store": False}
    odd = {"flavour": 0.5, "models": ["demo"], "model": "demo", "min_keep": None}
    with capture_logs() as lines:
        for _ in range(2):
            await house.post("/v1/chat/completions", {"messages": WHAT, **idle, **odd})
    told = [line["field"] for line in lines if line["event"] == "unknown field ignored"]
    assert told == ["flavour", "models"]


@pytest.mark.parametrize(
    "idle",
    [
        {"tools": [{"type": "function", "function": {"name": "look"}}], "tool_choice": "none"},
        {"functions": [{"name": "look"}], "function_call": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none", "verbosity": "medium", "thinking_token_budget": 0},
        dict.fromkeys(("tools", "tool_choice", "chat_template_kwargs", "reasoning_effort", "verbosity")),
    ],
)
async def test_fields_that_ask_for_what_happens_anyway_are_taken(house: Served, idle: dict[str, Any]) -> None:
    answer = await house.post("/v1/chat/completions", {"messages": WHAT, **idle})
    assert answer.json()["choices"][0]["message"]["content"] == SAID


async def test_turns_in_parts_and_the_newer_word_for_system(house: Served) -> None:
    parts = [{"type": "text", "text": "What "}, {"type": "text", "text": "is it?"}]
    await ask(
        house,
        [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts, "name": "A"}],
    )
    asked = house.stage.prompts_seen[-1][1]
    assert "\nWhat is it?\n" in asked
    assert "system\nBe brief." in asked


async def test_logprobs(house: Served) -> None:
    answer = await ask(house, logprobs=True, top_logprobs=2)
    tokens = house.stage.text.encode(SAID)
    told = answer.choices[0].logprobs.content
    assert [one.logprob for one in told] == [pytest.approx(chance_of(token, 2).logprob) for token in tokens]
    assert b"".join(bytes(one.bytes) for one in told).decode() == SAID
    assert all(len(one.top_logprobs) == 2 for one in told)
    streamed = await chunks(house, logprobs=True)
    pieces = [chunk.choices[0].logprobs.content for chunk in streamed if chunk.choices[0].logprobs]
    assert [one.logprob for piece in pieces for one in piece] == [one.logprob for one in told]
    assert all(one.top_logprobs == [] for piece in pieces for one in piece)


async def test_a_plan_is_streamed_in_order_to_clients_that_do_not_request_branches(house: Served) -> None:
    told = await chunks(house, LETTERS, "sot")
    assert text_of(told) == ANSWER
    assert [hasattr(chunk.choices[0], "specsot") for chunk in told] == [False] * (len(told) - 1) + [True]


@pytest.mark.parametrize(
    ("default", "asked", "planned"),
    [
        ("direct", {}, False),
        ("direct", {"specsot": {"branches": True}}, False),
        ("direct", {"specsot": {"mode": "sot"}}, True),
        ("sot", {}, True),
        ("auto", {}, True),
        ("sot", {"specsot": {"mode": "direct"}}, False),
        ("sot", {"response_format": {"type": "json_object"}}, False),
        ("sot", {"specsot": {"pruning": {}}}, False),
        ("sot", {"tools": [{"type": "function", "function": {"name": "look"}}]}, False),
        ("direct", {"model": "demo:sot"}, True),
    ],
)
async def test_the_body_says_whether_it_is_planned_then_the_master(
    default: Any, asked: dict[str, Any], planned: bool
) -> None:
    says = {"Write the plan.": PLAN, "Write point": "So.", "letters": '{"a": 1}'}
    async with served(says, mode=default) as house:
        answer = await house.post("/v1/chat/completions", {"messages": LETTERS, **asked})
        assert answer.status_code == 200, answer.text
        written = [prompt for _, prompt in house.stage.prompts_seen]
        assert any("Write the plan." in prompt for prompt in written) is planned
        assert (len(house.opened()) > 1) is planned
        await house.quiet()
        house.stage.assert_clean()


async def test_branches_for_those_who_ask(house: Served) -> None:
    told = await chunks(house, LETTERS, extra_body=planning("sot", branches=True, max_parallel=2))
    events = [chunk.choices[0].specsot for chunk in told if hasattr(chunk.choices[0], "specsot")]
    names = [event["event"] for event in events]
    assert (names[0], names[-1]) == ("started", "finished")
    assert "".join(event["text"] for event in events if event["event"] == "skeleton_text") == PLAN
    planned = next(event for event in events if event["event"] == "planned")
    assert [point["title"] for point in planned["points"]] == ["Alpha", "Beta 你好", "Gamma 🎉"]
    bodies: dict[int, str] = {}
    for event in events:
        if event["event"] == "branch_text":
            assert event["offset"] == len(bodies.setdefault(event["branch"], ""))
            assert event["step_tokens"] >= 0
            bodies[event["branch"]] += event["text"]
    assert bodies == {id: SAYS[f"Write point {id}"].strip() for id in (1, 2, 3)}
    assert events[-1]["statistics"]["mode"] == "sot"
    assert not any("text" in event for event in events if event["event"] in ("merged_text", "finished"))
    assert text_of(told) == ANSWER, "and the merged answer as for everybody"


async def test_branches_of_a_whole_answer(house: Served) -> None:
    answer = await ask(house, LETTERS, extra_body=planning("sot", branches=True), seed=9)
    told = answer.choices[0].specsot
    assert answer.choices[0].message.content == ANSWER
    assert (told["mode"], told["seed"], told["skeleton"]) == ("sot", 9, PLAN)
    assert [one["text"] for one in told["branches"]] == [SAYS[f"Write point {n}"].strip() for n in (1, 2, 3)]
    assert [one["needs"] for one in told["branches"]] == [[], [], [1]]
    assert {one["reason"] for one in told["branches"]} == {"stop"}
    assert told["statistics"]["branches"] == 3


async def test_limits_of_a_plan_arrive(house: Served) -> None:
    await ask(
        house,
        LETTERS,
        extra_body=planning("sot", max_branch_tokens=60, max_skeleton_tokens=300, drafter="none"),
    )
    skeleton, *branches = house.opened()
    assert skeleton.limit == 300
    assert all(opening.limit <= 60 and not opening.drafted for opening in branches)


async def test_a_planned_answer_is_billed_whole_and_within_its_limit(house: Served) -> None:
    text = house.stage.text
    direct = Prompts(BASE, text).chat((Message("user", "Tell me about letters."),))
    answer = await ask(house, LETTERS, max_tokens=200, extra_body=planning("sot"))
    usage, details = answer.usage, answer.usage.completion_tokens_details
    figures = answer.choices[0].specsot["statistics"]
    assert usage.prompt_tokens == len(direct), "nobody is billed for our instructions"
    assert usage.completion_tokens == figures["completion_tokens"] <= 200
    assert details.reasoning_tokens == details.plan_tokens == len(text.encode(PLAN))
    assert 0 < details.heading_tokens == figures["heading_tokens"]
    written = len(text.encode(answer.choices[0].message.content)) + details.plan_tokens
    assert abs(usage.completion_tokens - written) < 12, "end tokens, and tokens across what is merged"


async def test_only_one_branch_at_a_time(house: Served) -> None:
    await ask(house, LETTERS, extra_body=planning("sot", max_parallel=1))
    assert house.stage.ring.most_live == 1


async def test_the_model_may_choose_to_answer_directly() -> None:
    async with served({"Write the plan.": "[DIRECT]\nJust so.[END]"}) as house:
        told = await chunks(house, WHAT, "auto")
        assert text_of(told) == "Just so."
        answer = await ask(house, WHAT, "auto", max_tokens=200)
        assert answer.choices[0].specsot["mode"] == "direct"
        markers = answer.usage.completion_tokens_details.reasoning_tokens
        assert markers > 0
        assert answer.usage.completion_tokens == len(house.stage.text.encode("Just so.")) + markers


async def test_many_calls_at_once(house: Served) -> None:
    long = SAYS["Count"]
    answers = await asyncio.gather(*(ask(house, COUNT, max_tokens=400) for _ in range(20)))
    assert {answer.choices[0].message.content for answer in answers} == {long} == {repeat("word", 300)}


async def test_the_callers_id_is_a_name_that_several_calls_may_have(house: Served) -> None:
    """Proxies keep it when they try again."""
    named = {"x-request-id": "mine"}
    house.going.clear()
    asking = [asyncio.create_task(ask(house, extra_headers=named, n=2)) for _ in range(2)]
    while (told := house.stage.engine.requests()).running + told.waiting < 4:
        await turn()
    house.going.set()
    answers = await asyncio.gather(*asking)
    assert [answer._request_id for answer in answers] == ["mine", "mine"]
    assert len({answer.id for answer in answers}) == 2
    assert all("mine" not in answer.id for answer in answers)
    unnamed = await ask(house)
    assert unnamed.id == f"chatcmpl-{unnamed._request_id}"
