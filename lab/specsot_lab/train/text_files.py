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
    """Return the file itself, or a folder's files of known kinds, in the order of their names.

    path: a file or folder. Raises InvalidRequest if it does not exist or has no such file.
    """
    candidates = sorted(path.iterdir()) if path.is_dir() else [path]
    if not path.exists():
        raise InvalidRequest(f"{path}: no such file or directory", field="data")
    readable = [file for file in candidates if _kind(file) in KINDS and file.name != "README.txt"]
    if not readable:
        raise InvalidRequest(f"{path}: no {', '.join(KINDS)} file there (nor one with .zst)", field="data")
    return readable


def items_in(path: Path) -> Iterator[Item]:
    """Yield the lines of text, or the JSON objects, of a file; blank lines are left out. Raises ModelError
    with the line's number.
    """
    return _each(path, lambda item: item)


def read_questions(path: Path, phrasings: Sequence[str]) -> list[str]:
    """Return each question of a file once: JSON lines as they are, lines of text in every phrasing.

    path: the file. phrasings: templates in which "{}" stands for the line.
    Raises InvalidRequest if there is no question in the file.
    """

    def worded(item: Item) -> list[str]:
        """Return the questions of one item; one empty question for a JSON object without a question."""
        return (
            [template.replace("{}", item) for template in phrasings]
            if isinstance(item, str)
            else [_ask(item)]
        )

    questions = dict.fromkeys(
        question for template in _each(path, worded) for question in template if question
    )
    if not questions:
        raise InvalidRequest(f"{path}: no questions in it", field="questions")
    return list(questions)


def rows_of(path: Path, text: Text, length: int, group: int) -> Iterator[Row]:
    """Yield rows of a file's conversations and texts, or stored rows.

    path: the file. text: the tokenizer. length: tokens at which plain text is cut into rows. group: number of
        the first row's group; each conversation or text has the next number.
    Raises ModelError for an unreadable line.
    """
    if _kind(path) == ROWS_KIND:
        yield from (Row(row.tokens, row.learned, group + row.group) for row in load(path))
        return
    for row_group, content in enumerate(_each(path, _text_of_item), group):
        if isinstance(content, str):
            yield from _windows(text.encode_bare(content), length, row_group)
        elif content:
            yield conversation(content, text, row_group)


def conversation(messages: Sequence[Message], text: Text, group: int) -> Row:
    """Return a conversation through the chat template as one row; what the assistant says is learned.

    If the template changes an earlier turn, the row ends before that turn. A conversation without an answer
    gives an empty row.

    messages: in order. text: the tokenizer with the chat template. group: number of the row's group.
    """
    parts: list[tuple[Sequence[int], bool]] = []
    rendered_so_far = ""
    for turn, message in enumerate(messages):
        if message.role != "assistant":
            continue
        prompt_text = text.render(messages[:turn])
        full_text = text.render(messages[: turn + 1], for_answer=False)
        if not (prompt_text.startswith(rendered_so_far) and full_text.startswith(prompt_text)):
            break  # a template that rewrites what it said before: the turns so far
        parts += [
            (text.encode(prompt_text[len(rendered_so_far) :]), False),
            (text.encode(full_text[len(prompt_text) :]), True),
        ]
        rendered_so_far = full_text
    return row_of(parts or [((), False)], group)


def _windows(tokens: Sequence[int], length: int, group: int) -> Iterator[Row]:
    """Yield a text as rows of at most `length` tokens, all of which are learned; none for an empty text.

    tokens: token ids. group: number of the group of all these rows.
    """
    for first in range(0, len(tokens), length):
        yield row_of([(tokens[first : first + length], True)], group)


def _text_of_item(item: Item) -> str | list[Message]:
    """Return the text of an item, or its conversation; an empty list if it has neither."""
    return item if isinstance(item, str) else _string(item, "text") or _messages(item) or _answered(item)


def _messages(item: Fields) -> list[Message]:
    """Return the messages of a JSON object: `messages` (role, content) or `conversations` (from, value);
    turns of unknown roles are left out.

    Raises ValueError if they are no list of objects.
    """
    turns: Any = item.get("messages") or item.get("conversations") or []
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in cast("list[Any]", turns)):
        raise ValueError("messages must be a list of objects, each with its role and content")
    roles_and_turns = [(_string(turn, "role", "from"), turn) for turn in cast("list[Fields]", turns)]
    return [
        Message(ROLES[role], _string(turn, "content", "value"))
        for role, turn in roles_and_turns
        if role in ROLES
    ]


def _answered(item: Fields) -> list[Message]:
    """Return a question and its `output` as two messages; none if either is missing."""
    question = _ask(item)
    output = _string(item, "output")
    return [Message("user", question), Message("assistant", output)] if question and output else []


def _ask(item: Fields) -> str:
    """Return the question that a JSON line holds, or the first user turn of a conversation; an empty text if
    there is none.
    """
    for name in ("question", "instruction", "prompt"):
        if isinstance(item.get(name), str):
            return "\n".join(filter(None, (item[name], _string(item, "input"))))
    if (turns := item.get("turns")) and isinstance(turns, list):
        return _string({"turns[0]": turns[0]}, "turns[0]")
    return next((message.content for message in _messages(item) if message.role == "user"), "")


def _string(item: Fields, *names: str) -> str:
    """Return the first of these entries that is present, as a text; an empty text if none is. Raises
    ValueError for lists and objects.
    """
    name, value = next(((name, item[name]) for name in names if item.get(name) is not None), ("", ""))
    if isinstance(value, (list, dict)):
        raise ValueError(f"{name} must be a string")
    return str(value)


def _each(path: Path, read: Callable[[Item], T]) -> Iterator[T]:
    """Yield what `read` returns for every line that is not blank; JSON lines are parsed first.

    path: the file. read: called with a line of text or a JSON object. Raises ModelError with the line's
        number.
    """
    with _open(path) as file:
        for line_number, line in enumerate(file, 1):
            try:
                if line_text := line.decode().strip():
                    yield read(line_text if _kind(path) == ".txt" else _fields(line_text))
            except ValueError as error:
                raise ModelError(f"{path}:{line_number}: {error}") from None


def _fields(line: str) -> Fields:
    """Return a line as a JSON object. Raises ValueError for anything else."""
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(item, dict):
        raise ValueError("must be a JSON object")
    return cast("Fields", item)


def _kind(path: Path) -> str:
    """Return the file's suffix, without that of compression: "a.jsonl.zst" -> ".jsonl"."""
    return Path(path.stem).suffix if path.suffix == ".zst" else path.suffix


def _open(path: Path) -> io.BufferedIOBase:
    """Open a file to read bytes, decompressed if its name ends in .zst. Raises ModelError if zstandard is not
    installed.
    """
    if path.suffix != ".zst":
        return path.open("rb")
    try:
        import zstandard
    except ImportError:
        raise ModelError(f"{path}: to read it, install zstandard, or unpack it") from None
    return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(path.open("rb")))
