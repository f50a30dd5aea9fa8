"""Serves the endpoints of SpecSoT's predecessors: /generate, /health, /info."""

from __future__ import annotations

import dataclasses
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from specsot.events import Finished
from specsot.params import Ask, Limits, Sampling
from specsot.service.telemetry import read_gpus
from specsot_master.core.dialects.openai_responses import finish_reason
from specsot_master.http import schemas
from specsot_master.http.calls import HttpContext, call_of, unless_disconnected
from specsot_master.http.errors import naming_fields
from specsot_master.http.json_bodies import JsonRoute
from specsot_master.http.openai_schemas import Words
from specsot_master.master import ServingState
from specsot_master.text import Text

# Tokens. Default length of an answer. Precedent: SpecSoT's predecessors, 512.
GENERATE_TOKENS = 512
# Names that the predecessors' bodies have for fields of a request, for errors.
_LEGACY_FIELDS = {"mode": "enable_parallel", "constraint": "use_semantic_constraint"}


class Generated(BaseModel):
    """POST /generate"""

    # The answer.
    text: str
    # The number of its tokens.
    tokens: int
    # Milliseconds from arrival to the end.
    time_ms: float
    # How the request was answered, in the predecessors' words: "specsot" by a plan, "eagle" directly.
    mode: str
    # The members of `Statistics`, and `finish_reason`.
    stats: dict[str, Any]


class Health(BaseModel):
    """GET /health"""

    # "healthy" while the server answers requests; "waiting" for a complete ring, "stuck" if a ring makes no
    # steps, "leaving" while it shuts down.
    status: Literal["healthy", "waiting", "stuck", "leaving"]
    # True if a ring is complete.
    model_loaded: bool
    # Memory of all GPUs in use, in MiB; 0 without a GPU.
    gpu_memory_mb: float


class Served(BaseModel):
    """GET /info"""

    # The model's name.
    base_model: str
    # The name of the draft head, or of the drafter if it has no head; null without a drafter.
    eagle_model: str | None
    # True if the draft head reads several layers, as EAGLE-3 heads do.
    use_eagle3: bool
    # The model's context, in tokens.
    max_seq_len: int


class GenerateBody(BaseModel):
    """POST /generate. top_p 0 means no cut.

    max_new_tokens: 512 unless given, or as many as fit.
    """

    model_config = ConfigDict(strict=True)

    prompt: Annotated[Words, Field(min_length=1, examples=["Why is the sky blue?"])]
    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 0.0
    enable_parallel: bool = True
    use_semantic_constraint: bool = True


def legacy_routes(context: HttpContext) -> APIRouter:
    """Return the router with the endpoints /generate, /health, /ping and /info.

    POST /generate answers one request as JSON; GET /health and GET /ping answer 200 or 503 with the state,
    and with the used GPU memory in MiB; GET /info names the model, its head or drafter, and its positions.

    context: Values that all HTTP endpoints share: requests, model, tokenizer, health.
    """
    router = APIRouter(tags=["as before"], route_class=JsonRoute)

    @router.post("/generate", responses=schemas.documented(Generated), openapi_extra=schemas.CALLERS)
    async def generate(request: Request, body: GenerateBody) -> Response:
        """One answer, whole."""
        call = call_of(request)
        with naming_fields(_LEGACY_FIELDS):
            events = context.counter.generate(legacy_ask(body), call.caller)
            finished = await unless_disconnected(request, last_of(events))
        return JSONResponse(generated(finished, context.text), headers=call.headers)

    @router.get("/ping", include_in_schema=False)
    @router.get("/health", responses=schemas.documented(Health, 200, 503))
    async def health() -> Response:
        """200 while requests are answered, 503 while they are not."""
        state = await context.state()
        used = sum(gpu.used for gpu in read_gpus()) / (1 << 20)
        body = {
            "status": health_status(state),
            "model_loaded": state.info.ready,
            "gpu_memory_mb": used,
        }
        return JSONResponse(body, 200 if state.serving else 503)

    @router.get("/info", response_model=Served)
    async def info() -> dict[str, Any]:
        """What is served."""
        state = await context.state()
        head = state.head
        drafter = next((member.name for member in state.info.members if member.kind == "drafter"), None)
        return {
            "base_model": context.model.name,
            "eagle_model": (head and head.name) or drafter,
            "use_eagle3": head is not None and len(head.taps) > 1,
            "max_seq_len": context.model.max_positions,
        }

    _ = generate, health, info
    return router


def legacy_ask(body: GenerateBody) -> Ask:
    """Return the request that a body describes.

    A mode "auto" or "direct" follows from `enable_parallel`. A top_p of 0 becomes 1. Without a maximum the
    default of new tokens is GENERATE_TOKENS.

    body: The parsed body of POST /generate.
    Raises InvalidRequest for an impossible value.
    """
    return Ask(
        prompt=body.prompt,
        mode="auto" if body.enable_parallel else "direct",
        constraint=body.use_semantic_constraint,
        sampling=Sampling(temperature=body.temperature, top_p=body.top_p or 1.0),
        limits=Limits(body.max_new_tokens, default_new_tokens=GENERATE_TOKENS),
    )


async def last_of(events: Any) -> Finished:
    """Return the last event of a request.

    Raises AssertionError if the events end without a Finished event.

    events: Asynchronous generator of numbered events, closed at the end; a Finished event is the last.
    """
    finished: Finished | None = None
    async with aclosing(events):
        async for numbered in events:
            if isinstance(numbered.event, Finished):
                finished = numbered.event
    assert finished is not None
    return finished


def generated(finished: Finished, text: Text) -> dict[str, Any]:
    """Return the response body with the predecessors' field names.

    The entry "tokens" counts the tokens of the returned text.

    Of an answer that was not planned, "tokens" is the number of merged tokens, otherwise the text is
    tokenized again. The mode is "specsot" with a plan, else "eagle". Durations are in milliseconds.

    finished: The request's last event.
    text: The model's tokenizer.
    Raises SpecsotError if the request failed.
    """
    figures = finished.statistics
    planned = figures.mode == "sot"
    mode = "specsot" if planned else "eagle"
    return {
        "text": finished.text,
        "tokens": len(text.encode(finished.text)) if planned else figures.merged_tokens,
        "time_ms": round(figures.seconds * 1000, 3),
        "mode": mode,
        "stats": dataclasses.asdict(figures) | {"mode": mode, "finish_reason": finish_reason(finished)},
    }


def health_status(state: ServingState) -> str:
    """Return one word for the state of the service: "leaving" while it closes, "waiting" while the ring is
    not complete, "healthy", or "stuck" if requests are not answered.

    The words are tested in this order.

    state: The present state of the master.
    """
    if state.closing:
        return "leaving"
    if not state.info.ready:
        return "waiting"
    return "healthy" if state.serving else "stuck"
