"""Renders conversations through a model's own chat template.

Refuses to know tokens and what the conversation is about.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from specsot.errors import InvalidRequest, ModelError
from specsot.params import Message

PLAIN = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

# Templates know thinking under either name; those that do not ignore both.
THINKING_OFF = {"enable_thinking": False, "thinking": False}


class TemplateRefused(InvalidRequest):
    """The template does not take these roles in this order."""


class ChatTemplate:
    """A Jinja chat template with the special tokens it may name (bos_token and so on).

    Compiled on first use, in a sandbox: a template comes with a model from somewhere.
    """

    def __init__(self, source: str = PLAIN, names: Mapping[str, str] | None = None) -> None:
        self._source = source
        self._names = {"bos_token": "", "eos_token": "", **(names or {})}

    def render(self, messages: Sequence[Message], answer: bool = True) -> str:
        """The whole conversation as text; `answer`: with the head of the assistant's next turn.

        Raises TemplateRefused with the template's own words.
        """
        from jinja2 import TemplateError

        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._compiled.render(
                messages=turns, add_generation_prompt=answer, **THINKING_OFF, **self._names
            )
        except (TemplateError, TypeError) as error:
            raise TemplateRefused(f"the model's chat template says: {error}", field="messages") from error

    @cached_property
    def _compiled(self) -> Any:
        from jinja2 import TemplateError

        environment = _environment()
        try:
            return environment.from_string(self._source)
        except TemplateError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error


def _environment() -> Any:
    """Jinja as chat templates expect it: the names and habits that Transformers gives them."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _write_json
    names: dict[str, Any] = {"raise_exception": _refuse, "strftime_now": _write_today}
    environment.globals.update(names)
    return environment


def _generation_tag() -> Any:
    """`{% generation %}` marks what the assistant wrote, for training; here it only renders its body."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    Generation.tags = {"generation"}
    return Generation


def _refuse(reason: str) -> str:
    from jinja2 import TemplateError

    raise TemplateError(reason)


def _write_today(shape: str) -> str:
    return datetime.now().strftime(shape)


def _write_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
