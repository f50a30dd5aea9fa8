"""From keywords to one request (`Ask`), and from its events to one `Answer`; presets of both. Pure."""

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
from specsot.service.option_table import SECONDS, Tier, mode_of, option, truth


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request asks for. None: as the master has it."""

    HEADING: ClassVar[str] = "Request"
    TIER: ClassVar[Tier] = "expert"

    mode: params.Mode = option(
        "auto",
        "`auto`: the question decides; `sot`: write a plan, then its points; `direct`: no plan.",
        keywords={"enable_parallel": mode_of},
        tier="common",
    )
    max_new_tokens: int | None = option(
        None,
        "Maximum number of tokens generated: plan, headings and branches together.",
        aliases=("max-tokens", "n-predict"),
        tier="common",
        unset="1024, or what the context holds",
    )
    max_branch_tokens: int | None = option(None, "Maximum number of tokens in one branch.")
    max_skeleton_tokens: int | None = option(None, "Maximum number of tokens in a plan.", keyword_only=True)
    max_parallel: int | None = option(None, "Maximum number of branches written at once.", unset="8")
    stop: tuple[str, ...] = option((), "Text that ends a branch.")
    constraint: bool = option(
        True, "Constrain the plan to its grammar.", keywords={"use_semantic_constraint": truth}, paired=True
    )
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
    """How tokens are drawn. None: as the master has it."""

    HEADING: ClassVar[str] = "Sampling"
    TIER: ClassVar[Tier] = "expert"

    temperature: float | None = option(
        None,
        "Sampling temperature; 0 takes the most likely token.",
        aliases=("temp",),
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
        aliases=("repeat-penalty",),
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
    """Which earlier positions are attended to. Nothing given: all."""

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
    """What the answer must look like; one of them at most."""

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
    """Keywords of `ask_of`: what these say, where they say something."""
    found = {one.name: getattr(said, one.name) for said in options for one in fields(cast("Any", said))}
    return {name: value for name, value in found.items() if value not in (None, ())}


def names_of(kind: type) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind))


WINDOW = ("sinks", "recent")
PRUNING = ("keep_ratio", "prune_every", "skip_layers")
LIMITS = ("max_new_tokens", "max_branch_tokens", "max_skeleton_tokens", "max_parallel")
SAMPLING = tuple(name for name in names_of(SamplingOptions) if name not in ("logprobs", "seed"))
REQUEST = (
    *(name for name in names_of(RequestOptions) if name not in LIMITS),
    *("logprobs", "seed", "head_aware"),
)
OPTIONS: tuple[str, ...] = (*SAMPLING, *LIMITS, *WINDOW, *PRUNING, *REQUEST, *params.FORM_KINDS)

FLAGS = tuple(one.name for one in fields(params.Ask) if isinstance(one.default, bool))

Turns = Sequence[params.Message | Mapping[str, str]]


def ask_of(prompt: str | Turns, **options: Any) -> params.Ask:
    """One request; options that are None are left at their defaults.

    prompt: the question, or the turns of a conversation.
    Raises InvalidRequest: an unknown option, or a value that can never work.
    """
    refuse_unknown(options)
    plain = {name: one.item() if is_scalar(one) else one for name, one in options.items()}
    given = {name: value for name, value in plain.items() if value is not None}
    turns = isinstance(prompt, Iterable) and not isinstance(prompt, str)
    said: dict[str, Any] = {"messages": messages_of(prompt)} if turns else {"prompt": prompt}
    rest = {name: given[name] for name in REQUEST if name in given}
    for name in FLAGS:
        params.require_field(isinstance(rest.get(name, True), bool), name, "True or False", rest.get(name))
    for name in ("stop", "tools"):
        if name in rest:
            rest[name] = strings_of(rest[name])
    if "stop_token_ids" in rest:
        rest["stop_token_ids"] = strings_of(rest["stop_token_ids"])
    if "logit_bias" in given:
        given["logit_bias"] = biases_of(given["logit_bias"])
    sampling = params.Sampling(**{name: given[name] for name in SAMPLING if name in given})
    limits = params.Limits(**{name: given[name] for name in LIMITS if name in given})
    window = {name: given[name] for name in WINDOW if name in given}
    pruning = {name: given[name] for name in PRUNING if name in given}
    return params.Ask(
        **said,
        **rest,
        sampling=sampling,
        limits=limits,
        form=form_of(given),
        window=params.Window(**window) if window else None,
        pruning=params.Pruning(**pruning) if pruning else None,
    )


def is_scalar(value: Any) -> bool:
    """A number as NumPy and torch have it."""
    return getattr(value, "shape", None) == ()


def form_of(given: Mapping[str, Any]) -> params.Form | None:
    """What the answer must look like, where something is said of it.

    json_schema: text, or a schema as a mapping. choice: texts. json_object: whether.
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
    several = kind == "choice" and hasattr(value, "__iter__") and not isinstance(value, str)
    return params.Form(kind, tuple(value) if several else (value,))


def biases_of(given: Any) -> tuple[tuple[int, float], ...]:
    """{token id: gain}, or "ID=GAIN" as on a command line, one or several; by ascending id."""
    try:
        listed: Any = given.items() if isinstance(given, Mapping) else strings_of(given)
        pairs = (one.split("=") if isinstance(one, str) else one for one in listed)
        return tuple(sorted((int(token), float(gain)) for token, gain in pairs))
    except (TypeError, ValueError):
        said = params.brief(given)
        raise InvalidRequest(
            f"logit_bias must be token ids with numbers, such as 42=-1.5, got {said}", field="logit_bias"
        ) from None


def refuse_unknown(options: Iterable[str]) -> None:
    for name in options:
        if name not in OPTIONS:
            known = ", ".join(sorted(OPTIONS))
            raise InvalidRequest(f"no option is called {name!r}; known: {known}", field=name)


def messages_of(turns: Turns) -> tuple[params.Message, ...]:
    """Turns as values; a mapping must have `role` and `content`."""
    return tuple(turn if isinstance(turn, params.Message) else message_of(turn) for turn in turns)


def message_of(turn: Any) -> params.Message:
    if not isinstance(turn, Mapping) or not {"role", "content"} <= set(turn):
        raise InvalidRequest("every message needs a role and a content", field="messages")
    return params.Message(turn["role"], turn["content"])


def strings_of(value: Any) -> tuple[Any, ...]:
    """One, or several; whether they are what they should be is seen later."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)


@dataclass(frozen=True, slots=True)
class Branch:
    """One point as written. `text` is its body without the heading."""

    point: Point
    text: str
    tokens: int
    reason: Reason | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What `SpecSoT.generate` returns.

    tokens:   token ids of the merged text, in order.
    logprobs: of these tokens, where they were asked for. prompt_logprobs: of the prompt's but the first.
    skeleton: the plan as the model wrote it, markers included; empty when none was asked for.
    stop_reason: the stop string or stop token that ended a direct answer; None for anything else.
    seed:     what was asked for or drawn; the same seed draws the same answer (not in 16 bits).
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
        return self.text


def answer_of(view: View) -> Answer:
    """Raises Unavailable when the stream ended before the request did."""
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


LEGACY_MODES = {"sot": "specsot", "direct": "eagle"}


def stats_of(answer: Answer, tokens: int) -> dict[str, Any]:
    """Statistics under the seeds' names beside ours. tokens: that are returned."""
    told = answer.statistics
    return asdict(told) | {
        "mode": LEGACY_MODES[told.mode],
        "tokens": tokens,
        "total_tokens": told.completion_tokens,
        "time_ms": told.seconds * 1000,
        "total_time": told.seconds,
        "skeleton_text": answer.skeleton,
        "output_text": answer.text,
    }


Preset = Literal["short", "long", "small"]

OTHER_POLICIES = (*PRUNING, "head_aware")  # than a window


@dataclass(frozen=True, slots=True)
class Settings:
    """fleet: of what is loaded and how is drafted. request: of every request."""

    fleet: Mapping[str, Any]
    request: Mapping[str, Any] = field(default_factory=dict[str, Any])


PRESETS: Mapping[str, Settings] = {
    "short": Settings({"draft_depth": 5}),
    "long": Settings({"draft_depth": 4}, {"sinks": 4, "recent": 1020}),
    "small": Settings(
        {"draft_depth": 3, "quantization": "int8", "draft_dtype": "fp16"}, {"sinks": 4, "recent": 252}
    ),
}


def fleet_with(preset: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given of a fleet, and the preset's where nothing is. Raises InvalidRequest."""
    return _filled(given, settings_of(preset).fleet)


def request_with(preset: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a request. Another KV policy is given besides the preset's window, and wins as a whole."""
    settings = settings_of(preset).request
    other = any(given.get(name) is not None and given[name] is not False for name in OTHER_POLICIES)
    return dict(given) if other else _filled(given, settings)


def settings_of(preset: str | None) -> Settings:
    """None: nothing is set. Raises InvalidRequest."""
    if preset is None:
        return Settings({})
    if preset not in PRESETS:
        known = ", ".join(PRESETS)
        raise InvalidRequest(f"preset must be one of {known}, got {preset!r}", field="preset")
    return PRESETS[preset]


def filled(preset: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a command is given, by flag, and the preset's of fleet and request where nothing is."""
    named = {flag.replace("-", "_"): value for flag, value in given.items()}
    whole = request_with(preset, fleet_with(preset, named))
    return {name.replace("_", "-"): value for name, value in whole.items()}


def _filled(given: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**given, **{name: value for name, value in settings.items() if given.get(name) is None}}
