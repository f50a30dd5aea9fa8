"""Looks at a master again and again, and shows each look in the place of the one before.

Refuses to know how a look is taken and drawn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

from rich.console import Console
from rich.live import Live

from specsot.errors import SpecsotError, Unavailable
from specsot.info import Info
from specsot_app.terminal.standing import StatusView, draw_status

INFO_TIMEOUT = 5.0  # seconds for one look
CURVE_LENGTH = 48  # looks that the curve shows

Look = Callable[[], Awaitable[Info]]
Pause = Callable[[], Awaitable[None]]


async def watch(look: Look, pause: Pause, console: Console) -> None:
    """Until cancelled. A master that is lost is looked for; raises SpecsotError if it was never there."""
    with Live(console=console, auto_refresh=False) as live:
        async for standing in status_views(look, pause):
            live.update(draw_status(standing), refresh=True)


async def status_views(look: Look, pause: Pause) -> AsyncIterator[StatusView]:
    """What is known after each look. Raises what the first one raises."""
    standing = with_pace(StatusView(await get_info(look)))
    while True:
        yield standing
        await pause()
        try:
            standing = with_pace(replace(standing, info=await get_info(look), lost=None))
        except SpecsotError as error:
            standing = replace(standing, lost=f"{error}; looking again. Ctrl-C leaves")


async def get_info(look: Look) -> Info:
    """Raises Unavailable for a master that does not answer."""
    try:
        async with asyncio.timeout(INFO_TIMEOUT):
            return await look()
    except TimeoutError:
        raise Unavailable(f"the master did not answer within {INFO_TIMEOUT:g} s") from None


def with_pace(standing: StatusView) -> StatusView:
    """The newest look's pace beside the ones before."""
    laps = standing.info.laps
    return replace(standing, pace=(*standing.pace, laps.per_second if laps else 0.0)[-CURVE_LENGTH:])
