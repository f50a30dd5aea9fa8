"""The last stage's verdict on one sequence: which nodes are accepted, what is written, what ends it.

Refuses to know logits and tensors: it is handed the target token of every node.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specsot.core.frames import End, Opening, Outcome
from specsot.core.tree import Tree, accept
from specsot.grammar import LONGEST_STRETCH, Grammar, IsolatedGrammar, SpellingHabits
from specsot_worker.history import TokenCounts


@dataclass(slots=True)
class DecodeState:
    """What the last stage remembers of a decoding sequence.

    tokens: everything it wrote, the newest (not fed yet) included.
    state:  the grammar's state behind those tokens; None without a grammar.
    habits: how the base spells what grammars force, shared by all it writes.
    history: what penalties look at; None where none is asked for.
    retried: its newest token had no target, and is fed once more.
    """

    opening: Opening
    grammar: Grammar | None = None
    habits: SpellingHabits = field(default_factory=SpellingHabits)
    history: TokenCounts | None = None
    tokens: list[int] = field(default_factory=list)
    state: object | None = None
    retried: bool = False

    def __post_init__(self) -> None:
        if self.grammar:
            self.set_grammar(self.grammar)

    def set_grammar(self, grammar: Grammar) -> None:
        """To this grammar, before anything was written."""
        self.grammar, self.state = grammar, grammar.start()

    @property
    def failure(self) -> str | None:
        """Why it cannot go on, whatever the logits say."""
        return self.grammar.failure if isinstance(self.grammar, IsolatedGrammar) else None

    @property
    def remaining(self) -> int:
        """How many tokens it may still write."""
        return self.opening.limit - len(self.tokens)

    def write(self, tokens: tuple[int, ...]) -> End | None:
        """Append tokens up to the first that ends the sequence; returns why, or None."""
        for token in tokens:
            self.tokens.append(token)
            if self.history:
                self.history.add(token)
            if end := self._end_at(token):
                return end
        return None

    def forced(self) -> tuple[int, ...]:
        """What must follow, as far as it is worth drafting: up to the last token that may be written."""
        if self.grammar is None or not self.opening.drafted:
            return ()
        return self.habits.forced(self.grammar, self.state, min(self.remaining - 1, LONGEST_STRETCH))

    def read_prompt(self, start: int, tokens: tuple[int, ...]) -> None:
        """Take prompt tokens fed at `start`; the last of a prompt it may have written before a repair."""
        given = max(self.opening.prompt - self.opening.generated - start, 0)
        if self.history:
            self.history.add_prompt(tokens[:given])
        self.write(tokens[given:])

    def _end_at(self, token: int) -> End | None:
        if token in self.opening.stop_ids:
            return End.STOP
        if self.grammar:
            self.habits.note(self.grammar, self.state, token)
            self.state = self.grammar.advance(self.state, token)
            if self.state is None:
                return End.FAILED
            if self.grammar.finished(self.state):
                return End.GRAMMAR
        return End.LENGTH if self.remaining <= 0 else None


def accept_prompt(state: DecodeState, target: int | None) -> Outcome:
    """The first token behind a prompt."""
    if target is None:
        return Outcome(state.opening.sequence, 0, (), (), End.FAILED)
    end = state.write((target,))
    return Outcome(state.opening.sequence, 0, (), (target,), end, forced=() if end else state.forced())


def accept_tree(state: DecodeState, step: int, tree: Tree, targets: list[int | None]) -> Outcome:
    """Accept along the targets, write the accepted tokens and the bonus, cut at an end.

    A draft whose own logits are not numbers is not accepted: its token is the bonus, and decides as a root.
    It may have spoilt the root's logits too: then nothing is accepted, and the root is fed once more, alone.
    """
    sequence = state.opening.sequence
    *above, last = accept(tree, [-1 if target is None else target for target in targets])
    if above and targets[last] is None:
        last = above.pop()
    accepted, bonus = (*above, last), targets[last]
    if bonus is None:
        again, state.retried = not state.retried, True
        return Outcome(sequence, step, (), ()) if again else Outcome(sequence, step, (0,), (), End.FAILED)
    state.retried = False
    before = len(state.tokens)
    end = state.write((*(tree.tokens[node] for node in accepted[1:]), bonus))
    tokens = tuple(state.tokens[before:])
    forced = () if end else state.forced()
    return Outcome(sequence, step, accepted[: len(tokens)], tokens, end, forced=forced)
