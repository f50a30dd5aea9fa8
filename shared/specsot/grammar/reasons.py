"""Why a form cannot be compiled, in words that a caller can act on."""

from __future__ import annotations

import re

CONTRADICTION = (
    "no text satisfies all of its patterns, such as patternProperties that match declared properties"
)
# What the library says in words of its own, and what a caller can act on.
_IN_WORDS = (
    (re.compile(r"^NoExtensionBias$"), CONTRADICTION),
    (re.compile(r"Unimplemented keys: \[(.*)\]"), r"keywords that cannot be enforced: \1"),
    (re.compile(r"Regex is empty: .*"), "no text satisfies its pattern, format and lengths together"),
)
_LONGEST_REASON = 300  # characters of a compiler's message that are repeated
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")
_EXCERPT = re.compile(r"\n\s+\d+ \| ")


def reason_in(error: str) -> str:
    """What the library complains about, without its excerpts, places and inner names, on one line."""
    told = _EXCERPT.split(error)[0].replace("<non-verbose/>", "")
    line = " ".join(_PLACE.sub("", told).split())
    for pattern, words in _IN_WORDS:
        line = pattern.sub(words, line)
    return line if len(line) <= _LONGEST_REASON else line[:_LONGEST_REASON] + "..."
