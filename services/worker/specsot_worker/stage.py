"""A layer range with its KV pages: applies a frame's page operations and runs its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import structlog
import torch

from specsot.core.frames import Frame, Payload, TreeSegment, tokens_of
from specsot.core.pages import HeadShares, PageTable, RowPruning
from specsot.core.tree import Tree
from specsot.core.verdict import UnreadTrees
from specsot.errors import WireError
from specsot.members import Layout, Range
from specsot.transport.pending_rows import PendingRows
from specsot_model.attention import AttentionPlan, RowSpan
from specsot_model.core.kv_plan import KvPlan, PolicySpan, plan_frame
from specsot_model.cuda_graphs import (
    BUCKETS,
    CapturedLaps,
    GraphCapture,
    LapRows,
    prompt_buckets,
    prompt_rows,
)
from specsot_model.decoder import Decoder, Tap
from specsot_model.kv import Moves, indices
from specsot_worker.handed_rows import StageRows
from specsot_worker.next_lap import GuessedLap, Laps, NextLap
from specsot_worker.stage_timers import make_timer

log = structlog.get_logger()

RowsOut = tuple[torch.Tensor | None, torch.Tensor | None]  # hidden, and fused


class DecoderStage:
    """One layer range with its pages. `run` takes frames strictly in order.

    uncaptured: frames that ran kernel by kernel though there are graphs.
    """

    def __init__(
        self,
        decoder: Decoder,
        pages: int,
        page_rows: int,
        layout: Layout = "batched",
        before_frame: Callable[[], None] | None = None,
    ) -> None:
        """before_frame: called before each frame runs."""
        self._decoder = decoder
        self._before_frame = before_frame
        self._layout: Layout = layout
        self._table = PageTable(pages, page_rows)
        self._kv = decoder.make_kv(pages, page_rows)
        self._kv.shared = self._table.shared
        self._taps: dict[int, Tap] = {}
        self._graphs: Laps | None = None
        self._next: NextLap | None = None
        self._held = False  # what is begun waits for its frame
        self.rows = StageRows(self._table, self._kv, decoder.layers)
        self.uncaptured = 0
        first, last = decoder.layers.first == 0, decoder.layers.last == decoder.config.layers
        self._timer = make_timer(decoder.device, first, last)
        self._last = last
        self._whole = first and last

    @property
    def table(self) -> PageTable:
        return self._table

    @property
    def layers(self) -> Range:
        return self._decoder.layers

    def tap(self, layer: int, weight: torch.Tensor) -> None:
        """Fuse the input of `layer` through `weight` [Hd, H] into every frame from now on."""
        self._taps[layer] = self._decoder.hold_tap(weight)
        self._graphs = self._next = None

    def prompt_rows(self, rows: int) -> int:
        """Rows of a frame of prompts alone, where other frames have so many."""
        return prompt_rows(self._decoder, self._kv, rows)

    def capture(self) -> None:
        """Capture what can be captured, once every tap is here; takes seconds on a GPU."""
        if self._decoder.capturable:
            taps = {layer: tap for layer, tap in self._taps.items() if isinstance(tap, torch.Tensor)}
            wide = prompt_buckets(self._decoder, self._kv)
            self.run_by(CapturedLaps(self._decoder, self._kv, taps, GraphCapture(), prompts=wide))

    def run_by(self, graphs: Laps) -> None:
        """Frames that fit run in these from now on."""
        self._graphs = graphs
        guess = self._whole and not self._decoder.config.delta  # whose states a lap for nothing would move on
        self._next = NextLap(self._table, self._kv, graphs) if guess else None

    @torch.inference_mode()
    def run(self, frame: Frame) -> Frame:
        """Apply the header, run the rows; returns the frame with this stage's hidden and fused rows.

        Raises WireError when the rows that came do not match the header.
        """
        if self._before_frame:
            self._before_frame()
        guess = self._next.take(frame) if self._next else None
        if self._next and not guess:
            frame = self._next.settled(frame)
        if guess is None or guess.outputs is None or self._held:
            self._timer.begin()
        self._held = False
        hidden, fused = self._run_guessed(frame, guess) if guess else self._run_planned(frame)
        if self._next:
            self._next.guess(frame)
        seconds = (*frame.seconds, self._timer.end(0 if hidden is None else len(hidden)))
        if self._last and isinstance(frame.hidden, PendingRows):
            frame.hidden.check()  # here, where somebody waits for the device anyway
        return replace(frame, hidden=hidden, fused=fused, seconds=seconds)

    @torch.inference_mode()
    def go_on(self, tokens: list[int]) -> bool:
        """Begin the next frame as soon as the last one's tokens are known, if what comes was guessed; whether
        it was. Where another frame comes, this one has never been.
        """
        if not self._next or max(tokens) >= self._decoder.config.vocab:
            return False
        self._timer.begin()
        return self._next.start(tokens)

    @torch.inference_mode()
    def foresee(self, segments: Sequence[TreeSegment]) -> bool:
        """Arrange the next frame, which has these segments, but for the tokens of its trees, and their shapes
        if they come otherwise; whether it is to be begun when they come.
        """
        return self._next is not None and self._next.foresee(segments)

    @torch.inference_mode()
    def grow_on(self, trees: Sequence[Tree]) -> bool:
        """Begin what was foreseen, with these trees; see `go_on`."""
        if not self._next or max(max(tree.tokens) for tree in trees) >= self._decoder.config.vocab:
            return False
        self._timer.begin()
        return self._next.grow(trees)

    @torch.inference_mode()
    def go_unread(self, segments: Sequence[TreeSegment], trees: UnreadTrees) -> bool:
        """Begin the next frame, which has these roots, with trees that a device chooses; `read` says later
        what they are. See `go_on`.
        """
        return self._next is not None and self._next.go_unread(segments, trees)

    def read(self, trees: Sequence[Tree]) -> bool:
        """See `go_unread`: whether these may be what was chosen. They grew until now: time begins here."""
        self._timer.begin()
        return self._next is not None and self._next.read(trees)

    def hold(self) -> None:
        """Nothing is sent for now: what is begun waits for its frame, and that is no computing."""
        self._held = True

    def _run_planned(self, frame: Frame) -> RowsOut:
        arrangement = plan_frame(self._table, frame)
        moves = self._change_pages(frame, arrangement)
        self.rows.fill(frame)
        passed = self._forward(frame, arrangement, moves) if arrangement.slots else (None, None)
        self._clear(arrangement.freed)
        return passed

    def _run_guessed(self, frame: Frame, guess: GuessedLap) -> RowsOut:
        """A frame that was foreseen, and may run already."""
        assert self._next is not None
        entry, before = self._inputs(frame, guess.rows)
        hidden, fused = guess.outputs or self._next.launch(guess, entry)
        self.rows.fill(frame)
        self._clear(page for sequence in frame.closings for page in self._table.close(sequence))
        return hidden, _sum(fused, before)

    def _inputs(self, frame: Frame, rows: int) -> tuple[list[int] | torch.Tensor, torch.Tensor | None]:
        """What enters, and the stages' before sum of taps."""
        inputs = self._entry_rows(frame, rows), None if frame.fused is None else self._to_device(frame.fused)
        self._timer.mark_input()
        return inputs

    def _forward(self, frame: Frame, arrangement: KvPlan, moves: Moves) -> RowsOut:
        """By a graph where one fits; a graph sums up this stage's own taps alone."""
        entry, before = self._inputs(frame, len(arrangement.slots))
        ends = self.layers.first, self.layers.last - 1
        spans, others = ([span.at(layer) for span in arrangement.spans] for layer in ends)
        rows = LapRows(entry, arrangement.positions, arrangement.slots, spans, moves)
        alike = all(one.sight is other.sight for one, other in zip(spans, others))
        passed = self._graphs.run(rows) if self._graphs and alike else None
        if passed is None:
            self._warn_uncaptured(len(arrangement.slots), len(spans), alike)
            return self._run_eager(rows, self._plans(arrangement.spans), before)
        return passed[0], _sum(passed[1], before)

    def _warn_uncaptured(self, rows: int, sequences: int, alike: bool) -> None:
        """Once, where graphs were prepared: without one a lap takes two or three times as long."""
        missed = self._graphs is not None and rows <= BUCKETS[-1]  # more are prompts alone, see `prompt_rows`
        self.uncaptured += missed
        if self.uncaptured == 1 and missed:
            why = "no graph has room for it" if alike else "layers that see different rows have none"
            log.warning("a frame runs without a graph", rows=rows, sequences=sequences, why=why)

    def _plans(self, spans: Sequence[RowSpan]) -> list[AttentionPlan]:
        """For every layer its plan; layers in which rows see the same share one."""
        if not any(isinstance(span, PolicySpan) for span in spans):
            return [self._plan(spans)] * len(self.layers)
        layers = range(self.layers.first, self.layers.last)
        by_layer = [tuple(span.at(layer) for span in spans) for layer in layers]
        plans = {here: self._plan(here) for here in set(by_layer)}
        return [plans[here] for here in by_layer]

    def _plan(self, spans: Sequence[RowSpan]) -> AttentionPlan:
        return self._decoder.plan(spans, self._table.page_rows, self._layout)

    def _run_eager(
        self, rows: LapRows, plans: Sequence[AttentionPlan], fused: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Kernel by kernel, as any device can."""
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
        """The rows at this stage's door: tokens on the first stage, else the hidden rows that came."""
        if self._decoder.layers.first == 0:
            tokens = [token for segment in frame.segments for token in tokens_of(segment)]
            vocab = self._decoder.config.vocab
            if min(tokens) < 0 or max(tokens) >= vocab:  # on a GPU its context would be lost
                raise WireError(f"frame {frame.number} has token ids beyond {vocab}")
            return tokens
        hidden = frame.hidden
        if hidden is None or tuple(hidden.shape) != (rows, self._decoder.config.hidden):
            shape = None if hidden is None else tuple(hidden.shape)
            raise WireError(f"frame {frame.number} has {rows} rows but hidden rows of shape {shape}")
        return self._to_device(hidden)

    def _to_device(self, rows: Payload) -> torch.Tensor:
        """On this stage's device, wherever they come from."""
        return rows.to(self._decoder.device, self._decoder.dtype)

    def _rejected_slots(self, segment: TreeSegment) -> Sequence[int]:
        """Slots of its sequence's own pages from its root on: rejected drafts lie there."""
        table = self._table
        sequence = segment.sequence
        row = segment.committed
        rows = len(table.pages(sequence)) * table.page_rows - table.column(sequence, row)
        return table.slots(sequence, row, row + rows)

    def _change_pages(self, frame: Frame, arrangement: KvPlan) -> Moves:
        """What comes before the rows; returns the moves that are left to whatever runs them."""
        for page in arrangement.trimmed:
            self._kv.clear_page(page)
        for segment in frame.segments:
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
        """In those of this stage's layers that do not keep all."""
        slots = pruning.sources, pruning.targets
        sources, targets = (torch.tensor(each, device=self._decoder.device) for each in slots)
        for layer in range(max(pruning.skip - self.layers.first, 0), len(self.layers)):
            own = None
            counts = None
            if pruning.heads:
                own, counts = self._head_rows(pruning.heads, self.layers.first + layer, len(sources))
            self._kv.keep_least(layer, sources, targets, own, counts)

    def _head_rows(self, shares: HeadShares, layer: int, sources: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The sources that are rows of each KV head of a layer of the model, bool [sources, kv_heads], and
        how many each head keeps.
        """
        device = self._decoder.device
        before, after = (torch.tensor(each[layer], device=device) for each in (shares.before, shares.after))
        columns = torch.arange(sources, device=device)[:, None]
        return (columns < before) | (columns >= shares.shared), after

    def _clear(self, freed: Iterable[int]) -> None:
        """Last: the closing frame itself may still have written to these pages."""
        for page in freed:
            self._kv.clear_page(page)


def _sum(fused: torch.Tensor | None, before: torch.Tensor | None) -> torch.Tensor | None:
    """Of this stage's own taps and of those before it."""
    if fused is None or before is None:
        return before if fused is None else fused
    return fused.add_(before)
