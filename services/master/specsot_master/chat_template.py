"""Renders a conversation by a model's chat template, as Transformers would, in a sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from specsot.errors import InvalidRequest, ModelError
from specsot.params import Message

# The template of a model without one of its own: "role: text" for each turn, an empty line between turns.
PLAIN = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

# Templates switch thinking off by either name, and ignore names that they do not know.
THINKING_OFF = {"enable_thinking": False, "thinking": False}


class TemplateRefused(InvalidRequest):
    """Raised if the template does not take a conversation, such as these roles in this order."""


class ChatTemplate:
    """A Jinja chat template with the special tokens that it may name.

    The template is compiled on first use, in a sandbox, because it is code that comes with a model.
    """

    def __init__(
        self,
        source: str = PLAIN,
        special_tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
    ) -> None:
        """Keep a template, without compiling it.

        source: the text of the template.
        special_tokens: texts of the special tokens by name, such as bos_token; bos_token and eos_token are ""
            if they are missing. None for no special tokens.
        tool_source: the text of the template that renders conversations with tools; None if `source` renders
            them.
        """
        self.source = source
        self.tool_source = source if tool_source is None else tool_source
        self._names = {"bos_token": "", "eos_token": "", **(special_tokens or {})}

    def render(self, messages: Sequence[Message], for_answer: bool = True) -> str:
        """Return the whole conversation as text, with thinking turned off. What is returned for no messages
        is up to the template.

        messages: the turns, oldest first.
        for_answer: True to end with the head of the assistant's next turn, False to end after the last turn.

        Raises TemplateRefused with the template's own message.
        """
        return self.render_turns([{"role": one.role, "content": one.content} for one in messages], for_answer)

    def render_turns(
        self, turns: Sequence[Mapping[str, Any]], for_answer: bool = True, **variables: Any
    ) -> str:
        """Return a conversation as text, whose turns may have any fields that the template reads.

        If the template refuses a system turn, as Gemma 2's does, its text becomes the beginning of the first
        user turn, and the template is tried once more. That needs a system turn first and a user's turn after
        it; otherwise the refusal is raised.

        turns: the turns, oldest first, each with at least "role" and "content".
        for_answer: True to end with the head of the assistant's next turn, False to end after the last turn.
        variables: further variables of the template; with a non-empty `tools`, the template for tools renders
            the turns.

        Raises TemplateRefused with the template's own message.
        """
        try:
            return self._render(turns, for_answer, variables)
        except TemplateRefused:
            if [turn["role"] for turn in turns[:2]] != ["system", "user"]:
                raise
        system, first, *others = turns
        first = {**first, "content": f"{system['content']}\n\n{first['content']}"}
        return self._render((first, *others), for_answer, variables)

    def _render(
        self, turns: Sequence[Mapping[str, Any]], for_answer: bool, variables: Mapping[str, Any]
    ) -> str:
        """Return rendered turns; thinking is off unless `variables` says otherwise. Every exception of the
        template becomes TemplateRefused.

        turns: the turns, oldest first.
        for_answer: True to end with the head of the assistant's next turn, False to end after the last turn.
        variables: further variables of the template, by name; a non-empty "tools" selects the template for
            tools.

        Raises TemplateRefused with the template's own message, and ModelError if the template does not
        compile.
        """
        special_tokens: dict[str, Any] = {**_ABSENT, **THINKING_OFF, **self._names, **variables}
        compiled = self._compiled_for_tools if variables.get("tools") else self._compiled
        messages = [_with_thinking(turn) for turn in turns]
        try:
            return compiled.render(messages=messages, add_generation_prompt=for_answer, **special_tokens)
        except Exception as error:  # A template is foreign code that may raise any exception.
            raise TemplateRefused(f"the model's chat template says: {error}", field="messages") from error

    @cached_property
    def _compiled(self) -> Any:
        """The compiled template for conversations without tools."""
        return _compile(self.source)

    @cached_property
    def _compiled_for_tools(self) -> Any:
        """The compiled template for conversations with tools."""
        return self._compiled if self.tool_source == self.source else _compile(self.tool_source)


# Transformers passes these as None where a request has none of them; templates test `tools is not none`.
_ABSENT: Mapping[str, Any] = {"tools": None, "documents": None}


def _with_thinking(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a turn whose reasoning also has the name "thinking", which gpt-oss's template reads.

    Transformers does the same.

    turn: a turn in OpenAI's format. It is returned unchanged if it has no "reasoning_content".
    """
    reasoning = turn.get("reasoning_content")
    return turn if reasoning is None else {"thinking": reasoning, **turn}


def _compile(source: str) -> Any:
    """Return the `jinja2.Template` of this source. It runs in a sandbox.

    source: the text of the template.

    Raises ModelError if the source is not a valid Jinja template.
    """
    from jinja2 import TemplateError

    try:
        return _environment().from_string(source)
    except TemplateError as error:
        raise ModelError(f"the model's chat template does not compile: {error}") from error


def _environment() -> Any:
    """Return a sandboxed Jinja environment with the functions and settings that Transformers provides.
    `raise_exception` raises TemplateError with the template's message, `strftime_now` formats the local time,
    `tojson` writes JSON without escaping characters beyond ASCII, and `{% generation %}` renders its body.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """The tag `{% generation %}`, which marks text for training; here it only renders its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            """Parse the tag, and return a node that renders its body.

            parser: Jinja's parser, at the tag's name.
            """
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(reason: str) -> str:
        """Raise TemplateError with the template's own message, for the function `raise_exception` of
        templates.

        reason: the message, as the template words it.
        """
        raise TemplateError(reason)

    def write_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Return a value as JSON, for the filter `tojson`. BREAK_MARK stays unescaped even if `ensure_ascii`
        is set.

        value: what the template writes.
        ensure_ascii: True to escape characters beyond ASCII, as `json.dumps` does by default.
        indent: spaces, or the text, by which nested values are indented; None for a single line.
        separators: the texts between items and after names; None for those of `json.dumps`.
        sort_keys: True to write the names of objects in alphabetical order.
        """
        written = json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return _ESCAPED_MARK.sub(lambda found: found[1] or BREAK_MARK, written) if ensure_ascii else written

    def write_today(time_format: str) -> str:
        """Return the present local time, for the function `strftime_now` of templates.

        time_format: a format of `strftime`.
        """
        return datetime.now().strftime(time_format)

    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = write_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = write_today
    return environment


# Marks control tokens that a client's text spells (`text.ControlTokens`). The mark is half of a surrogate
# pair, which no client's text contains: UTF-8 cannot encode it, and `mark` refuses text in which a JSON
# escape spells it.
BREAK_MARK = "\ud800"
# Finds the mark as `ensure_ascii` escapes it. It does not match an escaped backslash before "ud800" (group
# 1), nor the first half of a character such as U+10330, which is escaped as \ud800\udf30.
_ESCAPED_MARK = re.compile(r"(\\\\)|\\ud800(?!\\ud[c-f])")
