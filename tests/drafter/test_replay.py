"""The tuner on what the real model did: never far below plain, never far behind the best fixed setting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from statistics import mean

import numpy as np
import pytest

from specsot_drafter.core.budget import BudgetPolicy, TreeOutcome
from tests.conftest import is_full, some
from tests.drafter.replay import SWEEP, Fixed, Offer, in_a_row, measured, replay, told_texts, trace

TOKENS = 200  # of each text
NOISES, MACHINES = ["calm", "noisy"], ["bf16", "int8"]
WAYS = [(machine, noise, live) for machine in MACHINES for noise in NOISES for live in (1, 4)]
PAIRS = 0, 3, 5, 6  # every two of machine, noise, live
EACH = [(machine, noise) for machine in MACHINES for noise in NOISES]


def policy(setting: str, machine: str) -> BudgetPolicy:
    return measured(machine=machine) if setting == "tuner" else Fixed(*SWEEP[setting])


def sweep() -> list[str]:
    """All fixed settings; or every second, the narrowest and the widest among them."""
    return [*SWEEP] if is_full() else [*SWEEP][::2]


def step(live: int) -> int:
    """Every which text, or group of texts, is replayed."""
    return 2 if live == 1 and is_full() else 6


@cache
def gains(setting: str, machine: str, noise: str, live: int) -> list[float]:
    """Times plain decoding, for some texts, or groups of texts."""
    return [
        replay(None, noise, first, live, machine=machine).run(TOKENS)
        / replay(policy(setting, machine), noise, first, live, machine=machine).run(TOKENS)
        for first in range(0, len(trace().texts), step(live))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "noise", "live"), some(WAYS, *PAIRS))
def test_never_below_097_of_plain_for_200_tokens(machine: str, noise: str, live: int) -> None:
    """Each text alone, by a tuner that knows nothing yet."""
    assert min(gains("tuner", machine, noise, live)) >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "noise"), some(EACH, 3))
def test_of_many_texts_none_is_below_097_of_plain_and_none_is_given_up_for_good(
    machine: str, noise: str
) -> None:
    """What was risked on texts before is not missing to the next. The first lap with drafts of the 8-bit
    machine takes as long as two plain ones: a tuner that believed it drafted nothing for ever.
    """
    found = [*in_a_row(measured(machine=machine), noise, machine, TOKENS)]
    assert min(found) >= 0.97
    assert mean(found) >= 0.9 * max(mean(gains(name, machine, noise, 1)) for name in sweep())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "noise"),
    some([(kind, how) for kind in ("int4", "calm4") for how in (*NOISES, "loaded")], 1, 5),
)
def test_where_little_pays_and_curves_say_too_little_or_too_much(machine: str, noise: str) -> None:
    """A base in 4 bits, text after text: the aim, 0.97, is missed here by some. What growing took while the
    machine was slow made one rest for five texts and longer.
    """
    found = [*in_a_row(measured(machine=machine), noise, machine, TOKENS)]
    assert min(found) >= 0.95
    assert mean(found) >= 0.9 * max(mean(gains(name, machine, noise, 1)) for name in sweep())


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "noise", "live"), some(WAYS, *PAIRS))
def test_never_a_tenth_behind_the_best_fixed_setting(machine: str, noise: str, live: int) -> None:
    best = max(mean(gains(name, machine, noise, live)) for name in sweep())
    assert mean(gains("tuner", machine, noise, live)) >= 0.9 * best


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "noise"), some([("vnni4", "calm"), ("vnni8", "loaded")], 0))
def test_curves_that_a_busy_start_spoilt_cost_a_new_server_little(machine: str, noise: str) -> None:
    """No drafts pay there. First answers took 0.81 of plain where the tuner believed what it was told."""
    firsts = range(0, len(trace().texts), 2)
    plain = sum(replay(None, noise, first, machine=machine).run(TOKENS) for first in firsts)
    tuned = (replay(measured(machine=machine), noise, first, machine=machine).run(TOKENS) for first in firsts)
    assert plain / sum(tuned) >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("live", some([64, 8], 0))
def test_many_texts_on_a_gpu_lose_little_to_a_head_that_is_never_right(live: int) -> None:
    """Their prompts are not caught up with, and a first draft for all of them took four plain laps."""
    plain = replay(None, "calm", 0, live, machine="gpu").run(TOKENS)
    turning = replay(measured(machine="gpu"), "calm", 0, live, machine="gpu")
    turning.texts = [[_wrong(offer) for offer in text] for text in turning.texts]
    assert plain / turning.run(TOKENS) >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "busy"), some([("int8", 4), ("int8", 10), ("int4", 4), ("calm4", 10)], 1)
)
def test_a_busy_minute_is_not_believed_for_long(machine: str, busy: int) -> None:
    """Sixty laps while neighbours compute, then texts that drafts hardly pay for: 0.89 where plain laps were
    believed to take as long as then."""
    tuner = measured(machine=machine)
    turning = replay(tuner, "calm", busy, machine=machine)
    calm = turning.machine
    turning.noise = [3 * one for one in turning.noise]
    turning.machine = replace(calm, hop=calm.hop + 8e-3, handover=calm.handover + 2e-3)
    while turning.laps < 60:
        turning.run(1)
    for text in range(4):
        after = replay(tuner, "calm", text, machine=machine)
        after.follow(turning)
        assert replay(None, "calm", text, machine=machine).run(TOKENS) / after.run(TOKENS) >= 0.93
        turning = after


GPU_SWEEP = [
    (1, 1),
    (2, 2),
    (2, 3),
    (3, 3),
    (3, 7),
    (4, 4),
    (5, 5),
    (5, 11),
    (6, 7),
    (6, 20),
]  # levels, nodes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "live", "share"),
    some(
        [
            *(("h100", live, share) for live in (1, 8, 64) for share in (1.0, 0.8, 0.7, 0.5, 0.2)),
            *(("small", live, share) for live, share in ((4, 1.0), (4, 0.9), (1, 0.8), (1, 0.5))),
        ],
        *(8, 10, 15, 18),
    ),
)
def test_on_a_gpu_it_is_never_a_tenth_behind_and_never_below_097_of_plain(
    machine: str, live: int, share: float
) -> None:
    """Heads that are right often or seldom; a new server's first 300 tokens of each text. Levels are grown at
    once there, so how many is chosen before, together with the nodes: 64 texts were 11 % behind with two of
    both, as a third node of two levels brings nothing. Plain laps are looked at no more often than that pays.
    Where the host takes most of a lap, trials of one level say nothing: 0.98 where whole trees bring 1.6.
    """

    def run(make: Callable[[], BudgetPolicy | None]) -> float:
        seconds = 0.0
        for texts in (drafted[first : first + live] for first in range(0, len(drafted), live)):
            turning = replay(make(), "calm", 0, live, 5e-6, machine)
            turning.texts, turning.noise, turning.at = texts, (1.0,), [0] * live
            seconds += turning.run(300)
        return seconds

    drafted = told_texts(share, max(live, 6))[: max(live, 6) // live * live]
    plain, tuner = run(lambda: None), run(partial(measured, machine=machine))
    best = min(run(partial(Fixed, levels, nodes, True)) for levels, nodes in GPU_SWEEP)
    assert plain / tuner >= 0.97
    assert best / tuner >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("row_hop", some([1e-3, 3e-3, 10e-3, 40e-3], 0))
@pytest.mark.parametrize("live", [1, 4])
def test_never_below_097_of_plain_on_a_narrow_link(row_hop: float, live: int) -> None:
    """Where a row's bytes take from a fifteenth of a lap to three laps."""
    for first in range(0, len(trace().texts), 6):
        plain = replay(None, "noisy", first, live, row_hop).run(TOKENS)
        assert plain / replay(measured(), "noisy", first, live, row_hop).run(TOKENS) >= 0.97


def test_fewer_rows_are_sent_where_bytes_are_dear() -> None:
    """Seconds of hops by rows are learned from laps, and count as what rows cost."""
    tuner = measured()
    tuner.record_lap([TreeOutcome(1, 21, (0.9,), 1)])
    worth = np.linspace(0.9, 0.05, 20)
    before = tuner.count_rows(worth, 1, 1)
    for rows in (1, 5, 2, 9, 3, 7):
        tuner.costs.record_hop(True, 2e-3 + 4e-3 * rows, 14e-3, rows)
    assert float(tuner.costs.tree_rows(1, 8)) == pytest.approx(
        float(measured().costs.tree_rows(1, 8)) + 32e-3
    )
    assert tuner.count_rows(worth, 1, 1) < before


@pytest.mark.slow
@pytest.mark.parametrize("scale", some([0.5, 2.0], 0, 1))
def test_a_machine_that_was_busy_while_it_was_measured_changes_nothing(scale: float) -> None:
    tuned = [replay(measured(scale), "noisy", first, 4).run(TOKENS) for first in (0, 5)]
    told = [replay(measured(), "noisy", first, 4).run(TOKENS) for first in (0, 5)]
    assert sum(tuned) == pytest.approx(sum(told), rel=0.06)


def test_resting_costs_one_part_in_a_hundred() -> None:
    """Where nothing is ever accepted, beyond what the first trials may lose."""
    turning = replay(measured(), "calm", live=4)
    turning.texts = [[_wrong(offer) for offer in text] for text in turning.texts]
    turning.run(TOKENS)
    before = turning.tokens
    seconds = turning.run(4 * TOKENS)
    plain = (turning.tokens - before) / 4 * float(turning.lap.at(4))
    assert plain / seconds >= 0.99


@pytest.mark.slow
def test_drafts_return_when_the_text_does() -> None:
    """Four hundred laps of a text that the head cannot guess; then one it can."""
    tuner = measured()
    plain, chain = (
        [replay(policy, "calm", first).run(TOKENS) for first in range(0, len(trace().texts), 2)]
        for policy in (None, Fixed(*SWEEP["chain 1"]))
    )
    good = [one / other for one, other in zip(plain, chain)]
    best = 2 * good.index(max(good))
    turning = replay(tuner, "calm", best)
    hopeless, turning.texts = turning.texts, [[_wrong(offer) for offer in text] for text in turning.texts]
    turning.run(2 * TOKENS)
    turning.texts = hopeless
    turning.run(TOKENS)
    plain = replay(None, "calm", best).run(TOKENS)
    assert plain / turning.run(TOKENS) > 1.05


def _wrong(offer: Offer) -> Offer:
    return replace(offer, right=np.zeros_like(offer.right))
