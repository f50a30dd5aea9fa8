"""Pauses of drafting on the demo model: the same tokens, and drafts that are accepted as if none had paused.

In most tests the ring of features is small, so that short pauses are longer than it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from specsot.core.draft_pause import FEATURE_RING_ROWS
from specsot.core.frames import Features
from specsot.members import TreeShape
from specsot_drafter.heads import DraftHead
from specsot_drafter.loader import make_engine
from specsot_model.decoder import Decoder
from tests.drafter.curves import QUICK_HEAD
from tests.drafter.ring import PAGE_ROWS, Ring, configuration, opening
from tests.drafter.test_ring import CHEAP, PREFIX, base, head

__all__ = ["base", "head"]

SHAPE = TreeShape(3, 4, 12, fixed=True)
# Tokens that every sequence writes before the pause.
FIRST = 30


class Setting(NamedTuple):
    """A ring of features of so many rows, and so many sequences of so many tokens."""

    ring_rows: int
    num_sequences: int
    num_tokens: int


SMALL = Setting(ring_rows=32, num_sequences=1, num_tokens=170)
WHOLE = Setting(FEATURE_RING_ROWS, num_sequences=20, num_tokens=420)


@dataclass
class Written:
    """What the sequences wrote, how long each was after each step, and what the drafter was sent."""

    tokens: list[list[int]]
    lengths: list[list[int]] = field(default_factory=list[list[int]])
    sent: list[Features] = field(default_factory=list[Features])

    def steps_after(self, length: int) -> int:
        """How many trees wrote the tokens after the first `length` ones of all sequences."""
        ends = [len(one) for one in self.tokens]
        return sum(
            length < now and before < end
            for previous, step in zip(self.lengths, self.lengths[1:])
            for before, now, end in zip(previous, step, ends)
        )


def write(base: Decoder, head: DraftHead, setting: Setting, pause: int = 0) -> Written:
    """Write all sequences, with one pause of so many tokens of all of them together."""
    pages = setting.num_sequences * (setting.num_tokens + 100) // PAGE_ROWS + setting.num_sequences
    engine = make_engine(head, configuration(SHAPE, pages, curve=CHEAP), curve=QUICK_HEAD)
    free = engine.free_pages
    ring = Ring(base, head, engine, pages, ring_rows=setting.ring_rows)
    suffixes = ([300 + number] if number else [] for number in range(setting.num_sequences))
    prompts = [[*PREFIX, *own] for own in suffixes]
    writers = [
        ring.open(opening(number, len(prompt), limit=setting.num_tokens), prompt)
        for number, prompt in enumerate(prompts)
    ]
    found = Written([one.written for one in writers])
    while ring.turn():
        found.lengths.append([len(one.written) for one in writers])
        if pause and min(found.lengths[-1]) >= FIRST:
            ring.pause(pause)
            pause = 0
    for number in range(len(writers)):
        ring.close(number)
    found.sent = ring.heard
    assert engine.free_pages == free
    return found


UNPAUSED = dict[Setting, Written]()


@pytest.mark.parametrize(
    ("setting", "pause"),
    [
        (SMALL, 10),
        pytest.param(SMALL, 24, marks=pytest.mark.full),
        (SMALL, 100),
        *(pytest.param(WHOLE, pause, marks=pytest.mark.full) for pause in (10, 1500, 5000)),
    ],
)
def test_after_a_pause_drafts_are_accepted_as_if_drafting_had_never_paused(
    base: Decoder, head: DraftHead, setting: Setting, pause: int
) -> None:
    """A pause is shorter than the ring of features, as long as most of it, or longer."""
    unpaused = UNPAUSED.get(setting) or UNPAUSED.setdefault(setting, write(base, head, setting))
    paused = write(base, head, setting, pause)
    assert paused.tokens == unpaused.tokens
    begun = next(lengths for lengths in paused.lengths if min(lengths) >= FIRST)
    resumed = max(begun) + pause // setting.num_sequences + 2
    steps, before = paused.steps_after(resumed), unpaused.steps_after(resumed)
    assert 0 < before < setting.num_sequences * (setting.num_tokens - resumed) / 1.5, "drafts are accepted"
    assert steps <= 1.1 * before + 2
    batches = [(one, each) for one in paused.sent for each in one.feature_batches]
    lost = sum(len(each.tokens) for one, each in batches if one.rows is None)
    assert (lost > 0) == (pause > setting.ring_rows)
