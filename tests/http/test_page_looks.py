"""How the page looks: cards, colours, narrow windows, two windows. `make test-all` alone looks."""

from __future__ import annotations

import asyncio

import pytest

from tests.http.browser import LAST, ask, chromium, done, house, opened, shoot, text_of, until
from tests.http.house import Served
from tests.http.test_page import LETTERS
from tests.master.letters import SAYS

# As in test_page.py.
pytestmark = [
    pytest.mark.full,
    pytest.mark.processes,
    pytest.mark.timeout(120),
    pytest.mark.asyncio(loop_scope="module"),
]

__all__ = ["chromium", "house"]  # fixtures


async def test_what_is_read_stays_where_it_is_while_a_plan_is_written(house: Served) -> None:
    """Nothing scrolls, and the reader's section begins where it began, at every step."""
    house.going.clear()
    async with opened(house) as page:
        await page.set_viewport_size({"width": 390, "height": 900})
        await ask(page, LETTERS, "sot")
        await house.asked()
        while house.metrics.branches < 2:
            await house.steps(1)
        await until(page, "document.querySelectorAll('.planned .part').length === 3")
        top = "[document.querySelector('.part').getBoundingClientRect().top, scrollY]"
        seen = {tuple(await page.evaluate(top))}
        for _ in range(6):
            await house.steps(1)
            seen.add(tuple(await page.evaluate(top)))
        assert len(seen) == 1
        bodies = "[...document.querySelectorAll('.body')].map(one => getComputedStyle(one).overflowY)"
        assert not {"auto", "scroll"} & set(await page.evaluate(bodies))
        assert await text_of(page, "#model") == "demo", "what answers is named on a phone, too"
        house.going.set()
        await done(page, "stop")


async def test_the_end_of_a_planned_answer_moves_nothing(house: Served) -> None:
    """A second question stays where it was put when it was asked, in windows of two sizes."""
    question = "[...document.querySelectorAll('.asked')].at(-1).getBoundingClientRect().top"
    for width, height in ((390, 844), (1280, 900)):
        async with opened(house) as page:
            await page.set_viewport_size({"width": width, "height": height})
            await ask(page, "What is it?", "direct")
            await done(page, "stop")
            house.going.clear()
            await ask(page, LETTERS, "sot")
            await house.asked()
            while house.metrics.branches < 2:
                await house.steps(1)
            begun = await page.evaluate(question)
            house.going.set()
            await done(page, "stop")
            assert await page.evaluate(question) == begun < 80


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


async def test_narrow_windows_need_no_sideways_scrolling(house: Served) -> None:
    async with opened(house) as page:
        await ask(page, LETTERS, "sot")
        await done(page, "stop")
        for width in (320, 768):
            await page.set_viewport_size({"width": width, "height": 700})
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            assert not await page.is_visible("#talks")
            await page.click("#menu")
            assert await page.is_visible("#talks")
            await page.keyboard.press("Escape")
            await shoot(page, f"narrow-{width}")


async def test_two_windows_do_not_disturb_each_other(house: Served) -> None:
    async with opened(house) as one, opened(house) as other:
        await asyncio.gather(ask(one, LETTERS, "sot"), ask(other, "What is it?", "direct"))
        await asyncio.gather(done(one), done(other))
        assert await text_of(other, f"{LAST} .body") == SAYS["What is"]
        assert len(await one.query_selector_all(".part[data-is=stop]")) == 3
