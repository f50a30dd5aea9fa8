"""Fills the tables of numbers by which a captured graph's attention reads a frame's pages."""

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
    PageStretch,
    PieceTables,
    RowSights,
    TableRoom,
    cut_pieces,
    numbers,
    room_for,
    sights_of,
    sinces_of,
    stretches_alone,
    stretches_of,
    tabulate_prompts,
    whole_pages,
)
from specsot_kernels.line_tables import BLOCK, LineRoom, cut_lines, line_room, line_sights
from specsot_model.attention import AttentionPlan, RowSpan, plan_with_kernel
from specsot_model.kv import KVPages, views
from specsot_model.rotary import frequencies

if TYPE_CHECKING:
    from specsot_model.decoder import Decoder

MAX_PROMPTS = 64  # that have room in such a graph; not measured
MAX_KNOWN_FRAMES = 8  # frames whose tables are kept: as many may take turns in a ring; not measured


class FrameTables:
    """Fills a graph's tables for a frame. window: of layers in which a row sees no more rows than that. Then
    the first row that is seen changes with every lap, but the pages that are read do so only at their ends.
    rates: see `AnchorRows`, where the room is for texts with a policy, too.
    """

    def __init__(
        self, room: TableRoom, page_rows: int, window: int | None = None, rates: Tensor | None = None
    ) -> None:
        self._room = room
        self._page_rows = page_rows
        self.window = window
        self._rates = rates
        self.told = len(self._tell(()))  # tables of where each row's sight begins
        self._known: dict[object, list[Numbers] | None] = {}
        self.begin: Callable[[], None] | None = None  # of the plan: before anybody attends

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the tables that `fill` gives, the last one whole."""
        return *((self._room.rows,),) * self.told, *self._room.shapes

    def plan(self, flat: Tensor, heads_per_kv: int) -> AttentionPlan:
        """What reads them, once they are there. flat: int32, as many as `shapes` have."""
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
        """What is read, of whole pages: so it stays the same for many laps; and what rows see of that. None
        where the graph has no room for it.
        """
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
        """cut: makes what is read, where it is not known."""
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
        """Of each row the first column that it sees, and what policies leave it besides."""
        if self._rates is not None:
            return policy_sights(spans, self.window)
        return () if self.window is None else (sinces_of(spans, self.window),)

    def padded(self, tables: list[Numbers]) -> list[Numbers]:
        """The same, the last one as long as the room has it, too."""
        return [*tables[:-1], np.resize(tables[-1], self._room.pages)]

    def _cut(
        self, spans: Sequence[RowSpan], pages: Sequence[tuple[int, ...]], firsts: Sequence[int]
    ) -> PieceTables:
        """pages: that each span's rows reach. firsts: of each span the first page that is read."""
        size = self._page_rows
        rows = [span.rows for span in spans]
        anchored = list[PageStretch]()
        bases = [span.base // size * size for span in spans]
        plain = self._rates is None and not any(firsts)
        stretches = stretches_alone(rows, pages, size) if plain else None
        if stretches is None:
            whole = [whole_pages(*each, size) for each in zip(rows, bases, pages)]
            sinces = np.repeat(numbers(firsts) * size, rows) if any(firsts) else None
            stretches = stretches_of(whole, size, sinces)
        if self._rates is not None:
            anchored = list(anchored_of(spans, size))
        leads = numbers(bases).repeat(rows)
        return cut_pieces(
            stretches, leads, size, self._room.tile_rows, anchored=anchored, places=self._room.places
        )


class LineFrames(FrameTables):
    """The same for a graph of a batch-invariant range. What is read stays the same for a tree until its text
    is a block longer.
    """

    def __init__(self, room: LineRoom, page_rows: int, window: int | None = None) -> None:
        super().__init__(room, page_rows, window)
        self._lines = room

    def plan(self, flat: Tensor, heads_per_kv: int) -> AttentionPlan:
        from specsot_kernels.gpu.lines import plan_over_lines

        tables = views(flat, self.shapes)
        told = tables[: self.told]
        tables = tables[self.told :]
        plan = plan_over_lines(tables, self._lines.slots, self._page_rows, *told)
        self.begin = plan.lay
        return plan_with_kernel(plan)

    def fill(self, spans: Sequence[RowSpan]) -> list[Numbers] | None:
        size, room, sights = self._page_rows, self._lines, line_sights(spans)
        known = tuple(
            (s.rows, s.tail, s.base // BLOCK if s.visible else (s.base,), s.pages[: s.depth(size)])
            for s in spans
        )

        def cut() -> list[Numbers] | None:
            return room.fill_lines(cut_lines(spans, sights.leads, size, room.tile_rows))

        return self._fill(spans, known, cut, sights)


def frame_tables(
    decoder: Decoder, kv: KVPages, rows: int, short: bool, hidden: bool
) -> Sequence[FrameTables]:
    """Of the layers that see windows, if any, then of the others. short: as in `TableRoom`; hidden: where
    policies hide something.
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
    """The same for a graph of prompts alone."""

    def __init__(self, rows: int, pages: int, page_rows: int, heads_per_kv: int) -> None:
        self._rows = rows
        self._page_rows = page_rows
        self._tile_rows = PROMPT_QUERIES // heads_per_kv
        self.shapes = (rows // self._tile_rows + MAX_PROMPTS + 1, 4), (pages,)

    def plan(self, flat: Tensor, heads_per_kv: int) -> AttentionPlan:
        """As `FrameTables` has it."""
        from specsot_kernels.gpu.attention import plan_over_prompts

        tiles, pages = views(flat, self.shapes)
        return plan_with_kernel(plan_over_prompts(tiles, pages, self._page_rows))

    def fill(self, spans: Sequence[RowSpan]) -> list[Numbers] | None:
        """What is read; None where others than prompts are among them, or more than there is room for."""
        if any(span.visible is not None for span in spans):
            return None
        tiles, pages = tabulate_prompts(spans, self._page_rows, self._tile_rows, self._rows)
        whole = np.zeros(self.shapes[0], np.int32)
        if len(tiles) > len(whole) or len(pages) > self.shapes[1][0]:
            return None
        whole[: len(tiles)] = tiles
        return [whole, pages]
