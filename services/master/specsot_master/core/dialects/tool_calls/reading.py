"""Reads an answer as it arrives: text, and the calls that a model writes in its own form."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from specsot_master.core.dialects.tool_calls.arguments import (
    ArgumentStream,
    Json,
    JsonRewriter,
    arguments_of,
    as_json,
)
from specsot_master.core.dialects.tool_calls.forms import (
    PLAIN,
    CallForm,
    Unfinished,
    match,
    matches_any,
    skip_white,
)
from specsot_master.core.dialects.tool_calls.marked_arguments import (
    MemberStream,
    ParameterStream,
    PythonStream,
)
from specsot_master.core.dialects.tool_calls.tails import (
    ARGUMENT_KEYS,
    FENCE,
    FENCE_LINE,
    NAME_KEYS,
    CallTail,
    JsonTracker,
    call_in,
    has_arguments,
)


@dataclass(frozen=True, slots=True)
class CallDelta:
    """New text of one call in an answer that is still being read.

    index: the number of the call in the answer to which the text belongs, from 0.
    name: the function's name, once at the beginning of the call; else None.
    arguments: new text of the arguments, which is JSON; "" if this delta only begins the call.
    """

    index: int
    name: str | None = None
    arguments: str = ""


class CallReader(ABC):
    """Separates content, thoughts and calls in an answer that arrives in pieces of any size. The result does
    not depend on the pieces.

    `calls` is the number of calls so far, and `thought` what was thought in the text that was fed last.
    """

    def __init__(self, only_one: bool) -> None:
        """Create a reader.

        only_one: True if the answer ends with its first call, so that whatever follows that call is dropped.
        """
        self.calls = 0
        self.thought = ""
        self._only_one = only_one
        self._held = ""  # Text that is not decided yet.
        self._last = False  # No more text comes.
        self._muted = False  # No part of this answer is content.
        self._content: list[str] = []
        self._out: list[CallDelta] = []

    def feed(self, text: str, last: bool = False) -> tuple[str, tuple[CallDelta, ...]]:
        """Add text. Return what is certain now: new content, and what is new of each call; ("", ()) if
        nothing is. With `last`, a call that is cut off is closed so that its arguments are valid JSON. After
        `has_ended` the text is dropped.

        text: the next text of the answer.
        last: True if no more text comes.
        """
        self._held += text
        self._last = last
        self.thought = ""
        try:
            while self._step():
                pass
        except Unfinished:
            pass
        if last:
            self._finish()
        content = "".join(self._content)
        calls = tuple(self._out)
        self._content.clear()
        self._out.clear()
        return "" if self._muted else content, calls

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """True if the answer ends with its first call, and that call is complete."""

    @abstractmethod
    def _step(self) -> bool:
        """Read the next part of the held text. Return True if another call may read more; return False, or
        raise Unfinished, if that takes more text or the answer has ended.
        """

    @abstractmethod
    def _finish(self) -> None:
        """Add what is still missing when no more text comes."""

    def _add_call(self, name: str, arguments: str = "") -> None:
        """Add the delta that begins a call.

        name: the name of the function.
        arguments: its arguments as JSON text, if they are known already; else "".
        """
        self._out.append(CallDelta(self.calls, name, arguments))
        self.calls += 1

    def _add_arguments(self, text: str) -> None:
        """Add new text of the last call's arguments. The text is joined to the last delta if that belongs to
        the same call; otherwise it becomes a delta of its own.

        text: the new text, which is JSON; nothing happens for "".
        """
        if not text:
            return
        if self._out and self._out[-1].index == self.calls - 1:
            self._out[-1] = replace(self._out[-1], arguments=self._out[-1].arguments + text)
        else:
            self._out.append(CallDelta(self.calls - 1, arguments=text))


# The name of a function.
_NAME = re.compile(r"[\w.\-]+")
# The beginning of an object up to its arguments. Cohere writes the call's id first.
_HEAD: Final = (
    r"""\{{\s*(?:\{{\s*)?(?:["'](?:tool_call_id|id|type)["']\s*:\s*"[^"\\]*"\s*,\s*)*"""
    r"""["'](?:{names})["']\s*:\s*"(?P<name>(?:[^"\\]|\\.)*)"\s*,\s*["'](?:{keys})["']\s*:\s*(?=\S)"""
)
MAX_HEAD: Final = (
    4096  # Characters of an object within which its name and the key of its arguments stand. Untuned.
)
# Characters that may stand between two calls.
_SEPARATORS: Final = " \t\r\n,;"

# Characters that may be read again to look for calls inside what is no call; bounds the time that
# a model takes that repeats the beginning of a call without end. Untuned.
MAX_READ_TWICE: Final = 100_000

# What a reader reads: content, objects at the end of the message that may be calls, an object with a name and
# arguments, the arguments of a call, the members after them, further members that are ignored, or what
# follows a call.
State = Literal["content", "tail", "object", "arguments", "members", "skipped", "after"]


class CodeTracker:
    """Tracks whether the text of an answer so far ends inside a code fence, or inside backticks on its last
    line.
    """

    def __init__(self) -> None:
        """Start outside of code."""
        self.fenced = self._quoted = False

    def inside(self, white: str) -> bool:
        """Return True if text that follows this white space is code. The white space has not been added
        yet.

        white: white space that follows the text so far.
        """
        return self.fenced or (self._quoted and "\n" not in white)

    def add(self, text: str) -> None:
        """Add text. A run of backticks must not be split between two calls. A run of three or more backticks
        opens or closes a fence, a shorter run outside a fence opens or closes quoted code, and a line break
        ends quoted code. "" changes nothing.

        text: the next text of the answer.
        """
        for part in re.findall(r"`+|\n|[^`\n]+", text):
            if part == "\n":
                self._quoted = False
            elif part.startswith(FENCE):
                self.fenced = not self.fenced
                self._quoted = False
            elif part[0] == "`" and not self.fenced:
                self._quoted = not self._quoted


class ToolReader(CallReader):
    """Reads calls that a model writes in the form of its chat template.

    Text is held back only as long as it may still become a call. With the last text, what was held back
    becomes content, and white space at the end is content unless it touches a call.

        Hermes: 'Hi <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
            -> content "Hi", CallDelta(0, "f", '{"a": 1}')
    """

    def __init__(self, form: CallForm, functions: Mapping[str, Json], only_one: bool = False) -> None:
        """Create a reader.

        form: how the model writes calls.
        functions: the JSON schema of the arguments of each offered function, by name; a function that is
            missing has the schema {}. Bare objects are calls only if they name one of these functions.
        only_one: True if the answer ends with its first call, so that whatever follows that call is dropped.
        """
        super().__init__(only_one)
        self._form = form
        self._functions = functions
        self._state: State = "content"
        self._code = CodeTracker()
        self._json = JsonTracker()
        self._spoke = False  # Some content came.
        self._white = ""  # White space that is content only if more content follows.
        self._after_call = False  # The white space in `_white` touches a call.
        self._tail: CallTail | None = None
        self._read_twice = 0  # Characters that were read as possible calls and turned out to be content.
        self._raw = ""  # The marks before the object that is read, which are content if it is no call.
        self._object = ""  # That object's text so far.
        self._rewriter = JsonRewriter()
        self._written = ""  # What the rewriter returned so far.
        self._stream: ArgumentStream | MemberStream = ArgumentStream()
        self._in_object = False  # The arguments are a member of an object.
        self._closed = False  # A closer followed the last call.
        self._fenced = False  # The object of the last call stands in a code fence within the call's marks.
        keys = "|".join(map(re.escape, dict.fromkeys((form.arguments_key, *ARGUMENT_KEYS))))
        names = "|".join(map(re.escape, dict.fromkeys((form.name_key, *NAME_KEYS))))
        self._head = re.compile(_HEAD.format(names=names, keys=keys), re.DOTALL)
        starts = [form.openers[n] for n in form.starts]
        first = "".join(sorted({re.escape(one[0]) for one in starts if isinstance(one, str)}))
        self._places = re.compile(rf"[`{{\[{first}]")

    @property
    def has_ended(self) -> bool:
        """True if the answer ends with its first call, and that call and a mark that closes it are read."""
        is_closed = self._closed or not self._form.closers or self._state == "content"
        return self._only_one and self.calls > 0 and self._state in ("after", "content") and is_closed

    def _finish(self) -> None:
        """Add white space at the end of the answer to the content, unless it touches a call."""
        if self._white and not self._after_call:
            self._content.append(self._white)
            self._white = ""

    def _step(self) -> bool:
        """Read the next part of the answer, depending on the state. Return True if another call may read
        more; return False, or raise Unfinished, if that takes more text or the answer has ended. An answer
        has ended after its only call; text that is held then is dropped.
        """
        if self.has_ended:
            self._held = self._white = ""
            return False
        match self._state:
            case "content":
                return self._read_content()
            case "tail":
                return self._read_tail()
            case "object":
                return self._read_object()
            case "arguments":
                return self._read_arguments()
            case "members":
                return self._read_members()
            case "skipped":
                return self._read_skipped()
            case "after":
                return self._read_after()

    # Content.

    def _say(self, text: str) -> None:
        """Release text as content. White space at its end waits for what follows; white space around calls is
        dropped at the beginning of the answer. The white space between a call and content after it is
        released if there was content before the call (a line break if there was none), and dropped if there
        was not. Text of white space only, or "", releases nothing.

        text: text that is part of no call.
        """
        spoken = text.rstrip()
        if spoken:
            if self._after_call:
                self._white = (self._white or "\n") if self._spoke else ""
                spoken = spoken if self._spoke or self._muted else spoken.lstrip()
            released = self._white + spoken
            self._content.append(released)
            self._code.add(released)
            self._json.add(released)
            self._white = ""
            self._spoke = True
            self._after_call = False
        self._white += text[len(text.rstrip()) :]

    def _say_raw(self, size: int) -> bool:
        """Release the first held characters as content. Return True, so that a state can return this call.

        size: how many characters; 0 releases none.
        """
        self._say(self._held[:size])
        self._held = self._held[size:]
        return True

    def _read_content(self) -> bool:
        """Read content up to the next place at which a call may begin. Return False if all text is read or
        more text decides, else True. A place inside code, and one at which no call begins, is released as one
        character of content. At a brace or bracket that does not lie inside JSON content, or at a code fence,
        the tail of the message is read as possible calls.
        """
        place = self._places.search(self._held)
        self._say_raw(place.start() if place else len(self._held))
        if not self._held:
            return False
        if self._held[0] == "`":
            return self._read_backticks()
        if self._code.inside(self._white):
            return self._say_raw(1)
        for first in self._form.starts:
            if self._begin_call(0, first):
                return True
        if self._held[0] in "{[" and not self._json.inside(self._white):
            return self._begin_tail()
        return self._say_raw(1)

    def _read_backticks(self) -> bool:
        """Read a run of backticks. A code fence may hold calls at the end of the message. Return False, with
        nothing read, if the run may continue in later text; else True. Exactly three backticks outside a code
        fence begin a tail; every other run is released as content.
        """
        ticks = len(self._held) - len(self._held.lstrip("`"))
        if ticks == len(self._held) and not self._last:
            return False
        if ticks == len(FENCE) and not self._code.fenced:
            return self._begin_tail()
        return self._say_raw(ticks)

    # Objects at the end of the message.

    def _begin_tail(self) -> bool:
        """Start to read the rest of the message as objects that may be calls. Return True, as the next step
        reads them.
        """
        self._tail = CallTail(self._functions)
        self._state = "tail"
        return True

    def _read_tail(self) -> bool:
        """Read objects at the end of the message. If they turn out to be no calls, their text is read again
        as content. Return False if more text decides or the calls are read, True if content follows. Only the
        first call counts if the answer ends with its first call. Once more than MAX_READ_TWICE characters
        turned out to be content, the whole tail is released at once and is not searched for calls again.
        """
        tail = self._tail
        assert tail is not None, "the state says so"
        self._held = self._held[tail.feed(self._held) :]
        if tail.alive and not self._last:
            return False
        found = tail.calls() if tail.alive else None
        self._tail = None
        self._state = "content"
        if found is None:
            self._held = tail.text + self._held
            self._read_twice += len(tail.text)
            if self._read_twice > MAX_READ_TWICE:
                return self._say_raw(len(tail.text))
            return self._say_raw(len(FENCE) if self._held.startswith(FENCE) else 1)
        for name, arguments in found[:1] if self._only_one else found:
            self._add_call(name, as_json(arguments))
        self._held = ""
        self._after_call = True
        return False

    # The beginning of a call.

    def _begin_call(self, at: int, first: int) -> bool:
        """Begin a call if some openers stand at a position, with a name or an object after them. Return True
        if a call begins; else return False and change nothing. False is returned if the openers do not stand
        there, if no name (or no beginning of an object) follows them, or if neither arguments nor a closer
        follow the name. If a call begins, its openers and name are removed from the held text, and the delta
        with its name is added, except for an object, whose name is read later.

        at: a position in the held text, in characters.
        first: the number of the first opener that must stand there; those before it may be missing.

        Raises Unfinished if more text decides.
        """
        form = self._form
        text = self._held
        place = match(form.openers[first:], text, at, self._last)
        if place is None:
            return False
        place = self._skip_white(place)
        if form.layout == "object":
            return self._begin_object(place)
        name = _NAME.match(text, place)
        if name is None:
            self._need(place)
            return False
        self._need(name.end())
        place = match(form.middle, text, name.end(), self._last)
        if place is None or not self._may_follow(self._skip_white(place)):
            return False
        self._start(name[0], place)
        return True

    def _need(self, at: int) -> None:
        """Raise Unfinished if the text ends at a position and more may come; else do nothing.

        at: a position in the held text, in characters.
        """
        if at >= len(self._held) and not self._last:
            raise Unfinished

    def _skip_white(self, at: int) -> int:
        """Return the position of the next character that is no white space; the length of the held text if
        there is none and no more text comes.

        at: a position in the held text, in characters.

        Raises Unfinished if more text may come.
        """
        at = skip_white(self._held, at)
        self._need(at)
        return at

    def _may_follow(self, at: int) -> bool:
        """Return True if arguments, or the end of a call without any, may begin at a position. For the layout
        "named" this is a brace, a bracket or a closer; for "python" an opening parenthesis; for "parameters"
        the marks of an argument or a closer.

        at: a position in the held text, in characters.

        Raises Unfinished if more text decides.
        """
        form = self._form
        if form.layout == "named" and self._held[at : at + 1] in ("{", "["):
            return True
        if form.layout == "python":
            return match(("(",), self._held, at, self._last) is not None
        inner = [form.parameter.begin] if form.parameter else []
        return matches_any((*inner, *((one,) for one in form.closers)), self._held, at, self._last)

    def _start(self, name: str, at: int) -> None:
        """Begin a call whose name has been read; what precedes its arguments is dropped. The delta with the
        name is added, and a reader for the layout's arguments is set up. The schema of a function that is not
        offered is {}.

        name: the name of the function.
        at: the position at which its arguments begin.
        """
        self._held = self._held[at:]
        match self._form.layout:
            case "parameters":
                self._begin_arguments(name, ParameterStream(self._form, self._functions.get(name, {})))
            case "python":
                self._begin_arguments(name, PythonStream())
            case _:
                self._begin_json(name)

    def _add_call(self, name: str, arguments: str = "") -> None:
        """Add the delta that begins a call. White space after the call is no content of its own.

        name: the name of the function.
        arguments: its arguments as JSON text, if they are known already; else "".
        """
        super()._add_call(name, arguments)
        self._after_call = True

    # Objects with a name and arguments.

    def _begin_object(self, at: int) -> bool:
        """Begin an object, or a list of objects. Return True if one begins there; else return False and
        change nothing. A code fence between the marks of a call and its object, brackets of lists before the
        object, and a second brace after the first, are accepted.
        False is returned if no brace stands there or if no quote follows it. If an object begins, the held
        text before it is kept apart, to be content if the object is no call.

        at: a position in the held text, in characters.

        Raises Unfinished if more text decides.
        """
        fence_size = self._fence_at(at) if self._form.openers else 0
        if fence_size:
            at = self._skip_white(at + fence_size)
        while self._held[at : at + 1] == "[":
            at = self._skip_white(at + 1)
        if self._held[at : at + 1] != "{":
            return False
        ahead = self._skip_white(at + 1)
        if self._held[ahead : ahead + 1] == "{":
            ahead = self._skip_white(ahead + 1)
        if self._held[ahead : ahead + 1] not in ('"', "'"):
            return False
        self._raw = self._held[:at]
        self._object = ""
        self._held = self._held[at:]
        self._rewriter = JsonRewriter(self._form.stops)
        self._written = ""
        self._state = "object"
        self._fenced = fence_size > 0
        return True

    def _fence_at(self, at: int) -> int:
        """Return the length of the code fence, with the language after it, that begins at a position; 0 if
        none does.

        at: a position in the held text, in characters.

        Raises Unfinished if more text decides.
        """
        ahead = self._held[at : at + len(FENCE)]
        if FENCE.startswith(ahead):
            self._need(at + len(ahead))
        fence = FENCE_LINE.match(self._held, at)
        if fence is None:
            return 0
        self._need(fence.end())
        return fence.end() - at

    def _read_object(self) -> bool:
        """Read an object with a name and arguments. If the name precedes the arguments, the arguments are
        passed on as they arrive; otherwise the object is read to its end. An object that turns out to be no
        call is content. Return False if that takes more text, else True. An object is content if it names no
        function, or if it was cut off by the end of the text before any arguments.
        """
        read_so_far = self._object + self._held
        head = self._head.match(read_so_far) if len(self._object) < MAX_HEAD else None
        if head and head.end() < len(read_so_far):
            self._held = read_so_far[head.end() :]
            self._begin_json(_text_of(head["name"]))
            self._in_object = True
            return True
        self._written += self._rewriter.feed(self._held, self._last)
        if not self._rewriter.done:
            self._object = read_so_far
            self._held = ""
            return False
        self._held = self._rewriter.rest
        value = _value_of(self._written)
        call = call_in(value)
        if call is None or (self._rewriter.is_cut and not has_arguments(value)):
            self._state = "content"
            self._say(self._raw + read_so_far[: len(read_so_far) - len(self._held)])
            return True
        self._add_call(call[0], as_json(arguments_of(call[1])))
        self._closed = False
        self._state = "after"
        return True

    def _begin_json(self, name: str) -> None:
        """Begin a call whose arguments are JSON.

        name: the name of the function.
        """
        self._begin_arguments(name, ArgumentStream(self._form.stops, self._form.quote))

    def _begin_arguments(self, name: str, stream: ArgumentStream | MemberStream) -> None:
        """Begin a call, and read its arguments from now on. The delta with the name is added.

        name: the name of the function.
        stream: reads its arguments.
        """
        self._add_call(name)
        self._stream = stream
        self._closed = self._in_object = False
        self._state = "arguments"

    def _read_arguments(self) -> bool:
        """Read a part of the arguments. Return False if that takes more text, True once they are complete. A
        call without an object of arguments has the arguments {}. For the layout "named", a call after which
        something other than a brace or bracket follows also has the arguments {}. Afterwards the members of
        the call's object are read if the call is an object, else what follows the call.

        Raises Unfinished for the layout "named" if it is not known yet whether arguments follow.
        """
        if self._form.layout == "named" and self._is_empty_call():
            self._add_arguments("{}")
            self._state = "after"
            return True
        self._add_arguments(self._stream.feed(self._held, self._last))
        self._held = self._stream.rest if self._stream.done else ""
        if self._stream.done:
            self._state = "members" if self._in_object else "after"
        return self._stream.done

    def _is_empty_call(self) -> bool:
        """Return True if something other than an object of arguments follows, where one is due; False once
        its reading has started. Return False also if the text is complete and nothing follows, and for
        arguments that are not read as JSON.

        Raises Unfinished if more text decides.
        """
        if not isinstance(self._stream, ArgumentStream) or self._stream.has_started:
            return False
        at = self._skip_white(0)
        return self._held[at : at + 1] not in ("{", "[") and at < len(self._held)

    def _read_members(self) -> bool:
        """Read what follows the arguments in a call's object: the closing brace, which may be missing, or
        more members. Return True, as the next step reads what follows. If a comma and a quote follow, the
        further members are read next, to be ignored. Otherwise a closing brace is dropped if there is one,
        and what follows the call is read next.

        Raises Unfinished if more text decides.
        """
        at = self._skip_white(0)
        if self._held[at : at + 1] == "," and self._held[self._skip_white(at + 1) :][:1] in ('"', "'"):
            self._held = self._held[at + 1 :]
            self._rewriter = JsonRewriter(self._form.stops)
            self._rewriter.feed("{")
            self._state = "skipped"
            return True
        if self._held[at : at + 1] == "}":
            self._held = self._held[at + 1 :]
        self._state = "after"
        return True

    def _read_skipped(self) -> bool:
        """Read the further members of a call's object, which are ignored. Return False if that takes more
        text, True once the object is closed. What follows the call is read next.
        """
        self._rewriter.feed(self._held, self._last)
        if not self._rewriter.done:
            self._held = ""
            return False
        self._held = self._rewriter.rest
        self._state = "after"
        return True

    # After a call.

    def _read_after(self) -> bool:
        """Read what follows a call: closers, the next call, or content. Return False if all text is read,
        else True. Closers are dropped, and so are closing brackets, and the end of a code fence around the
        object, before the first closer. White space before content is kept, to be released or dropped with
        it; white space at the end of the answer is dropped. False is returned for white space alone.

        Raises Unfinished if more text decides.
        """
        form = self._form
        at = skip_white(self._held, 0)
        if at == len(self._held):
            if self._last:
                self._held = ""
            return False
        if (size := self._closer_at(at)) is not None:
            self._held = self._held[at + size :]
            self._closed = True
            return True
        if self._fenced and not self._closed and (size := self._fence_at(at)):
            self._held = self._held[at + size :]
            self._fenced = False
            return True
        if not self._closed and self._held[at] in "}]" and form.layout in ("object", "named"):
            self._held = self._held[at + 1 :]
            return True
        if self._begin_next(at):
            return True
        self._white += self._held[:at]
        self._held = self._held[at:]
        self._state = "content"
        return True

    def _closer_at(self, at: int) -> int | None:
        """Return the length of the closer that begins at a position, or None if none does. If two closers
        fit, the first in the form's order counts. A closer that is incomplete at the end of the answer does
        not count.

        at: a position in the held text, in characters.

        Raises Unfinished if more text decides.
        """
        unfinished = False
        for closer in self._form.closers:
            if self._held.startswith(closer, at):
                return len(closer)
            unfinished = unfinished or closer.startswith(self._held[at:])
        if unfinished and not self._last:
            raise Unfinished
        return None

    def _begin_next(self, at: int) -> bool:
        """Begin another call after one, with or without a separator. Return True if one begins; else return
        False and change nothing. The call may begin with any of the openers; the openers before that one may
        be missing. Without openers a call begins only for the layout "python", and for the layout "object" as
        long as no closer was read (or if the form has no openers).

        at: a position in the held text, in characters.

        Raises Unfinished if more text decides.
        """
        while at < len(self._held) and self._held[at] in _SEPARATORS:
            at += 1
        self._need(at)
        unfinished = False
        for first, mark in enumerate(self._form.openers):
            try:
                if isinstance(mark, str) and self._begin_call(at, first):
                    return True
            except Unfinished:
                unfinished = True
        if unfinished:
            raise Unfinished
        if self._form.layout == "python" and not self._closed:
            return self._begin_call(at, len(self._form.openers))
        if self._form.layout != "object" or (self._closed and self._form.openers):
            return False
        return self._begin_object(at)


class ForcedReader(ToolReader):
    """Reads an answer that is forced to consist of calls: a list of objects with the form's members or, with
    a name, the arguments of that function. No part of the answer is content.
    """

    def __init__(self, functions: Mapping[str, Json], name: str | None, form: CallForm = PLAIN) -> None:
        """Create a reader. With a name, the call begins at once: its delta is part of what the first `feed`
        returns.

        functions: the JSON schemas of the arguments of the offered functions, by the function's name.
        name: the function whose arguments the answer consists of, or None for calls, or a list of calls,
            whose members have the names of `form`.
        form: how the model writes calls; only the names of an object's members are taken from it, and marks
            are not expected.
        """
        members = replace(PLAIN, name_key=form.name_key, arguments_key=form.arguments_key)
        super().__init__(members, functions)
        self._muted = True
        self._state = "after"
        if name is not None:
            self._begin_json(name)


class MarkedReader(ToolReader):
    """Reads an answer that is forced to consist of calls in the model's own marks. No part of the answer is
    content.
    """

    def __init__(self, form: CallForm, functions: Mapping[str, Json], head: str) -> None:
        """Create a reader.

        form: how the model writes calls.
        functions: the JSON schemas of the arguments of the offered functions, by the function's name.
        head: the beginning of the first call, which the prompt contains, so that the answer continues it; ""
            for none.
        """
        super().__init__(form, functions)
        self._muted = True
        self._held = head


def _text_of(written: str) -> str:
    """Return the text of a JSON string that is given without its quotes.

    written: the text between the quotes, with escapes.
    """
    return str(json.loads(JsonRewriter().feed(f'"{written}"', last=True)))


def _value_of(written: str) -> Any:
    """Return the value of JSON text, or the text itself if it is no JSON. Text that is nested too deeply to
    be decoded counts as no JSON.

    written: any text.
    """
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return written
