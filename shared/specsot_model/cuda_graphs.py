"""Captures a layer range's forward as CUDA graphs, one per bucket of batch sizes, and times steps.

A frame runs in the graph of the next larger bucket. The surplus rows have a negative slot, so they write no
KV and read none. A *row* in this file is a token of the batch.

    # 20 rows -> bucket 32; rows 20..31 have slot -1, and their outputs are cut off
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
from functools import cache, partial
from itertools import accumulate
from threading import Lock
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from specsot.core.device_verification import DeviceTrees
from specsot.members import Curve
from specsot_kernels.attention_tables import BITS, MAX_SHORT_ROWS, SHORTEST, SHORTEST_ROWS, Numbers
from specsot_kernels.growing import TreeRows
from specsot_kernels.line_tables import MAX_SMALL_ROWS
from specsot_kernels.segments import HeadColumns
from specsot_model.attention import RowSpan
from specsot_model.decoder import Decoder
from specsot_model.delta_pages import WalkedPages
from specsot_model.graph_tables import FrameTables, PromptTables, frame_tables, heads_per_tile
from specsot_model.inference import inference_mode
from specsot_model.kv import KVPages, Staging, aligned, joined, size_of, views
from specsot_model.step_rows import FilledStep, Outputs, StepRows, device_tree_entry

# Rows. Sizes of graphs for any frame. Untuned.
BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 200, 256, 384, 512)
# Rows. Sizes of graphs for frames of many sequences with few rows each, whose attention is divided into
# smaller tiles. The large ones fit 64 chains of four nodes or trees of eight (measured on an H100); the
# small ones fit about 64 sequences whose rows are one tile each, such as sequences without drafts
# (measured on an H100).
SHORT_BUCKETS = (48, 64, 320, 512)
# Rows. What a sequence of a large short graph may have, on average over the frame. Untuned.
MAX_MEAN_SHORT_ROWS = 8
# Rows. Sizes of graphs for frames of prompts alone, which have an attention kernel of their own. The kernel
# needs 2,048 rows to fill an H100 (measured). The sizes are so close that every frame of more than 512 and at
# most 2,048 rows fills MIN_FULL of its graph, because the host took 25 to 60 ms for such a frame without a
# graph (1.5B, H200).
PROMPT_BUCKETS = (512, 768, 1024, 1536, 2048)
PROMPT_ROWS = PROMPT_BUCKETS[-1]
# Fraction of a prompt graph's rows that a frame must fill; otherwise it runs faster without a graph, or in a
# smaller one. Untuned.
MIN_FULL = 2 / 3
# KV rows that a graph moves by itself; longer move lists are done before the graph. Untuned.
MAX_GRAPH_MOVES = 64
# Rows. Smaller graphs move no KV by themselves: the frames before them seldom leave moves to do. Untuned.
MIN_ROWS_WITH_MOVES = 16

# Which frames a graph is for.
RowKind = Literal["any", "short", "prompts"]
# Runs the work that is captured on the current stream, and returns its outputs.
Work = Callable[[], Outputs]
# A function that runs the captured work again, and the outputs that it overwrites.
Captured = tuple[Callable[[], object], Outputs]
# Captures work as a CUDA graph.
Capture = Callable[[Work], Captured]


def bucket_of(rows: int, buckets: Iterable[int]) -> int | None:
    """Return the smallest bucket that holds so many rows, or None if none does.

    rows: Number of rows of a frame.
    buckets: Sizes of the captured graphs, in any order.
    """
    return min([bucket for bucket in buckets if rows <= bucket], default=None)


def prompt_rows(decoder: Decoder, kv: KVPages, rows: int) -> int:
    """Return how many rows a frame of prompts alone may have, if other frames may have `rows`.

    Only one device that holds all layers gets more, PROMPT_ROWS: in a pipeline of stages, smaller frames keep
    more stages busy at the same time. `rows` is returned unchanged for a range that lacks some of the model's
    layers or cannot be captured, for a range that is split over several devices, for `rows` less than
    BUCKETS[-1], for dense models with gated delta layers, for latent attention, and for batch-invariant
    ranges.

    decoder: The layer range, with its weights loaded.
    kv: The KV cache of the layer range.
    rows: Number of rows that other frames may have.
    """
    has_all_layers = decoder.capturable and len(decoder.layers) == decoder.config.layers
    # Dense gated delta layers have no such graphs: 2,048 rows took 13 ms at once, 9 in graphs of 512 (H100).
    slow = bool(decoder.config.delta) and decoder.config.routing is None
    # Batch-invariant attention would need much memory for so many rows, and so would latent attention, whose
    # partial results have a latent vector for each head: 270 KB a row of DeepSeek V3.
    slow = slow or decoder.batch_invariant or decoder.config.latent is not None
    takes_more = has_all_layers and len(decoder.parts(kv)) == 1 and rows >= BUCKETS[-1] and not slow
    return max(rows, PROMPT_ROWS) if takes_more else rows


def prompt_buckets(decoder: Decoder, kv: KVPages) -> tuple[int, ...]:
    """Return the sizes of graphs for prompts alone; none if their kernel does not support these layers.

    The result is PROMPT_BUCKETS, or empty: for every range to which `prompt_rows` gives no more rows, for
    models with gated delta layers, sliding windows, attention sinks, capped scores or latent attention, and
    for types that the kernel does not support.

    decoder: The layer range, with its weights loaded.
    kv: The KV cache of the layer range.
    """
    takes_more = prompt_rows(decoder, kv, BUCKETS[-1]) == PROMPT_ROWS
    return PROMPT_BUCKETS if takes_more and _has_prompt_kernel(decoder, kv) else ()


def _has_prompt_kernel(decoder: Decoder, kv: KVPages) -> bool:
    """Tell whether the attention kernel for prompts alone supports these layers and pages.

    decoder: The layer range, with its weights loaded.
    kv: The KV cache of the layer range.
    """
    from specsot_kernels.gpu.prompts import suits

    config = decoder.config
    special = config.delta or config.window or config.names.sinks or config.attention_softcap or config.latent
    return not special and suits(decoder.dtype, kv.layers[0])


@inference_mode
def compile_steps(decoder: Decoder) -> None:
    """Begin to compile in parallel the kernels of all graphs that `CapturedSteps` captures over such layers,
    and those of frames without a graph: large frames of prompts over layers that have no graphs for prompts
    alone, and frames with more pages than the tables of a graph hold. Otherwise all sequences would wait
    while the first such frame compiles the kernels: 0.4 s (measured on an H200). `compile_ahead` says how to
    wait for the kernels.

    One layer is enough, because all layers of a range run the same kernels. The only exceptions are kernels
    that also norm the rows for a next layer: a single layer does not run these, so they are run in addition
    (`Decoder.run_mlp_between_layers`). Nothing happens for experts and gated delta layers, whose operations
    depend on what their kernels write, for layers that are split over devices, and for layers that cannot be
    captured.

    decoder: The layer range, with its weights loaded.
    """
    if not decoder.capturable or decoder.config.routing or decoder.config.delta:
        return
    from specsot_kernels.gpu.launching import compile_ahead

    kv = decoder.make_kv(1, HISTORY_ROWS + max(WIDE))
    if len(decoder.parts(kv)) > 1:
        return
    prompt_sizes = PROMPT_BUCKETS if _has_prompt_kernel(decoder, kv) else ()

    def run_all() -> None:
        """Run what the graphs capture, and a frame without a graph."""
        CapturedSteps(decoder, kv, {}, run_once, BUCKETS, prompt_sizes)
        _forward(decoder, kv, _different_rows(decoder, kv.pages * kv.page_rows))
        decoder.run_mlp_between_layers(_different_rows(decoder, 1))

    compile_ahead(run_all)


def run_once(work: Work) -> Captured:
    """Run work once, without capturing it, and return its outputs and a function that does nothing.

    work: Runs the work on the current stream, and returns its outputs.
    """
    return _do_nothing, work()


def _do_nothing() -> None:
    """Do nothing: there is no graph to replay."""


class GraphCapture:
    """Captures CUDA graphs with torch. All graphs share one memory pool; only the first one fills it."""

    # Stages of one process prepare at the same time, but a capture begins by waiting for its device, so only
    # one thread may capture at a time.
    _turns = Lock()

    def __init__(self) -> None:
        """Allocate a memory pool on the GPU that is current at this moment."""
        self._pool = torch.cuda.graph_pool_handle()
        self._streams = defaultdict[int, torch.cuda.Stream](torch.cuda.Stream)

    def __call__(self, work: Work) -> Captured:
        """Run `work` once, capture it, and replay it once; return its replay function and outputs.

        The work therefore runs twice outside the capture. Captures of several threads take turns.

        work: Runs the work that is captured on the current stream, and returns its outputs.
        """
        # The first run compiles kernels, and lets libraries allocate what they cannot in a capture.
        work()
        graph = torch.cuda.CUDAGraph()
        stream = self._streams[torch.cuda.current_device()]
        with self._turns, _without_collection(), torch.cuda.graph(graph, self._pool, stream, "thread_local"):
            outputs = work()
        # The first replay is slow; at this point no request waits for it.
        graph.replay()
        return graph.replay, outputs


@contextmanager
def _without_collection() -> Generator[None]:
    """Run the body without garbage collection: if the collector destroyed an older graph now, the capture
    would break.

    Afterwards the collector is enabled again if it was enabled before.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class CapturedSteps:
    """All CUDA graphs of a layer range over its KV pages; with tensor parallelism, one per device and bucket.

    On a single device, graphs for frames with a KV policy (hidden columns) are captured when the first such
    frame arrives.
    """

    # The graphs of a tensor-parallel group wait for each other on the devices. If another range launched its
    # graphs in between, and on some of the devices only, both would wait forever.
    _launching = Lock()

    @inference_mode
    def __init__(
        self,
        decoder: Decoder,
        kv: KVPages,
        taps: Mapping[int, Tensor],
        capture: Capture,
        buckets: Sequence[int] = BUCKETS,
        prompt_sizes: Sequence[int] = (),
        short_sizes: Sequence[int] = SHORT_BUCKETS,
    ) -> None:
        """Capture the graphs; this takes seconds.

        A batch-invariant range has no short graphs.

        decoder: The layer range whose forward pass is captured.
        kv: The KV cache of the layer range.
        taps: By layer, the weight of its tap, as in `Decoder.forward`; the graphs keep reading these tensors.
        capture: Captures work as a CUDA graph, such as `GraphCapture`.
        buckets: Sizes of graphs for any frame. At least one.
        prompt_sizes: Sizes of graphs for prompts alone; see `prompt_buckets`. Empty: none.
        short_sizes: Sizes of graphs for sequences with few rows each; sizes above the largest bucket are left
            out. With an int8 KV cache, sizes up to SHORTEST_ROWS are left out as well.
        """
        parts = decoder.parts(kv)

        def capture_graphs(sizes: Iterable[int], kind: RowKind, hidden: bool = False) -> Graphs:
            """Capture graphs, and return them by size, each a list with one graph per device.

            sizes: Sizes of the graphs, in rows.
            kind: Which frames the graphs are for.
            hidden: True for frames from which a KV policy hides columns.
            """
            # The largest graph is captured first; the others reuse its memory.
            return {
                rows: [
                    _CapturedStep(part, pages, {} if number else taps, capture, rows, kind, hidden)
                    for number, (part, pages) in enumerate(parts)
                ]
                for rows in sorted(sizes, reverse=True)
            }

        self._invariant = decoder.batch_invariant
        self._small_steps = decoder.runs_small_steps
        self._group = heads_per_tile(decoder.config)
        self._capture_graphs = capture_graphs
        self._hidden = defaultdict[RowKind, Graphs](dict)
        self._prompts = capture_graphs(prompt_sizes, "prompts")
        self._steps = capture_graphs(buckets, "any")
        # Small tiles over int8 KV are not measured, so the small short graphs are left out there.
        int8_kv = any(layer.dtype == torch.int8 for _, pages in parts for layer in pages.layers)
        min_rows = SHORTEST_ROWS + 1 if int8_kv else 0
        # Batch-invariant attention is divided in the same way for every frame, so it has no short graphs.
        short_buckets = () if self._invariant else short_sizes
        self._short = capture_graphs(
            (rows for rows in short_buckets if min_rows <= rows <= max(buckets)), "short"
        )
        every = (*self._steps.values(), *self._short.values(), *self._prompts.values())
        self._size = max(step.size for steps in every for step in steps)
        self._stagings = [Staging(self._size, part.device) for part, _ in parts]
        sizes = [*self._prompts], [*self._steps], [*self._short]
        # The size of the graph of each kind (prompts, any, short) for a number of rows.
        self._buckets_of = cache(lambda rows: [bucket_of(rows, each) for each in sizes])
        # Whether `launch_device_trees` is possible: on a single device, without sliding-window layers.
        self._accepts_device_trees = len(parts) == 1 and all(
            step.trees for steps in self._steps.values() for step in steps
        )

    def run(self, rows: StepRows) -> Outputs | None:
        """Run a frame, and return hidden states [rows, H] and the sum of this range's taps.

        Return None if no graph fits the frame; the caller then runs `Decoder.forward`.

        rows: The frame: tokens or hidden states, positions, slots, spans and moves.
        """
        filled = self.fill(rows)
        return None if filled is None else self.launch(filled, rows.entry)

    def fill(self, rows: StepRows) -> FilledStep | None:
        """Prepare the tables of a frame for its graph, or return None if no graph fits.

        A prompt graph is chosen if the frame has prompts only and fills at least MIN_FULL of its rows.
        Otherwise a short graph is chosen if its tiles suit the frame and it is no larger than the graph for
        any frame. A small step whose sequences are too long for its graph's tables runs in the first larger
        graph that has room. None is returned for a frame with more rows than the largest graph, with more
        pieces or pages than the graph's tables hold, or with hidden columns that `_fill_hidden` refuses.

        rows: The frame. Its entry (tokens or hidden states) is not read yet; it may become known later.
        """
        count = len(rows.positions)
        prompt_bucket, bucket, short = self._buckets_of(count)
        filled = (
            _fill_for(rows, self._prompts[prompt_bucket])
            if prompt_bucket and count >= MIN_FULL * prompt_bucket
            else None
        )
        if filled is not None or bucket is None:
            return filled
        fits = short is not None and short <= bucket and _are_short(rows.spans, short, self._group)
        if any(span.sight for span in rows.spans):
            return self._fill_hidden(rows, *((short, "short") if short and fits else (bucket, "any")))
        if short and fits:
            return _fill_for(rows, self._short[short])
        sizes = [bucket]
        if self._small_steps and bucket <= MAX_SMALL_ROWS:
            sizes += [size for size in sorted(self._steps) if size > MAX_SMALL_ROWS]
        attempts = (_fill_for(rows, self._steps[size]) for size in sizes)
        return next((attempt for attempt in attempts if attempt is not None), None)

    def _fill_hidden(self, rows: StepRows, bucket: int, kind: RowKind) -> FilledStep | None:
        """Return a frame from which a KV policy hides columns, prepared for its graph, which is captured if
        it is the first.

        Return None if the heads see different columns, for batch-invariant ranges, and with several devices.
        None is also returned if the frame does not fit the tables.

        rows: The frame as this range receives it: tokens or hidden states, positions, slots, spans, moves.
        bucket: Size of the graph, in rows.
        kind: Which frames the graph is for.
        """
        if (
            self._invariant
            or len(self._stagings) > 1
            or any(isinstance(span.sight, HeadColumns) for span in rows.spans)
        ):
            return None
        graphs = self._hidden[kind]
        if bucket not in graphs:
            with torch.inference_mode():
                graphs |= self._capture_graphs((bucket,), kind, hidden=True)
            (step,) = graphs[bucket]
            if step.size > self._size:
                self._size = step.size
                self._stagings = [Staging(step.size, step.device)]
        return _fill_for(rows, graphs[bucket])

    @inference_mode
    def launch(self, filled: FilledStep, entry: Sequence[int] | Tensor) -> Outputs:
        """Launch a prepared frame and return its outputs: hidden states [rows, H] and the sum of this range's
        taps.

        The outputs are copies; the sum of taps is None if the range has none. With several devices they are
        those of the first device. States that gated delta layers store become valid.

        filled: The frame with its tables, as `fill` returned it.
        entry: Token ids if the range starts with the embedding, else hidden states [rows, H]. On a single
            device, token ids may be a tensor on it, [rows], which the host has not read.
        """
        steps = filled.steps
        with self._launching if len(steps) > 1 else nullcontext():
            for number, (step, staging) in enumerate(zip(steps, self._stagings)):
                step.send(filled, staging, entry if number == 0 else None)
            # A graph that runs already waits for those of the other devices, so all are started in a row.
            for step in steps:
                step.start()
        steps[0].commit()
        return steps[0].outputs(len(filled.rows.positions))

    @property
    def accepts_device_tokens(self) -> bool:
        """Tell whether `launch` takes token ids that are still on the device: on a single device."""
        return len(self._stagings) == 1

    @property
    def accepts_device_trees(self) -> bool:
        """Tell whether `launch_device_trees` is possible: on a single device, without sliding-window
        layers."""
        return self._accepts_device_trees

    @inference_mode
    def launch_device_trees(self, filled: FilledStep, roots: Sequence[int], trees: DeviceTrees) -> Outputs:
        """Launch a frame whose draft trees are still on the GPU, not read by the host, and return its
        outputs.

        A kernel writes the tokens, positions and masks of the trees into the graph's tables. The result is
        that of `launch`: hidden states [rows, H] and the sum of this range's taps. Only possible if
        `accepts_device_trees`; otherwise ValueError or AssertionError is raised.

        filled: A prepared frame with trees of the right number of nodes, of any shape, and single rows after
            those.
        roots: Root tokens of the trees, then the tokens of the single rows; see `device_tree_entry`.
        trees: The trees on the device.
        """
        (step,) = filled.steps
        rows = len(filled.rows.positions)
        entry = device_tree_entry(rows, roots, trees.nodes)
        step.send(filled, self._stagings[0], entry)
        assert step.trees is not None
        trees.choose(step.trees.tokens, step.trees.positions, step.trees.bits, step.vocabulary)
        step.start()
        step.commit()
        return step.outputs(rows)

    @inference_mode
    def seconds(self, rows: StepRows, times: int = 3) -> float:
        """Return the seconds that the GPU takes for a frame, as the mean of `times` runs.

        A graph must fit the frame. AssertionError is raised otherwise.

        rows: The frame as this range receives it: tokens or hidden states, positions, slots, spans, moves.
        times: How often to run it, after one run that is not timed.
        """
        filled = self.fill(rows)
        assert filled is not None, "only frames that fit a graph can be timed"
        self.launch(filled, rows.entry)
        steps = filled.steps
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with self._launching:
            begin.record()
            for _ in range(times):
                for step in steps:
                    step.start()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / times


# By bucket: its graphs, one per device.
Graphs = dict[int, list["_CapturedStep"]]


def _are_short(spans: Sequence[RowSpan], bucket: int, heads_per_kv: int) -> bool:
    """Tell whether the short graph of `bucket` rows suits these spans.

    A graph of at most SHORTEST_ROWS rows suits if every span is a single tile: SHORTEST // heads_per_kv rows.
    A larger one suits if no span has more than MAX_SHORT_ROWS rows and their mean is at most
    MAX_MEAN_SHORT_ROWS.

    spans: One span per segment of the frame; at least one.
    bucket: Rows of the graph.
    heads_per_kv: Query heads per KV head.
    """
    rows = [span.rows for span in spans]
    if bucket <= SHORTEST_ROWS:
        return max(rows) <= SHORTEST // heads_per_kv
    return max(rows) <= MAX_SHORT_ROWS and sum(rows) <= MAX_MEAN_SHORT_ROWS * len(rows)


def _fill_for(rows: StepRows, steps: Sequence[_CapturedStep]) -> FilledStep | None:
    """Return a frame that is prepared for some graphs; None if it does not fit their tables.

    rows: The frame as this range receives it: tokens or hidden states, positions, slots, spans, moves.
    steps: The graphs of one bucket, one per device.
    """
    numbers = steps[0].fill(rows)
    return None if numbers is None else FilledStep(rows, steps, numbers)


class _CapturedStep:
    """One CUDA graph on one device, with the tables that it reads.

    trees: The tables that a kernel may fill with trees that are still on the device, or None if these
        layers do not support that.
    size: Length of the tables, in int32 numbers.
    device: The device of the graph.
    vocabulary: Number of tokens of the vocabulary.
    start: Function that launches the graph on its device, for the tables that `send` has copied last. It may
        be called several times. The current device of the caller does not matter.
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
        """Allocate the tables, and capture the graph.

        decoder: The layer range whose forward pass is captured.
        kv: The KV cache of the layer range.
        taps: By layer, the weight of its tap; the graph keeps reading these tensors. Empty: the graph returns
            no taps.
        capture: Captures work as a CUDA graph.
        rows: Size of the graph's bucket, in rows.
        kind: Which frames the graph is for.
        hidden: True if the graph is for frames from which a KV policy hides columns.
        """
        config = decoder.config
        self.device = decoder.device
        self._kv = kv
        group = heads_per_tile(config)
        self._tables: Sequence[FrameTables] | Sequence[PromptTables]
        if kind == "prompts":
            self._tables = [PromptTables(rows, kv.pages + rows, kv.page_rows, group)]
        else:
            self._tables = frame_tables(decoder, kv, rows, kind == "short", hidden)
        self._moves = MAX_GRAPH_MOVES if rows >= MIN_ROWS_WITH_MOVES else 0
        # The array with moves, tokens, positions and slots of a frame that has no rows and moves nothing,
        # laid out as `Staging.send` does. `fill` copies it, and nothing writes to it.
        #
        #     graph of 2 rows, which moves nothing -> [0 0 . . | 0 0 . . | -1 -1 . .], starts 0, 4 and 8
        #     graph of 16 rows -> [64 sources, 64 targets | 16 tokens | 16 positions | 16 slots],
        #     starts 128, 144 and 160
        no_slots = np.full(rows, -1, np.int32)
        nothing = np.zeros_like(no_slots)
        self._no_rows = joined([np.full((2, self._moves), -1, np.int32), nothing, nothing, no_slots])
        # Where tokens, positions and slots begin in this array.
        self._starts = range(aligned(2 * self._moves), len(self._no_rows), aligned(rows))
        self._walked = kv if isinstance(kv, WalkedPages) else None
        self._walk_room = walks = self._walked.table_sizes(rows) if self._walked else None
        own_shapes = (2, self._moves), (rows,), (rows,), (rows,), *(walks.shapes if walks else ())
        lengths = [size_of(own_shapes), *(size_of(tables.shapes) for tables in self._tables)]
        self.size = sum(lengths)
        self._numbers = torch.zeros(self.size, dtype=torch.int32, device=decoder.device)
        own_flat, *table_flats = self._numbers.split(lengths)
        moves, tokens, positions, slots, *walk = views(own_flat, own_shapes)
        self._tokens = tokens
        moves.fill_(-1)
        slots.fill_(-1)
        plans = [tables.plan(flat, group) for tables, flat in zip(self._tables, table_flats)]
        plan = replace(plans[-1], sliding=plans[0])
        # Trees on the device need one set of tables, without a first visible column per row.
        first_tables = self._tables[0]
        fills_trees = (
            isinstance(first_tables, FrameTables)
            and len(self._tables) == 1
            and not first_tables.num_sight_tables
        )
        self.trees = (
            TreeRows(tokens, positions, views(table_flats[0], first_tables.shapes)[BITS])
            if fills_trees
            else None
        )
        self.vocabulary = config.vocab
        self._hidden: Tensor | None = None
        if not decoder.embeds:
            self._hidden = tokens.new_zeros((rows, config.hidden), dtype=decoder.dtype)

        def forward() -> Outputs:
            """Do what the graph captures: move KV, prepare attention, run the layers."""
            if self._moves:
                kv.move_on_device(moves)
            for tables in self._tables:
                if isinstance(tables, FrameTables) and tables.prepare:
                    tables.prepare()
            if self._walked and walks:
                self._walked.use_tables(walk, walks)
            entry = decoder.embed(tokens) if self._hidden is None else self._hidden.clone()
            return decoder.forward(entry, positions, slots, plan, kv, taps)

        with decoder.alone():
            self.start, outputs = capture(forward)

        @cache
        def first_outputs(count: int) -> Outputs:
            """Return the first rows of the outputs, as views of the tensors that every launch overwrites. The
            views are cached, because steps have few different numbers of rows, and making a view takes half
            as long as copying the rows. They stay valid as long as the graph, which always writes the same
            tensors.

            count: Number of rows.
            """
            hidden, fused = outputs
            return hidden[:count], None if fused is None else fused[:count]

        self._first_outputs = first_outputs

    def fill(self, rows: StepRows) -> list[Numbers] | None:
        """Return the tables of a frame, int32, which are the same on all devices; None if the frame does not
        fit.

        The first array holds the moves, the tokens, the positions and the slots, in this order. `send` fills
        in the tokens. The tables of gated delta layers follow, if there are any, and then those of attention.
        Moves after the frame's own are -1. If the frame has more moves than the graph's table holds, all of
        them are -1, and `send` does the moves. Rows after the frame's own have slot -1. The frame must not
        have more rows than the graph.

        rows: The frame as this range receives it: tokens or hidden states, positions, slots, spans, moves.
        """
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
        numbers = self._no_rows.copy()
        count = len(rows.positions)
        _, positions, slots = self._starts
        numbers[positions : positions + count] = rows.positions
        numbers[slots : slots + count] = rows.slots
        moves = rows.moves
        if 0 < len(moves) <= self._moves:
            sources, targets = zip(*moves)
            numbers[: len(moves)] = sources
            numbers[self._moves : self._moves + len(moves)] = targets
        return [numbers, *walk, *filled]

    def send(
        self, filled: FilledStep, staging: Staging, entry: Sequence[int] | Numbers | Tensor | None
    ) -> None:
        """Copy the tables of a frame to the device.

        `filled.numbers[0]` receives the tokens if the range begins with the embedding and the host has them.
        If the frame has more KV moves than the graph's table holds, they are done first.

        entry: Tokens or hidden states; None if this device is not where the rows enter. Tokens may be a
            tensor on the device, which is copied after the tables.
        filled: The frame with its tables.
        staging: The buffers through which this device's tables are copied.
        """
        if entry is not None and self._hidden is not None:
            self._hidden[: len(entry)] = torch.as_tensor(entry)
        elif entry is not None and not isinstance(entry, Tensor):
            start = self._starts[0]
            filled.numbers[0][start : start + len(entry)] = entry
        moves = filled.rows.moves
        if len(moves) > self._moves:
            self._kv.move(moves)
        staging.send(filled.numbers, self._numbers)
        if self._hidden is None and isinstance(entry, Tensor):
            self._tokens[: len(entry)] = entry

    def commit(self) -> None:
        """Record that the frame that was sent last runs: the states that it stores become valid."""
        if self._walked:
            self._walked.commit()

    def outputs(self, count: int) -> Outputs:
        """Return copies of the outputs of the last launch, for its first rows: hidden states [count, H], and
        the sum of the taps [count, Hd], which is None if the range has no taps.

        count: Number of rows of the frame that was launched.
        """
        hidden, fused = self._first_outputs(count)
        return hidden.clone(), None if fused is None else fused.clone()


# Rows. Batch sizes at which the cost curve of a range is measured. Untuned.
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
# Rows. The same if steps run as CUDA graphs: the trees of many sequences have as many rows, and those cost
# more. Untuned.
WIDE = (*SIZES, 256, 512)
# KV rows. How many precede the measured rows: the length of a short prompt. Untuned.
HISTORY_ROWS = 128
# Timed runs per size, at least; and at most on a CPU. A GPU uses all the time, to reach its clock. Untuned.
MIN_TURNS = 3
MAX_TURNS_CPU = 12
# Factor. A size's fastest run counts if another run takes at most this times as long. Untuned.
REPEATED = 1.25
# Seconds. How long a measurement continues until the fastest run of every size is confirmed in that way. At a
# load of 10, the fastest of three runs of 4 rows took 71 ms; 0.7 ms is usual. Untuned.
PATIENCE_SECONDS = 2.0
# Rows. The sizes at which a curve that an earlier process measured is checked: one reads all weights, the
# other one also computes. They are among SIZES and the sizes of drafters.
CHECKED_SIZES = (1, 16)
# Factor. An earlier curve is used if the fastest of MIN_TURNS runs takes between 1 / ALIKE and ALIKE times
# its seconds at both sizes. Curves of one machine differ by a tenth or two from start to start. Untuned.
ALIKE = 1.4
# Seconds. If the runs of a size are slower than ALIKE times the earlier seconds, the size is run again until
# its runs have taken this long together, because a GPU that was idle reaches its clock only after some work.
# Untuned.
WARM_UP_SECONDS = 0.02

# Runs something once and returns its seconds.
Timer = Callable[[], float]
# Runs a number of rows and returns the seconds.
Forward = Callable[[int], float]


def measure_curve(
    timers: Mapping[int, Timer],
    seconds: float,
    min_turns: int,
    device: torch.device,
    clock: Timer = time.perf_counter,
    known: Curve = (),
) -> Curve:
    """Return the measured cost curve: pairs (rows, fastest seconds), by ascending rows.

    timers: By number of rows, a function that runs so many rows once and returns the seconds. At least one.
    seconds: Roughly how long to measure if nothing disturbs the measurement.
    min_turns: How often each timer runs at least.
    device: On a CPU the number of runs is limited.
    clock: Source of time, in seconds.
    known: A curve that an earlier process measured, or (). It is returned if it has the same sizes, and runs
        of CHECKED_SIZES confirm it; otherwise it is measured anew.

    The fastest run counts, because another process only adds time, and seldom to all runs of a size; medians
    made two rows look twice as expensive as one. Sizes are measured in turns, the largest first, so that a
    disturbance hits all of them. Each timer first runs once untimed, to compile and warm up. More rows never
    cost less, so a size's cost is capped at that of every larger size.

        # fastest runs {1: 3.0, 2: 2.0, 4: 2.5} -> ((1, 2.0), (2, 2.0), (4, 2.5))
    """
    if is_confirmed(known, timers):
        return known
    max_turns = MAX_TURNS_CPU if device.type == "cpu" else math.inf
    times: dict[int, list[float]] = {rows: [] for rows in sorted(timers, reverse=True)}
    for rows in times:
        timers[rows]()
    started = clock()
    turns = 0
    while turns < min_turns or clock() - started < (
        PATIENCE_SECONDS if _disturbed(times.values()) else seconds
    ):
        for rows, seconds_taken in times.items():
            seconds_taken.append(timers[rows]())
        turns += 1
        if turns >= max(min_turns, max_turns) and not _disturbed(times.values()):
            break
    costs = accumulate(map(min, times.values()), min)
    return tuple(reversed([*zip(times, costs)]))


def is_confirmed(known: Curve, timers: Mapping[int, Timer]) -> bool:
    """Return whether an earlier curve has the sizes of these timers, and whether the machine is as fast now:
    at every size of CHECKED_SIZES, the fastest of MIN_TURNS runs must lie within the factor ALIKE. As long as
    the fastest run is slower than that, further runs follow, until all runs of the size have taken
    WARM_UP_SECONDS together. Return False without a curve.

        # curve ((1, 2.0), (4, 2.5), (16, 4.0)), ALIKE 1.4:
        # 1 row takes 2.5 now, 16 rows 3.0 -> True; 1 row takes 2.5, 16 rows 6.0 -> False

    known: Pairs (rows, seconds) by ascending rows, or ().
    timers: By number of rows, a function that runs so many rows once and returns the seconds. Those of
        CHECKED_SIZES first run once untimed, to warm up. No other timer is called.
    """
    if not known or [rows for rows, _ in known] != sorted(timers):
        return False

    def is_alike(rows: int, seconds: float) -> bool:
        """Return whether the fastest of a few runs takes about as long as the curve says.

        rows: Number of rows to run.
        seconds: Seconds of the curve.
        """
        timers[rows]()
        runs = [timers[rows]() for _ in range(MIN_TURNS)]
        while min(runs) > seconds * ALIKE and sum(runs) < WARM_UP_SECONDS:
            runs.append(timers[rows]())
        return seconds / ALIKE <= min(runs) <= seconds * ALIKE

    return all(is_alike(rows, seconds) for rows, seconds in known if rows in CHECKED_SIZES)


def _disturbed(times: Iterable[Sequence[float]]) -> bool:
    """Tell whether the fastest run of some size is not confirmed by a second run within REPEATED.

    times: For each size, the seconds of its runs.
    """
    two_fastest = (heapq.nsmallest(2, seconds) for seconds in times)
    return any(fastest[-1] > fastest[0] * REPEATED for fastest in two_fastest)


@inference_mode
def measure_rows(
    decoder: Decoder,
    sizes: Sequence[int] = (),
    seconds: float = 0.3,
    known: Curve = (),
) -> Curve:
    """Return the measured seconds of *one* layer for each number of rows; see `measure_curve`.

    If steps run as CUDA graphs, the graphs are timed; call `compile_steps` before, so that their kernels are
    compiled in parallel. The result is pairs (rows, seconds), by ascending rows.

    decoder: The layer range that is timed; the result is divided by its number of layers.
    sizes: Numbers of rows; empty means WIDE if steps run as CUDA graphs, else SIZES.
    seconds: Roughly how long to measure.
    known: What this function returned in an earlier process, or (); see `measure_curve`.
    """
    sizes = sizes or (WIDE if decoder.capturable else SIZES)
    kv = decoder.make_kv(1, HISTORY_ROWS + max(sizes))
    if decoder.capturable:
        forward = _graph_timer(decoder, kv)
    else:
        forward = partial(_time_forward, decoder, kv, _different_rows(decoder, max(sizes)))
    timers = {rows: partial(forward, rows) for rows in sizes}
    layers = len(decoder.layers)
    earlier = tuple((rows, spent * layers) for rows, spent in known)
    curve = measure_curve(timers, seconds, MIN_TURNS, decoder.device, known=earlier)
    return known if curve is earlier else tuple((rows, spent / layers) for rows, spent in curve)


def _graph_timer(decoder: Decoder, kv: KVPages) -> Forward:
    """Return a function that times graphs on the GPU.

    Host time is left out, because it is spent once per step and not once per layer. The returned function
    takes the number of rows of a frame and returns the mean seconds of a few runs. The first call for a
    number of rows captures the graph.

    decoder: The layer range, with its weights loaded.
    kv: Pages that may be overwritten.
    """
    capture = GraphCapture()

    @cache
    def steps_of(rows: int) -> CapturedSteps:
        """Return the graph for this number of rows.

        rows: Number of rows of a frame.
        """
        return CapturedSteps(decoder, kv, {}, capture, (rows,), short_sizes=())

    def forward(rows: int) -> float:
        """Return the seconds that the GPU takes for a frame.

        rows: Number of rows of the frame.
        """
        history, span = _measured_span(kv, rows)
        entry = torch.zeros(rows, decoder.config.hidden, dtype=decoder.dtype, device=decoder.device)
        tokens = [0] * rows
        places = range(history, history + rows)
        return steps_of(rows).seconds(
            StepRows(entry if decoder.layers.first else tokens, places, places, [span])
        )

    return forward


def _measured_span(kv: KVPages, rows: int) -> tuple[int, RowSpan]:
    """Return the number of KV rows before the measured rows, and the span of the measured rows.

    With gated delta layers the span is a tree: a prompt's span would replace the state before it.
    HISTORY_ROWS rows precede the measured rows, or fewer if the pages hold fewer. The span uses all pages.

    kv: The pages of the range.
    rows: Number of measured rows. At most the rows of all pages together.
    """
    history = min(HISTORY_ROWS, kv.pages * kv.page_rows - rows)
    pages = tuple(range(kv.pages))
    span = RowSpan(rows, history, rows, pages)
    return history, replace(span, visible=span.seen) if isinstance(kv, WalkedPages) else span


def _different_rows(decoder: Decoder, rows: int) -> Tensor:
    """Return random hidden states [rows, hidden].

    Equal rows would all choose the same experts, so many rows would seem to cost what one costs.

    decoder: The layer range, for its hidden size, device and dtype.
    rows: Number of rows.
    """
    drawn = torch.Generator().manual_seed(0)
    table = torch.randn(rows, decoder.config.hidden, generator=drawn)
    return table.to(decoder.device, decoder.dtype)


def _time_forward(decoder: Decoder, kv: KVPages, table: Tensor, rows: int) -> float:
    """Run the first `rows` rows of `table` through the range, and return the seconds.

    On a GPU the work is waited for.

    decoder: The layer range, with its weights loaded.
    kv: Pages that may be overwritten.
    table: Hidden states [at least rows, H].
    rows: Number of rows to run.
    """
    started = time.perf_counter()
    _forward(decoder, kv, table[:rows].clone())
    if decoder.device.type == "cuda":
        # Wait for this thread's stream only: no thread may wait for the whole device while another captures.
        torch.cuda.current_stream(decoder.device).synchronize()
    return time.perf_counter() - started


def _forward(decoder: Decoder, kv: KVPages, hidden: Tensor) -> None:
    """Run rows through the range without a graph, as the rows of one sequence.

    decoder: The layer range, with its weights loaded.
    kv: Pages that may be overwritten.
    hidden: Hidden states [rows, H], which are changed. At most as many rows as the pages hold.
    """
    rows = len(hidden)
    history, span = _measured_span(kv, rows)
    positions = torch.arange(history, history + rows, device=decoder.device)
    plan = decoder.plan([span], kv.page_rows, "packed")
    tokens = positions % decoder.config.vocab if decoder.reads_tokens else None
    decoder.forward(hidden, positions, positions, plan, kv, tokens=tokens)
