"""How long clients waited: for the first text, from lap to lap, for a token; over many requests.

Pure: times are passed in, in seconds of any clock that only goes forward.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

MOMENT = 0.001  # seconds: texts closer together came with one lap

Spread = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """What one client heard of one request. texts: when text came. tokens: those of the answer.

    error: what the request ended with instead of an answer.
    """

    begun: float
    ended: float
    texts: tuple[float, ...] = ()
    tokens: int = 0
    error: str | None = None

    @property
    def first(self) -> float:
        """Seconds from the call to the first text."""
        return self.texts[0] - self.begun

    @property
    def between(self) -> list[float]:
        """Seconds from lap to lap that brought text."""
        gaps = (later - sooner for sooner, later in itertools.pairwise(self.texts))
        return [gap for gap in gaps if gap > MOMENT]

    @property
    def per_token(self) -> float:
        """Mean seconds of a token behind the first."""
        return (self.texts[-1] - self.texts[0]) / max(self.tokens - 1, 1)


@dataclass(frozen=True, slots=True)
class LoadLevel:
    """Requests of so many clients at once, and the seconds all of them took together."""

    clients: int
    seconds: float
    heard: tuple[RequestTimes, ...]

    @property
    def answered(self) -> list[RequestTimes]:
        """Only these count for rates and waits."""
        return [one for one in self.heard if one.error is None and one.texts]

    @property
    def errors(self) -> dict[str, int]:
        """How many requests ended without an answer, by why; an answer without a text is none."""
        found = Counter(one.error or "no text" for one in self.heard if one.error or not one.texts)
        return dict(sorted(found.items()))

    def row(self) -> dict[str, object]:
        """As JSON and tables have it."""
        answered = self.answered
        return {
            "name": f"clients {self.clients}",
            "clients": self.clients,
            "requests": len(self.heard),
            "answered": len(answered),
            "errors": self.errors,
            "seconds": round(self.seconds, 3),
            "requests_per_second": round(len(answered) / self.seconds, 3),
            "tokens_per_second": round(sum(one.tokens for one in answered) / self.seconds, 1),
            "first_text_seconds": spread(one.first for one in answered),
            "between_texts_seconds": spread(itertools.chain(*(one.between for one in answered))),
            "per_token_seconds": spread(one.per_token for one in answered if one.tokens > 1),
        }


def spread(values: Iterable[float]) -> Spread:
    """Median and 99th percentile, each one of the values; None where there are none."""
    listed: Sequence[float] = list(values)
    if not listed:
        return {"p50": None, "p99": None}
    p50, p99 = np.percentile(listed, (50, 99), method="inverted_cdf")
    return {"p50": round(float(p50), 6), "p99": round(float(p99), 6)}
