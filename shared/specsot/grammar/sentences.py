"""Finds where sentences, lists and blocks of Markdown end, from the bytes of tokens.

A sequence with a soft end ends there (`specsot.core.soft_end`). Whether a sentence has ended is often clear
only from what follows: "3." may continue with "5", and "Dr." with " Smith". So the question is asked about
the next token, which the model has chosen already: `SentenceEnds.ends_before(state, token)` returns whether
`token` would begin something new. If it would, the sequence ends instead. The answer depends on the tokens
alone, so it is the same for every drafter, tree and batch. If in doubt, it is no: then the sequence continues
to the next sentence.

* Never within code, a table, a heading, or a list, and never within brackets, quotes or emphasis.
* After the last item of a list: at the beginning of the next line that is no item.
* After a closed block of code or a table, if a new line starts after it.
* In a paragraph, after ".", "!" or "?" and closing marks, if the next token begins a new line, or a space
  with a capital letter or an opening mark. Not after abbreviations, initials, and numbers of one or two
  digits (German "am 3. Oktober").
* In a paragraph, after a Chinese "。", "！" or "？", if the next token begins with no other such mark.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specsot.core.vocabulary import Vocabulary

# What the text so far allows as its end, from least to most.
_NOTHING: Final = 0
_DOT: Final = 1  # A full stop that may belong to an abbreviation or to a number: an end of its line only.
_SENTENCE: Final = 2  # A sentence has ended if a space and a capital letter follow.
_WIDE: Final = 3  # A Chinese sentence has ended, whatever follows.

# Kinds of a line. A line is a `_MARGIN` until its first characters tell its kind.
_MARGIN: Final = "margin"
_PARAGRAPH: Final = "paragraph"
_ITEM: Final = "item"
_HEADING: Final = "heading"
_TABLE: Final = "table"
_FENCE: Final = "fence"  # The line that opens a block of code.
_CODE: Final = "code"
_CLOSING: Final = "closing"  # The line that closes a block of code.

# Abbreviations that a capital letter may follow, in English, German, Spanish and French. Those of one letter
# and those with a full stop within ("e.g.", "z.B.") are recognised without a list, and a full stop before a
# digit or a small letter ends no sentence anyway.
_ENGLISH: Final = (
    "mr mrs ms dr prof st mt jr sr vs gen gov sen capt lt sgt rev hon inc ltd corp dept univ bros approx esp"
)
_GERMAN: Final = (
    "bzw evtl ggf vgl bspw inkl exkl zzgl sog geb hr fr dipl ing mio mrd tsd ca max phil allg bes urspr"
)
_SPANISH_AND_FRENCH: Final = "sra srta dra ud uds vd vds ee uu ej avda cía mme mlle"
# All of them, in small letters and without the full stop.
ABBREVIATIONS: Final = frozenset(f"{_ENGLISH} {_GERMAN} {_SPANISH_AND_FRENCH}".split())
# Characters that may end a sentence, with the strongest end that each allows.
_MARKS: Final = {".": _DOT, "!": _SENTENCE, "?": _SENTENCE, "。": _WIDE, "！": _WIDE, "？": _WIDE, "｡": _WIDE}
# Brackets and quotes with a form for each side. "“" closes a German quote, see `Prose._quote`.
_OPENERS: Final = frozenset("([{（［【〔「『《〈“„«")
_CLOSERS: Final = frozenset(")]}）］】〕」』》〉”»")
# Marks that may follow the end of a sentence and still belong to it.
_TRAILERS: Final = frozenset("\"'’_~") | _CLOSERS
# Marks with which a sentence may begin.
_BEGINNERS: Final = frozenset("\"'([*_`“„«‘¿¡「『《（【")
# The beginnings of a line that decide its kind.
_BULLET: Final = re.compile(r"(?:[-*+•]|\d{1,3}[.)])[ \t]|\d{1,3}[、．]|•")
# Beginnings of a line that further characters may make an item of a list, or a heading.
_MAY_BECOME_BULLET: Final = re.compile(r"[-*+]|\d{1,3}[.)]?")
_MAY_BECOME_HEADING: Final = re.compile(r"#{1,6}")
# The marks that open and close a block of code.
_FENCES: Final = ("```", "~~~")
# Bits of a number of stars: "*" is italic, "**" is bold, and "***" is both.
_ITALIC: Final = 1
_BOLD: Final = 2
# A mark or a mark after it, or blanks alone.
_CLOSES: Final = re.compile(
    "|".join(map(re.escape, sorted({*_MARKS, *_TRAILERS, "*", "\n"}))).encode() + rb"|^\s+$"
)
# Characters. Bounds what is remembered of a word; no abbreviation is longer. Untuned.
_LONGEST_WORD: Final = 16


@dataclass(slots=True)
class Prose:
    """The state of a text: what must be remembered of it to tell where its sentences end.

    `read` changes it; `SentenceEnds.advance` returns a changed copy.

    line: kind of the current line.
    margin: the visible characters of a line whose kind is not known yet.
    mark: the strongest end that the text allows now, see `_NOTHING` and the following numbers.
    spaced: True if a space follows the mark.
    word: the last characters since a space or an opening mark, with full stops.
    colon: True if the last visible character is a colon, which announces what follows.
    depth: number of open brackets and of quotes that have a form for each side.
    low: True if a German quote is open.
    quote: True if a straight quote is open.
    stars: how many "*" the text ends with.
    bold: True if "**" is open.
    italic: True if "*" is open.
    tick: True if inline code is open.
    fence: the mark that opened the current block of code, or "".
    closed: True if the text may end at the beginning of the current line.
    listed: True if the preceding visible line was an item of a list, which the current line may continue.
    table: True if the preceding line was a row of a table, which an empty line would close.
    partial: the bytes of an incomplete character.
    """

    line: str = _MARGIN
    margin: str = ""
    mark: int = _NOTHING
    spaced: bool = False
    word: str = ""
    colon: bool = False
    depth: int = 0
    low: bool = False
    quote: bool = False
    stars: int = 0
    bold: bool = False
    italic: bool = False
    tick: bool = False
    fence: str = ""
    closed: bool = False
    listed: bool = False
    table: bool = False
    partial: bytes = b""

    def read(self, character: str) -> None:
        """Read one character, and change the state accordingly. Characters of headings, tables and fences
        change nothing until their line ends.

        character: the next character of the text.

        A line feed ends the line in any state.
        """
        if character == "\n":
            self._end_line()
        elif self.fence:
            self._read_code(character)
        elif self.line == _MARGIN:
            self._read_margin(character)
        elif self.line in (_PARAGRAPH, _ITEM):
            self._read_words(character)

    def _end_line(self) -> None:
        """Read a line feed: decide whether the text may end here, open or close a block of code, and forget
        what belongs to the line.

        Sets `closed` to whether the text may end at the beginning of the next line. A line of dashes or
        underscores keeps that, and so does an empty line, which also ends a table.
        """
        if self.line == _MARGIN:
            # An empty line closes a table. A line of dashes stands between two blocks.
            bare = not self.margin.strip("-_")
            self.closed = bare and (self.closed or self.table)
            self.table = False
        else:
            self.closed = _may_end_at_line(self)
            self.listed = self.line == _ITEM
            self.table = self.line == _TABLE
        if self.line == _FENCE:
            self.fence = self.margin[:3]
        elif self.line == _CLOSING:
            self.fence = ""
        self.line = _MARGIN
        self.margin = ""
        self.depth = 0
        self.low = self.quote = self.bold = self.italic = self.tick = False
        self._forget_mark()
        self.word = ""
        self.colon = False
        self.stars = 0

    def _read_code(self, character: str) -> None:
        """Read a character within a block of code: a line that consists of the fence closes the block.

        character: the next character of the text, other than a line feed.

        Only the first 8 characters of the line count. Sets `line`, as long as the line is not complete.
        """
        self.margin = (self.margin + character).lstrip()[:8]
        bare = self.margin.rstrip()
        closes = bare.startswith(self.fence) and not bare.strip(self.fence[0])
        self.line = _CLOSING if closes else _CODE

    def _read_margin(self, character: str) -> None:
        """Read a character of a line whose kind is not known yet. Spaces and ">" at the beginning of the line
        are ignored.

        character: the next character of the text, other than a line feed.

        Sets `line` once the kind is known: a row of a table begins with "|", a block of code with its fence,
        an item with a bullet or a number, a heading with "#" and a space. All others are paragraphs, whose
        first characters are then read as words.
        """
        if character.isspace() and not self.margin:
            return
        if character == ">" and not self.margin:
            return
        self.margin += character
        margin = self.margin
        if margin.startswith("|"):
            self.line = _TABLE
        elif margin.startswith(_FENCES):
            self.line = _FENCE
        elif _BULLET.fullmatch(margin):
            self.line = _ITEM
        elif margin[:-1] and _MAY_BECOME_HEADING.fullmatch(margin[:-1]) and character.isspace():
            self.line = _HEADING
        elif not self._is_undecided(margin):
            self.line = _PARAGRAPH
            for each in margin:
                self._read_words(each)

    def _is_undecided(self, margin: str) -> bool:
        """Return whether further characters decide the kind of a line that begins like this.

        margin: the visible beginning of the line.
        """
        return bool(
            _MAY_BECOME_BULLET.fullmatch(margin)
            or _MAY_BECOME_HEADING.fullmatch(margin)
            or margin in ("`", "``", "~", "~~")
            # A ruler.
            or (len(margin) < 80 and margin in ("-" * len(margin), "_" * len(margin)))
        )

    def _read_words(self, character: str) -> None:
        """Read a character of a paragraph or of an item. Stars are counted until another character follows,
        and characters within inline code are ignored.

        character: the next character of the text, other than a line feed.

        A space ends the word. A colon is remembered until the next visible character.
        """
        if character == "*":
            self.stars += 1
            return
        self._count_stars()
        if character == "`":
            self.tick = not self.tick
            self._forget_mark()
        elif self.tick:
            return
        elif character.isspace():
            self.spaced = self.spaced or bool(self.mark or self.word)
            self.word = ""
        else:
            self.colon = character in ":："
            self._read_visible(character)

    def _read_visible(self, character: str) -> None:
        """Read a visible character outside of inline code.

        character: the character, which is neither a space nor a star nor a backtick.

        A mark may end a sentence, a bracket or quote opens or closes, and any other character continues a
        word and forgets the mark; characters that may follow the end of a sentence, such as "'" and "_",
        change nothing.
        """
        if character in _MARKS:
            self._read_mark(character)
        elif character == '"' or character in _OPENERS or character in _CLOSERS:
            self._quote(character)
        elif character not in _TRAILERS:
            self._forget_mark()
            self.word = (self.word + character)[-_LONGEST_WORD:]

    def _read_mark(self, character: str) -> None:
        """Read a character that may end a sentence. A full stop after an abbreviation or a short number
        allows only an end of its line.

        character: one of `_MARKS`.

        Changes `mark`, `spaced` and `word`.
        """
        self.mark = _MARKS[character]
        if character == "." and not self._is_abbreviation():
            self.mark = _SENTENCE
        self.spaced = False
        self.word = (self.word + character)[-_LONGEST_WORD:]

    def _is_abbreviation(self) -> bool:
        """Return whether a full stop after the current word may not end a sentence.

        True for numbers of one or two digits, for words of at most one letter, for words that have a full
        stop already, such as "e.g", and for those in ABBREVIATIONS, in any case; also if there is no word.
        """
        word = self.word.strip("'’_-").casefold()
        if word.isdigit():
            return len(word) <= 2
        return len(word) <= 1 or "." in word or word in ABBREVIATIONS

    def _quote(self, character: str) -> None:
        """Read a bracket or a quote, and open or close what it belongs to.

        character: a straight quote, or one of `_OPENERS` and `_CLOSERS`.

        A straight quote closes if one is open. A closing bracket without an open one leaves the depth at 0.
        """
        closes = character in _CLOSERS or (character == '"' and self.quote) or (character == "“" and self.low)
        if character == '"':
            self.quote = not self.quote
        elif closes:
            self.depth = max(self.depth - 1, 0)
            self.low = self.low and character != "“"
        else:
            self.depth += 1
            self.low = self.low or character == "„"
        # What was closed may end a sentence: ("Yes.") What was opened begins something.
        if not closes or self.spaced:
            self._forget_mark()
        self.word = "" if not closes else self.word

    def _count_stars(self) -> None:
        """Open or close emphasis by the stars before this character. Does nothing if there are none.

        One star toggles italic, two toggle bold, three both. After a space, the mark is forgotten, because
        the stars begin something new. The count of stars is then 0.
        """
        if self.stars & _BOLD:
            self.bold = not self.bold
        if self.stars & _ITALIC:
            self.italic = not self.italic
        if self.stars and self.spaced:
            self._forget_mark()
        self.stars = 0

    def _forget_mark(self) -> None:
        """Record that the text allows no end now."""
        self.mark = _NOTHING
        self.spaced = False


@functools.lru_cache(maxsize=4)
def sentence_ends(vocabulary: Vocabulary) -> SentenceEnds:
    """Return the `SentenceEnds` of a vocabulary, which the whole process shares. The last four results are
    cached.

    vocabulary: the bytes of every token id.
    """
    return SentenceEnds(vocabulary)


class SentenceEnds:
    """Finds where a text may end after a sentence, over the tokens of one vocabulary. Has no state of its
    own.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Take the bytes of the tokens; nothing is computed yet.

        vocabulary: the bytes of every token id.
        """
        self._bytes = vocabulary.bytes

    @functools.cached_property
    def closes(self) -> NDArray[np.bool_]:
        """True for tokens after which a text may be complete, unless a new line follows: [vocabulary size].
        The first access takes a tenth of a second.
        """
        return np.array([_CLOSES.search(text or b"") is not None for text in self._bytes], dtype=np.bool_)

    @functools.cached_property
    def breaks(self) -> NDArray[np.bool_]:
        """True for tokens that begin a new line, after blanks at most: [vocabulary size]."""
        begins = [(text or b"").lstrip(b" \t\r")[:1] == b"\n" for text in self._bytes]
        return np.array(begins, dtype=np.bool_)

    def start(self) -> Prose:
        """Return the state before the first token."""
        return Prose()

    def advance(self, state: Prose, token: int) -> Prose:
        """Return the state after a token. Tokens without bytes, and ids outside of the vocabulary, change
        nothing.

        state: the state before the token, which is not changed.
        token: token id.

        The bytes of an incomplete character are kept for the next token. For a token that changes nothing,
        `state` itself is returned.
        """
        if not (text := self._bytes_of(token)):
            return state
        characters, partial = split_characters(state.partial + text)
        after = replace(state, partial=partial)
        for character in characters:
            after.read(character)
        return after

    def ends_before(self, state: Prose, token: int) -> bool:
        """Return whether the text in this state is complete, and `token` would begin something new.

        False if in doubt: for a token without bytes, within a character, and within code.

        state: the state before the token.
        token: id of the token that the model has chosen to generate next.

        At the beginning of a line, the text is complete if the preceding lines are. Before a token that
        begins with a line feed, the current line decides. Otherwise only a paragraph can be complete, after a
        sentence outside of brackets, quotes, code and emphasis, if `token` begins the next sentence; after a
        mark of an alphabet without spaces, no space is needed.
        """
        text = self._bytes_of(token)
        if not text or state.partial or state.fence:
            return False
        following, _ = split_characters(text)
        visible = following.lstrip()
        if state.line == _MARGIN:
            ends = state.closed and not state.margin
            return ends and not (state.listed and _may_continue_list(visible))
        blank = following[: len(following) - len(visible)]
        if "\n" in blank:
            return state.line != _ITEM and _may_end_at_line(state)
        if state.line != _PARAGRAPH or _is_open(state):
            return False
        first = visible[:1]
        if state.mark == _WIDE:
            return bool(first) and first not in _TRAILERS and first not in _MARKS and first != "*"
        spaced = state.spaced or bool(blank)
        return state.mark == _SENTENCE and spaced and bool(first) and _begins_sentence(first)

    def _bytes_of(self, token: int) -> bytes | None:
        """Return the bytes of a token, or None if it has no text or its id is outside of the vocabulary.

        token: token id.
        """
        return self._bytes[token] if 0 <= token < len(self._bytes) else None


def split_characters(text: bytes) -> tuple[str, bytes]:
    """Return the complete characters of UTF-8 bytes, and the bytes of an incomplete last one, or b"" if it is
    complete.

    Invalid bytes become replacement characters: b"a\\\\xe7\\\\x9d" -> ("a", b"\\\\xe7\\\\x9d").

    text: the bytes, which begin with a character.

    For empty bytes, the result is ("", b"").
    """
    size = len(text)
    for back in range(1, min(size, 3) + 1):
        byte = text[size - back]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            if needed > back:
                size -= back
            break
        if byte < 0x80:
            break
    return text[:size].decode(errors="replace"), text[size:]


def _begins_sentence(character: str) -> bool:
    """Return whether a sentence may begin with a character: a capital letter, a letter without case, or an
    opening mark.

    character: a single character.
    """
    return character in _BEGINNERS or (character.isalpha() and not character.islower())


def _may_continue_list(visible: str) -> bool:
    """Return whether a line that begins with these visible characters may be a further item of a list. A
    blank line may precede a further item, so "" may continue the list, too.
    """
    return not visible or visible[0].isdigit() or visible[0] in "-*+•"


def _may_end_at_line(state: Prose) -> bool:
    """Return whether the text may end at the end of the current line: after a sentence, a list's item, or the
    end of a block of code. False after headings and table rows.

    state: the state before the line feed.

    A paragraph must end with a mark, even one after an abbreviation, and outside of inline code and emphasis.
    An item must have a word and not end with a colon. A line whose kind is not known gives False.
    """
    if state.line == _PARAGRAPH:
        return state.mark > _NOTHING and not state.tick and not _is_emphasised(state)
    if state.line == _ITEM:
        return bool(state.word or state.mark or state.spaced) and not state.colon
    return state.line == _CLOSING


def _is_emphasised(state: Prose) -> bool:
    """Return whether bold or italic emphasis is open, with the stars at the end of the text counted.

    state: the state after the text so far.
    """
    bold = state.bold != bool(state.stars & _BOLD)
    italic = state.italic != bool(state.stars & _ITALIC)
    return bold or italic


def _is_open(state: Prose) -> bool:
    """Return whether brackets, quotes, emphasis or inline code are open.

    state: the state after the text so far.
    """
    return state.depth > 0 or state.quote or state.tick or _is_emphasised(state)
