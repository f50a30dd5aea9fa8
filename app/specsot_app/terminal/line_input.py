"""Reads lines from a terminal or a pipe, also Ctrl-C and lines typed while an answer is written."""

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

INTERRUPT = "/stop"  # what Ctrl-C says while an answer is written
DONE = b"\0"  # what the bell says; signals say their number, which is never 0


class LineInput(Protocol):
    """Where a chat's lines come from."""

    def read(self, prompt: str) -> str | None:
        """The next line; None at the end. Raises KeyboardInterrupt."""
        ...

    def during(self, work: Future[Any]) -> Iterator[str]:
        """The lines that come until the work is done; Ctrl-C is one of them."""
        ...


class PipeInput:
    """Every line waits for its turn: nobody types while an answer is written."""

    def __init__(self, lines: TextIO) -> None:
        self._lines = lines

    def read(self, prompt: str) -> str | None:
        return self._lines.readline() or None

    def during(self, work: Future[Any]) -> Iterator[str]:
        return _lines_until_done(work, None)


class TerminalInput:
    """At a terminal: a question may have several lines, by pasting them or by Alt-Enter; Enter sends it.

    What is typed during an answer is not shown: the answer has the screen.
    """

    def __init__(self, terminal: TextIO, visible: bool, history: Path) -> None:
        """visible: prompts go to a terminal too. history: questions of earlier conversations."""
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
    return TerminalInput(lines, out.isatty(), history) if lines.isatty() else PipeInput(lines)


def _session(history: Path) -> PromptSession[str]:
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
        history.touch(mode=0o600)  # what was asked is nobody else's business
        kept = FileHistory(history)
    except OSError:
        kept = InMemoryHistory()
    return PromptSession(multiline=True, key_bindings=keys, history=kept)


def _lines_until_done(work: Future[Any], terminal: int | None) -> Iterator[str]:
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
                watched = [heard]  # the terminal is gone


@contextmanager
def _bell(work: Future[Any]) -> Generator[socket.socket]:
    """Rings when the work is done, and at Ctrl-C, which raises nothing meanwhile."""
    heard, rings = socket.socketpair()
    rings.setblocking(False)
    with heard, rings, _instead_of_interrupts(rings.fileno()):
        work.add_done_callback(_ringing(rings))
        yield heard


def _ringing(bell: socket.socket) -> Callable[[Any], None]:
    def ring(_: Any) -> None:
        with suppress(OSError):  # nobody waits any more
            bell.send(DONE)

    return ring


@contextmanager
def _instead_of_interrupts(place: int) -> Generator[None]:
    """Signals write their number there."""
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
    """No echo: what is typed would tear the picture."""
    before = termios.tcgetattr(terminal)
    hidden = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(terminal, termios.TCSANOW, hidden)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
