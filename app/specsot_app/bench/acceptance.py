"""How often drafts are right where acceptance is replayed: a chance, and runs of right guesses that have it.

Pure. Refuses to know drafters and models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples fill the unit interval more evenly than dice do


def chance_of(tau: float, levels: int) -> float:
    """The same for every level, so that a lap brings `tau` tokens on average, with the bonus one."""
    low, high = 0.0, 1.0
    for _ in range(60):
        chance = (low + high) / 2
        brings = 1 + sum(chance**n for n in range(1, levels + 1))
        low, high = (chance, high) if brings < tau else (low, chance)
    return low


def even_runs(chance: float) -> Iterator[int]:
    """Right guesses before each wrong one: geometric, as if each were right with this chance.

    Not by dice: a few hundred of them would miss the mean by several per cent, and speed-ups with it.
    """
    place = 0.5
    while True:
        yield int(math.log(place) / math.log(chance))
        place = (place + GOLDEN) % 1.0
