"""Grows whole trees in one captured CUDA graph, rows that the head must catch up with included.

The trees are those of `growth`. The host fills in index tables, launches the graph and reads one result. All
forward passes for a tree read the same pages. The passes differ in the number of rows per tree and in the
columns that a row attends to; for grown rows the device computes these columns itself. Trees whose grammar
must be asked between levels grow in `growth`.

Rows that are *due* are rows of committed tokens that the head has not computed yet. *Asynchronous* growth is
launched before the host has read the verification result that it follows. The graphs of both ways of growth
are the same; only the tables come from the host or from a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import le
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specsot.core.frames import TreeSegment
from specsot.core.tree import single
from specsot_drafter.core.selection import Candidates, stacked
from specsot_drafter.eagle_kv import DraftPages, DueRows, FrameTrees
from specsot_drafter.growth import TreeRoom
from specsot_drafter.heads import GraphHead, HeadRows
from specsot_drafter.heads.checkpoint import HeadShape
from specsot_drafter.overlap.device_growth import (
    DeviceGrowth,
    page_windows,
    verified_numbers,
    verified_numbers_size,
)
from specsot_drafter.overlap.device_selection import GrownPool, TreeChooser
from specsot_kernels.attention_tables import (
    as_arrays,
    cut_pieces,
    page_runs_of,
    page_runs_unshared,
    room_for,
    whole_pages,
)
from specsot_kernels.device_waits import record_on, wait_for
from specsot_kernels.growing import WORD, CandidatePool, DueNumbers, LevelFrontier, LevelPlace, VerifiedTrees
from specsot_model.attention import AttentionPlan, plan_with_kernel
from specsot_model.cuda_graphs import Capture, Captured, Work, bucket_of, run_once
from specsot_model.inference import inference_mode
from specsot_model.kv import Numbers, Staging, aligned, joined, size_of, views
from specsot_model.memory_fit import graph_bytes

# Trees. The numbers of trees that graphs are captured for; more trees take several runs. Untuned.
GRAPH_TREES = (1, 2, 4, 8, 16, 32, 64)
# Levels. The depths that graphs are captured for, in addition to the deepest; other depths use the next
# deeper graph. Untuned.
GRAPH_LEVELS = (*range(1, 9), 16, 32)
# Rows. Bounds the rows of a level over all trees where a policy chooses the size of trees. Chosen by traces
# of a small model with so many trees that they share 512 rows: one fed node per level gives 0.4 to 1.2 %
# fewer tokens than four, two give as many as four.
LEVEL_ROWS = 64

# Waits for the device and returns the candidates.
Grown = Callable[[], Candidates]
# Chooses the candidates and the frontier of a level: `specsot_kernels.gpu.growing.grow`.
Grow = Callable[
    [Tensor, int, LevelPlace, int, CandidatePool, LevelFrontier | None, Tensor | None], LevelFrontier
]


class GraphInput(NamedTuple):
    """Input of one tree of a graph: what it grows from, and where.

    due: Rows of committed tokens to compute first. The tree grows from the output of the last of them.
    room: The KV slots that were reserved for the grown rows.
    """

    due: DueRows
    room: TreeRoom


@dataclass(frozen=True, slots=True)
class GraphSize:
    """The fixed sizes of one graph.

    Example: k 4, widths (4, 2), that is 3 levels. The levels have 4, 16 and 8 candidates; 4 + 2 rows of every
    tree are fed after the due rows.

    trees: Number of trees that the graph grows together.
    k: Number of children of every node that is fed.
    widths: Number of nodes of level 1, 2, ... of each tree that are fed. Empty: only the roots are fed.
    floor: Cumulative log-probability below which a node is barred from being fed. -inf: none is barred.
    due: Maximum number of due rows of a tree.
    attending: How many of a tree's due rows, from the last one back, take part in attention.
    """

    trees: int
    k: int
    widths: tuple[int, ...]
    floor: float
    due: int
    attending: int

    @property
    def levels(self) -> int:
        """Number of levels of every tree."""
        return len(self.widths) + 1

    @property
    def level_sizes(self) -> list[int]:
        """The number of candidates of each level of one tree."""
        return [self.k * nodes for nodes in (1, *self.widths)]

    @property
    def grown(self) -> int:
        """The number of rows of one tree that are fed after the due rows."""
        return sum(self.widths)

    @property
    def passes(self) -> list[int]:
        """The distinct numbers of rows per tree of the graph's forward passes, ascending."""
        return sorted({self.attending, *self.widths})

    @property
    def words(self) -> int:
        """The number of 32-bit words of a row's attention mask over its tree."""
        return self.grown // WORD + 1

    def place(self, level: int) -> LevelPlace:
        """Return where the candidates and the fed rows of a level begin, and how many nodes are fed.

        level: Number of the level, 0 for the roots' children.

        With k 4 and widths (4, 2), level 1 has first 4, fed 4 and width 2.

        The level after the last fed one has width k.
        """
        width = self.widths[level] if level < len(self.widths) else self.k
        return LevelPlace(sum(self.level_sizes[:level]), sum(self.widths[:level]), width)


# The kinds of heads and the arguments for which the kernels of `TreeGraphs` were compiled in this process.
_compiled = set[tuple[object, ...]]()


class TreeGraphs:
    """The captured graphs of one head and its KV pages, by number of trees and of levels.

    due: Maximum number of due rows per tree for which the graphs have room.
    """

    @inference_mode
    def __init__(
        self,
        head: GraphHead,
        pages: DraftPages,
        k: int,
        levels: int,
        capture: Capture,
        grow: Grow,
        trees: Sequence[int] = GRAPH_TREES,
        widths: Sequence[int] | None = None,
        floor: float = -math.inf,
        level_rows: int | None = None,
    ) -> None:
        """Capture all graphs, which takes seconds on a GPU.

        head: The head whose passes are captured.
        pages: Its KV pages and features.
        k: Number of children of every node that is fed.
        levels: Levels of the deepest tree.
        capture: Captures a function as a graph.
        grow: Chooses a level's candidates and frontier.
        trees: The numbers of trees to capture graphs for.
        widths: Number of nodes of level 1, 2, ... that are fed. None: k of every level.
        floor: Cumulative log-probability below which a node is not fed.
        level_rows: Maximum number of rows of a level over all trees, so that fewer nodes of each tree are fed
            if there are many trees. None: no limit.

        Graphs are captured for each number of trees with each number of levels in GRAPH_LEVELS below
        `levels`, and with `levels` itself. The kernels of asynchronous growth are compiled, too. On a GPU,
        all kernels are compiled in parallel before the first capture: the same object is made with `run_once`
        as `capture`, within `compile_ahead`, unless that was done before for such a head and these arguments.
        As no kernel runs then, `grow` is replaced by `_grow_zeros`.
        """
        own = type(head), head.device, head.layers, head.kv_heads, head.group, pages.features.shape[1]
        kind = (*own, k, levels, tuple(trees), widths and tuple(widths), floor, level_rows)
        if capture is run_once:
            grow = partial(_grow_zeros, grow)
        elif head.device.type == "cuda":
            from specsot_kernels.gpu.launching import await_compiled, compile_ahead

            if kind not in _compiled:
                compile_ahead(
                    lambda: TreeGraphs(
                        head, pages, k, levels, run_once, grow, trees, widths, floor, level_rows
                    )
                )
            await_compiled()
        _compiled.add(kind)
        self.due = max_due_rows(k, levels)
        self._pages = pages
        widths = (k,) * (levels - 1) if widths is None else tuple(widths)
        self._trees = tuple(trees)
        self._levels = {levels, *(one for one in GRAPH_LEVELS if one < levels)}
        attending = 1 if head.asks_alone else self.due
        sizes = [
            GraphSize(many, k, _fed(widths[: deep - 1], many, level_rows), floor, self.due, attending)
            for many in sorted(trees, reverse=True)
            for deep in sorted(self._levels, reverse=True)
        ]
        # The maximum number of rows that asynchronous growth needs per tree: accepted tokens and grown rows.
        self.async_rows = self.due + sum(widths)
        # The deepest trees launch the kernels of all others, so that only they are run to compile kernels.
        capture_shallow = _skip if capture is run_once else capture
        self._graphs = {
            (size.trees, size.levels): _TreeGraph(
                *(head, pages, size),
                capture if size.levels == levels else capture_shallow,
                *(grow, self.async_rows),
            )
            for size in sizes
        }
        # The smallest graph that has room, by (number of trees, number of levels). The table has all numbers
        # up to those of the largest graph; for larger ones there is no graph.
        self._graph_for = {
            (many, deep): self._graphs[bucket_of(many, trees) or 0, bucket_of(deep, self._levels) or 0]
            for many in range(1, max(trees) + 1)
            for deep in range(1, levels + 1)
        }
        self._chooser = TreeChooser(
            max(trees), max(sum(size.level_sizes) for size in sizes), levels, head.device
        )
        self._staging = Staging(max(one.size for one in self._graphs.values()), head.device)
        # Compile the kernels of asynchronous growth now, so that no request waits for them: verify a made-up
        # tree that consists of its root.
        num_pages = pages.table.pages_for(self.async_rows)
        root = FrameTrees(
            [TreeSegment(0, 1, 0, (), single(0))], firsts=[0], columns=[0], pages=[(0,) * num_pages]
        )
        graph = self._graphs[self._trees[0], levels]
        features = pages.features.new_zeros((1, pages.features.shape[1]))
        graph.send_and_accept(root, features.new_zeros(1, dtype=torch.int32), features, 1, self._staging)
        # The candidates from which the device may select nodes, by graph.
        self._pools = {graph: graph.grown(self._chooser) for graph in self._graphs.values()}
        for pool in filter(None, self._pools.values()):
            self._chooser.warm_up(pool)

    def run(self, inputs: Sequence[GraphInput], levels: int) -> Candidates | None:
        """Grow one tree per input and return all candidates, in the order of `TreeGrowth`. Return None if no
        graph has room.

        inputs: Due rows and reserved slots of each tree. At least one.
        levels: Number of levels to grow; the candidates have as many levels as the next deeper graph.
        """
        grown = self.begin(inputs, levels)
        return None if grown is None else grown()

    @inference_mode
    def begin_async(
        self, trees: FrameTrees, targets: Tensor, features: Tensor, ids: int, levels: int
    ) -> DeviceGrowth | None:
        """Launch the growth of the next trees, before the host has read the verification result of the
        current ones. The device verifies the trees itself and continues from what it accepted. Return None if
        no graph has room.

        trees: The trees that are being verified, with the pages of their sequences.
        targets: The base model's token after each node, int32 [num_tokens of the frame].
        features: Features as the head's forward pass takes them, [num_tokens of the frame, hidden]. For a
            head that reads no features, [n, 0] with any n.
        ids: Number of token ids that may be fed; token 0 is fed instead of any other target.
        levels: Number of levels of the next trees; a deeper graph may be used.

        There is no room if there are more trees than the largest graph has, if the levels are more than the
        deepest, or if the sequences have too many pages or nodes.
        """
        segments = trees.segments
        graph = self._graph_for.get((len(segments), levels))
        read = graph.begin_async(trees, targets, features, ids, self._staging) if graph else None
        if graph is None or read is None:
            return None
        places = dict(zip([one.sequence for one in segments], enumerate(trees.firsts)))
        return DeviceGrowth.launched(places, self.due, read, self._pools[graph])

    @inference_mode
    def begin(self, inputs: Sequence[GraphInput], levels: int) -> Grown | None:
        """Launch what `run` computes. Return a function that waits for the candidates, or None if no graph
        has room.

        inputs: Due rows and reserved slots of each tree. At least one.
        levels: Number of levels to grow; a deeper graph may be used.

        More trees than the largest graph has are grown in several runs. Each run is awaited before the next
        one is launched, since all runs of a graph write to the same buffers.

        There is no room if the levels are more than the deepest, or if a tree has too many due rows or
        pages. If only a later run has no room, None is returned as well, although earlier runs were
        launched.
        """
        max_trees = max(self._trees)
        grown = list[Grown]()
        graph = self._graph_for.get((min(len(inputs), max_trees), levels))
        for first in range(0, len(inputs), max_trees):
            batch = inputs[first : first + max_trees]
            run = graph.begin(batch, self._staging) if graph else None
            if run is None:
                return None
            # The next run writes to the buffers of this one, so take these candidates first.
            if first + max_trees < len(inputs):
                run = partial(_same, run())
            grown.append(run)
        return grown[0] if len(grown) == 1 else lambda: stacked([one() for one in grown])


def _skip(work: Work) -> Captured:
    """Return a function that does nothing, and no outputs, instead of capturing work.

    work: Ignored.
    """
    return lambda: None, (torch.empty(0), None)


def _grow_zeros(grow: Grow, *given: Any) -> LevelFrontier:
    """Call `grow`, and return its frontier with zeros as tokens and origins. Used where kernels are compiled
    and none runs: the frontier's memory is arbitrary then, and arbitrary token ids and row numbers would
    index out of bounds.

    grow: Chooses a level's candidates and frontier.
    given: Arguments of `grow`.
    """
    frontier = grow(*given)
    frontier.tokens.zero_()
    frontier.origins.zero_()
    return frontier


def _fed(widths: Sequence[int], trees: int, rows: int | None) -> tuple[int, ...]:
    """Return the widths, cut so that a level has at most `rows` rows over all trees. Every tree keeps at
    least one node per level.

    widths: Number of nodes of level 1, 2, ... that are fed.
    trees: Number of trees.
    rows: Maximum number of rows of a level. None: no limit.

    For example:

        # widths (10, 10), 32 trees, rows 64 -> (2, 2)
    """
    return tuple(widths) if rows is None else tuple(min(width, max(rows // trees, 1)) for width in widths)


def _same(offer: Candidates) -> Candidates:
    """Return candidates that were read already. It stands for a function that waits for them.

    offer: The candidates.
    """
    return offer


def max_due_rows(k: int, levels: int) -> int:
    """Return the maximum number of due rows per tree for which a graph has room. A verified tree can accept
    levels + 1 tokens, its root included.

    k: Number of children of every node that is fed.
    levels: Levels of the deepest tree.
    """
    return max(k, levels + 1)


def tree_graph_bytes(
    shape: HeadShape, itemsize: int, k: int, levels: int, trees: int = max(GRAPH_TREES)
) -> int:
    """Return an upper bound of the bytes of a head's graphs.

    shape: Sizes of the head.
    itemsize: Bytes of one number of the computation.
    k: Number of nodes per level that are fed.
    levels: Levels of the deepest tree.
    trees: Number of trees of the largest graph.
    """
    heads = shape.heads, shape.kv_heads, shape.head_dim
    stream = 8 * shape.hidden + 3 * shape.intermediate + 2 * shape.vocab
    own = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    caught_up = -(-max_due_rows(k, levels) // k) * (3 * shape.hidden + own)
    columns = stream + own + caught_up
    return graph_bytes(trees * k, heads, columns, itemsize)


class AsyncTables(NamedTuple):
    """Tables of asynchronous growth that stay the same for many steps.

    pages: The pages of each tree's sequence.
    starts: For each tree, the column at which its window begins, which is also the beginning of a page. All
        rows attend to the columns before the window.
    numbers: The tables as one array, see `_TreeGraph._tables_of`. None if the trees have too many pages for
        the graph.
    """

    pages: Sequence[tuple[int, ...]]
    starts: Sequence[int]
    numbers: Numbers | None

    def hold(self, columns: Sequence[int], max_offset: int) -> bool:
        """Return whether the tables can be used again for trees on the same pages: whether the first due row
        of each tree lies at most `max_offset` columns after the beginning of its window, and not before it.

        columns: Column of the first due row of each tree.
        max_offset: Maximum number of columns between the beginning of the window and the first due row, with
            which all rows of the next tree lie in the window, too.
        """
        stops = [start + max_offset for start in self.starts]
        return all(map(le, self.starts, columns)) and all(map(le, columns, stops))


class _TreeGraph:
    """One captured graph, with the index tables that it reads and the candidates that it writes.

    The tables lie in one int32 buffer, so that one copy fills all of them. Unused rows have the slot -1, and
    their keys and values are not written.

    size: Number of int32 values in all index tables of the graph together.
    """

    def __init__(
        self,
        head: GraphHead,
        pages: DraftPages,
        size: GraphSize,
        capture: Capture,
        grow: Grow,
        async_rows: int,
    ) -> None:
        """Allocate tables and candidates, and capture the graph.

        head: The head whose passes are captured.
        pages: Its KV pages and features.
        size: The fixed sizes of the graph.
        capture: Captures a function as a graph.
        grow: Chooses a level's candidates and frontier.
        async_rows: Number of rows per tree whose pages the device is sent for asynchronous growth. All graphs
            have the same number, because the kernel that reads the pages is compiled for it.
        """
        self._head = head
        self._pages = pages
        self._size = size
        self._grow = grow
        trees = size.trees
        # Maximum number of page numbers in the tables of one forward pass.
        max_pages = pages.kv.pages + size.trees * max(size.passes)
        self._rooms = {
            width: room_for(trees * width, max_pages, head.group, kv_heads=head.kv_heads)
            for width in size.passes
        }
        # Of `TableRoom.shapes`, each pass has pieces, starts and slots of its own; the pages are shared.
        read = [room.shapes[at] for room in self._rooms.values() for at in (0, 4, 5)]
        self._places, rows = _places(size)
        self._places_in_all = sum(rows)
        own = (4, aligned(trees * size.due)), (trees,), (trees * size.attending,), (3, self._places_in_all)
        shapes = (*own, *read, (max_pages,))
        # The number of pages of a window: those on which the rows of asynchronous growth lie, wherever on the
        # first page they begin, and one more, so that a window stays the same until at least as many tokens
        # were accepted as a page has rows.
        self._window_pages = pages.table.pages_for(async_rows - 1) + 2
        self._max_offset = self._window_pages * pages.table.page_rows - async_rows
        self.size = size_of(shapes) + verified_numbers_size(self._window_pages, trees)
        self._numbers = torch.zeros(self.size, dtype=torch.int32, device=head.device)
        due, self._asked, self._leads, grown, *tables, self._named = views(self._numbers, shapes)
        self._due = due[:, : trees * size.due]
        self._due[2].fill_(-1)
        grown[1].fill_(-1)
        self._grown = [part[:, : trees * width] for part, width in zip(grown.split(rows, 1), size.widths)]
        self._read = dict(zip(self._rooms, zip(tables[::3], tables[1::3], tables[2::3])))
        self._nothing = grown.new_zeros((trees * size.attending, 1))
        self._grown_depths = np.repeat(np.arange(size.levels - 1), size.widths)
        self._pooled = aligned(trees * sum(size.level_sizes) * 5)
        due_size = trees * (1 + size.due)
        self._flat = torch.zeros(self._pooled + due_size, dtype=torch.int32, device=head.device)
        self._candidates = _pool(self._flat, size)
        depths = np.arange(1, size.levels + 1, dtype=np.int32)
        self._depths = torch.from_numpy(depths.repeat(size.level_sizes)).to(head.device)
        places = torch.from_numpy(self._places.astype(np.int32)).to(head.device)
        grown_depths = torch.from_numpy(self._grown_depths.astype(np.int32)).to(head.device)
        self._due_numbers = DueNumbers(
            self._due,
            self._asked,
            self._leads,
            grown,
            places,
            grown_depths,
            self._flat[self._pooled :].view(trees, -1),
        )
        on_gpu = head.device.type == "cuda"
        self._host = torch.empty(self._flat.shape, dtype=torch.int32, pin_memory=on_gpu)
        self._read_back = torch.Event(head.device, enable_timing=False) if on_gpu else None
        pool = _pool(self._host, size)
        self._candidate_depths = depths.repeat(size.level_sizes).astype(np.int64)
        # The candidates in the buffer on the host, which the next run overwrites.
        self._host_pool = Candidates(
            pool.tokens.numpy(), pool.scores.numpy(), pool.parents.numpy(), self._candidate_depths
        )
        # What the device accepted, in the same buffer.
        self._host_accepted: Numbers = self._host[self._pooled :].view(trees, -1).numpy()
        # The results of `_read_async_candidates`, by number of trees: views of the first trees in the buffer.
        # They are made once, because making them takes the host longer than reading what a step needs of
        # them.
        host = self._host_pool
        self._async_results = {
            many: (
                Candidates(host.tokens[:many], host.scores[:many], host.parents[:many], host.depths),
                self._host_accepted[:many],
            )
            for many in range(1, trees + 1)
        }
        self._cached_tables: tuple[object, list[Numbers] | None] = ((), None)
        # The tables of due and grown rows without any such row, as one array. They are sent for asynchronous
        # growth, for which the device fills in the rows. The array is never written to after this.
        self._without_due = np.zeros(size_of(own), np.int32)
        for part, numbers in zip(views(torch.from_numpy(self._without_due), own), self._no_due_numbers()):
            part.copy_(torch.from_numpy(numbers).view(part.shape))
        # The tables of asynchronous growth that `_tables_of` computed last.
        self._async_tables = AsyncTables([], [], None)
        # The tables of asynchronous growth that lie in the buffer of the device. None: none lie there, as
        # nothing was sent yet, or `begin` has overwritten them.
        self._sent_tables: Numbers | None = None
        # Where the trees that were verified last lie in the buffer: the index at which they begin, the number
        # of trees, and the length of `verified_numbers`, which is different for every number of nodes.
        self._verified_at = (0, 0, 0)
        # Launches the verification of trees with that layout (`AcceptRows`). Set by the first verification.
        self._accept_rows: Callable[[Tensor, Tensor, int], None]
        # The buffer from the index on at which these trees begin.
        self._after_tables = self._numbers
        self._replay, _ = capture(lambda: (self._grow_trees(), None))

    def begin_async(
        self, trees: FrameTrees, targets: Tensor, features: Tensor, ids: int, staging: Staging
    ) -> Callable[[], tuple[Candidates, Numbers]] | None:
        """Launch asynchronous growth, and return a function that waits for it. Return None if there is no
        room for these trees.

        trees: The trees that are being verified, with the pages of their sequences.
        targets: Id of the base model's token after each node, int32 [num_tokens] on the device, at least one
            per node of the frame.
        features: Features as the head's forward pass takes them, [num_tokens of the frame, hidden]. For a
            head that reads no features, [n, 0] with any n.
        ids: Number of token ids that may be fed.
        staging: Buffer by which tables are copied to the device.

        The returned function waits for the candidates and for what the device accepted, [trees, 1 + due]. It
        must be called before the graph is launched again.
        """
        if not self.send_and_accept(trees, targets, features, ids, staging):
            return None
        self._run()
        return partial(self._read_async_candidates, len(trees.segments))

    def send_and_accept(
        self, trees: FrameTrees, targets: Tensor, features: Tensor, ids: int, staging: Staging
    ) -> bool:
        """Send the trees and the tables of their pages, and launch the verification on the device. Return
        True. If there is no room for these trees, do nothing and return False.

        The arguments are those of `begin_async`. The tables are sent without due and grown rows, and only if
        the device does not have them already; the trees are sent in every step. The kernel of
        `prepare_accept_rows` verifies the trees, fills in these rows, and stores the accepted features. The
        launch of the kernel is prepared anew if the number of trees or of their nodes has changed.

            # buffer: [due | asked | leads | grown | page tables | windows | trees | tokens | parents]
            # the first six parts are `tables`, the last three are `numbers`
        """
        tables = self._tables_of(trees)
        numbers = verified_numbers(trees)
        if tables is None or numbers is None:
            return False
        # With the same numbers of trees and nodes, the trees lie at the same addresses as in the step before.
        place = len(tables), len(trees.segments), len(numbers)
        if place != self._verified_at:
            from specsot_kernels.gpu.accepting import prepare_accept_rows

            self._verified_at = place
            windows = place[1], 1 + self._window_pages
            nodes = (sum([len(one.tree.tokens) for one in trees.segments]),)
            shapes = windows, (4, place[1]), nodes, nodes
            # The windows are the last of the tables.
            arrays = views(self._numbers[len(tables) - size_of([windows]) :], shapes)
            self._accept_rows = prepare_accept_rows(
                VerifiedTrees(*arrays),
                self._due_numbers,
                self._pages.features,
                self._pages.table.page_rows,
            )
            self._after_tables = self._numbers[len(tables) :]
        if tables is self._sent_tables:
            staging.send([numbers], self._after_tables)
        else:
            staging.send([tables, numbers], self._numbers)
            self._sent_tables = tables
        self._accept_rows(targets, features, ids)
        return True

    def _tables_of(self, trees: FrameTrees) -> Numbers | None:
        """Return what precedes the verified trees in the buffer as one array: `_without_due`, the tables of
        pages, and the windows of `page_windows`. Return None if the trees have too many pages.

        trees: The trees that are being verified, with the pages of their sequences.

        The same array is returned as by the previous call if the sequences have the same pages, and if
        `AsyncTables.hold` allows that for their first due rows.
        """
        columns, pages = trees.columns, trees.pages
        cached = self._async_tables
        if pages != cached.pages or not cached.hold(columns, self._max_offset):
            page_rows = self._pages.table.page_rows
            starts = [column // page_rows * page_rows for column in columns]
            numbers = None
            if tables := self._tabulate(starts, pages):
                windows = page_windows(starts, pages, self._window_pages, page_rows)
                numbers = joined((self._without_due, *tables, windows))
            cached = self._async_tables = AsyncTables(pages, starts, numbers)
        return cached.numbers

    def grown(self, chooser: TreeChooser) -> GrownPool | None:
        """Return the candidates on the device, from which nodes can be selected. Return None for graphs with
        a floor, because the device would select barred candidates.

        chooser: Selects nodes from the candidates.
        """
        floor = self._size.floor
        levels = self._size.levels
        return None if floor > -math.inf else GrownPool(self._candidates, self._depths, levels, chooser)

    def _read_async_candidates(self, trees: int) -> tuple[Candidates, Numbers]:
        """Wait for the candidates, and for what the device accepted of each tree, [trees, 1 + due]. Return
        both.

        trees: Number of trees that were grown, which come first among those of the graph.

        All arrays are views of a buffer that the next run overwrites, except the depths.
        """
        if self._read_back:
            wait_for(self._read_back)
        return self._async_results[trees]

    def _no_due_numbers(self) -> list[Numbers]:
        """Return tables without any tree: due rows, asked rows, columns these attend to, and grown rows.

        Row 2 of the due rows and row 1 of the grown rows are slots; -1 means that nothing is written.
        """
        size = self._size
        due = np.zeros((4, aligned(size.trees * size.due)), np.int32)
        grown = np.zeros((3, self._places_in_all), np.int32)
        due[2], grown[1] = -1, -1
        return [due, np.zeros(size.trees, np.int32), np.zeros((size.trees, size.attending), np.int32), grown]

    def begin(self, inputs: Sequence[GraphInput], staging: Staging) -> Grown | None:
        """Launch the graph, and return a function that waits for the candidates. Return None if there is no
        room for these trees.

        inputs: Due rows and reserved slots of each tree.
        staging: Buffer by which tables are copied to the device.

        The returned function waits for the candidates. It must be called before the graph is launched again.

        The tables of due rows, grown rows and pages are copied to the device first.
        """
        filled = self._fill(inputs)
        if filled is None:
            return None
        staging.send(filled, self._numbers)
        self._sent_tables = None
        self._run()
        return partial(self._read_candidates, len(inputs))

    def _run(self) -> None:
        """Launch the graph, which ends with the copy of its results to the host.

        On a GPU, the host does not wait for the graph here, but in `_read_candidates` or in
        `_read_async_candidates`.
        """
        self._replay()
        if self._read_back:
            record_on(self._read_back, self._flat.device)

    def _read_candidates(self, trees: int) -> Candidates:
        """Wait for the copy of the results, and return the candidates of the first trees.

        trees: Number of trees that were grown.

        The arrays are copies of the buffer, [trees, candidates]; `depths` begins at 1.
        """
        if self._read_back:
            wait_for(self._read_back)
        host = self._host_pool
        return Candidates(
            host.tokens[:trees].copy(),
            host.scores[:trees].copy(),
            host.parents[:trees].copy(),
            self._candidate_depths,
        )

    def _grow_trees(self) -> Tensor:
        """Compute the due rows, grow level by level, and copy the results to the host. Return the flat int32
        buffer on the device with the candidates, see `_pool`. This function is what the graph captures. The
        graph includes the copy, because a separate launch of the copy would take the host 8 us in each step.

        A node whose cumulative log-probability is below the floor is barred from being fed further.
        """
        head = self._head
        size = self._size
        pool = _pool(self._flat, self._size)
        kv = self._pages.kv
        tokens, positions, slots, origins = self._due
        due = self._plan(size.attending, self._leads, self._leads, self._nothing, self._leads)
        rows = HeadRows(positions, slots, due, kv, self._asked)
        outputs = head.step(tokens, self._pages.features, origins, rows)
        frontier: LevelFrontier | None = None
        for level in range(size.levels):
            if frontier is not None:
                positions, slots, bases = self._grown[level - 1]
                plan = self._plan(size.widths[level - 1], bases, bases, frontier.bits, bases + level)
                rows = HeadRows(positions, slots, plan, kv)
                outputs = head.step(frontier.tokens.flatten(), outputs, frontier.origins.flatten(), rows)
            logits = head.logits(outputs)
            place = size.place(level)
            frontier = self._grow(logits, size.k, place, size.words, pool, frontier, head.offsets)
            if size.floor > -math.inf:
                frontier.scores.masked_fill_(frontier.scores < size.floor, -math.inf)
        self._host.copy_(self._flat, non_blocking=True)
        return self._flat

    def _plan(self, width: int, leads: Tensor, bases: Tensor, bits: Tensor, lengths: Tensor) -> AttentionPlan:
        """Return the attention plan of a forward pass. A row attends to all columns before its entry in
        `leads`, and to the columns `bases` + i for every set bit i of `bits`. If the head has a window,
        columns before `lengths` - window are left out.

        width: Number of rows per tree.
        leads: Number of leading columns that each row attends to, int32 [trees * width].
        bases: Column at which each row's tree begins, int32 [trees * width].
        bits: Ancestors of each row in its tree, as bits, 32 rows per word: int32 [trees * width, words].
        lengths: Number of positions up to each row, itself included, int32 [trees * width].

        The tables of pages are those that were sent for passes with this number of rows.
        """
        from specsot_kernels.gpu.attention import plan_over

        pieces, starts, parts = self._read[width]
        tables = pieces, leads, bases, bits, starts, parts, self._named
        window = self._head.window
        given = (self._rooms[width], self._pages.kv.page_rows, self._head.group)
        sinces = () if window is None else ((lengths - window).clamp_min(0),)
        return plan_with_kernel(plan_over(tables, *given, sinces))

    def _fill(self, inputs: Sequence[GraphInput]) -> list[Numbers] | None:
        """Return all tables of a run. Return None if a tree has too many due rows, or too many pages.

        inputs: Due rows and reserved slots of each tree.

        Example: two trees, `due` 3, with 2 and 1 due rows. The due rows take the places [a0 a1 - | b0 - -],
            and `asked` is [1, 3]: the places of the last row of each tree.

        A tree with fewer due rows than `attending` has columns 0 for the missing ones. Unused rows have the
        slot -1. The grown rows take as many reserved slots as the graph feeds.
        """
        size = self._size
        num_trees = len(inputs)
        rows = self._pages.table.page_rows
        fit = all(len(one.due.tokens) <= size.due for one in inputs)
        starts = [(due.first - at.position + at.base) // rows * rows for due, at in inputs]
        tables = self._tables(starts, [at.pages for _, at in inputs]) if fit else None
        if tables is None:
            return None
        slots = self._pages.table.slots
        places = self._places[:num_trees]
        due, asked, leads, grown = self._no_due_numbers()
        rooms = list[tuple[int, ...]]()
        tokens = list[int]()
        due_slots = list[int]()
        grown_slots = list[int]()
        for one, room in inputs:
            rooms.append((one.first, len(one.tokens), room.position, room.base))
            tokens += one.tokens
            due_slots += slots(one.sequence, one.first, one.stop)
            grown_slots += room.slots[: size.grown]
        first, count, position, base = np.array(rooms).T[..., None]
        number = np.arange(size.due)
        attend = np.minimum(count, size.attending)
        # [trees, due] True where a tree has a due row.
        is_due = number < count
        due[:, np.flatnonzero(is_due)] = tokens, (first + number)[is_due], due_slots, due_slots
        asked[:num_trees] = np.arange(num_trees) * size.due + count[:, 0] - 1
        visible = first + count - position + base - attend + number[: size.attending] + 1
        leads[:num_trees] = np.where(number[: size.attending] < attend, visible, 0)
        grown[0, places], grown[2, places] = position + self._grown_depths, base
        grown[1, places] = np.reshape(grown_slots, places.shape)
        return [due, asked, leads, grown, *tables]

    def _tables(self, starts: Sequence[int], pages: Sequence[tuple[int, ...]]) -> list[Numbers] | None:
        """Return the tables of the pages that are read, from the cache if they have not changed. Return None
        if the trees have too many pages.

        starts: For each tree, the number of leading columns that all its rows attend to, rounded down to
            whole pages.
        pages: The pages of each tree's sequence.

        The tables are made of whole pages, so that they stay the same for many steps.

        The cache holds the tables of the last call only, also if these were None.
        """
        if (starts, pages) != self._cached_tables[0]:
            self._cached_tables = (starts, pages), self._tabulate(starts, pages)
        return self._cached_tables[1]

    def _tabulate(self, starts: Sequence[int], pages: Sequence[tuple[int, ...]]) -> list[Numbers] | None:
        """Return the page tables of all forward passes; the list of pages is shared by the passes. Return
        None if the trees have too many pages for the graph.

        starts: For each tree, the number of leading columns that all its rows attend to, a multiple of
            page_rows.
        pages: The pages of each tree's sequence.

        Also None if the pages of a pass need more pieces than it has room for.
        """
        page_rows = self._pages.kv.page_rows
        tables = list[Numbers]()
        named = np.zeros(0, np.int32)
        page_runs = page_runs_unshared([1] * len(pages), pages, page_rows)
        if page_runs is None:
            spans = [whole_pages(1, *each, page_rows) for each in zip(starts, pages)]
            page_runs = as_arrays(page_runs_of(spans, page_rows))
        leads = np.array(starts, np.int32)
        for width, room in self._rooms.items():
            cut = cut_pieces(
                page_runs, leads.repeat(width), page_rows, room.tile_rows, width, places=room.places
            )
            filled = room.fill_pieces(cut)
            if filled is None:
                return None
            *own, named = filled
            tables += own
        return [*tables, named]


def _places(size: GraphSize) -> tuple[NDArray[np.int64], list[int]]:
    """Return the index of each tree's grown rows among those of all trees, [trees, grown], and the rows of
    each level.

    size: The sizes of the graph.

    The rows are stored level by level, and tree by tree within a level. The number of rows of a level is
    rounded up to a multiple of ALIGNED (4).

        # 2 trees, widths (2, 1) -> indices [[0 1 4] [2 3 5]], levels of [4 4] rows
    """
    rows = [aligned(size.trees * width) for width in size.widths]
    trees = np.arange(size.trees)[:, None]
    starts = accumulate(rows, initial=0)
    levels = [start + trees * width + np.arange(width) for start, width in zip(starts, size.widths)]
    return np.concatenate([np.zeros((size.trees, 0), np.int64), *levels], 1), rows


def _pool(flat: Tensor, size: GraphSize) -> CandidatePool:
    """Return views of the candidates in a flat buffer: tokens and parents as int64, scores as fp32, each
    [trees, candidates].

    flat: int32 buffer of at least 5 * trees * candidates values: first the tokens and then the parents, of
        which each takes two values, then the scores.
    size: The sizes of the graph.
    """
    candidates = sum(size.level_sizes)
    many = size.trees * candidates
    whole = flat[: 4 * many].view(torch.int64).view(2, size.trees, candidates)
    scores = flat[4 * many : 5 * many].view(torch.float32).view(size.trees, candidates)
    return CandidatePool(whole[0], scores, whole[1])
