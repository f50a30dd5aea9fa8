"""Where sentences end and headings begin in text that arrives piece by piece, and a buffer of sentences."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from specsot_master.core.plans.text_pieces import TextPiece

ENDS: Final = (".", "!", "?", "。", "！", "？", "\n")
# Characters. The end of a text that tells whether the text ends a sentence.
TAIL_CHARACTERS: Final = 16
_ITEM: Final = re.compile(r"\s*(?:[-*+•]\s|\d{1,3}(?:[.)]\s|[、．]))")
_FENCES: Final = ("```", "~~~")


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


def is_lone_item(text: str) -> bool:
    """Return True if the text announces a list, of which it has no more than one item.

    "Use these:\\n- Light\\n" -> True;   "Use these:\\n- Light\\n- Water\\n" -> False;   "- Light\\n" -> False
    """
    lines = [line for line in text.split("\n") if line.strip()]
    items = sum(_ITEM.match(line) is not None for line in lines)
    announced = [line for line in lines if line.rstrip(" *_").endswith((":", "："))]
    return bool(announced) and items == 1


def open_fence(text: str) -> str:
    """Return the fence of the code block that is open at the end of the text, or "" if none is.

    "Run this:\\n```sh\\nls" -> "```"
    """
    fence = ""
    for line in text.split("\n"):
        bare = line.strip()
        if not fence and bare.startswith(_FENCES):
            fence = bare[:3]
        elif fence and bare.startswith(fence) and not bare.strip(fence[0]):
            fence = ""
    return fence


@dataclass(slots=True)
class SentenceBuffer:
    """Holds the pieces of one text back until they complete a sentence or a line. A line that announces a
    list is held until two of the list's items are complete, so that no list is shown of which a limit leaves
    only the first item.

    held: the pieces of the unfinished sentence.
    whole: True while the text that was released ends with a whole sentence or line.
    begun: True once a sentence or a line was whole.
    """

    held: list[TextPiece] = field(default_factory=list[TextPiece])
    whole: bool = False
    begun: bool = False
    # The last TAIL_CHARACTERS characters that were added.
    _tail: str = ""

    def add(self, piece: TextPiece, holds: bool = True) -> list[TextPiece]:
        """Add one piece, and return the pieces that may be shown now. With `holds` unset, all of them may.

        "A b", ".", " C" one after the other -> [], ["A b", "."], []
        """
        self.held.append(piece)
        self._tail = (self._tail + piece.text)[-TAIL_CHARACTERS:]
        ended = ends_sentence(self._tail)
        if holds and not (ended and not is_lone_item("".join(one.text for one in self.held))):
            return []
        self.whole = ended
        self.begun = self.begun or ended
        return self.take()

    def take(self) -> list[TextPiece]:
        """Return the pieces that are held, and hold them no longer."""
        held = self.held
        self.held = []
        return held


@dataclass(slots=True)
class NextHeading:
    """Finds where the text of a point begins a heading, which would be the next point's. A line of code
    between fences may begin with "#".

    found: True once a heading has begun.
    fenced: True while the text is code between fences.
    """

    found: bool = False
    fenced: bool = False
    _begun: bool = False
    _line: str = ""

    def begins_with(self, piece: TextPiece) -> bool:
        """Return True if this piece, which is one token, begins a heading. Otherwise add the piece.

        "It is.", "\\n\\n", "##", " 2" one after the other -> False, False, True, True
        """
        at_line = self._begun and not self.fenced and not self._line.strip()
        self.found = self.found or (at_line and piece.text.lstrip().startswith("#"))
        if self.found:
            return True
        self._begun = True
        *lines, self._line = (self._line + piece.text).split("\n")
        for line in lines:
            self.fenced ^= line.lstrip().startswith(_FENCES)
        return False
