"""Takes pictures of a running server: its page in several widths, dark and light, and the terminal.

python tools/pictures.py FOLDER [--url http://127.0.0.1:8000] [--master 127.0.0.1:50050] [--question ...]
    [--width 390 1280 1920]

For each width and colour: the first screen, a planned answer while it is written, and the finished answer, as
NAME-WIDTH-COLOUR.png. terminal.svg is what `specsot infer` shows while it writes a planned answer. The
question is asked once for each. Needs a Chromium (`make browser`) and a running `specsot serve`.
docs/page.png is writing-1280-dark.png, and docs/terminal.svg is terminal.svg.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from playwright.async_api import async_playwright
from rich.console import Console

from specsot.core.view import View, advance
from specsot_app.core.answer_view import Size, draw
from specsot_app.core.ask import ask_of
from specsot_app.fleet.opening import open_fleet
from specsot_app.fleet.options import FleetOptions

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
QUESTION = "What are the benefits of regular exercise?"
WIDTHS = (390, 1280, 1920)  # Pixels. A phone, a laptop, a large screen.
HEIGHT = 900  # Pixels.
SCHEMES = ("dark", "light")
TIMEOUT = 600_000  # Milliseconds. For one answer on a busy machine.
# Text of the unfinished sections: the one that grows, and those after it.
IN_WRITING = ".planned .part[data-is=writing]:not([data-branch='0']) .body"
CHARACTERS = 160  # Of a section, when the picture of an unfinished answer is taken: about two lines.
PAUSE = 50  # Milliseconds between two looks.
SCREEN = Size(110, 28)  # Columns and lines of the terminal.


async def take(page: Any, folder: Path, name: str, question: str) -> None:
    """Take the three pictures of one window.

    page: A window that shows the page.
    folder: Folder that gets the pictures.
    name: End of the pictures' names, such as "390-dark".
    question: What is asked, with a plan.
    """
    await page.wait_for_selector("#state[data-is=ready]")
    await page.screenshot(path=folder / f"first-{name}.png")
    await page.fill("#question", question)
    await page.press("#question", "Enter")
    await page.wait_for_selector(IN_WRITING)
    # The page's policy forbids the expressions by which Playwright would wait.
    while await page.eval_on_selector_all(
        IN_WRITING, f"all => all.length > 1 && all[0].textContent.length < {CHARACTERS}"
    ):
        await page.wait_for_timeout(PAUSE)
    await page.screenshot(path=folder / f"writing-{name}.png")
    await page.wait_for_selector("#ask:visible")
    await page.screenshot(path=folder / f"answer-{name}.png")


async def take_all(url: str, folder: Path, question: str, widths: Sequence[int]) -> None:
    """Take the pictures of every width and colour.

    url: Address of the page.
    folder: Existing folder that gets the pictures.
    question: What is asked.
    widths: Widths of the windows in pixels.
    Raises FileNotFoundError if no Chromium is installed.
    """
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None:
        raise FileNotFoundError("no Chromium is installed: make browser")
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width in widths:
            for scheme in SCHEMES:
                window = {"viewport": {"width": width, "height": HEIGHT}, "color_scheme": scheme}
                context = await browser.new_context(**window, reduced_motion="reduce")
                page = await context.new_page()
                page.set_default_timeout(TIMEOUT)
                await page.goto(url)
                await take(page, folder, f"{width}-{scheme}", question)
                await context.close()
        await browser.close()


async def take_terminal(master: str, question: str) -> str:
    """Return what a terminal shows while a planned answer is written, as SVG.

    master: Address of the master's gRPC server.
    question: What is asked, with a plan.
    Raises RuntimeError if the answer ends before two branches have CHARACTERS characters.
    """
    fleet = await open_fleet(FleetOptions(master=master))
    view = View()
    try:
        async for numbered in fleet.generate(ask_of(question)):
            view = advance(view, numbered.event)
            if sum(len(panel.text) >= CHARACTERS for panel in view.panels) > 1:
                break
        else:
            raise RuntimeError("the answer ended before two of its branches were long enough for a picture")
    finally:
        await fleet.close()
    console = Console(width=SCREEN.width, record=True, file=StringIO(), color_system="truecolor")
    console.print(draw(view, SCREEN))
    return console.export_svg(title=f'specsot infer "{question}"', unique_id="terminal")


def main() -> int:
    """Take the pictures and return 0; return 1 if no Chromium is installed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder that gets the pictures")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--master", default="127.0.0.1:50050")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--width", type=int, nargs="+", default=WIDTHS)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    (given.folder / "terminal.svg").write_text(asyncio.run(take_terminal(given.master, given.question)))
    try:
        asyncio.run(take_all(given.url, given.folder, given.question, given.width))
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
