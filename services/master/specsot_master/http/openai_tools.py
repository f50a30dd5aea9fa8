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
from specsot_master.core.dialects.tool_calls.reading import (
    CallDelta,
    CallReader,
    ForcedReader,
    MarkedReader,
    ToolReader,
)
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
MAX_CALLS = 16


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How the answers to one request with tools are constrained, and how they are read.

    form: How the model writes calls.
    functions: The JSON schemas of the arguments of the offered functions, by the function's name.
    named: The one function that must be called, or None if the answer may choose.
    required: True if some function must be called.
    parallel: True if one answer may hold several calls.
    tokens: The texts of the model's tokens that are a part of calls, by token id; empty if there are none.
    ends: The texts of the tokens that end an answer; empty if the model has none.
    """

    form: CallForm
    functions: Mapping[str, Json]
    named: str | None = None
    required: bool = False
    parallel: bool = True
    tokens: Mapping[int, str] = field(default_factory=dict)
    ends: tuple[str, ...] = ()

    def reader(self) -> CallReader:
        """Return a new reader that separates calls from text in one answer. Its class depends on the model's
        form, and on whether calls are forced. Forced calls are read in the model's own marks if those are
        known, else as JSON; calls that are not forced by the model's form, or by Harmony's own reader.
        """
        if (forced := self.marked) is not None:
            return MarkedReader(self.form, self.functions, forced.head)
        if self.is_forced:
            return ForcedReader(self.functions, self.only, self.form)
        if self.form is HARMONY:
            return HarmonyReader(self.functions, self.ends_with_call)
        return ToolReader(self.form, self.functions, self.ends_with_call)

    @property
    def ends_with_call(self) -> bool:
        """True if an answer that may call a function ends with its first call."""
        return not self.parallel and not self.is_forced

    @property
    def is_forced(self) -> bool:
        """True if the answer must call a function."""
        return self.required or self.named is not None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about parts of argument schemas that forced calls are not held to, each with the
        function's name; empty if calls are not forced, or if all parts are enforced. If a function is named,
        only its schema counts.
        """
        if not self.is_forced:
            return ()
        schemas = {name: schema for name, schema in self.functions.items() if self.named in (None, name)}
        found = [(name, warning) for name, schema in schemas.items() for warning in warnings_of(schema)]
        return tuple(f"tools.{name}: {warning}" for name, warning in found)

    @property
    def only(self) -> str | None:
        """The function of a forced call of which the model writes nothing but the arguments; None if the
        model also writes the name. It is the named function, or the only offered one if exactly one call is
        required; None if calls are not forced.
        """
        if self.required and not self.parallel and len(self.functions) == 1:
            return next(iter(self.functions))
        return self.named

    @property
    def marked(self) -> ForcedCalls | None:
        """The forced calls in the model's own marks; None if they are objects of JSON, or if calls are not
        forced. It is None also if the model's form cannot express the functions' schemas.
        """
        if not self.is_forced:
            return None
        functions = self.functions if self.only is None else {self.only: self.functions[self.only]}
        max_calls = MAX_CALLS if self.only is None and self.parallel else 1
        return forced_calls(self.form, functions, max_calls, self.ends)

    @property
    def head(self) -> str:
        """The text with which the prompt ends: a forced call up to what the model writes of it; "" if the
        model writes all of it. It is "" if calls are not forced.
        """
        if (forced := self.marked) is not None:
            return forced.head
        if self.only is not None:
            return self.form.forced_head(self.only)
        return self.form.object_head if self.required else ""

    def forced_form(self, functions: Sequence[Json]) -> Form:
        """Return the form of what follows `head` if a call is forced. This is a tag of the grammar for calls
        in the model's own marks, else a JSON schema.

        functions: the offered functions, declared as in the body.
        """
        if (forced := self.marked) is not None:
            return Form(STRUCTURAL_TAG, (write_tag(StructuralTag(forced.parts, self.tokens)),))
        return Form("json_schema", (json.dumps(self._forced_schema(functions)),))

    def _forced_schema(self, functions: Sequence[Json]) -> Json:
        """Return the schema of a forced call that is a JSON object: the only function's arguments, else a
        call or a list of calls. A list of calls has at most MAX_CALLS, or one if parallel calls are not
        allowed.

        functions: the offered functions, declared as in the body.
        """
        if self.only is not None:
            return arguments_schema(functions, self.only)
        is_list = self.parallel or self.form.is_list
        max_calls = MAX_CALLS if self.parallel else 1
        return calls_schema(functions, max_calls if is_list else None, self.form)


def uses_tools(body: ChatBody) -> bool:
    """Return True if a body offers tools, or an earlier turn of the conversation used some.

    body: the parsed body.
    """
    return offers_tools(body) or any(turn.tool_calls or turn.role == "tool" for turn in body.messages)


def offers_tools(body: ChatBody) -> bool:
    """Return True if the answer may call tools.

    body: the parsed body.
    """
    return bool(body.tools) and body.tool_choice != "none"


def tool_use(body: ChatBody, text: Text) -> ToolUse | None:
    """Return how the answers of a body are read, or None if no tool may be called. A model whose form of
    calls is unknown can only make forced calls, as plain JSON.

    body: the parsed body.
    text: the model's tokenizer and chat template.

    Raises InvalidRequest for a required or named tool without tools or with an unknown name, for tools
    together with an answer's form, and for a choice that is not forced if it is not known how this model
    writes calls.
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


def tool_asks(body: ChatBody, use: ToolUse | None, mode: Mode, text: Text, max_positions: int) -> list[Ask]:
    """Return the requests of a body whose conversation has tools, with prompts in tokens, one for each of its
    `n` answers. The prompt ends with the beginning of a forced call. Special tokens stay in the text if they
    are a part of the model's calls.

    Forced calls are constrained by a form.

    body: the parsed body.
    use: how the answers are read, or None if no tool may be called.
    mode: as for `chat_asks`; it has no effect, since answers with tools are direct.
    text: the model's tokenizer and chat template.
    max_positions: the model's context, in tokens.

    Raises InvalidRequest for a body that cannot be served, among others for mode sot, and
    ContextLengthExceeded for a prompt that does not fit with its answer.
    """
    shared: dict[str, Any] = common_fields(body, mode)
    if body.specsot and body.specsot.mode == "sot":
        raise InvalidRequest("tools: mode sot plans, and a plan calls no tools", "tools")
    functions = functions_of(body)
    limits = limits_of(body, body.max_completion_tokens, body.max_tokens)
    rendering = render_conversation(body.messages, functions, text)
    rendering += use.head if use else ""
    held = position_limit_of(body, max_positions)
    text.check_fits(rendering, held)
    tokens = text.encode(rendering)
    check_ids([tokens], held, limits)
    shared |= {"mode": "direct", "logprobs": logprobs_of(body)}
    if use and use.is_forced:
        shared["form"] = use.forced_form(functions)
    if use and text.writes_special_calls:
        shared["skip_special_tokens"] = False
    return copies_of(Ask(tokens=tokens, limits=limits, **shared), body)


def render_conversation(
    turns: Sequence[Turn],
    functions: list[dict[str, Any]],
    text: Text,
    with_thinking: bool = False,
    effort: str | None = None,
) -> str:
    """Render a conversation with tools by the model's chat template. As far as the template has no place for
    tools or for calls, they are written in words. Results of tools and earlier calls are then turns of text,
    or are written as the template shows them.

    turns: the turns of a parsed body.
    functions: the offered functions, in OpenAI's format; empty for none.
    text: the model's tokenizer and chat template.
    with_thinking: True to end where the model begins to think, if it can think; False to close any thinking
        block.
    effort: OpenAI's reasoning effort, for templates that use it; None for the template's default.

    Raises InvalidRequest if a turn is not text, or if the template refuses the conversation.
    """
    rendered_turns = [_template_turn(turn, f"messages.{n}") for n, turn in enumerate(turns)]
    if text.has_tools:
        tools = [{"type": "function", "function": one} for one in functions]
        return text.render_turns(
            _with_arguments(rendered_turns, text.call_form), tools, with_thinking, effort
        )
    if functions:
        rendered_turns = _with_tool_description(rendered_turns, tools_in_words(functions, text.call_example))
    if text.call_example is None:
        return text.render_turns(_with_calls_in_words(rendered_turns), [], with_thinking, effort)
    for turn in rendered_turns:
        if turn.get("tool_calls") and not turn["content"]:
            turn["content"] = None  # R1-Distill writes "" as a turn of its own.
    return text.render_turns(_with_arguments(rendered_turns, text.call_form), [], with_thinking, effort)


def functions_of(body: ChatBody) -> list[dict[str, Any]]:
    """Return the functions that the answer may call, as JSON objects in OpenAI's format; empty if it may call
    none.

    body: the parsed body.
    """
    offered = (body.tools or ()) if offers_tools(body) else ()
    return [one.function.model_dump(exclude_none=True) for one in offered]


def _template_turn(turn: Turn, field: str) -> dict[str, Any]:
    """Return a turn as chat templates expect it, with arguments of calls as values, not as JSON text. Members
    that the turn lacks are left out, but for its content, which is then "". The role "developer" becomes
    "system".

    turn: a turn of a parsed body.
    field: the name of the turn, such as "messages.0", for errors.

    Raises InvalidRequest if the turn is not text.
    """
    rendered: dict[str, Any] = {"role": "system" if turn.role == "developer" else turn.role}
    rendered["content"] = text_of(turn, f"{field}.content")
    members = {name: getattr(turn, name) for name in ("name", "reasoning_content", "tool_call_id")}
    rendered |= {name: value for name, value in members.items() if value}
    if turn.tool_calls:
        rendered["tool_calls"] = [
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
    return rendered


def _with_arguments(turns: list[Json], form: CallForm | None) -> list[Json]:
    """Return the turns. Arguments of earlier calls become JSON text, in place, if the template expects text;
    otherwise the turns are unchanged. They are also unchanged if the form of calls is unknown.

    turns: turns as `_template_turn` returns them.
    form: how the model writes calls, or None if that is unknown.
    """
    if form is None or not form.arguments_as_text:
        return turns
    for call in (call for turn in turns for call in turn.get("tool_calls", ())):
        call["function"]["arguments"] = as_json(call["function"]["arguments"])
    return turns


def _with_tool_description(turns: list[Json], tool_description: str) -> list[Json]:
    """Return the turns, with a description of the tools at the end of the system message; without one, a
    system message is added. The description is set off by a blank line.

    turns: turns as `_template_turn` returns them, at least one.
    tool_description: the tools in words.
    """
    has_system = turns[0]["role"] == "system"
    system = turns[0]["content"] if has_system else ""
    return [{"role": "system", "content": f"{system}\n\n{tool_description}".lstrip()}, *turns[has_system:]]


def _with_calls_in_words(turns_with_calls: list[Json]) -> list[Json]:
    """Return the turns without calls: calls are written in Hermes' words in the text of their turn, and
    answers of tools become the user's. Consecutive user turns are joined; no turns return none. The answer of
    a tool is joined to a user turn before it in the same way.

    turns_with_calls: turns as `_template_turn` returns them.
    """
    turns: list[Json] = []
    for turn in turns_with_calls:
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
    """Yield the events of an answer that ends with its first call. Once that call is complete the request is
    cancelled, and the answer's reason is that it ended by itself (STOP). An answer without a call is yielded
    unchanged. Events that arrive after the first call are still yielded, up to the end.

    The master reads text, so the ring may have generated a few more tokens; a reader of `use` drops them.

    events: the events of one answer; closed at the end.
    use: how the answer is read.
    cancel: ends the request; called at most once, its result is ignored.
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
    """Separates the calls of one answer from its content, while the answer is written to the client.

    use: How the answer is read.
    reader: The reader that keeps the state of this answer.
    """

    use: ToolUse
    reader: CallReader = field(init=False)

    def __post_init__(self) -> None:
        """Create the reader, which keeps the state of this answer."""
        self.reader = self.use.reader()

    def separate_calls(self, piece: ChoiceDelta) -> ChoiceDelta:
        """Return a piece of a streamed answer with its calls separated from its text. Its text is what is not
        a call, its thought includes what the reader found, and its reason may become "tool_calls".

        piece: the next piece of the answer; its `reason` is set in the last one.
        """
        content, calls = self.reader.feed(piece.text, last=piece.reason is not None)
        call_deltas = tuple(map(self._call_delta, calls))
        thought = piece.thought + self.reader.thought
        return replace(
            piece, text=content, thought=thought, calls=call_deltas, reason=self.reason(piece.reason)
        )

    def reason(self, reason: str | None) -> str | None:
        """Return OpenAI's finish reason: "tool_calls" for an answer that stopped after calls, but "stop"
        after a named function; any other reason unchanged.

        reason: the finish reason of an answer without tools, or None before its end.
        """
        called = self.reader.calls and self.use.named is None
        return "tool_calls" if reason == "stop" and called else reason

    def complete_choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return a complete choice with its calls separated from its content; a choice without calls only
        gets its thought. With calls, the content is None if it would be empty; each call has an id, its name
        and all of its arguments.

        choice: a choice of a chat completion, whose content holds the calls as text.
        """
        content, deltas = self.reader.feed(choice["message"]["content"], last=True)
        calls: list[dict[str, Any]] = []
        for one in map(self._call_delta, deltas):
            if "id" in one:
                calls.append({name: one[name] for name in ("id", "type", "function")})
            else:
                calls[one["index"]]["function"]["arguments"] += one["function"]["arguments"]
        more = {"content": content or None, "tool_calls": calls} if calls else {"content": content}
        if self.reader.thought:
            more["reasoning_content"] = self.reader.thought
        message = choice["message"] | more
        return choice | {"message": message, "finish_reason": self.reason(choice["finish_reason"])}

    def _call_delta(self, call: CallDelta) -> dict[str, Any]:
        """Return a part of a call in OpenAI's format; the first part of a call has an id and the name. The id
        is random, of nine letters and digits.

        call: a part of a call, as the reader returns it.
        """
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        # Mistral's chat templates require ids of nine letters or digits.
        id = secrets.token_hex(8)[:9]
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": id, "type": "function", "function": function}
