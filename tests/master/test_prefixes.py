"""Beginnings of prompts: which are found, which go first, and that pages are counted exactly.

The tree is checked against brute force, the ledger against a real page table.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsot.core.pages import PageTable
from specsot.members import Curve
from specsot_master.core.ring.admission import (
    MIN_PREFIX_TOKENS,
    MIN_SHARED_TOKENS,
    PageLedger,
    PromptPrefix,
    admission_options,
    min_prefix_tokens,
    own_pages,
    pages_for,
    shared_pages,
)
from specsot_master.core.ring.prefix_tree import PrefixMatch, PrefixNode, PrefixTree, ancestors
from specsot_master.core.ring.ring_state import RingState

PLAIN = RingState(epoch=1, pages=40, page_rows=8, slots=3, max_positions=1000)
DRAFTING = RingState(epoch=1, pages=40, page_rows=8, slots=3, max_positions=1000, has_drafter=True)


def texts(size: int = 30) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, 1), min_size=1, max_size=size).map(tuple)


def grow(tree: PrefixTree, tokens: tuple[int, ...], sequence: int, drafted: bool = True) -> PrefixNode:
    """As the master does: fork what is there, add the rest."""
    route = tree.longest_match(tokens, drafted)
    if route.node and route.length == len(tokens):
        return route.node
    node = PrefixNode(sequence, tokens, 1, drafted, route.node, route.length)
    tree.add(node)
    return node


@given(st.lists(st.tuples(texts(), st.booleans()), max_size=30), texts(), st.booleans())
def test_the_longest_beginning_is_found(
    kept: list[tuple[tuple[int, ...], bool]], asked: tuple[int, ...], drafted: bool
) -> None:
    tree = PrefixTree()
    for sequence, (tokens, whose) in enumerate(kept):
        node = grow(tree, tokens, sequence, whose)
        assert node.tokens[: node.at] == (node.parent.tokens[: node.at] if node.parent else ())
    found = tree.longest_match(asked, drafted)
    best = max((_same(asked, tokens) for tokens, whose in kept if whose is drafted), default=0)
    assert found.length == best
    assert (found.node is None) == (best == 0)
    if found.node:
        assert found.node.tokens[:best] == asked[:best]


def _same(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    return next(n for n in range(min(len(left), len(right)), -1, -1) if left[:n] == right[:n])


def chain() -> tuple[PrefixTree, PrefixNode, PrefixNode, PrefixNode]:
    """a <- b <- c, and nothing else."""
    tree = PrefixTree()
    a = grow(tree, (1, 2), 1)
    b = grow(tree, (1, 2, 3), 2)
    c = grow(tree, (1, 2, 3, 4), 3)
    return tree, a, b, c


def test_what_is_needed_and_what_it_stands_on_stays() -> None:
    tree, _, b, c = chain()
    tree.pin(b)
    assert tree.spare() == 1
    assert tree.evict(99) == [c]
    tree.unpin(b)
    assert tree.spare() == 2
    assert tree.spare(kept_node=b) == 0
    assert tree.evict(99, kept_node=b) == []
    assert [node.sequence for node in tree.evict(99)] == [2, 1], "children before what they stand on"
    assert len(tree.sequences) == tree.pages == 0


def test_no_more_is_given_up_than_must_be_longest_unneeded_first() -> None:
    tree = PrefixTree()
    nodes = [grow(tree, (n, n), n) for n in range(5)]
    for n in (3, 0, 4):
        tree.pin(nodes[n])
        tree.unpin(nodes[n])
    assert [node.sequence for node in tree.evict(3)] == [1, 2, 3]
    assert [node.sequence for node in tree.evict(1)] == [0]


def test_what_is_needed_keeps_what_it_stands_on_young() -> None:
    tree, a, _, c = chain()
    other = grow(tree, (9,), 9)
    tree.pin(other)
    tree.unpin(other)
    tree.pin(c)
    tree.unpin(c)
    assert tree.evict(1) == [other]
    assert a.used == c.used


def test_doubted_ones_are_not_found_and_go_first() -> None:
    tree, a, b, c = chain()
    tree.pin(b)
    tree.mark_suspect(b)
    assert tree.longest_match((1, 2, 3, 4), True) == PrefixMatch()
    assert [one.suspect for one in (a, b, c)] == [True, True, False]
    tree.unpin(b)
    other = grow(tree, (7, 7), 7)
    assert tree.evict(1) == [c], "it stands on doubted ones, and keeps them there"
    assert tree.evict(1) == [b]
    assert tree.drop(a) == [a]
    assert tree.find(7) is other


class TestWays:
    def ways_of(
        self, length: int, route: PrefixMatch, needed: bool, ring: RingState = PLAIN, keeps: bool = True
    ):  # type: ignore[no-untyped-def]
        tokens = tuple(range(length))
        beginning = PromptPrefix(tokens, needed, lambda shared: own_pages(length + 9, shared, ring))
        return [
            (way.route.length, len(way.own), way.pages)
            for way in admission_options(beginning, route, ring, keeps)
        ]

    def node(self, length: int) -> PrefixNode:
        return PrefixNode(1, tuple(range(length)), pages_for(length, 8))

    def test_a_needed_one_is_opened_as_far_as_it_is_not_there(self) -> None:
        assert self.ways_of(50, PrefixMatch(), True) == [(0, 50, 7)]
        assert self.ways_of(50, PrefixMatch(self.node(40), 40), True) == [(40, 50, 2), (0, 50, 7)]
        assert self.ways_of(50, PrefixMatch(self.node(40), 40), True, DRAFTING) == [(40, 50, 3), (0, 50, 7)]
        assert self.ways_of(50, PrefixMatch(self.node(60), 50), True) == [(50, 0, 0), (0, 50, 7)]
        assert self.ways_of(0, PrefixMatch(), True) == [(0, 0, 0)]

    def test_little_is_not_worth_a_fork(self) -> None:
        little = PrefixMatch(self.node(MIN_SHARED_TOKENS - 1), MIN_SHARED_TOKENS - 1)
        assert self.ways_of(50, little, True) == [(0, 50, 7)]
        assert self.ways_of(MIN_SHARED_TOKENS - 1, little, True) == [
            (MIN_SHARED_TOKENS - 1, 0, 0),
            (0, MIN_SHARED_TOKENS - 1, 2),
        ], "but all is"
        assert self.ways_of(MIN_SHARED_TOKENS - 1, PrefixMatch(), False) == [(0, 0, 0)]

    def test_a_useful_one_is_opened_where_that_is_worth_a_step(self) -> None:
        assert self.ways_of(50, PrefixMatch(), False) == [(0, 50, 7), (0, 0, 0)]
        near, far = (
            PrefixMatch(self.node(49), 49),
            PrefixMatch(self.node(MIN_SHARED_TOKENS), MIN_SHARED_TOKENS),
        )
        assert self.ways_of(50, near, False) == [(49, 0, 0), (0, 50, 7), (0, 0, 0)]
        assert self.ways_of(80, far, False) == [(16, 80, 8), (16, 0, 0), (0, 80, 10), (0, 0, 0)]
        assert self.ways_of(80, PrefixMatch(), False, keeps=False) == [(0, 0, 0)]

    def test_a_template_is_shared_and_a_short_question_after_it_is_not_cached(self) -> None:
        template = PrefixMatch(self.node(47), 26)
        assert self.ways_of(46, template, False) == [(26, 0, 0), (0, 46, 6), (0, 0, 0)]
        assert self.ways_of(46, template, True) == [(0, 46, 6)], "a prefix would wait for it"

    def test_a_short_beginning_that_is_needed_later_is_not_opened_before_the_first_sequence(self) -> None:
        tokens = tuple(range(50))
        beginning = PromptPrefix(tokens, True, lambda shared: 20, plan=3)

        def ways(shared: int) -> list[tuple[int, int, int, int]]:
            route = PrefixMatch(self.node(shared), shared) if shared else PrefixMatch()
            found = admission_options(beginning, route, PLAIN, True, later=True)
            return [(len(way.own), way.shared, way.grant, way.plan) for way in found]

        opened = (50, 50, 20, 3)
        assert ways(0) == [opened], "a long one is opened first, as for a direct answer"
        # 50 tokens are 7 pages of 8 rows, 24 tokens 3.
        assert ways(24) == [(0, 24, 20 + 4, 3 + 4), opened]
        assert ways(50) == [(0, 50, 20, 3), opened]

    def test_where_many_tokens_take_as_long_as_one_only_long_beginnings_are_kept_for_later(self) -> None:
        """A step of 100 tokens takes twice as long as one of a token; sizes are multiples of 32."""
        gpu = replace(PLAIN, on_gpus=True, curve=((1, 1.0), (50, 1.0), (150, 3.0)))
        assert min_prefix_tokens(gpu) == 128
        assert min_prefix_tokens(replace(gpu, on_gpus=False)) == MIN_PREFIX_TOKENS, "on a CPU"
        assert self.ways_of(127, PrefixMatch(), False, gpu) == [(0, 0, 0)]
        assert self.ways_of(128, PrefixMatch(), False, gpu) == [(0, 128, 16), (0, 0, 0)]
        assert self.ways_of(50, PrefixMatch(), True, gpu) == [(0, 50, 7)], "sequences wait for it now"

    @pytest.mark.parametrize(
        ("curve", "rows", "wanted"),
        [
            ((), 512, MIN_PREFIX_TOKENS),
            (((1, 1.0), (8, 4.0)), 512, MIN_PREFIX_TOKENS),
            (((1, 1.0), (512, 1.5)), 512, 512),
            (((1, 1.0), (512, 1.5)), 8, MIN_PREFIX_TOKENS),
        ],
        ids=["not measured", "steep", "flat", "small frames"],
    )
    def test_how_much_a_prefix_adds_at_least(self, curve: Curve, rows: int, wanted: int) -> None:
        assert min_prefix_tokens(replace(PLAIN, on_gpus=True, curve=curve, rows=rows)) == wanted

    def test_where_pages_are_tight_nothing_else_is_held(self) -> None:
        tight = RingState(epoch=1, pages=10, page_rows=8, slots=3, max_positions=1000)
        assert self.ways_of(60, PrefixMatch(self.node(40), 40), True, tight) == [(0, 60, 8)]


@given(st.integers(0, 2**32), st.booleans())
def test_pages_are_counted_exactly(seed: int, drafting: bool) -> None:
    """A random life of a tree, its ledger and the page tables of a stage and of a drafter.

    Without a drafter what the ledger says is free is free, to the page; with one it is at least that.
    """
    chance = random.Random(seed)
    ring = DRAFTING if drafting else PLAIN
    tree, ledger, stage = PrefixTree(), PageLedger(ring.pages), Table(ring)
    ids = iter(range(1, 10_000))
    live: dict[str, tuple[PrefixNode, int, int]] = {}
    for step in range(60):
        if chance.random() < 0.6:
            length = chance.choice([5, 8, 9, 16, 24, 30])
            tokens = tuple(chance.randint(0, 1) for _ in range(2)) + (7,) * length
            route = tree.longest_match(tokens, True)
            pages = pages_for(len(tokens), 8) - shared_pages(route.length, ring)
            grant = own_pages(len(tokens) + 10, len(tokens), ring)
            for gone in _room(tree, ledger, pages + grant, route.node):
                stage.close(gone.sequence)
            if pages + grant > ledger.free:
                continue
            node = PrefixNode(next(ids), tokens, pages, True, route.node, route.length)
            stage.open(node.sequence, route.node, route.length, len(tokens))
            tree.add(node)
            ledger.reserve_prefix_pages(pages)
            tree.pin(node)
            assert ledger.admit(f"r{step}", grant)
            assert ledger.use_pages(f"r{step}", grant)
            writer = next(ids)
            stage.open(writer, node, len(tokens), len(tokens) + 10 + ring.slots)
            live[f"r{step}"] = (node, writer, grant)
        elif live:
            name = chance.choice(sorted(live))
            node, writer, _ = live.pop(name)
            stage.close(writer)
            ledger.remove(name)
            tree.unpin(node)
        assert ledger.free == stage.free if not drafting else 0 <= ledger.free <= stage.free
    assert all(one.sequence in stage.table for node, _, _ in live.values() for one in ancestors(node))


class Table:
    """Pages of a stage, or of whichever runs out first, the stage or the drafter."""

    def __init__(self, ring: RingState) -> None:
        self.table, self._drafter = (PageTable(ring.pages, ring.page_rows) for _ in range(2))
        self._drafts = ring.has_drafter

    @property
    def free(self) -> int:
        return min(self.table.free, self._drafter.free) if self._drafts else self.table.free

    def open(self, sequence: int, source: PrefixNode | None, at: int, rows: int) -> None:
        """The drafter shares all rows of a fork but the last."""
        for table, less in ((self.table, 0), (self._drafter, 1)):
            if source:
                table.fork(sequence, source.sequence, at - less)
            else:
                table.open(sequence)
            table.reserve(sequence, rows)
            if not self._drafts:
                break

    def close(self, sequence: int) -> None:
        self.table.close(sequence)
        self._drafter.close(sequence)


def _room(tree: PrefixTree, ledger: PageLedger, pages: int, keep: PrefixNode | None) -> list[PrefixNode]:
    gone = tree.evict(pages - ledger.free, keep)
    ledger.free_prefix_pages(sum(node.pages for node in gone))
    return gone


@pytest.mark.parametrize(("shared", "plain", "drafted"), [(0, 0, 0), (8, 1, 0), (9, 1, 1), (16, 2, 1)])
def test_a_drafter_shares_a_row_less(shared: int, plain: int, drafted: int) -> None:
    assert shared_pages(shared, PLAIN) == plain
    assert shared_pages(shared, DRAFTING) == drafted
