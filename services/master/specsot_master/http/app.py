"""The HTTP application: all routes, the status page, middleware; and how it is opened."""

from __future__ import annotations

import re
import time
from base64 import b64encode
from collections.abc import Callable, Iterable
from hashlib import sha256
from importlib.metadata import entry_points
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST as TEXT_FORMAT
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from specsot._version import __version__
from specsot.core.info import Info
from specsot.errors import SpecsotError
from specsot.members import Head
from specsot.params import Mode
from specsot.transport.grpc_channel import Terms
from specsot.transport.security import Tokens
from specsot_master.http.calls import PING_SECONDS, HttpContext
from specsot_master.http.errors import refuse, refuse_body, refuse_http
from specsot_master.http.json_bodies import take_turns
from specsot_master.http.messages_api import messages_routes
from specsot_master.http.middleware import OPEN_PATHS, BearerCheck, BodyLimits, HostCheck, largest_of
from specsot_master.http.openai_api import openai_routes
from specsot_master.http.responses_api import responses_routes
from specsot_master.http.schemas import REFUSALS, Version
from specsot_master.http.server import HttpDoor, open_http_door
from specsot_master.http.tokenizer_api import tokenizer_routes
from specsot_master.master import Master
from specsot_master.telemetry import Metrics


def ring_routes(context: HttpContext) -> APIRouter:
    router = APIRouter(tags=["the ring"])
    page = read_page()
    headers = headers_of(page)

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def show_page() -> Response:
        return HTMLResponse(page, headers=headers)

    @router.get("/ring")
    async def show_ring() -> Info:
        """Models, members, layer ranges, KV pages, and how the newest laps went."""
        return context.counter.info()

    @router.get("/metrics", response_class=PlainTextResponse)
    async def show_figures() -> Response:
        return Response(context.figures(), media_type=TEXT_FORMAT)

    @router.get("/version", response_model=Version)
    async def show_version() -> dict[str, str]:
        return {"version": __version__}

    _ = show_page, show_ring, show_figures, show_version
    return router


def read_page() -> str:
    """index.html with its styles and scripts in it: one file, so that one hash each allows them."""
    folder = files("specsot_master.http") / "page"

    def put_in(found: re.Match[str]) -> str:
        name, tag = (found["style"], "style") if found["style"] else (found["script"], "script")
        return f"<{tag}>{(folder / name).read_text(encoding='utf-8')}</{tag}>"

    return re.sub(_PARTS, put_in, (folder / "index.html").read_text(encoding="utf-8"))


_PARTS = r'<link rel="stylesheet" href="(?P<style>[^"]+)">|<script src="(?P<script>[^"]+)"></script>'


def headers_of(page: str) -> dict[str, str]:
    """The page may run what is in it, talk to where it came from, make no HTML of text, and no more."""
    rules = (
        "default-src 'none'",
        f"style-src {_hashes_of(page, 'style')}",
        f"script-src {_hashes_of(page, 'script')}",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return {
        "content-security-policy": "; ".join(rules),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }


def _hashes_of(page: str, tag: str) -> str:
    """Of what a browser finds between each <tag> and its </tag>."""
    inside = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in inside)


def build_app(context: HttpContext, tokens: Tokens | None = None, origins: Iterable[str] = ()) -> ASGIApp:
    """Everything that is served, behind whatever looks at requests first. origins: of pages that may ask."""
    largest = largest_of(context.model.max_positions)
    if tokens is None:
        app: ASGIApp = BodyLimits(build_api(context), largest)
    else:
        app = BearerCheck(BodyLimits(build_api(context, TokenProtectedApi), largest), tokens)
    if allowed := tuple(origins):
        methods = ("GET", "POST")
        told = ("x-request-id",)
        return CORSMiddleware(app, allowed, methods, allow_headers=("*",), expose_headers=told)
    return app


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


def build_api(context: HttpContext, kind: type[FastAPI] = FastAPI) -> FastAPI:
    """The endpoints. The documents' own pages would fetch scripts from elsewhere: left out."""
    app = kind(title="SpecSoT", version=__version__, docs_url=None, redoc_url=None, responses=dict(REFUSALS))
    take_turns(app)
    for fault, answer in (
        (SpecsotError, refuse),
        (RequestValidationError, refuse_body),
        (HTTPException, refuse_http),
        (Exception, refuse),
    ):
        app.add_exception_handler(fault, answer)
    for routes in (
        openai_routes,
        responses_routes,
        messages_routes,
        tokenizer_routes,
        *installed_routes(),
        ring_routes,
    ):
        app.include_router(routes(context))
    return app


def installed_routes() -> list[Callable[[HttpContext], APIRouter]]:
    """Routes that other packages bring as entry points, such as those of SpecSoT's predecessors."""
    points = entry_points(group="specsot.http_routes")
    return [point.load() for point in sorted(points, key=lambda point: point.name)]


async def open_http(
    listen: str,
    master: Master,
    terms: Terms,
    metrics: Metrics,
    mode: Mode = "direct",
    ping_every: float = PING_SECONDS,
    names: Iterable[str] = (),
    origins: Iterable[str] = (),
) -> HttpDoor:
    """mode: of OpenAI's clients who do not say. ping_every: as in HttpContext. names: what the door is called
    where nobody is asked for a token. origins: of other pages that may ask.

    Raises Unavailable when the address cannot be had, InvalidRequest for bad certificates.
    """

    def head() -> Head | None:
        rings = [one.fleet.ring for one in master.replicas if one.drafts]
        return next((ring.head for ring in rings if ring), None)

    context = HttpContext(
        master.requests,
        master.model,
        master.text,
        healthy=lambda: master.serving,
        head=head,
        figures=metrics.written,
        began=int(time.time()),
        mode=mode,
        ping_every=ping_every,
    )
    app = build_app(context, terms.tokens, origins)
    return await open_http_door(listen, HostCheck(app, names) if terms.tokens is None else app, terms.tls)
