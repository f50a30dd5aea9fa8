"""A covering array: few rows in which every two values of different factors meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product

Factors = Mapping[str, Sequence[str]]
Row = dict[str, str]
Pair = frozenset[tuple[str, str]]


def pairs_of(factors: Factors, allowed: Callable[[Row], bool]) -> set[Pair]:
    """Every two values of different factors that may meet."""
    return {
        frozenset({(one, a), (other, b)})
        for one, other in combinations(factors, 2)
        for a, b in product(factors[one], factors[other])
        if allowed({one: a, other: b})
    }


def met(row: Row) -> Iterator[Pair]:
    for one, other in combinations(row.items(), 2):
        yield frozenset({one, other})


def cover(factors: Factors, allowed: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Rows in which all allowed pairs meet. Greedy, the same every time; a few more rows than the fewest."""
    missing, rows, rng = pairs_of(factors, allowed), list[Row](), random.Random(1)
    while missing:
        row = dict(min(missing, key=sorted))
        for name in sorted(
            (name for name in factors if name not in row), key=lambda name: -len(factors[name])
        ):
            fitting = [row | {name: value} for value in factors[name] if allowed(row | {name: value})]
            rng.shuffle(fitting)
            row = max(fitting, key=lambda one: sum(pair in missing for pair in met(one)))
        rows.append({name: row[name] for name in factors})
        missing -= set(met(row))
    return rows
