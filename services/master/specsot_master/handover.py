"""Migrates KV rows and features to the stages of the next epoch while the present epoch continues.

A *row* is the KV of one token. Givers are the stages of the present epoch, takers those of the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import structlog

from specsot.members import HandOver, Head, Registration, RowsOf
from specsot_master.core.ring.epoch import Epoch
from specsot_master.core.ring.placement import Stages
from specsot_master.members import MemberTable

log = structlog.get_logger()

# Seconds after which a round is given up. Requests continue meanwhile. 46 MB take 37 s at 10 Mbit/s.
ROUND_SECONDS = 60.0
# Tokens, over all sequences. So few are computed again in the next epoch rather than migrated in a further
# round. Untuned.
FEW_ROWS = 32
# Rounds of one change. Untuned.
MAX_ROUNDS = 4
# Bytes of KV that are migrated, the longest sequences first. A link's send queue holds twice as many.
MAX_BYTES = 256 << 20


class KvHandover:
    """Migrates KV for one change of the ring at a time, in rounds.

    Each round migrates the tokens that have become final since the round before:
    # final tokens of sequence 7 at the three rounds: 900, 960, 970
    # -> round 1 sends rows 0..899, round 2 rows 900..959; the last 10 are fewer than FEW_ROWS: done

    The argument `later` is called when a round's time has run out, so that the fleet calls `done` again.
    """

    def __init__(self, table: MemberTable, later: Callable[[], None]) -> None:
        self._table = table
        self._later = later
        # What the change depends on: (epoch, next stages, registrations of the takers, draft head).
        self._change: object = None
        # By sequence id: how many leading tokens every taker has, or receives in this round.
        self._migrated: dict[int, int] = {}
        # Sequences that the givers have closed already, even if their results have not arrived here.
        self._over: set[int] = set()
        # Names of the takers that have not confirmed this round.
        self._lacking: set[str] = set()
        # The number of rounds of this change, and the number of the newest order of all changes.
        self._rounds = self._number = 0
        # The loop's time at which this round is given up.
        self._ends = 0.0
        # The epoch that began with migrated rows, with their counts by sequence id.
        self._kept: tuple[int, Mapping[int, int]] = 0, {}

    def done(self, epoch: Epoch, wanted: Stages, final: Callable[[], Mapping[int, int]]) -> bool:
        """Start or continue the migration to the stages `wanted`.

        Return whether the next epoch may begin now.

        final: returns, by sequence id, for how many leading tokens the KV on every stage is final.

        If the members changed since the last call, the migration starts anew. If rows cannot be migrated, or
        were not in time, the next epoch begins without them and computes them again.
        """
        members = self._table.registrations
        takers = [one for one in members if any(one.name == to.name for to in wanted)]
        change = epoch.number, wanted, takers, head_of(members)
        reason = why_not(members, epoch, wanted)
        if self._change != change or reason:
            self._change = change
            self._rounds = 0
            self._migrated = {}
            self._lacking.clear()
            self._over.clear()
        if reason:
            log.info("KV rows are not handed over", reason=reason)
            return True
        if self._lacking and asyncio.get_running_loop().time() < self._ends:
            return False
        if self._lacking:
            log.warning("KV rows were not handed over in time", lacking=sorted(self._lacking))
            self._migrated.clear()
            return True
        live = {one: rows for one, rows in final().items() if one not in self._over}
        return not self._go_on(epoch, wanted, _within(MAX_BYTES, members, live))

    def note(self, name: str, number: int, over: Sequence[int]) -> None:
        """Note that a taker has received all rows of the order of this number.

        over: sequences of the order that the givers had closed, so that they sent no rows of them.
        Confirmations of older orders are ignored.
        """
        if number == self._number:
            self._lacking.discard(name)
            self._over.update(over)
            for sequence in over:
                self._migrated.pop(sequence, None)

    def serve(self, epoch: int) -> None:
        """Note that this epoch began with the migrated rows, and that no change is under way any more."""
        if self._migrated:
            rows = sum(self._migrated.values())
            log.info("KV rows are handed over", epoch=epoch, sequences=len(self._migrated), rows=rows)
        self._kept = (epoch, self._migrated)
        self._change = None

    def kept(self, epoch: int) -> Mapping[int, int]:
        """Return, by sequence id of the previous epoch, how many leading tokens' KV this epoch's stages have.

        Return nothing for an epoch that did not begin with migrated rows.
        """
        return self._kept[1] if epoch == self._kept[0] else {}

    def _go_on(self, epoch: Epoch, wanted: Stages, final: Mapping[int, int]) -> bool:
        """Begin a further round and return True, unless few rows remain or MAX_ROUNDS have been made.

        final: by sequence id, how many leading tokens are final now, within MAX_BYTES.
        """
        asked = [
            RowsOf(sequence, self._migrated.get(sequence, 0), last)
            for sequence, last in final.items()
            if last > self._migrated.get(sequence, 0)
        ]
        if sum(one.last - one.first for one in asked) <= FEW_ROWS or self._rounds == MAX_ROUNDS:
            return False
        self._rounds += 1
        self._number += 1
        self._migrated |= {one.sequence: one.last for one in asked}
        self._lacking = {stage.name for stage in wanted}
        self._ends = asyncio.get_running_loop().time() + ROUND_SECONDS
        asyncio.get_running_loop().call_later(ROUND_SECONDS, self._later)
        features = head_of(self._table.registrations) is not None
        order = HandOver(epoch.number, epoch.stages, wanted, tuple(asked), self._number, features)
        self._table.send_all(
            dict.fromkeys(dict.fromkeys(stage.name for stage in (*wanted, *epoch.stages)), order)
        )
        return True


def head_of(members: Sequence[Registration]) -> Head | None:
    """Return the draft head for which the next epoch's last stage keeps features, or None without one."""
    return next((one.head for one in members if one.head), None)


def why_not(members: Sequence[Registration], epoch: Epoch, after: Stages) -> str | None:
    """Return in words why rows cannot be migrated to the stages `after`, or None if they can be."""
    names = {stage.name for stage in (*epoch.stages, *after)}
    stages = [one for one in members if one.name in names]
    head = head_of(members)
    if head and not (epoch.ring and epoch.ring.head == head):
        return "a draft head came later, and reads features of all that was written"
    if unable := [one.name for one in stages if not one.hands_over]:
        return f"not done by {', '.join(unable)}: states, parts of layers, or another version"
    alike = len({(one.dtype, one.number_bytes, one.quantization) for one in stages}) == 1
    return None if alike else "stages keep rows in different types"


def _within(most: int, members: Sequence[Registration], final: Mapping[int, int]) -> dict[int, int]:
    """Choose the longest sequences whose KV takes at most so many bytes together.

    final: by sequence id, the number of final tokens. Return the chosen part of it. A sequence that does not
    fit into the remaining bytes is left out, and shorter ones may still be chosen:
    # room for 1000 tokens, final {1: 700, 2: 500, 3: 200} -> {1: 700, 3: 200}
    """
    width = head.width if (head := head_of(members)) else 0
    workers = [one for one in members if one.kind == "worker"]
    row = max(one.row_bytes * one.model_layers + width * one.number_bytes for one in workers)
    chosen = dict[int, int]()
    room = most
    for sequence, rows in sorted(final.items(), key=lambda one: -one[1]):
        if rows * row <= room:
            chosen[sequence] = rows
            room -= rows * row
    return chosen
