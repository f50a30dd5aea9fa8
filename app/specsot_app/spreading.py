"""A fleet over several machines: which host is this one, where members come in, and what is missing.

Refuses to know what the services compute, and how they are started.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from specsot.errors import InvalidRequest
from specsot.transport.security import exposed
from specsot_app.lineup import LOOPBACK, Serving
from specsot_app.places import address_of

FLEET_PORT = 50060


def spread(serving: Serving, fleet: str | None, insecure: bool) -> Serving:
    """With a door for members that those elsewhere reach. Raises InvalidRequest, naming what is missing.

    fleet: the door that somebody chose.
    """
    if not serving.spread:
        apart = address_of(LOOPBACK, FLEET_PORT) if serving.certificates else None
        return replace(serving, fleet=fleet or apart)
    hosts = [place.host for place in serving.places]
    elsewhere = next(host for host in hosts if host not in serving.here)
    for host in hosts:
        if not exposed(address_of(host, 0)):
            raise InvalidRequest(
                f"devices name {host}, which {elsewhere} cannot reach: write this machine's address",
                field="devices",
            )
    if serving.certificates is None and not insecure:
        raise InvalidRequest(
            f"{elsewhere} is another machine: give --certificates FOLDER (docker/certificates.sh makes one), "
            "or --insecure in a network that nobody else is in",
            field="certificates",
        )
    return replace(serving, fleet=fleet or _door(hosts, serving.here, elsewhere))


def _door(hosts: Iterable[str], here: frozenset[str], elsewhere: str) -> str:
    """Of members, where this machine is one of the hosts."""
    own = next((host for host in hosts if host in here), None)
    if own is None:
        raise InvalidRequest(
            f"no device is here: give --fleet-listen HOST:{FLEET_PORT}, where {elsewhere} reaches this one",
            field="fleet_listen",
        )
    return address_of(own, FLEET_PORT)


def hosts_here(hosts: Iterable[str]) -> frozenset[str]:
    """Those that are this machine. Raises InvalidRequest for one that nobody knows."""
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
