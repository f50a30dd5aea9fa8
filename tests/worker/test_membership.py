"""A member's life over a part that records what it is asked."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from specsot.errors import Occupied, Refused, SpecsotError, Unavailable, WireError
from specsot.members import Broken, Configuration, HandOver, MemberLeaving, Registration, StandBy
from specsot.service import membership
from specsot.service.membership import run_membership
from specsot.transport.links import Arrival, Inbox, Lost


class EagerPart:
    """Always wants to be called again at once; leaves when the last word arrives."""

    epoch = 1

    def __init__(self, leaving: asyncio.Event) -> None:
        self.leaving, self.turns = leaving, 0

    async def registration(self) -> Registration:
        return Registration("worker", "eager", "nowhere", "abc", 8, 64, 1 << 20, 64)

    async def configure(self, configuration: Configuration, uplink: object) -> None: ...

    async def prepare(self, order: StandBy | HandOver, uplink: object) -> None: ...

    async def handle(self, arrival: Arrival) -> None:
        if arrival.message == "the last word":
            self.leaving.set()

    async def run_due(self) -> float | None:
        self.turns += 1
        return 0.0

    async def disband(self) -> None: ...


class Recorder:
    """An uplink that keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    async def send(self, message: object) -> None:
        self.sent.append(message)

    async def close(self) -> None: ...


async def live(part: EagerPart, *words: object, told: list[object] | None = None) -> list[object]:
    """Its life with a master that lets it in, and then says that; what it told the master."""
    inbox, uplink = Inbox(), Recorder()
    uplink.sent = uplink.sent if told is None else told

    async def connect(registration: Registration) -> Recorder:
        for word in words:
            inbox.put("master", word)
        return uplink

    await asyncio.wait_for(run_membership(part, inbox, connect, part.leaving), 100)
    return uplink.sent


async def test_a_part_in_a_hurry_leaves_the_loop_to_its_links() -> None:
    leaving, inbox, uplink = asyncio.Event(), Inbox(), Recorder()
    part = EagerPart(leaving)

    async def connect(registration: Registration) -> Recorder:
        inbox.put("peer", "a word")  # from now on it is in a hurry
        asyncio.get_running_loop().call_later(0.01, inbox.put, "peer", "the last word")
        return uplink

    await asyncio.wait_for(run_membership(part, inbox, connect, leaving), 100)
    assert part.turns > 2
    assert uplink.sent == [MemberLeaving()]


class BrokenPart(EagerPart):
    """Everything but the last word goes wrong in it."""

    async def handle(self, arrival: Arrival) -> None:
        await super().handle(arrival)
        if arrival.message != "the last word":
            raise WireError("rows are missing")


@pytest.mark.parametrize(("epoch", "told"), [(3, [Broken(3, "rows are missing")]), (0, [])])
async def test_what_breaks_in_no_epoch_breaks_none(epoch: int, told: list[object]) -> None:
    part = BrokenPart(asyncio.Event())
    part.epoch = epoch
    assert await live(part, "a word", "the last word") == [*told, MemberLeaving()]


class BuggyPart(EagerPart):
    epoch = 3

    async def handle(self, arrival: Arrival) -> None:
        await super().handle(arrival)
        if arrival.message != "the last word":
            raise KeyError("words of a prompt")


async def test_a_bug_ends_the_epoch_in_words_fit_for_everybody_and_not_the_member() -> None:
    told = await live(BuggyPart(asyncio.Event()), "a word", "the last word")
    assert told == [Broken(3, "this member failed: KeyError (its log says where)"), MemberLeaving()]


async def test_a_member_that_rejoins_reports_the_newest_epoch() -> None:
    leaving, inbox, joined = asyncio.Event(), Inbox(), list[int]()
    configuration = Configuration(9, "eager", (), 4, 4, 4)

    async def connect(registration: Registration) -> Recorder:
        joined.append(registration.epoch)
        for word in (configuration, Lost("master", "gone")) if len(joined) < 3 else ("the last word",):
            inbox.put("master", word)
        return Recorder()

    await asyncio.wait_for(run_membership(EagerPart(leaving), inbox, connect, leaving), 100)
    assert joined == [0, 9, 9]


@pytest.mark.parametrize(
    ("error", "said", "level"),
    [
        (Occupied("a member named d is already here"), "not let in", "warning"),
        (Unavailable("no answer"), "waiting for the master", "info"),
    ],
)
async def test_who_may_be_let_in_later_tries_again(
    error: SpecsotError, said: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "FIRST_RETRY_SECONDS", 0.0)
    leaving, inbox, answers = asyncio.Event(), Inbox(), [error, error]

    async def connect(registration: Registration) -> Recorder:
        if answers:
            raise answers.pop()
        inbox.put("peer", "the last word")
        return Recorder()

    with capture_logs() as lines:
        await asyncio.wait_for(run_membership(EagerPart(leaving), inbox, connect, leaving), 100)
    assert not answers
    told = [(line["event"], line["log_level"]) for line in lines if line.get("reason") == str(error)]
    assert told == [(said, level)], "once, however long that is"


async def test_who_does_not_belong_there_ends() -> None:
    leaving = asyncio.Event()

    async def connect(registration: Registration) -> Recorder:
        raise Refused("fingerprint xyz, here abc")

    with pytest.raises(Refused, match="xyz"):
        await asyncio.wait_for(run_membership(EagerPart(leaving), Inbox(), connect, leaving), 100)


async def test_one_that_stands_by_says_so_on_one_line() -> None:
    with capture_logs() as lines:
        await live(EagerPart(asyncio.Event()), StandBy(4), "the last word")
    assert [(line["event"], line["epoch"]) for line in lines if "epoch" in line] == [("stands by", 4)]
