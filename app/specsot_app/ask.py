"""From keywords to one request (`Ask`), and from its events to one `Answer`. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specsot.core.skeleton import Point
from specsot.core.view import View
from specsot.errors import InvalidRequest, Unavailable
from specsot.events import Reason, Statistics, TokenLogprobs
from specsot.params import (
    FORM_KINDS,
    Ask,
    Form,
    FormKind,
    Limits,
    Message,
    Pruning,
    Sampling,
    Window,
    brief,
    refuse,
)

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)
LIMITS = ("max_new_tokens", "max_branch_tokens", "max_skeleton_tokens", "max_parallel")
WINDOW = ("sinks", "recent")
PRUNING = ("keep_ratio", "prune_every", "skip_layers")
REQUEST = (
    "model",
    "mode",
    "drafter",
    "stop",
    "tools",
    "constraint",
    "seed",
    "ignore_eos",
    "logprobs",
    "head_aware",
)
OPTIONS: tuple[str, ...] = SAMPLING + LIMITS + WINDOW + PRUNING + REQUEST + FORM_KINDS

Turns = Sequence[Message | Mapping[str, str]]


def ask_of(prompt: str | Turns, **options: Any) -> Ask:
    """One request; options that are None are left at their defaults.

    prompt: the question, or the turns of a conversation.
    Raises InvalidRequest: an unknown option, or a value that can never work.
    """
    refuse_unknown(options)
    given = {name: value for name, value in options.items() if value is not None}
    said = {"prompt": prompt} if isinstance(prompt, str) else {"messages": messages_of(prompt)}
    rest = {name: given[name] for name in REQUEST if name in given}
    for name in ("stop", "tools"):
        if name in rest:
            rest[name] = strings_of(rest[name])
    if "logit_bias" in given:
        given["logit_bias"] = biases_of(given["logit_bias"])
    sampling = Sampling(**{name: given[name] for name in SAMPLING if name in given})
    limits = Limits(**{name: given[name] for name in LIMITS if name in given})
    window = {name: given[name] for name in WINDOW if name in given}
    pruning = {name: given[name] for name in PRUNING if name in given}
    return Ask(
        **said,
        **rest,
        sampling=sampling,
        limits=limits,
        form=form_of(given),
        window=Window(**window) if window else None,
        pruning=Pruning(**pruning) if pruning else None,
    )


def form_of(given: Mapping[str, Any]) -> Form | None:
    """What the answer must look like, where something is said of it.

    json_schema: text, or a schema as a mapping. choice: texts. json_object: whether.
    """
    kinds: list[FormKind] = [kind for kind in FORM_KINDS if given.get(kind) not in (None, False)]
    if len(kinds) > 1:
        raise refuse(f"{' and '.join(kinds)} are given; an answer has one form")
    if not kinds:
        return None
    kind, value = kinds[0], given[kinds[0]]
    if kind == "json_object":
        return Form(kind)
    if kind == "json_schema" and not isinstance(value, str):
        value = written_schema(value)
    return Form(kind, tuple(value) if kind == "choice" and is_several(value) else (value,))


def is_several(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str)


def written_schema(schema: Any) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise refuse(f"json_schema is not JSON: {error}") from None


def biases_of(given: Any) -> tuple[tuple[int, float], ...]:
    """{token id: gain}, or "ID=GAIN" as on a command line, one or several; by ascending id."""
    try:
        pairs = given.items() if isinstance(given, Mapping) else map(pair_of, strings_of(given))
        return tuple(sorted((int(token), float(gain)) for token, gain in pairs))
    except (TypeError, ValueError):
        said = brief(given)
        raise InvalidRequest(
            f"logit_bias must be token ids with numbers, such as 42=-1.5, got {said}", field="logit_bias"
        ) from None


def pair_of(written: Any) -> Any:
    """ "42=-1.5" in two; a pair is one already."""
    return written.split("=") if isinstance(written, str) else written


def refuse_unknown(options: Iterable[str]) -> None:
    for name in options:
        if name not in OPTIONS:
            known = ", ".join(sorted(OPTIONS))
            raise InvalidRequest(f"no option is called {name!r}; known: {known}", field=name)


def messages_of(turns: Turns) -> tuple[Message, ...]:
    """Turns as values; a mapping must have `role` and `content`."""
    return tuple(turn if isinstance(turn, Message) else message_of(turn) for turn in turns)


def message_of(turn: Any) -> Message:
    if not isinstance(turn, Mapping) or not {"role", "content"} <= set(turn):
        raise InvalidRequest("every message needs a role and a content", field="messages")
    return Message(turn["role"], turn["content"])


def strings_of(value: str | Iterable[str]) -> tuple[str, ...]:
    """One string or several, as several."""
    return (value,) if isinstance(value, str) else tuple(value)


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
    logprobs: of these tokens, where they were asked for.
    skeleton: the plan as the model wrote it, markers included; empty when none was asked for.
    seed:     what was asked for or drawn; the same seed draws the same answer.
    """

    text: str
    tokens: tuple[int, ...]
    statistics: Statistics
    reason: Reason
    seed: int
    skeleton: str
    branches: tuple[Branch, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()

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
    )


def stats_of(answer: Answer) -> dict[str, Any]:
    """Statistics under the seeds' names beside ours."""
    told = answer.statistics
    return asdict(told) | {
        "tokens": told.completion_tokens,
        "total_tokens": told.completion_tokens,
        "time_ms": told.seconds * 1000,
        "total_time": told.seconds,
        "skeleton_text": answer.skeleton,
        "output_text": answer.text,
    }
