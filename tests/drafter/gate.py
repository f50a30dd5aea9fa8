"""The gate of the draft policy: every recorded trace, with the policy and with fixed settings.

    python -m tests.drafter.gate [MACHINE ...]    # the table: policy | best fixed, and what the gate says
    python -m tests.drafter.gate --fixed          # measure the fixed settings anew, after a change to replays

A trace is a machine (what steps take there), a series of noise, a number of sequences written together, and
a head (`recorded` drafts of SmolLM2, or one that is right as often as a share of `RANKS` says). One server
answers all texts of a trace one after another, 200 tokens each. Figures are tokens per second, times those
of the baseline, which drafts nothing. `gate.json` holds, by trace, those of the best fixed setting (the
baseline is one of them).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from specsot_drafter.core.budget import BudgetPolicy
from tests.drafter.replay import SWEEP, Fixed, Offer, measured, replay, told_texts, trace

TOKENS = 200  # of each text
MADE_UP_GROUPS = 3  # groups of texts that a made-up head drafts for
KNOWN = Path(__file__).parent / "gate.json"
# Of the best fixed setting: on average, and of every trace.
MEAN, LEAST = 0.97, 0.90
# Of the baseline: a head that is never right, over 200 tokens; the same once drafting is paused.
NEVER_RIGHT, PAUSED = 0.97, 0.99
# Tokens of answers, one after the other, where clients ask again: drawn once from 40 to 256.
LENGTHS = tuple(int(number) for number in np.random.default_rng(5).integers(40, 256, 97))
FIXED = SWEEP | {"tree 3 of 2": (2, 3, True), "chain 4": (4, 4, False), "tree 7 of 3": (3, 7, True)}
Make = Callable[[], BudgetPolicy | None]


class Trace(NamedTuple):
    """head: None for recorded drafts; else how often a made-up head is right, as a share of `RANKS`."""

    machine: str
    noise: str
    live: int
    head: float | None = None

    def __str__(self) -> str:
        head = "recorded" if self.head is None else f"right {self.head:g}"
        return f"{self.machine} {self.noise} {self.live} {head}"


CPU = ("bf16", "int8", "int4", "vnni8", "vnni4", "calm4")
NOISES = ("calm", "noisy", "loaded")
TRACES = [
    *(Trace(machine, noise, live) for machine in CPU for noise in NOISES for live in (1, 4)),
    *(Trace(machine, noise, 1) for machine in ("small", "near", "card") for noise in ("calm", "noisy")),
    *(Trace(machine, "calm", live) for machine in ("gpu", "h100") for live in (1, 8, 64)),
    *(Trace("h100", "calm", live, head) for live in (1, 8, 64) for head in (1.0, 0.7, 0.5, 0.2)),
    *(Trace("small", "calm", 4, head) for head in (1.0, 0.5)),
    *(Trace("h200", "device", live, head) for live in (1, 8, 64) for head in (0.85, 0.75, 0.5)),
]


class Figures(NamedTuple):
    """Times the baseline. all: of all texts; least: of the worst group of texts. never_right: of a new
    server's first 200 tokens, by a head that is never right; paused: of 800 tokens of the same texts, 1,000
    tokens later.
    """

    all: float
    least: float
    never_right: float
    paused: float


def _groups(one: Trace) -> Iterator[list[list[Offer]]]:
    """Texts that are written together, group after group."""
    texts = trace().texts if one.head is None else told_texts(one.head, max(6, MADE_UP_GROUPS * one.live))
    for first in range(0, len(texts), one.live):
        yield [texts[(first + each) % len(texts)] for each in range(one.live)]


def seconds(one: Trace, make: Make) -> list[float]:
    """Seconds of every group of texts, by one policy."""
    policy, before, found = make(), None, list[float]()
    for number, texts in enumerate(_groups(one)):
        turning = replay(policy, one.noise, number, one.live, machine=one.machine)
        if one.head is not None:
            turning.row_hop = 0.0 if one.noise == "device" else 5e-6  # one process, one device
            turning.lengths = LENGTHS if one.noise == "device" else ()
            turning.left = [turning._next_length() for _ in turning.texts]
            turning.noise = (1.0,) if one.noise == "calm" else turning.noise
        turning.texts = texts
        turning.at = [23 * (row // len(trace().texts)) % len(text) for row, text in enumerate(texts)]
        if before:
            turning.follow(before)
        found.append(turning.run(TOKENS))
        before = turning
    return found


def _wrong(offer: Offer) -> Offer:
    return replace(offer, right=np.zeros_like(offer.right))


def figures(one: Trace) -> Figures:
    make = partial(measured, machine=one.machine)
    baseline, ours = seconds(one, lambda: None), seconds(one, make)
    worst = min(base / mine for base, mine in zip(baseline, ours))
    return Figures(sum(baseline) / sum(ours), worst, *never_right(one, make()))


def never_right(one: Trace, policy: BudgetPolicy) -> tuple[float, float]:
    """Times the baseline: the first 200 tokens of a new server's first texts, and 800 after 1,000."""
    both = [replay(each, one.noise, 0, one.live, machine=one.machine) for each in (policy, None)]
    for turning in both:
        turning.texts = [[_wrong(offer) for offer in text] for text in next(_groups(one))]
    ratios = list[float]()
    for tokens in (TOKENS, 4 * TOKENS, 4 * TOKENS):
        ours, baseline = (turning.run(tokens) for turning in both)
        ratios.append(baseline / ours)
    return ratios[0], ratios[-1]


def best_fixed(one: Trace) -> tuple[float, str]:
    """The best fixed setting, times the baseline, and its name."""
    baseline = sum(seconds(one, lambda: None))
    ratios = {name: baseline / sum(seconds(one, partial(Fixed, *how))) for name, how in FIXED.items()}
    best = max(ratios, key=ratios.__getitem__)
    return (ratios[best], best) if ratios[best] > 1 else (1.0, "none")


def known() -> dict[str, Any]:
    return json.loads(KNOWN.read_text())


def table(found: Mapping[str, Figures]) -> str:
    """One line a trace, then what the gate asks for. `<`: below what it asks for."""
    best = known()
    lines = [f"{'trace':26} {'policy':>6} {'best fixed':>18} {'share':>7} {'worst text':>10} "]
    lines[0] += f"{'never right':>11} {'paused':>7}"
    for name, one in found.items():
        fixed, setting = best[name]
        flags = [(one.all / fixed, LEAST), (one.never_right, NEVER_RIGHT), (one.paused, PAUSED)]
        share, wrong, paused = (f"{value:.3f}{'<' if value < aim else ' '}" for value, aim in flags)
        lines.append(
            f"{name:26} {one.all:6.3f} {fixed:6.3f} {setting:>11} {share:>7} {one.least:10.3f} {wrong:>11} "
            f"{paused:>7}"
        )
    return "\n".join([*lines, summary(found)])


def summary(found: Mapping[str, Figures]) -> str:
    shares = [one.all / known()[name][0] for name, one in found.items()]
    each = list(found.values())
    return (
        f"{mean(shares):.3f} of the best fixed setting on average (asked: {MEAN}), "
        f"{min(shares):.3f} at least ({LEAST}); worst text {min(one.least for one in each):.3f}; never right "
        f"{mean(one.never_right for one in each):.3f}, {min(one.never_right for one in each):.3f} at least "
        f"({NEVER_RIGHT}); paused {mean(one.paused for one in each):.3f}, "
        f"{min(one.paused for one in each):.3f} at least ({PAUSED})"
    )


def measure(traces: Sequence[Trace], processes: int = 2) -> dict[str, Figures]:
    with ProcessPoolExecutor(processes) as pool:
        return dict(zip(map(str, traces), pool.map(figures, traces)))


def record_fixed(traces: Sequence[Trace]) -> None:
    """Write the figures of the best fixed settings anew."""
    told = known()
    with ProcessPoolExecutor(2) as pool:
        for one, fixed in zip(traces, pool.map(best_fixed, traces)):
            told[str(one)] = fixed
    lines = [f" {json.dumps(name)}: {json.dumps(one)}" for name, one in told.items()]
    KNOWN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    machines = [word for word in sys.argv[1:] if not word.startswith("-")]
    traces = [one for one in TRACES if not machines or one.machine in machines]
    if "--fixed" in sys.argv:
        record_fixed(traces)
    print(table(measure(traces)))


if __name__ == "__main__":
    main()
