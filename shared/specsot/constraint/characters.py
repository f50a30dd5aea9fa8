"""UTF-8 as byte ranges: what may follow which part of a character, in titles and in free text.

Refuses to know the skeleton language around the text.

A partly written character is named by what is still owed ("1", "2", "3" continuation bytes), or by its
bytes in hex where the next byte is not free: overlong forms, surrogates, and in titles the characters
that are blank or break lines. "" is the place between two characters.
Source: Unicode 16, table 3-7 (well-formed UTF-8), and the White_Space property.
"""

from __future__ import annotations

from typing import Final

Partial = str
Row = tuple[tuple[int, int, Partial], ...]  # (low, high, what comes after); inclusive, disjoint

SOLID: Final = "solid"  # the byte ends a character that can be seen
BLANK: Final = "blank"  # the byte ends a kind of space

_ANY: dict[Partial, Row] = {
    "1": ((0x80, 0xBF, SOLID),),
    "2": ((0x80, 0xBF, "1"),),
    "3": ((0x80, 0xBF, "2"),),
    "e0": ((0xA0, 0xBF, "1"),),
    "ed": ((0x80, 0x9F, "1"),),
    "f0": ((0x90, 0xBF, "2"),),
    "f4": ((0x80, 0x8F, "2"),),
}

_LONG_LEADS: Row = (
    (0xC3, 0xDF, "1"),
    (0xE0, 0xE0, "e0"),
    (0xE4, 0xEC, "2"),
    (0xED, 0xED, "ed"),
    (0xEE, 0xEF, "2"),
    (0xF0, 0xF0, "f0"),
    (0xF1, 0xF3, "3"),
    (0xF4, 0xF4, "f4"),
)

# "[" (0x5B) is left out of both: it may begin "[END]", so the grammar looks at it itself.
FREE: dict[Partial, Row] = {
    "": ((0x00, 0x5A, SOLID), (0x5C, 0x7F, SOLID), (0xC2, 0xC2, "1"), (0xE1, 0xE3, "2"), *_LONG_LEADS),
    **_ANY,
}

# Rows put solid characters first: the first byte of a row is the surest way to a valid title.
TITLE: dict[Partial, Row] = {
    "": (
        (0x41, 0x5A, SOLID),
        (0x21, 0x40, SOLID),
        (0x5C, 0x7E, SOLID),
        (0x20, 0x20, BLANK),
        (0xC2, 0xC2, "c2"),
        (0xE1, 0xE1, "e1"),
        (0xE2, 0xE2, "e2"),
        (0xE3, 0xE3, "e3"),
        *_LONG_LEADS,
    ),
    "c2": ((0xA1, 0xBF, SOLID), (0xA0, 0xA0, BLANK)),  # 80..9F are control characters, 85 a line end
    "e1": ((0x80, 0x99, "1"), (0x9A, 0x9A, "e19a"), (0x9B, 0xBF, "1")),
    "e19a": ((0x81, 0xBF, SOLID), (0x80, 0x80, BLANK)),
    "e2": ((0x82, 0xBF, "1"), (0x80, 0x80, "e280"), (0x81, 0x81, "e281")),
    "e280": (
        (0x8B, 0xA7, SOLID),
        (0xAA, 0xAE, SOLID),
        (0xB0, 0xBF, SOLID),
        (0x80, 0x8A, BLANK),
        (0xAF, 0xAF, BLANK),
    ),
    "e281": ((0x80, 0x9E, SOLID), (0xA0, 0xBF, SOLID), (0x9F, 0x9F, BLANK)),
    "e3": ((0x81, 0xBF, "1"), (0x80, 0x80, "e380")),
    "e380": ((0x81, 0xBF, SOLID), (0x80, 0x80, BLANK)),
    **_ANY,
}

OWED: dict[Partial, int] = {
    **{"": 0, "1": 1, "2": 2, "3": 3, "e0": 2, "ed": 2, "f0": 3, "f4": 3},
    **{"c2": 1, "e1": 2, "e19a": 1, "e2": 2, "e280": 1, "e281": 1, "e3": 2, "e380": 1},
}  # continuation bytes until the character is whole
