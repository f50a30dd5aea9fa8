"""One run by its seed: a fleet, clients, faults and their times are all drawn from it; then the verdict."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from specsot.core.info import ReplicaInfo
from specsot.params import Ask, Limits
from specsot.transport.heartbeat import BUSY_FACTOR, Heartbeat
from tests.faults.checker import HARMLESS, check, tell
from tests.faults.clients import Client, Habit
from tests.faults.history import History, Hurt, Incomplete, Looked, Rested
from tests.faults.parts import AT_GRAMMAR, LIES, POISONS
from tests.faults.virtual import run
from tests.faults.world import CONDUCT, GLANCE, Honest, Shape, World

QUESTIONS = ("What is a ring?", "Explain steps.")
ASKS = [
    Ask(prompt=question, mode=mode, seed=1, limits=Limits(max_new_tokens=160), resumable=kept)
    for question in QUESTIONS
    for mode in ("direct", "sot")
    for kept in (False, True)
]
WORDS = " responsibilities" * 1000  # so long a prompt is made into tokens in a thread
LONG = [
    Ask(prompt=QUESTIONS[0] + WORDS, mode="direct", seed=1, limits=Limits(max_new_tokens=80), resumable=kept)
    for kept in (False, True)
]
REFUSED = (
    replace(ASKS[0], model="another"),
    replace(ASKS[0], limits=Limits(max_new_tokens=4096)),
    Ask(prompt="What? " * (1 << 17), mode="sot"),
    Ask(tokens=(300, 8192), mode="direct"),
    Ask(tokens=(300,) * 4096, mode="direct"),
)
NOTICE = (
    BUSY_FACTOR * Heartbeat().silence + 3.0
)  # seconds of the master's within which who is frozen is noticed
KINDS = (
    "kill",
    "kill",
    "freeze",
    "cut",
    "leave",
    "restart",
    "hang",
    "vanish",
    "stall",
    "stall",
    "slow",
    "pause",
)
SLOW = 100.0  # times as long as usual
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
    theme = rng.choice(("faults", "faults", "faults", "stalls", "poison", "hostile", "lies", "crowd"))
    shape = _shape(rng, theme)
    clients = [(rng.uniform(0, 10), rng.choice(ASKS), _habit(rng)) for _ in range(rng.randint(3, 7))]
    victims = [f"worker-{n}" for n in range(shape.stages * shape.replicas)] + ["drafter"] * shape.drafter
    faults: list[Fault] = []
    match theme:
        case "faults":
            faults = [
                _fault(rng, rng.choice(KINDS), victims, shape.journal) for _ in range(rng.randint(1, 3))
            ]
            if rng.random() < 0.3:
                faults += _while_it_stands_still(rng, victims)
        case "stalls":
            faults = [_stall(rng, [*victims, "master"]) for _ in range(rng.randint(2, 6))]
        case "poison":
            clients.append(_poison(rng))
            faults = [_stall(rng, [*victims, "master"]) for _ in range(rng.randint(0, 1))]
        case "hostile":
            clients += [_hostile(rng) for _ in range(rng.randint(2, 6))]
            faults = [_stall(rng, [*victims, "master"]) for _ in range(rng.randint(0, 2))]
        case "crowd":
            shape = replace(shape, rows=16, nodes=24)
        case _:  # a drafter that lies
            faults = [
                _fault(rng, rng.choice(KINDS), victims, shape.journal) for _ in range(rng.randint(0, 2))
            ]
    return Campaign(shape, tuple(clients), tuple(_apart(faults)))


def _apart(faults: list[Fault]) -> Iterator[Fault]:
    """Without short stalls of a loop that stands still already, or has hardly gone on: that is a long one."""
    until: dict[str, float] = {}
    for fault in sorted(faults, key=lambda one: one.at):
        if fault.kind == "stall":
            if fault.at < until.get(fault.whom, 0.0) and fault.lasts <= HARMLESS:
                continue
            until[fault.whom] = fault.at + fault.lasts + Heartbeat().silence - HARMLESS
        yield fault


def _shape(rng: random.Random, theme: str) -> Shape:
    lies = theme == "lies"
    replicas = 2 if rng.random() < (0.6 if theme == "hostile" else 0.1) else 1
    stages, drafter = rng.choice((1, 2, 2, 3) if replicas == 1 else (1, 2)), rng.random() < 0.8 or lies
    return Shape(
        stages=stages,
        drafter=drafter,
        skill=rng.choice((0.0, 0.5, 0.9)),
        journal=rng.random() < 0.5,
        replicas=replicas,
        rows=rng.choice((16, 32, 64)),
        nodes=rng.choice((6, 6, 24)),
        taps=drafter and rng.random() < 0.6,
        lie=rng.choice(LIES) if lies else "",
        losses=rng.choice((0.0, 0.01, 0.05)) if theme in ("faults", "lies") else 0.0,
        poisoned=rng.randrange(stages),
        parts=rng.choice((1, 3, 8)),
    )


def _stall(rng: random.Random, whom: list[str]) -> Fault:
    """What must alarm nobody: a loop stands still for a moment, everybody for long, or work takes long."""
    kind, at = rng.choice(("stall", "stall", "slow", "pause")), rng.uniform(0, 15)
    if kind == "pause":
        return Fault(kind, "everybody", at, rng.uniform(1.0, 60.0))
    if kind == "slow":
        return Fault(kind, rng.choice(whom[:-1]), at, rng.uniform(2.0, 10.0))
    return Fault(kind, rng.choice(whom), at, rng.uniform(0.1, HARMLESS))


def _while_it_stands_still(rng: random.Random, victims: list[str]) -> list[Fault]:
    """Much happens before the master hears of any of it."""
    at, lasts = rng.uniform(0, 10), rng.uniform(4.0, 19.5)
    inside = Fault("kill", rng.choice(victims), at + rng.uniform(0, 2.0))
    return [Fault("stall", "master", at, lasts), inside]


def _poison(rng: random.Random) -> tuple[float, Ask, Habit]:
    seed = rng.choice(POISONS)
    mode = "sot" if seed == AT_GRAMMAR else rng.choice(("direct", "sot"))
    asks = [ask for ask in ASKS if ask.mode == mode]
    return rng.uniform(0, 10), replace(rng.choice(asks), seed=seed), Habit(once=True)


def _hostile(rng: random.Random) -> tuple[float, Ask, Habit]:
    at = rng.uniform(0, 10)
    match rng.choice(("twin", "twin", "storm", "pry", "refused", "slow")):
        case "twin":
            twin = rng.choice((0.0, 0.002, 0.01, 0.5))
            return at, rng.choice((*LONG, *ASKS)), Habit(twin=twin, once=True)
        case "storm":
            return at, rng.choice(ASKS), Habit(stop=rng.randint(1, 20), storm=50)
        case "pry":
            return at, rng.choice(ASKS), Habit(pries=True)
        case "refused":
            return at, rng.choice(REFUSED), Habit(refused=True, once=True)
        case _:
            return at, rng.choice(ASKS), Habit(pause=3.0)


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
    if kind == "stall":
        return Fault(kind, rng.choice((whom, "master")), at, rng.choice((5.0, 19.0)))
    if kind in ("slow", "pause"):
        return Fault(kind, "everybody" if kind == "pause" else whom, at, lasts)
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
        calm = Campaign(Shape(1, False), tuple((0.0, ask, Habit()) for ask in (*ASKS, *LONG)), ())
        for story in tell(play(calm, 0)).values():
            assert story.finished is not None, story.ended
            _answers[story.asked.ask] = story.finished.text
    return _answers


def judge(campaign: Campaign, seed: int = 0, between: Honest | None = None) -> list[str]:
    """Everything that is wrong with one run of it; the seed settles what the campaign leaves to chance."""
    return check(play(campaign, seed, between), answers())


def play(campaign: Campaign, seed: int, between: Honest | None = None) -> History:
    with TemporaryDirectory() as place, _one_thread():
        return run(_play(campaign, seed, between, Path(place)))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Tensors are tiny here: others would only wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


async def _play(campaign: Campaign, seed: int, between: Honest | None, place: Path) -> History:
    journal = place if campaign.shape.journal else None
    world = World(random.Random(seed), campaign.shape, between, journal)
    if campaign.shape.lie:
        world.recorder.note(Hurt("lie", "drafter"))
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
    if not settled:
        world.recorder.note(Incomplete(world.lacking()))
    await asyncio.sleep(CONDUCT.keep_for + 1.0)
    left = (*world.left(), ("ring incomplete", not settled), ("crashes", len(world.crashed)))
    world.recorder.note(Rested(left))
    await world.close()
    return world.recorder.seen


async def _after(seconds: float, act: Callable[[], Awaitable[None]]) -> None:
    await asyncio.sleep(seconds)
    await act()


async def _hurt(world: World, fault: Fault) -> None:
    world.recorder.note(Hurt(fault.kind, fault.whom, fault.lasts))
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
        case "stall":
            host = members[0].host if members else world.house.host
            host.stall()
            await asyncio.sleep(fault.lasts)
            host.go_on()
        case "slow":
            host = members[0].host
            host.slow = SLOW
            await asyncio.sleep(fault.lasts)
            host.slow = 1.0
        case "pause":
            hosts = world.hosts
            world.net.freeze(*hosts)
            await asyncio.sleep(fault.lasts)
            world.net.thaw(*hosts)
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
    """Who is frozen so long must have been noticed, if the ring runs with it and the master runs meanwhile.
    Who was frozen before and is noticed already, is no stage of the ring any more.
    """
    house, before = world.house, _ring_of(world, whom)
    stages = [
        stage.name for one in house.master.replicas if one.fleet.ring for stage in one.fleet.ring.stages
    ]
    needed = before.ready and whom in stages
    awake, until = 0.0, world.net.now + fault.lasts
    while awake < NOTICE and world.net.now < until:
        await asyncio.sleep(min(GLANCE, until - world.net.now))
        awake += GLANCE * (not world.house.host.stalled)
    if fault.kind == "freeze" and awake >= NOTICE:
        now = _ring_of(world, whom)
        same = world.house is house and now.epoch == before.epoch and now.ready
        world.recorder.note(Looked(whom, needed and same))
    await asyncio.sleep(until - world.net.now)


def _ring_of(world: World, whom: str) -> ReplicaInfo:
    """How the ring stands that this member belongs to, or else the first."""
    rings = world.house.master.replicas
    found = (one for one in rings if any(whom.startswith(each.name) for each in one.fleet.registrations))
    return next(found, rings[0]).info()


def fingerprint(history: History) -> str:
    """Of everything that happens, and when."""
    return hashlib.sha256(repr(history).encode()).hexdigest()
