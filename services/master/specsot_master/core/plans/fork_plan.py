"""The state machine of a request to a model that was trained to fork its answer by tags.

    start -> text -> [threads -> text ->]* finished

The texts of a block's threads are put into the answer, and the next sequence has the whole answer so far as
its prompt. So each sequence is ordinary decoding of its prompt. If the outlines cannot be forked (fewer than
two, too many, or too few tokens left) the same text is continued by a single sequence. `max_new_tokens`
bounds everything together, including the tags around threads.

The tags are ThreadWeaver's: github.com/facebookresearch/threadweaver at 2662232, README.md ("Inference State
Machine"). The white space is that of `AsyncBranchingController` without conclusions in
threadweaver_rl/verl/experimental/agent_loop/single_turn_agent_loop.py, as threadweaver_sft/src/simple_eval.py
has it. Blocks are not nested there: the first `</Thread>` ends a thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from specsot.core.frames import End, Outcome
from specsot.core.skeleton import MAX_POINTS, MAX_TITLE_BYTES, Point
from specsot.events import (
    BranchFinished,
    BranchStarted,
    BranchText,
    Event,
    Finished,
    MergedText,
    Numbered,
    Planned,
    Reason,
    Started,
    TokenLogprobs,
)
from specsot.params import Ask
from specsot_master.core.commands import REASON_OF_END, CloseSequence, Command, OpenAnswer, OpenBranch
from specsot_master.core.limits import MIN_BRANCH_TOKENS, split_budget
from specsot_master.core.plans.answer import AnswerText
from specsot_master.core.plans.forecast import Outlook
from specsot_master.core.plans.router import BY_ITSELF, Decision
from specsot_master.core.plans.text_pieces import TextPiece, TokenSpans
from specsot_master.core.stats import OutputTokens, RequestTally

# Tags of ThreadWeaver.
OUTLINES = "<Outlines>"
OUTLINES_END = "</Outlines>"
THREAD = "<Thread>"
THREAD_END = "</Thread>"
TAGS = (OUTLINES, OUTLINES_END, THREAD, THREAD_END, "<Outline>", "</Outline>", "<Parallel>", "</Parallel>")
# One outline with its number and its words.
_OUTLINE = re.compile(r"<Outline>\s*([0-9]+(?:\.[0-9]+)*)\s*:([^<]*)")
# The text that follows a block in the answer.
_BLOCK_END = "\n"


@dataclass(frozen=True, slots=True)
class Outline:
    """The outline of one thread, which a forking model writes before the thread itself.

    number: the number as the model wrote it, such as "1" or "2.1".
    title: the rest of the outline on one line, cut to the length of a title.
    """

    number: str
    title: str


@dataclass(frozen=True, slots=True)
class ForkTags:
    """The fork and join tags of one model, as its tokens.

    outlines_end: the token of the tag that ends the outlines.
    thread_end: the token of the tag that ends a thread.
    encode: returns the tokens of a text with tags.
    decode: returns the text of tokens; its second argument is True to leave special tokens out.
    """

    outlines_end: int
    thread_end: int
    encode: Callable[[str], tuple[int, ...]]
    decode: Callable[[Sequence[int], bool], str]

    @property
    def block_end(self) -> tuple[int, ...]:
        """The token ids that follow a block of threads in the answer."""
        return self.encode(_BLOCK_END)

    def head(self, outline: Outline, first: bool = True) -> tuple[int, ...]:
        """Return the token ids that a thread's prompt ends with, and that precede the thread in the answer.

        outline: the outline of the thread.
        first: True for the first thread of a block, whose head begins a new line in the answer.
        """
        return self.encode(f"{_BLOCK_END if first else ''}{THREAD}\n{outline.number}:")

    def outlines(self, written: Sequence[int]) -> tuple[Outline, ...]:
        """Return the outlines of the last block in these tokens. A number that occurs more than once is one
        outline, with the title and at the place of the first occurrence. Return () if there are fewer than
        two outlines or more than MAX_POINTS, so that they cannot be threads. Text before the last block's
        opening tag is not read; without such a tag the result is ().

        written: the tokens of the answer so far.
        """
        _, begun, block = self.decode(written, False).rpartition(OUTLINES)
        found: dict[str, str] = {}
        for number, words in _OUTLINE.findall(block) if begun else ():
            found.setdefault(number, _title(words))
        outlines = tuple(Outline(number, title) for number, title in found.items())
        return outlines if 2 <= len(outlines) <= MAX_POINTS else ()


def find_tags(
    encode: Callable[[str], tuple[int, ...]], decode: Callable[[Sequence[int], bool], str]
) -> ForkTags | None:
    """Return the model's tags, or None if some tag is not a single token, so that the model was not trained
    on them.

    encode: returns the tokens of a text, in which tags become control tokens.
    decode: returns the text of tokens; its second argument is True to leave special tokens out.
    """
    tokens = {tag: encode(tag) for tag in TAGS}
    if any(len(one) != 1 for one in tokens.values()):
        return None
    return ForkTags(tokens[OUTLINES_END][0], tokens[THREAD_END][0], encode, decode)


def may_fork(ask: Ask) -> bool:
    """Return True if this request's answer may be written in threads. It may not if an option of the request
    needs one sequence, such as a form, a window or `min_tokens`. It may not in mode direct either.

    ask: what the client asks for.
    """
    alone = (
        *(ask.form, ask.tools, ask.min_tokens, ask.polish, ask.finish_within_s is not None),
        *(ask.window, ask.pruning, ask.head_aware, ask.prompt_logprobs is not None),
        *(ask.ignore_eos, ask.stop_token_ids, ask.include_stop_str_in_output),
    )
    return ask.mode != "direct" and not any(alone)


def _title(words: str) -> str:
    """Return the words on one line, cut to MAX_TITLE_BYTES bytes; "" for white space.

    words: the text of an outline, which may have several lines.
    """
    line = " ".join(words.split())
    return line.encode()[:MAX_TITLE_BYTES].decode(errors="ignore")


# How every request is decided whose model forks by itself.
FORKED = Decision("auto", BY_ITSELF)
# Why such a request is answered by a single sequence, in words.
ALONE = "what is asked for needs one sequence"
# Blocks. Bounds the blocks of one answer; after them the answer is continued by a single sequence. Precedent:
# ThreadWeaver ends after 32 steps, two per block.
MAX_BLOCKS = 16


@dataclass(slots=True)
class Stretch:
    """A segment of a forking model's answer: what one sequence writes, outside of a block or as a thread.

    answer: the segment's text.
    budget: the most tokens that the sequence may decode.
    head: tokens before a thread's text in the answer; empty for a text between blocks.
    point: the thread's point; None for a text between blocks.
    spans: which token wrote which characters.
    opened: True once the sequence was opened.
    headed: True once the thread's head is in the answer.
    tag: the token that ended the sequence, or None if no token did.
    reason: why the sequence ended, or None while it runs or waits.
    ending: the closing tag after the text in the answer; empty if the sequence did not end by its own tag.
    waiting: text of this segment that follows the answer so far only once earlier threads are finished; empty
        if there is none.
    logprobs: the logprobs of the tokens of `waiting`.
    """

    answer: AnswerText
    budget: int
    head: tuple[int, ...] = ()
    point: Point | None = None
    spans: TokenSpans = field(default_factory=TokenSpans)
    opened: bool = False
    headed: bool = False
    tag: int | None = None
    reason: Reason | None = None
    ending: tuple[int, ...] = ()
    waiting: list[str] = field(default_factory=list[str])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])

    @property
    def live(self) -> bool:
        """True while the sequence runs; False before it is opened, and once it has ended."""
        return self.opened and self.reason is None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids of the text, without the one that ended it; () before the first one."""
        return self.spans.within(0, self.answer.released if self.answer.stopped else None)

    @property
    def placed(self) -> tuple[int, ...]:
        """The tokens of a thread in the answer with its head and its closing tag; empty if the thread is not
        in the answer.
        """
        return (*self.head, *self.tokens, *self.ending) if self.headed else ()

    @property
    def written(self) -> int:
        """Tokens that the sequence decoded, including the tag that ended it."""
        return len(self.spans) + (self.tag is not None)

    def read(self, pieces: Iterable[TextPiece]) -> str:
        """Add pieces and return the text that may be shown; "" if all of it is held back. Text after a stop
        string is dropped. The tokens and their spans are kept, and the tag that ended the sequence is noted.

        pieces: the next pieces of the sequence, one per token.
        """
        shown: list[str] = []
        for piece in pieces:
            if self.answer.stopped:
                break
            self.spans.add(piece)
            self.tag = piece.stop
            shown.append(self.answer.feed(piece.text))
        return "".join(shown)

    def take_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Return the logprobs of tokens whose text was released, each token once; at the segment's end, those
        of all remaining tokens. Return () if there are none, or if the client asked for none.
        """
        whole = self.reason is not None and not self.answer.stopped
        return self.spans.take_logprobs(0, None if whole else self.answer.released)


class ForkPlan:
    """The plan of one request to a forking model, with the same methods as `RequestPlan`.

    Ordinal 0 is the text outside of blocks; every other ordinal is a thread, numbered through all blocks.
    `context` holds the tokens after the prompt that the next sequence reads; in the end they are the tokens
    of the answer.
    """

    # The time limit that `RequestPlan` may have; a request with one never forks.
    deadline: None = None

    def __init__(self, ask: Ask, request: str, seed: int, model: str, now: float, tags: ForkTags) -> None:
        """Create the plan of a request. The first sequence may write all tokens of the request.

        ask: what the client asks for.
        request: the request's id, for the Started event.
        seed: the request's sampling seed, for the Started event.
        model: the public name of the model, for the Started event.
        now: when the request arrived, in seconds of the engine's clock.
        tags: the fork and join tags of the model.
        """
        self._ask = ask
        self._request = request
        self._seed = seed
        self._model = model
        self._tags = tags
        self._tally = RequestTally(now)
        self._number = 0
        self.context: tuple[int, ...] = ()
        self._solo = self._stretch(ask.limits.new_tokens)
        self._block = dict[int, Stretch]()
        self._outlines = dict[int, Outline]()
        self._threads = self._blocks = 0  # Threads and blocks so far.
        self._current = 0  # Threads of the current block that are completely in the answer.
        self._text = list[str]()
        self._length = 0
        self._written = self._headings = 0
        self.finished = False
        self.reason: str | None = None

    @property
    def all_opened(self) -> bool:
        """True if the request will open no further sequence, which is known only at its end."""
        return self.finished

    def apply_forecast(self, outlook: Outlook) -> None:
        """Do nothing: there is no forecast, as the number of forks is unknown.

        outlook: not used.
        """

    def start(self, prompt_tokens: int, now: float, found: int = 0, plans: bool = True) -> list[Command]:
        """Return the commands of an admitted request: the Started event, and the opening of the first
        sequence. If the request has no token left, the last events are returned instead of an opening.

        prompt_tokens: number of tokens of the prompt.
        now: the time of admission, in seconds of the engine's clock.
        found: how many first tokens of the prompt the ring's prefix cache had; 0 for none.
        plans: has no effect, as forks are never speculative.
        """
        self._tally.prompt_tokens = prompt_tokens
        self._tally.cached_tokens = min(found, prompt_tokens)
        started = Started(self._request, self._model, self._ask.mode, self._seed, prompt_tokens)
        return [self._tell(started), *self._go_on(now)]

    def on_step(self, outcomes: Iterable[Outcome], now: float) -> None:
        """Count one step of the ring; nothing happens after the end.

        outcomes: what the step did for the request's sequences.
        now: the time of the step, in seconds of the engine's clock.
        """
        if not self.finished:
            self._tally.step(outcomes, now)

    def on_text(self, ordinal: int, pieces: Sequence[TextPiece], now: float) -> list[Command]:
        """Handle new text of a sequence. Return the commands that follow, in order; an empty list if the
        sequence does not run, or without pieces. If a stop string ends the segment, its sequence is closed
        and the segment ends.

        ordinal: 0 for the text outside of blocks, else the thread's id.
        pieces: one piece per token, without the token that ended the sequence.
        now: the time of the step, in seconds of the engine's clock.
        """
        stretch = self._find(ordinal)
        if stretch is None or not pieces:
            return []
        step = sum(piece.token is not None for piece in pieces)
        told = self._show(ordinal, stretch, stretch.read(pieces), step)
        if stretch.answer.stopped:
            return [*told, CloseSequence(ordinal), *self._end(ordinal, stretch, Reason.STOP, now)]
        return told

    def on_end(self, ordinal: int, end: End, now: float) -> list[Command]:
        """Handle the end of a sequence. Return the commands that follow; an empty list if the sequence does
        not run.

        ordinal: 0 for the text outside of blocks, else the thread's id.
        end: why the sequence ended.
        now: the time of the step, in seconds of the engine's clock.
        """
        stretch = self._find(ordinal)
        return self._end(ordinal, stretch, REASON_OF_END[end], now) if stretch else []

    def pass_openings(self, now: float) -> list[Command]:
        """Return nothing: threads may begin alike.

        now: unused.
        """
        return []

    def ready(self) -> tuple[Point, ...]:
        """Return the threads that may be opened now, at most as many as may still run in parallel; () if none
        may, or after the end. Threads are returned in the order of their outlines.
        """
        if self.finished:
            return ()
        live = sum(one.live for one in self._block.values())
        waiting = [one.point for one in self._block.values() if one.point and not (one.opened or one.reason)]
        return tuple(waiting[: max(self._ask.limits.max_parallel - live, 0)])

    def preview(self, point: Point) -> OpenBranch:
        """Return the command that would open a thread. Nothing changes.

        point: a thread of the current block.
        """
        points = tuple(one.point for one in self._block.values() if one.point)
        return OpenBranch(point, points, (), self._block[point.id].budget)

    def open_branch(self, point: Point) -> list[Command]:
        """Mark a thread as opened, and return the command that opens it with its BranchStarted event.

        point: a thread that `ready` has returned.
        """
        order = self.preview(point)
        self._block[point.id].opened = True
        return [order, self._tell(BranchStarted(point.id, point.title, order.budget))]

    def head_of(self, thread: int) -> tuple[int, ...]:
        """Return the token ids that a thread's prompt has after the request's prompt and the context.

        thread: the id of a thread of the current block.

        Raises KeyError for an unknown thread.
        """
        return self._tags.head(self._outlines[thread])

    def cancel(self, now: float) -> list[Command]:
        """Close all running sequences. The text so far becomes the answer. Return the commands; an empty list
        after the end. Threads that were not opened end as cancelled, too.

        now: the present time, in seconds of the engine's clock.
        """
        if self.finished:
            return []
        commands: list[Command] = []
        for ordinal, stretch in {0: self._solo, **self._block}.items():
            if stretch.live:
                commands += [CloseSequence(ordinal), *self._close(ordinal, stretch, Reason.CANCELLED)]
        for stretch in self._block.values():
            stretch.reason = stretch.reason or Reason.CANCELLED
        return [*commands, *self._merge(), *self._finish(Reason.CANCELLED, now)]

    def _stretch(self, budget: int, head: tuple[int, ...] = (), point: Point | None = None) -> Stretch:
        """Return an empty segment.

        budget: the most tokens that its sequence may decode.
        head: tokens before a thread's text in the answer; empty for a text between blocks.
        point: the thread's point; None for a text between blocks.
        """
        return Stretch(AnswerText(self._ask.stop), budget, head, point)

    def _find(self, ordinal: int) -> Stretch | None:
        """Return the segment that a sequence writes, or None if the sequence does not run.

        ordinal: 0 for the text outside of blocks, else the thread's id.
        """
        stretch = self._block.get(ordinal) if ordinal else self._solo
        return stretch if stretch and stretch.live and not self.finished else None

    # --- text ---

    def _show(self, ordinal: int, stretch: Stretch, text: str, step: int = 0) -> list[Command]:
        """Return events for new text of a segment; an empty list if there is none. Text of a thread is told
        as the branch's text, and in the answer once all earlier threads are finished.

        ordinal: 0 for the text outside of blocks, else the thread's id.
        stretch: the segment that this sequence writes.
        text: its new text that may be shown.
        step: how many tokens the present step added.
        """
        logprobs = stretch.take_logprobs()
        if not text and not logprobs:
            return []
        stretch.waiting.append(text)
        stretch.logprobs += logprobs
        if not ordinal:
            return self._merged_events(*self._take(stretch), step)
        offset = stretch.answer.length - len(text)
        return [self._tell(BranchText(ordinal, offset, text, step, logprobs)), *self._merge()]

    def _merge(self) -> list[Command]:
        """Return the event for what the answer gains from the current block, or an empty list if it gains
        nothing. Threads are merged in order, each with its head, its text and its closing tag; the first
        unfinished thread streams live. A thread without text and without a closing tag gets no head.
        """
        text = ""
        logprobs = tuple[TokenLogprobs, ...]()
        threads = tuple(self._block.values())
        while self._current < len(threads):
            thread = threads[self._current]
            if not thread.headed and (thread.waiting or thread.ending):
                thread.headed, text = True, text + self._spell(thread.head)
                self._headings += len(thread.head)
            body, told = self._take(thread)
            text = text + body
            logprobs = logprobs + told
            if thread.reason is None:
                break
            text += self._spell(thread.ending)
            self._current += 1
        return self._merged_events(text, logprobs)

    def _take(self, stretch: Stretch) -> tuple[str, tuple[TokenLogprobs, ...]]:
        """Return the waiting text of a segment and its logprobs, and clear both; ("", ()) if nothing waits.

        stretch: a segment of the answer.
        """
        taken = "".join(stretch.waiting), tuple(stretch.logprobs)
        stretch.waiting = []
        stretch.logprobs = []
        return taken

    def _merged_events(
        self, text: str, logprobs: tuple[TokenLogprobs, ...] = (), step: int = 0
    ) -> list[Command]:
        """Return the event for new text of the answer, or an empty list if there is none. The text is added
        to the answer.

        text: the new text.
        logprobs: the logprobs of its tokens; empty if the client asked for none.
        step: how many tokens the present step added.
        """
        if not text and not logprobs:
            return []
        offset = self._length
        self._length = self._length + len(text)
        self._text.append(text)
        return [self._tell(MergedText(offset, text, logprobs, step))]

    def _spell(self, tokens: Sequence[int]) -> str:
        """Return the text of tags with the words around them. Tags are special tokens, which the client may
        have asked to leave out; then only those words are returned.

        tokens: the token ids of tags, and of the words around them; () returns "".
        """
        return self._tags.decode(tokens, self._ask.skip_special_tokens)

    # --- ends of sequences ---

    def _end(self, ordinal: int, stretch: Stretch, reason: Reason, now: float) -> list[Command]:
        """End a segment, and what follows from it: the next block, the next text, or the end of the answer. A
        thread's end changes nothing else until all threads of the block have ended.

        ordinal: 0 for the text outside of blocks, else the thread's id.
        stretch: the segment that this sequence writes.
        reason: why it ends.
        now: the present time, in seconds of the engine's clock.
        """
        told = self._close(ordinal, stretch, reason)
        if not ordinal:
            return [*told, *self._settle(reason, now)]
        over = all(one.reason for one in self._block.values())
        return [*told, *(self._join(now) if over else ())]

    def _close(self, ordinal: int, stretch: Stretch, reason: Reason) -> list[Command]:
        """Record the end of a segment and return the events for its remaining text, and for a thread its
        BranchFinished event. The closing tag counts only if the sequence ended by it (STOP) and no stop
        string came first.

        ordinal: 0 for the text outside of blocks, else the thread's id.
        stretch: the segment that this sequence writes.
        reason: why it ends.
        """
        text = stretch.answer.flush()
        stretch.reason = reason
        tag = self._tags.thread_end if ordinal else self._tags.outlines_end
        if reason is Reason.STOP and stretch.tag == tag and not stretch.answer.stopped:
            stretch.ending = (tag,)
        told = self._show(ordinal, stretch, text)
        if not ordinal:
            self.context += stretch.tokens
            self._written += stretch.written
            return told
        return [*told, self._tell(BranchFinished(ordinal, reason, len(stretch.tokens))), *self._merge()]

    def _settle(self, reason: Reason, now: float) -> list[Command]:
        """Handle the end of a text outside of blocks: open the threads of its outlines, continue it by a
        single sequence, or finish. The text continues only if its outlines were ended by their tag.

        reason: why the text ended.
        now: the present time, in seconds of the engine's clock.
        """
        if not self._solo.ending:
            return self._finish(reason, now)
        self.context += self._solo.ending
        told = self._merged_events(self._spell(self._solo.ending))
        return [*told, *(self._fork(now) or self._go_on(now))]

    def _fork(self, now: float) -> list[Command]:
        """Open a block with the threads of the last outlines. Return nothing if they cannot be forked; then
        the text is continued by a single sequence. They cannot be if there are fewer than two or more than
        MAX_POINTS, after MAX_BLOCKS blocks, or if the tokens left give a thread fewer than MIN_BRANCH_TOKENS.
        Otherwise return the Planned event.

        now: the present time, in seconds of the engine's clock.
        """
        outlines = self._tags.outlines((*self._solo.tokens, *self._solo.ending))
        tags = self._tags
        heads = [tags.head(outline, not place) for place, outline in enumerate(outlines)]
        rest = self._rest - sum(map(len, heads)) - len(tags.block_end) - MIN_BRANCH_TOKENS
        if not outlines or self._blocks == MAX_BLOCKS or rest < MIN_BRANCH_TOKENS * len(outlines):
            return []
        ids = range(self._threads + 1, self._threads + 1 + len(outlines))
        points = [Point(id, 0, outline.title) for id, outline in zip(ids, outlines)]
        budgets = split_budget(points, rest, self._ask.limits.max_branch_tokens, MIN_BRANCH_TOKENS)
        self._blocks = self._blocks + 1
        self._threads = ids[-1]
        self._current = 0
        self._outlines = dict(zip(ids, outlines))
        points = [Point(point.id, budgets[point.id], point.title) for point in points]
        self._block = {
            point.id: self._stretch(budgets[point.id], head, point) for point, head in zip(points, heads)
        }
        self._tally.enter("branches", now)
        return [self._tell(Planned(tuple(points)))]

    def _join(self, now: float) -> list[Command]:
        """Handle the end of a block: continue after it. If a thread did not end by its own tag, finish the
        answer, as the published procedure does: the model was not trained to continue after such a thread.
        The answer also ends if no token is left.

        now: the present time, in seconds of the engine's clock.
        """
        threads = self._block.values()
        if not all(one.ending for one in threads):
            return self._finish(_worst(one.reason for one in threads), now)
        self._take_block()
        self.context += self._tags.block_end
        self._headings += len(self._tags.block_end)
        return [*self._merged_events(self._spell(self._tags.block_end)), *self._go_on(now)]

    def _take_block(self) -> tuple[Stretch, ...]:
        """Add the threads of the current block to the context, remove the block, and return the threads; ()
        without a block. The tokens that the threads wrote are counted. Threads that are not in the answer add
        nothing to the context.
        """
        threads = tuple(self._block.values())
        self._block = {}
        for thread in threads:
            self.context += thread.placed
            self._written += thread.written
        return threads

    def _go_on(self, now: float) -> list[Command]:
        """Return the command that opens the next sequence with ordinal 0; or the last events, if no tokens
        are left. The sequence may write all tokens that are left.

        now: the present time, in seconds of the engine's clock.
        """
        if self._rest < 1:
            return self._finish(Reason.LENGTH, now)
        self._solo = self._stretch(self._rest)
        self._solo.opened = True
        self._tally.enter("direct", now)
        return [OpenAnswer(self._rest)]

    @property
    def _rest(self) -> int:
        """Number of tokens that the answer may still grow by; 0 or less if it is full."""
        return self._ask.limits.new_tokens - len(self.context)

    def _finish(self, reason: Reason, now: float) -> list[Command]:
        """Return the last event: Finished with the whole text, its tokens and the request's statistics. The
        stop string is named only for the reason STOP; threads of an open block are added to the context
        first.

        reason: why the answer ended.
        now: the present time, in seconds of the engine's clock.
        """
        self.finished = True
        self.reason = reason.value
        writers = self._solo, *self._take_block()
        counts = OutputTokens(self._written, 0, len(self.context) - self._headings, self._headings)
        way = FORKED.way(bool(self._blocks), not self._blocks)
        figures = self._tally.close(*way, counts, self._threads, now)
        hits = (one.answer.hit for one in writers if one.answer.hit)
        stop = next(hits, None) if reason is Reason.STOP else None
        return [self._tell(Finished(reason, "".join(self._text), self.context, figures, stop))]

    def _tell(self, event: Event) -> Numbered:
        """Return an event with the next number. Numbers count up from 0.

        event: an event for the client.
        """
        number = self._number
        self._number = self._number + 1
        return Numbered(number, event)


def _worst(reasons: Iterable[Reason | None]) -> Reason:
    """Return FAILED if a thread failed, else LENGTH if one reached its limit, else STOP.

    reasons: why the threads ended; None for one that has not, which counts as STOP.
    """
    among = set(reasons)
    return next((one for one in (Reason.FAILED, Reason.LENGTH) if one in among), Reason.STOP)
