"""How the branches of one plan begin: no branch begins like an earlier one.

Branches do not see one another, so that several may begin with the same words ("Electric cars typically").
The first words of a branch are withheld until those of all earlier branches are settled. A branch that begins
like an earlier one is opened again, and must not begin with the same word any more: neither with its first
token nor with others that begin the word. The same holds for a point that begins like the question or the
introduction. A branch that is opened again once more must not begin with the first tokens of earlier branches
either, so that it is not opened again for each of them. Tokens are excluded at the first position only: the
branch may write them later. Which branch is opened again depends on tokens only, never on which of them is
faster.

Below its heading, prose follows. In a plan with an aim, the tokens that begin an item, a heading, a label in
bold or a quotation are excluded from the start. A branch that begins with such a mark all the same is opened
again, and so is a branch that speaks of itself ("Here's a revised version").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from specsot.core.frames import End
from specsot_master.core.plans import router_words
from specsot_master.core.plans.text_pieces import TextPiece

# Returns the ids of the tokens with which a text that begins with a certain word or mark may begin.
Beginnings = Callable[[str], tuple[int, ...]]
# Words, and characters of Han script. Texts that share so many first ones begin alike. Chosen by reading.
OPENING_WORDS: Final = 3
OPENING_CHARACTERS: Final = 4
# Pieces of text, one per token. Bounds the opening: a text without enough words has its opening then. Given
# by the aim of the feature.
MAX_OPENING_TOKENS: Final = 24
# Times. Bounds how often a branch is opened again. Chosen by reading: with 5, a branch that tried openings
# with a quotation mark or about itself could end up with the opening of another branch.
MAX_REWRITES: Final = 8
# The beginnings of items, of labels in bold, of headings, and of texts in quotation marks, in which small
# models set all that they write. A number may also begin a sentence ("3. is"), so that a capital letter or a
# star must follow it.
_MARKUP = re.compile(r"\s*(?:[-+•]\s|[*#\"“„«]|\d{1,3}[.)]\s+(?:\*|(?![a-zäöüáéíóúñ])[^\W\d_]))")
# With these a branch does not begin: line ends, and the marks of `_MARKUP`. Of numbers only "1" is excluded,
# since a list begins with it; so no branch begins with a year whose first token is "1". They are excluded
# from the start, because a branch that is opened again begins some steps after the others: of 26 times that
# branches of one plan of SmolLM2 were opened again, 18 were for such a mark.
NOT_PROSE: Final = ("\n", "\n\n", "-", "+", "•", "*", "**", "#", "####", '"', "“", "„", "«", "1")
# The first words of a text that speaks of itself.
_OF_ITSELF = re.compile(router_words.OF_ITSELF)
# One character of Han script.
_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]")
# One word.
_WORD = re.compile(r"\w+")
# Characters. Bounds the first word whose tokens are excluded: Chinese has no spaces between words. Untuned.
MAX_EXCLUDED_CHARACTERS: Final = 24


def speaks_of_itself(words: str) -> bool:
    """Return True if a branch with these first words speaks of its own text, and not of its subject.

        "here s a" -> True;   "in two sentences" -> True;   "here the light" -> False

    words: the first words of the branch, as `opening_of` returns them.
    """
    return _OF_ITSELF.match(words) is not None


def opening_of(text: str, whole: bool = False) -> str | None:
    """Return the first words of a text in the form in which they are compared, or None if more must follow. A
    text with at least OPENING_CHARACTERS Han characters, wherever they are, gives the first
    OPENING_CHARACTERS of them. Any other text gives OPENING_WORDS words in lower case, without punctuation;
    an apostrophe separates words ("Here's" -> "here s").

        "Electric cars typically ha" -> "electric cars typically"
        "Electric cars" -> None, as the last word may be incomplete

    text: the beginning of a branch's text.
    whole: True if no more text follows; then fewer words are returned too, and "" for a text without words.
    """
    bare = "".join(_HAN.findall(text))
    if len(bare) >= OPENING_CHARACTERS:
        return bare[:OPENING_CHARACTERS]
    words: list[str] = _WORD.findall(text.casefold())
    known = words if whole or not text[-1:].isalnum() else words[:-1]
    return " ".join(known[:OPENING_WORDS]) if whole or len(known) >= OPENING_WORDS else None


@dataclass(slots=True)
class BranchOpening:
    """The beginning of one branch until it is settled, that is, known to differ from those of earlier
    branches.

    settled: True once the branch may be shown, because its first words are its own.
    waiting: the pieces that arrived so far and are not shown yet; empty once the opening is settled.
    end: how the branch's sequence ended, or None while it runs.
    excluded: ids that must not be the branch's first token: those of NOT_PROSE, and those that `discard` has
        excluded so far; empty for none. Later in the branch they are allowed.
    first_tokens: the id of the token with which the branch's first text began; () if that text ended without
        a token, None before.
    rewrites: how often the branch was opened again; 0 at first.
    """

    settled: bool = False
    waiting: list[TextPiece] = field(default_factory=list[TextPiece])
    end: End | None = None
    excluded: tuple[int, ...] = ()
    first_tokens: tuple[int, ...] | None = None
    rewrites: int = 0

    @property
    def words(self) -> str | None:
        """The branch's first words, or None while they are incomplete. They count as complete once the branch
        has ended or has MAX_OPENING_TOKENS pieces; then they may be "". Meaningful only until the opening is
        settled, because `settle` removes the pieces that this reads.
        """
        whole = self.end is not None or len(self.waiting) >= MAX_OPENING_TOKENS
        text = "".join(piece.text for piece in self.waiting[:MAX_OPENING_TOKENS])
        return opening_of(text, whole)

    @property
    def is_markup(self) -> bool:
        """True if the branch begins with an item of a list, a label in bold, a heading or a quotation."""
        return _MARKUP.match("".join(piece.text for piece in self.waiting[:MAX_OPENING_TOKENS])) is not None

    def may_rewrite(self, alike: bool) -> bool:
        """Return True if the branch is to be opened again, because it begins like an earlier one, speaks of
        itself, or begins not with prose. Return False if it was opened again MAX_REWRITES times already.

        alike: True if an earlier branch begins with the same words, or if the branch speaks of itself.
        """
        return (alike or self.is_markup) and self.rewrites < MAX_REWRITES

    def read_first_token(self) -> None:
        """Set `first_tokens` as soon as the first text has a token or has ended; it does not change then."""
        if self.first_tokens is None and (self._tokens or self.end is not None):
            self.first_tokens = self._tokens[:1]

    @property
    def _tokens(self) -> tuple[int, ...]:
        """Token ids of the pieces that wait; () if none does."""
        return tuple(piece.token for piece in self.waiting if piece.token is not None)

    def discard(self, beginnings: Beginnings = lambda _: (), taken: Iterable[int] = ()) -> int:
        """Exclude the beginning of the branch's text, and forget all pieces. Return the number of their
        tokens; 0 if there was none. The branch counts as not ended, and as opened again once more.

        The text's first token is excluded. If the text begins with a word, so is what `beginnings` returns
        for it; and if the branch was opened again before, `taken`, too:

            "Ver|gleiche ..." -> excluded "Ver", "Verg", "Ve"
            "The light ...", opened again before, taken "Elect" -> further "The", "Th", "Elect"

        beginnings: returns the ids of the tokens with which a text that begins with a certain word or mark
            may begin.
        taken: the ids of the tokens with which other branches begin.
        """
        tokens = self._tokens
        found = _WORD.match("".join(piece.text for piece in self.waiting).lstrip())
        word = found[0][:MAX_EXCLUDED_CHARACTERS] if found else ""
        others = (*(beginnings(word) if word else ()), *(taken if self.rewrites else ()))
        self.waiting = []
        self.end = None
        self.excluded = tuple(dict.fromkeys((*self.excluded, *tokens[:1], *others)))
        self.rewrites += 1
        return len(tokens)

    def settle(self) -> list[TextPiece]:
        """Settle the opening, and return the pieces that waited; [] if none did."""
        self.settled = True
        waiting = self.waiting
        self.waiting = []
        return waiting
