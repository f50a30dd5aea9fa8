"""Migrated sequences: whose KV rows the next epoch has, and which openings reuse those rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from specsot.core.frames import ReusedKV
from specsot_master.core.request import RequestState
from specsot_master.core.sequence import ActiveSequence


class MigratedSequences:
    """The sequences whose KV was offered for migration, and how many rows of each were migrated.

    A sequence is recognised by the object itself, not only by its id: another ring's factory gives out the
    same ids.
    """

    def __init__(self) -> None:
        self._offered: dict[int, ActiveSequence] = {}
        self._rows: Mapping[int, int] = {}

    def offer(self, sequences: Iterable[ActiveSequence], slots: int) -> dict[int, int]:
        """Record the sequences that the next epoch may reuse. Return how many first KV rows of each are final
        in every stage, by id.

        Not final are the row of the newest token, and `slots` rows before it: the last result may not have
        been applied everywhere, and accepted nodes still move.

            100 tokens, slots 10 -> 100 - 1 - 10 = 89 rows, those of tokens 0 .. 88
        """
        self._offered = {one.id: one for one in sequences if _plain(one)}
        final = {id: one.log.position - 1 - slots for id, one in self._offered.items()}
        return {id: rows for id, rows in final.items() if rows > 0}

    def begin(self, rows: Mapping[int, int]) -> list[int]:
        """Begin an epoch that has these first rows of earlier sequences. Return the ids of those that have
        ended meanwhile, whose rows can be freed.
        """
        self._rows = rows
        return [id for id in rows if id not in self._offered]

    def end(self, sequence: ActiveSequence) -> bool:
        """Forget a sequence that is over. Return True if rows of it were migrated, so that they can be
        freed.
        """
        waited = self._count(sequence) > 0
        if self._offered.get(sequence.id) is sequence:
            del self._offered[sequence.id]
        return waited

    def reused_of_sequence(self, sequence: ActiveSequence, forked: int) -> ReusedKV | None:
        """Return the rows to reuse for a sequence that is opened again, after the `forked` rows of its
        prefix; None if there are none.

            forked 40, 89 rows migrated -> the rows of tokens 40 .. 88
        """
        tokens = sequence.log.tokens[forked : self._count(sequence)]
        return ReusedKV(sequence.id, tokens) if tokens else None

    def of_prefix(self, request: RequestState, tokens: tuple[int, ...], forked: int) -> ReusedKV | None:
        """Return the rows to reuse for this request's prefix, from one of its sequences that is opened again
        after the prefix; None if there are none.

        At least the last token of the prefix is computed again, because only a frame with a token of the
        sequence puts the reused rows into its pages.

            prefix of 50 tokens, forked 8, 89 rows migrated -> the rows of tokens 8 .. 48
        """
        for sequence in request.lost:
            last = min(self._count(sequence), len(tokens) - 1)
            if last > forked and sequence.log.tokens[: len(tokens)] == tokens:
                return ReusedKV(sequence.id, tokens[forked:last])
        return None

    def _count(self, sequence: ActiveSequence) -> int:
        """Return how many first rows of this sequence were migrated; 0 if it was not offered."""
        return self._rows.get(sequence.id, 0) if self._offered.get(sequence.id) is sequence else 0


def _plain(sequence: ActiveSequence) -> bool:
    """Return True if the sequence has output, runs, and attends to all tokens before each token (no window,
    no pruning).
    """
    opening = sequence.log.opening
    log = sequence.log
    return log.has_output and log.end is None and not (opening.window or opening.pruning or opening.heads)
