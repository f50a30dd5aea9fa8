"""A scripted ring behind the real endpoint, for agents whose prompts no demo model holds: prints its address.

`python -m tests.clients.scripted FIRST THEN`: what is written to a question, and behind a tool's answer.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

from specsot.core.info import ModelInfo
from tests.http import house
from tests.master.fake_ring import STATE

POSITIONS = 262_144  # as many as agents expect


async def main(first: str, then: str) -> None:
    house.INFO = replace(house.INFO, models=(ModelInfo("demo", "0123456789abcdef", 8, POSITIONS),))
    state = replace(STATE, max_positions=POSITIONS, pages=POSITIONS // 16)
    async with house.served({"tool_response": then, "": first}, state=state) as one:
        print(one.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
