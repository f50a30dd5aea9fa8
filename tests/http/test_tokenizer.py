"""/tokenize and /detokenize; models named with a mode; pages of other origins."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import httpx2 as httpx
import pytest

from specsot.service.option_table import ORIGINS
from specsot_master.engine.intake import THREAD_CHARACTERS
from specsot_master.http.app import build_app
from specsot_master.text import CHARACTERS_PER_POSITION, Text
from tests.http.house import Served
from tests.master.letters import ANSWER, SAYS

pytestmark = pytest.mark.timeout(60)

TURN = {"role": "user", "content": "Letters?"}
WHAT = {"role": "user", "content": "What is it?"}


async def test_a_prompts_tokens_and_back(house: Served) -> None:
    told = (await house.post("/tokenize", {"prompt": "Why is the sky blue?", "model": "demo"})).json()
    assert told["tokens"] == list(house.stage.text.encode_prompt("Why is the sky blue?"))
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 2048)
    back = (await house.post("/detokenize", {"tokens": told["tokens"]})).json()
    assert back == {"prompt": "Why is the sky blue?"}


async def test_a_conversations_tokens_are_what_is_counted_for_it(house: Served) -> None:
    told = (await house.post("/tokenize", {"messages": [WHAT]})).json()
    answer = (await house.post("/v1/chat/completions", {"messages": [WHAT]})).json()
    assert told["count"] == answer["usage"]["prompt_tokens"]
    bare = (await house.post("/tokenize", {"messages": [WHAT], "add_generation_prompt": False})).json()
    assert bare["tokens"] == told["tokens"][: bare["count"]]
    assert 0 < bare["count"] < told["count"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "Letters?"}),
        ("/tokenize", {"messages": [TURN]}),
        ("/v1/messages/count_tokens", {"messages": [TURN]}),
        ("/v1/completions", {"prompt": "What is it?"}),
    ],
)
async def test_requests_are_tokenised_in_a_thread(
    house: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """Four megabytes take seconds, in which members would miss the master."""
    where, within = list[threading.Thread](), Text._token_ids

    def split(self: Text, text: str, add_bos: bool) -> tuple[int, ...]:
        where.append(threading.current_thread())
        return within(self, text, add_bos)

    monkeypatch.setattr(Text, "_token_ids", split)
    assert (await house.post(path, body)).status_code == 200
    assert where[0] is not threading.main_thread(), "those behind it are of who plays the ring"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "word " * 40_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 40_000}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "word " * 40_000}], "max_tokens": 5}),
    ],
)
async def test_only_a_part_of_a_far_too_long_text_is_tokenised(
    house: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """Two million characters of a model of 8,192 positions held a thread for 4 to 7 seconds."""
    seen, within = list[int](), Text._token_ids

    def split(self: Text, text: str, add_bos: bool) -> tuple[int, ...]:
        seen.append(len(text))
        return within(self, text, add_bos)

    monkeypatch.setattr(Text, "_token_ids", split)
    answer = await house.post(path, body)
    assert (answer.status_code, "context length" in answer.text) == (400, True)
    assert sum(seen) <= CHARACTERS_PER_POSITION * 2048


async def test_short_texts_do_not_wait_for_long_ones_of_other_requests(
    house: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which there may be more than threads: 24 of half a megabyte held them for 6 seconds."""
    go_on, within, loop = threading.Event(), Text._token_ids, asyncio.get_running_loop()
    begun = asyncio.Event()

    def split(self: Text, text: str, add_bos: bool) -> tuple[int, ...]:
        if len(text) > THREAD_CHARACTERS:
            loop.call_soon_threadsafe(begun.set)
            go_on.wait()
        return within(self, text, add_bos)

    monkeypatch.setattr(Text, "_token_ids", split)
    long = [asyncio.ensure_future(house.post("/tokenize", {"prompt": "word " * 10_000})) for _ in range(40)]
    try:
        await begun.wait()
        for path in ("/v1/completions", "/tokenize"):
            async with asyncio.timeout(20):
                assert (await house.post(path, {"prompt": "What is it?"})).status_code == 200
    finally:
        go_on.set()
    assert {answer.status_code for answer in await asyncio.gather(*long)} == {200}


async def test_a_long_text_of_long_words_is_tokenised_whole(house: Served) -> None:
    """Blanks, say, of which the next token takes many; and what a template leaves out is not there."""
    turn = {"role": "user", "content": "What is it?" + " " * 20_000}
    answer = await house.post("/v1/chat/completions", {"messages": [turn]})
    assert answer.status_code == 200 or "tokens" in answer.json()["error"]["message"]


async def test_prompts_are_echoed_from_a_thread(house: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 of 8,000 tokens took the loop a quarter of a second."""
    where, within = dict[str, threading.Thread](), Text.decode

    def decode(self: Text, tokens: Sequence[int], skip_special: bool = True) -> str:
        text = within(self, tokens, skip_special)
        where.setdefault(text, threading.current_thread())
        return text

    monkeypatch.setattr(Text, "decode", decode)
    ids = list(house.stage.text.encode("What is it?"))
    answer = await house.post("/v1/completions", {"prompt": ids, "echo": True})
    assert answer.json()["choices"][0]["text"].startswith("What is it?")
    assert where["What is it?"] is not threading.main_thread()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": [TURN]}, 400),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404),
        ("/tokenize", {"prompt": "a" * 3_000_000}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": [8191, 8192]}, 400),
        ("/detokenize", {"tokens": [1] * 3000}, 400),
        ("/detokenize", {"tokens": "a"}, 400),
    ],
)
async def test_what_has_no_tokens(house: Served, path: str, body: dict[str, Any], status: int) -> None:
    answer = await house.post(path, body)
    assert (answer.status_code, set(answer.json())) == (status, {"error"})


async def test_a_model_named_with_a_mode(house: Served) -> None:
    listed = (await house.get("/v1/models")).json()["data"]
    assert [(card["id"], card["root"]) for card in listed] == [
        (name, "demo") for name in ("demo", "demo:auto", "demo:sot")
    ]
    assert (await house.get("/v1/models/demo:sot")).json() == listed[2]
    answer = (await house.post("/v1/chat/completions", {"model": "demo:sot", "messages": [TURN]})).json()
    assert (answer["choices"][0]["message"]["content"], answer["model"]) == (ANSWER, "demo:sot")
    chosen = {
        "model": "demo:sot",
        "messages": [{"role": "user", "content": "What is it?"}],
        "specsot": {"mode": "direct"},
    }
    answer = (await house.post("/v1/chat/completions", chosen)).json()
    assert answer["choices"][0]["message"]["content"] == SAYS["What is"], "the body's own mode wins"


async def test_plain_completions_write_no_plans(house: Served) -> None:
    refused = await house.post("/v1/completions", {"model": "demo:sot", "prompt": "a"})
    assert refused.status_code == 400
    assert "demo:sot writes plans" in refused.json()["error"]["message"]
    answer = await house.post("/v1/completions", {"model": "demo:auto", "prompt": "What is it?"})
    assert (answer.status_code, answer.json()["model"]) == (200, "demo:auto")
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        assert (await house.post(path, body | {"model": "demo:sot"})).status_code == 200


async def test_pages_of_allowed_origins_may_ask(house: Served) -> None:
    asked = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    async with house.client() as client:
        refused = await client.options("/v1/chat/completions", headers=asked)
    assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (405, False)
    app = build_app(house.context, origins=ORIGINS.read("https://chat.example,http://localhost:3000"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
        allowed = await client.options("/v1/chat/completions", headers=asked)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, asked["origin"])
        other = await client.options(
            "/v1/chat/completions", headers=asked | {"origin": "https://evil.example"}
        )
        assert other.status_code == 400
        told = await client.get("/version", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in told.headers


@pytest.mark.parametrize("text", ["chat.example", "https://chat.example/path", "", "https://*.example"])
def test_what_is_no_origin(text: str) -> None:
    with pytest.raises(ValueError, match="is no origin"):
        ORIGINS.read(text)
