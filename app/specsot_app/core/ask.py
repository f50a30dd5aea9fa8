"""Turns keyword options into one request (`Ask`) and its events into one `Answer`; holds the
presets. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal, cast

from specsot import params
from specsot.core.skeleton import Point
from specsot.core.view import View
from specsot.errors import InvalidRequest, Unavailable
from specsot.events import Reason, Statistics, TokenLogprobs
from specsot.service.option_table import SECONDS, Tier, option


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of a request. None leaves a value to the master."""

    HEADING: ClassVar[str] = "Request"
    TIER: ClassVar[Tier] = "expert"

    mode: params.Mode = option(
        "auto",
        "`auto`: the question decides; `sot`: write a plan, then its points; `direct`: no plan.",
        tier="common",
    )
    max_new_tokens: int | None = option(
        None,
        "Maximum number of tokens generated: plan, headings and branches together.",
        tier="common",
        unset="1024, or what the context holds",
    )
    max_branch_tokens: int | None = option(None, "Maximum number of tokens in one branch.")
    max_skeleton_tokens: int | None = option(None, "Maximum number of tokens in a plan.", keyword_only=True)
    max_parallel: int | None = option(None, "Maximum number of branches written at once.", unset="8")
    stop: tuple[str, ...] = option((), "Text that ends a branch.")
    constraint: bool = option(True, "Constrain the plan to its grammar.", paired=True)
    finish_within_s: float | None = option(
        None,
        "Finish the answer within this many seconds, its last sentence complete.",
        flag="finish-within",
        kind=SECONDS,
    )
    polish: bool = option(
        False, "Then rewrite what the branches wrote as one text; half of the tokens are reserved for it."
    )
    model: str | None = option(None, "Name of the model to ask.", keyword_only=True)
    drafter: params.DrafterName | None = option(None, "What drafts.", keyword_only=True)
    tools: tuple[str, ...] = option((), "Names that a plan may use.", keyword_only=True)
    ignore_eos: bool = option(False, "Continue after an end token.")
    min_tokens: int = option(0, "No end before so many tokens.", keyword_only=True)
    stop_token_ids: tuple[int, ...] = option((), "Further tokens that end a branch.", keyword_only=True)
    include_stop_str_in_output: bool = option(
        False, "Keep the stop string, or the end token's text.", keyword_only=True
    )
    skip_special_tokens: bool = option(True, "Leave special tokens out of the text.", keyword_only=True)
    prompt_logprobs: int | None = option(
        None, "Log-probabilities of the prompt's tokens, too.", keyword_only=True
    )


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Options of sampling. None leaves a value to the master."""

    HEADING: ClassVar[str] = "Sampling"
    TIER: ClassVar[Tier] = "expert"

    temperature: float | None = option(
        None,
        "Sampling temperature; 0 takes the most likely token.",
        tier="common",
        unset="0",
    )
    top_p: float | None = option(
        None, "Sample from the most likely tokens that reach this probability mass.", unset="1"
    )
    top_k: int | None = option(None, "Sample from this many most likely tokens; 0 for all.", unset="0")
    min_p: float | None = option(
        None, "Minimum probability, as a share of the most likely token's.", unset="0"
    )
    repetition_penalty: float | None = option(
        None,
        "Divides the logits of tokens in prompt and answer; 1 for none.",
        unset="1",
    )
    presence_penalty: float | None = option(
        None, "Subtracted from the logits of tokens in the answer.", unset="0"
    )
    frequency_penalty: float | None = option(None, "The same, for each occurrence.", unset="0")
    logit_bias: tuple[str, ...] = option((), "ID=VALUE: added to a token's logit.", metavar="ID=VALUE")
    logprobs: int | None = option(
        None, "With --json: log-probabilities of the tokens, and of this many others at each position."
    )
    seed: int | None = option(
        None,
        "Random seed; the same seed gives the same answer, except in 16 bits: rounding depends on drafts.",
        tier="common",
        unset="drawn by the master",
    )


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of the KV policy: which earlier positions are attended to. Without any, all positions are."""

    HEADING: ClassVar[str] = "KV policy"
    TIER: ClassVar[Tier] = "expert"

    sinks: int | None = option(
        None, "Attend only to this many first tokens and to recent ones. [4 with --recent]"
    )
    recent: int | None = option(
        None, "Attend only to this many recent tokens and to the sinks. [508 with --sinks]"
    )
    keep_ratio: float | None = option(
        None, "Pruning: share of its rows that each head keeps, by key norm. [0.8 with the others]"
    )
    prune_every: int | None = option(
        None, "Pruning: number of tokens written between two prunings. [50 with the others]"
    )
    skip_layers: int | None = option(
        None, "Pruning: keep all rows in this many first layers. [2 with the others]"
    )
    head_aware: bool | None = option(
        None,
        "Use the window measured for each attention head (see bench policies); with pruning, the importance.",
    )


@dataclass(frozen=True, slots=True)
class FormOptions:
    """Options of the answer's form; at most one may be given."""

    HEADING: ClassVar[str] = "Form of the answer"
    TIER: ClassVar[Tier] = "expert"

    json_schema: str | None = option(
        None,
        "Answer in JSON that follows this schema: a file, or the schema itself.",
        metavar="SCHEMA",
        tier="common",
    )
    json_object: bool = option(False, "Answer with a JSON object.")
    regex: str | None = option(
        None, "Answer with text that matches this regular expression.", metavar="REGEX"
    )
    choice: tuple[str, ...] = option((), "Answer with one of these texts.")


def asked(*options: object) -> dict[str, Any]:
    """Return the options that have a value, as keywords of `ask_of`; options that are None or () are left
    out.

    False and 0 count as values. If two groups have a field of the same name, the later one is taken.

    options: Dataclasses of options, such as RequestOptions and SamplingOptions.
    """
    given = {
        entry.name: getattr(group, entry.name) for group in options for entry in fields(cast("Any", group))
    }
    return {name: value for name, value in given.items() if value not in (None, ())}


def names_of(kind: type) -> tuple[str, ...]:
    """Return the field names of a dataclass, in their order.

    kind: The dataclass.
    """
    return tuple(entry.name for entry in fields(kind))


# Names of the options that make a `Window`.
WINDOW = ("sinks", "recent")
# Names of the options that make a `Pruning`.
PRUNING = ("keep_ratio", "prune_every", "skip_layers")
# Names of the options that make `Limits`.
LIMITS = ("max_new_tokens", "max_branch_tokens", "max_skeleton_tokens", "max_parallel")
# Names of the options that make a `Sampling`.
SAMPLING = tuple(name for name in names_of(SamplingOptions) if name not in ("logprobs", "seed"))
# Names of the options that are fields of the request itself.
REQUEST = (
    *(name for name in names_of(RequestOptions) if name not in LIMITS),
    *("logprobs", "seed", "head_aware"),
)
# Names of all options of a request.
OPTIONS: tuple[str, ...] = (*SAMPLING, *LIMITS, *WINDOW, *PRUNING, *REQUEST, *params.FORM_KINDS)

# Names of the request's fields that are True or False.
FLAGS = tuple(entry.name for entry in fields(params.Ask) if isinstance(entry.default, bool))

# The messages of a conversation, oldest first.
Turns = Sequence[params.Message | Mapping[str, str]]


def ask_of(prompt: str | Turns, **options: Any) -> params.Ask:
    """Return one request; options that are None are left at their defaults.

    A prompt that is a string, or no iterable, becomes `prompt`; any other iterable becomes `messages`. Flags
    must be True or False, and a single string for `stop`, `tools` or a single number for `stop_token_ids`
    counts as a list of one. A window or a pruning is set only if one of its options is given; the others of
    the group then have their defaults.

    prompt: The question, or the messages of a conversation.
    options: Values by the names in OPTIONS; scalars of NumPy and torch are converted.
    Raises InvalidRequest for an unknown option, or a value that can never work.
    """
    refuse_unknown(options)
    plain = {name: value.item() if is_scalar(value) else value for name, value in options.items()}
    given = {name: value for name, value in plain.items() if value is not None}
    turns = isinstance(prompt, Iterable) and not isinstance(prompt, str)
    question: dict[str, Any] = {"messages": messages_of(prompt)} if turns else {"prompt": prompt}
    fields_of_ask = {name: given[name] for name in REQUEST if name in given}
    for name in FLAGS:
        params.require_field(
            isinstance(fields_of_ask.get(name, True), bool), name, "True or False", fields_of_ask.get(name)
        )
    for name in ("stop", "tools", "stop_token_ids"):
        if name in fields_of_ask:
            fields_of_ask[name] = tuple_of(fields_of_ask[name])
    if "logit_bias" in given:
        given["logit_bias"] = biases_of(given["logit_bias"])
    sampling = params.Sampling(**{name: given[name] for name in SAMPLING if name in given})
    limits = params.Limits(**{name: given[name] for name in LIMITS if name in given})
    window = {name: given[name] for name in WINDOW if name in given}
    pruning = {name: given[name] for name in PRUNING if name in given}
    return params.Ask(
        **question,
        **fields_of_ask,
        sampling=sampling,
        limits=limits,
        form=form_of(given),
        window=params.Window(**window) if window else None,
        pruning=params.Pruning(**pruning) if pruning else None,
    )


def is_scalar(value: Any) -> bool:
    """Return whether a value is a scalar of NumPy or torch, which has an empty shape.

    value: Any value of an option; a plain Python number gives False.
    """
    return getattr(value, "shape", None) == ()


def form_of(given: Mapping[str, Any]) -> params.Form | None:
    """Return the form that the answer must have, or None if no option asks for one.

    A schema that is no text is written as JSON. A single text for `choice` counts as one choice. json_object
    False counts as not given.

    given: Options by name, of which json_schema (text, or a schema as a mapping), json_object (True or
        False), regex (text) and choice (texts) are read.
    Raises InvalidRequest if several forms are given, or a schema is not JSON.
    """
    kinds: list[params.FormKind] = [
        kind for kind in params.FORM_KINDS if given.get(kind) not in (None, False)
    ]
    if len(kinds) > 1:
        raise params.refuse(f"{' and '.join(kinds)} are given; an answer has one form")
    if not kinds:
        return None
    kind = kinds[0]
    value = given[kinds[0]]
    if kind == "json_object":
        return params.Form(kind)
    if kind == "json_schema" and not isinstance(value, str):
        try:
            value = json.dumps(value)
        except (TypeError, ValueError) as error:
            raise params.refuse(f"json_schema is not JSON: {error}") from None
    is_list = kind == "choice" and hasattr(value, "__iter__") and not isinstance(value, str)
    return params.Form(kind, tuple(value) if is_list else (value,))


def biases_of(given: Any) -> tuple[tuple[int, float], ...]:
    """Return (token id, bias) pairs by ascending token id.

    An entry that is no pair, or has no integer and number, raises as well. Duplicate ids are kept.

    given: {token id: bias}, or one or several "ID=BIAS" strings.
    Raises InvalidRequest for anything else.
    """
    try:
        biases: Any = given.items() if isinstance(given, Mapping) else tuple_of(given)
        pairs = (bias.split("=") if isinstance(bias, str) else bias for bias in biases)
        return tuple(sorted((int(token), float(value)) for token, value in pairs))
    except (TypeError, ValueError):
        brief_value = params.brief(given)
        raise InvalidRequest(
            f"logit_bias must be token ids with numbers, such as 42=-1.5, got {brief_value}",
            field="logit_bias",
        ) from None


def refuse_unknown(options: Iterable[str]) -> None:
    """Raise InvalidRequest for the first name that is not in OPTIONS; return if there is none.

    The error lists all known names.

    options: Names of keywords.
    """
    for name in options:
        if name not in OPTIONS:
            known = ", ".join(sorted(OPTIONS))
            raise InvalidRequest(f"no option is called {name!r}; known: {known}", field=name)


def messages_of(turns: Turns) -> tuple[params.Message, ...]:
    """Return the messages of a conversation as `Message` values, in the same order.

    turns: Messages, or mappings with `role` and `content`.
    Raises InvalidRequest for a mapping that lacks one of them.
    """
    return tuple(turn if isinstance(turn, params.Message) else message_of(turn) for turn in turns)


def message_of(turn: Any) -> params.Message:
    """Return a mapping with `role` and `content` as a `Message`.

    turn: One message of a conversation, as the caller gave it.
    Raises InvalidRequest for anything but a mapping that has both.
    """
    if not isinstance(turn, Mapping) or not {"role", "content"} <= set(turn):
        raise InvalidRequest("every message needs a role and a content", field="messages")
    return params.Message(turn["role"], turn["content"])


def tuple_of(value: Any) -> tuple[Any, ...]:
    """Return one value, or an iterable of values, as a tuple. The values are not checked here.

    value: A single value, or an iterable; a string counts as a single value.
    """
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)


@dataclass(frozen=True, slots=True)
class Branch:
    """One point of a plan as it was written.

    point: The point.
    text: The branch's text without the heading.
    tokens: Number of tokens of the branch.
    reason: Reason why the branch ended; None if it had not ended when the request did.
    """

    point: Point
    text: str
    tokens: int
    reason: Reason | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What `SpecSoT.generate` returns.

    text: The merged text.
    tokens: Token ids of the merged text, in order.
    statistics: Statistics of the request: its tokens, steps, seconds and branches.
    reason: Reason why the answer ended.
    seed: The seed that was given or drawn; the same seed gives the same answer (not in 16 bits).
    skeleton: The plan as the model wrote it, markers included; empty if the answer was not planned.
    branches: The points as they were written.
    logprobs: Log-probabilities of the tokens, if they were asked for.
    stop_reason: The stop string or stop token that ended a direct answer; else None.
    prompt_logprobs: Log-probabilities of the prompt's tokens except the first, if they were asked for.
    """

    text: str
    tokens: tuple[int, ...]
    statistics: Statistics
    reason: Reason
    seed: int
    skeleton: str
    branches: tuple[Branch, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    stop_reason: str | int | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def __str__(self) -> str:
        """Return the merged text."""
        return self.text


def answer_of(view: View) -> Answer:
    """Return the answer to a finished request.

    A request that failed gives an answer too, whose `reason` says so.

    view: The state after the last event.
    Raises Unavailable if the stream of events ended before the request did.
    """
    if view.started is None or view.finished is None:
        raise Unavailable("the stream ended before the answer did")
    end = view.finished
    branches = tuple(Branch(panel.point, panel.text, panel.tokens, panel.reason) for panel in view.panels)
    return Answer(
        end.text,
        end.tokens,
        end.statistics,
        end.reason,
        view.started.seed,
        view.skeleton,
        branches,
        view.logprobs,
        end.stop_reason,
        view.prompt_logprobs,
    )


# The names of each mode in the statistics of the projects that this one grew from (docs/migrating.md).
LEGACY_MODES = {"sot": "specsot", "direct": "eagle"}


def stats_of(answer: Answer, tokens: int) -> dict[str, Any]:
    """Return the statistics of an answer as a dict, under our names and under those of the projects that this
    one grew from (docs/migrating.md).

    Times are in milliseconds under "time_ms" and in seconds under "total_time"; "mode" is "specsot" for a
    planned answer and "eagle" for a direct one.

    answer: The answer.
    tokens: Number of tokens that are returned to the caller; it becomes the entry "tokens".
    """
    statistics = answer.statistics
    return asdict(statistics) | {
        "mode": LEGACY_MODES[statistics.mode],
        "tokens": tokens,
        "total_tokens": statistics.completion_tokens,
        "time_ms": statistics.seconds * 1000,
        "total_time": statistics.seconds,
        "skeleton_text": answer.skeleton,
        "output_text": answer.text,
    }


# Names of the presets, see PRESETS.
Preset = Literal["short", "long", "small"]

# Options of KV policies other than a window.
OTHER_POLICIES = (*PRUNING, "head_aware")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a preset sets.

    fleet: Options of what is loaded, and of drafting.
    request: Options of every request.
    """

    fleet: Mapping[str, Any]
    request: Mapping[str, Any] = field(default_factory=dict[str, Any])


# What each preset sets.
PRESETS: Mapping[str, Settings] = {
    "short": Settings({"draft_depth": 5}),
    "long": Settings({"draft_depth": 4}, {"sinks": 4, "recent": 1020}),
    "small": Settings(
        {"draft_depth": 3, "quantization": "int8", "draft_dtype": "fp16"}, {"sinks": 4, "recent": 252}
    ),
}


def fleet_with(preset: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options of a fleet, completed by the preset's.

    preset: Name of a preset; None completes nothing.
    given: Options by name; an option that is None counts as not given.
    Raises InvalidRequest for an unknown preset.
    """
    return _filled(given, settings_of(preset).fleet)


def request_with(preset: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options of a request, completed by the preset's.

    If another KV policy is given, nothing of the preset is used, so that its window is not mixed with that
    policy.

    preset: Name of a preset; None completes nothing.
    given: Options by name; an option that is None counts as not given.
    Raises InvalidRequest for an unknown preset.
    """
    settings = settings_of(preset).request
    has_other_policy = any(
        given.get(name) is not None and given[name] is not False for name in OTHER_POLICIES
    )
    return dict(given) if has_other_policy else _filled(given, settings)


def settings_of(preset: str | None) -> Settings:
    """Return the settings of a preset.

    The error lists the known presets.

    preset: The preset's name; None gives empty settings.
    Raises InvalidRequest for an unknown name.
    """
    if preset is None:
        return Settings({})
    if preset not in PRESETS:
        known = ", ".join(PRESETS)
        raise InvalidRequest(f"preset must be one of {known}, got {preset!r}", field="preset")
    return PRESETS[preset]


def filled(preset: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a command's options, completed by the preset's options of fleet and request. Options that were
    given take precedence over the preset.

    Options that were given as None are filled in. If a KV policy other than a window is given, the preset's
    options of the request are left out.

    preset: Name of a preset.
    given: Values by flag without leading dashes, such as "draft-depth"; the result has the same form.
    Raises InvalidRequest for an unknown preset.
    """
    options = {flag.replace("-", "_"): value for flag, value in given.items()}
    completed = request_with(preset, fleet_with(preset, options))
    return {name.replace("_", "-"): value for name, value in completed.items()}


def _filled(given: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given`, with the preset's values in place of values that are None or absent.

    given: Options by name.
    settings: The preset's options by name.
    """
    return {**given, **{name: value for name, value in settings.items() if given.get(name) is None}}
