"""Questions, conversations and plain text from files: JSON lines or text, .zst too where zstandard is there.

Only `rows_of` needs a tokenizer.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from specsot.errors import InvalidRequest, ModelError
from specsot.params import Message
from specsot_lab.train.rows import Row, load, row_of
from specsot_master.text import Text

T = TypeVar("T")
Fields = dict[str, Any]
Item = str | Fields

ROWS_KIND = ".npz"  # Rows of token ids, as `self_talk` and `specsot train` write them.
KINDS = (".jsonl", ".txt", ROWS_KIND)
ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}


def files_in(path: Path) -> list[Path]:
    """The file itself, or a folder's files of known kinds. Raises InvalidRequest."""
    found = sorted(path.iterdir()) if path.is_dir() else [path]
    if not path.exists():
        raise InvalidRequest(f"{path}: no such file or directory", field="data")
    known = [one for one in found if _kind(one) in KINDS and one.name != "README.txt"]
    if not known:
        raise InvalidRequest(f"{path}: no {', '.join(KINDS)} file there (nor one with .zst)", field="data")
    return known


def items_in(path: Path) -> Iterator[Item]:
    """Lines of text, or JSON objects; blank lines are none. Raises ModelError with the line's number."""
    return _each(path, lambda item: item)


def read_questions(path: Path, phrasings: Sequence[str]) -> list[str]:
    """Questions of a file: JSON lines as they are, lines of text in every phrasing."""

    def worded(item: Item) -> list[str]:
        return [each.replace("{}", item) for each in phrasings] if isinstance(item, str) else [_ask(item)]

    found = dict.fromkeys(question for each in _each(path, worded) for question in each if question)
    if not found:
        raise InvalidRequest(f"{path}: no questions in it", field="questions")
    return list(found)


def rows_of(path: Path, text: Text, length: int, group: int) -> Iterator[Row]:
    """Rows of a file's conversations and texts, or stored rows; their groups count on from `group`."""
    if _kind(path) == ROWS_KIND:
        yield from (Row(row.tokens, row.learned, group + row.group) for row in load(path))
        return
    for number, said in enumerate(_each(path, _error_text), group):
        if isinstance(said, str):
            yield from _windows(text.encode_bare(said), length, number)
        elif said:
            yield conversation(said, text, number)


def conversation(messages: Sequence[Message], text: Text, group: int) -> Row:
    """A conversation through the chat template; what the assistant says is learned."""
    parts: list[tuple[Sequence[int], bool]] = []
    written = ""
    for turn, message in enumerate(messages):
        if message.role != "assistant":
            continue
        asked = text.render(messages[:turn])
        answered = text.render(messages[: turn + 1], for_answer=False)
        if not (asked.startswith(written) and answered.startswith(asked)):
            break  # a template that rewrites what it said before: the turns so far
        parts += [(text.encode(asked[len(written) :]), False), (text.encode(answered[len(asked) :]), True)]
        written = answered
    return row_of(parts or [((), False)], group)


def _windows(tokens: Sequence[int], length: int, group: int) -> Iterator[Row]:
    for first in range(0, len(tokens), length):
        yield row_of([(tokens[first : first + length], True)], group)


def _error_text(item: Item) -> str | list[Message]:
    """A text, or a conversation; empty: neither."""
    return item if isinstance(item, str) else _string(item, "text") or _messages(item) or _answered(item)


def _messages(item: Fields) -> list[Message]:
    """messages (role, content) or conversations (from, value)."""
    turns: Any = item.get("messages") or item.get("conversations") or []
    if not isinstance(turns, list) or not all(isinstance(one, dict) for one in cast("list[Any]", turns)):
        raise ValueError("messages must be a list of objects, each with its role and content")
    named = [(_string(one, "role", "from"), one) for one in cast("list[Fields]", turns)]
    return [Message(ROLES[role], _string(one, "content", "value")) for role, one in named if role in ROLES]


def _answered(item: Fields) -> list[Message]:
    question = _ask(item)
    output = _string(item, "output")
    return [Message("user", question), Message("assistant", output)] if question and output else []


def _ask(item: Fields) -> str:
    """The question that a JSON line holds; the first user turn of a conversation. Empty: none."""
    for name in ("question", "instruction", "prompt"):
        if isinstance(item.get(name), str):
            return "\n".join(filter(None, (item[name], _string(item, "input"))))
    if (turns := item.get("turns")) and isinstance(turns, list):
        return _string({"turns[0]": turns[0]}, "turns[0]")
    return next((message.content for message in _messages(item) if message.role == "user"), "")


def _string(item: Fields, *names: str) -> str:
    """What the first of these that is there says; empty: none is. Raises ValueError for lists and objects."""
    name, value = next(((name, item[name]) for name in names if item.get(name) is not None), ("", ""))
    if isinstance(value, (list, dict)):
        raise ValueError(f"{name} must be a string")
    return str(value)


def _each(path: Path, read: Callable[[Item], T]) -> Iterator[T]:
    """What is read from every line that is not blank. Raises ModelError with the line's number."""
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                if written := line.decode().strip():
                    yield read(written if _kind(path) == ".txt" else _fields(written))
            except ValueError as error:
                raise ModelError(f"{path}:{number}: {error}") from None


def _fields(line: str) -> Fields:
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(item, dict):
        raise ValueError("must be a JSON object")
    return cast("Fields", item)


def _kind(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == ".zst" else path.suffix


def _open(path: Path) -> io.BufferedIOBase:
    if path.suffix != ".zst":
        return path.open("rb")
    try:
        import zstandard
    except ImportError:
        raise ModelError(f"{path}: to read it, install zstandard, or unpack it") from None
    return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(path.open("rb")))
