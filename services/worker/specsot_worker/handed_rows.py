"""KV rows that stages of the next epoch get from those of this one, while it goes on, so that texts are not
read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol, runtime_checkable

import structlog
import torch
from torch import Tensor

from specsot.core.frames import Frame, Opening
from specsot.core.pages import PageTable
from specsot.errors import SpecsotError, WireError
from specsot.members import HandOver, KvRows, Progress, Range, RowsOf, Stage
from specsot.tasks import start
from specsot.transport.links import Dialer, Link, close_in_background
from specsot_model.kv import KVPages

log = structlog.get_logger()

MAX_BYTES = (
    512 << 20
)  # bytes of rows that wait for their epoch; twice as many as a master lets be handed over
OVER_BYTES = 64  # as which the word counts that nothing comes of a sequence in one layer
JOB_ROWS = 4096  # rows of one layer that are gathered between two frames; not measured

Key = tuple[str, int, int]  # sender, sequence, layer


class HandedRows:
    """What came, by sender, sequence and layer. epoch: of no earlier one."""

    def __init__(self, epoch: int = 0) -> None:
        self._rows: dict[Key, list[Tensor]] = {}
        self._over: set[Key] = set()
        self._order = HandOver(0, (), (), ())
        self._epoch = epoch
        self._bytes = 0

    def expect(self, order: HandOver) -> None:
        if order.epoch < self._epoch:  # of which only some sender spoke
            self._epoch = 0
        self._enter(order.epoch)
        self._order = order

    def add(self, giver: str, message: KvRows) -> None:
        """What is here already, or does not follow it, is left out; so is what is too much."""
        self._enter(message.epoch)
        key = (giver, message.sequence, message.layer)
        room = MAX_BYTES - self._bytes
        if message.epoch < self._epoch or key in self._over:
            return
        if not isinstance(message.rows, Tensor):
            if room >= OVER_BYTES:
                self._over.add(key)
                self._bytes += OVER_BYTES
            return
        missing = sum(map(len, self._rows.get(key, ()))) - message.first
        if 0 <= missing < len(message.rows) and 0 < message.rows.nbytes <= room:
            self._rows.setdefault(key, []).append(message.rows[missing:])
            self._bytes += message.rows[missing:].nbytes

    def complete(self, layers: Range) -> bool:
        """Whether all is here that the order names, of these layers."""
        return all(
            sum(map(len, self._rows.get(key, ()))) >= wanted.last or key in self._over
            for wanted in self._order.rows
            for key in self._keys(wanted.sequence, layers)
        )

    def over(self, layers: Range) -> tuple[int, ...]:
        """Sequences that the order names and that are closed: one without features is not."""
        kv = Range(layers.first, min(layers.last, self._order.model_layers))
        named = (one.sequence for one in self._order.rows)
        return tuple(one for one in named if any(key in self._over for key in self._keys(one, kv)))

    def rows(self, opening: Opening, layer: int | None = None) -> Tensor | None:
        """What an opening says was kept of this layer, or of features: [tokens, numbers of a row]; None where
        it is not here. Whoever writes goes on as this opening, and nobody else needs what was kept for it.
        """
        assert opening.kept is not None
        layer = self._order.model_layers if layer is None else layer
        last = opening.begun
        (key,) = self._keys(opening.kept.sequence, Range(layer, layer + 1))
        held = (self._rows.pop if opening.decodes else self._rows.get)(key, [])
        whole = sum(map(len, held)) >= last
        return torch.cat(held)[last - len(opening.kept.tokens) : last] if whole else None

    def keep(self, layers: Range) -> None:
        """Nobody asks for others: they are of an order that another one came after."""
        for key in tuple(self._rows):
            if not layers.first <= key[2] < layers.last:
                del self._rows[key]

    def drop(self, sequence: int, features: bool = False) -> None:
        """It will not be opened again. features: those, which are read later than the rows of layers."""
        for key in tuple(self._rows):
            if key[1] == sequence and (key[2] == self._order.model_layers) == features:
                self._rows.pop(key, None)

    def _keys(self, sequence: int, layers: Range) -> list[Key]:
        numbers = range(layers.first, layers.last)
        return [(self._order.giver_of(layer), sequence, layer) for layer in numbers]

    def _enter(self, epoch: int) -> None:
        if epoch > self._epoch:
            self._rows.clear()
            self._over.clear()
            self._epoch = epoch
            self._bytes = 0


LayerRows = tuple[RowsOf, int]  # of one layer of the model


class StageRows:
    """Rows in a stage's pages: copies for whoever runs its layers next, and those that openings begin with.

    handed: where it finds the latter.
    """

    def __init__(self, table: PageTable, kv: KVPages, layers: Range) -> None:
        self._table = table
        self._kv = kv
        self._layers = layers
        self.handed = HandedRows()
        self._unfilled: dict[int, Opening] = {}  # by sequence; its pages come with its first rows
        self._over = set[int]()  # of an epoch before, and somebody is still to begin with their rows

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
        """Put what was kept into pages of sequences, before their first rows read it. Raises WireError."""
        self._unfilled |= {one.sequence: one for one in frame.openings if one.kept}
        for segment in frame.segments if self._unfilled else ():
            if opening := self._unfilled.pop(segment.sequence, None):
                slots = self._table.slots(opening.sequence, opening.forked, opening.begun)
                for layer in range(self._layers.first, self._layers.last):
                    rows = self.handed.rows(opening, layer)
                    if rows is None:
                        raise WireError(f"rows of layer {layer} are to be here for {opening.sequence}")
                    self._kv.put_rows_at(layer - self._layers.first, slots, rows)
        self._over.update(map(self._text_of, frame.closings))
        if self._over:
            wanted = {one.kept.sequence for one in self._unfilled.values() if one.kept}
            for sequence in self._over - wanted:
                self.handed.drop(sequence)
            self._over &= wanted

    def _text_of(self, closed: int) -> int:
        """Itself, of an epoch before, or that one which would have gone on as this one, and has not begun."""
        waited = self._unfilled.pop(closed, None)
        return waited.kept.sequence if waited and waited.kept and waited.decodes else closed


@runtime_checkable
class KeepsRows(Protocol):
    """A stage that can hand its rows over, and take some."""

    rows: StageRows


# Rows of these layers, or, by the number behind the last layer, features: see `StageRows.copies`.
Copies = Callable[[Sequence[LayerRows]], Awaitable[Sequence[Tensor | None]]]


class RowHandover:
    """A worker's part: it sends rows of layers that others will run, and tells the master when it has
    those of its own.
    """

    def __init__(self, name: str, dialer: Dialer) -> None:
        self._name = name
        self._dialer = dialer
        self.rows = self.ready = HandedRows()  # of the epoch that runs, and of the one before, which serve it
        self._waiting: tuple[HandOver, Range, Link] | None = None  # for what, and whom to tell
        self._own: Range | None = None  # layers that the newest order has here
        self._giving: asyncio.Task[None] | None = None

    def begin(self, order: HandOver, copies: Copies | None, uplink: Link) -> None:
        """copies: of what the running epoch has here; None where this worker only takes."""
        self.stop()
        self.rows.expect(order)
        own = next((order.held_by(one) for one in order.takers if one.name == self._name), None)
        self._waiting = (order, own, uplink) if own else None
        self._own = own
        self._giving = start(self._give(order, copies))

    def turn(self, epoch: int) -> None:
        """This one is configured, with what came in the one before."""
        self.stop()
        self.ready = self.rows
        self.rows = HandedRows(epoch)
        if self._own:
            self.ready.keep(self._own)
        self._own = None

    def stop(self) -> None:
        if self._giving:
            self._giving.cancel()
        self._giving = self._waiting = None

    async def take(self, giver: str, message: KvRows) -> None:
        self.rows.add(giver, message)
        await self._tell()

    async def _tell(self) -> None:
        if self._waiting and self.rows.complete(self._waiting[1]):
            (order, layers, uplink) = self._waiting
            self._waiting = None
            told = Progress(order.epoch, 1, 1, handed=order.number, over=self.rows.over(layers))
            with suppress(SpecsotError):  # a lost master is heard of by itself
                await uplink.send(told)

    async def _give(self, order: HandOver, copies: Copies | None) -> None:
        own = next((order.held_by(one) for one in order.givers if one.name == self._name), None)
        for taker in order.takers if own and copies else ():
            assert own
            assert copies
            wanted = order.held_by(taker)
            layers = Range(max(own.first, wanted.first), min(own.last, wanted.last))
            if layers.first < layers.last:
                await self._give_to(taker, order, copies, layers)
        await self._tell()

    async def _give_to(self, taker: Stage, order: HandOver, copies: Copies, layers: Range) -> None:
        """One that cannot be reached never says that it has all; the master does not wait for ever."""
        if taker.name == self._name:
            await _send(order, copies, layers, lambda one: self.take(self._name, one))
            return
        try:
            link = await self._dialer.dial(taker.address, 0)  # its loss ends no epoch
            try:
                await _send(order, copies, layers, link.send)
            finally:
                await close_in_background(link.close())
        except SpecsotError as error:
            log.warning("KV rows are not handed over", to=taker.name, reason=str(error))


async def _send(
    order: HandOver, copies: Copies, layers: Range, send: Callable[[KvRows], Awaitable[None]]
) -> None:
    """Gathered a few at a time, between frames."""
    for part in _parts(order.rows, layers, order.model_layers):
        for (asked, layer), rows in zip(part, await copies(part)):
            await send(KvRows(order.epoch, asked.sequence, layer, asked.first, rows))


def _parts(asked: Sequence[RowsOf], layers: Range, model_layers: int) -> Iterator[list[LayerRows]]:
    """At most JOB_ROWS each, or one; features by themselves."""
    part = list[LayerRows]()
    count = 0
    for layer in range(layers.first, layers.last):
        for one in asked:
            if part and (count + one.last - one.first > JOB_ROWS or part[-1][1] < layer == model_layers):
                yield part
                part = []
                count = 0
            part.append((one, layer))
            count += one.last - one.first
    if part:
        yield part
