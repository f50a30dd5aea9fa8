"""A layer range with its KV pages: applies a frame's KV operations and runs its tokens through the layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

import structlog
import torch

from specsot.core.frames import Frame, Payload, TreeSegment, num_tokens_of, tokens_of
from specsot.core.overlap import OverlapEvent
from specsot.core.pages import HeadShares, PageTable, RowPruning
from specsot.core.tree import single
from specsot.errors import WireError
from specsot.members import Layout, Range
from specsot.phases import timed_phase
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
from specsot_model.inference import inference_mode
from specsot_model.kv import Moves, indices
from specsot_worker.hidden_log import HiddenLog
from specsot_worker.migrated_kv import StageRows
from specsot_worker.overlap.next_step import NextStep, SpeculativeStep, Steps
from specsot_worker.stage_timers import make_timer

log = structlog.get_logger()

# Hidden states [num_tokens, hidden_size], and the fused features [num_tokens, feature_size] so far. None:
# there are none.
RowsOut = tuple[torch.Tensor | None, torch.Tensor | None]


class DecoderStage:
    """One layer range with its KV pages, for one epoch. Call `run` with frames strictly in order.

    rows: Migrates the KV of the stage's pages to and from other workers between epochs.
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
        prepare_frame: Called before each frame runs. None: nothing is called.
        """
        self._decoder = decoder
        self._prepare_frame = prepare_frame
        self._layout: Layout = layout
        self._table = PageTable(pages, page_rows)
        self._kv = decoder.make_kv(pages, page_rows)
        self._kv.shared = self._table.is_shared
        self._taps: dict[int, Tap] = {}
        self._graphs: Steps | None = None
        self.next_step: NextStep | None = None
        self.uncaptured = 0
        first, last = decoder.layers.first == 0, decoder.layers.last == decoder.config.layers
        shape = pages, page_rows, decoder.config.hidden
        self._log = None if last else HiddenLog(*shape, decoder.dtype, decoder.device)
        self.rows = StageRows(self._table, self._kv, decoder.layers, self._log)
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
        """From now on, fuse the input of a layer into the features of every frame. Captured graphs and a
        predicted step become invalid.

        layer: Number of the layer in the model, within this range.
        weight: Slice of the draft head's weights for this layer, [feature_size, hidden_size].

        Call `capture` afterwards for graphs with this tap.
        """
        self._taps[layer] = self._decoder.hold_tap(weight)
        self._graphs = self.next_step = None

    def prompt_rows(self, rows: int) -> int:
        """Return the maximum number of tokens of a frame that carries prompts only. It is at least `rows`.

        rows: Maximum number of tokens of other frames.
        """
        return prompt_rows(self._decoder, self._kv, rows)

    def capture(self) -> None:
        """Capture CUDA graphs, where the decoder can be captured; elsewhere do nothing. Call it once every
        tap has arrived; it takes seconds on a GPU.

        Graphs of earlier captures are replaced.
        """
        if self._decoder.capturable:
            taps = {layer: tap for layer, tap in self._taps.items() if isinstance(tap, torch.Tensor)}
            wide = prompt_buckets(self._decoder, self._kv)
            with timed_phase("captured graphs", what="steps"):
                self.run_by(CapturedSteps(self._decoder, self._kv, taps, GraphCapture(), prompt_sizes=wide))

    def run_by(self, graphs: Steps) -> None:
        """Run frames in these graphs from now on, as far as they fit, and predict steps if the stage can.

        graphs: Runs whole frames, see `Steps`.

        `next_step` is set for a stage that runs the whole model without recurrent states, and None
        otherwise.
        """
        self._graphs = graphs
        # Speculative launches need the whole model on one device. Layers with recurrent states are excluded:
        # a discarded step would have advanced the states.
        overlaps = self._whole and not self._decoder.config.delta
        vocabulary = self._decoder.config.vocab
        self.next_step = (
            NextStep(self._table, self._kv, graphs, vocabulary, self._timer.begin) if overlaps else None
        )

    @inference_mode
    def run(self, frame: Frame) -> Frame:
        """Apply the frame's header to the KV pages and run its tokens. Return the frame with this stage's
        hidden states, fused features and compute seconds. A frame without tokens has hidden states None.

        frame: The next frame: on stage 0 without hidden states, otherwise with those of the preceding stage.

        Raises WireError if the hidden states that arrived do not match the header, or if token ids are beyond
        the vocabulary.

        If the frame's step was predicted, its outputs are used; otherwise the frame is planned here. Then
        the step after it is predicted if the stage can. `seconds` of the result are those of the preceding
        stages followed by this stage's. An error in the transfer of hidden states is raised on the last
        stage. Of a frame of several passes whose step was not predicted, the first pass is run, and the
        verifier launches the others (`NextStep.run_passes`).
        """
        if self._prepare_frame:
            self._prepare_frame()
        step = self.next_step.take(frame) if self.next_step else None
        if self.next_step and step is None:
            frame = self.next_step.without_applied_moves(frame)
        if step is None or not step.timed:
            self._timer.begin()
        if frame.replay:
            hidden, fused = self._replay(frame), None
        elif step:
            hidden, fused = self._run_predicted(frame, step)
        elif self.next_step and num_tokens_of(frame.segments) > BUCKETS[-1]:
            hidden, fused = self._run_apart(frame)
        else:
            hidden, fused = self._run_planned(self._first_pass(frame))
        if self.next_step:
            self.next_step.predict(frame)
        seconds = (*frame.seconds, self._timer.end(0 if hidden is None else hidden.shape[0]))
        if self._last and isinstance(frame.hidden, PendingRows):
            # An error in the transfer is raised on the last stage, which waits for the device anyway.
            frame.hidden.check()
        return frame.with_outputs(hidden, fused, seconds)

    def _run_apart(self, frame: Frame) -> RowsOut:
        """Run the trees of a frame and then its prompts in a pass of their own, and return the hidden states
        and fused features of both.

        frame: A frame of a stage that runs the whole model, with more tokens than the graphs for any frame
            have. It has prompts, and it may have trees whose step was launched ahead and discarded.

        One pass over all of it would have no graph, and might need more memory than was reserved for passes.
        """
        trees = tuple(one for one in frame.segments if isinstance(one, TreeSegment))
        if not trees:
            return self._run_planned(frame)
        first = self._run_planned(replace(frame, openings=(), segments=trees, closings=()))
        second = self._run_planned(replace(frame, segments=frame.segments[len(trees) :]))
        return _joined(first[0], second[0]), _joined(first[1], second[1])

    def _first_pass(self, frame: Frame) -> Frame:
        """Return the first pass of a frame of several passes, which feeds the roots alone, and reserve pages
        for all passes. A frame of one pass is returned as it is.

        frame: The frame to run.
        """
        if not frame.extra_passes:
            return frame
        roots = list[TreeSegment]()
        for one in frame.segments:
            assert isinstance(one, TreeSegment)
            roots.append(one.with_tree(single(one.tree.tokens[0])))
            self._table.reserve(one.sequence, one.committed + len(one.tree.tokens))
        return replace(frame, segments=tuple(roots))

    def pause_compute_timer(self) -> None:
        """Stop counting compute time for a launched step, which waits for its frame. Nothing happens without
        one.
        """
        if self.next_step:
            self.next_step.pause_timer()

    def _run_planned(self, frame: Frame) -> RowsOut:
        """Run a frame that was not launched before: plan it, change the pages, and run its tokens. Return
        hidden states and fused features, both None for a frame without tokens.

        frame: The frame to run.

        KV pages of sequences that the frame closes are cleared. Raises WireError as `run` does, and if
        migrated KV is missing.
        """
        plan = plan_frame(self._table, frame)
        moves = self._prepare_pages(frame, plan)
        self.rows.fill(frame)
        outputs = self._forward(frame, plan, moves) if plan.slots else (None, None)
        if self._log:
            self._log.record(frame, plan, outputs[0])
        # This comes last, because the closing frame itself may have written to the freed pages.
        if plan.freed:
            self._kv.clear_pages(plan.freed)
        return outputs

    def _replay(self, frame: Frame) -> torch.Tensor | None:
        """Put the KV that was kept of a frame's reused tokens into its pages, and compute the KV of the
        layers that were lost. Return the hidden states after the last layer, [num_tokens, hidden_size], if
        the next stage needs them, because the lost layers reach beyond this stage; else None.

        frame: The frame with `replay`, of which openings and chunks of reused tokens are read.

        The first lost layer reads the tokens' embedding, the hidden states that the stage before has
        computed, or those that the stage before the lost one has logged. Raises WireError if they are
        missing.

            # layers 10:19 were lost, this stage runs 10:14: reads the log of layer 10, runs 10..13, returns
            # what enters layer 14; the next stage runs 14:28: reads that, runs 14..18, returns None
        """
        plan = plan_frame(self._table, frame)
        self._prepare_pages(frame, plan)
        self.rows.put_kept(frame, plan.slots)
        lost = self.rows.lost
        hidden = self._compute_lost(frame, plan, lost) if lost and plan.slots else None
        passed = hidden if lost and lost.last == self.layers.last else None
        if self._log:
            self._log.record(frame, plan, passed)
        if plan.freed:
            self._kv.clear_pages(plan.freed)
        return None if self._last else passed

    def _compute_lost(self, frame: Frame, plan: KvPlan, lost: Range) -> torch.Tensor:
        """Compute the KV of the lost layers for a frame's reused tokens. Return the hidden states after the
        last of these layers, [num_tokens, hidden_size].

        frame: The frame with `replay`.
        plan: Positions, KV slots and visible KV of its tokens.
        lost: The lost layers of this stage.
        """
        decoder = self._decoder
        if lost.first == 0 or frame.hidden is not None:
            entry = self._entry_rows(frame, len(plan.slots))
        else:
            entry = self._to_device(self.rows.hidden_entering(frame, lost.first))
        return decoder.run_layers(
            lost,
            entry if isinstance(entry, torch.Tensor) else decoder.embed(indices(entry, decoder.device)),
            indices(plan.positions, decoder.device),
            indices(plan.slots, decoder.device),
            self._plans(plan.spans),
            self._kv,
            self._tokens(frame),
        )

    def _run_predicted(self, frame: Frame, step: SpeculativeStep) -> RowsOut:
        """Run a frame whose trees were predicted: launch their step, if that has not been done, and then run
        the frame's prompts in a pass of their own. Return the hidden states and fused features of both.

        frame: The frame to run.
        step: The predicted step of its trees, in the state PREPARED or CONFIRMED.

        The frame's sequences are opened after its trees were launched, which the trees do not notice: an
        opening forks only tokens that earlier frames have fed. The sequences that the frame closes are closed
        in the page table at the end, and their pages cleared. Only a stage that runs the whole model has
        predicted steps, so no previous stage has taps.
        """
        assert self.next_step is not None
        # A launched step has its tokens already. Without `outputs`, the frame's tokens are sent now.
        outputs = step.outputs or self.next_step.run_prepared(step, self._entry_rows(frame, step.rows))
        step.apply(OverlapEvent.RELEASED)
        prompts = frame.segments[len(step.segments) :]
        if prompts or frame.openings:
            others = self._run_planned(replace(frame, segments=prompts, closings=()))
            outputs = _joined(outputs[0], others[0]), _joined(outputs[1], others[1])
            frame = replace(frame, openings=())
        self.rows.fill(frame)
        if freed := [page for sequence in frame.closings for page in self._table.close(sequence)]:
            self._kv.clear_pages(freed)
        return outputs

    def _inputs(self, frame: Frame, num_tokens: int) -> tuple[list[int] | torch.Tensor, torch.Tensor | None]:
        """Return what enters the range (token ids or hidden states), and the sum of the taps of previous
        stages, or None if there are none.

        frame: The frame to run.
        num_tokens: Number of its tokens.
        """
        inputs = (
            self._entry_rows(frame, num_tokens),
            None if frame.fused is None else self._to_device(frame.fused),
        )
        self._timer.mark_input()
        return inputs

    def _forward(self, frame: Frame, plan: KvPlan, moves: Moves) -> RowsOut:
        """Run the tokens in a CUDA graph if one fits, else kernel by kernel. Return hidden states and fused
        features.

        frame: The frame to run.
        plan: Positions, KV slots and visible KV of the frame's tokens.
        moves: Moves of accepted KV that precede the tokens.

        A graph sums up the taps of this stage only, so the sum of previous stages is added afterwards.

        Graphs need all layers of the range to see the same KV. Layers differ only if a KV policy skips the
        model's first layers (`skip_layers`), or has a window per head and layer. It suffices to compare the
        first layer of the range with the last: skipped layers come first, and with windows per head every
        call of `PolicySpan.at` returns a new `sight`, so that no two layers have the same object.

        A frame also runs kernel by kernel without captured graphs, and if its layers see different KV; this
        is counted, see `_warn_uncaptured`. A part of a frame always runs kernel by kernel, and is not
        counted: where graphs are captured, steps of many tokens take as long as steps of few, so that trees
        hardly ever travel in parts.
        """
        entry, earlier_taps = self._inputs(frame, len(plan.slots))
        end_layers = self.layers.first, self.layers.last - 1
        spans, last_spans = ([span.at(layer) for span in plan.spans] for layer in end_layers)
        rows = StepRows(entry, plan.positions, plan.slots, spans, moves)
        same_kv = all(one.sight is other.sight for one, other in zip(spans, last_spans))
        graphs = None if frame.last_part else self._graphs
        outputs = graphs.run(rows) if graphs and same_kv else None
        if outputs is None:
            if not frame.last_part:
                self._warn_uncaptured(len(plan.slots), len(spans), same_kv)
            return self._run_eager(rows, self._plans(plan.spans), earlier_taps, self._tokens(frame))
        return outputs[0], _sum(outputs[1], earlier_taps)

    def _warn_uncaptured(self, num_tokens: int, num_sequences: int, same_kv: bool) -> None:
        """Count a frame that runs without a graph although graphs were captured, and log a warning for the
        first one. Such a step takes two or three times as long.

        num_tokens: Number of tokens of the frame.
        num_sequences: Number of its sequences.
        same_kv: True if tokens see the same KV in all layers, so that only room was lacking.

        Nothing is counted without captured graphs, or for a frame with more tokens than the largest graph
        for trees.
        """
        # Frames with more tokens than that carry prompts only, see `prompt_rows`; or they were composed for
        # launched trees of one pass, and the launched step was discarded.
        missed = self._graphs is not None and num_tokens <= BUCKETS[-1]
        self.uncaptured += missed
        if self.uncaptured == 1 and missed:
            reason = "no captured graph has room for it" if same_kv else "its layers see different KV"
            log.warning(
                "frame ran without a CUDA graph",
                tokens=num_tokens,
                sequences=num_sequences,
                reason=reason,
            )

    def _plans(self, spans: Sequence[RowSpan]) -> list[AttentionPlan]:
        """Return the attention plan of each layer of the range. Layers in which tokens see the same KV share
        a plan.

        spans: For each sequence of the frame, its tokens and the KV that they see.

        Without a span of a KV policy, all layers share one plan. The list has one plan for each layer of the
        range, in order.
        """
        if not any(isinstance(span, PolicySpan) for span in spans):
            return [self._plan(spans)] * len(self.layers)
        layers = range(self.layers.first, self.layers.last)
        by_layer = [tuple(span.at(layer) for span in spans) for layer in layers]
        plans = {spans_here: self._plan(spans_here) for spans_here in set(by_layer)}
        return [plans[spans_here] for spans_here in by_layer]

    def _plan(self, spans: Sequence[RowSpan]) -> AttentionPlan:
        """Return the attention plan of one layer.

        spans: For each sequence of the frame, its tokens and the KV that they see in this layer.
        """
        return self._decoder.plan(spans, self._table.page_rows, self._layout)

    def _run_eager(
        self,
        rows: StepRows,
        plans: Sequence[AttentionPlan],
        earlier_taps: torch.Tensor | None,
        tokens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the tokens kernel by kernel, which every device can. Return hidden states [num_tokens,
        hidden_size], and fused features [num_tokens, feature_size] or None if there are no taps.

        rows: Inputs, positions, KV slots and KV moves of the frame's tokens.
        plans: Attention plan of each layer.
        earlier_taps: Sum of the taps of previous stages, [num_tokens, feature_size]. None: there are none.
        tokens: The token ids, [num_tokens], for layers that read them. None: no layer does.

        The KV moves are applied first.
        """
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
            earlier_taps,
            tokens,
        )

    def _tokens(self, frame: Frame) -> torch.Tensor | None:
        """Return the frame's token ids on the device, [num_tokens], if the layers of this range read them;
        else None.

        frame: The frame to run.

        Raises WireError if a token id is negative or beyond the vocabulary.
        """
        if not self._decoder.reads_tokens:
            return None
        return indices(self._checked_tokens(frame), self._decoder.device)

    def _entry_rows(self, frame: Frame, num_tokens: int) -> list[int] | torch.Tensor:
        """Return what enters the range: token ids on the first stage, else the hidden states that arrived, on
        the device.

        frame: The frame to run.
        num_tokens: Number of its tokens.

        Raises WireError if the hidden states do not match the frame, or if a token id is beyond the
        vocabulary.

        A missing hidden state raises WireError, too, and so does a negative token id. On the first stage,
        the hidden states of the frame are ignored.
        """
        if self._decoder.layers.first == 0:
            return self._checked_tokens(frame)
        hidden = frame.hidden
        if hidden is None or tuple(hidden.shape) != (num_tokens, self._decoder.config.hidden):
            shape = None if hidden is None else tuple(hidden.shape)
            raise WireError(
                f"frame {frame.number} has {num_tokens} tokens, but hidden states of shape {shape}"
            )
        return self._to_device(hidden)

    def _checked_tokens(self, frame: Frame) -> list[int]:
        """Return the frame's token ids, in the order of its tokens. Raises WireError for one beyond the
        vocabulary, and for a negative one.

        frame: The frame to run.
        """
        tokens = list(chain.from_iterable(map(tokens_of, frame.segments)))
        vocab = self._decoder.config.vocab
        # On a GPU, reading out of the embedding's bounds would destroy the CUDA context.
        if min(tokens) < 0 or max(tokens) >= vocab:
            raise WireError(f"frame {frame.number} has token ids beyond {vocab}, the size of the vocabulary")
        return tokens

    def _to_device(self, hidden: Payload) -> torch.Tensor:
        """Return a tensor that arrived with a frame on this stage's device, in the stage's dtype. The shape
        stays the same.

        hidden: Hidden states or fused features, which may still be on their way.
        """
        return hidden.to(self._decoder.device, self._decoder.dtype)

    def _rejected_slots(self, segment: TreeSegment) -> Sequence[int]:
        """Return the KV slots of a sequence from its root to the end of its pages: rejected drafts lie there.
        Return an empty sequence if its pages end right before the root.

        segment: The tree segment of the sequence, whose root is at position `committed`.

        For example:

            # committed 10, pages of 8 slots, 2 pages -> slots of positions 10..15
        """
        table = self._table
        sequence = segment.sequence
        position = segment.committed
        end = len(table.pages(sequence)) * table.page_rows - table.column(sequence, position)
        return table.slots(sequence, position, position + end)

    def _prepare_pages(self, frame: Frame, plan: KvPlan) -> Moves:
        """Apply what must precede the frame's new tokens: clear pages, copy pages, prune.

        frame: The frame to run.
        plan: The page operations and KV moves of the frame.

        Returns the moves of accepted KV that remain for whatever runs the tokens. If the frame prunes a
        sequence, the moves are applied at once, because pruning reads the moved KV; then () is returned.

        Trimmed pages are cleared. For a tree whose root is fed once more, the slots from its root on are
        cleared, because rejected drafts there may not be finite.
        """
        if plan.trimmed:
            self._kv.clear_pages(plan.trimmed)
        for segment in frame.segments:
            # Values that are not finite in rejected drafts must not reach the root when it is fed once more.
            if isinstance(segment, TreeSegment) and segment.once_more:
                self._kv.clear_rows(self._rejected_slots(segment))
        for copy in plan.copies:
            self._kv.copy_page(copy.source, copy.target, copy.rows)
        if not plan.prunings:
            return plan.moves
        self._kv.move(plan.moves)
        for pruning in plan.prunings:
            self._prune(pruning)
        return ()

    def _prune(self, pruning: RowPruning) -> None:
        """Prune a sequence's KV in those layers of this stage that do not keep all of it. Nothing happens if
        all layers of the stage precede the first pruned layer.

        pruning: Slots before and after, the first layer that is pruned, and each head's share.

        Layers before the first pruned one keep all KV. Without shares per head, every head keeps the same
        number of slots.
        """
        slots = pruning.sources, pruning.targets
        sources, targets = (torch.tensor(each, device=self._decoder.device) for each in slots)
        for layer in range(max(pruning.skip - self.layers.first, 0), len(self.layers)):
            head_rows = None
            counts = None
            if pruning.heads:
                head_rows, counts = self._head_rows(pruning.heads, self.layers.first + layer, len(sources))
            self._kv.keep_smallest_keys(layer, sources, targets, head_rows, counts)

    def _head_rows(
        self, shares: HeadShares, layer: int, num_sources: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which of the source slots belong to each KV head, bool [num_sources, num_kv_heads], and how
        many slots each head keeps, int [num_kv_heads].

        shares: What each head of each layer has kept so far, and is to keep.
        layer: Number of the layer in the model.
        num_sources: Number of source slots.

        For example:

            # two heads kept 2 and 3 positions, then 2 more followed:
            # sources [c0 c1 c2 | c3 c4], shares.shared 3, shares.before (2, 3)
            # -> first head True for c0 c1 c3 c4, second head True for all
        """
        device = self._decoder.device
        before, after = (torch.tensor(each[layer], device=device) for each in (shares.before, shares.after))
        columns = torch.arange(num_sources, device=device)[:, None]
        return (columns < before) | (columns >= shares.shared), after


def _joined(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    """Return the rows of two passes, [num_tokens of both, width]: those of the first pass, then those of the
    second. If one pass has no rows, return those of the other pass; None if neither has any.

    first: Rows of the first pass, [num_tokens, width]. None if the pass has no rows.
    second: Rows of the second pass, [num_tokens, width]. None if the pass has no rows.
    """
    if first is None or second is None:
        return second if first is None else first
    return torch.cat((first, second))


def _sum(own_taps: torch.Tensor | None, earlier_taps: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of this stage's taps and those of previous stages. None if there are neither.

    own_taps: [num_tokens, feature_size], which is changed in place. None: this stage has no taps.
    earlier_taps: [num_tokens, feature_size]. None: no previous stage has taps.

    If both are given, the result is `own_taps`.
    """
    if own_taps is None or earlier_taps is None:
        return earlier_taps if own_taps is None else own_taps
    return own_taps.add_(earlier_taps)
