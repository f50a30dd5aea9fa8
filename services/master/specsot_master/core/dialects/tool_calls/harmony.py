"""Reads OpenAI's Harmony, which gpt-oss writes: messages with a header that names a channel or a function.

The package openai-harmony is not used: it reads token ids of its own vocabulary, which it downloads when it
starts, while an answer comes here as text of whatever tokenizer the model's folder holds.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

from specsot_master.core.dialects.tool_calls.arguments import ArgumentStream
from specsot_master.core.dialects.tool_calls.forms import CallForm
from specsot_master.core.dialects.tool_calls.reading import CallReader

# The mark with which the header of a message begins.
HARMONY_MARK = "<|channel|>"
# The form of gpt-oss's calls. `HarmonyReader` reads them; the form only serves to force calls.
HARMONY = CallForm(
    "named",
    openers=(HARMONY_MARK,),
    head=("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"),
)
# Where a message ends: a mark, or the header of the next message.
_MESSAGE_END = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|(?:start|channel)\|>)")
# The beginning of a mark at the end of a text, which later text may complete.
_MARK_START = re.compile(r"<(?:\|(?:[a-z]+\|?)?)?\Z")
# The function or the other tool to which a message is addressed.
_RECIPIENT = re.compile(r"\bto=(?P<functions>functions\.)?(?P<name>[\w.-]+)")


class HarmonyReader(CallReader):
    """Reads an answer of gpt-oss.

    The prompt ends within the header of the first message. Messages to the user are content. Analysis, and
    what is written to other tools, is a thought: `thought` holds that of the text that was fed last.

        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
            -> CallDelta(0, "f", '{"a": 1}')
    """

    def __init__(self, function_names: Collection[str], only_one: bool = False) -> None:
        """Create a reader.

        function_names: the names of the offered functions, which the model may call without "functions.".
        only_one: True if the answer ends with its first call, so that whatever follows that call is dropped.
        """
        super().__init__(only_one)
        self._known = function_names
        self._kind: Literal["header", "content", "thought", "call"] = "header"  # Of the message that is read.
        self._seen: set[str] = set()  # The kinds of messages so far.
        self._stream = ArgumentStream()

    @property
    def has_ended(self) -> bool:
        """True if the answer ends with its first call, and that call is complete."""
        return self._only_one and self.calls > 0 and self._kind != "call"

    def _step(self) -> bool:
        """Read the next part of a message. Return False if that takes more text, or if the answer has ended.
        Text that may be the beginning of a mark is held back unless no more text comes. Return True if a
        header was read or a message ended.
        """
        if self.has_ended:
            self._held = ""
            return False
        if self._kind == "header":
            return self._read_header()
        if found := _MESSAGE_END.search(self._held):
            cut, size = found.span()
        else:
            mark_beginning = None if self._last else _MARK_START.search(self._held)
            cut = size = mark_beginning.start() if mark_beginning else len(self._held)
        self._write(self._held[:cut])
        self._held = self._held[size:]
        if found:
            self._finish()
            self._kind = "header"
        return found is not None

    def _read_header(self) -> bool:
        """Read the header of a message; a text without one is content. Return False if the header is
        incomplete, and drop it if no more text comes. Text counts as without a header unless it begins, after
        white space, with "<|" or "to=", or may still do so. Return True if a message has begun.
        """
        ahead = self._held.lstrip()
        if not any(ahead.startswith(one) or one.startswith(ahead) for one in ("<|", "to=")):
            self._kind = "content"  # A text without a header.
            return True
        header, message, rest = self._held.partition("<|message|>")
        if not message:
            self._held = "" if self._last else self._held  # A limit cut the header off.
            return False
        self._held = rest
        self._begin(header)
        return True

    def _begin(self, header: str) -> None:
        """Begin a message. A message to an offered function, or to one with "functions.", is a call, whose
        delta is added. A message to another tool, or on the channel of analysis, is a thought; every other
        message is content. A blank line is written before the second and each later thought or content.

        header: the text of its header, without the mark that ends it.
        """
        recipient = _RECIPIENT.search(header)
        if recipient and (recipient["functions"] or recipient["name"] in self._known):
            self._kind = "call"
            self._stream = ArgumentStream()
            self._add_call(recipient["name"])
            return
        self._kind = "thought" if recipient or "<|channel|>analysis" in header else "content"
        if self._kind in self._seen:
            self._write("\n\n")
        self._seen.add(self._kind)

    def _finish(self) -> None:
        """Finish the message: the arguments of a call are closed if they are incomplete; nothing happens for
        other messages.
        """
        if self._kind == "call" and not self._stream.done:
            self._write("", last=True)

    def _write(self, text: str, last: bool = False) -> None:
        """Add text to the message's call, thought or content. Text after a call's complete arguments is
        dropped. Thoughts are added to `thought`.

        text: the next text of the message.
        last: True if the message ends.
        """
        if self._kind == "call":
            if not self._stream.done:
                self._add_arguments(self._stream.feed(text, last))
        elif self._kind == "thought":
            self.thought += text
        else:
            self._content.append(text)
