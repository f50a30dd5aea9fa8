"""Serves OpenAI's endpoints /v1/chat/completions, /v1/completions and /v1/models.

The other APIs convert their bodies to bodies of chat completions, and use the functions here.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from specsot.core.view import View, advance
from specsot.errors import InvalidRequest, NotFound
from specsot.events import Event, Numbered, PromptScored, Started, TokenLogprobs
from specsot.params import Ask, Mode, check_length
from specsot_master.core.dialects.message_blocks import MessageWriter
from specsot_master.core.dialects.openai_responses import (
    CHAT,
    TEXT,
    ChoiceDelta,
    ChoiceOptions,
    Dialect,
    TextOffsets,
    Thought,
    UsageCount,
    choice_of,
    chunk_of,
    delta_of,
    first_of,
    unwritten,
)
from specsot_master.core.dialects.response_items import ResponseWriter
from specsot_master.core.plans.fork_plan import may_fork
from specsot_master.engine import Caller
from specsot_master.http.calls import (
    EventStyle,
    HttpCall,
    HttpContext,
    Requests,
    begin_stream,
    call_of,
    merged_events,
    unless_disconnected,
)
from specsot_master.http.errors import complaint_text, names_to_wrong_value, naming_fields
from specsot_master.http.json_bodies import JsonRoute
from specsot_master.http.openai_requests import (
    CHAT_CALLER_NAMES,
    COMPLETION_CALLER_NAMES,
    caller_names_of,
    chat_asks,
    completion_asks,
    num_characters,
    position_limit_of,
    prompts_of,
    warnings_in,
    writes_nothing,
)
from specsot_master.http.openai_schemas import (
    Asking,
    ChatBody,
    CompletionBody,
    Planning,
    refuse_unserved,
)
from specsot_master.http.openai_tools import (
    ToolAnswer,
    ToolUse,
    functions_of,
    render_conversation,
    tool_asks,
    tool_use,
    until_first_call,
    uses_tools,
)
from specsot_master.http.schemas import CALLERS, ChatCompletion, Completion, ModelCard, ModelList, documented
from specsot_master.http.thinking import ThinkFirst, generate_thinking, think_first, wants_thinking
from specsot_master.http.unserved_fields import UNSERVED

# The events of a call's answers, as (index of the answer, event).
CallEvents = AsyncGenerator[tuple[int, Numbered | Thought], None]


@dataclass(frozen=True, slots=True)
class OpenAICall:
    """One call of a completions endpoint: the requests to run, and how their answers are written.

    asks: The requests, one per answer.
    dialect: The format of the endpoint's objects.
    options: What a choice contains: log probabilities, the plan, branches.
    words: From our names of fields to the caller's, for errors.
    copies: How many answers each prompt gets; consecutive asks belong to one prompt.
    echoed_prompts: The prompt with which each answer begins; empty unless `echo` was asked for.
    spell: Returns a token's bytes, if log probabilities of the echoed prompt are asked for; else None.
    prompt_only: True if the answer consists of the echoed prompt only.
    tools: The tools that the model may call, or None if it may call none.
    think: How the model thinks before each answer, or None if it does not.
    usage: True if a stream ends with the usage.
    head: The members with which every object of this call begins; None before `answer` sets them, and for
        other APIs, which have members of their own.
    warnings: Parts of the request that the answer is not held to, in words; reported once. Empty for none.
    """

    asks: tuple[Ask, ...]
    dialect: Dialect
    options: ChoiceOptions
    words: Mapping[str, str]
    copies: int = 1
    echoed_prompts: tuple[str, ...] = ()
    spell: Callable[[int], bytes] | None = None
    prompt_only: bool = False
    tools: ToolUse | None = None
    think: ThinkFirst | None = None
    usage: bool = False
    head: Mapping[str, Any] | None = None
    warnings: tuple[str, ...] = ()

    def generate(self, counter: Requests, http: HttpCall) -> CallEvents:
        """Start the requests, and return their events as (index of the answer, event), in the order of
        arrival. The requests begin when the events are read; closing the events ends them.

        Text that waits for the client is joined, unless the client asked for every event of the branches.

        counter: the entry point of requests.
        http: the HTTP call, which gives the requests their ids and their caller.
        """
        callers = http.callers(len(self.asks))
        return merged_events([self._answer(counter, ask, one) for ask, one in zip(self.asks, callers)])

    def _answer(
        self, counter: Requests, ask: Ask, caller: Caller
    ) -> AsyncGenerator[Numbered | Thought, None]:
        """Start one request, and return the events of its answer, up to its first call if only that counts.
        With thinking, the events of the thinking precede those of the answer.

        counter: the entry point of requests.
        ask: the request: what one answer is asked for.
        caller: id and owner of the request.
        """
        if self.think is None:
            events: AsyncGenerator[Numbered | Thought, None] = counter.generate(
                ask, caller, join_text=not self.options.branches
            )
        else:
            events = generate_thinking(counter, ask, caller, self.think)
        if self.tools is None or not self.tools.ends_with_call:
            return events
        cancel = partial(counter.cancel, caller.request or "", caller.owner)
        return until_first_call(events, self.tools, cancel)

    async def chunks(
        self, events: CallEvents, usage: UsageCount | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield a chunk for every event that adds to an answer, and the usage last if it was asked for. An
        event that adds nothing for the client gives no chunk. The warnings are a part of the first chunk;
        with `usage`, every chunk has the member, which is None but in the last one.

        events: what `generate` returned; closed at the end.
        usage: counts the tokens of this call, also for the caller; None if only this method needs the count.

        Raises the errors of the requests; InvalidRequest names the caller's fields.
        """
        usage = usage or UsageCount()
        bill = {"usage": None} if self.usage else {}
        head = self._head(self.dialect.chunk)
        answers = self._tool_answers()
        warned = self.warned
        offsets = [TextOffsets(self.options.special) for _ in self.asks]
        with naming_fields(self.words):
            async with aclosing(self._as_asked(events)) as call_events:
                async for index, numbered in call_events:
                    usage.count(index // self.copies, event_of(numbered))
                    if piece := self._piece(index, numbered):
                        piece = answers[index].separate_calls(piece) if answers else piece
                        if not piece.says_something:
                            continue
                        choice = chunk_of(self.dialect, index, piece, offsets[index])
                        yield head | {"choices": [choice]} | bill | warned
                        warned = {}
        if self.usage:
            yield head | {"choices": [], "usage": usage.as_json()}

    async def gather(self, events: CallEvents) -> dict[str, Any]:
        """Wait for all events, and return the response as one JSON object, with one choice per request.
        Warnings, if there are some, are a member of the object.

        events: what `generate` returned; closed at the end.

        Raises the errors of the requests; InvalidRequest names the caller's fields.
        """
        usage = UsageCount()
        views = [View() for _ in self.asks]
        thoughts = ["" for _ in self.asks]
        with naming_fields(self.words):
            async with aclosing(self._as_asked(events)) as call_events:
                async for index, numbered in call_events:
                    usage.count(index // self.copies, event_of(numbered))
                    if isinstance(numbered, Thought):
                        thoughts[index] += numbered.text
                    else:
                        views[index] = advance(views[index], numbered.event)
        choices = [
            choice_of(self.dialect, index, self._echoed(index, view), self.options, thoughts[index])
            for index, view in enumerate(views)
        ]
        if answers := self._tool_answers():
            choices = [answer.complete_choice(choice) for answer, choice in zip(answers, choices)]
        members = {"choices": choices, "usage": usage.as_json()}
        return self._head(self.dialect.whole) | members | self.warned

    @property
    def warned(self) -> dict[str, Any]:
        """The warnings as a member of a response; empty if there are none."""
        return {"warnings": list(self.warnings)} if self.warnings else {}

    def _tool_answers(self) -> list[ToolAnswer]:
        """Return a reader of tool calls per answer; an empty list if no tool may be called."""
        return [ToolAnswer(self.tools) for _ in self.asks] if self.tools else []

    def _head(self, object_kind: str) -> dict[str, Any]:
        """Return the members with which an object of this call begins; only "object" before `answer` has set
        the others.

        object_kind: the value of the member "object".
        """
        return {**(self.head or {}), "object": object_kind}

    def _as_asked(self, events: CallEvents) -> CallEvents:
        """Return the events, changed by `_adapt_to_echo` if the prompt is echoed or no text is wanted; else
        unchanged.

        events: what `generate` returned.
        """
        return self._adapt_to_echo(events) if self.echoed_prompts or self.prompt_only else events

    async def _adapt_to_echo(self, events: CallEvents) -> CallEvents:
        """Yield the events as the client asked for them. A prompt's log probabilities, which come in several
        events, are joined in one event, from the prompt's first token on. If the answer consists of the
        echoed prompt only, its generated text is removed from the events. Answers whose prompt is only echoed
        have a Finished event without text.

        events: what `generate` returned; closed at the end.
        """
        parts: dict[int, tuple[TokenLogprobs, ...]] = {}
        async with aclosing(events):
            async for index, numbered in events:
                if isinstance(numbered, Thought):
                    yield index, numbered
                    continue
                event = numbered.event
                if isinstance(event, Started) and self.spell:
                    first = self.asks[index].tokens[0]
                    parts[index] = (first_of(first, self.spell(first)),)
                elif isinstance(event, PromptScored):
                    parts[index] += event.logprobs
                    continue
                elif index in parts:
                    yield index, replace(numbered, event=PromptScored(0, parts.pop(index)))
                if shown := unwritten(event) if self.prompt_only else event:
                    yield index, numbered if shown is event else replace(numbered, event=shown)

    def _piece(self, index: int, event: Numbered | Thought) -> ChoiceDelta | None:
        """Return what an event adds to an answer, or None if it adds nothing. The first piece begins with the
        echoed prompt, if there is one. With log probabilities, the echoed text comes with those of the
        prompt, else with the start of the answer.

        index: the index of the answer.
        event: an event of the answer, or a part of its thinking.
        """
        piece = delta_of(event, self.options)
        if piece is None or not self.echoed_prompts or isinstance(event, Thought):
            return piece
        if isinstance(event.event, PromptScored) or (piece.begins and not self.spell):
            return replace(piece, text=self.echoed_prompts[index])
        return piece

    def _echoed(self, index: int, view: View) -> View:
        """Return a finished answer with the echoed prompt before its text and log probabilities. Without
        `echo`, or before the answer is finished, return the view unchanged. The prompt's log probabilities
        precede those of the answer.

        index: the index of the answer.
        view: the answer as the events so far describe it.
        """
        finished = view.finished
        if not self.echoed_prompts or finished is None:
            return view
        echoed = replace(finished, text=self.echoed_prompts[index] + finished.text)
        return replace(view, finished=echoed, logprobs=view.prompt_logprobs + view.logprobs)


def event_of(numbered: Numbered | Thought) -> Event | Thought:
    """Return an event without its number; thinking, which has none, is returned as it is.

    numbered: an event of an answer, or a part of its thinking.
    """
    return numbered if isinstance(numbered, Thought) else numbered.event


def openai_routes(context: HttpContext) -> APIRouter:
    """Return the routes of OpenAI's completions and models. They are POST /v1/chat/completions, POST
    /v1/completions, GET /v1/models and GET /v1/models/{name}.

    context: what all endpoints share.
    """
    router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=JsonRoute)

    @router.post(
        "/chat/completions", responses=documented(ChatCompletion, stream=True), openapi_extra=CALLERS
    )
    async def complete_chat(request: Request, body: ChatBody) -> Response:
        """Answer a conversation, as one object or as server-sent events.
        \f
        request: the HTTP request of the client.
        body: the parsed body.

        Raises InvalidRequest for a body that cannot be served, and the errors of the request.
        """
        return await answer(context, request, body, await chat_call(context, body))

    @router.post("/completions", responses=documented(Completion, stream=True), openapi_extra=CALLERS)
    async def complete(request: Request, body: CompletionBody) -> Response:
        """Continue texts, as one object or as server-sent events.
        \f
        request: the HTTP request of the client.
        body: the parsed body.

        Raises InvalidRequest for a body that cannot be served, and the errors of the requests.
        """
        refuse_unserved(body)
        context.unknown.check(body, COMPLETION_CALLER_NAMES, UNSERVED)
        words = caller_names_of(body)
        with naming_fields(words):
            named = body.model_copy(update={"model": model_without_suffix(context, body.model)})
            text = context.text
            context_length = context.model.max_positions
            encode = partial(text.encode_prompt, max_positions=position_limit_of(body, context_length))
            size = sum(map(len, prompts_of(body)))
            asks = tuple(await context.in_thread(size, completion_asks, named, encode, context_length))
        copies = body.n or 1
        skip = body.skip_special_tokens is not False
        given = zip(prompts_of(body), asks[::copies])
        prompts = (one if isinstance(one, str) else text.decode(ask.tokens, skip) for one, ask in given)
        echoed = await context.in_thread(size, list, prompts) if body.echo else []
        echoed_prompts = tuple(echo for echo in echoed for _ in range(copies))
        options = replace(choice_options(body, body.logprobs is not None), special=text.special_ids)
        spell = context.text.spell if body.echo and options.logprobs else None
        call = OpenAICall(asks, TEXT, options, words, copies, echoed_prompts, spell, writes_nothing(body))
        call = replace(call, warnings=warnings_in(body))
        return await answer(context, request, body, call)

    @router.get("/models", response_model=ModelList)
    async def list_models() -> dict[str, Any]:
        """List the model; further names stand for the model in a mode."""
        return {"object": "list", "data": [model_card(context, name) for name in names_of(context)]}

    router.add_api_route("/models/", list_models, include_in_schema=False)

    @router.get("/models/{name:path}", response_model=ModelCard)
    async def show_model(name: str) -> dict[str, Any]:
        """Describe one listed model.
        \f
        name: the model's name, as `list_models` lists it.

        Raises NotFound for any other name.
        """
        if name not in names_of(context):
            raise NotFound(f"no model named {name!r} here")
        return model_card(context, name)

    _ = complete_chat, complete, list_models, show_model
    return router


async def chat_call(
    context: HttpContext, body: ChatBody, caller_names: Mapping[str, str] | None = None
) -> OpenAICall:
    """Return the call that a chat body makes. The plan is written as a thought if the model's name names a
    mode, as "demo:sot" does. Warnings name what the answer is not held to.

    context: what all endpoints share.
    body: the parsed body.
    caller_names: from our names of fields to the caller's, for bodies that were converted from another API;
        None for a chat body of the caller's own.

    Raises InvalidRequest for a body that cannot be served.
    """
    refuse_unserved(body)
    context.unknown.check(body, CHAT_CALLER_NAMES, UNSERVED)
    asked = body
    body, mode = resolve_mode(body, context)
    caller_names = {**caller_names_of(body), **(caller_names or {})}
    with naming_fields(caller_names):
        use, asks, think = await _asks_of(context, body, mode)
    options = replace(choice_options(asked, bool(body.logprobs)), plan=asked.model != body.model)
    warnings = (*warnings_in(body), *(use.warnings if use else ()))
    return OpenAICall(
        tuple(asks), CHAT, options, caller_names, body.n or 1, tools=use, think=think, warnings=warnings
    )


async def _asks_of(
    context: HttpContext, body: ChatBody, mode: Mode
) -> tuple[ToolUse | None, list[Ask], ThinkFirst | None]:
    """Return the tools that may be called (None if none may), the requests, and how the model thinks before
    it answers (None if it does not). If thinking has no limit of its own, one is found for thinking and
    answer together. That limit is what the body grants, or AGENT_TOKENS. A model that forks, and does not
    think before this answer, answers directly.

    Prompts with tools or with thinking are rendered and tokenized here, in a thread because they are long;
    other conversations are left to the engine.

    context: what all endpoints share.
    body: the parsed body.
    mode: the mode if the body names none.

    Raises InvalidRequest for a body that cannot be served, and ContextLengthExceeded for one that is too
    long.
    """
    positions = context.model.max_positions
    text = context.text
    use = tool_use(body, text)
    tools = uses_tools(body)
    forks = not tools and text.thinking != "never" and context.model.plan_style == "tags"
    forks = forks and may_fork(chat_asks(body, mode, positions)[0])
    thinks = wants_thinking(body, text, forks)
    words = num_characters(body) if thinks or tools else 0
    check_length(position_limit_of(body, positions), characters=words)
    if thinks and body.max_completion_tokens is None and body.max_tokens is None:
        body = await within_context(body, context, body.granted or AGENT_TOKENS)
    given = body, use, text, positions, forks
    think = await context.in_thread(words, think_first, *given) if thinks else None
    if not tools:
        asks = chat_asks(body, mode, positions)
        # A model that forks does so in its thinking, so without thinking the answer is direct.
        alone = forks and not thinks
        return None, [replace(ask, mode="direct") for ask in asks] if alone else asks, think
    return use, await context.in_thread(words, tool_asks, body, use, mode, text, positions), think


# Converts the chunks of a chat completion to the events, or to the response, of another API.
OtherWriter = MessageWriter | ResponseWriter


async def answer_in_other_format(
    writer: OtherWriter, context: HttpContext, request: Request, call: OpenAICall, style: EventStyle | None
) -> Response:
    """Run a call's requests, and answer in the format of another API. If the client disconnects, the requests
    are cancelled. With a style, errors before the first event are raised, and later ones become events.

    writer: converts chunks to the events of the other API, and choices to its objects.
    context: what all endpoints share.
    request: the HTTP request of the client.
    call: the requests to run, with a single answer.
    style: how the API writes events; None to answer by one object.
    """
    http = call_of(request)
    events = call.generate(context.counter, http)
    if style:
        other_events = _events_of(writer, call, events)
        return await begin_stream(request, other_events, http.headers, style, context.ping_every)
    completion = await unless_disconnected(request, call.gather(events))
    return JSONResponse(writer.whole(completion["choices"][0], completion["usage"]), headers=http.headers)


async def _events_of(
    writer: OtherWriter, call: OpenAICall, events: CallEvents
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield another API's events for the chunks of a call; only those of the end if there is no chunk.
    Without a chunk, the events of the beginning are left out.

    writer: converts the chunks.
    call: the requests that run.
    events: what `call.generate` returned; closed at the end.

    Raises the errors of the requests.
    """
    usage = UsageCount()
    has_started = False
    async with aclosing(call.chunks(events, usage)) as chunks:
        async for chunk in chunks:
            for event in () if has_started else writer.begin(usage.as_json()):
                yield event
            has_started = True
            for event in writer.take(chunk["choices"][0]):
                yield event
    for event in writer.end(usage.as_json()):
        yield event


async def answer(context: HttpContext, request: Request, body: Asking, call: OpenAICall) -> Response:
    """Run a call's requests, and answer by server-sent events or by one object, as the body asks. If the
    client disconnects, the requests are cancelled. A stream ends with the usage if the body asks for that.
    Errors before a stream's first chunk are raised, later ones are sent as events.

    context: what all endpoints share.
    request: the HTTP request of the client.
    body: the parsed body.
    call: the requests to run, and how their answers are written.
    """
    http = call_of(request)
    model = context.model
    head = {
        "id": call.dialect.prefix + http.id,
        "object": "",
        "created": int(time.time()),
        "model": body.model or model.name,
        "system_fingerprint": f"fp_{model.fingerprint[:12]}",
    }
    call = replace(call, head=head, usage=bool(body.stream_options and body.stream_options.include_usage))
    events = call.generate(context.counter, http)
    if body.stream:
        return await begin_stream(request, call.chunks(events), http.headers, ping_every=context.ping_every)
    return JSONResponse(await unless_disconnected(request, call.gather(events)), headers=http.headers)


def choice_options(body: Asking, with_logprobs: bool) -> ChoiceOptions:
    """Return what a choice contains in addition to its text: log probabilities, and our own field with or
    without branches.

    body: the parsed body, whose field `specsot` asks for our own field.
    with_logprobs: True if the body asks for log probabilities.
    """
    planning = body.specsot
    return ChoiceOptions(with_logprobs, planning is not None, planning is not None and planning.branches)


def names_of(context: HttpContext) -> dict[str, Mode]:
    """Return the listed model names, each with its mode, for clients that can only choose a model.

        # model "demo", default mode direct -> {"demo": "direct", "demo:auto": "auto", "demo:sot": "sot"}

    context: what all endpoints share.
    """
    name = context.model.name
    return {name: context.mode, f"{name}:auto": "auto", f"{name}:sot": "sot"}


def resolve_mode(body: ChatBody, context: HttpContext) -> tuple[ChatBody, Mode]:
    """Return the body with the model's plain name, and the mode that applies if the body names none. A name
    that ends with ":sot" sets the body's own mode, unless the body names another one. A body with an unlisted
    name is returned unchanged, with the default mode. For a body without a name it is the default mode.

    body: the parsed body.
    context: what all endpoints share.
    """
    mode = names_of(context).get(body.model or "")
    if mode is None:
        return body, context.mode
    changes: dict[str, Any] = {"model": context.model.name}
    if mode == "sot" and body.model != context.model.name:
        planning = body.specsot or Planning()
        changes["specsot"] = planning.model_copy(update={"mode": planning.mode or mode})
    return body.model_copy(update=changes), mode


def model_without_suffix(context: HttpContext, name: str | None) -> str | None:
    """Return the model's plain name for a listed name, and other names as they are. The name itself is
    accepted even if its default mode is sot.

    context: what all endpoints share.
    name: the model's name in the body, or None, which is returned as it is.

    Raises InvalidRequest for the name that asks for plans, which text completions do not have.
    """
    mode = names_of(context).get(name or "")
    if mode == "sot" and name != context.model.name:
        raise InvalidRequest(
            f"model: {name} writes plans, and this endpoint has none: ask for {context.model.name}", "model"
        )
    return name if mode is None else context.model.name


def model_card(context: HttpContext, name: str) -> dict[str, Any]:
    """Return the description of a listed model, in OpenAI's and vLLM's format. The name is not checked.

    context: what all endpoints share.
    name: one of `names_of`.
    """
    model = context.model
    return {
        "id": name,
        "object": "model",
        "created": context.began,
        "owned_by": "specsot",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_positions,
    }


# Tokens. The limit of an agent's answer, or of thinking and answer together, if the caller names none.
# Untuned.
AGENT_TOKENS = 8192
# KV rows. What a draft tree needs besides prompt and answer. Untuned.
SPARE_TOKENS: Final = 64


def chat_body(members: dict[str, Any], conversation_name: str) -> ChatBody:
    """Return the chat body for members that were converted from another API's body. Only the first error is
    reported.

    members: the members of a chat body, by name; None and empty lists are left out.
    conversation_name: the caller's name of the conversation, for errors.

    Raises InvalidRequest. An error in one turn names it `messages.N`, which `naming_turns` converts.
    """
    given = {name: value for name, value in members.items() if value is not None and value != []}
    try:
        return ChatBody.model_validate({"messages": [], **given})
    except ValidationError as error:
        complaint = error.errors()[0]
        path = list(names_to_wrong_value(complaint, complaint["loc"], {"messages": [], **given}))[
            :2
        ]  # further ones are ours
        field = conversation_name if path == ["messages"] else ".".join(path)
        raise InvalidRequest(f"{field}: {complaint_text(complaint)}", field) from None


def text_in(content: Any, text_types: Collection[str], field: str) -> str:
    """Return the text of a content: a string as it is, the joined texts of its parts, or "" for None. Empty
    lists give "".

    content: a JSON value: text, one part, or a list of parts.
    text_types: the types of parts that are accepted.
    field: the name of the content, for errors.

    Raises InvalidRequest for other parts.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = cast("list[Any]", content) if isinstance(content, list) else [content]
    texts: list[str] = []
    for part in parts:
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
        if kind not in text_types or not isinstance(text, str):
            raise InvalidRequest(f"{field}: only blocks of text are supported, not {kind or 'this'}", field)
        texts.append(text)
    return "".join(texts)


async def within_context(chat: ChatBody, context: HttpContext, wanted_tokens: int) -> ChatBody:
    """Return the body with a limit for thinking and answer together.

    The limit is `wanted_tokens`, or as many as the model's context and the ring's KV hold after the prompt,
    but at least one: if they hold none, the engine refuses the request. SPARE_TOKENS of the room are left to
    draft trees; without a complete ring only the context counts.

    chat: the parsed body.
    context: what all endpoints share.
    wanted_tokens: the limit if there is room for it, in tokens.

    Raises InvalidRequest if the prompt is too long.
    """
    positions = context.model.max_positions
    pages = (await context.state()).info.pages
    held = min(positions, pages.total * pages.rows) if pages and pages.total else positions
    check_length(positions, characters=(words := num_characters(chat)))
    position_limit = position_limit_of(chat, positions)
    room = held - await context.in_thread(words, prompt_tokens, chat, context, position_limit) - SPARE_TOKENS
    return chat.model_copy(update={"max_completion_tokens": max(min(wanted_tokens, room), 1)})


def prompt_tokens(chat: ChatBody, context: HttpContext, max_positions: int | None = None) -> int:
    """Return the number of tokens of a direct answer's prompt, tools included.

    chat: the parsed body.
    context: what all endpoints share.
    max_positions: if given, a text that is far longer than so many tokens is refused without tokenizing it;
        None to tokenize any text.

    Raises InvalidRequest if the template refuses the conversation, and ContextLengthExceeded.
    """
    rendering = render_conversation(chat.messages, functions_of(chat), context.text)
    if max_positions is not None:
        context.text.check_fits(rendering, max_positions)
    return len(context.text.encode(rendering))
