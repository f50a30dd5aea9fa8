"""The tokenizer of a model directory, as plain functions between text and token ids.

Refuses to know weights, requests, and code that comes with a model. Reads local files only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from specsot.errors import InvalidRequest, ModelError, SpecsotError
from specsot.params import Message
from specsot_master.text.control import BREAK_MARK, ControlTokens
from specsot_master.text.detokenizer import Detokenizer
from specsot_master.text.spelling import TokenBytes
from specsot_master.text.template import PLAIN, ChatTemplate

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Text:
    """Encode, decode, render. Special tokens are written by templates and never show up in text.

    spell:   the bytes of one token.
    end_ids: tokens with which the model ends an answer, ascending.
    vocabulary: how many ids the tokenizer knows.
    """

    def __init__(self, directory: str | Path, limit: int | None = None) -> None:
        """The text side of a Hugging Face model directory. limit: how many ids the model knows, where its
        tokenizer may know more. Raises ModelError.
        """
        folder = Path(directory)
        config = _read_json(folder / "tokenizer_config.json")
        names = _special_names(config)
        self._tokenizer = _load_tokenizer(folder)
        self._template = ChatTemplate(_find_template(folder, config), names)
        self.spell = TokenBytes(self._tokenizer)
        self.end_ids = tuple(sorted(_find_end_ids(folder, self._tokenizer, names)))
        self.vocabulary = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        self._limit = None if limit is None or max(self._largest(), 0) < limit else limit

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of exactly this text: nothing is put before or behind it. In a rendering what is marked
        is plain text. Raises InvalidRequest for a token that the model does not have.
        """
        return self._check(self._control.encode(text) if BREAK_MARK in text else self._split(text, bare=True))

    def encode_bare(self, text: str) -> tuple[int, ...]:
        """Token ids of a text that is to be gone on with: what the tokenizer itself puts before it (such as
        a bos token) included. Control tokens may stand in it. Raises InvalidRequest as `encode`.
        """
        return self._check(self._split(text, bare=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of these tokens; special ones are left out."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self.decode)

    def render(self, messages: Sequence[Message], answer: bool = True) -> str:
        """A conversation through the chat template; what in its contents spells a control token is marked.

        Raises TemplateRefused.
        """
        marked = [Message(message.role, self.mark(message.content)) for message in messages]
        return self._template.render(marked, answer)

    def mark(self, words: str) -> str:
        """Somebody's words as they stand in a rendering."""
        return self._control.mark(words)

    def cut(self, rendering: str, end: int) -> tuple[int, int]:
        """The last control token before `end` at which a rendering can be cut: where it begins and ends. Both
        parts, the second one beginning with it, then have the tokens of the whole. (0, 0): there is none.
        """
        return self._control.last(rendering, end)

    def _split(self, text: str, bare: bool) -> tuple[int, ...]:
        """Others' Python goes on meanwhile."""
        try:
            return tuple(self._tokenizer.encode_batch_fast([text], add_special_tokens=not bare)[0].ids)
        except TypeError as error:  # what tokenizers makes of a string that UTF-8 cannot write
            raise InvalidRequest("the text holds half of a surrogate pair", field="prompt") from error

    def _check(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        if self._limit is not None and (last := max(tokens, default=0)) >= self._limit:
            name = self._tokenizer.id_to_token(last)
            raise InvalidRequest(
                f"{name!r} is token {last} of the tokenizer, the model's are 0 .. {self._limit - 1}",
                field="prompt",
            )
        return tokens

    def _largest(self) -> int:
        added = max(self._tokenizer.get_added_tokens_decoder(), default=0)
        return max(added, self._tokenizer.get_vocab_size(with_added_tokens=False) - 1)

    @cached_property
    def _control(self) -> ControlTokens:
        added = self._tokenizer.get_added_tokens_decoder()
        said = self._sample()
        ids = (id for id, one in added.items() if one.special or id in self.end_ids or one.content in said)
        return ControlTokens(self._tokenizer, ids)

    def _sample(self) -> str:
        """A short conversation, by which a template shows what its turns begin and end with."""
        roles = ("user", "assistant", "user")
        try:
            return self._template.render([Message(role, "-") for role in roles], answer=False)
        except SpecsotError:
            return ""


def _load_tokenizer(folder: Path) -> Any:
    """tokenizer.json as it is (milliseconds); older formats through Transformers, which converts them."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        return _convert_tokenizer(folder)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{path}: not a readable tokenizer ({error})") from error
    tokenizer.no_truncation()  # as some were saved
    tokenizer.no_padding()
    return tokenizer


def _convert_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        return loaded.backend_tokenizer
    except Exception as error:  # whatever a converter meets in a broken directory
        line = str(error).strip().partition("\n")[0]
        raise ModelError(f"{folder}: no tokenizer.json, and no tokenizer to convert ({line})") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ModelError(f"{path}: not JSON ({error})") from error


def _special_names(config: dict[str, Any]) -> dict[str, str]:
    """bos_token and friends; older files write them as {"content": ...}."""
    found = {name: config.get(name) for name in _SPECIAL_NAMES}
    plain = {name: value["content"] if isinstance(value, dict) else value for name, value in found.items()}
    return {name: value for name, value in plain.items() if isinstance(value, str)}


def _find_template(folder: Path, config: dict[str, Any]) -> str:
    """A file of its own, a string, or one of several named ones; a plain form when there is none."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else PLAIN


def _find_end_ids(folder: Path, tokenizer: Any, names: dict[str, str]) -> set[int]:
    """eos ids of the generation config, the model config and the tokenizer; they may all differ."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    written = tokenizer.token_to_id(names["eos_token"]) if "eos_token" in names else None
    return found if written is None else found | {int(written)}
