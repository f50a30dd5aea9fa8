"""OpenAI's endpoints: /v1/chat/completions, /v1/completions, /v1/models."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from specsot.core.info import ModelInfo
from specsot.core.view import View, advance
from specsot.errors import NotFound
from specsot.events import Numbered
from specsot.params import Ask
from specsot_master.core import openai_responses
from specsot_master.core.openai_responses import ChoiceDelta, ChoiceOptions, UsageCount, delta_of
from specsot_master.http.context import HttpContext, caller_of
from specsot_master.http.errors import naming_fields
from specsot_master.http.openai_requests import chat_asks, completion_asks, words_of
from specsot_master.http.openai_schemas import Asking, ChatBody, CompletionBody, refuse_unserved
from specsot_master.http.schemas import CALLERS, ChatCompletion, Completion, ModelCard, ModelList, documented
from specsot_master.http.sse import begin_stream, merge_streams, unless_gone

CallEvents = AsyncGenerator[tuple[int, Numbered], None]


@dataclass(frozen=True, slots=True)
class EndpointObjects:
    """The objects of one endpoint."""

    prefix: str
    whole: str
    chunk: str
    chunk_of: Callable[[int, ChoiceDelta], dict[str, Any]]
    choice_of: Callable[[int, View, ChoiceOptions], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class OpenAICall:
    """asks: one an answer, `copies` of them for each prompt. echoes: what each answer begins with.

    words: our fields as the caller knows them. usage: whether a stream ends with what it cost.
    head: what every object of this call begins with.
    """

    asks: tuple[Ask, ...]
    shape: EndpointObjects
    telling: ChoiceOptions
    words: Mapping[str, str]
    copies: int = 1
    echoes: tuple[str, ...] = ()
    usage: bool = False
    head: Mapping[str, Any] | None = None

    async def chunks(self, events: CallEvents) -> AsyncGenerator[dict[str, Any], None]:
        """A chunk for every event that says something, the bill last where it is wanted."""
        usage, bill = UsageCount(), {"usage": None} if self.usage else {}
        head = self._head(self.shape.chunk)
        with naming_fields(self.words):
            async with aclosing(events):
                async for index, numbered in events:
                    usage.count(index // self.copies, numbered.event)
                    if piece := self._piece(index, numbered):
                        yield head | {"choices": [self.shape.chunk_of(index, piece)]} | bill
        if self.usage:
            yield head | {"choices": [], "usage": usage.as_json()}

    async def gather(self, events: CallEvents) -> dict[str, Any]:
        """The whole answer as one object."""
        usage, views = UsageCount(), [View() for _ in self.asks]
        with naming_fields(self.words):
            async with aclosing(events):
                async for index, numbered in events:
                    usage.count(index // self.copies, numbered.event)
                    views[index] = advance(views[index], numbered.event)
        choices = [
            self.shape.choice_of(index, self._echoed(index, view), self.telling)
            for index, view in enumerate(views)
        ]
        return self._head(self.shape.whole) | {"choices": choices, "usage": usage.as_json()}

    def _head(self, kind: str) -> dict[str, Any]:
        return {**(self.head or {}), "object": kind}

    def _piece(self, index: int, numbered: Numbered) -> ChoiceDelta | None:
        piece = delta_of(numbered, self.telling)
        if piece is None or not self.echoes:
            return piece
        echo = self.echoes[index]
        return replace(piece, text=echo) if piece.begins else replace(piece, offset=piece.offset + len(echo))

    def _echoed(self, index: int, view: View) -> View:
        finished = view.finished
        if not self.echoes or finished is None:
            return view
        return replace(view, finished=replace(finished, text=self.echoes[index] + finished.text))


CHAT = EndpointObjects(
    openai_responses.CHAT_PREFIX,
    openai_responses.CHAT_WHOLE,
    openai_responses.CHAT_CHUNK,
    openai_responses.chat_chunk,
    openai_responses.chat_choice,
)
COMPLETION = EndpointObjects(
    openai_responses.TEXT_PREFIX,
    openai_responses.TEXT_WHOLE,
    openai_responses.TEXT_CHUNK,
    openai_responses.text_chunk,
    openai_responses.text_choice,
)


def openai_routes(house: HttpContext) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["OpenAI"])

    @router.post(
        "/chat/completions", responses=documented(ChatCompletion, stream=True), openapi_extra=CALLERS
    )
    async def complete_chat(request: Request, body: ChatBody) -> Response:
        """An answer to a conversation, whole or as server-sent events."""
        refuse_unserved(body)
        words = words_of(body)
        with naming_fields(words):
            asks = tuple(chat_asks(body, house.mode, house.positions))
        call = OpenAICall(asks, CHAT, choice_options(body, bool(body.logprobs)), words, body.n or 1)
        return await answer(house, request, body, call)

    @router.post("/completions", responses=documented(Completion, stream=True), openapi_extra=CALLERS)
    async def complete(request: Request, body: CompletionBody) -> Response:
        """How texts go on, whole or as server-sent events."""
        refuse_unserved(body)
        words = words_of(body)
        with naming_fields(words):
            asks = tuple(completion_asks(body, house.language.encode_bare, house.positions))
        copies = body.n or 1
        echoed = [house.language.decode(ask.tokens) for ask in asks[::copies]] if body.echo else []
        echoes = tuple(echo for echo in echoed for _ in range(copies))
        telling = choice_options(body, body.logprobs is not None)
        call = OpenAICall(asks, COMPLETION, telling, words, copies, echoes)
        return await answer(house, request, body, call)

    @router.get("/models", response_model=ModelList)
    async def list_models() -> dict[str, Any]:
        """What can be asked for."""
        return {"object": "list", "data": [model_of(house, model) for model in house.desk.info().models]}

    router.add_api_route("/models/", list_models, include_in_schema=False)

    @router.get("/models/{name:path}", response_model=ModelCard)
    async def show_model(name: str) -> dict[str, Any]:
        """One of them."""
        for model in house.desk.info().models:
            if model.name == name:
                return model_of(house, model)
        raise NotFound(f"no model named {name!r} here")

    _ = complete_chat, complete, list_models, show_model
    return router


async def answer(house: HttpContext, request: Request, body: Asking, call: OpenAICall) -> Response:
    """Let the call's requests run, and tell of them as the caller wants it."""
    caller = caller_of(request)
    call = replace(call, head=head_of(house, call, caller.id), usage=wants_usage(body))
    events = merge_streams(caller.generate(house.desk, call.asks))
    if body.stream:
        return await begin_stream(request, call.chunks(events), caller.headers)
    return JSONResponse(await unless_gone(request, call.gather(events)), headers=caller.headers)


def head_of(house: HttpContext, call: OpenAICall, id: str) -> dict[str, Any]:
    """What every object of a call begins with."""
    model = house.desk.info().models[0]
    return {
        "id": call.shape.prefix + id,
        "object": "",
        "created": int(time.time()),
        "model": model.name,
        "system_fingerprint": f"fp_{model.fingerprint[:12]}",
    }


def choice_options(body: Asking, logprobs: bool) -> ChoiceOptions:
    planning = body.specsot
    return ChoiceOptions(logprobs, planning is not None, planning is not None and planning.branches)


def wants_usage(body: Asking) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


def model_of(house: HttpContext, model: ModelInfo) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": house.began,
        "owned_by": "specsot",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_positions,
    }
