"""Quarantine of requests that may break rings: which requests may enter while suspects are on trial.

When a ring breaks, the requests in it are blamed. If the blame of some is high enough, those suspects are
tried in halves: half of them enter the ring, and are cleared once they have written enough tokens. If the
ring breaks again, only the half that was on trial stays suspect and is halved in turn, until a single request
is found under which rings break.

    suspects [a b c d]: trial [a b], pending [c d]; the ring breaks -> trial [a], pending [b]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Tokens. So many written tokens halve the blame of a break. Untuned.
BLAME_HALF_LIFE_TOKENS = 64
# Breaks. A request with more blame is suspect: two breaks in a row with little written before and between
# them (1 + 0.5 or more). Untuned.
SUSPECT_BLAME = 1.5
# Breaks. A request with more breaks is suspect, however much it wrote between them. Untuned.
MAX_BREAKS = 8
# Tokens. A suspect that has written so many is cleared. Untuned.
PROOF_TOKENS = 16
# Tokens. Bounds the proof of a request with many breaks, so that it lies within a first lease. Untuned.
MAX_PROOF_TOKENS = 256
# Breaks. A request with more guilt is given up: breaks in a row while it was alone in the ring, each halved
# by PROOF_TOKENS written tokens. Untuned.
GUILTY_BREAKS = 1.5
# Breaks. A request with so many breaks while it was alone in the ring is given up. Untuned.
MAX_BREAKS_ALONE = 8


@dataclass(slots=True, eq=False)
class BreakHistory:
    """The breaks of rings that one request was in, by which the quarantine finds the request that causes
    them.

    blame: the number of breaks, each halved by every BLAME_HALF_LIFE_TOKENS tokens that the request wrote.
    guilt: the number of breaks since it was last cleared, while it was on trial alone in the ring, each
        halved by every PROOF_TOKENS tokens.
    breaks: the number of all breaks.
    alone: the number of breaks while it was on trial alone in the ring.
    written: number of tokens that it wrote since the last break, or since its arrival.
    """

    blame: float = 0.0
    guilt: float = 0.0
    breaks: int = 0
    alone: int = 0
    written: int = 0

    @property
    def suspect(self) -> bool:
        """True if the request must stand trial after the next break."""
        return self.blame > SUSPECT_BLAME or self.breaks > MAX_BREAKS

    @property
    def guilty(self) -> bool:
        """True if the request is given up after a break in which it was alone in the ring."""
        return self.guilt > GUILTY_BREAKS or self.alone >= MAX_BREAKS_ALONE

    @property
    def proof(self) -> int:
        """The number of written tokens that clear the request on trial. Every break beyond MAX_BREAKS doubles
        it, up to MAX_PROOF_TOKENS.
        """
        return min(PROOF_TOKENS << min(max(self.breaks - MAX_BREAKS, 0), 8), MAX_PROOF_TOKENS)

    @property
    def summary(self) -> str:
        """The reason, in words, that the client receives if the request is given up."""
        return f"{self.breaks} rings broke while this request ran, {self.alone} of them with it alone in them"

    def on_break(self, on_trial_alone: bool) -> None:
        """Count a break of a ring that the request was in, and begin a new count of written tokens. `breaks`
        and `blame` grow with every break, `alone` and `guilt` only if it was on trial alone. The blame and
        guilt of earlier breaks and of this one are reduced by what was written since the last.

        on_trial_alone: True if the request was on trial and no other request was in the ring.
        """
        self.breaks += 1
        if on_trial_alone:
            self.alone += 1
            self.guilt = (self.guilt + 1) * 0.5 ** (self.written / PROOF_TOKENS)
        self.blame = (self.blame + 1) * 0.5 ** (self.written / BLAME_HALF_LIFE_TOKENS)
        self.written = 0


class Quarantine:
    """Decides which requests may be in the ring after rings have broken. While some are on trial, only those
    and the cleared ones may.
    """

    def __init__(self) -> None:
        """Create a quarantine in which no request is on trial."""
        self._moved = False
        self._pending: list[BreakHistory] = []
        self._trial: list[BreakHistory] = []
        self._cleared: list[BreakHistory] = []

    def admits(self, history: BreakHistory) -> bool:
        """Return True if a request may enter the ring: no request is on trial, or this one is on trial or
        cleared.

        history: the breaks of rings that the request was in.
        """
        return not self._trial or history in self._trial or history in self._cleared

    def has_changed(self) -> bool:
        """Return True if other requests than before may enter since the last call of this method; a second
        call in a row returns False.
        """
        moved = self._moved
        self._moved = False
        return moved

    def on_break(self, histories: Sequence[BreakHistory]) -> BreakHistory | None:
        """Record that the ring broke. Return the request that must be given up, or None. A request is given
        up only if it was on trial, alone in the ring, and `guilty`. The given-up request is removed from the
        quarantine. Otherwise the next trial begins: with the requests on trial that were in the ring, or, if
        none was, with the suspect ones in the ring and all that are still untried. Nothing changes if no
        request was in the ring.

        histories: the break histories of the requests that were in the ring, the most likely cause first; may
            be empty.
        """
        tried = [one for one in histories if one in self._trial]
        alone = len(histories) == len(tried) == 1
        for one in histories:
            one.on_break(alone)
        if alone and tried[0].guilty:
            self.remove(tried[0])
            return tried[0]
        if histories:
            untried = [*self._trial, *self._pending]
            suspects = tried or [*(one for one in histories if one.suspect), *untried]
            self._begin(sorted(suspects, key=lambda one: -one.blame))
        return None

    def on_tokens(self, history: BreakHistory, num_tokens: int) -> None:
        """Record that a request wrote tokens. A request on trial is cleared if it has written enough. If that
        ends the trial, the first half of the pending requests is tried next, and `has_changed` reports it.

        history: the breaks of rings that the request was in.
        num_tokens: how many tokens it wrote in this step.
        """
        history.written += num_tokens
        if history in self._trial and history.written >= history.proof:
            history.guilt = 0.0
            self._cleared.append(history)
            self._end_trial(history)

    def remove(self, history: BreakHistory) -> None:
        """Forget a request that is over. If it was the last one on trial, the next half is tried. An unknown
        request is ignored. A cleared or pending request is taken from its group.

        history: the breaks of rings that the request was in.
        """
        for group in (self._pending, self._cleared):
            if history in group:
                group.remove(history)
        if history in self._trial:
            self._end_trial(history)

    def clear(self) -> None:
        """End the quarantine: every request may enter the ring again."""
        self._begin([])

    def _begin(self, suspects: list[BreakHistory]) -> None:
        """Begin a trial. Requests that were cleared earlier are suspects again only if they are listed. The
        first half of the suspects is on trial then.

        suspects: the break histories of the suspects, the likeliest cause first; empty to end the quarantine.
        """
        self._pending = suspects
        self._cleared = []
        self._take_half()

    def _end_trial(self, history: BreakHistory) -> None:
        """Take a request off trial. If it was the last one, the first half of the pending requests is tried
        next. `has_changed` then returns True.

        history: the break history of a request on trial.
        """
        self._trial.remove(history)
        if not self._trial:
            self._take_half()
            self._moved = True

    def _take_half(self) -> None:
        """Put the first half of the pending requests on trial, rounded up; if none is pending, no request is
        on trial.
        """
        half = (len(self._pending) + 1) // 2
        self._trial = self._pending[:half]
        self._pending = self._pending[half:]
