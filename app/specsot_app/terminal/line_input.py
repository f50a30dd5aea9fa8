"""Reads lines from a terminal or a pipe, also Ctrl-C and lines that are typed while an answer is written."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import termios
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

# The line that Ctrl-C stands for while an answer is written.
INTERRUPT = "/stop"
# The byte that is sent when the work is done. Signals send their number, which is never 0.
DONE = b"\0"


class LineInput(Protocol):
    """The source of a chat's lines."""

    def read(self, prompt: str) -> str | None:
        """Return the next line, or None at the end. Raises KeyboardInterrupt."""
        ...

    def during(self, work: Future[Any]) -> Iterator[str]:
        """Yield the lines that arrive until the work is done; Ctrl-C yields INTERRUPT."""
        ...


class PipeInput:
    """Lines of a pipe. Every line waits for its turn, so that only Ctrl-C arrives while an answer
    is written.
    """

    def __init__(self, lines: TextIO) -> None:
        self._lines = lines

    def read(self, prompt: str) -> str | None:
        return self._lines.readline() or None

    def during(self, work: Future[Any]) -> Iterator[str]:
        return _lines_until_done(work, None)


class TerminalInput:
    """Lines of a terminal. Pasted text and Alt-Enter put several lines into a question; Enter sends it.

    What is typed during an answer is not echoed, since the answer occupies the screen.
    """

    def __init__(self, terminal: TextIO, visible: bool, history: Path) -> None:
        """Open the terminal.

        visible: the output is a terminal, too, so that prompts can be edited there.
        history: file with the questions of earlier conversations.
        """
        self._terminal = terminal
        self._session = _session(history) if visible else None

    def read(self, prompt: str) -> str | None:
        if self._session is None:
            print(prompt, end="", file=sys.stderr, flush=True)
            return self._terminal.readline() or None
        try:
            return self._session.prompt(prompt, prompt_continuation=" " * len(prompt))
        except EOFError:
            return None

    def during(self, work: Future[Any]) -> Iterator[str]:
        return _lines_until_done(work, self._terminal.fileno())


def input_from(lines: TextIO, out: TextIO, history: Path) -> LineInput:
    """Return the input for a terminal or a pipe."""
    return TerminalInput(lines, out.isatty(), history) if lines.isatty() else PipeInput(lines)


def _session(history: Path) -> PromptSession[str]:
    """Return a prompt session with Enter, Alt-Enter and a history that only this user can read."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    keys.add("enter")(send)
    keys.add("escape", "enter")(begin_line)

    try:
        history.parent.mkdir(parents=True, exist_ok=True)
        # Only this user may read what was asked.
        history.touch(mode=0o600)
        kept = FileHistory(history)
    except OSError:
        kept = InMemoryHistory()
    return PromptSession(multiline=True, key_bindings=keys, history=kept)


def _lines_until_done(work: Future[Any], terminal: int | None) -> Iterator[str]:
    """Yield lines of the terminal, and INTERRUPT at Ctrl-C, until the work is done."""
    with _bell(work) as heard, nullcontext() if terminal is None else _unseen(terminal):
        watched: list[Any] = [heard] if terminal is None else [heard, terminal]
        while True:
            ready, _, _ = select.select(watched, [], [])
            if heard in ready:
                said = heard.recv(64)
                if DONE in said:
                    return
                yield INTERRUPT
            elif typed := os.read(watched[1], 4096):
                yield from typed.decode(errors="replace").splitlines()
            else:
                # The terminal has been closed.
                watched = [heard]


@contextmanager
def _bell(work: Future[Any]) -> Generator[socket.socket]:
    """Yield a socket that receives DONE when the work is done, and the signal's number at Ctrl-C, which
    raises no exception.
    """
    heard, rings = socket.socketpair()
    rings.setblocking(False)
    with heard, rings, _instead_of_interrupts(rings.fileno()):
        work.add_done_callback(_ringing(rings))
        yield heard


def _ringing(bell: socket.socket) -> Callable[[Any], None]:
    """Return a callback that sends DONE."""

    def ring(_: Any) -> None:
        # The waiting side may have closed its socket.
        with suppress(OSError):
            bell.send(DONE)

    return ring


@contextmanager
def _instead_of_interrupts(place: int) -> Generator[None]:
    """Let signals write their number to this file descriptor, and let Ctrl-C raise no exception."""
    handler = signal.signal(signal.SIGINT, _raise_nothing)
    before = signal.set_wakeup_fd(place)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGINT, handler)


def _raise_nothing(number: int, frame: FrameType | None) -> None: ...


@contextmanager
def _unseen(terminal: int) -> Generator[None]:
    """Turn the echo off, since typed characters would disturb the display."""
    before = termios.tcgetattr(terminal)
    hidden = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(terminal, termios.TCSANOW, hidden)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
