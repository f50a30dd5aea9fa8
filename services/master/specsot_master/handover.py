"""Hands KV rows and features over to the stages of the next epoch, while this one goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import structlog

from specsot.members import HandOver, Head, Registration, RowsOf
from specsot_master.core.ring.epoch import Epoch
from specsot_master.core.ring.placement import Stages
from specsot_master.members import MemberTable

log = structlog.get_logger()

# Seconds for one round, in which nothing is interrupted; 46 MB take 37 s at 10 Mbit/s.
ROUND_SECONDS = 60.0
# Rows that are rather read again than handed over in one more round, and the most rounds; not measured.
FEW_ROWS = 32
MAX_ROUNDS = 4
MAX_BYTES = 256 << 20  # bytes of rows, those of the longest texts first: a link's queue holds twice as many


class KvHandover:
    """One change of the ring at a time. Each round hands over what was written since the one before.

    later: called when it may be time to go on.
    """

    def __init__(self, table: MemberTable, later: Callable[[], None]) -> None:
        self._table = table
        self._later = later
        self._change: object = None  # from which epoch, to which stages, of which processes and which head
        self._handed: dict[int, int] = {}  # by sequence, its first rows, that every taker has or now gets
        self._over: set[int] = set()  # sequences that givers have closed, whether or not we know
        self._lacking: set[str] = set()  # takers
        self._rounds = self._number = 0  # of this change; of the newest order
        self._ends = 0.0
        self._kept: tuple[int, Mapping[int, int]] = 0, {}  # of which epoch

    def done(self, epoch: Epoch, wanted: Stages, final: Callable[[], Mapping[int, int]]) -> bool:
        """Whether the next epoch may begin.

        final: how many first rows of each sequence are computed, and stay as they are.
        """
        members = self._table.registrations
        takers = [one for one in members if any(one.name == to.name for to in wanted)]
        change = epoch.number, wanted, takers, head_of(members)
        reason = why_not(members, epoch, wanted)
        if self._change != change or reason:
            self._change = change
            self._rounds = 0
            self._handed = {}
            self._lacking.clear()
            self._over.clear()
        if reason:
            log.info("KV rows are not handed over", reason=reason)
            return True
        if self._lacking and asyncio.get_running_loop().time() < self._ends:
            return False
        if self._lacking:
            log.warning("KV rows were not handed over in time", lacking=sorted(self._lacking))
            self._handed.clear()
            return True
        live = {one: rows for one, rows in final().items() if one not in self._over}
        return not self._go_on(epoch, wanted, _within(MAX_BYTES, members, live))

    def note(self, name: str, number: int, over: Sequence[int]) -> None:
        """This taker has all that the order of this number names, but for what is over."""
        if number == self._number:
            self._lacking.discard(name)
            self._over.update(over)
            for sequence in over:
                self._handed.pop(sequence, None)

    def serve(self, epoch: int) -> None:
        """It began with what was handed over."""
        if self._handed:
            rows = sum(self._handed.values())
            log.info("KV rows are handed over", epoch=epoch, sequences=len(self._handed), rows=rows)
        self._kept = (epoch, self._handed)
        self._change = None

    def kept(self, epoch: int) -> Mapping[int, int]:
        """By sequence of an epoch before, how many first rows of it every stage of this one has."""
        return self._kept[1] if epoch == self._kept[0] else {}

    def _go_on(self, epoch: Epoch, wanted: Stages, final: Mapping[int, int]) -> bool:
        """Whether one more round has begun; not for a few rows."""
        asked = [
            RowsOf(sequence, self._handed.get(sequence, 0), last)
            for sequence, last in final.items()
            if last > self._handed.get(sequence, 0)
        ]
        if sum(one.last - one.first for one in asked) <= FEW_ROWS or self._rounds == MAX_ROUNDS:
            return False
        self._rounds += 1
        self._number += 1
        self._handed |= {one.sequence: one.last for one in asked}
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
    """What the next epoch will keep features for."""
    return next((one.head for one in members if one.head), None)


def why_not(members: Sequence[Registration], epoch: Epoch, after: Stages) -> str | None:
    """What keeps the stages of this epoch from handing rows over; None: nothing does."""
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
    """The longest of these that take no more bytes together; one that alone takes more is left out."""
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
