"""The text of one answer as tokens arrive: stop strings, markers, and what a client may see so far."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from specsot.core.list_plan import LIST_HEAD, ListReader
from specsot.core.skeleton import PlanReader, Point
from specsot.events import Reason, TokenLogprobs
from specsot_master.core.plans.cuts import LoopRule, LoopWatch, StopStrings
from specsot_master.core.plans.text_pieces import TextPiece, TokenSpans

# The marker with which the text of a branch may begin.
ANSWER = "[ANSWER]"
# The marker with which a plan, a direct answer or a branch may end.
END = "[END]"


class AnswerText:
    """Removes stop strings, loops and markers from one sequence's text while the text grows.

    `marked` is True if the text began with [ANSWER]. `skipped` counts the raw characters that were left out
    at the beginning. `released` counts the raw characters after those that were released, or that are held
    back only because they are trailing white space. `length` counts the characters of `text`.

        trim=True, feed("  [ANSWER] Hi ") -> "Hi"   skipped 11, released 3, one space held back
    """

    def __init__(
        self,
        stops: Iterable[str] = (),
        trim: bool = False,
        loops: LoopRule | None = None,
        shown: Collection[str] = (),
    ) -> None:
        """Create an empty text.

        stops: the stop strings; empty for none.
        trim: True for the text of a branch: a leading [ANSWER] and white space around the text are left out.
        loops: the rule that ends repetitive text, or None to never end it.
        shown: the stop strings that stay in the text; empty if none does.
        """
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
        """Everything that was released so far; "" before anything was."""
        return "".join(self._shown)

    @property
    def stopped(self) -> bool:
        """True once a stop string or the loop rule has ended the text."""
        return self._watch.hit is not None or (self._loops is not None and self._loops.repeats)

    @property
    def hit(self) -> str | None:
        """The stop string that ended the text, or None if none has."""
        return self._watch.hit

    def feed(self, text: str, early: bool = False) -> str:
        """Add raw text and return the part that may be shown now; "" once the text has been stopped. With
        `trim`, leading and trailing white space and a leading [ANSWER] are left out.

        text: the next text of the sequence.
        early: True if stop strings are not looked for yet, because too few tokens were written.
        """
        text = text if self._begun else self._begin(text, last=False)
        text = text if early else self._watch.feed(text)
        return self._show(self._loops.feed(text) if self._loops else text)

    def flush(self) -> str:
        """Return the text that was held back, as no more text comes; "" if none was, or once the text has
        been stopped. White space at the end of a trimmed text is dropped.
        """
        held = "" if self._begun else self._begin("", last=True)
        text = self._watch.feed(held) + self._watch.flush()
        return self._show(self._loops.feed(text) + self._loops.flush() if self._loops else text)

    def _begin(self, text: str, last: bool) -> str:
        """Return the text without leading white space and one [ANSWER]. Return "" as long as an [ANSWER] may
        still be incomplete. `marked` and `skipped` are set once the beginning is known.

        text: the next raw text.
        last: True if no more text comes.
        """
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
        """Release text; with `trim`, hold back trailing white space until more text follows. `released`
        counts the held-back white space, too.

        text: text without stop strings.
        """
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
    """Reads the text of ordinal 0, the sequence that is opened first: a direct answer, or a skeleton that may
    turn out to be one.

    `over` is set to a reason when the master, and not the model's own end token, must end the sequence.
    `ended` is True if an end token ended it.
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
        """Create a reader. With a reader, END is a stop string, too, and `least` has no effect.

        stops: the client's stop strings.
        limit: the most tokens of a direct answer, including the markers around it.
        reader: parses the plan language; None for a sequence that can only be a direct answer.
        plan_tokens: the number of tokens after which an unfinished plan is used as it is.
        loops: the rule that ends repetitive text, or None.
        least: how many first tokens of a direct answer are not searched for stop strings.
        shown: the stop strings that stay in the text; empty if none does.
        """
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
        # Characters of the direct answer that `take_delta` has returned.
        self.taken = 0
        # How many first characters of the direct answer may be taken yet; None for all. The rest is withheld.
        self.visible: int | None = None
        # True once the answer was cut after its first `visible` characters.
        self._abridged = False
        self.ended = False
        self.over: Reason | None = None

    @property
    def direct(self) -> bool:
        """True if the text so far is a direct answer; False while that is not known."""
        return self._reader is None or self._reader.kind == "direct"

    @property
    def planned(self) -> bool:
        """True if the text is a complete plan; False for a direct answer."""
        return self._reader is not None and self._reader.kind == "plan" and self._reader.finished

    @property
    def points(self) -> tuple[Point, ...]:
        """The points of the plan so far; () for a direct answer, or before the first point."""
        return self._reader.points if self._reader else ()

    @property
    def text(self) -> str:
        """The direct answer so far; "" for a plan."""
        return self._answer.text

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer, or None if none has."""
        return self._answer.hit

    @property
    def length(self) -> int:
        """Number of characters of the direct answer so far; 0 for a plan."""
        return self._answer.length

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of the direct answer, without markers and without withheld text; () while the text is not
        known to be a direct answer.
        """
        if self._start is None:
            return ()
        withheld = self.visible is not None
        return self._spans.within(self._start, self._reach if self._is_cut or withheld else None)

    @property
    def written(self) -> int:
        """Number of tokens that the sequence decoded, including an end token."""
        return len(self._spans) + self.ended

    @property
    def plan_tokens(self) -> int:
        """Number of tokens that are not part of a direct answer: the plan, or the markers that announce a
        direct answer. 0 for a sequence that can only be a direct answer. All tokens count as those of the
        plan while it is not known to be a direct answer.
        """
        if self._reader is None:
            return 0
        return self.written if self._start is None else len(self._spans) - len(self.tokens)

    def write(self, piece: TextPiece) -> None:
        """Add one piece of text; it is ignored once the sequence is over. If the sequence must end now,
        `over` is set: to STOP after a stop string, a loop or the end of the plan, and to LENGTH at the token
        limit.

        piece: the next piece of the sequence.

        Raises PlanError if the text is a plan in markers without a valid line.
        """
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
        """Conclude the text, as no more text comes; nothing happens if the sequence is over already.

        Raises PlanError if the text is a plan in markers without a valid line.
        """
        if not self.over:
            self._conclude()

    def abridge(self, text: str) -> None:
        """Cut the direct answer to its beginning; whatever follows is discarded.

        text: the first `visible` characters of the direct answer.
        """
        self._abridged = True
        self._delta = text[self.taken :]

    def take_raw(self) -> str:
        """Return the skeleton text since the last call; "" if there is none."""
        raw = self._raw
        self._raw = ""
        return raw

    def take_raw_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Return the logprobs of tokens that wrote skeleton text since the last call; () if there are none,
        or if the client asked for none.
        """
        taken = self._raw_logprobs
        self._raw_logprobs = []
        return tuple(taken)

    def take_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Return the logprobs of the answer's tokens whose text was released, each token once; at the end,
        those of all remaining tokens. Return () if there are none, or if the text is not known to be a direct
        answer. Logprobs of text that is withheld or was cut off are not returned.
        """
        if self._start is None:
            return ()
        whole = self._concluded and not self._is_cut and self.visible is None
        return self._spans.take_logprobs(self._start, None if whole else self._reach)

    def take_delta(self) -> str:
        """Return the text of the direct answer since the last call, without withheld text; "" if there is
        none. `taken` grows by the length of the text.
        """
        end = len(self._delta) if self.visible is None else max(self.visible - self.taken, 0)
        delta = self._delta[:end]
        self._delta = self._delta[end:]
        self.taken += len(delta)
        return delta

    @property
    def _is_cut(self) -> bool:
        """True if the answer ended before the sequence's last token, at a stop string or a marker."""
        return self._answer.stopped or self._marked_end

    @property
    def _reach(self) -> int:
        """The number of raw characters up to the end of the released text that is not withheld. It is counted
        from the beginning of the sequence.
        """
        released = self._answer.released
        if self.visible is not None:
            released = self.visible if self._abridged else min(released, self.visible)
        return (self._start or 0) + released

    def _read(self, text: str) -> str:
        """Return what raw text adds to a direct answer; "" if it adds nothing yet. Text that is not known to
        be a direct answer is added to the skeleton text. A text that is known to be a direct answer is not
        added.

        text: the next raw text.
        """
        if self._reader is None:
            return text
        if self._reader.kind != "direct":
            self._raw += text
        return self._grown(lambda reader: reader.feed(text))

    def _grown(self, move: Callable[[PlanReader | ListReader], object]) -> str:
        """Apply a change to the reader and return what it added to the direct answer; "" if it added nothing.
        The first character of the direct answer is noted when it is known.

        move: feeds the reader, or finishes it.
        """
        assert self._reader is not None
        before = len(self._reader.direct_text)
        move(self._reader)
        if self._start is None and self._reader.direct_text:
            self._start = _find_start(self._reader)
        return self._reader.direct_text[before:]

    def _judge(self) -> Reason | None:
        """Return why the master must end the sequence now, or None if it may continue. The reason is STOP
        after a stop string, a loop or the text's own end, and LENGTH at the limit of a direct answer, or at
        that of a plan while the text may be one.
        """
        reader = self._reader
        if self._answer.stopped:
            return Reason.STOP
        planning = reader is not None and self._start is None and reader.kind != "direct"
        full = len(self._spans) >= (self._plan_tokens if planning else self._limit)
        # At the token limit the grammar forced the end of the text, so the reason is LENGTH.
        if reader and reader.finished:
            self._marked_end = True
            return Reason.LENGTH if full else Reason.STOP
        return Reason.LENGTH if full else None

    def _conclude(self) -> None:
        """Release all text that was held back, and let the reader finish what it has read.

        Raises PlanError if the text is a plan in markers without a valid line.
        """
        if self._reader and not self._reader.finished:
            self._delta += self._answer.feed(self._grown(lambda reader: reader.finish()))
        self._delta += self._answer.flush()
        self._concluded = True


def _find_start(reader: PlanReader | ListReader) -> int:
    """Return the raw character at which the direct answer begins, as soon as the answer's first characters
    are certain; 0 if the answer is the whole text. It is counted in raw characters of the whole text.

    reader: a reader that has begun to read a direct answer.
    """
    raw = reader.text
    direct = reader.direct_text
    if len(direct) == len(raw):
        return 0
    if reader.finished and direct + END in raw:
        return raw.find(direct + END)
    held = next((size for size in range(len(END) - 1, 0, -1) if raw.endswith(END[:size])), 0)
    return len(raw) - held - len(direct)
