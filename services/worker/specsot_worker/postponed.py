"""Segments that cannot be judged yet: what holds their sequence is still being compiled.

Refuses to know grammars, logits and lessons.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from specsot.constraint import Grammar
from specsot.frames import Frame, rows_of


class Postponed:
    """By sequence what it waits for; and its segments with their rows, each as a frame, in order."""

    def __init__(self) -> None:
        self._coming: dict[int, Future[Grammar]] = {}
        self._kept: list[Frame] = []

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def ready(self) -> set[int]:
        """Sequences that have segments here and need not wait any more."""
        return {one for one in map(_sequence, self._kept) if self._coming[one].done()}

    def wait(self, sequence: int, grammar: Future[Grammar]) -> None:
        """Its segments are kept from now on, until they are taken."""
        self._coming[sequence] = grammar

    def keep(self, frame: Frame) -> Frame:
        """What can be judged of a frame. How long that took nobody knows, if it is not all of it."""
        if self._coming.keys().isdisjoint(segment.sequence for segment in frame.segments):
            return frame
        now = list[Frame]()
        for part in _apart(frame):
            (self._kept if _sequence(part) in self._coming else now).append(part)
        return _joined(now, replace(frame, seconds=()))

    def take(self) -> tuple[dict[int, Future[Grammar]], Frame]:
        """What those that are ready waited for, all done; and their segments as a frame that is no lap."""
        grammars = {sequence: self._coming.pop(sequence) for sequence in self.ready}
        mine = [part for part in self._kept if _sequence(part) in grammars]
        self._kept = [part for part in self._kept if _sequence(part) not in grammars]
        return grammars, _joined(mine, mine[-1])

    def forget(self, sequence: int) -> None:
        if self._coming.pop(sequence, None):
            self._kept = [part for part in self._kept if _sequence(part) != sequence]


def _sequence(part: Frame) -> int:
    return part.segments[0].sequence


def _apart(frame: Frame) -> list[Frame]:
    """A frame for every segment, of number 0: no lap."""
    parts, first = list[Frame](), 0
    for segment in frame.segments:
        rows = slice(first, first + rows_of(segment))
        first = rows.stop
        part = replace(frame, number=0, openings=(), segments=(segment,), closings=(), seconds=())
        parts.append(replace(part, hidden=_cut(frame.hidden, rows), fused=_cut(frame.fused, rows)))
    return parts


def _joined(parts: list[Frame], frame: Frame) -> Frame:
    """`frame` with the segments and rows of these parts."""
    return replace(
        frame,
        segments=tuple(segment for part in parts for segment in part.segments),
        hidden=_stacked(part.hidden for part in parts),
        fused=_stacked(part.fused for part in parts),
    )


def _cut(rows: Any, part: slice) -> Any:
    return None if rows is None else rows[part]


def _stacked(parts: Iterable[Any]) -> torch.Tensor | None:
    there = [rows for rows in parts if rows is not None]
    return torch.cat(there) if there else None
