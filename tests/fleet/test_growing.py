"""A ring that had to be formed of fewer workers grows again, once that disturbs nobody, or is waited for."""

from dataclasses import replace

import pytest

from specsot.core.frames import Outcome, Result
from specsot.errors import Refused
from specsot.members import Configuration, Progress, Range, StandBy
from tests.fleet.test_fleet import HASTY, Stand, ranges, stand_with
from tests.fleet.test_formation import drafter, worker

LARGE = 10  # pages; one worker alone has 8 for all layers, two have 16
HASTY = replace(HASTY, page_rows=256)


async def one_is_left() -> Stand:
    """Of two workers, amid a request, which goes on."""
    stand = await stand_with(worker("a"), worker("b"), wishes=HASTY)
    stand.all_ready(1, "a", "b")
    stand.at_work = 1
    stand.fleet.on_disconnect("a", "killed")
    await stand.calm()
    stand.all_ready(2, "b")
    # No other change begins before the ring has run.
    stand.fleet.on_message("b", Result(2, 1, (Outcome(1, 0, (), (7,)),)))
    return stand


async def test_a_ring_grows_amid_requests_where_one_waits_for_a_larger_one():
    """Once the new one has its layers; but not for one that brings less memory than there is now."""
    stand = await one_is_left()
    stand.needs = [1, LARGE]
    await stand.join(worker("c", kv_bytes=1 << 18))
    assert stand.told("c") == [StandBy(2)]
    stand.fleet.on_disconnect("c", "killed")
    await stand.join(worker("a"))
    assert stand.told("a") == [StandBy(2), StandBy(2, Range(4, 8))]
    assert stand.ends == ["a is gone: killed"]
    stand.fleet.on_message("a", Progress(2, 4, 4, layers=Range(4, 8)))
    await stand.calm()
    assert stand.ends[1:] == ["a worker joined"]
    assert ranges(stand.told("a")[-1]) == {"b": "0:4", "a": "4:8"}
    assert stand.fleet._planned_stages == ()


async def test_a_waiting_request_has_a_larger_ring_formed_if_layers_do_not_fit_alongside_the_loaded_ones():
    stand = await one_is_left()
    stand.needs = [1, LARGE]
    await stand.join(worker("a"))
    stand.fleet.on_message("a", Progress(2, 0, 4, layers=Range(4, 8)))
    await stand.calm()
    assert ranges(stand.told("a")[-1]) == {"b": "0:4", "a": "4:8"}


async def test_a_worker_and_a_drafter_that_came_late_are_taken_in_together():
    stand = await one_is_left()
    await stand.join(drafter())
    await stand.join(worker("a"))
    stand.at_work = 0
    stand.fleet.reform()
    await stand.calm()
    (configured,) = [one for one in stand.told("d") if isinstance(one, Configuration)]
    assert (configured.epoch, ranges(configured)) == (3, {"b": "0:4", "a": "4:8"})


@pytest.mark.parametrize("late", [worker("c", kv_bytes=1 << 10), drafter("c", kv_bytes=1 << 10)])
async def test_a_ring_is_not_given_up_for_one_with_which_there_could_be_none(late):
    """Two pages are the least."""
    wishes = replace(HASTY, workers=2 if late.kind == "worker" else 1)
    stand = await stand_with(worker("a"), worker("b"), wishes=wishes)
    if late.kind == "worker":
        stand.all_ready(1, "a", "b")
        stand.fleet.on_disconnect("b", "killed")
        await stand.calm()
    epoch = stand.fleet.epoch
    stand.all_ready(epoch, "a", "b")
    assert stand.fleet.ready
    stand.ends.clear()
    await stand.join(late)
    stand.fleet.reform()
    await stand.calm()
    assert stand.fleet.ready
    assert (stand.fleet.epoch, stand.ends) == (epoch, [])


@pytest.mark.parametrize("need", [4, 8])
async def test_a_faster_ring_is_not_formed_amid_requests_that_it_could_not_hold(need):
    """The quick one takes all layers, and has half of the memory."""
    stand = await stand_with(worker("a", host="a"), wishes=replace(HASTY, workers=1, max_stages=2))
    stand.all_ready(1, "a")
    stand.at_work, stand.needs = 1, [need]
    quick = worker("c", host="c", curve=((1, 0.00005), (8, 0.0001)), kv_bytes=1 << 19)
    await stand.join(quick)
    assert stand.told("c") == ([StandBy(1), StandBy(1, Range(0, 8))] if need == 4 else [StandBy(1)])


async def test_layers_are_not_shared_out_anew_where_no_pages_would_be_left():
    stand = await stand_with(worker("a", host="a"), wishes=replace(HASTY, workers=1))
    stand.all_ready(1, "a")
    quick = worker("c", host="c", curve=((1, 0.00005), (8, 0.0001)), kv_bytes=1 << 10)
    await stand.join(quick)
    with pytest.raises(Refused, match="at least 2 are needed"):
        await stand.fleet.rebalance()
    assert stand.fleet.ready


async def test_a_repair_leaves_out_a_drafter_with_which_there_could_be_no_ring():
    stand = await stand_with(drafter(), worker("a"), worker("b"), wishes=HASTY)
    stand.all_ready(1, "a", "b", "d")
    stand.fleet.on_disconnect("d", "killed")
    await stand.join(drafter(kv_bytes=1 << 10))
    stand.fleet.on_disconnect("b", "killed")
    await stand.join(worker("b"))
    stand.all_ready(stand.fleet.epoch, "a", "b")
    assert stand.fleet.ready
    assert stand.fleet.ring.drafter is None
    assert stand.fleet.complaint is None
