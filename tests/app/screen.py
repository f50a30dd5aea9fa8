"""A program at a pseudo-terminal: what it shows, what is typed, how it ends.

Waits for what is shown, never for time.
"""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios

from tests.forked import fork

ROWS, COLUMNS = 30, 100
PLAIN = {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}  # nobody here says where the cursor is


class Screen:
    """`seen`: everything shown so far, escapes included."""

    def __init__(self, module: str, *words: str) -> None:
        self.seen, self._read = "", 0
        self._terminal, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.process = fork((theirs, theirs), {**os.environ, **PLAIN}, module, words)
        os.close(theirs)

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        os.close(self._terminal)

    def wait_for(self, text: str) -> None:
        """Until it is shown, after what was waited for before."""
        while (found := self.seen.find(text, self._read)) < 0:
            assert self._more(), f"{text!r} was never shown: {self.seen[self._read :]!r}"
        self._read = found + len(text)

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def ends(self) -> int | None:
        """Its exit status, once it is gone."""
        while self._more():
            pass
        self.process.join(100)
        return self.process.exitcode

    def _more(self) -> bool:
        try:
            read = os.read(self._terminal, 65536)
        except OSError:  # Linux tells the end of a terminal like this
            return False
        self.seen += read.decode(errors="replace")
        return bool(read)
