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
    """Return the text unchanged.

    text: a text of the body.

    Raises ValueError for half of a surrogate pair, which JSON can spell but UTF-8 cannot encode.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not Unicode text: half of a surrogate pair stands alone") from None
    return text


def _written_arguments(arguments: Any) -> Any:
    """Return a call's arguments as JSON text. Some clients send them as an object, or null for none, which
    gives "". A text is returned unchanged, without a check.

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
    A list or object with exactly so many entries passes; the validator raises ValueError for more, and values
    of other types pass.

    max_entries: the maximum number of entries that are accepted.
    """

    def check(value: Any) -> Any:
        """Return the value unchanged; what is no list or object is checked later.

        value: the JSON value of the field.

        Raises ValueError if it is a list or object with too many entries.
        """
        if isinstance(value, (dict, list)) and len(cast("list[Any]", value)) > max_entries:
            raise ValueError(f"at most {max_entries} entries are allowed")
        return value

    return BeforeValidator(check)


def _check_parts(messages: Any) -> Any:
    """Return the value unchanged; what is not a list is checked later. Both bounds are MAX_MESSAGES.

    messages: the JSON value of the field.

    Raises ValueError for too many messages, or too many parts of all messages together, before any of them is
    validated.
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
    in C, because a body may hold millions. An empty list is returned as it is.

    prompt: the JSON value of the field.

    Raises ValueError for anything else, for more than MAX_ANSWERS prompts, and for half of a surrogate pair.
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
    """Return True if a list holds integers only; an empty list does.

    values: the entries, decoded from JSON.
    """
    return set(map(type, values)) <= {int}


T = TypeVar("T")

# Text without halves of surrogate pairs.
Words = Annotated[str, AfterValidator(_check_text)]
# A list whose validation stops at the first wrong entry, because a body may hold millions.
Many = Annotated[list[T], Field(fail_fast=True)]
# Bounds the entries of lists and objects in fields without a bound of their own.
Few = at_most(MAX_BIASES)
# A whole number that fits 64 bits.
Count = Annotated[int, Field(ge=-(2**63), lt=2**64)]


def _drop_no_limit(limit: int | None) -> int | None:
    """Return the limit; None for -1, which llama.cpp, LM Studio and their clients send for no limit.

    limit: the value of the field; None if the body leaves it out.
    """
    return None if limit == -1 else limit


# The maximum number of tokens of an answer; None for no limit of the caller's own.
TokenLimit = Annotated[Count | None, AfterValidator(_drop_no_limit)]
# The JSON schema of text.
Text: dict[str, Any] = {"type": "string"}
# The JSON schema of a list of token ids.
Ids: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
# One or several prompts, each text or token ids.
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

    # How many first tokens each token attends to; None for the default.
    sinks: Count | None = None
    # How many tokens before it each token attends to; None for the default.
    recent: Count | None = None


class Leaving(BaseModel):
    """How the KV cache is pruned."""

    model_config = ConfigDict(strict=True, extra="forbid")

    # The fraction of KV rows that are kept; None for the default.
    keep_ratio: float | None = None
    # The number of tokens between two prunings; None for the default.
    prune_every: Count | None = None
    # How many first layers are not pruned; None for the default.
    skip_layers: Count | None = None


class Planning(BaseModel):
    """SpecSoT's own field of a body: how the request is planned and decoded."""

    model_config = ConfigDict(strict=True, extra="forbid")

    # Whether the answer is planned: "auto", "sot" or "direct"; None for the endpoint's default.
    mode: Mode | None = None
    # The drafter to use; None for the ring's own, "none" for no drafts.
    drafter: DrafterName | None = None
    # False to write the plan without a grammar; None for the default.
    constraint: bool | None = None
    # Names that points of a plan in markers may carry; None for none.
    tools: Annotated[Many[Words] | None, at_most(MAX_TOOLS)] = None
    # The request's priority in the queue; higher is more urgent, None is 0.
    priority: Count | None = None
    # The maximum number of branches that are written at the same time; None for the default.
    max_parallel: Count | None = None
    # The maximum number of tokens of one branch; None for no bound of its own.
    max_branch_tokens: Count | None = None
    # The maximum number of tokens of the plan; None for the default.
    max_skeleton_tokens: Count | None = None
    # The attention window; None to attend to all tokens.
    window: Looking | None = None
    # How the KV cache is pruned; None for not at all.
    pruning: Leaving | None = None
    # True to window or prune each head by what was measured of it; None for False.
    head_aware: bool | None = None
    # Seconds after its arrival within which the request ends, at the end of a sentence; None for no such
    # limit.
    finish_within_s: float | None = None
    # True to have the merged answer written anew as one text; None for False.
    polish: bool | None = None
    # True to return the plan and every branch in addition to the answer.
    branches: bool = False


class StreamOptions(Model):
    """What a stream contains in addition to the answer's text."""

    # True to end the stream with the usage.
    include_usage: bool | None = None


class JsonSchema(Model):
    """A named JSON schema for the answer.

    `strict` and `name` are accepted and ignored: answers always follow their schema.
    """

    # The JSON schema itself.
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Model):
    """The form of an answer."""

    # "text" for any form, or the kind of JSON that the answer must be.
    type: Literal["text", "json_object", "json_schema"]
    # The schema, for the type "json_schema"; None if it stands in `inline_schema`.
    json_schema: JsonSchema | None = None
    # The schema where llama.cpp, Together and others put it, for any type; None if it is not there.
    inline_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class StructuredOutputs(Model):
    """vLLM's field for the form of an answer, of which exactly one member may be set."""

    model_config = ConfigDict(strict=True, extra="forbid")

    # A JSON schema as an object or as text; None for another form.
    json_schema: Annotated[dict[str, Any] | Words | None, Field(alias="json")] = None
    # True for any JSON object.
    json_object: bool | None = None
    # A regular expression that the answer must match; None for another form.
    regex: Words | None = None
    # Texts of which the answer must be one; None for another form.
    choice: Annotated[Many[Words] | None, at_most(MAX_CHOICES)] = None


# Tokens. llama.cpp and Ollama read this number as no limit.
NO_LIMIT = -1


def _read_other_names(body_json: Any) -> Any:
    """Return the body with OTHER_NAMES replaced by our names. If a body has both names of a field, the other
    name stays, and `refuse_unserved` refuses it. An other name whose value is None stays too. A value of
    NO_LIMIT (-1) under an other name is left out. What is not an object is returned unchanged.

    body_json: the decoded JSON body.
    """
    if not isinstance(body_json, dict):
        return body_json
    body = cast("dict[str, Any]", body_json)
    found = {name: body[name] for name in OTHER_NAMES if body.get(name) is not None}
    moved = {name: value for name, value in found.items() if body.get(OTHER_NAMES[name]) is None}
    unchanged = {name: value for name, value in body.items() if name not in moved}
    return unchanged | {OTHER_NAMES[name]: value for name, value in moved.items() if value != NO_LIMIT}


class Asking(Model):
    """The fields that chat and text completions have in common."""

    _other_names = model_validator(mode="before")(_read_other_names)

    # The model's public name, possibly with a mode after it; None for the only one.
    model: Words | None = None
    # True to answer by server-sent events.
    stream: bool | None = None
    # What the stream contains in addition; None for nothing.
    stream_options: StreamOptions | None = None
    # How many answers each prompt gets; None for 1.
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    # The maximum number of tokens of an answer; None for the endpoint's default.
    max_tokens: Annotated[TokenLimit, Field(examples=[64])] = None
    # The sampling temperature; None for the default.
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    # The probability mass from which tokens are sampled; None for the default.
    top_p: float | None = None
    # The number of tokens from which is sampled; 0 or -1 for all, None for the default.
    top_k: Count | None = None
    # The smallest probability of a sampled token, as a fraction of the likeliest one's; None for the default.
    min_p: float | None = None
    # Penalty on the logits of all tokens of prompt and answer; 1 for none, None for the default.
    repetition_penalty: float | None = None
    # Subtracted from the logits of tokens that occurred in the answer; None for the default.
    presence_penalty: float | None = None
    # Subtracted from a token's logit once for each time it occurred in the answer; None for the default.
    frequency_penalty: float | None = None
    # Added to the logits, by token id as text; None for nothing.
    logit_bias: Annotated[dict[str, float] | None, Few] = None
    # Text, or texts, that end the answer; None for none.
    stop: Annotated[Words | Many[Words] | None, at_most(MAX_STOPS)] = None
    # The sampling seed; None or a negative number to have the master draw one.
    seed: Annotated[int, Field(lt=2**64)] | None = None
    # True to continue after the model's end tokens.
    ignore_eos: bool | None = None
    # Tokens before which no end token is written; None for 0.
    min_tokens: Count | None = None
    # Ids of further tokens that end the answer; None for none.
    stop_token_ids: Annotated[Many[Count] | None, at_most(MAX_STOP_IDS)] = None
    # True to keep the stop string at the end of the answer.
    include_stop_str_in_output: bool | None = None
    # False to show special tokens in the text; None for True.
    skip_special_tokens: bool | None = None
    # The form that the answer must have, as OpenAI names it; None for any.
    response_format: ResponseFormat | None = None
    # The form, as vLLM names it; None for any.
    structured_outputs: Annotated[StructuredOutputs | None, Few] = None
    # The form as a JSON schema, as older vLLM names it; None for any.
    guided_json: dict[str, Any] | Words | None = None
    # The form as a regular expression, as older vLLM names it; None for any.
    guided_regex: Words | None = None
    # The form as a choice of texts, as older vLLM names it; None for any.
    guided_choice: Annotated[Many[Words] | None, at_most(MAX_CHOICES), Field(examples=[["yes", "no"]])] = None
    # The form as a JSON schema, as llama.cpp and SGLang name it; None for any.
    json_schema: dict[str, Any] | Words | None = None
    # The form as a regular expression, as SGLang names it; None for any.
    regex: Words | None = None
    # The form as Ollama names it: any JSON object, or a JSON schema; None or "" for any.
    format: Literal["json", ""] | dict[str, Any] | None = None
    # OpenAI's name of the caller's user; accepted and ignored.
    user: Words | None = None
    # SpecSoT's own field; None for what the endpoint does by default.
    specsot: Annotated[Planning | None, Few] = None
    # Tokens that an answer without a limit gets if they fit; None for the default of `Limits`.
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

    # The kind of part; only "text" is served.
    type: str
    # The text of the part; None for other kinds.
    text: Words | None = None


class GivenFunction(Model):
    """A function that an assistant's turn called, with its arguments as JSON text."""

    # The function's name.
    name: Words
    # The arguments as JSON text, or as an object; "" for none.
    arguments: Annotated[Words, BeforeValidator(_written_arguments)] = ""


class PastCall(Model):
    """A call in an assistant's turn."""

    # The call's id, which the turn with its result names.
    id: Words = ""
    # The function that was called, with its arguments.
    function: GivenFunction


class Turn(Model):
    """A message of a conversation."""

    # Who wrote the turn.
    role: Literal["system", "developer", "user", "assistant", "tool"]
    # The text of the turn, or its parts; None for none.
    content: Words | Many[Part] | None = None
    # The name of the turn's author; used only if the conversation is rendered with tools or thinking.
    name: Words | None = None
    # What the model thought before the turn; used only if the conversation is rendered with tools or
    # thinking.
    reasoning_content: Words | None = None
    # The calls of an assistant's turn; None for none.
    tool_calls: Annotated[Many[PastCall] | None, Few] = None
    # The id of the call whose result the turn holds, for the role "tool"; else None.
    tool_call_id: Words | None = None


class ToolFunction(Model):
    """A function that may be called."""

    # The function's name.
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    # What the function does, for the model; None for no description.
    description: Words | None = None
    # The JSON schema of the arguments, which forced calls always follow; None for a function without
    # arguments.
    parameters: dict[str, Any] | None = None


class OfferedTool(Model):
    """A tool that the answer may call."""

    # The only kind of tool that is served.
    type: Literal["function"]
    # The function itself.
    function: ToolFunction


class ToolName(Model):
    """The name of an offered function."""

    # The function's name.
    name: Words


class NamedTool(Model):
    """The function that the answer must call."""

    # The only kind of tool that is served.
    type: Literal["function"]
    # The function's name, as an object.
    function: ToolName


# OpenAI's reasoning efforts; "none" turns thinking off.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]

# The example of a conversation in the API document.
_CONVERSATION = [{"role": "user", "content": "Why is the sky blue?"}]


# The turns of a chat, with a bound of turns and parts.
Conversation = Annotated[
    Many[Turn],
    BeforeValidator(_check_parts),
    Field(min_length=1, max_length=MAX_MESSAGES, examples=[_CONVERSATION]),
]


class ChatBody(Asking):
    """POST /v1/chat/completions"""

    # The conversation, oldest turn first.
    messages: Conversation
    # The maximum number of tokens of thought and answer; None for `max_tokens`.
    max_completion_tokens: Annotated[TokenLimit, Field(examples=[64])] = None
    # The functions that the answer may call; None for none.
    tools: Annotated[Many[OfferedTool] | None, at_most(MAX_ANSWERS)] = None
    # Which functions the answer may or must call; None lets the model decide.
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    # False if the answer may make one call only.
    parallel_tool_calls: bool | None = None
    # True to return log probabilities.
    logprobs: Annotated[bool | None, Field(examples=[True])] = None
    # How many of the likeliest tokens are returned at each position; None for none.
    top_logprobs: Annotated[Count | None, Field(examples=[2])] = None
    # How much the model thinks, for templates that use it; None for the template's default.
    reasoning_effort: Effort | None = None
    # Variables of the chat template; of these, only the switches of thinking and the reasoning effort are
    # served.
    chat_template_kwargs: Annotated[dict[str, Any] | None, Few] = None
    # The maximum number of tokens of a thought; None for no bound of its own.
    thinking_token_budget: Annotated[Count, Field(ge=0)] | None = None
    # False to leave the thought out of the response.
    include_reasoning: bool | None = None


class CompletionBody(Asking):
    """POST /v1/completions. A prompt is text or token ids; several prompts are answered at the same time."""

    # One or several prompts, each text or token ids.
    prompt: Prompt
    # How many of the likeliest tokens are returned at each position; None for no log probabilities.
    logprobs: Count | None = None
    # True to return the prompt before the answer.
    echo: bool | None = None


def refuse_unserved(body: BaseModel) -> None:
    """Check that a body asks for nothing that is not served. Values that change nothing are accepted. The
    unserved fields come first, then windows of penalties, which are refused only if the body asks for a
    penalty, and prefixes of messages. A field that another field switches off with "none" (SWITCHES) is
    accepted.

    body: the parsed body; `model_extra` holds its unknown fields.

    Raises InvalidRequest that names the first field that is not served.
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


def refuse_foreign_fields(body: BaseModel, own_field: str) -> None:
    """Check that a body of another API has no field of chat completions, served or not, that this API lacks.
    Values that change nothing are accepted. The message names the own field for a form of the answer.

    body: the parsed body; `model_extra` holds its unknown fields.
    own_field: the field that this API has for the form of an answer.

    Raises InvalidRequest that names the first such field.
    """
    for name in unserved_in(body.model_extra or {}, FOREIGN):
        use = f"use {own_field}, or " if name in FORMS else ""
        raise InvalidRequest(f"{name} is not supported: {use}leave it out", name)
