"""Errors as HTTP responses: the one place for status codes and OpenAI's error shape.

An exception that is not a SpecsotError never shows its message to a client.
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

MAX_MESSAGE_CHARACTERS = 1000  # characters of a message, which may repeat what was sent
MAX_PLAN_CHARACTERS = 20_000  # characters of an invalid plan that an error repeats; not measured
FIRST_SERVER_STATUS = 500


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """`status`, and OpenAI's `type` and `code`."""

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
# Bodies that JSON's reader gives up on, by what it raises.
_UNREAD: Mapping[type[BaseException | None], str] = {
    RecursionError: "the body is not JSON: it is nested too deeply",
    UnicodeDecodeError: "the body is not JSON: it is not UTF-8",
    ValueError: "the body is not JSON: a number has too many digits",
}


def body_of(error: Exception) -> dict[str, Any]:
    """The error as OpenAI's clients read it, also from within a stream."""
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
    """The error as Anthropic's clients read it; by these words they know that they must send less."""
    error = known_error(error)
    told = body_of(error)
    told["error"]["type"] = _ANTHROPIC_TYPES.get(_shape_of(error).status, told["error"]["type"])
    if isinstance(error, errors.ContextLengthExceeded):
        told["error"]["message"] = f"prompt is too long: {told['error']['message']}"
    return {"type": "error", **told}


BodyOf = Callable[[Exception], dict[str, Any]]


def response_of(error: Exception, body_of: BodyOf = body_of) -> Response:
    """The whole answer to a call that failed before its answer began."""
    error = known_error(error)
    headers: dict[str, str] = {}
    if isinstance(error, errors.Overloaded):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if isinstance(error, errors.Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return _respond(_shape_of(error).status, body_of(error), headers)


def known_error(error: Exception) -> errors.SpecsotError:
    """The error itself if it is one of ours; else it is logged, and told as an internal one."""
    if isinstance(error, errors.SpecsotError):
        return error
    log.error("a call failed", exc_info=error)
    return errors.SpecsotError("internal error")


@contextmanager
def naming_fields(words: Mapping[str, str]) -> Generator[None]:
    """Whatever is refused meanwhile names the field that the caller wrote."""
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
    """Refusals of the chat turn `messages.N` name the part of the caller's body that this turn was made of.

    places: of each turn, such as ("instructions", "input.0", "input.2").
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
    return anthropic_body if path.startswith("/v1/messages") else body_of


async def refuse(request: Request, error: Exception) -> Response:
    return response_of(error, shape_at(request.url.path))


async def refuse_body(request: Request, error: Exception) -> Response:
    """What the body's schema says, as the one field that is wrong and why."""
    error = cast(RequestValidationError, error)
    complaint = error.errors()[0]
    shape = shape_at(request.url.path)
    if complaint["type"] == "json_invalid":
        return response_of(errors.InvalidRequest(f"the body is not JSON: {complaint['ctx']['error']}"), shape)
    field = ".".join(way_to(complaint, complaint["loc"][1:], error.body))
    return response_of(
        errors.InvalidRequest(f"{field or 'body'}: {said_of(complaint)}", field or None), shape
    )


def said_of(complaint: Mapping[str, Any]) -> str:
    """Pydantic's words for what is wrong, or better ones."""
    if complaint["type"] == "too_long":
        return f"at most {complaint['ctx']['max_length']} entries are allowed"
    return _COMPLAINTS.get(complaint["type"]) or complaint["msg"].removeprefix("Value error, ")


def way_to(complaint: Mapping[str, Any], way: Iterable[Any], inside: Any) -> Generator[str]:
    """The names that lead to what is wrong; those of types that were tried for it are left out."""
    for part in way:
        if isinstance(inside, dict) and (part in inside or complaint["type"] == "missing"):
            inside = cast(dict[str, Any], inside).get(part)
        elif isinstance(inside, list) and isinstance(part, int):
            inside = cast(list[Any], inside)[part]
        else:
            continue
        yield str(part)


async def refuse_http(request: Request, error: Exception) -> Response:
    """What the framework itself refuses: no such path, no such method, a body that cannot be read."""
    error = cast(HTTPException, error)
    words = _UNREAD.get(type(error.__cause__)) or _HTTP_MESSAGES.get(error.status_code, str(error.detail))
    line = words.format(path=request.url.path, method=request.method)
    return refusal(error.status_code, line, dict(error.headers or {}))


def refusal(status: int, line: str, headers: dict[str, str] | None = None) -> Response:
    kind = _WRONG if status < FIRST_SERVER_STATUS else "server_error"
    told = {"message": line[:MAX_MESSAGE_CHARACTERS], "type": kind, "param": None, "code": None}
    return _respond(status, {"error": told}, headers or {})


def _shape_of(error: errors.SpecsotError) -> ErrorShape:
    return next(_SHAPE_OF_ERROR[kind] for kind in type(error).__mro__ if kind in _SHAPE_OF_ERROR)


def _respond(status: int, body: dict[str, Any], headers: dict[str, str]) -> Response:
    return Response(json.dumps(body), status, headers, "application/json")
