"""Laws 1 and 4 with two drafters: which of them drafts never changes a text, and a lost one stops nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from specsot.members import CommMode
from tests.conftest import some
from tests.laws.drafters import KnowingDrafter, knowing
from tests.laws.plain import write_plainly
from tests.laws.ring import GREEDY, Links, Ring, Setup, ring_of

pytestmark = pytest.mark.torch

LIMIT = 24
PROMPTS = [[7, 9, 3, n] for n in range(8)]
WAYS: list[tuple[int, Links, CommMode]] = [
    (1, "local", "p2p"),
    (2, "grpc", "p2p"),
    (2, "local", "ring"),
    (3, "unix", "p2p"),
]


def plain(base: Path, number: int) -> list[int]:
    return list(write_plainly(base, tuple(PROMPTS[number]), LIMIT, GREEDY, 7, number).tokens)


def setup_of(base: Path, drafters: int, stages: int, links: Links, mode: CommMode) -> Setup:
    texts = [[*prompt, *plain(base, n)] for n, prompt in enumerate(PROMPTS)]
    knows = knowing(base, texts, skill=0.9)
    return Setup(base, None, stages, drafter=knows, drafters=drafters, links=links, comm_mode=mode)


async def open_all(ring: Ring, numbers: range) -> dict[int, int]:
    """Open these prompts; sequences by prompt."""
    return {n: await ring.open(PROMPTS[n], limit=LIMIT, seed=7, ordinal=n) for n in numbers}


async def check(ring: Ring, base: Path, opened: dict[int, int]) -> float:
    """Every text is the plain one. Returns tokens per step."""
    for number, sequence in opened.items():
        assert await ring.written(sequence) == plain(base, number)
    assert not ring.broken
    draft_rounds = [
        draft_round for sequence in opened.values() for draft_round in ring.texts[sequence].draft_rounds[1:]
    ]
    return sum(draft_rounds) / len(draft_rounds)


def drafted(ring: Ring, name: str) -> int:
    part = ring.parts[name]
    assert isinstance(part, KnowingDrafter)
    return part.drafted


@pytest.mark.parametrize(("stages", "links", "mode"), some(WAYS, 0, 1))
async def test_both_draft_and_either_may_go_in_mid_answer_and_come_back(
    models: tuple[Path, Path], stages: int, links: Links, mode: CommMode
) -> None:
    base, _ = models
    async with ring_of(setup_of(base, 1, stages, links, mode)) as ring:
        alone = await check(ring, base, await open_all(ring, range(4)))
    setup = setup_of(base, 2, stages, links, mode)
    async with ring_of(setup) as ring:
        await ring.has_drafters(2)
        assert await check(ring, base, await open_all(ring, range(4))) > 0.8 * alone > 1
        shares = [drafted(ring, name) for name in ("drafter", "drafter-1")]
        assert min(shares) > max(shares) / 2, "the sequences are divided"

        opened = await open_all(ring, range(4))
        await ring.heard(opened[0], tokens=4)
        ring.leaving["drafter"].set()
        assert await check(ring, base, opened) > 1.2, "the other one drafts for all of them"
        assert await check(ring, base, await open_all(ring, range(4, 8))) > 0.8 * alone

        await ring.start("drafter", setup.drafter)
        await ring.has_drafters(2)
        await check(ring, base, await open_all(ring, range(2)))  # meanwhile the last stage reaches it
        before = [drafted(ring, name) for name in ("drafter", "drafter-1")]
        assert await check(ring, base, await open_all(ring, range(8))) > 0.8 * alone
        shares = [drafted(ring, name) - old for name, old in zip(("drafter", "drafter-1"), before)]
        assert min(shares) > max(shares) / 2, "the sequences are divided again"
