"""Questions and conversations are read as they were meant; what cannot be read is named by its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from specsot.errors import InvalidRequest, ModelError
from specsot_lab.train.settings import HeadPlan, Learning
from specsot_lab.train.text_files import files_in, items_in, read_questions, rows_of
from specsot_master.text import Text


@pytest.fixture(scope="module")
def text(demo_model: Path) -> Text:
    return Text(demo_model / "base")


def written(folder: Path, content: str | bytes, name: str = "given.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("line", "question"),
    [
        ('{"question": "Why?"}', "Why?"),
        ('{"instruction": "Add", "input": "1, 2"}', "Add\n1, 2"),
        ('{"prompt": "Square it.", "input": 3}', "Square it.\n3"),
        ('{"prompt": "Why?", "input": null}', "Why?"),
        ('{"turns": ["First?", "Then?"]}', "First?"),
        ('{"conversations": [{"from": "gpt", "value": "Hi"}, {"from": "human", "value": "Why?"}]}', "Why?"),
    ],
)
def test_every_form_of_a_question_is_read(line: str, question: str, tmp_path: Path) -> None:
    assert read_questions(written(tmp_path, line), ["{}"]) == [question]


@pytest.mark.parametrize("line", ['{"turns": []}', '{"output": "Yes."}', '{"messages": []}', "{}", " "])
def test_a_line_without_a_question_is_passed_over(line: str, text: Text, tmp_path: Path) -> None:
    path = written(tmp_path, line)
    with pytest.raises(InvalidRequest, match="no questions"):
        read_questions(path, ["{}"])
    assert list(rows_of(path, text, 64, 0)) == []


@pytest.mark.parametrize(
    "line",
    [
        '{"messages": ["hi"]}',
        '{"messages": "hi"}',
        '{"messages": [{"role": ["user"], "content": "hi"}]}',
        '{"conversations": [{"from": "human", "value": {"hi": 1}}]}',
        '{"prompt": "Why?", "input": ["a"], "output": "So."}',
        '{"turns": [{"role": "user"}]}',
        '"hi"',
        "hi",
        b'{"question": "caf\xe9"}',
    ],
)
def test_what_cannot_be_read_is_named_by_its_line(line: str | bytes, text: Text, tmp_path: Path) -> None:
    path = written(tmp_path, b'{"question": "Why?"}\n' + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(ModelError, match=r"given\.jsonl:2: "):
        read_questions(path, ["{}"])
    with pytest.raises(ModelError, match=r"given\.jsonl:2: "):
        list(rows_of(path, text, 64, 0))


def test_items_are_lines_of_text_or_objects(tmp_path: Path) -> None:
    assert list(items_in(written(tmp_path, " tides \r\n\nice\n", "given.txt"))) == ["tides", "ice"]
    assert list(items_in(written(tmp_path, '{"any": [1]}\n'))) == [{"any": [1]}]
    with pytest.raises(ModelError, match=r"given\.txt:2: .*utf-8"):
        list(items_in(written(tmp_path, b"tides\ncaf\xe9\n", "given.txt")))


def test_packed_files_are_read_the_same(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    packed = zstandard.ZstdCompressor().compress(b"tides\nice\n")
    assert list(items_in(written(tmp_path, packed, "given.txt.zst"))) == ["tides", "ice"]


def test_what_cannot_be_is_refused_by_the_name_of_its_flag() -> None:
    with pytest.raises(InvalidRequest, match="learning-rate must be > 0"):
        Learning(rate=-1)
    with pytest.raises(InvalidRequest, match="draft-vocab must be >= 1"):
        HeadPlan(vocabulary=0)
    with pytest.raises(InvalidRequest, match="intermediate must be >= 1"):
        HeadPlan(intermediate=-4)


def test_a_file_that_is_not_there_is_no_file_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"none: no such file or directory$"):
        files_in(tmp_path / "none")
