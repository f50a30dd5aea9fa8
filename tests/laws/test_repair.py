"""Law 1 after a loss: of a broken ring everything but the lost layers is kept, and the text is the same."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from specsot.core.frames import Frame, Result, num_tokens_of
from specsot.events import Finished
from specsot.members import Quantization
from specsot.params import Ask
from tests.conftest import some
from tests.laws.test_handover import LETTERS, WARM, Gate, House, ask_of

# Tokens of each sequence that may be computed by every layer: the newest one, and those of a tree before it.
TAIL = 1 + 8
STAGES = "abc"
# Frames that may be in flight over three stages until the time of a hop has been measured.
ALL_FRAMES = 3


class Replays(Gate):
    """Counts what frames with `replay` carry, and what other prompt chunks do, by epoch."""

    def __init__(self, frames: int) -> None:
        super().__init__(frames)
        self.replayed: dict[int, int] = {}

    def computed(self, frame: Frame, seconds: float) -> None:
        if frame.replay:
            self.replayed[frame.epoch] = self.replayed.get(frame.epoch, 0) + num_tokens_of(frame.segments)
        else:
            super().computed(frame, seconds)


class InFlight(Replays):
    """Keeps the numbers of frames that stage 0 has launched and whose results it lacks."""

    def __init__(self, frames: int) -> None:
        super().__init__(frames)
        self.numbers = set[int]()
        self.changed = asyncio.Event()

    def launched(self, frame: Frame, now: float) -> Frame:
        self.numbers.add(frame.number)
        self.changed.set()
        return frame

    def returned(self, result: Result, now: float) -> None:
        self.numbers.discard(result.number)

    async def holds(self, frames: int) -> None:
        """Wait until so many frames are in flight."""
        while len(self.numbers) < frames:
            self.changed.clear()
            await self.changed.wait()


@asynccontextmanager
async def ring_of_three(
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
    bits: Quantization | None,
    drafts: bool,
    copies: bool = False,
):
    """Workers a, b and c of equal speed, each of which stops before its frame 16, unless they copy KV."""
    monkeypatch.setattr("tests.laws.test_handover.Gate", Replays)
    house = House(base, bits, drafts, workers=3, max_stages=3, copies=copies)
    if drafts:
        house.add_drafter()
    for name in STAGES:
        house.add(name, 1.0, 1 << 30 if copies else 16)
    try:
        await house.master.complete(with_drafter=drafts)
        yield house
    finally:
        await house.close()


async def answer(house: House, ask: Ask) -> str:
    events = [one.event async for one in house.master.requests.generate(ask)]
    assert isinstance(events[-1], Finished)
    return events[-1].text


async def lose(house: House, *places: int) -> None:
    """The stages at these places are killed amid the answers."""
    names = [stage.name for stage in house.fleet.ring.stages]
    await house.gates[names[0]].reached.wait()
    for place in places:
        house.fleet.on_disconnect(names[place], "killed")
    for gate in house.gates.values():
        gate.open.set()


async def all_free(house: House) -> None:
    """Wait until every stage holds the pages of cached prefixes and no others: the last closings come with a
    frame of their own.
    """
    engine, workers = house.fleet.user, [house.workers[name] for name in house.fleet._epoch.running]
    async with asyncio.timeout(60):
        # No message says that the last frame has run everywhere.
        while {worker.free_pages for worker in workers} != {  # noqa: ASYNC110
            house.fleet.ring.pages - engine.prefix_pages
        }:
            await asyncio.sleep(0.01)


def kept(logs: list[Any]) -> list[tuple[str, str]]:
    """What was kept of each broken ring, and which layers were lost; or why nothing was kept."""
    return [
        (one["event"], one.get("replayed_layers") or one.get("reason"))
        for one in logs
        if one["event"] in ("KV rows kept after a loss", "repair computes every layer again")
    ]


CASES = {
    "first": (0, [ask_of("direct", 0, tokens=32)], None, False),
    "middle": (1, [ask_of("direct", 0, tokens=32), ask_of("direct", 1, WARM, tokens=32)], None, False),
    "last, int8": (2, [ask_of("direct", 0, tokens=32)], "int8", False),
    "middle, branches, a head": (
        1,
        [ask_of("sot", 0, tokens=96), ask_of("direct", 1, tokens=32)],
        None,
        True,
    ),
    "last, a grammar, a head": (2, [ask_of("direct", 0, tokens=48, form=LETTERS)], None, True),
}


@pytest.mark.parametrize(
    ("case", "spare"), some([(case, spare) for case in CASES for spare in (False, True)], 2, 9)
)
async def test_only_lost_layers_are_computed_again_and_the_sequences_are_the_same(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, case: str, spare: bool
) -> None:
    """The others take over the lost layers, or a standby does. Every page is free again."""
    place, asks, bits, drafts = CASES[case]
    async with ring_of_three(demo_model / "base", monkeypatch, bits, drafts) as house:
        if spare:
            house.add("d", 1.0)
            while not house.fleet.knows("d"):
                await house.hear()
        lost = house.fleet.ring.stages[place]
        answers = [asyncio.create_task(answer(house, ask)) for ask in asks]
        with capture_logs() as logs:
            await lose(house, place)
            texts = [await one for one in answers]
        epoch, migrated = house.fleet.epoch, house.fleet._handover._kept[1]
        gates = [gate for name, gate in house.gates.items() if name != lost.name]
        replayed = max(gate.replayed.get(epoch, 0) for gate in gates)
        again = max(gate.read.get(epoch, 0) for gate in gates)
        whole = [await answer(house, ask) for ask in asks]
        assert house.fleet.epoch == epoch
        await all_free(house)
        left = {name: house.workers[name]._handover.ready._rows for name in house.fleet._epoch.running}
    assert kept(logs) == [("KV rows kept after a loss", str(lost.layers))]
    assert texts == whole
    assert replayed
    assert replayed <= sum(migrated.values())
    if len(migrated) == len(asks):  # a sequence that has no output yet is computed from its first token
        assert again <= (TAIL + 1) * (len(migrated) + 1)
    assert not any(left.values()), "no received row is left"


@pytest.mark.parametrize("place", some((2, 0), 0))
async def test_a_drafter_that_is_lost_with_a_stage_makes_no_other_layer_compute_again(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """As where both run in one process. The next ring drafts nothing, so it needs no features."""
    ask = ask_of("direct", 0, tokens=48)
    async with ring_of_three(demo_model / "base", monkeypatch, None, True) as house:
        lost = house.fleet.ring.stages[place]
        answering = asyncio.create_task(answer(house, ask))
        with capture_logs() as logs:
            await house.gates[house.fleet.ring.stages[0].name].reached.wait()
            house.fleet.on_disconnect("drafter", "killed")
            house.fleet.on_disconnect(lost.name, "killed")
            for gate in house.gates.values():
                gate.open.set()
            text = await answering
        gates = [gate for name, gate in house.gates.items() if name != lost.name]
        again = max(gate.read.get(house.fleet.epoch, 0) for gate in gates)
        whole = await answer(house, ask)
        await all_free(house)
    assert kept(logs) == [("KV rows kept after a loss", str(lost.layers))]
    assert text == whole
    assert again <= 2 * (TAIL + 1)


async def copied(house: House, count: int) -> None:
    """Wait until KV of so many sequences is copied, and of no fewer than have some that is final."""
    fleet = house.fleet
    async with asyncio.timeout(60):
        while True:
            rows = fleet._handover._copies.rows_of(fleet.epoch)
            if len(rows) >= count and rows.keys() >= fleet.user.final_rows().keys():
                return
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("case", "spare"), some([(case, spare) for case in CASES for spare in (False, True)], 2, 9)
)
async def test_with_copies_no_layer_is_computed_again_and_the_sequences_are_the_same(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, case: str, spare: bool
) -> None:
    """Every stage's KV is copied to another stage while the answers are written. Only the tokens since the
    last copy are computed, by all layers.
    """
    place, asks, bits, drafts = CASES[case]
    async with ring_of_three(demo_model / "base", monkeypatch, bits, drafts, copies=True) as house:
        if spare:
            house.add("d", 1.0)
            while not house.fleet.knows("d"):
                await house.hear()
        lost = house.fleet.ring.stages[place]
        tending = asyncio.create_task(house.fleet.reform_regularly(0.001))
        answers = [asyncio.create_task(answer(house, ask)) for ask in asks]
        with capture_logs() as logs:
            await copied(house, len(asks))
            before = house.fleet.user.final_rows()
            house.fleet.on_disconnect(lost.name, "killed")
            texts = [await one for one in answers]
        migrated = house.fleet._handover._kept[1]
        replayed = max(max(gate.replayed.values(), default=0) for gate in house.gates.values())
        again = max(gate.read.get(house.fleet.epoch, 0) for gate in house.gates.values())
        whole = [await answer(house, ask) for ask in asks]
        await all_free(house)
        tending.cancel()
    assert kept(logs) == [("KV rows kept after a loss", "none")]
    assert texts == whole
    assert not replayed
    if all(ask.mode == "direct" for ask in asks):  # branches that begin later read prompts of their own
        lag = sum(before.values()) - sum(migrated.values())
        assert again <= lag + (TAIL + 1) * (len(before) + 1)


@pytest.mark.parametrize(
    ("place", "passed", "drafts"),
    some(
        [(place, passed, drafts) for drafts in (False, True) for place in (1, 0, 2) for passed in (0, 4)],
        0,
        7,
    ),
)
async def test_a_stage_is_lost_while_one_prompt_has_all_frames_in_flight(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, place: int, passed: int, drafts: bool
) -> None:
    """The second stage stands still before a chunk of the prompt, after `passed` other ones, until as many
    frames as are allowed are in flight; then the stage at `place` is killed. The prompt is fed again, and the
    answer is that of the ring when nothing happens.
    """
    monkeypatch.setattr("tests.laws.test_handover.Gate", InFlight)
    house = House(demo_model / "base", None, drafts, workers=3, max_stages=3, rows=16)
    if drafts:
        house.add_drafter()
    for name in STAGES:
        house.add(name, 1.0)
    try:
        await house.master.complete(with_drafter=drafts)
        names = [stage.name for stage in house.fleet.ring.stages]
        first, blocked = house.gates[names[0]], house.gates[names[1]]
        blocked.left = passed
        asking = asyncio.create_task(answer(house, ask_of("direct", 0, tokens=16)))
        await blocked.reached.wait()
        await first.holds(ALL_FRAMES)
        house.fleet.on_disconnect(names[place], "killed")
        if place != 1:
            blocked.open.set()
        text = await asking
        assert house.fleet.epoch > 1
        assert text == await answer(house, ask_of("direct", 0, tokens=16))
        await all_free(house)
    finally:
        await house.close()
