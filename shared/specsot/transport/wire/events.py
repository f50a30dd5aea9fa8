"""A client's request and its events on the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message as Proto

from specsot.core.skeleton import Point
from specsot.errors import InvalidRequest
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
from specsot.params import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOKENS,
    MAX_TOOLS,
    Ask,
    Limits,
    Message,
    Mode,
    check_length,
)
from specsot.transport.wire.values import (
    DRAFTERS,
    chosen,
    decode_form,
    decode_pruning,
    decode_sampling,
    decode_window,
    encode_drafter,
    encode_form,
    encode_pruning,
    encode_sampling,
    encode_window,
    few,
    known,
    require,
)
from specsot.v1 import master_pb2

T = TypeVar("T")

MODE_NUMBERS: dict[str, master_pb2.Mode] = {
    "auto": master_pb2.MODE_AUTO,
    "sot": master_pb2.MODE_SOT,
    "direct": master_pb2.MODE_DIRECT,
}
PLAIN = ("constraint", "seed", "ignore_eos", "logprobs", "priority", "resumable", "head_aware")
MODES: dict[int, Mode] = {
    master_pb2.MODE_AUTO: "auto",
    master_pb2.MODE_SOT: "sot",
    master_pb2.MODE_DIRECT: "direct",
}


def encode_ask(ask: Ask, request_id: str = "") -> master_pb2.GenerateRequest:
    """Every field is set: what the caller sees as a default is what the master hears."""
    return master_pb2.GenerateRequest(
        prompt=ask.prompt,
        messages=(master_pb2.Message(role=m.role, content=m.content) for m in ask.messages),
        tokens=ask.tokens,
        model=ask.model,
        mode=MODE_NUMBERS[ask.mode],
        drafter=encode_drafter(ask.drafter),
        sampling=encode_sampling(ask.sampling),
        limits=encode_limits(ask.limits),
        stop=ask.stop,
        tools=ask.tools,
        constraint=ask.constraint,
        seed=ask.seed,
        ignore_eos=ask.ignore_eos,
        logprobs=ask.logprobs,
        request_id=request_id,
        priority=ask.priority,
        resumable=ask.resumable,
        form=encode_form(ask.form),
        window=encode_window(ask.window),
        pruning=encode_pruning(ask.pruning),
        head_aware=ask.head_aware,
    )


def decode_ask(request: master_pb2.GenerateRequest, positions: int = MAX_TOKENS + 1) -> Ask:
    """Unset fields have the defaults of specsot.params. Raises InvalidRequest with the field's name.

    positions: the model's context; what cannot fit it is refused before it is read.
    """
    _check_sizes(request, positions)
    return Ask(
        prompt=request.prompt if request.HasField("prompt") else None,
        messages=decode_messages(request.messages),
        tokens=tuple(request.tokens),
        model=request.model,
        mode=named_choice(MODES, request.mode, "mode"),
        drafter=named_choice(DRAFTERS, request.drafter, "drafter") if request.drafter else None,
        sampling=decode_sampling(request.sampling),
        limits=Limits(**given_fields(request.limits)),
        stop=tuple(request.stop),
        tools=tuple(request.tools),
        form=decode_form(request.form) if request.HasField("form") else None,
        window=decode_window(request.window) if request.HasField("window") else None,
        pruning=decode_pruning(request.pruning) if request.HasField("pruning") else None,
        **given_fields(request, *PLAIN),
    )


def _check_sizes(request: master_pb2.GenerateRequest, positions: int) -> None:
    """Parts of a message that take a byte or two each, by their number. Raises InvalidRequest."""
    reach = MAX_TOKENS if request.HasField("window") else positions
    completion = request.limits.max_new_tokens or Limits().max_new_tokens
    check_length(reach, len(request.tokens), len(request.prompt), completion)
    for name, most in (("messages", MAX_MESSAGES), ("stop", MAX_STOPS), ("tools", MAX_TOOLS)):
        if (count := len(getattr(request, name))) > most:
            raise InvalidRequest(f"{name} must be at most {most}, got {count}", name)


def decode_messages(messages: Sequence[master_pb2.Message]) -> tuple[Message, ...]:
    return tuple(Message(message.role, message.content) for message in messages)


def resumes(request: master_pb2.GenerateRequest) -> bool:
    """It reads on in a request that is known, rather than asking for something. Raises InvalidRequest."""
    if request.resume_offset and not request.request_id:
        raise InvalidRequest("resume_offset needs a request_id", field="request_id")
    return bool(request.request_id) and (request.resume_offset > 0 or not has_words(request))


def has_words(request: master_pb2.GenerateRequest) -> bool:
    """There is something to answer in it."""
    return request.HasField("prompt") or bool(request.messages) or bool(request.tokens)


def encode_limits(limits: Limits) -> master_pb2.Limits:
    return master_pb2.Limits(
        max_new_tokens=limits.max_new_tokens,
        max_branch_tokens=limits.max_branch_tokens,
        max_skeleton_tokens=limits.max_skeleton_tokens,
        max_parallel=limits.max_parallel,
    )


def named_choice(table: dict[int, T], number: int, field: str) -> T:
    """What an enum number stands for; unspecified stands for the first, which is the default."""
    if number == 0:
        return next(iter(table.values()))
    if number not in table:
        raise InvalidRequest(f"{field} {number} is unknown", field=field)
    return table[number]


def given_fields(message: Proto, *names: str) -> dict[str, Any]:
    """The fields that are set: of these names, or all."""
    fields = message.ListFields()
    return {field.name: value for field, value in fields if not names or field.name in names}


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
