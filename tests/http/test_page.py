"""The page in a real Chromium: types, streams, stops, loses the server, comes back.

Scripts say what is written, and laps are played by hand where it matters.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.http.house import CONFIG, INFO, Served, served, turn
from tests.master.letters import ANSWER, SAYS

playwright = pytest.importorskip("playwright.async_api")

# One browser for all, so one event loop: whoever holds the other end of its pipe must live as long.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("SPECSOT_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
LETTERS = "Tell me about letters."
BROWSER: list[Any] = []  # the running one
SHOTS = os.environ.get("SPECSOT_SHOTS")  # a folder for pictures, where somebody wants to look

if CHROMIUM is None:
    pytest.skip("no Chromium here: apt-get install chromium", allow_module_level=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def chromium() -> AsyncIterator[None]:
    """Started once; every window is a fresh one."""
    async with playwright.async_playwright() as driver:
        BROWSER.append(await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]))
        yield
        await BROWSER.pop().close()


@pytest_asyncio.fixture(loop_scope="module")
async def house() -> AsyncIterator[Served]:
    async with served() as one:
        yield one
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
    page.on("console", lambda said: "Content Security" in said.text and wrong.append(said.text))
    await page.goto(house.url)
    await page.wait_for_selector("#state:not(:text('looking'))")
    yield page
    await context.close()
    assert [one for one in wrong if not one.startswith("data:")] == []


async def ask(page: Any, question: str, mode: str | None = None) -> None:
    if mode:
        await page.check(f"input[value={mode}]")
    await page.fill("#question", question)
    await page.press("#question", "Enter")


async def shoot(page: Any, name: str) -> None:
    if SHOTS:
        await page.screenshot(path=Path(SHOTS) / f"{name}.png", full_page=True)


async def until(page: Any, holds: str) -> None:
    """Look until it holds. (Chromium's own waiting would need what the page's policy forbids.)"""
    async with asyncio.timeout(60):
        while not await page.evaluate(holds):
            await turn()


async def text_of(page: Any, selector: str) -> str:
    return (await page.inner_text(selector)).strip()


async def done(page: Any) -> None:
    await page.wait_for_selector("#result[data-is]")
    await page.wait_for_selector("#ask:enabled")


async def test_a_question_is_planned_written_and_merged_before_your_eyes(house: Served) -> None:
    house.going.clear()
    async with opened(house) as page:
        assert await page.evaluate("document.activeElement.id") == "question"
        await ask(page, LETTERS, "sot")
        await house.asked()
        await house.laps(8)
        await until(page, "document.querySelector('#raw').textContent.startsWith('1. ')")
        await shoot(page, "skeleton")
        while house.metrics.branches != 2:
            await house.laps(1)
        await house.laps(4)
        await until(page, "document.querySelectorAll('article[data-is=writing] .body span').length > 2")
        states = await page.eval_on_selector_all("article", "all => all.map(one => one.dataset.is)")
        assert states == ["writing", "writing", "waiting"], "two at once; the third needs the first"
        assert await page.eval_on_selector_all("#points li", "all => all.length") == 3
        assert "after 1" in await text_of(page, "#points li:nth-child(3)")
        assert await page.is_enabled("#stop")
        assert not await page.is_enabled("#ask")
        await shoot(page, "branches")
        house.going.set()
        await done(page)
        bodies = await page.eval_on_selector_all("article .body", "all => all.map(one => one.textContent)")
        assert bodies == [SAYS[f"Write point {n}"].strip() for n in (1, 2, 3)]
        tints = await page.eval_on_selector_all("article .body span", "all => all.map(one => one.className)")
        assert {"lap1", "lap2"} <= set(tints) <= {f"lap{n}" for n in range(6)}
        assert (await text_of(page, "article:nth-child(1) .meta")).startswith("done")
        shown = await page.eval_on_selector_all("#answer > *", "all => all.map(one => one.textContent)")
        assert shown == [part.strip() for part in re.split(r"^## (.*)$", ANSWER, flags=re.MULTILINE) if part]
        figures = await text_of(page, "#figures")
        assert "branches" in figures
        assert str(house.opened()[0].seed) in figures, "to the last digit"
        assert await text_of(page, "#said") == "The answer is complete."
        await shoot(page, "answer")


async def test_the_ring_is_drawn_with_its_times(house: Served) -> None:
    async with opened(house) as page:
        seats = await page.eval_on_selector_all("[data-seat]", "all => all.map(one => one.textContent)")
        assert seats == ["stage 0layers 0–312.0 ms", "stage 1layers 4–715.0 ms", "drafter6.0 rows a lap"]
        assert await page.text_content("[data-is=laps]") == "4.0"
        assert await page.text_content("[data-is=tokens]") == "2.5"
        assert "2 stages and a drafter" in await page.text_content("#ring-words")
        assert await page.eval_on_selector("#ring", "one => one.classList.contains('moving')")
        quiet = replace(INFO.laps, per_second=0.0) if INFO.laps else None
        house.standing.info = replace(INFO, laps=quiet)
        await page.wait_for_selector("#ring:not(.moving)")


async def test_a_direct_answer_with_a_seed(house: Served) -> None:
    async with opened(house) as page:
        await page.fill("[name=seed]", "9007199254740993")
        await page.fill("[name=temperature]", "0.5")
        await page.fill("[name=max_tokens]", "7")
        await ask(page, "Count.", "direct")
        await done(page)
        assert await text_of(page, "#answer") == "word word word word word word"
        tints = await page.eval_on_selector_all("#answer span", "all => all.map(one => one.className)")
        assert set(tints) <= {f"lap{n}" for n in range(1, 6)}
        assert await page.is_visible("#legend")
        assert not await page.is_visible("#plan")
        assert not await page.is_visible("#writing")
        (opening,) = house.opened()
        assert (opening.seed, opening.sampling.temperature, opening.limit) == (9007199254740993, 0.5, 7)


async def test_stop_by_button_and_by_key(house: Served) -> None:
    async with opened(house) as page:
        for stop in (lambda: page.click("#stop"), lambda: page.keyboard.press("Escape")):
            house.going.clear()
            written = house.metrics.branches
            await ask(page, LETTERS, "sot")
            await house.asked()
            while house.metrics.branches == written:
                await house.laps(1)
            await house.laps(3)
            await page.wait_for_selector("article .body span")
            await stop()
            await done(page)
            await house.quiet()
            house.stage.assert_clean()
            assert (await text_of(page, "article:nth-child(1) .meta")).startswith("stopped")
            assert not await page.is_visible("#notice"), "who says stop needs no explanation"
            assert await text_of(page, "#said") == "The answer is not complete: stopped."
            await shoot(page, "stopped")
        house.going.set()
        await ask(page, "What is it?", "direct")
        await until(page, f"document.querySelector('#answer').textContent === {SAYS['What is']!r}")


async def test_the_server_is_lost_and_comes_back(house: Served) -> None:
    house.going.clear()
    async with opened(house) as page:
        await ask(page, "Count.", "direct")
        await house.asked()
        await house.laps(6)
        await until(page, "document.querySelector('#answer').textContent.length > 10")
        before = await text_of(page, "#answer")
        await house.door.close(0)
        await page.wait_for_selector("#notice")
        assert "cannot be reached" in await text_of(page, "#notice")
        assert (await text_of(page, "#answer")).startswith(before), "what is written stays"
        assert await page.input_value("#question") == "Count."
        await page.wait_for_selector("#state[data-is=lost]")
        await shoot(page, "lost")
        await page.click("#again")
        await page.wait_for_selector("#notice")
        await house.reopen()
        await page.wait_for_selector("#state[data-is=ready]")
        house.going.set()
        await page.click("#again")
        await until(page, f"document.querySelector('#answer').textContent === {SAYS['Count']!r}")
        assert not await page.is_visible("#notice")


async def test_the_ring_breaks_under_an_answer(house: Served) -> None:
    house.going.clear()
    async with opened(house) as page:
        await ask(page, "Count.", "direct")
        await house.asked()
        await house.laps(6)
        await until(page, "document.querySelector('#answer').textContent.length > 10")
        house.stage.engine.end("worker-1 is gone: its link broke")
        await page.wait_for_selector("#notice")
        said = await text_of(page, "#notice")
        assert said.startswith("The answer broke off. worker-1 is gone")
    house.stage.ring.live.clear()  # the ring forgot it too
    house.stage.ring._table = type(house.stage.ring._table)(64, 64)
    house.going.set()


async def test_no_ring_is_told_kindly(house: Served) -> None:
    house.stage.ring.now, state = None, house.stage.ring.now
    house.standing.info = replace(INFO, ready=False, waiting_for=("1 of 2 workers",))
    async with opened(house) as page:
        assert await text_of(page, "#state") == "waiting for 1 of 2 workers"
        await ask(page, LETTERS)
        await page.wait_for_selector("#notice")
        said = await text_of(page, "#notice")
        assert said.startswith("The server cannot answer at the moment. the ring is not complete")
        assert "Traceback" not in said
        await shoot(page, "no-ring")
    house.stage.ring.now = state


async def test_a_busy_server_and_an_impossible_limit() -> None:
    async with served(config=replace(CONFIG, live=1, queue=0)) as house, opened(house) as page:
        await ask(page, LETTERS)
        await page.wait_for_selector("#notice")
        assert "The server is busy" in await text_of(page, "#notice")
    async with served() as house, opened(house) as page:
        await page.fill("[name=max_tokens]", "50000")
        await ask(page, LETTERS)
        await page.wait_for_selector("#notice")
        said = await text_of(page, "#notice")
        assert "cannot be answered in this form. This model's maximum context length is" in said


async def test_what_cannot_be_is_not_even_sent(house: Served) -> None:
    async with opened(house) as page:
        for name, value in (("max_tokens", ""), ("max_parallel", "0"), ("temperature", "-1"), ("seed", "x")):
            await page.reload()
            await page.fill(f"[name={name}]", value)
            await ask(page, LETTERS)
            assert await page.is_enabled("#ask")
        await page.reload()
        await ask(page, "")
        assert await page.is_enabled("#ask")
    assert house.stage.ring.orders == []


async def test_text_is_text() -> None:
    evil = "<img src=x onerror=alert(1)> <script>alert(2)</script> <b>bold</b>"
    plan = "[PLAN]\n1.<40><None>[-]<i>x</i>\n[END]"
    async with served({"Write the plan.": plan, "Write point 1": evil}) as house, opened(house) as page:
        await ask(page, LETTERS, "sot")
        await done(page)
        assert await text_of(page, "article .body") == evil
        assert await text_of(page, "article h3") == "1. <i>x</i>"
        assert await page.query_selector_all("main img, main b, main article i, #plan i, #answer i") == []


async def test_dark_and_light(house: Served) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    seen: dict[str, str] = {}
    for scheme in ("dark", "light"):
        async with opened(house, color_scheme=scheme) as page:
            seen[scheme] = await page.evaluate(ground)
            await shoot(page, scheme)
            await page.click("#theme")
            other = await page.evaluate(ground)
            assert other != seen[scheme]
            await page.reload()
            assert await page.evaluate(ground) == other, "and it is remembered"
    assert seen["dark"] != seen["light"]


async def test_everything_by_keyboard(house: Served) -> None:
    async with opened(house) as page:
        await page.keyboard.type("What is it?")
        await page.keyboard.press("Shift+Enter")
        await page.keyboard.type("Say it.")
        assert await page.input_value("#question") == "What is it?\nSay it."
        reached: list[str] = []
        for _ in range(8):
            await page.keyboard.press("Tab")
            focused = "document.activeElement"
            reached.append(await page.evaluate(f"{focused}.name || {focused}.id || {focused}.localName"))
            if reached[-1] == "mode":
                await page.keyboard.press("ArrowRight")
                await page.keyboard.press("ArrowRight")
        limits = ["max_tokens", "max_parallel", "temperature", "seed", "finish_within_s"]
        assert reached == ["mode", "summary", *limits, "ask"]
        outline = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", "one sees where one is"
        await page.keyboard.press("Space")
        await done(page)
        assert await text_of(page, "#answer") == SAYS["What is"]


async def test_narrow_windows_need_no_sideways_scrolling(house: Served) -> None:
    async with opened(house) as page:
        await ask(page, LETTERS, "sot")
        await done(page)
        for width in (320, 768):
            await page.set_viewport_size({"width": width, "height": 700})
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            await shoot(page, f"narrow-{width}")


async def test_two_windows_do_not_disturb_each_other(house: Served) -> None:
    async with opened(house) as one, opened(house) as other:
        await asyncio.gather(ask(one, LETTERS, "sot"), ask(other, "What is it?", "direct"))
        await asyncio.gather(done(one), done(other))
        assert await text_of(other, "#answer") == SAYS["What is"]
        assert len(await one.query_selector_all("article[data-is=stop]")) == 3
