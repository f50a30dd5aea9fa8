"""Text of one answer as tokens arrive: stop strings, markers, and what a client may see so far."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from specsot.core.list_plan import LIST_HEAD, ListReader
from specsot.core.skeleton import PlanReader, Point
from specsot.events import Reason, TokenLogprobs
from specsot_master.core.loops import LoopWatch


class StopStrings:
    """Feed text in pieces of any size; what comes out never holds a stop string, nor what follows one.

    The stop string that is complete first wins, so that pieces of any size give the same text; of two
    that are complete at once, the longer.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._stops = tuple(stop for stop in stops if stop)
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
            _, place, self.hit = min(cuts)
            self._held = ""
            return text[:place]
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


ANSWER, END = "[ANSWER]", "[END]"


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A token and the text it completed ("" in the middle of a character).

    token None: text that was held back and came out at the end.
    logprobs: of the token, where they are asked for.
    """

    token: int | None
    text: str
    logprobs: TokenLogprobs | None = None


class TokenSpans:
    """Which token wrote which characters of a sequence's raw text."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._logprobs: list[TokenLogprobs] = []  # as many as tokens, or none at all
        self._taken = 0
        self.length = 0  # characters

    def add(self, piece: TextPiece) -> None:
        start, self.length = self.length, self.length + len(piece.text)
        if piece.token is not None:
            self._tokens.append(piece.token)
            self._starts.append(start)
            self._ends.append(self.length)
        if piece.logprobs is not None:
            self._logprobs.append(piece.logprobs)

    def __len__(self) -> int:
        return len(self._tokens)

    def count(self, first: int) -> int:
        """How many tokens wrote at or behind character `first`."""
        return len(self._tokens) - self._index(first)

    def within(self, first: int, last: int | None = None) -> tuple[int, ...]:
        """Tokens that wrote any of the characters first .. last - 1, to the end if `last` is None."""
        return tuple(self._tokens[self._index(first) : self._stop(last)])

    def take_logprobs(self, first: int, last: int | None = None) -> tuple[TokenLogprobs, ...]:
        """Those of the tokens `within` that were not taken before."""
        if not self._logprobs:
            return ()
        start, stop = max(self._index(first), self._taken), self._stop(last)
        self._taken = max(self._taken, stop)
        return tuple(self._logprobs[start:stop])

    def _stop(self, last: int | None) -> int:
        return len(self._tokens) if last is None else bisect.bisect_left(self._starts, last)

    def _index(self, first: int) -> int:
        """The first token with text behind `first`; silent ones belong to what follows them."""
        index = bisect.bisect_right(self._ends, first)
        while index and self._starts[index - 1] >= first:
            index -= 1
        return index


class AnswerText:
    """Cuts at stop strings. `trim`: a branch's body, without a leading [ANSWER] and white space around it.
    loops: it also ends where it repeats itself.

    marked:   it began with [ANSWER].
    skipped:  raw characters left out at the beginning.
    released: raw characters behind those that are let through, or held only as trailing white space.
    """

    def __init__(self, stops: Iterable[str] = (), trim: bool = False, loops: bool = False) -> None:
        self._watch, self._loops = StopStrings(stops), LoopWatch() if loops else None
        self._trim, self._begun = trim, not trim
        self._head, self._tail = "", ""
        self.marked = False
        self._shown: list[str] = []
        self.skipped = self.released = self.length = 0

    @property
    def text(self) -> str:
        """Everything let through so far; `length` characters."""
        return "".join(self._shown)

    @property
    def stopped(self) -> bool:
        """A stop string was hit, or it repeats itself."""
        return self._watch.hit is not None or (self._loops is not None and self._loops.repeats)

    def feed(self, text: str) -> str:
        """What may be shown now."""
        text = self._watch.feed(text if self._begun else self._begin(text, last=False))
        return self._show(self._loops.feed(text) if self._loops else text)

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held = "" if self._begun else self._begin("", last=True)
        text = self._watch.feed(held) + self._watch.flush()
        return self._show(self._loops.feed(text) + self._loops.flush() if self._loops else text)

    def _begin(self, text: str, last: bool) -> str:
        """Skip white space and one [ANSWER]; wait as long as the latter may still be coming."""
        self._head += text
        body = self._head.lstrip()
        if not last and ANSWER.startswith(body):
            return ""
        if body.startswith(ANSWER):
            self.marked, body = True, body.removeprefix(ANSWER).lstrip()
            if not body and not last:
                return ""
        self._begun = True
        self.skipped = len(self._head) - len(body)
        return body

    def _show(self, text: str) -> str:
        self.released += len(text)
        if self._trim:
            text = self._tail + text
            shown = text.rstrip()
            self._tail, text = text[len(shown) :], shown
        if text:
            self._shown.append(text)
            self.length += len(text)
        return text


class FirstSequence:
    """Feed it pieces. `over` is set when the master, not the model's own end, must end it.

    reader:      None for a plain answer.
    limit:       tokens of a direct answer, the markers around it included.
    plan_tokens: tokens after which an unfinished plan is taken as it is.
    loops:       it ends where it repeats itself, too.
    """

    def __init__(
        self,
        stops: Iterable[str],
        limit: int,
        reader: PlanReader | ListReader | None,
        plan_tokens: int = 0,
        loops: bool = False,
    ) -> None:
        stops = (*stops, END) if reader else tuple(stops)
        self._answer, self._spans = AnswerText(stops, loops=loops), TokenSpans()
        self._reader, self._limit, self._plan_tokens = reader, limit, plan_tokens
        self._start = None if reader else 0
        self._raw, self._delta = LIST_HEAD if isinstance(reader, ListReader) else "", ""
        self._raw_logprobs: list[TokenLogprobs] = []
        self._marked_end = self._concluded = False
        self.ended = False  # by an end token
        self.over: Reason | None = None

    @property
    def direct(self) -> bool:
        """This is the answer, as far as one can tell by now."""
        return self._reader is None or self._reader.kind == "direct"

    @property
    def planned(self) -> bool:
        """This is a plan, and it is complete."""
        return self._reader is not None and self._reader.kind == "plan" and self._reader.finished

    @property
    def points(self) -> tuple[Point, ...]:
        return self._reader.points if self._reader else ()

    @property
    def text(self) -> str:
        return self._answer.text

    @property
    def length(self) -> int:
        """Characters of the answer so far."""
        return self._answer.length

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of the direct answer, markers left out."""
        if self._start is None:
            return ()
        return self._spans.within(self._start, self._reach if self._is_cut else None)

    @property
    def written(self) -> int:
        """All tokens, an end token too."""
        return len(self._spans) + self.ended

    @property
    def plan_tokens(self) -> int:
        """Those that are not of the answer: the plan, or the markers that say that there is none."""
        if self._reader is None:
            return 0
        return self.written if self._start is None else len(self._spans) - len(self.tokens)

    def write(self, piece: TextPiece) -> None:
        """Take a token's text; ignored once it is over. Raises PlanError."""
        if self.over:
            return
        self._spans.add(piece)
        if piece.logprobs is not None and not self.direct:
            self._raw_logprobs.append(piece.logprobs)
        self._delta += self._answer.feed(self._read(piece.text))
        self.over = self._judge()
        if self.over:
            self._conclude()

    def finish(self) -> None:
        """No more text comes. Raises PlanError."""
        if not self.over:
            self._conclude()

    def take_raw(self) -> str:
        """Skeleton text since the last call."""
        raw, self._raw = self._raw, ""
        return raw

    def take_raw_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Of the tokens that wrote skeleton text since the last call."""
        taken, self._raw_logprobs = self._raw_logprobs, []
        return tuple(taken)

    def take_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Of the answer's tokens whose text is out, each once; at the end of all that are left."""
        if self._start is None:
            return ()
        whole = self._concluded and not self._is_cut
        return self._spans.take_logprobs(self._start, None if whole else self._reach)

    def take_delta(self) -> str:
        """Answer text since the last call."""
        delta, self._delta = self._delta, ""
        return delta

    @property
    def _is_cut(self) -> bool:
        """The answer ended before the sequence did."""
        return self._answer.stopped or self._marked_end

    @property
    def _reach(self) -> int:
        """Raw characters up to the end of what was let through."""
        return (self._start or 0) + self._answer.released

    def _read(self, text: str) -> str:
        """Raw text in, what it adds to a direct answer out."""
        if self._reader is None:
            return text
        if self._reader.kind != "direct":
            self._raw += text
        return self._grown(lambda reader: reader.feed(text))

    def _grown(self, move: Callable[[PlanReader | ListReader], object]) -> str:
        assert self._reader is not None
        before = len(self._reader.direct_text)
        move(self._reader)
        if self._start is None and self._reader.direct_text:
            self._start = _find_start(self._reader)
        return self._reader.direct_text[before:]

    def _judge(self) -> Reason | None:
        reader = self._reader
        if self._answer.stopped:
            return Reason.STOP
        planning = reader is not None and self._start is None and reader.kind != "direct"
        full = len(self._spans) >= (self._plan_tokens if planning else self._limit)
        if reader and reader.finished:  # when full, the grammar had to end it
            self._marked_end = True
            return Reason.LENGTH if full else Reason.STOP
        return Reason.LENGTH if full else None

    def _conclude(self) -> None:
        if self._reader and not self._reader.finished:
            self._delta += self._answer.feed(self._grown(lambda reader: reader.finish()))
        self._delta += self._answer.flush()
        self._concluded = True


def _find_start(reader: PlanReader | ListReader) -> int:
    """Where in the raw text the direct answer begins, found when its first characters are certain."""
    raw, direct = reader.text, reader.direct_text
    if len(direct) == len(raw):
        return 0
    if reader.finished and direct + END in raw:
        return raw.find(direct + END)
    held = next((size for size in range(len(END) - 1, 0, -1) if raw.endswith(END[:size])), 0)
    return len(raw) - held - len(direct)
