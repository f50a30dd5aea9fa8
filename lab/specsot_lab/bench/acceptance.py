"""How often replayed drafts are right: with one chance for each level, or with one chance for each rank of a
node's children.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

# Multiples of the golden ratio modulo 1 fill the unit interval more evenly than random numbers do.
GOLDEN: Final = (math.sqrt(5) - 1) / 2

# The square roots of these primes are no rational multiples of each other.
PRIMES: Final = (2, 3, 5, 7, 11, 13, 17, 19)


def chance_of(tau: float, levels: int) -> float:
    """Return the probability of acceptance, the same at every level, with which a step yields `tau` tokens on
    average. Return nearly 1 if even full acceptance yields fewer, and 0.0 if `tau` is at most 1.

    tau: Mean tokens per step, the bonus token included.
    levels: Number of drafted levels of a tree.

    The probability is found by bisection between 0 and 1.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        chance = (low + high) / 2
        tokens_per_step = 1 + sum(chance**n for n in range(1, levels + 1))
        low, high = (chance, high) if tokens_per_step < tau else (low, chance)
    return low


def even_runs(chance: float) -> Iterator[int]:
    """Yield, without end, the number of right drafts before each wrong one. The numbers are distributed
    geometrically, as if each draft were right with this probability.

    The numbers are evenly spread instead of random: a few hundred random draws would miss the mean by several
    per cent, and speed-ups with it.

    chance: Probability that a draft is right, greater than 0 and less than 1.

    The sequence is always the same for one chance.
    """
    point = 0.5
    while True:
        yield int(math.log(point) / math.log(chance))
        point = (point + GOLDEN) % 1.0


def even_ranks(chances: Sequence[float], level: int) -> Iterator[int | None]:
    """Yield, without end, the rank of the draft that is right at one level of one tree after another; None
    where none is.

    Every level advances through the unit interval by an irrational number of its own, so that what is right
    at one level says nothing about the next.

    chances: Probability that the draft of each rank is right, the best rank first; at most 1 in total.
    level: The level, counted from 0. Levels whose numbers are equal modulo 8 advance alike.

    The sequence is always the same for the same arguments.
    """
    step = math.sqrt(PRIMES[level % len(PRIMES)]) % 1.0
    point = 0.5
    while True:
        cumulative_chance = 0.0
        for rank, chance in enumerate(chances):
            cumulative_chance += chance
            if point < cumulative_chance:
                yield rank
                break
        else:
            yield None
        point = (point + step) % 1.0
