"""Events as OpenAI's response objects: chunks and whole choices of chat and text completions."""

from __future__ import annotations

import dataclasses
import math
from codecs import getincrementaldecoder
from dataclasses import dataclass, field
from typing import Any

from specsot import events
from specsot.core.event_json import fields_of
from specsot.core.view import Panel, View
from specsot.errors import SpecsotError

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot hold; the value OpenAI's API uses


@dataclass(frozen=True, slots=True)
class Thought:
    """What a model thinks before it answers. tokens: that it took, told at its end."""

    text: str
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What one event adds to a choice. thought: before all.

    logprobs: None where nobody asked. calls: what is new of functions that are called. extra:
    the event itself, for those who want to see branches.
    """

    text: str = ""
    thought: str = ""
    logprobs: tuple[events.TokenLogprobs, ...] | None = None
    reason: str | None = None
    stop: str | int | None = None
    calls: tuple[dict[str, Any], ...] = ()
    begins: bool = False
    extra: dict[str, Any] | None = None

    @property
    def says_something(self) -> bool:
        """Not so where a call has begun whose name is not known yet."""
        told = self.begins or self.text or self.thought or self.calls or self.logprobs or self.extra
        return bool(told) or self.reason is not None


@dataclass(frozen=True, slots=True)
class ChoiceOptions:
    """What of a request is told. logprobs: asked for. planning: SpecSoT's own field was there at all.
    plan: the plan is told as a thought. special: tokens that texts may leave out.
    """

    logprobs: bool = False
    planning: bool = False
    branches: bool = False
    plan: bool = False
    special: frozenset[int] = frozenset()


def delta_of(numbered: events.Numbered | Thought, telling: ChoiceOptions) -> ChoiceDelta | None:
    """None for an event that says nothing to this caller. Raises SpecsotError, as `reason_of`."""
    if isinstance(numbered, Thought):
        return ChoiceDelta(thought=numbered.text) if numbered.text else None
    event = numbered.event
    extra = _extra_of(numbered, telling)
    match event:
        case events.Started():
            return ChoiceDelta(begins=True, extra=extra)
        case events.MergedText():
            logprobs = event.logprobs if telling.logprobs else None
            return ChoiceDelta(event.text, logprobs=logprobs, extra=extra)
        case events.SkeletonText() if telling.plan:
            return ChoiceDelta(thought=event.text, extra=extra)
        case events.PromptScored():
            return ChoiceDelta(logprobs=event.logprobs)
        case events.Finished():
            reason = finish_reason(event)
            return ChoiceDelta(reason=reason, stop=event.stop_reason, extra=extra)
        case _:
            return ChoiceDelta(extra=extra) if extra else None


def unwritten(event: events.Event) -> events.Event | None:
    """An event of an answer of which nothing is told but that it is there: None for its text."""
    if not isinstance(event, events.Finished):
        return None if isinstance(event, events.MergedText) else event
    figures = dataclasses.replace(event.statistics, completion_tokens=0, merged_tokens=0)
    reason = events.Reason.LENGTH if event.reason is events.Reason.STOP else event.reason
    return events.Finished(reason, "", (), figures)


@dataclass(slots=True)
class UsageCount:
    """Tokens of one call: each prompt once, and everything that was written for every answer."""

    prompts: dict[int, int] = field(default_factory=dict[int, int])
    completion: int = 0
    thoughts: int = 0
    plans: int = 0
    headings: int = 0
    cached: dict[int, int] = field(default_factory=dict[int, int])

    def count(self, prompt: int, event: events.Event | Thought) -> None:
        """`prompt`: which of the call's prompts the event belongs to."""
        if isinstance(event, Thought):
            self.completion += event.tokens
            self.thoughts += event.tokens
        elif isinstance(event, events.Started):
            self.prompts[prompt] = event.prompt_tokens
        elif isinstance(event, events.Finished):
            figures = event.statistics
            self.completion += figures.completion_tokens
            self.plans += figures.plan_tokens
            self.headings += figures.heading_tokens
            self.cached[prompt] = max(self.cached.get(prompt, 0), figures.cached_tokens)

    def as_json(self) -> dict[str, Any]:
        prompt = sum(self.prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion,
            "total_tokens": prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
            "completion_tokens_details": {
                "reasoning_tokens": self.thoughts + self.plans,  # OpenAI's word for what no content shows
                "plan_tokens": self.plans,
                "heading_tokens": self.headings,
            },
        }


def finish_reason(finished: events.Finished) -> str:
    """OpenAI's finish_reason; `abort` is vLLM's word, `error` ours. Raises SpecsotError where a failure
    left no text at all.
    """
    match finished.reason:
        case events.Reason.STOP | events.Reason.LENGTH:
            return finished.reason.value
        case events.Reason.CANCELLED:
            return "abort"
        case _ if finished.text:
            return "error"
        case _:
            raise SpecsotError("the model could not write this answer")


def planning_of(view: View, telling: ChoiceOptions) -> dict[str, Any]:
    """The `specsot` field of a whole choice."""
    assert view.started is not None
    assert view.finished is not None
    figures = view.finished.statistics
    told: dict[str, Any] = {
        "mode": figures.mode,
        "decision": figures.decision,
        "seed": view.started.seed,
        "statistics": dataclasses.asdict(figures),
    }
    if view.started.forecast:
        told["forecast"] = dataclasses.asdict(view.started.forecast)
    if telling.branches:
        told |= {"skeleton": view.skeleton, "branches": [_branch_of(panel) for panel in view.panels]}
    return told


def _branch_of(panel: Panel) -> dict[str, Any]:
    point = dataclasses.asdict(panel.point)
    written = {"text": panel.text, "tokens": panel.tokens, "reason": panel.reason and panel.reason.value}
    return point | written


def _extra_of(numbered: events.Numbered, telling: ChoiceOptions) -> dict[str, Any] | None:
    """The event for those who asked for branches; without the text that the chunk carries anyway."""
    event = numbered.event
    always = isinstance(event, events.Finished) or (isinstance(event, events.Started) and event.forecast)
    if not (telling.branches or (telling.planning and always)):
        return None
    told = fields_of(numbered)
    if not isinstance(event, events.MergedText | events.Finished):
        return told
    return {name: told[name] for name in told if name not in ("text", "tokens", "logprobs")}


@dataclass(frozen=True, slots=True)
class Dialect:
    """One endpoint's words: what its ids begin with, and the names of a whole answer and of a chunk."""

    prefix: str
    whole: str
    chunk: str


CHAT = Dialect("chatcmpl-", "chat.completion", "chat.completion.chunk")
TEXT = Dialect("cmpl-", "text_completion", "text_completion")


def chunk_of(dialect: Dialect, index: int, piece: ChoiceDelta, offsets: TextOffsets) -> dict[str, Any]:
    """offsets: of what the chunks before this told."""
    if dialect is CHAT:
        begun = {"role": "assistant", "content": ""} if piece.begins else {}
        delta = begun | ({"reasoning_content": piece.thought} if piece.thought else {})
        delta |= {"content": piece.text} if piece.text else {}
        said: dict[str, Any] = {"delta": delta | ({"tool_calls": list(piece.calls)} if piece.calls else {})}
    else:
        said = {"text": piece.text}
    chunk = {"index": index, **said, "logprobs": None, "finish_reason": piece.reason}
    if piece.reason is not None:
        chunk["stop_reason"] = piece.stop
    if piece.logprobs is not None:
        chunk["logprobs"] = _logprobs_of(dialect, piece.text, piece.logprobs, offsets)
    return chunk | ({"specsot": piece.extra} if piece.extra else {})


def choice_of(
    dialect: Dialect, index: int, view: View, telling: ChoiceOptions, thought: str = ""
) -> dict[str, Any]:
    """One choice of a whole answer. Raises SpecsotError where there is none."""
    finished = view.finished
    assert finished is not None
    thought += view.skeleton if telling.plan else ""
    message = {"role": "assistant", "content": finished.text, "refusal": None}
    message |= {"reasoning_content": thought} if thought else {}
    offsets = TextOffsets(telling.special)
    choice: dict[str, Any] = {
        "index": index,
        **({"message": message} if dialect is CHAT else {"text": finished.text}),
        "logprobs": _logprobs_of(dialect, finished.text, view.logprobs, offsets)
        if telling.logprobs
        else None,
        "finish_reason": finish_reason(finished),
        "stop_reason": finished.stop_reason,
    }
    return choice | ({"specsot": planning_of(view, telling)} if telling.planning else {})


def _logprobs_of(
    dialect: Dialect, text: str, tokens: tuple[events.TokenLogprobs, ...], offsets: TextOffsets
) -> dict[str, Any]:
    return chat_logprobs(tokens) if dialect is CHAT else text_logprobs(tokens, offsets.add(text, tokens))


def chat_logprobs(tokens: tuple[events.TokenLogprobs, ...]) -> dict[str, Any]:
    told = [
        _chat_candidate(one.chosen) | {"top_logprobs": [_chat_candidate(top) for top in one.top]}
        for one in tokens
    ]
    return {"content": told, "refusal": None}


def _chat_candidate(candidate: events.Candidate) -> dict[str, Any]:
    raw = candidate.raw
    shown = raw.decode(errors="replace")
    return {"token": shown, "logprob": max(candidate.logprob, MIN_LOGPROB), "bytes": list(raw)}


def text_logprobs(tokens: tuple[events.TokenLogprobs, ...], offsets: list[int]) -> dict[str, Any]:
    """Four lists, one entry a token. offsets: characters of the choice before each."""
    return {
        "tokens": [_shown_token(one.chosen) for one in tokens],
        "token_logprobs": [_told_logprob(one) for one in tokens],
        "top_logprobs": [
            None
            if _told_logprob(one) is None
            else {_shown_token(top): max(top.logprob, MIN_LOGPROB) for top in (*one.top, one.chosen)}
            for one in tokens
        ],
        "text_offset": offsets,
    }


def first_of(token: int, raw: bytes) -> events.TokenLogprobs:
    """A prompt's first token, behind nothing."""
    return events.TokenLogprobs(events.Candidate(token, raw, math.nan))


def _told_logprob(one: events.TokenLogprobs) -> float | None:
    return None if math.isnan(one.chosen.logprob) else max(one.chosen.logprob, MIN_LOGPROB)


class TextOffsets:
    """Where in the text of a choice its tokens begin, as both come; one that only goes on with a character
    begins where that does. special: tokens that the text may leave out; then they take no place, nor does a
    space with which a vocabulary begins its texts.
    """

    def __init__(self, special: frozenset[int]) -> None:
        self._special = special
        self._text = ""
        self._place = 0
        self._read = getincrementaldecoder("utf-8")(errors="replace")

    def add(self, text: str, tokens: tuple[events.TokenLogprobs, ...]) -> list[int]:
        """Of the next tokens. Their text may be held back until later."""
        self._text = self._text + text
        places = list[int]()
        for one in tokens:
            places.append(self._place)
            piece = self._read.decode(one.chosen.raw)
            if not self._text.startswith(piece, self._place):
                held = self._place or self._text[:1] in ("", " ")
                first = piece if held else piece.lstrip(" ")
                piece = "" if one.chosen.token in self._special else first
            self._place += len(piece)
        return places


def _shown_token(candidate: events.Candidate) -> str:
    """A token as text; as OpenAI has it, where it is only a part of a character."""
    try:
        return candidate.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in candidate.raw)
