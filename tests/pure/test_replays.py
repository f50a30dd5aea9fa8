"""States that are kept for gated delta layers: each is what its text's rows lead to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy

import pytest

from specsot.core.pages import PageTable
from specsot.core.tree import ancestry
from specsot.errors import Overloaded
from specsot_kernels.segments import RowSpan
from specsot_model.core.replays import CHUNK, KEPT_ROWS, CachedStates, PathReplay, SpanReplay, states_for
from specsot_model.core.walks import (
    ASIDE,
    FIELDS,
    KEPT,
    LANES,
    OUTPUT,
    TAKEN,
    SequenceRows,
    WalkRoom,
    in_blocks,
    mark_saved_states,
    sequences_of_frame,
    set_aside_of,
    walk_of,
)
from tests.conftest import seeds

HISTORY = 3
Link = tuple[int, int, bool]  # the state before, a row, and whether that ran as a part of a chunk


class Texts:
    """Texts in pages. A row is a number of its own; a state is the rows that it follows, all of them."""

    def __init__(self, seed: int, page_rows: int, states: int | None = None, walking: bool = False) -> None:
        """walking: rows run one by one, so that a state may be kept behind any."""
        self.rng = random.Random(seed)
        pages = 4096 // page_rows
        self.table = PageTable(pages, page_rows)
        many, self.walking = states or states_for(pages * page_rows), walking
        self.kept = CachedStates(many, page_rows, 1 if walking else CHUNK, self.table.is_shared)
        self.rows: dict[int, int] = {}
        self.states: dict[int, list[int]] = {}
        self.links: list[Link] = [(0, -1, False)]  # where rows are walked, states by number
        self.numbered: dict[Link, int] = {}
        self.ran: dict[int, int] = {}  # which of them is kept as which state
        self.committed: dict[int, list[int]] = {}
        self.numbers = iter(range(10**9))
        self.moves: list[tuple[int, int]] = []
        self.read = self.fed = 0  # rows that were run, and rows that came

    def open(self) -> None:
        sequence = next(self.numbers)
        self.table.open(sequence)
        self.committed[sequence] = []

    def fork(self) -> None:
        """Anywhere inside of another text."""
        source, sequence = self.rng.choice(list(self.committed)), next(self.numbers)
        length = self.rng.randint(0, len(self.committed[source]))
        copy = self.table.fork(sequence, source, length)
        self.committed[sequence] = self.committed[source][:length]
        if copy:
            size = self.table.page_rows
            for row in range(copy.rows):
                self.rows[copy.target * size + row] = self.rows[copy.source * size + row]
            if copied := self.kept.copy(copy.source, copy.target, copy.rows):
                states = self.ran if self.walking else self.states
                states[copied[1]] = states[copied[0]]  # type: ignore[assignment]

    def close(self) -> None:
        sequence = self.rng.choice(list(self.committed))
        del self.committed[sequence]
        for page in self.table.close(sequence):
            self.kept.discard_from(page)

    def step(self, commit: bool = True) -> None:
        """Rows of some texts: a prompt's, or a tree's of which a path is kept, moved before the next step."""
        chosen = self.rng.sample(list(self.committed), min(len(self.committed), 3))
        spans, fed, wanted = list[RowSpan](), list[list[int]](), list[list[int]]()
        sizes = [self.rng.choice((1, 1, 1, 6, 24, self.rng.randint(1, 300))) for _ in chosen]
        for sequence, many in zip(chosen, sizes):
            self.table.reserve(sequence, len(self.committed[sequence]) + many)
        for sequence, many in zip(chosen, sizes):
            text = self.committed[sequence]
            tree = many <= 24 and self.rng.random() < 0.7
            parents = [self.rng.randrange(max(node, 1)) for node in range(many)]
            visible = ancestry(parents) if tree else None
            pages = self.table.pages(sequence)[: self.table.pages_for(len(text) + many)]
            spans.append(RowSpan(many, len(text), many, pages, visible))
            new = [next(self.numbers) for _ in range(many)]
            slots = self.table.slots(sequence, len(text), len(text) + many)
            self.rows |= dict(zip(slots, new))
            seen = visible or [(2 << row) - 1 for row in range(many)]
            paths = [[node for node in range(many) if bits >> node & 1] for bits in seen]
            wanted += [text + [new[node] for node in path] for path in paths]
            fed.append(new)
            path = self.rng.choice(paths) if tree else list(range(many))
            self.moves += [(slots[node], slots[place]) for place, node in enumerate(path) if node != place]
            self.committed[sequence] = text + [new[node] for node in path]
        if self.walking:
            self.walk(spans, [row for rows in fed for row in rows], wanted, commit)
        else:
            self.check(self.kept.plan(spans, HISTORY), wanted, commit)
        self.move()

    def move(self) -> None:
        found = [self.rows[source] for source, _ in self.moves]
        for (_, target), row in zip(self.moves, found):
            self.rows[target] = row
            self.kept.discard_from(*divmod(target, self.table.page_rows))
        self.moves = []

    def check(self, replays: Sequence[PathReplay], wanted: list[list[int]], commit: bool) -> None:
        """Every row of the frame is the end of the path that leads to it."""
        told: dict[int, list[int]] = {}
        kept: dict[int, list[int]] = {}
        for one in replays:
            begun = [] if one.state is None else self.states[one.state]
            assert len(begun) % CHUNK == 0
            front = [-1] * HISTORY + begun
            assert [self.rows.get(slot, -1) for slot in one.slots[:HISTORY]] == front[len(front) - HISTORY :]
            path = begun + [self.rows[slot] for slot in one.slots[HISTORY:]]
            told |= {row: path[: len(begun) + place + 1] for row, place in one.outputs}
            for chunk, state in one.saves:
                assert state not in kept
                kept[state] = path[: len(begun) + (chunk + 1) * CHUNK]
            self.read += len(one.slots) - HISTORY
        assert [told[row] for row in range(len(wanted))] == wanted
        self.fed += len(wanted)
        self.states |= kept
        if commit:
            self.kept.commit()

    def walk(self, spans: list[RowSpan], fed: list[int], wanted: list[list[int]], commit: bool) -> None:
        """And each row is what it is if no state is kept."""
        found, again = self.kept.find(spans), dict[int, int]()
        self.ran[self.kept.count] = 0
        if self.rng.random() < 0.25:
            anew = deepcopy(self.kept)
            for page in range(self.table.count):
                anew._free_state(page)
            again = self.run(self.texts(anew.find(spans)), fed, dict(self.ran))
        texts = self.texts(found)
        self.read, self.fed = self.read + sum(len(text.rows) for text in texts), self.fed + len(wanted)
        mark_saved_states(texts, self.kept.reserve(found))
        told = self.run(texts, fed, self.ran)
        assert again in ({}, told)
        rows = {state: wanted[row] for row, state in told.items()}
        for row, path in enumerate(wanted):
            before, own, _ = self.links[told[row]]
            assert (rows.get(before) or self.back(before)) + [own] == path
        if commit:
            self.kept.commit()

    def back(self, state: int, most: int = 10**9) -> list[int]:
        """Its last rows, at most so many."""
        rows = list[int]()
        while state and len(rows) < most:
            state, row, _ = self.links[state]
            rows.append(row)
        return rows[::-1]

    def texts(self, found: Sequence[SpanReplay]) -> list[SequenceRows]:
        return sequences_of_frame(found, HISTORY, self.table.page_rows, self.kept.count)

    def run(self, texts: list[SequenceRows], fed: list[int], states: dict[int, int]) -> dict[int, int]:
        """As kernels do: chunks of a block, then its rows; texts in any order: one must not keep a state
        where another one begins."""
        told, aside, most = dict[int, int](), dict[int, int](), self.rng.choice((CHUNK, 100, 4096))
        for block in in_blocks(texts, most):
            assert 0 < len(block.rows) <= most
            for runs, chunked in (block.chunks * CHUNK, True), (block.starts, False):
                every, lanes = list(enumerate(zip(runs.tolist(), runs[1:].tolist()))), dict[int, int]()
                for number, (first, stop) in self.rng.sample(every, len(every)):
                    state = 0
                    for place, line in enumerate(block.rows[first:stop].tolist()):
                        if line[TAKEN] != -1:
                            assert not chunked or place % CHUNK == 0
                            state = aside[line[TAKEN]] if line[TAKEN] >= 0 else states[-2 - line[TAKEN]]
                        read = [
                            fed[-2 - one] if one < -1 else self.rows.get(one, -1) for one in line[:-FIELDS]
                        ]
                        if read[-1] < 0:
                            assert chunked, "behind the last row"
                            continue
                        assert read[:-1] == ([-1] * HISTORY + self.back(state, HISTORY))[-HISTORY:]
                        link = state, read[-1], chunked
                        state = self.numbered.setdefault(link, len(self.links))
                        self.links += [link] * (state == len(self.links))
                        if line[OUTPUT] >= 0:
                            told[line[OUTPUT]] = state
                        if line[ASIDE] >= 0:
                            assert line[ASIDE] < block.aside
                            if not chunked:
                                assert lanes.setdefault(line[ASIDE], number % LANES) == number % LANES, (
                                    "beside"
                                )
                            aside[line[ASIDE]] = state
                        if line[KEPT] >= 0:
                            states[line[KEPT]] = state
                        assert not chunked or line[ASIDE] == line[KEPT] == -1 or place % CHUNK == CHUNK - 1
        return told


@pytest.mark.parametrize("walking", [False, True])
@pytest.mark.parametrize("page_rows", [16, 64, 100, 256])
@pytest.mark.parametrize("seed", seeds(4, quick=1))
def test_a_cached_state_follows_from_the_rows_of_its_sequence(
    seed: int, page_rows: int, walking: bool
) -> None:
    """Texts grow by prompts and trees, are forked and closed, and some frames fail; states are too few."""
    world = Texts(seed, page_rows, None if seed % 2 else 4, walking)
    for _ in range(50):
        dice = world.rng.choice(("step",) * 4 + ("open", "fork", "close"))
        try:
            if dice == "open" or not world.committed:
                world.open()
            elif dice == "step":
                world.step(commit=world.rng.random() < 0.95)
            else:
                (world.fork if dice == "fork" else world.close)()
        except Overloaded:
            world.close()


def run(kept: CachedStates, *spans: RowSpan) -> list[int]:
    """Where the walks of a frame's texts begin."""
    found = kept.find(spans)
    kept.reserve(found)
    kept.commit()
    return [one.start for one in found]


@pytest.mark.parametrize(
    ("rows", "shared", "stays"), [(70, False, False), (70, True, True), (KEPT_ROWS, False, True)]
)
def test_a_sequence_that_advances_frees_its_own_former_state(rows: int, shared: bool, stays: bool) -> None:
    """Unless it is one of those at every so many rows, or others hold its page."""
    kept, pages = CachedStates(8, 64, 1, lambda page: shared), tuple(range(8))
    run(kept, RowSpan(rows, 0, rows, pages))
    assert run(kept, RowSpan(1, rows + 64, 1, pages, (1,))) == [rows]
    (again,) = kept.find([RowSpan(1, rows, 1, pages, (1,))])
    assert again.start == (rows if stays else 0)


def test_sequences_of_one_frame_that_start_at_one_state_do_not_change_it() -> None:
    kept = CachedStates(8, 64, 1)
    run(kept, RowSpan(64, 0, 64, (0,)))
    assert run(kept, *(RowSpan(2, 64, 2, (0, own)) for own in (1, 2))) == [64, 64]
    assert run(kept, RowSpan(2, 64, 2, (0, 3))) == [64]


def test_decoding_sequences_evict_no_state_of_an_idle_prefix() -> None:
    """As many states are counted for their rows as they keep."""
    rows, written = 30_016, 4_400
    kept = CachedStates(states_for(rows + 4 * (written + 64)) - 1, 64, 1)
    prefix = tuple(range(rows // 64))
    for base in range(0, rows, 2048):
        many = min(2048, rows - base)
        run(kept, RowSpan(many, base, many, prefix))
    texts = [tuple(range(1000 * text, 1000 * text + written // 64 + 1)) for text in range(1, 5)]
    for base in range(0, written, 24):
        run(kept, *(RowSpan(1, base, 1, pages, (1,)) for pages in texts))
    assert run(kept, RowSpan(1, rows, 1, (*prefix, 6000), (1,))) == [rows]


@pytest.mark.parametrize("page_rows", [64, 256])
def test_a_step_runs_no_more_rows_however_long_the_sequence(page_rows: int) -> None:
    kept, pages = CachedStates(states_for(2048), page_rows), tuple(range(2048 // page_rows))
    most = 0
    for base in range(0, 2000):
        (replay,) = kept.plan([RowSpan(1, base, 1, pages[: base // page_rows + 1], (1,))], HISTORY)
        most = max(most, len(replay.slots) - HISTORY)
        kept.commit()
    assert most == CHUNK + 1


def test_branches_begin_where_their_prefix_ended() -> None:
    """The state of the last page is copied with its rows; of pages that are shared, shared."""
    kept = CachedStates(8, 256)
    kept.plan([RowSpan(200, 0, 200, (5,), None)], HISTORY)
    kept.commit()
    assert kept.copy(5, 7, 200)
    assert kept.copy(5, 8, 191) is None, "of fewer rows than the state follows"
    own, other = kept.plan([RowSpan(1, 200, 1, (7,), (1,)), RowSpan(1, 191, 1, (8,), (1,))], HISTORY)
    assert (len(own.slots), len(other.slots)) == (HISTORY + 200 - 192 + 1, HISTORY + 192)


def test_a_tree_sets_few_states_aside() -> None:
    """However it is grown; a graph has room for them."""
    rng = random.Random(1)
    for rows in (1, 3, 7, 24, 60, 200):
        for wide in (1, 2, 8, rows):
            parents = [rng.randrange(max(0, node - wide), max(node, 1)) for node in range(rows)]
            span = RowSpan(rows, 300, rows, tuple(range(8)), ancestry(parents))
            texts = sequences_of_frame(CachedStates(8, 64, 1).find([span]), HISTORY, 64, 8)
            room = WalkRoom(rows, HISTORY)
            assert texts[0].num_aside <= min(rows.bit_length() - 1, room.aside)
            assert len(texts[0].rows) == 300 + rows
            assert room.holds(texts) is (300 + rows <= room.lines)
            if room.holds(texts):
                assert [part.shape for part in room.fill(walk_of(texts))] == list(room.shapes)


@pytest.mark.parametrize("texts", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("nodes", [3, 4, 6, 8])
def test_small_trees_of_many_sequences_have_room_in_graphs(texts: int, nodes: int) -> None:
    """A root with two children and more sets one state aside, behind a row that was accepted."""
    seen = ancestry([0, 0, 0, 1, 2, 1, 3, 2][:nodes])
    kept, spans = CachedStates(8, 64, 1), list[RowSpan]()
    for text in range(texts):
        spans.append(RowSpan(nodes, 3, nodes, (text,), seen))
    aside = set_aside_of([text.num_aside for text in sequences_of_frame(kept.find(spans), HISTORY, 64, 8)])
    assert aside <= 3 * min(texts, LANES)
    assert WalkRoom(texts * nodes, HISTORY).aside >= aside
