"""The sequence of ordinal 0: a skeleton that may turn out to be the answer, or the answer itself.

Pure. Refuses to know events and sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from specsot.events import Reason, TokenLogprobs
from specsot.skeleton import PlanReader, Point
from specsot_master.plan.answer import END, AnswerText, TextPiece, TokenSpans


class FirstSequence:
    """Feed it pieces. `over` is set when the master, not the model's own end, must end it.

    reader:      None for a plain answer.
    limit:       tokens of a direct answer, the markers around it included.
    plan_tokens: tokens after which an unfinished plan is taken as it stands.
    """

    def __init__(
        self, stops: Iterable[str], limit: int, reader: PlanReader | None, plan_tokens: int = 0
    ) -> None:
        stops = (*stops, END) if reader else tuple(stops)
        self._answer, self._spans = AnswerText(stops), TokenSpans()
        self._reader, self._limit, self._plan_tokens = reader, limit, plan_tokens
        self._start = None if reader else 0
        self._raw, self._delta = "", ""
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

    def _grown(self, move: Callable[[PlanReader], object]) -> str:
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


def _find_start(reader: PlanReader) -> int:
    """Where in the raw text the direct answer begins, found when its first characters are certain."""
    raw, direct = reader.text, reader.direct_text
    if len(direct) == len(raw):
        return 0
    if reader.finished and direct + END in raw:
        return raw.find(direct + END)
    held = next((size for size in range(len(END) - 1, 0, -1) if raw.endswith(END[:size])), 0)
    return len(raw) - held - len(direct)
