"""Tools described in Hermes' words, for chat templates that have no place for tools."""

from __future__ import annotations

import json
from typing import Any


def tools_in_words(functions: list[dict[str, Any]]) -> str:
    """Return the instructions of Hermes' models that offer these functions."""
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
    """Return past calls in Hermes' form. The `arguments` of each call are a JSON value, not text."""
    told = (json.dumps(one["function"], ensure_ascii=False) for one in calls)
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in told)
