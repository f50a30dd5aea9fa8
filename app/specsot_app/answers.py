"""A whole answer as one value, made from the events of its request.

Refuses to know fleets and terminals.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from specsot.errors import Unavailable
from specsot.events import Reason, Statistics, TokenLogprobs
from specsot.skeleton import Point
from specsot.view import View


@dataclass(frozen=True, slots=True)
class Branch:
    """One point as written. `text` is its body without the heading."""

    point: Point
    text: str
    tokens: int
    reason: Reason | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What `SpecSoT.generate` returns.

    tokens:   token ids of the merged text, in order.
    logprobs: of these tokens, where they were asked for.
    skeleton: the plan as the model wrote it, markers included; empty when none was asked for.
    seed:     what was asked for or drawn; the same seed draws the same answer.
    """

    text: str
    tokens: tuple[int, ...]
    statistics: Statistics
    reason: Reason
    seed: int
    skeleton: str
    branches: tuple[Branch, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()

    def __str__(self) -> str:
        return self.text


def answer_of(view: View) -> Answer:
    """Raises Unavailable when the stream ended before the request did."""
    if view.started is None or view.finished is None:
        raise Unavailable("the stream ended before the answer did")
    end = view.finished
    branches = tuple(Branch(panel.point, panel.text, panel.tokens, panel.reason) for panel in view.panels)
    return Answer(
        end.text,
        end.tokens,
        end.statistics,
        end.reason,
        view.started.seed,
        view.skeleton,
        branches,
        view.logprobs,
    )


def stats_of(answer: Answer) -> dict[str, Any]:
    """Statistics under the seeds' names beside ours."""
    told = answer.statistics
    return asdict(told) | {
        "tokens": told.completion_tokens,
        "total_tokens": told.completion_tokens,
        "time_ms": told.seconds * 1000,
        "total_time": told.seconds,
        "skeleton_text": answer.skeleton,
        "output_text": answer.text,
    }
