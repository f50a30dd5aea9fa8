"""Where sentences end and headings begin in text that arrives piece by piece, and a buffer of sentences."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from specsot_master.core.plans import router_words
from specsot_master.core.plans.introduction import announces
from specsot_master.core.plans.text_pieces import TextPiece

ENDS: Final = (".", "!", "?", "。", "！", "？", "\n")
# Characters. The end of a text that tells whether the text ends a sentence.
TAIL_CHARACTERS: Final = 16
_ITEM: Final = re.compile(r"\s*(?:[-*+•]\s|\d{1,3}(?:[.)]\s|[、．]))")
_FENCES: Final = ("```", "~~~")
_LEANING: Final = re.compile(router_words.LEANING, re.IGNORECASE)
# An end after a digit, as in a number or a list, or a full stop after a single capital letter ("J. K.").
_ABBREVIATED: Final = re.compile(r"(?:\d[\s\S]|(?:^|[\W_])[A-ZÄÖÜÁÉÍÓÚÑ]\.)\Z")


def ends_sentence(text: str) -> bool:
    r"""Return True if the text ends a sentence or a line. A full stop after a digit or a single capital
    letter does not count: it may belong to a number, to a list or to initials. Neither does a line that
    announces what follows, or one of marks only. Return False for a text without words. Quotes, brackets and
    marks of emphasis after the end are ignored.

        "It is so." -> True;   "Use these:\n" -> False;   "It is so.\n**" -> False

    text: the end of a text, TAIL_CHARACTERS or more characters if there are so many.
    """
    bare = text.rstrip(" \"'*”’)")
    line = text.rpartition("\n")[2]
    marks = line.strip() and line != text and not any(map(str.isalnum, line))
    if marks or bare.rstrip().endswith((":", "：")):
        return False
    return bare.endswith(ENDS) and bool(bare.strip()) and not _ABBREVIATED.search(bare)


def leans(text: str) -> bool:
    """Return True if a sentence begins with words that lean on the sentence before it ("This helps you"), or
    announces what follows ("Here are some tips"), with which no text begins.
    """
    bare = text.strip()
    return _LEANING.match(bare) is not None or announces(bare)


def ends_announcing(text: str) -> bool:
    """Return True if the text ends with a line that announces what follows: "Use these:"."""
    return text.rstrip(" *_\n").endswith((":", "："))


def is_announcement(text: str) -> bool:
    """Return True if the text is a single sentence that announces what follows: "Here are some points."

    text: text that ends with a whole sentence.
    """
    bare = text.strip()
    return announces(bare) and not any(map(ends_sentence, _beginnings_of(bare)))


def _beginnings_of(text: str) -> list[str]:
    """Return the text up to each of its characters that may end a sentence, without the last one.

    text: any text.
    """
    return [text[: place + 1] for place, character in enumerate(text[:-1]) if character in ENDS]


def open_fence(text: str) -> str:
    """Return the fence of the code block that is open at the end of the text, or "" if none is. A fence is
    returned as three characters. Only a line of nothing but the same characters, at least three, closes it.

    "Run this:\\n```sh\\nls" -> "```"

    text: any text, from its beginning.
    """
    fence = ""
    for line in text.split("\n"):
        fence = fence_after(line, fence)
    return fence


def fence_after(line: str, fence: str) -> str:
    """Return the fence of the code block that is open after a line, or "" if none is.

    line: the line, without its line break.
    fence: the fence that is open before the line, or "".
    """
    bare = line.strip()
    if not fence and bare.startswith(_FENCES):
        return bare[:3]
    return "" if fence and bare.startswith(fence) and not bare.strip(fence[0]) else fence


@dataclass(slots=True)
class SentenceBuffer:
    """Holds back the pieces of one sequence's text until they complete a sentence or a line. The first item
    of a list is held, with the line that announces the list, until the second item is complete, so that no
    list is shown of which a limit leaves only the first item. An announcement ("Here are some points.") is
    held with the sentence that follows it.

    held: the pieces of the unfinished sentence.
    whole: True while the text that was released ends with a whole sentence or line.
    begun: True once a sentence or a line was whole.
    holds_code: True to hold code between fences until its last line is complete, so that no code is shown of
        which a limit leaves only the beginning.
    """

    held: list[TextPiece] = field(default_factory=list[TextPiece])
    whole: bool = False
    begun: bool = False
    holds_code: bool = False
    # The last TAIL_CHARACTERS characters that were added.
    _tail: str = ""
    # The current line, and how many items of a list precede it.
    _line: str = ""
    _items: int = 0
    # The fence of the code block that is open, or "" outside of code.
    _fence: str = ""

    def add(self, piece: TextPiece, holds: bool = True) -> list[TextPiece]:
        """Add one piece, and return the pieces that may be shown now; [] while their sentence is not
        complete, or while they end with a list of one item, an announcement, or code that is held. `whole` is
        updated whenever pieces are returned.

        "A b", ".", " C" one after the other -> [], ["A b", "."], []

        piece: the next piece of the text.
        holds: False to return all pieces at once, whether or not their sentence is complete.
        """
        self.held.append(piece)
        self._tail = (self._tail + piece.text)[-TAIL_CHARACTERS:]
        ended = ends_sentence(self._tail)
        self._read_lines(piece.text)
        if self.holds_code:
            # The beginning of a line may become a fence.
            ended = ended and not self._fence and not self._line.lstrip().startswith(("`", "~"))
        if holds and (not ended or self._is_lone_item or self._announces):
            return []
        self.whole = ended
        self.begun = self.begun or ended
        return self.take()

    def _read_lines(self, text: str) -> None:
        """Count the items of the list that the text continues, and find the fences of code. Blank lines may
        separate items; any other line sets the count to 0. Only complete lines count.

        text: the next part of the text.
        """
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._fence = fence_after(line, self._fence)
            if _ITEM.match(line):
                self._items += 1
            elif line.strip():
                self._items = 0

    @property
    def _announces(self) -> bool:
        """True if the pieces that are held are an announcement, and nothing else."""
        return is_announcement("".join(piece.text for piece in self.held))

    @property
    def _is_lone_item(self) -> bool:
        """True if the text ends with a list of one item, which may be incomplete."""
        if not self._line.strip():
            return self._items == 1
        return self._items == 0 and _ITEM.match(self._line) is not None

    def take(self) -> list[TextPiece]:
        """Return the pieces that are held, and hold them no longer; [] if none is."""
        held = self.held
        self.held = []
        return held


@dataclass(slots=True)
class NextHeading:
    """Finds where the text of one point begins a heading, which would be the next point's. A line of code
    between fences may begin with "#".

    found: True once a heading has begun.
    fenced: True while the text is code between fences.
    """

    found: bool = False
    fenced: bool = False
    # True once a piece was added: a heading at the very beginning of the text is not the next point's.
    _begun: bool = False
    # The unfinished line.
    _line: str = ""

    def begins_with(self, piece: TextPiece) -> bool:
        r"""Return True if this piece begins a heading, or if one has begun before. Otherwise add the piece,
        and return False. A "#" counts at the beginning of a line outside of code, but not at the very
        beginning of the text.

        "It is.", "\n\n", "##", " 2" one after the other -> False, False, True, True

        piece: the next piece of the text, which is one token.
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
