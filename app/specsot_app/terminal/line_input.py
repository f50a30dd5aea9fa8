"""Reads lines from a terminal or a pipe, also Ctrl-C and lines that are typed while an answer is written."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import termios
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

# The line that Ctrl-C stands for while an answer is written.
INTERRUPT = "/stop"
# The byte that is sent when the work is done. Signals send their number, which is never 0.
DONE = b"\0"


class LineInput:
    """The lines of a chat, from a terminal or a pipe.

    Pasted text and Alt-Enter at a terminal put several lines into a question; Enter sends it. What is typed
    during an answer is not echoed, since the answer occupies the screen. Every line of a pipe waits for its
    turn, so that only Ctrl-C arrives while an answer is written.
    """

    def __init__(self, lines: TextIO, out: TextIO, history: Path) -> None:
        """Open the terminal, if the lines are typed at one.

        lines: The stream to read.
        out: The stream of answers, on which prompts are edited if both streams are a terminal.
        history: File with the questions of earlier conversations, used at a terminal alone.
        """
        self._lines = lines
        self._terminal = lines.fileno() if lines.isatty() else None
        self._session = _session(history) if self._terminal is not None and out.isatty() else None

    def read(self, prompt: str) -> str | None:
        """Return the next question, or None at the end of the input (Ctrl-D). Raises KeyboardInterrupt at
        Ctrl-C.

        A question that is edited at the prompt may have several lines; otherwise it is one line, with its
        newline.

        prompt: Text shown in front of the first line; on stderr if the output is no terminal, and not at all
            if the lines come from a pipe.
        """
        if self._session is not None:
            try:
                return self._session.prompt(prompt, prompt_continuation=" " * len(prompt))
            except EOFError:
                return None
        if self._terminal is not None:
            print(prompt, end="", file=sys.stderr, flush=True)
        return self._lines.readline() or None

    def during(self, future: Future[Any]) -> Iterator[str]:
        """Yield the lines that are typed, and INTERRUPT at Ctrl-C, until the future is done. Lines of a pipe
        stay unread.

        A terminal that is closed meanwhile yields nothing more. Several lines that arrive at once are yielded
        one by one, without their newlines; an unfinished line counts as a line. Several Ctrl-C that arrive
        together yield INTERRUPT once. The end of the work takes precedence over lines that arrive with it:
        these stay unread.

        future: Future of the work; it is done when the work is.
        """
        terminal = self._terminal
        with (
            _done_or_interrupt(future) as receiver,
            nullcontext() if terminal is None else _without_echo(terminal),
        ):
            sources: list[Any] = [receiver] if terminal is None else [receiver, terminal]
            while True:
                ready, _, _ = select.select(sources, [], [])
                if receiver in ready:
                    received = receiver.recv(64)
                    if DONE in received:
                        return
                    yield INTERRUPT
                elif typed := os.read(sources[1], 4096):
                    yield from typed.decode(errors="replace").splitlines()
                else:
                    # The terminal has been closed.
                    sources = [receiver]


def _session(history: Path) -> PromptSession[str]:
    """Return a prompt session with Enter, Alt-Enter and a history that only this user can read.

    Enter sends, and Alt-Enter inserts a line break.

    history: File of the history, created if missing; if that fails, the history is kept in memory.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    def send(event: KeyPressEvent) -> None:
        """Accept the question as it is.

        event: Key press of Enter, which holds the edited text.
        """
        event.current_buffer.validate_and_handle()

    def begin_line(event: KeyPressEvent) -> None:
        """Insert a line break.

        event: Key press of Alt-Enter, which holds the edited text.
        """
        event.current_buffer.insert_text("\n")

    keys.add("enter")(send)
    keys.add("escape", "enter")(begin_line)

    try:
        history.parent.mkdir(parents=True, exist_ok=True)
        # Only this user may read what was asked.
        history.touch(mode=0o600)
        stored = FileHistory(history)
    except OSError:
        stored = InMemoryHistory()
    return PromptSession(multiline=True, key_bindings=keys, history=stored)


@contextmanager
def _done_or_interrupt(future: Future[Any]) -> Generator[socket.socket]:
    """Yield a socket that receives DONE when the future is done, and the signal's number at Ctrl-C, which
    raises no exception meanwhile.

    A future that is done already sends DONE at once. Both sockets are closed and SIGINT is handled as before
    at the end of the context.

    future: Future of the work; it is done when the work is.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    with receiver, sender, _signals_to(sender.fileno()):
        future.add_done_callback(lambda _: _send_done(sender))
        yield receiver


def _send_done(sender: socket.socket) -> None:
    """Send DONE. An error is ignored, since the waiting side may have closed its socket.

    sender: Sending side of the socket.
    """
    with suppress(OSError):
        sender.send(DONE)


@contextmanager
def _signals_to(file_descriptor: int) -> Generator[None]:
    """Within the context, which yields None, let signals write their number to a file descriptor, and let
    Ctrl-C raise no exception.

    The former handler and descriptor are restored at the end, also after an exception. Must run on the main
    thread.

    file_descriptor: File descriptor of a socket that does not block.
    """
    previous_handler = signal.signal(signal.SIGINT, _ignore_interrupt)
    previous_descriptor = signal.set_wakeup_fd(file_descriptor)
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_descriptor)
        signal.signal(signal.SIGINT, previous_handler)


def _ignore_interrupt(number: int, frame: FrameType | None) -> None:
    """Handle SIGINT by doing nothing; its number was already written to the socket.

    number: Number of the signal; it is not used.
    frame: The interrupted stack frame; it is not used.
    """


@contextmanager
def _without_echo(terminal: int) -> Generator[None]:
    """Turn the terminal's echo off within the context, which yields None, since typed characters would
    disturb the display.

    The former settings are restored at the end, also after an exception.

    terminal: File descriptor of the terminal.
    """
    previous = termios.tcgetattr(terminal)
    hidden = [*previous[:3], previous[3] & ~termios.ECHO, *previous[4:]]
    termios.tcsetattr(terminal, termios.TCSANOW, hidden)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, previous)
