"""Where one constrained text stands in its grammar.

Refuses to know heads, trees, bytes and rules; the grammar knows the last two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specsot.core.frames import Opening
from specsot.grammar import Grammar


@dataclass(slots=True)
class GrammarState:
    """Where one constrained sequence stands. state: None once it broke its grammar."""

    grammar: Grammar
    state: Any

    def advance(self, tokens: Sequence[int]) -> None:
        """Go on behind tokens the sequence wrote itself."""
        for token in tokens:
            if self.state is not None:
                self.state = self.grammar.advance(self.state, token)


def own_tokens(opening: Opening, first: int, tokens: Sequence[int]) -> Sequence[int]:
    """Those of the tokens at positions first, first + 1, ... that the sequence wrote itself."""
    return tokens[max(opening.prompt - opening.generated - first, 0) :]
