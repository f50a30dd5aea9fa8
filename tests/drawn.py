"""What Hypothesis works out in every process of tests anew: nearly six seconds of a core each."""

from __future__ import annotations

from typing import Any

from hypothesis.internal import charmap
from hypothesis.internal.conjecture import providers
from hypothesis.internal.intervalsets import IntervalSet

ALL_BUT_SURROGATES = IntervalSet(((0, 0xD7FF), (0xE000, 0x10FFFF)))
OF_A_CODEC: Any = charmap.intervals_from_codec


def characters_of(codec: str) -> Any:
    """As `intervals_from_codec`, which tries a million characters to find those that a codec can write."""
    return (ALL_BUT_SURROGATES, IntervalSet(())) if codec == "utf-8" else OF_A_CODEC(codec)


def install(constants: bool) -> None:
    """constants: of what is drawn, some are still constants that our loaded modules name. They are read out
    of four hundred files, and what is drawn then depends on which are loaded.
    """
    charmap.intervals_from_codec = characters_of  # type: ignore[assignment]
    if not constants:
        providers.is_local_module_file = lambda path: False
