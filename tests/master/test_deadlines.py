"""A request's deadline on a fake ring: while it waits, while it is answered, and after it is done.

The test passes the time.
"""

from __future__ import annotations

import pytest

from specsot.errors import TimedOut
from specsot_master.engine import EngineConfig
from tests.master.letters import ANSWER, COUNT, DIRECT, SAYS, SOT, finished, openings
from tests.master.stage import Stage

pytestmark = pytest.mark.slow


async def test_a_deadline_that_passes_while_the_request_waits() -> None:
    stage = Stage(SAYS, config=EngineConfig(model="demo", live=1))
    running, waiting = stage.listen(COUNT), stage.listen(DIRECT, timeout=30)
    await stage.settle()
    stage.time.advance(20)
    await stage.settle()
    assert not waiting.done()
    stage.time.advance(20)
    with pytest.raises(TimedOut, match="the deadline passed while the request waited for its turn"):
        await waiting
    assert len(openings(stage)) == 1, "it was never opened"
    assert finished((await stage.play(running))[0]).text == SAYS["Count"]
    stage.assert_clean()


async def test_a_deadline_that_passes_while_the_request_is_answered() -> None:
    stage = Stage(SAYS)
    late, other = stage.listen(SOT, timeout=1000), stage.listen(COUNT)
    for _ in range(12):
        await stage.step()
    assert len(stage.ring.live) > 2
    stage.time.advance(1000)
    with pytest.raises(TimedOut, match="the deadline passed while the request was answered"):
        await late
    await stage.settle()
    writing = [one for one in stage.ring.live.values() if one.opening.decodes]
    assert len(writing) == 1, "its sequences are closed at once, the other's is not"
    await stage.play(other)
    stage.assert_clean()


async def test_a_deadline_that_does_not_pass() -> None:
    stage = Stage(SAYS)
    (events,) = await stage.play(stage.listen(SOT, timeout=1e6))
    assert finished(events).text == ANSWER
    stage.assert_clean()


@pytest.mark.parametrize("timeout", [0.0, -1.0])
async def test_a_deadline_that_had_passed_before(timeout: float) -> None:
    stage = Stage(SAYS)
    with pytest.raises(TimedOut, match="had passed when the request came"):
        await stage.listen(SOT, timeout=timeout)
    assert stage.ring.orders == []
    stage.assert_clean()
