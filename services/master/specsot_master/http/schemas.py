"""Response schemas for /openapi.json; a test validates actual responses against them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from specsot.events import Forecast, Statistics

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


class Fault(BaseModel):
    """In OpenAI's shape. param: the field that is wrong. plan: where a plan had no valid line, its text."""

    message: str
    type: str
    param: str | None
    code: str | None
    plan: str = ""


class Refused(BaseModel):
    error: Fault


class CachedTokens(BaseModel):
    cached_tokens: int


class WrittenTokens(BaseModel):
    """Parts of completion_tokens. reasoning_tokens: thinking and the plan, what no content shows."""

    reasoning_tokens: int
    plan_tokens: int
    heading_tokens: int


class Usage(BaseModel):
    """prompt_tokens: of the messages, without what the model is told to plan. completion_tokens: all that was
    written, as max_tokens bounds it.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: WrittenTokens


class Branch(BaseModel):
    """A point of the plan, and what was written of it."""

    id: int
    length: int
    title: str
    tool: str | None
    needs: list[int]
    text: str
    tokens: int
    reason: str | None


class Planned(BaseModel):
    """For those who sent a `specsot` field; skeleton and branches for those who asked for branches.

    forecast: seconds of either way, as foreseen before the first token; none before anything was measured.
    """

    mode: str
    decision: str
    seed: int
    statistics: Statistics
    forecast: Forecast | None = None
    skeleton: str = ""
    branches: list[Branch] = []


class Candidate(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(Candidate):
    top_logprobs: list[Candidate]


class ChatLogprobs(BaseModel):
    content: list[ChosenToken]
    refusal: None


class CalledFunction(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Said(BaseModel):
    """reasoning_content: what the model thought, and the plan where the model's name asked for one."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str = ""
    refusal: None
    tool_calls: list[ToolCall] = []


class Choice(BaseModel):
    index: int
    finish_reason: FinishReason
    stop_reason: str | int | None
    specsot: Planned | None = None


class ChatChoice(Choice):
    message: Said
    logprobs: ChatLogprobs | None


class TextLogprobs(BaseModel):
    """Four lists, one entry a token; null for the first one of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Choice):
    text: str
    logprobs: TextLogprobs | None


class Answered(BaseModel):
    """warnings: what of the request the answer is not held to; present only if there is something to tell."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    warnings: list[str] | None = None


class ChatCompletion(Answered):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Completion(Answered):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class ResponseObject(BaseModel):
    """POST /v1/responses. output: thoughts, messages and calls of functions, as OpenAI's items."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "failed"]
    error: None
    incomplete_details: dict[str, str] | None
    output: list[dict[str, Any]]
    usage: dict[str, Any]
    warnings: list[str] | None = None


class ClaudeUsage(BaseModel):
    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class MessageObject(BaseModel):
    """POST /v1/messages. content: thoughts, texts and uses of tools, as Anthropic's blocks."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: ClaudeUsage
    warnings: list[str] | None = None


class CountedTokens(BaseModel):
    """POST /v1/messages/count_tokens"""

    input_tokens: int


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Generated(BaseModel):
    """POST /generate. stats: the figures of `Statistics`, and `finish_reason`."""

    text: str
    tokens: int
    time_ms: float
    mode: str
    stats: dict[str, Any]


class Health(BaseModel):
    status: Literal["healthy", "waiting", "stuck", "leaving"]
    model_loaded: bool
    gpu_memory_mb: float


class Served(BaseModel):
    """GET /info"""

    base_model: str
    eagle_model: str | None
    use_eagle3: bool
    max_seq_len: int


class Version(BaseModel):
    version: str


Document = dict[int | str, dict[str, Any]]

REFUSALS: Document = {
    "4XX": {"model": Refused, "description": "Refused, with the reason and the field."},
    "5XX": {"model": Refused, "description": "Not now, or a fault of ours."},
}
_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "A chunk as JSON; [DONE] is the last."}},
}
STREAM = {"text/event-stream": {"itemSchema": _EVENT}}
CALLERS: dict[str, Any] = {
    "parameters": [
        {
            "name": "x-request-id",
            "in": "header",
            "description": "A name for traces, also in the answer's headers; several calls may have one.",
            "schema": {"type": "string", "maxLength": 128},
            "example": "mine-1",
        },
        {
            "name": "x-request-timeout",
            "in": "header",
            "description": "Seconds that the answer may take.",
            "schema": {"type": "number", "minimum": 0.001},
            "example": 60,
        },
    ]
}


def documented(model: type[BaseModel], *statuses: int, stream: bool = False) -> Document:
    """What an endpoint answers with these statuses, or 200."""
    answer: dict[str, Any] = {"model": model} | ({"content": STREAM} if stream else {})
    return dict.fromkeys(statuses or (200,), answer)
