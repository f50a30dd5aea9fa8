"""A request's events on the wire.

Refuses to know streams, tokens' meaning and clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from specsot.core.skeleton import Point
from specsot.events import (
    BranchFinished,
    BranchStarted,
    BranchText,
    Candidate,
    Event,
    Finished,
    MergedText,
    Numbered,
    Planned,
    Reason,
    SkeletonText,
    Started,
    Statistics,
    TokenLogprobs,
)
from specsot.v1 import master_pb2
from specsot.wire.checks import chosen, few, known, require
from specsot.wire.requests import MODE_NUMBERS, MODES

REASON_NUMBERS = {
    Reason.STOP: master_pb2.FINISH_REASON_STOP,
    Reason.LENGTH: master_pb2.FINISH_REASON_LENGTH,
    Reason.CANCELLED: master_pb2.FINISH_REASON_CANCELLED,
    Reason.FAILED: master_pb2.FINISH_REASON_FAILED,
    Reason.PARENT_FAILED: master_pb2.FINISH_REASON_PARENT_FAILED,
}
MOST_TOKENS = 1 << 20  # of one answer

REASONS = {int(number): reason for reason, number in REASON_NUMBERS.items()}


def encode_event(numbered: Numbered) -> master_pb2.GenerateEvent:
    name, encode = _ENCODERS[type(numbered.event)]
    return master_pb2.GenerateEvent(offset=numbered.offset, **{name: encode(numbered.event)})


def decode_event(message: master_pb2.GenerateEvent) -> Numbered:
    """Raises WireError."""
    name = chosen(message, "event")
    event = _DECODERS[name](getattr(message, name))
    return Numbered(message.offset, event)


def encode_started(event: Started) -> master_pb2.Started:
    return master_pb2.Started(
        request_id=event.request,
        model=event.model,
        mode=MODE_NUMBERS[event.mode],
        seed=event.seed,
        prompt_tokens=event.prompt_tokens,
    )


def decode_started(message: master_pb2.Started) -> Started:
    mode = known(MODES, message.mode, "mode")
    return Started(message.request_id, message.model, mode, message.seed, message.prompt_tokens)


def encode_point(point: Point) -> master_pb2.Point:
    return master_pb2.Point(
        id=point.id, length=point.length, tool=point.tool, needs=point.needs, title=point.title
    )


def decode_point(message: master_pb2.Point) -> Point:
    tool = message.tool if message.HasField("tool") else None
    return Point(message.id, message.length, message.title, tool, tuple(few(message.needs, "needs")))


def encode_planned(event: Planned) -> master_pb2.Planned:
    return master_pb2.Planned(points=map(encode_point, event.points))


def decode_planned(message: master_pb2.Planned) -> Planned:
    return Planned(tuple(map(decode_point, few(message.points, "points"))))


def encode_branch_finished(event: BranchFinished) -> master_pb2.BranchFinished:
    return master_pb2.BranchFinished(
        branch=event.branch, reason=REASON_NUMBERS[event.reason], tokens=event.tokens
    )


def decode_branch_finished(message: master_pb2.BranchFinished) -> BranchFinished:
    return BranchFinished(message.branch, known(REASONS, message.reason, "reason"), message.tokens)


def encode_candidate(one: Candidate) -> master_pb2.Candidate:
    return master_pb2.Candidate(token=one.token, raw=one.raw, logprob=one.logprob)


def decode_candidate(message: master_pb2.Candidate) -> Candidate:
    return Candidate(message.token, message.raw, message.logprob)


def encode_logprobs(told: Iterable[TokenLogprobs]) -> Iterator[master_pb2.TokenLogprobs]:
    for one in told:
        chosen, top = encode_candidate(one.chosen), map(encode_candidate, one.top)
        yield master_pb2.TokenLogprobs(chosen=chosen, top=top)


def decode_logprobs(message: Any) -> tuple[TokenLogprobs, ...]:
    """Of a message that has `logprobs`: of one lap, so there are few, and few alternatives of each."""
    few(range(sum(len(one.top) for one in few(message.logprobs, "logprobs"))), "candidates")
    return tuple(
        TokenLogprobs(decode_candidate(one.chosen), tuple(map(decode_candidate, one.top)))
        for one in message.logprobs
    )


def encode_statistics(figures: Statistics) -> master_pb2.Statistics:
    return master_pb2.Statistics(
        mode=MODE_NUMBERS[figures.mode],
        prompt_tokens=figures.prompt_tokens,
        completion_tokens=figures.completion_tokens,
        merged_tokens=figures.merged_tokens,
        seconds=figures.seconds,
        seconds_to_first_token=figures.seconds_to_first_token,
        tokens_per_second=figures.tokens_per_second,
        laps=figures.laps,
        mean_accepted=figures.mean_accepted,
        branches=figures.branches,
        cached_tokens=figures.cached_tokens,
        plan_tokens=figures.plan_tokens,
        heading_tokens=figures.heading_tokens,
        phases=figures.phases,
    )


def decode_statistics(message: master_pb2.Statistics) -> Statistics:
    return Statistics(
        mode=known(MODES, message.mode, "mode"),
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        merged_tokens=message.merged_tokens,
        seconds=message.seconds,
        seconds_to_first_token=message.seconds_to_first_token,
        tokens_per_second=message.tokens_per_second,
        laps=message.laps,
        mean_accepted=message.mean_accepted,
        branches=message.branches,
        cached_tokens=message.cached_tokens,
        plan_tokens=message.plan_tokens,
        heading_tokens=message.heading_tokens,
        phases=dict(few(message.phases, "phases")),
    )


def encode_finished(event: Finished) -> master_pb2.Finished:
    return master_pb2.Finished(
        reason=REASON_NUMBERS[event.reason],
        text=event.text,
        tokens=event.tokens,
        statistics=encode_statistics(event.statistics),
    )


def decode_finished(message: master_pb2.Finished) -> Finished:
    reason = known(REASONS, message.reason, "reason")
    count = len(message.tokens)
    require(count <= MOST_TOKENS, f"{count} tokens in one answer, {MOST_TOKENS} are allowed")
    return Finished(reason, message.text, tuple(message.tokens), decode_statistics(message.statistics))


_ENCODERS: dict[type[Event], tuple[str, Callable[[Any], Any]]] = {
    Started: ("started", encode_started),
    SkeletonText: (
        "skeleton_text",
        lambda e: master_pb2.SkeletonText(text=e.text, logprobs=encode_logprobs(e.logprobs)),
    ),
    Planned: ("planned", encode_planned),
    BranchStarted: (
        "branch_started",
        lambda e: master_pb2.BranchStarted(branch=e.branch, title=e.title, budget=e.budget),
    ),
    BranchText: (
        "branch_text",
        lambda e: master_pb2.BranchText(
            branch=e.branch,
            offset=e.offset,
            text=e.text,
            lap_tokens=e.lap_tokens,
            logprobs=encode_logprobs(e.logprobs),
        ),
    ),
    BranchFinished: ("branch_finished", encode_branch_finished),
    MergedText: (
        "merged_text",
        lambda e: master_pb2.MergedText(
            offset=e.offset,
            text=e.text,
            logprobs=encode_logprobs(e.logprobs),
            lap_tokens=e.lap_tokens,
        ),
    ),
    Finished: ("finished", encode_finished),
}
_DECODERS: dict[str, Callable[[Any], Event]] = {
    "started": decode_started,
    "skeleton_text": lambda m: SkeletonText(m.text, decode_logprobs(m)),
    "planned": decode_planned,
    "branch_started": lambda m: BranchStarted(m.branch, m.title, m.budget),
    "branch_text": lambda m: BranchText(m.branch, m.offset, m.text, m.lap_tokens, decode_logprobs(m)),
    "branch_finished": decode_branch_finished,
    "merged_text": lambda m: MergedText(m.offset, m.text, decode_logprobs(m), m.lap_tokens),
    "finished": decode_finished,
}
