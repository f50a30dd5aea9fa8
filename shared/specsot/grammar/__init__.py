"""Constrained decoding of skeletons and of answers with a form, and ends of sentences, from token bytes.

Nothing in this package uses text, tensors or requests.
"""

from specsot.grammar.automaton import Mask, State, TokenAutomaton
from specsot.grammar.sentences import Prose, SentenceEnds, sentence_ends
from specsot.grammar.state import (
    LONGEST_FORCED_RUN,
    Grammar,
    IsolatedGrammar,
    SpellingHabits,
    fewest_tokens,
    grammar_of,
    prebuild,
)

__all__ = [
    "LONGEST_FORCED_RUN",
    "Grammar",
    "SpellingHabits",
    "IsolatedGrammar",
    "Mask",
    "Prose",
    "SentenceEnds",
    "State",
    "TokenAutomaton",
    "fewest_tokens",
    "grammar_of",
    "prebuild",
    "sentence_ends",
]
