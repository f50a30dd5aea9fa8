"""Vocabularies to test with, and texts over them."""

from __future__ import annotations

from specsot.core.vocabulary import Vocabulary, describe

SINGLE = describe([None, *(bytes([byte]) for byte in range(256)), None])

# Tokens that cross fields, lines and characters, the way real merges do and worse.
_MARKERS = (
    b"[PLAN]\n",
    b"[PLAN]\n1.<",
    b"[P",
    b"[DIRECT]\n",
    b"[DI",
    b"[END]",
    b"\n[END]",
    b"[EN",
    b"D]",
    b"ND]",
)
_AFTER_END = (b"a[END]", b"[END]x", b"[[END]", b"[END]")
_LINES = (
    b"]\n",
    b"]\n2",
    b"\n2",
    b"\n3.<",
    b"\n\n",
    b"A title\n2.<9><None>[-]B",
    b"A\n2.<1><None>[-]" + b"B" * 81,
)
_LISTS = (b"\n2.", b"A title\n2. B", b": ", b":\n3", b". ", b"\n\n", b" A b c d e f g h i", b".5", b"9:")
_FIELDS = (
    b">[",
    b".<",
    b"><",
    b"><None>[-]",
    b"None>[",
    b"80",
    b"123",
    b"12345",
    b"1,2",
    b"],",
    b"-]",
    b"-]A",
)
_TITLES = (b" ", b"  ", b" " * 40, b" " * 90, b" the", b" the", b"x" * 79, b"y" * 80, b"z" * 81, b"\x00")
_WHOLE_LINE = b"A" * 70 + b"\n2.<1><None>[-]" + b"B" * 80
_CHARACTERS = tuple(text.encode() for text in ("睡眠", "😴", "é", "\u2028", "\u3000", "\u0085", "\u00a0"))
_PIECES = (b"\xe7\x9d", b"\xf0\x9f\x98", b"\xe3\x80", b"\xe2\x80", b"\x85", b"\xed\xa0", b"\xa8x", b"\xaf")
_NAMES = (b"Search", b"Se")

CROSSING = describe(
    [
        *(bytes([byte]) for byte in range(256)),
        None,
        *(
            *_MARKERS,
            *_AFTER_END,
            *_LINES,
            *_LISTS,
            *_FIELDS,
            *_TITLES,
            _WHOLE_LINE,
            *_CHARACTERS,
            *_PIECES,
            *_NAMES,
        ),
        None,
    ]
)

# Just what a plan or direct answer needs, no bytes above ASCII.
NARROW = describe([bytes([byte]) for byte in b"\n,-.<>[]0123456789ADEILNPRTCone x"] + [b"\xe7", b".<", None])


def token_ids(vocabulary: Vocabulary, text: bytes, longest: int = 12) -> list[int]:
    """Tokens of `text`, longest first."""
    ids = {token: number for number, token in enumerate(vocabulary.bytes) if token}
    found: list[int] = []
    while text:
        stop = next(stop for stop in range(longest, 0, -1) if text[:stop] in ids)
        found.append(ids[text[:stop]])
        text = text[stop:]
    return found
