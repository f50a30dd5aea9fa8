"""Serves OpenAI's endpoints /v1/chat/completions, /v1/completions and /v1/models.

The other APIs convert their bodies to bodies of chat completions, and use the functions here.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol, cast

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from specsot.core.view import View, advance
from specsot.errors import InvalidRequest, NotFound
from specsot.events import Event, Numbered, PromptScored, Started, TokenLogprobs
from specsot.params import Ask, Mode, check_length
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
from specsot_master.core.plans.fork_plan import may_fork
from specsot_master.http.calls import (
    EventStyle,
    HttpCall,
    HttpContext,
    begin_stream,
    call_of,
    merge_streams,
    unless_gone,
)
from specsot_master.http.errors import complaint_text, naming_fields, way_to
from specsot_master.http.json_bodies import JsonRoute
from specsot_master.http.openai_requests import (
    CHAT_WORDS,
    COMPLETION_WORDS,
    chat_asks,
    completion_asks,
    position_limit_of,
    prompts_of,
    warnings_in,
    words_in,
    words_of,
    writes_nothing,
)
from specsot_master.http.openai_schemas import (
    UNSERVED,
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
    render,
    tool_asks,
    tool_use,
    uses_tools,
)
from specsot_master.http.schemas import CALLERS, ChatCompletion, Completion, ModelCard, ModelList, documented
from specsot_master.http.thinking import ThinkFirst, generate_thinking, think_first, wants_thinking
from specsot_master.master import RequestCounter

CallEvents = AsyncGenerator[tuple[int, Numbered | Thought], None]


@dataclass(frozen=True, slots=True)
class OpenAICall:
    """One call of a completions endpoint: the requests to run, and how their answers are written.

    asks: The requests, one per answer.
    dialect: The format of the endpoint's objects.
    telling: What a choice contains: log probabilities, the plan, branches.
    words: From our names of fields to the caller's, for errors.
    copies: How many answers each prompt gets; consecutive asks belong to one prompt.
    echoes: The prompt with which each answer begins; empty unless `echo` was asked for.
    spell: Returns a token's bytes, if log probabilities of the echoed prompt are asked for; else None.
    silent: Whether the answer consists of the echoed prompt only.
    tools: The tools that the model may call, or None.
    think: How the model thinks before each answer, or None.
    usage: Whether a stream ends with the usage.
    head: The members with which every object of this call begins.
    warnings: What of the request the answer is not held to; reported once.
    """

    asks: tuple[Ask, ...]
    dialect: Dialect
    telling: ChoiceOptions
    words: Mapping[str, str]
    copies: int = 1
    echoes: tuple[str, ...] = ()
    spell: Callable[[int], bytes] | None = None
    silent: bool = False
    tools: ToolUse | None = None
    think: ThinkFirst | None = None
    usage: bool = False
    head: Mapping[str, Any] | None = None
    warnings: tuple[str, ...] = ()

    def generate(self, counter: RequestCounter, http: HttpCall) -> CallEvents:
        """Start the requests, and return their events as (index of the answer, event).

        Text that waits for the client is joined, unless the client asked for every event of the branches.
        """
        if self.think is None:
            return merge_streams(http.generate(counter, self.asks, joins=not self.telling.branches))
        callers = http.callers(len(self.asks))
        return merge_streams(
            [generate_thinking(counter, ask, one, self.think) for ask, one in zip(self.asks, callers)]
        )

    async def chunks(
        self, events: CallEvents, usage: UsageCount | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield a chunk for every event that adds to an answer, and the usage last if it was asked for.

        usage: counts the tokens of this call, also for the caller; None if only this method needs the count.
        """
        usage = usage or UsageCount()
        bill = {"usage": None} if self.usage else {}
        head = self._head(self.dialect.chunk)
        answers = self._tool_answers()
        warned = self.warned
        offsets = [TextOffsets(self.telling.special) for _ in self.asks]
        with naming_fields(self.words):
            async with aclosing(self._as_asked(events)) as heard:
                async for index, numbered in heard:
                    usage.count(index // self.copies, event_of(numbered))
                    if piece := self._piece(index, numbered):
                        piece = answers[index].tell(piece) if answers else piece
                        if not piece.says_something:
                            continue
                        choice = chunk_of(self.dialect, index, piece, offsets[index])
                        yield head | {"choices": [choice]} | bill | warned
                        warned = {}
        if self.usage:
            yield head | {"choices": [], "usage": usage.as_json()}

    async def gather(self, events: CallEvents) -> dict[str, Any]:
        """Wait for all events, and return the response as one object."""
        usage = UsageCount()
        views = [View() for _ in self.asks]
        thoughts = ["" for _ in self.asks]
        with naming_fields(self.words):
            async with aclosing(self._as_asked(events)) as heard:
                async for index, numbered in heard:
                    usage.count(index // self.copies, event_of(numbered))
                    if isinstance(numbered, Thought):
                        thoughts[index] += numbered.text
                    else:
                        views[index] = advance(views[index], numbered.event)
        choices = [
            choice_of(self.dialect, index, self._echoed(index, view), self.telling, thoughts[index])
            for index, view in enumerate(views)
        ]
        if answers := self._tool_answers():
            choices = [answer.whole(choice) for answer, choice in zip(answers, choices)]
        told = {"choices": choices, "usage": usage.as_json()}
        return self._head(self.dialect.whole) | told | self.warned

    @property
    def warned(self) -> dict[str, Any]:
        """The warnings as a member of a response; empty if there are none."""
        return {"warnings": list(self.warnings)} if self.warnings else {}

    def _tool_answers(self) -> list[ToolAnswer]:
        """Return a reader of tool calls per answer; none if no tool may be called."""
        return [ToolAnswer(self.tools) for _ in self.asks] if self.tools else []

    def _head(self, kind: str) -> dict[str, Any]:
        """Return the members with which an object of this kind begins."""
        return {**(self.head or {}), "object": kind}

    def _as_asked(self, events: CallEvents) -> CallEvents:
        """Return the events, changed by `_heard` if the prompt is echoed or no text is wanted."""
        return self._heard(events) if self.echoes or self.silent else events

    async def _heard(self, events: CallEvents) -> CallEvents:
        """Yield the events, with a prompt's log probabilities, from its first token on, in one event.

        If the answer is silent, its generated text is removed from the events.
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
                if told := unwritten(event) if self.silent else event:
                    yield index, numbered if told is event else replace(numbered, event=told)

    def _piece(self, index: int, numbered: Numbered | Thought) -> ChoiceDelta | None:
        """Return what an event adds to an answer, or None; the first piece begins with the echoed prompt."""
        piece = delta_of(numbered, self.telling)
        if piece is None or not self.echoes or isinstance(numbered, Thought):
            return piece
        if isinstance(numbered.event, PromptScored) or (piece.begins and not self.spell):
            return replace(piece, text=self.echoes[index])
        return piece

    def _echoed(self, index: int, view: View) -> View:
        """Return a finished answer with the echoed prompt before its text and log probabilities."""
        finished = view.finished
        if not self.echoes or finished is None:
            return view
        told = replace(finished, text=self.echoes[index] + finished.text)
        return replace(view, finished=told, logprobs=view.prompt_logprobs + view.logprobs)


def event_of(told: Numbered | Thought) -> Event | Thought:
    """Return an event without its number."""
    return told if isinstance(told, Thought) else told.event


def openai_routes(context: HttpContext) -> APIRouter:
    """Return the routes of OpenAI's completions and models."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=JsonRoute)

    @router.post(
        "/chat/completions", responses=documented(ChatCompletion, stream=True), openapi_extra=CALLERS
    )
    async def complete_chat(request: Request, body: ChatBody) -> Response:
        """Answer a conversation, as one object or as server-sent events."""
        return await answer(context, request, body, await chat_call(context, body))

    @router.post("/completions", responses=documented(Completion, stream=True), openapi_extra=CALLERS)
    async def complete(request: Request, body: CompletionBody) -> Response:
        """Continue texts, as one object or as server-sent events."""
        refuse_unserved(body)
        context.unknown.check(body, COMPLETION_WORDS, UNSERVED)
        words = words_of(body)
        with naming_fields(words):
            named = body.model_copy(update={"model": model_without_suffix(context, body.model)})
            text = context.text
            most = context.model.max_positions
            encode = partial(text.encode_bare, positions=position_limit_of(body, most))
            size = sum(map(len, prompts_of(body)))
            asks = tuple(await context.in_thread(size, completion_asks, named, encode, most))
        copies = body.n or 1
        skip = body.skip_special_tokens is not False
        given = zip(prompts_of(body), asks[::copies])
        prompts = (one if isinstance(one, str) else text.decode(ask.tokens, skip) for one, ask in given)
        echoed = await context.in_thread(size, list, prompts) if body.echo else []
        echoes = tuple(echo for echo in echoed for _ in range(copies))
        telling = replace(choice_options(body, body.logprobs is not None), special=text.special_ids)
        spell = context.text.spell if body.echo and telling.logprobs else None
        call = OpenAICall(asks, TEXT, telling, words, copies, echoes, spell, writes_nothing(body))
        call = replace(call, warnings=warnings_in(body))
        return await answer(context, request, body, call)

    @router.get("/models", response_model=ModelList)
    async def list_models() -> dict[str, Any]:
        """List the model; further names stand for the model in a mode."""
        return {"object": "list", "data": [model_card(context, name) for name in names_of(context)]}

    router.add_api_route("/models/", list_models, include_in_schema=False)

    @router.get("/models/{name:path}", response_model=ModelCard)
    async def show_model(name: str) -> dict[str, Any]:
        """Describe one listed model."""
        if name not in names_of(context):
            raise NotFound(f"no model named {name!r} here")
        return model_card(context, name)

    _ = complete_chat, complete, list_models, show_model
    return router


async def chat_call(
    context: HttpContext, body: ChatBody, words: Mapping[str, str] | None = None
) -> OpenAICall:
    """Return the call that a chat body makes.

    words: from our names of fields to the caller's, for bodies that were converted from another API. Raises
    InvalidRequest.
    """
    refuse_unserved(body)
    context.unknown.check(body, CHAT_WORDS, UNSERVED)
    asked = body
    body, mode = in_mode(body, context)
    words = {**words_of(body), **(words or {})}
    with naming_fields(words):
        use, asks, think = await _asks_of(context, body, mode)
    telling = replace(choice_options(asked, bool(body.logprobs)), plan=asked.model != body.model)
    warnings = (*warnings_in(body), *(use.warnings if use else ()))
    return OpenAICall(
        tuple(asks), CHAT, telling, words, body.n or 1, tools=use, think=think, warnings=warnings
    )


async def _asks_of(
    context: HttpContext, body: ChatBody, mode: Mode
) -> tuple[ToolUse | None, list[Ask], ThinkFirst | None]:
    """Return the tools that may be called, the requests, and how the model thinks before it answers.

    Prompts with tools or with thinking are rendered and tokenized here, in a thread because they are long;
    other conversations are left to the engine. Raises InvalidRequest.
    """
    positions = context.model.max_positions
    text = context.text
    use = tool_use(body, text)
    tools = uses_tools(body)
    forks = not tools and text.thinking != "never" and context.model.plan_style == "tags"
    forks = forks and may_fork(chat_asks(body, mode, positions)[0])
    thinks = wants_thinking(body, text, forks)
    words = words_in(body) if thinks or tools else 0
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


class OtherWriter(Protocol):
    """Converts the chunks of a chat completion to the events or the response of another API."""

    def begin(self, usage: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events that precede the first chunk."""
        ...

    def take(self, choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events for one chunk's choice."""
        ...

    def end(self, usage: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events after the last chunk."""
        ...

    def whole(self, choice: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the response for a complete choice."""
        ...


async def answer_by(
    writer: OtherWriter, context: HttpContext, request: Request, call: OpenAICall, style: EventStyle | None
) -> Response:
    """Run a call's requests, and answer in the format of another API.

    style: how the API writes events; None to answer by one object.
    """
    http = call_of(request)
    events = call.generate(context.counter, http)
    if style:
        told = _events_of(writer, call, events)
        return await begin_stream(request, told, http.headers, style, context.ping_every)
    told = await unless_gone(request, call.gather(events))
    return JSONResponse(writer.whole(told["choices"][0], told["usage"]), headers=http.headers)


async def _events_of(
    writer: OtherWriter, call: OpenAICall, events: CallEvents
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield another API's events for the chunks of a call."""
    usage = UsageCount()
    begun = False
    async with aclosing(call.chunks(events, usage)) as chunks:
        async for chunk in chunks:
            for event in () if begun else writer.begin(usage.as_json()):
                yield event
            begun = True
            for event in writer.take(chunk["choices"][0]):
                yield event
    for event in writer.end(usage.as_json()):
        yield event


async def answer(context: HttpContext, request: Request, body: Asking, call: OpenAICall) -> Response:
    """Run a call's requests, and answer by server-sent events or by one object, as the body asks."""
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
    return JSONResponse(await unless_gone(request, call.gather(events)), headers=http.headers)


def choice_options(body: Asking, logprobs: bool) -> ChoiceOptions:
    """Return what a choice contains: log probabilities, and our own field with or without branches."""
    planning = body.specsot
    return ChoiceOptions(logprobs, planning is not None, planning is not None and planning.branches)


def names_of(context: HttpContext) -> dict[str, Mode]:
    """Return the listed model names, each with its mode, for clients that can only choose a model.

    # model "demo", default mode direct -> {"demo": "direct", "demo:auto": "auto", "demo:sot": "sot"}
    """
    name = context.model.name
    return {name: context.mode, f"{name}:auto": "auto", f"{name}:sot": "sot"}


def in_mode(body: ChatBody, context: HttpContext) -> tuple[ChatBody, Mode]:
    """Return the body with the model's plain name, and the mode that applies if the body names none.

    A name that ends with ":sot" sets the body's own mode, unless the body names another one.
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
    """Return the model's plain name for a listed name, and other names as they are.

    Raises InvalidRequest for the name that asks for plans, which text completions do not have.
    """
    mode = names_of(context).get(name or "")
    if mode == "sot" and name != context.model.name:
        raise InvalidRequest(
            f"model: {name} writes plans, and this endpoint has none: ask for {context.model.name}", "model"
        )
    return name if mode is None else context.model.name


def model_card(context: HttpContext, name: str) -> dict[str, Any]:
    """Return the description of a listed model, in OpenAI's and vLLM's format."""
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


def chat_body(told: dict[str, Any], messages: str) -> ChatBody:
    """Return the chat body for members that were converted from another API's body.

    told: the members; None and empty lists are left out. messages: the caller's name of the conversation.

    Raises InvalidRequest. An error in one turn names it `messages.N`, which `naming_turns` converts.
    """
    given = {name: value for name, value in told.items() if value is not None and value != []}
    try:
        return ChatBody.model_validate({"messages": [], **given})
    except ValidationError as error:
        complaint = error.errors()[0]
        way = list(way_to(complaint, complaint["loc"], {"messages": [], **given}))[
            :2
        ]  # further ones are ours
        field = messages if way == ["messages"] else ".".join(way)
        raise InvalidRequest(f"{field}: {complaint_text(complaint)}", field) from None


def text_in(content: Any, kinds: Collection[str], field: str) -> str:
    """Return the text of a content: a string as it is, or the joined texts of its parts.

    kinds: the types of parts that are accepted. field: the name of the content, for errors. Raises
    InvalidRequest for other parts.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = cast("list[Any]", content) if isinstance(content, list) else [content]
    told: list[str] = []
    for part in parts:
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
        if kind not in kinds or not isinstance(text, str):
            raise InvalidRequest(f"{field}: only blocks of text are served here, not {kind or 'this'}", field)
        told.append(text)
    return "".join(told)


async def within_context(chat: ChatBody, context: HttpContext, wanted: int) -> ChatBody:
    """Return the body with a limit for thinking and answer together.

    The limit is `wanted` tokens, or as many as the model's context and the ring's KV hold after the prompt,
    but at least one: if they hold none, the engine refuses the request.
    """
    positions = context.model.max_positions
    pages = context.counter.info().pages
    held = min(positions, pages.total * pages.rows) if pages and pages.total else positions
    check_length(positions, characters=(words := words_in(chat)))
    most = position_limit_of(chat, positions)
    room = held - await context.in_thread(words, prompt_tokens, chat, context, most) - SPARE_TOKENS
    return chat.model_copy(update={"max_completion_tokens": max(min(wanted, room), 1)})


def prompt_tokens(chat: ChatBody, context: HttpContext, positions: int | None = None) -> int:
    """Return the number of tokens of a direct answer's prompt.

    positions: if given, the prompt must fit into so many. Raises InvalidRequest.
    """
    rendering = render(chat.messages, functions_of(chat), context.text)
    if positions is not None:
        context.text.check_fits(rendering, positions)
    return len(context.text.encode(rendering))
