"""Binds the port of the HTTP server."""

from __future__ import annotations

import socket
from typing import Final

from specsot.errors import Unavailable
from specsot.transport.grpc_server import reason, split_address

# Connections. How many may wait to be accepted; further ones are tried again by their clients after a second.
# Precedent: uvicorn, 2048.
BACKLOG: Final = 2048


def bind(address: str) -> socket.socket:
    """Return a listening, non-blocking socket. The address may be used again at once after a restart.

    address: host:port on which it listens; a host with colons is an IPv6 address.

    Raises Unavailable if the address is not of the form host:port, or if it cannot be used.
    """
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise Unavailable(f"cannot listen at {address}: {reason(error)}") from None
    listener.setblocking(False)
    return listener
