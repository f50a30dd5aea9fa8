"""Drafter and stage together on the demo model: nothing changes but the number of steps."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import torch

from specsot.core.tree import Tree
from specsot.members import Curve, TreeShape
from specsot_drafter.engine import DraftEngine
from specsot_drafter.heads import DraftHead
from specsot_drafter.heads.loading import load_head
from specsot_drafter.loader import make_engine
from specsot_model.decoder import Decoder
from tests.drafter.curves import QUICK_HEAD
from tests.drafter.ring import Ring, Writer, configuration, load_base, opening

# "Explain Photosynthesis." and that a plan shall be written, as the demo model is asked; how plans begin.
PREFIX = [
    *(0, 1, 1438, 604, 201, 7269, 276, 890, 14, 968, 2909, 814, 942, 16, 2, 201, 1, 305, 266, 201, 1261),
    *(1816, 326, 6874, 420, 2770, 16, 2, 201, 1, 305, 266, 201, 1558, 265, 960, 16, 2, 201, 1, 529, 372),
    *(404, 201),
]  # fmt: skip
SUFFIXES = ([1259, 1255], [1259, 1255, 19, 542], [1259, 1255, 19, 542, 1450, 539, 540, 545, 6941])
CHEAP: Curve = ((1, 1.0), (512, 1.01))
SHAPES = {
    "tuned": TreeShape(4, 4, 16),
    "fixed": TreeShape(3, 4, 12, fixed=True),
    "chain": TreeShape(3, 1, 5, fixed=True),
}


@pytest.fixture(scope="module")
def base(demo_model: Path) -> Decoder:
    return load_base(demo_model / "base")


@pytest.fixture(scope="module")
def head(demo_model: Path) -> DraftHead:
    return load_head(demo_model / "eagle3", demo_model / "base", torch.float32, "cpu")


def begin(ring: Ring) -> list[Writer]:
    """Three forks of one prefix."""
    ring.open(opening(1, len(PREFIX), decodes=False), PREFIX, chunk=16)
    return [
        ring.open(opening(number, len(PREFIX) + len(own), limit=60, fork=(1, len(PREFIX))), own)
        for number, own in enumerate(SUFFIXES, start=2)
    ]


def write(base: Decoder, head: DraftHead, engine: DraftEngine | None) -> tuple[list[Writer], int]:
    """Three forks of one prefix, each to its limit; the steps they took."""
    ring = Ring(base, head, engine)
    writers = begin(ring)
    steps = 0
    while ring.turn():
        steps += 1
    for sequence in (1, 2, 3, 4):
        ring.close(sequence)
    return writers, steps


@pytest.fixture(scope="module")
def plainly(base: Decoder, head: DraftHead) -> tuple[list[Writer], int]:
    return write(base, head, None)


@pytest.mark.parametrize("name", SHAPES)
def test_the_same_tokens_in_fewer_steps(
    base: Decoder, head: DraftHead, plainly: tuple[list[Writer], int], name: str
) -> None:
    engine = make_engine(head, configuration(SHAPES[name], curve=CHEAP), curve=QUICK_HEAD)
    free = engine.free_pages
    writers, steps = write(base, head, engine)
    assert [writer.written for writer in writers] == [writer.written for writer in plainly[0]]
    assert steps < plainly[1]
    assert engine.free_pages == free


def test_a_drafter_that_is_back_grows_the_trees_of_one_that_never_left(
    base: Decoder, head: DraftHead, plainly: tuple[list[Writer], int]
) -> None:
    """Wherever both had to write on from the same place."""
    trees: dict[bool, dict[tuple[int, int], Tree]] = {}
    for leaves in (False, True):
        ring, trees[leaves] = Ring(base, head, fresh(head)), {}
        writers = begin(ring)
        for step in count():
            if leaves and step in (2, 4):
                ring.replace_drafter(fresh(head) if step == 4 else None)
            places = {one.opening.sequence: one.committed for one in writers if not one.done}
            if not ring.turn():
                break
            if step > 4 or not leaves:
                trees[leaves] |= {(n, at): ring.writers[n].trees[-1] for n, at in places.items()}
        assert [writer.written for writer in writers] == [writer.written for writer in plainly[0]]
    both = trees[True].keys() & trees[False].keys()
    assert len(both) > 5
    assert all(trees[True][place] == trees[False][place] for place in both)
    assert sum(len(trees[True][place]) > 1 for place in both) > 5


def fresh(head: DraftHead) -> DraftEngine:
    return make_engine(head, configuration(SHAPES["fixed"], curve=CHEAP), curve=QUICK_HEAD)
