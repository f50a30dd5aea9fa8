"""Whether a draft head fits its base: what is accepted by depth, and which other setting explains more.

Pure. Refuses to know tensors and how anything was measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from specsot.members import Overrides

USUAL_ROPE_THETAS = (10000.0, 500000.0, 1000000.0)  # what published heads were trained with
LEAST_ACCEPTANCE = (
    0.2  # of laps that accept any draft: heads that are wired up wrongly stay below, others do not
)
LEAST_GAIN = 0.02  # nats per token by which another setting must explain the base's text better
GAIN_ERRORS = 4.0  # standard errors of that difference
LEAST_SPEEDUP = 1.03  # tokens a lap must rise by this factor with it


@dataclass(frozen=True, slots=True)
class Acceptance:
    """lengths: accepted drafts of every lap."""

    lengths: tuple[int, ...]

    @property
    def per_lap(self) -> float:
        """Tokens a lap, bonus included (tau)."""
        return 1 + statistics.fmean(self.lengths) if self.lengths else 1.0

    @property
    def by_depth(self) -> tuple[float, ...]:
        """Share of laps that accept at least 1, 2, ... drafts."""
        laps = max(len(self.lengths), 1)
        deepest = max(self.lengths, default=0)
        return tuple(sum(n >= depth for n in self.lengths) / laps for depth in range(1, deepest + 1))

    @property
    def any(self) -> float:
        """Share of laps that accept something."""
        return self.by_depth[0] if self.by_depth else 0.0


@dataclass(frozen=True, slots=True)
class HeadFit:
    """as_is: under the head's own setting; better: under `trial`, where one explains the base better."""

    as_is: Acceptance
    trial: Overrides | None = None
    better: Acceptance | None = None

    @property
    def verdict(self) -> Literal["fits", "off", "unfit"]:
        """off: one setting is wrong, and `trial` says which."""
        if self.better is not None and self.better.per_lap >= LEAST_SPEEDUP * self.as_is.per_lap:
            return "off"
        return "fits" if self.as_is.any >= LEAST_ACCEPTANCE else "unfit"


def think_of_trials(
    own: Overrides, taps: tuple[int, ...] | None, layers: int, base_theta: float
) -> tuple[Overrides, ...]:
    """What is worth trying: every tap one layer off, and other bases of the head's rotary positions.

    own: what is set already. taps: None for a head that taps nothing but the last state.
    """
    moved = [tuple(tap + step for tap in taps) for step in (-1, 1)] if taps else []
    layered = [replace(own, aux_layers=tried) for tried in moved if tried[0] >= 0 and tried[-1] <= layers]
    thetas = dict.fromkeys((USUAL_ROPE_THETAS[0], base_theta, *USUAL_ROPE_THETAS[1:]))
    return (*layered, *(replace(own, rope_theta=theta) for theta in thetas))


def as_flags(trial: Overrides) -> str:
    """As a user asks for it."""
    layers, theta = trial.aux_layers, trial.rope_theta
    named = [] if layers is None else [f"--aux-layers {','.join(map(str, layers))}"]
    return " ".join([*named, *([] if theta is None else [f"--drafter-rope-theta {theta:.10g}"])])


def choose_trial(own: Sequence[float], others: Mapping[Overrides, Sequence[float]]) -> Overrides | None:
    """The setting that explains the same text best, if it does so beyond doubt.

    own, others: log-probability the head gives each token of the base's text, token by token.
    """
    gains = {trial: [b - a for a, b in zip(own, told)] for trial, told in others.items()}
    sure = {trial: statistics.fmean(gain) for trial, gain in gains.items() if _is_sure(gain)}
    return max(sure, key=lambda trial: sure[trial], default=None)


def _is_sure(gain: Sequence[float]) -> bool:
    if len(gain) < 2:
        return False
    mean, error = statistics.fmean(gain), statistics.stdev(gain) / len(gain) ** 0.5
    return mean > LEAST_GAIN and mean > GAIN_ERRORS * error
