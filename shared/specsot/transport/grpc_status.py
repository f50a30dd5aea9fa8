"""Translates the error tree to google.rpc.Status and back: the one place where gRPC's codes are known.

What is not a SpecsotError never shows its words to a peer.
"""

from __future__ import annotations

from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2 as details
from google.rpc import status_pb2
from grpc import StatusCode
from grpc.aio import AioRpcError

from specsot.errors import (
    Cancelled,
    ContextLengthExceeded,
    Forbidden,
    HeadMismatch,
    InvalidRequest,
    ModelError,
    NotFound,
    Overloaded,
    PlanError,
    Refused,
    SpecsotError,
    TimedOut,
    Unauthenticated,
    Unavailable,
    WireError,
)

DOMAIN = "specsot"
TRAILER = "grpc-status-details-bin"
LONGEST_LINE, LONGEST_TEXT = 512, 3072  # bytes; all trailers share gRPC's 8 KiB of metadata

_CODES: dict[type[SpecsotError], StatusCode] = {
    InvalidRequest: StatusCode.INVALID_ARGUMENT,
    ContextLengthExceeded: StatusCode.INVALID_ARGUMENT,
    Unauthenticated: StatusCode.UNAUTHENTICATED,
    Forbidden: StatusCode.PERMISSION_DENIED,
    NotFound: StatusCode.NOT_FOUND,
    Overloaded: StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: StatusCode.UNAVAILABLE,
    Refused: StatusCode.FAILED_PRECONDITION,
    HeadMismatch: StatusCode.FAILED_PRECONDITION,
    ModelError: StatusCode.FAILED_PRECONDITION,
    PlanError: StatusCode.ABORTED,
    WireError: StatusCode.INVALID_ARGUMENT,
    TimedOut: StatusCode.DEADLINE_EXCEEDED,
    Cancelled: StatusCode.CANCELLED,
    SpecsotError: StatusCode.INTERNAL,
}
_CLASSES: dict[StatusCode, type[SpecsotError]] = {
    StatusCode.INVALID_ARGUMENT: InvalidRequest,
    StatusCode.UNAUTHENTICATED: Unauthenticated,
    StatusCode.PERMISSION_DENIED: Forbidden,
    StatusCode.NOT_FOUND: NotFound,
    StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    StatusCode.FAILED_PRECONDITION: Refused,
    StatusCode.DEADLINE_EXCEEDED: TimedOut,
    StatusCode.CANCELLED: Cancelled,
    StatusCode.INTERNAL: SpecsotError,
    StatusCode.UNKNOWN: SpecsotError,
}


def code_of(error: SpecsotError) -> StatusCode:
    return next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)


def status_of(error: SpecsotError) -> status_pb2.Status:
    """Code, one clear line, and details a program can read."""
    status = status_pb2.Status(code=code_of(error).value[0], message=cut(str(error), LONGEST_LINE))
    status.details.extend(map(_packed, _details(error)))
    return status


def cut(text: str, most: int) -> str:
    """Its first `most` bytes in UTF-8, no half character."""
    return text.encode(errors="replace")[:most].decode(errors="ignore")


def error_of(failure: AioRpcError) -> SpecsotError:
    """What the peer raised, as far as its status tells; Unavailable for every failure of the network."""
    status = _rich(failure)
    message = failure.details() or failure.code().name
    if status is None:
        return _CLASSES.get(failure.code(), Unavailable)(message)
    found = {kind.DESCRIPTOR.full_name: kind() for kind in _KINDS}
    for packed in status.details:
        if (detail := found.get(packed.TypeName())) is not None:
            packed.Unpack(detail)
    return _rebuilt(status.message or message, failure.code(), found)


_KINDS: tuple[type[Message], ...] = (details.ErrorInfo, details.BadRequest, details.RetryInfo)


def _details(error: SpecsotError) -> list[Message]:
    info = details.ErrorInfo(reason=_reason(type(error)), domain=DOMAIN)
    found: list[Message] = [info]
    match error:
        case InvalidRequest(field=str(field)):
            line = cut(str(error), LONGEST_LINE)
            violation = details.BadRequest.FieldViolation(field=field, description=line)
            found.append(details.BadRequest(field_violations=[violation]))
        case Overloaded(retry_after=seconds):
            retry = details.RetryInfo()
            retry.retry_delay.FromNanoseconds(int(seconds * 1e9))
            found.append(retry)
        case PlanError(text=text):
            info.metadata["text"] = cut(text, LONGEST_TEXT)
        case _:
            pass
    return found


def _rebuilt(message: str, code: StatusCode, found: dict[str, Message]) -> SpecsotError:
    info = found[details.ErrorInfo.DESCRIPTOR.full_name]
    assert isinstance(info, details.ErrorInfo)
    kind = _NAMES.get(info.reason) if info.domain == DOMAIN else None
    kind = kind or _CLASSES.get(code, Unavailable)
    if issubclass(kind, InvalidRequest):
        return kind(message, _field(found[details.BadRequest.DESCRIPTOR.full_name]))
    if kind is Overloaded:
        return Overloaded(message, _delay(found[details.RetryInfo.DESCRIPTOR.full_name]))
    if kind is PlanError:
        return PlanError(message, info.metadata["text"])
    return kind(message)


def _field(detail: Message) -> str | None:
    assert isinstance(detail, details.BadRequest)
    return detail.field_violations[0].field if detail.field_violations else None


def _delay(detail: Message) -> float:
    assert isinstance(detail, details.RetryInfo)
    return detail.retry_delay.ToNanoseconds() / 1e9 if detail.HasField("retry_delay") else 1.0


def _reason(kind: type[SpecsotError]) -> str:
    """HeadMismatch -> HEAD_MISMATCH, as google.rpc.ErrorInfo wants it."""
    return "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(kind.__name__)).upper()


_NAMES: dict[str, type[SpecsotError]] = {_reason(kind): kind for kind in _CODES}


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _rich(failure: AioRpcError) -> status_pb2.Status | None:
    for key, value in failure.trailing_metadata():
        if key == TRAILER and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None
