"""Arguments that are not JSON, rewritten as a JSON object: marked one by one, or written as in Python."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from typing import Any, Final

from specsot_master.core.dialects.tool_calls.arguments import Json, JsonRewriter
from specsot_master.core.dialects.tool_calls.forms import (
    CallForm,
    Marks,
    ParameterForm,
    Unfinished,
    match,
    matches_any,
    skip_white,
)
from specsot_master.core.dialects.tool_calls.schemas import types_of, value_of_text

MAX_KEY: Final = 256  # Characters of the name of an argument. Untuned.
# What some models write before and after a value, as in XML.
_CDATA: Final = ("<![CDATA[", "]]>")
# The name of an argument in Python, with the sign after it and a value.
_KEY = re.compile(r"(\w+)\s*=\s*(?=\S)")
# What may be the beginning of a number or a constant.
_WORD_START = re.compile(r"\s*[-+.\w]*\s*")
# Characters. The longest escape in a string of JSON, such as \u00e9.
MAX_ESCAPE: Final = 6  # Characters of an escape in a string of JSON.
# What may be the beginning of the name of an argument in Python.
_KEY_START = re.compile(r"\w+\s*(?:=\s*)?")


class MemberStream(ABC):
    """Base class of readers that turn the arguments of one call into members of a JSON object as they arrive,
    with the interface of ArgumentStream.

    The interface is that of ArgumentStream: `done` is True once the arguments are complete.
    """

    def __init__(self) -> None:
        """Start without text."""
        self.done = False
        self._held = ""
        self._last = False
        self._members = 0  # Members written so far.
        self._out: list[str] = []

    @property
    def rest(self) -> str:
        """The text after the arguments, once they are done; before that, the text that is not read yet."""
        return self._held

    def feed(self, text: str, last: bool = False) -> str:
        """Add text. Return the JSON that is certain now; "" if nothing new is. Once the arguments are done,
        further text is not read; see `rest`. With `last`, a value that is cut off ends with the text.

        text: the next text of the call.
        last: True if no more text comes.
        """
        self._held += text
        self._last = last
        try:
            while not self.done and self._step():
                pass
        except Unfinished:
            pass
        written = "".join(self._out)
        self._out.clear()
        return written

    @abstractmethod
    def _step(self) -> bool:
        """Read one argument or the end. Return True if another call may read more; return False, or raise
        Unfinished, if that takes more text or the arguments are done.
        """

    def _add_member(self, key: str, value: Any) -> None:
        """Write one member of the object. A brace precedes the first member and a comma each other one.

        key: the name of the argument.
        value: its value, which JSON can express.
        """
        self._out.append(f"{', ' if self._members else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._out.append(json.dumps(value, ensure_ascii=False))
        self._members += 1

    def _end(self) -> bool:
        """Close the object. Return False, as no step follows. An object without members is written as {}."""
        self._out.append("}" if self._members else "{}")
        self.done = True
        return False


class ParameterStream(MemberStream):
    """Reads the arguments of a call in which each argument has marks of its own.

    '<parameter=a>3</parameter></function>' -> '{"a": 3}' if the schema says that `a` is an integer
    """

    def __init__(self, form: CallForm, schema: Json) -> None:
        """Create a reader.

        form: how the model writes calls; its layout is "parameters".
        schema: the JSON schema of the arguments, which distinguishes text from numbers; {} for an unknown
            function, whose values are JSON if possible.
        """
        super().__init__()
        assert form.parameter is not None, "the layout has parameters"
        self._form = form
        self._parameter = form.parameter
        self._schema = schema

    def _step(self) -> bool:
        """Read one argument, or the end of the arguments if no argument begins here. Return True if another
        call may read more, False at the end. Text after the end stays in `rest`. White space that the
        template writes around a value is removed from it.

        Raises Unfinished, with nothing read, if more text decides.
        """
        form = self._parameter
        begin = match(form.begin, self._held, 0, self._last)
        found = None if begin is None else self._key_at(begin, form)
        if found is None:
            return self._end()
        key, value_at, marks = found
        value_at = self._after_white(value_at, form.before_value)
        found_end = self._end_of_json(value_at, form) if self._is_json(key, marks) else None
        end, after = found_end or self._end_of_value(value_at, form)
        value = self._held[value_at:end]
        value = value.removesuffix(form.after_value) if form.after_value else value
        self._held = self._held[after:]
        self._add_member(key, self._typed(key, value, marks))
        return True

    def _after_white(self, at: int, white: str) -> int:
        """Return the position after the white space that the template writes there, or `at` if it is not
        present.

        at: a position in the held text, in characters.
        white: the white space; "" returns `at`.

        Raises Unfinished if more text decides.
        """
        if not white:
            return at
        if not self._last and white.startswith(self._held[at:]):
            raise Unfinished
        return at + len(white) if self._held.startswith(white, at) else at

    def _key_at(self, begin: int, form: ParameterForm) -> tuple[str, int, Marks] | None:
        """Return the key, the position of the value, and the marks between them. Return None if no argument
        begins here: the key would be longer than MAX_KEY or have several lines, or no marks follow it. The
        key is stripped of white space. Return None also if the text is complete and ends before the marks.

        begin: the position after the marks that begin an argument.
        form: the marks of an argument.

        Raises Unfinished if more text decides.
        """
        first = [marks[0] for marks in form.middles]
        places = [self._held.find(mark, begin) for mark in first if isinstance(mark, str)]
        at = min((place for place in places if place >= 0), default=len(self._held))
        if at - begin > MAX_KEY or "\n" in self._held[begin:at].strip():
            return None
        unfinished = at == len(self._held)
        for marks in form.middles:
            try:
                if (value_at := match(marks, self._held, at, self._last)) is not None:
                    return self._held[begin:at].strip(), value_at, marks
            except Unfinished:
                unfinished = True
        if unfinished and not self._last:
            raise Unfinished
        return None

    def _is_json(self, key: str, marks: Marks) -> bool:
        """Return True if the marks or the schema say that a value is no text; False if it may be text, or if
        the schema does not name the argument. If the marks differ for text, the marks alone decide; otherwise
        the value is no text if the schema names types without "string".

        key: the name of the argument.
        marks: the marks between key and value, as the model wrote them.
        """
        if self._parameter.text_middle:
            return marks != self._parameter.text_middle
        properties = self._schema.get("properties")
        types = types_of(properties.get(key), self._schema) if isinstance(properties, dict) else frozenset()
        return bool(types) and "string" not in types

    def _end_of_json(self, at: int, form: ParameterForm) -> tuple[int, int] | None:
        """Return where a value of strict JSON ends, and where the marks after it end. Return None if the
        value is no object or list of such JSON, or if those marks do not follow it. Marks in the strings of
        the value are text. Positions are characters of the held text. Return None also for JSON that is
        nested too deeply, or if neither an argument, a closer nor a call follows the marks.

        at: the position at which the value begins, in characters of the held text.
        form: the marks of an argument.

        Raises Unfinished if more text decides.
        """
        begin = skip_white(self._held, at)
        if begin == len(self._held) and not self._last:
            raise Unfinished
        if self._held[begin : begin + 1] not in ("{", "["):
            return None
        if not self._last and str(form.end[0]) not in self._held[begin:]:
            raise Unfinished
        try:
            end = json.JSONDecoder().raw_decode(self._held, begin)[1]
        except RecursionError:
            return None
        except json.JSONDecodeError as error:
            if not self._last and _is_cut(error):
                raise Unfinished from None
            return None
        after = match(form.end, self._held, end, self._last)
        return (end, after) if after is not None and self._may_follow_value(after, form) else None

    def _end_of_value(self, at: int, form: ParameterForm) -> tuple[int, int]:
        """Return where a value ends, and where the marks after it end. A mark within a value, as in HTML, is
        text. A value without its mark ends at the first closer, at the next call, or at the end of the text.
        A mark ends the value only if an argument, a closer, a call or the end of the text follows. If the
        value has no mark of its own, both positions are the same.

        at: the position at which the value begins, in characters of the held text.
        form: the marks of an argument.

        Raises Unfinished if more text decides.
        """
        mark = form.end[0]
        assert isinstance(mark, str), "values end with text"
        limit = self._next_call(at)
        place = self._held.find(mark, at, limit)
        while place >= 0:
            after = match(form.end, self._held, place, self._last)
            if after is not None and self._may_follow_value(after, form):
                return place, after
            place = self._held.find(mark, place + 1, limit)
        if limit == len(self._held) and not self._last:
            raise Unfinished
        closers = [self._held.find(closer, at, limit) for closer in self._form.closers]
        end = min((one for one in closers if one >= 0), default=limit)
        return end, end

    def _next_call(self, at: int) -> int:
        """Return where the next call begins, because its marks do not occur in values; else where the text
        ends. The first opener that cannot be prose is searched for; without one there is no next call.

        at: the position at which the search begins.
        """
        first = self._form.openers[self._form.starts[0]] if self._form.starts else ""
        place = self._held.find(first, at) if isinstance(first, str) and first else -1
        return place if place >= 0 else len(self._held)

    def _may_follow_value(self, at: int, form: ParameterForm) -> bool:
        """Return True if an argument, a closer or a call begins at a position, or if the text is over there;
        False if other text follows. White space before it is skipped.

        at: the position after the marks that may end the value, in characters of the held text.
        form: the marks of an argument.

        Raises Unfinished if more text decides.
        """
        at = skip_white(self._held, at)
        if at == len(self._held):
            if not self._last:
                raise Unfinished
            return True
        starts = [(self._form.openers[n],) for n in self._form.starts]
        choices = (form.begin, *((one,) for one in self._form.closers), *starts)
        return matches_any(choices, self._held, at, self._last)

    def _typed(self, key: str, text: str, marks: Marks) -> Any:
        """Return the value of an argument in the type that its marks or its schema say. A value in CDATA is
        text without those marks. If the marks differ for text, a value with the other marks is JSON if
        possible; otherwise the schema decides, as in `value_of_text`.

        key: the name of the argument.
        text: the text of its value.
        marks: the marks between key and value.
        """
        form = self._parameter
        if text.startswith(_CDATA[0]) and text.endswith(_CDATA[1]):
            return text[len(_CDATA[0]) : -len(_CDATA[1])]
        if form.text_middle and marks == form.text_middle:
            return text
        return value_of_text(text, key, {} if form.text_middle else self._schema)


def _is_cut(error: json.JSONDecodeError) -> bool:
    """Return True if a text that is no JSON may become JSON by more text: it ends within a string, an escape,
    a number or a constant. Return False for any other mistake in the text.

    error: what the JSON decoder has raised for the text.
    """
    rest = error.doc[error.pos :]
    if error.msg.startswith("Unterminated string") or _WORD_START.fullmatch(rest):
        return True
    return "escape" in error.msg and len(rest) < MAX_ESCAPE


class PythonStream(MemberStream):
    """Reads the keyword arguments of a call that is written as in Python, from its opening parenthesis on.

    '(a="x", b=True)' -> '{"a": "x", "b": true}'
    """

    def __init__(self) -> None:
        """Start before the opening parenthesis."""
        super().__init__()
        self._is_open = False  # The opening parenthesis was read.
        self._key: str | None = None  # The argument whose value is read.
        self._value = JsonRewriter()
        self._written = ""  # Its value so far.

    def _step(self) -> bool:
        """Read the parenthesis, the key or the value of an argument, or the end of the arguments. Return True
        if another call may read more; False if the value takes more text, or at the end. Commas between
        arguments are skipped, in any number. Where no key follows, the arguments end, and a closing
        parenthesis there is dropped.

        Raises Unfinished, with nothing read of the part in question, if more text decides.
        """
        if self._key is not None:
            return self._read_value(self._key)
        at = skip_white(self._held, 0)
        if not self._is_open:
            self._need(at)
            self._held = self._held[at:].removeprefix("(")
            self._is_open = True
            return True
        while self._held[at : at + 1] == ",":
            at = skip_white(self._held, at + 1)
        self._need(at)
        key = _KEY.match(self._held, at)
        if key:
            self._key, self._held = key[1], self._held[key.end() :]
            self._value = JsonRewriter((")",))
            self._written = ""
            return True
        if not self._last and _KEY_START.fullmatch(self._held, at):
            raise Unfinished
        self._held = self._held[at:].removeprefix(")")
        return self._end()

    def _need(self, at: int) -> None:
        """Raise Unfinished if the text ends at a position and more may come; else do nothing.

        at: a position in the held text, in characters.
        """
        if at >= len(self._held) and not self._last:
            raise Unfinished

    def _read_value(self, key: str) -> bool:
        """Read a part of one argument's value. Return False if that takes more text. Return True once the
        value is complete and written as a member.

        key: the name of the argument.
        """
        self._written += self._value.feed(self._held, self._last)
        if not self._value.done:
            self._held = ""
            return False
        self._held = self._value.rest
        self._key = None
        self._add_member(key, json.loads(self._written))
        return True
