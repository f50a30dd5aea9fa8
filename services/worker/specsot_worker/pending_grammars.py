"""Holds back segments, with their hidden states, until the grammar of their sequence has been compiled."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from specsot.core.frames import Frame, rows_of
from specsot.grammar import Grammar


class PendingGrammars:
    """Store of the grammars that are being compiled, by sequence, and of the segments that wait for them:
    each segment is a frame of its own with its hidden states, in order of arrival.
    """

    def __init__(self) -> None:
        """Start without grammars and segments."""
        self._compiling: dict[int, Future[Grammar]] = {}
        self._held: list[Frame] = []

    def __len__(self) -> int:
        """Return the number of segments that are held back."""
        return len(self._held)

    @property
    def ready(self) -> set[int]:
        """Ids of the sequences that have held-back segments and whose grammar has been compiled. Empty if
        there are none.
        """
        return {one for one in map(_sequence, self._held) if self._compiling[one].done()}

    def add(self, sequence: int, grammar: Future[Grammar]) -> None:
        """Hold back the segments of a sequence from now on, until `take_ready` returns them.

        sequence: Id of the sequence.
        grammar: The future of its grammar, which is being compiled.
        """
        self._compiling[sequence] = grammar

    def hold_back(self, frame: Frame) -> Frame:
        """Hold back the segments that must wait for a grammar, and return the frame with the other segments.
        Return the same frame if no segment must wait.

        frame: A frame that has passed every layer, with its hidden states.

        If any sequence of the frame must wait, the returned frame has no compute times, because they belong
        to the whole frame.

        Openings and closings stay in the returned frame, whose segments may be none.
        """
        if not self._compiling or self._compiling.keys().isdisjoint(one.sequence for one in frame.segments):
            return frame
        ready = list[Frame]()
        for part in _split_frame(frame):
            (self._held if _sequence(part) in self._compiling else ready).append(part)
        return _merge_frames(ready, replace(frame, seconds=()))

    def take_ready(self) -> tuple[dict[int, Future[Grammar]], Frame]:
        """Remove and return what no longer waits: the compiled grammars by sequence, as futures that are
        done, and the segments that waited for them, as one frame with number 0, because no step belongs to
        it. Call it only while `ready` is not empty.

        The frame has the epoch of the newest such segment, and the segments in the order of arrival.
        Grammars of sequences without held-back segments stay.
        """
        grammars = {sequence: self._compiling.pop(sequence) for sequence in self.ready}
        ready_parts = [part for part in self._held if _sequence(part) in grammars]
        self._held = [part for part in self._held if _sequence(part) not in grammars]
        return grammars, _merge_frames(ready_parts, ready_parts[-1])

    def forget(self, sequence: int) -> None:
        """Drop a sequence that has closed, with its held-back segments. An unknown sequence is ignored.

        sequence: Id of the sequence.
        """
        if self._compiling.pop(sequence, None):
            self._held = [part for part in self._held if _sequence(part) != sequence]


def _sequence(part: Frame) -> int:
    """Return the sequence id of the only segment of a frame.

    part: A frame with exactly one segment.
    """
    return part.segments[0].sequence


def _split_frame(frame: Frame) -> list[Frame]:
    """Return a frame for every segment, with the segment's hidden states and number 0: no step belongs to it.

    frame: A frame that has passed every layer.

    For example:

        # tokens [a0 a1 | b0 | c0 c1] -> frames with hidden states [0:2], [2:3] and [3:5]

    The frames have no openings, closings and compute seconds.
    """
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
    """Return a frame with the segments of other frames.

    parts: Frames whose segments, hidden states and fused features are put one after the other. May be empty.
    frame: Everything else is taken from this frame.
    """
    return replace(
        frame,
        segments=tuple(segment for part in parts for segment in part.segments),
        hidden=_stack_rows(part.hidden for part in parts),
        fused=_stack_rows(part.fused for part in parts),
    )


def _slice_rows(rows: Any, part: slice) -> Any:
    """Return the part of a tensor's rows that belongs to one segment. None stays None.

    rows: Hidden states or features [num_tokens, width], or None.
    part: Which tokens of the frame belong to the segment.
    """
    return None if rows is None else rows[part]


def _stack_rows(parts: Iterable[Any]) -> torch.Tensor | None:
    """Return the tensors of all parts, one after the other: [num_tokens, width]. None if there are none.

    parts: Hidden states or features of single segments; None for a segment without.
    """
    present = [rows for rows in parts if rows is not None]
    return torch.cat(present) if present else None
