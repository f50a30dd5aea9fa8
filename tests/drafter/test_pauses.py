"""Pauses of drafting on the demo model: the same tokens, and drafts that are accepted as if none had paused.

The ring of features is made small, so that short pauses are longer than it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from specsot.core.frames import Features
from specsot_drafter.heads import DraftHead
from specsot_model.decoder import Decoder
from tests.drafter.ring import Ring, opening
from tests.drafter.test_ring import PREFIX, base, fresh, head

__all__ = ["base", "head"]

RING_ROWS = 32
NUM_TOKENS = 170
# Tokens that are written before the pause.
FIRST = 30


@dataclass
class Written:
    """A text, how many tokens it had after each step, and what the drafter was sent."""

    tokens: list[int]
    lengths: list[int] = field(default_factory=list[int])
    sent: list[Features] = field(default_factory=list[Features])

    def steps_after(self, length: int) -> int:
        """How many steps wrote the tokens after the first `length` ones."""
        return sum(one > length for one in self.lengths)


def write(base: Decoder, head: DraftHead, pause: int = 0) -> Written:
    """Write one text, with one pause of so many tokens."""
    engine = fresh(head)
    free = engine.free_pages
    ring = Ring(base, head, engine, ring_rows=RING_ROWS)
    writer = ring.open(opening(1, len(PREFIX), limit=NUM_TOKENS), PREFIX)
    found = Written(writer.written)
    while ring.turn():
        found.lengths.append(len(writer.written))
        if pause and len(writer.written) >= FIRST:
            ring.pause(pause)
            pause = 0
    ring.close(1)
    found.sent = ring.heard
    assert engine.free_pages == free
    return found


@pytest.fixture(scope="module")
def unpaused(base: Decoder, head: DraftHead) -> Written:
    return write(base, head)


@pytest.mark.parametrize("pause", [10, 24, 100])
def test_after_a_pause_drafts_are_accepted_as_if_drafting_had_never_paused(
    base: Decoder, head: DraftHead, unpaused: Written, pause: int
) -> None:
    """A pause is shorter than the ring of features, as long as most of it, or three times as long."""
    paused = write(base, head, pause)
    assert paused.tokens == unpaused.tokens
    resumed = next(length for length in paused.lengths if length >= FIRST) + pause + 2
    steps, before = paused.steps_after(resumed), unpaused.steps_after(resumed)
    assert before < (NUM_TOKENS - resumed) / 1.5, "drafts are accepted"
    assert steps <= 1.1 * before + 1
    batches = [(one, each) for one in paused.sent for each in one.feature_batches]
    lost = sum(len(each.tokens) for one, each in batches if one.rows is None)
    assert (lost > 0) == (pause > RING_ROWS)
    sent = sum(len(each.tokens) for one, each in batches if one.rows is not None)
    assert sent + lost >= len(PREFIX) + NUM_TOKENS - 10
