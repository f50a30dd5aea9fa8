"""Which layers each stage runs, as written: "0:4,4:8", "0:4,4:" with an open end; or splits: "4"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from specsot.errors import InvalidRequest
from specsot.members import Range


def parse_ranges(written: str | Sequence[str], layers: int) -> tuple[Range, ...]:
    """One range a stage, in ring order. Raises InvalidRequest unless they follow each other from layer 0
    to the model's last.
    """
    said = written if isinstance(written, str) else ",".join(map(str, written))
    found = [re.fullmatch(r"\s*(\d{1,6}):(\d{0,6})\s*", part) for part in said.split(",")]
    edges = [(int(one[1]), int(one[2] or layers)) for one in found if one]
    follow = all(before[1] == behind[0] for before, behind in pairwise(edges))
    whole = follow and len(edges) == len(found) and edges[0][0] == 0 and edges[-1][1] == layers
    if not whole or any(first >= last for first, last in edges):
        raise InvalidRequest(
            f"layers must be ranges that follow each other from 0 to the model's {layers}, such as "
            f"0:{layers // 2},{layers // 2}:{layers}, got {said!r}",
            field="layers",
        )
    return tuple(Range(first, last) for first, last in edges)


def split_ranges(splits: str, layers: int) -> tuple[Range, ...]:
    """The ranges into which "14,28" cuts a model. Raises InvalidRequest for an empty one."""
    cuts = [int(cut) if re.fullmatch(r"\s*\d{1,6}\s*", cut) else 0 for cut in splits.split(",")]
    edges = list(pairwise([0, *cuts, layers]))
    if any(first >= last for first, last in edges):
        raise InvalidRequest(
            f"layer_splits must be ascending numbers between 0 and the model's {layers} layers, such as "
            f"{layers // 2}, got {splits!r}",
            field="layer_splits",
        )
    return tuple(Range(first, last) for first, last in edges)
