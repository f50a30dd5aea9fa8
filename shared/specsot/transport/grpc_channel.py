"""Opens gRPC channels: credentials, one-line reasons when nobody answers, health probes."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import grpc
from grpc import ChannelConnectivity as State
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specsot.errors import Refused, Unavailable
from specsot.transport.grpc_options import PUBLIC_BYTES, RING_BYTES, channel_options
from specsot.transport.security import PLAIN, Tls, WatchedFiles, read_pems

DIAL_SECONDS = 5.0  # seconds until a peer that neither answers nor refuses counts as absent


def open_channel(
    address: str, largest: int = RING_BYTES, tls: Tls = PLAIN, name: str | None = None
) -> grpc.aio.Channel:
    """A channel that has not connected yet. name: see channel_options. Raises InvalidRequest (tls)."""
    credentials = channel_credentials(tls)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=channel_options(largest))
    return grpc.aio.secure_channel(address, credentials, options=channel_options(largest, name))


async def reach(
    address: str,
    patience: float = DIAL_SECONDS,
    largest: int = RING_BYTES,
    tls: Tls = PLAIN,
    name: str | None = None,
) -> grpc.aio.Channel:
    """A connected channel. Raises Unavailable at the first refusal, or after `patience` seconds."""
    channel = open_channel(address, largest, tls, name)
    try:
        async with asyncio.timeout(patience):
            await _connected(channel, address)
    except TimeoutError:
        await channel.close()
        raise Unavailable(f"nobody answered at {address} within {patience:g} s") from None
    except BaseException:
        await channel.close()
        raise
    return channel


async def _connected(channel: grpc.aio.Channel, address: str) -> None:
    state = channel.get_state(try_to_connect=True)
    while state is not State.READY:
        if state in (State.TRANSIENT_FAILURE, State.SHUTDOWN):
            raise Unavailable(f"nobody answers at {address}{await _reason(channel)}")
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)


async def _reason(channel: grpc.aio.Channel) -> str:
    """Why it does not connect: only a call is told, and a call on such a channel fails at once."""
    try:
        await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=1)
    except grpc.aio.AioRpcError as failure:
        return failure_in_words(failure.details() or "")
    return ""


Role = Literal["master", "worker", "drafter"]


def server_credentials(tls: Tls) -> grpc.ServerCredentials | None:
    """None: no TLS. Changed files hold from the next connection on. Raises InvalidRequest."""
    if tls.cert is None:
        return None
    fresh = WatchedFiles(tls.paths, lambda: _configuration(tls))
    return grpc.dynamic_ssl_server_credentials(fresh.value(), fresh.value, tls.ca is not None)


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials | None:
    """None: no TLS. Read anew for every channel. Raises InvalidRequest."""
    if tls.ca is None:
        return None
    pems = read_pems(tls)
    key, cert = pems.pair or (None, None)
    return grpc.ssl_channel_credentials(pems.ca, key, cert)


def names_of(context: Any) -> frozenset[str] | None:
    """The names in the peer's certificate; None where the door asks for no certificates."""
    known = context.auth_context()
    if "x509_pem_cert" not in known:
        return None
    return frozenset(name.decode(errors="replace") for name in known.get("peer_dns", ()))


def check_role(names: frozenset[str] | None, who: str, *roles: Role) -> None:
    """Raises Refused when a peer's certificate, which has these names, is for none of the roles."""
    if names is not None and names.isdisjoint(roles):
        shown = ", ".join(sorted(names)) or "nobody"
        raise Refused(f"{who} shows a certificate for {shown}; {' or '.join(roles)} is needed")


def _configuration(tls: Tls) -> Any:
    pems = read_pems(tls)
    return grpc.ssl_server_certificate_configuration([pems.pair] if pems.pair else [], pems.ca)


def probe(address: str, service: str = "", timeout: float = 2.0, tls: Tls = PLAIN) -> str:
    """SERVING, NOT_SERVING, or in words why there is no such answer. Raises InvalidRequest (tls)."""
    with _channel(address, tls) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            health: Any = health_pb2_grpc.HealthStub(channel)
            response = health.Check(request, timeout=timeout)
        except grpc.RpcError as failure:
            return _in_words(failure, service)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


def _channel(address: str, tls: Tls) -> grpc.Channel:
    credentials, options = channel_credentials(tls), channel_options(PUBLIC_BYTES)
    if credentials is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, credentials, options)


def _in_words(failure: grpc.RpcError, service: str) -> str:
    why = failure_in_words(failure.details() or "") if isinstance(failure, grpc.Call) else ""
    code = failure.code() if isinstance(failure, grpc.Call) else grpc.StatusCode.UNKNOWN
    words = {
        grpc.StatusCode.NOT_FOUND: f"there is no {service} here",
        grpc.StatusCode.UNIMPLEMENTED: "something else answers here",
        grpc.StatusCode.UNAVAILABLE: f"nobody answers{why}",
        grpc.StatusCode.DEADLINE_EXCEEDED: "no answer in time",
    }
    return words.get(code, code.name)


_WORDS = {
    "certificate has expired": "its certificate has expired",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not vouched for by --tls-ca",
    "Hostname Verification": "its certificate is for another name",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "Socket closed": "it hung up: one side speaks TLS and the other does not, or it wants our certificate",
}


def failure_in_words(details: str) -> str:
    """ " (why)", or nothing where there is nothing to say but that nobody is there."""
    return next((f" ({words})" for said, words in _WORDS.items() if said in details), "")
