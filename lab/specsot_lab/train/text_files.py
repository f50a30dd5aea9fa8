"""Reads questions, conversations and plain text from files: JSON lines or text, with .zst if zstandard is
installed.

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
# A JSON object.
Fields = dict[str, Any]
# What one line of a file holds: a line of text, or a JSON object.
Item = str | Fields

ROWS_SUFFIX = ".npz"  # Rows of token ids, as `self_talk` and `specsot train` write them.
# Suffixes of the files that can be read, without that of compression.
SUFFIXES = (".jsonl", ".txt", ROWS_SUFFIX)
# Roles of messages in files, and the roles that the chat template knows.
ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}


def files_in(path: Path) -> list[Path]:
    """Return the file itself, or the readable files of a folder in the order of their names. A README.txt is
    left out.

    path: A file or a folder.
    Raises InvalidRequest if the path does not exist, or names no readable file.

    Folders are not searched recursively. A file of another suffix than SUFFIXES, with or without .zst, is not
    readable, also if it is named directly.
    """
    candidates = sorted(path.iterdir()) if path.is_dir() else [path]
    if not path.exists():
        raise InvalidRequest(f"{path}: no such file or directory", field="data")
    readable = [file for file in candidates if _suffix(file) in SUFFIXES and file.name != "README.txt"]
    if not readable:
        raise InvalidRequest(f"{path}: no {', '.join(SUFFIXES)} file there (nor one with .zst)", field="data")
    return readable


def items_in(path: Path) -> Iterator[Item]:
    """Yield the lines of a text file, or the JSON objects of a file of JSON lines. Blank lines are left out.

    path: The file.
    Raises ModelError with the number of a line that cannot be read.
    """
    return _read_items(path, lambda item: item)


def read_questions(path: Path, phrasings: Sequence[str]) -> list[str]:
    """Return each question of a file once, in order: questions of JSON lines as they are, lines of text in
    every phrasing.

    path: The file.
    phrasings: Templates in which "{}" stands for the line of text.
    Raises InvalidRequest if the file has no question, ModelError with the number of a line that cannot be
    read.

    Empty questions are left out: those of JSON objects that have no question. Repetitions after the first are
    left out.
    """

    def questions_of(item: Item) -> list[str]:
        """Return the questions of one item; one empty question for a JSON object that has no question.

        item: A line of text, or a JSON object.
        """
        return (
            [template.replace("{}", item) for template in phrasings]
            if isinstance(item, str)
            else [_question_of(item)]
        )

    questions = dict.fromkeys(
        question for template in _read_items(path, questions_of) for question in template if question
    )
    if not questions:
        raise InvalidRequest(f"{path}: no questions in it", field="questions")
    return list(questions)


def rows_of(path: Path, text: Text, length: int, group: int) -> Iterator[Row]:
    """Yield rows of a file's conversations and texts, or the rows that it stores.

    path: The file.
    text: The tokenizer.
    length: Maximum number of tokens of a row of plain text; a longer text becomes several rows of one group.
    group: Group of the first row; each further conversation or text has the next number.
    Raises ModelError with the number of a line that cannot be read, or for a damaged file of rows.

    A conversation gives one row, without any token if the assistant says nothing in it; its length is not
    limited. JSON objects that have neither text nor messages give no row, but use up a group. Rows of a
    stored file keep their groups, with `group` added.
    """
    if _suffix(path) == ROWS_SUFFIX:
        yield from (Row(row.tokens, row.learned, group + row.group) for row in load(path))
        return
    for row_group, content in enumerate(_read_items(path, _text_of_item), group):
        if isinstance(content, str):
            yield from _rows_of_tokens(text.encode_prompt(content), length, row_group)
        elif content:
            yield conversation(content, text, row_group)


def conversation(messages: Sequence[Message], text: Text, group: int) -> Row:
    """Return a conversation as one row, in the form of the chat template. The assistant's answers are
    learned.

    If the template changes an earlier turn, the row ends before that turn. A conversation without an answer
    gives an empty row.

    messages: The messages, in order.
    text: The tokenizer with the chat template.
    group: Group of the row.

    The prompt before each answer is not learned; the answer and what the template ends it with are. Messages
    after the last answer are left out.
    """
    parts: list[tuple[Sequence[int], bool]] = []
    rendered_so_far = ""
    for turn, message in enumerate(messages):
        if message.role != "assistant":
            continue
        prompt_text = text.render(messages[:turn])
        full_text = text.render(messages[: turn + 1], for_answer=False)
        if not (prompt_text.startswith(rendered_so_far) and full_text.startswith(prompt_text)):
            # The template rewrites earlier turns, so the row ends here.
            break
        parts += [
            (text.encode(prompt_text[len(rendered_so_far) :]), False),
            (text.encode(full_text[len(prompt_text) :]), True),
        ]
        rendered_so_far = full_text
    return row_of(parts or [((), False)], group)


def _rows_of_tokens(tokens: Sequence[int], length: int, group: int) -> Iterator[Row]:
    """Yield rows of a text, all of whose tokens are learned; nothing for an empty text.

    tokens: Token ids of the text.
    length: Maximum number of tokens of a row.
    group: Group of all these rows.
    """
    for first in range(0, len(tokens), length):
        yield row_of([(tokens[first : first + length], True)], group)


def _text_of_item(item: Item) -> str | list[Message]:
    """Return the text of an item, or the messages of its conversation; an empty list if it has neither.

    item: A line of text, or a JSON object with "text", with messages, or with a question and "output".
    Raises ValueError if its fields have other types.
    """
    return (
        item
        if isinstance(item, str)
        else _first_text(item, "text") or _messages(item) or _question_and_output(item)
    )


def _messages(item: Fields) -> list[Message]:
    """Return the messages of a JSON object; an empty list if it has none. Turns of unknown roles are left
    out.

    item: An object with `messages` (of role and content) or `conversations` (of from and value).
    Raises ValueError if these are not lists of objects.

    An object with both keys uses `messages`, unless these are empty. The roles "human" and "gpt" are read as
    "user" and "assistant"; a missing content is an empty text. Raises ValueError also if a role or a content
    is a list or an object.
    """
    turns: Any = item.get("messages") or item.get("conversations") or []
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in cast("list[Any]", turns)):
        raise ValueError("messages must be a list of objects, each with its role and content")
    roles_and_turns = [(_first_text(turn, "role", "from"), turn) for turn in cast("list[Fields]", turns)]
    return [
        Message(ROLES[role], _first_text(turn, "content", "value"))
        for role, turn in roles_and_turns
        if role in ROLES
    ]


def _question_and_output(item: Fields) -> list[Message]:
    """Return a question and its `output` as two messages; an empty list if either is missing.

    item: A JSON object.
    Raises ValueError if one of its fields is a list or an object.

    An empty question or output counts as missing. The roles are "user" and "assistant".
    """
    question = _question_of(item)
    output = _first_text(item, "output")
    return [Message("user", question), Message("assistant", output)] if question and output else []


def _question_of(item: Fields) -> str:
    """Return the question of a JSON object: its "question", "instruction" or "prompt" together with its
    "input", or else the first turn, or the first message of a user. Return an empty text if it has none of
    them.

    item: A JSON object.
    Raises ValueError if one of its fields has another type.

    "question", "instruction" and "prompt" are looked for in this order; an entry that is not a string is
    passed over. The input follows on a line of its own, unless it is missing or empty. Of "turns", only a
    list that is not empty is read.
    """
    for name in ("question", "instruction", "prompt"):
        if isinstance(item.get(name), str):
            return "\n".join(filter(None, (item[name], _first_text(item, "input"))))
    if (turns := item.get("turns")) and isinstance(turns, list):
        return _first_text({"turns[0]": turns[0]}, "turns[0]")
    return next((message.content for message in _messages(item) if message.role == "user"), "")


def _first_text(item: Fields, *names: str) -> str:
    """Return the first of some entries that is present, as a text; an empty text if none is present.

    item: A JSON object.
    names: Names of the entries, in the order in which they are looked for.
    Raises ValueError if the entry is a list or an object.

    An entry of null counts as missing. Numbers and truth values are converted to text.
    """
    name, value = next(((name, item[name]) for name in names if item.get(name) is not None), ("", ""))
    if isinstance(value, (list, dict)):
        raise ValueError(f"{name} must be a string")
    return str(value)


def _read_items(path: Path, read: Callable[[Item], T]) -> Iterator[T]:
    """Yield what a function returns for each line that is not blank.

    path: The file.
    read: Called with a line of a .txt file, or with the JSON object of another file's line. Its ValueError is
        reported with the number of the line.
    Raises ModelError with the number of a line that cannot be read.

    The line is stripped of white space at both ends; its number counts from 1. Bytes that are not UTF-8 are
    reported like any other line that cannot be read. Raises OSError if the file cannot be opened, and
    ModelError if it is compressed and zstandard is not installed.
    """
    with _open(path) as file:
        for line_number, line in enumerate(file, 1):
            try:
                if line_text := line.decode().strip():
                    yield read(line_text if _suffix(path) == ".txt" else _parse_object(line_text))
            except ValueError as error:
                raise ModelError(f"{path}:{line_number}: {error}") from None


def _parse_object(line: str) -> Fields:
    """Return a line as a JSON object.

    line: The line.
    Raises ValueError if it is not a JSON object.

    The error says "not JSON" with the parser's reason, or "must be a JSON object".
    """
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(item, dict):
        raise ValueError("must be a JSON object")
    return cast("Fields", item)


def _suffix(path: Path) -> str:
    """Return the suffix of a file's name, without that of compression: "a.jsonl.zst" -> ".jsonl". Return an
    empty string if the name has none.

    path: The file.
    """
    return Path(path.stem).suffix if path.suffix == ".zst" else path.suffix


def _open(path: Path) -> io.BufferedIOBase:
    """Open a file to read its bytes. A file whose name ends in .zst is decompressed.

    path: The file.
    Raises ModelError if the file is compressed, and zstandard is not installed.

    Raises OSError if the file cannot be opened.
    """
    if path.suffix != ".zst":
        return path.open("rb")
    try:
        import zstandard
    except ImportError:
        raise ModelError(f"{path}: to read it, install zstandard, or unpack it") from None
    return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(path.open("rb")))
