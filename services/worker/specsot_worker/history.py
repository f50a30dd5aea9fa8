"""Which tokens stand in a sequence, and how often it wrote each: what penalties look at.

Refuses to know logits and where in the sequence a token stands.
"""

from __future__ import annotations

from collections.abc import Iterable


class TokenCounts:
    """One sequence's past. Tokens of the prompt count as standing there, not as written."""

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        self._counts = dict.fromkeys(prompt, 0)

    def add_prompt(self, tokens: Iterable[int]) -> None:
        """More of the prompt."""
        for token in tokens:
            self._counts.setdefault(token, 0)

    def add(self, token: int) -> None:
        self._counts[token] = self._counts.get(token, 0) + 1

    def counts(self, trail: Iterable[int] = ()) -> dict[int, int]:
        """How often each token that stands there was written, as if `trail` had been written too."""
        counts = self._counts.copy()
        for token in trail:
            counts[token] = counts.get(token, 0) + 1
        return counts
