"""Schemas of OpenAI request bodies.

Known fields that would change the answer but are not served are refused; see also `unknown_fields`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)

from specsot.errors import InvalidRequest
from specsot.params import (
    MAX_BIASES,
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_STOP_IDS,
    MAX_STOPS,
    MAX_TOOLS,
    DrafterName,
    Mode,
)
from specsot_master.http.unserved_fields import (
    FOREIGN,
    FORMS,
    INSTEAD,
    OTHER_NAMES,
    SWITCHES,
    UNSERVED,
    WHOLE_TEXT,
    WINDOWS_OF_PENALTIES,
    unserved_in,
)

# Answers to one call (`n`). Precedent: OpenAI's API.
MAX_ANSWERS = 128


def _check_text(text: str) -> str:
    """Return the text unchanged. Raise ValueError for half of a surrogate pair, which JSON can spell but
    UTF-8 cannot encode.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not Unicode text: half of a surrogate pair stands alone") from None
    return text


def _written_arguments(arguments: Any) -> Any:
    """Return a call's arguments as JSON text. Some clients send them as an object, or null for none.

    arguments: the JSON value of the field.

    Raises ValueError if it is nested too deeply.
    """
    if isinstance(arguments, str):
        return arguments
    try:
        return "" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def at_most(max_entries: int) -> BeforeValidator:
    """Return a validator that refuses lists and objects with too many entries, before any entry is validated.

    max_entries: the most entries that are accepted.
    """

    def check(value: Any) -> Any:
        """Return the value unchanged. Raise ValueError if it is a list or object with too many entries."""
        if isinstance(value, (dict, list)) and len(cast("list[Any]", value)) > max_entries:
            raise ValueError(f"at most {max_entries} entries are allowed")
        return value

    return BeforeValidator(check)


def _check_parts(messages: Any) -> Any:
    """Return the value unchanged. Raise ValueError for too many messages, or too many parts of all messages
    together, before any of them is validated.

    messages: the JSON value of the field; what is not a list is checked later.
    """
    if isinstance(messages, list):
        if len(turns := cast("list[Any]", messages)) > MAX_MESSAGES:
            raise ValueError(f"at most {MAX_MESSAGES} messages are allowed")
        contents = [turn.get("content") for turn in turns if isinstance(turn, dict)]
        if sum(len(one) for one in contents if isinstance(one, list)) > MAX_MESSAGES:
            raise ValueError(f"at most {MAX_MESSAGES} parts are allowed in all")
    return messages


def _check_prompt(prompt: Any) -> Any:
    """Return one or several prompts, each text or token ids. Ids are checked by built-in functions, which run
    in C, because a body may hold millions.

    prompt: the JSON value of the field.

    Raises ValueError for anything else.
    """
    if isinstance(prompt, str):
        return _check_text(prompt)
    if not isinstance(prompt, list):
        raise ValueError("must be a string, token ids, or a list of these")
    prompts = cast("list[Any]", prompt)
    if _all_ids(prompts):
        return prompts
    if len(prompts) > MAX_ANSWERS:
        raise ValueError(f"{len(prompts)} prompts, from 1 to {MAX_ANSWERS} are allowed")
    kinds = set(map(type, prompts))
    if kinds == {str}:
        return [_check_text(one) for one in prompts]
    if kinds != {list} or not all(map(_all_ids, prompts)):
        raise ValueError("a list holds strings, token ids, or lists of token ids")
    return prompts


def _all_ids(values: list[Any]) -> bool:
    """Return True if a list holds integers only; an empty list does."""
    return set(map(type, values)) <= {int}


T = TypeVar("T")

Words = Annotated[str, AfterValidator(_check_text)]
# A list whose validation stops at the first wrong entry, because a body may hold millions.
Many = Annotated[list[T], Field(fail_fast=True)]
Few = at_most(MAX_BIASES)
Count = Annotated[int, Field(ge=-(2**63), lt=2**64)]


def _drop_no_limit(limit: int | None) -> int | None:
    """Return the limit; None for -1, which llama.cpp, LM Studio and their clients send for no limit."""
    return None if limit == -1 else limit


TokenLimit = Annotated[Count | None, AfterValidator(_drop_no_limit)]
Text: dict[str, Any] = {"type": "string"}
Ids: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [Text, {"type": "array", "items": Text}, Ids, {"type": "array", "items": Ids}],
            "examples": ["The sky is blue as"],
        }
    ),
]


class Model(BaseModel):
    """Base class of bodies: types are strict, and unknown fields are kept for `unknown_fields`."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=(), allow_inf_nan=False)


class Looking(BaseModel):
    """An attention window: each token attends to the first `sinks` and the last `recent` tokens."""

    model_config = ConfigDict(strict=True, extra="forbid")

    sinks: Count | None = None
    recent: Count | None = None


class Leaving(BaseModel):
    """How the KV cache is pruned."""

    model_config = ConfigDict(strict=True, extra="forbid")

    keep_ratio: float | None = None
    prune_every: Count | None = None
    skip_layers: Count | None = None


class Planning(BaseModel):
    """SpecSoT's own field.

    branches: whether to return the plan and every branch in addition to the answer.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    mode: Mode | None = None
    drafter: DrafterName | None = None
    constraint: bool | None = None
    tools: Annotated[Many[Words] | None, at_most(MAX_TOOLS)] = None
    priority: Count | None = None
    max_parallel: Count | None = None
    max_branch_tokens: Count | None = None
    max_skeleton_tokens: Count | None = None
    window: Looking | None = None
    pruning: Leaving | None = None
    head_aware: bool | None = None
    finish_within_s: float | None = None
    polish: bool | None = None
    branches: bool = False


class StreamOptions(Model):
    """What a stream contains in addition to the answer."""

    include_usage: bool | None = None


class JsonSchema(Model):
    """A named JSON schema.

    `strict` and `name` are accepted and ignored: answers always follow their schema.
    """

    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Model):
    """The form of an answer.

    schema: a JSON schema where llama.cpp, Together and others put it, for any type.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    inline_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class StructuredOutputs(Model):
    """vLLM's field for the form of an answer, of which exactly one member may be set."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_schema: Annotated[dict[str, Any] | Words | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Words | None = None
    choice: Annotated[Many[Words] | None, at_most(MAX_CHOICES)] = None


# Tokens. llama.cpp and Ollama read this number as no limit.
NO_LIMIT = -1


def _read_other_names(body_json: Any) -> Any:
    """Return the body with OTHER_NAMES replaced by our names. If a body has both names of a field, the other
    name stays, and `refuse_unserved` refuses it. What is not an object is returned unchanged.

    body_json: the decoded JSON body.
    """
    if not isinstance(body_json, dict):
        return body_json
    body = cast("dict[str, Any]", body_json)
    found = {name: body[name] for name in OTHER_NAMES if body.get(name) is not None}
    moved = {name: value for name, value in found.items() if body.get(OTHER_NAMES[name]) is None}
    kept = {name: value for name, value in body.items() if name not in moved}
    return kept | {OTHER_NAMES[name]: value for name, value in moved.items() if value != NO_LIMIT}


class Asking(Model):
    """The fields that chat and text completions have in common."""

    _other_names = model_validator(mode="before")(_read_other_names)

    model: Words | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    max_tokens: Annotated[TokenLimit, Field(examples=[64])] = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: float | None = None
    top_k: Count | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, Few] = None
    stop: Annotated[Words | Many[Words] | None, at_most(MAX_STOPS)] = None
    seed: Annotated[int, Field(lt=2**64)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[Many[Count] | None, at_most(MAX_STOP_IDS)] = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Annotated[StructuredOutputs | None, Few] = None
    guided_json: dict[str, Any] | Words | None = None
    guided_regex: Words | None = None
    guided_choice: Annotated[Many[Words] | None, at_most(MAX_CHOICES), Field(examples=[["yes", "no"]])] = None
    # Names of llama.cpp, SGLang and Ollama for the form of an answer.
    json_schema: dict[str, Any] | Words | None = None
    regex: Words | None = None
    format: Literal["json", ""] | dict[str, Any] | None = None
    user: Words | None = None
    specsot: Annotated[Planning | None, Few] = None
    _granted: int | None = PrivateAttr(None)

    @property
    def granted(self) -> int | None:
        """Tokens that an answer without a limit gets if they fit; None for the default of `Limits`."""
        return self._granted

    def granting(self, max_tokens: int) -> Self:
        """Return a copy of the body without a limit of its own.

        max_tokens: how many tokens its answer gets, if so many fit, else as many as fit.
        """
        copied = self.model_copy(update={"max_tokens": None})
        copied._granted = max_tokens  # noqa: SLF001 - its own
        return copied


class Part(Model):
    """A part of a message's content."""

    type: str
    text: Words | None = None


class GivenFunction(Model):
    """A function that an assistant's turn called, with its arguments as JSON text."""

    name: Words
    arguments: Annotated[Words, BeforeValidator(_written_arguments)] = ""


class PastCall(Model):
    """A call in an assistant's turn."""

    id: Words = ""
    function: GivenFunction


class Turn(Model):
    """A message.

    name, reasoning_content: only used if the conversation is rendered with tools or thinking.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Words | Many[Part] | None = None
    name: Words | None = None
    reasoning_content: Words | None = None
    tool_calls: Annotated[Many[PastCall] | None, Few] = None
    tool_call_id: Words | None = None


class ToolFunction(Model):
    """A function that may be called. parameters: a JSON schema, which forced calls always follow."""

    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    description: Words | None = None
    parameters: dict[str, Any] | None = None


class OfferedTool(Model):
    """A tool that the answer may call."""

    type: Literal["function"]
    function: ToolFunction


class ToolName(Model):
    """The name of an offered function."""

    name: Words


class NamedTool(Model):
    """The function that the answer must call."""

    type: Literal["function"]
    function: ToolName


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]

_CONVERSATION = [{"role": "user", "content": "Why is the sky blue?"}]


Conversation = Annotated[
    Many[Turn],
    BeforeValidator(_check_parts),
    Field(min_length=1, max_length=MAX_MESSAGES, examples=[_CONVERSATION]),
]


class ChatBody(Asking):
    """POST /v1/chat/completions"""

    messages: Conversation
    max_completion_tokens: Annotated[TokenLimit, Field(examples=[64])] = None
    tools: Annotated[Many[OfferedTool] | None, at_most(MAX_ANSWERS)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    logprobs: Annotated[bool | None, Field(examples=[True])] = None
    top_logprobs: Annotated[Count | None, Field(examples=[2])] = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Few] = None
    thinking_token_budget: Annotated[Count, Field(ge=0)] | None = None
    include_reasoning: bool | None = None


class CompletionBody(Asking):
    """POST /v1/completions. A prompt is text or token ids; several prompts are answered at the same time."""

    prompt: Prompt
    logprobs: Count | None = None
    echo: bool | None = None


def refuse_unserved(body: BaseModel) -> None:
    """Raise InvalidRequest for a field that asks for something that is not served. Values that change nothing
    are accepted.

    body: the parsed body; `model_extra` holds its unknown fields.
    """
    given = body.model_extra or {}
    for name in unserved_in(given, UNSERVED):
        if given.get(SWITCHES.get(name, "")) == "none":
            continue
        may = f', or set {SWITCHES[name]} to "none"' if name in SWITCHES else ""
        instead = f"use {INSTEAD[name]}, or " if name in INSTEAD else ""
        raise InvalidRequest(f"{name} is not supported: {instead}leave it out{may}", field=name)
    for name in WINDOWS_OF_PENALTIES:
        if given.get(name) not in (None, WHOLE_TEXT) and _penalizes(body):
            raise InvalidRequest(
                f"{name} is not supported: penalties count the whole text; leave it out", field=name
            )
    for n, turn in enumerate(body.messages if isinstance(body, ChatBody) else ()):
        if (turn.model_extra or {}).get("prefix"):
            field = f"messages.{n}.prefix"
            raise InvalidRequest(f"{field} is not supported: leave it out", field)


def _penalizes(body: BaseModel) -> bool:
    """Return True if a body asks for a penalty of repeated tokens.

    body: the parsed body.
    """
    return isinstance(body, Asking) and (
        (body.repetition_penalty or 1) != 1 or bool(body.presence_penalty or body.frequency_penalty)
    )


def refuse_foreign_fields(body: BaseModel, instead: str) -> None:
    """Raise InvalidRequest for a field of chat completions, served or not, in a body of another API that has
    no such field. Values that change nothing are accepted.

    body: the parsed body; `model_extra` holds its unknown fields.
    instead: the field that this API has for the form of an answer.
    """
    for name in unserved_in(body.model_extra or {}, FOREIGN):
        use = f"use {instead}, or " if name in FORMS else ""
        raise InvalidRequest(f"{name} is not supported: {use}leave it out", name)
