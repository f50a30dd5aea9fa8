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
    keep,
    sequences_of_frame,
    walk_of,
)
from specsot_model.kv import KVPages, Moves, Numbers, Places, aligned, indices, untouched_zeros, views

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
    def of(cls, replays: Sequence[PathReplay], history: int, begun: int, device: torch.device) -> ReplayBatch:
        """Make the batch. begun: number of the zero state, from which a new sequence starts."""
        width = _chunks(replays[0], history) * CHUNK
        slots = [one.slots + (-1,) * (history + width - len(one.slots)) for one in replays]
        states = [begun if one.state is None else one.state for one in replays]
        outputs = [(run * width + at, row) for run, one in enumerate(replays) for row, at in one.outputs]
        saves: dict[int, list[tuple[int, int]]] = {}
        for run, one in enumerate(replays):
            for chunk, state in one.saves:
                saves.setdefault(chunk, []).append((run, state))
        pairs = [list(each) for part in (outputs, *saves.values()) for each in zip(*part)]
        parts = [[slot for one in slots for slot in one], states, *pairs]
        sent = indices([number for part in parts for number in part], device)
        rows, first, places, targets, *kept = sent.split([len(part) for part in parts])
        by_chunk = {chunk: (kept[2 * n], kept[2 * n + 1]) for n, chunk in enumerate(saves)}
        return cls(rows.view(len(replays), -1), first, places, targets, by_chunk)


def _chunks(replay: PathReplay, history: int) -> int:
    """Return the number of chunks of a path, the last one perhaps partly filled."""
    return -(-(len(replay.slots) - history) // CHUNK)


class DeltaPages(KVPages):
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
        kept: KvDtype,
    ) -> None:
        delta = [config.recurrent(layer) for layer in range(layers.first, layers.last)]
        sizes = pages, page_rows, config.kv_heads, config.head_dim
        super().__init__(delta.count(False), *sizes, dtype, device, kept)
        shape = config.delta or Delta()
        self._inputs = KVPages(delta.count(True), pages, page_rows, 1, shape.half, dtype, device)
        self._places = [(one, delta[:layer].count(one)) for layer, one in enumerate(delta)]
        both = self.layers, self._inputs.layers
        self.layers = tuple(both[one][index] for one, index in self._places)
        many = states_for(pages * page_rows)
        self.history = shape.kernel - 1
        self._kept = CachedStates(many - 1, page_rows, self.step, lambda page: self.shared(page))
        self.batches: tuple[ReplayBatch, ...] = ()
        sizes = many, shape.value_heads, shape.key_dim, shape.value_dim
        self._states = untouched_zeros((delta.count(True), *sizes), torch.float32, device)

    @property
    def bytes(self) -> int:
        return super().bytes + self._inputs.bytes + self._states.nbytes

    def arrange(self, spans: Sequence[RowSpan]) -> None:
        """Plan what gated delta layers run for a frame; call it before the layers run."""
        by_chunks: dict[int, list[PathReplay]] = {}
        for one in self._kept.plan(spans, self.history) if len(self._states) else ():
            by_chunks.setdefault(_chunks(one, self.history), []).append(one)
        given = self.history, self._kept.count, self._states.device
        self.batches = tuple(ReplayBatch.of(alike, *given) for alike in by_chunks.values())

    def inputs(self, layer: int, slots: Tensor) -> Tensor:
        """Return the inputs stored at slots [replays, rows]: [replays, rows, 2 * half]; 0 for slots < 0."""
        rows = self.layers[layer].flatten(1, 3)[:, slots.clamp_min(0).flatten()]
        found = rows.transpose(0, 1).reshape(*slots.shape, -1)
        return found.masked_fill(slots.unsqueeze(-1) < 0, 0)

    def states(self, layer: int) -> Tensor:
        """Return the stored states of a layer, fp32 [states, value_heads, key_dim, value_dim]."""
        return self._states[self._places[layer][1]]

    def finish(self, layer: int) -> None:
        """Record that a layer has run. After the last gated delta layer, the saved states become valid."""
        if self._places[layer][1] == len(self._states) - 1:
            self._kept.commit()

    def put(self, layer: int, places: Places, kv: Tensor) -> None:
        """Write the KV of a layer that attends, or the inputs [rows, 2, 1, half] of a gated delta layer."""
        delta, index = self._places[layer]
        if delta:
            self._inputs.put(index, places, kv)
        else:
            super().put(index, places, kv)

    def move(self, moves: Moves) -> None:
        """Move KV and inputs, and drop the states that follow from the target slots."""
        super().move(moves)
        self._inputs.move(moves)
        self._forget_rows([target for _, target in moves])

    def copy_page(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of a page, and the page's state if it follows from these rows alone."""
        super().copy_page(source, target, rows)
        self._inputs.copy_page(source, target, rows)
        if copied := self._kept.copy(source, target, rows):
            self._states[:, copied[1]] = self._states[:, copied[0]]

    def clear_rows(self, slots: Sequence[int]) -> None:
        super().clear_rows(slots)
        self._inputs.clear_rows(slots)
        self._forget_rows(slots)

    def clear_page(self, page: int) -> None:
        super().clear_page(page)
        self._inputs.clear_page(page)
        self._kept.forget(page)

    def _forget_rows(self, slots: Sequence[int]) -> None:
        """Drop the states that follow from these slots, because the slots are overwritten."""
        for slot in slots:
            self._kept.forget(*divmod(slot, self.page_rows))


class WalkedPages(DeltaPages):
    """Pages for GPU kernels, which run tokens one by one except for long prompts.

    A state may be stored after any token.

    walks: What the layers run for the current frame, one walk after another.
    """

    step = 1
    walks: Sequence[WalkTables]

    def arrange(self, spans: Sequence[RowSpan]) -> None:
        """Plan the walks of a frame. In a CUDA graph there are no spans; `read` has set the walks already."""
        if spans and len(self._states):
            found = self._kept.find(spans)
            self.walks = [
                self._sent(block) for block in in_blocks(self._kept_too(self._sequences(found), found))
            ]

    def room(self, rows: int) -> WalkRoom:
        """Return the table sizes for frames of at most `rows` rows."""
        return WalkRoom(rows, self.history)

    def fill(self, spans: Sequence[RowSpan], moves: Moves, room: WalkRoom) -> list[Numbers] | None:
        """Return the walk tables of a frame, or None if the graph has no room for them.

        moves: KV moves that the graph does before its layers run.

        The states that the frame stores become valid with `commit`.
        """
        self._forget_rows([target for _, target in moves])
        found = self._kept.find(spans)
        sequences = self._sequences(found)
        return room.fill(walk_of(self._kept_too(sequences, found))) if room.holds(sequences) else None

    def read(self, tables: Sequence[Tensor], room: WalkRoom) -> None:
        """Let the layers read their walk from these int32 tables, with the shapes `room.shapes`."""
        from specsot_kernels.gpu.delta import WalkTables

        self.walks = [WalkTables(*tables, aside=room.aside, many_chunks=room.chunks)]

    def commit(self) -> None:
        """Record that the frame of the last `fill` runs: the states that it stores are valid."""
        self._kept.commit()

    def move_on_device(self, moves: Tensor) -> None:
        """Move KV and inputs on the GPU; `fill` has dropped the states of the targets already."""
        super().move_on_device(moves)
        self._inputs.move_on_device(moves)

    def _sequences(self, found: Sequence[SpanReplay]) -> list[SequenceRows]:
        """Return the table rows of each sequence."""
        return sequences_of_frame(found, self.history, self.page_rows, self._kept.count)

    def _kept_too(self, sequences: list[SequenceRows], found: Sequence[SpanReplay]) -> list[SequenceRows]:
        """Reserve states and mark them in the table rows."""
        keep(sequences, self._kept.reserve(found))
        return sequences

    def _sent(self, walk: Walk) -> WalkTables:
        """Copy the tables of a walk to the device in one transfer."""
        from specsot_kernels.gpu.delta import WalkTables

        parts = walk.counts, walk.starts, walk.chunks, walk.rows
        padded = [np.pad(part.reshape(-1), (0, aligned(part.size) - part.size)) for part in parts]
        flat = torch.from_numpy(np.concatenate(padded))
        # Without pinned memory, the host would wait for all work on the device.
        if self._states.is_cuda:
            flat = flat.pin_memory().to(self._states.device, non_blocking=True)
        tables = views(flat, [part.shape for part in parts])
        return WalkTables(*tables, aside=walk.aside, many_chunks=int(walk.chunks[-1]))
