"""Opens gRPC channels: options, credentials, one-line reasons of failures, health probes.

Sizes are in bytes. Times of gRPC's own options are in milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Literal

import grpc
from grpc import ChannelConnectivity as State
from grpc.aio import AioRpcError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specsot.errors import Refused, Unavailable
from specsot.transport.grpc_status import error_of
from specsot.transport.security import PLAIN, Tls, Tokens, WatchedFiles, read_pems

# Bytes. Bounds a client's message: the tokens of the longest prompt (MAX_TOKENS), with room to spare.
PUBLIC_BYTES = 8 << 20
# Bytes. Bounds a message between members: hidden and fused states of the largest frame.
RING_BYTES = 256 << 20
# Bytes. Bounds a call's metadata: a token, a trace context, an id. Untuned.
METADATA_BYTES = 16 << 10
# Calls. Bounds the concurrent calls of one connection between members. Untuned.
MAX_STREAMS = 1024
# Calls. Bounds the concurrent calls of a client's connection, each of which may send a message of
# PUBLIC_BYTES.
CLIENT_STREAMS = 100
# Bytes. Bounds the messages of all clients' running calls to 32 of the largest. Untuned.
HELD_BYTES = 256 << 20
# Seconds. Bounds the handshake of a new connection. Untuned.
HANDSHAKE_SECONDS = 15.0

StreamCall = grpc.aio.StreamStreamCall[Any, Any] | grpc.aio.StreamUnaryCall[Any, Any]
Options = list[tuple[str, int | str]]


@dataclass(frozen=True, slots=True)
class Keepalive:
    """The intervals of a connection's pings, and when a silent connection counts as broken.

    every: seconds between pings.
    patience: seconds within which the peer's operating system must acknowledge bytes.
    answer: seconds within which the peer must answer a ping.
    """

    every: float = 5.0
    patience: float = 10.0
    answer: float = 10.0


# Between members, a ping waits for what was sent before it: up to 4.5 MB in buffers, which take 18 s at 2
# Mbit/s. A broken line is still noticed after 14.7 s because of `patience`, and the master notices a frozen
# member.
LINK = Keepalive(answer=60.0)


@dataclass(frozen=True, slots=True)
class Terms:
    """The limits and the access rules of a server.

    largest: bytes of one message.
    keepalive: when a silent connection counts as broken.
    reflection: True if the server offers reflection. None: only if it needs neither tokens nor certificates.
    channelz: True if the server offers channelz, which reports the state of its connections.
    tls: the server's certificate, and whether clients need one.
    tokens: the tokens of which every call must send one, or None if none is needed.
    handshake: seconds for the handshake of a new connection.
    streams: concurrent calls of one connection.
    held: bytes of the messages of all running calls. None: no limit.
    """

    largest: int = RING_BYTES
    keepalive: Keepalive = Keepalive()
    reflection: bool | None = None
    channelz: bool = False
    tls: Tls = PLAIN
    tokens: Tokens | None = None
    handshake: float = HANDSHAKE_SECONDS
    streams: int = MAX_STREAMS
    held: int | None = None

    @property
    def needs_credentials(self) -> bool:
        """True if callers need a token or a certificate."""
        return self.tokens is not None or self.tls.mutual

    @property
    def reflects(self) -> bool:
        """True if the server offers reflection."""
        return not self.needs_credentials if self.reflection is None else self.reflection


def server_options(terms: Terms) -> Options:
    """Return the gRPC options of a server, as (name, value).

    SO_REUSEPORT is off, so that a second server on the same port fails instead of getting some of the calls.

    terms: the limits and the access rules of the server.
    """
    return [
        *_size_options(terms.largest),
        *_ping_options(terms.keepalive),
        ("grpc.max_metadata_size", METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES),
        ("grpc.max_concurrent_streams", terms.streams),
        ("grpc.server_handshake_timeout_ms", int(terms.handshake * 1000)),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.so_reuseport", 0),
        ("grpc.enable_channelz", int(terms.channelz)),
    ]


def channel_options(largest: int, name: str | None = None, keepalive: Keepalive = LINK) -> Options:
    """Return the gRPC options of a channel, as (name, value). The channel uses no proxy.

    A channel shares no connection with others, so that a link to a restarted peer does not wait for an
    earlier link's backoff.

    largest: bytes of the largest message in either direction.
    name: the name that the peer's certificate must have, if it is not the dialed host.
    keepalive: when a silent connection counts as broken.
    """
    return [
        *([("grpc.ssl_target_name_override", name)] if name else []),
        *_size_options(largest),
        *_ping_options(keepalive),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 5_000),
    ]


def _ping_options(keepalive: Keepalive) -> Options:
    """Return the options of pings.

    A frozen peer whose operating system still acknowledges bytes is noticed only because of
    `ping_timeout_ms`, and only if `max_pings_without_data` is 0. `keepalive_timeout_ms` is a timeout of TCP.

    keepalive: the intervals, in seconds.
    """
    return [
        ("grpc.keepalive_time_ms", int(keepalive.every * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive.patience * 1000)),
        ("grpc.http2.ping_timeout_ms", int(keepalive.answer * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _size_options(largest: int) -> Options:
    """Return the options of message sizes.

    largest: bytes of the largest message in either direction.
    """
    return [("grpc.max_receive_message_length", largest), ("grpc.max_send_message_length", largest)]


# Seconds after which a peer that neither answers nor refuses a connection counts as absent. Untuned.
DIAL_SECONDS = 5.0


def open_channel(
    address: str,
    largest: int = RING_BYTES,
    tls: Tls = PLAIN,
    name: str | None = None,
    keepalive: Keepalive = LINK,
    library: Any = grpc.aio,
) -> Any:
    """Return a channel that has not connected yet.

    address: the peer's address, host:port or unix:path.
    largest: bytes of the largest message in either direction.
    tls: the TLS files; with a CA, the channel uses TLS, otherwise it is not encrypted.
    name: with TLS, the name that the peer's certificate must have. None: the dialed host.
    keepalive: when a silent connection counts as broken.
    library: `grpc.aio`, or `grpc` for a blocking channel.

    Raises InvalidRequest if TLS files are invalid.

    Nothing is sent before the first call, so that a peer that cannot be reached raises no error here.
    """
    credentials = channel_credentials(tls)
    options = channel_options(largest, name if credentials else None, keepalive)
    if credentials is None:
        return library.insecure_channel(address, options=options)
    return library.secure_channel(address, credentials, options=options)


async def reach(
    address: str,
    timeout_seconds: float = DIAL_SECONDS,
    largest: int = RING_BYTES,
    tls: Tls = PLAIN,
    name: str | None = None,
    keepalive: Keepalive = LINK,
) -> grpc.aio.Channel:
    """Return a connected channel.

    address: the peer's address, host:port or unix:path.
    timeout_seconds: seconds to wait. A peer that loads its layers may need some for the handshake.
    largest: bytes of the largest message in either direction.
    tls: the TLS files; with a CA, the channel uses TLS.
    name: with TLS, the name that the peer's certificate must have. None: the dialed host.
    keepalive: when a silent connection counts as broken.

    Raises Unavailable if the peer refuses the connection or does not answer in time, InvalidRequest if TLS
    files are invalid.

    Raises Unavailable also for an address that is none. The channel is closed before any error is raised. A
    server that ends a connection because it is busy is tried again until the time is over.
    """
    channel = open_channel(address, largest, tls, name, keepalive)
    try:
        async with asyncio.timeout(timeout_seconds):
            await _connected(channel, address)
    except TimeoutError:
        await channel.close()
        raise Unavailable(f"no process answered at {address} within {timeout_seconds:g} s") from None
    except BaseException:
        await channel.close()
        raise
    return channel


@contextlib.asynccontextmanager
async def greeting(
    call: StreamCall, first_message: bytes, timeout_message: str, timeout_seconds: float = DIAL_SECONDS
) -> AsyncGenerator[None]:
    """Return a context manager that writes the first message of a stream; the answer must be awaited within
    it.

    call: the stream, to which nothing was written yet.
    first_message: the encoded message.
    timeout_message: the message of the error if no answer arrives in time.
    timeout_seconds: seconds to wait for the answer. The context yields None.

    Raises the error that the peer raised, and Unavailable if no answer arrives in time.

    A stream that the peer has ended before the message was written is no error by itself; awaiting the answer
    then raises the peer's error. Other exceptions from within the context are raised unchanged.
    """
    try:
        async with asyncio.timeout(timeout_seconds):
            # The peer may have ended the stream before the message is written.
            with contextlib.suppress(asyncio.InvalidStateError):
                await call.write(first_message)
            yield
    except TimeoutError:
        call.cancel()
        raise Unavailable(timeout_message) from None
    except AioRpcError as failure:
        raise error_of(failure) from None


async def _connected(channel: grpc.aio.Channel, address: str) -> None:
    """Wait until a channel is connected. Raises Unavailable, with the reason, if the peer refuses the
    connection.

    channel: the channel.
    address: the peer's address, for the error message.

    Returns at once if the channel is connected. Waits without limit for a peer that does not answer. A
    failure that only says that the server is closing the connection or does answer now counts as no refusal.
    """
    state = channel.get_state(try_to_connect=True)
    while state is not State.READY:
        if state in (State.TRANSIENT_FAILURE, State.SHUTDOWN):
            reason = await _reason(channel)
            if not any(words in reason for words in _BUSY):
                raise Unavailable(f"no process answers at {address}{_why(address, reason)}")
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)


# gRPC's messages if a peer accepted the connection but did not complete the handshake within a second.
_BUSY = ("Handshake read failed (Endpoint closing)", "before receiving SETTINGS frame", "it answers now")


async def _reason(channel: grpc.aio.Channel) -> str:
    """Return the text in which gRPC says why a channel does not connect. Return "" if gRPC gives no text, and
    "it answers now" if the peer has become reachable meanwhile.

    gRPC reports the reason only to a call, and a call on such a channel fails at once.

    channel: a channel that failed to connect.
    """
    try:
        await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=1)
    except AioRpcError as failure:
        return failure.details() or ""
    return "it answers now"


Role = Literal["master", "worker", "drafter"]


def server_credentials(tls: Tls) -> grpc.ServerCredentials | None:
    """Return a server's credentials, or None if `tls` has no certificate. Raises InvalidRequest if the files
    are invalid.

    Changed files apply from the next connection on.

    tls: the paths of the files.

    Clients need a certificate if `tls` has a CA. If changed files are invalid, that is logged and the
    previous ones stay in use.
    """
    if tls.cert is None:
        return None
    configuration = WatchedFiles(tls.paths, lambda: _configuration(tls))
    return grpc.dynamic_ssl_server_credentials(configuration.value(), configuration.value, tls.ca is not None)


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials | None:
    """Return a channel's credentials, or None if `tls` has no CA. Raises InvalidRequest if the files are
    invalid.

    The files are read for every channel.

    tls: the paths of the files.

    Without a certificate in `tls`, the channel offers none to the server.
    """
    if tls.ca is None:
        return None
    pems = read_pems(tls)
    key, cert = pems.pair or (None, None)
    return grpc.ssl_channel_credentials(pems.ca, key, cert)


def names_of(context: Any) -> frozenset[str] | None:
    """Return the names in a peer's certificate, or None if the server needs no certificates.

    context: context of the peer's call.

    The set is empty if the certificate has no DNS names; its other names are ignored.
    """
    properties = context.auth_context()
    if "x509_pem_cert" not in properties:
        return None
    return frozenset(name.decode(errors="replace") for name in properties.get("peer_dns", ()))


def check_role(names: frozenset[str] | None, peer: str, *roles: Role) -> None:
    """Raise Refused if a peer's certificate is for none of the roles. Do nothing if no certificates are
    needed.

    names: names in the certificate. None if no certificates are needed; then every role is allowed.
    peer: the peer's name, for the error message.
    roles: the roles of which the certificate must name one.

    The certificate may have other names in addition to a role.
    """
    if names is not None and names.isdisjoint(roles):
        names_text = ", ".join(sorted(names)) or "no name"
        raise Refused(f"{peer} shows a certificate for {names_text}; {' or '.join(roles)} is needed")


def _configuration(tls: Tls) -> Any:
    """Return the server's certificates as they are in the files now.

    tls: the paths of the files.

    Raises InvalidRequest if a file is invalid.
    """
    pems = read_pems(tls)
    return grpc.ssl_server_certificate_configuration([pems.pair] if pems.pair else [], pems.ca)


def probe(address: str, service: str = "", timeout: float = 2.0, tls: Tls = PLAIN) -> str:
    """Return the health of a service: "SERVING", "NOT_SERVING", or another status that the server answered,
    or in words why there is no answer, such as "nobody answers" or "no answer in time".

    address: the server's address, host:port or unix:path.
    service: full name of the service. Empty: the server as a whole.
    timeout: seconds to wait for the answer.
    tls: the TLS files; with a CA, the channel uses TLS.

    Raises InvalidRequest if TLS files are invalid.
    """
    with open_channel(address, PUBLIC_BYTES, tls, library=grpc) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            health: Any = health_pb2_grpc.HealthStub(channel)
            response = health.Check(request, timeout=timeout)
        except grpc.RpcError as failure:
            return _in_words(failure, service, address)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


def _in_words(failure: grpc.RpcError, service: str, address: str) -> str:
    """Return in words why a health check got no answer.

    failure: the error that grpc raised.
    service: full name of the service that was asked for.
    address: the server's address.

    A code that has no words of its own gives its name, such as "PERMISSION_DENIED". The reason why a
    connection failed is added only if nobody answers.
    """
    why = _why(address, failure.details() or "") if isinstance(failure, grpc.Call) else ""
    code = failure.code() if isinstance(failure, grpc.Call) else grpc.StatusCode.UNKNOWN
    words = {
        grpc.StatusCode.NOT_FOUND: f"there is no {service} here",
        grpc.StatusCode.UNIMPLEMENTED: "something else answers here",
        grpc.StatusCode.UNAVAILABLE: f"no process answers{why}",
        grpc.StatusCode.DEADLINE_EXCEEDED: "no answer in time",
    }
    return words.get(code, code.name)


# The reason if an address has no port.
_NO_ADDRESS = "it is no HOST:PORT"
# What a part of gRPC's description of a failure means, in words for users.
_WORDS = {
    "certificate has expired": "its certificate has expired",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not vouched for by --tls-ca",
    "Hostname Verification": "its certificate is for another name",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "http1.x server": "it speaks HTTP/1; gRPC has a port of its own",
    "Misformatted domain name": _NO_ADDRESS,
    "Domain name not found": "there is no such host",
    "Socket closed": "it hung up: one side speaks TLS and the other does not, or it wants our certificate",
}


def _why(address: str, details: str) -> str:
    """Return the reason of a failure in words. An address without a port is named, because gRPC uses port
    443.

    address: the address that was dialed.
    details: gRPC's description of the failure.

    The result begins with a space, or is "" if gRPC's description only says that the peer is absent.
    """
    named = address.startswith("unix:") or address.rpartition(":")[2].isdecimal()
    return failure_in_words(details) if named else f" ({_NO_ADDRESS})"


def failure_in_words(details: str) -> str:
    """Return " (reason)" for gRPC's details of a failure, or "" if they only say that the peer is absent.

    details: gRPC's description of the failure.
    """
    return next((f" ({words})" for phrase, words in _WORDS.items() if phrase in details), "")
