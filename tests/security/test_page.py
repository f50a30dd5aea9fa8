"""The page where tokens are asked for: it says so, takes one, and knows a wrong one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from specsot.transport.security import Tokens
from tests.http.browser import LAST, chromium, done, opened, shoot, text_of, until
from tests.http.house import Served, served
from tests.master.letters import SAYS

__all__ = ["chromium"]  # a fixture for all of this file

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module")
async def house(tmp_path: Path) -> AsyncIterator[Served]:
    (tmp_path / "tokens").write_text("opensesame\n")
    async with served(tokens=Tokens(tmp_path / "tokens")) as one:
        yield one
        one.going.set()
        await one.quiet()


async def test_a_token_is_asked_for_kindly_and_once(house: Served) -> None:
    async with opened(house) as page:
        assert await text_of(page, "#state-words") == "a token is needed"
        await until(page, "document.activeElement.id === 'token'")
        await shoot(page, "token")
        await page.check("input[value=direct]")
        await page.fill("#question", "What is it?")
        await page.click("#ask")
        await page.wait_for_selector(".notice")
        assert (await text_of(page, ".notice")).startswith("The server asks for a token. a token is needed")
        assert await text_of(page, ".asked p") == "What is it?"
        await page.click("#token")
        await page.keyboard.type("opensesam")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#state-words:text('not known here')")
        assert await page.is_visible("#entry")
        await page.fill("#token", "opensesame")
        await page.press("#token", "Enter")
        await page.wait_for_selector("#state[data-is=ready]")
        assert not await page.is_visible("#entry")
        await page.click(".retry")
        await done(page, "stop")
        assert await text_of(page, f"{LAST} .body") == SAYS["What is"]
        await page.reload()
        await page.wait_for_selector("#state[data-is=ready]")
        assert "opensesame" not in await page.content()
        assert "opensesame" not in page.url
        assert "opensesame" not in await page.evaluate("JSON.stringify(localStorage)")


async def test_a_token_that_was_taken_away(house: Served, tmp_path: Path) -> None:
    async with opened(house) as page:
        await page.fill("#token", "opensesame")
        await page.press("#token", "Enter")
        await page.wait_for_selector("#state[data-is=ready]")
        (tmp_path / "tokens").write_text("another\n")
        await page.wait_for_selector("#entry:visible")
        assert await text_of(page, "#state-words") == "the token is not known here"
