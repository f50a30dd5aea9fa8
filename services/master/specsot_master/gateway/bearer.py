"""Lets only those in who show a token, before a byte of what they send is read.

Refuses to know endpoints. Health is open, as by gRPC; so is the page, which is the same for everybody and
asks for a token itself. Figures, the ring and the documents are for those who have one.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specsot.errors import Unauthenticated
from specsot.rpc.tokens import Tokens
from specsot_master.gateway.refusals import response_of

OPEN_PATHS = frozenset({"/", "/health", "/ping"})
OWNER = "specsot.owner"  # in a call's scope: whose token it shows


class BearerCheck:
    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app, self._tokens = app, tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
        except Unauthenticated as error:
            await response_of(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return
        shown = Headers(scope=scope).getlist("authorization")
        scope[OWNER] = self._tokens.owner(shown[0] if len(shown) == 1 else None)
