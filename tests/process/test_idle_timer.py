"""A timer: called once, after the last restart; never while there is work."""

from specsot.tasks import IdleTimer
from tests.faults.virtual import VirtualLoop


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
