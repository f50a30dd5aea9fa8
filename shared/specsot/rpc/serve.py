"""Opens a gRPC server with what every service has: limits, keepalive, health, reflection, clear refusals.

Refuses to know what is served.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import grpc
import structlog
from google.protobuf import descriptor_pb2, descriptor_pool, json_format
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from specsot.errors import Unavailable
from specsot.rpc.bearer import BearerInterceptor
from specsot.rpc.credentials import server_credentials
from specsot.rpc.exposure import exposed
from specsot.rpc.guard import CallGuard
from specsot.rpc.options import Terms, server_options
from specsot.rpc.tracing import TraceInterceptor

log = structlog.get_logger()

Attach = Callable[[grpc.aio.Server], None]

_TERMS = Terms()
_V1 = "grpc.reflection.v1.ServerReflection"


class GrpcServer:
    """A server that is open. `port` is the real one (0 for a unix socket)."""

    def __init__(self, server: grpc.aio.Server, port: int, state: Any) -> None:
        self._server, self.port, self._state = server, port, state

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
    asked = [BearerInterceptor(terms.tokens)] if terms.tokens else []
    server = grpc.aio.server(
        interceptors=[CallGuard(terms.held), *asked, TraceInterceptor()], options=server_options(terms)
    )
    state: Any = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
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
    servicer = reflection.aio.ReflectionServicer(service_names=names)
    request, response = reflection_pb2.ServerReflectionRequest, reflection_pb2.ServerReflectionResponse
    for service in (reflection.SERVICE_NAME, _V1):
        method = grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo, request.FromString, response.SerializeToString
        )
        handler = grpc.method_handlers_generic_handler(service, {"ServerReflectionInfo": method})
        server.add_generic_rpc_handlers((handler,))


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
    return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)


def _bind(server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, credentials)
    except RuntimeError:
        raise Unavailable(f"cannot listen at {listen}: address already in use") from None
    return 0 if listen.startswith("unix:") else port
