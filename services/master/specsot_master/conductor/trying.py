"""Tries forms that nobody has used yet, each in a process of its own, before a request may have them.

Refuses to know what a form means. A stranger's form may make the library crash or compute for minutes;
neither reaches the master or the ring.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict

from specsot.errors import InvalidRequest, Overloaded, Unavailable
from specsot.forms import Form, refuse

KNOWN = 256  # forms whose verdict is kept
QUEUE = 16  # requests that wait for a verdict at most
PATIENCE = 30.0  # seconds; the trial ends itself after 4 of one core

_SLOW = "takes too long to compile"
_CRASHES = {
    -signal.SIGXCPU: _SLOW,
    -signal.SIGKILL: _SLOW,
    -signal.SIGSEGV: "is nested too deeply",
    -signal.SIGBUS: "is nested too deeply",
    -signal.SIGABRT: "takes too much memory to compile",
}

Trial = Callable[[Form], str]


class Forms:
    """What is known of forms. One new one is tried at a time."""

    def __init__(self, trial: Trial | None = None) -> None:
        self._trial = trial or try_apart
        self._known: OrderedDict[Form, str] = OrderedDict()
        self._turn, self._waiting = asyncio.Lock(), 0

    async def check(self, form: Form) -> None:
        """Raises InvalidRequest with the library's reason, Overloaded where too many are new at once."""
        complaint = self._recall(form)
        if complaint is None:
            complaint = await self._find(form)
        if complaint:
            raise InvalidRequest(complaint, field=refuse("").field)

    async def _find(self, form: Form) -> str:
        if self._waiting >= QUEUE:
            raise Overloaded("too many constraints are tried at once")
        self._waiting += 1
        try:
            async with self._turn:
                complaint = self._recall(form)  # somebody else may have asked for the same
                if complaint is None:
                    complaint = await asyncio.to_thread(self._trial, form)
                    self._remember(form, complaint)
                return complaint
        finally:
            self._waiting -= 1

    def _recall(self, form: Form) -> str | None:
        if form in self._known:
            self._known.move_to_end(form)
        return self._known.get(form)

    def _remember(self, form: Form, complaint: str) -> None:
        self._known[form] = complaint
        if len(self._known) > KNOWN:
            self._known.popitem(last=False)


def try_apart(form: Form) -> str:
    """What is wrong with a form, "" for nothing. Raises Unavailable where no process can be started."""
    command = [sys.executable, "-m", "specsot.constraint.trial"]
    try:
        done = subprocess.run(
            command, input=json.dumps(asdict(form)), capture_output=True, text=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        return str(refuse(f"{form.kind} {_SLOW}"))
    except OSError as error:
        raise Unavailable(f"constraints cannot be tried: {error}") from error
    if done.returncode == 0:
        return done.stdout.strip()
    return str(refuse(f"{form.kind} {_CRASHES.get(done.returncode, 'cannot be compiled')}"))
