"""One sequence as the drafter follows it: which features it has, which draft rows it could compute.

Refuses to know tensors and pages: positions and tokens.

Draft row j pairs the feature of position j with the token at j + 1. So with n committed tokens there
are n features, and n rows once the token behind them is known; a fork at n shares n - 1 rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specsot.frames import Lesson, Opening
from specsot_drafter.standing import Standing, own_tokens
from specsot_drafter.tuning import Returned


@dataclass(frozen=True, slots=True)
class Flight:
    """A tree that was sent, until its outcome is known."""

    committed: int
    grown: int
    rows: int
    masses: tuple[float, ...]


@dataclass(slots=True)
class Stream:
    """What is known of one open sequence.

    length:   features known, of positions 0 .. length - 1.
    extended: draft rows computed from true features.
    waiting:  known tokens at positions extended + 1, extended + 2, ...
    last:     the token at position `length`, once known.
    standing: where its grammar stands behind `last`; None for free text.
    """

    opening: Opening
    length: int = 0
    extended: int = 0
    waiting: list[int] = field(default_factory=list)
    last: int | None = None
    standing: Standing | None = None
    flight: Flight | None = None

    @property
    def sequence(self) -> int:
        return self.opening.sequence

    @property
    def known(self) -> int:
        """Tokens known, fed ones and the one behind them."""
        return self.length + (self.last is not None)

    @property
    def room(self) -> int:
        """Tokens this sequence may still write behind its last known one."""
        written = self.opening.generated + self.length + 1 - self.opening.prompt
        return self.opening.limit - written

    def follows(self, lesson: Lesson) -> bool:
        """Whether the lesson continues what is known; false after a missed one."""
        continues = bool(lesson.tokens) and lesson.start == self.length
        return continues and (self.last is None or self.last == lesson.tokens[0])

    def hear(self, lesson: Lesson) -> None:
        """Take in committed tokens; their features are stored by the caller."""
        told = lesson.tokens if lesson.bonus is None else (*lesson.tokens, lesson.bonus)
        first = self.known
        fresh = told[first - lesson.start :]
        self.waiting += fresh if first else fresh[1:]  # the very first token is nobody's follower
        self.length += len(lesson.tokens)
        self.last = lesson.bonus
        if self.standing:
            self.standing.write(own_tokens(self.opening, first, fresh))

    def take(self, rows: int | None = None) -> tuple[int, ...]:
        """The tokens of the next rows to compute (all, or the first `rows`), which now count as extended."""
        count = len(self.waiting) if rows is None else rows
        taken = tuple(self.waiting[:count])
        del self.waiting[:count]
        self.extended += count
        return taken

    def rewind(self) -> None:
        """Make the last row due again, where its token is known and nothing else is waiting."""
        if self.last is not None and not self.waiting:
            self.extended -= 1
            self.waiting = [self.last]

    def branch(self, opening: Opening, length: int) -> Stream:
        """A fork at `length`: shares length - 1 rows, the row after them waits for its own token."""
        return Stream(opening, length=length, extended=length - 1)

    def outcome(self, lesson: Lesson) -> Returned | None:
        """What became of the tree on its way, when this lesson tells it."""
        flight, self.flight = self.flight, None
        if flight is None or flight.committed != lesson.start or lesson.bonus is None:
            return None
        return Returned(flight.grown, flight.rows, flight.masses, len(lesson.tokens) - 1)
