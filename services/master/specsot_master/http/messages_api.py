"""Serves Anthropic's /v1/messages and /v1/messages/count_tokens for agents, by chat completions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from specsot.errors import InvalidRequest
from specsot.params import MAX_MESSAGES, check_length
from specsot_master.core.dialects.message_blocks import CALL_ID, MessageWriter
from specsot_master.http.calls import EventStyle, HttpContext, call_of
from specsot_master.http.errors import anthropic_body, naming_turns
from specsot_master.http.json_bodies import JsonRoute
from specsot_master.http.openai_api import (
    AGENT_TOKENS,
    answer_in_other_format,
    chat_body,
    chat_call,
    prompt_tokens,
    text_in,
)
from specsot_master.http.openai_requests import num_characters
from specsot_master.http.openai_schemas import (
    ChatBody,
    Count,
    Few,
    Many,
    Model,
    Planning,
    TokenLimit,
    Words,
    at_most,
    refuse_foreign_fields,
)
from specsot_master.http.schemas import CALLERS, CountedTokens, MessageObject, documented
from specsot_master.http.unserved_fields import FOREIGN

# A decoded JSON object.
Json = dict[str, Any]
# Text, or a list of content blocks.
Content = Words | Annotated[Many[Json], at_most(MAX_MESSAGES)]


class ClaudeTurn(Model):
    """A message of a conversation: text, or a list of content blocks."""

    # Who wrote the message.
    role: Literal["user", "assistant", "system"]
    # What the message holds; None for nothing.
    content: Content | None


class ClaudeThinking(Model):
    """Whether the model thinks, and for how many tokens at most."""

    # "disabled" to answer at once; "enabled" and "adaptive" to think first.
    type: Literal["enabled", "adaptive", "disabled"]
    # The maximum number of tokens of a thought; None for no bound of its own.
    budget_tokens: Annotated[Count, Field(ge=1)] | None = None


class ClaudeTool(Model):
    """A function of the caller; tools that Anthropic's servers run are refused by their type."""

    # The function's name.
    name: Words
    # "custom" or None for a function of the caller; any other type is refused.
    type: Words | None = None
    # What the function does, for the model; None for no description.
    description: Words | None = None
    # The JSON schema of the arguments; None for a function without arguments.
    input_schema: Json | None = None


class ClaudeChoice(Model):
    """Which tools the answer may or must call."""

    # "auto": the model decides; "any": some function must be called; "tool": the named one; "none": no
    # function.
    type: Literal["auto", "any", "tool", "none"]
    # The function that must be called, for the type "tool"; else None.
    name: Words | None = None
    # True if the answer may make one call only.
    disable_parallel_tool_use: bool | None = None


# The example of a conversation in the API document.
_CONVERSATION = [{"role": "user", "content": "Why is the sky blue?"}]


class CountBody(Model):
    """POST /v1/messages/count_tokens"""

    # The model's public name; None for the only one.
    model: Words | None = None
    # The conversation, oldest message first.
    messages: Annotated[
        Many[ClaudeTurn], at_most(MAX_MESSAGES), Field(min_length=1, examples=[_CONVERSATION])
    ]
    # The system prompt; None for none.
    system: Content | None = None
    # The functions that the answer may call; None for none.
    tools: Annotated[Many[ClaudeTool] | None, Few] = None
    # Which functions the answer may or must call; None lets the model decide.
    tool_choice: ClaudeChoice | None = None
    # Whether the model thinks first; None for what its template does by default.
    thinking: ClaudeThinking | None = None


class MessagesBody(CountBody):
    """POST /v1/messages"""

    # The maximum number of tokens of thought and answer; None for AGENT_TOKENS, or as many as fit.
    max_tokens: Annotated[TokenLimit, Field(examples=[64])]
    # True to answer by server-sent events.
    stream: bool | None = None
    # The sampling temperature; None for the default.
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    # The probability mass from which tokens are sampled; None for the default.
    top_p: float | None = None
    # The number of tokens from which is sampled; None for the default.
    top_k: Count | None = None
    # Texts that end the answer; None for none.
    stop_sequences: Many[Words] | None = None
    # Its member "format" holds a JSON schema that the answer must follow; None for any form.
    output_config: Annotated[Json | None, Few] = None
    # The same member, as older clients name it; None for any form.
    output_format: Annotated[Json | None, Few] = None
    # How the answer is planned, in SpecSoT's own field; None for the mode that the server uses by default.
    specsot: Annotated[Planning | None, Few] = None


# From our names of fields to Anthropic's, for errors.
_CALLER_NAMES = {
    "prompt": "messages",
    **dict.fromkeys(("max_new_tokens", "default_new_tokens"), "max_tokens"),
    "stop": "stop_sequences",
    "tokens": "messages",
}
# From Anthropic's types of tool choices to those of chat completions.
_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
# Fields that would change the answer but are not served.
_REFUSED_FIELDS = ("container", "mcp_servers")
# The event that is sent during silence.
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
# How Anthropic's API writes server-sent events.
_STYLE = EventStyle(named=True, last=b"", ping=_PING, fault=anthropic_body)


def messages_routes(context: HttpContext) -> APIRouter:
    """Return the routes of Anthropic's Messages. They are POST /v1/messages and POST
    /v1/messages/count_tokens.

    context: what all endpoints share.
    """
    router = APIRouter(prefix="/v1", tags=["Anthropic"], route_class=JsonRoute)

    @router.post("/messages", responses=documented(MessageObject, stream=True), openapi_extra=CALLERS)
    async def send(request: Request, body: MessagesBody) -> Response:
        """Answer a conversation in content blocks, as one object or as server-sent events.
        \f
        request: the HTTP request of the client.
        body: the parsed body.

        Raises InvalidRequest for a body that cannot be served, and the errors of the request.
        """
        refuse_foreign_fields(body, "output_config.format")
        context.unknown.check(body, _CALLER_NAMES, (*_REFUSED_FIELDS, *FOREIGN))
        granted_tokens = AGENT_TOKENS if body.max_tokens is None else body.max_tokens
        turns, places = turns_of(body)
        with naming_turns(places):
            chat = chat_of(body, turns, context).granting(granted_tokens)
            call = await chat_call(context, chat, _CALLER_NAMES)
        head = {"id": f"msg_{call_of(request).id}", "type": "message", "role": "assistant"}
        writer = MessageWriter(head | {"model": body.model or context.model.name} | call.warned)
        return await answer_in_other_format(writer, context, request, call, _STYLE if body.stream else None)

    @router.post("/messages/count_tokens", responses=documented(CountedTokens))
    async def count(body: CountBody) -> dict[str, int]:
        """Count the tokens of a conversation's prompt.
        \f
        body: the parsed body.

        Raises InvalidRequest for a body that cannot be served.
        """
        turns, places = turns_of(body)
        with naming_turns(places):
            chat = chat_of(body, turns, context)
            check_length(context.model.max_positions, characters=(words := num_characters(chat)))
            return {"input_tokens": await context.in_thread(words, prompt_tokens, chat, context)}

    _ = send, count
    return router


def chat_of(body: CountBody, turns: list[Json], context: HttpContext) -> ChatBody:
    """Return the body of the chat completion that answers a conversation. A request for thinking is ignored
    if the model cannot think. A body that only counts tokens has no sampling and no form.

    body: the parsed body.
    turns: the turns that `turns_of` made of it, oldest first.
    context: what all endpoints share.

    Raises InvalidRequest for a body that cannot be served, such as one with MCP servers or a container.
    """
    given = body.model_extra or {}
    for name in _REFUSED_FIELDS:
        if given.get(name):
            raise InvalidRequest(f"{name} is not supported: leave it out", name)
    choice = body.tool_choice
    named = choice and choice.type == "tool" and {"type": "function", "function": {"name": choice.name or ""}}
    members: Json = {
        "model": body.model,
        "messages": turns,
        "tools": [chat_tool(one, f"tools.{n}") for n, one in enumerate(body.tools or ())],
        "tool_choice": named or (choice and _CHOICES[choice.type]),
    }
    if choice and choice.disable_parallel_tool_use:
        members["parallel_tool_calls"] = False
    if body.thinking and context.text.thinking != "never":
        members["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
        members["thinking_token_budget"] = body.thinking.budget_tokens
    if isinstance(body, MessagesBody):
        members |= {name: getattr(body, name) for name in ("temperature", "top_p", "top_k")}
        members |= {"stop": body.stop_sequences, "response_format": chat_format(body)}
        members["specsot"] = body.specsot and body.specsot.model_dump(exclude_unset=True)
    return chat_body(members, "messages")


def chat_format(body: MessagesBody) -> Json | None:
    """Return the JSON schema of the answer as a response_format of chat completions; None if there is none. A
    format that is no object counts as none.

    body: the parsed body, with the schema in `output_config.format`, or in `output_format`, its older name.
    """
    form = (body.output_config or {}).get("format") or body.output_format
    if not isinstance(form, dict):
        return None
    return {"type": form.get("type"), "json_schema": {"name": "answer", "schema": form.get("schema")}}


def chat_tool(tool: ClaudeTool, field: str) -> Json:
    """Return a tool in the format of chat completions. A description or schema that is None is left out.

    tool: a tool of the parsed body.
    field: its name, such as "tools.0", for errors.

    Raises InvalidRequest for Anthropic's own tools.
    """
    if tool.type not in (None, "custom"):
        raise InvalidRequest(f"{field}: tools of type {tool.type} are not supported, custom tools are", field)
    about = {"description": tool.description, "parameters": tool.input_schema}
    function = {"name": tool.name} | {name: value for name, value in about.items() if value is not None}
    return {"type": "function", "function": function}


def turns_of(body: CountBody) -> tuple[list[Json], list[str]]:
    """Return the turns of a chat, at least one, and for each turn the part of the body of which it was made.
    A message of thinking blocks alone has no turn.

        # system "Be brief.", messages [user text, assistant tool_use, user tool_result + text]
        # -> turns [system, user, assistant, tool, user]
        # -> places ["system", "messages.0", "messages.1", "messages.2", "messages.2"]

    body: the parsed body.

    Raises InvalidRequest if the last message is the assistant's, or if a block is not served.
    """
    system = text_in(body.system, ("text",), "system")
    turns: list[Json] = [{"role": "system", "content": system}] if system else []
    places = ["system"] * len(turns)
    if body.messages[-1].role == "assistant":
        field = f"messages.{len(body.messages) - 1}"
        raise InvalidRequest(
            f"{field}: the last message must not be the assistant's, since answers are not continued here",
            field,
        )
    for n, turn in enumerate(body.messages):
        turns += blocks_as_turns(turn, f"messages.{n}")
        places += [f"messages.{n}"] * (len(turns) - len(places))
    return turns, places


def blocks_as_turns(turn: ClaudeTurn, field: str) -> list[Json]:
    """Return the chat turns of one message: one per tool result, then one for its text and tool calls.
    Thinking blocks are left out; a message of nothing else returns no turn. A content of None or text is one
    turn. The arguments of calls become JSON text, and ids lose Anthropic's prefix.

    turn: a message of the parsed body.
    field: its name, such as "messages.0", for errors.

    Raises InvalidRequest for blocks that are not served.
    """
    if turn.content is None or isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results: list[Json] = []
    calls: list[Json] = []
    texts: list[Json] = []
    for n, block in enumerate(turn.content):
        place = f"{field}.content.{n}"
        match block.get("type"):
            case "tool_result":
                result_text = text_in(block.get("content"), ("text",), place)
                results.append(
                    {"role": "tool", "tool_call_id": _id_of(block, "tool_use_id"), "content": result_text}
                )
            case "tool_use":
                function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
                calls.append({"id": _id_of(block, "id"), "function": function})
            case "thinking" | "redacted_thinking":
                pass  # Chat templates leave out the thinking of earlier turns.
            case _:
                texts.append({"type": "text", "text": text_in([block], ("text",), place)})
    if not (texts or calls):
        return results
    return [
        *results,
        {"role": turn.role, "content": texts or None, **({"tool_calls": calls} if calls else {})},
    ]


def _id_of(block: Json, name: str) -> str:
    """Return the id of a tool call without the prefix that Anthropic's ids have; "" if there is none.

    block: a content block.
    name: the member that holds the id.
    """
    return str(block.get(name, "")).removeprefix(CALL_ID)
