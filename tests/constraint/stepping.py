"""Walks the language of skeletons by its definition: the first edge that has a byte counts."""

from __future__ import annotations

from specsot.core.skeleton import PlanRules
from specsot.grammar import language
from specsot.grammar.language import Place


def step(rules: PlanRules, place: Place, byte: int) -> Place | None:
    """Return the place after `byte`, or None if no valid output continues with this byte.

    rules: the rules of the skeleton. Only its tool names are read here.
    place: the place before the byte.
    byte: the next byte of the output, 0..255.

    Returns None at the end, and where an edge forbids the byte although a later one would allow it.
    """
    for edge in language.edges(rules, place):
        if edge.low <= byte <= edge.high:
            return edge.target
    return None
