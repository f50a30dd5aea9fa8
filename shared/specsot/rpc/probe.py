"""Asks one address for its health, once, and answers in half a second.

Refuses to know what serves there; imports nothing heavy (no torch, no asyncio, no wire).
"""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specsot.rpc.credentials import channel_credentials
from specsot.rpc.failures import failure_in_words
from specsot.rpc.options import PUBLIC_BYTES, channel_options
from specsot.rpc.tls import PLAIN, Tls


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
