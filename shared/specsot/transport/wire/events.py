"""Schemas of messages between clients and the master: requests, events, the status report."""

from __future__ import annotations

from typing import Any

from specsot import events
from specsot.core import info
from specsot.core.skeleton import Point
from specsot.errors import InvalidRequest
from specsot.params import (
    MAX_MESSAGES,
    MAX_NEW_TOKENS,
    MAX_STOP_IDS,
    MAX_STOPS,
    MAX_TOKENS,
    MAX_TOOLS,
    Ask,
    Limits,
    Message,
    check_length,
)
from specsot.transport.wire.schema import (
    Enumeration,
    FieldCodec,
    OneOf,
    Schema,
    bounded,
    register,
    repeated,
    require,
)
from specsot.transport.wire.values import DRAFTERS, FORM
from specsot.v1 import master_pb2

# Tokens. Bounds an answer, like params.MAX_TOKENS.
MAX_ANSWER_TOKENS = 1 << 20


def check_logprobs(message: Any) -> None:
    """Raise WireError if an event has too many log-probabilities.

    An event covers one step, so it has few tokens and few alternatives of each.

    message: an event with log-probabilities.
    """
    bounded(range(sum(len(one.top) for one in bounded(message.logprobs, "logprobs"))), "candidates")


def check_finished(message: master_pb2.Finished) -> None:
    """Raise WireError if an answer has more than MAX_ANSWER_TOKENS tokens.

    message: the event before it is decoded.
    """
    count = len(message.tokens)
    require(count <= MAX_ANSWER_TOKENS, f"{count} tokens in one answer, {MAX_ANSWER_TOKENS} are allowed")


# "auto", "sot" and "direct" by number.
MODES = Enumeration(master_pb2.Mode.DESCRIPTOR)
# The codecs of requests, events, the status report and the answer to Rebalance.
ASK = Schema(Ask, master_pb2.GenerateRequest, mode=MODES.or_unspecified("auto"), form=FORM)
EVENT = OneOf[events.Event, master_pb2.GenerateEvent](master_pb2.GenerateEvent, "event")
INFO = Schema(info.Info, master_pb2.GetInfoResponse)
REBALANCED = Schema(info.Rebalanced, master_pb2.RebalanceResponse)

register(
    MODES,
    Enumeration(master_pb2.FinishReason.DESCRIPTOR, events.Reason),
    Schema(Message, master_pb2.Message),
    # The master that receives a request applies its own default.
    Schema(Limits, master_pb2.Limits, without=("default_new_tokens",)),
    Schema(events.Forecast, master_pb2.Forecast),
    Schema(events.Started, master_pb2.Started, renamed={"request": "request_id"}),
    Schema(events.Candidate, master_pb2.Candidate),
    Schema(events.TokenLogprobs, master_pb2.TokenLogprobs),
    Schema(events.PromptScored, master_pb2.PromptScored, check_logprobs),
    Schema(events.SkeletonText, master_pb2.SkeletonText, check_logprobs),
    Schema(Point, master_pb2.Point, needs=repeated(FieldCodec(), "needs")),
    Schema(events.Planned, master_pb2.Planned),
    Schema(events.BranchStarted, master_pb2.BranchStarted),
    Schema(events.BranchText, master_pb2.BranchText, check_logprobs),
    Schema(events.BranchFinished, master_pb2.BranchFinished),
    Schema(events.MergedText, master_pb2.MergedText, check_logprobs),
    Schema(
        events.Statistics,
        master_pb2.Statistics,
        phases=FieldCodec(decode=lambda phases: dict(bounded(phases, "phases"))),
    ),
    Schema(events.Finished, master_pb2.Finished, check_finished),
    Schema(info.ModelInfo, master_pb2.Model),
    Schema(info.MemberInfo, master_pb2.Member),
    Schema(info.PagesInfo, master_pb2.Pages),
    Schema(info.StepsInfo, master_pb2.Steps),
    Schema(
        info.RequestsInfo,
        master_pb2.Requests,
        ended=FieldCodec(dict, lambda ended: tuple(sorted(bounded(ended, "reasons").items()))),
    ),
    Schema(info.ReplicaInfo, master_pb2.Replica),
)


def encode_ask(ask: Ask, request_id: str = "") -> master_pb2.GenerateRequest:
    """Return the message of a request. All fields are set, so that the client's defaults apply.

    ask: the request.
    request_id: id of the request. Empty: the master chooses one.
    """
    request = ASK.encode(ask)
    request.request_id = request_id
    return request


def decode_ask(request: master_pb2.GenerateRequest, context_tokens: int = MAX_TOKENS + 1) -> Ask:
    """Return the request of a message. Unset fields have the defaults of `specsot.params`.

    request: the message as the client sent it.
    context_tokens: length of the model's context in tokens. A prompt that cannot fit is rejected before it is
        decoded.

    Raises InvalidRequest, which names the field.

    Rejected are also unknown numbers of `mode` and `drafter`, and lists that are too long. A `mode` of 0
    becomes "auto".
    """
    _check_sizes(request, context_tokens)
    for field, number, enumeration in (("mode", request.mode, MODES), ("drafter", request.drafter, DRAFTERS)):
        if number and number not in enumeration.values:
            raise InvalidRequest(f"{field} {number} is unknown", field)
    return ASK.decode(request)


def _check_sizes(request: master_pb2.GenerateRequest, context_tokens: int) -> None:
    """Raise InvalidRequest, which names the field, if a prompt is too long for the model, or if a list has
    more entries than allowed: messages, stop texts, tools, or stop tokens. Each entry would take only a byte
    or two of the message. Otherwise return None.

    request: the message as the client sent it.
    context_tokens: length of the model's context in tokens. With a window, a prompt may be longer.
    """
    max_prompt_tokens = MAX_TOKENS if request.HasField("window") else context_tokens
    completion = request.limits.max_new_tokens or MAX_NEW_TOKENS
    check_length(max_prompt_tokens, len(request.tokens), len(request.prompt), completion)
    bounds = {"messages": MAX_MESSAGES, "stop": MAX_STOPS, "tools": MAX_TOOLS, "stop_token_ids": MAX_STOP_IDS}
    for name, max_count in bounds.items():
        if (count := len(getattr(request, name))) > max_count:
            raise InvalidRequest(f"{name} must be at most {max_count}, got {count}", name)


def resumes(request: master_pb2.GenerateRequest) -> bool:
    """Return whether a message resumes reading a known request instead of making a new one.

    request: the message as the client sent it.

    Raises InvalidRequest if `resume_from` is set without a `request_id`.

    A message resumes if it has an id, and either a `resume_from` above 0 or no prompt.
    """
    if request.resume_from and not request.request_id:
        raise InvalidRequest("resume_from needs a request_id", field="request_id")
    return bool(request.request_id) and (request.resume_from > 0 or not has_prompt(request))


def has_prompt(request: master_pb2.GenerateRequest) -> bool:
    """Return whether a message contains a prompt of any kind.

    request: the message as the client sent it.
    """
    return request.HasField("prompt") or bool(request.messages) or bool(request.tokens)


def encode_event(numbered: events.Numbered) -> master_pb2.GenerateEvent:
    """Return the message of an event.

    `MergedText`, which most events are, is encoded without its schema, which takes three times as long.

    numbered: the event with its number in the request's stream.

    Raises WireError for a value that is no event.
    """
    event = numbered.event
    if isinstance(event, events.MergedText) and not event.logprobs:
        message = master_pb2.GenerateEvent()
        merged_text = message.merged_text
        merged_text.offset = event.offset
        merged_text.text = event.text
        merged_text.step_tokens = event.step_tokens
    else:
        message = EVENT.encode(event)
    message.number = numbered.number
    return message


def decode_event(message: master_pb2.GenerateEvent) -> events.Numbered:
    """Return the event of a message. Raises WireError if it is unknown or invalid.

    message: the event as the master sent it.
    """
    return events.Numbered(message.number, EVENT.decode(message))
