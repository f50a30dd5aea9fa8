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
from specsot_master.gateway.bearer import OPEN, Bearer
from specsot_master.gateway.house import House
from specsot_master.gateway.intake import Intake, largest_of
from specsot_master.gateway.openai.routes import openai_routes
from specsot_master.gateway.refusals import refuse, refuse_body, refuse_http
from specsot_master.gateway.ring import ring_routes
from specsot_master.gateway.seeds import seed_routes


def build_app(house: House, tokens: Tokens | None = None) -> ASGIApp:
    """Everything that is served, behind whatever looks at requests first."""
    largest = largest_of(lambda: house.positions)
    if tokens is None:
        return Intake(gather(house), largest)
    return Bearer(Intake(gather(house, Guarded), largest), tokens)


class Guarded(FastAPI):
    """Says in /openapi.json that a token is wanted, and where it is not."""

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
        for path in OPEN & document["paths"].keys():
            for operation in document["paths"][path].values():
                operation["security"] = []
        return document


def gather(house: House, kind: type[FastAPI] = FastAPI) -> FastAPI:
    """The endpoints. The documents' own pages would fetch scripts from elsewhere: left out."""
    app = kind(title="SpecSoT", version=__version__, docs_url=None, redoc_url=None, responses=dict(REFUSALS))
    for fault, answer in (
        (SpecsotError, refuse),
        (RequestValidationError, refuse_body),
        (HTTPException, refuse_http),
        (Exception, refuse),
    ):
        app.add_exception_handler(fault, answer)
    for routes in (openai_routes, seed_routes, ring_routes):
        app.include_router(routes(house))
    return app
