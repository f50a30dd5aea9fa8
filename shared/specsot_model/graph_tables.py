"""Fills the tables by which the attention of a CUDA graph reads the KV pages of a frame.

A captured graph cannot take new arguments. It reads tables of a fixed size instead, which the host fills and
copies before each launch: which pages are read, divided into pieces, and which columns every row sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from specsot_kernels.anchors import anchored_of, anchors_in, first_of, policy_sights
from specsot_kernels.attention_tables import (
    PROMPT_QUERIES,
    Numbers,
    PageRun,
    PieceTables,
    RowSights,
    TableRoom,
    cut_pieces,
    numbers,
    page_runs_of,
    page_runs_unshared,
    room_for,
    sights_of,
    sinces_of,
    tabulate_prompts,
    whole_pages,
)
from specsot_kernels.line_tables import BLOCK, LineRoom, cut_lines, line_room, line_sights
from specsot_model.attention import AttentionPlan, RowSpan, plan_with_kernel
from specsot_model.kv import KVPages, views
from specsot_model.rotary import frequencies

if TYPE_CHECKING:
    from specsot_model.decoder import Decoder

# Prompts that have room in a graph of prompts alone. Untuned.
MAX_PROMPTS = 64
# Frames whose page tables are cached: as many frames may take turns in a ring. Untuned.
MAX_KNOWN_FRAMES = 8


class FrameTables:
    """Fills the attention tables of a graph.

    Tables name whole pages. The pages of a frame stay the same for many steps, so those tables are cached;
    only the tables of what rows see are filled for each step. With a window, the first visible column
    changes with every step, but the pages that are read change only when the window leaves a page.

    told: Number of leading tables that say where each row's visible columns begin.
    begin: Work that the plan does once per step before the first layer; None: no such work.
    """

    def __init__(
        self, room: TableRoom, page_rows: int, window: int | None = None, rates: Tensor | None = None
    ) -> None:
        """
        room: Sizes of the tables.
        window: In these layers a row sees at most so many positions; None: all.
        rates: `Rotary.frequencies` if frames may have a KV policy (see `AnchorRows`), else None.
        """
        self._room = room
        self._page_rows = page_rows
        self.window = window
        self._rates = rates
        self.told = len(self._tell(()))
        self._known: dict[object, list[Numbers] | None] = {}
        self.begin: Callable[[], None] | None = None

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tables that `fill` returns; the last one at its full length."""
        return *((self._room.rows,),) * self.told, *self._room.shapes

    def plan(self, flat: Tensor, heads_per_kv: int) -> AttentionPlan:
        """Return the attention plan that reads these tables.

        flat: int32 buffer on the device with as many numbers as `shapes` need.
        heads_per_kv: Number of query heads per KV head.
        """
        from specsot_kernels.gpu.attention import plan_over

        tables = views(flat, self.shapes)
        given = (self._room, self._page_rows, heads_per_kv)
        told = tables[: self.told]
        tables = tables[self.told :]
        plan = plan_over(tables, *given, told, self._rates)
        if plan.anchored:
            self.begin = plan.anchored.turn
        return plan_with_kernel(plan)

    def fill(self, spans: Sequence[RowSpan]) -> list[Numbers] | None:
        """Return the tables of a frame, or None if the graph has no room for it."""
        size = self._page_rows
        window = self.window
        firsts = [0] * len(spans)
        if window is not None:
            firsts = [max(span.base + 1 - window, 0) // size for span in spans]
        anchors = list[int]()
        if self._rates is not None:
            firsts = [max(at, first_of(span) // size) for span, at in zip(spans, firsts)]
            anchors = [anchors_in(span) for span in spans]
        pages = [span.pages[: -(-(span.base + span.tail) // size)] for span in spans]
        read = [(span.rows, span.base // size, own, at) for span, own, at in zip(spans, pages, firsts)]
        known = (tuple(read), tuple(anchors))
        room = self._room
        cut = partial(self._cut, spans, pages, firsts)
        return self._fill(spans, known, lambda: room.fill_pieces(cut()), sights_of(spans, window))

    def _fill(
        self,
        spans: Sequence[RowSpan],
        known: object,
        cut: Callable[[], list[Numbers] | None],
        sights: RowSights,
    ) -> list[Numbers] | None:
        """Return the tables, from the cache where possible.

        known: Key of the page tables in the cache.
        cut: Makes the page tables if they are not cached.
        sights: Which columns the rows see.
        """
        if known not in self._known:
            if len(self._known) == MAX_KNOWN_FRAMES:
                del self._known[next(iter(self._known))]
            self._known[known] = cut()
        filled = self._known[known]
        if filled is None:
            return None
        told = np.zeros((self.told, self._room.rows), np.int32)
        for table, each in zip(told, self._tell(spans)):
            table[: len(each)] = each
        return [*told, filled[0], *self._room.fill_sights(sights), *filled[1:]]

    def _tell(self, spans: Sequence[RowSpan]) -> Sequence[Numbers]:
        """Return the leading tables: each row's first visible column and, with a policy, its sinks."""
        if self._rates is not None:
            return policy_sights(spans, self.window)
        return () if self.window is None else (sinces_of(spans, self.window),)

    def padded(self, tables: list[Numbers]) -> list[Numbers]:
        """Return the tables with the last one (pages) extended to its full length."""
        return [*tables[:-1], np.resize(tables[-1], self._room.pages)]

    def _cut(
        self, spans: Sequence[RowSpan], pages: Sequence[tuple[int, ...]], firsts: Sequence[int]
    ) -> PieceTables:
        """Divide the pages of a frame into pieces for the kernel.

        pages: By span, the pages up to the span's last row.
        firsts: By span, the index of the first page that is read.
        """
        size = self._page_rows
        rows = [span.rows for span in spans]
        anchored = list[PageRun]()
        bases = [span.base // size * size for span in spans]
        plain = self._rates is None and not any(firsts)
        stretches = page_runs_unshared(rows, pages, size) if plain else None
        if stretches is None:
            whole = [whole_pages(*each, size) for each in zip(rows, bases, pages)]
            sinces = np.repeat(numbers(firsts) * size, rows) if any(firsts) else None
            stretches = page_runs_of(whole, size, sinces)
        if self._rates is not None:
            anchored = list(anchored_of(spans, size))
        leads = numbers(bases).repeat(rows)
        return cut_pieces(
            stretches, leads, size, self._room.tile_rows, anchored=anchored, places=self._room.places
        )


class LineFrames(FrameTables):
    """Fills the attention tables of a graph of a batch-invariant range.

    The page tables of a tree stay the same until its sequence is a block (BLOCK columns) longer.
    """

    def __init__(self, room: LineRoom, page_rows: int, window: int | None = None) -> None:
        super().__init__(room, page_rows, window)
        self._lines = room

    def plan(self, flat: Tensor, heads_per_kv: int) -> AttentionPlan:
        """Return the attention plan that reads these tables; see `FrameTables.plan`."""
        from specsot_kernels.gpu.lines import plan_over_lines

        tables = views(flat, self.shapes)
        told = tables[: self.told]
        tables = tables[self.told :]
        plan = plan_over_lines(tables, self._lines.slots, self._page_rows, *told)
        self.begin = plan.lay
        return plan_with_kernel(plan)

    def fill(self, spans: Sequence[RowSpan]) -> list[Numbers] | None:
        """Return the tables of a frame, or None if the graph has no room for it."""
        size, room, sights = self._page_rows, self._lines, line_sights(spans)
        known = tuple(
            (s.rows, s.tail, s.base // BLOCK if s.visible else (s.base,), s.pages[: s.num_pages(size)])
            for s in spans
        )

        def cut() -> list[Numbers] | None:
            return room.fill_lines(cut_lines(spans, sights.leads, size, room.tile_rows))

        return self._fill(spans, known, cut, sights)


def frame_tables(
    decoder: Decoder, kv: KVPages, rows: int, short: bool, hidden: bool
) -> Sequence[FrameTables]:
    """Return the tables of sliding-window layers, if the range has any, then those of the other layers.

    rows: Size of the graph's bucket.
    short: The graph is for many sequences with few rows each; see `TableRoom`.
    hidden: The graph is for frames from which a KV policy hides columns.
    """
    config = decoder.config
    layers = set(range(decoder.layers.first, decoder.layers.last))
    windows = [config.window] * bool(layers & config.windowed) + [None] * bool(layers - config.windowed)
    given = rows, kv.pages + rows, config.heads // config.kv_heads
    if decoder.batch_invariant:
        return [LineFrames(line_room(*given), kv.page_rows, window) for window in windows]
    rates = frequencies(config.rope, config.head_dim).to(decoder.device) if hidden else None
    room = room_for(*given, short, hidden, config.kv_heads)
    return [FrameTables(room, kv.page_rows, window, rates) for window in windows]


class PromptTables:
    """Fills the attention tables of a graph for prompts alone.

    shapes: Shapes of the two tables, tiles and pages.
    """

    def __init__(self, rows: int, pages: int, page_rows: int, heads_per_kv: int) -> None:
        self._rows = rows
        self._page_rows = page_rows
        self._tile_rows = PROMPT_QUERIES // heads_per_kv
        self.shapes = (rows // self._tile_rows + MAX_PROMPTS + 1, 4), (pages,)

    def plan(self, flat: Tensor, heads_per_kv: int) -> AttentionPlan:
        """Return the attention plan that reads these tables; see `FrameTables.plan`."""
        from specsot_kernels.gpu.attention import plan_over_prompts

        tiles, pages = views(flat, self.shapes)
        return plan_with_kernel(plan_over_prompts(tiles, pages, self._page_rows))

    def fill(self, spans: Sequence[RowSpan]) -> list[Numbers] | None:
        """Return the tables of a frame; None if it has trees, or does not fit."""
        if any(span.visible is not None for span in spans):
            return None
        tiles, pages = tabulate_prompts(spans, self._page_rows, self._tile_rows, self._rows)
        whole = np.zeros(self.shapes[0], np.int32)
        if len(tiles) > len(whole) or len(pages) > self.shapes[1][0]:
            return None
        whole[: len(tiles)] = tiles
        return [whole, pages]
