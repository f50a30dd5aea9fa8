"""Matchers of one form for many texts: copies of a compiled one, and the next one before it is needed.

Refuses to know forms, vocabularies and texts.

Copies share what they learn of the form's regexes. There is a bound to that, and then all of them fail: the
whole batch is worn out. Another one has been compiled by then, on a thread on which no lap waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor

from llguidance import LLMatcher


class Matchers:
    """For any thread. A matcher comes with the number of its batch."""

    def __init__(self, compile_one: Callable[[], LLMatcher], later: Executor) -> None:
        """later: where the next batches are compiled. Raises what compiling raises."""
        self._compile, self._later = compile_one, later
        self._batch, self._original = 0, compile_one()
        self._next = later.submit(compile_one)
        self._lock = threading.Lock()

    def take(self, worn: int | None = None) -> tuple[int, LLMatcher]:
        """A matcher before its first token, of a batch that is not the worn one."""
        with self._lock:
            if worn == self._batch:
                self._renew()
            return self._batch, self._original.deep_copy()

    def _renew(self) -> None:
        """Waits for the next one only if it is being compiled right now; one that still waits for others is
        sooner compiled here.
        """
        self._original = self._compile() if self._next.cancel() else self._next.result()
        self._batch, self._next = self._batch + 1, self._later.submit(self._compile)
