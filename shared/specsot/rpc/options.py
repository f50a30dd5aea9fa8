"""gRPC's settings, the same for every server and channel.

Refuses to know who uses them. Sizes in bytes, times in milliseconds, as gRPC wants them.
"""

from __future__ import annotations

PUBLIC_BYTES = 8 << 20  # the longest prompt's tokens, with room
RING_BYTES = 256 << 20  # hidden and fused rows of the largest frame

Options = list[tuple[str, int]]

# Without max_pings_without_data = 0 a frozen peer behind a live kernel is never noticed.
_ALIVE: Options = [
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


def server_options(largest: int) -> Options:
    """SO_REUSEPORT is off: two servers on one port is an error, not a lottery."""
    return [
        *_sizes(largest),
        *_ALIVE,
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.so_reuseport", 0),
    ]


def channel_options(largest: int) -> Options:
    """No proxy and no shared connection: a link to a restarted peer starts without its old backoff."""
    return [
        *_sizes(largest),
        *_ALIVE,
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 5_000),
    ]


def _sizes(largest: int) -> Options:
    return [
        ("grpc.max_receive_message_length", largest),
        ("grpc.max_send_message_length", largest),
    ]
