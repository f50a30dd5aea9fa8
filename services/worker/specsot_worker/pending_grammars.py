"""Segments of sequences whose grammar is still being compiled, with their rows."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from specsot.core.frames import Frame, rows_of
from specsot.grammar import Grammar


class PendingGrammars:
    """By sequence what it waits for; and its segments with their rows, each as a frame, in order."""

    def __init__(self) -> None:
        self._compiling: dict[int, Future[Grammar]] = {}
        self._held: list[Frame] = []

    def __len__(self) -> int:
        return len(self._held)

    @property
    def ready(self) -> set[int]:
        """Sequences that have segments here and need not wait any more."""
        return {one for one in map(_sequence, self._held) if self._compiling[one].done()}

    def add(self, sequence: int, grammar: Future[Grammar]) -> None:
        """Its segments are kept from now on, until they are taken."""
        self._compiling[sequence] = grammar

    def hold_back(self, frame: Frame) -> Frame:
        """What can be judged of a frame. How long that took nobody knows, if it is not all of it."""
        if self._compiling.keys().isdisjoint(segment.sequence for segment in frame.segments):
            return frame
        ready = list[Frame]()
        for part in _split_frame(frame):
            (self._held if _sequence(part) in self._compiling else ready).append(part)
        return _merge_frames(ready, replace(frame, seconds=()))

    def take_ready(self) -> tuple[dict[int, Future[Grammar]], Frame]:
        """What those that are ready waited for, all done; and their segments as a frame that is no lap."""
        grammars = {sequence: self._compiling.pop(sequence) for sequence in self.ready}
        own = [part for part in self._held if _sequence(part) in grammars]
        self._held = [part for part in self._held if _sequence(part) not in grammars]
        return grammars, _merge_frames(own, own[-1])

    def forget(self, sequence: int) -> None:
        if self._compiling.pop(sequence, None):
            self._held = [part for part in self._held if _sequence(part) != sequence]


def _sequence(part: Frame) -> int:
    return part.segments[0].sequence


def _split_frame(frame: Frame) -> list[Frame]:
    """A frame for every segment, of number 0: no lap."""
    parts = list[Frame]()
    first = 0
    for segment in frame.segments:
        rows = slice(first, first + rows_of(segment))
        first = rows.stop
        part = replace(frame, number=0, openings=(), segments=(segment,), closings=(), seconds=())
        parts.append(
            replace(part, hidden=_slice_rows(frame.hidden, rows), fused=_slice_rows(frame.fused, rows))
        )
    return parts


def _merge_frames(parts: list[Frame], frame: Frame) -> Frame:
    """`frame` with the segments and rows of these parts."""
    return replace(
        frame,
        segments=tuple(segment for part in parts for segment in part.segments),
        hidden=_stack_rows(part.hidden for part in parts),
        fused=_stack_rows(part.fused for part in parts),
    )


def _slice_rows(rows: Any, part: slice) -> Any:
    return None if rows is None else rows[part]


def _stack_rows(parts: Iterable[Any]) -> torch.Tensor | None:
    present = [rows for rows in parts if rows is not None]
    return torch.cat(present) if present else None
