"""POST /v1/responses: OpenAI's Responses as chat completions, for agents. Nothing is kept between calls."""

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
    answer_by,
    chat_body,
    chat_call,
    text_in,
)
from specsot_master.http.openai_schemas import (
    FOREIGN_FORMS,
    ChatBody,
    Few,
    Many,
    Model,
    Planning,
    TokenLimit,
    Words,
    at_most,
    refuse_foreign_forms,
)
from specsot_master.http.schemas import CALLERS, ResponseObject, documented

Json = dict[str, Any]
Items = Annotated[Many[Json], at_most(MAX_MESSAGES)]


class ResponseReasoning(Model):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ResponseText(Model):
    format: Json | None = None
    verbosity: Literal["medium"] | None = None


def _check_included(given: list[str] | None) -> list[str] | None:
    """What else may be included belongs to tools of OpenAI's, or is there anyway."""
    if given and (name := "message.output_text.logprobs") in given:
        raise ValueError(f"{name} is not served here: leave it out")
    return given


class ResponsesBody(Model):
    """POST /v1/responses. input: text, or items of a conversation."""

    model: Words | None = None
    input: Annotated[Words | Items, Field(examples=["Why is the sky blue?"])]
    instructions: Words | None = None
    max_output_tokens: Annotated[TokenLimit, Field(examples=[64])] = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: Annotated[Many[Json] | None, Few] = None
    tool_choice: Words | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ResponseReasoning | None = None
    text: ResponseText | None = None
    include: Annotated[Many[Words] | None, Few, AfterValidator(_check_included)] = None
    metadata: Annotated[Json | None, Few] = None
    specsot: Annotated[Planning | None, Few] = None


# What is known, and not served: with what a caller may spell out because it is what happens anyway.
_IDLE: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "previous_response_id": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_WORDS = {"prompt": "input", "messages": "input", "max_new_tokens": "max_output_tokens", "tokens": "input"}
_CHAT_WORDS = dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens")
# Of tools that OpenAI's servers run agents always offer this one, and a model that is not told of it never
# wants it; of others a caller expects something.
_UNOFFERED = ("web_search", "web_search_preview")


def responses_routes(context: HttpContext) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=JsonRoute)

    @router.post("/responses", responses=documented(ResponseObject, stream=True), openapi_extra=CALLERS)
    async def respond(request: Request, body: ResponsesBody) -> Response:
        """An answer to a conversation as items, whole or as server-sent events."""
        turns, places = turns_of(body)
        with naming_turns(places):
            chat = chat_of(body, turns, context)
            if body.max_output_tokens is None:
                chat = chat.granting(AGENT_TOKENS)
            call = await chat_call(context, chat, _WORDS)
        spaces = {joined(space, one): (space, one["name"]) for space, one in functions_in(body) if space}
        head = head_of(body, context, f"resp_{call_of(request).id}") | call.warned
        writer = ResponseWriter(head, spaces)
        style = EventStyle(named=True, last=b"", fault=lambda error: writer.fail(body_of(error)["error"]))
        return await answer_by(writer, context, request, call, style if body.stream else None)

    _ = respond
    return router


def chat_of(body: ResponsesBody, turns: list[Json], context: HttpContext) -> ChatBody:
    """The same as a chat completion. Raises InvalidRequest."""
    given = body.model_extra or {}
    for name, idle in _IDLE.items():
        if (value := given.get(name)) is not None and value not in idle:
            why = ": nothing is kept here, send the whole conversation as input" if "_id" in name else ""
            raise InvalidRequest(f"{name} is not served here{why or ': leave it out'}", name)
    refuse_foreign_forms(body, "text.format")
    context.unknown.check(body, _WORDS | _CHAT_WORDS, (*_IDLE, *FOREIGN_FORMS))
    effort = body.reasoning.effort if body.reasoning and context.text.thinking != "never" else None
    told: Json = {
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
    return chat_body(told, "input")


def functions_in(body: ResponsesBody) -> list[tuple[str, Json]]:
    """Every function, with its namespace if it has one. Raises InvalidRequest for other tools."""
    found: list[tuple[str, Json]] = []
    for n, tool in enumerate(body.tools or ()):
        space = str(tool.get("name", "")) if tool.get("type") == "namespace" else ""
        inside = cast("list[Json]", tool.get("tools") or []) if space else [tool]
        for one in inside:
            if one.get("type") == "function":
                found.append((space, one))
            elif one.get("type") not in _UNOFFERED:
                why = f"tools of type {one.get('type')} are not served here, functions are"
                raise InvalidRequest(f"tools.{n}: {why}", f"tools.{n}")
    return found


def joined(space: str, function: Json) -> str:
    name = str(function.get("name", ""))
    return f"{space}.{name}" if space else name


def chat_tool(function: Json, name: str) -> Json:
    about = {part: function[part] for part in _FUNCTION if function.get(part) is not None}
    return {"type": "function", "function": {"name": name, **about}}


_FUNCTION = ("description", "parameters")


def chat_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def chat_format(text: ResponseText | None) -> Json | None:
    """Raises InvalidRequest."""
    form = text.format if text else None
    if not form or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}


def turns_of(body: ResponsesBody) -> tuple[list[Json], list[str]]:
    """Items as turns: calls go to the assistant's turn before them. Also, for each turn, where its first item
    is in the body. Raises InvalidRequest.
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
            said = text_in(item.get("output"), ("input_text", "output_text", "text"), f"{field}.output")
            turns.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": said})
        case "reasoning":
            pass  # templates leave out what was thought in earlier turns
        case kind:
            raise InvalidRequest(f"{field}: items of type {kind} are not served here", field)


def _add_words(turns: list[Json], role: Any, content: str) -> None:
    """Agents send several system and user items in a row; templates want one turn."""
    role = "system" if role == "developer" else role
    if turns and turns[-1]["role"] == role and role in ("system", "user"):
        turns[-1]["content"] += f"\n\n{content}"
    else:
        turns.append({"role": role, "content": content})


def head_of(body: ResponsesBody, context: HttpContext, id: str) -> Json:
    return {
        "id": id,
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
