"""What a grammar forces, spelled the way one base spells it.

Refuses to know bytes and rules; the automaton does. The same bytes have many tokenisations, and only
the base's own is ever accepted: so it is learned as the base writes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

LONGEST_STRETCH = 16  # tokens
MAX_STRETCHES = 4096  # stretches; strangers' forms bring ever new ones


class Forcing(Protocol):
    """What is asked of an automaton over tokens; states are opaque."""

    def advance(self, state: Any, token: int, /) -> Any: ...
    def finished(self, state: Any, /) -> bool: ...
    def forced(self, state: Any, /) -> Sequence[int]: ...


class SpellingHabits:
    """With which token one base begins each forced stretch. Shared by all its texts; those that were noted
    longest ago are forgotten.
    """

    def __init__(self) -> None:
        self._firsts: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def __len__(self) -> int:
        """Stretches that are known."""
        return len(self._firsts)

    def note(self, rules: Forcing, state: Any, token: int) -> None:
        """The base wrote `token` in this state."""
        if stretch := _stretch(rules, state):
            self._firsts[stretch] = token
            self._firsts.move_to_end(stretch)
            if len(self._firsts) > MAX_STRETCHES:
                self._firsts.popitem(last=False)

    def forced(self, rules: Forcing, state: Any, most: int = LONGEST_STRETCH) -> tuple[int, ...]:
        """What must follow this state, as far as there is no choice; at most `most` tokens."""
        chain: list[int] = []
        while len(chain) < most and (stretch := _stretch(rules, state)):
            chain.append(self._firsts.get(stretch, stretch[0]))
            state = rules.advance(state, chain[-1])
        return tuple(chain)


def _stretch(rules: Forcing, state: Any) -> tuple[int, ...]:
    return () if state is None or rules.finished(state) else tuple(rules.forced(state))
