"""Function calling: renders conversations with tools as prompts, and reads a model's text as calls.

A request with tools is rendered and tokenized here, and answered directly: answers with tools are never
planned.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from specsot.errors import InvalidRequest
from specsot.events import Finished, MergedText, Numbered, Reason
from specsot.grammar.schemas import warnings_of
from specsot.grammar.structural_tag import StructuralTag, write_tag
from specsot.params import STRUCTURAL_TAG, Ask, Form, Mode
from specsot_master.core.dialects.openai_responses import ChoiceDelta, Thought
from specsot_master.core.dialects.tool_calls.arguments import Json, as_json, read_arguments
from specsot_master.core.dialects.tool_calls.forcing import ForcedCalls, forced_calls
from specsot_master.core.dialects.tool_calls.forms import PLAIN, CallForm
from specsot_master.core.dialects.tool_calls.harmony import HARMONY, HarmonyReader
from specsot_master.core.dialects.tool_calls.hermes_prompt import calls_in_words, tools_in_words
from specsot_master.core.dialects.tool_calls.reading import CallDelta, ForcedReader, MarkedReader, ToolReader
from specsot_master.core.dialects.tool_calls.schemas import arguments_schema, calls_schema, parameters_of
from specsot_master.http.openai_requests import (
    check_ids,
    common_fields,
    copies_of,
    forms_in,
    limits_of,
    logprobs_of,
    position_limit_of,
    text_of,
)
from specsot_master.http.openai_schemas import ChatBody, NamedTool, Turn
from specsot_master.text import Text

# Calls of one answer that must call functions; without a bound, a small model might never stop. Untuned.
MOST_CALLS = 16


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How the answers to one request are read.

    form: How the model writes calls.
    functions: The offered functions by name, with the JSON schemas of their arguments.
    named: The one function that must be called, or None.
    required: Whether some function must be called.
    parallel: Whether one answer may hold several calls.
    tokens: The model's tokens that are a part of calls, with their texts.
    ends: The texts of the tokens that end an answer.
    """

    form: CallForm
    functions: Mapping[str, Json]
    named: str | None = None
    required: bool = False
    parallel: bool = True
    tokens: Mapping[int, str] = field(default_factory=dict)
    ends: tuple[str, ...] = ()

    def reader(self) -> ToolReader | HarmonyReader:
        """Return a new reader that separates calls from text in one answer."""
        if (forced := self.marked) is not None:
            return MarkedReader(self.form, self.functions, forced.head)
        if self.is_forced:
            return ForcedReader(self.functions, self.only, self.form)
        if self.form is HARMONY:
            return HarmonyReader(self.functions, self.ends_with_call)
        return ToolReader(self.form, self.functions, self.ends_with_call)

    @property
    def ends_with_call(self) -> bool:
        """Whether an answer that may call a function ends with its first call."""
        return not self.parallel and not self.is_forced

    @property
    def is_forced(self) -> bool:
        """Whether the answer must call a function."""
        return self.required or self.named is not None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about parts of argument schemas that forced calls are not held to."""
        if not self.is_forced:
            return ()
        schemas = {name: schema for name, schema in self.functions.items() if self.named in (None, name)}
        found = [(name, warning) for name, schema in schemas.items() for warning in warnings_of(schema)]
        return tuple(f"tools.{name}: {warning}" for name, warning in found)

    @property
    def only(self) -> str | None:
        """The function of a forced call of which the model writes nothing but the arguments."""
        if self.required and not self.parallel and len(self.functions) == 1:
            return next(iter(self.functions))
        return self.named

    @property
    def marked(self) -> ForcedCalls | None:
        """The forced calls in the model's own marks; None if they are objects of JSON, or not forced."""
        if not self.is_forced:
            return None
        functions = self.functions if self.only is None else {self.only: self.functions[self.only]}
        max_calls = MOST_CALLS if self.only is None and self.parallel else 1
        return forced_calls(self.form, functions, max_calls, self.ends)

    @property
    def head(self) -> str:
        """The text with which the prompt ends: a forced call up to what the model writes of it."""
        if (forced := self.marked) is not None:
            return forced.head
        if self.only is not None:
            return self.form.forced_head(self.only)
        return self.form.object_head if self.required else ""

    def forced_form(self, functions: Sequence[Json]) -> Form:
        """The form of what follows `head` if a call is forced. `functions` are declared as in the body."""
        if (forced := self.marked) is not None:
            return Form(STRUCTURAL_TAG, (write_tag(StructuralTag(forced.parts, self.tokens)),))
        return Form("json_schema", (json.dumps(self._forced_schema(functions)),))

    def _forced_schema(self, functions: Sequence[Json]) -> Json:
        """The schema of calls that are objects of JSON."""
        if self.only is not None:
            return arguments_schema(functions, self.only)
        is_list = self.parallel or self.form.is_list
        max_calls = MOST_CALLS if self.parallel else 1
        return calls_schema(functions, max_calls if is_list else None, self.form)


def uses_tools(body: ChatBody) -> bool:
    """Whether a body offers tools, or an earlier turn of the conversation used some."""
    return offers_tools(body) or any(turn.tool_calls or turn.role == "tool" for turn in body.messages)


def offers_tools(body: ChatBody) -> bool:
    """Whether the answer may call tools."""
    return bool(body.tools) and body.tool_choice != "none"


def tool_use(body: ChatBody, text: Text) -> ToolUse | None:
    """Return how the answers of a body are read, or None if no tool may be called.

    Raises InvalidRequest for a choice of tools that is impossible, for tools together with an answer's form,
    and if it is not known how this model writes calls.
    """
    must = isinstance(body.tool_choice, NamedTool) or body.tool_choice == "required"
    if must and not body.tools:
        raise InvalidRequest("tool_choice needs tools", "tool_choice")
    if not offers_tools(body):
        return None
    functions = {one["name"]: parameters_of(one) for one in functions_of(body)}
    choice = body.tool_choice
    form = text.call_form
    named = choice.function.name if isinstance(choice, NamedTool) else None
    if named is not None and named not in functions:
        raise InvalidRequest(f"tool_choice: no tool is called {named!r}", "tool_choice")
    use = ToolUse(
        form or PLAIN,
        functions,
        named,
        required=choice == "required",
        parallel=body.parallel_tool_calls is not False,
        tokens=text.call_tokens,
        ends=text.end_texts,
    )
    if form is None and not use.is_forced:
        raise InvalidRequest(
            "tools: this model's chat template does not show how the model writes calls: "
            'set tool_choice to "required", to a function, or to "none"',
            "tools",
        )
    if forms := forms_in(body):
        raise InvalidRequest(f"tools: an answer of a form ({forms[0][0]}) calls none", "tools")
    return use


def tool_asks(body: ChatBody, use: ToolUse | None, mode: Mode, text: Text, positions: int) -> list[Ask]:
    """Return the requests of a body whose conversation has tools, with prompts in tokens.

    Forced calls are constrained by a form. mode: as for `chat_asks`; positions: the model's context.
    Raises InvalidRequest.
    """
    shared: dict[str, Any] = common_fields(body, mode)
    if body.specsot and body.specsot.mode == "sot":
        raise InvalidRequest("tools: mode sot plans, and a plan calls no tools", "tools")
    functions = functions_of(body)
    limits = limits_of(body, body.max_completion_tokens, body.max_tokens)
    rendering = render(body.messages, functions, text)
    rendering += use.head if use else ""
    held = position_limit_of(body, positions)
    text.check_fits(rendering, held)
    tokens = text.encode(rendering)
    check_ids([tokens], held, limits)
    shared |= {"mode": "direct", "logprobs": logprobs_of(body)}
    if use and use.is_forced:
        shared["form"] = use.forced_form(functions)
    if use and text.writes_special_calls:
        shared["skip_special_tokens"] = False
    return copies_of(Ask(tokens=tokens, limits=limits, **shared), body)


def render(
    turns: Sequence[Turn],
    functions: list[dict[str, Any]],
    text: Text,
    thinks: bool = False,
    effort: str | None = None,
) -> str:
    """Render a conversation with tools by the model's chat template, and in words as far as the template has
    no place for tools or for calls.

    If the template has no place for tools, they are described in words. thinks, effort: see
    `Text.render_turns`. Raises InvalidRequest.
    """
    told = [_told(turn, f"messages.{n}") for n, turn in enumerate(turns)]
    if text.has_tools:
        tools = [{"type": "function", "function": one} for one in functions]
        return text.render_turns(_with_arguments(told, text.call_form), tools, thinks, effort)
    if functions:
        told = _offered(told, tools_in_words(functions, text.call_example))
    if text.call_example is None:
        return text.render_turns(_in_words(told), [], thinks, effort)
    for turn in told:
        if turn.get("tool_calls") and not turn["content"]:
            turn["content"] = None  # R1-Distill writes "" as a turn of its own.
    return text.render_turns(_with_arguments(told, text.call_form), [], thinks, effort)


def functions_of(body: ChatBody) -> list[dict[str, Any]]:
    """Return the functions that the answer may call, as JSON objects."""
    offered = (body.tools or ()) if offers_tools(body) else ()
    return [one.function.model_dump(exclude_none=True) for one in offered]


def _told(turn: Turn, field: str) -> dict[str, Any]:
    """Return a turn as chat templates expect it, with arguments of calls as values, not as JSON text."""
    told: dict[str, Any] = {"role": "system" if turn.role == "developer" else turn.role}
    told["content"] = text_of(turn, f"{field}.content")
    if turn.name:
        told["name"] = turn.name
    if turn.reasoning_content:
        told["reasoning_content"] = turn.reasoning_content
    if turn.tool_call_id:
        told["tool_call_id"] = turn.tool_call_id
    if turn.tool_calls:
        told["tool_calls"] = [
            {
                "id": one.id,
                "type": "function",
                "function": {
                    "name": one.function.name,
                    "arguments": read_arguments(one.function.arguments),
                },
            }
            for one in turn.tool_calls
        ]
    return told


def _with_arguments(turns: list[Json], form: CallForm | None) -> list[Json]:
    """Return the turns, with arguments of earlier calls as JSON text if the template expects text."""
    if form is None or not form.arguments_as_text:
        return turns
    for call in (call for turn in turns for call in turn.get("tool_calls", ())):
        call["function"]["arguments"] = as_json(call["function"]["arguments"])
    return turns


def _offered(turns: list[Json], words: str) -> list[Json]:
    """The turns, with these words at the end of the system message."""
    has_system = turns[0]["role"] == "system"
    system = turns[0]["content"] if has_system else ""
    return [{"role": "system", "content": f"{system}\n\n{words}".lstrip()}, *turns[has_system:]]


def _in_words(told: list[Json]) -> list[Json]:
    """Calls in Hermes' words in the texts of turns; answers of tools become the user's."""
    turns: list[Json] = []
    for turn in told:
        role = turn["role"]
        content = turn["content"]
        if calls := turn.get("tool_calls"):
            content = f"{content}\n{calls_in_words(calls)}".lstrip()
        if role == "tool":
            role = "user"
            content = f"<tool_response>\n{content}\n</tool_response>"
        if turns and role == "user" == turns[-1]["role"]:
            turns[-1]["content"] += f"\n{content}"
        else:
            turns.append({"role": role, "content": content})
    return turns


async def until_first_call(
    events: AsyncGenerator[Numbered | Thought, None], use: ToolUse, cancel: Callable[[], object]
) -> AsyncGenerator[Numbered | Thought, None]:
    """Yield the events of an answer that ends with its first call. `cancel` ends the request once that call
    is complete; the answer's reason is then that it ended by itself.

    The master reads text, so the ring may have generated a few more tokens; a reader of `use` drops them.
    """
    reader = use.reader()
    has_ended = False
    async with aclosing(events):
        async for one in events:
            event = None if isinstance(one, Thought) else one.event
            if isinstance(event, MergedText) and not has_ended:
                reader.feed(event.text)
                has_ended = reader.has_ended
                if has_ended:
                    cancel()
            if isinstance(event, Finished) and has_ended and event.reason is Reason.CANCELLED:
                assert not isinstance(one, Thought), "a thought is no event"
                one = replace(one, event=replace(event, reason=Reason.STOP))
            yield one


@dataclass(slots=True)
class ToolAnswer:
    """Separates the calls of one answer from its content, as the answer is written to the client.

    use: How the answer is read.
    reader: The reader that keeps the state of this answer.
    """

    use: ToolUse
    reader: ToolReader | HarmonyReader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = self.use.reader()

    def tell(self, piece: ChoiceDelta) -> ChoiceDelta:
        """Return a piece of a streamed answer with its calls separated from its text."""
        content, calls = self.reader.feed(piece.text, last=piece.reason is not None)
        told = tuple(map(self._told, calls))
        thought = piece.thought + self.reader.thought
        return replace(piece, text=content, thought=thought, calls=told, reason=self.reason(piece.reason))

    def reason(self, reason: str | None) -> str | None:
        """Return OpenAI's finish reason: "tool_calls" after calls, but "stop" after a named function."""
        called = self.reader.calls and self.use.named is None
        return "tool_calls" if reason == "stop" and called else reason

    def whole(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return a complete choice with its calls separated from its content."""
        content, deltas = self.reader.feed(choice["message"]["content"], last=True)
        calls: list[dict[str, Any]] = []
        for one in map(self._told, deltas):
            if "id" in one:
                calls.append({name: one[name] for name in ("id", "type", "function")})
            else:
                calls[one["index"]]["function"]["arguments"] += one["function"]["arguments"]
        more = {"content": content or None, "tool_calls": calls} if calls else {"content": content}
        if self.reader.thought:
            more["reasoning_content"] = self.reader.thought
        message = choice["message"] | more
        return choice | {"message": message, "finish_reason": self.reason(choice["finish_reason"])}

    def _told(self, one: CallDelta) -> dict[str, Any]:
        """Return a part of a call in OpenAI's format; the first part of a call has an id and the name."""
        if one.name is None:
            return {"index": one.index, "function": {"arguments": one.arguments}}
        # Mistral's chat templates require ids of nine letters or digits.
        id = secrets.token_hex(8)[:9]
        function = {"name": one.name, "arguments": one.arguments}
        return {"index": one.index, "id": id, "type": "function", "function": function}
