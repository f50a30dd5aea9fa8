"""Compiles a form in a process of its own: `python -m specsot.grammar.sandbox` prints its error."""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
from contextlib import suppress

import numpy as np
from llguidance import LLMatcher

from specsot.core.vocabulary import Vocabulary, describe
from specsot.errors import InvalidRequest
from specsot.grammar.answers import STACK, Choices, compile_form
from specsot.grammar.reasons import CONTRADICTION, reason_in
from specsot.params import Form, refuse

# Seconds of one core. Bounds the compilation of a form and its first steps. Untuned.
SECONDS = 1.0
# Tokens. How many tokens a trial generates. Untuned.
_STEPS = 64
# The library's messages for a form that no text matches.
_NOTHING = ("", CONTRADICTION)
# Bytes of address space. Bounds a trial, the interpreter and libraries included. Untuned.
_MEMORY = 4 << 30


def main() -> None:
    """Read a form as JSON from stdin, with `kind` and `texts`, try it in this process, and print the error,
    on one line, if it is invalid. Print nothing if it is valid.

    The exit status is 0 in both cases. Another exit status means that the library crashed.

    The process gets limits of CPU seconds and memory, and writes no core file. Beyond a limit, the system
    ends the process, or the library fails; both count as a crash. JSON without these keys raises an error, so
    that the exit status is 1.
    """
    _lower_limit(resource.RLIMIT_CORE, 0)
    # Seconds. A compilation that hangs cannot check the time itself, so the system ends the process.
    _lower_limit(resource.RLIMIT_CPU, 4)
    _lower_limit(resource.RLIMIT_AS, _MEMORY)
    request = json.load(sys.stdin)
    try:
        try_form(Form(request["kind"], tuple(request["texts"])))
    except InvalidRequest as error:
        print(error)


def try_form(form: Form) -> None:
    """Compile a form and generate a few tokens. Return nothing if that works.

    form: the constraint to try.

    Raises InvalidRequest if the form cannot be compiled, allows no text, fails later, or takes more than
    SECONDS.

    Up to _STEPS tokens are tried. Nothing is raised if the form is complete earlier.
    """
    vocabulary = _pairs()
    started = _cpu_seconds()
    matcher = compile_form(vocabulary, form, STACK // 8)
    if form.kind == "choice":
        # The real compilation counts the tokens of the choices too.
        Choices(vocabulary, form.texts)
    for step in range(_STEPS):
        allowed = _allowed(matcher, len(vocabulary))
        if step == 0 and not len(allowed) and reason_in(matcher.get_error()) in _NOTHING:
            raise refuse(f"{form.title} allows no text")
        if matcher.is_error():
            raise refuse(f"{form.title}: {reason_in(matcher.get_error())}")
        if _cpu_seconds() - started > SECONDS:
            raise refuse(f"{form.title} takes too long to follow")
        if not len(allowed):
            break
        matcher.consume_token(int(allowed[step * 7919 % len(allowed)]))


def _pairs() -> Vocabulary:
    """Return a vocabulary of all bytes and all pairs of printable characters.

    With it, a step takes about as long as with a model's vocabulary.
    """
    printable = range(0x20, 0x7F)
    pairs = (bytes(pair) for pair in itertools.product(printable, repeat=2))
    return describe([*(bytes([byte]) for byte in range(256)), *pairs])


def _allowed(matcher: LLMatcher, count: int) -> np.ndarray:
    """Return the ids of the tokens that may follow, ascending. Empty at the end, and if the matcher has
    failed.

    matcher: the compiled form, after the tokens so far.
    count: number of token ids of the vocabulary.
    """
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(bits, count=count, bitorder="little"))


def _cpu_seconds() -> float:
    """Return the CPU seconds of all threads of this process."""
    times = os.times()
    return times.user + times.system


def _lower_limit(kind: int, limit: int) -> None:
    """Lower a resource limit of this process, if the system supports it. A lower hard limit stays.

    kind: the limit, such as `resource.RLIMIT_CPU`.
    limit: the limit to set, in the unit of its kind: seconds or bytes.

    The soft limit becomes `limit`, or the hard limit if that is lower; the hard limit does not change. Does
    nothing if the limit cannot be set.
    """
    with suppress(ValueError, OSError):
        hard_limit = resource.getrlimit(kind)[1]
        bound = limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit)
        resource.setrlimit(kind, (bound, hard_limit))


if __name__ == "__main__":
    main()
