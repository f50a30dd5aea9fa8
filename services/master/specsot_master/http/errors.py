"""Turns errors into HTTP responses: the only place for status codes and OpenAI's error format.

The message of an exception that is not a SpecsotError is never shown to a client.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import structlog
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from specsot import errors

log = structlog.get_logger()

# Characters of an error message, which may quote what the client sent.
MAX_MESSAGE_CHARACTERS = 1000
# Characters of an invalid plan that an error quotes. Untuned.
MAX_PLAN_CHARACTERS = 20_000
FIRST_SERVER_STATUS = 500


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How an error is reported.

    status: The HTTP status.
    type: OpenAI's `type` of the error.
    code: OpenAI's `code` of the error.
    """

    status: int
    type: str
    code: str | None = None


_WRONG = "invalid_request_error"
_SHAPE_OF_ERROR: dict[type[errors.SpecsotError], ErrorShape] = {
    errors.InvalidRequest: ErrorShape(400, _WRONG),
    errors.ContextLengthExceeded: ErrorShape(400, _WRONG, "context_length_exceeded"),
    errors.WireError: ErrorShape(400, _WRONG),
    errors.Unauthenticated: ErrorShape(401, _WRONG, "invalid_api_key"),
    errors.Forbidden: ErrorShape(403, _WRONG, "forbidden"),
    errors.NotFound: ErrorShape(404, _WRONG, "model_not_found"),
    errors.Refused: ErrorShape(409, "conflict_error", "refused"),
    errors.PlanError: ErrorShape(422, "plan_error", "no_valid_plan"),
    errors.Overloaded: ErrorShape(429, "rate_limit_error", "rate_limit_exceeded"),
    errors.Cancelled: ErrorShape(499, "cancelled_error", "cancelled"),
    errors.ModelError: ErrorShape(500, "server_error", "model_error"),
    errors.Unavailable: ErrorShape(503, "service_unavailable_error", "unavailable"),
    errors.TimedOut: ErrorShape(504, "timeout_error", "deadline_exceeded"),
    errors.SpecsotError: ErrorShape(500, "server_error"),
}
_COMPLAINTS: Mapping[str, str] = {
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
    "too_short": "must not be empty",
}
_HTTP_MESSAGES = {
    404: "there is nothing at {path}",
    405: "{path} does not take {method}",
    413: "the body is too large",
    415: "the body must be application/json",
    500: "internal error",
}
# Messages for bodies that are not JSON, by the exception that the JSON reader raises.
_UNREAD: Mapping[type[BaseException | None], str] = {
    RecursionError: "the body is not JSON: it is nested too deeply",
    UnicodeDecodeError: "the body is not JSON: it is not UTF-8",
    ValueError: "the body is not JSON: a number has too many digits",
}


def body_of(error: Exception) -> dict[str, Any]:
    """Return an error in OpenAI's format, as the body of a response or as an event of a stream."""
    error = known_error(error)
    refusal = _shape_of(error)
    told: dict[str, Any] = {
        "message": str(error)[:MAX_MESSAGE_CHARACTERS],
        "type": refusal.type,
        "param": error.field if isinstance(error, errors.InvalidRequest) else None,
        "code": refusal.code,
    }
    if isinstance(error, errors.PlanError):
        told["plan"] = error.text[:MAX_PLAN_CHARACTERS]
    return {"error": told}


_ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


def anthropic_body(error: Exception) -> dict[str, Any]:
    """Return an error in Anthropic's format.

    The message of a too long prompt begins with the words by which Anthropic's clients know that they must
    shorten the conversation.
    """
    error = known_error(error)
    told = body_of(error)
    told["error"]["type"] = _ANTHROPIC_TYPES.get(_shape_of(error).status, told["error"]["type"])
    if isinstance(error, errors.ContextLengthExceeded):
        told["error"]["message"] = f"prompt is too long: {told['error']['message']}"
    return {"type": "error", **told}


BodyOf = Callable[[Exception], dict[str, Any]]


def response_of(error: Exception, body_of: BodyOf = body_of) -> Response:
    """Return the response to a call that failed before its response began. body_of: formats the error."""
    error = known_error(error)
    headers: dict[str, str] = {}
    if isinstance(error, errors.Overloaded):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if isinstance(error, errors.Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return _respond(_shape_of(error).status, body_of(error), headers)


def known_error(error: Exception) -> errors.SpecsotError:
    """Return a SpecsotError as it is. Log any other exception, and return an internal error in its place."""
    if isinstance(error, errors.SpecsotError):
        return error
    log.error("a call failed", exc_info=error)
    return errors.SpecsotError("internal error")


@contextmanager
def naming_fields(words: Mapping[str, str]) -> Generator[None]:
    """Let InvalidRequest errors of the block name the field by the caller's name.

    words: from our names of fields to the caller's. Both the error's field and its message are changed:
    # words {"max_new_tokens": "max_tokens"}: "max_new_tokens must be ..." -> "max_tokens must be ..."
    """
    try:
        yield
    except errors.InvalidRequest as error:
        if error.field is None or error.field not in words:
            raise
        theirs = words[error.field]
        times = -1 if isinstance(error, errors.ContextLengthExceeded) else 1
        raise type(error)(str(error).replace(error.field, theirs, times), theirs) from error


@contextmanager
def naming_turns(places: Sequence[str]) -> Generator[None]:
    """Let InvalidRequest errors that name a chat turn `messages.N` name the caller's part of the body.

    places: for each turn, the part of the body of which the turn was made:
    # places ("instructions", "input.0", "input.2"): field "messages.2.content" -> "input.2.content"
    """
    try:
        yield
    except errors.InvalidRequest as error:
        found = re.match(r"messages\.(\d+)", error.field or "")
        if found is None or error.field is None or int(found[1]) >= len(places):
            raise
        place = places[int(found[1])]
        field = error.field.replace(found[0], place, 1)
        raise type(error)(str(error).replace(found[0], place, 1), field) from error


def shape_at(path: str) -> BodyOf:
    """Return the function that formats errors at this path: Anthropic's for its endpoints, else OpenAI's."""
    return anthropic_body if path.startswith("/v1/messages") else body_of


async def refuse(request: Request, error: Exception) -> Response:
    """Answer a call that raised an error, in the format of its endpoint."""
    return response_of(error, shape_at(request.url.path))


async def refuse_body(request: Request, error: Exception) -> Response:
    """Answer a call whose body does not fit its schema; the message names the first wrong field and why."""
    error = cast(RequestValidationError, error)
    complaint = error.errors()[0]
    shape = shape_at(request.url.path)
    if complaint["type"] == "json_invalid":
        return response_of(errors.InvalidRequest(f"the body is not JSON: {complaint['ctx']['error']}"), shape)
    field = ".".join(way_to(complaint, complaint["loc"][1:], error.body))
    return response_of(
        errors.InvalidRequest(f"{field or 'body'}: {complaint_text(complaint)}", field or None), shape
    )


def complaint_text(complaint: Mapping[str, Any]) -> str:
    """Return in words what is wrong with a field: our own words for some errors, else Pydantic's."""
    if complaint["type"] == "too_long":
        return f"at most {complaint['ctx']['max_length']} entries are allowed"
    return _COMPLAINTS.get(complaint["type"]) or complaint["msg"].removeprefix("Value error, ")


def way_to(complaint: Mapping[str, Any], way: Iterable[Any], inside: Any) -> Generator[str]:
    """Yield the names on the path to a wrong value within a body.

    way: the location as Pydantic reports it, which also contains the names of the types that were tried;
    these are left out. inside: the body.
    # way ("stop", "list[str]", 0), body {"stop": [1]} -> "stop", "0"
    """
    for part in way:
        if isinstance(inside, dict) and (part in inside or complaint["type"] == "missing"):
            inside = cast(dict[str, Any], inside).get(part)
        elif isinstance(inside, list) and isinstance(part, int):
            inside = cast(list[Any], inside)[part]
        else:
            continue
        yield str(part)


async def refuse_http(request: Request, error: Exception) -> Response:
    """Answer a call that the framework refuses: an unknown path or method, or a body that cannot be read."""
    error = cast(HTTPException, error)
    words = _UNREAD.get(type(error.__cause__)) or _HTTP_MESSAGES.get(error.status_code, str(error.detail))
    line = words.format(path=request.url.path, method=request.method)
    return refusal(error.status_code, line, dict(error.headers or {}))


def refusal(status: int, line: str, headers: dict[str, str] | None = None) -> Response:
    """Return a response with this status and message, in OpenAI's error format."""
    kind = _WRONG if status < FIRST_SERVER_STATUS else "server_error"
    told = {"message": line[:MAX_MESSAGE_CHARACTERS], "type": kind, "param": None, "code": None}
    return _respond(status, {"error": told}, headers or {})


def _shape_of(error: errors.SpecsotError) -> ErrorShape:
    """Return how an error is reported: by its class, or by the nearest base class in the table."""
    return next(_SHAPE_OF_ERROR[kind] for kind in type(error).__mro__ if kind in _SHAPE_OF_ERROR)


def _respond(status: int, body: dict[str, Any], headers: dict[str, str]) -> Response:
    """Return a JSON response."""
    return Response(json.dumps(body), status, headers, "application/json")
