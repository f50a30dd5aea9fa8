"""The form in which a direct answer begins, from which its usual length follows.

A direct answer whose items have titles ("1. **Light**: Plants need ...") is longer than one without them.
The form depends on the first tokens of the direct answer only, so that the length of the planned answer is
the same with any drafter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, get_args

from specsot_master.core.plans.introduction import MAX_INTRODUCTION_TOKENS
from specsot_master.core.plans.text_pieces import TextPiece

# plain: paragraphs, or items without titles.
# titled: the first line after the first paragraph begins with a heading or with words in bold.
AnswerForm = Literal["plain", "titled"]
ANSWER_FORMS: tuple[AnswerForm, ...] = get_args(AnswerForm)

_ITEM: Final = r"(?:[-*+•]\s+|\d{1,3}(?:[.)]\s*|[、．]\s*))?"
# The beginning of a heading, or of a line or an item that begins with words in bold.
_TITLE: Final = re.compile(rf"{_ITEM}(?:\*\*|__)|#")
# What may still become such a beginning.
_MAY_BECOME_TITLE: Final = re.compile(rf"(?:[-*+•]|\d{{1,3}}[.)]?|{_ITEM}[*_]?)\Z")


@dataclass(frozen=True, slots=True)
class UsualLengths:
    """The usual numbers of tokens of a model's direct answers to questions that are planned, by their form.

    plain: of answers without titles.
    titled: of answers whose items or sections have titles.
    """

    plain: int
    titled: int

    def of(self, form: AnswerForm) -> int:
        """Return the usual number of tokens of answers of a form.

        form: the form of the answer.
        """
        return self.titled if form == "titled" else self.plain


@dataclass(slots=True)
class FormReader:
    """Reads a direct answer token by token until its form is known.

        "Plants need three things:\\n\\n1. **" -> titled
        "Plants need three things:\\n\\n1. Li" -> plain

    form: the form of the answer, or None while it is not known. An answer is plain if its form is still
        unknown after MAX_INTRODUCTION_TOKENS tokens, or when it ends. Its first paragraph is its first line
        with words.
    """

    form: AnswerForm | None = None
    # Tokens so far.
    _tokens: int = 0
    # The text of the current line.
    _line: str = ""
    # True once the first paragraph is complete.
    _broken: bool = False

    def read(self, piece: TextPiece) -> None:
        """Add the next piece. Nothing happens once the form is known.

        piece: the next piece of the direct answer; one without a token counts as text only.
        """
        if self.form is not None:
            return
        self._tokens += piece.token is not None
        *lines, self._line = (self._line + piece.text).split("\n")
        for line in lines:
            self._read_line(line.strip(), complete=True)
        self._read_line(self._line.strip(), complete=False)
        if self.form is None and self._tokens >= MAX_INTRODUCTION_TOKENS:
            self.form = "plain"

    def end(self) -> None:
        """Record that the direct answer has ended: if its form was not known before, it is plain."""
        self.form = self.form or "plain"

    def _read_line(self, line: str, complete: bool) -> None:
        """Read a line, or the beginning of the last one. The first line with words completes the first
        paragraph; the beginning of the next one tells the form.

        line: the line without white space around it; "" for a blank one.
        complete: True if the line has ended.
        """
        if self.form is not None or not line:
            return
        if not self._broken:
            self._broken = complete
        elif _TITLE.match(line):
            self.form = "titled"
        elif complete or not _MAY_BECOME_TITLE.match(line):
            self.form = "plain"


def form_of(answer: str) -> AnswerForm:
    """Return the form of a whole direct answer.

    answer: the text of the answer. Each character counts as text without a token, so that the length of its
        first paragraph does not matter.
    """
    reader = FormReader()
    reader.read(TextPiece(None, answer))
    reader.end()
    return reader.form or "plain"
