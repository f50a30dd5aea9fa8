"""Opens gRPC channels: options, credentials, one-line reasons when nobody answers, health probes.

Sizes are in bytes; times of gRPC's own options in milliseconds.
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

PUBLIC_BYTES = 8 << 20  # bytes of a message: the longest prompt's tokens (MAX_TOKENS), with room
RING_BYTES = 256 << 20  # bytes of a message: hidden and fused rows of the largest frame
METADATA_BYTES = 16 << 10  # bytes of a call's metadata: a token, a trace, an id; not measured
MOST_STREAMS = 1024  # calls at a time of one connection between members; not measured
CLIENT_STREAMS = 100  # calls at a time of a client's connection: each may bring a message of the largest size
HELD_BYTES = 256 << 20  # bytes of messages of all clients' calls under way: 32 of the largest; not measured
HANDSHAKE = 15.0  # seconds in which a new connection must have begun to speak; not measured

StreamCall = grpc.aio.StreamStreamCall[Any, Any] | grpc.aio.StreamUnaryCall[Any, Any]
Options = list[tuple[str, int | str]]


@dataclass(frozen=True, slots=True)
class Keepalive:
    """every: seconds between pings. patience: seconds in which the peer's system must acknowledge bytes, and
    answer: in which the peer must answer a ping, after which it is gone.
    """

    every: float = 5.0
    patience: float = 10.0
    answer: float = 10.0


# Between members, where pings wait behind what was sent before: up to 4.5 MB in buffers, 18 s at 2 Mbit/s.
# A line that is cut is noticed after 14.7 s all the same, by `patience`; a frozen member by its master.
LINK = Keepalive(answer=60.0)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a server grants to whoever comes. largest: bytes of one message. streams: calls at a time, of a
    connection. held: bytes of all messages of calls that are under way, None for no limit.

    reflection, channelz: whether it tells what it serves, and how its connections stand. reflection None:
    where strangers may come in.
    tls: what it shows, and whether it wants to be shown the same. tokens: what every call must bring.
    """

    largest: int = RING_BYTES
    keepalive: Keepalive = Keepalive()
    reflection: bool | None = None
    channelz: bool = False
    tls: Tls = PLAIN
    tokens: Tokens | None = None
    handshake: float = HANDSHAKE
    streams: int = MOST_STREAMS
    held: int | None = None

    @property
    def asks(self) -> bool:
        return self.tokens is not None or self.tls.mutual

    @property
    def reflects(self) -> bool:
        return not self.asks if self.reflection is None else self.reflection


def server_options(terms: Terms) -> Options:
    """SO_REUSEPORT is off: two servers on one port is an error, not a lottery."""
    return [
        *_sizes(terms.largest),
        *_alive(terms.keepalive),
        ("grpc.max_metadata_size", METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES),
        ("grpc.max_concurrent_streams", terms.streams),
        ("grpc.server_handshake_timeout_ms", int(terms.handshake * 1000)),
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.so_reuseport", 0),
        ("grpc.enable_channelz", int(terms.channelz)),
    ]


def channel_options(largest: int, name: str | None = None, keepalive: Keepalive = LINK) -> Options:
    """No proxy and no shared connection: a link to a restarted peer starts without its old backoff.

    name: what the peer's certificate must be for, where that is not the host that is dialed.
    """
    return [
        *([("grpc.ssl_target_name_override", name)] if name else []),
        *_sizes(largest),
        *_alive(keepalive),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 5_000),
    ]


def _alive(keepalive: Keepalive) -> Options:
    """Without max_pings_without_data = 0 a frozen peer behind a live kernel is never noticed, and only by
    ping_timeout; keepalive_timeout is TCP's.
    """
    return [
        ("grpc.keepalive_time_ms", int(keepalive.every * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive.patience * 1000)),
        ("grpc.http2.ping_timeout_ms", int(keepalive.answer * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _sizes(largest: int) -> Options:
    return [("grpc.max_receive_message_length", largest), ("grpc.max_send_message_length", largest)]


DIAL_SECONDS = 5.0  # seconds until a peer that neither answers nor refuses counts as absent; not measured


def open_channel(
    address: str,
    largest: int = RING_BYTES,
    tls: Tls = PLAIN,
    name: str | None = None,
    keepalive: Keepalive = LINK,
) -> grpc.aio.Channel:
    """A channel that has not connected yet. name: see channel_options. Raises InvalidRequest (tls)."""
    credentials = channel_credentials(tls)
    options = channel_options(largest, name if credentials else None, keepalive)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


async def reach(
    address: str,
    patience: float = DIAL_SECONDS,
    largest: int = RING_BYTES,
    tls: Tls = PLAIN,
    name: str | None = None,
    keepalive: Keepalive = LINK,
) -> grpc.aio.Channel:
    """A connected channel. Raises Unavailable at the first refusal, or after `patience` seconds: a peer that
    loads its layers may take some to shake hands.
    """
    channel = open_channel(address, largest, tls, name, keepalive)
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


@contextlib.asynccontextmanager
async def greeting(
    call: StreamCall, word: bytes, silent: str, patience: float = DIAL_SECONDS
) -> AsyncGenerator[None]:
    """Says the first word of a stream; within, its answer is awaited. Raises what the peer raised, and
    Unavailable with the words of `silent` where no answer comes in time.
    """
    try:
        async with asyncio.timeout(patience):
            with contextlib.suppress(asyncio.InvalidStateError):  # refused before it was written
                await call.write(word)
            yield
    except TimeoutError:
        call.cancel()
        raise Unavailable(silent) from None
    except AioRpcError as failure:
        raise error_of(failure) from None


async def _connected(channel: grpc.aio.Channel, address: str) -> None:
    state = channel.get_state(try_to_connect=True)
    while state is not State.READY:
        if state in (State.TRANSIENT_FAILURE, State.SHUTDOWN):
            reason = await _reason(channel)
            if not any(words in reason for words in _BUSY):
                raise Unavailable(f"nobody answers at {address}{_why(address, reason)}")
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)


# gRPC's words for a peer that took the connection, and shook no hands within its second.
_BUSY = ("Handshake read failed (Endpoint closing)", "before receiving SETTINGS frame", "it answers now")


async def _reason(channel: grpc.aio.Channel) -> str:
    """Why it does not connect: only a call is told, and a call on such a channel fails at once."""
    try:
        await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=1)
    except AioRpcError as failure:
        return failure.details() or ""
    return "it answers now"


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
            return _in_words(failure, service, address)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


def _channel(address: str, tls: Tls) -> grpc.Channel:
    credentials = channel_credentials(tls)
    options = channel_options(PUBLIC_BYTES)
    if credentials is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, credentials, options)


def _in_words(failure: grpc.RpcError, service: str, address: str) -> str:
    why = _why(address, failure.details() or "") if isinstance(failure, grpc.Call) else ""
    code = failure.code() if isinstance(failure, grpc.Call) else grpc.StatusCode.UNKNOWN
    words = {
        grpc.StatusCode.NOT_FOUND: f"there is no {service} here",
        grpc.StatusCode.UNIMPLEMENTED: "something else answers here",
        grpc.StatusCode.UNAVAILABLE: f"nobody answers{why}",
        grpc.StatusCode.DEADLINE_EXCEEDED: "no answer in time",
    }
    return words.get(code, code.name)


_NO_ADDRESS = "it is no HOST:PORT"
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
    """gRPC takes port 443 where none is given."""
    named = address.startswith("unix:") or address.rpartition(":")[2].isdecimal()
    return failure_in_words(details) if named else f" ({_NO_ADDRESS})"


def failure_in_words(details: str) -> str:
    """ " (why)", or nothing where there is nothing to say but that nobody is there."""
    return next((f" ({words})" for said, words in _WORDS.items() if said in details), "")
