"""JSON objects at the end of a message that may be calls, bare or in code fences.

Qwen2.5-Coder and Llama 3 write nothing else. Since the same text may be an example or an answer, it is a call
only if nothing else follows it, its function is offered, and its arguments fit the function's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, Literal, cast

from specsot_master.core.dialects.tool_calls.arguments import Json, JsonRewriter, arguments_of
from specsot_master.core.dialects.tool_calls.schemas import fits

# Begins and ends a block of code.
FENCE: Final = "```"
# Members of an object that may hold the name of the called function.
NAME_KEYS: Final = ("name", "tool_name")
# Members of an object that may hold the arguments.
ARGUMENT_KEYS: Final = ("arguments", "parameters")
# Members that hold the arguments in the calls of other systems.
_FOREIGN_ARGUMENT_KEYS: Final = ("input", "args", "kwargs", "params")
# Further members that the object of a call may have.
_OTHER_KEYS: Final = ("function", "id", "type", "tool_call_id")
# All members that the object of a call may have.
_KEYS: Final = (*NAME_KEYS, *ARGUMENT_KEYS, *_OTHER_KEYS)
# The beginning of an object; some models write a second brace.
_BEGINNING = re.compile(r"\{\s*(?:\{\s*)?")
# Characters besides white space that may stand between two objects.
_BETWEEN: Final = ",;[]}"
# A code fence with the language after it.
FENCE_LINE = re.compile(r"```[\w-]*")
# A string of JSON, which may lack its closing quote.
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)("?)', re.DOTALL)


def call_in(value: Any) -> tuple[str, Any] | None:
    """Return the name and the arguments of a call written as an object, or None if the value is no object
    with a name. The arguments are None if the object has none. {"function": {"name": ...}} is read as its
    inner object. A name that is no string does not count. The arguments are returned as they are, of any
    type; if both keys of ARGUMENT_KEYS are present, "arguments" counts. Without either, the members that are
    none of a call are the arguments, or the object in the only one of them if its key is known.

    {"name": "f", "arguments": {}} -> ("f", {});   {"function": "f", "parameters": {}} -> ("f", {})
    {"name": "f", "input": {"a": 1}} -> ("f", {"a": 1});   {"name": "f", "a": 1} -> ("f", {"a": 1})

    value: a decoded JSON value.
    """
    if not isinstance(value, dict):
        return None
    call = cast(Json, value)
    if isinstance(call.get("function"), dict):
        call = cast(Json, call["function"])
    elif isinstance(call.get("function"), str):
        call = {"name": call["function"], **call}
    name = next((call[key] for key in NAME_KEYS if isinstance(call.get(key), str)), None)
    if name is None:
        return None
    key = next((key for key in ARGUMENT_KEYS if key in call), None)
    return name, call[key] if key else _other_members(call)


def has_arguments(value: Json) -> bool:
    """Return True if the object of a call has a member for the arguments, one of ARGUMENT_KEYS. Of
    {"function": {"name": ...}} the inner object counts.

    value: the object of the call.
    """
    inner = value.get("function")
    return any(key in (inner if isinstance(inner, dict) else value) for key in ARGUMENT_KEYS)


def _other_members(call: Json) -> Json | None:
    """Return the arguments of a call whose object has no member for them, or None if it has no member that
    could be one. See `call_in`.

    call: the object of the call.
    """
    others = {key: value for key, value in call.items() if key not in _KEYS}
    if len(others) == 1:
        ((key, value),) = others.items()
        if key in _FOREIGN_ARGUMENT_KEYS and isinstance(value, dict):
            return cast(Json, value)
    return others or None


class JsonTracker:
    """Tracks whether a text so far ends inside a JSON object or list, whose members are no calls.

        '{"example": ' -> inside;   'Use {x} or [y], then ' -> not inside

    A bracket counts if the value or name of a member follows it. A blank line ends any value, since prose may
    hold a bracket that is never closed.
    """

    def __init__(self) -> None:
        """Start outside of JSON."""
        self._depth = 0
        # True after a bracket of prose or JSON, until the next visible character decides which it is.
        self._opened = False
        self._quoted = self._escaped = False
        self._line_breaks = 0  # In the white space at the end of the text.

    def inside(self, white: str) -> bool:
        """Return True if an object that follows this white space is a member of another value. The white
        space has not been added yet.

        white: white space that follows the text so far.
        """
        return (self._depth > 0 or self._opened) and self._line_breaks + white.count("\n") < 2

    def add(self, text: str) -> None:
        """Add text. A blank line that more text follows ends every open object, list and string.

        text: the next text of the message, of any length.
        """
        for one in text:
            if one.isspace():
                self._line_breaks += one == "\n"
                self._escaped = False
                continue
            if self._line_breaks > 1:
                self._depth = 0
                self._opened = self._quoted = self._escaped = False
            self._line_breaks = 0
            self._read(one)

    def _read(self, one: str) -> None:
        """Read one visible character. A bracket opens an object or a list once a quote, a bracket, a minus or
        a digit follows it. Quotes count only inside of such a value, and brackets inside of a string do not.

        one: the character; not white space.
        """
        if self._quoted:
            self._quoted = self._escaped or one != '"'
            self._escaped = one == "\\" and not self._escaped
            return
        if one in "}]":
            # An opened bracket that nothing follows was not counted.
            self._depth = max(self._depth - (not self._opened), 0)
        elif self._opened and (one in '"{[-' or one.isdigit()):
            self._depth += 1
        self._opened = one in "{["
        self._quoted = one == '"' and self._depth > 0


class CallTail:
    """Decides whether the rest of a message, from a brace or a code fence on, consists of calls.

    `text` is what was read, and `alive` is True as long as it may still consist of calls.
    """

    def __init__(self, functions: Mapping[str, Json]) -> None:
        """Create an empty tail.

        functions: the JSON schemas of the arguments of the offered functions, by the function's name.
        """
        self.text = ""
        self.alive = True
        self._functions = functions
        self._state: Literal["between", "fence", "object"] = "between"
        self._object_start = 0  # The position in `text` at which the current object begins.
        # True once it is known whether the current object may call an offered function.
        self._decided = False
        self._depth = 0
        self._quoted = self._escaped = False
        self._ticks = 0  # Backticks read in a row.

    def feed(self, text: str) -> int:
        """Read text as long as it may consist of calls. Return how many characters were read; fewer than all
        if the text turns out to be no call. All of it is appended to `text`, up to and including the
        character that makes `alive` False.

        text: the next text of the message.
        """
        for count, one in enumerate(text, 1):
            self.text += one
            self._read(one)
            if not self.alive:
                return count
        return len(text)

    def _read(self, character: str) -> None:
        """Read one character between objects, or pass it on to `_read_object`. `alive` becomes False if no
        call can contain it. Between objects, white space, separators and code fences with the name of a
        language are allowed. Any other character, a run of more than three backticks, and one or two
        backticks before other text, make `alive` False.

        character: the next character of the text.
        """
        if self._state == "object":
            self._read_object(character)
            return
        ticks = self._ticks + 1 if character == "`" else 0
        if self._state == "fence" and (character.isalnum() or character in "-_"):
            return  # The language of a fence.
        self._state = "between"
        if character == "{":
            self._state = "object"
            self._object_start = len(self.text) - 1
            self._depth = 1
            self._decided = False
            self._quoted = self._escaped = False
        elif character == "`":
            self._state = "fence" if ticks == len(FENCE) else "between"
            self.alive = ticks <= len(FENCE)
        else:
            self.alive = not self._ticks or self._ticks == len(FENCE)
            self.alive = self.alive and (character.isspace() or character in _BETWEEN)
        self._ticks = ticks

    def _read_object(self, character: str) -> None:
        """Read one character of an object. `alive` becomes False if the object cannot be a call of an offered
        function. The last closing bracket ends the object. Once its function is known to be offered, or its
        first key is another one of a call, the rest of it is not checked here.

        character: the next character of the text.
        """
        if self._quoted:
            self._quoted = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth <= 0:
                self._state = "between"
        if not self._decided:
            self.alive = self._may_call(self.text[self._object_start :])

    def _may_call(self, written: str) -> bool:
        """Return True if the object that begins like this may call an offered function. A first key or a name
        that is still incomplete may be the beginning of a permitted one. `_decided` is set once the first key
        is one that does not hold the name, or the name is complete; then later text of the object is not
        checked. Return False if the first key is none of a call, or if the name is none of an offered
        function.

        written: the beginning of the object, from its brace on.
        """
        beginning = _BEGINNING.match(written)
        assert beginning is not None, "an object begins with a brace"
        ahead = written[beginning.end() :]
        key = _STRING.match(ahead)
        if key is None:
            return not ahead
        if not key[2]:
            return any(known.startswith(key[1]) for known in _KEYS)
        if key[1] not in NAME_KEYS:
            self._decided = True
            return key[1] in _KEYS
        rest = ahead[key.end() :].lstrip()
        if not rest.startswith(":"):
            return not rest
        value = rest[1:].lstrip()
        name = _STRING.match(value)
        if name is None:
            return not value
        self._decided = bool(name[2])
        known = self._functions
        return name[1] in known if name[2] else any(one.startswith(name[1]) for one in known)

    def calls(self) -> list[tuple[str, Json]] | None:
        """Return the calls of the complete message as (name, arguments), or None if one of its objects is no
        call of an offered function, or if it has none. Return None also if an object has unknown members,
        lacks arguments, or has arguments that do not fit the schema.
        """
        found: list[tuple[str, Json]] = []
        rest = self._between(self.text)
        while rest:
            rewriter = JsonRewriter(stops=(FENCE,))
            written = rewriter.feed(rest, last=True)
            call = _checked(written, self._functions)
            if call is None:
                return None
            found.append(call)
            rest = self._between(rewriter.rest)
        return found or None

    def _between(self, text: str) -> str:
        """Return the text from the next object on, without white space, separators and code fences; "" if
        there is none.

        text: the rest of the message.
        """
        while True:
            stripped = text.lstrip(" \t\r\n" + _BETWEEN)
            fence = FENCE_LINE.match(stripped)
            if fence is None:
                return stripped
            text = stripped[fence.end() :]


def _checked(written: str, functions: Mapping[str, Json]) -> tuple[str, Json] | None:
    """Return the call that a JSON text is, or None if its function is not offered or its arguments do not fit
    the function's schema. Return None also if the text is no JSON, is no call, has members that no call has,
    or lacks a member for the arguments.

    written: the text of one object.
    functions: the JSON schemas of the arguments of the offered functions, by the function's name.
    """
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        return None
    call = call_in(value)
    if call is None or call[0] not in functions or not set(value) <= set(_KEYS):
        return None
    if not has_arguments(value):
        return None
    schema = functions[call[0]]
    arguments = arguments_of(call[1])
    return (call[0], arguments) if fits(arguments, schema, schema) else None
