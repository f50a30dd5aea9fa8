"""Which sequences of an epoch have KV rows in the next one, and what is opened there with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from specsot.core.frames import Kept
from specsot_master.core.request import RequestState
from specsot_master.core.sequence import ActiveSequence


class HandedTexts:
    """What was offered, and how much of it was handed over. A sequence is known by itself, too: another ring
    gives the same numbers.
    """

    def __init__(self) -> None:
        self._offered: dict[int, ActiveSequence] = {}
        self._rows: Mapping[int, int] = {}

    def offer(self, sequences: Iterable[ActiveSequence], slots: int) -> dict[int, int]:
        """How many first rows of each are final in every stage. slots: rows behind its root of which the last
        result may have spoken, and which may still move.
        """
        self._offered = {one.id: one for one in sequences if _plain(one)}
        final = {id: one.log.position - 1 - slots for id, one in self._offered.items()}
        return {id: rows for id, rows in final.items() if rows > 0}

    def begin(self, rows: Mapping[int, int]) -> list[int]:
        """An epoch, in which these first rows of earlier sequences are. Returns those that have ended."""
        self._rows = rows
        return [id for id in rows if id not in self._offered]

    def end(self, sequence: ActiveSequence) -> bool:
        """It is over. Whether it was to be opened again, and some of its rows are there."""
        waited = self._count(sequence) > 0
        if self._offered.get(sequence.id) is sequence:
            del self._offered[sequence.id]
        return waited

    def of_writer(self, sequence: ActiveSequence, forked: int) -> Kept | None:
        """For a sequence that is to be opened again, behind what it forks."""
        tokens = sequence.log.tokens[forked : self._count(sequence)]
        return Kept(sequence.id, tokens) if tokens else None

    def of_prefix(self, request: RequestState, tokens: tuple[int, ...], forked: int) -> Kept | None:
        """For what this request's sequences begin with: of one that waits to be opened again, and so comes
        behind it. Its last row is read, for a frame must put the others into pages.
        """
        for sequence in request.lost:
            last = min(self._count(sequence), len(tokens) - 1)
            if last > forked and sequence.log.tokens[: len(tokens)] == tokens:
                return Kept(sequence.id, tokens[forked:last])
        return None

    def _count(self, sequence: ActiveSequence) -> int:
        return self._rows.get(sequence.id, 0) if self._offered.get(sequence.id) is sequence else 0


def _plain(sequence: ActiveSequence) -> bool:
    """It writes, and sees all that is before it."""
    opening = sequence.log.opening
    log = sequence.log
    return log.has_output and log.end is None and not (opening.window or opening.pruning or opening.heads)
