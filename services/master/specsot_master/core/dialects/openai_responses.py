"""Client events as OpenAI's response objects: chunks and whole choices of chat and text completions."""

from __future__ import annotations

import dataclasses
import json
import math
from codecs import getincrementaldecoder
from dataclasses import dataclass, field
from typing import Any

from specsot import events
from specsot.core.event_json import line_of
from specsot.core.view import Panel, View
from specsot.errors import SpecsotError

# Logprob. Stands for minus infinity, which JSON cannot hold. Precedent: OpenAI's API, -9999.0.
MIN_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class Thought:
    """A part of what the model thinks before it answers, in the place of an event.

    text: the new text; "" if this part only counts tokens.
    tokens: the number of all tokens of the thought, with its last part; else 0.
    """

    text: str
    tokens: int = 0


@dataclass(slots=True)
class ChoiceDelta:
    """What one event of an answer adds to a choice of the response. Not frozen, because a frozen object takes
    three times as long to make.

    text: new text of the answer; "" if there is none.
    thought: new text of the thought before the answer; "" if there is none.
    logprobs: logprobs of the new tokens; None if the client asked for none.
    reason: the finish_reason of the choice, with its last delta only; else None.
    stop: the stop string, or the id of the stop token, that ended the answer; None if neither did.
    calls: new parts of tool calls, as members of `tool_calls`; empty if there are none.
    begins: True for the first delta of a choice.
    extra: the event itself as JSON values, for clients that asked to see branches; else None.
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
        """True if the client must receive this delta. It is False, for example, while the name of a
        tool call is incomplete.
        """
        has_content = self.begins or self.text or self.thought or self.calls or self.logprobs or self.extra
        return bool(has_content) or self.reason is not None


@dataclass(frozen=True, slots=True)
class ChoiceOptions:
    """What the client asked to receive in addition to the text.

    logprobs: True to send logprobs.
    planning: True if the request has the `specsot` field, so that the response gets one.
    branches: True to send the events of plans and branches.
    plan: True to send the plan as a thought.
    special: ids of special tokens, which texts may leave out.
    """

    logprobs: bool = False
    planning: bool = False
    branches: bool = False
    plan: bool = False
    special: frozenset[int] = frozenset()


def delta_of(numbered: events.Numbered | Thought, options: ChoiceOptions) -> ChoiceDelta | None:
    """Return what an event adds to a choice, or None if the client receives nothing for it. A part of a
    thought without text gives None. The text of a plan is a thought if the client asked for the plan.
    Logprobs of answer text are left out unless the client asked for them; those of a scored prompt are always
    sent. All other events give a delta only for a client that asked for branches.

    numbered: an event of the answer, or a part of its thinking.
    options: what the client asked to receive.

    Raises SpecsotError, as `finish_reason` does.
    """
    if isinstance(numbered, Thought):
        return ChoiceDelta(thought=numbered.text) if numbered.text else None
    event = numbered.event
    extra = _extra_of(numbered, options)
    match event:
        case events.Started():
            return ChoiceDelta(begins=True, extra=extra)
        case events.MergedText():
            logprobs = event.logprobs if options.logprobs else None
            return ChoiceDelta(event.text, logprobs=logprobs, extra=extra)
        case events.SkeletonText() if options.plan:
            return ChoiceDelta(thought=event.text, extra=extra)
        case events.PromptScored():
            return ChoiceDelta(logprobs=event.logprobs)
        case events.Finished():
            reason = finish_reason(event)
            return ChoiceDelta(reason=reason, stop=event.stop_reason, extra=extra)
        case _:
            return ChoiceDelta(extra=extra) if extra else None


def unwritten(event: events.Event) -> events.Event | None:
    """Return the event for an answer of which no text is sent; None for an event that only carries text. A
    Finished event counts no tokens, and ends with LENGTH instead of STOP. Its text and logprobs are empty,
    and completion_tokens and merged_tokens are 0. All other events are returned unchanged.

    event: an event of the answer.
    """
    if not isinstance(event, events.Finished):
        return None if isinstance(event, events.MergedText) else event
    figures = dataclasses.replace(event.statistics, completion_tokens=0, merged_tokens=0)
    reason = events.Reason.LENGTH if event.reason is events.Reason.STOP else event.reason
    return events.Finished(reason, "", (), figures)


@dataclass(slots=True)
class UsageCount:
    """Counts the tokens of one API call: each prompt once, and everything that was written for all answers.

    prompts: number of prompt tokens, by the number of the prompt in the call.
    completion: number of written tokens, thoughts included.
    thoughts: number of tokens of thoughts, which `completion` counts too.
    plans: number of tokens of plans, which `completion` counts too.
    headings: number of tokens of headings, which `completion` counts too.
    discarded: number of tokens that no answer uses, in addition to the written ones.
    cached: number of cached prompt tokens, by the number of the prompt in the call.
    """

    prompts: dict[int, int] = field(default_factory=dict[int, int])
    completion: int = 0
    thoughts: int = 0
    plans: int = 0
    headings: int = 0
    discarded: int = 0
    cached: dict[int, int] = field(default_factory=dict[int, int])

    def count(self, prompt: int, event: events.Event | Thought) -> None:
        """Count one event of the call; an event that carries no counts is ignored. A repeated start of a
        prompt replaces its tokens; of the cached tokens of several answers to a prompt, the most count.

        prompt: the number of the prompt within the call to which the event's answer belongs.
        event: an event of the answer, or a part of its thinking.
        """
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
            self.discarded += figures.discarded_tokens
            self.cached[prompt] = max(self.cached.get(prompt, 0), figures.cached_tokens)

    def as_json(self) -> dict[str, Any]:
        """Return the `usage` object of chat completions; all its counts are 0 before the first event. Tokens
        of plans count as reasoning, too. Discarded tokens are not part of the completion.
        """
        prompt = sum(self.prompts.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion,
            "total_tokens": prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
            "completion_tokens_details": {
                # OpenAI's name for tokens that the content does not show.
                "reasoning_tokens": self.thoughts + self.plans,
                "plan_tokens": self.plans,
                "heading_tokens": self.headings,
                "discarded_tokens": self.discarded,
            },
        }


def finish_reason(finished: events.Finished) -> str:
    """Return OpenAI's finish_reason. `abort` is vLLM's value, `error` is this project's own. STOP gives
    "stop", LENGTH gives "length", CANCELLED gives "abort", and every other reason gives "error" if there is
    some text.

    finished: the last event of the answer.

    Raises SpecsotError if the request failed without any text.
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


def planning_of(view: View, options: ChoiceOptions) -> dict[str, Any]:
    """Return the `specsot` field of a whole choice: its mode, decision, seed and statistics, the forecast if
    one was made, and the branches if the client asked for them. The branches come with the plan's text, as
    `skeleton`.

    view: the answer as the events so far describe it; it is finished.
    options: what the client asked to receive.
    """
    assert view.started is not None
    assert view.finished is not None
    figures = view.finished.statistics
    field: dict[str, Any] = {
        "mode": figures.mode,
        "decision": figures.decision,
        "seed": view.started.seed,
        "statistics": dataclasses.asdict(figures),
    }
    if view.started.forecast:
        field["forecast"] = dataclasses.asdict(view.started.forecast)
    if options.branches:
        field |= {"skeleton": view.skeleton, "branches": [_branch_of(panel) for panel in view.panels]}
    return field


def _branch_of(panel: Panel) -> dict[str, Any]:
    """Return one branch of a plan for the `specsot` field: its point, its text, and its reason, which is None
    if it has not ended. The number of its tokens is a member, too.

    panel: the branch as the events so far describe it.
    """
    point = dataclasses.asdict(panel.point)
    written = {"text": panel.text, "tokens": panel.tokens, "reason": panel.reason and panel.reason.value}
    return point | written


def _extra_of(numbered: events.Numbered, options: ChoiceOptions) -> dict[str, Any] | None:
    """Return an event as JSON values for a client that asked for branches, without the text that the chunk
    carries anyway. Return None if the client does not receive it. Clients with the `specsot` field always
    receive the end, and a start that has a forecast. Text, token ids and logprobs of an answer's text, and of
    its end, are left out.

    numbered: an event of the answer, with its number.
    options: what the client asked to receive.
    """
    event = numbered.event
    always = isinstance(event, events.Finished) or (isinstance(event, events.Started) and event.forecast)
    if not (options.branches or (options.planning and always)):
        return None
    event_json: dict[str, Any] = json.loads(line_of(numbered))
    if not isinstance(event, events.MergedText | events.Finished):
        return event_json
    return {name: event_json[name] for name in event_json if name not in ("text", "tokens", "logprobs")}


@dataclass(frozen=True, slots=True)
class Dialect:
    """The names of one OpenAI endpoint's JSON objects.

    prefix: the prefix of the ids of its responses.
    whole: the value of `object` in a whole answer.
    chunk: the value of `object` in a chunk.
    """

    prefix: str
    whole: str
    chunk: str


# The objects of chat completions.
CHAT = Dialect("chatcmpl-", "chat.completion", "chat.completion.chunk")
# The objects of text completions, whose chunks have the same name as whole answers.
TEXT = Dialect("cmpl-", "text_completion", "text_completion")


def chunk_of(dialect: Dialect, index: int, piece: ChoiceDelta, offsets: TextOffsets) -> dict[str, Any]:
    """Return one choice of a chunk, in the endpoint's format. Members without a value in this chunk are left
    out, but for `logprobs` and `finish_reason`, which are then None. `stop_reason` is present only with a
    finish_reason, and `specsot` only if the delta has an event for it.

    dialect: the endpoint's format.
    index: the index of the choice.
    piece: what the chunk adds to the choice.
    offsets: the position in the text after all chunks before this one; it is advanced.
    """
    if dialect is CHAT:
        role = {"role": "assistant", "content": ""} if piece.begins else {}
        delta = role | ({"reasoning_content": piece.thought} if piece.thought else {})
        delta |= {"content": piece.text} if piece.text else {}
        added: dict[str, Any] = {"delta": delta | ({"tool_calls": list(piece.calls)} if piece.calls else {})}
    else:
        added = {"text": piece.text}
    chunk = {"index": index, **added, "logprobs": None, "finish_reason": piece.reason}
    if piece.reason is not None:
        chunk["stop_reason"] = piece.stop
    if piece.logprobs is not None:
        chunk["logprobs"] = _logprobs_of(dialect, piece.text, piece.logprobs, offsets)
    return chunk | ({"specsot": piece.extra} if piece.extra else {})


def choice_of(
    dialect: Dialect, index: int, view: View, options: ChoiceOptions, thought: str = ""
) -> dict[str, Any]:
    """Return one choice of a whole answer, in the endpoint's format. The thought is followed by the plan's
    text if the client asked for the plan. Logprobs are None unless the client asked for them, and `specsot`
    is present only if the request had that field.

    dialect: the endpoint's format.
    index: the index of the choice.
    view: the answer as the events so far describe it; it must be finished.
    options: what the client asked to receive.
    thought: what the model has thought before the answer; "" for nothing.

    Raises SpecsotError if there is no answer.
    """
    finished = view.finished
    assert finished is not None
    thought += view.skeleton if options.plan else ""
    message = {"role": "assistant", "content": finished.text, "refusal": None}
    message |= {"reasoning_content": thought} if thought else {}
    offsets = TextOffsets(options.special)
    choice: dict[str, Any] = {
        "index": index,
        **({"message": message} if dialect is CHAT else {"text": finished.text}),
        "logprobs": _logprobs_of(dialect, finished.text, view.logprobs, offsets)
        if options.logprobs
        else None,
        "finish_reason": finish_reason(finished),
        "stop_reason": finished.stop_reason,
    }
    return choice | ({"specsot": planning_of(view, options)} if options.planning else {})


def _logprobs_of(
    dialect: Dialect, text: str, tokens: tuple[events.TokenLogprobs, ...], offsets: TextOffsets
) -> dict[str, Any]:
    """Return the `logprobs` object in the endpoint's format; its lists are empty if there are no tokens.

    dialect: the endpoint's format.
    text: the text that the tokens added.
    tokens: the tokens with their logprobs.
    offsets: the position in the text before these tokens; it is advanced.
    """
    return chat_logprobs(tokens) if dialect is CHAT else text_logprobs(tokens, offsets.add(text, tokens))


def chat_logprobs(tokens: tuple[events.TokenLogprobs, ...]) -> dict[str, Any]:
    """Return the `logprobs` object of chat completions; its list is empty if there are no tokens.

    tokens: the tokens with their logprobs.
    """
    entries = [
        _chat_candidate(one.chosen) | {"top_logprobs": [_chat_candidate(top) for top in one.top]}
        for one in tokens
    ]
    return {"content": entries, "refusal": None}


def _chat_candidate(candidate: events.Candidate) -> dict[str, Any]:
    """Return one candidate token in the form of chat completions: its text, its logprob of at least
    MIN_LOGPROB, and its bytes as numbers. Bytes that are no whole character are shown as U+FFFD.

    candidate: the token, whose bytes may be only a part of a character.
    """
    raw = candidate.raw
    shown = raw.decode(errors="replace")
    return {"token": shown, "logprob": max(candidate.logprob, MIN_LOGPROB), "bytes": list(raw)}


def text_logprobs(tokens: tuple[events.TokenLogprobs, ...], offsets: list[int]) -> dict[str, Any]:
    """Return the `logprobs` object of text completions: four lists with one entry per token. A prompt's first
    token has None in place of a logprob. The most likely tokens of a position include the chosen one.

    tokens: the tokens with their logprobs.
    offsets: how many characters of the choice precede each token, one number per token.
    """
    return {
        "tokens": [_shown_token(one.chosen) for one in tokens],
        "token_logprobs": [_response_logprob(one) for one in tokens],
        "top_logprobs": [
            None
            if _response_logprob(one) is None
            else {_shown_token(top): max(top.logprob, MIN_LOGPROB) for top in (*one.top, one.chosen)}
            for one in tokens
        ],
        "text_offset": offsets,
    }


def first_of(token: int, raw: bytes) -> events.TokenLogprobs:
    """Return the entry of a prompt's first token. No token precedes it, so its logprob is NaN, which is sent
    as null.

    token: the token's id.
    raw: the token's bytes.
    """
    return events.TokenLogprobs(events.Candidate(token, raw, math.nan))


def _response_logprob(one: events.TokenLogprobs) -> float | None:
    """Return the logprob that is sent for a token, at least MIN_LOGPROB; None if there is none.

    one: the token with its logprobs.
    """
    return None if math.isnan(one.chosen.logprob) else max(one.chosen.logprob, MIN_LOGPROB)


class TextOffsets:
    """Computes where in the text of a choice its tokens begin, while both arrive. A token that continues an
    unfinished character begins where the character does.

        tokens "He", 0xC3, 0xA9, "!" with text "Heé!" -> offsets [0, 2, 2, 3]
    """

    def __init__(self, special: frozenset[int]) -> None:
        """Start at the beginning of a choice.

        special: tokens that the text may leave out. If the text has no room for one, the token takes no
            characters. The same holds for a leading space that the vocabulary adds to the first token.
        """
        self._special = special
        self._text = ""
        self._place = 0
        self._read = getincrementaldecoder("utf-8")(errors="replace")

    def add(self, text: str, tokens: tuple[events.TokenLogprobs, ...]) -> list[int]:
        """Return the offsets of the next tokens, in characters of the choice's text, one per token. A special
        token, or one that the text does not contain at its position, takes no characters if the text has left
        it out. A leading space of the choice's first token takes no character if the text lacks it.

        text: the text that has been sent since the last call; parts of it may still be held back, so it may
            be shorter than the tokens.
        tokens: the next tokens, in order.
        """
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
    r"""Return a token as text. A token that is only a part of a character is written as OpenAI does:
    "bytes:\xe2\x82". All its bytes are written that way, in hexadecimal digits.

    candidate: the token with its bytes.
    """
    try:
        return candidate.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in candidate.raw)
