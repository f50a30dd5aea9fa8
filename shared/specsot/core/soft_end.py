"""Where a sequence of free text may end before its limit: after a sentence, once it is nearly long enough."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SoftEnd:
    """The soft end of a sequence. Its hard end is the sequence's limit.

    Once the sequence has generated `after` tokens, it ends after the current sentence, list or
    block. If the next token would begin something new, `token` is generated in its place.

    after: number of generated tokens.
    token: an end token, one of the sequence's stop ids.

    Worked example, with after=5:

        # A cat sleeps . It purrs . Dogs bark     -> the sequence ends after "purrs .", its 6th and 7th tokens
    """

    after: int
    token: int
