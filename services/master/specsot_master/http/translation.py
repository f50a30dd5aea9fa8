"""Other APIs' bodies as bodies of chat completions: what their translations have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, cast

from pydantic import ValidationError

from specsot.errors import InvalidRequest
from specsot.params import check_length
from specsot_master.http.calls import HttpContext
from specsot_master.http.errors import said_of, way_to
from specsot_master.http.openai_requests import words_in
from specsot_master.http.openai_schemas import ChatBody
from specsot_master.http.openai_tools import functions_of, render

AGENT_TOKENS = 8192  # tokens of an answer to an agent that names no limit; not measured
SPARE_TOKENS, SPARE_PAGES = 64, 2  # what a ring needs beside prompt and answer: a tree's nodes, pages begun


def chat_body(told: dict[str, Any], messages: str) -> ChatBody:
    """What says nothing is left out. messages: what the caller calls them. Raises InvalidRequest."""
    given = {name: value for name, value in told.items() if value is not None and value != []}
    try:
        return ChatBody.model_validate({"messages": [], **given})
    except ValidationError as error:
        complaint = error.errors()[0]
        way = list(way_to(complaint, complaint["loc"], {"messages": [], **given}))[
            :2
        ]  # further ones are ours
        field = ".".join(way).replace("messages", messages, 1)
        raise InvalidRequest(f"{field}: {said_of(complaint)}", field) from None


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


async def within_context(chat: ChatBody, context: HttpContext, wanted: int) -> ChatBody:
    """With at most so many tokens for the answer, or as many as model and KV hold behind the prompt: agents
    name the limits of larger models. Where there is no room at all it is left to be refused.
    """
    positions, pages = context.model.max_positions, context.counter.info().pages
    held = min(positions, (pages.total - SPARE_PAGES) * pages.rows) if pages and pages.total else positions
    check_length(positions, characters=words_in(chat))
    room = held - await asyncio.to_thread(prompt_tokens, chat, context) - SPARE_TOKENS
    return chat.model_copy(update={"max_completion_tokens": min(wanted, room) if room > 0 else wanted})


def prompt_tokens(chat: ChatBody, context: HttpContext) -> int:
    """As they are counted for a direct answer. Raises InvalidRequest."""
    return len(context.text.encode(render(chat.messages, functions_of(chat), context.text)))
