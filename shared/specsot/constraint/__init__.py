"""Constrained decoding of skeletons: masks over tokens, computed from token bytes.

Refuses to know text, tensors and requests.
"""

from specsot.constraint.automaton import Mask, State, TokenAutomaton, automaton
from specsot.constraint.habits import LONGEST_STRETCH, Habits

__all__ = ["LONGEST_STRETCH", "Habits", "Mask", "State", "TokenAutomaton", "automaton"]
