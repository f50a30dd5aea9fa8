"""Who goes next, how tokens are split, how pages and leases are counted: tables and properties."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsot.core.skeleton import Point
from specsot.errors import InvalidRequest
from specsot.params import Ask, Limits
from specsot_master.core.limits import split_budget
from specsot_master.core.plans.branches import critical_paths, pick_ready
from specsot_master.core.ring.admission import PageLedger, PlanSizes, grant_answer, grant_plan, own_pages
from specsot_master.core.ring.queue import Claim, pick_displaced, pick_fairest
from specsot_master.core.ring.ring_state import RingState
from specsot_master.core.sequence import first_lease, renewed_lease
from specsot_master.core.stats import RetryHints

RING = RingState(epoch=1, pages=10, page_rows=64, slots=8, max_positions=1000)


def point(id: int, length: int, *needs: int) -> Point:
    return Point(id, length, f"P{id}", None, needs)


DIAMOND = (point(1, 10), point(2, 50), point(3, 20, 1), point(4, 5, 2, 3), point(5, 40))


def test_a_critical_path_is_the_longest_chain_after_a_point() -> None:
    assert critical_paths(DIAMOND) == {1: 35, 2: 55, 3: 25, 4: 5, 5: 40}


@pytest.mark.parametrize(
    ("done", "taken", "places", "picked"),
    [
        (set[int](), [], 8, [2, 5, 1]),
        (set[int](), [], 2, [2, 5]),
        (set[int](), [2, 5], 8, [1]),
        ({1}, [1, 2, 5], 8, [3]),
        ({1, 2, 3}, [1, 2, 3, 5], 8, [4]),
        ({1, 2}, [1, 2, 3, 5], 8, []),
        (set[int](), [], 0, []),
    ],
)
def test_ready_points_longest_path_first(
    done: set[int], taken: list[int], places: int, picked: list[int]
) -> None:
    assert [one.id for one in pick_ready(DIAMOND, done, taken, places)] == picked


def test_equal_paths_go_in_id_order() -> None:
    assert [one.id for one in pick_ready([point(1, 9), point(2, 9)], set(), [], 8)] == [1, 2]


@pytest.mark.parametrize(
    ("claims", "winner"),
    [
        ([], None),
        ([Claim("a", "x", 0, 0, 1), Claim("b", "x", 0, 0, 0)], "b"),
        ([Claim("a", "x", 3, 0, 0), Claim("b", "y", 1, 1, 5)], "b"),
        ([Claim("a", "x", 2, 2, 0), Claim("b", "x", 2, 0, 1)], "b"),
    ],
)
def test_the_fairest_claim(claims: list[Claim], winner: str | None) -> None:
    found = pick_fairest(claims)
    assert (found.request if found else None) == winner


def claim(request: str, priority: int = 0, waited: float = 0.0, held: int = 0, arrival: int = 0) -> Claim:
    return Claim(request, f"client of {request}", held, 0, arrival, priority, waited)


@pytest.mark.parametrize(
    ("claims", "winner"),
    [
        ([claim("low", 0), claim("high", 1, held=9, arrival=9)], "high"),
        ([claim("low", -10), claim("usual", held=9)], "usual"),
        ([claim("low", 0, waited=9.9), claim("high", 1, held=1)], "high"),
        ([claim("low", 0, waited=10), claim("high", 1, held=1)], "low"),
        ([claim("low", 0, waited=10, held=2), claim("high", 1, held=1)], "high"),
        ([claim("old", 0, waited=1e6, held=1), claim("new", 0)], "new"),
        ([claim("old", -10, waited=200, arrival=0), claim("new", 10, arrival=1)], "old"),
    ],
)
def test_priorities_go_first_but_waiting_raises(claims: list[Claim], winner: str) -> None:
    for order in itertools.permutations(claims):
        found = pick_fairest(order, aging_seconds=10)
        assert found
        assert found.request == winner


def test_no_request_waits_forever_for_higher_priorities() -> None:
    """One slot is taken for a second each time, and a new request of the highest priority always waits."""
    patient, turns = claim("patient", -10), 0
    while True:
        new = [claim(f"new {turns}", 10, arrival=turns + 1)]
        found = pick_fairest([replace(patient, waited=float(turns)), *new], aging_seconds=10)
        assert found
        if found.request == "patient":
            break
        turns += 1
    assert turns == 200


def queue(clients: str, priorities: str = "") -> list[Claim]:
    """One claim for each letter, in order of arrival; a digit under it is its priority."""
    levels = [int(one) for one in priorities or "0" * len(clients)]
    return [
        Claim(f"{client}{n}", client, 0, 0, n, level)
        for n, (client, level) in enumerate(zip(clients, levels))
    ]


@pytest.mark.parametrize(
    ("waiting", "newcomer", "gone"),
    [
        ("", "a", None),
        ("aaaa", "a", None),
        ("aaaa", "b", "a3"),
        ("aaab", "b", "a2"),
        ("aabb", "b", None),
        ("aabb", "c", "b3"),
        ("ab", "c", None),
        ("abcabca", "b", None),
    ],
)
def test_who_makes_room_in_a_full_queue(waiting: str, newcomer: str, gone: str | None) -> None:
    found = pick_displaced(queue(waiting), Claim("new", newcomer, 0, 0, 99))
    assert (found.request if found else None) == gone


def test_the_lowest_priority_makes_room_first() -> None:
    found = pick_displaced(queue("aaaa", "1011"), Claim("new", "b", 0, 0, 99))
    assert found
    assert found.request == "a1"


@given(st.text("abcd", max_size=20), st.text("abcd", min_size=1, max_size=60))
def test_a_full_queue_ends_up_shared(waiting: str, newcomers: str) -> None:
    """Whoever is displaced had more places than whoever displaced it has then."""
    line = queue(waiting)
    for n, client in enumerate(newcomers, 100):
        newcomer = Claim(f"{client}{n}", client, 0, 0, n)
        gone = pick_displaced(line, newcomer)
        places = Counter(one.client for one in line)
        if gone is None:
            assert places[client] + 1 >= max(places.values(), default=0)
            continue
        line = [one for one in line if one is not gone] + [newcomer]
        assert places[gone.client] - 1 >= places[client] + 1


class TestHints:
    def test_until_something_is_known(self) -> None:
        assert RetryHints(2.5).refuse(0) == 2.5

    def test_each_caller_is_sent_to_a_place_of_its_own(self) -> None:
        hints = RetryHints(1)
        for now in (0, 2, 4):
            hints.on_departure(now)
        assert [hints.refuse(4.5) for _ in range(3)] == [2, 4, 6]
        hints.on_departure(6)
        assert hints.refuse(6) == 2

    def test_when_nothing_leaves_any_more(self) -> None:
        hints = RetryHints(1)
        hints.on_departure(0)
        hints.on_departure(1)
        assert hints.refuse(31) == 30
        assert hints.refuse(1000) == 60

    def test_the_shortest(self) -> None:
        hints = RetryHints(1)
        hints.on_departure(0)
        hints.on_departure(0.001)
        assert hints.refuse(0.001) == 0.1


@pytest.mark.parametrize(
    ("lengths", "total", "cap", "shares"),
    [
        ((60, 30, 10), 100, None, (60, 30, 10)),
        ((60, 30, 10), 3, None, (1, 1, 1)),
        ((1, 9999), 10, None, (1, 9)),
        ((50, 50), 101, None, (51, 50)),
        ((50, 50), 100, 20, (20, 20)),
        ((80,), 1024, None, (1024,)),
    ],
)
def test_budgets(lengths: tuple[int, ...], total: int, cap: int | None, shares: tuple[int, ...]) -> None:
    points = [point(id, length) for id, length in enumerate(lengths, 1)]
    assert tuple(split_budget(points, total, cap).values()) == shares


@given(
    st.lists(st.integers(1, 9999), min_size=1, max_size=16),
    st.integers(0, 5000),
    st.none() | st.integers(1, 300),
)
def test_budgets_use_all_tokens_and_leave_no_point_out(
    lengths: list[int], spare: int, cap: int | None
) -> None:
    points = [point(id, length) for id, length in enumerate(lengths, 1)]
    total = len(points) + spare
    whole = split_budget(points, total)
    assert sum(whole.values()) == total
    assert min(whole.values()) >= 1
    ordered = sorted(points, key=lambda one: one.length)
    assert all(whole[a.id] <= whole[b.id] + 1 for a, b in itertools.pairwise(ordered))
    assert split_budget(points, total, cap) == {id: min(share, cap or total) for id, share in whole.items()}


@pytest.mark.parametrize(
    ("position", "lease", "last", "renewed"),
    [
        (100, 356, 2000, None),
        (227, 356, 2000, None),
        (228, 356, 2000, 612),
        (400, 356, 2000, 656),
        (340, 356, 350, None),
    ],
)
def test_leases_are_renewed_when_half_is_used(
    position: int, lease: int, last: int, renewed: int | None
) -> None:
    assert first_lease(100, 256) == 356
    assert renewed_lease(position, lease, last, 256) == renewed


@pytest.mark.parametrize(
    ("length", "shared", "pages"), [(56, 0, 1), (57, 0, 2), (100, 60, 2), (100, 64, 1), (300, 130, 3)]
)
def test_pages_of_a_sequence_with_its_slots(length: int, shared: int, pages: int) -> None:
    assert own_pages(length, shared, RING) == pages


def ask(**limits: int) -> Ask:
    return Ask(prompt="?", limits=Limits(**limits))


def test_grants_cover_the_worst_case() -> None:
    assert grant_answer(40, ask(max_new_tokens=100), RING) == 3
    limits = ask(max_new_tokens=100, max_skeleton_tokens=100)
    # beside a prefix: skeleton 110 + 100 + 8 rows: 3 own pages; branch 100 + 20 + 100 + 50 + 80 + 8: 5 own
    assert grant_plan(PlanSizes(100, 110, 20), limits, RING) == 5


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [
        ({"max_new_tokens": 1000}, r"context length is 1000 tokens. However, you requested 1120"),
        ({"max_new_tokens": 881, "max_skeleton_tokens": 950}, r"you requested 1001 tokens"),
        ({"max_new_tokens": 700}, r"needs 14 KV pages of 64 rows, the ring has 10"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_figures(limits: dict[str, int], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        grant_plan(PlanSizes(100, 110, 20), ask(**limits), RING)


class TestThePageLedger:
    def test_a_request_is_charged_what_it_uses_but_at_least_its_grant(self) -> None:
        ledger = PageLedger(10)
        assert ledger.admit("a", 4)
        assert ledger.use_pages("a", 3)
        assert ledger.free == 6
        assert ledger.use_pages("a", 3)
        assert ledger.free == 4
        ledger.return_pages("a", 3)
        assert ledger.free == 6
        ledger.drop_grant("a")
        assert ledger.free == 7
        ledger.remove("a")
        assert ledger.free == 10

    def test_what_does_not_fit_changes_nothing(self) -> None:
        ledger = PageLedger(5)
        assert ledger.admit("a", 3)
        assert not ledger.admit("b", 3)
        assert not ledger.use_pages("a", 6)
        assert ledger.free == 2

    def test_free_pages_are_lacking_beyond_a_grant_and_may_be_used(self) -> None:
        """`RingTables.has_room` keeps what is lacking for requests that wait."""
        ledger = PageLedger(5)
        ledger.admit("a", 3)
        assert ledger.shortfall("a", 3) == 0
        assert ledger.use_pages("a", 3)
        assert ledger.shortfall("a", 1) == 1
        assert ledger.use_pages("a", 1)

    @given(
        st.lists(st.tuples(st.sampled_from("atgwl"), st.sampled_from("xyz"), st.integers(1, 6)), max_size=60)
    )
    def test_pages_are_never_promised_twice(self, moves: list[tuple[str, str, int]]) -> None:
        ledger, grants, used = PageLedger(12), dict[str, int](), dict[str, list[int]]()
        for move, who, pages in moves:
            if move == "a" and who not in grants and ledger.admit(who, pages):
                grants[who], used[who] = pages, []
            elif move == "t" and who in grants and ledger.use_pages(who, pages):
                used[who].append(pages)
            elif move == "g" and used.get(who):
                ledger.return_pages(who, used[who].pop())
            elif move == "w" and who in grants:
                ledger.drop_grant(who)
                grants[who] = 0
            elif move == "l":
                ledger.remove(who)
                grants.pop(who, None), used.pop(who, None)
            charged = sum(max(grants[one], sum(used[one])) for one in grants)
            assert ledger.free == 12 - charged >= 0
