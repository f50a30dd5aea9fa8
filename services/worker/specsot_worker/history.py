"""Which tokens stand in a sequence, and how often it wrote each: what penalties look at.

Refuses to know logits and where in the sequence a token stands.
"""

from __future__ import annotations

from collections.abc import Iterable


class History:
    """One sequence's past. Tokens of the prompt count as standing there, not as written."""

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        self._times = dict.fromkeys(prompt, 0)

    def read(self, tokens: Iterable[int]) -> None:
        """More of the prompt."""
        for token in tokens:
            self._times.setdefault(token, 0)

    def write(self, token: int) -> None:
        self._times[token] = self._times.get(token, 0) + 1

    def times(self, trail: Iterable[int] = ()) -> dict[int, int]:
        """How often each token that stands there was written, as if `trail` had been written too."""
        times = self._times.copy()
        for token in trail:
            times[token] = times.get(token, 0) + 1
        return times
