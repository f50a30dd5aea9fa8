"""Law 1 with trees that travel in parts: stages compute parts of one tree at a time, and no token changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from specsot.core.frames import Frame
from specsot.members import TreeShape
from specsot.params import Sampling
from specsot.transport.wire.values import MAX_NODES
from specsot_worker.observer import WorkerObserver
from tests.cut_trees import cut_into
from tests.laws.drafters import hostile, knowing
from tests.laws.plain import Excuses, Plain, write_plainly
from tests.laws.ring import Setup, ring_of
from tests.laws.test_pairs import SAMPLINGS, prompts_of

pytestmark = pytest.mark.torch

LIMIT = 18
DEEP = TreeShape(6, 2, 14, fixed=True)


@dataclass
class Cuts(WorkerObserver):
    """Counts the frames that a stage computes: (part, last part)."""

    seen: Counter[tuple[int, int]] = field(default_factory=Counter[tuple[int, int]])

    def computed(self, frame: Frame, seconds: float) -> None:
        self.seen[frame.part, frame.last_part] += 1


def plain_texts(base: Path, sampling: Sampling) -> list[Plain]:
    return [write_plainly(base, tuple(prompt), LIMIT, sampling, 7, 0) for prompt in prompts_of(3)]


async def compare(setup: Setup, sampling: Sampling, plain: list[Plain]) -> Counter[tuple[int, int]]:
    """Write the prompts one after the other; return the parts that the last stage computed."""
    excuses, cuts = Excuses(), Cuts()
    last = f"worker-{setup.stages - 1}"
    setup = replace(setup, watch=lambda name: cuts if name == last else None)
    async with ring_of(setup) as ring:
        for prompt, wanted in zip(prompts_of(3), plain):
            sequence = await ring.open(prompt, limit=LIMIT, sampling=sampling, seed=7)
            excuses.compare(await ring.written(sequence), wanted)
        assert not ring.broken
    excuses.settle()
    return cuts.seen


@pytest.mark.parametrize(
    ("stages", "parts", "links", "layout", "sampling", "drafter"),
    [
        (1, 3, "local", "packed", "greedy", "knowing"),
        (2, 2, "grpc", "batched", "warm", "knowing"),
        (2, 8, "local", "packed", "penalties", "knowing"),
        (3, 3, "curve", "packed", "greedy", "hostile"),
        (3, 4, "local", "batched", "warm", "hostile"),
        (4, 3, "grpc", "packed", "greedy", "head"),
        (4, 64, "local", "batched", "greedy", "knowing"),
    ],
)
async def test_law_1_trees_in_parts(models, stages, parts, links, layout, sampling, drafter) -> None:
    base, head = models
    how = SAMPLINGS[sampling]
    plain = plain_texts(base, how)
    known = [[*prompt, *one.tokens] for prompt, one in zip(prompts_of(3), plain)]
    most = 500 if links == "local" else MAX_NODES
    makers = {"knowing": knowing(base, known, skill=0.9), "hostile": hostile(base, known, most), "head": None}
    setup = Setup(
        base,
        head if drafter == "head" else None,
        stages,
        layout,
        DEEP,
        drafter=makers[drafter],
        links=links,
        draft_timeout=0.2 if drafter == "hostile" else 10.0,
        make_depth=cut_into(parts),
    )
    seen = await compare(setup, how, plain)
    assert any(last for _, last in seen), "some trees really travelled in parts"
