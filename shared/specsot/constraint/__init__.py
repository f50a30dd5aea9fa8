"""Constrained decoding of skeletons: masks over tokens, computed from token bytes.

Refuses to know text, tensors and requests.
"""

from specsot.constraint.automaton import Mask, State, TokenAutomaton, automaton

__all__ = ["Mask", "State", "TokenAutomaton", "automaton"]
