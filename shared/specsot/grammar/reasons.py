"""Translates the compiler's errors for forms into messages that a client can act on.

Only known errors are translated, and every other error has one general message, so that no internal word of
the library reaches a client.
"""

from __future__ import annotations

import re

# The message for a form that no text matches.
CONTRADICTION = "no text satisfies all of its patterns"
# The message for an error that is not known here.
UNKNOWN = "a part of it is invalid, or cannot be enforced"
# Characters. Bounds how much of a form is repeated in a message.
_MAX_REASON = 300

# What the library writes in place of a message, for example if no token is allowed at the beginning.
_NO_MESSAGE = "<non-verbose/>"
# Where the library's excerpt of its own source begins.
_EXCERPT = re.compile(r"\n\s+\d+ \| ")

# Errors of the library as regular expressions, and their messages as templates of `re.Match.expand`. The
# first one that is found in an error counts.
_MESSAGES = tuple(
    (re.compile(error, re.DOTALL), message)
    for error, message in (
        (r"^NoExtensionBias$", CONTRADICTION),
        (r"Unimplemented keys: \[([^\]]*)\]", r"keywords that cannot be enforced: \1"),
        (r"Regex is empty: ", "no text satisfies its pattern, format and lengths together"),
        # The engine of regular expressions shows the pattern, marks below it what is wrong, and says why. A
        # pattern of several lines has line numbers and further marks, and is not repeated.
        (
            r"regex parse error:\n {4}([^\n]*)\n[ ^]*\nerror: ([^\n]*)",
            r'a pattern cannot be used: \2, in "\1"',
        ),
        (r"regex parse error:.*\nerror: ([^\n]*)", r"a pattern cannot be used: \1"),
        (
            r"lookarounds not supported yet; \w+ in regex /(.*)/",
            r'a pattern cannot be used: word boundaries, and anchors within it, are not supported, in "\1"',
        ),
        (r"Pointer '([^']*)' does not exist", r'its reference to "\1" names nothing'),
        (
            r"Resource '(?:json-schema:///)?([^']*)' is not present",
            r'"\1" is not part of the schema, and other documents are not read',
        ),
        (r"Invalid type: (.*)", r'there is no type "\1"'),
        (r"(?:^|: )([$\w]+) must be (an? [a-z]+(?: or [a-z ]+)?)(?:, got .*)?$", r"\1 must be \2"),
        (r"Expected (?:u64|positive integer) for '([^']*)'", r"\1 must be an integer >= 0"),
        (r"Expected f64 for '([^']*)'", r"\1 must be a number"),
        (r"Expected (array|object) for '([^']*)'", r"\2 must be an \1"),
        (r"Expected (string|bool)\w* for '([^']*)'", r"\2 must be a \1"),
        (r"invalid multiple of", "multipleOf must be more than 0"),
        (r"'multipleOf' has too many digits", "multipleOf has too many digits"),
        (r"(?:anyOf|oneOf) is empty", "an enum, anyOf or oneOf is empty"),
        (r"(m\w+) \(([^()]*)\) is greater than (m\w+) \(([^()]*)\)", r"\1 (\2) is greater than \3 (\4)"),
        (r"incompatible types", "no value has all of the types that it requires"),
        (r"does not contain a multiple of", "no multiple of multipleOf is in its range"),
        (r"Unsatisfiable schema", "no value satisfies it"),
        (r"(?:float|integer) range", "its range of numbers cannot be enforced"),
        (r"too large|too many|too big|fuel", "it is too large"),
    )
)


def reason_in(error: str) -> str:
    """Return what is wrong with a form, on one line; "" for no error, or for an error without a message.

    error: the library's error, which may have several lines.

    A known error gives a message for clients, of at most _MAX_REASON characters and "..."; any other error
    gives UNKNOWN.
    """
    sentence = _EXCERPT.split(error)[0].replace(_NO_MESSAGE, "")
    if not sentence.strip():
        return ""
    for pattern, message in _MESSAGES:
        if found := pattern.search(sentence):
            line = " ".join(found.expand(message).split())
            return line if len(line) <= _MAX_REASON else line[:_MAX_REASON] + "..."
    return UNKNOWN
