"""Converts OpenAI request bodies to requests of the master, one for each answer that is wanted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from specsot import params
from specsot.errors import InvalidRequest
from specsot.grammar.schemas import warnings_of
from specsot_master.http.openai_schemas import (
    MAX_ANSWERS,
    Asking,
    ChatBody,
    CompletionBody,
    Planning,
    ResponseFormat,
    StructuredOutputs,
    Turn,
)

# A form that a body asks for: (the caller's field, the kind of form, its texts).
FieldForm = tuple[str, params.FormKind, tuple[str, ...]]


def form_of(body: Asking) -> params.Form | None:
    """Return the form that the answer must have (a JSON schema, a regular expression, a choice), or None for
    any form.

    body: the parsed body.

    Raises InvalidRequest if the body asks for two forms at once, or for a JSON schema without giving one.
    """
    wishes = forms_in(body)
    if len(wishes) > 1:
        first, second = wishes[0][0], wishes[1][0]
        raise InvalidRequest(f"{second} cannot come with {first}: an answer has one form", second)
    return next((params.Form(kind, words) for _, kind, words in wishes), None)


def forms_in(body: Asking) -> list[FieldForm]:
    """Return the forms that a body asks for, by the fields of OpenAI, vLLM, older vLLM and other servers;
    empty if it asks for none. The order is that of `response_format`, `structured_outputs`, the `guided_`
    fields, and the fields of other servers.

    body: the parsed body.

    Raises InvalidRequest if response_format asks for a JSON schema and has none.
    """
    structured = body.structured_outputs or StructuredOutputs()
    other_format = None if body.format == "" else body.format
    wishes: list[tuple[str, params.FormKind, Any]] = [
        ("response_format", *_form_of_response(body.response_format)),
        ("structured_outputs.json", "json_schema", structured.json_schema),
        ("structured_outputs.regex", "regex", structured.regex),
        ("structured_outputs.choice", "choice", structured.choice),
        ("structured_outputs.json_object", "json_object", structured.json_object or None),
        ("guided_json", "json_schema", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        # The fields of llama.cpp, SGLang and Ollama.
        ("json_schema", "json_schema", body.json_schema),
        ("regex", "regex", body.regex or None),
        ("format", "json_object" if other_format == "json" else "json_schema", other_format),
    ]
    return [(field, kind, _texts_of(kind, value)) for field, kind, value in wishes if value is not None]


def _form_of_response(asked: ResponseFormat | None) -> tuple[params.FormKind, Any]:
    """Return the kind of form that OpenAI's `response_format` asks for, and its value: True for any JSON
    object, a JSON schema, or None if it asks for no form.

    asked: the field, or None if it is absent.

    Raises InvalidRequest if it asks for a JSON schema and has none.
    """
    if asked is None or asked.type == "text":
        return "json_schema", None
    schema = asked.inline_schema
    if asked.type == "json_object":
        return ("json_schema", {"type": "object", **schema}) if schema else ("json_object", True)
    if schema is not None:
        return "json_schema", schema
    if asked.json_schema is None:
        raise InvalidRequest("response_format.json_schema must be given", "response_format.json_schema")
    return "json_schema", asked.json_schema.json_schema


def _texts_of(kind: params.FormKind, value: Any) -> tuple[str, ...]:
    """Return the texts of a form: none for any JSON object, those of a choice, else a single one.

    kind: the kind of the form.
    value: what the field holds. A JSON schema is an object, or JSON text, which is returned as it is.
    """
    if kind == "json_object":
        return ()
    if kind == "choice":
        return tuple(value)
    return (value if isinstance(value, str) else json.dumps(value),)


def warnings_in(body: Asking) -> tuple[str, ...]:
    """Return warnings about parts of the answer's JSON schema that answers are not held to, each with the
    caller's field; empty if there are none. Schemas that are no JSON are left out here, and refused when they
    are compiled.

    body: the parsed body.
    """
    found: list[str] = []
    for field, kind, texts in forms_in(body):
        try:
            schema = json.loads(texts[0]) if kind == "json_schema" else None
        except (ValueError, RecursionError):
            continue  # Refused where the form is compiled.
        if isinstance(schema, dict):
            found += (f"{field}: {warning}" for warning in warnings_of(schema))
    return tuple(found)


# Tokens of a text completion that names no limit. Precedent: OpenAI's API.
COMPLETION_TOKENS = 16
# Seeds are below this bound, so that a signed 64-bit integer holds them.
SEED_BOUND = 2**63

# Returns the token ids of a text.
Encode = Callable[[str], tuple[int, ...]]

# Fields of a body that are sampling parameters of the same names.
_SAMPLING = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
# Fields of `specsot` that are limits of the same names.
_LIMITS = ("max_parallel", "max_branch_tokens", "max_skeleton_tokens")
# Fields of a body that say how an answer ends, and which are fields of `Ask` of the same names.
_ENDS = ("min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
# Fields of `specsot` that are fields of `Ask` of the same names.
_GIVEN = ("mode", "drafter", "constraint", "priority", "head_aware", "finish_within_s", "polish")
# Our names of fields that stand in `specsot`.
_PLANNING = ("mode", "drafter", "constraint", "tools", "priority", *_LIMITS)

# From our names of fields to those of chat completions.
CHAT_CALLER_NAMES: Mapping[str, str] = {
    "prompt": "messages",
    "max_new_tokens": "max_tokens",
    "logprobs": "top_logprobs",
    **{
        name: f"specsot.{name}"
        for name in (*_PLANNING, "window", "pruning", "head_aware", "finish_within_s", "polish")
    },
    **{name: f"specsot.window.{name}" for name in ("sinks", "recent")},
    **{name: f"specsot.pruning.{name}" for name in ("keep_ratio", "prune_every", "skip_layers")},
}
# From our names of fields to those of text completions.
COMPLETION_CALLER_NAMES: Mapping[str, str] = {
    **CHAT_CALLER_NAMES,
    "prompt": "prompt",
    "logprobs": "logprobs",
    "tokens": "prompt",
}


def caller_names_of(body: Asking) -> Mapping[str, str]:
    """Return, by our names of fields, the names that the caller uses for them, for error messages. Some of
    them depend on the fields that the body uses. With tools, the tokens are "messages" and the constraint
    "tools", unless the body asks for a form of its own, which is then named.

    body: the parsed body.
    """
    words = CHAT_CALLER_NAMES if isinstance(body, ChatBody) else COMPLETION_CALLER_NAMES
    asked = body.max_completion_tokens if isinstance(body, ChatBody) else None
    chat = isinstance(body, ChatBody) and body.tools
    return {
        **words,
        **({"tokens": "messages", "tools": "tools"} if chat else {}),
        "constraint": next((field for field, *_ in forms_in(body)), "tools" if chat else "specsot.grammar"),
        "max_new_tokens": "max_tokens" if asked is None else "max_completion_tokens",
    }


def chat_asks(body: ChatBody, mode: params.Mode, max_positions: int) -> list[params.Ask]:
    """Return the requests of a chat body, one for each of its `n` answers. The copies differ in their seeds
    only.

    body: the parsed body, without tools.
    mode: applies if the body names none, and asks for nothing that rules out a plan.
    max_positions: the model's context, in tokens.

    Raises InvalidRequest for a body that cannot be served, and ContextLengthExceeded for one with too many
    characters.
    """
    messages = tuple(message_of(turn, f"messages.{n}") for n, turn in enumerate(body.messages))
    params.check_length(position_limit_of(body, max_positions), characters=num_characters(body))
    ask = params.Ask(
        messages=messages,
        **common_fields(body, mode),
        limits=limits_of(body, body.max_completion_tokens, body.max_tokens),
        logprobs=logprobs_of(body),
    )
    return copies_of(ask, body)


def logprobs_of(body: ChatBody) -> int | None:
    """Return how many top log probabilities a chat body asks for, or None for no log probabilities. It is 0
    if only the log probability of each token itself is wanted.

    body: the parsed body.

    Raises InvalidRequest for top_logprobs without logprobs.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def completion_asks(body: CompletionBody, encode: Encode, max_positions: int) -> list[params.Ask]:
    """Return the requests of a text completion: `n` for each prompt, those of one prompt consecutively; at
    least one. Too many or too long prompts are refused before any prompt is encoded. They are answered
    directly, with a default of COMPLETION_TOKENS tokens. With `echo`, the prompt's log probabilities are
    asked for as well.

    body: the parsed body.
    encode: returns the token ids of a text prompt.
    max_positions: the model's context, in tokens.

    Raises InvalidRequest for a body that cannot be served, among others for mode sot, and
    ContextLengthExceeded for a prompt that is too long.
    """
    if body.specsot and body.specsot.mode == "sot":
        raise InvalidRequest("mode sot plans, and plain completions have no plan", "mode")
    shared: dict[str, Any] = common_fields(body, "direct") | {"mode": "direct"}
    shared["prompt_logprobs"] = body.logprobs if body.echo else None
    given, position_limit = prompts_of(body), position_limit_of(body, max_positions)
    wanted_tokens = 1 if writes_nothing(body) else body.max_tokens

    limits = replace(limits_of(body, wanted_tokens), default_new_tokens=COMPLETION_TOKENS)
    for one in given:
        params.check_length(position_limit, characters=len(one) if isinstance(one, str) else 0)
    for ids in (one for one in given if not isinstance(one, str)):
        check_ids([ids], position_limit, limits)
    prompts = [encode(one) if isinstance(one, str) else tuple(one) for one in given]
    for ids in prompts:
        check_ids([ids], position_limit, limits)
    shared["logprobs"] = body.logprobs
    asks = [params.Ask(tokens=tokens, **shared, limits=limits) for tokens in prompts]
    return [copy for ask in asks for copy in copies_of(ask, body)]


def writes_nothing(body: CompletionBody) -> bool:
    """Return True if the caller asks about the prompt only (max_tokens 0). The ring generates at least one
    token, which is then left out of the response.

    body: the parsed body.
    """
    return body.max_tokens == 0


def check_ids(prompts: Sequence[Sequence[int]], max_positions: int, limits: params.Limits) -> None:
    """Check that each prompt has tokens and fits the context together with its answer; return nothing if all
    do. An empty list of prompts passes.

    prompts: the token ids of each prompt.
    max_positions: how many tokens prompt and answer may have together.
    limits: the limits of the answer, which must fit after the prompt.

    Raises InvalidRequest for an empty prompt, and ContextLengthExceeded for a too long one.
    """
    for ids in prompts:
        if not ids:
            raise InvalidRequest("prompt must not be empty", "prompt")
        params.check_length(max_positions, len(ids), completion=limits.new_tokens)


def message_of(turn: Turn, field: str) -> params.Message:
    """Return one turn as a message, with its text parts joined. OpenAI's role `developer` becomes `system`.

    turn: a turn of a parsed body.
    field: the name of the turn, such as "messages.0", for errors.

    Raises InvalidRequest if the turn is not text.
    """
    return params.Message(
        "system" if turn.role == "developer" else turn.role, text_of(turn, f"{field}.content")
    )


def text_of(turn: Turn, field: str) -> str:
    """Return the text of a turn; a turn of any role may have no content, and then has an empty text. Parts
    are joined without anything between them.

    turn: a turn of a parsed body.
    field: the name of its content, such as "messages.0.content", for errors.

    Raises InvalidRequest for images and audio, and for the older function_call.
    """
    if (turn.model_extra or {}).get("function_call"):
        name = field.replace(".content", ".function_call")
        raise InvalidRequest(f"{name} is not supported: use tool_calls", name)
    if not isinstance(turn.content, list):
        return turn.content or ""
    for part in turn.content:
        if part.type != "text" or part.text is None:
            raise InvalidRequest(f"{field}: only parts of type text are supported", field)
    return "".join(part.text or "" for part in turn.content)


def num_characters(body: ChatBody) -> int:
    """Return the number of characters of all turns; 0 for turns without content.

    body: the parsed body.

    Raises InvalidRequest if a turn is not text.
    """
    return sum(len(text_of(turn, f"messages.{n}.content")) for n, turn in enumerate(body.messages))


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """Return every prompt of a text completion, as text or as token ids. An empty list is refused.

        # "a" -> ["a"]    [1, 2] -> [[1, 2]]    ["a", "b"] -> ["a", "b"]    [[1], [2, 3]] -> [[1], [2, 3]]

    body: the parsed body.

    Raises InvalidRequest if there is no prompt, or if there are too many prompts or answers.
    """
    given: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if given and isinstance(given[0], int):
        given = [given]
    if not 0 < len(given) <= MAX_ANSWERS:
        raise InvalidRequest(f"prompt: {len(given)} prompts, from 1 to {MAX_ANSWERS} are allowed", "prompt")
    if (answers := len(given) * (body.n or 1)) > MAX_ANSWERS:
        raise InvalidRequest(f"{answers} answers to one call, {MAX_ANSWERS} are allowed", "prompt")
    return given


def position_limit_of(body: Asking, max_positions: int) -> int:
    """Return how many tokens prompt and answer may have together: the model's context, or MAX_TOKENS for a
    request with an attention window.

    body: the parsed body.
    max_positions: the model's context, in tokens.
    """
    return params.MAX_TOKENS if body.specsot and body.specsot.window else max_positions


def limits_of(body: Asking, *wanted_tokens: int | None) -> params.Limits:
    """Return the limits of a body's answers. A request without any limit gets as many tokens as the body
    grants, if it grants some.

    body: the parsed body.
    wanted_tokens: values of the body's fields for the answer's length; the first one that is not None becomes
        max_new_tokens. If all are None, the default applies.
    """
    values: dict[str, int | None] = {name: getattr(body.specsot, name, None) for name in _LIMITS}
    values["max_new_tokens"] = next((count for count in wanted_tokens if count is not None), None)
    values["default_new_tokens"] = body.granted
    return params.Limits(**{name: count for name, count in values.items() if count is not None})


def copies_of(ask: params.Ask, body: Asking) -> list[params.Ask]:
    """Return `n` copies of a request, one if the body names no number, with consecutive seeds if the caller
    named one.

        # seed 7, n 3 -> seeds 7, 8, 9; without a seed, the master draws one for each copy

    ask: the request of which copies are made.
    body: the parsed body, with `n`.
    """
    seed = ask.seed
    return [ask.seeded(None if seed is None else (seed + n) % SEED_BOUND) for n in range(body.n or 1)]


def common_fields(body: Asking, mode: params.Mode) -> dict[str, Any]:
    """Return the fields of Ask that every body may set, by name. A form, pruning or `head_aware` makes the
    answer direct unless `specsot` names a mode; `polish` makes the default mode auto. Fields that the body
    leaves out are left out, or have the value that means nothing.

    body: the parsed body.
    mode: applies if the body names none, and asks for nothing that rules out a plan.

    Raises InvalidRequest for values that are not served.
    """
    planning = body.specsot or Planning()
    form = form_of(body)
    given = {name: getattr(planning, name) for name in _GIVEN}
    unnamed: params.Mode = "auto" if planning.polish else mode
    return {
        "form": form,
        "mode": "direct" if form or planning.pruning or planning.head_aware else unnamed,
        "model": body.model or "",
        "sampling": sampling_of(body),
        "stop": (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        "tools": tuple(planning.tools or ()),
        "seed": seed_of(body.seed),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "window": planning.window and params.Window(**planning.window.model_dump(exclude_none=True)),
        "pruning": planning.pruning and params.Pruning(**planning.pruning.model_dump(exclude_none=True)),
        **{name: value for name, value in given.items() if value is not None},
        **{name: value for name in _ENDS if (value := getattr(body, name)) is not None},
    }


def seed_of(seed: int | None) -> int | None:
    """Return the seed, folded into what a signed 64-bit integer holds. Return None for no seed and for a
    negative one, so that the master draws one.

    seed: the caller's seed, or None.
    """
    return None if seed is None or seed < 0 else seed % SEED_BOUND


def sampling_of(body: Asking) -> params.Sampling:
    """Return a body's sampling parameters; those that the body leaves out have the defaults of `Sampling`. A
    negative `top_k` means no limit, as 0 does.

    body: the parsed body.

    Raises InvalidRequest for values out of range.
    """
    given: dict[str, Any] = {name: getattr(body, name) for name in _SAMPLING}
    # Some clients send -1 for no limit, which is 0 here.
    top_k = None if body.top_k is None else max(body.top_k, 0)
    values: dict[str, Any] = given | {"top_k": top_k, "logit_bias": bias_of(body.logit_bias)}
    return params.Sampling(**{name: value for name, value in values.items() if value is not None})


def bias_of(biases: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    """Return the biases as (token id, bias), ascending by id; empty for None. Keys have only decimal digits,
    at most 11.

    biases: what is added to the logits, by token id; the keys of JSON objects are text.

    Raises InvalidRequest for a key that is not a token id.
    """
    for key in biases or {}:
        if not (key.isascii() and key.isdecimal() and len(key) < 12):
            raise InvalidRequest("logit_bias: its keys must be token ids", "logit_bias")
    return tuple(sorted((int(key), float(gain)) for key, gain in (biases or {}).items()))
