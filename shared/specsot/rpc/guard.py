"""One interceptor around every call: bytes that do not parse, and errors of ours, become rich statuses.

Refuses to know what the calls do. Nothing of Python reaches a peer: what nobody expected is logged
here and told as "internal error".
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import structlog
from grpc.aio import AbortError, ServicerContext

from specsot.errors import Overloaded, SpecsotError, WireError
from specsot.rpc.statuses import TRAILER, code_of, status_of

log = structlog.get_logger()

Behaviour = Callable[[Any, Any], Any]


class Malformed:
    """Stands in for a message whose bytes did not parse."""


class Excess:
    """Stands in for a message that there was no room for."""


class HeldBytes:
    """Bytes of the messages of one call, out of a budget that all have."""

    def __init__(self, guard: CallGuard) -> None:
        self._guard, self._bytes = guard, 0

    def take(self, size: int) -> bool:
        """Whether there is room for so many more."""
        if self._guard.left is None:
            return True
        fits = size <= self._guard.left
        if fits:
            self._bytes += size
            self._guard.left -= size
        return fits

    def give_back(self) -> None:
        """The call is over."""
        if self._guard.left is not None:
            self._guard.left += self._bytes
        self._bytes = 0


class CallGuard(grpc.aio.ServerInterceptor):
    """left: bytes that messages of calls under way may still have, None for no limit."""

    def __init__(self, held: int | None = None) -> None:
        self.left = held

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        return handler and _wrapped(handler, HeldBytes(self))


def _wrapped(handler: Any, held: HeldBytes) -> Any:
    make, behaviour = _parts(handler)
    return make(
        _guarded(behaviour, handler.request_streaming, held),
        request_deserializer=handler.request_deserializer and _tolerant(handler.request_deserializer, held),
        response_serializer=handler.response_serializer,
    )


def _parts(handler: Any) -> tuple[Callable[..., Any], Behaviour]:
    match handler.request_streaming, handler.response_streaming:
        case False, False:
            return grpc.unary_unary_rpc_method_handler, handler.unary_unary
        case False, True:
            return grpc.unary_stream_rpc_method_handler, handler.unary_stream
        case True, False:
            return grpc.stream_unary_rpc_method_handler, handler.stream_unary
        case _:
            return grpc.stream_stream_rpc_method_handler, handler.stream_stream


def _tolerant(deserialize: Callable[[bytes], Any], held: HeldBytes) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data) if held.take(len(data)) else Excess()
        except Exception:  # any: a stranger's bytes must not reach the caller as a Python error
            return Malformed()

    return read


def _guarded(behaviour: Behaviour, streaming: bool, held: HeldBytes) -> Behaviour:
    """The same kind of coroutine or generator as `behaviour`; gRPC treats the two differently."""
    admit = _checked_stream if streaming else _checked

    async def answer(request: Any, context: ServicerContext[Any, Any]) -> Any:
        try:
            return await behaviour(admit(request), context)
        except Exception as error:
            await refuse(context, error)
        finally:
            held.give_back()

    async def generate(request: Any, context: ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async with aclosing(behaviour(admit(request), context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await refuse(context, error)
        finally:
            held.give_back()

    return generate if inspect.isasyncgenfunction(behaviour) else answer


def _checked(request: Any) -> Any:
    if isinstance(request, Malformed):
        raise WireError("the message does not parse")
    if isinstance(request, Excess):
        raise Overloaded("the messages of other calls fill the memory for them")
    return request


async def _checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)


async def refuse(context: ServicerContext[Any, Any], error: Exception) -> NoReturn:
    """End a call with what `error` means. Errors of gRPC itself pass through."""
    if isinstance(error, AbortError) or context.done():
        raise error
    if not isinstance(error, SpecsotError):
        log.error("a call failed", exc_info=error)
        error = SpecsotError("internal error")
    status = status_of(error)
    await context.abort(code_of(error), status.message, ((TRAILER, status.SerializeToString()),))
