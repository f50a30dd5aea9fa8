"""What tokens write, for the kinds of tokenizer.json that models come with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specsot.core.vocabulary import describe, read_vocabulary
from specsot.errors import ModelError

TEXT = "[PLAN]\n1.<80><None>[-]NREM 睡眠 😴 naïve\n[END]"


def save(directory: Path, tokenizer: Tokenizer) -> Path:
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def sentencepiece(directory: Path) -> Path:
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "睡", "▁▁"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=[("▁", "a"), ("▁", "▁")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</end>"])
    return save(directory, tokenizer)


def byte_level(directory: Path) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["<tool>"])
    tokenizer.add_special_tokens(["<end>"])
    return save(directory, tokenizer)


def test_the_demo_tokens_write_the_text_they_encode(demo_model: Path) -> None:
    vocabulary = read_vocabulary(demo_model / "base")
    tokens = Tokenizer.from_file(str(demo_model / "base" / "tokenizer.json")).encode(TEXT).ids
    assert b"".join(vocabulary.bytes[token] or b"?" for token in tokens).decode() == TEXT
    assert vocabulary.bytes[:3] == (None, None, None)
    assert len(vocabulary) == 8192
    assert None not in vocabulary.bytes[3:]


def test_byte_level_covers_every_byte_once(tmp_path: Path) -> None:
    vocabulary = read_vocabulary(byte_level(tmp_path))
    assert sorted(text for text in vocabulary.bytes if text) == [bytes([byte]) for byte in range(256)]
    assert vocabulary.bytes[256:] == (None, None)


def test_sentencepiece_pieces_and_fallback_bytes(tmp_path: Path) -> None:
    vocabulary = read_vocabulary(sentencepiece(tmp_path))
    assert vocabulary.bytes[:2] == (None, None)
    assert vocabulary.bytes[2:258] == tuple(bytes([byte]) for byte in range(256))
    assert vocabulary.bytes[258:] == (b" ", b"a", b" a", "睡".encode(), b"  ", None)


def test_width_pads_with_nothing_and_counts_in_the_digest(tmp_path: Path) -> None:
    directory = byte_level(tmp_path)
    exact, wide = read_vocabulary(directory), read_vocabulary(directory, width=300)
    assert wide.bytes == exact.bytes + (None,) * 42
    assert wide.digest != exact.digest
    assert wide != exact
    assert read_vocabulary(directory, width=256).bytes == exact.bytes[:256]


def test_text_tokens_without_logits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="258 tokens, but the model has logits for 255"):
        read_vocabulary(byte_level(tmp_path), width=255)


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="WordLevel is neither byte-level nor has byte fallback"):
        read_vocabulary(save(tmp_path, Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))))


@pytest.mark.parametrize("content", [None, "", "{", "[]", json.dumps({"model": {"type": "New"}})])
def test_broken_files_are_refused_by_name(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a readable tokenizer"):
        read_vocabulary(tmp_path)


def test_the_digest_tells_where_tokens_begin() -> None:
    texts: list[list[bytes | None]] = [[b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"abc", None], [None, b"abc"]]
    assert len({describe(text).digest for text in texts}) == len(texts)
