"""Who comes back: a process whose old link still seems to live, and a drafter into a running epoch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specsot.errors import Refused
from specsot.members import Broken, Configuration, Disband, DrafterLost, Ready, Rejoined, StandBy
from specsot.transport.links import Inbox, LocalLink
from tests.fleet.test_fleet import Stand, ranges, stand_with
from tests.fleet.test_formation import drafter, worker


async def test_a_restarted_worker_takes_its_place_at_once() -> None:
    """Not the one that stands by, which would have to load the layers first."""
    stand = await stand_with(worker("a", began=5), worker("b", began=5), worker("c", began=5))
    stand.all_ready(1, "a", "b")
    await stand.join(worker("b", began=9))
    assert stand.ends == ["b is gone: another process took its place"]
    (configured,) = stand.told("b")
    assert (configured.epoch, ranges(configured)) == (2, {"a": "0:4", "b": "4:8"})
    stand.all_ready(2, "a", "b")
    assert stand.fleet.ready
    assert [type(one) for one in stand.told("c")] == [StandBy, StandBy]


async def test_its_old_link_is_closed() -> None:
    stand = Stand()
    old = LocalLink("master", Inbox())
    await stand.fleet.join(worker("a", began=5), old)
    await stand.join(worker("a", began=5))
    with pytest.raises(Exception, match="link is closed"):
        await old.send(Ready(1))
    assert [one.name for one in stand.fleet.members()] == ["a"]


@pytest.mark.parametrize(
    "other",
    [{"began": 4}, {"began": 9, "address": "elsewhere:1"}, {}],
    ids=["an older process", "another address", "nobody knows when it began"],
)
async def test_anybody_else_of_the_same_name_is_refused(other: dict[str, object]) -> None:
    stand = await stand_with(worker("a", began=5), worker("b"))
    stand.all_ready(1, "a", "b")
    with pytest.raises(Refused, match="has joined already"):
        await stand.join(worker("a", **other))
    assert stand.fleet.ready


def drafter_of(stand: Stand) -> str | None:
    assert stand.fleet.ring is not None
    return stand.fleet.ring.drafter


async def drafting() -> Stand:
    stand = await stand_with(drafter(), worker("a"), worker("b"))
    stand.all_ready(1, "a", "b", "d")
    stand.at_work = 1
    for name in stand.inboxes:
        stand.told(name)
    return stand


async def test_a_drafter_comes_back_into_the_running_epoch() -> None:
    stand = await drafting()
    stand.fleet.on_disconnect("d", "killed")
    assert drafter_of(stand) is None
    await stand.join(drafter(address="elsewhere:1"))
    (configured,) = stand.told("d")
    assert isinstance(configured, Configuration)
    assert (configured.epoch, configured.drafter) == (1, "elsewhere:1")
    assert stand.fleet.ready
    assert drafter_of(stand) is None, "it is not ready yet"
    stand.all_ready(1, "d")
    await stand.calm()
    assert drafter_of(stand) == "elsewhere:1"
    assert stand.told("a") == []
    assert stand.told("b") == [DrafterLost(1, "d"), Rejoined(1, "elsewhere:1", "d")]
    assert (stand.ready, stand.ends) == (2, []), "whoever waits for a drafter hears of it; no epoch ended"


async def test_a_second_drafter_joins_the_running_epoch_and_its_loss_leaves_the_first() -> None:
    stand = await drafting()
    await stand.join(drafter("e"))
    (configured,) = stand.told("e")
    assert [place.name for place in configured.drafters] == ["d", "e"]
    assert configured.head is None, "the stages have their slices of the head already"
    stand.all_ready(1, "e")
    await stand.calm()
    assert stand.told("b") == [Rejoined(1, "e:1", "e")]
    assert [place.address for place in stand.fleet.ring.drafters] == ["d:1", "e:1"]
    stand.fleet.on_disconnect("d", "killed")
    assert drafter_of(stand) == "e:1"
    await stand.calm()
    assert stand.told("b") == [DrafterLost(1, "d")]
    assert stand.ends == []


async def test_a_drafter_that_cannot_take_part_disturbs_neither_ring_nor_the_other_drafter() -> None:
    stand = await drafting()
    await stand.join(drafter("e"))
    stand.fleet.on_message("e", Broken(1, "no room"))
    stand.at_work = 0
    stand.fleet.reform()
    await stand.calm()
    assert (stand.ends, drafter_of(stand)) == ([], "d:1")
    await stand.join(replace(drafter("f"), kv_bytes=1 << 10))  # for less than two pages
    stand.fleet.on_message("a", Broken(1, "out of memory"))
    stand.fleet.reform()
    await stand.calm()
    stand.all_ready(2, "a", "b", "d")
    assert stand.fleet.ring is not None
    assert [place.name for place in stand.fleet.ring.drafters] == ["d"]


async def test_several_drafters_are_formed_together_and_one_of_them_sends_the_head() -> None:
    stand = await stand_with(drafter("d"), drafter("e"), worker("a"), worker("b"))
    first, second = stand.told("d")[-1], stand.told("e")[-1]
    assert [place.name for place in first.drafters] == ["d", "e"]
    assert (first.head is None, second.head is None) == (False, True)
    assert stand.told("b")[-1].drafters == first.drafters


async def test_a_replica_with_the_address_of_a_live_member_is_refused_and_changes_nothing() -> None:
    """As `docker compose up --scale drafter=2` would start it, if both advertised the name of their
    service.
    """
    one, other = (
        drafter("x", address="drafter:50052", host=host, began=n + 1) for n, host in enumerate("pq")
    )
    stand = await stand_with(one, worker("a"), worker("b"))
    stand.all_ready(1, "a", "b", "x")
    with pytest.raises(
        Refused, match=r"drafter x of host p has joined already at drafter:50052: .*--advertise"
    ):
        await stand.join(other)
    assert stand.fleet.ready
    stand.fleet.on_disconnect("x", "killed")
    await stand.join(other)
    assert stand.told("x")[-1].epoch == 1, "once the first one is lost, its address is free"


async def test_another_drafter_waits_until_no_request_would_be_interrupted() -> None:
    """With less room than the one before, for whom the ring would have fewer pages."""
    stand = await drafting()
    stand.fleet.on_disconnect("d", "killed")
    await stand.join(replace(drafter(), kv_bytes=1 << 17))
    assert stand.told("d") == []
    assert [one.is_standby for one in stand.fleet.members() if one.name == "d"] == [True], "users see that"
    stand.at_work = 0
    stand.fleet.reform()
    await stand.calm()
    assert stand.told("d")[0].epoch == 2


async def test_a_drafter_that_breaks_breaks_nothing() -> None:
    stand = await drafting()
    stand.fleet.on_message("d", Broken(1, "d hangs"))
    assert stand.fleet.ready
    assert drafter_of(stand) is None
    stand.fleet.reform()
    assert stand.told("d") == [], "it is not asked again at once"
    stand.fleet.on_disconnect("d", "its link broke")
    await stand.join(drafter())
    stand.fleet.on_message("d", Broken(1, "no room"))
    stand.fleet.on_disconnect("d", "its link broke")
    await stand.join(drafter())
    stand.all_ready(1, "d")
    assert drafter_of(stand) == "d:1"
    assert stand.ends == []


async def test_a_ring_that_breaks_while_its_drafter_comes_back_is_formed_with_it() -> None:
    stand = await drafting()
    stand.fleet.on_disconnect("d", "killed")
    await stand.join(drafter())
    stand.fleet.on_message("a", Broken(1, "out of memory"))
    stand.fleet.reform()
    await stand.calm()
    stand.fleet.on_message("d", Ready(1))
    assert [one.epoch for one in stand.told("d")] == [1, 2]
    assert Disband(1, "a: out of memory") in stand.told("b")
    stand.all_ready(2, "a", "b", "d")
    assert drafter_of(stand) == "d:1"
