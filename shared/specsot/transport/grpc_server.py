"""Opens a gRPC server with limits, health, reflection, token checks, and errors as rich statuses."""

from __future__ import annotations

import contextlib
import inspect
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

OPEN = "/grpc.health.v1.Health/"
HEADER = "authorization"


def shown(metadata: Any) -> str | None:
    """The header, if there is exactly one."""
    values = [value for key, value in metadata or () if key == HEADER]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None


log = structlog.get_logger()

Attach = Callable[[grpc.aio.Server], None]

_TERMS = Terms(keepalive=LINK)
_V1 = "grpc.reflection.v1.ServerReflection"


class GrpcServer:
    """A server that is open. `port` is the real one (0 for a unix socket)."""

    def __init__(self, server: grpc.aio.Server, port: int, state: Any) -> None:
        self._server = server
        self.port = port
        self._state = state

    async def report(self, service: str, serving: bool) -> None:
        """Tell the world by grpc.health.v1 whether a service can do its work."""
        states = health_pb2.HealthCheckResponse
        await self._state.set(service, states.SERVING if serving else states.NOT_SERVING)

    async def close(self, grace: float) -> None:
        """No new calls; those under way have `grace` seconds, then they are cancelled."""
        await self._state.enter_graceful_shutdown()
        await self._server.stop(grace)


async def open_server(listen: str, services: Mapping[str, Attach], terms: Terms = _TERMS) -> GrpcServer:
    """Serve at host:port or unix:path. `services` start as not serving; "" is live at once.

    Raises, in one line, Unavailable when the address cannot be had, InvalidRequest for bad certificates.
    """
    check_free(listen)
    if exposed(listen) and not terms.asks:
        log.warning("other machines reach this address, and nobody is asked who they are", at=listen)
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
    door = GrpcServer(server, _bind(server, listen, credentials), state)
    for name in services:
        await door.report(name, False)
    await server.start()
    return door


def names_of(services: Iterable[str], terms: Terms) -> list[str]:
    """Everything that is served, in the words of reflection."""
    debugging = ["grpc.channelz.v1.Channelz"] if terms.channelz else []
    return [*services, "grpc.health.v1.Health", *debugging, _V1, reflection.SERVICE_NAME]


def reflect(server: grpc.aio.Server, names: list[str]) -> None:
    """Reflection v1alpha, and v1 too: the messages are the same, grpcio-reflection serves only the former."""
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
        self._pool = descriptor_pool.Default()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:
        """Raises KeyError."""
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            service, _, method = symbol.rpartition(".")
            found = self._pool.FindServiceByName(service)
            return found.methods_by_name[method].containing_service.file


def describe_v1() -> None:
    """Let v1 be looked up as well: whoever walks all services asks for the file of each."""
    known = descriptor_pool.Default()
    try:
        known.FindFileContainingSymbol(_V1)
    except KeyError:
        alpha = descriptor_pb2.FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
        renamed = json_format.MessageToJson(alpha).replace("v1alpha", "v1")
        known.Add(json_format.Parse(renamed, descriptor_pb2.FileDescriptorProto()))


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port". Raises Unavailable."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise Unavailable(f"{address} is not an address; write host:port")
    return host.strip("[]"), int(port)


def check_free(listen: str) -> None:
    """Find out in plain words what gRPC would only say in a stack of C++ lines."""
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


def reason(error: OSError) -> str:
    if error.errno and error.errno > 0:
        return os.strerror(error.errno).lower()
    return error.strerror or str(error)  # of the resolver, or Python's own


def _bind(server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, credentials)
    except RuntimeError:
        raise Unavailable(f"cannot listen at {listen}: {_refused(listen)}") from None
    return 0 if listen.startswith("unix:") else port


def _refused(listen: str) -> str:
    """Why gRPC does not listen there, which it does not say."""
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

_NO_ROOM = "the messages of other calls fill the memory for them"


class HeldBytes:
    """Bytes of the messages of one call, out of a budget that all have."""

    def __init__(self, guard: CallGuard) -> None:
        self._guard = guard
        self._bytes = 0

    def take(self, size: int) -> bool:
        if self._guard.left is None:
            return True
        fits = size <= self._guard.left
        if fits:
            self._bytes += size
            self._guard.left -= size
        return fits

    def give_back(self) -> None:
        if self._guard.left is not None:
            self._guard.left += self._bytes
        self._bytes = 0


class CallGuard(grpc.aio.ServerInterceptor):
    """Asks every call for its token, sets the trace context that it brought, bounds what calls hold, makes
    a status of whatever they raise.

    left: bytes that messages of calls under way may still have, None for no limit.
    """

    def __init__(self, held: int | None = None, tokens: Tokens | None = None) -> None:
        self.left = held
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        details: Any = handler_call_details
        _trace(details.invocation_metadata or ())
        try:
            if self._tokens and not details.method.startswith(OPEN):
                self._tokens.check(shown(details.invocation_metadata))
        except Exception as error:
            handler = _refusal(error)
        else:
            handler = await continuation(handler_call_details)
        return handler and _wrapped(handler, HeldBytes(self))


def _trace(metadata: Any) -> None:
    """For the task that answers a call: its `caller`, and the trace's name in log lines. What does not parse
    counts as absent.
    """
    caller.set(next((well_formed(value) for key, value in metadata if key == TRACEPARENT), None))
    bind_contextvars(trace_id=trace_of(caller.get()))


def _refusal(error: Exception) -> Any:
    """Answers a call of any kind; whether there is such a method is not told either."""

    async def refuse(request: object, context: object) -> NoReturn:
        raise error

    return grpc.stream_stream_rpc_method_handler(refuse)  # pyrefly: ignore[bad-argument-type]


def _wrapped(handler: Any, held: HeldBytes) -> Any:
    kinds = {False: "unary", True: "stream"}
    kind = f"{kinds[handler.request_streaming]}_{kinds[handler.response_streaming]}"
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(
        _guarded(getattr(handler, kind), handler.request_streaming, held),
        request_deserializer=handler.request_deserializer and _tolerant(handler.request_deserializer, held),
        response_serializer=handler.response_serializer,
    )


def _tolerant(deserialize: Callable[[bytes], Any], held: HeldBytes) -> Callable[[bytes], Any]:
    """In place of a message that cannot be had, the error that says why: raised here, it would be lost."""

    def read(data: bytes) -> Any:
        try:
            return deserialize(data) if held.take(len(data)) else Overloaded(_NO_ROOM)
        except Exception:  # any: a stranger's bytes must not reach the caller as a Python error
            return WireError("the message does not parse")

    return read


def _guarded(behaviour: Behaviour, streaming: bool, held: HeldBytes) -> Behaviour:
    """The same kind of coroutine or generator as `behaviour`; gRPC treats the two differently."""
    admit = partial(_checked_stream, held=held) if streaming else _checked

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
    if isinstance(request, SpecsotError):
        raise request
    return request


async def _checked_stream(requests: AsyncIterator[Any], held: HeldBytes) -> AsyncIterator[Any]:
    """The next message comes when it is asked for: then nobody holds the one before."""
    async for request in requests:
        yield _checked(request)
        held.give_back()


async def refuse(context: ServicerContext[Any, Any], error: Exception) -> NoReturn:
    """End a call with what `error` means. Errors of gRPC itself pass through."""
    if isinstance(error, AbortError) or context.done():
        raise error
    if not isinstance(error, SpecsotError):
        log.error("a call failed", exc_info=error)
        error = SpecsotError("internal error")
    status = status_of(error)
    await context.abort(code_of(error), status.message, ((TRAILER, status.SerializeToString()),))
