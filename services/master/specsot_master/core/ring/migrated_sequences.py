"""Migrated sequences: whose KV rows the next epoch has, and which openings reuse those rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from specsot.core.frames import ReusedKV
from specsot_master.core.request import RequestState
from specsot_master.core.sequence import ActiveSequence


class MigratedSequences:
    """The sequences whose KV was offered for migration to the next epoch, and how many rows of each were
    migrated.

    A sequence is recognised by the object itself, not only by its id: another ring's factory gives out the
    same ids.
    """

    def __init__(self) -> None:
        """Know no sequences."""
        self._offered: dict[int, ActiveSequence] = {}
        self._rows: Mapping[int, int] = {}
        self._replays = False

    def offer(self, sequences: Iterable[ActiveSequence]) -> dict[int, int]:
        """Record the sequences that the next epoch may reuse. Return, by sequence id, how many first KV rows
        of each are final in every stage; sequences without any are left out. Sequences without output, that
        have ended, or that have windows of single heads are not offered either. Earlier offers are forgotten.

        sequences: the running sequences; those with a window or pruning are not offered.
        """
        self._offered = {one.id: one for one in sequences if _plain(one)}
        return {id: one.log.final_rows for id, one in self._offered.items() if one.log.final_rows > 0}

    def begin(self, num_rows: Mapping[int, int], replays: bool = False) -> list[int]:
        """Begin an epoch that has KV of earlier sequences. Return the ids of those that have ended meanwhile,
        whose rows can be freed; empty if none has.

        num_rows: by sequence id of the previous epoch, how many first KV rows every stage has; empty if
            nothing was migrated.
        replays: True if a stage was lost with its part of these rows, which must be computed again.
        """
        self._rows = num_rows
        self._replays = replays
        return [id for id in num_rows if id not in self._offered]

    def end(self, sequence: ActiveSequence) -> bool:
        """Forget a sequence that is over. Return True if rows of it were migrated, so that they can be freed.
        Return False if its rows were not migrated, or if another sequence with its id was offered.

        sequence: the sequence, which may never have been offered.
        """
        waited = self._count(sequence) > 0
        if self._offered.get(sequence.id) is sequence:
            del self._offered[sequence.id]
        return waited

    def reused_of_sequence(self, sequence: ActiveSequence, num_forked: int) -> ReusedKV | None:
        """Return the rows to reuse for a sequence that is opened again, after the rows that it forks from its
        prefix; None if there are none.

            num_forked 40, 89 rows migrated -> the rows of tokens 40 .. 88

        sequence: the sequence, still with its id of the previous epoch.
        num_forked: how many first tokens it forks in the new epoch.
        """
        tokens = sequence.log.tokens[num_forked : self._count(sequence)]
        return ReusedKV(sequence.id, tokens, self._replays) if tokens else None

    def is_unused(self, sequence: ActiveSequence, num_forked: int) -> bool:
        """Return True if rows of a sequence were migrated, but the prefix that it forks has all of them.

            num_forked 100, 89 rows migrated -> True

        sequence: the sequence, still with its id of the previous epoch.
        num_forked: how many first tokens it forks in the new epoch.
        """
        return 0 < self._count(sequence) <= num_forked

    def of_prefix(self, request: RequestState, tokens: tuple[int, ...], num_forked: int) -> ReusedKV | None:
        """Return the rows to reuse for a request's prefix, from one of its sequences that is opened again
        after the prefix; None if there are none. The sequence must begin with all tokens of the prefix; the
        first that has enough migrated rows is used.

        At least the last token of the prefix is computed again, because only a frame with a token of the
        sequence puts the reused rows into its pages.

            prefix of 50 tokens, num_forked 8, 89 rows migrated -> the rows of tokens 8 .. 48

        request: the request that opens the prefix.
        tokens: all token ids of the prefix.
        num_forked: how many of them the prefix forks from another prefix.
        """
        for sequence in request.lost:
            last = min(self._count(sequence), len(tokens) - 1)
            if last > num_forked and sequence.log.tokens[: len(tokens)] == tokens:
                return ReusedKV(sequence.id, tokens[num_forked:last], self._replays)
        return None

    def _count(self, sequence: ActiveSequence) -> int:
        """Return how many first rows of a sequence were migrated; 0 if it was not offered, or if another
        sequence with its id was.

        sequence: the sequence, with its id of the previous epoch.
        """
        return self._rows.get(sequence.id, 0) if self._offered.get(sequence.id) is sequence else 0


def _plain(sequence: ActiveSequence) -> bool:
    """Return True if the sequence has output, runs, and attends to all tokens before each token (no window,
    no pruning, no windows of single heads). Only the KV of such sequences can be migrated.

    sequence: a sequence of the running epoch.
    """
    opening = sequence.log.opening
    log = sequence.log
    return log.has_output and log.end is None and not (opening.window or opening.pruning or opening.heads)
