"""Who comes to the fleet's endpoint: streams that follow each other, who is not let in, and who hears of
it."""

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from specsot.errors import Refused
from specsot.members import MemberLeaving, Ready
from specsot.transport.links import Inbox, LocalLink
from specsot.transport.wire.members import encode_upward
from specsot_master.grpc_api import FleetService
from specsot_master.members import ASKS_AGAIN_SECONDS, MAX_REFUSED_MEMBERS, RefusedMembers
from tests.fleet.test_fleet import Stand, stand_with
from tests.fleet.test_formation import WISHES, worker


async def turn(turns):
    """The loop goes round so many times."""
    for _ in range(turns):
        await asyncio.sleep(0)


@pytest.mark.parametrize("turns", range(4))
async def test_the_end_of_an_old_stream_never_removes_who_took_its_place(turns):
    """So many turns of the loop before the next process registers."""
    fleet = Stand(replace(WISHES, workers=1)).fleet
    service, (old, new) = FleetService(fleet), (asyncio.Queue(), asyncio.Queue())

    async def stream(queue):
        while (said := await queue.get()) is not None:
            yield encode_upward(said)

    streams = [asyncio.create_task(service.Join(stream(one), Context())) for one in (old, new)]
    old.put_nowait(worker("a", began=1))
    await turn(100)
    old.put_nowait(None)
    await turn(turns)
    new.put_nowait(worker("a", began=2))
    await turn(100)
    assert [one.began for one in fleet.registrations] == [2]
    for one in streams:
        one.cancel()
    await asyncio.gather(*streams, return_exceptions=True)


async def test_who_is_not_let_in_is_named_by_the_master_too():
    """Once, however often it asks; its state tells of it until it is in, or asks no more."""
    fleet, now = Stand(replace(WISHES, workers=2)).fleet, [0.0]
    refused_members = RefusedMembers(lambda: now[0])
    service = FleetService(fleet, refused_members=refused_members)
    await fleet.join(worker("a", began=1), LocalLink("master", Inbox()))
    why = "a member named a has joined already, at a:1"
    said = f"worker a at elsewhere:2 is not let in: {why}"

    async def asks():
        async def stream():
            yield encode_upward(worker("a", address="elsewhere:2", began=2))
            await asyncio.Event().wait()

        await service.Join(stream(), Context())

    with capture_logs() as lines:
        for _ in range(2):
            with pytest.raises(Refused, match=why):
                await asks()
    told = [line for line in lines if line["event"] == "member not let in"]
    assert [(line["name"], line["at"], line["reason"]) for line in told] == [("a", "elsewhere:2", why)]
    assert refused_members.lines() == (said,)
    now[0] += ASKS_AGAIN_SECONDS - 1
    assert refused_members.lines() == (said,)
    fleet.on_disconnect("a", "its link broke")
    joined = asyncio.create_task(asks())
    await turn(100)
    assert refused_members.lines() == ()
    joined.cancel()
    refused_members.note(worker("b"), Refused("no"))
    now[0] += ASKS_AGAIN_SECONDS
    assert refused_members.lines() == ()


def test_a_crowd_that_is_not_let_in_fills_no_log():
    refused_members = RefusedMembers()
    with capture_logs() as lines:
        for number in range(10 * MAX_REFUSED_MEMBERS):
            refused_members.note(worker(f"w{number}"), Refused("no"))
    assert len(lines) == len(refused_members.lines()) == MAX_REFUSED_MEMBERS


class Context:
    """Of a call without certificates."""

    async def write(self, response): ...

    def auth_context(self):
        return {}


async def test_messages_of_a_replaced_stream_are_ignored():
    stand = await stand_with(worker("a", began=1), worker("b"))
    old = stand.fleet._table["a"].downlink
    await stand.join(worker("a", began=2))
    for said in (Ready(stand.fleet.epoch), MemberLeaving()):
        stand.fleet.on_message("a", said, old)
    stand.fleet.on_disconnect("a", "its link broke", old)
    assert {one.began for one in stand.fleet.registrations} == {0, 2}
    assert stand.fleet.waiting_for() == "a, b to get ready"


async def test_a_stranger_is_refused_and_changes_nothing():
    stand = await stand_with(worker("a"), worker("b"))
    stand.all_ready(1, "a", "b")
    with pytest.raises(Refused, match="has joined already"):
        await stand.fleet.join(worker("a"), LocalLink("master", Inbox()))
    assert stand.fleet.ready
    assert len(stand.fleet.members()) == 2
