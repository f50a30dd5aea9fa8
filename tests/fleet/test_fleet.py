"""Epochs: the barrier, losses, a late drafter, and a ring that is formed anew."""

import asyncio
from dataclasses import replace

import pytest

from specsot.core.frames import Close, End, Outcome, Result
from specsot.errors import Unavailable
from specsot.members import (
    Broken,
    Configuration,
    Disband,
    MemberLeaving,
    Progress,
    Range,
    Ready,
    StandBy,
    WeightBytes,
)
from specsot.transport.links import Inbox, LocalLink
from specsot_master.core.inputs import RingLost, RingReady
from specsot_master.fleet import BARRIER_SECONDS, Fleet
from tests.faults.virtual import run
from tests.fleet.test_formation import WISHES, drafter, worker

MIB = 1 << 20
HASTY = replace(WISHES, take_over_after=0)


class Stand:
    """A fleet with everything it says written down."""

    def __init__(self, wishes=WISHES):
        self.results, self.ends, self.ready, self.at_work = [], [], 0, 0
        self.needs: list[int] = []  # pages of each request; if empty all fit
        self.final: dict[int, int] = {}
        self.complaints = []  # at every change
        self.fleet = Fleet(wishes, lambda: self.complaints.append(self.fleet.complaint))
        self.fleet.user = self
        self.inboxes: dict[str, Inbox] = {}

    def handle(self, event):
        match event:
            case RingReady():
                self.ready += 1
            case RingLost(reason):
                self.ends.append(reason)
            case _:
                self.results.append(event)

    async def join(self, registration):
        inbox = self.inboxes[registration.name] = Inbox()
        await self.fleet.join(registration, LocalLink("master", inbox))
        await self.calm()

    def final_rows(self):
        return self.final

    def fitting(self, ring):
        return sum(pages <= ring.pages for pages in self.needs) if self.needs else self.at_work

    async def calm(self):
        for _ in range(5):
            await asyncio.sleep(0)

    def told(self, name):
        messages = []
        while (arrival := self.inboxes[name].pop()) is not None:
            messages.append(arrival.message)
        return messages

    def all_ready(self, epoch, *names):
        for name in names:
            self.fleet.on_message(name, Ready(epoch))


def ranges(configuration):
    return {stage.name: str(stage.layers) for stage in configuration.stages}


async def stand_with(*registrations, wishes=WISHES):
    stand = Stand(wishes)
    for registration in registrations:
        await stand.join(registration)
    return stand


async def test_orders_pass_only_after_the_barrier():
    stand = await stand_with(worker("a"), worker("b"))
    assert isinstance(stand.told("a")[0], Configuration)
    stand.all_ready(1, "a")
    assert stand.fleet.waiting_for() == "b to get ready"
    with pytest.raises(Unavailable, match="b to get ready"):
        await stand.fleet.order(Close(1))
    stand.all_ready(1, "b")
    assert stand.ready == 1
    await stand.fleet.order(Close(1))
    assert stand.told("a") == [Close(1)]
    assert stand.told("b")[1:] == []


async def test_a_lost_stage_ends_the_epoch_and_a_new_worker_begins_the_next():
    stand = await stand_with(worker("a"), worker("b"))
    stand.all_ready(1, "a", "b")
    stand.fleet.on_disconnect("b", "connection reset")
    await stand.calm()
    assert stand.ends == ["b is gone: connection reset"]
    assert [type(message) for message in stand.told("a")] == [Configuration, Disband]
    assert stand.fleet.waiting_for() == "1 of 2 workers"
    await stand.join(worker("c"))
    assert stand.told("a")[0].epoch == 2
    stand.fleet.on_message("a", Ready(1))
    assert not stand.fleet.ready
    stand.all_ready(2, "a", "c")
    assert stand.fleet.ready


async def test_the_first_ring_is_formed_once_and_with_the_drafter():
    stand = await stand_with(worker("a"), worker("b"), wishes=replace(WISHES, drafter_grace=60))
    assert stand.told("a") == []
    assert stand.fleet.waiting_for() == "the drafter"
    await stand.join(drafter())
    (configuration,) = stand.told("a")
    assert (configuration.epoch, configuration.drafter) == (1, drafter().address)
    stand.all_ready(1, "a", "b", drafter().name)
    stand.fleet.on_disconnect("b", "connection reset")
    stand.fleet.on_disconnect(drafter().name, "connection reset")
    await stand.join(worker("c"))
    assert stand.fleet.epoch == 2, "later ones wait for no drafter"


def test_a_drafter_that_does_not_come_is_not_waited_for():
    async def without() -> None:
        stand = await stand_with(worker("a"), wishes=replace(WISHES, drafter_grace=5))
        assert stand.fleet.waiting_for() == "1 of 2 workers"
        await asyncio.sleep(6)  # of virtual time: it is the workers that do not come
        await stand.join(worker("b"))
        assert stand.fleet.epoch == 0
        assert stand.fleet.waiting_for() == "the drafter"
        await asyncio.sleep(6)
        assert stand.fleet.epoch == 1
        assert [type(message) for message in stand.told("a")] == [Configuration]

    run(without())


@pytest.mark.parametrize(("gpus", "wanted"), [(("A",), True), ((), False)])
async def test_the_engine_knows_whether_every_stage_computes_on_a_gpu(gpus, wanted):
    """A drafter does not count."""
    stand = await stand_with(drafter(), worker("a", gpus=("A",)), worker("b", gpus=gpus))
    stand.all_ready(1, "a", "b", "d")
    assert stand.fleet.state().on_gpus is wanted


async def test_a_lost_drafter_interrupts_no_request():
    stand = await stand_with(drafter(), worker("a"), worker("b"))
    stand.all_ready(1, "a", "b", "d")
    assert stand.fleet.ring.drafter == "d:1"
    stand.fleet.on_disconnect("d", "killed")
    assert stand.fleet.ready
    assert stand.fleet.ring.drafter is None
    assert stand.ends == []


async def test_a_lost_drafter_may_still_be_named():
    """Whoever asks for it is answered, as all others are, instead of being told that there is none."""
    stand = await stand_with(drafter(drafters=("eagle", "ngram")), worker("a"), worker("b"))
    stand.all_ready(1, "a", "b", "d")
    stand.fleet.on_disconnect("d", "killed")
    assert stand.fleet.ring.drafter is None
    assert stand.fleet.state().drafters == ("eagle", "ngram")


async def test_a_late_drafter_is_admitted_once_no_request_would_be_interrupted():
    stand = await stand_with(worker("a"), worker("b"))
    stand.all_ready(1, "a", "b")
    stand.at_work = 1
    await stand.join(drafter())
    assert stand.fleet.ready
    stand.at_work = 0
    stand.fleet.reform()
    await stand.calm()
    stand.all_ready(2, "a", "b", "d")
    assert stand.fleet.ring.drafter == "d:1"


async def test_results_of_a_past_epoch_are_dropped():
    stand = await stand_with(worker("a"), worker("b"))
    stand.all_ready(1, "a", "b")
    stand.fleet.on_message("b", Result(0, 1))
    stand.fleet.on_message("b", Result(1, 1))
    assert stand.results == [Result(1, 1)]


async def test_a_new_ring_has_a_later_epoch_than_any_that_members_know():
    """Another master, whose clock was ahead, may have led them before."""
    stand = await stand_with(worker("a", epoch=7), worker("b", epoch=9))
    assert [stand.told(name)[0].epoch for name in ("a", "b")] == [10, 10]
    stand.fleet.on_disconnect("b", "killed")
    await stand.join(worker("b", epoch=3))
    assert stand.fleet.epoch == 11


def test_who_gets_no_further_is_lost_and_another_takes_its_place():
    """Loading may take as long as it likes, layer by layer."""

    async def load():
        stand = await stand_with(worker("a"), worker("b"), worker("c"))
        stand.all_ready(1, "a")
        for layer in range(4):
            await asyncio.sleep(BARRIER_SECONDS - 1)
            stand.fleet.on_message("b", Progress(1, layer, 5))
        assert (stand.ends, stand.fleet.waiting_for()) == ([], "b (3 of 5) to get ready")
        for _ in range(3):
            await asyncio.sleep(BARRIER_SECONDS / 2)
            stand.fleet.on_message("b", Progress(1, 3, 5))  # that is no news
        assert stand.ends == ["no progress for 180 s in getting ready: b 3 of 5"]
        assert {one.name for one in stand.fleet.members()} == {"a", "c"}
        assert ranges(stand.told("c")[-1]) == {"a": "0:4", "c": "4:8"}

    run(load())


def test_where_all_wait_for_something_that_is_lost_the_epoch_is_formed_anew():
    async def wait():
        stand = await stand_with(worker("a"), worker("b"))
        for name in ("a", "b"):
            stand.fleet.on_message(name, Progress(1, 5, 5))
        await asyncio.sleep(BARRIER_SECONDS * 1.5)
        assert stand.ends == ["no progress for 180 s in getting ready: a 5 of 5, b 5 of 5"]
        assert stand.fleet.epoch == 2
        stand.all_ready(2, "a", "b")
        await asyncio.sleep(BARRIER_SECONDS * 2)
        assert stand.fleet.ready

    run(wait())


async def test_results_come_from_the_last_stage_and_rejections_from_the_first():
    """Neither a drafter nor one that stands by, nor another stage, writes an answer."""
    stand = await stand_with(drafter(), worker("a"), worker("b"), worker("c"))
    stand.all_ready(1, "a", "b", "d")
    answer = Result(1, 7, (Outcome(1, 0, (), (666,)),))
    rejection = Result(1, 0, (Outcome(1, 0, (), (), End.FAILED),))
    for name in ("a", "c", "d"):
        stand.fleet.on_message(name, answer)
        stand.fleet.on_message(name, replace(answer, number=0))
    for name in ("c", "d"):
        stand.fleet.on_message(name, rejection)
    assert stand.results == []
    late = replace(answer, number=0)  # judged once what holds it was compiled
    for name, result in (("b", answer), ("b", late), ("b", rejection), ("a", rejection)):
        stand.fleet.on_message(name, result)
    assert stand.results == [answer, late, rejection, rejection]


async def test_a_failing_member_is_reported_and_a_leaving_one_is_released():
    stand = await stand_with(worker("a"), worker("b"))
    stand.all_ready(1, "a", "b")
    stand.fleet.on_message("a", Broken(1, "out of memory"))
    assert stand.ends == ["a: out of memory"]
    assert "out of memory" in stand.fleet.waiting_for()
    stand.fleet.on_message("b", MemberLeaving())
    assert stand.fleet.waiting_for() == "1 of 2 workers"


async def test_one_more_stands_by_and_takes_the_place_of_a_lost_one_at_once():
    stand = await stand_with(worker("a"), worker("b"), worker("c"))
    stand.all_ready(1, "a", "b")
    assert stand.told("c") == [StandBy(1)]
    assert {one.name: one.is_standby for one in stand.fleet.members()} == {"a": False, "b": False, "c": True}
    stand.fleet.on_disconnect("a", "killed")
    await stand.calm()
    configured = stand.told("c")[0]
    assert ranges(configured) == {"c": "0:4", "b": "4:8"}
    stand.all_ready(2, "b", "c")
    assert (stand.fleet.ready, stand.ends) == (True, ["a is gone: killed"])


async def test_a_lost_one_that_comes_back_in_time_finds_its_place():
    stand = await stand_with(worker("a"), worker("b"))
    stand.fleet.on_disconnect("a", "killed")
    assert stand.fleet.waiting_for() == "1 of 2 workers"
    await stand.join(worker("a", address="elsewhere:1"))
    (configured,) = stand.told("a")
    assert (configured.stages[0].address, ranges(configured)) == ("elsewhere:1", {"a": "0:4", "b": "4:8"})


async def test_patience_with_a_lost_one_ends_and_the_others_share_its_layers():
    """Until a worker comes and nobody is disturbed: then the ring is as large again as it was meant to be."""
    stand = await stand_with(worker("a"), worker("b"), wishes=HASTY)
    stand.all_ready(1, "a", "b")
    stand.at_work = 1
    stand.fleet.on_disconnect("a", "killed")
    await stand.calm()
    assert ranges(stand.told("b")[-1]) == {"b": "0:8"}
    stand.all_ready(2, "b")
    await stand.join(worker("c"))
    assert stand.told("c") == [StandBy(2)]
    stand.at_work = 0
    stand.fleet.reform()
    await stand.calm()
    assert ranges(stand.told("c")[-1]) == {"b": "0:4", "c": "4:8"}


@pytest.mark.parametrize("alone", [False, True])
async def test_faster_ones_are_taken_in_amid_requests_once_all_have_the_layers_for_it(alone):
    """alone: the new one is so fast that it takes all layers."""
    stand = await stand_with(worker("a", host="a"), wishes=replace(WISHES, workers=1, max_stages=2))
    stand.all_ready(1, "a")
    stand.at_work = 1 if alone else 2
    stand.told("a")
    quick = worker("c", host="c", curve=((1, 0.00005), (8, 0.0001))) if alone else worker("c", host="c")
    await stand.join(quick)
    wanted = Range(0, 8) if alone else Range(4, 8)
    assert stand.told("c") == [StandBy(1), StandBy(1, wanted)]
    stand.fleet.reform()
    await stand.calm()
    assert (stand.told("a"), stand.told("c"), stand.ends) == ([], [], [])
    stand.fleet.on_message("c", Progress(1, 4, 4, layers=Range(3, 4)))
    assert not stand.ends, "others than those that it was told to load"
    stand.fleet.on_message("c", Progress(1, 4, 4, layers=wanted))
    await stand.calm()
    assert stand.ends == ["a worker joined"]
    assert ranges(stand.told("c")[-1]) == ({"c": "0:8"} if alone else {"a": "0:4", "c": "4:8"})


async def test_a_stage_with_a_moved_range_also_preloads_it():
    """Three share what two had: the second one gets layers of the first one's."""
    names = [worker(name, host=name) for name in "ab"]
    stand = await stand_with(*names, wishes=replace(WISHES, workers=2, max_stages=3))
    stand.all_ready(1, "a", "b")
    stand.at_work = 3
    stand.told("b")
    await stand.join(worker("c", host="c"))
    assert (stand.told("b"), stand.told("c")[1:]) == ([StandBy(1, Range(3, 6))], [StandBy(1, Range(6, 8))])
    stand.fleet.on_message("c", Progress(1, 2, 2, layers=Range(6, 8)))
    assert not stand.ends
    stand.fleet.on_message("b", Progress(1, 3, 3, layers=Range(3, 6)))
    await stand.calm()
    assert ranges(stand.told("a")[-1]) == {"a": "0:3", "b": "3:6", "c": "6:8"}


async def test_if_no_worker_has_room_the_missing_memory_is_reported():
    small = {"memory": 6 * MIB, "kv_bytes": MIB, "weights": WeightBytes(MIB, 0, 0)}
    stand = await stand_with(worker("a", **small), worker("b", **small), wishes=HASTY)
    stand.all_ready(1, "a", "b")
    stand.fleet.on_disconnect("a", "killed")
    await stand.calm()
    assert stand.fleet.waiting_for() == (
        "1 of 2 workers; without: layers 0:8 need 8.0 MiB, workers offer 5.0 MiB in addition to their "
        "KV pages; 3.0 MiB are missing"
    )
    await stand.join(worker("a", **small))
    assert stand.told("a")[0].epoch == 2


@pytest.mark.parametrize(
    ("small", "said"),
    [
        ({"kv_bytes": 1}, "more KV memory: 0 pages of 256 rows fit, at least 2 are needed (--kv-memory)"),
        (
            {"memory": 3 * MIB, "kv_bytes": MIB, "weights": WeightBytes(MIB, 0, 0)},
            "layers 0:8 need 8.0 MiB, workers offer 2.0 MiB + 2.0 MiB in addition to their KV pages; "
            "4.0 MiB are missing",
        ),
    ],
)
async def test_too_little_memory_is_reported_to_requests_that_wait_for_the_ring(small, said):
    stand = await stand_with(worker("a", **small), worker("b", **small))
    assert stand.complaints[-1] == said


async def test_a_leaving_worker_is_replaced_before_its_link_ends():
    stand = await stand_with(worker("a"), worker("b"), worker("c"))
    stand.all_ready(1, "a", "b")
    stand.fleet.on_message("b", MemberLeaving())
    await stand.calm()
    assert ranges(stand.told("c")[-1]) == {"a": "0:4", "c": "4:8"}
    stand.fleet.on_disconnect("b", "its link broke")
    stand.all_ready(2, "a", "c")
    assert stand.fleet.ready
    assert stand.ends == ["b is gone: shutting down"]


@pytest.mark.parametrize("stale", [0, 1])
async def test_a_broken_epoch_breaks_no_other_one(stale):
    """The word of a member that had disbanded already, or spoke of the epoch before."""
    stand = await stand_with(worker("a"), worker("b"), worker("c"))
    stand.all_ready(1, "a", "b")
    stand.fleet.on_disconnect("b", "killed")
    stand.fleet.on_message("a", Broken(stale, "lost b"))
    stand.all_ready(2, "a", "c")
    stand.fleet.on_message("a", Broken(stale, "lost b"))
    assert stand.fleet.ready
    assert stand.ends == ["b is gone: killed"]


async def test_an_epoch_breaks_once_however_many_say_so():
    stand = await stand_with(worker("a"), worker("b"))
    stand.all_ready(1, "a", "b")
    for name in "ab":
        stand.fleet.on_message(name, Broken(1, "lost the other one"))
    assert stand.ends == ["a: lost the other one"]


async def test_one_that_cannot_take_part_steps_back_for_one_that_stands_by():
    stand = await stand_with(worker("a"), worker("b"), worker("c"))
    stand.all_ready(1, "a")
    stand.fleet.on_message("b", Broken(1, "out of memory"))
    stand.fleet.reform()
    await stand.calm()
    assert ranges(stand.told("c")[-1]) == {"a": "0:4", "c": "4:8"}
    assert stand.told("b")[-1] == StandBy(2)


async def test_a_rebalance_takes_all_that_help_and_then_changes_nothing():
    stand = await stand_with(worker("a"), worker("b"), worker("c"))
    with pytest.raises(Unavailable, match="1 of 2 workers"):
        await (await stand_with(worker("a"))).fleet.rebalance()
    stand.all_ready(1, "a", "b")
    done = await stand.fleet.rebalance()
    await stand.calm()
    assert (done.changed, done.epoch) == (True, 2)
    assert (
        done.plan
        == "a 0:3 3.0 ms, b 3:6 3.0 ms, c 6:8 2.0 ms: 125.0 tokens/s without drafts"
        == stand.fleet.plan
    )
    assert stand.ends == ["the ring is rebalanced"]
    stand.all_ready(2, "a", "b", "c")
    assert not (await stand.fleet.rebalance()).changed


async def test_one_who_comes_late_and_has_no_room_at_all_stands_by():
    stand = await stand_with(worker("a"), worker("b"), wishes=HASTY)
    stand.all_ready(1, "a", "b")
    stand.fleet.on_disconnect("a", "killed")
    await stand.calm()
    await asyncio.sleep(0)
    stand.all_ready(2, "b")
    await stand.join(worker("c", memory=MIB + 10, kv_bytes=MIB, weights=WeightBytes(MIB, 0, 0)))
    stand.fleet.reform()
    assert [one.name for one in stand.fleet.members() if one.is_standby] == ["c"]


async def test_slices_of_a_head_travel_again_only_to_stages_that_lack_them():
    """Over a narrow link they take long. Another process that drafts has another head."""
    stand = await stand_with(drafter(began=5), worker("a"), worker("b"))
    stand.all_ready(1, "a", "b", "d")

    def taps():
        told = {name: stand.told(name)[-1].head for name in stand.inboxes if stand.fleet.knows(name)}
        return {name: head and head.taps for name, head in told.items()}

    whole = (2, 4, 5)
    assert taps() == dict.fromkeys("abd", whole)
    await stand.join(worker("c"))
    stand.told("c")
    stand.fleet.on_disconnect("b", "killed")
    await stand.calm()
    assert taps() == {"a": (), "c": whole, "d": (4, 5)}
    stand.all_ready(2, "a", "c", "d")
    stand.fleet.on_message("a", Broken(2, "a bug"))
    stand.fleet.reform()
    await stand.calm()
    assert taps() == {"a": (), "c": (), "d": None}
    stand.all_ready(3, "a", "c", "d")
    stand.fleet.on_disconnect("d", "killed")
    await stand.join(drafter(began=6))
    stand.fleet.on_message("a", Broken(3, "a bug"))
    stand.fleet.reform()
    await stand.calm()
    assert taps() == dict.fromkeys("acd", whole)
