"""Invariant 14, plans: a point that fails harms only those that need it; the answer keeps the plan's order.

The calls are real ones.
"""

from __future__ import annotations

import asyncio

import pytest

from specsot.core.frames import Close, End, Outcome, Result
from specsot.events import BranchFinished, MergedText, Planned, Reason
from specsot.params import Ask
from tests.conftest import seeds
from tests.endpoints.front import front, told
from tests.master.letters import finished, openings
from tests.master.stage import of, turn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

COUNT = 6
PLAN = (
    "[PLAN]\n"
    + "".join(f"{n}.<20><None>[{n - 3 if n > 3 else '-'}]Point {n}\n" for n in range(1, 7))
    + "[END]"
)
BODIES = {n: f"This is body {n}, " + "and so on " * n + "to its end." for n in range(1, 7)}
SAYS = {"Write the plan.": PLAN, **{f"Write point {n}": body for n, body in BODIES.items()}}
ASK = Ask(prompt="Six points?", mode="sot", seed=5)


@pytest.mark.parametrize("seed", seeds(3, quick=1))
@pytest.mark.parametrize("failing", range(1, COUNT + 1))
async def test_invariant_14_the_kth_point_fails(failing: int, seed: int) -> None:
    """Point n + 3 needs point n."""
    async with front(SAYS, seed=seed) as one:
        client = await one.client()
        asked = asyncio.create_task(told(client, ASK))
        while not (found := [o for o in openings(one.stage) if o.ordinal == failing]):
            await turn()
        await one.stage.settle()
        if found[0].sequence in one.stage.ring.live:
            await one.stage.ring.order(Close(found[0].sequence))
            failed = Outcome(found[0].sequence, 0, (), (), End.FAILED)
            one.stage.engine.handle(Result(1, 999, (failed,)))
        events = await asked
        await client.close()
        await one.quiet()
        one.stage.assert_clean()
    lost = {failing, failing + 3} & set(BODIES)
    reasons = {event.branch: event.reason for event in of(BranchFinished, events)}
    assert {id for id, reason in reasons.items() if reason is Reason.STOP} == set(BODIES) - lost
    text = finished(events).text
    assert text == "".join(event.text for event in of(MergedText, events))
    shown = [id for id in BODIES if id not in lost]
    whole = [f"## {number}. Point {id}\n{BODIES[id]}" for number, id in enumerate(shown, 1)]
    places = [text.find(part) for part in whole]
    assert -1 not in places, "the others are whole"
    assert places == sorted(places), "in the plan's order"
    assert [point.id for point in of(Planned, events)[0].points] == sorted(BODIES)
