"""Lets models think before they answer: decides whether and how long, and requests the answer that follows.

Thinking is a request of its own, which ends at the closing tag. The answer is a second request, whose prompt
contains the thinking. With the same tokens, seed and positions, the model writes what it would have written
in one go, but the answer can be held to a form, a function or a limit from its first token on. The turns of a
plan read the end of the thinking in their system turn instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import get_args

from specsot.errors import InvalidRequest, TimedOut
from specsot.events import Finished, MergedText, Numbered, Reason, Started
from specsot.params import Ask, Message, brief
from specsot_master.chat_template import THINKING_OFF
from specsot_master.core.dialects.openai_responses import Thought
from specsot_master.core.dialects.thinking_style import ThinkingStyle
from specsot_master.engine import Caller
from specsot_master.http.calls import Requests
from specsot_master.http.openai_requests import check_ids, limits_of, position_limit_of
from specsot_master.http.openai_schemas import ChatBody, Effort
from specsot_master.http.openai_tools import ToolUse, functions_of, render_conversation
from specsot_master.text import Text

# Tokens. The maximum length of thinking by `reasoning_effort`, for templates that do not use it. For higher
# efforts, thinking may have as many tokens as the answer. Untuned.
MAX_THINKING_BY_EFFORT = {"minimal": 256, "low": 1024, "medium": 4096}
# The field, and the template's variable, that holds OpenAI's reasoning effort.
EFFORT = "reasoning_effort"
# Characters. The end of the thinking that the turns of a plan read. Untuned.
MAX_NOTE_CHARACTERS = 2000
# Introduces the end of the thinking in the system turn of a plan.
NOTES = "You have thought about the question. Your conclusions:"


@dataclass(frozen=True, slots=True)
class ThinkFirst:
    """How a model thinks before it answers, and the two requests that this takes.

    prompt: The prompt in tokens, up to where thinking begins.
    max_tokens: The maximum number of tokens of thinking; None for as many as the answer may have.
    text: The model's tokenizer.
    style: The tags around thinking.
    head: The text with which the answer begins; "" to let the model write it.
    shown: True if the caller receives the thinking.
    forks: True if the thinking may fork into threads; then the answer is a single sequence.
    """

    prompt: tuple[int, ...]
    max_tokens: int | None
    text: Text
    style: ThinkingStyle
    head: str = ""
    shown: bool = True
    forks: bool = False

    def first(self, ask: Ask) -> Ask:
        """Return the request that thinks. If the answer is a plan or has a form, half of its tokens are
        reserved for it, because plans and forms are refused below a minimum length. It ends at the closing
        tag, has the request's sampling, seed and priority, and at least one token.

        ask: the request of thinking and answer together.
        """
        free = self.forks or (ask.mode == "direct" and not ask.form)
        max_thinking = ask.limits.new_tokens if free else ask.limits.new_tokens // 2
        limit = min(max_thinking, ask.limits.new_tokens if self.max_tokens is None else self.max_tokens)
        return Ask(
            tokens=self.prompt,
            model=ask.model,
            mode="auto" if self.forks else "direct",
            drafter=ask.drafter,
            sampling=ask.sampling,
            limits=replace(ask.limits, max_new_tokens=max(limit, 1)),
            seed=ask.seed,
            priority=ask.priority,
            stop=(self.style.end,),
            skip_special_tokens=False,
        )

    def then(self, ask: Ask, thought: Finished) -> Ask | None:
        """Return the request that answers after this thinking, or None if no tokens are left for it. A
        planned answer reads the end of the thinking in its system turn; a direct one continues the prompt,
        the thinking and its closing tag. The least number of tokens of a direct answer is at most what is
        left.

        ask: the request of thinking and answer together.
        thought: the end of the request that thought, with its text and tokens.
        """
        left = ask.limits.new_tokens - thought.statistics.completion_tokens
        if left <= 0:
            return None
        limits = replace(ask.limits, max_new_tokens=left)
        min_tokens = min(ask.min_tokens, left)
        if ask.mode != "direct" and not self.forks:
            return replace(ask, limits=limits, messages=with_notes(ask.messages, thought.text))
        closing_tokens = self.text.encode(f"{self.style.closing(thought.text)}{self.head}")
        tokens = self.prompt + thought.tokens + closing_tokens
        return replace(ask, mode="direct", messages=(), tokens=tokens, limits=limits, min_tokens=min_tokens)


def think_first(
    body: ChatBody, use: ToolUse | None, text: Text, max_positions: int, may_fork: bool = False
) -> ThinkFirst:
    """Return how the model thinks before it answers a body, for a model that can think. Thinking may have as
    many tokens as the body's budget says; without one, templates that do not use an effort get
    MAX_THINKING_BY_EFFORT, and all others as many as the answer.

    body: the parsed body.
    use: the tools that may be called, or None.
    text: the model's tokenizer and chat template.
    max_positions: the model's context, in tokens.
    may_fork: True if the thinking may fork into threads.

    Raises InvalidRequest for a body that cannot be served, among others for a time limit of the answer, and
    ContextLengthExceeded if the prompt does not fit with its answer.
    """
    if body.specsot and body.specsot.finish_within_s is not None:
        raise InvalidRequest("specsot.finish_within_s: thinking has no time limit", "specsot.finish_within_s")
    effort = None if (named_effort := effort_of(body)) == "none" else named_effort
    rendering = render_conversation(
        body.messages, functions_of(body), text, with_thinking=True, effort=effort
    )
    held = position_limit_of(body, max_positions)
    text.check_fits(rendering, held)
    prompt = text.encode(rendering)
    limits = limits_of(body, body.max_completion_tokens, body.max_tokens)
    check_ids([prompt], held, limits)
    style = text.style
    assert style is not None, "see wants_thinking"
    head = style.header if use is None else use.head
    usual = None if text.reads_effort else MAX_THINKING_BY_EFFORT.get(effort or "")
    max_thinking = body.thinking_token_budget or usual
    return ThinkFirst(prompt, max_thinking, text, style, head, body.include_reasoning is not False, may_fork)


def effort_of(body: ChatBody) -> str | None:
    """Return the reasoning effort that a body names, in its own field or for the template; None if it names
    none.

    body: the parsed body.
    """
    return body.reasoning_effort or (body.chat_template_kwargs or {}).get(EFFORT)


def wants_thinking(body: ChatBody, text: Text, may_fork: bool = False) -> bool:
    """Return True if the model shall think before it answers this body. A budget of 0 tokens, and the effort
    "none", turn thinking off.

    The first of chat_template_kwargs, the reasoning effort and the token budget that is given decides. If
    none is given, models think whose template always begins to think, and models that fork in their thinking.

    body: the parsed body.
    text: the model's tokenizer and chat template.
    may_fork: True if the model forks in its thinking.

    Raises InvalidRequest, with the name of the field, if a model shall think that cannot, and for any other
    variable or value in chat_template_kwargs.
    """
    given = (body.chat_template_kwargs or {}).items()
    switches = {name: value for name, value in given if value is not None}
    effort = effort_of(body)
    budget = body.thinking_token_budget
    if switches.get(EFFORT) in get_args(Effort):
        del switches[EFFORT]
    for name, value in switches.items():
        if name not in THINKING_OFF or not isinstance(value, bool):
            known = f"{EFFORT} ({', '.join(get_args(Effort))}) and {', '.join(THINKING_OFF)} (true, false)"
            raise InvalidRequest(
                f"chat_template_kwargs: {brief(name)}: {brief(value)} is not supported, only {known}",
                "chat_template_kwargs",
            )
    wishes: list[tuple[str, bool | None]] = [
        ("chat_template_kwargs", next(iter(switches.values()), None)),
        (
            EFFORT if body.reasoning_effort else "chat_template_kwargs",
            None if effort is None else effort != "none",
        ),
        ("thinking_token_budget", None if budget is None else True),
    ]
    by_nature = ("", may_fork or text.thinking == "always")
    name, wish = next(((name, wish) for name, wish in wishes if wish is not None), by_nature)
    wish = wish and budget != 0
    if wish and text.thinking == "never":
        raise InvalidRequest(f"{name} is not supported: this model's chat template has no thinking", name)
    return wish


def with_notes(messages: tuple[Message, ...], thought: str) -> tuple[Message, ...]:
    """Return the conversation with the end of the thinking in its system turn, which is added if there is
    none; its question is unchanged. The notes begin with NOTES.

    messages: the conversation, oldest turn first, at least one.
    thought: the text of the thinking.
    """
    words = f"{NOTES}\n{conclusion_of(thought)}"
    if messages[0].role == "system":
        return (Message("system", f"{messages[0].content}\n\n{words}"), *messages[1:])
    return (Message("system", words), *messages)


def conclusion_of(thought: str) -> str:
    """Return the last MAX_NOTE_CHARACTERS characters of thinking, from the start of a paragraph if possible;
    all of a shorter text. White space around the thinking is removed.

    thought: the text of the thinking.
    """
    text = thought.strip()
    if len(text) <= MAX_NOTE_CHARACTERS:
        return text
    tail = text[-MAX_NOTE_CHARACTERS:]
    _, found, rest = tail.partition("\n\n")
    return rest if found else tail


def nothing_after(thought: Finished) -> Finished:
    """Return the Finished event of an answer for which thinking has left no tokens; its text is empty. It
    ends with LENGTH in place of STOP, else with the reason of the thinking, and counts no tokens of an
    answer.

    thought: the end of the request that thought.
    """
    figures = replace(thought.statistics, completion_tokens=0, merged_tokens=0)
    reason = Reason.LENGTH if thought.reason is Reason.STOP else thought.reason
    return Finished(reason, "", (), figures)


async def generate_thinking(
    counter: Requests, ask: Ask, caller: Caller, think: ThinkFirst
) -> AsyncGenerator[Numbered | Thought, None]:
    """Yield the events of an answer, preceded by what the model thinks. Thinking is yielded as `Thought`,
    with its number of tokens at the end. If thinking leaves no tokens for the answer, or none of its form
    fits, the Finished event has an empty text. The events of the thinking itself are not yielded, but for its
    start; those of the answer follow without a second start. A thinking that failed or was cancelled ends the
    answer with its reason. Thinking is not yielded as text if the caller does not want it.

    counter: the entry point of requests.
    ask: the request of thinking and answer together.
    caller: who asks; the thinking's request id is this one's with "-thinking" at the end.
    think: how the model thinks.

    Raises what the two requests raise, and TimedOut if no time is left for the answer.
    """
    now = asyncio.get_running_loop().time
    began = now()
    thought: Numbered | None = None
    named = replace(caller, request=f"{caller.request}-thinking")
    async with aclosing(counter.generate(think.first(ask), named)) as events:
        async for numbered in events:
            match numbered.event:
                case Started():
                    yield numbered
                case MergedText(text=text) if think.shown:
                    yield Thought(text)
                case Finished():
                    thought = numbered
                case _:
                    pass
    assert thought is not None
    finished = thought.event
    assert isinstance(finished, Finished)
    yield Thought("", finished.statistics.completion_tokens)
    follows = think.then(ask, finished) if finished.reason in (Reason.STOP, Reason.LENGTH) else None
    if follows is None:
        yield replace(thought, event=nothing_after(finished))
        return
    left = None if caller.timeout is None else caller.timeout - (now() - began)
    if left is not None and left <= 0:
        raise TimedOut("the deadline passed while the model was thinking")
    try:
        async with aclosing(counter.generate(follows, replace(caller, timeout=left))) as events:
            async for numbered in events:
                if not isinstance(numbered.event, Started):
                    yield numbered
    except InvalidRequest as error:
        if follows.form is None or error.field != "max_new_tokens":
            raise
        # No answer of the wanted form fits into the tokens that are left.
        yield replace(thought, event=nothing_after(finished))
