"""Tells from the beginning of a direct answer whether the answer is so short that a plan would stretch it.

The result depends on the tokens of the direct answer only, as the decision between plan and direct answer
must be the same with any drafter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from specsot_master.core.plans.introduction import MAX_INTRODUCTION_TOKENS
from specsot_master.core.plans.text_pieces import TextPiece
from specsot_master.core.plans.wording import PARAGRAPH_TOKENS

# Tokens. An item of a list with fewer is a one-liner. A point of a plan would have at least twice as many.
ONE_LINER_TOKENS: Final = 16
# Fraction of a plan's tokens. One-liners count within so many first tokens of the answer: numbers and full
# stops of a plan's lines follow from its grammar, so that about so many steps complete the plan. Chosen by
# measurement: of the tokens of 41 plans of Qwen2.5-Coder-1.5B-Instruct, 0.75 are no such marks.
READ_FRACTION: Final = 0.7
# Items. A list whose first so many items are one-liners has nothing else. Untuned.
_ITEMS_READ: Final = 2
_ITEM: Final = re.compile(r"\s*(?:[-*+•]\s|\d{1,3}(?:[.)]\s|[、．]))")
_MAY_BECOME_ITEM: Final = re.compile(r"\s*(?:[-*+•]|\d{1,3}[.)]?)?\Z")


@dataclass(slots=True)
class ShortAnswer:
    """Reads a direct answer token by token until it is known whether the answer is short.

    An answer is short if it is a single paragraph, or if the first two lines after its first paragraph are
    one-liners of a list. One-liners count only within the answer's first tokens, READ_FRACTION of as many as
    the plan has, so that a plan which is complete does not wait for them. Where answers may be long
    paragraphs, a single paragraph is short only if it has fewer tokens than an introduction may have.

        "Rivers are long.\\n\\n1. Danube\\n2. Rhine\\n3." -> short, as soon as the second item is complete
        "Rivers are long.\\n\\n1. The Danube, which rises in the Black Forest and has" -> not short
    """

    # A first paragraph of at least this number of tokens is taken for the whole answer. None if this model
    # writes long answers of a single paragraph (see `Wording.paragraph_tokens`): then no paragraph is.
    paragraph_tokens: int | None = PARAGRAPH_TOKENS
    # True or False once the tokens tell, None before.
    _short: bool | None = None
    # Tokens of the text up to those that told, and of the current line.
    _tokens: int = 0
    _line_tokens: int = 0
    _line: str = ""
    # True once the first paragraph is complete.
    _broken: bool = False
    # One-liners after the first paragraph.
    _one_liners: int = 0

    def read(self, piece: TextPiece) -> None:
        """Add the next piece. Nothing happens once the text has told whether the answer is short.

        piece: the next piece of the direct answer; one without a token counts as text only.
        """
        if self._short is not None:
            return
        self._tokens += piece.token is not None
        self._line_tokens += piece.token is not None
        *lines, last = (self._line + piece.text).split("\n")
        for line in lines:
            self._end_line(line)
        self._line = last
        self._judge_line()

    def end(self) -> None:
        """Record that the direct answer has ended: what was undecided is short."""
        if self._short is None:
            self._short = True

    def is_short(self, plan_tokens: int, plan_complete: bool) -> bool | None:
        """Return whether the answer is short, or None if that is not known yet. A result never changes,
        whichever of answer and plan is decoded first.

        A single paragraph is short whatever the plan's length; one-liners make the answer short only if they
        were complete within READ_FRACTION of `plan_tokens` tokens. Return False if the text tells so, or if
        the first paragraph and the plan are complete and the answer has so many tokens without being short.

        plan_tokens: how many tokens the plan has so far.
        plan_complete: True if the plan has no further tokens.
        """
        last = int(READ_FRACTION * plan_tokens)
        if self._short and (not self._broken or self._tokens <= last):
            return True
        late = self._broken and plan_complete and self._tokens >= last
        return False if late or self._short is False else None

    def _end_line(self, line: str) -> None:
        """Read a complete line. Blank lines count as nothing. The first other line completes the first
        paragraph. After that, a line that is no item of a list, or that ends with a colon, tells that the
        answer is not short; _ITEMS_READ items tell that it is.

        line: the line, without its line break.
        """
        self._line_tokens = 0
        if self._short is not None or not line.strip():
            return
        if not self._broken:
            self._broken = True
        elif not _ITEM.match(line) or line.rstrip(" *_").endswith((":", "：")):
            self._short = False
        else:
            self._one_liners += 1
            if self._one_liners == _ITEMS_READ:
                self._short = True

    def _judge_line(self) -> None:
        """Decide by the incomplete last line, if it suffices. A first paragraph of `paragraph_tokens` tokens
        is short; where answers may be long paragraphs, one of MAX_INTRODUCTION_TOKENS is not. After that, a
        line that cannot become an item of a list, or that has ONE_LINER_TOKENS tokens, tells that the answer
        is not short.
        """
        if self._short is not None:
            return
        if not self._broken:
            may_be_long = self.paragraph_tokens is None
            enough = MAX_INTRODUCTION_TOKENS if self.paragraph_tokens is None else self.paragraph_tokens
            if self._tokens >= enough:
                self._short = not may_be_long
            return
        may_be_item = _ITEM.match(self._line) or _MAY_BECOME_ITEM.match(self._line)
        if not may_be_item or self._line_tokens >= ONE_LINER_TOKENS:
            self._short = False
