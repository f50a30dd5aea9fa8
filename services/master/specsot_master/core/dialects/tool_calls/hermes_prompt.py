"""Tools described in words like those of Hermes' models, for chat templates that have no place for tools."""

from __future__ import annotations

import json
from typing import Any


def tools_in_words(functions: list[dict[str, Any]], example: str | None = None) -> str:
    """Return the instructions that offer functions. The text names the functions between <tools> and
    </tools>, and then says how to write a call.

    functions: the offered functions, in OpenAI's format; each is listed as a line of JSON.
    example: a call as the model's template writes it; None asks for calls in the form of Hermes' models.
    """
    signatures = "\n".join(
        json.dumps({"type": "function", "function": one}, ensure_ascii=False) for one in functions
    )
    offered = (
        "You may call one or more functions to assist with the user query. Function signatures are within "
        f"<tools></tools> XML tags:\n<tools>\n{signatures}\n</tools>\n"
    )
    if example is not None:
        return f"{offered}Write function calls, with their names and arguments, in this form:\n{example}"
    return (
        f"{offered}For each function call, return a JSON object with the function's name and arguments "
        "within <tool_call></tool_call> XML tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def calls_in_words(calls: list[dict[str, Any]]) -> str:
    """Return past calls in Hermes' form, separated by line breaks; "" for no calls.

    calls: calls in OpenAI's format, whose `arguments` are JSON values, not text.
    """
    encoded_calls = (json.dumps(one["function"], ensure_ascii=False) for one in calls)
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in encoded_calls)
