"""Captures a layer range's forward as one CUDA graph for each bucket of row counts; measures laps' seconds.

A frame runs in the graph of the next larger number of rows; the rows that are too many have no slot, so
they leave nothing behind, and read nothing.
"""

from __future__ import annotations

import gc
import heapq
import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from threading import Lock
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from specsot.core.verdict import UnreadTrees
from specsot.members import Curve
from specsot_kernels.attention_tables import BITS, SHORTEST, SHORTEST_ROWS, Numbers
from specsot_kernels.growing import TreeRows
from specsot_kernels.segments import HeadColumns
from specsot_model.attention import RowSpan
from specsot_model.decoder import Decoder
from specsot_model.delta_pages import WalkedPages
from specsot_model.graph_tables import FrameTables, PromptTables, frame_tables
from specsot_model.kv import KVPages, Moves, Staging, size_of, views
from specsot_model.lap_rows import FilledLap, LapRows, Outputs, unread_entry

# Rows that graphs are captured for; a frame takes the next larger one; no measurement recorded.
BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 200, 256, 384, 512)
# The same of many texts with a few rows each, whose attention is cut otherwise (docs/results/h100-vllm.md):
# 64 chains of four or trees of eight, of at most so many rows, on average and each; or some 64 texts whose
# rows are one tile, such as plain ones (docs/results/h100-product.md).
SHORT_BUCKETS = (48, 64, 320, 512)
SHORT_MEAN = 8
SHORT_MOST = 32
# The same of prompts alone, with an attention kernel of their own; it needs 2,048 rows to fill an H100
# (docs/results/h100-product.md).
PROMPT_BUCKETS = (512, 1024, 2048)
PROMPT_ROWS = PROMPT_BUCKETS[-1]
MIN_FULL = 3 / 4  # of such a graph: fewer rows run faster without one, or in a smaller one; not measured
MAX_GRAPH_MOVES = 64  # KV rows that a graph of trees moves itself; more are moved before it; not measured
# Rows of a graph that moves KV: what fewer rows follow seldom left any to move; not measured.
MIN_ROWS_WITH_MOVES = 16

RowKind = Literal["any", "short", "prompts"]  # that a graph is for
Work = Callable[[], Outputs]
Captured = tuple[Callable[[], object], Outputs]  # runs the work again, into the same outputs
Capture = Callable[[Work], Captured]


def bucket_of(rows: int, buckets: Sequence[int]) -> int | None:
    """The least that holds so many; None where none does."""
    return next((bucket for bucket in sorted(buckets) if rows <= bucket), None)


def prompt_rows(decoder: Decoder, kv: KVPages, rows: int) -> int:
    """Rows of a frame of prompts alone, where other frames have so many. More than those need one device with
    all layers: behind each other, stages work on fewer rows at a time.
    """
    whole = decoder.capturable and len(decoder.layers) == decoder.config.layers
    # Dense gated delta layers have no such graphs: 2,048 rows took 13 ms at once, 9 in graphs of 512 (H100).
    slow = bool(decoder.config.delta) and decoder.config.routing is None
    slow = slow or decoder.batch_invariant  # whose attention would keep much of so many
    wide = whole and len(decoder.parts(kv)) == 1 and rows >= BUCKETS[-1] and not slow
    return max(rows, PROMPT_ROWS) if wide else rows


def prompt_buckets(decoder: Decoder, kv: KVPages) -> tuple[int, ...]:
    """Rows of graphs of prompts alone; none where their kernel does not read what layers here ask for."""
    config = decoder.config
    wide = prompt_rows(decoder, kv, BUCKETS[-1]) == PROMPT_ROWS
    plain = not (config.delta or config.window or config.names.sinks or config.attention_softcap)
    if not (wide and plain):
        return ()
    from specsot_kernels.gpu.prompts import suits

    return PROMPT_BUCKETS if suits(decoder.dtype, kv.layers[0]) else ()


class GraphCapture:
    """Captures with torch; what is captured shares one pool of memory, so that only the first needs any."""

    _turns = (
        Lock()
    )  # stages of one process are prepared side by side; a capture begins by waiting for a device

    def __init__(self) -> None:
        """For the GPU that is current when it is called."""
        self._pool = torch.cuda.graph_pool_handle()
        self._streams = defaultdict[int, torch.cuda.Stream](torch.cuda.Stream)

    def __call__(self, work: Work) -> Captured:
        work()  # compiles, and lets libraries take what they will not take while they are captured
        graph = torch.cuda.CUDAGraph()
        stream = self._streams[torch.cuda.current_device()]
        with self._turns, _uncollected(), torch.cuda.graph(graph, self._pool, stream, "thread_local"):
            outputs = work()
        graph.replay()  # the first one is slow, and nobody waits for it yet
        return graph.replay, outputs


@contextmanager
def _uncollected() -> Generator[None]:
    """An older graph that the garbage collector finds, and ends, would break the capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class CapturedLaps:
    """All of a range's graphs over its pages; one a device where layers are split over several.

    Those wait for one another, so no other range's may come between them on one device alone. On one, graphs
    of frames from which a policy hides something are captured, too: when the first such frame comes.
    """

    _launching = Lock()

    @torch.inference_mode()
    def __init__(
        self,
        decoder: Decoder,
        kv: KVPages,
        taps: Mapping[int, Tensor],
        capture: Capture,
        buckets: Sequence[int] = BUCKETS,
        prompts: Sequence[int] = (),
        short: Sequence[int] = SHORT_BUCKETS,
    ) -> None:
        """taps: as in `Decoder.forward`; good for as long as they stay. Takes seconds.

        prompts: buckets of those alone, see `prompt_buckets`. short: of texts with a few rows each, where
        there are others as large.
        """
        parts = decoder.parts(kv)

        def captured(sizes: Iterable[int], kind: RowKind, hidden: bool = False) -> Graphs:
            # the largest first: the others live in its memory
            return {
                rows: [
                    _CapturedLap(part, pages, {} if number else taps, capture, rows, kind, hidden)
                    for number, (part, pages) in enumerate(parts)
                ]
                for rows in sorted(sizes, reverse=True)
            }

        self._invariant = decoder.batch_invariant
        self._group = decoder.config.heads // decoder.config.kv_heads
        self._captured = captured
        self._hidden = defaultdict[RowKind, Graphs](dict)
        self._prompts = captured(prompts, "prompts")
        self._laps = captured(buckets, "any")
        # Tiles of few queries over KV in int8 are not measured: those texts have the graphs of any others.
        eight = any(layer.dtype == torch.int8 for _, pages in parts for layer in pages.layers)
        least = SHORTEST_ROWS + 1 if eight else 0
        cut = () if self._invariant else short  # in one way for all
        self._short = captured((rows for rows in cut if least <= rows <= max(buckets)), "short")
        every = (*self._laps.values(), *self._short.values(), *self._prompts.values())
        self._size = max(lap.size for laps in every for lap in laps)
        self._stagings = [Staging(self._size, part.device) for part, _ in parts]

    def run(self, rows: LapRows) -> Outputs | None:
        """Hidden [rows, H] behind the range and the sum of its own taps; None where no graph fits."""
        filled = self.fill(rows)
        return None if filled is None else self.launch(filled, rows.entry)

    def fill(self, rows: LapRows) -> FilledLap | None:
        """What graphs read of a frame, but its entry: that may be known later. None where no graph fits."""
        count = len(rows.positions)
        wide, bucket = (bucket_of(count, tuple(laps)) for laps in (self._prompts, self._laps))
        found = _filled(rows, self._prompts[wide]) if wide and count >= MIN_FULL * wide else None
        if found is not None or bucket is None:
            return found
        short = bucket_of(count, tuple(self._short))
        fits = short is not None and short <= bucket and _are_short(rows.spans, short, self._group)
        if any(span.sight for span in rows.spans):
            return self._fill_hidden(rows, *((short, "short") if short and fits else (bucket, "any")))
        return _filled(rows, self._short[short] if short and fits else self._laps[bucket])

    def _fill_hidden(self, rows: LapRows, bucket: int, kind: RowKind) -> FilledLap | None:
        """The same where a policy hides something. Not what each head sees for itself, nor invariant rows."""
        if (
            self._invariant
            or len(self._stagings) > 1
            or any(isinstance(span.sight, HeadColumns) for span in rows.spans)
        ):
            return None
        graphs = self._hidden[kind]
        if bucket not in graphs:
            with torch.inference_mode():
                graphs |= self._captured((bucket,), kind, hidden=True)
            (lap,) = graphs[bucket]
            if lap.size > self._size:
                self._size = lap.size
                self._stagings = [Staging(lap.size, lap.device)]
        return _filled(rows, graphs[bucket])

    @torch.inference_mode()
    def launch(self, filled: FilledLap, entry: Sequence[int] | Tensor) -> Outputs:
        """See `run`. entry: as of `LapRows`."""
        laps = filled.laps
        with self._launching if len(laps) > 1 else nullcontext():
            for number, (lap, staging) in enumerate(zip(laps, self._stagings)):
                lap.send(filled, staging, entry if number == 0 else None)
            for lap in laps:  # one that runs already waits for the others: nothing comes between
                lap.start()
        laps[0].commit()
        return laps[0].outputs(len(filled.rows.positions))

    @property
    def takes_unread(self) -> bool:
        """Not where layers see windows, or are on several devices."""
        return len(self._stagings) == 1 and all(lap.trees for laps in self._laps.values() for lap in laps)

    @torch.inference_mode()
    def launch_unread(self, filled: FilledLap, roots: Sequence[int], trees: UnreadTrees) -> Outputs:
        """The same of trees that a device has, where it takes those: it writes what the graph reads of them.

        filled: of trees of as many nodes, whatever their shapes, and single rows behind those. roots: first
        tokens of all.
        """
        (lap,) = filled.laps
        rows = len(filled.rows.positions)
        entry = unread_entry(rows, roots, trees.nodes)
        lap.send(filled, self._stagings[0], entry.tolist())
        assert lap.trees is not None
        trees.choose(lap.trees.tokens, lap.trees.positions, lap.trees.bits, lap.vocabulary)
        lap.start()
        lap.commit()
        return lap.outputs(rows)

    @torch.inference_mode()
    def seconds(self, rows: LapRows, times: int = 3) -> float:
        """What the device takes for a frame, on a GPU. A graph must have room for it."""
        filled = self.fill(rows)
        assert filled is not None, "what is timed runs in a graph"
        self.launch(filled, rows.entry)
        laps = filled.laps
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with self._launching:
            begin.record()
            for _ in range(times):
                for lap in laps:
                    lap.start()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / times


Graphs = dict[int, list["_CapturedLap"]]  # of each bucket, one a device


def _are_short(spans: Sequence[RowSpan], bucket: int, group: int) -> bool:
    rows = [span.rows for span in spans]
    if bucket <= SHORTEST_ROWS:
        return max(rows) <= SHORTEST // group
    return max(rows) <= SHORT_MOST and sum(rows) <= SHORT_MEAN * len(rows)


def _filled(rows: LapRows, laps: Sequence[_CapturedLap]) -> FilledLap | None:
    numbers = laps[0].fill(rows)
    return None if numbers is None else FilledLap(rows, laps, numbers)


class _CapturedLap:
    """One graph, with the numbers it reads. trees: what of those a device may write, or None.

    hidden: of frames from which a policy hides something.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVPages,
        taps: Mapping[int, Tensor],
        capture: Capture,
        rows: int,
        kind: RowKind,
        hidden: bool = False,
    ) -> None:
        config = decoder.config
        self.device = decoder.device
        self._rows = rows
        self._kv = kv
        group = config.heads // config.kv_heads
        self._tables: Sequence[FrameTables] | Sequence[PromptTables]
        if kind == "prompts":
            self._tables = [PromptTables(rows, kv.pages + rows, kv.page_rows, group)]
        else:
            self._tables = frame_tables(decoder, kv, rows, kind == "short", hidden)
        self._moves = MAX_GRAPH_MOVES if rows >= MIN_ROWS_WITH_MOVES else 0
        self._walked = kv if isinstance(kv, WalkedPages) else None
        self._walk_room = walks = self._walked.room(rows) if self._walked else None
        own = (2, self._moves), (rows,), (rows,), (rows,), *(walks.shapes if walks else ())
        parts = [size_of(own), *(size_of(tables.shapes) for tables in self._tables)]
        self.size = sum(parts)
        self._numbers = torch.zeros(self.size, dtype=torch.int32, device=decoder.device)
        first, *rest = self._numbers.split(parts)
        moves, tokens, positions, slots, *walk = views(first, own)
        moves.fill_(-1)
        slots.fill_(-1)
        plans = [tables.plan(flat, group) for tables, flat in zip(self._tables, rest)]
        plan = replace(plans[-1], near=plans[0])
        only = self._tables[0]  # of layers that all see the same
        whole = isinstance(only, FrameTables) and len(self._tables) == 1 and not only.told
        self.trees = TreeRows(tokens, positions, views(rest[0], only.shapes)[BITS]) if whole else None
        self.vocabulary = config.vocab
        self._hidden: Tensor | None = None
        if not decoder.embeds:
            self._hidden = tokens.new_zeros((rows, config.hidden), dtype=decoder.dtype)

        def forward() -> Outputs:
            if self._moves:
                kv.move_on_device(moves)
            for tables in self._tables:
                if isinstance(tables, FrameTables) and tables.begin:
                    tables.begin()
            if self._walked and walks:
                self._walked.read(walk, walks)
            entry = decoder.embed(tokens) if self._hidden is None else self._hidden.clone()
            return decoder.forward(entry, positions, slots, plan, kv, taps)

        with decoder.alone():
            self._replay, self._outputs = capture(forward)

    def fill(self, rows: LapRows) -> list[Numbers] | None:
        """What graphs of all devices read of a frame, tokens first, which come later; None where there is no
        room for it.
        """
        count = len(rows.positions)
        filled = list[Numbers]()
        for tables in self._tables:
            if (parts := tables.fill(rows.spans)) is None:
                return None
            if isinstance(tables, FrameTables) and tables is not self._tables[-1]:
                parts = tables.padded(parts)
            filled += parts
        walk = list[Numbers]()
        if self._walked and self._walk_room:
            if (parts := self._walked.fill(rows.spans, rows.moves, self._walk_room)) is None:
                return None
            walk = parts
        heads = np.full((3, self._rows), ((0,), (0,), (-1,)), np.int32)
        heads[1, :count], heads[2, :count] = rows.positions, rows.slots
        return [*heads, *walk, *filled]

    def send(self, filled: FilledLap, staging: Staging, entry: Sequence[int] | Tensor | None) -> None:
        """What the graph reads of a frame. entry: None where rows do not enter here."""
        from specsot_kernels.gpu.launching import on_device_of

        with on_device_of(self._numbers):
            if entry is not None and self._hidden is not None:
                self._hidden[: len(entry)] = torch.as_tensor(entry)
            elif entry is not None:
                filled.numbers[0][: len(entry)] = entry
            staging.send([self._moved(filled.rows.moves), *filled.numbers], self._numbers)

    def start(self) -> None:
        """The frame that was sent last; once more, too."""
        from specsot_kernels.gpu.launching import on_device_of

        with on_device_of(self._numbers):
            self._replay()

    def commit(self) -> None:
        """The frame that was sent last runs."""
        if self._walked:
            self._walked.commit()

    def outputs(self, count: int) -> Outputs:
        """Of the frame that was started last."""
        hidden, fused = self._outputs
        return hidden[:count].clone(), None if fused is None else fused[:count].clone()

    def _moved(self, moves: Moves) -> Numbers:
        """What the graph is to move; more than it has room for is moved at once."""
        room = np.full((2, self._moves), -1, np.int32)
        if len(moves) <= self._moves:
            room[:, : len(moves)] = np.array(moves, np.int32).reshape(-1, 2).T
        else:
            self._kv.move(moves)
        return room


SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # rows at which a range's curve is measured
WIDE = (*SIZES, 256, 512)  # where laps are graphs: many texts' trees are as many rows, and those cost more
HISTORY_ROWS = 128  # KV rows in front of the measured ones; a short prompt
# Timed runs per size at least; and at most on a CPU (a GPU uses all the time, to reach its clock).
MIN_TURNS = 3
MAX_TURNS_CPU = 12
# Times the least that another run of a size may take for the least to count, and seconds that a disturbed
# measurement goes on for that. At a load of 10 the least of three runs of 4 rows took 71 ms (0.7 is usual).
REPEATED = 1.25
PATIENCE_SECONDS = 2.0

Timer = Callable[[], float]  # does something once, and tells its seconds
Forward = Callable[[int], float]  # seconds of so many rows


def measure_curve(
    timers: Mapping[int, Timer],
    seconds: float,
    least: int,
    device: torch.device,
    clock: Timer = time.perf_counter,
) -> Curve:
    """(rows, least seconds), ascending. timers: by rows; each is asked `least` times or more.

    The least, because a busy neighbour only adds, and seldom to all turns of a size: medians made two rows
    look twice as long as one.

    seconds: roughly how long to measure, where nothing disturbs. Sizes are measured in turns, the largest
    first, so that a disturbance hits all of them; before the first one each runs once, which compiles and
    warms up. As more rows never cost less, no size is believed to cost more than a larger one did.
    """
    most = MAX_TURNS_CPU if device.type == "cpu" else math.inf
    times: dict[int, list[float]] = {rows: [] for rows in sorted(timers, reverse=True)}
    for rows in times:
        timers[rows]()
    begun = clock()
    turns = 0
    while turns < least or clock() - begun < (PATIENCE_SECONDS if _disturbed(times.values()) else seconds):
        for rows, taken in times.items():
            taken.append(timers[rows]())
        turns += 1
        if turns >= max(least, most) and not _disturbed(times.values()):
            break
    costs = accumulate(map(min, times.values()), min)
    return tuple(reversed([*zip(times, costs)]))


def _disturbed(times: Iterable[Sequence[float]]) -> bool:
    """Some size has a least time that no other run of it repeats."""
    leasts = (heapq.nsmallest(2, taken) for taken in times)
    return any(one[-1] > one[0] * REPEATED for one in leasts)


@torch.inference_mode()
def measure_rows(
    decoder: Decoder, kv: KVPages | None = None, sizes: Sequence[int] = (), seconds: float = 0.3
) -> Curve:
    """Least seconds of *one* layer for each number of rows, ascending; see `measure_curve`.

    kv: pages that may be overwritten; None makes its own. sizes: SIZES or WIDE where none are given.
    Where laps are graphs, graphs are timed.
    """
    sizes = sizes or (WIDE if decoder.capturable else SIZES)
    kv = kv or decoder.make_kv(1, HISTORY_ROWS + max(sizes))
    if decoder.capturable:
        forward = _captured(decoder, kv, sizes)
    else:
        forward = partial(_forward, decoder, kv, _different_rows(decoder, max(sizes)))
    timers = {rows: partial(forward, rows) for rows in sizes}
    curve = measure_curve(timers, seconds, MIN_TURNS, decoder.device)
    return tuple((rows, spent / len(decoder.layers)) for rows, spent in curve)


def _captured(decoder: Decoder, kv: KVPages, sizes: Sequence[int]) -> Forward:
    """What the device takes: the host's part is paid once a lap, not once a layer."""
    laps = CapturedLaps(decoder, kv, {}, GraphCapture(), tuple(sizes))

    def forward(rows: int) -> float:
        history, span = _behind(kv, rows)
        entry = torch.zeros(rows, decoder.config.hidden, dtype=decoder.dtype, device=decoder.device)
        tokens = [0] * rows
        places = range(history, history + rows)
        return laps.seconds(LapRows(entry if decoder.layers.first else tokens, places, places, [span]))

    return forward


def _behind(kv: KVPages, rows: int) -> tuple[int, RowSpan]:
    """Rows in front of the measured ones, and the span of those. Where states are kept, it is a tree's: a
    prompt's would take the place of the state in front."""
    history = min(HISTORY_ROWS, kv.pages * kv.page_rows - rows)
    pages = tuple(range(kv.pages))
    span = RowSpan(rows, history, rows, pages)
    return history, replace(span, visible=span.seen) if isinstance(kv, WalkedPages) else span


def _different_rows(decoder: Decoder, rows: int) -> Tensor:
    """[rows, hidden]: rows that were alike would all choose the same experts, so that many seemed to cost
    what one costs."""
    drawn = torch.Generator().manual_seed(0)
    table = torch.randn(rows, decoder.config.hidden, generator=drawn)
    return table.to(decoder.device, decoder.dtype)


def _forward(decoder: Decoder, kv: KVPages, table: Tensor, rows: int) -> float:
    """table: rows to run."""
    begun = time.perf_counter()
    history, span = _behind(kv, rows)
    positions = torch.arange(history, history + rows, device=decoder.device)
    plan = decoder.plan([span], kv.page_rows, "packed")
    decoder.forward(table[:rows].clone(), positions, positions, plan, kv)
    if decoder.device.type == "cuda":
        # for this thread's work alone: the device may not be waited for while any other thread captures
        torch.cuda.current_stream(decoder.device).synchronize()
    return time.perf_counter() - begun
