"""The HTTP endpoint with tokens and TLS: who comes in, what the others are told, and in whose words."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

import httpx2 as httpx
import openai
import pytest

from specsot.transport.security import Tokens
from tests.http.apart import served_apart
from tests.http.house import Served, served
from tests.security.tls_files import Authority

pytestmark = pytest.mark.timeout(60)

TOKEN = "the-one-that-counts"
SHOWN = {"authorization": f"Bearer {TOKEN}"}
OPEN = {"/", "/health"}
CLOSED = ["/ring", "/metrics", "/version", "/info", "/v1/models", "/openapi.json", "/nothing", "/health/"]
QUESTION = {"messages": [{"role": "user", "content": "What is it?"}], "specsot": {"mode": "direct"}}


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[Served]:
    (tmp_path / "tokens").write_text(f"{TOKEN}\n")
    async with served(tokens=Tokens(tmp_path / "tokens")) as one:
        yield one
        await one.quiet()
        one.stage.assert_clean()


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer guess"}, {"authorization": TOKEN}, {"x-token": TOKEN}],
    ids=["none", "wrong", "bare", "elsewhere"],
)
async def test_nothing_but_health_and_the_page_is_open(house: Served, headers: dict[str, str]) -> None:
    async with house.client(headers=headers) as client:
        for path, method in product(CLOSED, ("GET", "POST", "HEAD", "OPTIONS")):
            answer = await client.request(method, path)
            assert answer.status_code == 401, (path, method)
            assert answer.headers["www-authenticate"] == "Bearer"
            if method == "GET":
                error = answer.json()["error"]
                assert error == {
                    "message": error["message"],
                    "type": "invalid_request_error",
                    "param": None,
                    "code": "invalid_api_key",
                }


@pytest.mark.parametrize("path", sorted(OPEN))
async def test_health_and_the_page_are(house: Served, path: str) -> None:
    assert (await house.get(path)).status_code == 200


async def test_with_a_token_everything_is_as_ever(house: Served) -> None:
    async with house.client(headers=SHOWN) as client:
        for path in ("/ring", "/metrics", "/version", "/info", "/v1/models", "/openapi.json"):
            assert (await client.get(path)).status_code == 200, path
        assert (await client.get("/nothing")).status_code == 404
        assert (await client.post("/v1/chat/completions", json=QUESTION)).status_code == 200


async def test_openais_client_says_what_is_wrong(house: Served) -> None:
    """Its key is the token."""
    async with openai.AsyncOpenAI(
        base_url=f"{house.url}/v1", api_key="guess", max_retries=0, http_client=house.client()
    ) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.models.list()
        assert caught.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="demo", messages=[], stream=True)
        known = client.with_options(api_key=TOKEN)
        ids = [model.id async for model in await known.models.list()]
        assert ids == ["demo", "demo:auto", "demo:sot"]


async def test_a_long_question_without_a_token_is_refused_before_it_is_read(house: Served) -> None:
    """Megabytes are on their way; the client still hears why they are not wanted."""
    body = {"messages": [{"role": "user", "content": "x" * (6 << 20)}]}
    answer = await house.post("/v1/chat/completions", body)
    assert answer.status_code == 401
    assert house.stage.ring.orders == []


async def test_over_tls(authority: Authority, tmp_path: Path) -> None:
    trusting = ssl.create_default_context(cafile=authority.file)
    async with secured(authority, tmp_path) as house:
        url = f"https://127.0.0.1:{house.endpoint.port}"
        async with httpx.AsyncClient(base_url=url, verify=trusting, trust_env=False, timeout=100) as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/v1/models")).status_code == 401
            answer = await client.post("/v1/chat/completions", json=QUESTION, headers=SHOWN)
            assert answer.json()["choices"][0]["message"]["content"]
        async with httpx.AsyncClient(trust_env=False, timeout=100) as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get(f"{url}/health")
            with pytest.raises(httpx.HTTPError):
                await stranger.get(f"http://127.0.0.1:{house.endpoint.port}/health")


async def test_api_processes_have_the_same_certificate_and_tokens(
    authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text(f"{TOKEN}\n")
    own = authority.issue("master")
    files = {"certificate": str(own.cert), "key": str(own.key), "token_file": str(tmp_path / "tokens")}
    trusting = ssl.create_default_context(cafile=authority.file)
    async with served_apart(**files) as house:
        url = f"https://127.0.0.1:{house.endpoint.port}"
        async with httpx.AsyncClient(trust_env=False, timeout=100) as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get(f"{url}/health")
            with pytest.raises(httpx.HTTPError):
                await stranger.get(f"http://127.0.0.1:{house.endpoint.port}/health")
        async with httpx.AsyncClient(base_url=url, verify=trusting, trust_env=False, timeout=100) as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/v1/models")).status_code == 401
            answer = await client.post("/v1/chat/completions", json=QUESTION, headers=SHOWN)
            assert answer.json()["choices"][0]["message"]["content"]


async def test_its_certificate_is_renewed_in_service(authority: Authority, tmp_path: Path) -> None:
    async with secured(authority, tmp_path) as house:
        first = await serial(house, authority)
        assert await serial(house, authority) == first
        own = authority.issue("master")  # in the same files
        second = await serial(house, authority)
        assert second != first
        assert own.key
        own.key.write_text("nonsense")
        assert await serial(house, authority) == second, "what does not fit is not taken"


@asynccontextmanager
async def secured(authority: Authority, folder: Path) -> AsyncIterator[Served]:
    (folder / "tokens").write_text(f"{TOKEN}\n")
    own = authority.issue("master")
    async with served(tokens=Tokens(folder / "tokens"), tls=replace(own, ca=None)) as house:
        yield house
        await house.quiet()


async def serial(house: Served, authority: Authority) -> str:
    """Of the certificate that is shown."""
    context = ssl.create_default_context(cafile=authority.file)
    _, writer = await asyncio.open_connection(
        "127.0.0.1", house.endpoint.port, ssl=context, server_hostname="localhost"
    )
    shown = writer.get_extra_info("peercert")
    writer.close()
    return shown["serialNumber"]


async def test_the_document_says_where_a_token_is_wanted(house: Served) -> None:
    async with house.client(headers=SHOWN) as client:
        told = (await client.get("/openapi.json")).json()
    assert told["components"]["securitySchemes"]["token"] == {"type": "http", "scheme": "bearer"}
    assert told["security"] == [{"token": []}]
    free = {path for path, one in told["paths"].items() if all(o.get("security") == [] for o in one.values())}
    assert free == OPEN & told["paths"].keys() != set()
