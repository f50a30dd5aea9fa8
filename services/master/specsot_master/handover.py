"""Migrates KV rows and features to the stages of the next epoch, while the present epoch continues or after
it broke.

A *row* is the KV of one token. Givers are the stages of the present epoch, takers those of the next one. If a
stage was lost, the other stages of the broken epoch are the givers, and the layers that were lost compute
their KV from the hidden states that the stage before them has logged; `HandOver` shows who keeps what.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from specsot.members import HandOver, Head, HopDtype, Registration, RowsOf, Stage
from specsot_master.core.ring.epoch import Epoch
from specsot_master.core.ring.placement import Stages
from specsot_master.kv_copies import KvCopies, givers_of_copies
from specsot_master.members import Member, MemberTable

log = structlog.get_logger()

# Seconds after which a round is given up. Requests continue meanwhile. 46 MB take 37 s at 10 Mbit/s.
ROUND_SECONDS = 60.0
# Seconds after which the stages that are left of a broken ring are waited for no longer, and everything is
# computed again. Requests wait meanwhile. Untuned.
REPAIR_SECONDS = 5.0
# Tokens, over all sequences. So few are computed again in the next epoch rather than migrated in a further
# round. Untuned.
MAX_RECOMPUTED_ROWS = 32
# Rounds of one change. Untuned.
MAX_ROUNDS = 4
# Bytes of KV that are migrated, the longest sequences first. A link's send queue holds twice as many.
MAX_MIGRATED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class BrokenRing:
    """What may be left of a ring that broke.

    number: the epoch's number.
    stages: all its stages, in ring order.
    members: the members of these stages that had not been lost when it broke, by name.
    head: the draft head for which its last stage keeps features, or None.
    rows: by sequence id, how many of its first tokens had final KV on every stage.
    copied: by sequence id, how many of its first tokens had their KV copied to another stage, in all layers.
    """

    number: int
    stages: Stages
    members: Mapping[str, Member]
    head: Head | None
    rows: Mapping[int, int]
    copied: Mapping[int, int]


class KvHandover:
    """Migrates KV to the stages of the next epoch, for one change of the ring at a time: in rounds while the
    present epoch runs, or in a single one after it broke.

    Each round migrates the tokens that have become final since the round before:
        # final tokens of sequence 7 at the three rounds: 900, 960, 970
        # -> round 1 sends rows 0..899, round 2 rows 900..959; the last 10 are fewer than MAX_RECOMPUTED_ROWS:
        done
    """

    def __init__(
        self, table: MemberTable, on_timeout: Callable[[], None], hop_dtype: HopDtype = "auto"
    ) -> None:
        """Create a migration that has not started.

        table: the members and their links.
        on_timeout: called without arguments when a round's time has run out, so that the fleet calls
            `continue_migration` or `continue_repair` again.
        hop_dtype: in which form hidden states travel between stages.
        """
        self._table = table
        self._hop_dtype = hop_dtype
        # Keeps copies while a ring runs.
        self._copies = KvCopies(table, self._next_number)
        # The ring that broke, until the next epoch begins or it turns out that nothing of it can be used.
        self._broken: BrokenRing | None = None
        # The newest order, if it says what was lost of a broken ring.
        self._repair: HandOver | None = None
        self._later = on_timeout
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
        # The epoch that began with migrated rows, with their counts by sequence id, and whether lost layers
        # must compute their rows again.
        self._kept: tuple[int, Mapping[int, int], bool] = 0, {}, False

    def continue_migration(
        self, epoch: Epoch, next_stages: Stages, final_rows: Callable[[], Mapping[int, int]]
    ) -> bool:
        """Start or continue the migration to the next stages. Return True if the next epoch may begin now;
        False if rows are still being migrated. It is to be called again after every confirmation and when a
        round's time is over; a round that took longer than ROUND_SECONDS discards all rows.

        If the members have changed since the last call, the migration starts anew. If rows cannot be
        migrated, or were not in time, the result is True, and the next epoch computes them again.

        epoch: the running epoch, whose stages give their rows.
        next_stages: the stages of the next epoch, which take the rows.
        final_rows: returns, by sequence id, how many of its first tokens have final KV on every stage.
        """
        members = self._table.registrations
        takers = [one for one in members if any(one.name == to.name for to in next_stages)]
        change = epoch.number, next_stages, takers, head_of(members)
        reason = handover_obstacle(members, epoch, next_stages)
        if self._change != change or reason:
            self._change = change
            self._rounds = 0
            self._migrated = {}
            self._lacking.clear()
            self._over.clear()
        if reason:
            log.info("KV rows not migrated", reason=reason)
            return True
        if self._lacking and asyncio.get_running_loop().time() < self._ends:
            return False
        if self._lacking:
            log.warning("KV rows not migrated in time", lacking=sorted(self._lacking))
            self._migrated.clear()
            return True
        live = {one: rows for one, rows in final_rows().items() if one not in self._over}
        return not self._begin_round(epoch, next_stages, _within(MAX_MIGRATED_BYTES, members, live))

    def _next_number(self) -> int:
        """Return a number for a new order, one more than the last. Confirmations of older orders of a
        migration or repair are ignored from now on.
        """
        self._number += 1
        return self._number

    def continue_copies(self, epoch: Epoch, final_rows: Callable[[], Mapping[int, int]]) -> None:
        """Keep copies of every stage's KV at another stage up to date. To be called now and then while a ring
        runs and no change of it is under way. Nothing happens with a single stage, or if the stages cannot
        exchange KV.

        epoch: the running epoch.
        final_rows: returns, by sequence id, how many of its first tokens have final KV on every stage.
        """
        members = self._table.registrations
        if len(epoch.stages) > 1 and epoch.ring and kv_obstacle(members, epoch.stages) is None:
            rows = _within(MAX_MIGRATED_BYTES, members, final_rows())
            self._copies.advance(epoch.number, epoch.stages, rows, epoch.ring.head is not None)

    def remember_broken(self, epoch: Epoch, final_rows: Callable[[], Mapping[int, int]]) -> None:
        """Remember a ring that has broken, so that the next epoch may begin with its KV (`continue_repair`).
        A ring that was not complete has none.

        epoch: the epoch, whose end has not been noted yet.
        final_rows: returns, by sequence id, how many of its first tokens have final KV on every stage.
        """
        self._change = None
        self._repair = None
        self._broken = None
        found = [(stage.name, self._table.get(stage.name)) for stage in epoch.stages]
        members = {name: member for name, member in found if member}
        number, kept, _ = self._kept
        if not epoch.ring and number == epoch.number and kept:
            self._repair_in_full("the ring broke again before it was complete")
        if epoch.ring and members:
            head = epoch.ring.head
            copied = self._copies.rows_of(epoch.number)
            self._broken = BrokenRing(epoch.number, epoch.stages, members, head, final_rows(), copied)

    def continue_repair(self, next_stages: Stages) -> bool:
        """Start or continue to keep what is left of a broken ring for the next one. Return True if the next
        epoch may begin now; False if rows are still on their way. It is to be called again after every
        confirmation and when the time is over.

        If the members change meanwhile, it starts anew. If nothing can be kept, or rows were not in time, the
        result is True, and the next epoch computes everything again; the log says why.

        next_stages: the stages of the next epoch, which take the rows.
        """
        broken = self._broken
        if broken is None or not broken.rows:
            self._migrated = {}
            return True
        members = self._table.registrations
        # A process that joined under the name of a lost one has nothing to give.
        givers = tuple(
            one
            for one in broken.stages
            if one.name in self._table and self._table.get(one.name) is broken.members.get(one.name)
        )
        change = broken.number, givers, next_stages, members
        if self._change != change:
            self._change = change
            order = HandOver(
                broken.number, givers, next_stages, (), features=head_of(members) is not None, hidden=True
            )
            order, rows = use_copies(order, broken)
            if reason := repair_obstacle(members, broken, order, self._hop_dtype):
                return self._repair_in_full(reason)
            self._send(order, _within(MAX_MIGRATED_BYTES, members, rows))
            return False
        if self._lacking and asyncio.get_running_loop().time() < self._ends:
            return False
        if self._lacking:
            return self._repair_in_full(f"not in time: {', '.join(sorted(self._lacking))}")
        return True

    def _repair_in_full(self, reason: str) -> bool:
        """Give up what is left of a broken ring, log why, and return True: the next epoch may begin.

        reason: why nothing of it can be used, in words.
        """
        log.warning("repair computes every layer again", reason=reason)
        self._broken = None
        self._repair = None
        self._migrated = {}
        return True

    def _send(self, order: HandOver, rows: Mapping[int, int]) -> None:
        """Order the stages that are left of a broken ring to keep rows for the next one.

        order: the order without its rows.
        rows: by sequence id, how many of its first tokens are to be kept.
        """
        order = replace(order, number=self._next_number())
        self._migrated = dict(rows)
        self._over.clear()
        self._repair = replace(order, rows=tuple(RowsOf(one, 0, last) for one, last in rows.items()))
        self._lacking = {stage.name for stage in order.takers}
        self._ends = asyncio.get_running_loop().time() + REPAIR_SECONDS
        asyncio.get_running_loop().call_later(REPAIR_SECONDS, self._later)
        names = dict.fromkeys(stage.name for stage in (*order.takers, *order.givers))
        self._table.send_all(dict.fromkeys(names, self._repair))

    def record_confirmation(self, name: str, number: int, closed_sequences: Sequence[int]) -> None:
        """Note that a taker has received all rows of an order. Confirmations of older orders are ignored. The
        rows of closed sequences are not counted as migrated, and no more of them are sent.

        name: the taker's name.
        number: the number of the order, as `HandOver` carries it.
        closed_sequences: ids of sequences in the order that the givers had closed already, so that they sent
            no rows of them.
        """
        if self._copies.record_confirmation(name, number, closed_sequences):
            return
        if number == self._number:
            self._lacking.discard(name)
            self._over.update(closed_sequences)
            for sequence in closed_sequences:
                self._migrated.pop(sequence, None)

    def finish_migration(self, epoch: int) -> None:
        """Note that an epoch has started with the migrated rows, and that no change is under way any more.
        `migrated_rows` then returns its rows; without migrated rows it is empty.

        epoch: the number of the epoch that has started.
        """
        lost = self._repair.lost if self._repair else None
        if self._migrated:
            rows = sum(self._migrated.values())
            if self._repair:
                log.info(
                    "KV rows kept after a loss",
                    epoch=epoch,
                    sequences=len(self._migrated),
                    rows=rows,
                    replayed_layers=str(lost) if lost else "none",
                )
            else:
                log.info("KV rows migrated", epoch=epoch, sequences=len(self._migrated), rows=rows)
        self._kept = (epoch, self._migrated, lost is not None)
        self._change = None
        self._broken = None
        self._repair = None

    def replays(self, epoch: int) -> bool:
        """Return True if the rows of this epoch (`migrated_rows`) lack layers that must compute them again.

        epoch: the number of the epoch.
        """
        return self._kept[2] and epoch == self._kept[0]

    def migrated_rows(self, epoch: int) -> Mapping[int, int]:
        """Return, by sequence id of the previous epoch, how many of its first tokens have KV on this epoch's
        stages. Return an empty mapping for an epoch that did not begin with migrated rows.

        epoch: the number of the epoch.
        """
        return self._kept[1] if epoch == self._kept[0] else {}

    def _begin_round(self, epoch: Epoch, next_stages: Stages, final_rows: Mapping[int, int]) -> bool:
        """Begin a further round and return True; or return False if at most MAX_RECOMPUTED_ROWS rows remain,
        or MAX_ROUNDS have been made. Every giver and taker is sent the order with the first and last row of
        each sequence; if it is not confirmed in ROUND_SECONDS, `on_timeout` is called.

        epoch: the running epoch, whose stages give their rows.
        next_stages: the stages of the next epoch, which take the rows.
        final_rows: by sequence id, how many of its first tokens have final KV now; the sequences fit into
            MAX_MIGRATED_BYTES.
        """
        asked = [
            RowsOf(sequence, self._migrated.get(sequence, 0), last)
            for sequence, last in final_rows.items()
            if last > self._migrated.get(sequence, 0)
        ]
        if sum(one.last - one.first for one in asked) <= MAX_RECOMPUTED_ROWS or self._rounds == MAX_ROUNDS:
            return False
        self._rounds += 1
        number = self._next_number()
        self._migrated |= {one.sequence: one.last for one in asked}
        self._lacking = {stage.name for stage in next_stages}
        self._ends = asyncio.get_running_loop().time() + ROUND_SECONDS
        asyncio.get_running_loop().call_later(ROUND_SECONDS, self._later)
        members = self._table.registrations
        features = head_of(members) is not None
        workers = [one for one in members if one.kind == "worker"]
        logs = all(one.hidden_bytes for one in workers)
        order = HandOver(epoch.number, epoch.stages, next_stages, tuple(asked), number, features, logs)
        self._table.send_all(
            dict.fromkeys(dict.fromkeys(stage.name for stage in (*next_stages, *epoch.stages)), order)
        )
        return True


def use_copies(order: HandOver, broken: BrokenRing) -> tuple[HandOver, Mapping[int, int]]:
    """Return the order after a loss, and by sequence id how many of its first tokens are kept.

    With copies of the lost stages, the tokens that were not copied are computed in all layers; without them,
    all tokens are computed in the lost layers, from logged hidden states. The way that computes less is
    chosen. With copies, the workers that have them are added as givers, and sequences without copies are left
    out. Otherwise, or if copies are missing or nothing was lost, the order is returned as it is.

    order: the order without its rows. Its givers are the stages that are left.
    broken: the ring that broke.

        # 28 layers, 10:19 lost, a sequence of 400 final tokens, 370 of them copied:
        # 30 tokens in 28 layers are less than 400 tokens in 9 layers -> 370 tokens, with copies
        # 200 of them copied: 200 tokens in 28 layers are more -> 400 tokens, without copies
    """
    lost = order.lost
    copies = givers_of_copies(broken.stages, order.givers)
    rows = {one: min(last, broken.copied.get(one, 0)) for one, last in broken.rows.items()}
    rows = {one: last for one, last in rows.items() if last}
    if lost is None or copies is None or not rows:
        return order, broken.rows
    final = sum(broken.rows.values())
    if (final - sum(rows.values())) * order.model_layers >= final * len(lost):
        return order, broken.rows
    return replace(order, givers=(*order.givers, *copies)), rows


def head_of(members: Sequence[Registration]) -> Head | None:
    """Return the draft head for which the next epoch's last stage keeps features; None if no drafter with a
    head has joined.

    members: the registrations of all members.
    """
    return next((one.head for one in members if one.head), None)


def handover_obstacle(members: Sequence[Registration], epoch: Epoch, next_stages: Stages) -> str | None:
    """Return in words why rows cannot be migrated to these stages, or None if they can be. The first obstacle
    that is found is returned.

    The obstacles are a draft head that the running epoch does not know, stages that cannot hand over KV, and
    stages that store KV in different data types.

    members: the registrations of all members.
    epoch: the running epoch, whose stages would give their rows.
    next_stages: the stages of the next epoch.
    """
    head = head_of(members)
    if head and not (epoch.ring and epoch.ring.head == head):
        return "a draft head joined after the ring was formed, and needs the features of all tokens"
    return kv_obstacle(members, (*epoch.stages, *next_stages))


def repair_obstacle(
    members: Sequence[Registration], broken: BrokenRing, order: HandOver, hop_dtype: HopDtype
) -> str | None:
    """Return in words why the next epoch cannot begin with what is left of a broken ring, or None if it can.
    The first obstacle that is found is returned.

    members: the registrations of all members.
    broken: the ring that broke.
    order: the order, without its rows, that the stages of both rings would receive.
    hop_dtype: in which form hidden states travel between stages.
    """
    lost = order.lost
    if not order.givers:
        return "no stage is left"
    head = head_of(members)
    if head and head != broken.head:
        return "the draft head has changed, and needs the features of all tokens"
    if lost and any(lost.first <= one.layers.first < lost.last for one in order.givers):
        return "several stages were lost, with another one between them"
    stages = (*order.givers, *order.takers)
    if lost and lost.first and hop_dtype != "auto":
        return "hidden states travel in 8 bits, and are logged in full"
    logs = {one.name for one in members if one.hidden_bytes}
    if unable := sorted({one.name for one in stages} - logs):
        return f"hidden states are not logged by {', '.join(unable)}"
    return kv_obstacle(members, stages)


def kv_obstacle(members: Sequence[Registration], either_stages: Sequence[Stage]) -> str | None:
    """Return in words why these stages cannot exchange KV rows, or None if they can.

    members: the registrations of all members.
    either_stages: the stages that give rows and those that take them.
    """
    names = {stage.name for stage in either_stages}
    stages = [one for one in members if one.name in names]
    if unable := [one.name for one in stages if not one.hands_over]:
        return f"not supported by {', '.join(unable)}: recurrent states, parts of layers, or another version"
    alike = len({(one.dtype, one.number_bytes, one.quantization) for one in stages}) == 1
    return None if alike else "stages store KV in different data types"


def _within(max_bytes: int, members: Sequence[Registration], final_rows: Mapping[int, int]) -> dict[int, int]:
    """Return the longest sequences whose KV takes at most `max_bytes` bytes together, with their numbers of
    rows. A sequence that does not fit into the remaining bytes is left out, and shorter ones may still be
    chosen. The result is empty if no sequence fits.

        # room for 1000 tokens, final rows {1: 700, 2: 500, 3: 200} -> {1: 700, 3: 200}

    max_bytes: bytes of KV, of the last stage's features and of logged hidden states, over all stages.
    members: the registrations of all members, of which at least one is a worker.
    final_rows: by sequence id, how many of its first tokens have final KV on every stage.
    """
    width = head.width if (head := head_of(members)) else 0
    workers = [one for one in members if one.kind == "worker"]
    logged = len(workers) - 1
    row = max(
        one.row_bytes * one.model_layers + width * one.number_bytes + one.hidden_bytes * logged
        for one in workers
    )
    chosen = dict[int, int]()
    room = max_bytes
    for sequence, rows in sorted(final_rows.items(), key=lambda one: -one[1]):
        if rows * row <= room:
            chosen[sequence] = rows
            room -= rows * row
    return chosen
