"""Orders the tokens that GPU kernels of gated delta layers run in a step, each sequence's one after another.

The kernels *walk* a table with one row per token. A token starts from the state that the row before it left.
The nodes of a tree are visited depth first: the state of a node with several children is set aside, and each
child except the first starts from there. The tokens of a chunk run together
(`specsot_model.core.replays.CHUNKED_ROWS` says which tokens run by chunks).

Identifiers still say `text` for a sequence. The states of different sequences are independent, so the kernels
walk LANES sequences side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from specsot_kernels.segments import RowSpan
from specsot_model.core.replays import CHUNK, CHUNKED_ROWS, KEPT_ROWS, SpanReplay

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
# Sequences. How many the kernel walks side by side; equals `TEXTS` of specsot_kernels.gpu.delta. Sequences
# i, i + LANES, i + 2 * LANES, ... run one after another in the same lane.
LANES = 16
# Table rows. What one pass runs at most if the tables are not captured in a CUDA graph; as many as a frame of
# prompts has.
BLOCK_ROWS = 2048
# Sequences. How many may carry a state from one pass to the next at the same time.
CARRIED = LANES
# Placeholders in TAKEN and ASIDE: HANDED - i stands for the i-th carried state until the number of states
# that are set aside is known; `_Block.walk` then replaces it by that number + i.
HANDED = -(1 << 30)


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
        """[4]: number of sequences that run token by token, table rows, sequences with chunks, chunks."""
        sequences = len(self.starts) - 1
        chunks = len(self.chunks) - 1
        return np.array((sequences, len(self.rows), chunks, self.chunks[-1]), np.int32)


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The table rows of one sequence, before the sequences of a frame are combined into walks.

    rows: Table rows as in `Walk.rows`. The states that this sequence sets aside are numbered from 0 on.
    pieces: Pairs (end row, whether the piece consists of chunks), in order: rows that run in the same way.
    held: How many states the sequence sets aside at once.
    whole: How many rows at the end must run in the same pass: a tree, and the token before it.
    """

    rows: Numbers
    pieces: tuple[tuple[int, bool], ...]
    held: int = 0
    whole: int = 0


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
        """Number of table rows, with room for replayed tokens.

        A sequence replays as many tokens as the last frame may have accepted, or up to KEPT_ROWS if its last
        state was evicted.
        """
        return 2 * self.rows + KEPT_ROWS

    @property
    def chunks(self) -> int:
        """Number of chunks, for prompts that begin and end anywhere; 0 if frames are too small for chunks."""
        return 2 * self.rows // CHUNK + 2 if self.rows >= CHUNKED_ROWS else 0

    @property
    def aside(self) -> int:
        """Number of states that may be set aside at once.

        Three nodes set aside one state at most, and few sequences set aside many at once, so this is enough
        for most frames; `holds` checks it.
        """
        return min(self.rows // 3, LANES + self.rows // 8)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the four tables: counts, starts, chunks, rows."""
        sequences = self.rows // CHUNKED_ROWS + 1
        return (4,), (self.rows + 1,), (sequences,), (self.lines, self.history + 1 + FIELDS)

    def holds(self, sequences: Sequence[SequenceRows]) -> bool:
        """Tell whether one pass in these tables can run the sequences.

        It cannot if a sequence runs partly by chunks and partly token by token, or if a table is too small.
        """
        if any(len(sequence.pieces) > 1 for sequence in sequences):
            return False
        chunks = sum(len(sequence.rows) for sequence in sequences if sequence.pieces[0][1])
        lines = sum(len(sequence.rows) for sequence in sequences)
        aside = set_aside_of([sequence.held for sequence in sequences if not sequence.pieces[0][1]])
        return chunks <= self.chunks * CHUNK and lines <= self.lines and aside <= self.aside

    def fill(self, walk: Walk) -> list[Numbers]:
        """Return counts, starts, chunks and rows of a walk, padded with zeros to `shapes`."""
        starts, chunks, rows = (np.zeros(shape, np.int32) for shape in self.shapes[1:])
        starts[: len(walk.starts)], rows[: len(walk.rows)] = walk.starts, walk.rows
        chunks[: len(walk.chunks)] = walk.chunks
        return [walk.counts, starts, chunks, rows]


def sequences_of_frame(
    replays: Sequence[SpanReplay], history: int, page_rows: int, begun: int
) -> list[SequenceRows]:
    """Return the table rows of each replay of a frame, in the order of its segments.

    history: Number of preceding tokens that a convolution reads.
    begun: Number of the zero state, from which a new sequence begins.

    No row stores a state yet; `keep` adds that.
    """
    found = list[SequenceRows]()
    first = 0
    for one in replays:
        found.append(_text(one, first, history, page_rows, begun))
        first += one.span.rows
    return found


def _text(one: SpanReplay, first: int, history: int, page_rows: int, begun: int) -> SequenceRows:
    """Return the table rows of one replay. first: the frame row of the segment's first token."""
    sources = _sources(one, first, history, page_rows)
    lead = one.span.base - one.start
    taken = -2 - (begun if one.state is None else one.state)
    held = 0
    whole = 0
    if one.span.visible is None:
        rows = _in_a_row(sources, history)
        rows[lead:, OUTPUT] = np.arange(first, first + one.span.rows)
    else:
        behind = bool(one.chunks) and one.chunks[-1] + CHUNK == one.span.base
        root = HANDED if behind else taken
        rows, held = _depth_first(one.span, sources, lead, first, root, behind, history)
        whole = len(rows) - lead + (bool(lead) and not behind)
    rows[0, TAKEN] = taken
    pieces = tuple(_pieces(one, len(rows)))
    # The last chunk is filled up with empty rows.
    if missing := pieces[-1][0] - len(rows):
        rows = np.pad(rows, ((0, missing), (0, 0)), constant_values=NOTHING)
    return SequenceRows(rows, pieces, held, whole)


def _pieces(one: SpanReplay, many: int) -> Iterator[tuple[int, bool]]:
    """Yield `SequenceRows.pieces` for a sequence of `many` table rows.

    # chunks at rows [10 74], 150 rows, CHUNK 64 -> (10, False), (138, True), (150, False)
    """
    end = 0
    for at in (chunk - one.start for chunk in one.chunks):
        if at > end:
            if end:
                yield end, True
            yield at, False
        end = at + CHUNK
    if end:
        yield end, True
    if many > end:
        yield many, False


def set_aside_of(held: Sequence[int]) -> int:
    """Return how many states must be available in memory if sequence i sets aside held[i] at once.

    Sequences of the same lane run one after another and share their places, so each lane needs its maximum.

        # held: sixteen times 1, then 3 and 2 -> lane 0 needs 3, lane 1 needs 2, the others 1: 19
    """
    return sum(max(held[lane::LANES]) for lane in range(min(LANES, len(held))))


def walk_of(sequences: Sequence[SequenceRows]) -> Walk:
    """Return one walk that runs all sequences in a single pass. It modifies the arrays in `sequences`."""
    (walk,) = in_blocks(sequences, sum(len(sequence.rows) for sequence in sequences))
    return walk


def keep(sequences: Sequence[SequenceRows], replays: Sequence[SpanReplay]) -> None:
    """Mark in the table rows which states are stored: `replays` are those of `sequences`, with their
    `saves`."""
    for sequence, one in zip(sequences, replays):
        for end, state in one.saves:
            sequence.rows[end - 1 - one.start, KEPT] = state


@dataclass(slots=True)
class _Block:
    """A walk under construction.

    chunks: Table rows that run by chunks, one array per sequence.
    rows: Table rows that run one by one, one array per sequence.
    held: For each array of `rows`, how many states it sets aside at once.
    lines: Number of table rows in all.
    """

    chunks: list[Numbers] = field(default_factory=list[Numbers])
    rows: list[Numbers] = field(default_factory=list[Numbers])
    held: list[int] = field(default_factory=list[int])
    lines: int = 0

    def put(self, part: Numbers, chunked: bool, held: int = 0) -> None:
        """Add the table rows of one sequence."""
        (self.chunks if chunked else self.rows).append(part)
        self.held += [] if chunked else [held]
        self.lines += len(part)

    def walk(self, aside: int, migrated: int) -> Walk:
        """Return the finished walk.

        aside: Number of states that are set aside at once, in any block of the frame.
        handed: Number of carried states, which are stored after those.
        """
        if any(self.held):
            _share_aside(self.rows, self.held)
        parts = [*self.chunks, *self.rows]
        rows = np.concatenate(parts) if len(parts) > 1 else parts[0]
        if migrated:
            for places in rows[:, TAKEN], rows[:, ASIDE]:
                handing = places <= HANDED
                places[handing] = aside + HANDED - places[handing]
        chunks = [*accumulate(map(len, self.chunks), initial=0)]
        starts = [*accumulate(map(len, self.rows), initial=chunks[-1])]
        ends = np.array([chunk // CHUNK for chunk in chunks], np.int32)
        return Walk(np.array(starts, np.int32), rows, aside + migrated, ends)


def in_blocks(sequences: Sequence[SequenceRows], most: int = BLOCK_ROWS) -> list[Walk]:
    """Return walks of at most `most` table rows each, to be run one after another.

    This bounds the memory of a pass, however far back a sequence has to be replayed. A sequence that
    continues in the next walk, or that runs token by token after its chunks, carries its state over in
    memory. It modifies the arrays in `sequences`.
    """
    blocks = [_Block()]
    # For each carried state, the first block in which it is unused.
    free = [0] * CARRIED
    for number, sequence in enumerate(sequences):
        slot = number % CARRIED
        last = blocks[-1]
        if len(sequence.pieces) == 1 and last.lines + len(sequence.rows) <= most:
            last.put(sequence.rows, sequence.pieces[0][1], sequence.held)
        else:
            free[slot] = _put_parts(sequence, blocks, free[slot], most, HANDED - slot)
    aside = max(set_aside_of(block.held) for block in blocks)
    migrated = CARRIED if any(free) else 0
    return [block.walk(aside, migrated) for block in blocks]


def _put_parts(sequence: SequenceRows, blocks: list[_Block], at: int, most: int, migrated: int) -> int:
    """Distribute one sequence over `blocks`, from block `at` on, and add blocks as needed.

    handed: Placeholder of the state that the sequence carries from part to part.

    Return the block after its last part. Within a block, chunks run before single tokens, so chunks that
    follow single tokens go into the next block.
    """
    begin = 0
    rows = sequence.rows
    before = False
    assert sequence.whole <= most, "a tree runs in one block"
    rows[rows[:, TAKEN] == HANDED, TAKEN] = migrated
    for end, chunked in sequence.pieces:
        while begin < end:
            if at == len(blocks):
                blocks.append(_Block())
            size = min(most - blocks[at].lines, end - begin)
            if chunked:
                size = 0 if before else size // CHUNK * CHUNK
            elif begin + size < end:
                size = 0 if before else min(size, len(rows) - sequence.whole - begin)
            if size <= 0:
                at = at + 1
                before = False
                continue
            if begin:
                rows[begin - 1, ASIDE] = rows[begin, TAKEN] = migrated
            begin, part = begin + size, rows[begin : begin + size]
            blocks[at].put(part, chunked, sequence.held if begin == len(rows) else 0)
            # Chunks of a block run before its single tokens, so a chunk after these needs the next block.
            before = not chunked
    return at + 1


def _share_aside(parts: Sequence[Numbers], held: Sequence[int]) -> None:
    """Renumber the states that each sequence sets aside from 0 .. held - 1 to its lane's places, in place."""
    begin = 0
    for lane in range(min(LANES, len(parts))):
        for part in parts[lane::LANES]:
            for places in part[:, TAKEN], part[:, ASIDE]:
                places[places >= 0] += begin
        begin += max(held[lane::LANES])


def _sources(one: SpanReplay, first: int, history: int, page_rows: int) -> Numbers:
    """Return the source codes of columns start - history .. total - 1 of one sequence.

    A column of an earlier step is named by its KV slot, a token of this frame by -2 - its row, and a column
    before the sequence by -1.

        # base 5, 4 tokens in frame rows 0..3, start 5, history 2, page 0 -> [3 4 -2 -3 -4 -5]
    """
    span = one.span
    columns = np.arange(one.start - history, span.total)
    place, row = np.divmod(columns.clip(0), page_rows)
    sources = np.array(span.pages, np.int32)[place] * page_rows + row
    sources[columns < 0] = NOTHING
    sources[len(sources) - span.rows :] = -2 - np.arange(first, first + span.rows)
    return sources.astype(np.int32)


def _in_a_row(sources: Numbers, history: int) -> Numbers:
    """Return table rows of a chain of tokens: each reads the `history` sources before its own.

    # sources [3 4 -2 -3], history 2 -> rows that begin [3 4 -2] and [4 -2 -3], with empty fields
    """
    many = len(sources) - history
    rows = np.full((many, history + 1 + FIELDS), NOTHING, np.int32)
    for back in range(history + 1):
        rows[:, back] = sources[back : back + many]
    return rows


def _depth_first(
    span: RowSpan, sources: Numbers, lead: int, first: int, taken: int, cut: bool, history: int
) -> tuple[Numbers, int]:
    """Return the table rows of the tokens that lead to a tree and of the tree itself.

    The second result is the number of states that the tree sets aside at once.

    lead: Number of replayed tokens before the tree.
    first: Row of the frame that holds the first node of the segment.
    taken: Code of the state before all rows or, with `cut`, before the tree.
    cut: The tree starts from a carried state instead of the row before it, because chunks precede the tree.

    Of the children of a node, the one with the largest subtree comes last. The state of the parent is
    released before that subtree runs, so few states are held at once.
    """
    before = _in_a_row(sources[: history + lead], history)
    parents = _parents(span)
    codes = sources[lead:].tolist()
    children = _children(parents)
    read = {ROOT: codes[:history]}
    own = span.tail - span.rows
    held = 0
    free = list[int]()
    rows = list[list[int]]()
    line: Numbers | list[int] | None = before[-1] if lead and not cut else None
    todo = [(ROOT, NOTHING)]
    while todo:
        node, place = todo.pop()
        if node != ROOT:
            seen = [*read[parents[node]], codes[history + node]]
            read[node] = seen[1:]
            line = [*seen, place, NOTHING, NOTHING, first + node - own if node >= own else NOTHING]
            rows.append(line)
            if place >= 0 and node == children[parents[node]][-1]:
                free.append(place)
        few = children.get(node, ())
        place = NOTHING
        if len(few) > 1:
            if line is None:
                place = taken
            else:
                if not free:
                    free.append(held)
                    held += 1
                line[ASIDE] = place = free.pop()
        todo += [(child, place if number else NOTHING) for number, child in enumerate(few)][::-1]
    return np.concatenate((before, np.array(rows, np.int32))), held


def _parents(span: RowSpan) -> dict[int, int]:
    """Return the parent of every tail node that some row sees, by node; ROOT for first nodes.

    # visible [0b1, 0b11, 0b101, 0b1101] -> {0: ROOT, 1: 0, 2: 0, 3: 2}
    """
    parents: dict[int, int] = {}
    for bits in span.seen:
        before = ROOT
        while bits:
            node = (bits & -bits).bit_length() - 1
            parents[node], before, bits = before, node, bits & (bits - 1)
    return parents


def _children(parents: dict[int, int]) -> dict[int, list[int]]:
    """Return the children of every node that has any; the child with the largest subtree comes last."""
    sizes = dict.fromkeys(parents, 1)
    children = dict[int, list[int]]()
    for node in sorted(parents, reverse=True):
        if parents[node] != ROOT:
            sizes[parents[node]] += sizes[node]
    for node in sorted(parents):
        children.setdefault(parents[node], []).append(node)
    for few in children.values():
        few.sort(key=sizes.__getitem__)
    return children
