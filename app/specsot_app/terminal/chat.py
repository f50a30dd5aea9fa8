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
from specsot_app.core.answer_view import has_no_plan, summary, with_noun
from specsot_app.fleet.opening import FleetClient
from specsot_app.runtime import BackgroundLoop
from specsot_app.terminal.line_input import LineInput
from specsot_app.terminal.show import OutputFormat, Streams, Summary, show

# Text that "/help" prints; a command's explanation begins in column HELP_COLUMN.
HELP = """\
/mode auto|sot|direct  let the model choose; force a plan; answer without one
/compare               the last question once more the other way, with a plan or without: both times
/retry                 another answer to the last question; at temperature 0.7 where 0 would write the same
/system TEXT           system message before the conversation; without TEXT: none
/seed N                seed of the answers from now on; without N: a random one each time
/save FILE             save the conversation as JSON: role and content of each message
/load FILE             continue a conversation that was saved
/stop                  end the answer that is being written, as Ctrl-C does; the text so far stays
/clear                 forget the conversation
/help                  show this list
/exit                  leave, as Ctrl-D does
Enter sends; Alt-Enter begins another line, and pasted text keeps its lines"""


# Column of HELP in which a command's explanation begins.
HELP_COLUMN = 23
# Temperature of another answer if temperature 0 would repeat the first. Precedent: the web page uses the
# same.
RETRY_TEMPERATURE = 0.7


def wrapped_help(help_text: str, columns: int) -> str:
    """Return a help text wrapped between words to a terminal's width; explanations that continue are
    indented.

    A line that does not begin with "/" continues in the first column. The indentation is at most half of
    `columns`.

    help_text: Lines, of which those that begin with "/" have an explanation from column HELP_COLUMN on.
    columns: Width of the terminal, in characters.
    """
    indent = " " * min(HELP_COLUMN, columns // 2)
    lines = ((line, indent if line.startswith("/") else "") for line in help_text.splitlines())
    return "\n".join(
        textwrap.fill(line, columns, subsequent_indent=indent_next) for line, indent_next in lines
    )


def with_retry_temperature(ask: Ask) -> Ask:
    """Return the request so that it may get another answer: with temperature RETRY_TEMPERATURE if its
    temperature is 0 and no seed is given.

    With temperature 0 and a seed, the answer would be the same, and the request stays unchanged all the
    same.

    ask: The request. If it has a temperature or a seed, it is returned unchanged.
    """
    if ask.sampling.temperature or ask.seed is not None:
        return ask
    return replace(ask, sampling=replace(ask.sampling, temperature=RETRY_TEMPERATURE))


# Matches a line that is a command: a slash and letters, then perhaps a space and an argument.
_COMMAND = re.compile(r"(/[a-z]+)(?: +(.*))?")


def parse_line(line: str) -> tuple[str, str]:
    """Return (command, its argument), or ("", question). An empty line gives ("", "").

    Only a line that begins like a command, such as "/mode direct", is one; a path or pasted text is a
    question.

    A command without an argument has the argument "". Whether a command exists is not checked.

    line: The text that the user sent, which may have several lines.
    """
    stripped = line.strip()
    match = _COMMAND.fullmatch(stripped)
    return (match[1], match[2] or "") if match else ("", stripped)


@dataclass(frozen=True, slots=True)
class ChatHistory:
    """The conversation so far, oldest first; questions and answers alternate.

    mode: Mode of the next question: "auto", "sot" or "direct".
    system: The system message; empty: none.
    turns: Messages of user and assistant in turn.
    seed: The seed of answers; None draws one for each answer.
    """

    mode: Mode = "auto"
    system: str = ""
    turns: tuple[Message, ...] = ()
    seed: int | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return the system message, if it is not empty, and all turns."""
        system_messages = (Message("system", self.system),) if self.system else ()
        return (*system_messages, *self.turns)

    def with_question(self, question: str) -> tuple[Message, ...]:
        """Return the messages of a request: the system message, the conversation, then a question.

        question: The text that the user sent.
        """
        return (*self.messages, Message("user", question))

    def with_exchange(self, question: str, answer: str) -> ChatHistory:
        """Return the conversation with this exchange; with an empty answer, the conversation stays as it was.

        An answer of white space alone counts as empty.

        question: The text that the user sent.
        answer: The merged text of the answer.
        """
        if not answer.strip():
            return self
        exchange = Message("user", question), Message("assistant", answer)
        return replace(self, turns=(*self.turns, *exchange))

    def without_last_exchange(self, question: str) -> ChatHistory:
        """Return the conversation without its newest exchange, if that exchange is a given question and its
        answer; otherwise return it unchanged.

        question: The question.
        """
        is_last = self.turns[-2:-1] == (Message("user", question),)
        return replace(self, turns=self.turns[:-2]) if is_last else self

    def without_oldest_exchange(self) -> ChatHistory:
        """Return the conversation without its oldest exchange; an empty one stays empty."""
        return replace(self, turns=self.turns[2:])


def is_seed(text: str) -> bool:
    """Return whether a text is a seed: a whole number from 0 to MAX_SEED.

    The text's length is checked first, since Python refuses to read thousands of digits.

    A sign, a fraction and an empty text give False.

    text: Argument of "/seed", without a sign.
    """
    return text.isdecimal() and len(text) < 100 and int(text) <= MAX_SEED


def write_messages(history: ChatHistory) -> str:
    """Return the conversation, with the system message, as JSON: a list of objects with role and content.

    Without a system message, the list begins with the first question. The text ends in a line break.

    history: The conversation.
    """
    messages = [{"role": message.role, "content": message.content} for message in history.messages]
    return json.dumps(messages, ensure_ascii=False, indent=1) + "\n"


def read_messages(history: ChatHistory, text: str) -> ChatHistory:
    """Return the chat with the messages of a saved one; its mode and seed stay.

    A first message with the role "system" becomes the system message; without such a message, the system
    message is removed. An empty list gives a chat without messages. Every question must have its answer: an
    odd number of turns raises ValueError too. Invalid JSON raises json.JSONDecodeError, which is a
    ValueError.

    history: The present chat.
    text: JSON as `write_messages` returns it.
    Raises ValueError if the text is no list of messages, or questions and answers do not take turns.
    """
    try:
        messages = tuple(
            Message(str(message["role"]), _text_of(message["content"])) for message in json.loads(text)
        )
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError("not a list of messages of text") from error
    has_system = bool(messages) and messages[0].role == "system"
    system, turns = (messages[0].content, messages[1:]) if has_system else ("", messages)
    if [message.role for message in turns] != ["user", "assistant"] * (len(turns) // 2):
        raise ValueError("questions and answers must take turns")
    return replace(history, system=system, turns=turns)


def _text_of(content: Any) -> str:
    """Return a message's text, or the joined texts of its parts.

    content: A string, or a list of objects with `text`.
    Raises KeyError or TypeError for content that has no text.
    """
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


# Makes the request from the conversation and the question.
Asker = Callable[[ChatHistory, str], Ask]
# Shows events; called with them and the number of exchanges that were left out, and returns the last view.
Show = Callable[[AsyncGenerator[Numbered], int], Any]
# The field that an error names if the request does not fit the ring's memory.
TOO_LARGE = "max_new_tokens"


@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    """A question with its answer.

    history: The conversation as it was sent, without the oldest exchanges if they did not fit.
    question: The text that the user sent.
    view: The state after the request's last event.
    """

    history: ChatHistory
    question: str
    view: View


class RunningAnswer:
    """An answer in progress. Call `show` once; `stop` may be called at any time. Runs on the background loop.

    fleet: The client that answers.
    make_ask: Makes the request from a history and a question.
    show: Shows the events, and returns the view after the last one.
    """

    def __init__(self, fleet: FleetClient, make_ask: Asker, show: Show) -> None:
        self._fleet = fleet
        self._make_ask = make_ask
        self._show = show
        self._task: asyncio.Task[Any] | None = None
        self._request: str | None = None
        self._stopping = False

    async def show(self, history: ChatHistory, question: str) -> AnsweredQuestion:
        """Send a request, show its events, and return the question with its answer.

        The returned history is the one that was sent: if the conversation did not fit the context, it lacks
        the oldest exchanges, and the number of these is passed to the function that shows the events.

        history: The conversation before the question.
        question: The text that the user sent.
        Raises what the request raises, and CancelledError if it was stopped before it began.
        """
        self._task = asyncio.current_task()
        sent_history, first_event, later_events = await self._send(history, question)
        async with aclosing(later_events):
            left_out = (len(history.turns) - len(sent_history.turns)) // 2
            return AnsweredQuestion(
                sent_history,
                question,
                await self._show(self._record_request_id(first_event, later_events), left_out),
            )

    async def stop(self) -> None:
        """Cancel the request, and let the text that was written arrive. Before the request began, and at a
        second call, end at once: `show` then raises CancelledError.

        If `show` was not called yet, nothing happens.
        """
        if self._request is not None and not self._stopping:
            self._stopping = True
            await self._fleet.cancel(self._request)
        elif self._task is not None:
            self._task.cancel()

    async def _send(
        self, history: ChatHistory, question: str
    ) -> tuple[ChatHistory, Numbered, AsyncGenerator[Numbered]]:
        """Send the request, and return the conversation that fits, the first event, and the later events.

        The oldest exchanges are left out, one by one, while the model's context is too short for all of them
        and an answer of the usual length. Raises InvalidRequest if the question alone does not fit.

        With earlier turns, the request asks explicitly for the usual number of new tokens, so that the
        oldest exchanges are left out instead of the answer being shortened. Every other error of the request
        is raised unchanged.

        history: The conversation before the question.
        question: The text that the user sent.
        """
        while True:
            ask = self._make_ask(history, question)
            if history.turns:
                ask = replace(ask, limits=replace(ask.limits, max_new_tokens=ask.limits.new_tokens))
            events = cast("AsyncGenerator[Numbered]", self._fleet.generate(ask))
            try:
                return history, await anext(events), events
            except InvalidRequest as error:
                shorter = isinstance(error, ContextLengthExceeded) or error.field == TOO_LARGE
                if not (shorter and history.turns):
                    raise
                history = history.without_oldest_exchange()

    async def _record_request_id(
        self, first_event: Numbered, later_events: AsyncGenerator[Numbered]
    ) -> AsyncGenerator[Numbered]:
        """Yield all events, and record the request's id, which `stop` needs.

        If the first event is not `Started`, no id is recorded.

        first_event: The first event, which has the id unless the request failed.
        later_events: The events after the first one.
        """
        if isinstance(first_event.event, Started):
            self._request = first_event.event.request
        yield first_event
        async for numbered in later_events:
            yield numbered


class Chat:
    """The loop of a chat: reads lines, runs commands, asks questions and keeps the conversation.

    background: The loop on which requests run.
    fleet: The client that answers.
    make_ask: Makes a request from a history and a question.
    keyboard: The source of the user's lines.
    streams: The streams of answers and of remarks.
    output_format: Format in which answers are shown: live panels or plain text.
    max_positions: Number of positions of the model's context; None if unknown.
    has_drafter: True if the fleet has a drafter, which summaries mention.
    """

    def __init__(
        self,
        background: BackgroundLoop,
        fleet: FleetClient,
        make_ask: Asker,
        keyboard: LineInput,
        streams: Streams,
        output_format: OutputFormat,
        max_positions: int | None = None,
        has_drafter: bool = False,
    ) -> None:
        self._background = background
        self._fleet = fleet
        self._make_ask = make_ask
        self._keyboard = keyboard
        self._streams = streams
        self._max_positions = max_positions
        self._output_format: OutputFormat = output_format
        # Lines that were typed while an answer was written.
        self._typed_lines: deque[str] = deque()
        self._failed = False
        self._has_drafter = has_drafter
        self._last: AnsweredQuestion | None = None

    def run(self, history: ChatHistory) -> int:
        """Run until the user leaves; return 1 if a question was not answered, else 0.

        An empty line is ignored. A command with a wrong argument, or an unknown one, only prints a remark.
        "/exit", "/quit", the end of the input and Ctrl-C at the prompt end the loop. A later answer does not
        undo a failed one. "/retry" and "/compare" before the first answer print a remark.

        history: The conversation to begin with.
        """
        while (line := self._next_line(history)) is not None:
            match parse_line(line):
                case "", "":
                    pass
                case "", question:
                    history = self._answer(history, question)
                case "/mode", mode if mode in MODES:
                    history = replace(history, mode=mode)
                    self._print_remark(f"mode {mode}")
                case "/mode", _:
                    self._print_remark(f"/mode takes one of {', '.join(MODES)}")
                case "/system", text:
                    history = replace(history, system=text)
                    self._print_remark("system message set" if text else "no system message")
                case "/seed", number if not number or is_seed(number.removeprefix("-")):
                    # A negative seed means a random one, as in requests.
                    is_random = not number or number.startswith("-")
                    history = replace(history, seed=None if is_random else int(number))
                    self._print_remark("each answer gets a random seed" if is_random else f"seed {number}")
                case "/seed", _:
                    self._print_remark(f"/seed takes a whole number up to {MAX_SEED}, or nothing")
                case "/compare", "":
                    self._compare()
                case "/retry", "" if self._last is not None:
                    history = self._answer(
                        history.without_last_exchange(self._last.question),
                        self._last.question,
                        differently=True,
                    )
                case "/retry", "":
                    self._print_remark("no question was answered yet")
                case ("/save" | "/load") as word, file:
                    history = self._save_or_load(history, word, Path(file).expanduser()) if file else history
                    self._print_remark("" if file else f"{word} needs a file")
                case "/clear", "":
                    history = replace(history, turns=())
                    self._print_remark("conversation cleared")
                case "/stop", "":
                    self._print_remark("no answer is being written")
                case "/help", "":
                    self._print_remark(wrapped_help(HELP, shutil.get_terminal_size().columns))
                case (("/exit" | "/quit"), ""):
                    break
                case _:
                    self._print_remark(f"unknown command {line.strip()}; /help lists all commands")
        return int(self._failed)

    def _save_or_load(self, history: ChatHistory, command_word: str, file: Path) -> ChatHistory:
        """Save the conversation to a file, or load one, and print a remark; return the conversation to
        continue with.

        If the file cannot be written or read, the reason is printed and the conversation stays as it was.

        After loading, there is no last question for "/retry" and "/compare". An existing file is overwritten
        by "/save".

        history: The conversation.
        command_word: "/save" or "/load".
        file: Path of the file.
        """
        try:
            if command_word == "/save":
                file.write_text(write_messages(history), "utf-8")
            else:
                history = read_messages(history, file.read_text("utf-8"))
                self._last = None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            self._print_remark(f"{file}: {reason}")
        else:
            verb = "saved to" if command_word == "/save" else "read from"
            self._print_remark(f"{with_noun(len(history.turns) // 2, 'exchange')} {verb} {file}")
        return history

    def _next_line(self, history: ChatHistory) -> str | None:
        """Return the next line: first those typed during the last answer; None at the end of the input or at
        Ctrl-C.

        Ctrl-C also ends the line on the error stream. The prompt is "> " in mode auto, else the mode's name
        and "> ".

        history: The conversation, whose mode is shown in the prompt.
        """
        if self._typed_lines:
            return self._typed_lines.popleft()
        try:
            return self._keyboard.read("> " if history.mode == "auto" else f"{history.mode}> ")
        except KeyboardInterrupt:
            print(file=self._streams.err)
            return None

    def _answer(self, history: ChatHistory, question: str, differently: bool = False) -> ChatHistory:
        """Return the conversation with this exchange, or unchanged if there was no answer.

        An answer that ended is remembered for "/retry" and "/compare". An answer without text leaves the
        turns as they were sent, perhaps without the oldest exchanges.

        history: The conversation before the question.
        question: The text that the user sent.
        differently: True if another answer than before is wanted.
        """
        answered = self._ask(history, question, lambda view: summary(view, self._has_drafter), differently)
        if answered is None:
            return history
        self._last = answered
        return answered.history.with_exchange(question, answered.view.merged)

    def _compare(self) -> None:
        """Answer the last question the other way; the answer is shown, but not added to the conversation.

        If no question was answered yet, or if the last answer's plan was dropped, a remark says so and
        nothing is asked.

        The other way is "direct" if the last answer had branches, else "sot". The question is asked with the
        conversation that was sent the first time. The last answer stays the one that was compared.
        """
        if self._last is None:
            self._print_remark("no question was answered yet")
            return
        first_view = self._last.view
        if has_no_plan(first_view.finished):
            self._print_remark(f"nothing to compare with: {NO_PLAN}")
            return
        history = replace(self._last.history, mode="direct" if first_view.panels else "sot")
        self._ask(
            history,
            self._last.question,
            lambda view: summary(first_view, self._has_drafter, view.finished, "/compare"),
        )

    def _ask(
        self, history: ChatHistory, question: str, make_summary: Summary, differently: bool = False
    ) -> AnsweredQuestion | None:
        """Send a question and show its answer. Return None if there was no answer, after a remark that says
        why.

        Lines that are typed meanwhile are kept for later, except "/stop", which ends the answer.

        The remark is "stopped before anything was written" if the user stopped the request before it began,
        else the error's text. An error, an answer without a last event and an answer that failed make `run`
        return 1; a stopped one does not.

        history: The conversation before the question.
        question: The text that the user sent.
        make_summary: Makes the line that is shown below the answer.
        differently: True if another answer than before is wanted.
        """

        def make_ask(history: ChatHistory, question: str) -> Ask:
            """Return the request, changed if another answer than before is wanted.

            history: The conversation that fits.
            question: The text that the user sent.
            """
            ask = self._make_ask(history, question)
            return with_retry_temperature(ask) if differently else ask

        answering = RunningAnswer(self._fleet, make_ask, partial(self._show, make_summary))
        future = self._background.start(answering.show(history, question))
        for typed in self._keyboard.during(future):
            if parse_line(typed) == ("/stop", ""):
                self._background.start(answering.stop())
            else:
                self._typed_lines.append(typed)
        try:
            answered = future.result()
        except CancelledError:
            self._print_remark("stopped before anything was written")
        except SpecsotError as error:
            self._failed = True
            self._print_remark(f"specsot: {error}")
        else:
            finished = answered.view.finished
            self._failed = self._failed or finished is None or finished.reason is Reason.FAILED
            return answered

    async def _show(self, make_summary: Summary, events: AsyncGenerator[Numbered], left_out: int) -> View:
        """Show an answer, and before it mention exchanges that were left out; return the view after the last
        event.

        make_summary: Makes the line below the answer.
        events: Events of the request.
        left_out: Number of exchanges that were left out, since they do not fit the model's context.
        """
        if left_out:
            self._print_remark(describe_left_out(left_out, self._max_positions))
        return await show(events, self._output_format, self._streams, make_summary)

    def _print_remark(self, text: str) -> None:
        """Print a remark to the error stream; an empty one is not printed.

        text: The remark.
        """
        if text:
            print(text, file=self._streams.err, flush=True)


def describe_left_out(exchanges: int, max_positions: int | None) -> str:
    """Return the remark about exchanges that were left out, since they do not fit the model's context.

    Without `max_positions`, the remark leaves out the context's size.

    exchanges: Number of exchanges that were left out, at least 1.
    max_positions: Number of positions of the context; None if unknown.
    """
    noun, fit, was = (
        ("exchange", "fits", "was") if exchanges == 1 else (f"{exchanges} exchanges", "fit", "were")
    )
    capacity = f" of {max_positions} positions" if max_positions else ""
    return f"the oldest {noun} no longer {fit} the model's context{capacity}, and {was} left out"
