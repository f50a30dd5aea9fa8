"""KV rows that stages of the next epoch get from those of this one, while it goes on, so that texts are not
read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import structlog
import torch
from torch import Tensor

from specsot.core.frames import Frame, Opening
from specsot.core.pages import PageTable
from specsot.errors import SpecsotError, WireError
from specsot.members import HandOver, KvRows, Progress, Range, RowsOf
from specsot.model.kv import KVPages
from specsot.tasks import start
from specsot.transport.links import Dialer, Link, close_in_background

log = structlog.get_logger()

MAX_BYTES = (
    512 << 20
)  # bytes of rows that wait for their epoch; twice as many as a master lets be handed over
JOB_ROWS = 4096  # rows of one layer that are gathered between two frames; not measured

Run = Callable[..., Awaitable[Any]]


class HandedRows:
    """What came, by sender, sequence and layer. epoch: of no earlier one."""

    def __init__(self, epoch: int = 0) -> None:
        self._rows: dict[tuple[str, int, int], list[Tensor]] = {}
        self._over: set[tuple[str, int]] = set()
        self._order = HandOver(0, (), (), ())
        self._epoch, self._bytes = epoch, 0

    def expect(self, order: HandOver) -> None:
        if order.epoch < self._epoch:  # of which only some sender spoke
            self._epoch = 0
        self._enter(order.epoch)
        self._order = order

    def add(self, giver: str, message: KvRows) -> None:
        """What is here already, or does not follow it, is left out; so is what is too much."""
        self._enter(message.epoch)
        if message.epoch < self._epoch:
            return
        if not isinstance(message.rows, Tensor):
            self._over.add((giver, message.sequence))
            return
        key, size = (giver, message.sequence, message.layer), message.rows.nbytes
        missing = sum(map(len, self._rows.get(key, ()))) - message.first
        if 0 <= missing < len(message.rows) and 0 < size <= MAX_BYTES - self._bytes:
            self._rows.setdefault(key, []).append(message.rows[missing:])
            self._bytes += message.rows[missing:].nbytes

    def complete(self, layers: Range) -> bool:
        """Whether all is here that the order names, of these layers."""
        return all(
            self._count(wanted.sequence, layer) >= wanted.last
            for wanted in self._order.rows
            for layer in range(layers.first, layers.last)
            if (self._order.giver_of(layer), wanted.sequence) not in self._over
        )

    def rows(self, opening: Opening, layer: int) -> Tensor:
        """What an opening says was kept of this layer: [tokens, numbers of a row]. Raises WireError."""
        assert opening.kept is not None
        sequence, last = opening.kept.sequence, opening.begun
        if self._count(sequence, layer) < last:
            raise WireError(f"rows of sequence {sequence} are to be here, of layer {layer}")
        held = torch.cat(self._rows[self._order.giver_of(layer), sequence, layer])
        return held[last - len(opening.kept.tokens) : last]

    def forget(self, opening: Opening) -> None:
        """Whoever writes goes on as this: nobody else needs what was kept for it."""
        if opening.kept and opening.decodes:
            for key in [key for key in tuple(self._rows) if key[1] == opening.kept.sequence]:
                self._bytes -= sum(rows.nbytes for rows in self._rows.pop(key))

    def _count(self, sequence: int, layer: int) -> int:
        return sum(map(len, self._rows.get((self._order.giver_of(layer), sequence, layer), ())))

    def _enter(self, epoch: int) -> None:
        if epoch > self._epoch:
            self._rows.clear()
            self._over.clear()
            self._epoch, self._bytes = epoch, 0


LayerRows = tuple[RowsOf, int]  # of one layer of the model


class StageRows:
    """Rows in a stage's pages: copies for whoever runs its layers next, and those that openings begin with.

    handed: where it finds the latter.
    """

    def __init__(self, table: PageTable, kv: KVPages, layers: Range) -> None:
        self._table, self._kv, self._layers = table, kv, layers
        self.handed = HandedRows()
        self._unfilled: dict[int, Opening] = {}  # by sequence; its pages come with its first rows

    @torch.inference_mode()
    def copies(self, asked: Sequence[LayerRows]) -> list[Tensor | None]:
        """[last - first, numbers of a row] of each, on the host; None where the sequence is closed."""
        found = list[Tensor | None]()
        for one, layer in asked:
            here = one.sequence in self._table
            slots = self._table.slots(one.sequence, one.first, one.last) if here else None
            found.append(self._kv.rows_at(layer - self._layers.first, slots) if slots else None)
        return found

    def fill(self, frame: Frame) -> None:
        """Put what was kept of sequences into their pages, before their first rows read it."""
        self._unfilled |= {one.sequence: one for one in frame.openings if one.kept}
        for segment in frame.segments if self._unfilled else ():
            if opening := self._unfilled.pop(segment.sequence, None):
                slots = self._table.slots(opening.sequence, opening.forked, opening.begun)
                for layer in range(self._layers.first, self._layers.last):
                    rows = self.handed.rows(opening, layer)
                    self._kv.put_rows_at(layer - self._layers.first, slots, rows)
                self.handed.forget(opening)


@runtime_checkable
class KeepsRows(Protocol):
    """A stage that can hand its rows over, and take some."""

    rows: StageRows


class RowHandover:
    """A worker's part: it sends rows of layers that others will run, and tells the master when it has
    those of its own. run: does what it is given on the thread that computes.
    """

    def __init__(self, name: str, dialer: Dialer, run: Run) -> None:
        self._name, self._dialer, self._run = name, dialer, run
        self.rows = self.ready = HandedRows()  # of the epoch that runs, and of the one before, which serve it
        self._waiting: tuple[int, Range, Link] | None = None  # epoch, layers, whom to tell
        self._giving: asyncio.Task[None] | None = None

    def begin(self, order: HandOver, stage: object, uplink: Link) -> None:
        """stage: of the running epoch; of another kind where this worker only takes."""
        self.stop()
        self.rows.expect(order)
        own = next((one.layers for one in order.takers if one.name == self._name), None)
        self._waiting = (order.epoch, own, uplink) if own else None
        self._giving = start(self._give(order, stage if isinstance(stage, KeepsRows) else None))

    def turn(self, epoch: int) -> None:
        """This one is configured, with what came in the one before."""
        self.stop()
        self.ready, self.rows = self.rows, HandedRows(epoch)

    def stop(self) -> None:
        if self._giving:
            self._giving.cancel()
        self._giving = self._waiting = None

    async def take(self, giver: str, message: KvRows) -> None:
        self.rows.add(giver, message)
        await self._tell()

    async def _tell(self) -> None:
        if self._waiting and self.rows.complete(self._waiting[1]):
            (epoch, _, uplink), self._waiting = self._waiting, None
            with suppress(SpecsotError):  # a lost master is heard of by itself
                await uplink.send(Progress(epoch, 1, 1, handed=True))

    async def _give(self, order: HandOver, stage: KeepsRows | None) -> None:
        """A taker that cannot be reached never says that it has all; the master does not wait for ever."""
        try:
            own = next((one.layers for one in order.givers if one.name == self._name), None)
            for taker in order.takers if own and stage else ():
                assert own
                assert stage
                first, last = max(own.first, taker.layers.first), min(own.last, taker.layers.last)
                if first < last and taker.name == self._name:
                    await self._send(order, stage, Range(first, last), lambda one: self.take(self._name, one))
                elif first < last:
                    link = await self._dialer.dial(taker.address, 0)  # its loss ends no epoch
                    try:
                        await self._send(order, stage, Range(first, last), link.send)
                    finally:
                        await close_in_background(link.close())
            await self._tell()
        except SpecsotError as error:
            log.warning("KV rows are not handed over", reason=str(error))

    async def _send(
        self, order: HandOver, stage: KeepsRows, layers: Range, send: Callable[[KvRows], Awaitable[None]]
    ) -> None:
        """Gathered a few at a time, between frames."""
        for part in _parts(order.rows, layers):
            found: Sequence[Tensor | None] = await self._run(stage.rows.copies, part)
            for (asked, layer), rows in zip(part, found):
                await send(KvRows(order.epoch, asked.sequence, layer, asked.first, rows))


def _parts(asked: Sequence[RowsOf], layers: Range) -> Iterator[list[LayerRows]]:
    """At most JOB_ROWS each, or one."""
    part, count = list[LayerRows](), 0
    for layer in range(layers.first, layers.last):
        for one in asked:
            if part and count + one.last - one.first > JOB_ROWS:
                yield part
                part, count = [], 0
            part.append((one, layer))
            count += one.last - one.first
    if part:
        yield part
