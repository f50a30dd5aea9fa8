"""Tests the ring without weights: its output is independent of the drafter, and a wrong page is detected."""

import asyncio
import random
from functools import partial
from pathlib import Path

import pytest

from specsot.core.frames import Frame, Opening, PromptChunk, TreeSegment
from specsot.core.tree import Tree
from specsot.errors import Unavailable, WireError
from specsot.events import Finished
from specsot.members import Range
from specsot.service.options import DraftModelOptions
from specsot_app.core.ask import ask_of
from specsot_app.fleet.embedded import EmbeddedFleet, EmbeddedOptions
from tests.simulator import FakeLM, MockStage, Simulator, StageModel, plan_of

VOICE = FakeLM(range(400, 500))


def unslept(seconds: float) -> None:
    """Cheap steps."""


async def answers_of(demo_model, drafter: str, mode: str = "direct") -> list[Finished]:
    base = demo_model / "base"
    mock = Simulator(base, VOICE, plan=plan_of(base, 3, 10), sleep=unslept)
    parts = {name: partial(mock_worker, mock) for name in ("worker-0", "worker-1", "worker-2")}
    parts["drafter"] = lambda name, dialer, compute: mock.drafter(name, name, dialer, compute)
    options = EmbeddedOptions(DraftModelOptions(base, draft_model=demo_model / "eagle3"), stages=3)
    fleet = await EmbeddedFleet.start(options, parts)
    try:
        asks = [
            ask_of(one, mode=mode, drafter=drafter, max_new_tokens=256, max_branch_tokens=10)
            for one in ("One?", "Two?")
        ]
        return await asyncio.gather(*(answer_of(fleet, ask) for ask in asks))
    finally:
        await fleet.close()


def mock_worker(mock, name, dialer, compute):
    return mock.worker(name, name, dialer, compute)


async def answer_of(fleet, ask) -> Finished:
    events = [numbered.event async for numbered in fleet.generate(ask)]
    assert isinstance(events[-1], Finished)
    return events[-1]


async def test_a_request_that_runs_while_its_fleet_is_closed_fails_as_unavailable(demo_model):
    mock = Simulator(demo_model / "base", VOICE, sleep=unslept)
    options = EmbeddedOptions(DraftModelOptions(demo_model / "base"))
    fleet = await EmbeddedFleet.start(options, {"worker-0": partial(mock_worker, mock)})
    events = fleet.generate(ask_of("One?", mode="direct", max_new_tokens=300, ignore_eos=True))
    await anext(events)
    await fleet.close()
    with pytest.raises(Unavailable, match="the fleet is closed"):
        async for _ in events:
            pass


@pytest.mark.torch
async def test_a_ring_without_weights_answers_requests_alike_with_and_without_a_drafter(demo_model):
    plain = [one.text for one in await answers_of(demo_model, "none")]
    assert len(set(plain)) == 2
    assert [one.text for one in await answers_of(demo_model, "eagle")] == plain


@pytest.mark.torch
async def test_it_writes_the_plan_it_was_given(demo_model):
    for answer in await answers_of(demo_model, "eagle", "sot"):
        assert all(f"Point {n}" in answer.text for n in (1, 2, 3))


def stages() -> list[MockStage]:
    body = StageModel(VOICE, lambda rows: None)
    return [MockStage(body, layers, 16, 4) for layers in (Range(0, 2), Range(2, 4))]


def through(chain: list[MockStage], frame: Frame) -> Frame:
    for stage in chain:
        frame = stage.run(frame)
    return frame


def nexts(frame: Frame) -> list[int]:
    assert frame.hidden is not None
    return [int(row[2]) for row in frame.hidden]


@pytest.mark.torch
def test_every_token_of_a_prompt_and_node_of_a_tree_sees_its_own_sequence():
    ring, prompt = stages(), (1, 2, 3, 4, 5)
    fed = through(ring, Frame(1, 1, (Opening(1, 5),), (PromptChunk(1, 0, prompt, True),)))
    assert nexts(fed) == [VOICE.write(prompt[: n + 1], 1)[0] for n in range(5)]
    (root,) = VOICE.write(prompt, 1)
    right = VOICE.write((*prompt, root), 1)[0]
    tree = Tree((root, 9, right, 7), (0, 0, 0, 2))
    grown = through(ring, Frame(1, 2, (), (TreeSegment(1, 1, 5, (), tree),)))
    texts = ((root,), (root, 9), (root, right), (root, right, 7))
    assert nexts(grown) == [VOICE.write((*prompt, *text), 1)[0] for text in texts]
    kept = through(ring, Frame(1, 3, (), (TreeSegment(1, 2, 7, (0, 2), Tree((8,), (0,))),)))
    assert nexts(kept) == [VOICE.write((*prompt, root, right, 8), 1)[0]]


@pytest.mark.torch
def test_a_stage_that_lost_its_way_is_found_out():
    ring = stages()
    through(ring, Frame(1, 1, (Opening(1, 5),), (PromptChunk(1, 0, (1, 2, 3, 4, 5), True),)))
    ring[1]._states[4] ^= 1  # what a wrong page would look like
    with pytest.raises(WireError, match="computed other rows"):
        through(ring, Frame(1, 2, (), (TreeSegment(1, 1, 5, (), Tree((6,), (0,))),)))


def test_drafts_are_right_as_often_as_the_skill_says():
    skill, rng = Simulator(Path()).skill, random.Random(3)
    known = [VOICE.knows(rng.getrandbits(32), skill) for _ in range(1000)]
    assert sum(known) / len(known) == pytest.approx(0.8, abs=0.05)
