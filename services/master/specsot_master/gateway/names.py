"""For a door on loopback that asks nobody who they are: only who calls it by a name of this machine comes in.

Refuses to know endpoints. A page from elsewhere can point its own name at 127.0.0.1 and so make a browser
talk to us as if it were still talking to its own server (DNS rebinding); the name is in the request.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specsot.rpc.exposure import exposed
from specsot_master.gateway.refusals import refusal

MISDIRECTED = 421


class OwnNames:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if host and exposed(with_port(host)):
            await refusal(MISDIRECTED, "this server is only for its own machine")(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def with_port(host: str) -> str:
    """Browsers leave out the usual one."""
    bare = host.endswith("]") or ":" not in host
    return f"{host}:80" if bare else host
