"""The loop of `specsot chat`: input lines, conversation history, one question at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import CancelledError
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from specsot.core.view import View
from specsot.errors import ContextLengthExceeded, InvalidRequest, SpecsotError
from specsot.events import Numbered, Reason, Started
from specsot.params import MODES, Ask, Message, Mode
from specsot_app.core.answer_view import summary
from specsot_app.fleet.opening import FleetClient
from specsot_app.runtime import BackgroundLoop
from specsot_app.terminal.line_input import LineInput
from specsot_app.terminal.show import OutputFormat, Streams, Summary, show

HELP = """\
/mode auto|sot|direct  let the model choose; force a plan; answer without one
/compare               the last question once more the other way, with a plan or without: both times
/stop                  end the answer that is being written, as Ctrl-C does; what is there stays
/clear                 forget the conversation
/help                  this
/exit                  leave, as Ctrl-D does"""


@dataclass(frozen=True, slots=True)
class Question:
    text: str


@dataclass(frozen=True, slots=True)
class SetMode:
    mode: Mode


@dataclass(frozen=True, slots=True)
class Compare: ...


@dataclass(frozen=True, slots=True)
class Stop: ...


@dataclass(frozen=True, slots=True)
class Clear: ...


@dataclass(frozen=True, slots=True)
class Leave: ...


@dataclass(frozen=True, slots=True)
class Reply:
    """Nothing to do but to say this."""

    reply: str = ""


ChatCommand = Question | SetMode | Compare | Stop | Clear | Leave | Reply

_ALONE: dict[str, ChatCommand] = {
    "": Reply(),
    "/compare": Compare(),
    "/stop": Stop(),
    "/clear": Clear(),
    "/help": Reply(HELP),
    "/exit": Leave(),
    "/quit": Leave(),
}


def parse_line(line: str) -> ChatCommand:
    """Lines that begin with a slash are for us, all others for the model."""
    said = line.strip()
    word, _, rest = said.partition(" ")
    if said in _ALONE:
        return _ALONE[said]
    if word == "/mode":
        return _mode_of(rest.strip())
    if word.startswith("/"):
        return Reply(f"no command is called {said}; /help tells all")
    return Question(said)


def _mode_of(name: str) -> ChatCommand:
    if name in MODES:
        return SetMode(name)
    return Reply(f"/mode takes one of {', '.join(MODES)}")


@dataclass(frozen=True, slots=True)
class ChatHistory:
    """What was said so far, oldest first: questions and answers take turns.

    system: what the model is told before all of it.
    """

    mode: Mode = "auto"
    system: str = ""
    turns: tuple[Message, ...] = ()

    def with_question(self, question: str) -> tuple[Message, ...]:
        """What the model is sent."""
        before = (Message("system", self.system),) if self.system else ()
        return (*before, *self.turns, Message("user", question))

    def answered(self, question: str, answer: str) -> ChatHistory:
        """Without an answer, as if nothing had been asked."""
        if not answer.strip():
            return self
        more = Message("user", question), Message("assistant", answer)
        return replace(self, turns=(*self.turns, *more))

    def without_oldest(self) -> ChatHistory:
        """Without the oldest question and its answer."""
        return replace(self, turns=self.turns[2:])


Asker = Callable[[ChatHistory, str], Ask]
Show = Callable[[AsyncGenerator[Numbered], int], Any]  # (events, exchanges that were left out) -> View
TOO_LARGE = "max_new_tokens"  # the field of a refusal because of the ring's memory


@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    """talk: what was asked, and so without the oldest exchanges where they did not fit any more."""

    talk: ChatHistory
    question: str
    view: View


class RunningAnswer:
    """`show` it once; `stop` it at any time."""

    def __init__(self, fleet: FleetClient, asker: Asker, show: Show) -> None:
        self._fleet, self._asker, self._show = fleet, asker, show
        self._task: asyncio.Task[Any] | None = None
        self._request: str | None = None
        self._stopping = False

    async def show(self, talk: ChatHistory, question: str) -> AnsweredQuestion:
        """Raises what asking raises; CancelledError when it was stopped before it began."""
        self._task = asyncio.current_task()
        fitting, first, rest = await self._begin(talk, question)
        async with aclosing(rest):
            left_out = (len(talk.turns) - len(fitting.turns)) // 2
            return AnsweredQuestion(fitting, question, await self._show(self._noted(first, rest), left_out))

    async def stop(self) -> None:
        """What is written already still comes. Told twice, or before it began: at once."""
        if self._request is not None and not self._stopping:
            self._stopping = True
            await self._fleet.cancel(self._request)
        elif self._task is not None:
            self._task.cancel()

    async def _begin(
        self, talk: ChatHistory, question: str
    ) -> tuple[ChatHistory, Numbered, AsyncGenerator[Numbered]]:
        """Leave the oldest exchanges out, one by one, while the model's context is too short for all."""
        while True:
            events = cast("AsyncGenerator[Numbered]", self._fleet.generate(self._asker(talk, question)))
            try:
                return talk, await anext(events), events
            except InvalidRequest as error:
                shorter = isinstance(error, ContextLengthExceeded) or error.field == TOO_LARGE
                if not (shorter and talk.turns):
                    raise
                talk = talk.without_oldest()

    async def _noted(self, first: Numbered, rest: AsyncGenerator[Numbered]) -> AsyncGenerator[Numbered]:
        if isinstance(first.event, Started):
            self._request = first.event.request
        yield first
        async for numbered in rest:
            yield numbered


class Chat:
    """positions: of the model's context, where it is known. drafter: something drafts."""

    def __init__(
        self,
        background: BackgroundLoop,
        fleet: FleetClient,
        asker: Asker,
        keyboard: LineInput,
        streams: Streams,
        manner: OutputFormat,
        positions: int | None = None,
        drafter: bool = False,
    ) -> None:
        self._background, self._fleet, self._asker = background, fleet, asker
        self._keyboard, self._streams, self._positions = keyboard, streams, positions
        self._manner: OutputFormat = manner
        self._typed: deque[str] = deque()  # while an answer was written
        self._failed = False
        self._drafter = drafter
        self._last: AnsweredQuestion | None = None

    def go_on(self, talk: ChatHistory) -> int:
        """Until somebody leaves; 1 when a question was not answered."""
        while (line := self._next_line(talk)) is not None:
            match parse_line(line):
                case Question(text):
                    talk = self._answer(talk, text)
                case SetMode(mode):
                    talk = replace(talk, mode=mode)
                    self._remark(f"mode {mode}")
                case Compare():
                    self._compare()
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

    def _next_line(self, talk: ChatHistory) -> str | None:
        if self._typed:
            return self._typed.popleft()
        try:
            return self._keyboard.read("> " if talk.mode == "auto" else f"{talk.mode}> ")
        except KeyboardInterrupt:
            print(file=self._streams.err)
            return None

    def _answer(self, talk: ChatHistory, question: str) -> ChatHistory:
        """The conversation with this question and its answer, or without both where there is none."""
        answered = self._ask(talk, question, lambda view: summary(view, self._drafter))
        if answered is None:
            return talk
        self._last = answered
        return answered.talk.answered(question, answered.view.merged)

    def _compare(self) -> None:
        """What is written now is shown, and not remembered."""
        if self._last is None:
            self._remark("nothing was answered yet")
            return
        first = self._last.view
        talk = replace(self._last.talk, mode="direct" if first.panels else "sot")
        self._ask(
            talk, self._last.question, lambda view: summary(first, self._drafter, view.finished, "/compare")
        )

    def _ask(self, talk: ChatHistory, question: str, line: Summary) -> AnsweredQuestion | None:
        """None: there was no answer."""
        answering = RunningAnswer(self._fleet, self._asker, partial(self._show, line))
        work = self._background.start(answering.show(talk, question))
        for typed in self._keyboard.during(work):
            if isinstance(parse_line(typed), Stop):
                self._background.start(answering.stop())
            else:
                self._typed.append(typed)
        try:
            answered = work.result()
        except CancelledError:
            self._remark("stopped before anything was written")
        except SpecsotError as error:
            self._failed = True
            self._remark(f"specsot: {error}")
        else:
            finished = answered.view.finished
            self._failed = self._failed or finished is None or finished.reason is Reason.FAILED
            return answered

    async def _show(self, line: Summary, events: AsyncGenerator[Numbered], left_out: int) -> View:
        if left_out:
            self._remark(tell_left_out(left_out, self._positions))
        return await show(events, self._manner, self._streams, line)

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
