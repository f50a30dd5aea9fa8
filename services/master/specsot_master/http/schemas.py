"""Response schemas for /openapi.json; a test validates actual responses against them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from specsot.events import Forecast, Statistics

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


class Fault(BaseModel):
    """An error in OpenAI's format. param: the wrong field.

    plan: the text of a plan without any valid line.
    """

    message: str
    type: str
    param: str | None
    code: str | None
    plan: str = ""


class Refused(BaseModel):
    """The body of an error response."""

    error: Fault


class CachedTokens(BaseModel):
    """Prompt tokens whose KV was in the ring already."""

    cached_tokens: int


class WrittenTokens(BaseModel):
    """Parts of completion_tokens. reasoning_tokens: thinking and the plan, which are not in the content.

    discarded_tokens: no part of completion_tokens: generated tokens that no answer uses.
    """

    reasoning_tokens: int
    plan_tokens: int
    heading_tokens: int
    discarded_tokens: int


class Usage(BaseModel):
    """The number of tokens of a call.

    prompt_tokens: tokens of the messages, without the instructions for a plan. completion_tokens: all
    generated tokens, which max_tokens bounds.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: WrittenTokens


class Branch(BaseModel):
    """A point of the plan, with its text."""

    id: int
    length: int
    title: str
    tool: str | None
    needs: list[int]
    text: str
    tokens: int
    reason: str | None


class Planned(BaseModel):
    """How the answer was made, for requests with a `specsot` field.

    skeleton, branches: only if branches were asked for. forecast: the predicted seconds of a direct and of a
    planned answer, before the first token; absent before anything was measured.
    """

    mode: str
    decision: str
    seed: int
    statistics: Statistics
    forecast: Forecast | None = None
    skeleton: str = ""
    branches: list[Branch] = []


class Candidate(BaseModel):
    """A token with its log probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(Candidate):
    """A generated token with the most probable tokens at its place."""

    top_logprobs: list[Candidate]


class ChatLogprobs(BaseModel):
    """Log probabilities of a chat answer, one entry per token."""

    content: list[ChosenToken]
    refusal: None


class CalledFunction(BaseModel):
    """A called function, with its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call in an answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(BaseModel):
    """The message of an answer.

    reasoning_content: thinking, and the plan if the model's name asked for one.
    """

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str = ""
    refusal: None
    tool_calls: list[ToolCall] = []


class Choice(BaseModel):
    """One answer of a call."""

    index: int
    finish_reason: FinishReason
    stop_reason: str | int | None
    specsot: Planned | None = None


class ChatChoice(Choice):
    """One answer of a chat completion."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None


class TextLogprobs(BaseModel):
    """Four lists with one entry per token; the entry of an echoed prompt's first token is null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Choice):
    """One answer of a text completion."""

    text: str
    logprobs: TextLogprobs | None


class Answered(BaseModel):
    """Members of all completions. warnings: parts of the request that the answer is not held to, if any."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    warnings: list[str] | None = None


class ChatCompletion(Answered):
    """POST /v1/chat/completions"""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Completion(Answered):
    """POST /v1/completions"""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class ResponseObject(BaseModel):
    """POST /v1/responses. output: OpenAI's items for thinking, messages and function calls."""

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
    """The number of tokens of a call, in Anthropic's format."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class MessageObject(BaseModel):
    """POST /v1/messages. content: Anthropic's blocks for thinking, texts and tool calls."""

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
    """A listed model, in the format of OpenAI and vLLM."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(BaseModel):
    """GET /v1/models"""

    object: Literal["list"]
    data: list[ModelCard]


class Generated(BaseModel):
    """POST /generate. stats: the members of `Statistics`, and `finish_reason`."""

    text: str
    tokens: int
    time_ms: float
    mode: str
    stats: dict[str, Any]


class Health(BaseModel):
    """GET /health"""

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
    """GET /version"""

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
    """Return the API document's description of an endpoint's responses, by their HTTP status.

    model: the schema of the response.
    statuses: HTTP statuses with this response; none for 200 alone.
    stream: True if the response may also be a stream of server-sent events.
    """
    answer: dict[str, Any] = {"model": model} | ({"content": STREAM} if stream else {})
    return dict.fromkeys(statuses or (200,), answer)
