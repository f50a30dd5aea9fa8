"""Compiles new grammars in a subprocess first: a hostile one may crash the library or take minutes."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from specsot.core.vocabulary import Vocabulary, read_vocabulary
from specsot.errors import InvalidRequest, ModelError, Overloaded, Unavailable
from specsot.params import Form, refuse

MAX_VERDICTS = 256  # forms whose verdict is cached; bounds memory
MAX_WAITING_FORMS = 16  # forms that may wait for a verdict, those of two clients counted twice; not measured
# Tokens of an answer up to which it is looked whether its form fits at all: that takes compiling it here; not
# measured.
MAX_MEASURED_TOKENS = 512
TRIAL_SECONDS = 30.0  # seconds of wall time; the trial ends itself after 4 of one core; not measured

_SLOW = "takes too long to compile"
_CRASHES = {
    -signal.SIGXCPU: _SLOW,
    -signal.SIGKILL: _SLOW,
    -signal.SIGSEGV: "is nested too deeply",
    -signal.SIGBUS: "is nested too deeply",
    -signal.SIGABRT: "takes too much memory to compile",
}

Trial = Callable[[Form], str]
Measure = Callable[[Form], int | None]  # the tokens of its shortest answer, where they are known; in a thread


class GrammarSandbox:
    """What is known of forms. One new one is tried at a time, to its end, whoever still waits for it."""

    def __init__(self, trial: Trial | None = None, fewest: Measure | None = None) -> None:
        self._trial = trial or compile_in_subprocess
        self._fewest = fewest
        self._known: OrderedDict[Form, str] = OrderedDict()
        self._wanted: Counter[tuple[str, Form]] = Counter()  # requests that wait, by client and form
        self._now: tuple[Form, asyncio.Task[str]] | None = None

    async def check(self, form: Form, client: str = "", budget: int | None = None) -> None:
        """budget: tokens of the answer. Raises InvalidRequest with the library's reason, or because no answer
        of that form fits; Overloaded where too many are new at once.
        """
        complaint = self._recall(form)
        if complaint is None:
            complaint = await self._wait(form, client)
        if complaint:
            raise InvalidRequest(complaint, field=refuse("").field)
        if self._fewest and budget is not None and budget <= MAX_MEASURED_TOKENS:
            least = await asyncio.to_thread(self._fewest, form)
            if least is not None and least > budget:
                raise InvalidRequest(
                    f"max_new_tokens must be at least {least} for an answer of this form, got {budget}",
                    "max_new_tokens",
                )

    async def _wait(self, form: Form, client: str) -> str:
        mine = client, form
        self._make_room(mine)
        self._wanted[mine] += 1
        try:
            return await self._find(form)
        finally:
            self._wanted[mine] -= 1
            if not self._wanted[mine]:
                del self._wanted[mine]

    def _make_room(self, mine: tuple[str, Form]) -> None:
        """One client's forms take half of the places at most. Raises Overloaded."""
        places = sum(client == mine[0] for client, _ in self._wanted)
        if mine not in self._wanted and (
            len(self._wanted) >= MAX_WAITING_FORMS or places >= MAX_WAITING_FORMS // 2
        ):
            raise Overloaded("too many constraints are tried at once")

    async def _find(self, form: Form) -> str:
        while (complaint := self._recall(form)) is None:
            tried, trial = self._now = self._now or (form, asyncio.create_task(self._try(form)))
            await asyncio.wait([trial])  # goes on without us, should we leave: it cannot be stopped
            if tried == form:
                return trial.result()
        return complaint

    async def _try(self, form: Form) -> str:
        try:
            complaint = await asyncio.to_thread(self._trial, form)
            self._remember(form, complaint)
            return complaint
        finally:
            self._now = None

    def _recall(self, form: Form) -> str | None:
        if form in self._known:
            self._known.move_to_end(form)
        return self._known.get(form)

    def _remember(self, form: Form, complaint: str) -> None:
        self._known[form] = complaint
        if len(self._known) > MAX_VERDICTS:
            self._known.popitem(last=False)


def compile_in_subprocess(form: Form) -> str:
    """What is wrong with a form, "" for nothing. Raises Unavailable where no process can be started.

    The process imports nothing from the current folder (-P), and does not get the clients' token.
    """
    command = [sys.executable, "-P", "-m", "specsot.grammar.sandbox"]
    known = {name: value for name, value in os.environ.items() if name != "SPECSOT_TOKEN"}
    said = json.dumps(asdict(form))
    try:
        done = subprocess.run(
            command, input=said, capture_output=True, text=True, timeout=TRIAL_SECONDS, env=known
        )
    except subprocess.TimeoutExpired:
        return str(refuse(f"{form.kind} {_SLOW}"))
    except OSError as error:
        raise Unavailable(f"constraints cannot be tried: {error}") from error
    if done.returncode == 0:
        return done.stdout.strip()
    return str(refuse(f"{form.kind} {_CRASHES.get(done.returncode, 'cannot be compiled')}"))


def measure_with(base: Path, width: int, ends: tuple[int, ...]) -> Measure:
    """With the tokens of this model, of `width` logits. What is needed for it is read at the first form."""

    @functools.cache
    def vocabulary() -> Vocabulary | None:
        try:
            return read_vocabulary(base, width)
        except ModelError:
            return None  # nor can anybody else hold answers to forms

    def measure(form: Form) -> int | None:
        from specsot.grammar import fewest_tokens  # brings a library that most masters never need

        known = vocabulary()
        return fewest_tokens(known, form, ends, MAX_MEASURED_TOKENS) if known else None

    return measure
