"""Constrained decoding of skeletons: masks over tokens, computed from token bytes.

Refuses to know text, tensors and requests.
"""

from specsot.constraint.automaton import Mask, State, TokenAutomaton, automaton
from specsot.constraint.trees import mask_tree

__all__ = ["Mask", "State", "TokenAutomaton", "automaton", "mask_tree"]
