"""Calls of functions in a model's text: how they are written by different models, read as the text comes.

And what stands around its thoughts: a chat template shows both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class ToolDialect:
    """How a family of models writes calls: JSON objects, or a list of them, with a name and arguments.

    begin, end: what stands around them. key: what the arguments are called. bare: without `begin`, an object
    at the very beginning of an answer is a call, too. special: `begin` is a special token.
    """

    begin: str = ""
    end: str = ""
    key: str = "arguments"
    bare: bool = False
    special: bool = False

    def head(self, name: str) -> str:
        """How a call of this function begins, up to its arguments."""
        newline = "\n" if self.end else ""
        opened = "[" if self.special and not self.bare else ""
        begin = "" if self.bare else self.begin + newline
        return f"{begin}{opened}{{{json.dumps('name')}: {json.dumps(name)}, {json.dumps(self.key)}: "

    def reader(self, known: Collection[str]) -> ToolReader:
        """Of one answer. known: names of functions that may be called."""
        return ToolReader(self, known)


class HarmonyDialect(ToolDialect):
    """OpenAI's: messages with a header, which names the channel and, of a call, its function."""

    def head(self, name: str) -> str:
        return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"

    def reader(self, known: Collection[str]) -> ToolReader:
        return HarmonyReader(self, known)


HERMES = ToolDialect("<tool_call>", "</tool_call>")  # Hermes, Qwen
LLAMA = ToolDialect("<|python_tag|>", key="parameters", bare=True, special=True)  # Llama 3
MISTRAL = ToolDialect("[TOOL_CALLS]", special=True)
HARMONY = HarmonyDialect("<|channel|>", special=True)  # gpt-oss


def dialect_of(template: str) -> ToolDialect | None:
    """By what a chat template shows of it. None: it has tools, in a dialect that is not known here."""
    for dialect in (HERMES, MISTRAL, LLAMA, HARMONY):
        if dialect.begin in template:
            return dialect
    if "ipython" in template:  # Llama 3.2
        return LLAMA
    return None if re.search(r"\btools\b", template) else HERMES


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is new of the index-th call; its name comes once, at its beginning."""

    index: int
    name: str | None = None
    arguments: str = ""


# Where what follows is a call's arguments: an object's name first, or Mistral's newer form.
_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*(?P<json>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
    r"|(?P<plain>[\w.-]+)(?:\[CALL_ID\][\w-]+)?\[ARGS\]\s*(?=\{)"
)
_BETWEEN = " \t\r\n,;[]"


class _JsonEnd:
    """Feed it characters of a JSON object or what is left of one; it knows the last."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._quoted, self._escaped = depth, False, False

    def find(self, text: str) -> int | None:
        """Characters up to and with its end; None: it goes on."""
        for place, one in enumerate(text):
            if self._quoted:
                self._quoted = self._escaped or one != '"'
                self._escaped = one == "\\" and not self._escaped
            elif one == '"':
                self._quoted = True
            elif one in "{[":
                self._depth += 1
            elif one in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return None


class ToolReader:
    """Feed it text in pieces of any size: contents and calls come out.

    name: the text is the arguments of this function alone. inside: it is calls from the beginning. In either
    case nothing of it is content.
    known: names of functions; what is bare and calls no such one is content.
    """

    def __init__(
        self, dialect: ToolDialect, known: Collection[str] = (), inside: bool = False, name: str | None = None
    ) -> None:
        self._dialect, self._known = dialect, known
        self._forced = self._inside = inside or name is not None
        self._begun = False
        self._held = ""  # text that is not decided yet
        self._bare = False  # inside without a begin
        self._gap = False  # white space behind a call is not content
        self._arguments: _JsonEnd | None = None  # of the call that is read
        self._closing: _JsonEnd | None = None  # behind its arguments
        self._wrapped = False  # its arguments are part of an object
        self.calls = 0
        self.thought = ""  # in what was fed last; only Harmony's text has any
        self._out: list[CallDelta] = []
        self._content: list[str] = []
        if name is not None:
            self._call(name)
            self._expect_arguments(wrapped=False)

    def feed(self, text: str, last: bool = False) -> tuple[str, tuple[CallDelta, ...]]:
        """What is certain now: content, and what is new of each call. last: no more text comes."""
        self._held, self.thought = self._held + text, ""
        while self._step(last):
            pass
        if last and not self._forced:  # of a forced call, what a limit cut off before its arguments
            self._content.append(self._held)
        content, calls = "".join(self._content), tuple(self._out)
        self._content, self._out = [], []
        return content, calls

    def _step(self, last: bool) -> bool:
        if self._arguments:
            return self._read_arguments(self._arguments)
        if self._closing:
            return self._close(self._closing)
        return self._read_between(last) if self._inside else self._read_content(last)

    def _read_content(self, last: bool) -> bool:
        if self._gap:
            self._held = self._held.lstrip()
            self._gap = not self._held
        if self._dialect.bare and not self._begun:
            ahead = self._held.lstrip()
            if not ahead and not last:
                return False
            if ahead.startswith("{"):
                self._inside = self._bare = self._begun = True
                return True
        begin = self._dialect.begin
        place = self._held.find(begin)
        if place >= 0:
            self._content.append(self._held[:place].rstrip())
            self._held, self._inside = self._held[place + len(begin) :], True
            return True
        kept = 0 if last else _overlap(self._held, begin)
        cut = len(self._held) - kept
        white = len(self._held[:cut]) - len(self._held[:cut].rstrip()) if not last else 0
        self._content.append(self._held[: cut - white])  # white space before a call is not content
        self._held = self._held[cut - white :]
        self._begun |= bool(self._content[-1])
        return False

    def _read_between(self, last: bool) -> bool:
        begin, end, ahead = self._dialect.begin, self._dialect.end, self._held.lstrip()
        if begin and ahead.startswith(begin):
            self._held = ahead[len(begin) :]
            return True
        if begin and begin.startswith(ahead) and not last:
            return False
        held = ahead.lstrip(_BETWEEN)
        if end and held.startswith(end):
            self._held, self._inside, self._gap = held[len(end) :], False, True
            return True
        found = _HEAD.match(held)
        if found and self._fits(name := found["plain"] or json.loads(found["json"])):
            self._held = held[found.end() :]
            self._call(name)
            self._expect_arguments(wrapped=found["json"] is not None)
            return True
        if held.startswith("{") and (size := _JsonEnd().find(held)):
            return self._read_whole(held, size)
        if self._bare and held and not held.startswith("{"):
            self._inside = self._bare = False
            return True
        if last and self.calls == 0 and not self._bare:
            self._content.append(self._dialect.begin)  # it was no call, after all
        if last and self.calls and not held:
            self._held = ""
        return False

    def _read_whole(self, held: str, size: int) -> bool:
        """An object whose parts stand in another order, or that is no call."""
        self._held, name, arguments = held[size:], *_parts_of(held[:size])
        if name is None or not self._fits(name):
            self._content.append(held[:size])
            self._inside = self._bare = False
            return True
        self._call(name, arguments)
        return True

    def _fits(self, name: str) -> bool:
        return not self._bare or name in self._known

    def _call(self, name: str, arguments: str = "") -> None:
        self._out.append(CallDelta(self.calls, name, arguments))
        self.calls += 1

    def _expect_arguments(self, wrapped: bool) -> None:
        self._arguments, self._wrapped = _JsonEnd(), wrapped

    def _read_arguments(self, scan: _JsonEnd) -> bool:
        size = scan.find(self._held)
        told = self._held if size is None else self._held[:size]
        self._add_arguments(told)
        self._held = self._held[len(told) :]
        if size is None:
            return False
        self._arguments, self._closing = None, _JsonEnd(depth=1) if self._wrapped else None
        return True

    def _add_arguments(self, told: str) -> None:
        if told and self._out:  # of the same call: arguments are all that can follow its name
            self._out[-1] = replace(self._out[-1], arguments=self._out[-1].arguments + told)
        elif told:
            self._out.append(CallDelta(self.calls - 1, arguments=told))

    def _close(self, scan: _JsonEnd) -> bool:
        size = scan.find(self._held)
        self._held = "" if size is None else self._held[size:]
        self._closing = scan if size is None else None
        return size is not None


# Where a message of Harmony ends, and what may become one of these.
_MESSAGE_END = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|(?:start|channel)\|>)")
_MARKER_BEGUN = re.compile(r"<(?:\|(?:[a-z]+\|?)?)?\Z")
_RECIPIENT = re.compile(r"\bto=(?P<functions>functions\.)?(?P<name>[\w.-]+)")


class HarmonyReader(ToolReader):
    """Its messages one by one; a prompt ends within the header of the first.

    Messages to the user are content, analysis and what is written to other tools is thought.
    """

    def __init__(self, dialect: ToolDialect, known: Collection[str]) -> None:
        super().__init__(dialect, known)
        self._kind: Literal["header", "content", "thought", "call"] = "header"  # of what is read
        self._seen: set[str] = set()  # kinds there were

    def _step(self, last: bool) -> bool:
        if self._kind == "header":
            return self._read_header(last)
        if found := _MESSAGE_END.search(self._held):
            cut, size = found.span()
        else:
            begun = None if last else _MARKER_BEGUN.search(self._held)
            cut = size = begun.start() if begun else len(self._held)
        self._write(self._held[:cut])
        self._held, self._kind = self._held[size:], "header" if found else self._kind
        return found is not None

    def _read_header(self, last: bool) -> bool:
        ahead = self._held.lstrip()
        if not any(ahead.startswith(one) or one.startswith(ahead) for one in ("<|", "to=")):
            self._kind = "content"  # a text without a header
            return True
        header, message, behind = self._held.partition("<|message|>")
        if not message:
            self._held = "" if last else self._held  # a limit cut it off
            return False
        self._held = behind
        self._begin(header)
        return True

    def _begin(self, header: str) -> None:
        recipient = _RECIPIENT.search(header)
        if recipient and (recipient["functions"] or recipient["name"] in self._known):
            self._kind = "call"
            self._call(recipient["name"])
            return
        self._kind = "thought" if recipient or "<|channel|>analysis" in header else "content"
        if self._kind in self._seen:
            self._write("\n\n")
        self._seen.add(self._kind)

    def _write(self, text: str) -> None:
        if self._kind == "call":
            self._add_arguments(text)
        elif self._kind == "thought":
            self.thought += text
        else:
            self._content.append(text)


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` with which the marker begins."""
    return next((n for n in range(min(len(text), len(marker)), 0, -1) if text.endswith(marker[:n])), 0)


def _parts_of(written: str) -> tuple[str | None, str]:
    """Name and arguments of a call as a JSON object; (None, ""): it is none."""
    try:
        call: Any = json.loads(written)
    except ValueError:
        return None, ""
    if "function" in call and isinstance(call["function"], dict):
        call = call["function"]
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
    if not isinstance(name, str):
        return None, ""
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def forced_schema(functions: list[dict[str, Any]], name: str | None, most: int | None) -> dict[str, Any]:
    """Of the arguments of this function; else of a list of calls, from one to `most`."""
    if name is not None:
        return next(_parameters(one) for one in functions if one["name"] == name)
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for one in functions:
        parameters = dict(_parameters(one))
        definitions |= parameters.pop("$defs", {})
        parts = {"name": {"const": one["name"]}, "arguments": parameters}
        calls.append(
            {
                "type": "object",
                "properties": parts,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    bounds = {"minItems": 1} | ({} if most is None else {"maxItems": most})
    listed = {"type": "array", "items": {"anyOf": calls}, **bounds}
    return listed | ({"$defs": definitions} if definitions else {})


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    """Whatever it takes, an object."""
    return {"type": "object", **(function.get("parameters") or {})}


def tools_in_words(functions: list[dict[str, Any]]) -> str:
    """For templates that have no place for tools: what Hermes' models are told."""
    signatures = "\n".join(
        json.dumps({"type": "function", "function": one}, ensure_ascii=False) for one in functions
    )
    return (
        "You may call one or more functions to assist with the user query. Function signatures are within "
        f"<tools></tools> XML tags:\n<tools>\n{signatures}\n</tools>\n"
        "For each function call, return a JSON object with the function's name and arguments within "
        "<tool_call></tool_call> XML tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def calls_in_words(calls: list[dict[str, Any]]) -> str:
    """The calls of a turn, likewise; their arguments as values."""
    told = (json.dumps(one["function"], ensure_ascii=False) for one in calls)
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in told)


@dataclass(frozen=True, slots=True)
class ThinkingStyle:
    """begin, end: around what is thought. behind: what then leads to an answer.
    header: of an answer that calls no tools, whether anything was thought or not.
    """

    begin: str
    end: str
    behind: str
    header: str = ""

    def begun(self, rendering: str) -> bool:
        """Whether a prompt leaves thinking begun."""
        return rendering.rstrip().endswith(self.begin.rstrip())

    def closing(self, thought: str) -> str:
        """From a thought to the answer's header."""
        apart = "\n" if self.begin.endswith("\n") and not thought.endswith("\n") else ""
        return f"{apart}{self.end}{self.behind}"

    def skipped(self, rendering: str) -> str:
        """A prompt that the answer's header follows: templates without a switch leave thinking begun."""
        return f"{rendering.rstrip()}\n\n{self.end}{self.behind}" if self.begun(rendering) else rendering


TAGS = ThinkingStyle("<think>\n", "</think>", "\n\n")  # Qwen, DeepSeek, SmolLM3 and others
CHANNELS = ThinkingStyle(  # Harmony: gpt-oss
    "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant", "<|channel|>final<|message|>"
)


def style_of(template: str) -> ThinkingStyle | None:
    """None: nothing in it is about thinking."""
    if "<|channel|>" in template:
        return CHANNELS
    return TAGS if "<think>" in template or TAGS.end in template else None
