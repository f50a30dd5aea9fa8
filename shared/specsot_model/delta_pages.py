"""Pages of layer ranges with gated delta layers: stored inputs, stored states, and what is replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specsot.checkpoint.config import ModelConfig
from specsot.checkpoint.families import Delta
from specsot.members import KvDtype, Range
from specsot_kernels.segments import RowSpan
from specsot_model.core.replays import CHUNK, CachedStates, PathReplay, SpanReplay, states_for
from specsot_model.core.walks import (
    SequenceRows,
    Walk,
    WalkRoom,
    in_blocks,
    mark_saved_states,
    sequences_of_frame,
    walk_of,
)
from specsot_model.joined_pages import JoinedPages
from specsot_model.kv import KVPages, Moves, Numbers, aligned, indices, untouched_zeros, views

if TYPE_CHECKING:
    from specsot_kernels.gpu.delta import WalkTables


@dataclass(frozen=True, slots=True)
class ReplayBatch:
    """Replays that all have the same number of chunks, as tensors; made once per frame for all layers.

    slots: [replays, history + chunks * CHUNK], the KV slot of every token; negative where there is none.
    states: [replays], the stored state that each replay starts from.
    places: [wanted], indices into [replays * chunks * CHUNK] of the outputs that the frame needs.
    targets: [wanted], the frame rows of those outputs.
    saves: By chunk, which replays store their state after that chunk, and in which stored state; both [few].
    """

    slots: Tensor
    states: Tensor
    places: Tensor
    targets: Tensor
    saves: Mapping[int, tuple[Tensor, Tensor]]

    @classmethod
    def of_paths(
        cls, replays: Sequence[PathReplay], history: int, zero_state: int, device: torch.device
    ) -> ReplayBatch:
        """Return the batch of some paths.

        Paths are filled up with slot -1 to whole chunks. A path without `state` starts from `zero_state`.

        replays: The paths, at least one, all with the same number of chunks.
        history: Number of preceding tokens that a convolution reads.
        zero_state: Number of the zero state, from which a new sequence starts.
        device: Device of the tensors.
        """
        width = _num_chunks(replays[0], history) * CHUNK
        slots = [replay.slots + (-1,) * (history + width - len(replay.slots)) for replay in replays]
        states = [zero_state if replay.state is None else replay.state for replay in replays]
        outputs = [
            (index * width + at, row) for index, replay in enumerate(replays) for row, at in replay.outputs
        ]
        saves: dict[int, list[tuple[int, int]]] = {}
        for index, replay in enumerate(replays):
            for chunk, state in replay.saves:
                saves.setdefault(chunk, []).append((index, state))
        pairs = [list(column) for part in (outputs, *saves.values()) for column in zip(*part)]
        number_lists = [[slot for replay in slots for slot in replay], states, *pairs]
        sent = indices([number for part in number_lists for number in part], device)
        rows, first, places, targets, *save_parts = sent.split([len(part) for part in number_lists])
        by_chunk = {chunk: (save_parts[2 * n], save_parts[2 * n + 1]) for n, chunk in enumerate(saves)}
        return cls(rows.view(len(replays), -1), first, places, targets, by_chunk)


def _num_chunks(replay: PathReplay, history: int) -> int:
    """Return the number of chunks of a path, the last one perhaps partly filled.

    replay: The path through a sequence.
    history: Number of preceding tokens that a convolution reads.
    """
    return -(-(len(replay.slots) - history) // CHUNK)


class DeltaPages(JoinedPages):
    """The pages of a range with gated delta layers.

    A page stores KV for layers that attend, and the inputs of each token for gated delta layers. `layers`
    lists the pages of both kinds in the order of the model's layers. Stored states are kept in addition.

    history: Number of preceding tokens that a convolution reads.
    batches: What the gated delta layers run for the current frame.
    """

    # States are stored only at multiples of this position of a sequence.
    step = CHUNK

    def __init__(
        self,
        config: ModelConfig,
        layers: Range,
        pages: int,
        page_rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_dtype: KvDtype,
    ) -> None:
        """Reserve the pages and the stored states, filled with zeros.

        ModelError is raised if the memory cannot be reserved.

        config: The model's config.
        layers: The range of layers.
        pages: Number of pages of every layer.
        page_rows: Rows (tokens) of a page.
        dtype: Type of stored inputs, and of KV unless `kv_dtype` says int8.
        device: Device of the pages.
        kv_dtype: Type of the KV of layers that attend; "auto" means `dtype`.
        """
        is_delta = [config.recurrent(layer) for layer in range(layers.first, layers.last)]
        shape = config.delta or Delta()
        sizes = pages, page_rows, config.kv_heads, config.head_dim
        attending = KVPages(is_delta.count(False), *sizes, dtype, device, kv_dtype)
        inputs = KVPages(is_delta.count(True), pages, page_rows, 1, shape.half, dtype, device)
        places = [(kind, is_delta[:layer].count(kind)) for layer, kind in enumerate(is_delta)]
        super().__init__((attending, inputs), places)
        num_states = states_for(pages * page_rows)
        self.history = shape.kernel - 1
        self._cached_states = CachedStates(
            num_states - 1, page_rows, self.step, lambda page: self.shared(page)
        )
        self.batches: tuple[ReplayBatch, ...] = ()
        sizes = num_states, shape.value_heads, shape.key_dim, shape.value_dim
        self._states = untouched_zeros((is_delta.count(True), *sizes), torch.float32, device)

    @property
    def bytes(self) -> int:
        """Return the bytes of KV, stored inputs and stored states of all layers."""
        return super().bytes + self._states.nbytes

    def arrange(self, spans: Sequence[RowSpan]) -> None:
        """Plan what gated delta layers run for a frame; call it before the layers run. A range without such
        layers runs nothing.

        States that follow from rows that the frame overwrites are dropped, and states to save are reserved.

        spans: One span per segment of the frame, in row order.
        """
        by_chunks: dict[int, list[PathReplay]] = {}
        for replay in self._cached_states.plan(spans, self.history) if len(self._states) else ():
            by_chunks.setdefault(_num_chunks(replay, self.history), []).append(replay)
        options = self.history, self._cached_states.count, self._states.device
        self.batches = tuple(ReplayBatch.of_paths(replays, *options) for replays in by_chunks.values())

    def inputs(self, layer: int, slots: Tensor) -> Tensor:
        """Return stored inputs, [replays, rows, 2 * half]; 0 for negative slots.

        layer: Index of the layer within the range.
        slots: LongTensor [replays, rows], KV slots; negative where there is no token.
        """
        rows = self.layers[layer].flatten(1, 3)[:, slots.clamp_min(0).flatten()]
        replays = rows.transpose(0, 1).reshape(*slots.shape, -1)
        return replays.masked_fill(slots.unsqueeze(-1) < 0, 0)

    def states(self, layer: int) -> Tensor:
        """Return the stored states of a layer, fp32 [states, value_heads, key_dim, value_dim].

        layer: Index of a gated delta layer within the range.
        """
        return self._states[self._places[layer][1]]

    def finish(self, layer: int) -> None:
        """Record that a layer has run. After the last gated delta layer of the range, the states that the
        frame saves become valid.

        layer: Index of a gated delta layer within the range.
        """
        if self._places[layer][1] == len(self._states) - 1:
            self._cached_states.commit()

    def move(self, moves: Moves) -> None:
        """Move KV and inputs, and drop the states that follow from the target slots.

        Empty moves change nothing.

        moves: Pairs (source slot, target slot).
        """
        super().move(moves)
        self._forget_rows([target for _, target in moves])

    def copy_page(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of a page, and the page's state if it follows from these rows alone.

        The state that `target` had is dropped. If no state can be freed for the copy, `target` has none.

        source: Number of the page that is read.
        target: Number of the page that is written.
        rows: Number of rows to copy, from the page's first row on.
        """
        super().copy_page(source, target, rows)
        if copied := self._cached_states.copy(source, target, rows):
            self._states[:, copied[1]] = self._states[:, copied[0]]

    def clear_rows(self, slots: Sequence[int]) -> None:
        """Zero KV and inputs of rows in every layer, and drop the states that follow from them.

        slots: Slots of the rows, page * page_rows + offset.
        """
        super().clear_rows(slots)
        self._forget_rows(slots)

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zero pages in every layer, and drop their states.

        pages: Numbers of the pages.
        """
        super().clear_pages(pages)
        for page in pages:
            self._cached_states.discard_from(page)

    def _forget_rows(self, slots: Sequence[int]) -> None:
        """Drop the states that follow from some rows, because the rows are overwritten.

        slots: Slots of the rows, page * page_rows + offset.
        """
        for slot in slots:
            self._cached_states.discard_from(*divmod(slot, self.page_rows))


class WalkedPages(DeltaPages):
    """Pages for GPU kernels, which run tokens one by one except for long prompts.

    A state may be stored after any token.

    walks: What the layers run for the current frame, one walk after another.
    """

    step = 1
    walks: Sequence[WalkTables]

    def arrange(self, spans: Sequence[RowSpan]) -> None:
        """Plan the walks of a frame.

        A range without gated delta layers plans nothing.

        spans: One span per segment, in row order. Empty in a CUDA graph, where `use_tables` has set the walks
            already.
        """
        if spans and len(self._states):
            replays = self._cached_states.find(spans)
            self.walks = [
                self._send_walk(block)
                for block in in_blocks(self._reserve_states(self._sequences(replays), replays))
            ]

    def table_sizes(self, rows: int) -> WalkRoom:
        """Return the table sizes for frames of at most so many rows.

        rows: Rows of the largest frame.
        """
        return WalkRoom(rows, self.history)

    def fill(self, spans: Sequence[RowSpan], moves: Moves, table_sizes: WalkRoom) -> list[Numbers] | None:
        """Return the walk tables of a frame, or None if the graph has no room for them.

        The states that the frame stores become valid with `commit`. States that follow from the moves'
        targets, or from rows that the frame overwrites, are dropped even if None is returned; no state is
        reserved then.

        spans: One span per segment of the frame, in row order; at least one.
        moves: KV moves (source slot, target slot) that the graph does before its layers run.
        table_sizes: Sizes of the graph's tables, as the method `table_sizes` returned them.
        """
        self._forget_rows([target for _, target in moves])
        replays = self._cached_states.find(spans)
        sequences = self._sequences(replays)
        return (
            table_sizes.fill(walk_of(self._reserve_states(sequences, replays)))
            if table_sizes.holds(sequences)
            else None
        )

    def use_tables(self, tables: Sequence[Tensor], table_sizes: WalkRoom) -> None:
        """Let the layers read their walk from tables on the device.

        tables: int32 tensors with the shapes `table_sizes.shapes`.
        table_sizes: Sizes of the tables, as the method `table_sizes` returned them.
        """
        from specsot_kernels.gpu.delta import WalkTables

        self.walks = [WalkTables(*tables, aside=table_sizes.aside, many_chunks=table_sizes.chunks)]

    def commit(self) -> None:
        """Record that the frame of the last `fill` runs: the states that it stores are valid."""
        self._cached_states.commit()

    def _sequences(self, replays: Sequence[SpanReplay]) -> list[SequenceRows]:
        """Return the table rows of each sequence.

        replays: For each segment, from which state and position on its sequence runs.
        """
        return sequences_of_frame(replays, self.history, self.page_rows, self._cached_states.count)

    def _reserve_states(
        self, sequences: list[SequenceRows], replays: Sequence[SpanReplay]
    ) -> list[SequenceRows]:
        """Reserve states for a frame, mark them in the table rows, and return the table rows.

        sequences: Table rows of each sequence; changed in place.
        replays: For each segment, from which state and position on its sequence runs.
        """
        mark_saved_states(sequences, self._cached_states.reserve(replays))
        return sequences

    def _send_walk(self, walk: Walk) -> WalkTables:
        """Copy the tables of a walk to the device in one transfer, and return them.

        walk: The tables on the host.
        """
        from specsot_kernels.gpu.delta import WalkTables

        parts = walk.counts, walk.starts, walk.chunks, walk.rows
        padded = [np.pad(part.reshape(-1), (0, aligned(part.size) - part.size)) for part in parts]
        flat = torch.from_numpy(np.concatenate(padded))
        # Without pinned memory, the host would wait for all work on the device.
        if self._states.is_cuda:
            flat = flat.pin_memory().to(self._states.device, non_blocking=True)
        tables = views(flat, [part.shape for part in parts])
        return WalkTables(*tables, aside=walk.aside, many_chunks=int(walk.chunks[-1]))
