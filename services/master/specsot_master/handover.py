"""KV rows on their way to the stages of the next epoch, while this one goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import structlog

from specsot.members import HandOver, Registration, RowsOf
from specsot_master.core.epoch import Epoch
from specsot_master.core.placement import Stages
from specsot_master.members import MemberTable

log = structlog.get_logger()

# Seconds for one round, in which nothing is interrupted; 46 MB take 37 s at 10 Mbit/s.
ROUND_SECONDS = 60.0
# Rows that are rather read again than handed over in one more round, and the most rounds; not measured.
FEW_ROWS, MAX_ROUNDS = 32, 4
MAX_BYTES = 256 << 20  # bytes of rows, those of the longest texts first: a link's queue holds twice as many


class KvHandover:
    """One change of the ring at a time. Each round hands over what was written since the one before.

    later: called when it may be time to go on.
    """

    def __init__(self, table: MemberTable, later: Callable[[], None]) -> None:
        self._table, self._later = table, later
        self._change: object = None  # from which epoch, to which stages, of which processes
        self._handed: dict[int, int] = {}  # by sequence, its first rows, that every taker has or now gets
        self._lacking: set[str] = set()  # takers
        self._rounds = 0
        self._ends = 0.0
        self._kept: tuple[int, Mapping[int, int]] = 0, {}  # of which epoch

    def done(self, epoch: Epoch, wanted: Stages, final: Callable[[], Mapping[int, int]]) -> bool:
        """Whether the next epoch may begin.

        final: how many first rows of each sequence are computed, and stay as they are.
        """
        members = self._table.registrations
        change = epoch.number, wanted, [one for one in members if any(one.name == to.name for to in wanted)]
        reason = why_not(members, epoch.stages, wanted)
        if self._change != change or reason:
            self._change, self._rounds, self._handed = change, 0, {}
            self._lacking.clear()
        if reason:
            log.info("KV rows are not handed over", reason=reason)
            return True
        if self._lacking and asyncio.get_running_loop().time() < self._ends:
            return False
        if self._lacking:
            log.warning("KV rows were not handed over in time", lacking=sorted(self._lacking))
            self._handed.clear()
            return True
        return not self._go_on(epoch, wanted, _within(MAX_BYTES, members, final()))

    def note(self, name: str) -> None:
        """This taker has all of the round."""
        self._lacking.discard(name)

    def serve(self, epoch: int) -> None:
        """It began with what was handed over."""
        if self._handed:
            rows = sum(self._handed.values())
            log.info("KV rows are handed over", epoch=epoch, sequences=len(self._handed), rows=rows)
        self._kept, self._change = (epoch, self._handed), None

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
        self._handed |= {one.sequence: one.last for one in asked}
        self._lacking = {stage.name for stage in wanted}
        self._ends = asyncio.get_running_loop().time() + ROUND_SECONDS
        asyncio.get_running_loop().call_later(ROUND_SECONDS, self._later)
        order = HandOver(epoch.number, epoch.stages, wanted, tuple(asked))
        self._table.send_all(
            dict.fromkeys(dict.fromkeys(stage.name for stage in (*wanted, *epoch.stages)), order)
        )
        return True


def why_not(members: Sequence[Registration], before: Stages, after: Stages) -> str | None:
    """What keeps these stages from handing rows over; None: nothing does."""
    names = {stage.name for stage in (*before, *after)}
    stages = [one for one in members if one.name in names]
    if any(one.head for one in members):
        return "a draft head reads features"
    if unable := [one.name for one in stages if not one.hands_over]:
        return f"not done by {', '.join(unable)}: states, parts of layers, or another version"
    alike = len({(one.dtype, one.number_bytes, one.quantization) for one in stages}) == 1
    return None if alike else "stages keep rows in different types"


def _within(most: int, members: Sequence[Registration], final: Mapping[int, int]) -> dict[int, int]:
    """The longest of these that take no more bytes together; one that alone takes more is left out."""
    row = max(one.row_bytes * one.model_layers for one in members if one.kind == "worker")
    chosen, room = dict[int, int](), most
    for sequence, rows in sorted(final.items(), key=lambda one: -one[1]):
        if rows * row <= room:
            chosen[sequence] = rows
            room -= rows * row
    return chosen
