"""Draws docs/terminal.svg: `specsot infer` with a question, in the middle of its answer."""

from __future__ import annotations

import asyncio
import io
import re
import sys
from pathlib import Path

from rich.console import Console

from specsot.core.view import View, advance
from specsot.params import Ask
from specsot_app.core.answer_view import Size, draw
from specsot_app.fleet.opening import open_fleet, with_demo
from specsot_app.fleet.options import FleetOptions

PICTURE = Path(__file__).parent / "terminal.svg"
WIDTH, HEIGHT = 110, 30


async def views(question: str) -> list[View]:
    """Of the demo model's answer, one after each event."""
    seen = [View()]
    fleet = await open_fleet(with_demo(FleetOptions(), sys.stderr))
    try:
        async for numbered in fleet.generate(Ask(question)):
            seen.append(advance(seen[-1], numbered.event))
    finally:
        await fleet.close()
    return seen


def main() -> None:
    seen = asyncio.run(views(sys.argv[1]))
    console = Console(record=True, width=WIDTH, height=HEIGHT, file=io.StringIO(), force_terminal=True)
    console.print(draw(seen[len(seen) * 2 // 3], Size(WIDTH, HEIGHT)))
    drawn = console.export_svg(title=f'specsot infer "{sys.argv[1]}"')
    PICTURE.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))  # nothing is fetched


if __name__ == "__main__":
    main()
