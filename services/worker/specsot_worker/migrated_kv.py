"""Migrates KV to the stages of the next epoch while this epoch runs, so that prompts are not computed again.

The code says *handed* for migrated, and *rows* for the KV of token positions: one row is the KV of one
position in one layer.
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

# Bytes. Received KV that waits for its epoch takes at most this much: twice what a master lets be migrated.
MAX_BYTES = 512 << 20
# Bytes. What a message counts for that says that a sequence has no KV in one layer. Untuned.
OVER_BYTES = 64
# Positions. KV of at most this many positions, counted per layer, is gathered between two frames. Untuned.
JOB_ROWS = 4096

# Sender, sequence, layer. Features count as a layer after the last one.
Key = tuple[str, int, int]


class MigratedKV:
    """KV that has been received, by sender, sequence and layer."""

    def __init__(self, epoch: int = 0) -> None:
        """Start empty. KV of epochs before `epoch` is refused."""
        self._rows: dict[Key, list[Tensor]] = {}
        self._over: set[Key] = set()
        self._order = HandOver(0, (), (), ())
        self._epoch = epoch
        self._bytes = 0

    def expect(self, order: HandOver) -> None:
        """Set the master's order, which names the sequences to migrate, the senders and the receivers."""
        # The later epoch was named by a sender only, so the master's order wins.
        if order.epoch < self._epoch:
            self._epoch = 0
        self._enter(order.epoch)
        self._order = order

    def add(self, giver: str, message: KvRows) -> None:
        """Store KV from one sender. What is present already is left out; so is what does not continue the
        present KV, and what exceeds MAX_BYTES.

        For example:

            # present: positions 0..9; message with first 8 and 4 positions -> positions 10 and 11 are added
            # present: positions 0..9; message with first 12 -> ignored, because 10 and 11 are missing
        """
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
        """Return whether all KV of these layers is present that the order names, or was reported as not
        existing.
        """
        return all(
            sum(map(len, self._rows.get(key, ()))) >= wanted.last or key in self._over
            for wanted in self._order.rows
            for key in self._keys(wanted.sequence, layers)
        )

    def over(self, layers: Range) -> tuple[int, ...]:
        """Return the sequences of the order that the senders have closed. A sequence that lacks only features
        does not count.
        """
        kv = Range(layers.first, min(layers.last, self._order.model_layers))
        named = (one.sequence for one in self._order.rows)
        return tuple(one for one in named if any(key in self._over for key in self._keys(one, kv)))

    def rows(self, opening: Opening, layer: int | None = None) -> Tensor | None:
        """Return the KV with which an opening begins in one layer: [num_tokens, numbers of a position]. None
        if it is not present.

        layer: None: the features.

        A decoding sequence is the only one that needs its KV, so the KV is removed. That of a prefix is kept.

            # opening: fork of 6 tokens, 4 reused ones -> positions 6..9 of the received KV
        """
        assert opening.reused is not None
        layer = self._order.model_layers if layer is None else layer
        last = opening.begun
        (key,) = self._keys(opening.reused.sequence, Range(layer, layer + 1))
        held = (self._rows.pop if opening.decodes else self._rows.get)(key, [])
        whole = sum(map(len, held)) >= last
        return torch.cat(held)[last - len(opening.reused.tokens) : last] if whole else None

    def keep(self, layers: Range) -> None:
        """Drop the KV of all other layers: it belongs to an order that was replaced by a later one."""
        for key in tuple(self._rows):
            if not layers.first <= key[2] < layers.last:
                del self._rows[key]

    def drop(self, sequence: int, features: bool = False) -> None:
        """Drop the KV of a sequence that will not be opened again.

        features: Drop its features instead, which are read later than the KV.
        """
        for key in tuple(self._rows):
            if key[1] == sequence and (key[2] == self._order.model_layers) == features:
                self._rows.pop(key, None)

    def _keys(self, sequence: int, layers: Range) -> list[Key]:
        """Return the keys under which the KV of these layers is stored."""
        numbers = range(layers.first, layers.last)
        return [(self._order.giver_of(layer), sequence, layer) for layer in numbers]

    def _enter(self, epoch: int) -> None:
        """Discard everything received if this epoch is later than the present one."""
        if epoch > self._epoch:
            self._rows.clear()
            self._over.clear()
            self._epoch = epoch
            self._bytes = 0


# Positions of a sequence, and a layer of the model.
LayerRows = tuple[RowsOf, int]


class StageRows:
    """Migrates the KV in a stage's pages: copies it for the layers' next owners, and fills the pages of
    openings that reuse KV.

    handed: The KV that was received.
    """

    def __init__(self, table: PageTable, kv: KVPages, layers: Range) -> None:
        """Start without openings to fill."""
        self._table = table
        self._kv = kv
        self._layers = layers
        self.migrated = MigratedKV()
        # Openings that reuse KV, by sequence, until their first own tokens arrive: their pages are reserved
        # only then.
        self._unfilled: dict[int, Opening] = {}
        # Closed sequences of the previous epoch whose KV an opening is still to reuse.
        self._over = set[int]()

    @torch.inference_mode()
    def copies(self, asked: Sequence[LayerRows]) -> list[Tensor | None]:
        """Return copies of KV on the host, each [last - first, numbers of a position]. None if the sequence
        is closed.
        """
        found = list[Tensor | None]()
        for one, layer in asked:
            here = one.sequence in self._table
            slots = self._table.slots(one.sequence, one.first, one.last) if here else None
            found.append(self._kv.rows_at(layer - self._layers.first, slots) if slots else None)
        return found

    def fill(self, frame: Frame) -> None:
        """Write reused KV to the pages of the sequences that have their first own tokens in this frame,
        before these tokens attend to it. Also drop received KV that no opening will need.

        Raises WireError if the KV is not present.
        """
        self._unfilled |= {one.sequence: one for one in frame.openings if one.reused}
        for segment in frame.segments if self._unfilled else ():
            if opening := self._unfilled.pop(segment.sequence, None):
                slots = self._table.slots(opening.sequence, opening.forked, opening.begun)
                for layer in range(self._layers.first, self._layers.last):
                    rows = self.migrated.rows(opening, layer)
                    if rows is None:
                        raise WireError(f"rows of layer {layer} are to be here for {opening.sequence}")
                    self._kv.put_rows_at(layer - self._layers.first, slots, rows)
        self._over.update(map(self._text_of, frame.closings))
        if self._over:
            wanted = {one.reused.sequence for one in self._unfilled.values() if one.reused}
            for sequence in self._over - wanted:
                self.migrated.drop(sequence)
            self._over &= wanted

    def _text_of(self, closed: int) -> int:
        """Return the sequence of the previous epoch whose KV is no longer needed when `closed` closes.

        This is the sequence whose KV `closed` would have reused, if `closed` had not started. Otherwise it is
        `closed` itself.
        """
        waited = self._unfilled.pop(closed, None)
        return waited.reused.sequence if waited and waited.reused and waited.decodes else closed


@runtime_checkable
class KeepsRows(Protocol):
    """A stage that can migrate its KV and reuse received KV."""

    rows: StageRows


# Copies KV of one or more layers. The layer number after the last one asks for features. See
# `StageRows.copies`.
Copies = Callable[[Sequence[LayerRows]], Awaitable[Sequence[Tensor | None]]]


class RowHandover:
    """A worker's part in a migration: it sends KV of layers that other workers will run, and tells the master
    when it has received the KV of its own layers.
    """

    def __init__(self, name: str, dialer: Dialer) -> None:
        """Start without an order."""
        self._name = name
        self._dialer = dialer
        # `rows` receives KV during the running epoch; `ready` was received during the previous one and serves
        # the running epoch.
        self.rows = self.ready = MigratedKV()
        # The order, this worker's layers, and the link to the master, until all KV has been received.
        self._waiting: tuple[HandOver, Range, Link] | None = None
        # Layers of this worker in the newest order.
        self._own: Range | None = None
        self._giving: asyncio.Task[None] | None = None

    def begin(self, order: HandOver, copies: Copies | None, uplink: Link) -> None:
        """Start migrating. An order replaces the previous one.

        copies: Copies KV of the running epoch. None if this worker only receives.
        """
        self.stop()
        self.rows.expect(order)
        own = next((order.held_by(one) for one in order.takers if one.name == self._name), None)
        self._waiting = (order, own, uplink) if own else None
        self._own = own
        self._giving = start(self._give(order, copies))

    def turn(self, epoch: int) -> None:
        """Begin epoch `epoch` with the KV that was received during the previous epoch."""
        self.stop()
        self.ready = self.rows
        self.rows = MigratedKV(epoch)
        if self._own:
            self.ready.keep(self._own)
        self._own = None

    def stop(self) -> None:
        """Stop sending, and stop waiting for KV."""
        if self._giving:
            self._giving.cancel()
        self._giving = self._waiting = None

    async def take(self, giver: str, message: KvRows) -> None:
        """Store received KV, and tell the master if it was the last that is needed."""
        self.rows.add(giver, message)
        await self._tell()

    async def _tell(self) -> None:
        """Tell the master, once, that all KV of this worker's layers has been received."""
        if self._waiting and self.rows.complete(self._waiting[1]):
            (order, layers, uplink) = self._waiting
            self._waiting = None
            told = Progress(order.epoch, 1, 1, migrated=order.number, over=self.rows.over(layers))
            # The loss of the master is detected elsewhere.
            with suppress(SpecsotError):
                await uplink.send(told)

    async def _give(self, order: HandOver, copies: Copies | None) -> None:
        """Send every receiver the KV of the layers that it shares with this worker."""
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
        """Send KV to one receiver. If it cannot be reached, log a warning: it never reports completion, and
        the master's wait has a limit.
        """
        if taker.name == self._name:
            await _send(order, copies, layers, lambda one: self.take(self._name, one))
            return
        try:
            # Epoch 0: the loss of this link ends no epoch.
            link = await self._dialer.dial(taker.address, 0)
            try:
                await _send(order, copies, layers, link.send)
            finally:
                await close_in_background(link.close())
        except SpecsotError as error:
            log.warning("KV rows are not handed over", to=taker.name, reason=str(error))


async def _send(
    order: HandOver, copies: Copies, layers: Range, send: Callable[[KvRows], Awaitable[None]]
) -> None:
    """Gather and send KV, a few positions at a time, between frames."""
    for part in _parts(order.rows, layers, order.model_layers):
        for (asked, layer), rows in zip(part, await copies(part)):
            await send(KvRows(order.epoch, asked.sequence, layer, asked.first, rows))


def _parts(asked: Sequence[RowsOf], layers: Range, model_layers: int) -> Iterator[list[LayerRows]]:
    """Split what is to be sent into jobs of at most JOB_ROWS positions, or of one sequence and layer.
    Features have jobs of their own.

    For example:

        # JOB_ROWS 4096, sequences of 3000 and 2000 positions, layers 0 and 1
        # -> jobs [(3000, layer 0)], [(2000, layer 0)], [(3000, layer 1)], [(2000, layer 1)]
    """
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
