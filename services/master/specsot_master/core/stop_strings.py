"""Stop strings in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Collection, Iterable


class StopStrings:
    """Feed text in pieces of any size; what comes out never holds a stop string, nor what follows one.

    The stop string that is complete first wins, so that pieces of any size give the same text; of two
    that are complete at once, the longer. shown: those of them that come out, too.
    """

    def __init__(self, stops: Iterable[str] = (), shown: Collection[str] = ()) -> None:
        self._stops, self._shown = tuple(stop for stop in stops if stop), shown
        self._longest = max(map(len, self._stops), default=0)
        self._firsts = {stop[0] for stop in self._stops}
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """The text that is now safe to show. Empty for ever once a stop string was hit."""
        if self.hit is not None:
            return ""
        text = self._held + text
        cuts = [(place + len(stop), place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if cuts:
            end, place, self.hit = min(cuts)
            self._held = ""
            return text[: end if self.hit in self._shown else place]
        safe = len(text) - self._suspicious(text)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _suspicious(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        for start in range(max(len(text) - self._longest + 1, 0), len(text)):
            if text[start] in self._firsts and any(stop.startswith(text[start:]) for stop in self._stops):
                return len(text) - start
        return 0
