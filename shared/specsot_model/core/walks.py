"""Orders the tokens that GPU kernels of gated delta layers run in a step, each sequence's one after another.

The kernels *walk* a table with one row per token. A token starts from the state that the row before it left.
The nodes of a tree are visited depth first: the state of a node with several children is set aside, and each
child except the first starts from there. The tokens of a chunk run together
(`specsot_model.core.replays.CHUNKED_ROWS` says which tokens run by chunks).

The states of different sequences are independent, so the kernels walk LANES sequences side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from specsot_kernels.segments import RowSpan
from specsot_model.core.replays import CHUNK, CHUNKED_ROWS, KEPT_ROWS, SpanReplay

# A table of int32 numbers, as kernels read it.
Numbers = NDArray[np.int32]

# The last four columns of a table row: where the token's state is taken from, where the state after it is set
# aside, in which stored state it is kept, and the frame row of its output.
TAKEN = -4
ASIDE = -3
KEPT = -2
OUTPUT = -1
FIELDS = 4
# A field or a source with this value means: none.
NOTHING = -1
# The pseudo node that the first nodes of a tree follow.
ROOT = -1
# Sequences. How many the kernel walks side by side; equals `LANES` of specsot_kernels.gpu.delta. Sequences
# i, i + LANES, i + 2 * LANES, ... run one after another in the same lane.
LANES = 16
# Table rows. What one pass runs at most if the tables are not captured in a CUDA graph; as many as a frame of
# prompts has.
BLOCK_ROWS = 2048
# Sequences. How many may carry a state from one pass to the next at the same time: one of each lane.
CARRIED = LANES
# Placeholders in TAKEN and ASIDE: CARRIED_STATE - i stands for the i-th carried state until the number of
# states that are set aside is known; `_Block.walk` then replaces it by that number + i.
CARRIED_STATE = -(1 << 30)


@dataclass(frozen=True, slots=True)
class Walk:
    """The tokens of one pass in the order in which they run: those of chunks first, then the others.

    starts: [num_sequences + 1]; rows starts[i] .. starts[i + 1] - 1 of the table belong to the i-th sequence
        whose tokens run one by one.
    rows: [num_rows, history + 1 + FIELDS]. A row first names the inputs that its convolution reads, the
        token itself last: a KV slot, or -2 - i for row i of the frame. TAKEN is -1 to continue from the row
        before, i >= 0 for the i-th state set aside, and -2 - i for stored state i. In the other fields -1
        means nowhere. A chunk has its TAKEN in its first row, and its ASIDE and KEPT in its last row.
    aside: Number of states in memory that are set aside or carried at once. Sequences of the same lane share
        them.
    chunks: [num_chunked_sequences + 1]; chunks chunks[i] .. chunks[i + 1] - 1 belong to one sequence. Chunk j
        has the rows j * CHUNK .. (j + 1) * CHUNK - 1.

    Example: a tree with parents [0 0 0 2] after 5 tokens that lie in slots 0..4, from stored state 7, with
    history 2. Node 0 has two children, so its state is set aside in place 0; node 2 takes it from there.

        # sources       TAKEN  ASIDE  KEPT  OUTPUT
        #  3  4 -2        -9      0    -1      0     node 0: from stored state 7
        #  4 -2 -3        -1     -1    -1      1     node 1: continues from node 0
        #  4 -2 -4         0     -1    -1      2     node 2: from the state that node 0 set aside
        # -2 -4 -5        -1     -1    -1      3     node 3: continues from node 2
    """

    starts: Numbers
    rows: Numbers
    aside: int
    chunks: Numbers

    @property
    def counts(self) -> Numbers:
        """Return int32 [4]: number of sequences that run token by token, table rows, sequences with chunks,
        chunks.
        """
        sequences = len(self.starts) - 1
        chunks = len(self.chunks) - 1
        return np.array((sequences, len(self.rows), chunks, self.chunks[-1]), np.int32)


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The table rows of one sequence, before the sequences of a frame are combined into walks.

    rows: Table rows as in `Walk.rows`. The states that this sequence sets aside are numbered from 0 on.
    pieces: Pairs (end row, whether the piece consists of chunks), in order: rows that run in the same way.
    num_aside: How many states the sequence sets aside at once.
    num_together: How many rows at the end must run in the same pass: a tree, and the token before it.
    """

    rows: Numbers
    pieces: tuple[tuple[int, bool], ...]
    num_aside: int = 0
    num_together: int = 0


@dataclass(frozen=True, slots=True)
class WalkRoom:
    """The fixed table sizes that a CUDA graph uses for every frame of at most `rows` tokens.

    rows: Number of tokens that a frame has at most.
    history: Number of preceding tokens that a convolution reads.
    """

    rows: int
    history: int

    @property
    def lines(self) -> int:
        """Return the number of table rows, with room for replayed tokens.

        A sequence replays as many tokens as the last frame may have accepted, or up to KEPT_ROWS if its last
        state was evicted.
        """
        return 2 * self.rows + KEPT_ROWS

    @property
    def chunks(self) -> int:
        """Return the number of chunks, for prompts that begin and end anywhere; 0 if frames are too small for
        chunks.
        """
        return 2 * self.rows // CHUNK + 2 if self.rows >= CHUNKED_ROWS else 0

    @property
    def aside(self) -> int:
        """Return the number of states that may be set aside at once.

        Three nodes set aside one state at most, and few sequences set aside many at once, so this is enough
        for most frames; `holds` checks it.
        """
        return min(self.rows // 3, LANES + self.rows // 8)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the four tables: counts, starts, chunks, rows."""
        sequences = self.rows // CHUNKED_ROWS + 1
        return (4,), (self.rows + 1,), (sequences,), (self.lines, self.history + 1 + FIELDS)

    def holds(self, sequences: Sequence[SequenceRows]) -> bool:
        """Tell whether one pass in these tables can run the sequences.

        It cannot if a sequence runs partly by chunks and partly token by token, or if a table is too small.
        The limits are `chunks * CHUNK` rows of sequences that run by chunks, `lines` rows in all, and `aside`
        states of sequences that run token by token.

        sequences: Table rows of each sequence of a frame; every sequence has at least one row. True is
            returned for no sequences.
        """
        if any(len(sequence.pieces) > 1 for sequence in sequences):
            return False
        chunks = sum(len(sequence.rows) for sequence in sequences if sequence.pieces[0][1])
        lines = sum(len(sequence.rows) for sequence in sequences)
        aside = set_aside_of([sequence.num_aside for sequence in sequences if not sequence.pieces[0][1]])
        return chunks <= self.chunks * CHUNK and lines <= self.lines and aside <= self.aside

    def fill(self, walk: Walk) -> list[Numbers]:
        """Return counts, starts, chunks and rows of a walk, padded with zeros to `shapes`.

        walk: A walk that these tables hold; see `holds`. A larger walk raises ValueError.
        """
        starts, chunks, rows = (np.zeros(shape, np.int32) for shape in self.shapes[1:])
        starts[: len(walk.starts)] = walk.starts
        rows[: len(walk.rows)] = walk.rows
        chunks[: len(walk.chunks)] = walk.chunks
        return [walk.counts, starts, chunks, rows]


def sequences_of_frame(
    replays: Sequence[SpanReplay], history: int, page_rows: int, zero_state: int
) -> list[SequenceRows]:
    """Return the table rows of each replay of a frame, in the order of its segments.

    No row stores a state yet; `mark_saved_states` adds that.

    replays: For each segment, in the order of the frame's rows, from which state and position on its sequence
        runs. An empty list gives an empty list.
    history: Number of preceding tokens that a convolution reads.
    page_rows: Rows (tokens) of a KV page.
    zero_state: Number of the zero state, from which a new sequence begins.
    """
    sequences = list[SequenceRows]()
    first_row = 0
    for replay in replays:
        sequences.append(_sequence_rows(replay, first_row, history, page_rows, zero_state))
        first_row += replay.span.rows
    return sequences


def _sequence_rows(
    replay: SpanReplay, first_row: int, history: int, page_rows: int, zero_state: int
) -> SequenceRows:
    """Return the table rows of one replay.

    A prompt segment becomes a chain; a segment with a tree becomes the chain of its replayed tokens followed
    by the tree, depth first. Only the segment's own tokens have an OUTPUT: replayed tokens have none. The
    first row starts from the replay's stored state, or from the zero state if `replay.state` is None. If the
    last chunk reaches beyond the segment, empty rows of -1 fill it up to CHUNK.

    replay: The segment, and the tokens of its sequence that run.
    first_row: Row of the frame that holds the segment's first token.
    history: Number of preceding tokens that a convolution reads.
    page_rows: Rows (tokens) of a KV page.
    zero_state: Number of the zero state, from which a new sequence begins.
    """
    sources = _sources(replay, first_row, history, page_rows)
    num_replayed = replay.span.base - replay.start
    start_state = -2 - (zero_state if replay.state is None else replay.state)
    num_aside = 0
    num_together = 0
    if replay.span.visible is None:
        rows = _chain_rows(sources, history)
        rows[num_replayed:, OUTPUT] = np.arange(first_row, first_row + replay.span.rows)
    else:
        after_chunks = bool(replay.chunks) and replay.chunks[-1] + CHUNK == replay.span.base
        root_state = CARRIED_STATE if after_chunks else start_state
        rows, num_aside = _depth_first(
            replay.span, sources, num_replayed, first_row, root_state, after_chunks, history
        )
        num_together = len(rows) - num_replayed + (bool(num_replayed) and not after_chunks)
    rows[0, TAKEN] = start_state
    pieces = tuple(_pieces(replay, len(rows)))
    # The last chunk is filled up with empty rows.
    if missing := pieces[-1][0] - len(rows):
        rows = np.pad(rows, ((0, missing), (0, 0)), constant_values=NOTHING)
    return SequenceRows(rows, pieces, num_aside, num_together)


def _pieces(replay: SpanReplay, num_rows: int) -> Iterator[tuple[int, bool]]:
    """Yield `SequenceRows.pieces` for a sequence of `num_rows` table rows.

    # chunks at rows [10 74], 150 rows, CHUNK 64 -> (10, False), (138, True), (150, False)

    Adjacent chunks form one piece. Nothing is yielded for the rows before the first chunk if there are none,
    nor for the rows after the last chunk if the chunk reaches `num_rows` or beyond. Without chunks there is
    one piece (num_rows, False).

    replay: The replay, which names the chunks.
    num_rows: Number of the sequence's table rows.
    """
    end = 0
    for begin in (chunk - replay.start for chunk in replay.chunks):
        if begin > end:
            if end:
                yield end, True
            yield begin, False
        end = begin + CHUNK
    if end:
        yield end, True
    if num_rows > end:
        yield num_rows, False


def set_aside_of(num_aside: Sequence[int]) -> int:
    """Return how many states must be available in memory for the sequences of a walk.

    Sequences of the same lane run one after another and share their places, so each lane needs its maximum. 0
    is returned for no sequences.

    num_aside: For each sequence, how many states it sets aside at once.

        # num_aside: sixteen times 1, then 3 and 2 -> lane 0 needs 3, lane 1 needs 2, the others 1: 19
    """
    return sum(max(num_aside[lane::LANES]) for lane in range(min(LANES, len(num_aside))))


def walk_of(sequences: Sequence[SequenceRows]) -> Walk:
    """Return one walk that runs all sequences in a single pass.

    sequences: Table rows of each sequence, at least one; their arrays are modified.
    """
    (walk,) = in_blocks(sequences, sum(len(sequence.rows) for sequence in sequences))
    return walk


def mark_saved_states(sequences: Sequence[SequenceRows], replays: Sequence[SpanReplay]) -> None:
    """Mark in the table rows which states are stored, in place.

    The state after all tokens before position `end` is stored by the row of token `end - 1`. Rows that store
    nothing keep -1 in KEPT.

    sequences: Table rows of each sequence.
    replays: The replays of these sequences, in the same order, with their `saves`.
    """
    for sequence, replay in zip(sequences, replays):
        for end, state in replay.saves:
            sequence.rows[end - 1 - replay.start, KEPT] = state


@dataclass(slots=True)
class _Block:
    """A walk under construction.

    chunks: Table rows that run by chunks, one array per sequence.
    rows: Table rows that run one by one, one array per sequence.
    num_aside: For each array of `rows`, how many states it sets aside at once.
    lines: Number of table rows in all.
    """

    chunks: list[Numbers] = field(default_factory=list[Numbers])
    rows: list[Numbers] = field(default_factory=list[Numbers])
    num_aside: list[int] = field(default_factory=list[int])
    lines: int = 0

    def put(self, part: Numbers, chunked: bool, num_aside: int = 0) -> None:
        """Add table rows of one sequence.

        part: The rows, [rows, history + 1 + FIELDS].
        chunked: True if they run by chunks, False if they run one by one.
        num_aside: How many states the rows set aside at once. Ignored if `chunked` is true.
        """
        (self.chunks if chunked else self.rows).append(part)
        self.num_aside += [] if chunked else [num_aside]
        self.lines += len(part)

    def walk(self, aside: int, num_carried: int) -> Walk:
        """Return the finished walk.

        The block must have at least one row. The rows are changed in place or copied: the states that the
        sequences set aside are renumbered to the places of their lanes, and placeholders of carried states
        become aside, aside + 1, ...

        aside: Largest number of states that a block of the frame sets aside at once.
        num_carried: Number of carried states, which are stored after those. 0 if no sequence of the frame is
            divided.
        """
        if any(self.num_aside):
            _share_aside(self.rows, self.num_aside)
        parts = [*self.chunks, *self.rows]
        rows = np.concatenate(parts) if len(parts) > 1 else parts[0]
        if num_carried:
            for places in rows[:, TAKEN], rows[:, ASIDE]:
                carried = places <= CARRIED_STATE
                places[carried] = aside + CARRIED_STATE - places[carried]
        chunks = [*accumulate(map(len, self.chunks), initial=0)]
        starts = [*accumulate(map(len, self.rows), initial=chunks[-1])]
        ends = np.array([chunk // CHUNK for chunk in chunks], np.int32)
        return Walk(np.array(starts, np.int32), rows, aside + num_carried, ends)


def in_blocks(sequences: Sequence[SequenceRows], max_rows: int = BLOCK_ROWS) -> list[Walk]:
    """Return walks of at most `max_rows` table rows each, to be run one after another.

    This bounds the memory of a pass, however far back a sequence has to be replayed. A sequence that
    continues in the next walk, or that runs token by token after its chunks, carries its state over in
    memory. A sequence that fits into the last walk is added to that walk whole. All other sequences are
    divided by `_put_parts`; the i-th sequence uses the carried state i % CARRIED. Every walk gets the same
    `aside`, so that the same memory serves all of them.

    sequences: Table rows of each sequence, at least one sequence; their arrays are modified.
    max_rows: Table rows of a walk at most. Must be at least CHUNK if there are chunks, and at least
        `num_together` of every sequence, which is asserted.
    """
    blocks = [_Block()]
    # For each carried state, the first block in which it is unused.
    first_free = [0] * CARRIED
    for number, sequence in enumerate(sequences):
        slot = number % CARRIED
        last = blocks[-1]
        if len(sequence.pieces) == 1 and last.lines + len(sequence.rows) <= max_rows:
            last.put(sequence.rows, sequence.pieces[0][1], sequence.num_aside)
        else:
            first_free[slot] = _put_parts(sequence, blocks, first_free[slot], max_rows, CARRIED_STATE - slot)
    aside = max(set_aside_of(block.num_aside) for block in blocks)
    num_carried = CARRIED if any(first_free) else 0
    return [block.walk(aside, num_carried) for block in blocks]


def _put_parts(
    sequence: SequenceRows, blocks: list[_Block], block_index: int, max_rows: int, carried_state: int
) -> int:
    """Distribute one sequence over blocks, and add blocks as needed; return the number of the block after its
    last part.

    Within a block, chunks run before single tokens, so chunks that follow single tokens go into the next
    block. A block takes only whole chunks, and the last `num_together` rows stay in one block. A block
    without room is skipped. Where the sequence is divided, the last row of one part sets its state aside in
    the carried state and the first row of the next part takes it from there. AssertionError is raised if
    `num_together` exceeds `max_rows`.

    sequence: Table rows of the sequence; its array is modified.
    blocks: All blocks of the frame; changed in place.
    block_index: Number of the first block that may be used.
    max_rows: Table rows of a block at most.
    carried_state: Placeholder of the state that the sequence carries from part to part.
    """
    begin = 0
    rows = sequence.rows
    has_single_tokens = False
    assert sequence.num_together <= max_rows, "a tree runs in one block"
    rows[rows[:, TAKEN] == CARRIED_STATE, TAKEN] = carried_state
    for end, chunked in sequence.pieces:
        while begin < end:
            if block_index == len(blocks):
                blocks.append(_Block())
            size = min(max_rows - blocks[block_index].lines, end - begin)
            if chunked:
                size = 0 if has_single_tokens else size // CHUNK * CHUNK
            elif begin + size < end:
                size = 0 if has_single_tokens else min(size, len(rows) - sequence.num_together - begin)
            if size <= 0:
                block_index = block_index + 1
                has_single_tokens = False
                continue
            if begin:
                rows[begin - 1, ASIDE] = rows[begin, TAKEN] = carried_state
            begin, part = begin + size, rows[begin : begin + size]
            blocks[block_index].put(part, chunked, sequence.num_aside if begin == len(rows) else 0)
            # Chunks of a block run before its single tokens, so a chunk after these needs the next block.
            has_single_tokens = not chunked
    return block_index + 1


def _share_aside(parts: Sequence[Numbers], num_aside: Sequence[int]) -> None:
    """Renumber the states that each sequence sets aside from 0 .. num_aside - 1 to its lane's places, in
    place.

    parts: Table rows of each sequence.
    num_aside: For each sequence, how many states it sets aside at once. Each lane has as many places as its
        largest sequence needs; negative fields stay as they are.
    """
    begin = 0
    for lane in range(min(LANES, len(parts))):
        for part in parts[lane::LANES]:
            for places in part[:, TAKEN], part[:, ASIDE]:
                places[places >= 0] += begin
        begin += max(num_aside[lane::LANES])


def _sources(replay: SpanReplay, first_row: int, history: int, page_rows: int) -> Numbers:
    """Return the source codes of columns start - history .. total - 1 of one sequence.

    A column of an earlier step is named by its KV slot, a token of this frame by -2 - its row, and a column
    before the sequence by -1.

        # base 5, 4 tokens in frame rows 0..3, start 5, history 2, page 0 -> [3 4 -2 -3 -4 -5]

    The result is int32 [history + tokens that run]. A tree's nodes of an earlier frame that this segment sees
    are named by their slots.

    replay: The segment, and the tokens of its sequence that run.
    first_row: Row of the frame that holds the segment's first token.
    history: Number of preceding tokens that a convolution reads.
    page_rows: Rows (tokens) of a KV page.
    """
    span = replay.span
    columns = np.arange(replay.start - history, span.total)
    place, row = np.divmod(columns.clip(0), page_rows)
    sources = np.array(span.pages, np.int32)[place] * page_rows + row
    sources[columns < 0] = NOTHING
    sources[len(sources) - span.rows :] = -2 - np.arange(first_row, first_row + span.rows)
    return sources.astype(np.int32)


def _chain_rows(sources: Numbers, history: int) -> Numbers:
    """Return table rows of a chain of tokens: each reads the `history` sources before its own.

    # sources [3 4 -2 -3], history 2 -> rows that begin [3 4 -2] and [4 -2 -3], with empty fields

    sources: int32 [history + tokens], the source code of every token, preceded by those of `history` earlier
        tokens.
    history: Number of preceding tokens that a convolution reads.
    """
    num_rows = len(sources) - history
    rows = np.full((num_rows, history + 1 + FIELDS), NOTHING, np.int32)
    for back in range(history + 1):
        rows[:, back] = sources[back : back + num_rows]
    return rows


def _depth_first(
    span: RowSpan,
    sources: Numbers,
    lead: int,
    first_row: int,
    start_state: int,
    after_chunks: bool,
    history: int,
) -> tuple[Numbers, int]:
    """Return the table rows of the tokens that lead to a tree and of the tree itself.

    The second result is the number of states that the tree sets aside at once.

    Of the children of a node, the one with the largest subtree comes last. The state of the parent is
    released before that subtree runs, so few states are held at once. A node that no row of the segment sees
    is left out. Nodes before the segment's own have no OUTPUT. The root's predecessor, which is the last
    replayed token, sets its state aside if the tree has several first nodes; if there is no such row, they
    start from `start_state`.

    span: The rows of one segment of the frame, with its sequence's pages.
    sources: int32, the source code of every token; see `_sources`.
    lead: Number of replayed tokens before the tree. May be 0.
    first_row: Row of the frame that holds the first node of the segment.
    start_state: Code of the state before all rows or, with `after_chunks`, before the tree.
    after_chunks: True if the tree starts from a carried state instead of the row before it, because chunks
        precede the tree.
    history: Number of preceding tokens that a convolution reads.
    """
    lead_rows = _chain_rows(sources[: history + lead], history)
    parents = _parents(span)
    codes = sources[lead:].tolist()
    children = _children(parents)
    read = {ROOT: codes[:history]}
    first_node = span.tail - span.rows
    num_aside = 0
    free = list[int]()
    rows = list[list[int]]()
    last_row: Numbers | list[int] | None = lead_rows[-1] if lead and not after_chunks else None
    stack = [(ROOT, NOTHING)]
    while stack:
        node, place = stack.pop()
        if node != ROOT:
            seen = [*read[parents[node]], codes[history + node]]
            read[node] = seen[1:]
            last_row = [
                *seen,
                place,
                NOTHING,
                NOTHING,
                first_row + node - first_node if node >= first_node else NOTHING,
            ]
            rows.append(last_row)
            if place >= 0 and node == children[parents[node]][-1]:
                free.append(place)
        siblings = children.get(node, ())
        place = NOTHING
        if len(siblings) > 1:
            if last_row is None:
                place = start_state
            else:
                if not free:
                    free.append(num_aside)
                    num_aside += 1
                last_row[ASIDE] = place = free.pop()
        stack += [(child, place if number else NOTHING) for number, child in enumerate(siblings)][::-1]
    return np.concatenate((lead_rows, np.array(rows, np.int32))), num_aside


def _parents(span: RowSpan) -> dict[int, int]:
    """Return the parent of every tail node that some row sees, by node; ROOT for first nodes.

    # visible [0b1, 0b11, 0b101, 0b1101] -> {0: ROOT, 1: 0, 2: 0, 3: 2}

    span: The rows of one segment of the frame, with its sequence's pages.
    """
    parents: dict[int, int] = {}
    for bits in span.seen:
        parent = ROOT
        while bits:
            node = (bits & -bits).bit_length() - 1
            parents[node], parent, bits = parent, node, bits & (bits - 1)
    return parents


def _children(parents: dict[int, int]) -> dict[int, list[int]]:
    """Return the children of every node that has any, by node; the child with the largest subtree comes last.

    ROOT is a key too if the tree has any node; leaves are not keys. Children with subtrees of equal size are
    in ascending order.

    parents: The parent of every node; ROOT for first nodes.
    """
    sizes = dict.fromkeys(parents, 1)
    children = dict[int, list[int]]()
    for node in sorted(parents, reverse=True):
        if parents[node] != ROOT:
            sizes[parents[node]] += sizes[node]
    for node in sorted(parents):
        children.setdefault(parents[node], []).append(node)
    for siblings in children.values():
        siblings.sort(key=sizes.__getitem__)
    return children
