"""How often replayed drafts are right: one chance for a level, or one for each of a node's guesses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples fill the unit interval more evenly than dice do

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)  # their roots are no fractions of each other


def chance_of(tau: float, levels: int) -> float:
    """Return the probability, the same for every level, with which a step brings `tau` tokens on average, the
    bonus token included.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        chance = (low + high) / 2
        brings = 1 + sum(chance**n for n in range(1, levels + 1))
        low, high = (chance, high) if brings < tau else (low, chance)
    return low


def even_runs(chance: float) -> Iterator[int]:
    """Yield the number of right guesses before each wrong one: geometric, as if each were right with this
    probability.

    The numbers are not random: a few hundred draws would miss the mean by several per cent, and speed-ups
    with it.
    """
    place = 0.5
    while True:
        yield int(math.log(place) / math.log(chance))
        place = (place + GOLDEN) % 1.0


def even_ranks(chances: Sequence[float], level: int) -> Iterator[int | None]:
    """Which guess of a node is right, at one level of one tree after the other; None: none is.

    chances: of each guess, best first. Levels go through the unit interval by steps of their own, so that
    what is right at one says nothing of the next.
    """
    step = math.sqrt(PRIMES[level % len(PRIMES)]) % 1.0
    place = 0.5
    while True:
        below = 0.0
        for rank, chance in enumerate(chances):
            below += chance
            if place < below:
                yield rank
                break
        else:
            yield None
        place = (place + step) % 1.0
