"""Stands before every call of a gRPC door: without a token nothing is even parsed.

Refuses to know what the calls do. Health stays open: orchestrators ask for it, and it says nothing else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc

from specsot.rpc.tokens import Tokens

OPEN = "/grpc.health.v1.Health/"
HEADER = "authorization"


class BearerInterceptor(grpc.aio.ServerInterceptor):
    """Goes behind the Guard, which makes a status of what is raised here."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        details: Any = handler_call_details
        if details.method.startswith(OPEN):
            return await continuation(details)
        try:
            self._tokens.check(shown(details.invocation_metadata))
        except Exception as error:
            return _refusal(error)
        return await continuation(details)


def shown(metadata: Any) -> str | None:
    """The header, if there is exactly one."""
    values = [value for key, value in metadata or () if key == HEADER]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None


def _refusal(error: Exception) -> Any:
    """Answers a call of any kind; whether there is such a method is not told either."""

    async def refuse(request: object, context: object) -> NoReturn:
        raise error

    return grpc.stream_stream_rpc_method_handler(refuse)
