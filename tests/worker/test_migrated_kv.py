"""KV rows from stages of this epoch to those of the next: by layers, in rounds, and from nobody else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from specsot.core.frames import Frame, Opening, PromptChunk, ReusedKV
from specsot.core.pages import PageTable
from specsot.members import HandOver, KvRows, Progress, Range, RowsOf, Stage
from specsot.transport.links import Exchange, LocalDialer
from specsot_model.core.kv_plan import plan_frame
from specsot_worker import migrated_kv
from specsot_worker.feature_ring import FeatureRing
from specsot_worker.feature_stream import FeatureStream, with_gathered_rows
from specsot_worker.migrated_kv import LayerRows, MigratedKV, RowHandover, StageRows
from tests.worker.test_loading_ahead import Uplink


def numbers(sequence: int, layer: int, first: int, last: int) -> Any:
    """[rows, 2]; each row says whose it is."""
    rows = torch.arange(first, last, dtype=torch.float32)
    return torch.stack((rows, torch.full_like(rows, 1000.0 * sequence + layer)), -1)


class Kv:
    """A stage as far as rows go, which are its own. closed: sequences that it has not."""

    def __init__(self, *closed: int) -> None:
        self.closed = closed

    async def copies(self, asked: Sequence[LayerRows]) -> list[Any]:
        assert len({layer == 6 for _, layer in asked}) == 1, "features are asked for by themselves"
        return [
            None if one.sequence in self.closed else numbers(one.sequence, layer, one.first, one.last)
            for one, layer in asked
        ]


def opening(sequence: int, tokens: int, **more: Any) -> Opening:
    return Opening(99, tokens + 1, reused=ReusedKV(sequence, tuple(range(tokens))), **more)


def order(*rows: RowsOf, features: bool = False) -> HandOver:
    """Two stages of 3 layers each become a:0:2 and c:2:6."""
    a, b, c = (Stage(name, name, Range(*layers)) for name, layers in zip("abc", ((0, 3), (3, 6), (2, 6))))
    return HandOver(7, (a, b), (Stage("a", "a", Range(0, 2)), c), rows, 3, features)


class Fleet:
    """a and b run the ring, c takes; what lies in c's inbox is handed to it by `deliver`."""

    def __init__(self, *closed: int) -> None:
        exchange = Exchange()
        self.exchange = exchange
        self.inbox = exchange.listen("c")
        self.members = {name: RowHandover(name, LocalDialer(name, exchange)) for name in "abc"}
        self.uplinks = {name: Uplink() for name in "abc"}
        self.stage = Kv(*closed)

    async def begin(self, told: HandOver, *names: str) -> None:
        for name in names:
            self.members[name].begin(told, None if name == "c" else self.stage.copies, self.uplinks[name])
        for name in names:
            giving = self.members[name]._sending
            assert giving
            await giving

    async def deliver(self) -> int:
        count = 0
        while (arrival := self.inbox.pop()) is not None:
            await self.members["c"].take(arrival.sender, arrival.message)
            count += 1
        return count


@pytest.mark.parametrize("rows", [1, 4096])
async def test_every_receiver_gets_its_layers_from_the_stage_that_runs_them(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """a keeps its own; rows come before the order, or behind it; a second round goes on behind the first."""
    monkeypatch.setattr(migrated_kv, "JOB_ROWS", rows)
    fleet = Fleet()
    await fleet.begin(order(RowsOf(5, 0, 4), RowsOf(6, 0, 2)), "a", "b")
    assert fleet.uplinks["a"].said == [Progress(7, 1, 1, migrated=3)]
    assert await fleet.deliver() == 2 * 4
    assert not fleet.uplinks["c"].said, "nobody has told it what to expect"
    await fleet.begin(order(RowsOf(5, 0, 4), RowsOf(6, 0, 2)), "c")
    assert fleet.uplinks["c"].said == [Progress(7, 1, 1, migrated=3)]
    await fleet.begin(order(RowsOf(5, 4, 9)), "c", "a", "b")
    assert len(fleet.uplinks["c"].said) == 1
    await fleet.deliver()
    assert len(fleet.uplinks["c"].said) == 2
    for name, layers in (("a", range(2)), ("c", range(2, 6))):
        held = fleet.members[name].rows
        for layer in layers:
            assert torch.equal(held.rows(opening(5, 9), layer), numbers(5, layer, 0, 9))
            assert torch.equal(held.rows(opening(6, 2), layer), numbers(6, layer, 0, 2))
    assert fleet.members["c"].rows.rows(opening(6, 3), 2) is None


async def test_features_go_from_the_last_stage_to_the_last_stage() -> None:
    fleet = Fleet()
    await fleet.begin(order(RowsOf(5, 0, 4), RowsOf(6, 0, 2), features=True), "a", "b", "c")
    assert await fleet.deliver() == 2 * 5
    assert len(fleet.uplinks["c"].said) == 1
    held = fleet.members["c"].rows
    found = held.rows(opening(5, 4))
    assert found is not None
    assert torch.equal(found, numbers(5, 6, 0, 4))
    assert held.rows(opening(5, 4)) is None, "whoever writes goes on as this"


@pytest.mark.parametrize(("closed", "over"), [(5, (5,)), (None, ())])
async def test_a_sequence_that_is_cancelled_meanwhile_holds_nothing_up_nor_does_one_without_features(
    closed: int | None, over: tuple[int, ...]
) -> None:
    fleet = Fleet(*([closed] if closed else ()))
    told = order(RowsOf(5, 0, 4), features=True)
    await fleet.begin(told, "a", "c")
    await fleet.deliver()
    for layer in range(3, 6):
        await fleet.members["c"].take("b", KvRows(7, 5, layer, 0, numbers(5, layer, 0, 4)))
    await fleet.members["c"].take("b", KvRows(7, 5, 6, 0, None))
    assert fleet.uplinks["c"].said == [Progress(7, 1, 1, migrated=3, over=over)]


async def test_rows_count_only_from_the_stage_that_runs_their_layer() -> None:
    fleet = Fleet()
    await fleet.begin(order(RowsOf(5, 0, 1)), "c")
    for layer in range(2, 6):
        await fleet.members["c"].take("b", KvRows(7, 5, layer, 0, numbers(5, layer, 0, 1)))
    assert not fleet.uplinks["c"].said, "layer 2 is a's"
    await fleet.members["c"].take("a", KvRows(7, 5, 2, 0, numbers(5, 2, 0, 1)))
    assert fleet.uplinks["c"].said


async def test_a_taker_that_cannot_be_reached_leaves_the_others_theirs() -> None:
    fleet = Fleet()
    told = order(RowsOf(5, 0, 4))
    nowhere = HandOver(7, told.givers, (told.takers[0], Stage("c", "nowhere", Range(2, 6))), told.rows)
    await fleet.begin(nowhere, "a", "b")
    assert list(fleet.members["a"].rows._rows) == [("a", 5, 0), ("a", 5, 1)]


def test_rows_serve_the_next_epoch_and_what_is_too_much_or_out_of_place_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    member = RowHandover("c", LocalDialer("c", Exchange()))
    held = member.rows
    held.expect(order(RowsOf(5, 0, 4)))
    held.add("a", KvRows(7, 5, 0, 2, numbers(5, 0, 2, 4)))  # the two before are missing
    assert not held.complete(range(0, 1))
    held.add("a", KvRows(7, 5, 0, 0, numbers(5, 0, 0, 3)))
    held.add("a", KvRows(7, 5, 0, 2, numbers(5, 0, 2, 4)))  # one of them once more
    assert held.complete(range(0, 1))
    held.add("a", KvRows(6, 5, 1, 0, numbers(5, 1, 0, 4)))  # of an epoch before
    assert not held.complete(range(0, 2))
    member.turn(8)
    assert member.ready is held
    member.rows.add("a", KvRows(7, 6, 0, 0, numbers(6, 0, 0, 4)))
    assert member.rows._bytes == 0, "too late"
    member.rows.expect(replace(order(RowsOf(5, 0, 4)), epoch=8))
    assert torch.equal(held.rows(opening(5, 3, decodes=False), 0), numbers(5, 0, 0, 3))
    assert torch.equal(held.rows(opening(5, 4), 0), numbers(5, 0, 0, 4)), "whoever writes still needed them"
    assert not held._rows
    member.turn(9)
    assert member.ready is not held, "the second epoch since"
    monkeypatch.setattr(migrated_kv, "MAX_BYTES", 8 * 3)
    held.add("a", KvRows(8, 5, 0, 0, numbers(5, 0, 0, 4)))
    assert not held.complete(range(0, 1))


def test_what_no_order_named_neither_stays_nor_keeps_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    held, none = MigratedKV(), torch.empty(1, 0)
    held.add("x", KvRows(1 << 60, 5, 0, 0, numbers(5, 0, 0, 4)))
    held.expect(order(RowsOf(5, 0, 4)))
    assert held._bytes == 0
    for sequence in range(3):
        held.add("a", KvRows(7, sequence, 0, 2, numbers(5, 0, 2, 4)))
        held.add("a", KvRows(7, sequence, 0, 0, none))
    assert not held._rows
    held.add("a", KvRows(7, 5, 0, 0, numbers(5, 0, 0, 3)))
    held.add("a", KvRows(7, 5, 0, 2, numbers(5, 0, 2, 4)))
    assert held.complete(range(0, 1))
    held.drop(5)
    assert not held._rows
    monkeypatch.setattr(migrated_kv, "MAX_BYTES", held._bytes + 2 * migrated_kv.OVER_BYTES)
    for sequence in range(9):
        held.add("a", KvRows(7, sequence, 0, 0, None))
    assert len(held._closed) == 2


class LastStage:
    """The first two of three layers are others'. It takes frames in order: rows first, then features."""

    def __init__(self) -> None:
        self.table, self.put = PageTable(9, 4), list[Any]()
        self.rows = StageRows(self.table, self, Range(2, 3))  # type: ignore[arg-type]
        self.tokens = dict[int, list[int]]()
        self.stream = FeatureStream(self.tokens, FeatureRing(2, torch.float32, "cpu"))
        self.rows.migrated = self.stream.migrated = self.held = MigratedKV()
        stage = Stage("b", "b", Range(2, 3))
        self.held.expect(HandOver(7, (stage,), (stage,), (RowsOf(5, 0, 4),), 1, True))
        for layer in (2, 3):
            self.held.add("b", KvRows(7, 5, layer, 0, numbers(5, layer, 0, 4)))

    def put_rows_at(self, layer: int, slots: Any, rows: Any) -> None:
        self.put.append(rows)

    def run(self, number: int, *segments: PromptChunk, **more: Any) -> None:
        frame = Frame(8, number, segments=segments, fused=numbers(9, 3, 0, 1), paused=True, **more)
        plan_frame(self.table, frame)
        self.rows.fill(frame)
        self.stream.advance(frame, {}, 0.0)


BEGINNING = replace(opening(5, 4), decodes=False)


@pytest.mark.parametrize("begins", [True, False])
def test_rows_of_a_finished_sequence_are_freed_once_no_sequence_will_reuse_them(begins: bool) -> None:
    """They outlive it for a beginning without rows, until that has some, or is closed, too."""
    stage = LastStage()
    stage.run(1, openings=(BEGINNING,), closings=(5,))
    assert stage.held._rows
    stage.run(2, *([PromptChunk(99, 4, (4,), True)] if begins else ()), closings=() if begins else (99,))
    stage.stream.catch_up()
    assert len(stage.put) == begins
    assert not stage.held._rows


def test_features_of_a_finished_sequence_stay_until_the_sequences_that_reuse_them_are_recorded() -> None:
    """While the drafter rests that is a frame later."""
    stage = LastStage()
    stage.run(1, PromptChunk(99, 4, (4,), True), openings=(BEGINNING,))
    stage.run(2, closings=(5,))
    (found,) = stage.stream.copies([RowsOf(99, 0, 4)])
    assert found is not None
    assert torch.equal(found, numbers(5, 3, 0, 4))
    assert not stage.held._rows


def test_there_are_no_features_of_an_empty_range() -> None:
    stage = LastStage()
    stage.run(1, PromptChunk(99, 4, (4,), True), openings=(BEGINNING,))
    assert stage.stream.copies([RowsOf(99, 2, 2), RowsOf(99, 5, 5)]) == [None, None]


def test_a_sequence_without_migrated_features_is_drafted_from_its_first_own_token() -> None:
    """Also a message says so: the tokens before have no features."""
    stage = LastStage()
    stage.held.drop(5, features=True)
    stage.tokens[99] = [1, 2, 3, 4, 5]
    stage.run(1, PromptChunk(99, 4, (4,), True), openings=(BEGINNING,))
    assert stage.stream.copies([RowsOf(99, 0, 4), RowsOf(99, 4, 5)])[0] is None
    sent = stage.stream.advance(Frame(8, 2, closings=(5,)), {}, 0.0)
    (messages,) = with_gathered_rows(sent).values()
    found = [(batch.start, len(batch.tokens), one.rows) for one in messages for batch in one.feature_batches]
    assert found[0] == (0, 4, None)
    assert found[1][:2] == (4, 1)
    assert torch.equal(found[1][2], numbers(9, 3, 0, 1))


async def test_rows_of_layers_that_a_second_order_gives_to_others_go() -> None:
    """However late they came."""
    fleet, told = Fleet(), order(RowsOf(1, 0, 4))
    c = fleet.members["c"]
    c.begin(told, None, fleet.uplinks["c"])
    fewer = replace(told, number=4, takers=(*told.takers[:1], Stage("c", "c", Range(2, 5))))
    c.begin(fewer, None, fleet.uplinks["c"])
    for layer in (4, 5):
        c.rows.add("b", KvRows(7, 1, layer, 0, numbers(1, layer, 0, 4)))
    c.turn(8)
    assert {key[2] for key in c.ready._rows} == {4}


async def test_copies_of_a_lost_stage_are_given_by_the_worker_that_has_them() -> None:
    """a keeps copies of b, which runs 3:6; b is lost, and c takes its layers from a."""
    fleet = Fleet()
    a, b, c = fleet.members["a"], Stage("b", "b", Range(3, 6)), Stage("c", "c", Range(3, 6))
    own, kept = Stage("a", "a", Range(0, 3)), Stage("a", "a", Range(3, 6))
    inbox = fleet.exchange.listen("a")
    for number, rows in ((1, (RowsOf(1, 0, 5), RowsOf(2, 0, 4))), (2, (RowsOf(1, 5, 8), RowsOf(2, 4, 4)))):
        told = HandOver(7, (own, b), (kept, Stage("b", "b", Range(0, 3))), rows, number, True, copies=True)
        await fleet.begin(told, "a", "b")
        while (arrival := inbox.pop()) is not None:
            await a.take(arrival.sender, arrival.message)
        assert fleet.uplinks["a"].said[-1] == Progress(7, 1, 1, migrated=number)
    repair = HandOver(7, (own, kept), (own, c), (RowsOf(1, 0, 8), RowsOf(2, 0, 4)), 3, True, hidden=True)
    assert repair.lost is None
    await fleet.begin(repair, "c", "a")
    await fleet.deliver()
    fleet.members["c"].turn(8)
    for sequence, tokens in ((1, 8), (2, 4)):
        for layer in (3, 4, 5, 6):
            found = fleet.members["c"].ready.rows(opening(sequence, tokens, decodes=False), layer)
            assert found is not None
            assert torch.equal(found, numbers(sequence, layer, 0, tokens))
    a.turn(8)
    assert {key[2] for key in a.ready._rows} == {0, 1, 2, 9}, "no copy is left, but its own log"


async def test_copies_take_a_new_link_at_once_if_the_kept_one_is_broken() -> None:
    fleet = Fleet()
    own, c = Stage("a", "a", Range(0, 3)), Stage("c", "c", Range(0, 3))
    for number, rows in enumerate((RowsOf(5, 0, 4), RowsOf(5, 4, 9)), 1):
        told = HandOver(7, (own, Stage("b", "b", Range(3, 6))), (c,), (rows,), number, copies=True)
        await fleet.begin(told, "c", "a")
        await fleet.members["a"]._copy_links["c"].close()
    await fleet.deliver()
    found = fleet.members["c"].rows.copied("a", RowsOf(5, 0, 9), 0)
    assert found is not None
    assert torch.equal(found, numbers(5, 0, 0, 9))


async def test_copies_do_not_outlive_their_epoch() -> None:
    """The next epoch begins without an order that would use them."""
    fleet = Fleet()
    own, b = Stage("a", "a", Range(0, 3)), Stage("b", "b", Range(3, 6))
    kept = Stage("a", "a", Range(3, 6)), Stage("b", "b", Range(0, 3))
    await fleet.begin(HandOver(7, (own, b), kept, (RowsOf(1, 0, 5),), 1, copies=True), "a")
    a = fleet.members["a"]
    await a.take("b", KvRows(7, 1, 3, 0, numbers(1, 3, 0, 5)))
    assert a.rows._rows
    a.turn(8)
    assert not a.ready._rows


def test_copies_of_sequences_that_have_ended_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrated_kv, "MAX_BYTES", 100)
    store = MigratedKV(7)
    store.add("b", KvRows(7, 1, 3, 0, numbers(1, 3, 0, 10)))
    store.add("b", KvRows(7, 2, 3, 0, None))
    store.add("b", KvRows(7, 3, 3, 0, numbers(3, 3, 0, 10)))
    assert store.copied("b", RowsOf(3, 0, 10), 3) is None, "there was no room"
    store.keep_sequences({3})
    store.add("b", KvRows(7, 3, 3, 0, numbers(3, 3, 0, 10)))
    found = store.copied("b", RowsOf(3, 2, 10), 3)
    assert found is not None
    assert torch.equal(found, numbers(3, 3, 2, 10))
    assert store.copied("b", RowsOf(1, 0, 10), 3) is None
