"""Reads the bytes of every token from tokenizer.json, and tokenizes bytes that a grammar determines."""

from __future__ import annotations

import builtins
import functools
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specsot.errors import ModelError

# Fill-in-the-middle tokens that end a generation, as in llama.cpp: padding, and the beginning of a repository
# or of a file.
FIM_ENDS = (
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "<|file_sep|>",
)
# Name of a sentencepiece token that stands for a single byte: "<0x0A>".
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Returns the bytes of a token's name in tokenizer.json, or None if the name has no bytes.
Speller = Callable[[str], bytes | None]

# The character with which sentencepiece writes a space.
_SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The vocabulary of a tokenizer: the bytes of every token id. Two vocabularies are equal if their digests
    are.

    bytes: for each token id, the bytes of its text. None for ids without text: special and added tokens, and
        ids for which only the model has logits.
    digest: SHA-256 of `bytes`, in hex.
    unnamed: ids that the tokenizer does not know, ascending. Such ids pad an lm_head to a round size.
    """

    bytes: tuple[builtins.bytes | None, ...] = field(compare=False, repr=False)
    digest: str
    unnamed: tuple[int, ...] = field(default=(), compare=False, repr=False)

    def __len__(self) -> int:
        """Number of token ids."""
        return len(self.bytes)


def describe(tokens: Sequence[bytes | None]) -> Vocabulary:
    """Return the vocabulary of these tokens, with its digest and without unnamed ids.

    tokens: by token id, the bytes of the token's text, or None for a token without text.

    The digest differs if any token's bytes differ, or if a token without text takes the place of one with
    empty text.
    """
    digest = hashlib.sha256()
    for token in tokens:
        digest.update(b"\xff" if token is None else len(token).to_bytes(4, "little") + token)
    return Vocabulary(tuple(tokens), digest.hexdigest())


def read_vocabulary(directory: Path, width: int | None = None) -> Vocabulary:
    """Return the vocabulary of `directory`/tokenizer.json.

    Byte-level BPE and sentencepiece with byte fallback are supported. The file is parsed at every call; see
    `specsot.checkpoint.kept_vocabulary`.

    width: number of the model's logits; the vocabulary is padded with None, or cut, to so many ids. With
        None, the vocabulary has as many ids as the tokenizer.
    directory: the model's directory.

    Raises ModelError for other tokenizers, for an unreadable file, and if tokens with text have ids from
    `width` on.

    Ids that the tokenizer does not know are in `unnamed`. A file that cannot be parsed is unreadable, and so
    is a missing one.
    """
    path = directory / "tokenizer.json"
    # The tokenizers library would also build the merges: for 152 thousand tokens it takes 1.3 s of processor
    # time, reading the JSON 0.4 s. A list is the vocabulary of a Unigram model: a token's place is its id.
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        listed = config["model"]["vocab"]
        ids = (
            {piece: token for token, (piece, _) in enumerate(listed)} if isinstance(listed, list) else listed
        )
        added = frozenset(entry["id"] for entry in config.get("added_tokens") or [])
        named = added.union(ids.values())
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelError(f"{path}: not a readable tokenizer ({error})") from error
    known = describe(_fit(path, _token_bytes(path, config, ids, added), width))
    return replace(known, unnamed=unnamed_ids(named, len(known)))


def unnamed_ids(named: Collection[int], width: int) -> tuple[int, ...]:
    """Return the ids below `width` that no token of a tokenizer has, ascending.

    named: the ids of all tokens, added tokens included.
    width: number of ids to check, from 0 on.
    """
    return tuple(sorted(set(range(width)).difference(named)))


def _token_bytes(
    path: Path, config: dict[str, Any], ids: Mapping[str, int], added: Collection[int]
) -> list[bytes | None]:
    """Return the bytes of each token id. Added tokens, and ids between others that have no token, have None.

    path: the tokenizer.json, for error messages.
    config: the parsed tokenizer.json.
    ids: token id by the token's name in the model's vocabulary, which may list added tokens, too.
    added: ids of added tokens.

    Raises ModelError if the tokenizer is neither byte-level nor has byte fallback.

    A token whose name is empty or cannot be spelled has None too. Without tokens, the list is empty.
    """
    spell = speller(config)
    if spell is None:
        kind = config.get("model", {}).get("type")
        raise ModelError(
            f"{path}: {kind} is neither byte-level nor has byte fallback, its tokens have no bytes"
        )
    tokens: list[bytes | None] = [None] * (1 + max([*ids.values(), *added], default=-1))
    for token, number in ids.items():
        if number not in added:
            tokens[number] = spell(token) or None
    return tokens


def speller(config: Mapping[str, Any]) -> Speller | None:
    """Return the function that maps a token's name in tokenizer.json to the token's bytes.

    config: the parsed tokenizer.json, whose decoder determines the mapping.

    Returns None if the tokenizer is neither byte-level nor has byte fallback, so that its tokens have no
    bytes.

    The function returns None for a name that has no bytes. The dictionary is not changed. A byte-level
    decoder has precedence over byte fallback.
    """
    parts = _decoder_parts(config.get("decoder"))
    if "ByteLevel" in parts:
        return _Alphabet().spell
    if config.get("model", {}).get("byte_fallback") or "ByteFallback" in parts:
        return _spell_piece
    return None


def _decoder_parts(decoder: dict[str, Any] | None) -> set[str]:
    """Return the types of a decoder and of the decoders that it consists of; an empty set for None.

    decoder: the "decoder" of a parsed tokenizer.json, such as {"type": "ByteLevel"}.
    """
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(_decoder_parts(part) for part in decoder.get("decoders", [])))


class _Alphabet:
    """GPT-2's byte-level alphabet of 256 printable characters, one for each byte.

    Printable bytes are written as themselves. The others are written, in ascending order, as the characters
    from 256 on: byte 0x00 is "\\u0100", and a space (0x20) is "\\u0120".
    """

    def __init__(self) -> None:
        """Compute the byte of each character of the alphabet."""
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        # What `str.translate` makes of each character: the character whose number is the byte. Characters
        # below 256 that are not printable, such as a space, are not of the alphabet: they become one that
        # Latin-1 cannot encode.
        self._characters: dict[int, int | str] = dict.fromkeys(range(256), "\uffff")
        self._characters |= {byte: byte for byte in printable}
        self._characters |= {256 + place: byte for place, byte in enumerate(others)}

    def spell(self, token: str) -> bytes | None:
        r"""Return the bytes of a token's name, or None if a character is not of the alphabet.

        token: the token's name in tokenizer.json, such as "\\u0120the" for " the".
        """
        try:
            return token.translate(self._characters).encode("latin-1")
        except UnicodeEncodeError:
            return None


def _spell_piece(token: str) -> bytes:
    r"""Return the bytes of a sentencepiece token: "<0x0A>" is one byte, other names are text.

    token: the token's name in tokenizer.json. Its "\\u2581" stands for a space.

    Both cases of hexadecimal digits are accepted. Never returns None.
    """
    fallback = _FALLBACK.fullmatch(token)
    if fallback:
        return bytes([int(fallback[1], 16)])
    return token.replace(_SPACE, " ").encode()


def _fit(path: Path, tokens: list[bytes | None], width: int | None) -> list[bytes | None]:
    """Pad or cut the tokens to `width` ids, or return them unchanged if `width` is None.

    Added tokens from `width` on may be left out, because they have no text. Raises ModelError if a token with
    text would be left out.

    path: the tokenizer.json, for error messages.
    tokens: by token id, the bytes of the token or None.
    width: number of the model's logits, or None.

    The result has exactly `width` entries unless `width` is None.
    """
    if width is None:
        return tokens
    if any(token is not None for token in tokens[width:]):
        raise ModelError(f"{path}: {len(tokens)} tokens, but the model has logits for {width}")
    return (tokens + [None] * (width - len(tokens)))[:width]


@functools.lru_cache(maxsize=4)
def spelling_of(vocabulary: Vocabulary) -> Spelling:
    """Return the spelling of a vocabulary, which all grammars share. The last four results are cached.

    vocabulary: the bytes of every token id.
    """
    return Spelling(vocabulary)


class Spelling:
    """Maps bytes to tokens of a vocabulary.

    ids: the token of each text. If several tokens have the same bytes, the lowest id counts.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Collect the tokens that have text.

        vocabulary: the bytes of every token id. Tokens without text are never used.
        """
        self.ids: dict[bytes, int] = {}
        for token, text in enumerate(vocabulary.bytes):
            if text:
                self.ids.setdefault(text, token)
        self._longest = max(map(len, self.ids), default=0)

    def count(self, text: bytes, ceiling: int) -> int:
        """Return the smallest number of tokens that spell `text`.

        Returns `ceiling` if more tokens than that are needed, or if no tokens spell the text.

        text: the bytes to spell; empty bytes take 0 tokens.
        ceiling: the largest number of tokens that is of interest.
        """
        return self.counts(text, ceiling)[0]

    def counts(self, text: bytes, ceiling: int) -> list[int]:
        """Return `count` for every suffix of `text`: entry i is for the bytes from i on, the last entry is 0.

        Computed from the end: with the tokens a, b and ab, the text "aab" has the counts [2, 1, 1, 0].

        text: the bytes to spell.
        ceiling: the largest number that an entry can have, see `count`.

        A text that no tokens spell counts as `ceiling`, and so does every number above it.
        """
        counts = [0] * (len(text) + 1)
        for begin in range(len(text) - 1, -1, -1):
            tails = (counts[stop] for stop in self._stops(text, begin) if text[begin:stop] in self.ids)
            counts[begin] = min(1 + min(tails, default=ceiling), ceiling)
        return counts

    def split(self, text: bytes) -> tuple[int, ...]:
        """Tokenize `text` by greedy longest match, and return the token ids.

        Returns the tokens of the beginning that can be spelled: with the tokens a and ab, the text "aabc"
        yields the tokens of a and ab. Empty if no token begins the text.

        text: the bytes to tokenize.

        The longest token at each place is taken, even if a shorter one would let more of the text be spelled.
        """
        tokens: list[int] = []
        begin = 0
        while begin < len(text):
            stops = reversed(self._stops(text, begin))
            stop = next((stop for stop in stops if text[begin:stop] in self.ids), None)
            if stop is None:
                break
            tokens.append(self.ids[text[begin:stop]])
            begin = stop
        return tuple(tokens)

    def _stops(self, text: bytes, begin: int) -> range:
        """Return the possible ends of a token that begins at byte `begin`: as far as the longest token
        reaches. Empty at the end of the text.

        text: the bytes to spell.
        begin: index of the token's first byte.
        """
        return range(begin + 1, min(begin + self._longest, len(text)) + 1)
