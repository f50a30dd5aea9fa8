"""DNS rebinding: a page from elsewhere cannot make a browser use an endpoint that asks for no token."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import httpx2 as httpx
import pytest

from specsot.transport.grpc_channel import PUBLIC_BYTES, Terms
from specsot.transport.security import Tokens
from specsot_master.config import read_config
from specsot_master.core.ring.ring_state import RingOptions
from specsot_master.http.app import open_http
from specsot_master.http.server import HttpServer
from specsot_master.master import assemble
from specsot_master.telemetry import observe_master

pytestmark = pytest.mark.timeout(60)

TERMS = Terms(PUBLIC_BYTES)


@pytest.fixture
async def url(demo_model: Path) -> AsyncIterator[str]:
    endpoint, place = await gateway(demo_model, TERMS)
    yield place
    await endpoint.close(0)


async def gateway(
    demo_model: Path, terms: Terms, listen: str = "127.0.0.1:0", names: Iterable[str] = ()
) -> tuple[HttpServer, str]:
    master = assemble(demo_model / "base", RingOptions())
    endpoint = await open_http(listen, master, terms, observe_master(master), names=names)
    return endpoint, f"http://127.0.0.1:{endpoint.port}"


async def status(url: str, host: str, target: str = "/version") -> int:
    """target: in the request line."""
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        asked = client.get(url, headers={"host": host}, extensions={"target": target.encode()})
        return (await asked).status_code


OWN = (
    *("127.0.0.1:8000", "localhost", "LocalHost:1", "localhost.", "[::1]:8000", "[::1]", "127.1.2.3"),
    *("10.0.0.7:80", "[fd00::7]:8000", socket.gethostname()),
)
OTHERS = (
    *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "master"),
    *("evil.example:x", "1.2.3", ":80", "[evil]:80"),
)


async def test_this_machines_own_names_and_no_others(url: str) -> None:
    assert {host: await status(url, host) for host in OWN} == dict.fromkeys(OWN, 200)
    assert {host: await status(url, host) for host in OTHERS} == dict.fromkeys(OTHERS, 421)


async def test_a_name_in_the_request_line_counts_instead_of_the_hosts(url: str) -> None:
    for host in ("127.0.0.1:8000", "evil.example"):
        assert await status(url, host, "http://localhost:8000/version?x=1") == 200
        assert await status(url, host, "HTTPS://[::1]") == 200, "the page"
        assert await status(url, host, "http://localhost/http://localhost/version") == 404
        assert await status(url, host, "http://evil.example/version") == 421
        assert await status(url, host, "http://localhost@evil.example/version") == 421


async def test_an_endpoint_for_everybody_is_guarded_too_and_has_the_names_that_it_is_given(
    demo_model: Path,
) -> None:
    """As in a container that is published on its host's loopback alone: a browser there reaches it."""
    endpoint, url = await gateway(demo_model, TERMS, "0.0.0.0:0", ["Master", "fleet.example"])
    assert [await status(url, host) for host in ("master:8000", "FLEET.example", "127.0.0.1")] == [200] * 3
    assert [await status(url, host) for host in ("evil.example", "master.evil.example")] == [421] * 2
    await endpoint.close(0)


@pytest.mark.parametrize("names", ["a,,b", "fleet.example:80", "http://x", " "])
def test_what_is_no_name_is_refused(names: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_config(["--model", "m", "--http-names", names])
    assert "is not a host name" in capsys.readouterr().err


async def test_with_tokens_the_name_does_not_matter(demo_model: Path) -> None:
    """A page from elsewhere has none, and a proxy in front may use any name."""
    endpoint, url = await gateway(demo_model, Terms(PUBLIC_BYTES, tokens=Tokens(token="secret")))
    assert await status(url, "fleet.example") == 401
    await endpoint.close(0)
