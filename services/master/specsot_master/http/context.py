"""What every HTTP endpoint is given: the master, its tokenizer, and who is calling."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request
from structlog.contextvars import bind_contextvars

from specsot.core.info import ModelInfo
from specsot.errors import InvalidRequest
from specsot.members import Head
from specsot.params import Ask, Mode
from specsot.tracing import TRACEPARENT, caller, trace_of, well_formed
from specsot_master.engine import Caller
from specsot_master.grpc_api import checked_id
from specsot_master.http.errors import naming_fields
from specsot_master.http.middleware import OWNER
from specsot_master.http.sse import RequestEvents
from specsot_master.master import RequestCounter
from specsot_master.text import Text

TIMEOUT, REQUEST_ID = "x-request-timeout", "x-request-id"
MIN_TIMEOUT_SECONDS = 0.001  # seconds that a call may have; less is a mistake, not a deadline


@dataclass(frozen=True, slots=True)
class HttpContext:
    """healthy: whether requests are answered now. head: what drafts, if anything does.

    figures: for Prometheus, in its text format. began: seconds since 1970 when the master started.
    mode: of what OpenAI's clients ask, unless they say.
    """

    desk: RequestCounter
    model: ModelInfo
    text: Text
    healthy: Callable[[], bool]
    head: Callable[[], Head | None]
    figures: Callable[[], bytes]
    began: int
    mode: Mode = "direct"


@dataclass(frozen=True, slots=True)
class HttpCall:
    """id: of this call, drawn here. headers: of its answer."""

    id: str
    caller: Caller
    headers: dict[str, str]

    def generate(self, desk: RequestCounter, asks: Sequence[Ask]) -> list[RequestEvents]:
        """A stream for every ask. The first has the call's own id, further ones a number behind it."""
        ids = [self.id if n == 0 else f"{self.id}-{n}" for n in range(len(asks))]
        return [desk.generate(ask, replace(self.caller, request=id)) for ask, id in zip(asks, ids)]


def call_of(request: Request) -> HttpCall:
    """The caller's own id is for logs alone: proxies keep it when they try again, so calls may share one.

    Raises InvalidRequest for headers that make no sense; a trace context that makes none is left alone.
    """
    caller.set(well_formed(request.headers.get(TRACEPARENT)))
    with naming_fields({"request_id": REQUEST_ID}):
        name = checked_id(request.headers.get(REQUEST_ID, "")) or ""
    id = secrets.token_hex(12)
    named = {"x_request_id": name} if name else {}
    bind_contextvars(request_id=id, trace_id=trace_of(caller.get()), **named)
    owner = str(request.scope.get(OWNER, ""))
    timeout = timeout_of(request.headers.get(TIMEOUT))
    return HttpCall(id, Caller(id, owner or client_of(request), timeout, owner), {REQUEST_ID: name or id})


def client_of(request: Request) -> str:
    """One host is one client, at whichever door: the same words as gRPC's peers."""
    host = request.client.host if request.client else ""
    return f"ipv6:%5B{host}%5D" if ":" in host else f"ipv4:{host}"


def timeout_of(header: str | None) -> float | None:
    """Seconds. Raises InvalidRequest."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not MIN_TIMEOUT_SECONDS <= seconds < 1e9:
        raise InvalidRequest(
            f"{TIMEOUT} must be a number of seconds, at least {MIN_TIMEOUT_SECONDS:g}", field=TIMEOUT
        )
    return seconds
