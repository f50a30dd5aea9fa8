"""A ring that changes while requests run: their KV rows are with the next stages before it does."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from specsot.core.frames import Outcome, Result
from specsot.core.info import Rebalanced
from specsot.errors import Unavailable
from specsot.members import HandOver, Progress, Range, Registration, RowsOf, StandBy
from specsot_master import handover, kv_copies
from tests.faults.virtual import run
from tests.fleet.test_fleet import Stand
from tests.fleet.test_formation import WISHES, drafter, worker
from tests.there import there

ABLE: dict[str, Any] = {"hands_over": True, "row_bytes": 8}


async def amid(
    final: dict[int, int], quick: dict[str, Any] = ABLE, head: Registration | None = None, **more: Any
) -> Stand:
    """a runs all while a request does; c, which is to share the layers, has loaded its own."""
    stand = Stand(replace(WISHES, workers=1, max_stages=2, take_over_after=0))
    stand.final = final
    if head:
        await stand.join(head)
    await stand.join(worker("a", host="a", **ABLE, **more))
    stand.all_ready(1, "a", *([head.name] if head else ()))
    stand.at_work = 2
    await stand.join(worker("c", host="c", **quick))
    stand.told("a")
    assert stand.told("c") == [StandBy(1), StandBy(1, Range(4, 8))]
    stand.fleet.on_message("c", Progress(1, 4, 4, layers=Range(4, 8)))
    await stand.calm()
    return stand


def migrated(stand: Stand, *names: str, number: int = 1, over: tuple[int, ...] = ()) -> None:
    for name in names:
        stand.fleet.on_message(name, Progress(1, 1, 1, migrated=number, over=over))


def change(stand: Stand) -> None:
    """The next epoch is complete."""
    stand.told("a")
    stand.told("c")
    stand.all_ready(2, "a", "c")
    assert stand.fleet.ready


async def test_the_next_epoch_begins_when_every_taker_has_the_rows() -> None:
    stand = await amid({5: 100, 6: 40})
    (told,) = stand.told("a")
    assert isinstance(told, HandOver)
    assert stand.told("c") == [told]
    assert told.rows == (RowsOf(5, 0, 100), RowsOf(6, 0, 40))
    assert [(one.name, str(one.layers)) for one in told.givers] == [("a", "0:8")]
    assert [(one.name, str(one.layers)) for one in told.takers] == [("a", "0:4"), ("c", "4:8")]
    migrated(stand, "c")
    assert not stand.ends
    stand.final = {5: 110, 6: 50}  # that few are read
    migrated(stand, "a")
    await stand.calm()
    assert stand.ends == ["a worker joined"]
    change(stand)
    assert there(stand.fleet.state()).kept == {5: 100, 6: 40}
    stand.fleet.on_disconnect("c", "killed")
    await stand.calm()
    stand.all_ready(3, "a")
    state = there(stand.fleet.state())
    assert (state.epoch, state.kept) == (3, {}), "after a loss everything is read"


async def test_what_was_written_meanwhile_comes_in_further_rounds_but_not_for_ever() -> None:
    stand, count = await amid({5: 100}), 100
    for number in range(1, handover.MAX_ROUNDS):
        count += 100
        stand.final = {5: count}
        stand.told("c")
        migrated(stand, "a", "c", number=number)
        await stand.calm()
        assert [one.rows for one in stand.told("c")] == [(RowsOf(5, count - 100, count),)]
    stand.final = {5: count + 100}
    migrated(stand, "a", "c", number=handover.MAX_ROUNDS)
    await stand.calm()
    change(stand)
    assert there(stand.fleet.state()).kept == {5: count}


@pytest.mark.parametrize(
    ("quick", "more", "reason"),
    [
        ({"hands_over": False}, {}, "not supported by c"),
        (ABLE | {"dtype": "bfloat16"}, {"dtype": "float32"}, "different data types"),
        (ABLE | {"number_bytes": 2}, {"number_bytes": 4}, "different data types"),
    ],
    ids=["version", "type", "size"],
)
async def test_stages_that_do_not_keep_rows_alike_read_everything(
    quick: dict[str, Any], more: Any, reason: str
) -> None:
    with capture_logs() as logs:
        stand = await amid({5: 100}, quick, **more)
    (told,) = [one["reason"] for one in logs if one["event"] == "KV rows not migrated"]
    assert reason in told
    assert not any(isinstance(one, HandOver) for one in stand.told("a"))
    assert stand.ends == ["a worker joined"]


async def test_few_tokens_are_recomputed_and_of_many_the_longest_sequences_that_fit_are_migrated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (await amid({5: handover.MAX_RECOMPUTED_ROWS})).ends == ["a worker joined"]
    monkeypatch.setattr(handover, "MAX_MIGRATED_BYTES", 8 * 8 * 150)  # of 8 bytes in 8 layers
    stand = await amid({5: 60, 6: 100, 7: 50, 8: 151})
    assert stand.told("a")[0].rows == (RowsOf(6, 0, 100), RowsOf(7, 0, 50))


async def test_features_go_with_the_rows_and_count_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "MAX_MIGRATED_BYTES", (8 * 8 + 16 * 4) * 100)
    stand = await amid({5: 100, 6: 101}, ABLE | {"number_bytes": 4}, drafter(), number_bytes=4)
    (told,) = stand.told("c")
    assert (told.features, told.rows) == (True, (RowsOf(5, 0, 100),))
    assert [told.taken_by(one) for one in told.takers] == [tuple(range(4)), tuple(range(4, 9))]
    assert (told.giver_of(8), told.model_layers) == ("a", 8)


async def test_of_a_drafter_that_is_lost_meanwhile_no_features_are_asked_for_any_more() -> None:
    stand = await amid({5: 100}, head=drafter())
    stand.told("c")
    stand.fleet.on_disconnect("d", "killed")
    await stand.calm()
    (told,) = stand.told("c")
    assert (told.features, told.rows) == (False, (RowsOf(5, 0, 100),))


async def test_a_reply_to_a_previous_order_does_not_count() -> None:
    stand = await amid({5: 100})
    migrated(stand, "a", "c", number=2)
    assert stand.fleet._handover._lacking == {"a", "c"}


async def test_a_sequence_is_recomputed_if_the_report_of_its_end_was_lost() -> None:
    """Its end is on the way while rows are asked for, and is lost with the epoch."""
    stand = await amid({5: 100, 6: 100})
    migrated(stand, "a")
    migrated(stand, "c", over=(6,))
    await stand.calm()
    assert stand.ends == ["a worker joined"], "6 is not asked for again"
    change(stand)
    assert there(stand.fleet.state()).kept == {5: 100}


async def test_what_is_under_way_goes_on_though_something_else_would_be_better_by_now() -> None:
    stand = await amid({5: 100})
    stand.told("c")
    await stand.join(worker("e", host="e", **ABLE | {"curve": ((1, 1e-6), (8, 1e-6))}))
    assert not stand.told("c")
    migrated(stand, "a", "c")
    await stand.calm()
    assert stand.ends == ["a worker joined"]


async def rebalancing(final: dict[int, int]) -> tuple[Stand, asyncio.Task[Rebalanced]]:
    """a runs all, alone as was wished, while a request does; c is to have half of the layers."""
    stand = Stand(replace(WISHES, workers=1, take_over_after=0))
    stand.final, stand.at_work = final, 1
    await stand.join(worker("a", host="a", **ABLE))
    stand.all_ready(1, "a")
    await stand.join(worker("c", host="c", **ABLE))
    stand.told("a")
    assert stand.told("c") == [StandBy(1)]
    task = asyncio.create_task(stand.fleet.rebalance())
    await stand.calm()
    assert stand.told("c") == [StandBy(1, Range(4, 8))]
    return stand, task


@pytest.mark.parametrize("done", [4, 0], ids=["loaded ahead", "no room for both"])
async def test_a_rebalance_also_migrates_kv_and_returns_once_the_next_epoch_has_started(done: int) -> None:
    stand, task = await rebalancing({5: 100})
    stand.fleet.on_message("c", Progress(1, done, 4, layers=Range(4, 8)))
    await stand.calm()
    (told,) = stand.told("c")
    assert told.rows == (RowsOf(5, 0, 100),)
    assert not task.done()
    migrated(stand, "a", "c")
    await stand.calm()
    assert stand.ends == ["the ring is rebalanced"]
    found = await task
    assert (found.changed, found.epoch, found.plan) == (True, 2, stand.fleet.plan)
    change(stand)
    assert there(stand.fleet.state()).kept == {5: 100}


async def test_one_without_room_for_both_ranges_waits_for_a_rebalance() -> None:
    stand = Stand(replace(WISHES, workers=1, max_stages=2, take_over_after=0))
    await stand.join(worker("a", host="a", **ABLE))
    stand.all_ready(1, "a")
    stand.at_work = 2
    await stand.join(worker("c", host="c", **ABLE))
    stand.fleet.on_message("c", Progress(1, 0, 4, layers=Range(4, 8)))
    await stand.calm()
    assert not stand.ends
    task = asyncio.create_task(stand.fleet.rebalance())
    await stand.calm()
    assert stand.ends == ["the ring is rebalanced"]
    assert (await task).epoch == 2


@pytest.mark.parametrize("lost", ["a", "c"])
async def test_a_rebalance_ends_if_a_participant_is_lost(lost: str) -> None:
    stand, task = await rebalancing({5: 100})
    stand.fleet.on_disconnect(lost, "killed")
    with pytest.raises(Unavailable, match=f"the ring is not rebalanced: {lost} is gone: killed"):
        await task
    assert bool(stand.ends) == (lost == "a"), "the ring goes on without c"


async def test_a_giver_that_dies_ends_the_epoch_and_the_taker_reads_everything() -> None:
    stand = await amid({5: 100})
    migrated(stand, "a")
    stand.fleet.on_disconnect("a", "killed")
    await stand.calm()
    assert stand.ends == ["a is gone: killed"]
    stand.all_ready(2, "c")
    assert there(stand.fleet.state()).kept == {}


async def test_a_drafter_that_reads_features_and_joins_meanwhile_makes_everything_be_read() -> None:
    stand = await amid({5: 100})
    migrated(stand, "a")
    await stand.join(drafter())
    assert stand.ends == ["a worker joined"]
    stand.told("a")
    stand.told("c")
    stand.all_ready(2, "a", "c", "d")
    assert there(stand.fleet.state()).kept == {}, "c has none of its rows"


async def test_a_taker_that_is_another_process_by_now_is_given_all_rows_again() -> None:
    stand = await amid({5: 100})
    migrated(stand, "c")
    stand.fleet.on_disconnect("c", "killed")
    await stand.join(worker("c", host="c", began=2, **ABLE))
    stand.fleet.on_message("c", Progress(1, 4, 4, layers=Range(4, 8)))
    stand.told("c")
    migrated(stand, "a")
    await stand.calm()
    assert [one.rows for one in stand.told("c")] == [(RowsOf(5, 0, 100),)]
    assert not stand.ends


def test_a_member_that_never_gets_its_kv_does_not_block_the_others_forever() -> None:
    async def wait() -> None:
        stand = await amid({5: 100})
        migrated(stand, "a")
        while not stand.ends:  # noqa: ASYNC110
            await asyncio.sleep(handover.ROUND_SECONDS)  # of virtual time
        change(stand)
        assert there(stand.fleet.state()).kept == {}

    run(wait())


LOGS: dict[str, Any] = ABLE | {"hidden_bytes": 16}


async def broken(lost: str, *more: Registration, **changes: Any) -> Stand:
    """Of a, b and c, which ran 3, 3 and 2 of 8 layers while requests did, one is lost. changes: of all."""
    stand = Stand(replace(WISHES, workers=3, take_over_after=0))
    stand.final = {5: 100, 6: 40}
    for name in "abc":
        await stand.join(worker(name, host=name, **LOGS | changes))
    stand.all_ready(1, *"abc")
    stand.at_work = 2
    for one in more:
        await stand.join(one)
    for name in stand.inboxes:
        stand.told(name)
    stand.fleet.on_disconnect(lost, "killed")
    await stand.calm()
    return stand


def orders(stand: Stand, *names: str) -> list[HandOver]:
    return [one for name in names for one in stand.told(name) if isinstance(one, HandOver)]


@pytest.mark.parametrize(
    ("lost", "layers", "d_needs", "logs"),
    [("a", "0:3", (), [14]), ("b", "3:6", (11,), [11]), ("c", "6:8", (14,), [11, 14])],
)
async def test_what_is_left_of_a_broken_ring_is_kept_before_the_next_epoch_begins(
    lost: str, layers: str, d_needs: tuple[int, ...], logs: list[int]
) -> None:
    """A standby gets what the stage before the lost one has logged: what enters layer n has number 8 + n."""
    stand = await broken(lost, worker("d", host="d", **LOGS))
    left = [one for one in "abc" if one != lost]
    (told,) = orders(stand, "d")
    assert orders(stand, *left) == [told, told]
    assert (str(told.lost), told.rows) == (layers, (RowsOf(5, 0, 100), RowsOf(6, 0, 40)))
    assert [one.name for one in told.givers] == left
    needed = {one.name: told.needed_by(one) for one in told.takers}
    assert needed.pop("d") == d_needs
    assert needed == {one.name: tuple(range(one.layers.first, one.layers.last)) for one in told.givers}
    assert sorted({one for taker in told.takers for one in told.taken_by(taker) if one > 8}) == logs
    migrated(stand, *left)
    await stand.calm()
    assert stand.fleet.epoch == 1, "the standby waits for rows"
    migrated(stand, "d", over=(6,))
    await stand.calm()
    stand.all_ready(2, *left, "d")
    state = there(stand.fleet.state())
    assert (state.epoch, state.kept, state.replays) == (2, {5: 100}, True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_bytes": 0}, "hidden states are not logged by a, c"),
        ({"hands_over": False}, "not supported by a, c: recurrent states"),
    ],
)
async def test_a_ring_that_cannot_keep_rows_computes_all_of_them_again_and_says_why(
    changes: dict[str, Any], reason: str
) -> None:
    with capture_logs() as logs:
        stand = await broken("b", **changes)
    (said,) = [one["reason"] for one in logs if one["event"] == "repair computes every layer again"]
    assert reason in said
    assert not orders(stand, *"ac")
    assert stand.fleet.epoch == 2


async def test_a_second_loss_meanwhile_leaves_what_the_last_stage_has() -> None:
    """Or all is computed again if there is a stage between those that were lost."""
    stand = await broken("b")
    stand.fleet.on_disconnect("c", "killed")
    await stand.calm()
    told = orders(stand, "a")[-1]
    assert ([one.name for one in told.givers], str(told.lost)) == (["a"], "3:8")
    migrated(stand, "a", number=told.number)
    await stand.calm()
    stand.all_ready(2, "a")
    assert there(stand.fleet.state()).kept == {5: 100, 6: 40}


async def test_a_process_that_comes_back_under_its_name_has_nothing_and_is_sent_what_it_needs() -> None:
    stand = await broken("b")
    await stand.join(worker("b", host="b", began=2, **LOGS))
    (told,) = orders(stand, "b")
    assert [one.name for one in told.givers] == ["a", "c"]
    assert [told.needed_by(one) for one in told.takers if one.name == "b"] == [(11,)]


def test_stages_that_do_not_keep_their_rows_in_time_do_not_block_the_others_forever() -> None:
    async def wait() -> None:
        stand = await broken("b")
        migrated(stand, "a")
        assert stand.fleet.epoch == 1
        await asyncio.sleep(2 * handover.REPAIR_SECONDS)  # of virtual time
        stand.all_ready(2, "a", "c")
        assert there(stand.fleet.state()).kept == {}

    run(wait())


async def test_a_worker_that_comes_back_waits_until_the_ring_has_run() -> None:
    """Else requests would wait for its layers a second time, before anything was written."""
    stand = await broken("b", hidden_bytes=0)
    stand.at_work = 3
    await stand.join(worker("b", host="b", began=2, **LOGS | {"hidden_bytes": 0}))
    assert stand.told("b") == [StandBy(2)]
    stand.all_ready(2, "a", "c")
    await stand.calm()
    assert (stand.fleet.epoch, stand.told("b")) == (2, [])
    last = there(stand.fleet.ring).stages[-1].name
    stand.fleet.on_message(last, Result(2, 1, (Outcome(9, 0, (), (7,)),)))
    stand.fleet.reform()
    await stand.calm()
    assert stand.told("b"), "now it is told which layers to load"


async def copying(**changes: Any) -> Stand:
    """a, b and c run 3, 3 and 2 of 8 layers while requests do."""
    stand = Stand(replace(WISHES, workers=3, take_over_after=0, copy_kv="on"))
    for name in "abc":
        await stand.join(worker(name, host=name, **LOGS | changes))
    stand.all_ready(1, *"abc")
    stand.at_work = 2
    for name in "abc":
        stand.told(name)
    return stand


async def copies(stand: Stand, final: dict[int, int]) -> list[HandOver]:
    """The orders that follow once so many tokens are final, one for each of a, b and c."""
    stand.final = final
    stand.fleet.copy_kv()
    await stand.calm()
    return orders(stand, *"abc")


async def test_every_stage_keeps_copies_of_the_next_one() -> None:
    stand = await copying()
    told, *others = await copies(stand, {5: 100, 6: 40})
    assert others == [told, told]
    assert [(one.name, str(one.layers)) for one in told.takers] == [("a", "3:6"), ("b", "6:8"), ("c", "0:3")]
    assert (told.copies, told.rows) == (True, (RowsOf(5, 0, 100), RowsOf(6, 0, 40)))
    assert not await copies(stand, {5: 120, 6: 40}), "not all have the first ones"
    migrated(stand, *"abc")
    assert not await copies(stand, {5: 107, 6: 40}), "that few can wait"
    second, *_ = await copies(stand, {5: 120, 7: 10})
    assert second.rows == (RowsOf(5, 100, 120), RowsOf(7, 0, 10))
    migrated(stand, *"abc", number=second.number)
    (last, *_) = await copies(stand, {})
    assert last.rows == (), "what has ended is dropped"


@pytest.mark.parametrize(
    ("lost", "holder", "layers"), [("a", "c", "0:3"), ("b", "a", "3:6"), ("c", "b", "6:8")]
)
async def test_after_a_loss_the_copies_are_used(lost: str, holder: str, layers: str) -> None:
    stand = await copying()
    (told, *_) = await copies(stand, {5: 100, 6: 40})
    migrated(stand, *"abc", number=told.number, over=(6,))
    stand.final = {5: 104}
    stand.fleet.on_disconnect(lost, "killed")
    await stand.calm()
    left = [one for one in "abc" if one != lost]
    (repair, *_) = orders(stand, left[0])
    assert (repair.lost, repair.rows, repair.copies) == (None, (RowsOf(5, 0, 100),), False)
    assert [one.name for one in repair.givers] == [*left, holder]
    assert str(repair.givers[-1].layers) == layers
    migrated(stand, *left, number=repair.number)
    await stand.calm()
    stand.all_ready(2, *left)
    state = there(stand.fleet.state())
    assert (state.kept, state.replays) == ({5: 100}, False)


async def test_lost_layers_are_computed_again_if_that_is_less() -> None:
    """Of 100 tokens 60 were copied: 40 in 8 layers are more than 100 in 3."""
    stand = await copying()
    (told, *_) = await copies(stand, {5: 60})
    migrated(stand, *"abc", number=told.number)
    stand.final = {5: 100}
    stand.fleet.on_disconnect("b", "killed")
    await stand.calm()
    (repair,) = orders(stand, "a")
    assert (str(repair.lost), repair.rows) == ("3:6", (RowsOf(5, 0, 100),))


async def test_layers_are_computed_again_if_the_stage_with_their_copies_is_lost_too() -> None:
    stand = await copying()
    (told, *_) = await copies(stand, {5: 100})
    migrated(stand, *"abc", number=told.number)
    for lost in "bc":
        stand.fleet.on_disconnect(lost, "killed")
    await stand.calm()
    *_, repair = orders(stand, "a")
    assert str(repair.lost) == "3:8"


def test_copies_that_are_not_confirmed_in_time_are_made_anew() -> None:
    async def wait() -> None:
        stand = await copying()
        (told, *_) = await copies(stand, {5: 100})
        migrated(stand, "a", "b")
        await asyncio.sleep(kv_copies.COPY_SECONDS)  # of virtual time
        (again, *_) = await copies(stand, {5: 100})
        assert again.rows == told.rows
        assert again.number > told.number

    run(wait())


def test_a_late_confirmation_of_copies_that_were_given_up_says_nothing_of_the_other_workers() -> None:
    async def wait() -> None:
        stand = await copying()
        (told, *_) = await copies(stand, {5: 10})
        migrated(stand, "a", "b", number=told.number)
        await asyncio.sleep(kv_copies.COPY_SECONDS)  # of virtual time
        assert not await copies(stand, {6: 3}), "that few can wait"
        migrated(stand, "a", number=told.number)
        assert not stand.fleet._handover._copies.rows_of(1), "c has confirmed nothing"

    run(wait())


@pytest.mark.parametrize(
    ("copy_kv", "hosts", "gpus", "copied"),
    [
        ("auto", "xxx", (), True),
        ("auto", "xxy", (), False),
        ("auto", "xxx", ("gpu",), False),
        ("on", "xyz", ("gpu",), True),
        ("off", "xxx", (), False),
    ],
)
async def test_kv_is_copied_by_itself_on_one_machine_without_gpus(
    copy_kv: Any, hosts: str, gpus: tuple[str, ...], copied: bool
) -> None:
    stand = Stand(replace(WISHES, workers=3, copy_kv=copy_kv))
    for name, host in zip("abc", hosts):
        await stand.join(worker(name, host=host, gpus=gpus, **LOGS))
    stand.all_ready(1, *"abc")
    assert bool(await copies(stand, {5: 100})) is copied
