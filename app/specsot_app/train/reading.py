"""Questions, conversations and plain text from files: JSON lines or text, .zst too where zstandard is there.

Refuses to know models; only `rows_of` needs a tokenizer.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from specsot.errors import InvalidRequest, ModelError
from specsot.params import Message
from specsot_app.train.rows import Row, row_of
from specsot_master.prompts.generic import render_chat
from specsot_master.text import Text

KINDS = (".jsonl", ".txt")
ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}


def files_in(path: Path) -> list[Path]:
    """The file itself, or a folder's files of known kinds. Raises InvalidRequest."""
    found = sorted(path.iterdir()) if path.is_dir() else [path]
    known = [one for one in found if _kind(one) in KINDS and one.name != "README.txt"]
    if not known:
        raise InvalidRequest(f"{path}: no {', '.join(KINDS)} file there (nor one with .zst)", field="data")
    return known


def read_questions(path: Path, phrasings: Sequence[str]) -> list[str]:
    """Questions of a file: JSON lines as they are, lines of text in every phrasing."""
    found: dict[str, None] = {}
    for item in _items(path):
        worded = [each.replace("{}", item) for each in phrasings] if isinstance(item, str) else [_ask(item)]
        found |= dict.fromkeys(filter(None, worded))
    if not found:
        raise InvalidRequest(f"{path}: no questions in it", field="questions")
    return list(found)


def rows_of(path: Path, text: Text, length: int, group: int) -> Iterator[Row]:
    """Rows of a file's conversations and texts; their groups count on from `group`."""
    for number, item in enumerate(_items(path), group):
        if isinstance(item, str) or "text" in item:
            yield from _windows(
                text.encode_bare(item if isinstance(item, str) else str(item["text"])), length, number
            )
        elif messages := _messages(item):
            yield conversation(messages, text, number)


def conversation(messages: Sequence[Message], text: Text, group: int) -> Row:
    """A conversation through the chat template; what the assistant says is learned."""
    parts: list[tuple[Sequence[int], bool]] = []
    written = ""
    for turn, message in enumerate(messages):
        if message.role != "assistant":
            continue
        asked = render_chat(text, tuple(messages[:turn]))
        answered = text.render(messages[: turn + 1], answer=False)
        if not (asked.startswith(written) and answered.startswith(asked)):
            break  # a template that rewrites what it said before: the turns so far
        parts += [(text.encode(asked[len(written) :]), False), (text.encode(answered[len(asked) :]), True)]
        written = answered
    return row_of(parts or [((), False)], group)


def _windows(tokens: Sequence[int], length: int, group: int) -> Iterator[Row]:
    for first in range(0, len(tokens), length):
        yield row_of([(tokens[first : first + length], True)], group)


def _messages(item: dict[str, Any]) -> list[Message]:
    """messages (role, content), conversations (from, value), or instruction, input and output."""
    turns = item.get("messages") or item.get("conversations")
    if isinstance(turns, list):
        named = ((one.get("role", one.get("from")), one.get("content", one.get("value"))) for one in turns)
        return [Message(cast(Any, ROLES[role]), str(content)) for role, content in named if role in ROLES]
    if "output" not in item:
        return []
    return [Message("user", _ask(item)), Message("assistant", str(item["output"]))]


def _ask(item: dict[str, Any]) -> str:
    """The question that a JSON line holds; the first user turn of a conversation."""
    for name in ("question", "instruction", "prompt"):
        if isinstance(item.get(name), str):
            return "\n".join(filter(None, (item[name], item.get("input", ""))))
    if isinstance(item.get("turns"), list):
        return str(item["turns"][0])
    return next((message.content for message in _messages(item) if message.role == "user"), "")


def _items(path: Path) -> Iterator[str | dict[str, Any]]:
    """Lines of text, or JSON objects; blank lines are none. Raises ModelError with the line's number."""
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            if _kind(path) == ".txt":
                yield line.strip()
                continue
            try:
                item = json.loads(line)
            except ValueError as error:
                raise ModelError(f"{path}:{number}: not JSON ({error})") from None
            if not isinstance(item, dict):
                raise ModelError(f"{path}:{number}: must be a JSON object")
            yield cast("dict[str, Any]", item)


def _kind(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == ".zst" else path.suffix


def _open(path: Path) -> io.TextIOBase:
    if path.suffix != ".zst":
        return path.open(encoding="utf-8")
    try:
        import zstandard
    except ImportError:
        raise ModelError(f"{path}: to read it, install zstandard (specsot[train]), or unpack it") from None
    return io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(path.open("rb")), encoding="utf-8")
