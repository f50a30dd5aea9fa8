"""Migrates KV to the stages of the next epoch while this epoch runs, so that prompts are not computed again.

One *row* is the KV of one position in one layer. Features travel like the KV of a layer after the last one.
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
from specsot_model.inference import inference_mode
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
    """Store of the KV that has been received from other workers, by sender, sequence and layer."""

    def __init__(self, epoch: int = 0) -> None:
        """Start empty.

        epoch: Number of the epoch that runs. KV that is migrated for earlier epochs is refused.
        """
        self._rows: dict[Key, list[Tensor]] = {}
        self._closed: set[Key] = set()
        self._order = HandOver(0, (), (), ())
        self._epoch = epoch
        self._bytes = 0

    def expect(self, order: HandOver) -> None:
        """Set the order that is being carried out.

        order: The master's order, which names the sequences to migrate, the senders and the receivers.

        If the order is for a later epoch than the stored KV, everything stored is discarded; if for an
        earlier one, the same happens.
        """
        # The later epoch was named by a sender only, so the master's order wins.
        if order.epoch < self._epoch:
            self._epoch = 0
        self._enter(order.epoch)
        self._order = order

    def add(self, sender: str, message: KvRows) -> None:
        """Store KV from one sender. What is present already is left out; so is what does not continue the
        present KV, and what exceeds MAX_BYTES.

        sender: Name of the worker that sent it.
        message: KV of consecutive positions of one sequence in one layer; or, without a tensor, the report
            that the sequence has none there because it is closed.

        For example:

            # present: positions 0..9; message with first 8 and 4 positions -> positions 10 and 11 are added
            # present: positions 0..9; message with first 12 -> ignored, because 10 and 11 are missing

        A message for an earlier epoch, or for a sequence and layer that were reported as closed, is ignored.
        A message for a later epoch discards everything stored before. The report that a sequence is closed
        counts OVER_BYTES, and is ignored if MAX_BYTES would be exceeded.
        """
        self._enter(message.epoch)
        key = (sender, message.sequence, message.layer)
        free_bytes = MAX_BYTES - self._bytes
        if message.epoch < self._epoch or key in self._closed:
            return
        if not isinstance(message.rows, Tensor):
            if free_bytes >= OVER_BYTES:
                self._closed.add(key)
                self._bytes += OVER_BYTES
            return
        num_known = sum(map(len, self._rows.get(key, ()))) - message.first
        if 0 <= num_known < len(message.rows) and 0 < message.rows.nbytes <= free_bytes:
            self._rows.setdefault(key, []).append(message.rows[num_known:])
            self._bytes += message.rows[num_known:].nbytes

    def complete(self, layers: Range) -> bool:
        """Return whether all KV of some layers is present that the order names, or was reported as not
        existing: False while some is missing. Return True if the order names no sequences.

        layers: The layers that this worker will run.
        """
        return all(
            sum(map(len, self._rows.get(key, ()))) >= request.last or key in self._closed
            for request in self._order.rows
            for key in self._keys(request.sequence, layers)
        )

    def closed_sequences(self, layers: Range) -> tuple[int, ...]:
        """Return the ids of the sequences of the order that the senders have closed, or () if there are none.
        A sequence that lacks only features does not count.

        layers: The layers that this worker will run.
        """
        kv = Range(layers.first, min(layers.last, self._order.model_layers))
        sequences = (one.sequence for one in self._order.rows)
        return tuple(one for one in sequences if any(key in self._closed for key in self._keys(one, kv)))

    def rows(self, opening: Opening, layer: int | None = None) -> Tensor | None:
        """Return the KV with which an opening begins in one layer: [num_tokens, elements of a position]. None
        if it is not present completely.

        opening: The opening of a sequence that reuses KV (`opening.reused` is set).
        layer: Number of the layer in the model. None: the features.

        A decoding sequence is the only one that needs its KV, so the KV is removed. That of a prefix stays.

            # opening: fork of 6 tokens, 4 reused ones -> positions 6..9 of the received KV

        The result has only the positions that the opening reuses, without those that it forks from another
        sequence. For a decoding sequence the stored KV is removed even if the result is None.
        """
        assert opening.reused is not None
        layer = self._order.model_layers if layer is None else layer
        last = opening.num_computed_tokens
        (key,) = self._keys(opening.reused.sequence, Range(layer, layer + 1))
        parts = (self._rows.pop if opening.decodes else self._rows.get)(key, [])
        complete = sum(map(len, parts)) >= last
        return torch.cat(parts)[last - len(opening.reused.tokens) : last] if complete else None

    def keep(self, layers: Range) -> None:
        """Drop the KV of all other layers: it belongs to an order that was replaced by a later one.

        layers: The layers whose KV stays.

        A record that a sequence is closed stays.
        """
        for key in tuple(self._rows):
            if not layers.first <= key[2] < layers.last:
                del self._rows[key]

    def drop(self, sequence: int, features: bool = False) -> None:
        """Drop the KV of a sequence that will not be opened again. An unknown sequence is ignored.

        sequence: Id of the sequence in the previous epoch.
        features: True: drop its features and not its KV, because features are read later than the KV. False:
            drop its KV and not its features.
        """
        for key in tuple(self._rows):
            if key[1] == sequence and (key[2] == self._order.model_layers) == features:
                self._rows.pop(key, None)

    def _keys(self, sequence: int, layers: Range) -> list[Key]:
        """Return the keys under which the KV of a sequence is stored, one for each layer.

        sequence: Id of the sequence.
        layers: The layers, among which the one after the last stands for features.
        """
        numbers = range(layers.first, layers.last)
        return [(self._order.giver_of(layer), sequence, layer) for layer in numbers]

    def _enter(self, epoch: int) -> None:
        """Discard everything received if a later epoch than the present one begins to be prepared. Otherwise
        nothing happens.

        epoch: Number of the epoch for which KV is migrated.

        The number of stored bytes starts from 0 then, and the order stays.
        """
        if epoch > self._epoch:
            self._rows.clear()
            self._closed.clear()
            self._epoch = epoch
            self._bytes = 0


# Positions of a sequence, and a layer of the model.
LayerRows = tuple[RowsOf, int]


class StageRows:
    """Migrator of the KV in a stage's pages: copies KV for the layers' next owners, and fills the pages of
    openings that reuse KV.

    migrated: The KV that this worker received during the previous epoch. The worker sets it.
    """

    def __init__(self, table: PageTable, kv: KVPages, layers: Range) -> None:
        """Start without openings to fill.

        table: Page table of the stage.
        kv: KV pages of the stage.
        layers: Layer range of the stage.
        """
        self._table = table
        self._kv = kv
        self._layers = layers
        self.migrated = MigratedKV()
        # Openings that reuse KV, by sequence, until their first own tokens arrive: their pages are reserved
        # only then.
        self._unfilled: dict[int, Opening] = {}
        # Closed sequences of the previous epoch whose KV an opening is still to reuse.
        self._closed = set[int]()

    @inference_mode
    def copies(self, requests: Sequence[LayerRows]) -> list[Tensor | None]:
        """Return copies of KV on the host, each [last - first, elements of a position], one for each request.
        None if the sequence is closed, or if its range of positions is empty.

        requests: A sequence with a range of its positions, and a layer of this stage by its number in the
            model.

        Also None if the sequence is unknown.
        """
        found = list[Tensor | None]()
        for request, layer in requests:
            is_open = request.sequence in self._table
            slots = self._table.slots(request.sequence, request.first, request.last) if is_open else None
            found.append(self._kv.rows_at(layer - self._layers.first, slots) if slots else None)
        return found

    def fill(self, frame: Frame) -> None:
        """Write reused KV to the pages of the sequences that have their first own tokens in this frame,
        before these tokens attend to it. Also drop received KV that no opening will need. Nothing is written
        for sequences that reuse no KV.

        frame: The frame that is about to run.

        Raises WireError if the KV is not present.

        A sequence's pages are filled once, with its first segment. Received KV of a closed sequence is
        dropped unless an opening that is not filled yet reuses it.
        """
        self._unfilled |= {one.sequence: one for one in frame.openings if one.reused}
        for segment in frame.segments if self._unfilled else ():
            if opening := self._unfilled.pop(segment.sequence, None):
                slots = self._table.slots(opening.sequence, opening.forked, opening.num_computed_tokens)
                for layer in range(self._layers.first, self._layers.last):
                    rows = self.migrated.rows(opening, layer)
                    if rows is None:
                        raise WireError(
                            f"the migrated KV of layer {layer} is missing for sequence {opening.sequence}"
                        )
                    self._kv.put_rows_at(layer - self._layers.first, slots, rows)
        self._closed.update(map(self._reused_sequence, frame.closings))
        if self._closed:
            needed = {one.reused.sequence for one in self._unfilled.values() if one.reused}
            for sequence in self._closed - needed:
                self.migrated.drop(sequence)
            self._closed &= needed

    def _reused_sequence(self, closed: int) -> int:
        """Return the sequence of the previous epoch whose KV is no longer needed when a sequence closes.

        closed: Id of the sequence that closes. It is the result itself, unless it had not started and would
            have reused the KV of another sequence; then that sequence is the result.

        An opening of the sequence that has not been filled is forgotten.
        """
        waited = self._unfilled.pop(closed, None)
        return waited.reused.sequence if waited and waited.reused and waited.decodes else closed


@runtime_checkable
class KeepsRows(Protocol):
    """A stage that can migrate its KV and reuse received KV.

    rows: Copies the KV of the stage's pages, and fills pages with received KV.
    """

    rows: StageRows


# Copies KV of one or more layers. The layer number after the last one asks for features. See
# `StageRows.copies`.
Copies = Callable[[Sequence[LayerRows]], Awaitable[Sequence[Tensor | None]]]


class RowHandover:
    """A worker's part in a migration: it sends KV of layers that other workers will run, and reports to the
    master when it has received the KV of its own layers.

    rows: The KV that is received during the running epoch, for the next one.
    ready: The KV that was received during the previous epoch, which serves the running one.
    """

    def __init__(self, name: str, dialer: Dialer) -> None:
        """Start without an order.

        name: Name of this worker, by which orders name it.
        dialer: Opens links to other workers.
        """
        self._name = name
        self._dialer = dialer
        # `rows` receives KV during the running epoch; `ready` was received during the previous one and serves
        # the running epoch.
        self.rows = self.ready = MigratedKV()
        # The order, this worker's layers, and the link to the master, until all KV has been received.
        self._waiting: tuple[HandOver, Range, Link] | None = None
        # Layers of this worker in the newest order.
        self._own_layers: Range | None = None
        self._sending: asyncio.Task[None] | None = None

    def begin(self, order: HandOver, copies: Copies | None, uplink: Link) -> None:
        """Start migrating. An order replaces the previous one.

        order: The master's order, which names the sequences, the senders and the receivers.
        copies: Copies KV of the running epoch. None if this worker only receives.
        uplink: Link to the master, which is informed when this worker has received everything.

        If the order names this worker as no receiver, nothing is awaited. If it names this worker as no
        sender, nothing is sent. Sending runs in the background.
        """
        self.stop()
        self.rows.expect(order)
        own_layers = next((order.held_by(one) for one in order.takers if one.name == self._name), None)
        self._waiting = (order, own_layers, uplink) if own_layers else None
        self._own_layers = own_layers
        self._sending = start(self._send_all(order, copies))

    def turn(self, epoch: int) -> None:
        """Begin an epoch with the KV that was received during the previous epoch: `rows` becomes `ready`, and
        an order that is still being carried out stops. KV of layers that the newest order does not assign to
        this worker is dropped.

        epoch: Number of the epoch that begins.

        Without an order, or if the newest order names this worker as no receiver, nothing is dropped.
        """
        self.stop()
        self.ready = self.rows
        self.rows = MigratedKV(epoch)
        if self._own_layers:
            self.ready.keep(self._own_layers)
        self._own_layers = None

    def stop(self) -> None:
        """Stop sending, and stop waiting for KV. KV that has been received stays.

        Nothing happens if nothing is being sent or awaited.
        """
        if self._sending:
            self._sending.cancel()
        self._sending = self._waiting = None

    async def take(self, sender: str, message: KvRows) -> None:
        """Store received KV, and inform the master if it was the last that is needed. KV that is not needed
        or does not fit is dropped, see `MigratedKV.add`.

        sender: Name of the worker that sent it.
        message: KV of consecutive positions of one sequence in one layer; or, without a tensor, the report
            that the sequence is closed.
        """
        self.rows.add(sender, message)
        await self._report_received()

    async def _report_received(self) -> None:
        """Inform the master, once, that all KV of this worker's layers has been received. Nothing happens
        while KV is missing.

        Nothing happens either without an order for this worker's layers, or if the report was sent before.
        The report names the sequences that the senders have closed. An error of the link to the master is
        ignored.
        """
        if self._waiting and self.rows.complete(self._waiting[1]):
            (order, layers, uplink) = self._waiting
            self._waiting = None
            progress = Progress(
                order.epoch, 1, 1, migrated=order.number, over=self.rows.closed_sequences(layers)
            )
            # The loss of the master is detected elsewhere.
            with suppress(SpecsotError):
                await uplink.send(progress)

    async def _send_all(self, order: HandOver, copies: Copies | None) -> None:
        """Send every receiver the KV of the layers that it shares with this worker. Nothing is sent if this
        worker is no sender of the order.

        order: The order that is carried out.
        copies: Copies KV of the running epoch. None: nothing is sent.

        A receiver that shares no layers with this worker is skipped. At the end, the master is informed if
        this worker, as a receiver, has everything already.
        """
        own_layers = next((order.held_by(one) for one in order.givers if one.name == self._name), None)
        for receiver in order.takers if own_layers and copies else ():
            assert own_layers
            assert copies
            receiver_layers = order.held_by(receiver)
            layers = Range(
                max(own_layers.first, receiver_layers.first), min(own_layers.last, receiver_layers.last)
            )
            if layers.first < layers.last:
                await self._send_to(receiver, order, copies, layers)
        await self._report_received()

    async def _send_to(self, receiver: Stage, order: HandOver, copies: Copies, layers: Range) -> None:
        """Send KV to one receiver. If the receiver cannot be reached, a warning is logged, and nothing else
        happens: the receiver never reports completion, and the master's wait has a limit.

        receiver: The stage that will run the layers. It may be this worker, which then stores the KV itself.
        order: The order that is carried out.
        copies: Copies KV of the running epoch.
        layers: The layers whose KV is sent.

        KV that this worker stores itself is not sent over a link.
        """
        if receiver.name == self._name:
            await _send(order, copies, layers, lambda one: self.take(self._name, one))
            return
        try:
            # Epoch 0: the loss of this link ends no epoch.
            link = await self._dialer.dial(receiver.address, 0)
            try:
                await _send(order, copies, layers, link.send)
            finally:
                await close_in_background(link.close())
        except SpecsotError as error:
            log.warning("KV not migrated: receiver not reached", receiver=receiver.name, reason=str(error))


async def _send(
    order: HandOver, copies: Copies, layers: Range, send: Callable[[KvRows], Awaitable[None]]
) -> None:
    """Copy and send KV, a few positions at a time, between frames.

    order: The order that is carried out.
    copies: Copies KV of the running epoch.
    layers: The layers whose KV is sent.
    send: Sends one message to the receiver.
    """
    for job in _jobs(order.rows, layers, order.model_layers):
        for (request, layer), rows in zip(job, await copies(job)):
            await send(KvRows(order.epoch, request.sequence, layer, request.first, rows))


def _jobs(requests: Sequence[RowsOf], layers: Range, model_layers: int) -> Iterator[list[LayerRows]]:
    """Yield what is to be sent in jobs of at most JOB_ROWS positions, or of one sequence and layer. Features
    have jobs of their own. Nothing is yielded without requests or layers.

    requests: Sequences with ranges of their positions. Each is copied in every layer.
    layers: The layers whose KV is sent.
    model_layers: Number of layers of the model, which as a layer number stands for features.

    For example:

        # JOB_ROWS 4096, sequences of 3000 and 2000 positions, layers 0 and 1
        # -> jobs [(3000, layer 0)], [(2000, layer 0)], [(3000, layer 1)], [(2000, layer 1)]

    A job with one sequence and layer may exceed JOB_ROWS.
    """
    job = list[LayerRows]()
    num_positions = 0
    for layer in range(layers.first, layers.last):
        for request in requests:
            if job and (
                num_positions + request.last - request.first > JOB_ROWS or job[-1][1] < layer == model_layers
            ):
                yield job
                job = []
                num_positions = 0
            job.append((request, layer))
            num_positions += request.last - request.first
    if job:
        yield job
