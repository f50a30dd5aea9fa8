"""Messages between the engine and its API processes, as MessagePack; events of one step travel together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from specsot import errors, events
from specsot.core.info import ModelInfo
from specsot.events import Event, Numbered
from specsot.params import Ask, Mode, PlanStyle
from specsot.service.options import LogFormat
from specsot_master.core.ring.ring_state import Caller

# --- from the engine to an API process ---


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The first message to an API process: the options by which it serves.

    base: The model's directory.
    vocabulary: The number of token ids that the model has.
    model: Name and limits of the model.
    plan_style: How the model plans, as the options say.
    began: When the master started, in seconds since 1970.
    mode: The mode of requests that name none, from OpenAI's clients.
    ping_every: Seconds of silence in a stream before a ping.
    names: Host names of this server, which are checked if no token is required.
    origins: Origins of web pages that may send requests.
    certificate: The file of the server's certificate; None for plain HTTP.
    key: The file of the certificate's private key; None for plain HTTP.
    token_file: The file of valid client tokens; None for none.
    token: One more valid client token; None for no further one.
    num_processes: How many API processes share the limits of connections and of bodies.
    log_format: How log lines are written.
    log_level: The lowest level of log lines that are written.
    """

    base: str
    vocabulary: int
    model: ModelInfo
    plan_style: PlanStyle
    began: int
    mode: Mode
    ping_every: float
    names: tuple[str, ...]
    origins: tuple[str, ...]
    certificate: str | None
    key: str | None
    token_file: str | None
    token: str | None
    num_processes: int
    log_format: LogFormat
    log_level: str


# What became of one stream: (number of the stream, number of the event, kind of the entry, its contents).
# For TEXT the contents are (offset, text, step_tokens); for END they are None, and for FAILURE those of
# `encode_error`; for any other kind they are the members of an event of the class EVENTS[kind].
Entry = tuple[int, int, int, Any]
# Kinds of entries that are no events: the stream has ended, or has failed.
END: Final = -1
FAILURE: Final = -2
# The classes of events by kind.
EVENTS: Final[tuple[type[Event], ...]] = (
    events.MergedText,
    events.Started,
    events.PromptScored,
    events.SkeletonText,
    events.Planned,
    events.BranchStarted,
    events.BranchText,
    events.BranchFinished,
    events.Finished,
)
_KINDS: Final[dict[type[Event], int]] = {event: kind for kind, event in enumerate(EVENTS)}
# The kind of answer text without log probabilities, which most entries are.
TEXT: Final = len(EVENTS)


class Entries(msgspec.Struct, frozen=True, array_like=True, tag="entries"):
    """All that has become of the streams of one API process since the last message, in order."""

    entries: list[Entry]


class Reply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """The answer to a `Query`.

    number: The number of the query.
    value: The members of a ServingState, or the metrics as bytes.
    """

    number: int
    value: Any


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """The order to end: responses may continue for `grace` seconds."""

    grace: float


# --- from an API process to the engine ---


class ReadyToServe(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The API process takes connections from now on."""


class OpenRequest(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """A new request.

    stream: The number that the API process has given to the request's events.
    ask: What the client asks for.
    caller: Who asks; its prompt is the one that the API process has encoded.
    join_text: True to join pieces of answer text that wait for the client.
    trace: The context that the client sent with its call, or None.
    log_fields: The fields of log lines that name the call.
    """

    stream: int
    ask: Ask
    caller: Caller
    join_text: bool
    trace: str | None
    log_fields: dict[str, str | None]


class CloseRequest(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """The client has gone, or has read enough: the request is cancelled, and its stream ends."""

    stream: int


class PauseStream(msgspec.Struct, frozen=True, array_like=True, tag="pause"):
    """Pause a stream, or let it continue.

    stream: The number of the stream.
    is_paused: True if too much of the stream waits for the client: send no more of it. False if the client
        has read what waited: send further events.
    """

    stream: int
    is_paused: bool


class CancelRequest(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Cancel a request of this owner; the text so far becomes its answer."""

    request: str
    owner: str


class Query(msgspec.Struct, frozen=True, array_like=True, tag="query"):
    """A question about the master, which a `Reply` of the same number answers."""

    number: int
    subject: Literal["state", "metrics"]


class ConnectionEnded(msgspec.Struct, frozen=True, array_like=True, tag="connection_ended"):
    """One connection of a client that the engine has handed over has ended."""


# Messages of the engine, and of an API process.
ToApi = Welcome | Entries | Reply | Leave
ToEngine = ReadyToServe | OpenRequest | CloseRequest | PauseStream | CancelRequest | Query | ConnectionEnded


def encode_event(stream: int, numbered: Numbered) -> Entry:
    """Return the entry of an event.

    stream: the number of the event's stream.
    numbered: the event with its number.
    """
    event = numbered.event
    if isinstance(event, events.MergedText) and not event.logprobs:
        return stream, numbered.number, TEXT, (event.offset, event.text, event.step_tokens)
    return stream, numbered.number, _KINDS[type(event)], event


def decode_event(number: int, kind: int, contents: Any) -> Numbered:
    """Return the event of an entry, with its number.

    number: the number of the event.
    kind: TEXT, or the index of the event's class in EVENTS.
    contents: the entry's contents, as MessagePack decodes them.
    """
    if kind == TEXT:
        offset, text, step_tokens = contents
        return Numbered(number, events.MergedText(offset, text, (), step_tokens))
    return Numbered(number, msgspec.convert(contents, EVENTS[kind]))


# What `encode_error` returns: the error's class, its message, and the further argument of its class, or None.
ErrorParts = Sequence[Any]


def encode_error(error: errors.SpecsotError) -> ErrorParts:
    """Return the parts of an error, of which `decode_error` makes the error again.

    error: an error of a request.
    """
    # Of InvalidRequest, Overloaded and PlanError.
    attributes = ("field", "retry_after", "text")
    further = next((getattr(error, name) for name in attributes if hasattr(error, name)), None)
    # An error may quote what cannot be encoded as UTF-8.
    message = str(error).encode(errors="backslashreplace").decode()
    return type(error).__name__, message, further


def decode_error(parts: ErrorParts) -> errors.SpecsotError:
    """Return the error that `encode_error` was given; an error of a class that is not in `specsot.errors`
    becomes a SpecsotError.

    parts: what `encode_error` returned.
    """
    name, message, further = parts
    kind = getattr(errors, name, errors.SpecsotError)
    return kind(message) if further is None else kind(message, further)
