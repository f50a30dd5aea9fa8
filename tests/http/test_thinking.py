"""Models that think first, at OpenAI's and Anthropic's endpoints: what they are asked, and what is told of
it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from specsot.params import Message
from specsot_master.chat_template import ChatTemplate
from specsot_master.engine.grammar_sandbox import GrammarSandbox
from specsot_master.http.thinking import MAX_NOTE_CHARACTERS, conclusion_of
from specsot_master.text import Text
from tests.http.house import Served, served
from tests.master.letters import SAYS
from tests.master.stage import BASE, turn
from tests.master.test_forks import Forking

pytestmark = pytest.mark.timeout(60)

TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
HEAD = "{% if add_generation_prompt %}<|im_start|>assistant\n"
SWITCH = "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
QWEN, R1 = TURNS + HEAD + SWITCH, TURNS + HEAD + "<think>\n{% endif %}"
ASKED = [{"role": "user", "content": "What is it?"}]
THOUGHT = "It is a test.\nSo be brief.\n"
ON = {"chat_template_kwargs": {"enable_thinking": True}}
# What is written depends on the end of the prompt: thinking begins, or the answer does.
HARMONY = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}\n"
    "# Valid channels: analysis, commentary, final.<|end|>"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ 'developer' if m.role == 'system' else 'user' }}<|message|>{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
FINAL = "<|start|>assistant<|channel|>final<|message|>"
THINKS = {
    "<think>\n\n</think>": "At once.",
    "</think>": SAYS["What is"],
    "<think>": f"{THOUGHT}</think>\n\nNo.",
}


IN_CHANNELS = {
    f"{THOUGHT}<|end|>{FINAL}": SAYS["What is"],
    FINAL: "At once.",
    "<|channel|>analysis<|message|>": f"{THOUGHT}<|end|>{FINAL}No.",
}


class Scripted(Text):
    """The demo's tokenizer with another template."""

    def __init__(self, template: str) -> None:
        super().__init__(BASE)
        self._template = ChatTemplate(template)


@pytest.fixture
async def house() -> AsyncIterator[Served]:
    async with served(THINKS, text=Scripted(QWEN)) as one:
        yield one
        await one.quiet()
        one.stage.assert_clean()


async def ask(house: Served, **more: Any) -> Any:
    answer = await house.post("/v1/chat/completions", {"messages": ASKED, "max_tokens": 200, **more})
    return answer.json()


@pytest.mark.parametrize(
    "more", [ON, {"reasoning_effort": "low"}, {"thinking_token_budget": 50}, {**ON, "n": 2}]
)
async def test_reasoning_is_reported_separately_and_the_answer_follows_it(house: Served, more: Any) -> None:
    told = await ask(house, **more)
    for choice in told["choices"]:
        assert choice["message"]["reasoning_content"] == THOUGHT
        assert (choice["message"]["content"], choice["finish_reason"]) == (SAYS["What is"], "stop")
    assert house.stage.prompts_seen[-1][1].endswith(f"<think>\n{THOUGHT}</think>\n\n")
    thought = len(house.stage.text.encode(THOUGHT)) * len(told["choices"])
    details = told["usage"]["completion_tokens_details"]
    assert thought <= details["reasoning_tokens"] < told["usage"]["completion_tokens"]
    assert told["usage"]["prompt_tokens"] < 60, "of the question, not of what was thought"


async def test_without_a_limit_a_thought_may_take_what_the_context_holds() -> None:
    thought = "word " * 1200
    async with served({**THINKS, "<think>": f"{thought}</think>\n\nNo."}, text=Scripted(QWEN)) as house:
        told = await ask(house, **ON, max_tokens=None)
    assert told["choices"][0]["message"]["reasoning_content"] == thought
    assert told["choices"][0]["message"]["content"] == SAYS["What is"]


async def test_a_thought_streams_before_its_answer(house: Served) -> None:
    chat = house.openai().chat.completions
    stream = await chat.create(model="demo", messages=ASKED, max_tokens=200, stream=True, extra_body=ON)
    deltas = [chunk.choices[0].delta.model_dump() async for chunk in stream]
    assert "".join(one.get("reasoning_content") or "" for one in deltas) == THOUGHT
    assert "".join(one["content"] or "" for one in deltas) == SAYS["What is"]
    last = max(n for n, one in enumerate(deltas) if one.get("reasoning_content"))
    assert all(not one["content"] for one in deltas[: last + 1])


async def test_a_client_that_leaves_during_reasoning_leaves_no_state(house: Served) -> None:
    house.going.clear()
    chat = house.openai().chat.completions
    opening = asyncio.create_task(chat.create(model="demo", messages=ASKED, stream=True, extra_body=ON))
    await house.asked()
    await house.steps(2)
    async with await opening as stream:
        await anext(aiter(stream))
    while house.stage.engine.requests().running:
        await turn()
    house.going.set()
    await house.quiet()
    assert len(house.opened()) == 1, "nobody was there to be answered"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"reasoning_effort": "none"},
        {"thinking_token_budget": 0},
        {**ON, "thinking_token_budget": 0},
        {"chat_template_kwargs": {"thinking": False}, "reasoning_effort": "high"},
    ],
)
async def test_a_model_reasons_only_if_requested(house: Served, more: Any) -> None:
    message = (await ask(house, **more))["choices"][0]["message"]
    assert message["content"] == "At once."
    assert "reasoning_content" not in message


@pytest.mark.parametrize("streams", [False, True])
async def test_channels_of_harmony_are_thought_and_answer(streams: bool) -> None:
    """Written in the format's own words, as gpt-oss's template has them."""
    async with served(IN_CHANNELS, text=Scripted(HARMONY)) as house:
        chat = house.openai().chat.completions
        for more, thought, answer in ((ON, THOUGHT, SAYS["What is"]), ({}, "", "At once.")):
            told: Any = await chat.create(
                model="demo", messages=ASKED, max_tokens=200, stream=streams, extra_body=more
            )
            parts = [one.choices[0].delta async for one in told] if streams else [told.choices[0].message]
            dumped = [one.model_dump() for one in parts]
            assert "".join(one.get("reasoning_content") or "" for one in dumped) == thought
            assert "".join(one["content"] or "" for one in dumped) == answer
            assert house.stage.prompts_seen[-1][1].endswith(FINAL)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"reasoning_effort": "high"}, "high"),
        ({"reasoning_effort": "minimal"}, "low"),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "low"),
        (ON, "medium"),
    ],
)
async def test_effort_reaches_a_template_that_reads_it(more: Any, said: str) -> None:
    async with served(IN_CHANNELS, text=Scripted(HARMONY)) as house:
        told = await ask(house, **more)
        assert told["choices"][0]["message"]["reasoning_content"] == THOUGHT
        (thinking, prompt), (_, answering) = house.stage.prompts_seen
        assert f"Reasoning: {said}\n" in prompt
        assert answering.startswith(prompt), "the answer reads what was thought, under the same effort"
        assert thinking.limit == 200, "the model itself ends it"


def test_every_turn_of_a_plan_is_asked_for_the_final_channel() -> None:
    text = Scripted(HARMONY)
    assert text.thinking == "asked"
    turns = [Message("user", "Hi <|end|>"), Message("assistant", "Yes?"), Message("user", "Why?")]
    assert text.render(turns).endswith(f"<|start|>user<|message|>Why?<|end|>{FINAL}")
    told = [{"role": "user", "content": "Why?"}]
    assert text.render_turns(told, []).endswith(FINAL)
    assert text.render_turns(told, [{"type": "function"}]).endswith("<|start|>assistant")
    assert text.render_turns(told, [], with_thinking=True).endswith("assistant<|channel|>analysis<|message|>")


async def test_a_model_without_a_thinking_switch_thinks_unless_thinking_is_disabled() -> None:
    async with served(THINKS, text=Scripted(R1)) as house:
        message = (await ask(house))["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (THOUGHT, SAYS["What is"])
        assert (await ask(house, reasoning_effort="none"))["choices"][0]["message"]["content"] == "At once."
        hidden = (await ask(house, include_reasoning=False))["choices"][0]["message"]
        assert (hidden.get("reasoning_content"), hidden["content"]) == (None, SAYS["What is"])


async def test_a_budget_ends_the_thought_and_a_limit_both(house: Served) -> None:
    told = await ask(house, thinking_token_budget=3)
    (thinking, _), (answering, prompt) = house.stage.prompts_seen
    assert (thinking.limit, answering.limit) == (3, 197)
    assert prompt.endswith("\n</think>\n\n"), "ended for it"
    assert told["choices"][0]["message"]["content"] == SAYS["What is"]
    told = await ask(house, **ON, max_tokens=3)
    (choice,) = told["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert told["usage"]["completion_tokens"] == 3


async def test_a_form_holds_the_answer_not_the_thought(house: Served) -> None:
    await ask(house, **ON, guided_regex="[A-Z].*")
    thinking, answering = house.opened()
    assert thinking.form is None
    assert answering.form is not None


@pytest.mark.parametrize(("least", "told"), [(100, (SAYS["What is"], "stop")), (199, ("", "length"))])
async def test_a_form_has_half_of_the_limit_and_no_answer_where_it_does_not_fit(
    least: int, told: tuple[str, str]
) -> None:
    measured = GrammarSandbox(lambda form: "", lambda form: least)
    async with served(THINKS, text=Scripted(QWEN), forms=measured) as house:
        (choice,) = (await ask(house, **ON, guided_regex="[A-Z].*"))["choices"]
        assert house.opened()[0].limit == 100
        assert (choice["message"]["content"], choice["finish_reason"]) == told


async def test_a_plan_reads_the_conclusion() -> None:
    says = {name: SAYS[name] for name in SAYS if name.startswith("Write")} | {"<think>": f"{THOUGHT}</think>"}
    async with served(says, text=Scripted(QWEN)) as house:
        told = await ask(house, **ON, max_tokens=600, specsot={"mode": "sot", "branches": True})
        (choice,) = told["choices"]
        assert choice["message"]["reasoning_content"] == THOUGHT
        assert len(choice["specsot"]["branches"]) == 3
        asked = [prompt for _, prompt in house.stage.prompts_seen[1:]]
        assert all("So be brief." in prompt.partition("\nuser\n")[0] for prompt in asked)


async def test_turns_of_a_plan_begin_in_the_final_channel() -> None:
    begun = "<|channel|>analysis<|message|>"
    says = {name: SAYS[name] for name in SAYS if name.startswith("Write")} | {begun: f"{THOUGHT}<|end|>"}
    async with served(says, text=Scripted(HARMONY)) as house:
        told = await ask(house, **ON, max_tokens=600, specsot={"mode": "sot", "branches": True})
        (choice,) = told["choices"]
        assert choice["message"]["reasoning_content"] == THOUGHT
        assert len(choice["specsot"]["branches"]) == 3
        (_, thinking), (_, plan), *points = house.stage.prompts_seen
        assert thinking.endswith(begun)
        assert FINAL in plan.rpartition("<|end|>")[2]
        assert points
        assert all(FINAL in prompt.rpartition("<|end|>")[2] for _, prompt in points)
        assert "<|channel|>" not in choice["message"]["content"]


@pytest.mark.parametrize(
    "more",
    [
        ON,
        {"reasoning_effort": "high"},
        {"thinking_token_budget": 10},
        {"chat_template_kwargs": {"style": 1}},
        {"chat_template_kwargs": {"reasoning_effort": "low"}},
        {"chat_template_kwargs": {"reasoning_effort": 3}},
    ],
)
async def test_a_model_that_cannot_think_says_so(more: Any) -> None:
    async with served() as house:
        error = (await ask(house, **more))["error"]
        assert error["param"] in more
        assert "not supported" in error["message"]


async def test_agent_apis_report_reasoning_in_their_own_format(house: Served) -> None:
    body = {"messages": ASKED, "max_tokens": 200, "thinking": {"type": "enabled", "budget_tokens": 100}}
    blocks = (await house.post("/v1/messages", body)).json()["content"]
    assert [(one["type"], one.get("thinking") or one["text"]) for one in blocks] == [
        ("thinking", THOUGHT),
        ("text", SAYS["What is"]),
    ]
    body = {"input": "What is it?", "max_output_tokens": 200, "reasoning": {"effort": "medium"}}
    items = (await house.post("/v1/responses", body)).json()["output"]
    assert [(one["type"], one["content"][0]["text"]) for one in items] == [
        ("reasoning", THOUGHT),
        ("message", SAYS["What is"]),
    ]


def test_a_conclusion_is_the_last_paragraphs() -> None:
    assert conclusion_of(" short \n") == "short"
    paragraphs = [f"{n} " + "x" * 700 for n in range(6)]
    told = conclusion_of("\n\n".join(paragraphs))
    assert told == "\n\n".join(paragraphs[-2:])
    assert len(conclusion_of("y" * 5000)) == MAX_NOTE_CHARACTERS


TAUGHT = Path(__file__).parents[1] / "forking" / "model"
OUTLINED = "Two.\n<Parallel>\n<Outlines>\n<Outline> 1: sky\n<Outline> 2: sun\n</Outlines>"
FORKS = {
    "<think>\n\n</think>\n\n": "At once.",
    "<think>\n": OUTLINED,
    "</Outlines>\n<Thread>\n1:": " Blue.\n</Thread>",
    "</Outlines>\n<Thread>\n2:": " Yellow.\n</Thread>",
    "</Thread>\n": "</Parallel>\nThat is all.\n</think>\n\nNo.",
    "</think>\n\n": "Blue and yellow.",
}
WOVEN = (
    f"{OUTLINED}\n<Thread>\n1: Blue.\n</Thread><Thread>\n2: Yellow.\n</Thread>\n</Parallel>\nThat is all.\n"
)


def told_by(deltas: list[dict[str, Any]]) -> tuple[str, str]:
    """Thought and answer, which is told when the thought is over."""
    last = max(n for n, one in enumerate(deltas) if one.get("reasoning_content"))
    assert all(not one["content"] for one in deltas[: last + 1])
    return tuple("".join(one.get(name) or "" for one in deltas) for name in ("reasoning_content", "content"))  # type: ignore[return-value]


@pytest.mark.parametrize("more", [{}, ON, {"specsot": {"mode": "sot"}}])
async def test_a_model_that_forks_its_thoughts_tells_them_in_order(more: dict[str, Any]) -> None:
    async with served(FORKS, text=Text(TAUGHT), kind=Forking, style="tags", mode="auto") as house:
        chat = house.openai().chat.completions
        usage = {"stream_options": {"include_usage": True}}
        stream = await chat.create(model="demo", messages=ASKED, stream=True, extra_body={**more, **usage})
        chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks if chunk.choices]
        assert told_by(deltas) == (WOVEN, "Blue and yellow.")
        assert [one.ordinal for one in house.opened()] == [0, 1, 2, 0, 0]
        assert house.stage.prompts_seen[-1][1].endswith(f"<think>\n{WOVEN}</think>\n\n")
        text, bill = house.stage.text, chunks[-1].usage
        tokens = [len(text.encode(one)) for one in (f"{WOVEN}</think>", "Blue and yellow.<|im_end|>")]
        assert bill.completion_tokens_details.reasoning_tokens == tokens[0]
        assert bill.completion_tokens == sum(tokens)
        whole = await ask(house, **more)
        message = whole["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (WOVEN, "Blue and yellow.")
        await house.quiet()
        house.stage.assert_clean()


async def test_such_a_model_thinks_in_one_sequence_or_not_at_all_as_requested() -> None:
    async with served(FORKS, text=Text(TAUGHT), kind=Forking, style="tags", mode="auto") as house:
        message = (await ask(house, reasoning_effort="none"))["choices"][0]["message"]
        assert (message["content"], message.get("reasoning_content")) == ("At once.", None)
        message = (await ask(house, **ON, specsot={"mode": "direct"}))["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("Blue and yellow.", OUTLINED)
        assert {one.ordinal for one in house.opened()} == {0}


async def test_a_budget_for_thinking_bounds_threads_and_what_stands_around_them() -> None:
    says = FORKS | {"</Outlines>\n<Thread>\n2:": " Yellow" * 400, "</think>\n\n": "Blue and yellow."}
    async with served(says, text=Text(TAUGHT), kind=Forking, style="tags", mode="auto") as house:
        told = await ask(house, thinking_token_budget=150, max_tokens=400)
        (choice,) = told["choices"]
        thought = choice["message"]["reasoning_content"]
        assert thought.startswith(f"{OUTLINED}\n<Thread>\n1: Blue.\n</Thread><Thread>\n2: Yellow Yellow")
        assert 60 < told["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 150
        assert house.stage.prompts_seen[-1][1].endswith(f"{thought}\n</think>\n\n")
        assert choice["message"]["content"] == "Blue and yellow."
