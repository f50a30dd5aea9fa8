"""Where one constrained text stands in its grammar.

Refuses to know heads, trees, bytes and rules; the token automaton knows the last two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specsot.constraint import State, TokenAutomaton
from specsot.frames import Opening

Habits = dict[tuple[int, ...], int]  # forced stretch -> the token the base began it with

LONGEST_STRETCH = 16  # tokens


@dataclass(slots=True)
class Standing:
    """Where one constrained sequence stands. state: None once it broke its grammar.

    habits: how the base spells what is forced, learned as it writes: the same bytes have many
            spellings, and only the base's own is accepted. Shared by all texts of one base.
    """

    automaton: TokenAutomaton
    state: State | None
    habits: Habits

    def write(self, tokens: Sequence[int]) -> None:
        """Go on behind tokens the sequence wrote itself, and note how it spells."""
        for token in tokens:
            if stretch := self._stretch(self.state):
                self.habits[stretch] = token
            if self.state is not None:
                self.state = self.automaton.advance(self.state, token)

    def forced(self) -> tuple[int, ...]:
        """What must follow now, as far as there is no choice, spelled as the base does."""
        state, chain = self.state, list[int]()
        while len(chain) < LONGEST_STRETCH and (stretch := self._stretch(state)):
            chain.append(self.habits.get(stretch, stretch[0]))
            state = self.automaton.advance(state, chain[-1]) if state is not None else None
        return tuple(chain)

    def _stretch(self, state: State | None) -> tuple[int, ...]:
        return () if state is None or self.automaton.finished(state) else self.automaton.forced(state)


def own_tokens(opening: Opening, first: int, tokens: Sequence[int]) -> Sequence[int]:
    """Those of the tokens at positions first, first + 1, ... that the sequence wrote itself."""
    return tokens[max(opening.prompt - opening.generated - first, 0) :]
