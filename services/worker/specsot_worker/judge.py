"""The last stage's verdict on one sequence: which nodes are accepted, what is written, what ends it.

Refuses to know logits and tensors: it is handed the target token of every node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from specsot.frames import End, Opening, Outcome
from specsot.tree import Tree
from specsot.verify import accept


class Grammar(Protocol):
    """What the last stage asks of a constraint (specsot.constraint.TokenAutomaton); states are opaque."""

    def start(self) -> Any: ...
    def advance(self, state: Any, token: int) -> Any: ...
    def finished(self, state: Any) -> bool: ...
    def mask(self, state: Any, remaining: int) -> np.ndarray: ...


@dataclass(slots=True)
class Written:
    """What the last stage remembers of a decoding sequence.

    tokens: everything it wrote, the newest (not fed yet) included.
    state:  the grammar's state behind those tokens; None without a grammar.
    """

    opening: Opening
    grammar: Grammar | None = None
    tokens: list[int] = field(default_factory=list)
    state: object | None = None

    def __post_init__(self) -> None:
        if self.grammar:
            self.state = self.grammar.start()

    @property
    def remaining(self) -> int:
        """How many tokens it may still write."""
        return self.opening.limit - len(self.tokens)

    def write(self, tokens: tuple[int, ...]) -> End | None:
        """Append tokens up to the first that ends the sequence; returns why, or None."""
        for token in tokens:
            self.tokens.append(token)
            if end := self._end_at(token):
                return end
        return None

    def recall(self, start: int, tokens: tuple[int, ...]) -> None:
        """Take prompt tokens fed at `start` that this sequence wrote itself before a repair."""
        own = self.opening.prompt - self.opening.generated
        self.write(tokens[max(own - start, 0) :])

    def _end_at(self, token: int) -> End | None:
        if token in self.opening.stop_ids:
            return End.STOP
        if self.grammar:
            self.state = self.grammar.advance(self.state, token)
            if self.state is None:
                return End.FAILED
            if self.grammar.finished(self.state):
                return End.GRAMMAR
        return End.LENGTH if self.remaining <= 0 else None


def judge_prompt(written: Written, target: int | None) -> Outcome:
    """The first token behind a prompt."""
    if target is None:
        return Outcome(written.opening.sequence, 0, (), (), End.FAILED)
    end = written.write((target,))
    return Outcome(written.opening.sequence, 0, (), (target,), end)


def judge_tree(written: Written, step: int, tree: Tree, targets: list[int | None]) -> Outcome:
    """Accept along the targets, write the accepted tokens and the bonus, cut at an end."""
    sequence = written.opening.sequence
    accepted = accept(tree, [-1 if target is None else target for target in targets])
    bonus = targets[accepted[-1]]
    if bonus is None:
        return Outcome(sequence, step, (0,), (), End.FAILED)
    before = len(written.tokens)
    end = written.write((*(tree.tokens[node] for node in accepted[1:]), bonus))
    tokens = tuple(written.tokens[before:])
    return Outcome(sequence, step, accepted[: len(tokens)], tokens, end)
