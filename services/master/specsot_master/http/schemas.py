"""Response schemas for /openapi.json; a test validates actual responses against them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from specsot.events import Forecast, Statistics

# Why an answer ended: "abort" is vLLM's value for a cancelled one, "error" is this project's own.
FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


class Fault(BaseModel):
    """An error in OpenAI's format."""

    # What is wrong, and what to do.
    message: str
    # The kind of error.
    type: str
    # The wrong field; null if no single field is wrong.
    param: str | None
    # A word for programs; null if there is none.
    code: str | None
    # The text of a plan without any valid line; "" for other errors.
    plan: str = ""


class Refused(BaseModel):
    """The body of an error response."""

    # The error itself.
    error: Fault


class CachedTokens(BaseModel):
    """Prompt tokens whose KV was in the ring already."""

    # Number of these tokens.
    cached_tokens: int


class WrittenTokens(BaseModel):
    """Parts of completion_tokens, and tokens that were discarded."""

    # Tokens of the thought and of the plan, which are not in the content.
    reasoning_tokens: int
    # Tokens of the plan.
    plan_tokens: int
    # Tokens of the headings, which the model did not write.
    heading_tokens: int
    # Generated tokens that no answer uses, which completion_tokens does not count.
    discarded_tokens: int


class Usage(BaseModel):
    """The number of tokens of a call."""

    # Tokens of the messages, without the instructions for a plan.
    prompt_tokens: int
    # All generated tokens, which max_tokens bounds.
    completion_tokens: int
    # The sum of both.
    total_tokens: int
    # How many prompt tokens were cached.
    prompt_tokens_details: CachedTokens
    # What the generated tokens are part of.
    completion_tokens_details: WrittenTokens


class Branch(BaseModel):
    """A point of the plan, with its text."""

    # The point's number, from 1.
    id: int
    # The length that the plan wishes for, in tokens.
    length: int
    # The point's title.
    title: str
    # The label that the plan gives the point; null for none.
    tool: str | None
    # Numbers of the points that were written before this one.
    needs: list[int]
    # The text of the branch, without its heading.
    text: str
    # The number of tokens of the text.
    tokens: int
    # Why the branch ended; null if it did not.
    reason: str | None


class Planned(BaseModel):
    """How the answer was made, for requests with a `specsot` field."""

    # "direct" or "sot": how the request was answered.
    mode: str
    # Why, in the router's words.
    decision: str
    # The sampling seed, the caller's or a drawn one.
    seed: int
    # The request's statistics.
    statistics: Statistics
    # The predicted seconds of a direct and of a planned answer, before the first token; absent before
    # anything was measured.
    forecast: Forecast | None = None
    # The text of the plan, if branches were asked for.
    skeleton: str = ""
    # The branches, if they were asked for.
    branches: list[Branch] = []


class Candidate(BaseModel):
    """A token with its log probability and its bytes."""

    # The token as text, with U+FFFD for parts of characters.
    token: str
    # Its log probability, at least -9999.
    logprob: float
    # Its bytes as numbers.
    bytes: list[int]


class ChosenToken(Candidate):
    """A generated token with the most probable tokens at its place."""

    # The most probable tokens at this position.
    top_logprobs: list[Candidate]


class ChatLogprobs(BaseModel):
    """Log probabilities of a chat answer, one entry per token."""

    # One entry per token of the answer.
    content: list[ChosenToken]
    # Always null.
    refusal: None


class CalledFunction(BaseModel):
    """A called function, with its arguments as JSON text."""

    # The function's name.
    name: str
    # The arguments as JSON text.
    arguments: str


class ToolCall(BaseModel):
    """A call in an answer."""

    # The call's id, which the turn with its result names.
    id: str
    # The only kind of tool that is served.
    type: Literal["function"]
    # The function that is called, with its arguments.
    function: CalledFunction


class AnswerMessage(BaseModel):
    """The message of an answer."""

    # Always the assistant's.
    role: Literal["assistant"]
    # The text of the answer; null if it consists of calls.
    content: str | None
    # The thought, and the plan if the model's name asked for one.
    reasoning_content: str = ""
    # Always null.
    refusal: None
    # The calls of the answer.
    tool_calls: list[ToolCall] = []


class Choice(BaseModel):
    """One answer of a call."""

    # The number of the answer in the call, from 0.
    index: int
    # Why the answer ended.
    finish_reason: FinishReason
    # The stop string, or the id of the stop token, that ended the answer; null if neither did.
    stop_reason: str | int | None
    # How the answer was made, for requests with a `specsot` field.
    specsot: Planned | None = None


class ChatChoice(Choice):
    """One answer of a chat completion."""

    # The answer's message.
    message: AnswerMessage
    # Log probabilities, if they were asked for.
    logprobs: ChatLogprobs | None


class TextLogprobs(BaseModel):
    """Four lists with one entry per token; the entry of an echoed prompt's first token is null."""

    # The tokens as text.
    tokens: list[str]
    # Their log probabilities.
    token_logprobs: list[float | None]
    # Log probabilities of the likeliest tokens at each position, by the token's text.
    top_logprobs: list[dict[str, float] | None]
    # How many characters of the choice precede each token.
    text_offset: list[int]


class TextChoice(Choice):
    """One answer of a text completion."""

    # The answer, after the prompt if it is echoed.
    text: str
    # Log probabilities, if they were asked for.
    logprobs: TextLogprobs | None


class Answered(BaseModel):
    """Members of all completions."""

    # The call's id.
    id: str
    # When the answer was created, in seconds since 1970.
    created: int
    # The model's name, as the body has it.
    model: str
    # Identifies the model's files.
    system_fingerprint: str
    # The tokens of the call.
    usage: Usage
    # Parts of the request that the answer is not held to; null if there are none.
    warnings: list[str] | None = None


class ChatCompletion(Answered):
    """POST /v1/chat/completions"""

    # The kind of object.
    object: Literal["chat.completion"]
    # The answers of the call, in order.
    choices: list[ChatChoice]


class Completion(Answered):
    """POST /v1/completions"""

    # The kind of object.
    object: Literal["text_completion"]
    # The answers of the call: those of one prompt after each other.
    choices: list[TextChoice]


class ResponseObject(BaseModel):
    """POST /v1/responses"""

    # The response's id.
    id: str
    # The kind of object.
    object: Literal["response"]
    # When the response was created, in seconds since 1970.
    created_at: int
    # The model's name, as the body has it.
    model: str
    # How the answer ended.
    status: Literal["completed", "incomplete", "failed"]
    # Always null: errors have a response of their own.
    error: None
    # Why the answer is incomplete; null if it is complete.
    incomplete_details: dict[str, str] | None
    # OpenAI's items for thoughts, messages and function calls.
    output: list[dict[str, Any]]
    # The tokens of the call, in the format of the Responses API.
    usage: dict[str, Any]
    # Parts of the request that the answer is not held to; null if there are none.
    warnings: list[str] | None = None


class ClaudeUsage(BaseModel):
    """The number of tokens of a call, in Anthropic's format."""

    # Prompt tokens that were not cached.
    input_tokens: int
    # Prompt tokens whose KV was in the ring already.
    cache_read_input_tokens: int
    # Always 0.
    cache_creation_input_tokens: int
    # All generated tokens.
    output_tokens: int


class MessageObject(BaseModel):
    """POST /v1/messages"""

    # The message's id.
    id: str
    # The kind of object.
    type: Literal["message"]
    # Always the assistant's.
    role: Literal["assistant"]
    # The model's name, as the body has it.
    model: str
    # Anthropic's blocks for thoughts, texts and tool calls.
    content: list[dict[str, Any]]
    # Why the message ended.
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    # The stop sequence that ended the message; null if none did.
    stop_sequence: str | None
    # The tokens of the call.
    usage: ClaudeUsage
    # Parts of the request that the answer is not held to; null if there are none.
    warnings: list[str] | None = None


class CountedTokens(BaseModel):
    """POST /v1/messages/count_tokens"""

    # The number of tokens of the prompt.
    input_tokens: int


class ModelCard(BaseModel):
    """A listed model, in the format of OpenAI and vLLM."""

    # The listed name.
    id: str
    # The kind of object.
    object: Literal["model"]
    # When the server started, in seconds since 1970.
    created: int
    # Always "specsot".
    owned_by: str
    # The model's own name, without a mode.
    root: str
    # Always null.
    parent: None
    # The model's context, in tokens.
    max_model_len: int


class ModelList(BaseModel):
    """GET /v1/models"""

    # The kind of object.
    object: Literal["list"]
    # One entry per listed name.
    data: list[ModelCard]


class Version(BaseModel):
    """GET /version"""

    # The version of SpecSoT.
    version: str


# Descriptions of an endpoint's responses, by their HTTP status.
Document = dict[int | str, dict[str, Any]]

# Responses of every endpoint to calls that fail.
REFUSALS: Document = {
    "4XX": {"model": Refused, "description": "Refused, with the reason and the field."},
    "5XX": {"model": Refused, "description": "Not now, or a fault of ours."},
}
# The schema of one server-sent event.
_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "A chunk as JSON; [DONE] is the last."}},
}
# The description of a streamed response.
STREAM = {"text/event-stream": {"itemSchema": _EVENT}}
# The headers that every endpoint of answers reads.
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
    """Return the API document's description of an endpoint's responses, by their HTTP status; the same
    response for each of them.

    model: the schema of the response.
    statuses: HTTP statuses with this response; none for 200 alone.
    stream: True if the response may also be a stream of server-sent events.
    """
    answer: dict[str, Any] = {"model": model} | ({"content": STREAM} if stream else {})
    return dict.fromkeys(statuses or (200,), answer)
