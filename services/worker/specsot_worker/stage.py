"""A layer range with its KV pages: applies a frame's page operations and runs its rows."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import structlog
import torch

from specsot.core.frames import Frame, Payload, TreeSegment, tokens_of
from specsot.core.kv_plan import HeadColumns, KvPlan, SegmentPlan, VisibleColumns, plan_frame
from specsot.core.pages import PageTable, RowPruning
from specsot.errors import WireError
from specsot.members import Configuration, Layout, Range, Registration
from specsot.model.attention import AttentionPlan, RowSpan
from specsot.model.cuda_graphs import CapturedLaps, GraphCapture, LapRows
from specsot.model.decoder import Decoder, Tap
from specsot.model.kv import Moves
from specsot.transport.pending_rows import PendingRows
from specsot_worker.verifier import Verifier

log = structlog.get_logger()

AnyColumns = VisibleColumns | HeadColumns | None


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
        self._decoder, self._before_frame = decoder, before_frame
        self._layout: Layout = layout
        self._table = PageTable(pages, page_rows)
        self._kv = decoder.make_kv(pages, page_rows)
        self._taps: dict[int, Tap] = {}
        self._graphs: CapturedLaps | None = None
        self.uncaptured = 0
        first, last = decoder.layers.first == 0, decoder.layers.last == decoder.config.layers
        self._timer, self._last = make_timer(decoder.device, first, last), last

    @property
    def table(self) -> PageTable:
        return self._table

    @property
    def layers(self) -> Range:
        return self._decoder.layers

    def tap(self, layer: int, weight: torch.Tensor) -> None:
        """Fuse the input of `layer` through `weight` [Hd, H] into every frame from now on."""
        self._taps[layer] = self._decoder.hold_tap(weight)
        self._graphs = None

    def capture(self) -> None:
        """Capture what can be captured, once every tap is here; takes seconds on a GPU."""
        if self._decoder.capturable:
            taps = {layer: tap for layer, tap in self._taps.items() if isinstance(tap, torch.Tensor)}
            self._graphs = CapturedLaps(self._decoder, self._kv, taps, GraphCapture())

    @torch.inference_mode()
    def run(self, frame: Frame) -> Frame:
        """Apply the header, run the rows; returns the frame with this stage's hidden and fused rows.

        Raises WireError when the rows that came do not match the header.
        """
        if self._before_frame:
            self._before_frame()
        self._timer.begin()
        arrangement = plan_frame(self._table, frame)
        moves = self._change_pages(frame, arrangement)
        if not arrangement.slots:
            self._clear_freed(arrangement)
            return self._finish(frame, 0, None, None)
        hidden, fused = self._forward(frame, arrangement, moves)
        self._clear_freed(arrangement)
        passed = self._finish(frame, len(arrangement.slots), hidden, fused)
        if self._last and isinstance(frame.hidden, PendingRows):
            frame.hidden.check()  # here, where somebody waits for the device anyway
        return passed

    def _finish(
        self, frame: Frame, rows: int, hidden: torch.Tensor | None, fused: torch.Tensor | None
    ) -> Frame:
        seconds = (*frame.seconds, self._timer.end(rows))
        return replace(frame, hidden=hidden, fused=fused, seconds=seconds)

    def _forward(
        self, frame: Frame, arrangement: KvPlan, moves: Moves
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """By a graph where one fits; a graph sums up this stage's own taps alone."""
        entry = self._entry_rows(frame, len(arrangement.slots))
        before = None if frame.fused is None else self._to_device(frame.fused)
        self._timer.mark_input()
        spans = [_span(place, place.sight_at(self.layers.last - 1)) for place in arrangement.places]
        rows = LapRows(entry, arrangement.positions, arrangement.slots, spans, moves)
        whole = not any(span.sight for span in spans)
        passed = self._graphs.run(rows) if self._graphs and whole else None
        if passed is None:
            self._warn_uncaptured(len(arrangement.slots), len(arrangement.places), whole)
            return self._run_eager(rows, self._plans(arrangement.places), before)
        hidden, fused = passed
        if fused is None or before is None:
            return hidden, before if fused is None else fused
        return hidden, fused.add_(before)

    def _warn_uncaptured(self, rows: int, sequences: int, whole: bool) -> None:
        """Once, where graphs were prepared: without one a lap takes two or three times as long."""
        self.uncaptured += self._graphs is not None
        if self.uncaptured == 1 and self._graphs is not None:
            why = "no graph has room for it" if whole else "windows and pruned keys have none"
            log.warning("a frame runs without a graph", rows=rows, sequences=sequences, why=why)

    def _plans(self, places: Sequence[SegmentPlan]) -> list[AttentionPlan]:
        """For every layer its plan; layers in which rows see the same share one."""
        if not any(place.sight or place.heads for place in places):
            return [self._plan(places, (None,) * len(places))] * len(self.layers)
        layers = range(self.layers.first, self.layers.last)
        by_layer = [tuple(place.sight_at(layer) for place in places) for layer in layers]
        plans = {sights: self._plan(places, sights) for sights in set(by_layer)}
        return [plans[sights] for sights in by_layer]

    def _plan(self, places: Sequence[SegmentPlan], sights: Sequence[AnyColumns]) -> AttentionPlan:
        spans = [_span(*each) for each in zip(places, sights)]
        return self._decoder.plan(spans, self._table.page_rows, self._layout)

    def _run_eager(
        self, rows: LapRows, plans: Sequence[AttentionPlan], fused: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Kernel by kernel, as any device can."""
        decoder = self._decoder
        self._kv.move(rows.moves)
        entry = torch.as_tensor(rows.entry, device=decoder.device)
        return decoder.forward(
            decoder.embed(entry) if decoder.layers.first == 0 else entry,
            torch.tensor(rows.positions, device=decoder.device),
            torch.tensor(rows.slots, device=decoder.device),
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

    def _rejected_slots(self, segment: TreeSegment) -> list[int]:
        """Slots of its sequence's own pages from its root on: rejected drafts lie there."""
        table, sequence, row = self._table, segment.sequence, segment.committed
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
            self._kv.keep_least(layer, sources, targets)

    def _clear_freed(self, arrangement: KvPlan) -> None:
        """Last: the closing frame itself may still have written there."""
        for page in arrangement.freed:
            self._kv.clear_page(page)


def _span(place: SegmentPlan, sight: AnyColumns) -> RowSpan:
    return RowSpan(place.rows, place.base, place.rows, place.pages, place.visible, sight)


class StageRunner(Protocol):
    """One stage of one epoch, with its pages. Frames come strictly in order."""

    @property
    def table(self) -> PageTable: ...

    @property
    def layers(self) -> Range: ...

    def tap(self, layer: int, weight: Any) -> None:
        """Fuse the input of `layer` through `weight` [Hd, H] into every frame from now on."""
        ...

    def capture(self) -> None:
        """Whatever makes later frames quicker; all taps are here."""
        ...

    def run(self, frame: Frame) -> Frame:
        """Apply the header, run the rows; returns the frame as the next stage must have it."""
        ...


class StageProvider(Protocol):
    """Stages of any epoch, and the end of the ring."""

    @property
    def name(self) -> str: ...

    @property
    def loaded(self) -> int:
        """Layers of the range that was asked for last which are here. Asked from another thread."""
        ...

    @property
    def fetched(self) -> int:
        """Bytes of the model's files that are here, of one that is fetched; 0 of others. Like `loaded`."""
        ...

    @property
    def vocabulary(self) -> int | None:
        """How many token ids the base has; None: they are not checked."""
        ...

    def registration(self) -> Registration: ...

    def make_stage(self, configuration: Configuration, layers: Range) -> StageRunner: ...

    def fetch(self, layers: Range) -> None:
        """Have the bytes of these layers on this machine. May be called from any thread."""
        ...

    def preload(self, layers: Range | None = None) -> bool:
        """Load a little of these layers, or of what any later epoch may ask for; whether there is more, and
        room for it. Raises ModelError: no room for these.
        """
        ...

    def make_verifier(self, stage: StageRunner, configuration: Configuration) -> Verifier: ...


class HostTimer:
    """From the frame's turn to the end of what the host does for it. Asked in this order for every frame."""

    _begun = 0.0

    def begin(self) -> None:
        """Its turn has come."""
        self._begun = time.perf_counter()

    def mark_input(self) -> None:
        """Its rows are here, or the device will have them before it goes on."""

    def end(self, rows: int) -> float:
        """Everything is launched. Returns the stage's seconds."""
        return time.perf_counter() - self._begun


class DeviceTimer(HostTimer):
    """A stage on a GPU that hands its rows on while they are computed: what the device took for the last
    frame of about as many rows that is over. Until there is one, what the host took.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._input_event = self._mark()
        self._running: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._measured: dict[int, float] = {}

    def mark_input(self) -> None:
        self._input_event = self._mark()

    def end(self, rows: int) -> float:
        if not rows:
            return super().end(rows)
        self._poll()
        self._running.append((rows.bit_length(), self._input_event, self._mark()))
        return self._measured.get(rows.bit_length()) or super().end(rows)

    def _poll(self) -> None:
        """What is over by now."""
        while self._running and self._running[0][2].query():
            size, here, over = self._running.popleft()
            self._measured[size] = here.elapsed_time(over) / 1e3

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


class LastStageTimer(HostTimer):
    """The last stage behind others, on a GPU: it waits for its result anyway, so the host's clock will do.
    But it starts when the rows have come: before that, others were at work.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._input_event = torch.cuda.Event()

    def mark_input(self) -> None:
        self._input_event.record(self._stream)

    def end(self, rows: int) -> float:
        """Waits, now that all is launched. What the device takes from then on is counted by the judge."""
        self._input_event.synchronize()
        return 0.0


def make_timer(device: torch.device, first: bool, last: bool) -> HostTimer:
    """For a stage that runs the first layer, the last one, both or none."""
    if device.type != "cuda" or (first and last):
        return HostTimer()
    return LastStageTimer(device) if last else DeviceTimer(device)
