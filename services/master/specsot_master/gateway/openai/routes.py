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
    told,
)
from specsot_master.gateway.house import House, caller_of
from specsot_master.gateway.openai import chat, completions
from specsot_master.gateway.openai.asks import (
    chat_asks,
    completion_asks,
    words_of,
)
from specsot_master.gateway.openai.bodies import Asking, ChatBody, CompletionBody, refuse_unserved
from specsot_master.gateway.openai.calls import Call, Shape
from specsot_master.gateway.openai.choices import Telling
from specsot_master.gateway.refusals import in_words
from specsot_master.gateway.streams import begin, unless_gone
from specsot_master.gateway.together import together

CHAT = Shape(chat.PREFIX, chat.WHOLE, chat.CHUNK, chat.chunk_of, chat.choice_of)
COMPLETION = Shape(
    completions.PREFIX,
    completions.WHOLE,
    completions.CHUNK,
    completions.chunk_of,
    completions.choice_of,
)


def openai_routes(house: House) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["OpenAI"])

    @router.post("/chat/completions", responses=told(ChatCompletion, stream=True), openapi_extra=CALLERS)
    async def complete_chat(request: Request, body: ChatBody) -> Response:
        """An answer to a conversation, whole or as server-sent events."""
        refuse_unserved(body)
        words = words_of(body)
        with in_words(words):
            asks = tuple(chat_asks(body, house.mode, house.positions))
        call = Call(asks, CHAT, telling_of(body, bool(body.logprobs)), words, body.n or 1)
        return await answer(house, request, body, call)

    @router.post("/completions", responses=told(Completion, stream=True), openapi_extra=CALLERS)
    async def complete(request: Request, body: CompletionBody) -> Response:
        """How texts go on, whole or as server-sent events."""
        refuse_unserved(body)
        words = words_of(body)
        with in_words(words):
            asks = tuple(completion_asks(body, house.language.encode_bare, house.positions))
        copies = body.n or 1
        echoed = [house.language.decode(ask.tokens) for ask in asks[::copies]] if body.echo else []
        echoes = tuple(echo for echo in echoed for _ in range(copies))
        telling = telling_of(body, body.logprobs is not None)
        call = Call(asks, COMPLETION, telling, words, copies, echoes)
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


async def answer(house: House, request: Request, body: Asking, call: Call) -> Response:
    """Let the call's requests run, and tell of them as the caller wants it."""
    caller = caller_of(request)
    call = replace(call, head=head_of(house, call, caller.id), usage=wants_usage(body))
    events = together(caller.generate(house.desk, call.asks))
    if body.stream:
        return await begin(request, call.chunks(events), caller.headers)
    return JSONResponse(await unless_gone(request, call.gather(events)), headers=caller.headers)


def head_of(house: House, call: Call, id: str) -> dict[str, Any]:
    """What every object of a call begins with."""
    model = house.desk.info().models[0]
    return {
        "id": call.shape.prefix + id,
        "object": "",
        "created": int(time.time()),
        "model": model.name,
        "system_fingerprint": f"fp_{model.fingerprint[:12]}",
    }


def telling_of(body: Asking, logprobs: bool) -> Telling:
    planning = body.specsot
    return Telling(logprobs, planning is not None, planning is not None and planning.branches)


def wants_usage(body: Asking) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


def model_of(house: House, model: ModelInfo) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": house.began,
        "owned_by": "specsot",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_positions,
    }
