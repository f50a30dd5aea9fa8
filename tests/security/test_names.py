"""DNS rebinding: a page from elsewhere cannot make a browser use a door on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2 as httpx
import pytest

from specsot.rpc.options import PUBLIC_BYTES, Terms
from specsot.rpc.tokens import Tokens
from specsot_master.assembly import MasterSettings, assemble
from specsot_master.desk import Desk
from specsot_master.gateway.door import HttpDoor
from specsot_master.gateway.opening import open_gateway

pytestmark = pytest.mark.timeout(60)

TERMS = Terms(PUBLIC_BYTES)


@pytest.fixture
async def url(demo_model: Path) -> AsyncIterator[str]:
    door, place = await gateway(demo_model, TERMS)
    yield place
    await door.close(0)


async def gateway(demo_model: Path, terms: Terms) -> tuple[HttpDoor, str]:
    master = assemble(MasterSettings(demo_model / "base"))
    door = await open_gateway("127.0.0.1:0", master, Desk(master.leader, master.info), terms)
    return door, f"http://127.0.0.1:{door.port}"


async def status(url: str, host: str) -> int:
    async with httpx.AsyncClient(trust_env=False) as client:
        return (await client.get(f"{url}/version", headers={"host": host})).status_code


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost", "LocalHost:1", "[::1]:8000", "[::1]", "127.1.2.3"]
)
async def test_this_machines_own_names(url: str, host: str) -> None:
    assert await status(url, host) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.7:80"]
)
async def test_other_names(url: str, host: str) -> None:
    assert await status(url, host) == 421


async def test_with_tokens_the_name_does_not_matter(demo_model: Path) -> None:
    """A page from elsewhere has none, and a proxy in front may use any name."""
    door, url = await gateway(demo_model, Terms(PUBLIC_BYTES, tokens=Tokens(token="secret")))
    assert await status(url, "fleet.example") == 401
    await door.close(0)
