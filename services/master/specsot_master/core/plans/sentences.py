"""Where sentences end while text arrives piece by piece, and a buffer that releases whole sentences only."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import inf
from typing import Final

from specsot_master.core.plans.text_pieces import TextPiece

ENDS: Final = (".", "!", "?", "。", "！", "？", "\n")
# Characters. The end of a text that tells whether the text ends a sentence.
TAIL_CHARACTERS: Final = 16
# What follows a sentence that has ended: white space, unless a word in small letters follows ("e.g. this").
_NEXT_SENTENCE = re.compile(r"\s*\Z|\s+[^\sa-zäöüßáéíóúñ]|\n")
# The beginnings of lines that belong together with other lines: items of lists, tables, quotations.
_LINE_OF_MANY = re.compile(r"\s*(?:[-*+•>|]|\d{1,3}[.)、])")


def ends_sentence(text: str) -> bool:
    """Return True if the text ends a sentence or a line. A full stop after a digit does not count: it may
    belong to a number or to a list. Neither does a line that announces what follows, or one of marks only.

        "It is so." -> True;   "Use these:\\n" -> False;   "It is so.\\n**" -> False
    """
    bare = text.rstrip(" \"'*”’)")
    line = text.rpartition("\n")[2]
    marks = line.strip() and line != text and not any(map(str.isalnum, line))
    if marks or bare.rstrip().endswith((":", "：")):
        return False
    return bare.endswith(ENDS) and bool(bare.strip()) and not bare[:-1].endswith(tuple("0123456789"))


@dataclass(slots=True)
class SentenceBuffer:
    """Holds the pieces of one text back until they complete a sentence or a line.

    held: the pieces of the unfinished sentence.
    whole: True while the text that was released ends with a whole sentence or line.
    """

    held: list[TextPiece] = field(default_factory=list[TextPiece])
    whole: bool = False
    # The last TAIL_CHARACTERS characters that were added.
    _tail: str = ""

    def add(self, piece: TextPiece, holds: bool = True) -> list[TextPiece]:
        """Add one piece, and return the pieces that may be shown now. With `holds` unset, all of them may.

        "A b", ".", " C" one after the other -> [], ["A b", "."], []
        """
        self.held.append(piece)
        self._tail = (self._tail + piece.text)[-TAIL_CHARACTERS:]
        ended = ends_sentence(self._tail)
        if holds and not ended:
            return []
        self.whole = ended
        return self.take()

    def take(self) -> list[TextPiece]:
        """Return the pieces that are held, and hold them no longer."""
        held = self.held
        self.held = []
        return held


@dataclass(slots=True)
class SoftEnd:
    """Finds where a text may end softly: after the first sentence that ends once enough tokens were written.

    after: the tokens after which the text ends at the next end of a sentence.
    limit: the tokens after which the text ends before its unfinished sentence, if it has a whole one.
    fenced: True while the text is code between fences.

    A text does not end softly within a list, a table or code, or after an abbreviation.
    """

    after: float = inf
    limit: float = inf
    fenced: bool = False
    _tokens: int = 0
    _line: str = ""

    def ends_before(self, piece: TextPiece) -> bool:
        """Return True if the text ends before this piece, which is one token. Otherwise add the piece.

        A text also ends before a line that begins with a heading: the next point's.
        """
        if self._tokens and not (self.fenced or self._line.strip()) and piece.text.lstrip().startswith("#"):
            return True
        if self._tokens >= self.after and self._is_complete() and _NEXT_SENTENCE.match(piece.text):
            return True
        self._tokens += piece.token is not None
        *lines, last = (self._line + piece.text).split("\n")
        for line in lines:
            self.fenced ^= line.lstrip().startswith(("```", "~~~"))
        self._line = last
        return False

    def _is_complete(self) -> bool:
        """Return True if a sentence of ordinary text has ended here."""
        apart = self.fenced or _LINE_OF_MANY.match(self._line) is not None
        return not apart and not self._line.isspace() and ends_sentence(self._line)
