"""What the master tells of itself: the page at /, /ring for it, /metrics, /version.

Refuses to know requests.
"""

from __future__ import annotations

import dataclasses
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST as TEXT_FORMAT
from starlette.responses import HTMLResponse, Response

from specsot import __version__
from specsot_master.gateway.house import House

# The page is one file: nothing is fetched from anywhere, and nobody may put it into a frame.
_GUARD = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def ring_routes(house: House) -> APIRouter:
    router = APIRouter(tags=["the ring"])
    page = (files("specsot_master.gateway") / "page.html").read_text(encoding="utf-8")

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def show_page() -> Response:
        return HTMLResponse(page, headers=_GUARD)

    @router.get("/ring")
    async def show_ring() -> dict[str, Any]:
        """Models, members, layer ranges, KV pages, and how the newest laps went."""
        return dataclasses.asdict(house.desk.info())

    @router.get("/metrics")
    async def show_figures() -> Response:
        """Figures in Prometheus' text format."""
        return Response(house.figures(), media_type=TEXT_FORMAT)

    @router.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": __version__}

    _ = show_page, show_ring, show_figures, show_version
    return router
