"""What only rides along through a stage: drafts and taps of others, and the news that the drafter is lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from specsot.deadline import Deadline
from specsot.errors import Unavailable
from specsot.frames import Drafts
from specsot.links import Arrival, Lost
from specsot.members import Configuration, Range, Stage, Tap
from specsot_worker.part import WorkerPart, _Epoch  # pyright: ignore[reportPrivateUsage]
from specsot_worker.place import Links

STAGES = tuple(Stage(f"w{n}", f"w{n}:1", Range(2 * n, 2 * n + 2)) for n in range(3))


class Recorder:
    """A link that keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def close(self) -> None: ...


def last_stage() -> tuple[WorkerPart, Recorder]:
    """The last of three, as it stands in an epoch; all it knows of stage 0 is a link."""
    first = Recorder()
    configuration = Configuration(1, "w2", STAGES, 9, 9, 9, drafter="d:1", comm_mode="ring")
    links = Links(None, first, Recorder(), Recorder())
    part: Any = WorkerPart(SimpleNamespace(name="w2"), None, None)  # type: ignore[arg-type]
    part._now = _Epoch(configuration, None, links, set(), None, None, Deadline(()))  # type: ignore[arg-type]
    return part, first


async def test_drafts_and_taps_of_others_go_on_to_the_neighbour() -> None:
    part, first = last_stage()
    sent = [Drafts(1, (), rest=3), Tap(1, 1, "w"), Tap(1, 2, "w")]
    for message in [*sent, Tap(1, 4, "mine"), Tap(1, 6, "mine"), Drafts(0)]:
        await part.handle(Arrival("d", message))
    assert first.sent == sent


async def test_stage_0_is_told_once_that_the_drafter_is_lost() -> None:
    part, first = last_stage()
    for reason in ("its link broke", "the link to d broke"):
        await part.handle(Arrival("d", Lost("d", reason, 1)))
    assert first.sent == [Lost("d", "its link broke", 1)]


async def test_a_lost_stage_ends_the_epoch() -> None:
    part, first = last_stage()
    with pytest.raises(Unavailable, match="lost w1: its link broke"):
        await part.handle(Arrival("w1", Lost("w1", "its link broke", 1)))
    assert first.sent == []


@pytest.mark.parametrize(("mode", "to"), [("p2p", "w0"), ("ring", "w2")])
def test_whom_the_drafter_speaks_to(mode: Any, to: str) -> None:
    assert Configuration(1, "d", STAGES, 9, 9, 9, comm_mode=mode).drafted_for.name == to
