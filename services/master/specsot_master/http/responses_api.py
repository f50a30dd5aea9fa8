"""Serves OpenAI's /v1/responses for agents, by chat completions; nothing is stored between calls."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Request
from pydantic import AfterValidator, Field
from starlette.responses import Response

from specsot.errors import InvalidRequest
from specsot.params import MAX_MESSAGES
from specsot_master.core.dialects.response_items import ResponseWriter
from specsot_master.http.calls import EventStyle, HttpContext, call_of
from specsot_master.http.errors import body_of, naming_turns
from specsot_master.http.json_bodies import JsonRoute
from specsot_master.http.openai_api import (
    AGENT_TOKENS,
    answer_in_other_format,
    chat_body,
    chat_call,
    text_in,
)
from specsot_master.http.openai_schemas import (
    ChatBody,
    Few,
    Many,
    Model,
    Planning,
    TokenLimit,
    Words,
    at_most,
    refuse_foreign_fields,
)
from specsot_master.http.schemas import CALLERS, ResponseObject, documented
from specsot_master.http.unserved_fields import FOREIGN

# A decoded JSON object.
Json = dict[str, Any]
# The items of a conversation: messages, function calls and their results.
Items = Annotated[Many[Json], at_most(MAX_MESSAGES)]


class ResponseReasoning(Model):
    """How much the model thinks."""

    # How much the model thinks, for templates that use it; None for the template's default.
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ResponseText(Model):
    """The form of the answer's text."""

    # A JSON schema that the answer must follow; None for any form.
    format: Json | None = None
    # Only the default is served.
    verbosity: Literal["medium"] | None = None


def _check_included(included: list[str] | None) -> list[str] | None:
    """Return the value unchanged; values that concern OpenAI's own tools, or are included anyway, change
    nothing. None is accepted.

    included: the field `include`, or None.

    Raises ValueError if it asks for log probabilities, which this endpoint does not return.
    """
    if included and (name := "message.output_text.logprobs") in included:
        raise ValueError(f"{name} is not supported: leave it out")
    return included


class ResponsesBody(Model):
    """POST /v1/responses"""

    # The model's public name; None for the only one.
    model: Words | None = None
    # The conversation: text, or items, oldest first.
    input: Annotated[Words | Items, Field(examples=["Why is the sky blue?"])]
    # The system prompt; None for none.
    instructions: Words | None = None
    # The maximum number of tokens of thought and answer; None for AGENT_TOKENS, or as many as fit.
    max_output_tokens: Annotated[TokenLimit, Field(examples=[64])] = None
    # The sampling temperature; None for the default.
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    # The probability mass from which tokens are sampled; None for the default.
    top_p: float | None = None
    # True to answer by server-sent events.
    stream: bool | None = None
    # The tools that the answer may call; None for none.
    tools: Annotated[Many[Json] | None, Few] = None
    # "auto", "none", "required", or the function that must be called; None lets the model decide.
    tool_choice: Words | Json | None = None
    # False if the answer may make one call only.
    parallel_tool_calls: bool | None = None
    # How much the model thinks; None for what its template does by default.
    reasoning: ResponseReasoning | None = None
    # The form of the answer's text; None for any.
    text: ResponseText | None = None
    # What the response contains in addition; log probabilities are refused, other values change nothing.
    include: Annotated[Many[Words] | None, Few, AfterValidator(_check_included)] = None
    # The caller's own notes, which the response repeats.
    metadata: Annotated[Json | None, Few] = None
    # How the answer is planned, in SpecSoT's own field; None for the mode that the server uses by default.
    specsot: Annotated[Planning | None, Few] = None


# Fields that are known but not served, with the values that change nothing and are therefore accepted.
_HARMLESS_VALUES: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "previous_response_id": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
# From our names of fields to those of this API, for errors.
_CALLER_NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_new_tokens": "max_output_tokens",
    "tokens": "input",
}
# From names of chat completions to those of this API, for fields that callers mistake.
_CHAT_CALLER_NAMES = dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens")
# Tools of OpenAI's servers that agents always offer. They are ignored, and a model that does not know of them
# never calls them. Other tools of OpenAI's servers are refused, because a caller who offers them relies on
# them.
_IGNORED_TOOLS = ("web_search", "web_search_preview")


def responses_routes(context: HttpContext) -> APIRouter:
    """Return the route of OpenAI's Responses. It is POST /v1/responses.

    context: what all endpoints share.
    """
    router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=JsonRoute)

    @router.post("/responses", responses=documented(ResponseObject, stream=True), openapi_extra=CALLERS)
    async def respond(request: Request, body: ResponsesBody) -> Response:
        """Answer a conversation in items, as one object or as server-sent events.
        \f
        request: the HTTP request of the client.
        body: the parsed body.

        Raises InvalidRequest for a body that cannot be served, and the errors of the request.
        """
        turns, places = turns_of(body)
        with naming_turns(places):
            chat = chat_of(body, turns, context)
            if body.max_output_tokens is None:
                chat = chat.granting(AGENT_TOKENS)
            call = await chat_call(context, chat, _CALLER_NAMES)
        spaces = {joined(space, one): (space, one["name"]) for space, one in functions_in(body) if space}
        head = head_of(body, context, f"resp_{call_of(request).id}") | call.warned
        writer = ResponseWriter(head, spaces)
        style = EventStyle(named=True, last=b"", fault=lambda error: writer.fail(body_of(error)["error"]))
        return await answer_in_other_format(writer, context, request, call, style if body.stream else None)

    _ = respond
    return router


def chat_of(body: ResponsesBody, turns: list[Json], context: HttpContext) -> ChatBody:
    """Return the body of the chat completion that answers a conversation. Fields with values that change
    nothing are accepted. The reasoning effort is left out for a model that does not think.

    body: the parsed body.
    turns: the turns that `turns_of` made of it.
    context: what all endpoints share.

    Raises InvalidRequest for a body that cannot be served, among others for stored conversations, and for
    fields that only chat completions have.
    """
    given = body.model_extra or {}
    for name, idle in _HARMLESS_VALUES.items():
        if (value := given.get(name)) is not None and value not in idle:
            why = (
                ": conversations are not stored, send the whole conversation as input"
                if "_id" in name
                else ""
            )
            raise InvalidRequest(f"{name} is not supported{why or ': leave it out'}", name)
    refuse_foreign_fields(body, "text.format")
    context.unknown.check(body, _CALLER_NAMES | _CHAT_CALLER_NAMES, (*_HARMLESS_VALUES, *FOREIGN))
    effort = body.reasoning.effort if body.reasoning and context.text.thinking != "never" else None
    members: Json = {
        "model": body.model,
        "messages": turns,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": [chat_tool(one, joined(space, one)) for space, one in functions_in(body)],
        "tool_choice": chat_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": effort,
        "response_format": chat_format(body.text),
        "specsot": body.specsot and body.specsot.model_dump(exclude_unset=True),
    }
    return chat_body(members, "input")


def functions_in(body: ResponsesBody) -> list[tuple[str, Json]]:
    """Return (namespace, function) for every offered function; the namespace is "" if there is none, and the
    list is empty if no function is offered. A tool of type "namespace" stands for the functions in it; it may
    hold none.

    body: the parsed body.

    Raises InvalidRequest for tools that are not functions, except those in _IGNORED_TOOLS, which are left
    out.
    """
    found: list[tuple[str, Json]] = []
    for n, tool in enumerate(body.tools or ()):
        space = str(tool.get("name", "")) if tool.get("type") == "namespace" else ""
        inside = cast("list[Json]", tool.get("tools") or []) if space else [tool]
        for one in inside:
            if one.get("type") == "function":
                found.append((space, one))
            elif one.get("type") not in _IGNORED_TOOLS:
                why = f"tools of type {one.get('type')} are not supported, functions are"
                raise InvalidRequest(f"tools.{n}: {why}", f"tools.{n}")
    return found


def joined(namespace: str, function: Json) -> str:
    """Return a function's name, preceded by its namespace and a dot if it has one.

    namespace: the name of the namespace, or "".
    function: the function as a JSON object.
    """
    name = str(function.get("name", ""))
    return f"{namespace}.{name}" if namespace else name


def chat_tool(function: Json, name: str) -> Json:
    """Return a function in the format of chat completions.

    function: the function as a JSON object of a Responses body; it may lack a description and parameters.
    name: its name, with any namespace.
    """
    about = {part: function[part] for part in _FUNCTION if function.get(part) is not None}
    return {"type": "function", "function": {"name": name, **about}}


# Members of a function that chat completions have too.
_FUNCTION = ("description", "parameters")


def chat_choice(choice: Any) -> Any:
    """Return a tool_choice in the format of chat completions; texts and None are returned unchanged. So are
    objects of another type than "function".

    choice: the field `tool_choice`.
    """
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def chat_format(text_options: ResponseText | None) -> Json | None:
    """Return the form of the answer's text as a response_format of chat completions, or None if the body
    names none. Another type than "json_schema" is returned unchanged; an empty object is, too.

    text_options: the field `text`, or None.
    """
    form = text_options.format if text_options else None
    if not form or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}


def turns_of(body: ResponsesBody) -> tuple[list[Json], list[str]]:
    r"""Return the turns of a chat, and for each turn the part of the body in which it begins; two empty lists
    for a body without items and instructions. An input that is a text is one turn of the user. Instructions
    come first, as a system turn with the place "instructions".

    Function calls belong to the assistant's turn before them; consecutive system or user items become one
    turn:
        # input [user "a", user "b", assistant "c", function_call, function_call_output]
        # -> turns [user "a\n\nb", assistant "c" with the call, tool], places ["input.0", "input.2",
        "input.4"]

    body: the parsed body.

    Raises InvalidRequest for items that are not served.
    """
    turns: list[Json] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    places = ["instructions"] * len(turns)
    if isinstance(body.input, str):
        return [*turns, {"role": "user", "content": body.input}], [*places, "input"]
    for n, item in enumerate(body.input):
        _add_item(turns, item, f"input.{n}")
        places += [f"input.{n}"] * (len(turns) - len(places))
    return turns, places


def _add_item(turns: list[Json], item: Json, field: str) -> None:
    """Append an item to the last turn, or as a new turn. An item with reasoning is left out. A call goes to
    the assistant's turn, which is added if the last turn is another one's; a result is a turn of the tool. An
    item without a type is a message.

    turns: the turns so far, which are changed.
    item: an item of the field `input`.
    field: its name, such as "input.0", for errors.

    Raises InvalidRequest for items that are not served.
    """
    match item.get("type", "message"):
        case "message":
            content = text_in(item.get("content"), ("input_text", "output_text", "text"), f"{field}.content")
            _add_words(turns, item.get("role"), content)
        case "function_call":
            function = {
                "name": joined(item.get("namespace") or "", item),
                "arguments": item.get("arguments", ""),
            }
            call = {"id": item.get("call_id", ""), "function": function}
            if not turns or turns[-1]["role"] != "assistant":
                turns.append({"role": "assistant", "content": None})
            turns[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            output_text = text_in(
                item.get("output"), ("input_text", "output_text", "text"), f"{field}.output"
            )
            turns.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output_text})
        case "reasoning":
            pass  # Chat templates leave out the thinking of earlier turns.
        case kind:
            raise InvalidRequest(f"{field}: items of type {kind} are not supported", field)


def _add_words(turns: list[Json], role: Any, content: str) -> None:
    """Append text to the turns; consecutive system or user items are joined, because agents send several of
    them in a row, but chat templates expect alternating turns. An item of any other role, or of another role
    than the last turn, becomes a turn of its own. Texts are joined by a blank line.

    turns: the turns so far, which are changed.
    role: the item's role; "developer" counts as "system".
    content: the item's text.
    """
    role = "system" if role == "developer" else role
    if turns and turns[-1]["role"] == role and role in ("system", "user"):
        turns[-1]["content"] += f"\n\n{content}"
    else:
        turns.append({"role": role, "content": content})


def head_of(body: ResponsesBody, context: HttpContext, response_id: str) -> Json:
    """Return the members of a response object that repeat the request; what the request left out has its
    default.

    body: the parsed body.
    context: what all endpoints share.
    response_id: the id of the response.
    """
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": body.model or context.model.name,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": 0.0 if body.temperature is None else body.temperature,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
    }
