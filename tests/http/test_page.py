"""The page in a real Chromium: types, streams, stops, loses the server, comes back.

Scripts say what is written, and steps are played by hand where it matters.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specsot.core.info import RequestsInfo
from specsot.transport.security import Tokens
from specsot_master.core.inputs import MasterLeaving
from tests.http.browser import (
    LAST,
    all_of,
    ask,
    choose,
    chromium,
    done,
    house,
    opened,
    prompts,
    shoot,
    text_of,
    until,
    written,
)
from tests.http.house import CONFIG, INFO, Served, served
from tests.http.test_thinking import QWEN, THINKS, THOUGHT, Scripted
from tests.master.letters import ANSWER, SAYS

# One browser for all, so one event loop: whoever holds the other end of its pipe must live as long.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

LETTERS = "Tell me about letters."
__all__ = ["chromium", "house"]  # fixtures


async def test_a_question_is_planned_written_side_by_side_and_folded_into_the_answer(house: Served) -> None:
    house.going.clear()
    async with opened(house) as page:
        assert await page.evaluate("document.activeElement.id") == "question"
        await ask(page, LETTERS, "sot")
        await house.asked()
        await house.steps(8)
        await page.wait_for_selector(".planned .part[data-is=planned]")
        assert not await page.is_visible("#hello")
        await shoot(page, "skeleton")
        while house.metrics.branches != 2:
            await house.steps(1)
        await house.steps(4)
        await until(page, "document.querySelectorAll('.part[data-is=writing] .body > *').length === 2")
        states = await all_of(page, ".planned .part", "dataset.is")
        assert states == ["writing", "writing", "waiting"], "two at once; the third needs the first"
        folded = await all_of(page, ".planned .part", "classList.contains('ahead')")
        assert folded == [False, True, True], "the first can be read; the others tell how far they are"
        await page.click(".part:nth-child(2) .now")
        assert not await page.is_visible(".ahead:nth-child(2)"), "and can be read before their turn"
        assert await text_of(page, ".part:nth-child(3) .meta") == "waits for 1"
        assert await page.is_visible("#stop")
        assert not await page.is_visible("#ask")
        await shoot(page, "branches")
        house.going.set()
        await done(page, "stop")
        assert await page.query_selector(".planned, .ahead") is None, "all is shown"
        shown = await all_of(page, ".part :is(h3, .body)")
        assert shown == [part.strip() for part in re.split(r"^## (.*)$", ANSWER, flags=re.MULTILINE) if part]
        tints = await all_of(page, ".part .body span", "className")
        assert "step2" in tints
        assert set(tints) <= {f"step{n}" for n in range(2, 6)}
        assert not await page.is_visible(".part .meta")
        line = await text_of(page, ".figures summary")
        assert re.match(r"[\d.]+ s · \d+ tokens · [\d.]+ tokens/s · 3 branches in \d+ steps", line)
        await page.click(".figures summary")
        assert str(house.opened()[0].seed) in await text_of(page, ".figures"), "to the last digit"
        assert await page.is_visible(".legend")
        assert await text_of(page, "#announcement") == "The answer is complete."
        await shoot(page, "answer")


async def test_headings_count_as_in_the_answer_without_a_point_that_ends_without_text() -> None:
    async with served({**SAYS, "Write point 2": ""}) as house, opened(house) as page:
        sent: list[Any] = []
        page.on("request", lambda asked: asked.post_data and sent.append(asked.post_data_json))
        await ask(page, LETTERS, "sot")
        await done(page, "stop")
        assert await all_of(page, ".part h3") == ["1. Alpha", "Beta 你好", "2. Gamma 🎉"]
        await ask(page, "What is it?", "direct")
        await done(page, "stop")
        told = sent[-1]["messages"][1]["content"]
        assert told == "## 1. Alpha\nAlpha is the first letter.\n\n## 2. Gamma 🎉\nGamma follows alpha."


async def test_the_ring_is_a_drawer_with_its_times(house: Served) -> None:
    w0, w1, d0 = INFO.members
    known = {"device": "AMD EPYC, 2 cores", "memory": 8 << 30, "dtype": "float32", "host": "vm"}
    w0 = replace(w0, **known, weights=100 << 20, min_seconds=0.01)
    w1 = replace(w1, **known, weights=125 << 20, min_seconds=0.0125)
    running = replace(INFO, members=(w0, w1, d0), requests=RequestsInfo(running=1))
    house.standing.info = running
    async with opened(house) as page:
        assert not await page.is_visible("#ring")
        await page.click("#state")
        await page.wait_for_selector("[data-seat]")
        seats = await all_of(page, "[data-seat]")
        assert seats == ["stage 0layers 0–312.0 ms", "stage 1layers 4–715.0 ms", "drafter6.0 rows a step"]
        assert await page.text_content("[data-is=steps]") == "4.0"
        assert await page.text_content("[data-is=tokens]") == "2.5"
        assert "2 stages and a drafter" in await page.text_content("#ring-words")
        rows = [(await text_of(page, f"#stages tbody tr:nth-child({n})")).split("\t") for n in (1, 2)]
        assert rows == [
            ["0: w0, vm", "0–3", "100 MiB", "12.0 ms", "10.0 ms"],
            ["1: w1, vm", "4–7", "125 MiB", "15.0 ms", "12.5 ms"],
        ]
        reach = await text_of(page, "#reach")
        assert "can reach 44.4 tokens/s by that. Now 10.0 tokens/s are written, 0.2 times that" in reach
        assert await text_of(page, "#machine") == "demo · a context of 2,048 tokens · AMD EPYC, 2 cores"
        machine = "2 stages and a drafter on AMD EPYC, 2 cores, 8.0 GiB, on vm."
        assert await page.text_content("#machine-words") == f"8 layers, float32; {machine}"
        assert await page.get_attribute("#state", "data-pace") == "10 tokens/s"
        assert await page.eval_on_selector("#ring", "one => one.classList.contains('moving')")
        await shoot(page, "ring")
        house.standing.info = replace(running, requests=RequestsInfo())
        await page.wait_for_selector("#ring:not(.moving)")
        assert await page.get_attribute("#state", "data-pace") == "", "figures of the last seconds are over"
        await page.click("#close-ring")
        assert not await page.is_visible("#ring")


async def test_a_direct_answer_by_settings_that_stay(house: Served) -> None:
    async with opened(house) as page:
        await choose(page, seed="9007199254740993", temperature="0.5", max_tokens="7", system="Be brief.")
        await page.check("input[value=direct]")
        await page.reload()
        await ask(page, "Count.")
        await done(page, "length")
        assert await text_of(page, f"{LAST} .body") == "word word word word word word"
        assert await text_of(page, ".end") == "Cut at 7 tokens, the limit in Settings."
        assert await page.query_selector(".part h3") is None
        (opening,) = house.opened()
        assert (opening.seed, opening.sampling.temperature, opening.limit) == (9007199254740993, 0.5, 7)
        assert "Be brief." in prompts(house)[0]
        await page.click(f"{LAST} .actions button:text('Continue')")
        await until(page, f"document.querySelector('{LAST} .body').textContent.split(' ').length > 6")
        await done(page, "length")
        assert (await text_of(page, f"{LAST} .body")).replace(" ", "") == "word" * 12
        assert await text_of(page, ".end") == "Cut at 14 tokens, the limit in Settings."
        assert len(await all_of(page, ".answer")) == 1, "in the same turn"
        *_, rest = house.opened()
        assert (rest.seed, rest.sampling.temperature, rest.limit) == (9007199254740993, 0.5, 7)
        assert prompts(house)[1] == prompts(house)[0] + " ".join(["word"] * 6)


async def test_reasoning_is_shown_separately_and_can_be_folded() -> None:
    async with served(THINKS, text=Scripted(QWEN)) as house, opened(house) as page:
        await page.click("#open-settings")
        await page.select_option("[name=thinking]", "low")
        await page.click("#set .strong")
        await ask(page, "What is it?", "direct")
        await done(page, "stop")
        assert await text_of(page, f"{LAST} .body") == SAYS["What is"]
        assert await page.text_content(f"{LAST} .thinking p") == THOUGHT
        assert not await page.is_visible(f"{LAST} .thinking p")
        await page.reload()
        await page.click("#talks .open")
        await page.click(f"{LAST} .thinking summary")
        assert await page.is_visible(f"{LAST} .thinking p")


async def test_conversations_are_kept_and_sent_and_answered_anew(house: Served) -> None:
    async with opened(house) as page:
        sent: list[Any] = []
        page.on("request", lambda asked: asked.post_data and sent.append(asked.post_data_json))
        await ask(page, "What is it?", "direct")
        await done(page, "stop")
        await ask(page, "What is that?")
        await done(page, "stop")
        words = ["What is it?", SAYS["What is"], "What is that?"]
        assert [one["content"] for one in sent[-1]["messages"]] == words
        await page.reload()
        assert await all_of(page, ".answer") == [], "a page begins with a new one"
        assert await all_of(page, "#talks .open") == ["What is it?"]
        await page.click("#talks .open")
        assert await all_of(page, ".body") == [SAYS["What is"]] * 2
        await page.click(f"{LAST} .actions >> text=Again")
        await done(page, "stop")
        assert [one["content"] for one in sent[-1]["messages"]] == words
        assert house.opened()[-1].sampling.temperature == 0.7, "at 0 it would be the same one"
        assert len(await all_of(page, ".answer")) == 2
        await page.click("#new")
        await ask(page, LETTERS, "sot")
        await done(page, "stop")
        assert await all_of(page, "#talks .open") == [LETTERS, "What is it?"]
        await page.reload()
        await page.click("#talks .open")
        assert await all_of(page, ".part h3") == ["1. Alpha", "2. Beta 你好", "3. Gamma 🎉"]
        page.on("dialog", lambda asked: asked.accept())
        await page.hover("#talks li")
        await page.click("#talks li [title=Delete]")
        assert await all_of(page, "#talks .open") == ["What is it?"]
        assert await page.is_visible("#hello")


async def test_stop_by_button_and_by_key(house: Served) -> None:
    async with opened(house) as page:
        for stop in (lambda: page.click("#stop"), lambda: page.keyboard.press("Escape")):
            house.going.clear()
            branches = house.metrics.branches
            await ask(page, LETTERS, "sot")
            await house.asked()
            while house.metrics.branches == branches:
                await house.steps(1)
            await house.steps(3)
            await written(page, 0)
            await stop()
            await done(page, "stopped")
            await house.quiet()
            house.stage.assert_clean()
            assert (await text_of(page, f"{LAST} .part:nth-child(1) .meta")).startswith("stopped")
            assert (await text_of(page, f"{LAST} .end")).startswith("Stopped here, after ")
            assert not await page.is_visible(".notice"), "who says stop needs no explanation"
            assert await text_of(page, "#announcement") == "The answer is not complete: stopped."
            await shoot(page, "stopped")
        house.going.set()
        await ask(page, "What is it?", "direct")
        await done(page, "stop")
        assert await text_of(page, f"{LAST} .body") == SAYS["What is"]


async def test_what_was_shown_when_it_was_stopped_is_what_is_kept(house: Served) -> None:
    house.going.clear()
    async with opened(house) as page:
        sent: list[Any] = []
        page.on("request", lambda asked: asked.post_data and sent.append(asked.post_data_json))
        await ask(page, LETTERS, "sot")
        assert await text_of(page, f"{LAST} .status") == "planning"
        await house.asked()
        await house.steps(16)
        await page.wait_for_selector(".planned .part")
        await page.click("#stop")
        await done(page, "stopped")
        await house.quiet()
        assert await text_of(page, LAST) == "Stopped before the answer began.\n\nAgain\nIn points"
        branches = house.metrics.branches
        await ask(page, "And now?", "sot")
        await house.asked()
        while house.metrics.branches < branches + 2:
            await house.steps(1)
        await house.steps(3)
        both = "document.querySelectorAll('.part[data-is=writing] .body > *').length === 2"
        await until(page, both)
        await page.click("#stop")
        await done(page, "stopped")
        await house.quiet()
        shown = await all_of(page, f"{LAST} .part :is(h3, .body)")
        assert shown[::2] == ["1. Alpha", "2. Beta 你好"], "the third was not begun"
        house.going.set()
        await ask(page, "What is it?", "direct")
        await done(page, "stop")
        said = "\n\n".join(f"## {head}\n{body}" for head, body in zip(shown[::2], shown[1::2]))
        asked = ["And now?", said, "What is it?"]
        assert [one["content"] for one in sent[-1]["messages"]] == asked, "what has no answer is not sent"


async def test_the_server_is_lost_and_comes_back_and_the_ring_breaks(house: Served) -> None:
    house.going.clear()
    async with opened(house) as page:
        await ask(page, "Count.", "direct")
        await house.asked()
        await house.steps(6)
        before = await written(page, 10)
        await house.endpoint.close(0)
        await page.wait_for_selector(".notice")
        assert "cannot be reached" in await text_of(page, ".notice")
        assert (await text_of(page, f"{LAST} .body")).startswith(before), "what is written stays"
        assert await text_of(page, ".asked p") == "Count."
        await page.wait_for_selector("#state[data-is=lost]")
        await shoot(page, "lost")
        await page.click(".retry")
        await page.wait_for_selector(".notice")
        await house.reopen()
        await page.wait_for_selector("#state[data-is=ready]")
        house.going.set()
        await page.click(".retry")
        await done(page, "stop")
        assert await text_of(page, f"{LAST} .body") == SAYS["Count"]
        assert not await page.is_visible(".notice")
        house.going.clear()
        await ask(page, "Count.", "direct")
        await house.asked()
        await house.steps(6)
        await written(page, 10)
        house.stage.engine.handle(MasterLeaving("worker-1 is gone: its link broke"))
        await page.wait_for_selector(".notice")
        said = await text_of(page, ".notice")
        assert said.startswith("The answer broke off. worker-1 is gone")
    house.stage.ring.live.clear()  # the ring forgot it too
    house.stage.ring._table = type(house.stage.ring._table)(64, 64)
    house.going.set()


async def test_a_missing_ring_is_explained_on_the_page(house: Served) -> None:
    house.stage.ring.now, state = None, house.stage.ring.now
    house.standing.info = replace(INFO, ready=False, waiting_for=("1 of 2 workers",))
    async with opened(house) as page:
        assert await text_of(page, "#state-words") == "waiting for 1 of 2 workers"
        await ask(page, LETTERS)
        await page.wait_for_selector(".notice")
        said = await text_of(page, ".notice")
        assert said.startswith("The server cannot answer at the moment. the ring is not complete")
        assert "Traceback" not in said
        await shoot(page, "no-ring")
    house.stage.ring.now = state


async def test_a_busy_server_an_impossible_limit_and_a_long_conversation() -> None:
    async with served(config=replace(CONFIG, live=1, queue=0)) as house, opened(house) as page:
        await ask(page, LETTERS)
        await page.wait_for_selector(".notice")
        assert "The server is busy" in await text_of(page, ".notice")
    async with served() as house, opened(house) as page:
        await choose(page, max_tokens="50000")
        assert await page.is_visible("#settings"), "more than the model's context"
        await page.fill("[name=max_tokens]", "8")
        await page.click("#set .strong")
        house.going.set()
        sent: list[Any] = []
        page.on("request", lambda asked: asked.post_data and sent.append(asked.post_data_json))
        for words in ("Count. " + "far " * 100, "Count. " + "far " * 900, "Count. " + "far " * 1000):
            await ask(page, words, "direct")
            await done(page, "length")
        assert len(house.opened()) == 3
        assert "oldest turns no longer fit" in await text_of(page, LAST)
        assert [len(one["messages"]) for one in sent] == [1, 3, 5, 3], (
            "as many as must be are left out at once"
        )
        await ask(page, "Count. " + "far " * 3000)
        await page.wait_for_selector(".notice")
        said = await text_of(page, ".notice")
        assert "cannot be answered in this form. This model's maximum context length is" in said
        assert "oldest turns" not in await text_of(page, LAST), "it failed for its own length"
        await ask(page, "Count.", "sot")
        await page.wait_for_selector(f"{LAST} .notice")
        assert "Plan: always needs “Tokens, at most” of at least 64" in await text_of(page, f"{LAST} .notice")
        assert await all_of(page, f"{LAST} button") == ["Try again"]
        await page.check("input[value=direct]")
        await page.click(f"{LAST} .retry")
        await done(page, "length")


async def test_a_long_question_alone_is_answered_with_what_the_context_holds(house: Served) -> None:
    async with opened(house) as page:
        house.going.set()
        await ask(page, "Count. " + "far " * 1500, "direct")
        await done(page, "stop")


async def test_what_cannot_be_is_not_even_sent(house: Served) -> None:
    async with opened(house) as page:
        for name, value in (("max_tokens", ""), ("max_parallel", "0"), ("temperature", "-1"), ("seed", "x")):
            await page.click("#open-settings")
            await page.fill(f"[name={name}]", value)
            await page.click("#set .strong")
            assert await page.is_visible("#settings"), f"{name} is to be mended"
            await page.click("#set .head button")
            as_before = f"document.querySelector('[name={name}]').value !== {value!r}"
            await until(page, as_before)
        await ask(page, "")
        assert await page.is_visible("#ask")
    assert house.stage.ring.orders == []


async def test_text_is_text_and_markdown_is_elements() -> None:
    evil = "<img src=x onerror=alert(1)> <script>alert(2)</script> [a](javascript:alert(3)) ![p](http://x.test/p.png)"
    code = "**Bold** and `x<y`:\n\n- one\n- two\n\n```python\ndef f(n):  # adds\n    return n + 1\n```\n"
    plan = "[PLAN]\n1.<40><None>[-]<i>Markup</i>\n2.<40><None>[-]Code\n[END]"
    says = {"Write the plan.": plan, "Write point 1": evil, "Write point 2": code}
    async with served(says) as house, opened(house) as page:
        await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await ask(page, LETTERS, "sot")
        await done(page, "stop")
        first = await text_of(page, ".part .body")
        assert first == "<img src=x onerror=alert(1)> <script>alert(2)</script> a p"
        assert await all_of(page, ".part h3") == ["1. <i>Markup</i>", "2. Code"]
        assert await page.query_selector_all("main img, main script, main i:not(.legend i)") == []
        assert await all_of(page, ".body a", "href") == ["http://x.test/p.png"], "shown, not fetched"
        assert await all_of(page, ".body strong, .body p > code, .body li") == ["Bold", "x<y", "one", "two"]
        kinds = dict(zip(await all_of(page, "pre span"), await all_of(page, "pre span", "className")))
        assert kinds == {
            "def": "code-keyword",
            "f": "code-called",
            "# adds": "code-comment",
            "return": "code-keyword",
            "1": "code-number",
        }
        await page.click("figcaption button")
        await page.wait_for_selector("figcaption :text('Copied')")
        assert await page.evaluate("navigator.clipboard.readText()") == "def f(n):  # adds\n    return n + 1"
        await page.click(".actions :text('Copy')")
        await page.wait_for_selector(".actions :text('Copied')")
        assert (await page.evaluate("navigator.clipboard.readText()")).startswith("## 1. <i>Markup</i>\n<img")
        await shoot(page, "markdown")


async def test_everything_by_keyboard(house: Served) -> None:
    async with opened(house) as page:
        await page.keyboard.type("What is it?")
        await page.keyboard.press("Shift+Enter")
        await page.keyboard.type("Say it.")
        assert await page.input_value("#question") == "What is it?\nSay it."
        reached: list[str] = []
        for _ in range(2):
            await page.keyboard.press("Tab")
            focused = "document.activeElement"
            reached.append(await page.evaluate(f"{focused}.name || {focused}.id || {focused}.localName"))
            if reached[-1] == "mode":
                await page.keyboard.press("ArrowRight")
                await page.keyboard.press("ArrowRight")
        assert reached == ["mode", "ask"]
        outline = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", "one sees where one is"
        await page.keyboard.press("Space")
        await done(page, "stop")
        assert await text_of(page, f"{LAST} .body") == SAYS["What is"]
        await page.focus("#theme")
        await page.keyboard.press("/")
        assert await page.evaluate("document.activeElement.id") == "question"
        await page.keyboard.press("Control+Shift+O")
        assert await page.is_visible("#hello")


async def test_a_token_is_asked_for_kindly_and_once_until_it_is_taken_away(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("opensesame\n")
    async with served(tokens=Tokens(tmp_path / "tokens")) as house, opened(house) as page:
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
        (tmp_path / "tokens").write_text("another\n")
        await page.wait_for_selector("#entry:visible")
        assert await text_of(page, "#state-words") == "the token is not known here"
