"""Which addresses other machines can reach.

Refuses to know sockets: an address is judged by how it is written.
"""

from __future__ import annotations

import ipaddress


def exposed(address: str) -> bool:
    """Neither a unix socket nor loopback. Names count as reachable, but for localhost."""
    if address.startswith("unix:"):
        return False
    host = address.rpartition(":")[0].strip("[]")
    if host.lower() == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True
