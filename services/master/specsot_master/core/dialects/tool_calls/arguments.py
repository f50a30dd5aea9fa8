"""A call's arguments as models write them, rewritten as JSON that every reader accepts.

Models leave braces out, write raw line breaks and Windows paths into strings, use Python's quotes. All
endpoints read arguments by this file, so that a client sees the same object whichever endpoint it asks.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, Literal, cast

# A decoded JSON object.
Json = dict[str, Any]

# The key of an object that holds what a model wrote where an object of arguments was due, such as a list.
WRAPPED: Final = "arguments"
MAX_NUMBER: Final = 300  # Characters. A longer number becomes a string: many readers refuse it. Untuned.
MAX_DEPTH: Final = 200  # Containers inside each other. Deeper ones are not opened. Untuned; clients recurse.

# A number as JSON writes it.
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
# The constants of Python and of JSON, as JSON writes them.
_WORDS: Final = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
# A Unicode escape within a string, such as \u00e9.
_UNICODE = re.compile(r"\\u([0-9a-fA-F]{4})")
# The beginning of a Windows path.
_DRIVE = re.compile(r"[A-Za-z]:")
# The characters that JSON counts as white space.
_JSON_WHITE: Final = " \t\r\n"
# A comment as JavaScript writes it.
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*\n", re.DOTALL)
# The beginning of a comment whose end has not arrived.
_OPEN_COMMENT = re.compile(r"/(?:\Z|[/*])")
# The bracket that closes a container, by the bracket that opens it.
_CLOSERS: Final = {"{": "}", "[": "]"}

# What the rewriter expects next: a value, a key, the colon after a key, or what follows a complete item.
Expected = Literal["value", "key", "colon", "next"]


class JsonRewriter:
    """Rewrites the text of one JSON value, as a model wrote it, as strict JSON. The text may be fed in pieces
    of any size.

    Text that is strict JSON comes back unchanged. Outside strings, one of `stops` ends the value, as the end
    of the text does, and everything open is closed. Inside a string a stop is a part of the string if the
    string is closed later. `done` is True once the value is complete, and `is_cut` is True if the text ended
    within it.

        {'a': True, 'b': [1, 2 -> {"a": true, "b": [1, 2]}
    """

    def __init__(self, stops: Sequence[str] = (), quote: str = "") -> None:
        """Create a rewriter.

        stops: markers that cannot be a part of the value, such as "</tool_call>"; empty for none, and ""
            among them is ignored.
        quote: a further string delimiter, such as Gemma's '<|"|>'; "" for none. Strings inside it have no
            escapes.
        """
        self.done = False
        self.is_cut = False
        self._stops = tuple(stop for stop in stops if stop)
        self._quotes = tuple(dict.fromkeys((quote, '"', "'"))) if quote else ('"', "'")
        self._after_strings = ("", ",", ":", "}", "]", *(stop[0] for stop in self._stops if stop in ")"))
        self._plain = _unmarked_text(frozenset(mark[0] for mark in (*self._stops, *self._quotes)))
        self._text = ""
        self._at = 0
        self._last = False
        self._out: list[str] = []
        self._stack: list[str] = []  # The openers of the containers that are open.
        self._expected: Expected = "value"
        self._pending = ""  # A comma and white space that are written only if another item follows.
        self._quote = ""  # The delimiter of the string that is open.
        self._tail = ""  # White space and closing brackets at the end of an open string, not written yet.
        self._follows_drive = (
            False  # The first backslash of the open string follows a drive, as in "C:\\users".
        )
        # True if the open string begins at a drive and has had a backslash that is no escape. Then its other
        # backslashes are taken for parts of a path, too.
        self._is_path = False
        self._string = ""  # The first characters of the open string.

    @property
    def rest(self) -> str:
        """The text after the value, once it is done; before that, the text that is not read yet."""
        return self._text[self._at :]

    def feed(self, text: str, last: bool = False) -> str:
        """Add text. Return the strict JSON that is certain now; "" if nothing new is, or once the value is
        done. With `last`, everything open is closed, and a value that never began becomes null. Text after
        the value is not read; see `rest`.

        text: the next text; "" if there is none.
        last: True if no more text comes, so that the value ends here.
        """
        self._text = self._text[self._at :] + text
        self._at = 0
        self._last = last
        while not self.done and self._step():
            pass
        if last and not self.done:
            self.is_cut = True
            self._finish()
        written = "".join(self._out)
        self._out.clear()
        return written

    def _step(self) -> bool:
        """Read one token or a part of a string. Return False if that takes more text, or if the value is
        done; True if another call may read more. A stop ends the value. Inside a string, this call reads the
        next part of the string.
        """
        if self._quote:
            return self._read_string()
        if self._at >= len(self._text):
            return False
        found = self._starts_with(self._stops)
        if found:
            self._finish()
        if found is not False:
            return False
        quote = self._starts_with(self._quotes)
        if quote is None:
            return False
        one = self._text[self._at]
        if quote:
            self._begin_item()
            self._out.append('"')
            self._quote = quote
            self._string = ""
            self._follows_drive = False
            self._is_path = False
            self._at += len(quote)
        elif not _is_token(one):
            self._read_white(one)
        elif one in "{[":
            self._open(one)
        elif one in "}]":
            self._close(one)
        elif one == ",":
            self._read_comma()
        elif one == ":":
            self._read_colon()
        elif one == "/" and (self._expected != "value" or self._stack[-1:] == ["["]):
            return self._read_slash()
        else:
            return self._read_word()
        return True

    def _starts_with(self, marks: Iterable[str]) -> str | Literal[False] | None:
        """Return the mark that begins at the present position, False if none does, or None if more text
        decides. A mark that later text may complete leaves it undecided only if the text is not complete and
        no other mark of `marks` fits.

        marks: the marks in question; the first one that fits is returned.
        """
        undecided = False
        for mark in marks:
            ahead = self._text[self._at : self._at + len(mark)]
            if ahead == mark:
                return mark
            undecided = undecided or (mark.startswith(ahead) and not self._last)
        return None if undecided else False

    # Between strings.

    def _read_white(self, character: str) -> None:
        """Read one character of white space. Within a container it is written at once, or kept until the next
        item if a comma is pending or a key is due; outside of all containers it is dropped. Characters that
        JSON does not count as white space are always dropped.

        character: the character in question.
        """
        self._at += 1
        if character not in _JSON_WHITE:
            return
        if self._pending or self._expected == "key":
            self._pending += character
        elif self._stack:
            self._out.append(character)

    def _begin_item(self) -> None:
        """Write what has to precede a key or a value that begins here: a pending or missing comma, a missing
        colon, or nothing. After a complete item in an object the new item is a key, and in a list it is a
        value.
        """
        if self._expected == "next":
            self._out.append(self._pending or ", ")
            self._expected = "key" if self._stack[-1] == "{" else "value"
        elif self._expected == "colon":
            self._out.append(": ")
            self._expected = "value"
        elif self._expected == "key":
            self._out.append(self._pending)
        self._pending = ""

    def _end_item(self) -> None:
        """Record that a key or a value is complete. A value outside of all containers completes the whole
        text (`done`). After a key a colon is expected, and after a value in a container the next item.
        """
        if self._expected == "key":
            self._expected = "colon"
        elif self._stack:
            self._expected = "next"
        else:
            self.done = True

    def _open(self, character: str) -> None:
        """Open an object or a list. A bracket where a key is due, and one beyond MAX_DEPTH, is dropped. A
        bracket after a complete member of an object is dropped, too, as no container is a key.

        character: the bracket, "{" or "[".
        """
        self._at += 1
        if self._expected == "key" or len(self._stack) >= MAX_DEPTH:
            return  # This bracket cannot begin a key, or is nested too deeply, so it is dropped.
        if self._expected == "next" and self._stack[-1] == "{":
            return  # No container is a key.
        self._begin_item()
        self._out.append(character)
        self._stack.append(character)
        self._expected = "key" if character == "{" else "value"

    def _close(self, character: str) -> None:
        """Close the innermost container of a kind and everything open inside it. A bracket that closes
        nothing is dropped. Keys without values get null.

        character: the bracket, "}" or "]".
        """
        self._at += 1
        opener = "{" if character == "}" else "["
        if opener not in self._stack:
            return  # This bracket closes no open container, so it is dropped.
        while self._close_one() != opener:
            pass

    def _close_one(self) -> str:
        """Close the innermost container, add a missing value, and return the bracket that opened it: "{"
        or "[". A key without a value gets null. White space that was kept is written before the bracket, but
        not a pending comma.
        """
        if self._expected == "colon":
            self._out.append(": null")
        elif self._expected == "value" and self._stack[-1] == "{":
            self._out.append("null")
        if self._expected != "key":  # An empty object has no white space.
            self._out.append(self._pending.lstrip(","))
        self._pending = ""
        opener = self._stack.pop()
        self._out.append(_CLOSERS[opener])
        self._expected = "value"
        self._end_item()
        return opener

    def _read_comma(self) -> None:
        """Read a comma, and add a missing value before it. The comma is only written if another item follows;
        a comma where none is due is dropped. A key without a value, or a colon without one, gets null.
        """
        self._at += 1
        if self._expected in ("colon", "value") and self._stack and self._stack[-1] == "{":
            self._out.append(": null" if self._expected == "colon" else "null")
            self._expected = "next"
        if self._expected == "next":
            self._pending = self._pending or ","

    def _read_colon(self) -> None:
        """Read a colon, after which a value is expected. A colon where none is due is dropped."""
        self._at += 1
        if self._expected == "colon":
            self._out.append(":")
            self._expected = "value"

    def _read_slash(self) -> bool:
        """Drop a comment, or read a word that begins with a slash. Return False, with nothing read, if more
        text decides; else True. A stop ends a comment. The beginning of a comment that is never closed is a
        word.
        """
        if comment := _COMMENT.match(self._text, self._at):
            stops = (self._text.find(stop, self._at, comment.end()) for stop in self._stops)
            self._at = min((at for at in stops if at >= 0), default=comment.end())
            return True
        if not self._last and _OPEN_COMMENT.match(self._text, self._at):
            return False
        return self._read_word()

    def _read_word(self) -> bool:
        """Read a number, a constant, or text without quotes, up to the character that ends it. Return False,
        with nothing read, if the word may continue in later text; else True. The word ends at white space, a
        bracket, a comma, a colon, a quote or the first character of a stop. Where a key is due it becomes a
        string; otherwise a constant, a number or a string.
        """
        end = self._at + 1
        while end < len(self._text) and self._is_in_word(self._text[end]):
            end += 1
        if end == len(self._text) and not self._last:
            return False
        word = self._text[self._at : end]
        self._at = end
        self._begin_item()
        is_key = self._expected == "key"
        self._out.append(_string(word) if is_key else _scalar(word))
        self._end_item()
        return True

    def _is_in_word(self, character: str) -> bool:
        """Return True if a word without quotes can contain a character.

        character: the character in question.
        """
        return (
            _is_token(character)
            and character not in "{}[]:,\"'"
            and not any(character == stop[0] for stop in self._stops)
        )

    # Strings.

    def _read_string(self) -> bool:
        """Read a part of the open string. Return False if that takes more text or if the value ends here,
        True if another call may read more. The string ends at its quote, if what follows can follow a string;
        a stop ends it if the string is not closed later. Closing brackets and white space are held back until
        more of the string follows, because they belong to the JSON if the string lacks its quote.
        """
        if self._at >= len(self._text):
            return False
        plain = self._plain.match(self._text, self._at)
        if plain and plain.end() > self._at:
            self._write(plain[0])
            self._at = plain.end()
            return True
        quote = self._starts_with((self._quote,))
        if quote is None:
            return False
        if quote:
            return self._read_quote()
        stop = self._starts_with(self._stops)
        if stop is None:
            return False
        if stop:
            return self._read_stop_in_string(stop)
        one = self._text[self._at]
        if one == "\\" and self._quote in "\"'":
            return self._read_escape()
        self._at += 1
        if one in "}]" or one.isspace():
            self._tail += one
        else:
            self._write(one)
        return True

    def _write(self, text: str) -> None:
        """Add text to the string that is open. White space and brackets that were held back are written
        before it. Characters that JSON does not allow are escaped.

        text: the text, without escapes.
        """
        self._string = (self._string + self._tail + text)[:4]
        self._out.append(_escaped(self._tail + text))
        self._tail = ""

    def _write_escape(self, escape: str) -> None:
        """Add an escape sequence to the open string. White space and brackets that were held back are written
        before it.

        escape: the sequence as JSON writes it, with its backslash.
        """
        self._string = (self._string + self._tail + "\\")[:4]
        self._out.append(_escaped(self._tail) + escape)
        self._tail = ""

    def _read_escape(self) -> bool:
        r"""Read a backslash in a string. Escapes that JSON knows are kept; any other backslash stands for
        itself, as in C:\users. Return False, with nothing read, if more text decides; else True. \' becomes
        the quote itself. After a path such as C:\users has begun the string, \b, \f, \n, \r and \t are
        backslashes of the path, too.
        """
        ahead = self._text[self._at : self._at + 12]
        if len(ahead) < 2 and not self._last:
            return False
        self._follows_drive = self._follows_drive or bool(_DRIVE.fullmatch(self._string + self._tail))
        if ahead[1:2] == "u":
            return self._read_unicode_escape(ahead)
        if self._is_path and ahead[1:2] in tuple("bfnrt"):
            self._write_backslash()
        elif ahead[1:2] in ('"', "\\", "/", "b", "f", "n", "r", "t"):
            self._write_escape(ahead[:2])
            self._at += 2
        elif ahead[1:2] == "'":
            self._write("'")
            self._at += 2
        else:
            self._write_backslash()
        return True

    def _write_backslash(self) -> None:
        """Write a backslash that stands for itself. If a drive began the string, its other backslashes belong
        to a path from now on.
        """
        self._is_path = self._follows_drive
        self._write_escape("\\\\")
        self._at += 1

    def _read_unicode_escape(self, ahead: str) -> bool:
        """Keep a Unicode escape. Half of a surrogate pair is no character, so its six characters become text.
        Return False, with nothing read, if more text decides; else True. A backslash and "u" without four
        hexadecimal digits are text.

        ahead: the text from the backslash on, up to 12 characters.
        """
        first = _UNICODE.match(ahead)
        if first is None:
            if len(ahead) < 6 and not self._last and re.fullmatch(r"\\u[0-9a-fA-F]*", ahead):
                return False
            self._write_backslash()
            return True
        code = int(first[1], 16)
        size = 6
        if 0xD800 <= code < 0xDC00:
            second = _UNICODE.match(ahead, 6)
            if second is None and not self._last and re.fullmatch(r"(?:\\(?:u[0-9a-fA-F]*)?)?", ahead[6:]):
                return False
            size = 12 if second and 0xDC00 <= int(second[1], 16) < 0xE000 else 0
        elif 0xDC00 <= code < 0xE000:
            size = 0
        self._write_escape(ahead[:size] if size else f"\\\\{ahead[1:6]}")
        self._at += size or 6
        return True

    def _read_quote(self) -> bool:
        """End the string at this quote if what follows can follow a string; otherwise the quote is a part of
        the text. Return False, with nothing read, if more text decides; else True. The quote of a key, and a
        delimiter that is not a quote of JSON, always ends the string. Otherwise the quote ends it before a
        comma, a closing bracket or a stop, before another quote after white space, and at the end of the
        text.
        """
        after = self._at + len(self._quote)
        if self._expected == "key" or self._quote not in "\"'":
            return self._end_string(after)
        end = after
        while end < len(self._text) and self._text[end].isspace():
            end += 1
        if end == len(self._text):
            return self._end_string(after) if self._last else False
        at = self._at
        self._at = end
        stop = self._starts_with(self._stops)
        self._at = at
        if stop is None:
            return False
        follows = self._text[end]
        if stop or follows in ",}]" or (follows in "\"'" and end > after):
            return self._end_string(after)
        self._write(self._quote)
        self._at = after
        return True

    def _end_string(self, after: int) -> bool:
        """Close the open string, which completes a key or a value. Return True, as text may follow. White
        space and brackets that were held back are a part of the string.

        after: the position at which the text continues, in characters.
        """
        self._out.append(_escaped(self._tail) + '"')
        self._tail = self._quote = ""
        self._at = after
        self._end_item()
        return True

    def _read_stop_in_string(self, stop: str) -> bool:
        """Decide by the next unescaped quote whether a stop is text or the string lacks its closing quote. It
        is text if, after that quote, the text ends or continues with a comma, colon or closing bracket: then
        write it and return True. Otherwise end the value here and return False. Return False also, with
        `done` unchanged, if more text must come before this can be decided.

        {"a": "write </tool_call> here"}: the quote ends a string, since a brace follows: text.
        {"a": "x}}</tool_call><tool_call>{"name": ...: the quote begins a string: the first is not closed.

        stop: the stop that begins at the present position.
        """
        quote = re.compile(rf"(?<!\\)(?:\\\\)*{re.escape(self._quote)}\s*").search(
            self._text, self._at + len(stop)
        )
        if not self._last and (quote is None or quote.end() == len(self._text)):
            return False
        if quote and self._text[quote.end() : quote.end() + 1] in self._after_strings:
            self._write(stop)
            self._at += len(stop)
            return True
        self._finish()
        return False

    def _finish(self) -> None:
        """End the value here: close everything that is open; a value that never began becomes null. An open
        string gets its quote; closing brackets at its end are dropped from it if they close at least all open
        containers.
        """
        if self._quote:
            if sum(map(self._tail.count, "}]")) < len(self._stack):
                self._out.append(_escaped(self._tail))
            self._out.append('"')
            self._tail = self._quote = ""
            self._end_item()
        while self._stack:
            self._close_one()
        if not self.done:
            self._out.append("null")
            self.done = True


@lru_cache(maxsize=64)
def _unmarked_text(special: frozenset[str]) -> re.Pattern[str]:
    """Return the pattern of text that can be copied into a string unchanged, without a closing bracket, white
    space or a backslash.

    special: the first characters of stops and quotes, which the text must not contain.
    """
    return re.compile(rf"[^\\\s}}\]\x00-\x1f\x7f\ud800-\udfff{re.escape(''.join(sorted(special)))}]+")


def _is_token(character: str) -> bool:
    """Return True if a character is neither white space nor a control character.

    character: the character in question.
    """
    return not character.isspace() and character > "\x1f"


def _escaped(text: str) -> str:
    """Return text as it is written within a JSON string, without the quotes; "" for "".

    text: the characters of the string.
    """
    return json.dumps(_without_surrogates(text), ensure_ascii=False)[1:-1] if text else ""


def _string(text: str) -> str:
    """Return text as a JSON string, with its quotes; '""' for "".

    text: the characters of the string.
    """
    return f'"{_escaped(text)}"'


def _scalar(word: str) -> str:
    """Return a word without quotes as JSON: a constant, a finite number of at most MAX_NUMBER characters, or
    a string. Infinite numbers, such as 1e999, become strings.

    word: the word, at least one character.
    """
    if word in _WORDS:
        return _WORDS[word]
    number = word if _NUMBER.fullmatch(word) and len(word) <= MAX_NUMBER else ""
    return number if number and math.isfinite(float(number)) else _string(word)


class ArgumentStream:
    """Reads the arguments of one call as they arrive: each `feed` returns what they add to a JSON object.

    The object is valid once `done` is True. Arguments that are an object are passed on while they are read.
    Anything else, such as null, is read to its end and converted to an object by `arguments_of`.
    """

    def __init__(self, stops: Sequence[str] = (), quote: str = "") -> None:
        """Create a reader.

        stops: markers that cannot be a part of the arguments, such as "</tool_call>"; empty for none.
        quote: a further string delimiter; "" for none.
        """
        self._rewriter = JsonRewriter(stops, quote)
        self._before = ""  # White space before the value.
        self._is_object: bool | None = None
        self._collected = ""

    @property
    def has_started(self) -> bool:
        """True once the first character that is no white space was read."""
        return self._is_object is not None

    @property
    def done(self) -> bool:
        """True once the arguments are complete."""
        return self._rewriter.done

    @property
    def rest(self) -> str:
        """The text after the arguments, once they are done; before that, the text that is not read yet."""
        return self._rewriter.rest

    def feed(self, text: str, last: bool = False) -> str:
        """Add text. Return the JSON that is certain now; "" if nothing new is. White space before the value
        is dropped. Arguments that are not an object give "" until they are complete, and then the whole
        object at once; nothing at all gives {}.

        text: the next text of the call.
        last: True if no more text comes.
        """
        if self._is_object is None:
            text = (self._before + text).lstrip()
            self._before = text
            if not text and not last:
                return ""
            self._is_object = text.startswith("{")
        written = self._rewriter.feed(text, last)
        if self._is_object:
            return written
        self._collected += written
        return as_json(arguments_of(json.loads(self._collected))) if self.done else ""


def rewritten(text: str) -> tuple[str, str]:
    """Return the JSON value with which a text begins, as strict JSON, and the text after it: ("null", "") for
    an empty text. Text that is no JSON begins with a word, which becomes a string.

    text: a complete text, as a model has written it.
    """
    rewriter = JsonRewriter()
    return rewriter.feed(text, last=True), rewriter.rest


def arguments_of(value: Any) -> Json:
    """Return the arguments that a value stands for: the object itself, the object that a text contains, or an
    object with the value under the key WRAPPED. A list of one object stands for that object. A text stands
    for what `read_arguments` reads in it.

        None, "", [] -> {};   [{"a": 1}] -> {"a": 1};   [1, 2] -> {"arguments": [1, 2]}

    value: a decoded JSON value.
    """
    if isinstance(value, dict):
        return cast(Json, value)
    if value is None or value in ("", []):
        return {}
    if isinstance(value, str):
        return read_arguments(value)
    if isinstance(value, list):
        only = cast("list[Any]", value)[0] if len(cast("list[Any]", value)) == 1 else None
        if isinstance(only, dict):
            return cast(Json, only)
    return {WRAPPED: value}


def read_arguments(text: str) -> Json:
    """Return the arguments that a model or a client wrote, whatever is wrong with them. Text is never lost:
    text that is no JSON at all becomes the only value of the object. An object is repaired, and what follows
    it is ignored. Text in which more follows a value that is no object, and text that cannot be decoded, is
    returned under the key WRAPPED, with lone surrogates escaped. Otherwise the value is converted by
    `arguments_of`.

    text: the arguments as text; {} is returned for white space.
    """
    text = text.strip()
    if not text:
        return {}
    written, rest = rewritten(text)
    if rest.strip() and not text.startswith("{"):
        return {WRAPPED: _without_surrogates(text)}
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        return {WRAPPED: _without_surrogates(text)}
    return {WRAPPED: value} if isinstance(value, str) and value == text else arguments_of(value)


def _without_surrogates(text: str) -> str:
    """Return the text with lone surrogates escaped, as they cannot be encoded in UTF-8; a text without any is
    returned unchanged.

    text: any text.
    """
    return text.encode("utf-8", "backslashreplace").decode()


def as_json(arguments: Json) -> str:
    """Return arguments as JSON text, in which characters beyond ASCII stand for themselves.

    arguments: the arguments as an object; {} becomes "{}".
    """
    return json.dumps(arguments, ensure_ascii=False)
