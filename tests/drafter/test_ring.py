"""Drafter and stage together on the demo model: nothing changes but the number of laps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specsot.members import Curve, TreeShape
from specsot.model.decoder import Decoder
from specsot_drafter.engine import DraftEngine
from specsot_drafter.heads import DraftHead
from specsot_drafter.heads.loading import load_head
from specsot_drafter.single import engine_of
from tests.drafter.laps import QUICK_HEAD
from tests.drafter.ring import Ring, Writer, configuration, load_base, opening

PREFIX = [0, *range(300, 340)]
SUFFIXES = ([5, 90, 700], [17, 33], [2000, 4, 4, 61, 7])
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


def write(base: Decoder, head: DraftHead, engine: DraftEngine | None) -> tuple[list[Writer], int]:
    """Three forks of one prefix, each to its limit; the laps they took."""
    ring = Ring(base, head, engine)
    ring.open(opening(1, len(PREFIX), decodes=False), PREFIX, chunk=16)
    forks = list(enumerate(SUFFIXES, start=2))
    writers = [
        ring.open(opening(number, len(PREFIX) + len(own), limit=20, fork=(1, len(PREFIX))), own)
        for number, own in forks
    ]
    laps = 0
    while ring.turn():
        laps += 1
    for sequence in (1, 2, 3, 4):
        ring.close(sequence)
    return writers, laps


@pytest.fixture(scope="module")
def plainly(base: Decoder, head: DraftHead) -> tuple[list[Writer], int]:
    return write(base, head, None)


@pytest.mark.parametrize("name", SHAPES)
def test_the_same_tokens_in_fewer_laps(
    base: Decoder, head: DraftHead, plainly: tuple[list[Writer], int], name: str
) -> None:
    engine = engine_of(head, configuration(SHAPES[name], curve=CHEAP), curve=QUICK_HEAD)
    free = engine.free_pages
    writers, laps = write(base, head, engine)
    assert [writer.written for writer in writers] == [writer.written for writer in plainly[0]]
    assert laps < plainly[1]
    assert engine.free_pages == free
