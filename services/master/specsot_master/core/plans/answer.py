"""Text of one answer as tokens arrive: stop strings, markers, and what a client may see so far."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from specsot.core.list_plan import LIST_HEAD, ListReader
from specsot.core.skeleton import PlanReader, Point
from specsot.events import Reason, TokenLogprobs
from specsot_master.core.plans.cuts import LoopRule, LoopWatch, StopStrings
from specsot_master.core.plans.text_pieces import TextPiece, TokenSpans

ANSWER = "[ANSWER]"
END = "[END]"


class AnswerText:
    """Cuts at stop strings. `trim`: a branch's body, without a leading [ANSWER] and white space around it.
    loops: when it ends because it repeats itself; None: never. shown: stop strings that are part of it.

    marked:   it began with [ANSWER].
    skipped:  raw characters left out at the beginning.
    released: raw characters behind those that are let through, or held only as trailing white space.
    """

    def __init__(
        self,
        stops: Iterable[str] = (),
        trim: bool = False,
        loops: LoopRule | None = None,
        shown: Collection[str] = (),
    ) -> None:
        self._watch = StopStrings(stops, shown)
        self._loops = None if loops is None else LoopWatch(loops)
        self._trim = trim
        self._begun = not trim
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
        return self._watch.hit is not None or (self._loops is not None and self._loops.repeats)

    @property
    def hit(self) -> str | None:
        return self._watch.hit

    def feed(self, text: str, early: bool = False) -> str:
        """What may be shown now. early: no stop string ends it yet."""
        text = text if self._begun else self._begin(text, last=False)
        text = text if early else self._watch.feed(text)
        return self._show(self._loops.feed(text) if self._loops else text)

    def flush(self) -> str:
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
            self.marked = True
            body = body.removeprefix(ANSWER).lstrip()
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
            self._tail = text[len(shown) :]
            text = shown
        if text:
            self._shown.append(text)
            self.length += len(text)
        return text


class FirstSequence:
    """Feed it pieces. `over` is set when the master, not the model's own end, must end it.

    reader:      None for a plain answer.
    least:       tokens of a plain answer in which stop strings are not looked for; shown: see AnswerText.
    limit:       tokens of a direct answer, the markers around it included.
    plan_tokens: tokens after which an unfinished plan is taken as it is.
    loops:       as for AnswerText.
    """

    def __init__(
        self,
        stops: Iterable[str],
        limit: int,
        reader: PlanReader | ListReader | None,
        plan_tokens: int = 0,
        loops: LoopRule | None = None,
        least: int = 0,
        shown: Collection[str] = (),
    ) -> None:
        stops = (*stops, END) if reader else tuple(stops)
        self._least = 0 if reader else least
        self._answer = AnswerText(stops, loops=loops, shown=shown)
        self._spans = TokenSpans()
        self._reader = reader
        self._limit = limit
        self._plan_tokens = plan_tokens
        self._start = None if reader else 0
        self._raw = LIST_HEAD if isinstance(reader, ListReader) else ""
        self._delta = ""
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
    def stop(self) -> str | None:
        return self._answer.hit

    @property
    def length(self) -> int:
        return self._answer.length

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of the direct answer, markers left out."""
        if self._start is None:
            return ()
        return self._spans.within(self._start, self._reach if self._is_cut else None)

    @property
    def written(self) -> int:
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
        self._delta += self._answer.feed(self._read(piece.text), len(self._spans) <= self._least)
        self.over = self._judge()
        if self.over:
            self._conclude()

    def finish(self) -> None:
        """No more text comes. Raises PlanError."""
        if not self.over:
            self._conclude()

    def take_raw(self) -> str:
        raw = self._raw
        self._raw = ""
        return raw

    def take_raw_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Of the tokens that wrote skeleton text since the last call."""
        taken = self._raw_logprobs
        self._raw_logprobs = []
        return tuple(taken)

    def take_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Of the answer's tokens whose text is out, each once; at the end of all that are left."""
        if self._start is None:
            return ()
        whole = self._concluded and not self._is_cut
        return self._spans.take_logprobs(self._start, None if whole else self._reach)

    def take_delta(self) -> str:
        delta = self._delta
        self._delta = ""
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
    raw = reader.text
    direct = reader.direct_text
    if len(direct) == len(raw):
        return 0
    if reader.finished and direct + END in raw:
        return raw.find(direct + END)
    held = next((size for size in range(len(END) - 1, 0, -1) if raw.endswith(END[:size])), 0)
    return len(raw) - held - len(direct)
