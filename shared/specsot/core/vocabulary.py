"""Reads from tokenizer.json which bytes every token writes, and tokenizes bytes that a grammar forces."""

from __future__ import annotations

import builtins
import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from specsot.errors import ModelError

# Tokens of fill-in-the-middle that end a generation, as in llama.cpp: padding, and the begin of a repository
# or of a file.
FIM_ENDS = (
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "<|file_sep|>",
)
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
Speller = Callable[[str], bytes | None]

_SPACE = "\u2581"  # sentencepiece's picture of a space


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens as bytes; two vocabularies are equal when their digests are.

    bytes:  of each token id what it writes, or None for tokens that are no text (special and added
            tokens, and the ids that only the model's logits have).
    digest: sha256 of all of it, in hex.
    unnamed: ids that the tokenizer does not know, ascending: rows that pad an lm_head to a round size.
    """

    bytes: tuple[builtins.bytes | None, ...] = field(compare=False, repr=False)
    digest: str
    unnamed: tuple[int, ...] = field(default=(), compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.bytes)


def describe(tokens: Sequence[bytes | None]) -> Vocabulary:
    digest = hashlib.sha256()
    for token in tokens:
        digest.update(b"\xff" if token is None else len(token).to_bytes(4, "little") + token)
    return Vocabulary(tuple(tokens), digest.hexdigest())


def read_vocabulary(directory: Path, width: int | None = None) -> Vocabulary:
    """The vocabulary of `directory`/tokenizer.json, padded with None to `width` ids (the model's logits).

    Byte-level BPE and sentencepiece with byte fallback are understood.
    Raises ModelError for anything else, for a broken file, and for text tokens beyond `width`.
    Members that share a process share what was read last, while the file is the same.
    """
    path = directory / "tokenizer.json"
    try:
        found = path.stat()
    except OSError as error:
        raise ModelError(f"{path}: not a readable tokenizer ({error})") from error
    return _read(path, width, (found.st_ino, found.st_mtime_ns, found.st_size))


@functools.lru_cache(maxsize=4)
def _read(path: Path, width: int | None, version: tuple[int, ...]) -> Vocabulary:
    try:
        written = path.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(written)
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{path}: not a readable tokenizer ({error})") from error
    tokens = _token_bytes(path, json.loads(written), tokenizer.get_vocab(with_added_tokens=False))
    known = describe(_fit(path, tokens, width))
    return replace(known, unnamed=_unnamed(tokenizer, len(known)))


def unnamed_ids(directory: Path, width: int) -> tuple[int, ...]:
    """The ids below `width` that `directory`/tokenizer.json does not know, ascending, whatever kind of
    tokenizer it describes. Empty if there is no such file. Raises ModelError for a broken one.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return ()
    try:
        return _unnamed(Tokenizer.from_file(str(path)), width)
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{path}: not a readable tokenizer ({error})") from error


def _unnamed(tokenizer: Tokenizer, width: int) -> tuple[int, ...]:
    named = set(tokenizer.get_vocab(with_added_tokens=True).values())
    return tuple(token for token in range(width) if token not in named)


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


@functools.lru_cache(maxsize=4)
def spelling_of(vocabulary: Vocabulary) -> Spelling:
    """The one of this vocabulary, shared by all grammars."""
    return Spelling(vocabulary)


class Spelling:
    """The tokens of a vocabulary by what they write; of several that write the same, the lowest id."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids: dict[bytes, int] = {}
        for token, text in enumerate(vocabulary.bytes):
            if text:
                self._ids.setdefault(text, token)
        self._longest = max(map(len, self._ids), default=0)

    def count(self, text: bytes, ceiling: int) -> int:
        """The least number of tokens that write `text`; `ceiling` when it is more, or none do."""
        return self.counts(text, ceiling)[0]

    def counts(self, text: bytes, ceiling: int) -> list[int]:
        """The same for what is left of `text` behind 0, 1, ... of its bytes."""
        counts = [0] * (len(text) + 1)
        for begin in range(len(text) - 1, -1, -1):
            tails = (counts[stop] for stop in self._stops(text, begin) if text[begin:stop] in self._ids)
            counts[begin] = min(1 + min(tails, default=ceiling), ceiling)
        return counts

    def split(self, text: bytes) -> tuple[int, ...]:
        """Greedy longest match, as far as the vocabulary goes."""
        tokens: list[int] = []
        begin = 0
        while begin < len(text):
            stops = reversed(self._stops(text, begin))
            stop = next((stop for stop in stops if text[begin:stop] in self._ids), None)
            if stop is None:
                break
            tokens.append(self._ids[text[begin:stop]])
            begin = stop
        return tuple(tokens)

    def _stops(self, text: bytes, begin: int) -> range:
        return range(begin + 1, min(begin + self._longest, len(text)) + 1)
