"""Replays steps of the real model for a drafting policy: recorded drafts and verdicts, and what steps took.

`smollm2_steps.json` is of SmolLM2-135M-Instruct with its head on two cores. `texts` holds greedy answers (6
of
MT-bench, 4 of instructions, 4 of GSM8K, 4 of HumanEval), for every token the best candidates of a tree of
width 4: per candidate a letter for its parent and whether it was right, and one for its log-probability.
`calm`, `noisy`, `loaded` and `device` (on an H200) hold what steps really took, in times of the curve, one
after another.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np

from specsot.core.cost_curve import CostCurve
from specsot.core.draft_pause import FEATURE_RING_ROWS
from specsot.members import Curve, TreeShape
from specsot_drafter.core.budget import ROOT_ONLY, UNKNOWN_SECONDS, BudgetPolicy, StepSeconds, TreeOutcome
from specsot_drafter.core.control import make_budget
from specsot_drafter.core.selection import (
    Candidates,
    Floats,
    KeepGrowing,
    best_each,
    depth_masses,
    limit_depths,
)
from specsot_drafter.speculator import IDLE_PAUSE_STEPS
from specsot_model.cuda_graphs import BUCKETS

LAYOUT = (4, 5, 4, 3, 2, 2)  # candidates kept per depth
DEPTHS = np.repeat(np.arange(1, len(LAYOUT) + 1), LAYOUT)
FIRST, SCALE = 35, 8  # the letter of 0, and parts of a log-probability that one letter is


@dataclass(frozen=True, slots=True)
class Offer:
    """What was drafted behind one token: [n] parents and log-probabilities, and which were right."""

    parents: np.ndarray
    scores: np.ndarray
    right: np.ndarray


@dataclass(frozen=True, slots=True)
class Machine:
    """What steps take on it. step, level: seconds per rows; told: of the same as measured before, where that
    differs. growth: seconds that drafting takes besides its levels. hop: of a plain step beside its
    computing;
    handover: what a drafted one takes more. cold: what the first of them takes more than that.
    catching_up: for how long the end of a rest holds up whoever computes with the drafter. prompt: rows of
    each
    text that are not caught up with when it begins; row: seconds of one. graphs: all levels grow at once.
    switch: what the first plain step behind drafts takes more, and the first with drafts behind plain ones.
    waits: plain steps behind a rest until there are drafts. deciding: what choosing anew takes.
    host: seconds that the host takes besides all that, by the number of sequences: of a step without drafts,
    and of one with drafts. overlaps: a step with drafts takes as long as its host or its device, whichever
    is slower, and the host says how long it waited; `host` then holds all of the host's seconds.
    """

    step: Curve
    level: Curve
    told: tuple[Curve, Curve]
    growth: float = 0.0
    hop: float = 0.0
    handover: float = 0.5e-3
    cold: float = 0.0
    catching_up: float = 0.0
    prompt: int = 0
    row: float = 0.0
    graphs: bool = False
    switch: tuple[float, float] = (0.0, 0.0)
    waits: int = 0
    deciding: float = 0.0
    host: tuple[Curve, Curve] = ((), ())
    overlaps: bool = False


# As told and as steps really were, one thread beside other processes, weights of 8 bits.
INT8_TOLD: Curve = ((1, 2.27e-3), (2, 2.53e-3), (4, 3.08e-3), (8, 3.7e-3), (16, 5.22e-3), (32, 8.71e-3),
                    (64, 15.7e-3), (128, 31.0e-3))  # fmt: skip
INT8_STEP: Curve = (
    (1, 4.15e-3),
    (2, 4.5e-3),
    (4, 5.0e-3),
    (8, 6.0e-3),
    (16, 8.2e-3),
    (32, 12.9e-3),
    (64, 23e-3),
)
INT8_LEVEL_TOLD: Curve = ((1, 0.27e-3), (4, 0.31e-3), (16, 0.69e-3), (64, 2.02e-3))
INT8_LEVEL: Curve = ((1, 0.45e-3), (4, 0.5e-3), (16, 0.9e-3), (64, 2.4e-3))
INT8 = Machine(INT8_STEP, INT8_LEVEL, (INT8_TOLD, INT8_LEVEL_TOLD), 0.8e-3, 0.6e-3, 1.0e-3, 4e-3)
# Two threads beside other processes, weights of 4 bits, as traced on 2026-11-26: rows beyond two cost far
# more than the curve says, and so does a level.
INT4_TOLD: Curve = ((1, 7.53e-3), (2, 8.15e-3), (4, 10.7e-3), (8, 15.59e-3), (16, 23.47e-3), (32, 41.67e-3),
                    (64, 74.23e-3), (128, 134.8e-3))  # fmt: skip
INT4_STEP: Curve = ((1, 7.65e-3), (2, 7.75e-3), (3, 10.3e-3), (4, 13.1e-3), (5, 15.5e-3), (9, 28.64e-3),
                   (13, 40.7e-3))  # fmt: skip
INT4_LEVEL_TOLD: Curve = ((1, 0.49e-3), (4, 0.87e-3), (16, 4.2e-3), (64, 15.5e-3))
INT4_LEVEL: Curve = ((1, 1.6e-3), (4, 2.0e-3), (16, 4.5e-3), (64, 16e-3))
INT4_BOTH = INT4_TOLD, INT4_LEVEL_TOLD
INT4 = Machine(INT4_STEP, INT4_LEVEL, INT4_BOTH, 0.6e-3, 1.5e-3, 1.5e-3, 10e-3, 5e-3)
# AVX512-VNNI, two threads beside seven other processes (`recording.py`): curves were told that the start of a
# busy machine had spoilt, in 4 bits 41 times what a step took and flat.
VNNI8_TOLD: Curve = ((1, 7.54e-3), (2, 7.87e-3), (4, 9.47e-3), (8, 13.1e-3), (16, 15e-3), (32, 25.2e-3),
                     (64, 45.8e-3), (128, 89.7e-3))  # fmt: skip
VNNI8_STEP: Curve = ((1, 15.1e-3), (2, 16.3e-3), (3, 17.3e-3), (4, 18.3e-3), (6, 21e-3), (9, 22.7e-3),
                    (13, 26.4e-3), (21, 35.5e-3))  # fmt: skip
VNNI8_LEVELS: tuple[Curve, Curve] = (
    ((1, 7.32e-3), (4, 7.32e-3)),
    ((1, 1.76e-3), (4, 1.76e-3), (16, 15.4e-3), (64, 15.4e-3)),
)
VNNI8 = Machine(
    VNNI8_STEP, VNNI8_LEVELS[0], (VNNI8_TOLD, VNNI8_LEVELS[1]), 2.1e-3, 1.1e-3, 5.5e-3, 10e-3, 3e-3
)
VNNI4_TOLD: Curve = (
    (1, 1.3186),
    (2, 1.3186),
    (4, 1.319),
    (16, 1.3195),
    (32, 1.3195),
    (64, 1.56),
    (128, 1.56),
)
VNNI4_STEP: Curve = ((1, 31.7e-3), (2, 24.7e-3), (3, 43.3e-3), (4, 46.8e-3), (6, 49.2e-3), (13, 106e-3),
                    (21, 128e-3))  # fmt: skip
VNNI4_LEVELS: tuple[Curve, Curve] = (
    ((1, 18.1e-3), (4, 27e-3)),
    ((1, 1.12e-3), (4, 3.03e-3), (16, 4.23e-3), (64, 11.4e-3)),
)
VNNI4 = Machine(VNNI4_STEP, VNNI4_LEVELS[0], (VNNI4_TOLD, VNNI4_LEVELS[1]), 0.0, 4.5e-3, 14.6e-3, 10e-3, 3e-3)
# The same in 4 bits with less beside it, on 2026-11-26: rows cost less than the curve says, and levels more.
CALM4_TOLD: Curve = ((1, 4.6e-3), (2, 5.8e-3), (4, 7.0e-3), (8, 8.5e-3), (16, 13.3e-3), (32, 22.9e-3),
                     (64, 38.1e-3), (128, 69.7e-3))  # fmt: skip
CALM4_STEP: Curve = ((1, 6.2e-3), (2, 6.9e-3), (3, 7.6e-3), (4, 8.0e-3), (6, 8.5e-3), (9, 9.5e-3),
                    (13, 12.4e-3), (21, 15.6e-3))  # fmt: skip
CALM4_LEVEL: Curve = ((1, 1.15e-3), (4, 1.25e-3))
CALM4 = Machine(CALM4_STEP, CALM4_LEVEL, (CALM4_TOLD, INT4_LEVEL_TOLD), 0.1e-3, 0.7e-3, 1.7e-3, 10e-3, 3e-3)
# Many texts on an H100, an 8B base and its head captured in graphs, after measured steps of 64 with drafts
# (2026-11-26); what a first draft's prompts take is inferred from its 35 ms.
GPU_STEP: Curve = ((1, 5.6e-3), (8, 5.7e-3), (64, 6.3e-3), (128, 8.5e-3), (320, 15.1e-3), (512, 18e-3),
                  (1024, 30e-3))  # fmt: skip
GPU_LEVEL: Curve = ((1, 0.25e-3), (64, 0.35e-3), (256, 0.6e-3))
GPU = Machine(GPU_STEP, GPU_LEVEL, (GPU_STEP, GPU_LEVEL), 3e-3, 2e-3, 2.6e-3, 0.0, 0.0, 256, 0.7e-6, True)
# The same after steps of `GpuLoop` on an H100 on 2026-11-26: graphs of so many rows, whatever part of them is
# filled. What is between those that were run is a guess; the host takes 5 us a row here.
STEPS = {1: 5.5e-3, 2: 5.55e-3, 4: 5.7e-3, 8: 6.2e-3, 16: 6.3e-3, 32: 6.45e-3, 48: 6.7e-3, 64: 6.9e-3,
         96: 7.5e-3, 128: 7.9e-3, 160: 8.2e-3, 200: 8.5e-3, 256: 9.8e-3, 384: 12.2e-3,
         512: 16e-3}  # fmt: skip
H100_STEP: Curve = tuple(
    (rows, STEPS[step]) for step, last in zip(STEPS, (0, *STEPS)) for rows in {last + 1, step}
)
H100_TOLD: Curve = tuple((rows, STEPS[rows] - 0.6e-3) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512))
H100_LEVEL: Curve = ((1, 0.3e-3), (32, 0.35e-3), (256, 0.65e-3))
H100 = Machine(
    H100_STEP, H100_LEVEL, (H100_TOLD, H100_LEVEL), 0.45e-3, 0.2e-3, 0.7e-3, 0.0, 0.0, 256, 0.7e-6, True
)
# The recorded model itself on an H100, after `specsot bench tuner --device cuda`, 2026-11-27: steps of 1.29
# ms
# without drafts, 3.5 with one and 4.2 with 24. The host takes most of it; how much where is a guess.
SMALL_STEP: Curve = ((1, 0.85e-3), (8, 0.95e-3), (32, 1.0e-3), (64, 1.1e-3))
SMALL_LEVEL: Curve = ((1, 0.1e-3), (64, 0.1e-3))
SMALL = Machine(SMALL_STEP, SMALL_LEVEL, (SMALL_STEP, SMALL_LEVEL), 1.1e-3, 0.45e-3, 1.0e-3, graphs=True)
# The same where the drafter is told on the thread that verifies, traced on an H100: 1.36 and 3.45 ms whatever
# the tree. Of that a stage is told to compute for 2.4 ms; steps begun late take longer, twice at each change.
NEAR_STEP: Curve = ((1, 0.95e-3), (2, 2.4e-3), (64, 2.6e-3))
NEAR_LEVELS: tuple[Curve, Curve] = ((1, 0.01e-3), (64, 0.01e-3)), ((1, 0.08e-3), (64, 0.08e-3))
NEAR = Machine(NEAR_STEP, NEAR_LEVELS[0], (SMALL_STEP, NEAR_LEVELS[1]), 0.13e-3, 0.41e-3, 0.45e-3, 4e-3,
               graphs=True, switch=(4e-3, 3.5e-3))  # fmt: skip
# The same as traced at `e55570cd`: 1.22 ms, 2.78 with a fixed tree; the first plain step behind drafts took
# 1.3 more, behind a rest came two plain steps and one that took 3.1 more, and choosing a tree anew took 1.
CARD_STEP: Curve = ((1, 0.85e-3), (2, 1.9e-3), (64, 2.05e-3))
CARD = Machine(CARD_STEP, NEAR_LEVELS[0], (SMALL_STEP, NEAR_LEVELS[1]), 0.1e-3, 0.37e-3, 0.3e-3, 4e-3,
               graphs=True, switch=(1.3e-3, 3.1e-3), waits=2, deciding=1e-3)  # fmt: skip

# Qwen2.5-Coder-1.5B in bf16 with its bundled head on an H200, traced on 2026-12-01 while it was served:
# steps without drafts took 1.5, 2.0 and 3.3 ms with 1, 8 and 64 sequences. Steps with trees of 8 levels and
# 24 nodes (8 with 64 sequences) took 2.1, 3.0 and 6.1 ms, of which the host waited for the device for 0.7,
# 0.7 and 0.2 ms. Steps with trees of 4 levels and 16 nodes took 1.9 ms, with a wait of 0.35 ms.
H200_STEP: Curve = ((1, 1.45e-3), (2, 1.5e-3), (8, 1.55e-3), (16, 1.7e-3), (32, 1.9e-3), (64, 2.3e-3),
                    (128, 2.57e-3), (256, 2.91e-3), (512, 3.9e-3))  # fmt: skip
H200_LEVEL: Curve = ((1, 0.04e-3), (4, 0.05e-3), (16, 0.06e-3), (64, 0.07e-3))
H200_HOST: tuple[Curve, Curve] = (
    ((1, 0.06e-3), (8, 0.49e-3), (64, 1.0e-3)),
    ((1, 1.5e-3), (8, 2.3e-3), (64, 5.9e-3)),
)
H200 = Machine(
    H200_STEP, H200_LEVEL, (H200_STEP, H200_LEVEL), growth=0.05e-3, handover=0.1e-3, prompt=100, row=4e-6,
    graphs=True, switch=(1e-3, 1.1e-3), waits=2, deciding=0.9e-3, host=H200_HOST, overlaps=True,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trace:
    machines: dict[str, Machine]
    noise: dict[str, list[float]]
    texts: list[list[Offer]]


@cache
def trace() -> Trace:
    told = json.loads((Path(__file__).parent / "smollm2_steps.json").read_text())
    curves = [tuple((int(rows), seconds) for rows, seconds in told[name]) for name in ("step", "level")]
    texts = [[_offer(line) for line in text] for text in told["texts"]]
    bf16 = Machine(curves[0], curves[1], (curves[0], curves[1]))
    machines = {"bf16": bf16, "int8": INT8, "int4": INT4, "vnni8": VNNI8, "vnni4": VNNI4, "calm4": CALM4}
    machines |= {"gpu": GPU, "h100": H100, "small": SMALL, "near": NEAR, "card": CARD, "h200": H200}
    return Trace(machines, {name: told[name] for name in ("calm", "noisy", "loaded", "device")}, texts)


def _offer(line: str) -> Offer:
    letters = np.array([ord(letter) - FIRST for letter in line]).reshape(-1, 2)
    there = letters[:, 0] >= 0
    scores = np.where(there, -letters[:, 1] / SCALE, -np.inf)
    return Offer(np.where(there, letters[:, 0] // 2, 0), scores, there & (letters[:, 0] % 2 == 1))


# How often each of a node's guesses is right, best first: a head that brings 6.13 tokens a step with 60
# nodes.
RANKS = np.array((0.859, 0.041, 0.009, 0.005))


def told_texts(share: float, texts: int, tokens: int = 150) -> list[list[Offer]]:
    """Drafted for by a head whose guesses are right by rank, `share` times as often, and which knows."""
    chances, scores, parents, below = share * RANKS, list[float](), list[int](), dict[int, int]()
    kept = [(0, 0.0)]  # numbers and scores of the level above
    for width in LAYOUT:
        found = sorted(
            (
                (-score - np.log(chance), above, rank)
                for above, score in kept
                for rank, chance in enumerate(chances)
            )
        )[:width]
        kept = []
        for worst, above, rank in found:
            scores.append(-worst)
            parents.append(above)
            below[above * len(chances) + rank] = len(scores)
            kept.append((len(scores), -worst))
    draws, edges = np.random.default_rng(3), np.cumsum(chances)
    told, whole = (np.array(parents), np.array(scores)), list[list[Offer]]()
    for _ in range(texts):
        whole.append([])
        for ranks in np.searchsorted(edges, draws.random((tokens, len(LAYOUT)))).tolist():
            right, node = np.zeros(len(scores), bool), 0
            for rank in ranks:
                node = below.get(node * len(chances) + rank, 0) if rank < len(chances) else 0
                if not node:
                    break
                right[node - 1] = True
            whole[-1].append(Offer(*told, right))
    return whole


class Fixed(BudgetPolicy):
    """So many levels and nodes in every step, chains where wide is false; for comparisons."""

    def __init__(self, levels: int, nodes: int, wide: bool) -> None:
        self.levels, self.nodes, self.width = levels, nodes, None if wide else 1

    def plan_levels(self, live: int, most: int, due: int = 0, beside: int = 0) -> int:
        return min(self.levels, most)

    def predict_nodes(self, live: int, levels: int, most: int) -> int:
        return self.nodes

    def select(self, values: Floats, levels: int, most: int) -> np.ndarray:
        return best_each(values, self.nodes)


PLAIN = None
SWEEP = {
    "chain 1": (1, 1, False),
    "chain 2": (2, 2, False),
    "chain 3": (3, 3, False),
    "chain 5": (5, 5, False),
    "tree 8": (3, 8, True),
    "tree 12": (4, 12, True),
    "tree 20": (6, 20, True),
}


# Steps until a client's next question has been read, and the seconds that reading it takes more.
AWAY = 2
READING = 3e-3


@dataclass(slots=True)
class Replay:
    """Turns steps of `live` texts, and begins each anew where it ends. seconds, tokens: so far; plain: what
    the same tokens take without drafts, under the same noise.
    """

    policy: BudgetPolicy | None
    texts: Sequence[Sequence[Offer]]
    noise: Sequence[float]
    machine: Machine
    row_hop: float
    step: CostCurve = field(init=False)
    level: CostCurve = field(init=False)
    # Seconds of the host by sequences: of a step without drafts, and of one with drafts.
    host: tuple[CostCurve, CostCurve] = field(init=False)
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    due: list[int] = field(init=False)
    paused: int = 0
    missed: int = 0
    at: list[int] = field(init=False)
    _hopes: bool = field(init=False)
    _drafts: bool = field(init=False)  # the step before had some
    # Seconds that single steps with drafts take more, by the number of steps with drafts before them. The
    # first steps of a size compile kernels, for example.
    slow: Mapping[int, float] = field(default_factory=dict[int, float])
    # Tokens of one answer after the other, for clients that ask again when they have an answer. Empty: nobody
    # asks again, and the texts have no end.
    lengths: Sequence[int] = ()
    # By client: steps until its next question has been read, and tokens of its answer that are left.
    away: list[int] = field(init=False)
    left: list[int] = field(init=False)
    asked: int = 0
    _took: deque[float] = field(default_factory=lambda: deque[float](maxlen=15))  # steps of a rest

    def __post_init__(self) -> None:
        self.at = [23 * (text // len(trace().texts)) % len(one) for text, one in enumerate(self.texts)]
        self.due = [self.machine.prompt] * len(self.texts)
        self.step, self.level = CostCurve(self.machine.step), CostCurve(self.machine.level)
        without, drafted = self.machine.host
        self.host = CostCurve(without), CostCurve(drafted)
        self.away = [0] * len(self.texts)
        self.left = [self._next_length() for _ in self.texts]
        self._hopes = self.policy is not None and self.policy.start_sequences(len(self.texts))
        self._drafts = self.policy is not None and not self.policy.adaptive

    def follow(self, before: Replay) -> None:
        """Texts that come behind others: a rest of those goes on, unless these have credit of their own."""
        self.paused, self.missed, self.drafted = before.paused, before.missed, before.drafted
        self._drafts = before._drafts
        if self.policy and self.paused and before._took:  # the next step without drafts is told as those
            took, live = median(before._took), len(self.texts)
            wall = took + self.machine.hop + self.row_hop * live
            self.policy.record_step([ROOT_ONLY] * live, StepSeconds(took, wall))
        if self.policy and self._hopes and self.paused:
            self.policy.record_pause(self.missed, len(self.texts))
            self.paused = self.missed = 0

    def run(self, tokens: int) -> float:
        """Until each text has so many more; returns the seconds that took."""
        before, until = self.seconds, self.tokens + tokens * len(self.texts)
        while self.tokens < until:
            # A tree has no more levels than its sequence may still have tokens, without the root's.
            self._turn(min(len(LAYOUT), (until - self.tokens - 1) // len(self.texts)))
        return self.seconds - before

    def _next_length(self) -> int:
        """The tokens of the next answer; without lengths more than any replay has."""
        self.asked += 1
        return self.lengths[self.asked % len(self.lengths)] if self.lengths else 1 << 40

    @property
    def present(self) -> list[int]:
        """The texts that are being written now; others wait for their question to be read."""
        return [text for text, steps in enumerate(self.away) if not steps]

    @property
    def reads(self) -> bool:
        """Whether this step reads a question too: such steps take longer, and nothing is learned of them."""
        return 1 in self.away

    def _turn(self, most: int) -> None:
        live, factor = len(self.present), self.noise[self.steps % len(self.noise)]
        self.steps += 1
        if not live:
            self._advance({}, READING)
            return
        levels = few = 0
        if self.policy and not self.paused:
            few = live
            most = min(most, max(self.left[text] for text in self.present) - 1)
            due = sum(self.due[text] for text in self.present)
            levels = self.policy.plan_levels(few, most, due, live - few)
            self.paused = (
                0
                if levels
                else (self.policy.paused_trees or IDLE_PAUSE_STEPS * live) + self.machine.waits * live
            )
        if levels:
            self._draft(levels, factor)
        else:
            self._rest(factor)

    def _rest(self, factor: float) -> None:
        live = len(self.present)
        self.seconds += self.machine.switch[0] * factor if self._drafts else 0.0
        took = (float(self.step.at(live)) + self.host[0].at(live)) * factor
        if not self._drafts:  # the worker reports the median of such steps
            self._took.append(took)
        sending = self.row_hop * live
        sending += self.machine.hop
        reads = self.reads
        self._advance(dict.fromkeys(self.present, 0), took / factor + sending + READING * reads)
        self._drafts = False
        if not self.policy:
            return
        self.missed += live
        self.paused = max(self.paused - live, 0)
        if not self.paused:
            self.seconds += self.machine.catching_up if self.missed > live else 0.0
            self.policy.record_pause(self.missed, live)
            self.missed = 0
            # Older tokens of a pause are skipped, as their features were overwritten.
            self.due = [min(due, FEATURE_RING_ROWS // live) for due in self.due]
            if self.machine.graphs and not self.machine.prompt:  # caught up with meanwhile
                self.due = [2] * len(self.texts)
            took = median(self._took or [took])
            spent = UNKNOWN_SECONDS if reads else StepSeconds(took, took + sending)
            self.policy.record_step([ROOT_ONLY] * live, spent)

    def _draft(self, levels: int, factor: float) -> None:
        policy, present = self.policy, self.present
        live = few = len(present)
        assert policy is not None
        offers = [self.texts[text][self.at[text]] for text in present]
        width = getattr(policy, "width", None) or LAYOUT[0]
        candidates, fed = _grow(offers, levels, width, None if self.machine.graphs else policy.keep_growing)
        grown = len(fed)
        due = sum(self.due[text] for text in present)
        first, *more = (float(self.level.at(few * nodes)) for nodes in fed)
        on_device = 1.0 if self.machine.overlaps else factor  # the host is what is noisy then
        first = (self.machine.growth + first + self.machine.row * due) * on_device
        growing = first + sum(more) * on_device
        values, foreseen = policy.score(candidates), 0
        if self.machine.graphs and few == live:  # a device chooses them
            foreseen = policy.predict_nodes(few, grown, 512 - live)
        chosen = best_each(values, foreseen) if foreseen else policy.select(values, grown, 512 - live)
        policy.record_worth(values, candidates.depths)
        policy.keep_sample(candidates)
        masses = depth_masses(candidates, chosen).tolist()
        right = np.stack([offer.right[: chosen.shape[1]] for offer in offers]) & chosen
        accepted = (DEPTHS[: chosen.shape[1]] * right).max(1).tolist()
        rows = [1 + int(count) for count in chosen.sum(1)]
        fed_rows = sum(rows)
        computed = float(self.step.at(fed_rows)) * on_device
        sending = self.row_hop * fed_rows + self.machine.hop
        handover = self.machine.handover + self.host[1].at(live) + (0 if self.drafted else self.machine.cold)
        handover += 0.0 if self._drafts else self.machine.switch[1]
        self._drafts = True
        self._took.clear()
        handover += 0.0 if policy.holding else self.machine.deciding
        device, host, waited = computed + growing, handover * factor, None
        if self.machine.overlaps:
            waited = max(device - host, 0.0)
            device = waited
        wall = device + host + sending + self.slow.get(self.drafted, 0.0)
        self.drafted += fed_rows > live
        for text in present:
            self.due[text] = 0
        reads = self.reads
        seconds = (wall - sending) / factor + sending + READING * reads
        self._advance(dict(zip(present, accepted)), seconds)
        trees = [TreeOutcome(grown, *each) for each in zip(rows, masses, accepted)]
        told = wall if fed_rows > live else computed + sending
        policy.record_step(trees, UNKNOWN_SECONDS if reads else StepSeconds(computed, told, growing, waited))

    def _advance(self, accepted: Mapping[int, int], seconds: float) -> None:
        """Write a step's tokens. accepted: of each text that is being written, besides the root's."""
        self.seconds += seconds
        self.away = [max(steps - 1, 0) for steps in self.away]
        for text, count in accepted.items():
            self.tokens += 1 + count
            self.due[text] += 1 + count
            self.at[text] = (self.at[text] + 1 + count) % len(self.texts[text])
            self.left[text] -= 1 + count
            if self.left[text] <= 0:
                self.left[text] = self._next_length()
                self.away[text] = AWAY
                self.due[text] = self.machine.prompt


def _grow(
    offers: Sequence[Offer], levels: int, width: int, keep: KeepGrowing | None
) -> tuple[Candidates, list[int]]:
    """Level by level, as long and as wide as `keep` says; a fixed width of 1 is a chain without siblings.
    Returns the candidates, and the nodes fed per level.
    """
    parents, scores = np.stack([o.parents for o in offers]), np.stack([o.scores for o in offers])
    fed = [1]
    for depth in range(1, levels):
        at = depth == DEPTHS
        best = np.sort(scores[:, at], 1)[:, ::-1]
        feed = min(keep(best, depth) if keep else width, best.shape[1])
        if not feed:
            break
        fed.append(feed)
        shut = np.where(at & (scores < best[:, feed - 1 : feed]), np.arange(1, len(DEPTHS) + 1), -1)
        for row, numbers in enumerate(shut):  # nothing grows below what is not fed
            scores[row, np.isin(parents[row], numbers[numbers > 0])] = -np.inf
    if width == 1 and not keep:
        for depth in range(1, levels + 1):
            at = depth == DEPTHS
            best = scores[:, at].max(1, keepdims=True)
            scores[:, at] = np.where(scores[:, at] < best, -np.inf, scores[:, at])
    whole = Candidates(np.zeros_like(parents), scores, parents, DEPTHS)
    return limit_depths(whole, [len(fed)] * len(offers)), fed


def replay(
    policy: BudgetPolicy | None,
    noise: str,
    first: int = 0,
    live: int = 1,
    row_hop: float = 0.0,
    machine: str = "bf16",
) -> Replay:
    """Texts from the `first` on, `live` of them together. row_hop: seconds that a row's bytes take."""
    told = trace()
    texts = [told.texts[(first + each) % len(told.texts)] for each in range(live)]
    begun = 37 * first
    series = told.noise[noise]
    series = series[begun % len(series) :] + series[: begun % len(series)]
    return Replay(policy, texts, series, told.machines[machine], row_hop)


def in_a_row(
    policy: BudgetPolicy, noise: str, machine: str, tokens: int, order: Iterable[int] | None = None
) -> Iterator[float]:
    """Times plain decoding, for every text after the other: a rest goes on with the next one."""
    before = None
    for first in range(len(trace().texts)) if order is None else order:
        turning = replay(policy, noise, first, machine=machine)
        if before:
            turning.follow(before)
        yield replay(None, noise, first, machine=machine).run(tokens) / turning.run(tokens)
        before = turning


def measured(scale: float = 1.0, machine: str = "bf16") -> BudgetPolicy:
    """The tuner, told curves that are `scale` times what steps take."""
    place, shape = trace().machines[machine], TreeShape()
    step, level = (tuple((rows, scale * seconds) for rows, seconds in curve) for curve in place.told)
    widths = (LAYOUT[0] if place.graphs else shape.top_k,) * shape.depth
    sizes = BUCKETS if place.graphs else ()
    return make_budget("measured", shape, step, level, widths, place.graphs, graph_rows=sizes)
