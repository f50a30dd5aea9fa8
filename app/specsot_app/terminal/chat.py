"""Runs the loop of `specsot chat`: input lines, conversation history, one question at a time."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import textwrap
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import CancelledError
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from specsot.core.view import View
from specsot.errors import ContextLengthExceeded, InvalidRequest, SpecsotError
from specsot.events import NO_PLAN, Numbered, Reason, Started
from specsot.params import MAX_SEED, MODES, Ask, Message, Mode
from specsot_app.core.answer_view import counted, has_no_plan, summary
from specsot_app.fleet.opening import FleetClient
from specsot_app.runtime import BackgroundLoop
from specsot_app.terminal.line_input import LineInput
from specsot_app.terminal.show import OutputFormat, Streams, Summary, show

HELP = """\
/mode auto|sot|direct  let the model choose; force a plan; answer without one
/compare               the last question once more the other way, with a plan or without: both times
/retry                 another answer to the last question; at temperature 0.7 where 0 would write the same
/system TEXT           what the model is told before the conversation; without TEXT: nothing
/seed N                of the answers from now on; without N: drawn each time
/save FILE             keep the conversation as JSON: role and content of each message
/load FILE             go on with a conversation that was kept
/stop                  end the answer that is being written, as Ctrl-C does; what is there stays
/clear                 forget the conversation
/help                  this
/exit                  leave, as Ctrl-D does
Enter sends; Alt-Enter begins another line, and what is pasted keeps its lines"""


# Column of HELP in which a command's explanation begins.
COUNT_TOKENS_FROM = 23
# Temperature of another answer if temperature 0 would repeat the first. Precedent: the web page uses the
# same.
FRESH = 0.7


def fitting(text: str, columns: int) -> str:
    """Return HELP wrapped between words to so many columns."""
    indent = " " * min(COUNT_TOKENS_FROM, columns // 2)
    lines = ((line, indent if line.startswith("/") else "") for line in text.splitlines())
    return "\n".join(textwrap.fill(line, columns, subsequent_indent=more) for line, more in lines)


def anew(ask: Ask) -> Ask:
    """Return the question for another answer: with temperature FRESH if the answer would be the same."""
    if ask.sampling.temperature or ask.seed is not None:
        return ask
    return replace(ask, sampling=replace(ask.sampling, temperature=FRESH))


_COMMAND = re.compile(r"(/[a-z]+)(?: +(.*))?")


def parse_line(line: str) -> tuple[str, str]:
    """Return a command and its argument, or ("", question).

    Only a line that begins like a command, such as "/mode direct", is one; a path or pasted text is a
    question.
    """
    said = line.strip()
    found = _COMMAND.fullmatch(said)
    return (found[1], found[2] or "") if found else ("", said)


@dataclass(frozen=True, slots=True)
class ChatHistory:
    """The conversation so far, oldest first; questions and answers alternate.

    mode: how answers are planned.
    system: the system message.
    turns: the messages.
    seed: the seed of answers; None draws one for each answer.
    """

    mode: Mode = "auto"
    system: str = ""
    turns: tuple[Message, ...] = ()
    seed: int | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return the system message, if any, and all turns."""
        before = (Message("system", self.system),) if self.system else ()
        return (*before, *self.turns)

    def with_question(self, question: str) -> tuple[Message, ...]:
        """Return the messages of a request that asks this question."""
        return (*self.messages, Message("user", question))

    def answered(self, question: str, answer: str) -> ChatHistory:
        """Return the conversation with this exchange; with an empty answer, the conversation stays
        as it was.
        """
        if not answer.strip():
            return self
        more = Message("user", question), Message("assistant", answer)
        return replace(self, turns=(*self.turns, *more))

    def without_last(self, question: str) -> ChatHistory:
        """Return the conversation without this question and its answer, if they are the newest exchange."""
        asked = self.turns[-2:-1] == (Message("user", question),)
        return replace(self, turns=self.turns[:-2]) if asked else self

    def without_oldest(self) -> ChatHistory:
        """Return the conversation without its oldest exchange."""
        return replace(self, turns=self.turns[2:])


def is_seed(text: str) -> bool:
    """Return whether the text is a seed. Its length is checked first, since Python refuses to read thousands
    of digits.
    """
    return text.isdecimal() and len(text) < 100 and int(text) <= MAX_SEED


def write_messages(talk: ChatHistory) -> str:
    """Return the conversation as JSON."""
    listed = [{"role": one.role, "content": one.content} for one in talk.messages]
    return json.dumps(listed, ensure_ascii=False, indent=1) + "\n"


def read_messages(talk: ChatHistory, text: str) -> ChatHistory:
    """Return the same chat with the messages of a saved one. Raises ValueError."""
    try:
        read = tuple(Message(str(one["role"]), _text_of(one["content"])) for one in json.loads(text))
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError("not a list of messages of text") from error
    told = bool(read) and read[0].role == "system"
    system, turns = (read[0].content, read[1:]) if told else ("", read)
    if [one.role for one in turns] != ["user", "assistant"] * (len(turns) // 2):
        raise ValueError("questions and answers must take turns")
    return replace(talk, system=system, turns=turns)


def _text_of(content: Any) -> str:
    """Return a message's text, or the joined texts of its parts. Raises KeyError, TypeError."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


Asker = Callable[[ChatHistory, str], Ask]
# (events, number of exchanges that were left out) -> View
Show = Callable[[AsyncGenerator[Numbered], int], Any]
# The field that an error names if the request does not fit the ring's memory.
TOO_LARGE = "max_new_tokens"


@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    """A question with its answer.

    talk: the conversation as it was sent, without the oldest exchanges if they did not fit.
    question: the question.
    view: the answer.
    """

    talk: ChatHistory
    question: str
    view: View


class RunningAnswer:
    """An answer in progress. Call `show` once; `stop` may be called at any time."""

    def __init__(self, fleet: FleetClient, asker: Asker, show: Show) -> None:
        self._fleet = fleet
        self._asker = asker
        self._show = show
        self._task: asyncio.Task[Any] | None = None
        self._request: str | None = None
        self._stopping = False

    async def show(self, talk: ChatHistory, question: str) -> AnsweredQuestion:
        """Ask, and show the answer. Raises what asking raises, and CancelledError if it was stopped before it
        began.
        """
        self._task = asyncio.current_task()
        fitting, first, rest = await self._begin(talk, question)
        async with aclosing(rest):
            left_out = (len(talk.turns) - len(fitting.turns)) // 2
            return AnsweredQuestion(fitting, question, await self._show(self._noted(first, rest), left_out))

    async def stop(self) -> None:
        """Cancel the request, and let what was written arrive. A second call, or one before the request
        began, ends at once.
        """
        if self._request is not None and not self._stopping:
            self._stopping = True
            await self._fleet.cancel(self._request)
        elif self._task is not None:
            self._task.cancel()

    async def _begin(
        self, talk: ChatHistory, question: str
    ) -> tuple[ChatHistory, Numbered, AsyncGenerator[Numbered]]:
        """Send the request, and return the conversation that fits, the first event, and the other events.

        The oldest exchanges are left out, one by one, while the model's context is too short for all of them
        and an answer of the usual length.
        """
        while True:
            ask = self._asker(talk, question)
            if talk.turns:
                ask = replace(ask, limits=replace(ask.limits, max_new_tokens=ask.limits.new_tokens))
            events = cast("AsyncGenerator[Numbered]", self._fleet.generate(ask))
            try:
                return talk, await anext(events), events
            except InvalidRequest as error:
                shorter = isinstance(error, ContextLengthExceeded) or error.field == TOO_LARGE
                if not (shorter and talk.turns):
                    raise
                talk = talk.without_oldest()

    async def _noted(self, first: Numbered, rest: AsyncGenerator[Numbered]) -> AsyncGenerator[Numbered]:
        """Yield the events, and note the request's id."""
        if isinstance(first.event, Started):
            self._request = first.event.request
        yield first
        async for numbered in rest:
            yield numbered


class Chat:
    """The chat's loop.

    positions: positions of the model's context, if known. drafter: whether the fleet has a drafter.
    """

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
        self._background = background
        self._fleet = fleet
        self._asker = asker
        self._keyboard = keyboard
        self._streams = streams
        self._positions = positions
        self._manner: OutputFormat = manner
        # Lines that were typed while an answer was written.
        self._typed: deque[str] = deque()
        self._failed = False
        self._drafter = drafter
        self._last: AnsweredQuestion | None = None

    def go_on(self, talk: ChatHistory) -> int:
        """Run until the user leaves; return 1 if a question was not answered, else 0."""
        while (line := self._next_line(talk)) is not None:
            match parse_line(line):
                case "", "":
                    pass
                case "", question:
                    talk = self._answer(talk, question)
                case "/mode", mode if mode in MODES:
                    talk = replace(talk, mode=mode)
                    self._remark(f"mode {mode}")
                case "/mode", _:
                    self._remark(f"/mode takes one of {', '.join(MODES)}")
                case "/system", text:
                    talk = replace(talk, system=text)
                    self._remark("system message set" if text else "no system message")
                case "/seed", number if not number or is_seed(number.removeprefix("-")):
                    drawn = not number or number.startswith("-")  # as everywhere, a negative seed is random
                    talk = replace(talk, seed=None if drawn else int(number))
                    self._remark("a seed is drawn each time" if drawn else f"seed {number}")
                case "/seed", _:
                    self._remark(f"/seed takes a whole number up to {MAX_SEED}, or nothing")
                case "/compare", "":
                    self._compare()
                case "/retry", "" if self._last is not None:
                    talk = self._answer(
                        talk.without_last(self._last.question), self._last.question, again=True
                    )
                case "/retry", "":
                    self._remark("nothing was answered yet")
                case ("/save" | "/load") as word, file:
                    talk = self._keep(talk, word, Path(file).expanduser()) if file else talk
                    self._remark("" if file else f"{word} needs a file")
                case "/clear", "":
                    talk = replace(talk, turns=())
                    self._remark("forgotten")
                case "/stop", "":
                    self._remark("nothing is being written")
                case "/help", "":
                    self._remark(fitting(HELP, shutil.get_terminal_size().columns))
                case (("/exit" | "/quit"), ""):
                    break
                case _:
                    self._remark(f"no command is called {line.strip()}; /help tells all")
        return int(self._failed)

    def _keep(self, talk: ChatHistory, word: str, file: Path) -> ChatHistory:
        """Save or load the conversation."""
        try:
            if word == "/save":
                file.write_text(write_messages(talk), "utf-8")
            else:
                talk = read_messages(talk, file.read_text("utf-8"))
                self._last = None
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            self._remark(f"{file}: {why}")
        else:
            done = "kept in" if word == "/save" else "read from"
            self._remark(f"{counted(len(talk.turns) // 2, 'exchange')} {done} {file}")
        return talk

    def _next_line(self, talk: ChatHistory) -> str | None:
        """Return the next line; None at the end of the input or at Ctrl-C."""
        if self._typed:
            return self._typed.popleft()
        try:
            return self._keyboard.read("> " if talk.mode == "auto" else f"{talk.mode}> ")
        except KeyboardInterrupt:
            print(file=self._streams.err)
            return None

    def _answer(self, talk: ChatHistory, question: str, again: bool = False) -> ChatHistory:
        """Return the conversation with this exchange, or unchanged if there was no answer."""
        answered = self._ask(talk, question, lambda view: summary(view, self._drafter), again)
        if answered is None:
            return talk
        self._last = answered
        return answered.talk.answered(question, answered.view.merged)

    def _compare(self) -> None:
        """Answer the last question the other way; the answer is shown, but not added to the conversation."""
        if self._last is None:
            self._remark("nothing was answered yet")
            return
        first = self._last.view
        if has_no_plan(first.finished):
            self._remark(f"nothing to compare with: {NO_PLAN}")
            return
        talk = replace(self._last.talk, mode="direct" if first.panels else "sot")
        self._ask(
            talk, self._last.question, lambda view: summary(first, self._drafter, view.finished, "/compare")
        )

    def _ask(
        self, talk: ChatHistory, question: str, line: Summary, again: bool = False
    ) -> AnsweredQuestion | None:
        """Ask and show; return None if there was no answer. again: another answer than before is wanted."""

        def asker(talk: ChatHistory, question: str) -> Ask:
            asked = self._asker(talk, question)
            return anew(asked) if again else asked

        answering = RunningAnswer(self._fleet, asker, partial(self._show, line))
        work = self._background.start(answering.show(talk, question))
        for typed in self._keyboard.during(work):
            if parse_line(typed) == ("/stop", ""):
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
        """Show an answer, and mention exchanges that were left out."""
        if left_out:
            self._remark(tell_left_out(left_out, self._positions))
        return await show(events, self._manner, self._streams, line)

    def _remark(self, text: str) -> None:
        """Print a remark to the error stream."""
        if text:
            print(text, file=self._streams.err, flush=True)


def tell_left_out(exchanges: int, positions: int | None) -> str:
    """Return the remark about exchanges that did not fit."""
    which, fit, was = (
        ("exchange", "fits", "was") if exchanges == 1 else (f"{exchanges} exchanges", "fit", "were")
    )
    room = f" of {positions} positions" if positions else ""
    return f"the oldest {which} no longer {fit} the model's context{room}, and {was} left out"
