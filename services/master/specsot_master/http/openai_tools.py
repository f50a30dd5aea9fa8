"""Function calling: conversations with tools as prompts, and what a model writes as calls.

Such a request is rendered here, to token ids, and answered directly: tools never plan.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specsot.errors import InvalidRequest
from specsot.params import Ask, Form, Mode
from specsot_master.core.openai_responses import ChoiceDelta
from specsot_master.core.tool_calls import (
    CallDelta,
    ToolDialect,
    ToolReader,
    calls_in_words,
    forced_schema,
    tools_in_words,
)
from specsot_master.http.openai_requests import (
    check_ids,
    common_fields,
    copies_of,
    forms_in,
    limits_of,
    logprobs_of,
    position_limit_of,
    text_of,
)
from specsot_master.http.openai_schemas import ChatBody, NamedTool, Turn
from specsot_master.text import Text

MOST_CALLS = 16  # calls of an answer that must call: a small model might go on for ever


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one call's answers are read. named: the one function that must be called; required: any must."""

    dialect: ToolDialect
    known: tuple[str, ...]
    named: str | None = None
    required: bool = False
    parallel: bool = True

    def reader(self) -> ToolReader:
        if self.named or self.required:
            return ToolReader(ToolDialect(), self.known, self.required, self.named)
        return self.dialect.reader(self.known)


def uses_tools(body: ChatBody) -> bool:
    """It offers some, or a turn of the past used some."""
    return offers_tools(body) or any(turn.tool_calls or turn.role == "tool" for turn in body.messages)


def offers_tools(body: ChatBody) -> bool:
    return bool(body.tools) and body.tool_choice != "none"


def tool_use(body: ChatBody, text: Text) -> ToolUse | None:
    """None where no tool may be called. Raises InvalidRequest."""
    must = isinstance(body.tool_choice, NamedTool) or body.tool_choice == "required"
    if must and not body.tools:
        raise InvalidRequest("tool_choice needs tools", "tool_choice")
    if not offers_tools(body):
        return None
    known, choice, dialect = (
        tuple(one.function.name for one in body.tools or ()),
        body.tool_choice,
        text.tools,
    )
    named = choice.function.name if isinstance(choice, NamedTool) else None
    if named is not None and named not in known:
        raise InvalidRequest(f"tool_choice: no tool is called {named!r}", "tool_choice")
    forced = named is not None or choice == "required"
    if dialect is None and not forced:
        raise InvalidRequest(
            "tools: how this model writes calls is not known here (Hermes, Qwen, Llama 3, Mistral, Harmony): "
            'set tool_choice to "required", to a function, or to "none"',
            "tools",
        )
    if forms := forms_in(body):
        raise InvalidRequest(f"tools: an answer of a form ({forms[0][0]}) calls none", "tools")
    parallel = body.parallel_tool_calls is not False
    return ToolUse(dialect or ToolDialect(), known, named, choice == "required", parallel)


def tool_asks(body: ChatBody, use: ToolUse | None, mode: Mode, text: Text, positions: int) -> list[Ask]:
    """mode: where the body names none. Raises InvalidRequest."""
    shared: dict[str, Any] = common_fields(body, mode)
    if body.specsot and body.specsot.mode == "sot":
        raise InvalidRequest("tools: mode sot plans, and a plan calls no tools", "tools")
    functions = functions_of(body)
    limits = limits_of(body, body.max_completion_tokens, body.max_tokens)
    rendering = render(body.messages, functions, text)
    if use and use.named is not None:
        rendering += use.dialect.head(use.named)
    held = position_limit_of(body, positions)
    text.check_fits(rendering, held)
    tokens = text.encode(rendering)
    check_ids([tokens], held, limits)
    shared |= {"mode": "direct", "logprobs": logprobs_of(body)}
    if use and (use.named is not None or use.required):
        schema = forced_schema(functions, use.named, MOST_CALLS if use.parallel else 1)
        shared["form"] = Form("json_schema", (json.dumps(schema),))
    elif use and use.dialect.special:
        shared["skip_special_tokens"] = False
    return copies_of(Ask(tokens=tokens, limits=limits, **shared), body)


def render(
    turns: Sequence[Turn],
    functions: list[dict[str, Any]],
    text: Text,
    thinks: bool = False,
    effort: str | None = None,
) -> str:
    """Through the model's template; in words, where that has no place for tools. thinks, effort: see Text.

    Raises InvalidRequest.
    """
    told = [_told(turn, f"messages.{n}") for n, turn in enumerate(turns)]
    if text.has_tools:
        tools = [{"type": "function", "function": one} for one in functions]
        return text.render_turns(told, tools, thinks, effort)
    return text.render_turns(_in_words(told, functions), [], thinks, effort)


def functions_of(body: ChatBody) -> list[dict[str, Any]]:
    offered = (body.tools or ()) if offers_tools(body) else ()
    return [one.function.model_dump(exclude_none=True) for one in offered]


def _told(turn: Turn, field: str) -> dict[str, Any]:
    """A turn as templates expect it: arguments of calls are values."""
    told: dict[str, Any] = {"role": "system" if turn.role == "developer" else turn.role}
    told["content"] = text_of(turn, f"{field}.content")
    if turn.name:
        told["name"] = turn.name
    if turn.reasoning_content:
        told["reasoning_content"] = turn.reasoning_content
    if turn.tool_call_id:
        told["tool_call_id"] = turn.tool_call_id
    if turn.tool_calls:
        told["tool_calls"] = [
            {
                "id": one.id,
                "type": "function",
                "function": {
                    "name": one.function.name,
                    "arguments": _arguments(one.function.arguments, field),
                },
            }
            for one in turn.tool_calls
        ]
    return told


def _arguments(written: str, field: str) -> Any:
    try:
        return json.loads(written or "{}")
    except ValueError:
        name = f"{field}.tool_calls"
        raise InvalidRequest(f"{name}: arguments must be JSON", name) from None


def _in_words(told: list[dict[str, Any]], functions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Hermes' words in the texts of turns; answers of tools become the user's."""
    turns: list[dict[str, Any]] = []
    if functions:
        system = told.pop(0)["content"] if told[0]["role"] == "system" else ""
        turns.append({"role": "system", "content": f"{system}\n\n{tools_in_words(functions)}".lstrip()})
    for turn in told:
        role, content = turn["role"], turn["content"]
        if calls := turn.get("tool_calls"):
            content = f"{content}\n{calls_in_words(calls)}".lstrip()
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        if turns and role == "user" == turns[-1]["role"]:
            turns[-1]["content"] += f"\n{content}"
        else:
            turns.append({"role": role, "content": content})
    return turns


@dataclass(slots=True)
class ToolAnswer:
    """One answer as it is told: what it calls, and its content."""

    use: ToolUse
    reader: ToolReader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = self.use.reader()

    def tell(self, piece: ChoiceDelta) -> ChoiceDelta:
        content, calls = self.reader.feed(piece.text, last=piece.reason is not None)
        told, thought = tuple(map(self._told, calls)), piece.thought + self.reader.thought
        return replace(piece, text=content, thought=thought, calls=told, reason=self.reason(piece.reason))

    def reason(self, reason: str | None) -> str | None:
        """OpenAI's: a function that was named ends with "stop"."""
        called = self.reader.calls and self.use.named is None
        return "tool_calls" if reason == "stop" and called else reason

    def whole(self, choice: dict[str, Any]) -> dict[str, Any]:
        content, deltas = self.reader.feed(choice["message"]["content"], last=True)
        told = map(self._told, deltas)
        calls = [{name: one[name] for name in ("id", "type", "function")} for one in told]
        more = {"content": content or None, "tool_calls": calls} if calls else {"content": content}
        if self.reader.thought:
            more["reasoning_content"] = self.reader.thought
        message = choice["message"] | more
        return choice | {"message": message, "finish_reason": self.reason(choice["finish_reason"])}

    def _told(self, one: CallDelta) -> dict[str, Any]:
        if one.name is None:
            return {"index": one.index, "function": {"arguments": one.arguments}}
        id = secrets.token_hex(8)[:9]  # nine letters or digits: Mistral's templates want them so
        function = {"name": one.name, "arguments": one.arguments}
        return {"index": one.index, "id": id, "type": "function", "function": function}
