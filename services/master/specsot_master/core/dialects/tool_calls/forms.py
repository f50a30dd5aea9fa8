"""How a model writes a call: the marks around name and arguments, and how the arguments are written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal


class Hole(Enum):
    """A place among the marks of a call at which every call has another text."""

    # The ordinal of the call; the value lists the characters that may fill the place.
    NUMBER = "0123456789"  # The ordinal of the call.
    # The id of the call; the value lists the characters that may fill the place.
    WORD = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-."  # The id of the call.


# A text that calls contain, or a place at which every call has another text.
Mark = str | Hole
# Marks in the order in which they are written, with any white space before each.
Marks = tuple[Mark, ...]


class Unfinished(Exception):
    """Raised if more text of an answer must arrive to decide whether marks match."""


def match(marks: Marks, text: str, at: int, last: bool) -> int | None:
    """Return the position after marks if they begin at a position, else None. White space may precede each
    mark. A hole takes as many of its characters as follow, possibly none, without white space before them.
    Return None if the text differs from the marks, and also if it ends within them and is complete. White
    space after the last mark is not skipped.

        marks ("<f=",), text "  <f=x", at 0 -> 5;   text "  <f" -> Unfinished, or None if last

    marks: the marks, in order; an empty tuple matches anything.
    text: the text that has arrived so far.
    at: the position in the text, in characters.
    last: True if the text is complete.

    Raises Unfinished if the text ends within the marks and is not complete.
    """
    for mark in marks:
        if isinstance(mark, Hole):
            while at < len(text) and text[at] in mark.value:
                at += 1
            continue
        at = skip_white(text, at)
        if not text.startswith(mark, at):
            if not last and mark.startswith(text[at:]):
                raise Unfinished
            return None
        at += len(mark)
    return at


def matches_any(choices: Iterable[Marks], text: str, at: int, last: bool) -> bool:
    """Return True if any of these marks begin at a position, as `match` finds them.

    choices: the marks to look for; none give False.
    text: the text that has arrived so far.
    at: the position in the text, in characters.
    last: True if the text is complete.

    Raises Unfinished if none do, but some may once more text has arrived.
    """
    unfinished = False
    for marks in choices:
        try:
            if match(marks, text, at, last) is not None:
                return True
        except Unfinished:
            unfinished = True
    if unfinished:
        raise Unfinished
    return False


def skip_white(text: str, at: int) -> int:
    """Return the position of the next character that is no white space; the length of the text if there is
    none. It is `at` itself if no white space stands there.

    text: any text.
    at: the position to begin with, in characters; one beyond the text is returned unchanged.
    """
    while at < len(text) and text[at].isspace():
        at += 1
    return at


# How arguments are written. "object": name and arguments are members of one JSON object. "named": a JSON
# object of arguments after the name. "parameters": each argument has marks of its own. "python": a call in
# Python.
Layout = Literal["object", "named", "parameters", "python"]


@dataclass(frozen=True, slots=True)
class ParameterForm:
    """How a model writes one argument of a call: begin KEY middle VALUE end, as in
    `<parameter=KEY>VALUE</parameter>`.
    """

    # The marks before the key.
    begin: Marks
    # The marks between key and value, if the value is text.
    middle: Marks
    # The marks after the value.
    end: Marks
    # White space that the template writes between the middle and the value; "" for none.
    before_value: str = ""
    # White space that the template writes between the value and the end; "" for none.
    after_value: str = ""
    # The marks between key and value if the value is text; empty if the template's marks do not depend on the
    # type.
    text_middle: Marks = ()
    # The different marks between key and value if the value is no text; empty if the template's marks do not
    # depend on the type.
    other_middles: tuple[Marks, ...] = ()

    @property
    def middles(self) -> tuple[Marks, ...]:
        """The marks that may stand between key and value, at least one sequence of them."""
        return (self.text_middle, *self.other_middles) if self.text_middle else (self.middle,)


@dataclass(frozen=True, slots=True)
class ArgumentTexts:
    """The exact text around the arguments of a call: begin KEY middle VALUE end, with `between` between two
    of them.

    begin: The text before a key. Of `<param name="a">3</param>` it is `<param name="`.
    middle: The text between key and value, in the example `">`.
    end: The text after the value, in the example `</param>`.
    between: The text between two arguments, in the example "".
    other_middle: The middle if the value is no text; None if it is the same.
    quote: What is written around text that is no JSON; "" for nothing, None if text is written as JSON.
    """

    begin: str
    middle: str
    end: str
    between: str
    other_middle: str | None = None
    quote: str | None = ""


@dataclass(frozen=True, slots=True)
class CallTexts:
    """The exact text around the calls of an answer: before NAME opening ARGUMENTS closing (between NAME ...)
    end.

    before: The text before the first name.
    opening: The text from a name to its arguments.
    closing: The text after the arguments, as far as it is the same for every call.
    between: The text from there to the name of the next call; None if the template writes one call at most.
    end: The text after the closing of the last call, without the end of the turn.
    arguments: How the arguments are written; None for an object of JSON.
    """

    before: Marks
    opening: Marks
    closing: Marks
    between: Marks | None
    end: Marks
    arguments: ArgumentTexts | None = None


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a model writes one call: openers NAME middle ARGUMENTS closers, or for layout "object", openers
    OBJECT closers.

    layout: how the arguments are written; see `Layout`.
    openers: the marks before a call, such as `<tool_call>`, or `<function=` of Qwen3-Coder. A call begins at
        any of them that cannot be prose; so openers of a whole section, and those that a model forgets, need
        no rules of their own.
    middle: the marks between name and arguments; empty for an "object".
    closers: marks after the arguments, empty for none; the model may write them in any number.
    parameter: how one argument is written, for the layout "parameters"; else None.
    quote: a string delimiter besides those of JSON; "" for none.
    head: what a prompt ends with if an "object" is forced: the text before its name and from there to its
        arguments. Both are "" if that text is not the same for every call.
    texts: the exact text of calls of the other layouts; None if it is unknown. See `forcing`.
    object_head: what a prompt ends with if the model chooses the function: the text before its "object", or
        before a list of them if `is_list`. "" if such a call is not JSON in marks.
    is_list: True if the calls of an answer are members of one JSON list.
    name_key: the member of an "object" that holds the function's name.
    arguments_key: the member of an "object" that holds the arguments.
    """

    layout: Layout
    openers: Marks = ()
    middle: Marks = ()
    closers: tuple[str, ...] = ()
    parameter: ParameterForm | None = None
    quote: str = ""
    head: tuple[str, str] = ("", "")
    texts: CallTexts | None = None
    object_head: str = ""
    is_list: bool = False
    name_key: str = "name"
    arguments_key: str = "arguments"
    # True if the template wants the arguments of past calls as the text of JSON, and not as an object.
    arguments_as_text: bool = False  # The template wants the arguments of past calls as the text of JSON.

    @property
    def starts(self) -> tuple[int, ...]:
        """Indexes of the openers with which a call may begin in the middle of text; empty if none of them is
        distinctive.
        """
        return tuple(n for n, one in enumerate(self.openers) if isinstance(one, str) and is_distinctive(one))

    @property
    def stops(self) -> tuple[str, ...]:
        """Marks that end arguments, because no JSON contains them outside of a string; each once, possibly
        none. Closers come before openers; marks that prose may contain are left out.
        """
        starts = (self.openers[n] for n in self.starts)
        found = (*(one for one in self.closers if is_distinctive(one)), *starts)
        return tuple(dict.fromkeys(one for one in found if isinstance(one, str)))

    def contains(self, token: str) -> bool:
        """Return True if this token is a part of the marks. The marks are those of openers, names, arguments
        and closers, and the string delimiter; a part of a mark is enough. "" is a part of every mark. The
        ordinals and ids in holes are not considered.

        token: the text of a special or added token.
        """
        parameter = self.parameter
        inner = (*parameter.begin, *parameter.middle, *parameter.end) if parameter else ()
        marks = (*self.openers, *self.middle, *inner, *self.closers, self.quote)
        return any(token in mark for mark in marks if isinstance(mark, str))

    def forced_head(self, name: str) -> str:
        """Return the text with which a prompt ends if this function must be called: a call up to its
        arguments. A form without such a text gets the beginning of a JSON object.

        name: the name of the function.
        """
        before, after = self.head
        return f"{before}{name}{after}" if before or after else _JSON_HEAD.format(json.dumps(name))


# The beginning of a forced call as plain JSON, with a place for the name.
_JSON_HEAD: Final = '{{"name": {}, "arguments": '
MIN_DISTINCTIVE: Final = 3  # Characters of a mark that prose does not contain by chance. Untuned.


def is_distinctive(mark: str) -> bool:
    """Return True if the mark cannot be the beginning of prose or of JSON.

    mark: a mark of a call, at least one character.
    """
    return len(mark) >= MIN_DISTINCTIVE and not mark[0].isalnum() and not set("{}").intersection(mark[:2])


# Hermes' form, in which models are asked to write calls if their template has no place for tools.
HERMES: Final = CallForm(
    layout="object",
    openers=("<tool_call>",),
    closers=("</tool_call>",),
    head=('<tool_call>\n{"name": "', '", "arguments": '),
    object_head="<tool_call>\n",
)
# Forced calls of any model: JSON without marks.
PLAIN: Final = CallForm(layout="object")
