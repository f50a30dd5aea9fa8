"""gRPC channel and server options: message sizes, keepalive, stream limits.

Sizes in bytes, times in milliseconds, as gRPC wants them.
"""

from __future__ import annotations

from dataclasses import dataclass

from specsot.transport.security import PLAIN, Tls, Tokens

PUBLIC_BYTES = 8 << 20  # the longest prompt's tokens, with room
RING_BYTES = 256 << 20  # hidden and fused rows of the largest frame
METADATA_BYTES = 16 << 10
MOST_STREAMS = 1024  # of one connection of a member
CLIENT_STREAMS = 100  # of a client's: each may bring a message of the largest size
HELD_BYTES = 256 << 20  # messages of all calls that are under way at a door for clients
HANDSHAKE = 15.0  # seconds in which a new connection must have begun to speak

Options = list[tuple[str, int | str]]


@dataclass(frozen=True, slots=True)
class Keepalive:
    """every: seconds between pings. patience: seconds without an answer after which a peer is gone."""

    every: float = 5.0
    patience: float = 10.0


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
        """Whoever comes must show who they are."""
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


def channel_options(largest: int, name: str | None = None) -> Options:
    """No proxy and no shared connection: a link to a restarted peer starts without its old backoff.

    name: what the peer's certificate must be for, where that is not the host that is dialed.
    """
    return [
        *([("grpc.ssl_target_name_override", name)] if name else []),
        *_sizes(largest),
        *_alive(Keepalive()),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 5_000),
    ]


def _alive(keepalive: Keepalive) -> Options:
    """Without max_pings_without_data = 0 a frozen peer behind a live kernel is never noticed; without
    ping_timeout a server takes a minute, whatever keepalive_timeout says.
    """
    return [
        ("grpc.keepalive_time_ms", int(keepalive.every * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive.patience * 1000)),
        ("grpc.http2.ping_timeout_ms", int(keepalive.patience * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _sizes(largest: int) -> Options:
    return [
        ("grpc.max_receive_message_length", largest),
        ("grpc.max_send_message_length", largest),
    ]
