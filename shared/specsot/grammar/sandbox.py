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

SECONDS = 1.0  # seconds of one core for compiling a form and its first steps; not measured
_STEPS = 64  # tokens that a trial walks; not measured
_NOTHING = ("", CONTRADICTION)  # What the library complains of where no text matches.
_MEMORY = 4 << 30  # bytes of address space of a trial, interpreter and libraries included; not measured


def main() -> None:
    """Exits with 0 whatever is found; any other end is the library's."""
    _bound(resource.RLIMIT_CORE, 0)
    _bound(resource.RLIMIT_CPU, 4)  # seconds; what hangs cannot be measured, only ended
    _bound(resource.RLIMIT_AS, _MEMORY)
    asked = json.load(sys.stdin)
    try:
        try_form(Form(asked["kind"], tuple(asked["texts"])))
    except InvalidRequest as error:
        print(error)


def try_form(form: Form) -> None:
    """Compile it and write a few tokens. Raises InvalidRequest."""
    vocabulary = _pairs()
    began = _spent()
    matcher = compile_form(vocabulary, form, STACK // 8)
    if form.kind == "choice":
        Choices(vocabulary, form.texts)  # counted when it is compiled for laps, too
    for step in range(_STEPS):
        allowed = _allowed(matcher, len(vocabulary))
        if step == 0 and not len(allowed) and reason_in(matcher.get_error()) in _NOTHING:
            raise refuse(f"{form.kind} allows no text")
        if matcher.is_error():
            raise refuse(f"{form.kind}: {reason_in(matcher.get_error())}")
        if _spent() - began > SECONDS:
            raise refuse(f"{form.kind} takes too long to follow")
        if not len(allowed):
            break
        matcher.consume_token(int(allowed[step * 7919 % len(allowed)]))


def _pairs() -> Vocabulary:
    """Every byte, and every two printable ones: enough to make a step about as dear as with a model's."""
    printable = range(0x20, 0x7F)
    pairs = (bytes(pair) for pair in itertools.product(printable, repeat=2))
    return describe([*(bytes([byte]) for byte in range(256)), *pairs])


def _allowed(matcher: LLMatcher, count: int) -> np.ndarray:
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(bits, count=count, bitorder="little"))


def _spent() -> float:
    """Seconds of one core, of all threads."""
    times = os.times()
    return times.user + times.system


def _bound(kind: int, limit: int) -> None:
    """Never more than what is allowed already; systems that cannot bound it go without."""
    with suppress(ValueError, OSError):
        most = resource.getrlimit(kind)[1]
        bound = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(kind, (bound, most))


if __name__ == "__main__":
    main()
