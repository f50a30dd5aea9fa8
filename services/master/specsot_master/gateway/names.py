"""For a door that asks nobody who they are: only who calls it by a name of its own comes in.

Refuses to know endpoints. A page from elsewhere can point its own name at our address and so make a browser
talk to us as if it were still talking to its own server (DNS rebinding); the name is in the request. An
address is nobody's name: whoever writes one is where they believe to be.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specsot.params import brief
from specsot_master.gateway.refusals import refusal

MISDIRECTED = 421


class HostCheck:
    """names: what it is called, beside localhost and this machine's own name."""

    def __init__(self, app: ASGIApp, names: Iterable[str] = ()) -> None:
        own = socket.gethostname()
        self._app = app
        self._names = {name.lower() for name in ("localhost", own, own.partition(".")[0], *names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if host and not self._owns(host_of(host)):
            told = f"this server is not known as {brief(host_of(host))}: --http-names names those that it has"
            await refusal(MISDIRECTED, told)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _owns(self, name: str) -> bool:
        return name in self._names or is_address(name)


def host_of(host: str) -> str:
    """A Host header without its port, in small letters."""
    named, colon, port = host.rpartition(":")
    with_port = colon and port.isdecimal() and (":" not in named or named.endswith("]"))
    return (named if with_port else host).lower().rstrip(".")


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
