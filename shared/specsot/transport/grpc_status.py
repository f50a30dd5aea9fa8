"""Translates the error tree to google.rpc.Status and back. No other module knows gRPC's status codes.

The message of an error that is not a SpecsotError is never sent to a peer.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator

from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2 as details
from google.rpc import status_pb2
from grpc import StatusCode
from grpc.aio import AioRpcError

from specsot import errors

# The domain of this project's error details in google.rpc.ErrorInfo.
DOMAIN = "specsot"
# Key of the trailing metadata that carries a rich status, as gRPC libraries expect it.
TRAILER = "grpc-status-details-bin"
# Bytes. Bounds an error's message. All trailers share gRPC's 8 KiB of metadata. Untuned.
MAX_MESSAGE_BYTES = 512
# Bytes. Bounds the raw plan of a PlanError. Untuned.
MAX_PLAN_BYTES = 3072

# The status code of each class of errors; a class without an entry has that of its base class.
_CODES: dict[type[errors.SpecsotError], StatusCode] = {
    errors.InvalidRequest: StatusCode.INVALID_ARGUMENT,
    errors.ContextLengthExceeded: StatusCode.INVALID_ARGUMENT,
    errors.TooLarge: StatusCode.INVALID_ARGUMENT,
    errors.Unauthenticated: StatusCode.UNAUTHENTICATED,
    errors.Forbidden: StatusCode.PERMISSION_DENIED,
    errors.NotFound: StatusCode.NOT_FOUND,
    errors.Overloaded: StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: StatusCode.UNAVAILABLE,
    errors.Refused: StatusCode.FAILED_PRECONDITION,
    errors.Occupied: StatusCode.FAILED_PRECONDITION,
    errors.HeadMismatch: StatusCode.FAILED_PRECONDITION,
    errors.ModelError: StatusCode.FAILED_PRECONDITION,
    errors.PlanError: StatusCode.ABORTED,
    errors.WireError: StatusCode.INVALID_ARGUMENT,
    errors.TimedOut: StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: StatusCode.CANCELLED,
    errors.SpecsotError: StatusCode.INTERNAL,
}
# The class of each status code, for statuses without details. Of several classes with the same code, the
# first in the table is used. PlanError is left out, because it needs the text of its details.
_CLASSES = {code: kind for kind, code in reversed(_CODES.items()) if kind is not errors.PlanError}
_CLASSES[StatusCode.UNKNOWN] = errors.SpecsotError


def code_of(error: errors.SpecsotError) -> StatusCode:
    """Return the status code of an error, or of its nearest base class in the table.

    error: any error of this project.
    """
    return next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)


def status_of(error: errors.SpecsotError) -> status_pb2.Status:
    """Return the status of an error: its code, its message, and details for programs.

    error: any error of this project. Its message is cut to MAX_MESSAGE_BYTES bytes.

    A message that is longer is cut at a character. The details are the error's class, and the field, the
    delay or the plan that the error has.
    """
    status = status_pb2.Status(code=code_of(error).value[0], message=cut(str(error), MAX_MESSAGE_BYTES))
    for detail in _details(error):
        status.details.add().Pack(detail)
    return status


def cut(text: str, max_bytes: int) -> str:
    """Return the beginning of a text that has at most `max_bytes` bytes in UTF-8, cut between characters.

    text: the text. Lone surrogates become question marks.
    max_bytes: the largest number of bytes.
    """
    return text.encode(errors="replace")[:max_bytes].decode(errors="ignore")


def error_of(failure: AioRpcError) -> errors.SpecsotError:
    """Return the error that a peer raised, as far as its status shows it. A status without this project's
    details becomes the error class of its code.

    Failures of the network, and codes that no error class has, become Unavailable.

    failure: the error that grpc raised for a call.

    The message is that of the status, else gRPC's own text, else the name of the code. InvalidRequest and its
    subclasses have the field (None if the status names none), Overloaded the delay, and PlanError the plan,
    which is "" if the status has none.
    """
    status = _rich(failure)
    info = details.ErrorInfo()
    bad_request = details.BadRequest()
    retry = details.RetryInfo()
    for packed in status.details:
        for detail in (info, bad_request, retry):
            packed.Unpack(detail)  # Does nothing if the detail has another type.
    kind = _NAMES.get(info.reason) if info.domain == DOMAIN else None
    kind = kind or _CLASSES.get(failure.code(), errors.Unavailable)
    message = status.message or failure.details() or failure.code().name
    if issubclass(kind, errors.InvalidRequest):
        return kind(message, bad_request.field_violations[0].field if bad_request.field_violations else None)
    if kind is errors.Overloaded and retry.HasField("retry_delay"):
        return errors.Overloaded(message, retry.retry_delay.ToNanoseconds() / 1e9)
    if kind is errors.PlanError:
        return errors.PlanError(message, info.metadata["text"])
    return kind(message)


@contextlib.contextmanager
def peer_errors() -> Generator[None]:
    """Return a context manager for a gRPC call, in which the error that the peer raised is raised as this
    project's error class. It yields None.

    Failures of the network become Unavailable.

    Exceptions that are not of gRPC pass unchanged.
    """
    try:
        yield
    except AioRpcError as failure:
        raise error_of(failure) from None


def _rich(failure: AioRpcError) -> status_pb2.Status:
    """Return the status in the trailing metadata; an empty one if there is none or it cannot be parsed.

    failure: the error that grpc raised for a call.

    If several entries can be parsed, the first one is returned.
    """
    for key, value in failure.trailing_metadata():
        if key == TRAILER and isinstance(value, bytes):
            with contextlib.suppress(DecodeError):
                return status_pb2.Status.FromString(value)
    return status_pb2.Status()


def _details(error: errors.SpecsotError) -> list[Message]:
    """Return the details of an error as protobuf messages: always its class, and the field of an
    InvalidRequest that names one, the delay of an Overloaded, or the plan of a PlanError.

    error: any error of this project.

    The text of a plan is cut to MAX_PLAN_BYTES bytes.
    """
    info = details.ErrorInfo(reason=_reason(type(error)), domain=DOMAIN)
    found: list[Message] = [info]
    match error:
        case errors.InvalidRequest(field=str(field)):
            line = cut(str(error), MAX_MESSAGE_BYTES)
            violation = details.BadRequest.FieldViolation(field=field, description=line)
            found.append(details.BadRequest(field_violations=[violation]))
        case errors.Overloaded(retry_after=seconds):
            retry = details.RetryInfo()
            retry.retry_delay.FromNanoseconds(int(seconds * 1e9))
            found.append(retry)
        case errors.PlanError(text=text):
            info.metadata["text"] = cut(text, MAX_PLAN_BYTES)
        case _:
            pass
    return found


def _reason(kind: type[errors.SpecsotError]) -> str:
    """Return the name of a class as google.rpc.ErrorInfo spells it: HeadMismatch -> HEAD_MISMATCH.

    kind: the class of an error.
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).upper()


# The class of an error by the name that details carry, such as HEAD_MISMATCH.
_NAMES: dict[str, type[errors.SpecsotError]] = {_reason(kind): kind for kind in _CODES}
