"""Vocabularies to test with, and texts over them.

Refuses to know the automaton.
"""

from __future__ import annotations

from specsot.vocabulary import Vocabulary, describe

SINGLE = describe([None, *(bytes([byte]) for byte in range(256)), None])

# Tokens that cross fields, lines and characters, the way real merges do and worse.
CROSSING = describe(
    [
        *(bytes([byte]) for byte in range(256)),
        None,
        *(b"[PLAN]\n", b"[PLAN]\n1.<", b"[P", b"[DIRECT]\n", b"[DI", b"]\n", b"]\n2", b"\n2", b"\n3.<", b"[END]", b"\n[END]"),
        *(b">[", b".<", b"><", b"><None>[-]", b"None>[", b"80", b"123", b"12345", b"1,2", b"],", b"-]", b"-]A"),
        *(b" ", b"  ", b" " * 40, b" " * 90, b" the", b"A title\n2.<9><None>[-]B", b"x" * 79, b"y" * 80, b"z" * 81),
        *(b"A" * 70 + b"\n2.<1><None>[-]" + b"B" * 80, b"A\n2.<1><None>[-]" + b"B" * 81),
        *("睡眠".encode(), "睡".encode()[:2], "😴".encode()[:3], "😴".encode(), "é".encode(), "\u2028".encode()),
        *("\u3000".encode(), "\u3000".encode()[:2], b"\xe2\x80", b"\x85", b"\xc2\x85", b"\xc2\xa0", b"\xed\xa0"),
        *(b"[EN", b"D]", b"ND]", b"a[END]", b"[END]x", b"[[END]", b"\xa8x", b"\xaf", b"\n\n", b"\x00", b"Search", b"Se"),
        *(b"[END]", b" the"),
        None,
    ]
)  # fmt: skip

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
