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
# HTTP status. From this one on the server is at fault, and below it the client.
FIRST_SERVER_STATUS = 500


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How a class of errors is reported to HTTP clients.

    status: The HTTP status.
    type: OpenAI's `type` of the error.
    code: OpenAI's `code` of the error; None if it has none.
    """

    status: int
    type: str
    code: str | None = None


# OpenAI's `type` of an error for which the client is at fault.
_WRONG = "invalid_request_error"
# How each class of errors is reported; a class that is missing is reported as its base class is.
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
# Our own words for some of Pydantic's types of errors.
_COMPLAINTS: Mapping[str, str] = {
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
    "too_short": "must not be empty",
}
# Messages for errors of the framework, by HTTP status.
_HTTP_MESSAGES = {
    404: "there is nothing at {path}",
    405: "{path} does not take {method}",
    413: "the body is too large",
    415: "the body must be application/json",
    500: "internal error",
}
# Messages for bodies that are not JSON, by the exception that the JSON reader raises.
_PARSE_MESSAGES: Mapping[type[BaseException | None], str] = {
    RecursionError: "the body is not JSON: it is nested too deeply",
    UnicodeDecodeError: "the body is not JSON: it is not UTF-8",
    ValueError: "the body is not JSON: a number has too many digits",
}


def body_of(error: Exception) -> dict[str, Any]:
    """Return an error in OpenAI's format, as the body of a response or as an event of a stream. An exception
    that is no SpecsotError becomes an internal error, and is logged. The field is named if the error is an
    InvalidRequest, and a PlanError has the invalid plan. Message and plan are cut to their maximum lengths.

    error: the exception that a call raised.
    """
    error = known_error(error)
    refusal = _shape_of(error)
    body: dict[str, Any] = {
        "message": str(error)[:MAX_MESSAGE_CHARACTERS],
        "type": refusal.type,
        "param": error.field if isinstance(error, errors.InvalidRequest) else None,
        "code": refusal.code,
    }
    if isinstance(error, errors.PlanError):
        body["plan"] = error.text[:MAX_PLAN_CHARACTERS]
    return {"error": body}


# Anthropic's `type` of an error by its HTTP status; others keep OpenAI's.
_ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


def anthropic_body(error: Exception) -> dict[str, Any]:
    """Return an error in Anthropic's format. The message of a too long prompt begins with the words by which
    Anthropic's clients know that they must shorten the conversation. The body is OpenAI's with a further
    member "type", and its error has Anthropic's type for the status.

    error: the exception that a call raised.
    """
    error = known_error(error)
    body = body_of(error)
    body["error"]["type"] = _ANTHROPIC_TYPES.get(_shape_of(error).status, body["error"]["type"])
    if isinstance(error, errors.ContextLengthExceeded):
        body["error"]["message"] = f"prompt is too long: {body['error']['message']}"
    return {"type": "error", **body}


# Returns the JSON body for an error, in the format of one API.
BodyOf = Callable[[Exception], dict[str, Any]]


def response_of(error: Exception, format_body: BodyOf = body_of) -> Response:
    """Return the response to a call that failed before its response began, with the HTTP status of the error.
    An Overloaded has the header retry-after in whole seconds, at least 1; an Unauthenticated names the scheme
    Bearer.

    error: the exception that the call raised.
    format_body: returns the JSON body for the error, in the format of the API.
    """
    error = known_error(error)
    headers: dict[str, str] = {}
    if isinstance(error, errors.Overloaded):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if isinstance(error, errors.Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return _respond(_shape_of(error).status, format_body(error), headers)


def known_error(error: Exception) -> errors.SpecsotError:
    """Return a SpecsotError as it is. Log any other exception, and return an internal error in its place,
    which gives the client no details.

    error: the exception that a call raised.
    """
    if isinstance(error, errors.SpecsotError):
        return error
    log.error("a call failed", exc_info=error)
    return errors.SpecsotError("internal error")


@contextmanager
def naming_fields(caller_names: Mapping[str, str]) -> Generator[None]:
    """Let InvalidRequest errors of the block name the field by the caller's name. The context yields None.
    Errors without a field are raised unchanged. Both the error's field and the first mention of the field in
    its message are changed; in a ContextLengthExceeded all mentions are:

        # caller_names {"max_new_tokens": "max_tokens"}: "max_new_tokens must be 1" -> "max_tokens must be 1"

    caller_names: from our names of fields to the caller's; errors of other fields are raised unchanged.
    """
    try:
        yield
    except errors.InvalidRequest as error:
        if error.field is None or error.field not in caller_names:
            raise
        theirs = caller_names[error.field]
        times = -1 if isinstance(error, errors.ContextLengthExceeded) else 1
        raise type(error)(str(error).replace(error.field, theirs, times), theirs) from error


@contextmanager
def naming_turns(places: Sequence[str]) -> Generator[None]:
    """Let InvalidRequest errors of the block that name a chat turn `messages.N` name the caller's part of the
    body. The context yields None; other errors are raised unchanged. An index without a place is left as it
    is.

        # places ("instructions", "input.0", "input.2"): field "messages.2.content" -> "input.2.content"

    places: for each turn, the part of the body of which the turn was made.
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


def body_format_at(path: str) -> BodyOf:
    """Return the function that formats errors for an endpoint: Anthropic's for its endpoints, else OpenAI's.

    path: the path of the endpoint's URL.
    """
    return anthropic_body if path.startswith("/v1/messages") else body_of


async def refuse(request: Request, error: Exception) -> Response:
    """Answer a call that raised an error, in the format of its endpoint.

    request: the HTTP request of the call.
    error: the exception that the call raised.
    """
    return response_of(error, body_format_at(request.url.path))


async def refuse_body(request: Request, error: Exception) -> Response:
    """Answer a call whose body does not fit its schema; the message names the first wrong field and why. The
    status is 400; a body that is not JSON is told so, and "body" stands for a body that is wrong as a whole.

    request: the HTTP request of the call.
    error: FastAPI's RequestValidationError.
    """
    error = cast(RequestValidationError, error)
    complaint = error.errors()[0]
    shape = body_format_at(request.url.path)
    if complaint["type"] == "json_invalid":
        return response_of(errors.InvalidRequest(f"the body is not JSON: {complaint['ctx']['error']}"), shape)
    field = ".".join(names_to_wrong_value(complaint, complaint["loc"][1:], error.body))
    return response_of(
        errors.InvalidRequest(f"{field or 'body'}: {complaint_text(complaint)}", field or None), shape
    )


def complaint_text(complaint: Mapping[str, Any]) -> str:
    """Return in words what is wrong with a field: our own words for some errors, else Pydantic's. A list that
    is too long is told the number of entries that are allowed.

    complaint: one entry of Pydantic's `errors()`.
    """
    if complaint["type"] == "too_long":
        return f"at most {complaint['ctx']['max_length']} entries are allowed"
    return _COMPLAINTS.get(complaint["type"]) or complaint["msg"].removeprefix("Value error, ")


def names_to_wrong_value(complaint: Mapping[str, Any], location: Iterable[Any], body: Any) -> Generator[str]:
    """Yield the names on the path to a wrong value within a body; nothing if the body itself is wrong. A
    missing name is yielded although the body lacks it.

        # location ("stop", "list[str]", 0), body {"stop": [1]} -> "stop", "0"

    complaint: one entry of Pydantic's `errors()`, whose type shows whether the last name is missing.
    location: the location as Pydantic reports it, which also contains the names of the types that were tried;
        these are left out.
    body: the decoded JSON body, which may be of any type.
    """
    for part in location:
        if isinstance(body, dict) and (part in body or complaint["type"] == "missing"):
            body = cast(dict[str, Any], body).get(part)
        elif isinstance(body, list) and isinstance(part, int):
            body = cast(list[Any], body)[part]
        else:
            continue
        yield str(part)


async def refuse_http(request: Request, error: Exception) -> Response:
    """Answer a call that the framework refuses: an unknown path or method, or a body that cannot be read. The
    message is ours for a known status, and else the framework's.

    request: the HTTP request of the call.
    error: Starlette's HTTPException.
    """
    error = cast(HTTPException, error)
    words = _PARSE_MESSAGES.get(type(error.__cause__)) or _HTTP_MESSAGES.get(
        error.status_code, str(error.detail)
    )
    line = words.format(path=request.url.path, method=request.method)
    return refusal(error.status_code, line, dict(error.headers or {}))


def refusal(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """Return an error response in OpenAI's error format. Its type is "server_error" from FIRST_SERVER_STATUS
    on, else OpenAI's for a wrong request; it names neither a field nor a code.

    status: the HTTP status, from 400 on.
    message: what is wrong, for the client; cut after MAX_MESSAGE_CHARACTERS.
    headers: further headers of the response, or None.
    """
    kind = _WRONG if status < FIRST_SERVER_STATUS else "server_error"
    body = {"message": message[:MAX_MESSAGE_CHARACTERS], "type": kind, "param": None, "code": None}
    return _respond(status, {"error": body}, headers or {})


def _shape_of(error: errors.SpecsotError) -> ErrorShape:
    """Return how an error is reported: the entry of its class, or of the nearest base class in the table.

    error: the error, which is not changed.
    """
    return next(_SHAPE_OF_ERROR[kind] for kind in type(error).__mro__ if kind in _SHAPE_OF_ERROR)


def _respond(status: int, body: dict[str, Any], headers: dict[str, str]) -> Response:
    """Return a JSON response.

    status: the HTTP status.
    body: the JSON object.
    headers: further headers.
    """
    return Response(json.dumps(body), status, headers, "application/json")
