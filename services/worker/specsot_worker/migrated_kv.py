"""Migrates KV to the stages of the next epoch, while this epoch runs or after a stage was lost, so that
prompts are not computed again.

One *row* is the KV of one position in one layer. Features and logged hidden states travel like the KV of
further layers; `HandOver` lists their numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Protocol, runtime_checkable

import structlog
import torch
from torch import Tensor

from specsot.core.frames import Frame, Opening, PromptChunk
from specsot.core.pages import PageTable
from specsot.errors import SpecsotError, WireError
from specsot.members import HandOver, KvRows, Progress, Range, RowsOf, Stage
from specsot.tasks import start
from specsot.transport.links import Dialer, Link, close_in_background
from specsot_model.inference import inference_mode
from specsot_model.kv import KVPages
from specsot_worker.hidden_log import HiddenLog

log = structlog.get_logger()

# Bytes. Received KV that waits for its epoch takes at most this much: twice what a master lets be migrated.
MAX_BYTES = 512 << 20
# Bytes. What a message counts for that says that a sequence has no KV in one layer. Untuned.
OVER_BYTES = 64
# Positions. KV of at most this many positions, counted per layer, is gathered between two frames. Untuned.
JOB_ROWS = 4096

# Sender, sequence, and the number of what the rows belong to, see `HandOver`.
Key = tuple[str, int, int]


class MigratedKV:
    """Store of the KV that has been received from other workers, by sender, sequence and number.

    order: The order that is being carried out, or was carried out last.
    """

    def __init__(self, epoch: int = 0) -> None:
        """Start empty.

        epoch: Number of the epoch that runs. KV that is migrated for earlier epochs is refused.
        """
        self._rows: dict[Key, list[Tensor]] = {}
        self._closed: set[Key] = set()
        self.order = HandOver(0, (), (), ())
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
        self.order = order

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

    def complete(self, numbers: Collection[int]) -> bool:
        """Return whether all rows are present that the order names, or were reported as not existing: False
        while some are missing. Return True if the order names no sequences.

        numbers: The numbers of the rows that this worker is sent.
        """
        return all(
            sum(map(len, self._rows.get(key, ()))) >= request.last or key in self._closed
            for request in self.order.rows
            for key in self._keys(request.sequence, numbers)
        )

    def closed_sequences(self, needed: Collection[int]) -> tuple[int, ...]:
        """Return the ids of the sequences of the order of which a sender has no rows, because it has closed
        them, or () if there are none. A sequence that lacks only features, or only the log of this worker's
        hidden states, does not count.

        needed: The numbers of the rows without which this worker cannot continue a sequence.
        """
        sequences = (one.sequence for one in self.order.rows)
        return tuple(one for one in sequences if any(key in self._closed for key in self._keys(one, needed)))

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
        layer = self.order.model_layers if layer is None else layer
        last = opening.num_computed_tokens
        (key,) = self._keys(opening.reused.sequence, (layer,))
        parts = (self._rows.pop if opening.decodes else self._rows.get)(key, [])
        complete = sum(map(len, parts)) >= last
        return torch.cat(parts)[last - len(opening.reused.tokens) : last] if complete else None

    def chunk(self, opening: Opening, number: int, chunk: PromptChunk) -> Tensor | None:
        """Return the rows of one chunk of the tokens with which an opening begins, [num_tokens, elements of a
        row]; None if they are not present completely. The rows stay.

        opening: The opening of a sequence that reuses KV (`opening.reused` is set).
        number: What the rows belong to, see `HandOver`.
        chunk: A chunk of the reused tokens.
        """
        assert opening.reused is not None
        (key,) = self._keys(opening.reused.sequence, (number,))
        parts = self._rows.get(key, [])
        if len(parts) > 1:
            # A long sequence has many chunks, so its rows are joined once.
            parts = self._rows[key] = [torch.cat(parts)]
        last = chunk.start + len(chunk.tokens)
        return parts[0][chunk.start : last] if parts and len(parts[0]) >= last else None

    def copied(self, sender: str, request: RowsOf, number: int) -> Tensor | None:
        """Return rows that are kept in case that their sender is lost, [last - first, elements of a row].
        Return None if they are not present completely. The rows stay.

        sender: Name of the worker that has sent them.
        request: A sequence with a range of its positions.
        number: What the rows belong to, see `HandOver`.
        """
        key = sender, request.sequence, number
        parts = self._rows.get(key, [])
        if len(parts) > 1:
            parts = self._rows[key] = [torch.cat(parts)]
        complete = bool(parts) and len(parts[0]) >= request.last
        return parts[0][request.first : request.last] if complete else None

    def keep_sequences(self, sequences: Collection[int]) -> None:
        """Drop the rows of all other sequences, and the records that those are closed, so that neither counts
        towards MAX_BYTES any longer.

        sequences: Ids of the sequences whose rows and records stay. Empty: everything is dropped.
        """
        for key in [key for key in self._rows if key[1] not in sequences]:
            self._bytes -= sum(part.nbytes for part in self._rows.pop(key))
        over = {key for key in self._closed if key[1] not in sequences}
        self._bytes -= OVER_BYTES * len(over)
        self._closed -= over

    def keep(self, numbers: Collection[int]) -> None:
        """Drop all rows but those that the newest order sends to this worker. The others belong to an order
        that was replaced by a later one, or are copies.

        numbers: What the rows belong to that stay, see `HandOver`. Only rows that were sent by the giver that
            the order names for a number stay. Empty: all rows are dropped.

        A record that a sequence is closed stays.
        """
        for key in tuple(self._rows):
            if key[2] not in numbers or key[0] != self.order.giver_of(key[2]):
                del self._rows[key]

    def drop(self, sequence: int, features: bool = False) -> None:
        """Drop the KV of a sequence that will not be opened again. An unknown sequence is ignored.

        sequence: Id of the sequence in the previous epoch.
        features: True: drop its features and not its KV, because features are read later than the KV. False:
            drop its KV and not its features.
        """
        for key in tuple(self._rows):
            if key[1] == sequence and (key[2] == self.order.model_layers) == features:
                self._rows.pop(key, None)

    def _keys(self, sequence: int, numbers: Collection[int]) -> list[Key]:
        """Return the keys under which the rows of a sequence are stored, one for each number.

        sequence: Id of the sequence.
        numbers: What the rows belong to, see `HandOver`.
        """
        return [(self.order.giver_of(number), sequence, number) for number in numbers]

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


# Positions of a sequence, and the number of what the rows belong to: a layer of the model, features or hidden
# states, see `HandOver`.
LayerRows = tuple[RowsOf, int]


class StageRows:
    """Migrator of the KV in a stage's pages: copies KV for the layers' next owners, and fills the pages of
    openings that reuse KV.

    migrated: The KV that this worker received during the previous epoch. The worker sets it.
    """

    def __init__(self, table: PageTable, kv: KVPages, layers: Range, log: HiddenLog | None = None) -> None:
        """Start without openings to fill.

        table: Page table of the stage.
        kv: KV pages of the stage.
        layers: Layer range of the stage.
        log: The hidden states that the stage passes on. None on the last stage.
        """
        self._table = table
        self._kv = kv
        self._layers = layers
        self._log = log
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
            model, or the number of the hidden states that this stage passes on.

        Also None if the sequence is unknown, and for hidden states that are not logged completely.
        """
        found = list[Tensor | None]()
        for request, number in requests:
            is_open = request.sequence in self._table
            slots = self._table.slots(request.sequence, request.first, request.last) if is_open else None
            if not slots:
                found.append(None)
            elif number < self._layers.last:
                found.append(self._kv.rows_at(number - self._layers.first, slots))
            else:
                found.append(self._log.rows_at(request.sequence, slots) if self._log else None)
        return found

    @property
    def lost(self) -> Range | None:
        """The layers of this stage whose KV no worker has kept, so that frames with `replay` compute it. None
        if there are none.
        """
        lost = self.migrated.order.lost
        if lost is None:
            return None
        first, last = max(lost.first, self._layers.first), min(lost.last, self._layers.last)
        return Range(first, last) if first < last else None

    @inference_mode
    def put_kept(self, frame: Frame, slots: Sequence[int]) -> None:
        """Write the KV of all layers that is kept, and the logged hidden states, to the pages of a frame with
        `replay`.

        frame: The frame that is about to run. Its segments are chunks of reused tokens.
        slots: KV slot of every token of the frame.

        Raises WireError if KV is not present. A sequence whose hidden states are not present has an
        incomplete log from now on, unless this frame computes them.
        """
        self._unfilled |= {one.sequence: one for one in frame.openings if one.reused}
        lost = self.lost or Range(0, 0)
        layers = range(self._layers.first, self._layers.last)
        kept = [layer for layer in layers if not lost.first <= layer < lost.last]
        first = 0
        for segment, opening in self._chunks(frame):
            chunk_slots = slots[first : first + len(segment.tokens)]
            first += len(segment.tokens)
            for layer in kept:
                self._kv.put_rows_at(
                    layer - self._layers.first, chunk_slots, self._rows(opening, layer, segment)
                )
            if self._log and lost.last != self._layers.last:
                number = self.migrated.order.model_layers + self._layers.last
                logged = self.migrated.chunk(opening, number, segment)
                self._log.put_rows_at(segment.sequence, chunk_slots, logged)

    def hidden_entering(self, frame: Frame, layer: int) -> Tensor:
        """Return a copy of the logged hidden states of a frame with `replay`, [num_tokens, hidden_size], on
        the host.

        frame: The frame that is about to run.
        layer: The first lost layer, which the hidden states enter.

        Raises WireError if they are not present.
        """
        number = self.migrated.order.model_layers + layer
        return torch.cat([self._rows(opening, number, segment) for segment, opening in self._chunks(frame)])

    def _chunks(self, frame: Frame) -> Iterator[tuple[PromptChunk, Opening]]:
        """Yield the chunks of a frame with `replay`, each with the opening of its sequence.

        frame: A frame whose openings are known already.

        Raises WireError if a segment is no chunk of reused tokens.
        """
        for segment in frame.segments:
            opening = self._unfilled.get(segment.sequence)
            if opening is None or not isinstance(segment, PromptChunk):
                raise WireError(f"sequence {segment.sequence} of frame {frame.number} reuses no KV")
            yield segment, opening

    def _rows(self, opening: Opening, number: int, chunk: PromptChunk) -> Tensor:
        """Return the rows of one chunk. Raises WireError if they are not present.

        opening: The opening of the chunk's sequence.
        number: What the rows belong to, see `HandOver`.
        chunk: A chunk of the reused tokens.
        """
        rows = self.migrated.chunk(opening, number, chunk)
        if rows is None:
            raise WireError(f"rows {number} are missing for sequence {opening.sequence}")
        return rows

    def fill(self, frame: Frame) -> None:
        """Write reused KV to the pages of the sequences that have their first own tokens in this frame,
        before these tokens attend to it. Also drop received KV that no opening will need. Nothing is written
        for sequences that reuse no KV.

        frame: The frame that is about to run.

        Raises WireError if the KV is not present.

        A sequence's pages are filled once, with its first segment, unless frames with `replay` have filled
        them. Received KV of a closed sequence is dropped unless an opening that is not filled yet reuses it.
        """
        self._unfilled |= {one.sequence: one for one in frame.openings if one.reused}
        for segment in frame.segments if self._unfilled else ():
            if opening := self._unfilled.pop(segment.sequence, None):
                if opening.reused and opening.reused.replay:
                    # A decoding sequence is the last one that needs its rows.
                    self._closed.update([opening.reused.sequence] if opening.decodes else ())
                    continue
                slots = self._table.slots(opening.sequence, opening.forked, opening.num_computed_tokens)
                for layer in range(self._layers.first, self._layers.last):
                    rows = self.migrated.rows(opening, layer)
                    if rows is None:
                        raise WireError(
                            f"the migrated KV of layer {layer} is missing for sequence {opening.sequence}"
                        )
                    self._kv.put_rows_at(layer - self._layers.first, slots, rows)
                if self._log:
                    number = self.migrated.order.model_layers + self._layers.last
                    self._log.put_rows_at(opening.sequence, slots, self.migrated.rows(opening, number))
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
        # The order, this worker as a receiver, and the link to the master, until all rows have been received.
        self._waiting: tuple[HandOver, Stage, Link] | None = None
        # The newest order to keep copies in the running epoch. None without one.
        self._copies: HandOver | None = None
        # Links over which copies are sent, by the receiver's address. They stay open while sequences are
        # copied, until the epoch ends.
        self._copy_links: dict[str, Link] = {}
        # Numbers of the rows that the newest order sends to this worker for the next epoch. () for an order
        # to keep copies. None if there is no order, or if it names this worker as no receiver.
        self._own_numbers: tuple[int, ...] | None = None
        self._sending: asyncio.Task[None] | None = None

    def begin(self, order: HandOver, copies: Copies | None, uplink: Link) -> None:
        """Start migrating. An order replaces the previous one.

        order: The master's order, which names the sequences, the senders and the receivers.
        copies: Copies KV of the order's epoch. None if this worker has none of it; if the order names it as a
            sender, it then reports every sequence as closed.
        uplink: Link to the master, which is informed when this worker has received everything.

        If the order names this worker as no receiver, nothing is awaited. If it names this worker as no
        sender, nothing is sent. Sending runs in the background.
        """
        self.stop()
        self.rows.expect(order)
        if order.copies:
            self._copies = order
            self.rows.keep_sequences({one.sequence for one in order.rows})
            if not order.rows:
                self._close_copy_links()
        own_stage = next((one for one in order.takers if one.name == self._name), None)
        self._waiting = (order, own_stage, uplink) if own_stage else None
        taken = order.taken_by(own_stage) if own_stage else None
        self._own_numbers = () if order.copies else taken
        self._sending = start(self._send_all(order, copies))

    def turn(self, epoch: int) -> None:
        """Begin an epoch with the KV that was received during the previous epoch: `rows` becomes `ready`, and
        an order that is still being carried out stops. Rows that the newest order does not send to this
        worker are dropped, and so are all rows if the newest order was one to keep copies, of which the new
        epoch uses none.

        epoch: Number of the epoch that begins.

        Without an order, or if the newest order names this worker as no receiver, nothing is dropped.
        """
        self.stop()
        self.ready = self.rows
        self.rows = MigratedKV(epoch)
        self._copies = None
        self._close_copy_links()
        if self._own_numbers is not None:
            self.ready.keep(self._own_numbers)
        self._own_numbers = None

    def _close_copy_links(self) -> None:
        """Close the links over which copies were sent, in the background."""
        for link in self._copy_links.values():
            start(close_in_background(link.close()))
        self._copy_links.clear()

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

        Nothing happens either without an order that sends rows to this worker, or if the report was sent
        before. The report names the sequences that the senders have closed. An error of the link to the
        master is ignored.
        """
        if self._waiting and self.rows.complete(self._waiting[0].taken_by(self._waiting[1])):
            (order, own_stage, uplink) = self._waiting
            self._waiting = None
            over = self.rows.closed_sequences(order.needed_by(own_stage))
            progress = Progress(order.epoch, 1, 1, migrated=order.number, over=over)
            # The loss of the master is detected elsewhere.
            with suppress(SpecsotError):
                await uplink.send(progress)

    async def _send_all(self, order: HandOver, copies: Copies | None) -> None:
        """Send every receiver the rows that it wants of this worker. Nothing is sent if this worker is no
        sender of the order.

        order: The order that is carried out.
        copies: Copies KV of the order's epoch. None: every sequence is reported as closed.

        A receiver that wants nothing of this worker is skipped. At the end, the master is informed if this
        worker, as a receiver, has everything already.
        """
        # The first of these stages is this worker's own. Any further one was lost, and this worker gives the
        # copies that it has of that stage's rows, see `HandOver.givers`.
        source = copies or _no_copies
        givers = [one for one in order.givers if one.name == self._name]
        # Only an order for copies may name no new rows.
        for giver in givers if any(one.first < one.last for one in order.rows) else ():
            given = order.given_by(giver)
            for receiver in order.takers:
                taken = order.taken_by(receiver)
                if numbers := [number for number in given if number in taken]:
                    await self._send_to(receiver, order, source, numbers)
            source = self._copied
        await self._report_received()

    async def _copied(self, asked: Sequence[LayerRows]) -> Sequence[Tensor | None]:
        """Return the rows of a lost stage that this worker has copied, one tensor for each request: [last -
        first, elements of a row]. None if they were not copied completely.

        asked: The requests: a range of positions of one sequence each.
        """
        giver_of = self._copies.giver_of if self._copies else lambda number: ""
        return [self.rows.copied(giver_of(number), request, number) for request, number in asked]

    async def _send_to(
        self, receiver: Stage, order: HandOver, copies: Copies, numbers: Sequence[int]
    ) -> None:
        """Send KV to one receiver. If the receiver cannot be reached, a warning is logged, and nothing else
        happens: the receiver never reports completion, and the master's wait has a limit.

        receiver: The stage that will run the layers. It may be this worker, which then stores the KV itself.
        order: The order that is carried out.
        copies: Copies KV of the order's epoch.
        numbers: What the rows belong to that are sent, see `HandOver`.

        KV that this worker stores itself is not sent over a link. A link for copies of an earlier order is
        used again. If it is broken, everything is sent again over a new link; the receiver ignores the KV
        that it has already.
        """
        if receiver.name == self._name:
            await _send(order, copies, numbers, lambda one: self.take(self._name, one))
            return
        address = receiver.address
        if link := self._copy_links.pop(address, None):
            with suppress(SpecsotError):
                await self._send_over(link, address, order, copies, numbers)
                return
        try:
            # Epoch 0: the loss of this link ends no epoch.
            link = await self._dialer.dial(address, 0)
            await self._send_over(link, address, order, copies, numbers)
        except SpecsotError as error:
            log.warning("KV not migrated: receiver not reached", receiver=receiver.name, reason=str(error))

    async def _send_over(
        self, link: Link, address: str, order: HandOver, copies: Copies, numbers: Sequence[int]
    ) -> None:
        """Send KV over a link. A link for copies stays open for the next order, unless an error is raised,
        after which a message on it may be incomplete; any other link is closed.

        link: The link to the receiver.
        address: The receiver's address.
        order: The order that is carried out.
        copies: Copies KV of the order's epoch.
        numbers: What the rows belong to that are sent, see `HandOver`.
        """
        sent = False
        try:
            await _send(order, copies, numbers, link.send)
            sent = True
        finally:
            if sent and order.copies:
                self._copy_links[address] = link
            else:
                await close_in_background(link.close())


async def _no_copies(asked: Sequence[LayerRows]) -> Sequence[None]:
    """Return None for each request, as a worker does that has nothing of the order's epoch.

    asked: The requests: a range of positions of one sequence each.
    """
    return [None] * len(asked)


async def _send(
    order: HandOver, copies: Copies, numbers: Sequence[int], send: Callable[[KvRows], Awaitable[None]]
) -> None:
    """Copy and send KV, a few positions at a time, between frames.

    order: The order that is carried out.
    copies: Copies KV of the order's epoch.
    numbers: What the rows belong to that are sent, see `HandOver`.
    send: Sends one message to the receiver.
    """
    # Only an order for copies names sequences that have no new rows.
    rows = [one for one in order.rows if one.first < one.last]
    for job in _jobs(rows, numbers, order.model_layers):
        for (request, layer), rows in zip(job, await copies(job)):
            await send(KvRows(order.epoch, request.sequence, layer, request.first, rows))


def _jobs(requests: Sequence[RowsOf], numbers: Sequence[int], model_layers: int) -> Iterator[list[LayerRows]]:
    """Yield what is to be sent in jobs of at most JOB_ROWS positions, or of one sequence and layer. Features
    have jobs of their own. Nothing is yielded without requests or layers.

    requests: Sequences with ranges of their positions. Each is copied in every layer.
    numbers: What the rows belong to that are sent, see `HandOver`.
    model_layers: Number of layers of the model, which as a layer number stands for features.

    For example:

        # JOB_ROWS 4096, sequences of 3000 and 2000 positions, layers 0 and 1
        # -> jobs [(3000, layer 0)], [(2000, layer 0)], [(3000, layer 1)], [(2000, layer 1)]

    A job with one sequence and layer may exceed JOB_ROWS.
    """
    job = list[LayerRows]()
    num_positions = 0
    for number in numbers:
        for request in requests:
            if job and (
                num_positions + request.last - request.first > JOB_ROWS
                or (number == model_layers) != (job[-1][1] == model_layers)
            ):
                yield job
                job = []
                num_positions = 0
            job.append((request, number))
            num_positions += request.last - request.first
    if job:
        yield job
