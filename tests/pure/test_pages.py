"""The allocator: deterministic, reference counted, and nothing changes when a call is refused."""

import random

import pytest

from specsot.core.pages import PageCopy, PageTable
from specsot.errors import NotFound, Overloaded
from specsot.params import Window
from tests.conftest import seeds


def test_a_fork_shares_full_pages_and_copies_the_part():
    table = PageTable(8, 4)
    table.open(1)
    table.reserve(1, 10)
    assert table.pages(1) == (0, 1, 2)
    assert table.fork(2, 1, 10) == PageCopy(2, 3, 2)
    assert table.pages(2) == (0, 1, 3)
    assert table.fork(3, 1, 8) is None
    assert table.pages(3) == (0, 1)
    assert table.free == 4


def test_pages_come_back_when_their_last_owner_goes():
    table = PageTable(8, 4)
    table.open(1)
    table.reserve(1, 8)
    table.fork(2, 1, 8)
    assert table.close(1) == ()
    assert table.free == 6
    assert table.close(2) == (0, 1)
    assert table.close(2) == ()
    assert table.free == 8


def test_a_refused_call_changes_nothing():
    table = PageTable(2, 4)
    table.open(1)
    table.reserve(1, 5)
    with pytest.raises(Overloaded, match="2 more KV pages are needed, 0 are free"):
        table.reserve(1, 16)
    with pytest.raises(Overloaded):
        table.fork(2, 1, 5)
    with pytest.raises(NotFound):
        table.fork(2, 9, 4)
    with pytest.raises(NotFound, match="no 12 rows"):
        table.fork(2, 1, 12)
    assert table.free == 0
    assert 2 not in table
    table.close(1)
    assert table.free == 2


def test_slots_follow_the_pages():
    table = PageTable(4, 4)
    table.open(7)
    table.reserve(7, 4)
    table.open(8)
    table.reserve(8, 1)
    table.reserve(7, 6)
    assert table.slots(7, 2, 6) == [2, 3, 8, 9]
    assert table.slots(7, 4, 6) == range(8, 10), "all on one page"
    assert table.place(7, 5, 10) == (5, (0, 2, 3), [9, 10, 11, 12, 13]), "reserved with it"
    assert table.free == 0
    with pytest.raises(Overloaded):
        table.place(8, 1, 5)
    assert table.place(8, 1, 4) == (1, (1,), range(5, 8))


def test_listed_pages_are_those_held_now_after_pages_were_removed() -> None:
    table = PageTable(12, 4)
    table.open(1, Window(sinks=4, recent=16))
    table.open(2)
    assert table.cover(2, 3, 8) == (3, (0, 1))
    assert table.cover(2, 3, 5) == (3, (0, 1)), "the same pages reach the row"
    table.unreserve(2, 1)
    table.reserve(1, 4)
    assert table.cover(2, 3, 8) == (3, (0, 2)), "the removed page has another owner"
    assert table.cover(1, 0, 28) == (0, (1, 3, 4, 5, 6, 7, 8))
    assert table.trim(1, 24) == (3,), "rows from 24 on see rows 0..3 and 8.."
    assert table.cover(1, 24, 28) == (20, (1, 4, 5, 6, 7, 8))


def test_a_table_knows_whether_any_open_sequence_has_a_policy() -> None:
    table = PageTable(8, 4)
    table.open(1)
    assert not table.has_policies
    table.open(2, Window(sinks=4, recent=16))
    table.reserve(2, 8)
    table.fork(3, 2, 8)
    table.close(2)
    assert table.has_policies, "the fork has the policy of its source"
    table.close(3)
    assert not table.has_policies


@pytest.mark.parametrize("seed", seeds(20, quick=6))
def test_two_tables_that_see_the_same_calls_agree_and_lose_no_page(seed):
    rng = random.Random(seed)
    first, second = PageTable(40, 4), PageTable(40, 4)
    lengths: dict[int, int] = {}
    for sequence in range(200):
        for table in (first, second):
            call = random.Random(seed * 1000 + sequence)
            try:
                if lengths and call.random() < 0.5:
                    source = call.choice(sorted(lengths))
                    table.fork(sequence, source, lengths[source])
                else:
                    table.open(sequence)
                table.reserve(sequence, call.randrange(1, 20))
            except Overloaded:
                table.close(sequence)
        if sequence in first:
            lengths[sequence] = 1
        if lengths and rng.random() < 0.6:
            gone = rng.choice(sorted(lengths))
            del lengths[gone]
            first.close(gone)
            second.close(gone)
        assert first.free == second.free
        assert all(first.pages(one) == second.pages(one) for one in lengths)
    for sequence in list(lengths):
        first.close(sequence)
    assert first.free == 40


def test_skipped_rows_take_no_pages_and_the_rows_after_them_follow_in_the_next_columns():
    table = PageTable(9, 4)
    table.open(1)
    assert table.place(1, 0, 6) == (0, (0, 1), [0, 1, 2, 3, 4, 5])
    table.skip(1, 1000)
    assert table.column(1, 1006) == 6
    assert table.missing_pages([(1, 1008)]) == []
    assert table.place(1, 1006, 1010) == (6, (0, 1, 2), [6, 7, 8, 9])
    assert table.slots(1, 1007, 1010) == [7, 8, 9]
    assert table.reservable_rows(1, 1010) == 9 * 4 - 10
    assert table.fork(2, 1, 1009) == PageCopy(2, 3, 1)
    assert (table.pages(2), table.column(2, 1009)) == ((0, 1, 3), 9)
    for sequence in (1, 2):
        table.close(sequence)
    assert table.free == 9


def test_a_window_hides_the_rows_before_skipped_ones_like_all_others():
    table = PageTable(9, 4)
    table.open(1, Window(sinks=4, recent=16))
    table.reserve(1, 12)
    table.skip(1, 1000)
    table.reserve(1, 1024)
    assert table.trim(1, 1020) == ()
    assert table.trim(1, 1024) == (1,), "rows from 1,008 on are still seen, in columns from 8 on"
    assert table.column(1, 1024) == 20
    assert list(table.slots(1, 1022, 1024)) == [22, 23]
