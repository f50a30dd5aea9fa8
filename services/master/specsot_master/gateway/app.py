"""Puts the HTTP door's endpoints together, with one way to refuse and one way in.

Refuses to know sockets and processes.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from specsot._version import __version__
from specsot.errors import SpecsotError
from specsot.rpc.tokens import Tokens
from specsot_master.gateway.answers import REFUSALS
from specsot_master.gateway.bearer import OPEN_PATHS, BearerCheck
from specsot_master.gateway.house import HttpContext
from specsot_master.gateway.intake import BodyLimits, largest_of
from specsot_master.gateway.openai.routes import openai_routes
from specsot_master.gateway.refusals import refuse, refuse_body, refuse_http
from specsot_master.gateway.ring import ring_routes
from specsot_master.gateway.seeds import legacy_routes


def build_app(house: HttpContext, tokens: Tokens | None = None) -> ASGIApp:
    """Everything that is served, behind whatever looks at requests first."""
    largest = largest_of(lambda: house.positions)
    if tokens is None:
        return BodyLimits(build_api(house), largest)
    return BearerCheck(BodyLimits(build_api(house, TokenProtectedApi), largest), tokens)


class TokenProtectedApi(FastAPI):
    """Says in /openapi.json that a token is wanted, and where it is not."""

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
        for path in OPEN_PATHS & document["paths"].keys():
            for operation in document["paths"][path].values():
                operation["security"] = []
        return document


def build_api(house: HttpContext, kind: type[FastAPI] = FastAPI) -> FastAPI:
    """The endpoints. The documents' own pages would fetch scripts from elsewhere: left out."""
    app = kind(title="SpecSoT", version=__version__, docs_url=None, redoc_url=None, responses=dict(REFUSALS))
    for fault, answer in (
        (SpecsotError, refuse),
        (RequestValidationError, refuse_body),
        (HTTPException, refuse_http),
        (Exception, refuse),
    ):
        app.add_exception_handler(fault, answer)
    for routes in (openai_routes, legacy_routes, ring_routes):
        app.include_router(routes(house))
    return app
