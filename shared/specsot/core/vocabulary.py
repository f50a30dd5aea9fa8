"""Reads from tokenizer.json which bytes every token writes."""

from __future__ import annotations

import builtins
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from specsot.errors import ModelError

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
Speller = Callable[[str], bytes | None]

_SPACE = "\u2581"  # sentencepiece's picture of a space


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens as bytes; two vocabularies are equal when their digests are.

    bytes:  of each token id what it writes, or None for tokens that are no text (special and added
            tokens, and the ids that only the model's logits have).
    digest: sha256 of all of it, in hex.
    """

    bytes: tuple[builtins.bytes | None, ...] = field(compare=False, repr=False)
    digest: str

    def __len__(self) -> int:
        return len(self.bytes)


def describe(tokens: Sequence[bytes | None]) -> Vocabulary:
    """A vocabulary of these tokens."""
    digest = hashlib.sha256()
    for token in tokens:
        digest.update(b"\xff" if token is None else len(token).to_bytes(4, "little") + token)
    return Vocabulary(tuple(tokens), digest.hexdigest())


def read_vocabulary(directory: Path, width: int | None = None) -> Vocabulary:
    """The vocabulary of `directory`/tokenizer.json, padded with None to `width` ids (the model's logits).

    Byte-level BPE and sentencepiece with byte fallback are understood.
    Raises ModelError for anything else, for a broken file, and for text tokens beyond `width`.
    """
    path = directory / "tokenizer.json"
    try:
        written = path.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(written)
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{path}: not a readable tokenizer ({error})") from error
    tokens = _token_bytes(path, json.loads(written), tokenizer.get_vocab(with_added_tokens=False))
    return describe(_fit(path, tokens, width))


def _token_bytes(path: Path, config: dict[str, Any], ids: dict[str, int]) -> list[bytes | None]:
    """Bytes per id; ids of added tokens stay None."""
    spell = speller(config)
    if spell is None:
        kind = config.get("model", {}).get("type")
        raise ModelError(
            f"{path}: {kind} is neither byte-level nor has byte fallback, its tokens have no bytes"
        )
    added = {entry["id"] for entry in config.get("added_tokens") or []}
    tokens: list[bytes | None] = [None] * (1 + max([*ids.values(), *added], default=-1))
    for token, number in ids.items():
        if number not in added:
            tokens[number] = spell(token) or None
    return tokens


def speller(config: Mapping[str, Any]) -> Speller | None:
    """The function from a token's name to its bytes that the decoder of a tokenizer.json stands for.

    None: its tokens have no bytes of their own.
    """
    parts = _decoder_parts(config.get("decoder"))
    if "ByteLevel" in parts:
        return _Alphabet().spell
    if config.get("model", {}).get("byte_fallback") or "ByteFallback" in parts:
        return _spell_piece
    return None


def _decoder_parts(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(_decoder_parts(part) for part in decoder.get("decoders", [])))


class _Alphabet:
    """GPT-2's 256 printable characters, one for each byte."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        self._byte = {chr(byte): byte for byte in printable}
        self._byte |= {chr(256 + place): byte for place, byte in enumerate(others)}

    def spell(self, token: str) -> bytes | None:
        try:
            return bytes(self._byte[character] for character in token)
        except KeyError:
            return None


def _spell_piece(token: str) -> bytes:
    fallback = _FALLBACK.fullmatch(token)
    if fallback:
        return bytes([int(fallback[1], 16)])
    return token.replace(_SPACE, " ").encode()


def _fit(path: Path, tokens: list[bytes | None], width: int | None) -> list[bytes | None]:
    """Exactly `width` tokens. Added tokens beyond it can be left out: they write no text."""
    if width is None:
        return tokens
    if any(token is not None for token in tokens[width:]):
        raise ModelError(f"{path}: {len(tokens)} tokens, but the model has logits for {width}")
    return (tokens + [None] * (width - len(tokens)))[:width]
