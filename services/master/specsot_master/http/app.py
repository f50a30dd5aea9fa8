"""Builds the HTTP application from all routes, the status page and middleware, and opens its server."""

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
from specsot.params import Mode
from specsot.transport.grpc_channel import Terms
from specsot.transport.security import Tokens
from specsot_master.http.calls import PING_SECONDS, HttpContext
from specsot_master.http.errors import refuse, refuse_body, refuse_http
from specsot_master.http.json_bodies import take_turns
from specsot_master.http.messages_api import messages_routes
from specsot_master.http.middleware import (
    MAX_BODIES_BYTES,
    OPEN_PATHS,
    SMALL_BYTES,
    BearerCheck,
    BodyLimits,
    HostCheck,
    max_body_bytes,
)
from specsot_master.http.openai_api import openai_routes
from specsot_master.http.responses_api import responses_routes
from specsot_master.http.schemas import REFUSALS, Version
from specsot_master.http.server import HttpServer
from specsot_master.http.tokenizer_api import tokenizer_routes
from specsot_master.master import Master, ServingState
from specsot_master.telemetry import Metrics


def ring_routes(context: HttpContext) -> APIRouter:
    """Return the routes of the status page, the ring's state, metrics and version. They are GET /, /ring,
    /metrics and /version.

    context: what all endpoints share.
    """
    router = APIRouter(tags=["the ring"])
    page = read_page()
    headers = headers_of(page)

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def show_page() -> Response:
        """Return the status page."""
        return HTMLResponse(page, headers=headers)

    @router.get("/ring")
    async def show_ring() -> Info:
        """Models, members, layer ranges, KV pages, and statistics of the newest steps."""
        return (await context.state()).info

    @router.get("/metrics", response_class=PlainTextResponse)
    async def show_figures() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(await context.figures(), media_type=TEXT_FORMAT)

    @router.get("/version", response_model=Version)
    async def show_version() -> dict[str, str]:
        """The version of SpecSoT."""
        return {"version": __version__}

    _ = show_page, show_ring, show_figures, show_version
    return router


def read_page() -> str:
    """Return index.html as text with its styles and scripts inlined, so that hashes can allow them. The files
    are those of the package's folder "page".
    """
    folder = files("specsot_master.http") / "page"

    def put_in(link: re.Match[str]) -> str:
        """Return the element that takes the place of a link to a style or script, with the file's text in it.

        link: a match of _PARTS.
        """
        name, tag = (link["style"], "style") if link["style"] else (link["script"], "script")
        return f"<{tag}>{(folder / name).read_text(encoding='utf-8')}</{tag}>"

    return re.sub(_PARTS, put_in, (folder / "index.html").read_text(encoding="utf-8"))


# Finds a link to a style or a script in index.html, with its file's name.
_PARTS = r'<link rel="stylesheet" href="(?P<style>[^"]+)">|<script src="(?P<script>[^"]+)"></script>'


def headers_of(page: str) -> dict[str, str]:
    """Return the page's headers, whose content security policy allows as little as possible.

    The page may run its own scripts and connect to this server; it may not turn text into HTML or load
    anything else.

    page: the HTML text, whose scripts and styles are inline.
    """
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
    """Return the hashes of all texts between <tag> and </tag>, as a content security policy lists them; "" if
    there are none.

    page: the HTML text.
    tag: "style" or "script".
    """
    inside = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in inside)


def build_guarded_app(
    context: HttpContext,
    tokens: Tokens | None,
    names: Iterable[str],
    origins: Iterable[str],
    num_processes: int = 1,
) -> ASGIApp:
    """Return the whole application of a server. The Host header is checked only if no token is required.

    context: what all endpoints share.
    tokens: the valid client tokens, or None if none is required.
    names: host names of this server, which are checked if no token is required; empty for no further names.
    origins: origins of web pages that may send requests; empty for none.
    num_processes: how many processes share the memory for bodies.
    """
    app = build_app(context, tokens, origins, num_processes)
    return HostCheck(app, names) if tokens is None else app


def build_app(
    context: HttpContext,
    tokens: Tokens | None = None,
    origins: Iterable[str] = (),
    num_processes: int = 1,
) -> ASGIApp:
    """Return the whole application, with the middleware that checks requests first: the size of bodies, the
    token if tokens are required, and the origin if origins are given. Requests of other origins get no
    permission of the browser; x-request-id is the only response header that scripts may read.

    context: what all endpoints share.
    tokens: the valid client tokens, or None if none is required.
    origins: origins of web pages that may send requests; empty for none.
    num_processes: how many processes share the memory for bodies.
    """
    api = build_api(context, FastAPI if tokens is None else TokenProtectedApi)
    app: ASGIApp = BodyLimits(
        api,
        max_body_bytes(context.model.max_positions),
        budget_bytes=MAX_BODIES_BYTES // num_processes,
        small_bytes=SMALL_BYTES // num_processes,
    )
    if tokens is not None:
        app = BearerCheck(app, tokens)
    if allowed := tuple(origins):
        methods = ("GET", "POST")
        exposed = ("x-request-id",)
        return CORSMiddleware(app, allowed, methods, allow_headers=("*",), expose_headers=exposed)
    return app


class TokenProtectedApi(FastAPI):
    """An application whose /openapi.json says that a token is required, and where none is."""

    def openapi(self) -> dict[str, Any]:
        """Return the API document, in which every path requires a token except OPEN_PATHS. A bearer token is
        the document's only kind of credential.
        """
        document = super().openapi()
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
        for path in OPEN_PATHS & document["paths"].keys():
            for operation in document["paths"][path].values():
                operation["security"] = []
        return document


def build_api(context: HttpContext, app_class: type[FastAPI] = FastAPI) -> FastAPI:
    """Return the application with all endpoints and error handlers. FastAPI's documentation pages are turned
    off, because they load scripts from other servers. Errors are answered in the format of their endpoint.

    context: what all endpoints share.
    app_class: FastAPI, or a subclass that changes the API document.
    """
    app = app_class(
        title="SpecSoT", version=__version__, docs_url=None, redoc_url=None, responses=dict(REFUSALS)
    )
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
    """Return the functions that make the routes of other packages, such as those of SpecSoT's predecessors,
    by the names of their entry points. Empty if no such package is installed.
    """
    points = entry_points(group="specsot.http_routes")
    return [point.load() for point in sorted(points, key=lambda point: point.name)]


async def open_http(
    address: str,
    master: Master,
    terms: Terms,
    metrics: Metrics,
    mode: Mode = "direct",
    ping_every: float = PING_SECONDS,
    names: Iterable[str] = (),
    origins: Iterable[str] = (),
) -> HttpServer:
    """Serve a master's HTTP API, and return the running server. The Host header is checked only if no token
    is required.

    address: host:port on which it listens; port 0 stands for any free port.
    master: what serves the clients' requests.
    terms: the TLS certificate, and the valid client tokens.
    metrics: what GET /metrics returns.
    mode: the mode of requests that name none, from OpenAI's clients.
    ping_every: seconds of silence in a stream before a ping.
    names: host names of this server, which are checked if no token is required; empty for no further names.
    origins: origins of web pages that may send requests; empty for none.

    Raises Unavailable if the address cannot be used, and InvalidRequest for bad certificates.
    """

    async def state() -> ServingState:
        """Return the present state of the master."""
        return master.state()

    async def figures() -> bytes:
        """Return the metrics in Prometheus' text format."""
        return metrics.written()

    context = HttpContext(
        master.requests,
        master.model,
        master.text,
        state=state,
        figures=figures,
        began=int(time.time()),
        mode=mode,
        ping_every=ping_every,
    )
    return HttpServer(build_guarded_app(context, terms.tokens, names, origins), terms.tls, address)
