"""One run by its seed: a fleet, clients, faults and their times are all drawn from it; then the verdict.

Refuses to know how faults are done.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from specsot.info import ReplicaInfo
from specsot.params import Ask, Limits
from tests.faults.checker import check, tell
from tests.faults.clients import Client, Habit
from tests.faults.history import History, Hurt, Incomplete, Looked, Rested
from tests.faults.net import KEEPALIVE
from tests.faults.virtual import run
from tests.faults.world import CONDUCT, Honest, Shape, World

QUESTIONS = ("What is a ring?", "Explain laps.")
ASKS = [
    Ask(prompt=question, mode=mode, seed=1, limits=Limits(max_new_tokens=160), resumable=kept)
    for question in QUESTIONS
    for mode in ("direct", "sot")
    for kept in (False, True)
]
NOTICE = KEEPALIVE + 3.0  # seconds within which a peer that cannot be reached must have been noticed
SETTLING = 120.0  # seconds until the ring must be complete once nobody hurts it any more

_answers: dict[Ask, str] = {}


@dataclass(frozen=True, slots=True)
class Fault:
    """kind as in Hurt. at: seconds after the beginning. lasts: seconds, where it passes by itself."""

    kind: str
    whom: str
    at: float
    lasts: float = 0.0


@dataclass(frozen=True, slots=True)
class Campaign:
    """What will happen. clients: (when, what, how)."""

    shape: Shape
    clients: tuple[tuple[float, Ask, Habit], ...]
    faults: tuple[Fault, ...]


def draw(seed: int) -> Campaign:
    rng = random.Random(seed)
    skill, journal = rng.choice((0.0, 0.5, 0.9)), rng.random() < 0.5
    shape = Shape(rng.choice((1, 2, 2, 3)), rng.random() < 0.8, skill, journal)
    clients = tuple((rng.uniform(0, 10), rng.choice(ASKS), _habit(rng)) for _ in range(rng.randint(3, 7)))
    kinds = ("kill", "kill", "freeze", "cut", "leave", "restart", "hang", "vanish")
    victims = [f"worker-{n}" for n in range(shape.stages)] + ["drafter"] * shape.drafter
    faults = tuple(_fault(rng, rng.choice(kinds), victims, journal) for _ in range(rng.randint(1, 3)))
    return Campaign(shape, clients, faults)


def _habit(rng: random.Random) -> Habit:
    some = rng.randint(1, 40)
    return rng.choice(
        (
            Habit(),
            Habit(),
            Habit(pause=0.5),
            Habit(leave=some),
            Habit(leave=some, back=rng.uniform(0, 15)),
            Habit(stop=some),
            Habit(timeout=rng.uniform(1, 30)),
        )
    )


def _fault(rng: random.Random, kind: str, victims: list[str], journal: bool) -> Fault:
    at, lasts, whom = rng.uniform(0, 15), rng.choice((2.0, 10.0, 25.0)), rng.choice(victims)
    if kind == "hang":
        whom = victims[0] if whom == "drafter" else whom
    if kind == "restart":
        return Fault("revive" if journal else "restart", "master", at)
    if kind == "cut":
        other = rng.choice([name for name in (*victims, "master") if name != whom])
        return Fault("cut", f"{whom} {other}", at, lasts)
    return Fault(kind, whom, at, lasts if kind == "freeze" else 0.0)


def answers() -> dict[Ask, str]:
    """What a fleet to which nothing happens answers; found out once."""
    if not _answers:
        calm = Campaign(Shape(1, False), tuple((0.0, ask, Habit()) for ask in ASKS), ())
        for story in tell(play(calm, 0)).values():
            assert story.finished is not None, story.ended
            _answers[story.asked.ask] = story.finished.text
    return _answers


def judge(campaign: Campaign, seed: int = 0, between: Honest | None = None) -> list[str]:
    """Everything that is wrong with one run of it; the seed settles what the campaign leaves to chance."""
    return check(play(campaign, seed, between), answers())


def play(campaign: Campaign, seed: int, between: Honest | None = None) -> History:
    with TemporaryDirectory() as place:
        return run(_play(campaign, seed, between, Path(place)))


async def _play(campaign: Campaign, seed: int, between: Honest | None, place: Path) -> History:
    journal = place if campaign.shape.journal else None
    world = World(random.Random(seed), campaign.shape, between, journal)
    if not await world.complete(SETTLING):
        world.recorder.note(Incomplete(world.lacking()))
        await world.close()
        return world.recorder.seen
    async with asyncio.TaskGroup() as group:
        for number, (at, ask, habit) in enumerate(campaign.clients):
            group.create_task(_after(at, Client(world, f"r{number}", ask, habit).live))
        for fault in campaign.faults:
            group.create_task(_after(fault.at, lambda fault=fault: _hurt(world, fault)))
    settled = await world.complete(SETTLING)
    await asyncio.sleep(CONDUCT.keep_for + 1.0)
    left = (*world.left(), ("ring incomplete", not settled), ("crashes", len(world.crashed)))
    world.recorder.note(Rested(left))
    await world.close()
    return world.recorder.seen


async def _after(seconds: float, act: Callable[[], Awaitable[None]]) -> None:
    await asyncio.sleep(seconds)
    await act()


async def _hurt(world: World, fault: Fault) -> None:
    world.recorder.note(Hurt(fault.kind, fault.whom))
    members = [world.members[name] for name in fault.whom.split() if name in world.members]
    match fault.kind:
        case "kill":
            members[0].kill()
        case "hang":
            members[0].hang()
        case "vanish":
            members[0].vanish()
        case "leave":
            members[0].leaving.set()
        case "restart" | "revive":
            world.restart_master()
        case "freeze":
            host = members[0].host
            world.net.freeze(host)
            await _lasting(world, fault, fault.whom)
            world.net.thaw(host)
        case "cut":
            one, other = fault.whom.split()
            world.net.cut(one, other)
            await _lasting(world, fault, fault.whom)
            world.net.heal(one, other)
        case _:
            raise ValueError(fault.kind)


async def _lasting(world: World, fault: Fault, whom: str) -> None:
    """Halfway it must have been noticed, if it lasts that long and the ring needs what is hurt."""
    house, before = world.house, _ring_of(world, whom)
    needed = before.ready and "drafter" not in fault.whom
    if fault.lasts <= NOTICE:
        await asyncio.sleep(fault.lasts)
        return
    await asyncio.sleep(NOTICE)
    now = _ring_of(world, whom)
    same = world.house is house and now.epoch == before.epoch and now.ready
    if fault.kind == "freeze":
        world.recorder.note(Looked(whom, needed and same))
    await asyncio.sleep(fault.lasts - NOTICE)


def _ring_of(world: World, whom: str) -> ReplicaInfo:
    """How the ring stands that this member belongs to, or else the first."""
    rings = world.house.master.replicas
    found = (one for one in rings if any(whom.startswith(each.name) for each in one.fleet.registrations))
    return next(found, rings[0]).info()
