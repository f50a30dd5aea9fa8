"""Translates the compiler's error for a form into a message that a client can act on."""

from __future__ import annotations

import re

CONTRADICTION = (
    "no text satisfies all of its patterns, such as patternProperties that match declared properties"
)
# Messages of the library, and what a client is shown instead.
_IN_WORDS = (
    (re.compile(r"^NoExtensionBias$"), CONTRADICTION),
    (re.compile(r"Unimplemented keys: \[(.*)\]"), r"keywords that cannot be enforced: \1"),
    (re.compile(r"Regex is empty: .*"), "no text satisfies its pattern, format and lengths together"),
)
# Characters. Bounds how much of a compiler's message is repeated.
_LONGEST_REASON = 300
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")
_EXCERPT = re.compile(r"\n\s+\d+ \| ")


def reason_in(error: str) -> str:
    """Return the library's error on one line, without source excerpts, positions and internal names."""
    told = _EXCERPT.split(error)[0].replace("<non-verbose/>", "")
    line = " ".join(_PLACE.sub("", told).split())
    for pattern, words in _IN_WORDS:
        line = pattern.sub(words, line)
    return line if len(line) <= _LONGEST_REASON else line[:_LONGEST_REASON] + "..."
