"""Fills the tables by which the attention of a CUDA graph reads the KV pages of a frame.

A captured graph cannot take new arguments. It reads tables of a fixed size instead, which the host fills and
copies before each launch: which pages are read, divided into pieces, and which columns every row sees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from specsot.checkpoint.config import ModelConfig
from specsot_kernels.anchors import anchor_runs, first_unrotated_column, num_anchors, policy_sights
from specsot_kernels.attention_tables import (
    PROMPT_QUERIES,
    Numbers,
    PageRun,
    PieceTables,
    RowSights,
    TableRoom,
    cut_pieces,
    num_head_blocks,
    numbers,
    page_runs_of,
    page_runs_unshared,
    room_for,
    sights_of,
    sinces_of,
    tabulate_prompts,
    whole_pages,
)
from specsot_kernels.line_tables import (
    EQUAL_PIECES,
    MAX_SMALL_ROWS,
    SMALL_STEP_PIECES,
    LineRoom,
    PieceSizes,
    cut_lines,
    line_room,
    line_sights,
    small_step_room,
)
from specsot_model.attention import AttentionPlan, RowSpan, plan_with_kernel
from specsot_model.kv import KVPages, views
from specsot_model.rotary import frequencies

if TYPE_CHECKING:
    from specsot_model.decoder import Decoder

# Prompts that have room in a graph of prompts alone. Untuned.
MAX_PROMPTS = 64
# Frames whose page tables are cached: as many frames may take turns in a ring. Untuned.
MAX_KNOWN_FRAMES = 8


def heads_per_tile(config: ModelConfig) -> int:
    """Return how many query heads of one row and KV head lie in one tile of the attention kernel: all of
    them, or those of one block (`num_head_blocks`).

    config: The model's config, for its numbers of heads.
    """
    group = config.heads // config.kv_heads
    return group // num_head_blocks(group)


class FrameTables:
    """Fills the attention tables of a graph.

    Tables name whole pages. The pages of a frame stay the same for many steps, so those tables are cached;
    only the tables of what rows see are filled for each step. With a window, the first visible column changes
    with every step, but the pages that are read change only when the window leaves a page.

    window: In these layers a row sees at most so many positions; None: all.
    num_sight_tables: Number of leading tables that say where each row's visible columns begin.
    prepare: Work that the plan does once per step before the first layer; None: no such work.
    """

    def __init__(
        self, room: TableRoom, page_rows: int, window: int | None = None, frequencies: Tensor | None = None
    ) -> None:
        """Start with an empty cache of page tables.

        room: Sizes of the tables.
        page_rows: Rows (tokens) of a KV page.
        window: In these layers a row sees at most so many positions; None: all.
        frequencies: `Rotary.frequencies` if frames may have a KV policy (see `AnchorRows`), else None.
        """
        self._room = room
        self._page_rows = page_rows
        self.window = window
        self._frequencies = frequencies
        self.num_sight_tables = len(self._sight_tables(()))
        # The tables of the last frames, newest last, with what they were made of. Lists are compared, because
        # a comparison ends at the first page that differs, while a hash reads all pages of all sequences.
        self._cached_tables: deque[tuple[object, list[Numbers] | None]] = deque(maxlen=MAX_KNOWN_FRAMES)
        self.prepare: Callable[[], None] | None = None

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the tables that `fill` returns; the last one at its full length."""
        return *((self._room.rows,),) * self.num_sight_tables, *self._room.shapes

    def plan(self, flat: Tensor, heads_per_kv: int) -> AttentionPlan:
        """Return the attention plan that reads these tables.

        `prepare` is set if the plan has work to do once per step. For frames with a KV policy that is the
        rotation of queries towards the anchors.

        flat: int32 buffer on the device with as many numbers as `shapes` need.
        heads_per_kv: Number of query heads per KV head.
        """
        from specsot_kernels.gpu.attention import plan_over

        tables = views(flat, self.shapes)
        sizes = (self._room, self._page_rows, heads_per_kv)
        sight_tables = tables[: self.num_sight_tables]
        tables = tables[self.num_sight_tables :]
        plan = plan_over(tables, *sizes, sight_tables, self._frequencies)
        if plan.anchored:
            self.prepare = plan.anchored.turn
        return plan_with_kernel(plan)

    def fill(self, spans: Sequence[RowSpan]) -> list[Numbers] | None:
        """Return the tables of a frame, or None if the graph has no room for it.

        The tables are int32, in the order of `shapes`: first visible columns if there are such tables,
        pieces, what the rows see, slots, and the pages, which are not padded. None is returned if the frame
        has more rows, pieces, slots or pages than the tables hold.

        spans: One span per segment of the frame, in row order.
        """
        page_size = self._page_rows
        window = self.window
        firsts = [0] * len(spans)
        if window is not None:
            firsts = [max(span.base + 1 - window, 0) // page_size for span in spans]
        anchors = list[int]()
        if self._frequencies is not None:
            firsts = [
                max(first, first_unrotated_column(span) // page_size) for span, first in zip(spans, firsts)
            ]
            anchors = [num_anchors(span) for span in spans]
        rows = [span.rows for span in spans]
        bases = [span.base // page_size * page_size for span in spans]
        pages = [span.pages[: -(-(span.base + span.tail) // page_size)] for span in spans]
        # A comparison of keys ends at the first list that differs. Bases and pages come first, because they
        # change more often from frame to frame than the other lists.
        key = bases, pages, rows, firsts, anchors

        def make_tables() -> list[Numbers] | None:
            """Return the tables of pieces, slots and pages, or None if the graph has no room for them."""
            return self._room.fill_pieces(self._piece_tables(spans, rows, bases, pages, firsts))

        return self._fill(spans, key, make_tables, sights_of(spans, window))

    def _fill(
        self,
        spans: Sequence[RowSpan],
        key: object,
        make_tables: Callable[[], list[Numbers] | None],
        sights: RowSights,
    ) -> list[Numbers] | None:
        """Return the tables of a frame, from the cache where possible; None if the graph has no room for
        them.

        At most MAX_KNOWN_FRAMES frames are cached; the oldest is dropped for a new one. That there is no room
        is cached as well.

        key: Key of the page tables in the cache.
        make_tables: Makes the page tables if they are not cached; returns None if the graph has no room for
            them.
        sights: Which columns the rows see.
        spans: One span per segment of the frame, in row order.
        """
        cached = next((pair for pair in reversed(self._cached_tables) if pair[0] == key), None)
        if cached is None:
            cached = key, make_tables()
            self._cached_tables.append(cached)
        filled = cached[1]
        if filled is None:
            return None
        if not self.num_sight_tables:
            return [filled[0], *self._room.fill_sights(sights), *filled[1:]]
        sight_tables = np.zeros((self.num_sight_tables, self._room.rows), np.int32)
        for table, row_values in zip(sight_tables, self._sight_tables(spans)):
            table[: len(row_values)] = row_values
        return [*sight_tables, filled[0], *self._room.fill_sights(sights), *filled[1:]]

    def _sight_tables(self, spans: Sequence[RowSpan]) -> Sequence[Numbers]:
        """Return the leading tables, int32 [rows] each: each row's first visible column and, with a policy,
        its sinks.

        The result is empty if rows see all columns.

        spans: One span per segment of the frame, in row order.
        """
        if self._frequencies is not None:
            return policy_sights(spans, self.window)
        return () if self.window is None else (sinces_of(spans, self.window),)

    def padded(self, tables: list[Numbers]) -> list[Numbers]:
        """Return the tables with the last one (pages) extended to its full length.

        tables: The tables of a frame, as `fill` returns them.
        """
        return [*tables[:-1], np.resize(tables[-1], self._room.pages)]

    def _piece_tables(
        self,
        spans: Sequence[RowSpan],
        rows: Sequence[int],
        bases: Sequence[int],
        pages: Sequence[tuple[int, ...]],
        firsts: Sequence[int],
    ) -> PieceTables:
        """Return the pages of a frame, divided into pieces for the kernel.

        Without a window or a policy, runs of pages that several spans share are read once.

        spans: One span per segment of the frame, in row order.
        rows: By span, its number of rows.
        bases: By span, the number of columns before its rows, rounded down to whole pages.
        pages: By span, the pages up to the span's last row.
        firsts: By span, the index of the first page that is read.
        """
        size = self._page_rows
        of_anchors = list[PageRun]()
        all_visible = self._frequencies is None and not any(firsts)
        page_runs = page_runs_unshared(rows, pages, size) if all_visible else None
        if page_runs is None:
            whole_spans = [whole_pages(*span_parts, size) for span_parts in zip(rows, bases, pages)]
            sinces = np.repeat(numbers(firsts) * size, rows) if any(firsts) else None
            page_runs = page_runs_of(whole_spans, size, sinces)
        if self._frequencies is not None:
            of_anchors = list(anchor_runs(spans, size))
        leads = numbers(bases).repeat(rows)
        return cut_pieces(
            page_runs, leads, size, self._room.tile_rows, anchored=of_anchors, places=self._room.places
        )


class LineFrames(FrameTables):
    """Fills the attention tables of a graph of a batch-invariant range.

    The page tables of a tree stay the same until its rows read more columns together.
    """

    # Where lines are cut into pieces.
    _sizes: PieceSizes = EQUAL_PIECES

    def __init__(self, room: LineRoom, page_rows: int, window: int | None = None) -> None:
        """Start with an empty cache of page tables.

        room: Sizes of the tables.
        page_rows: Rows (tokens) of a KV page.
        window: In these layers a row sees at most so many positions; None: all.
        """
        super().__init__(room, page_rows, window)
        self._lines = room

    def plan(self, flat: Tensor, heads_per_kv: int) -> AttentionPlan:
        """Return the attention plan that reads these tables.

        `prepare` is set to the work that the plan does once per step.

        flat: int32 buffer on the device with as many numbers as `shapes` need.
        heads_per_kv: Not used; batch-invariant tiles do not depend on it.
        """
        from specsot_kernels.gpu.lines import plan_over_lines

        tables = views(flat, self.shapes)
        sight_tables = tables[: self.num_sight_tables]
        tables = tables[self.num_sight_tables :]
        plan = plan_over_lines(tables, self._lines.slots, self._page_rows, *sight_tables)
        self.prepare = plan.lay
        return plan_with_kernel(plan)

    def fill(self, spans: Sequence[RowSpan]) -> list[Numbers] | None:
        """Return the tables of a frame, or None if the graph has no room for it.

        The order is that of `FrameTables.fill`.

        spans: One span per segment of the frame, in row order.
        """
        page_size, room, sizes = self._page_rows, self._lines, self._sizes
        sights = line_sights(spans, sizes)
        key = tuple(
            (
                span.rows,
                span.tail,
                sizes.lead_of(span.base) if span.visible else (span.base,),
                span.pages[: span.num_pages(page_size)],
            )
            for span in spans
        )

        def make_tables() -> list[Numbers] | None:
            """Return the page tables of the frame, or None if the graph has no room for them."""
            return room.fill_lines(cut_lines(spans, sights.leads, page_size, room.tile_rows, sizes))

        return self._fill(spans, key, make_tables, sights)


class SmallStepFrames(LineFrames):
    """Fills the attention tables of a graph of at most MAX_SMALL_ROWS rows; see `small_attention`."""

    _sizes = SMALL_STEP_PIECES

    def plan(self, flat: Tensor, heads_per_kv: int) -> AttentionPlan:
        """Return the attention plan that reads these tables.

        flat: int32 buffer on the device with as many numbers as `shapes` need.
        heads_per_kv: Not used; the room of the tables was made for it.
        """
        from specsot_kernels.gpu.small_attention import SmallStepPlan

        tables = views(flat, self.shapes)
        sight_tables = tables[: self.num_sight_tables]
        tables = tuple(tables[self.num_sight_tables :])
        return plan_with_kernel(SmallStepPlan(tables, self._lines.slots, self._page_rows, *sight_tables))


def frame_tables(
    decoder: Decoder, kv: KVPages, rows: int, short_sequences: bool, hidden: bool
) -> Sequence[FrameTables]:
    """Return the tables of sliding-window layers, if the range has any, then those of the other layers.

    Batch-invariant ranges get `LineFrames`, whatever `short_sequences` and `hidden` say. Other ranges get
    `SmallStepFrames` for graphs of at most MAX_SMALL_ROWS rows if they run small steps and no policy hides
    columns. The list has one entry if all layers of the range are of one kind, else two.

    rows: Size of the graph's bucket, in rows.
    short_sequences: The graph is for many sequences with few rows each; see `TableRoom`.
    hidden: The graph is for frames from which a KV policy hides columns.
    decoder: The layer range, with its weights loaded.
    kv: The KV cache of the layer range.
    """
    config = decoder.config
    layers = set(range(decoder.layers.first, decoder.layers.last))
    windows = [config.window] * bool(layers & config.windowed) + [None] * bool(layers - config.windowed)
    sizes = rows, kv.pages + rows, config.heads // config.kv_heads
    if decoder.batch_invariant:
        return [LineFrames(line_room(*sizes), kv.page_rows, window) for window in windows]
    if decoder.runs_small_steps and rows <= MAX_SMALL_ROWS and not hidden:
        small_room = small_step_room(*sizes, kv.pages * kv.page_rows)
        return [SmallStepFrames(small_room, kv.page_rows, window) for window in windows]
    rates = frequencies(config.rope, config.head_dim).to(decoder.device) if hidden else None
    room = room_for(*sizes[:2], heads_per_tile(config), short_sequences, hidden, config.kv_heads)
    return [FrameTables(room, kv.page_rows, window, rates) for window in windows]


class PromptTables:
    """Fills the attention tables of a graph for prompts alone.

    shapes: Shapes of the two tables, tiles and pages.
    """

    def __init__(self, rows: int, pages: int, page_rows: int, heads_per_kv: int) -> None:
        """Compute the sizes of the tables.

        rows: Rows of the graph.
        pages: How many page numbers a frame may need.
        page_rows: Rows (tokens) of a KV page.
        heads_per_kv: Number of query heads per KV head.
        """
        self._rows = rows
        self._page_rows = page_rows
        self._tile_rows = PROMPT_QUERIES // heads_per_kv
        self.shapes = (rows // self._tile_rows + MAX_PROMPTS + 1, 4), (pages,)

    def plan(self, flat: Tensor, heads_per_kv: int) -> AttentionPlan:
        """Return the attention plan that reads these tables.

        flat: int32 buffer on the device with as many numbers as `shapes` need.
        heads_per_kv: Not used; `__init__` took it.
        """
        from specsot_kernels.gpu.attention import plan_over_prompts

        tiles, pages = views(flat, self.shapes)
        return plan_with_kernel(plan_over_prompts(tiles, pages, self._page_rows))

    def fill(self, spans: Sequence[RowSpan]) -> list[Numbers] | None:
        """Return the tables of a frame; None if it has trees, or if the graph has no room for it.

        The two tables are the tiles, padded with zeros, and the pages. There is room for at least MAX_PROMPTS
        spans with as many rows together as the graph.

        spans: One span per segment of the frame, in row order.
        """
        if any(span.visible is not None for span in spans):
            return None
        tiles, pages = tabulate_prompts(spans, self._page_rows, self._tile_rows, self._rows)
        padded = np.zeros(self.shapes[0], np.int32)
        if len(tiles) > len(padded) or len(pages) > self.shapes[1][0]:
            return None
        padded[: len(tiles)] = tiles
        return [padded, pages]
