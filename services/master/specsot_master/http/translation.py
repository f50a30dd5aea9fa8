"""Other APIs' bodies as bodies of chat completions: what their translations have in common."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

from pydantic import ValidationError

from specsot.errors import InvalidRequest
from specsot_master.http.openai_schemas import ChatBody


def chat_body(told: dict[str, Any], messages: str) -> ChatBody:
    """What says nothing is left out. messages: what the caller calls them. Raises InvalidRequest."""
    given = {name: value for name, value in told.items() if value is not None and value != []}
    try:
        return ChatBody.model_validate({"messages": [], **given})
    except ValidationError as error:
        complaint = error.errors()[0]
        field = ".".join(str(part) for part in complaint["loc"][:2])
        field = field.replace("messages", messages, 1)
        said = complaint["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{field}: {said}", field) from None


def text_in(content: Any, kinds: Collection[str], field: str) -> str:
    """A string, or the texts of parts of these kinds. Raises InvalidRequest."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = cast("list[Any]", content) if isinstance(content, list) else [content]
    told: list[str] = []
    for part in parts:
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
        if kind not in kinds or not isinstance(text, str):
            raise InvalidRequest(f"{field}: only blocks of text are served here, not {kind or 'this'}", field)
        told.append(text)
    return "".join(told)
