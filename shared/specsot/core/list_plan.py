"""Reads a numbered list as a plan, as it is written: the plan of a model that was not taught to plan.

    list := title NL {n "." title NL} [NL]          after "1.", with which the prompt ends

This is the constrained language. Without a constraint, a line may also have other marks ("2)", "3、") and
empty lines after it, and the list ends at the first line that is not an item. The list also ends if two items
in a row repeat the titles of earlier items, because a model that repeats two titles continues to repeat.
"""

from __future__ import annotations

import re
from typing import Final

from specsot.core.skeleton import MAX_LIST_POINTS, MAX_TITLE_BYTES, Kind, PlanRules, Point, clean_title

# The prompt ends with this text, which is also the beginning of the list.
LIST_HEAD = "1."

# An item: list or heading marks, a number, one of the punctuation marks that models write after it, a title.
_LINE = re.compile(r"[\s*#>-]*\d{1,3}\s*[.．。、:：)）](?P<title>.*)")
# "vs." with the next word glued to it, see `title_of`.
_GLUED = re.compile(r"\bvs\.(?=\w)")
# Characters of Markdown, quotes and brackets that are removed from both ends of a title.
_MARKS = "*_`#\"'“”„«»()"
# A pair of marks around italic or bold text, nearly as Markdown reads it. The marks are removed, also within
# a title, because a heading has no use for them. The stars of "2**n" are no opening marks, because they
# follow a letter or figure, and those of "*args and **kwargs" are no closing ones, because they begin a word.
# Closing marks within a word stand between letters ("**S**pecific").
_EMPHASIS = re.compile(
    r"(?<![0-9A-Za-z_*])(?P<marks>\*{1,3})(?![\s*])"
    r"(?P<text>(?:`[^`]+`|[^`])+?)"
    r"(?:(?<=[^\W\d_])(?P=marks)(?=[^\W\d_])|(?<=[^\s*])(?P=marks)(?![\w*]))"
)
# A pair of marks around code, which are removed as well.
_CODE = re.compile(r"`(?P<text>[^`]+)`")
# A title whose first star belongs to the first word, because a later word begins with stars, too.
_STARRED = re.compile(r"\*+\w.*\s\*+\w")
# Characters that are removed from the end of a title: punctuation, and the marks of italics, which may come
# before the punctuation.
_STOPS = " .,;:。，；、*_"
# Characters. Only so many of a line are searched for pairs of marks, because the search takes quadratic time.
# The title is cut to MAX_TITLE_BYTES afterwards. Untuned.
_MAX_LINE: Final = 4 * MAX_TITLE_BYTES
# After one of these, a model explains its title. A colon after a number belongs to the title ("Day 1:
# Arrival").
_ENDS = re.compile(r"(?<![\d０-９])[:：]|\.(?=\s)|\s[-–—]\s|——")


class ListReader:
    """Reads a numbered list as a plan, in pieces of any size, with the interface of `PlanReader`.

    kind: always "plan".
    points: the points whose lines are complete. All have the same length.
    direct_text: always empty, because a list is never a direct answer.
    finished: True once the list has ended or `finish` was called. Later text is ignored.
    text: everything that was fed, unchanged.
    """

    kind: Kind = "plan"
    direct_text = ""

    def __init__(self, rules: PlanRules) -> None:
        """Start to read a list whose first "1." was generated already.

        rules: bounds the number of points. The list ends after `rules.max_points` points, or MAX_LIST_POINTS
            if that is fewer.
        """
        self.finished = False
        self.text = ""
        self.points: tuple[Point, ...] = ()
        self._rules = rules
        # The incomplete last line.
        self._rest = LIST_HEAD
        # True if the newest item repeats the title of an earlier item.
        self._repeats = False

    def feed(self, text: str) -> list[Point]:
        """Read the next piece of text; return the points whose lines it completes.

        Returns an empty list if no line is completed, and for all text after the end of the list.

        text: the next characters that the model generated, of any length.

        The first piece follows the "1." of the first item, which is not fed. The incomplete last line is kept
        for later.
        """
        if self.finished:
            return []
        self.text += text
        *lines, self._rest = (self._rest + text).split("\n")
        return [point for line in lines if (point := self._read(line))]

    def finish(self) -> list[Point]:
        """End the text. The last line counts as complete; its point, if any, is returned. Returns an empty
        list if the last line is not an item, and after the end.
        """
        found = None if self.finished else self._read(self._rest)
        self.finished = True
        return [found] if found else []

    def _read(self, line: str) -> Point | None:
        """Read one complete line; return its point, or None if the line is not an item.

        Sets `finished` if the list ends with this line.

        line: the line without its newline.

        The list ends with a line that is neither empty nor an item, with the largest number of points, and
        with the second item in a row whose title repeats an earlier one. The point is added to `points`; its
        id is its place in the list, whatever number the model wrote, and its length is 1. A line after the
        end gives None.
        """
        if self.finished:
            return None
        match = _LINE.fullmatch(line)
        if not match:
            self.finished = bool(line.strip())
            return None
        # A list says nothing of lengths, so every point gets the same wish.
        point = Point(len(self.points) + 1, 1, title_of(match["title"]))
        repeats = any(one.title.casefold() == point.title.casefold() for one in self.points)
        repeats_twice = repeats and self._repeats
        self._repeats = repeats
        self.points += (point,)
        self.finished = repeats_twice or len(self.points) >= min(self._rules.max_points, MAX_LIST_POINTS)
        return point


def title_of(line: str) -> str:
    """Return the title of an item: the part of its line before a colon, a dash or a full stop. Pairs of marks
    of italics, bold text and code are removed, and any marks, quotation marks and brackets at the ends. The
    title may be empty.

    line: the text of an item after its number.

    >>> title_of(" **Buy the tickets**: early, as they sell out.")
    'Buy the tickets'
    >>> title_of(" Wired vs.wireless")
    'Wired vs. wireless'
    >>> title_of(" **A content delivery network (CDN)**")
    'A content delivery network (CDN)'
    >>> title_of(' Teach a command, like "sit"')
    'Teach a command, like "sit"'
    >>> title_of(" **Performance**.")
    'Performance'
    >>> title_of(" Use `ls` to list files")
    'Use ls to list files'
    >>> title_of(" *args and **kwargs")
    '*args and **kwargs'

    A bracket or a quotation mark that the title opens is closed. Control characters become spaces, and the
    title has at most MAX_TITLE_BYTES bytes, before either is closed.
    """
    without_pairs = _CODE.sub(r"\g<text>", _EMPHASIS.sub(r"\g<text>", line[:_MAX_LINE]))
    visible = _strip_marks(clean_title(without_pairs))
    title = _ENDS.split(visible, maxsplit=1)[0]
    # A full stop before a space ends a title, so that models glue the word after "vs." to it.
    bare = _GLUED.sub("vs. ", _strip_marks(title).rstrip(_STOPS))
    return _close_bracket(_pair_quotes(bare))


def _strip_marks(title: str) -> str:
    """Return a title without spaces, marks, quotation marks and brackets at its ends. Stars that belong to
    the first word are kept.

        '**Sleep" ' -> 'Sleep';   '*args and **kwargs' -> '*args and **kwargs'

    title: the title, without pairs of marks.
    """
    title = title.strip()
    return title.rstrip(_MARKS + " ") if _STARRED.match(title) else title.strip(_MARKS + " ")


def _close_bracket(title: str) -> str:
    """Return a title whose last bracket is closed if it was opened. The closing one was a mark at the end of
    the line, or the title has ended within the bracket. A title without open bracket is unchanged.

    title: the title, without marks around it.
    """
    for opening, closing in ("()", "（）"):
        if title.count(opening) > title.count(closing):
            return title + closing
    return title


def _pair_quotes(title: str) -> str:
    """Return a title without a single quotation mark: its other one was a mark at an end of the line. A mark
    that opens a quotation is closed at the end of the title, and one that closes is opened at its beginning.

        'Say "sit' -> 'Say "sit"';   'Sit" and "stay"' -> '"Sit" and "stay"'

    title: the title, without marks around it.
    """
    if title.count('"') % 2 == 0:
        return title
    return f'{title}"' if title.rpartition('"')[0][-1:].isspace() else f'"{title}'
