"""A ring that had to be formed of fewer workers grows again, once that disturbs nobody, or is waited for."""

from specsot.members import Configuration, Progress, Range, StandBy
from tests.fleet.test_fleet import HASTY, ranges, stand_with
from tests.fleet.test_formation import drafter, worker


async def test_a_ring_grows_amid_requests_where_one_waits_for_a_larger_one():
    """Once the new one has its layers; but not for one that brings less memory than there is now."""
    stand = await stand_with(worker("a"), worker("b"), wishes=HASTY)
    stand.all_ready(1, "a", "b")
    stand.at_work, stand.stranded = 1, ["too large"]
    stand.fleet.on_disconnect("a", "killed")
    await stand.calm()
    stand.all_ready(2, "b")
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
    assert stand.fleet._coming == ()


async def test_who_waits_for_a_larger_ring_has_it_formed_where_layers_find_no_room_beside_others():
    stand = await stand_with(worker("a"), worker("b"), wishes=HASTY)
    stand.all_ready(1, "a", "b")
    stand.at_work, stand.stranded = 1, ["too large"]
    stand.fleet.on_disconnect("a", "killed")
    await stand.calm()
    stand.all_ready(2, "b")
    await stand.join(worker("a"))
    stand.fleet.on_message("a", Progress(2, 0, 4, layers=Range(4, 8)))
    await stand.calm()
    assert ranges(stand.told("a")[-1]) == {"b": "0:4", "a": "4:8"}


async def test_a_worker_and_a_drafter_that_came_late_are_taken_in_together():
    stand = await stand_with(worker("a"), worker("b"), wishes=HASTY)
    stand.all_ready(1, "a", "b")
    stand.at_work = 1
    stand.fleet.on_disconnect("a", "killed")
    await stand.calm()
    stand.all_ready(2, "b")
    await stand.join(drafter())
    await stand.join(worker("a"))
    stand.at_work = 0
    stand.fleet.reform()
    await stand.calm()
    (configured,) = [one for one in stand.told("d") if isinstance(one, Configuration)]
    assert (configured.epoch, ranges(configured)) == (3, {"b": "0:4", "a": "4:8"})
