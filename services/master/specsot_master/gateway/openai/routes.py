"""OpenAI's endpoints as routes: /v1/chat/completions, /v1/completions, /v1/models.

Refuses to know how bodies become requests and events become chunks.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from specsot.errors import NotFound
from specsot.info import ModelInfo
from specsot_master.gateway.answers import (
    CALLERS,
    ChatCompletion,
    Completion,
    ModelCard,
    ModelList,
    documented,
)
from specsot_master.gateway.house import HttpContext, caller_of
from specsot_master.gateway.openai import chat, completions
from specsot_master.gateway.openai.asks import (
    chat_asks,
    completion_asks,
    words_of,
)
from specsot_master.gateway.openai.bodies import Asking, ChatBody, CompletionBody, refuse_unserved
from specsot_master.gateway.openai.calls import EndpointObjects, OpenAICall
from specsot_master.gateway.openai.choices import ChoiceOptions
from specsot_master.gateway.refusals import naming_fields
from specsot_master.gateway.streams import begin_stream, unless_gone
from specsot_master.gateway.together import merge_streams

CHAT = EndpointObjects(chat.CHAT_PREFIX, chat.CHAT_WHOLE, chat.CHAT_CHUNK, chat.chat_chunk, chat.chat_choice)
COMPLETION = EndpointObjects(
    completions.TEXT_PREFIX,
    completions.TEXT_WHOLE,
    completions.TEXT_CHUNK,
    completions.text_chunk,
    completions.text_choice,
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
