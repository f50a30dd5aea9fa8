"""Opens a gRPC server with limits, health, reflection, token checks, and errors as rich statuses."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf import descriptor_pb2, descriptor_pool, json_format
from grpc.aio import AbortError, ServicerContext
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from structlog.contextvars import bind_contextvars

from specsot.errors import Overloaded, SpecsotError, Unavailable, WireError
from specsot.tracing import TRACEPARENT, caller, trace_of, well_formed
from specsot.transport.grpc_channel import LINK, Terms, server_credentials, server_options
from specsot.transport.grpc_status import TRAILER, code_of, status_of
from specsot.transport.security import Tokens, exposed

# Calls of this service need no token, because health checkers have none.
OPEN = "/grpc.health.v1.Health/"
# Key of the metadata that carries the token.
HEADER = "authorization"


def authorization_of(metadata: Any) -> str | None:
    """Return the authorization header of a call. None if there is none, or several.

    metadata: the call's (key, value) pairs, or None.
    """
    values = [value for key, value in metadata or () if key == HEADER]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None


log = structlog.get_logger()

Attach = Callable[[grpc.aio.Server], None]

# The terms of a server between members, without TLS.
_TERMS = Terms(keepalive=LINK)
# The name of the reflection service, version 1.
_V1 = "grpc.reflection.v1.ServerReflection"


class GrpcServer:
    """A running gRPC server.

    port: the port on which the server listens; 0 for a unix socket.
    """

    def __init__(self, server: grpc.aio.Server, port: int, state: Any) -> None:
        """Hold a server that accepts calls.

        server: the started server.
        port: the port on which it listens; 0 for a unix socket.
        state: the servicer that reports the health of the services.
        """
        self._server = server
        self.port = port
        self._state = state

    async def report(self, service: str, serving: bool) -> None:
        """Set the health of a service in grpc.health.v1 to SERVING or NOT_SERVING.

        service: full name of the service, such as "specsot.v1.Ring".
        serving: True for SERVING.
        """
        states = health_pb2.HealthCheckResponse
        await self._state.set(service, states.SERVING if serving else states.NOT_SERVING)

    async def close(self, grace: float) -> None:
        """Accept no new calls, and end the server. Returns once it has ended.

        grace: seconds that running calls may continue before they are cancelled.
        """
        await self._state.enter_graceful_shutdown()
        await self._server.stop(grace)


async def open_server(listen: str, services: Mapping[str, Attach], terms: Terms = _TERMS) -> GrpcServer:
    """Start a server at host:port or unix:path, and return it.

    listen: the address. With port 0, any free port is used.
    services: by the name of each service, the function that adds it to the server. Their health starts as
        NOT_SERVING; the health of the whole server, "", is SERVING at once.
    terms: the limits and the access rules of the server.

    Raises Unavailable if the address is not available, InvalidRequest if TLS files are invalid.

    A warning is logged if other machines can reach the address and callers need neither a token nor a
    certificate. Calls are accepted once this returns.
    """
    check_free(listen)
    if exposed(listen) and not terms.needs_credentials:
        log.warning("address is reachable from other machines without authentication", at=listen)
    credentials = server_credentials(terms.tls)
    server = grpc.aio.server(
        interceptors=[CallGuard(terms.held, terms.tokens)], options=server_options(terms)
    )
    state: Any = health.aio.HealthServicer()  # pyrefly: ignore[missing-attribute]
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    for attach in services.values():
        attach(server)
    if terms.channelz:
        channelz.add_channelz_servicer(server)
    if terms.reflects:
        reflect(server, names_of(services, terms))
    endpoint = GrpcServer(server, _bind(server, listen, credentials), state)
    for name in services:
        await endpoint.report(name, False)
    await server.start()
    return endpoint


def names_of(services: Iterable[str], terms: Terms) -> list[str]:
    """Return the names of all services for reflection, those of debugging included.

    services: the names of this project's services.
    terms: the access rules; with channelz, its service is included.
    """
    debugging = ["grpc.channelz.v1.Channelz"] if terms.channelz else []
    return [*services, "grpc.health.v1.Health", *debugging, _V1, reflection.SERVICE_NAME]


def reflect(server: grpc.aio.Server, names: list[str]) -> None:
    """Add reflection to a server, as v1alpha and as v1.

    grpcio-reflection serves only v1alpha, but the messages of v1 are the same.

    server: the server, which was not started yet.
    names: full names of the services to list.

    Descriptors of v1 are added to the process's default descriptor pool. A service that is not named is not
    listed.
    """
    describe_v1()
    servicer = reflection.aio.ReflectionServicer(service_names=names, pool=SymbolPool())
    request = reflection_pb2.ServerReflectionRequest
    response = reflection_pb2.ServerReflectionResponse
    for service in (reflection.SERVICE_NAME, _V1):
        method = grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,  # pyrefly: ignore[bad-argument-type]
            request.FromString,
            response.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(service, {"ServerReflectionInfo": method})
        server.add_generic_rpc_handlers((handler,))


class SymbolPool:
    """The default descriptor pool, which also finds the file of a method: specsot.v1.Master.Generate."""

    def __init__(self) -> None:
        """Use the default descriptor pool of the process."""
        self._pool = descriptor_pool.Default()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the default descriptor pool.

        name: name of the attribute.
        """
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:
        """Return the file descriptor that contains a symbol, which may be a method. Raises KeyError if there
        is none.

        symbol: full name of a message, an enumeration, a service or a method.

        A method is named by its service and its own name: "specsot.v1.Master.Generate".
        """
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            service, _, method = symbol.rpartition(".")
            found = self._pool.FindServiceByName(service)
            return found.methods_by_name[method].containing_service.file


def describe_v1() -> None:
    """Add the descriptor of reflection v1, because clients that list all services look up each one's file.

    Does nothing if the descriptor exists already.
    """
    known = descriptor_pool.Default()
    try:
        known.FindFileContainingSymbol(_V1)
    except KeyError:
        alpha = descriptor_pb2.FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
        renamed = json_format.MessageToJson(alpha).replace("v1alpha", "v1")
        known.Add(json_format.Parse(renamed, descriptor_pb2.FileDescriptorProto()))


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[v6]:port". Raises Unavailable for anything else, such as an
    address without a port or with a port above 65535. The host is returned without brackets, and is "" if
    none is named.

    address: the address.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise Unavailable(f"{address} is not an address; write host:port")
    return host.strip("[]"), int(port)


def check_free(listen: str) -> None:
    """Return None if a server can listen at an address. Raise Unavailable, with the reason, if it cannot, or
    if the address is no host:port. A unix path is not checked.

    gRPC itself would only write C++ log lines.

    listen: host:port or unix:path.
    """
    if listen.startswith("unix:"):
        return
    host, port = split_address(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise Unavailable(f"cannot listen at {listen}: {reason(error)}") from None


def reason(error: Any) -> str:
    """Return the reason of an error of the operating system or of ZMQ in words, such as "address already in
    use".

    error: the error, an OSError or ZMQError.

    Errors without a positive number give their own text.
    """
    if error.errno and error.errno > 0:
        return os.strerror(error.errno).lower()
    # Errors of the resolver and of Python itself have no positive number.
    return error.strerror or str(error)


def _bind(server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials | None) -> int:
    """Let a server listen at an address, and return the port; 0 for a unix socket.

    server: the server, which was not started yet.
    listen: host:port or unix:path.
    credentials: the server's TLS credentials, or None without TLS.

    Raises Unavailable with a clear reason if the address is not available.

    An unused port is selected for port 0.
    """
    try:
        if credentials is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, credentials)
    except RuntimeError:
        raise Unavailable(f"cannot listen at {listen}: {_refusal_reason(listen)}") from None
    return 0 if listen.startswith("unix:") else port


def _refusal_reason(listen: str) -> str:
    """Return why gRPC cannot listen at an address, which gRPC does not tell.

    listen: the address that gRPC refused.

    Returns "address already in use" for a host and port, because `check_free` has excluded the other reasons.
    For a unix socket, the reason is found by binding a socket to the path; if that succeeds, the path is
    deleted again and "gRPC gives no reason" is returned.
    """
    if not listen.startswith("unix:"):
        return "address already in use"
    path = listen.removeprefix("unix:").removeprefix("//")
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        try:
            probe.bind(path)
        except OSError as error:
            return reason(error)
    Path(path).unlink()
    return "gRPC gives no reason"


Behaviour = Callable[[Any, Any], Any]

# The error of a message for which the budget has too little left.
_NO_ROOM = "the messages of other calls take all memory for messages; try again later"


class HeldBytes:
    """The bytes of one call's messages, which count toward the budget of all calls."""

    def __init__(self, guard: CallGuard) -> None:
        """Begin with no bytes.

        guard: the guard of the server, whose budget all calls share.
        """
        self._guard = guard
        self._bytes = 0

    def reserve(self, size: int) -> bool:
        """Count a message toward the budget of all calls, and return True. Return False, and count nothing,
        if the budget has too little left.

        size: bytes of the message.
        """
        fits = size <= self._guard.left
        if fits:
            self._bytes += size
            self._guard.left -= size
        return fits

    def release(self) -> None:
        """Return the bytes of all messages of this call to the budget. The call then holds no bytes."""
        self._guard.left += self._bytes
        self._bytes = 0


class CallGuard(grpc.aio.ServerInterceptor):
    """Intercepts every call: checks its token, sets its trace context, bounds the memory of messages, and
    turns errors into statuses.

    left: bytes that messages of running calls may still take; math.inf without a limit.
    """

    def __init__(self, max_held_bytes: int | None = None, tokens: Tokens | None = None) -> None:
        """Begin with the whole budget.

        max_held_bytes: bytes that messages of running calls may take together. None: no limit.
        tokens: the tokens of which every call must send one, or None if none is needed.
        """
        self.left = math.inf if max_held_bytes is None else max_held_bytes
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the handler of a call, within the call's limits; or one that raises an error if the token is
        not known.

        continuation: returns the handler of the method, or None if there is no such method.
        handler_call_details: the call's method and metadata.

        Returns None if there is no such method and the token is known. Calls of the health service need no
        token, and neither does any call if the server has no tokens.
        """
        details: Any = handler_call_details
        _set_trace_context(details.invocation_metadata or ())
        try:
            if self._tokens and not details.method.startswith(OPEN):
                self._tokens.check(authorization_of(details.invocation_metadata))
        except Exception as error:
            handler = _refusal(error)
        else:
            handler = await continuation(handler_call_details)
        return handler and _wrapped(handler, HeldBytes(self))


def _set_trace_context(metadata: Any) -> None:
    """Set the trace context of the task that answers a call, and the trace's id in its log lines.

    A trace context that cannot be parsed counts as absent.

    metadata: the call's (key, value) pairs.
    """
    caller.set(next((well_formed(value) for key, value in metadata if key == TRACEPARENT), None))
    bind_contextvars(trace_id=trace_of(caller.get()))


def _refusal(error: Exception) -> Any:
    """Return a handler that raises an error for a call of any kind, also if the method does not exist.

    error: the error to raise.

    The handler sends no response.
    """

    async def refuse(request: object, context: object) -> NoReturn:
        """Raise the error, for any request.

        request, context: given by gRPC, not needed.
        """
        raise error

    return grpc.stream_stream_rpc_method_handler(refuse)  # pyrefly: ignore[bad-argument-type]


def _wrapped(handler: Any, held: HeldBytes) -> Any:
    """Return a handler that does the same within the call's limits, and turns errors into statuses.

    handler: the handler of the method.
    held: counts the bytes of this call's messages.

    The kind of the call, which is unary or a stream on each side, stays the same. A request without a
    deserializer is passed on as bytes.
    """
    kinds = {False: "unary", True: "stream"}
    kind = f"{kinds[handler.request_streaming]}_{kinds[handler.response_streaming]}"
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(
        _guarded(getattr(handler, kind), handler.request_streaming, held),
        request_deserializer=handler.request_deserializer and _tolerant(handler.request_deserializer, held),
        response_serializer=handler.response_serializer,
    )


def _tolerant(deserialize: Callable[[bytes], Any], held: HeldBytes) -> Callable[[bytes], Any]:
    """Return a deserializer that returns an error instead of raising it.

    An error that is raised in a deserializer would not reach the client. The handler raises it instead.

    deserialize: the deserializer of the method's requests.
    held: counts the bytes of this call's messages.

    The bytes of a request stay counted until the call ends.
    """

    def read(data: bytes) -> Any:
        """Return the request of a message, Overloaded if the budget has too little left, or WireError if it
        cannot be parsed.

        data: the bytes of the message.
        """
        try:
            return deserialize(data) if held.reserve(len(data)) else Overloaded(_NO_ROOM)
        except Exception:  # Whatever a client's bytes cause, the client must not see it as a Python error.
            return WireError("the message does not parse")

    return read


def _guarded(behaviour: Behaviour, streams_requests: bool, held: HeldBytes) -> Behaviour:
    """Return a handler's function wrapped in a coroutine function or asynchronous generator function,
    whichever `behaviour` is.

    gRPC treats the two differently.

    behaviour: the function of the handler.
    streams_requests: True if the client sends a stream of requests.
    held: counts the bytes of this call's messages, which are released at the end.

    The result ends the call with the status of any exception, including one that `read` of `_tolerant`
    returned in the place of a request. A `behaviour` that is an asynchronous generator function gives a
    generator, any other one a coroutine function.
    """
    admit = partial(_checked_stream, held=held) if streams_requests else _checked

    async def answer(request: Any, context: ServicerContext[Any, Any]) -> Any:
        """Run a handler with a single response, and return the response.

        request: the deserialized request, or the stream of requests.
        context: context of the call, which gets the status of an error.
        """
        try:
            return await behaviour(admit(request), context)
        except Exception as error:
            await refuse(context, error)
        finally:
            held.release()

    async def generate(request: Any, context: ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        """Run a handler with a stream of responses, and yield the responses.

        request: the deserialized request, or the stream of requests.
        context: context of the call, which gets the status of an error.
        """
        try:
            async with aclosing(behaviour(admit(request), context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await refuse(context, error)
        finally:
            held.release()

    return generate if inspect.isasyncgenfunction(behaviour) else answer


def _checked(request: Any) -> Any:
    """Return a request unchanged, or raise the error that the deserializer returned instead.

    request: the result of the deserializer.

    Only an object that is a SpecsotError counts as an error.
    """
    if isinstance(request, SpecsotError):
        raise request
    return request


async def _checked_stream(requests: AsyncIterator[Any], held: HeldBytes) -> AsyncIterator[Any]:
    """Yield the requests of a stream, and free the memory of each before the next one is read.

    requests: the results of the deserializer.
    held: counts the bytes of this call's messages.

    Raises the error that the deserializer returned in the place of a request, and ends.
    """
    async for request in requests:
        yield _checked(request)
        held.release()


async def refuse(context: ServicerContext[Any, Any], error: Exception) -> NoReturn:
    """End a call with the status of an error; never returns. An error by which gRPC has ended the call
    already, and any error of a call that has ended, is raised unchanged.

    An error that is not a SpecsotError is logged and becomes an internal error without its message.

    context: context of the call.
    error: what the call raised.
    """
    if isinstance(error, AbortError) or context.done():
        raise error
    if not isinstance(error, SpecsotError):
        log.error("a call failed", exc_info=error)
        error = SpecsotError("internal error")
    status = status_of(error)
    await context.abort(code_of(error), status.message, ((TRAILER, status.SerializeToString()),))
