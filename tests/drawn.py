"""Spares Hypothesis two computations that take nearly six seconds of a core in every process."""

from __future__ import annotations

from typing import Any

from hypothesis.internal import charmap
from hypothesis.internal.conjecture import providers
from hypothesis.internal.intervalsets import IntervalSet

ALL_BUT_SURROGATES = IntervalSet(((0, 0xD7FF), (0xE000, 0x10FFFF)))
OF_A_CODEC: Any = charmap.intervals_from_codec


def characters_of(codec: str) -> Any:
    """Like `intervals_from_codec`, which encodes a million characters to find those that a codec can encode.

    codec: name of the codec. The result for UTF-8 is known; others are computed.
    """
    return (ALL_BUT_SURROGATES, IntervalSet(())) if codec == "utf-8" else OF_A_CODEC(codec)


def install(constants: bool) -> None:
    """Replace both computations.

    constants: True: Hypothesis still draws constants from the source of our modules, which it reads from all
        files that are loaded. Examples then depend on which modules a process has loaded.
    """
    charmap.intervals_from_codec = characters_of  # type: ignore[assignment]
    if not constants:
        providers.is_local_module_file = lambda path: False
