"""What the master tells of itself: the page at /, /ring for it, /metrics, /version.

Refuses to know requests.
"""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST as TEXT_FORMAT
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from specsot._version import __version__
from specsot.info import Info
from specsot_master.gateway.answers import Version
from specsot_master.gateway.house import House


def ring_routes(house: House) -> APIRouter:
    router = APIRouter(tags=["the ring"])
    page = read_page()
    headers = headers_of(page)

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def show_page() -> Response:
        return HTMLResponse(page, headers=headers)

    @router.get("/ring")
    async def show_ring() -> Info:
        """Models, members, layer ranges, KV pages, and how the newest laps went."""
        return house.desk.info()

    @router.get("/metrics", response_class=PlainTextResponse)
    async def show_figures() -> Response:
        """Figures in Prometheus' text format."""
        return Response(house.figures(), media_type=TEXT_FORMAT)

    @router.get("/version", response_model=Version)
    async def show_version() -> dict[str, str]:
        return {"version": __version__}

    _ = show_page, show_ring, show_figures, show_version
    return router


def read_page() -> str:
    return (files("specsot_master.gateway") / "page.html").read_text(encoding="utf-8")


def headers_of(page: str) -> dict[str, str]:
    """The page is one file: it may run what is written in it, talk to where it came from, and no more."""
    rules = (
        "default-src 'none'",
        f"style-src {_hash_of(page, 'style')}",
        f"script-src {_hash_of(page, 'script')}",
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


def _hash_of(page: str, tag: str) -> str:
    """What a browser must find between <tag> and </tag>."""
    inside = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"'sha256-{b64encode(sha256(inside.encode()).digest()).decode()}'"
