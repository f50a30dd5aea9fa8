"""A model's tokenizer and chat template: encode, decode, mark control tokens, render a conversation.

Reads local files only, and never runs code that comes with a model.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from specsot.checkpoint.config import text_fields
from specsot.checkpoint.fields import read_json
from specsot.core.vocabulary import FIM_ENDS, Speller, speller
from specsot.errors import ContextLengthExceeded, InvalidRequest, ModelError, SpecsotError
from specsot.params import Message
from specsot_master.chat_template import BREAK_MARK, PLAIN, THINKING_OFF, ChatTemplate
from specsot_master.core.dialects.thinking_style import ThinkingStyle, style_of
from specsot_master.core.dialects.tool_calls.deriving import (
    example_call,
    form_of_template,
    offers_functions,
)
from specsot_master.core.dialects.tool_calls.forms import HERMES, CallForm
from specsot_master.core.sequence import MAX_PENDING_TOKENS, Detokenizer

EFFORTS = {"minimal": "low", "xhigh": "high"}  # of OpenAI's words, those that templates have no word for
Thinking = Literal["never", "asked", "always"]


def _any_of(texts: Iterable[str]) -> str:
    """A pattern for the longest of these texts. Beginnings that they share are tried once: an alternation of
    250 reserved tokens takes seconds, of everybody's, to search two megabytes of "<|".
    """
    branches: dict[str, list[str]] = {}
    for text in texts:
        branches.setdefault(text[:1], []).append(text[1:])
    ends = branches.pop("", None) is not None
    alternatives = "|".join(re.escape(first) + _any_of(rest) for first, rest in sorted(branches.items()))
    if ends:
        return f"(?:{alternatives})?" if alternatives else ""
    return f"(?:{alternatives})" if len(branches) > 1 else alternatives


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
        is before it and what begins with it become the same tokens alone. (0, 0): there is none.
        """
        found = (0, 0)
        for one in self._pattern.finditer(rendering, 0, end):
            if one[0] in self._sharp:
                found = one.span()
        return found

    def encode(self, rendering: str) -> tuple[int, ...]:
        """Token ids of a rendering with marks: what is marked is plain text."""
        names = self._names
        ids = self._respelled
        aliased = self._pattern.sub(lambda found: names[self._ids[found[0]]], rendering)
        found = self._split(aliased.replace(BREAK_MARK, ""))
        if any(token in self._control and token not in ids for token in found):  # merges reach it, too
            found = self._split(aliased.replace(BREAK_MARK, names[None]))
        return tuple(told for token in found if (told := ids.get(token, token)) is not None)

    def _split(self, text: str) -> list[int]:
        return self._other.encode_batch_fast([text], add_special_tokens=False)[0].ids

    @cached_property
    def _sharp(self) -> frozenset[str]:
        """Those that are found whatever is around them, and take nothing of it."""
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


class TokenBytes:
    """Call it with a token id; ids that only the model's logits have write nothing."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        spelled = None if token in self._added or self._spell is None else self._spell(name)
        return name.encode() if spelled is None else spelled

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def _spell(self) -> Speller | None:
        """Only the decoder is looked at: a whole vocabulary takes long to write out."""
        decoder = self._tokenizer.decoder
        model = self._tokenizer.model
        described = None if decoder is None else json.loads(decoder.__getstate__())
        fallback = getattr(model, "byte_fallback", False)
        return speller({"decoder": described, "model": {"byte_fallback": fallback}})


LONG = 8  # characters a position: of longer texts a first part is looked at; most have 3 to 5 a token
KNOWN_TOKENS = 1 << 16  # tokens whose text alone is kept: some megabytes; most vocabularies have as many
_SPECIAL_NAMES = (
    *("bos_token", "eos_token", "pad_token", "unk_token"),
    *("sep_token", "cls_token", "mask_token"),
)


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
        templates = _find_templates(folder, config)
        self._template = ChatTemplate(templates.get("default", PLAIN), names, templates.get("tool_use"))
        self.spell = TokenBytes(self._tokenizer)
        self._decode_known = lru_cache(KNOWN_TOKENS)(self._tokenizer.decode)
        self.end_ids = tuple(sorted(_find_end_ids(folder, self._tokenizer, names)))
        self.vocabulary = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        self._limit = None if limit is None or self.largest < limit else limit

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of exactly this text: nothing is put before or behind it. In a rendering what is marked
        is plain text. Raises InvalidRequest for a token that the model does not have.
        """
        return self._check(self._control.encode(text) if BREAK_MARK in text else self._split(text, bare=True))

    def encode_bare(self, text: str, positions: int | None = None) -> tuple[int, ...]:
        """Token ids of a text that is to be gone on with: what the tokenizer itself puts before it (such as
        a bos token) included. Control tokens may stand in it. positions: see `check_fits`. Raises
        InvalidRequest as `encode`.
        """
        if positions is not None:
            self.check_fits(text, positions)
        return self._check(self._split(text, bare=False))

    def check_fits(self, text: str, positions: int) -> None:
        """By the first part of a long text: the whole may take seconds. Raises ContextLengthExceeded."""
        first = text[: LONG * positions]
        if len(first) < len(text) and len(self._split(first, bare=True)) >= positions:
            raise ContextLengthExceeded.of_text(positions, len(text))

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        """Text of these tokens; special ones are left out."""
        decode = self._tokenizer.decode if len(tokens) > 1 else self._decode_known
        return decode(tuple(tokens), skip_special_tokens=skip_special)

    def detokenizer(self, skip_special: bool = True, before: Sequence[int] = ()) -> Detokenizer:
        """before: the prompt whose text goes on; behind a special token another text begins."""
        near = before[-MAX_PENDING_TOKENS:]
        cut = max((n + 1 for n, token in enumerate(near) if token in self.special_ids), default=0)
        return Detokenizer(partial(self.decode, skip_special=skip_special), near[cut:])

    def render(self, messages: Sequence[Message], answer: bool = True) -> str:
        """A conversation through the chat template; what in its contents spells a control token is marked.
        The answer begins behind all thinking.

        Raises TemplateRefused.
        """
        marked = [Message(message.role, self.mark(message.content)) for message in messages]
        rendering = self._template.render(marked, answer)
        return self._skip_thinking(rendering) if answer else rendering

    @cached_property
    def thinking(self) -> Thinking:
        """Whether the model thinks before it answers, as its template shows. "always": thinking is begun
        although it was told not to; others only know the tags.
        """
        if self.style is None:
            return "never"
        return "always" if self.style.begun(self._template.render([Message("user", "-")])) else "asked"

    @cached_property
    def style(self) -> ThinkingStyle | None:
        """How the model thinks; None: not at all."""
        return style_of(self._template.source)

    @cached_property
    def call_form(self) -> CallForm | None:
        """How the model writes tool calls. None if its template offers tools, but does not show how."""
        return form_of_template(self._template.tool_source, self._render_calls)

    @cached_property
    def call_example(self) -> str | None:
        """A call as the template writes it; None if the template writes none of its own."""
        form = self.call_form
        return None if form is None or form is HERMES else example_call(self._render_calls, form)

    @cached_property
    def writes_special_calls(self) -> bool:
        """Whether special tokens are a part of the model's calls, so that its text must show them."""
        form = self.call_form
        added = self._tokenizer.get_added_tokens_decoder()
        return form is not None and form.contains_any(added[id].content for id in self.special_ids)

    def _render_calls(
        self, turns: Sequence[Mapping[str, Any]], functions: Sequence[Mapping[str, Any]], answer: bool
    ) -> str:
        """A conversation in which made-up functions are offered and called; see `derive`."""
        tools = [{"type": "function", "function": one} for one in functions]
        return self._skip_thinking(self._template.render_turns(turns, answer, tools=tools), answer)

    @property
    def reads_effort(self) -> bool:
        return "reasoning_effort" in self._template.source

    @property
    def has_template(self) -> bool:
        """Whether the model's files hold a chat template."""
        return self._template.source != PLAIN

    @property
    def has_tools(self) -> bool:
        """Whether the template has a place for the tools that a request offers."""
        return offers_functions(self._template.tool_source)

    def render_turns(
        self,
        turns: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        thinks: bool = False,
        effort: str | None = None,
    ) -> str:
        """A conversation with calls and tools, likewise marked all through. thinks: up to where the model
        begins to think; effort: how much, for templates that say it. An answer that may call tools chooses
        its header itself. Raises TemplateRefused.
        """
        more: dict[str, Any] = {"tools": self._mark_all(tools)} if tools else {}
        if effort:
            more["reasoning_effort"] = EFFORTS.get(effort, effort)
        if not (thinks and self.style):
            return self._skip_thinking(
                self._template.render_turns(self._mark_all(turns), **more), bool(tools)
            )
        rendering = self._template.render_turns(
            self._mark_all(turns), **more, **dict.fromkeys(THINKING_OFF, True)
        )
        return rendering if self.style.begun(rendering) else f"{rendering}{self.style.begin}"

    def _skip_thinking(self, rendering: str, calls: bool = False) -> str:
        """A prompt behind which the answer comes."""
        if self.style is None:
            return rendering
        return f"{self.style.skipped(rendering)}{'' if calls else self.style.header}"

    def _mark_all(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, Mapping):
            return {self.mark(str(name)): self._mark_all(part) for name, part in value.items()}
        return [self._mark_all(part) for part in value] if isinstance(value, (list, tuple)) else value

    def mark(self, words: str) -> str:
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

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Those that `decode` leaves out."""
        return frozenset(id for id, one in self._tokenizer.get_added_tokens_decoder().items() if one.special)

    @property
    def largest(self) -> int:
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
    return read_json(path) if path.is_file() else {}


def _special_names(config: dict[str, Any]) -> dict[str, str]:
    """bos_token and friends; older files write them as {"content": ...}."""
    found = {name: config.get(name) for name in _SPECIAL_NAMES}
    plain = {name: value["content"] if isinstance(value, dict) else value for name, value in found.items()}
    return {name: value for name, value in plain.items() if isinstance(value, str)}


def _find_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """The model's chat templates by name. A model with one template has only "default"; a template named
    "tool_use" renders requests with tools, as in Transformers. Empty if the model has no template.

    Templates in files of their own replace those of the configuration.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        files = {"default": path, **{file.stem: file for file in others}}
        return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    found = _read_json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
    named = found if isinstance(found, dict) else {"default": found}
    return {name: template for name, template in named.items() if isinstance(template, str)}


def _find_end_ids(folder: Path, tokenizer: Any, names: dict[str, str]) -> set[int]:
    """eos ids of the generation config, the model config and the tokenizer, which may all differ; and the
    tokenizer's ends of fill-in-the-middle.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = text_fields(_read_json(folder / name), folder / name).get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    written = tokenizer.token_to_id(names["eos_token"]) if "eos_token" in names else None
    added = tokenizer.get_added_tokens_decoder().items()
    found.update(id for id, token in added if token.content in FIM_ENDS)
    return found if written is None else found | {int(written)}
