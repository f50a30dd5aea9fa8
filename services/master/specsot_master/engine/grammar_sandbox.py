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

from specsot.checkpoint.kept_vocabulary import vocabulary_of
from specsot.core.vocabulary import Vocabulary
from specsot.errors import InvalidRequest, ModelError, Overloaded, Unavailable
from specsot.params import Form, refuse

# Forms. The number of cached compile results, which bounds memory. Untuned.
MAX_CACHED_CHECKS = 256
# Forms. How many may wait for a trial; a form for which two clients wait counts twice. Untuned.
MAX_WAITING_FORMS = 16
# Tokens. Up to this max_new_tokens, it is also checked whether an answer of the form may fit. Untuned.
MAX_MEASURED_TOKENS = 512
# Seconds of wall time after which a trial is killed. The trial itself ends after 4 s of CPU time. Untuned.
TRIAL_SECONDS = 30.0

# What is wrong with a form whose trial was ended.
_SLOW = "takes too long to compile"
# What is wrong with a form, by the exit status of its trial's process; a negative status is that of a signal.
_CRASHES = {
    -signal.SIGXCPU: _SLOW,
    -signal.SIGKILL: _SLOW,
    -signal.SIGSEGV: "is nested too deeply",
    -signal.SIGBUS: "is nested too deeply",
    -signal.SIGABRT: "takes too much memory to compile",
}

# Compiles a form. Returns what is wrong with the form, or "".
Trial = Callable[[Form], str]
# Returns how many tokens every answer of a form needs at least, or None if unknown. Called in a thread.
Measure = Callable[[Form], int | None]


class GrammarSandbox:
    """Checks forms (grammars, JSON schemas, regular expressions) of requests by compiling them in a
    subprocess, and caches the results. One new form is tried at a time. A trial runs to its end, even if no
    request waits for its result.
    """

    def __init__(self, trial: Trial | None = None, measure: Measure | None = None) -> None:
        """Create a sandbox without cached results.

        trial: compiles a form, and returns what is wrong with it, or ""; None for a compilation in a
            subprocess.
        measure: returns how many tokens every answer of a form needs at least; None to leave lengths
            unchecked.
        """
        self._trial = trial or compile_in_subprocess
        self._fewest = measure
        self._known: OrderedDict[Form, str] = OrderedDict()
        # The number of waiting requests by (client, form).
        self._wanted: Counter[tuple[str, Form]] = Counter()
        # The form that is being tried, with its task.
        self._now: tuple[Form, asyncio.Task[str]] | None = None

    async def check(self, form: Form, client: str = "", budget: int | None = None) -> None:
        """Check that a form compiles, and that some answer may fit the budget. Return if both hold. The
        length is checked only if the sandbox measures lengths and the budget is at most MAX_MEASURED_TOKENS;
        a form of unknown length passes.

        form: the form that the client gave for its answer.
        client: the name of the client, "" for one without a name; one client may not take all waiting places.
        budget: max_new_tokens of the answer, or None to leave the length unchecked.

        Raises InvalidRequest with the library's reason if the form does not compile, or if no answer of this
        form fits; Overloaded if too many new forms wait; Unavailable if no process can be started.
        """
        complaint = self._recall(form)
        if complaint is None:
            complaint = await self._wait(form, client)
        if complaint:
            raise InvalidRequest(complaint, field=refuse("").field)
        if self._fewest and budget is not None and budget <= MAX_MEASURED_TOKENS:
            min_tokens = await asyncio.to_thread(self._fewest, form)
            if min_tokens is not None and min_tokens > budget:
                raise InvalidRequest(
                    f"max_new_tokens must be at least {min_tokens} for an answer of this form, got {budget}",
                    "max_new_tokens",
                )

    async def _wait(self, form: Form, client: str) -> str:
        """Return the result of a form's trial: what is wrong with it, or "" if it is valid.

        form: a form that has not been tried yet.
        client: the name of the client.

        Raises Overloaded if too many new forms wait, and what the trial raises.
        """
        waiting_pair = client, form
        self._make_room(waiting_pair)
        self._wanted[waiting_pair] += 1
        try:
            return await self._find(form)
        finally:
            self._wanted[waiting_pair] -= 1
            if not self._wanted[waiting_pair]:
                del self._wanted[waiting_pair]

    def _make_room(self, waiting_pair: tuple[str, Form]) -> None:
        """Check that there is a place for one more waiting form; return nothing if there is.

        waiting_pair: (client, form). A pair that waits already needs no further place.

        Raises Overloaded if no place is left, or if this client's forms take half of the places already.
        """
        places = sum(client == waiting_pair[0] for client, _ in self._wanted)
        if waiting_pair not in self._wanted and (
            len(self._wanted) >= MAX_WAITING_FORMS or places >= MAX_WAITING_FORMS // 2
        ):
            raise Overloaded("too many constraints are tried at once")

    async def _find(self, form: Form) -> str:
        """Return the result of a form's trial: what is wrong with it, or "" for a valid form. The trial
        starts once no other one runs; a cached result is returned at once. Cancelling the call does not end
        the trial.

        form: the form to try.

        Raises what the trial raises.
        """
        while (complaint := self._recall(form)) is None:
            tried, trial = self._now = self._now or (form, asyncio.create_task(self._try(form)))
            # The trial continues if this request is cancelled, because its thread cannot be stopped.
            await asyncio.wait([trial])
            if tried == form:
                return trial.result()
        return complaint

    async def _try(self, form: Form) -> str:
        """Run the trial of a form in a thread, cache its result and return it: what is wrong with the form,
        or "" if it is valid. A raised error is not cached. Afterwards another form may be tried.

        form: the form to try.

        Raises what the trial raises, such as Unavailable.
        """
        try:
            complaint = await asyncio.to_thread(self._trial, form)
            self._remember(form, complaint)
            return complaint
        finally:
            self._now = None

    def _recall(self, form: Form) -> str | None:
        """Return the cached result of a form, "" if it is valid, or None if it has not been tried. A cached
        form counts as used now.

        form: the form that a client gave for its answer.
        """
        if form in self._known:
            self._known.move_to_end(form)
        return self._known.get(form)

    def _remember(self, form: Form, complaint: str) -> None:
        """Cache a result; the least recently used one is dropped if the cache is full. At most
        MAX_CACHED_CHECKS results are kept.

        form: the form that was tried.
        complaint: what is wrong with it, or "" if it is valid.
        """
        self._known[form] = complaint
        if len(self._known) > MAX_CACHED_CHECKS:
            self._known.popitem(last=False)


def compile_in_subprocess(form: Form) -> str:
    """Compile a form in a process of its own. Return what is wrong with the form, or "" if it is valid. The
    words name the kind of the form; an end by a signal is explained by _CRASHES, and any other failure as
    "cannot be compiled".

    A crash or a timeout of that process counts as an error of the form. The process imports nothing from the
    current directory (-P), and its environment does not contain the clients' token.

    form: the form that a client gave for its answer.

    Raises Unavailable if no process can be started.
    """
    command = [sys.executable, "-P", "-m", "specsot.grammar.sandbox"]
    known = {name: value for name, value in os.environ.items() if name != "SPECSOT_TOKEN"}
    form_json = json.dumps(asdict(form))
    try:
        done = subprocess.run(
            command, input=form_json, capture_output=True, text=True, timeout=TRIAL_SECONDS, env=known
        )
    except subprocess.TimeoutExpired:
        return str(refuse(f"{form.title} {_SLOW}"))
    except OSError as error:
        raise Unavailable(f"constraints cannot be tried: {error}") from error
    if done.returncode == 0:
        return done.stdout.strip()
    return str(refuse(f"{form.title} {_CRASHES.get(done.returncode, 'cannot be compiled')}"))


def measure_with(base: Path, width: int, ends: tuple[int, ...]) -> Measure:
    """Return a function that computes how many tokens every answer of a form needs at least. The function
    returns None if the vocabulary cannot be read.

    base: the model's directory, whose vocabulary is read when the first form is measured.
    width: the number of logits of the model, which bounds its token ids.
    ends: the ids of the tokens that end an answer.
    """

    @functools.cache
    def vocabulary() -> Vocabulary | None:
        """Return the model's vocabulary, which is read once, or None if it cannot be read."""
        try:
            return vocabulary_of(base, width)
        except ModelError:
            # Without a readable vocabulary no member can constrain answers either, so nothing is measured.
            return None

    def measure(form: Form) -> int | None:
        """Return how many tokens every answer of the form needs at least, or None if unknown.

        form: the form that a client gave for its answer.
        """
        # Imported here because this module loads a library that most masters never need.
        from specsot.grammar import fewest_tokens

        known = vocabulary()
        return fewest_tokens(known, form, ends) if known else None

    return measure
