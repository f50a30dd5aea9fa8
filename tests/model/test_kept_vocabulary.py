"""A vocabulary that is kept in the cache is the one that tokenizer.json has."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from specsot.checkpoint import kept_vocabulary
from specsot.checkpoint.kept_vocabulary import decode, encode, vocabulary_of
from specsot.core.vocabulary import Vocabulary, describe, read_vocabulary
from specsot.errors import ModelError


@pytest.fixture
def base(demo_model: Path, tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    shutil.copytree(demo_model / "base", tmp_path / "model", symlinks=False)
    return tmp_path / "model"


def forget() -> None:
    """As a process that begins."""
    kept_vocabulary._find.cache_clear()


def files_of(cache: Path) -> list[Path]:
    return sorted((cache / "cache" / "specsot" / "vocabularies").iterdir())


def test_a_later_process_reads_what_an_earlier_one_kept(base: Path, tmp_path: Path, monkeypatch) -> None:
    first = vocabulary_of(base, 8192)
    forget()
    monkeypatch.setattr(kept_vocabulary, "read_vocabulary", None)
    kept = vocabulary_of(base, 8192)
    assert kept is not first
    expected = read_vocabulary(base, 8192)
    assert (kept.bytes, kept.digest, kept.unnamed) == (expected.bytes, expected.digest, expected.unnamed)
    assert len(files_of(tmp_path)) == 1


def test_a_changed_tokenizer_and_another_width_are_read_anew(base: Path, tmp_path: Path) -> None:
    before = vocabulary_of(base, 8192)
    assert vocabulary_of(base, 8192) is before, "members of one process share what is read"
    assert len(vocabulary_of(base, 8200)) == 8200
    file = base / "tokenizer.json"
    file.write_text(file.read_text().replace('"the"', '"thé"'))
    assert vocabulary_of(base, 8192).bytes == read_vocabulary(base, 8192).bytes
    assert len(files_of(tmp_path)) == 3


def test_a_file_that_disappears_meanwhile_does_not_keep_a_vocabulary_from_being_kept(
    base: Path, tmp_path: Path
) -> None:
    """As the temporary file of another process that starts at the same time."""
    folder = tmp_path / "cache" / "specsot" / "vocabularies"
    folder.mkdir(parents=True)
    (folder / "gone").symlink_to(folder / "nowhere")
    vocabulary_of(base, 8192)
    assert len(files_of(tmp_path)) == 2


@pytest.mark.parametrize("damage", [slice(0, 0), slice(0, 40), slice(0, -1), slice(1, None)])
def test_a_part_of_a_file_is_never_used(base: Path, tmp_path: Path, damage: slice) -> None:
    expected = vocabulary_of(base, 8192).bytes
    (file,) = files_of(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[damage])
    forget()
    assert vocabulary_of(base, 8192).bytes == expected
    assert file.read_bytes() == whole


def test_a_folder_that_cannot_be_written_costs_time_alone(base: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    assert vocabulary_of(base, 8192).bytes == read_vocabulary(base, 8192).bytes


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        vocabulary_of(tmp_path, 300)


@pytest.mark.parametrize("tokens", [(), (None,), (b"", None, b"a\n", b"\xff\x00")])
def test_any_vocabulary_survives(tokens: tuple[bytes | None, ...]) -> None:
    known = describe(tokens)
    known = Vocabulary(known.bytes, known.digest, (0, 7))
    found = decode(encode(known))
    assert (found.bytes, found.digest, found.unnamed) == (known.bytes, known.digest, known.unnamed)
