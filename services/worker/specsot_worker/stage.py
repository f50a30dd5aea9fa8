"""A layer range with its KV pages: applies a frame's KV operations and runs its tokens through the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import structlog
import torch

from specsot.core.frames import Frame, Payload, TreeSegment, tokens_of
from specsot.core.overlap import OverlapEvent
from specsot.core.pages import HeadShares, PageTable, RowPruning
from specsot.errors import WireError
from specsot.members import Layout, Range
from specsot.transport.pending_rows import PendingRows
from specsot_model.attention import AttentionPlan, RowSpan
from specsot_model.core.kv_plan import KvPlan, PolicySpan, plan_frame
from specsot_model.cuda_graphs import (
    BUCKETS,
    CapturedSteps,
    GraphCapture,
    StepRows,
    prompt_buckets,
    prompt_rows,
)
from specsot_model.decoder import Decoder, Tap
from specsot_model.kv import Moves, indices
from specsot_worker.migrated_kv import StageRows
from specsot_worker.overlap.next_step import NextStep, SpeculativeStep, Steps
from specsot_worker.stage_timers import make_timer

log = structlog.get_logger()

# Hidden states [num_tokens, hidden_size], and the fused features [num_tokens, feature_size] so far. None:
# there are none.
RowsOut = tuple[torch.Tensor | None, torch.Tensor | None]


class DecoderStage:
    """One layer range with its KV pages, for one epoch. Call `run` with frames strictly in order.

    uncaptured: Number of frames that ran kernel by kernel although CUDA graphs were captured.
    next_step: Launches the next step speculatively, before its frame arrives. None if this stage cannot:
        there are no CUDA graphs, it is not the whole model, or its layers have recurrent states.
    """

    def __init__(
        self,
        decoder: Decoder,
        pages: int,
        page_rows: int,
        layout: Layout = "batched",
        prepare_frame: Callable[[], None] | None = None,
    ) -> None:
        """Allocate the pages.

        decoder: The layers of the range.
        pages: Number of KV pages.
        page_rows: Number of KV slots of a page.
        layout: How attention lays out the tokens of several sequences.
        prepare_frame: Called before each frame runs.
        """
        self._decoder = decoder
        self._prepare_frame = prepare_frame
        self._layout: Layout = layout
        self._table = PageTable(pages, page_rows)
        self._kv = decoder.make_kv(pages, page_rows)
        self._kv.shared = self._table.shared
        self._taps: dict[int, Tap] = {}
        self._graphs: Steps | None = None
        self.next_step: NextStep | None = None
        self.rows = StageRows(self._table, self._kv, decoder.layers)
        self.uncaptured = 0
        first, last = decoder.layers.first == 0, decoder.layers.last == decoder.config.layers
        self._timer = make_timer(decoder.device, first, last)
        self._last = last
        self._whole = first and last

    @property
    def table(self) -> PageTable:
        """The page table, on which the stage applies every frame's operations."""
        return self._table

    @property
    def layers(self) -> Range:
        """The layer range of the stage."""
        return self._decoder.layers

    def tap(self, layer: int, weight: torch.Tensor) -> None:
        """Fuse the input of `layer` through `weight` [feature_size, hidden_size] into every frame from now
        on.

        Captured graphs and a predicted step become invalid.
        """
        self._taps[layer] = self._decoder.hold_tap(weight)
        self._graphs = self.next_step = None

    def prompt_rows(self, rows: int) -> int:
        """Return the maximum number of tokens of a frame that carries prompts only, if other frames may have
        `rows` tokens.
        """
        return prompt_rows(self._decoder, self._kv, rows)

    def capture(self) -> None:
        """Capture CUDA graphs, where the decoder can be captured. Call it once every tap has arrived; it
        takes seconds on a GPU.
        """
        if self._decoder.capturable:
            taps = {layer: tap for layer, tap in self._taps.items() if isinstance(tap, torch.Tensor)}
            wide = prompt_buckets(self._decoder, self._kv)
            self.run_by(CapturedSteps(self._decoder, self._kv, taps, GraphCapture(), prompt_sizes=wide))

    def run_by(self, graphs: Steps) -> None:
        """Run frames in these graphs from now on, as far as they fit."""
        self._graphs = graphs
        # Speculative launches need the whole model on one device. Layers with recurrent states are excluded:
        # a discarded step would have advanced the states.
        overlaps = self._whole and not self._decoder.config.delta
        vocabulary = self._decoder.config.vocab
        self.next_step = (
            NextStep(self._table, self._kv, graphs, vocabulary, self._timer.begin) if overlaps else None
        )

    @torch.inference_mode()
    def run(self, frame: Frame) -> Frame:
        """Apply the frame's header and run its tokens. Return the frame with this stage's hidden states and
        fused features.

        Raises WireError if the hidden states that arrived do not match the header, or if token ids are beyond
        the vocabulary.
        """
        if self._prepare_frame:
            self._prepare_frame()
        step = self.next_step.take(frame) if self.next_step else None
        if self.next_step and step is None:
            frame = self.next_step.without_applied_moves(frame)
        if step is None or not step.timed:
            self._timer.begin()
        hidden, fused = self._run_predicted(frame, step) if step else self._run_planned(frame)
        if self.next_step:
            self.next_step.predict(frame)
        seconds = (*frame.seconds, self._timer.end(0 if hidden is None else len(hidden)))
        if self._last and isinstance(frame.hidden, PendingRows):
            # An error in the transfer is raised on the last stage, which waits for the device anyway.
            frame.hidden.check()
        return replace(frame, hidden=hidden, fused=fused, seconds=seconds)

    def hold(self) -> None:
        """Stop counting time for a launched step: it waits for its frame."""
        if self.next_step:
            self.next_step.pause_timer()

    def _run_planned(self, frame: Frame) -> RowsOut:
        """Run a frame that was not launched before: plan it, change the pages, and run its tokens."""
        arrangement = plan_frame(self._table, frame)
        moves = self._change_pages(frame, arrangement)
        self.rows.fill(frame)
        passed = self._forward(frame, arrangement, moves) if arrangement.slots else (None, None)
        self._clear(arrangement.freed)
        return passed

    def _run_predicted(self, frame: Frame, step: SpeculativeStep) -> RowsOut:
        """Run a frame whose step was predicted: launch the step, if that has not been done, and use its
        outputs.
        """
        assert self.next_step is not None
        entry, before = self._inputs(frame, step.rows)
        hidden, fused = step.outputs or self.next_step.run_prepared(step, entry)
        step.apply(OverlapEvent.RELEASED)
        self.rows.fill(frame)
        self._clear(page for sequence in frame.closings for page in self._table.close(sequence))
        return hidden, _sum(fused, before)

    def _inputs(self, frame: Frame, rows: int) -> tuple[list[int] | torch.Tensor, torch.Tensor | None]:
        """Return what enters the range (token ids or hidden states), and the sum of the taps of previous
        stages.
        """
        inputs = self._entry_rows(frame, rows), None if frame.fused is None else self._to_device(frame.fused)
        self._timer.mark_input()
        return inputs

    def _forward(self, frame: Frame, arrangement: KvPlan, moves: Moves) -> RowsOut:
        """Run the tokens in a CUDA graph if one fits, else kernel by kernel.

        A graph sums up the taps of this stage only, so the sum of previous stages is added afterwards. Graphs
        need all layers of the range to see the same KV; it suffices to compare the first layer with the last.
        """
        entry, before = self._inputs(frame, len(arrangement.slots))
        ends = self.layers.first, self.layers.last - 1
        spans, others = ([span.at(layer) for span in arrangement.spans] for layer in ends)
        rows = StepRows(entry, arrangement.positions, arrangement.slots, spans, moves)
        alike = all(one.sight is other.sight for one, other in zip(spans, others))
        passed = self._graphs.run(rows) if self._graphs and alike else None
        if passed is None:
            self._warn_uncaptured(len(arrangement.slots), len(spans), alike)
            return self._run_eager(rows, self._plans(arrangement.spans), before)
        return passed[0], _sum(passed[1], before)

    def _warn_uncaptured(self, rows: int, sequences: int, alike: bool) -> None:
        """Log a warning for the first frame that runs without a graph although graphs were captured. Such a
        step takes two or three times as long.
        """
        # Frames with more tokens than that carry prompts only, see `prompt_rows`.
        missed = self._graphs is not None and rows <= BUCKETS[-1]
        self.uncaptured += missed
        if self.uncaptured == 1 and missed:
            why = "no graph has room for it" if alike else "layers that see different rows have none"
            log.warning("a frame runs without a graph", rows=rows, sequences=sequences, why=why)

    def _plans(self, spans: Sequence[RowSpan]) -> list[AttentionPlan]:
        """Return the attention plan of each layer. Layers in which tokens see the same KV share a plan."""
        if not any(isinstance(span, PolicySpan) for span in spans):
            return [self._plan(spans)] * len(self.layers)
        layers = range(self.layers.first, self.layers.last)
        by_layer = [tuple(span.at(layer) for span in spans) for layer in layers]
        plans = {here: self._plan(here) for here in set(by_layer)}
        return [plans[here] for here in by_layer]

    def _plan(self, spans: Sequence[RowSpan]) -> AttentionPlan:
        """Return the attention plan for tokens that see these spans."""
        return self._decoder.plan(spans, self._table.page_rows, self._layout)

    def _run_eager(
        self, rows: StepRows, plans: Sequence[AttentionPlan], fused: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the tokens kernel by kernel, which every device can."""
        decoder = self._decoder
        entry = rows.entry
        self._kv.move(rows.moves)
        return decoder.forward(
            entry if isinstance(entry, torch.Tensor) else decoder.embed(indices(entry, decoder.device)),
            indices(rows.positions, decoder.device),
            indices(rows.slots, decoder.device),
            plans,
            self._kv,
            self._taps,
            fused,
        )

    def _entry_rows(self, frame: Frame, rows: int) -> list[int] | torch.Tensor:
        """Return what enters the range: token ids on the first stage, else the hidden states that arrived.

        rows: Number of tokens of the frame.

        Raises WireError if they do not match the frame, or if a token id is beyond the vocabulary.
        """
        if self._decoder.layers.first == 0:
            tokens = [token for segment in frame.segments for token in tokens_of(segment)]
            vocab = self._decoder.config.vocab
            # On a GPU, reading out of the embedding's bounds would destroy the CUDA context.
            if min(tokens) < 0 or max(tokens) >= vocab:
                raise WireError(f"frame {frame.number} has token ids beyond {vocab}")
            return tokens
        hidden = frame.hidden
        if hidden is None or tuple(hidden.shape) != (rows, self._decoder.config.hidden):
            shape = None if hidden is None else tuple(hidden.shape)
            raise WireError(f"frame {frame.number} has {rows} rows but hidden rows of shape {shape}")
        return self._to_device(hidden)

    def _to_device(self, rows: Payload) -> torch.Tensor:
        """Return the hidden states on this stage's device, in its dtype."""
        return rows.to(self._decoder.device, self._decoder.dtype)

    def _rejected_slots(self, segment: TreeSegment) -> Sequence[int]:
        """Return the KV slots of the sequence from its root to the end of its pages: rejected drafts lie
        there.

        For example:

            # committed 10, pages of 8 slots, 2 pages -> slots of positions 10..15
        """
        table = self._table
        sequence = segment.sequence
        row = segment.committed
        rows = len(table.pages(sequence)) * table.page_rows - table.column(sequence, row)
        return table.slots(sequence, row, row + rows)

    def _change_pages(self, frame: Frame, arrangement: KvPlan) -> Moves:
        """Apply what must precede the frame's new tokens: clear pages, copy pages, prune.

        Returns the moves of accepted KV that remain for whatever runs the tokens. Before a pruning the moves
        are applied at once, because pruning reads the moved KV.
        """
        for page in arrangement.trimmed:
            self._kv.clear_page(page)
        for segment in frame.segments:
            # Values that are not finite in rejected drafts must not reach the root when it is fed once more.
            if isinstance(segment, TreeSegment) and segment.once_more:
                self._kv.clear_rows(self._rejected_slots(segment))
        for copy in arrangement.copies:
            self._kv.copy_page(copy.source, copy.target, copy.rows)
        if not arrangement.prunings:
            return arrangement.moves
        self._kv.move(arrangement.moves)
        for pruning in arrangement.prunings:
            self._prune(pruning)
        return ()

    def _prune(self, pruning: RowPruning) -> None:
        """Prune a sequence's KV in those layers of this stage that do not keep all of it."""
        slots = pruning.sources, pruning.targets
        sources, targets = (torch.tensor(each, device=self._decoder.device) for each in slots)
        for layer in range(max(pruning.skip - self.layers.first, 0), len(self.layers)):
            own = None
            counts = None
            if pruning.heads:
                own, counts = self._head_rows(pruning.heads, self.layers.first + layer, len(sources))
            self._kv.keep_least(layer, sources, targets, own, counts)

    def _head_rows(self, shares: HeadShares, layer: int, sources: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which of the source slots belong to each KV head, bool [sources, num_kv_heads], and how many
        slots each head keeps.

        layer: Number of the layer in the model.
        sources: Number of source slots.

            # two heads kept 2 and 3 positions, then 2 more followed:
            # sources [c0 c1 c2 | c3 c4], shares.shared 3, shares.before (2, 3)
            # -> first head True for c0 c1 c3 c4, second head True for all
        """
        device = self._decoder.device
        before, after = (torch.tensor(each[layer], device=device) for each in (shares.before, shares.after))
        columns = torch.arange(sources, device=device)[:, None]
        return (columns < before) | (columns >= shares.shared), after

    def _clear(self, freed: Iterable[int]) -> None:
        """Clear freed pages. This comes last, because the closing frame itself may have written to them."""
        for page in freed:
            self._kv.clear_page(page)


def _sum(fused: torch.Tensor | None, before: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of this stage's taps and those of previous stages. None if there are neither."""
    if fused is None or before is None:
        return before if fused is None else fused
    return fused.add_(before)
