"""Control tokens (ends of turns, roles, ends of text): only a template writes them, nobody's words do.

Refuses to know templates. In a rendering a mark, which no text can hold, stands within whatever spells a
control token without being one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from specsot.errors import InvalidRequest

BREAK_MARK = "\ud800"  # half a surrogate pair: neither JSON's text nor a protobuf's can hold it


def _any_of(texts: Iterable[str]) -> str:
    """A pattern for the longest of these texts. Beginnings that they share are tried once: an alternation of
    250 reserved tokens takes seconds, of everybody's, to search two megabytes of "<|".
    """
    branches: dict[str, list[str]] = {}
    for text in texts:
        branches.setdefault(text[:1], []).append(text[1:])
    ends = branches.pop("", None) is not None
    ways = "|".join(re.escape(first) + _any_of(rest) for first, rest in sorted(branches.items()))
    if ends:
        return f"(?:{ways})?" if ways else ""
    return f"(?:{ways})" if len(branches) > 1 else ways


class ControlTokens:
    """The control tokens of one tokenizer. ids: theirs."""

    def __init__(self, tokenizer: Any, ids: Iterable[int]) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._ids = {added[id].content: id for id in ids if len(added[id].content) > 1}
        self._pattern = re.compile(_any_of(self._ids) if self._ids else "(?!)")

    def mark(self, words: str) -> str:
        """Somebody's words, with a mark within each control token they spell. Raises InvalidRequest."""
        try:
            words.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest("the text holds half of a surrogate pair", field="prompt") from error
        while self._pattern.search(words):  # again where two of them overlap
            words = self._pattern.sub(lambda found: f"{found[0][0]}{BREAK_MARK}{found[0][1:]}", words)
        return words

    def last(self, rendering: str, end: int) -> tuple[int, int]:
        """Where the last control token before `end` begins and ends at which a rendering can be cut: what
        stands before it and what begins with it become the same tokens alone. (0, 0): there is none.
        """
        found = (0, 0)
        for one in self._pattern.finditer(rendering, 0, end):
            if one[0] in self._sharp:
                found = one.span()
        return found

    def encode(self, rendering: str) -> tuple[int, ...]:
        """Token ids of a rendering with marks: what is marked is plain text."""
        names, ids = self._names, self._respelled
        aliased = self._pattern.sub(lambda found: names[self._ids[found[0]]], rendering)
        found = self._split(aliased.replace(BREAK_MARK, ""))
        if any(token in self._control and token not in ids for token in found):  # merges reach it, too
            found = self._split(aliased.replace(BREAK_MARK, names[None]))
        return tuple(told for token in found if (told := ids.get(token, token)) is not None)

    def _split(self, text: str) -> list[int]:
        return self._other.encode_batch_fast([text], add_special_tokens=False)[0].ids

    @cached_property
    def _sharp(self) -> frozenset[str]:
        """Those that are found whatever stands around them, and take nothing of it."""
        added = self._tokenizer.get_added_tokens_decoder()
        loose = ("lstrip", "single_word", "normalized")
        return frozenset(
            text for text, id in self._ids.items() if not any(getattr(added[id], flag) for flag in loose)
        )

    @cached_property
    def _control(self) -> frozenset[int]:
        return frozenset(self._ids.values())

    @cached_property
    def _names(self) -> dict[int | None, str]:
        """What control tokens are called here, which nobody can guess; None: a break that is no token."""
        secret = secrets.token_hex(8)
        return {id: f"\U000f0000{secret}.{id}\U000f0001" for id in (*self._control, None)}

    @cached_property
    def _other(self) -> Any:
        """The same tokenizer, but for the names; it shares the vocabulary."""
        from tokenizers import AddedToken, Tokenizer

        whole = self._tokenizer
        other = Tokenizer(whole.model)
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(whole, part) is not None:
                setattr(other, part, getattr(whole, part))
        flags = ("single_word", "lstrip", "rstrip", "normalized")
        tokens = [AddedToken(self._names[None], normalized=False)]
        for id, token in sorted(whole.get_added_tokens_decoder().items()):
            name = self._names.get(id, token.content)
            tokens.append(AddedToken(name, **{flag: getattr(token, flag) for flag in flags}))
        other.add_tokens(tokens)
        return other

    @cached_property
    def _respelled(self) -> dict[int, int | None]:
        """From the other tokenizer's ids of added tokens to this one's."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        names = {id: self._names.get(id, token.content) for id, token in added}
        return {self._other.token_to_id(self._names[None]): None} | {
            self._other.token_to_id(name): id for id, name in names.items()
        }
