"""A conversation at a terminal or through a pipe: reads a line, does what it means, again.

Refuses to know models and options; the fleet lives on a loop of its own, so that a prompt may wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from concurrent.futures import CancelledError
from dataclasses import replace

from specsot.errors import SpecsotError
from specsot.events import Numbered, Reason
from specsot.view import View
from specsot_app.background import BackgroundLoop
from specsot_app.fleets import Fleet
from specsot_app.terminal.answering import AnsweredQuestion, Asker, RunningAnswer
from specsot_app.terminal.draw import in_short
from specsot_app.terminal.keyboard import LineInput
from specsot_app.terminal.show import OutputFormat, Streams, show
from specsot_app.terminal.talk import Clear, Conversation, Leave, Question, Reply, SetMode, Stop, parse_line


class Chat:
    """positions: of the model's context, where it is known."""

    def __init__(
        self,
        background: BackgroundLoop,
        fleet: Fleet,
        asker: Asker,
        keyboard: LineInput,
        streams: Streams,
        manner: OutputFormat,
        positions: int | None = None,
    ) -> None:
        self._background, self._fleet, self._asker = background, fleet, asker
        self._keyboard, self._streams, self._positions = keyboard, streams, positions
        self._manner: OutputFormat = manner
        self._typed: deque[str] = deque()  # while an answer was written
        self._failed = False

    def go_on(self, talk: Conversation) -> int:
        """Until somebody leaves; 1 when a question was not answered."""
        while (line := self._next_line(talk)) is not None:
            match parse_line(line):
                case Question(text):
                    talk = self._answer(talk, text)
                case SetMode(mode):
                    talk = replace(talk, mode=mode)
                    self._remark(f"mode {mode}")
                case Clear():
                    talk = replace(talk, turns=())
                    self._remark("forgotten")
                case Stop():
                    self._remark("nothing is being written")
                case Reply(reply):
                    self._remark(reply)
                case Leave():
                    break
        return int(self._failed)

    def _next_line(self, talk: Conversation) -> str | None:
        if self._typed:
            return self._typed.popleft()
        try:
            return self._keyboard.read("> " if talk.mode == "auto" else f"{talk.mode}> ")
        except KeyboardInterrupt:
            print(file=self._streams.err)
            return None

    def _answer(self, talk: Conversation, question: str) -> Conversation:
        """The conversation with this question and its answer, or without both where there is none."""
        answering = RunningAnswer(self._fleet, self._asker, self._show)
        work = self._background.start(answering.show(talk, question))
        for line in self._keyboard.during(work):
            if isinstance(parse_line(line), Stop):
                self._background.start(answering.stop())
            else:
                self._typed.append(line)
        try:
            return self._remember(work.result(), question)
        except CancelledError:
            self._remark("stopped before anything was written")
        except SpecsotError as error:
            self._failed = True
            self._remark(f"specsot: {error}")
        return talk

    def _remember(self, answered: AnsweredQuestion, question: str) -> Conversation:
        finished = answered.view.finished
        self._failed = self._failed or finished is None or finished.reason is Reason.FAILED
        return answered.talk.answered(question, answered.view.merged)

    async def _show(self, events: AsyncGenerator[Numbered], left_out: int) -> View:
        if left_out:
            self._remark(tell_left_out(left_out, self._positions))
        return await show(events, self._manner, self._streams, lambda view: in_short(view, self._positions))

    def _remark(self, text: str) -> None:
        """Beside the conversation, not in it."""
        if text:
            print(text, file=self._streams.err, flush=True)


def tell_left_out(exchanges: int, positions: int | None) -> str:
    which, fit, was = (
        ("exchange", "fits", "was") if exchanges == 1 else (f"{exchanges} exchanges", "fit", "were")
    )
    room = f" of {positions} positions" if positions else ""
    return f"the oldest {which} no longer {fit} the model's context{room}, and {was} left out"
