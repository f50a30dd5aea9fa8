"""A timer: called once, after the last restart; never while there is work. A limit: of each wait alone."""

import asyncio

import pytest

from specsot.tasks import IdleTimer, WaitLimit
from tests.faults.virtual import VirtualLoop, run


def stirred(at, until):
    """When `then` was called, stirred at these times."""
    loop, heard = VirtualLoop(), []
    timer = IdleTimer(5.0, lambda: heard.append(round(loop.time() - begun, 3)), loop)
    begun = loop.time()
    for time in at:
        loop.call_at(begun + time, timer.restart)
    loop.call_at(begun + until, loop.stop)
    loop.run_forever()
    timer.stop()
    loop.close()
    return heard


def test_work_puts_it_off():
    assert stirred([0, 1, 2, 3, 7.9], 12.8) == []
    assert stirred([0, 1, 2, 3, 7.9], 13) == [12.9]


def test_once_for_every_quiet_time():
    assert stirred([0, 20], 100) == [5.0, 25.0]


def test_a_lull_that_is_stopped_says_nothing():
    loop, heard = VirtualLoop(), []
    timer = IdleTimer(5.0, lambda: heard.append(1), loop)
    timer.restart()
    timer.stop()
    loop.call_later(9, loop.stop)
    loop.run_forever()
    loop.close()
    assert heard == []


async def wait_often(limit):
    async with limit:
        for _ in range(10):
            await limit.wait(asyncio.sleep(4))
            await asyncio.sleep(7)  # between two of them there is none
        assert not limit.passed
        await limit.wait(asyncio.sleep(100))


def test_a_limit_is_for_each_wait_and_not_for_all_of_them():
    async def measure():
        loop, limit = asyncio.get_running_loop(), WaitLimit(5.0)
        begun = loop.time()
        with pytest.raises(TimeoutError):
            await wait_often(limit)
        return limit.passed, round(loop.time() - begun)

    assert run(measure()) == (True, 10 * 11 + 5)


async def fail_within(limit):
    async with limit:
        raise TimeoutError("another")


def test_a_limit_is_not_what_other_errors_mean():
    async def passed():
        limit = WaitLimit(5.0)
        with pytest.raises(TimeoutError, match="another"):
            await fail_within(limit)
        return limit.passed

    assert not run(passed())
