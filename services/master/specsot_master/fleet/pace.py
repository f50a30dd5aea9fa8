"""What a plan of stages promises by what was measured: seconds of every stage, tokens per second.

Pure. Refuses to know how a plan is made, and what laps really take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specsot.members import Curve, Registration, Stage


@dataclass(frozen=True, slots=True)
class Throughput:
    """One sequence, one row a lap, nobody drafts. stages: seconds of each; hops: of all of them together."""

    names: tuple[str, ...]
    stages: tuple[float, ...]
    hops: float

    @property
    def tokens_per_second(self) -> float | None:
        """None where nothing was measured."""
        lap = sum(self.stages) + self.hops
        return 1 / lap if sum(self.stages) else None

    def __str__(self) -> str:
        """ "a 0:16 12.1 ms, b 16:32 13.0 ms, hops 0.4 ms: 39.2 tokens/s"."""
        if self.tokens_per_second is None:
            return ", ".join(self.names)
        parts = [f"{name} {in_ms(seconds)}" for name, seconds in zip(self.names, self.stages)]
        hops = [f"hops {in_ms(self.hops)}"] if self.hops else []
        return f"{', '.join([*parts, *hops])}: {self.tokens_per_second:.1f} tokens/s plainly"


def expected_throughput(stages: Sequence[Stage], members: Mapping[str, Registration]) -> Throughput:
    return Throughput(
        tuple(f"{stage.name} {stage.layers}" for stage in stages),
        tuple(_seconds(stage, members[stage.name], stage is stages[-1]) for stage in stages),
        _hops([members[stage.name] for stage in stages]),
    )


def seconds_at(curve: Curve, rows: int) -> float:
    """Of the first point that has as many rows; of the last one; 0 for an empty curve."""
    return next((seconds for size, seconds in curve if size >= rows), curve[-1][1] if curve else 0.0)


def head_cost_in_layers(worker: Registration) -> float:
    """How many layers the model's end costs: as many as it is large, for one row reads every weight once."""
    weights = worker.weights
    return weights.last / weights.layer if weights and weights.layer else 0.0


def in_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _seconds(stage: Stage, member: Registration, last: bool) -> float:
    return seconds_at(member.curve, 1) * (len(stage.layers) + head_cost_in_layers(member) * last)


def _hops(ring: Sequence[Registration]) -> float:
    """From each to the next, and from the last one back: nothing within a host, else at most half the way of
    both to the master and back.
    """
    following = [*ring[1:], *ring[:1]]
    far = [(one, other) for one, other in zip(ring, following) if not one.host or one.host != other.host]
    return sum(((one.rtt or 0.0) + (other.rtt or 0.0)) / 2 for one, other in far if one is not other)
