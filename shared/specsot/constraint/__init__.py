"""Constrained decoding of skeletons and of answers with a form: masks over tokens, from token bytes.

Refuses to know text, tensors and requests.
"""

from specsot.constraint.automaton import Mask, State, TokenAutomaton, automaton
from specsot.constraint.habits import LONGEST_STRETCH, Habits
from specsot.constraint.held import Grammar, Isolated, grammar_of, warm

__all__ = [
    "LONGEST_STRETCH",
    "Grammar",
    "Habits",
    "Isolated",
    "Mask",
    "State",
    "TokenAutomaton",
    "automaton",
    "grammar_of",
    "warm",
]
