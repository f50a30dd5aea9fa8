"""A real Chromium for tests of the page: windows, and what is asked in them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from specsot.core.frames import Open
from tests.http.house import Served, served

playwright = pytest.importorskip("playwright.async_api")

# The first has no windows of its own: half of the processor time, and the smaller package.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("SPECSOT_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
BROWSER: list[Any] = []  # the running one
SHOTS = os.environ.get("SPECSOT_SHOTS")  # a folder for pictures, where somebody wants to look

if CHROMIUM is None:
    pytest.skip("no Chromium is installed: apt-get install chromium-headless-shell", allow_module_level=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def chromium() -> AsyncIterator[None]:
    """Started once; every window is a fresh one."""
    async with playwright.async_playwright() as driver:
        BROWSER.append(
            await driver.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--renderer-process-limit=1"]
            )
        )
        yield
        await BROWSER.pop().close()


@pytest_asyncio.fixture(loop_scope="module")
async def house() -> AsyncIterator[Served]:
    async with served() as one:
        yield one
        one.going.set()  # where a test failed, nobody else plays what is left
        await one.quiet()
        one.stage.assert_clean()


@asynccontextmanager
async def opened(house: Served, **more: Any) -> AsyncIterator[Any]:
    """The page in a fresh window. Whatever it complains about, or asks elsewhere for, fails the test."""
    still = {
        "viewport": {"width": 1200, "height": 900},
        "reduced_motion": "reduce",
    }  # nothing is painted in vain
    context = await BROWSER[0].new_context(**still, **more)
    page, wrong = await context.new_page(), list[str]()
    page.set_default_timeout(60_000)
    page.on("pageerror", lambda error: wrong.append(f"{error}"))
    page.on("request", lambda asked: asked.url.startswith(house.url) or wrong.append(asked.url))
    page.on(
        "console", lambda said: re.search("Content Security|Trusted", said.text) and wrong.append(said.text)
    )
    await page.goto(house.url)
    await page.wait_for_selector("#state-words:not(:text('looking'))")
    try:
        yield page
    finally:
        await context.close()
    assert [one for one in wrong if not one.startswith("data:")] == []


LAST = ".answer:last-child"


async def ask(page: Any, question: str, mode: str | None = None) -> None:
    if mode:
        await page.check(f"input[value={mode}]")
    await page.fill("#question", question)
    await page.press("#question", "Enter")


async def choose(page: Any, **values: str) -> None:
    """In the settings."""
    await page.click("#open-settings")
    for name, value in values.items():
        await page.fill(f"[name={name}]", value)
    await page.click("#set .strong")


async def shoot(page: Any, name: str) -> None:
    if SHOTS:
        await page.screenshot(path=Path(SHOTS) / f"{name}.png", full_page=True)


async def until(page: Any, holds: str) -> None:
    """Look at each frame until it holds. (Chromium's own waiting needs what the page's policy forbids.)"""
    look = f"({holds}) ? done() : requestAnimationFrame(look)"
    async with asyncio.timeout(60):
        await page.evaluate(f"new Promise(done => {{ const look = () => {look}; look() }})")


async def text_of(page: Any, selector: str) -> str:
    return (await page.inner_text(selector)).strip()


async def all_of(page: Any, selector: str, what: str = "textContent") -> list[str]:
    return await page.eval_on_selector_all(selector, f"all => all.map(one => one.{what})")


async def done(page: Any, state: str = "") -> None:
    """The last answer is over."""
    wanted = f'[data-is="{state}"]' if state else ":not([data-is=writing])"
    await page.wait_for_selector(f"{LAST}{wanted}")
    await page.wait_for_selector("#ask:visible")


async def written(page: Any, more_than: int) -> str:
    """Text of the last answer, once it has so many characters."""
    await until(page, f"(document.querySelector('{LAST} .body')?.textContent ?? '').length > {more_than}")
    return await text_of(page, f"{LAST} .parts")


def prompts(house: Served) -> list[str]:
    """What the ring was told to read, with its answers to come."""
    return [house.stage.text.decode(one.tokens) for one in house.stage.ring.orders if isinstance(one, Open)]
