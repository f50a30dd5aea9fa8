"""Tells this machine from others by their names and addresses."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import suppress

from specsot.errors import InvalidRequest


def hosts_here(hosts: Iterable[str]) -> frozenset[str]:
    """Those that are this machine. Raises InvalidRequest for one that cannot be resolved."""
    return frozenset(host for host in set(hosts) if _is_here(host))


def _is_here(host: str) -> bool:
    """Only an own address can be bound."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_DGRAM)
    except OSError:
        raise InvalidRequest(f"devices: nobody here knows the host {host}", field="devices") from None
    for family, kind, _, _, address in found:
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False
