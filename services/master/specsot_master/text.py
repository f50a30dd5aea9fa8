"""A model's tokenizer and chat template: encode, decode, mark control tokens, render a conversation.

Reads local files only, and never runs code that comes with a model.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from itertools import product
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
from specsot_master.core.sequence import BROKEN, MAX_PENDING_TOKENS, Detokenizer

# OpenAI's reasoning efforts that chat templates do not know, with the nearest one that they know.
EFFORTS = {"minimal": "low", "xhigh": "high"}
# Whether a model thinks before it answers; see `Text.thinking`.
Thinking = Literal["never", "asked", "always"]


def _any_of(literals: Iterable[str]) -> str:
    """Return a regular expression that matches the longest of these literals, built as a trie; an empty one
    for no literals. "" among the literals makes the match optional.

    Shared beginnings are tried once: ["ab", "ac"] -> "a(?:b|c)". A flat alternation of 250 reserved tokens
    takes seconds to search two megabytes of "<|", and blocks the event loop meanwhile.

    literals: the texts to match, as they are; none of them is a regular expression.
    """
    branches: dict[str, list[str]] = {}
    for text in literals:
        branches.setdefault(text[:1], []).append(text[1:])
    ends = branches.pop("", None) is not None
    alternatives = "|".join(re.escape(first) + _any_of(rest) for first, rest in sorted(branches.items()))
    if ends:
        return f"(?:{alternatives})?" if alternatives else ""
    return f"(?:{alternatives})" if len(branches) > 1 else alternatives


class ControlTokens:
    """Keeps text of clients from turning into the control tokens of a tokenizer.

    `mark` puts BREAK_MARK into every control token that a client's text spells. `encode` then tokenizes a
    rendered template so that marked occurrences become ordinary text tokens, and unmarked ones become control
    tokens:
        # "<|im_end|>" of a client -> marked "<" + BREAK_MARK + "|im_end|>" -> text tokens
    """

    def __init__(self, tokenizer: Any, ids: Iterable[int]) -> None:
        """Prepare the search for control tokens.

        tokenizer: a `tokenizers.Tokenizer`.
        ids: the ids of the control tokens, which are added tokens; those with a single character are left
            out, because they cannot be marked.
        """
        added = tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._ids = {added[id].content: id for id in ids if len(added[id].content) > 1}
        self._pattern = re.compile(_any_of(self._ids) if self._ids else "(?!)")

    def mark(self, text: str) -> str:
        """Return a client's text with BREAK_MARK within each control token, after its first character. A text
        that spells no control token is returned unchanged. Marks are added until no control token is spelled
        any more.

        text: text from a client, which may be "".

        Raises InvalidRequest if the text contains half of a surrogate pair, which UTF-8 cannot encode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest("the text holds half of a surrogate pair", field="prompt") from error
        # Repeated because two control tokens may overlap in the text.
        while self._pattern.search(text):
            text = self._pattern.sub(lambda found: f"{found[0][0]}{BREAK_MARK}{found[0][1:]}", text)
        return text

    def last(self, rendering: str, end: int) -> tuple[int, int]:
        """Return (begin, end), in characters, of the last control token at which a rendering can be cut: the
        text before the token, and the text from the token on, have the same tokens alone as together. Return
        (0, 0) if there is none. The token must be one that is found in any context and does not absorb white
        space before it.

        rendering: a rendered conversation, with marks.
        end: characters; the control token must end at or before this position.
        """
        found = (0, 0)
        for one in self._pattern.finditer(rendering, 0, end):
            if one[0] in self._cutting_tokens:
                found = one.span()
        return found

    def encode(self, rendering: str) -> tuple[int, ...]:
        """Return the token ids of a rendering with marks; what is marked becomes ordinary text. The result is
        empty for "". Nothing is added around the text.

        Control tokens get secret names before the marks are removed, so the tokenizer finds only those that
        the template wrote. If the model's merges still build a control token out of text, the marks are
        replaced by a separator token, whose id is dropped afterwards.

        rendering: a rendered conversation, with marks from `mark`.
        """
        names = self._names
        ids = self._model_ids
        aliased = self._pattern.sub(lambda found: names[self._ids[found[0]]], rendering)
        found = self._token_ids(aliased.replace(BREAK_MARK, ""))
        # Some vocabularies reach a control token by ordinary merges, without its name.
        if any(token in self._control and token not in ids for token in found):
            found = self._token_ids(aliased.replace(BREAK_MARK, names[None]))
        return tuple(id for token in found if (id := ids.get(token, token)) is not None)

    def _token_ids(self, text: str) -> list[int]:
        """Return the ids of a text in the second tokenizer, without a bos or other token around it.

        text: a rendering in which control tokens have their secret names, without marks.
        """
        return self._aliased_tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    @cached_property
    def _cutting_tokens(self) -> frozenset[str]:
        """The texts of control tokens that are found in any context and do not absorb white space before
        them, so that a rendering can be cut there. May be empty. Tokens that match only whole words, strip
        white space on the left, or are searched for in normalized text are left out.
        """
        added = self._tokenizer.get_added_tokens_decoder()
        loose = ("lstrip", "single_word", "normalized")
        return frozenset(
            text for text, id in self._ids.items() if not any(getattr(added[id], flag) for flag in loose)
        )

    @cached_property
    def _control(self) -> frozenset[int]:
        """The ids of all control tokens; empty if the tokenizer has none."""
        return frozenset(self._ids.values())

    @cached_property
    def _names(self) -> dict[int | None, str]:
        """Secret names of the control tokens by id, which clients cannot guess; None names the separator."""
        secret = secrets.token_hex(8)
        return {id: f"\U000f0000{secret}.{id}\U000f0001" for id in (*self._control, None)}

    @cached_property
    def _aliased_tokenizer(self) -> Any:
        """A second tokenizer with the same vocabulary, in which control tokens have their secret names."""
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
    def _model_ids(self) -> dict[int, int | None]:
        """Maps ids of added tokens in the second tokenizer to the model's ids; None for the separator."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        names = {id: self._names.get(id, token.content) for id, token in added}
        return {self._aliased_tokenizer.token_to_id(self._names[None]): None} | {
            self._aliased_tokenizer.token_to_id(name): id for id, name in names.items()
        }


class TokenBytes:
    """A callable from a token id to the token's bytes; ids without a token in the tokenizer have no bytes.

    The model's logits may have more entries than the tokenizer has tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Keep the tokenizer; its vocabulary is read on the first call.

        tokenizer: a `tokenizers.Tokenizer`.
        """
        self._tokenizer = tokenizer

    def __call__(self, token: int) -> bytes:
        """Return the bytes of one token: those of its name if it is an added token or if the decoder is of an
        unknown kind, else those that the decoder writes for it. Return b"" for an id without a token. A name
        that the decoder cannot write gives the name's own bytes.

        token: a token id; it may exceed the tokenizer's vocabulary.
        """
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        spelled = None if token in self._added or self._spell is None else self._spell(name)
        return name.encode() if spelled is None else spelled

    @cached_property
    def _added(self) -> frozenset[int]:
        """The ids of added tokens, whose names are their texts; empty if there are none."""
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def _spell(self) -> Speller | None:
        """The function from a token's name to its bytes, or None if the decoder is of an unknown kind.

        Only the decoder's description is serialized, because serializing the whole vocabulary takes long.
        """
        decoder = self._tokenizer.decoder
        model = self._tokenizer.model
        described = None if decoder is None else json.loads(decoder.__getstate__())
        fallback = getattr(model, "byte_fallback", False)
        return speller({"decoder": described, "model": {"byte_fallback": fallback}})


# Characters per position. Of a longer text only so many characters are tokenized to find that it does not
# fit; most texts have 3 to 5 characters per token.
CHARACTERS_PER_POSITION = 8
# Tokens. The cache of single tokens' texts takes some megabytes, and most vocabularies fit into it.
MAX_CACHED_TOKENS = 1 << 16
# The texts of tokens that announce a list, in two parts; vocabularies have a token for some of them.
_COLONS = (":", " :", "：")
_LINE_ENDS = ("\n", "\n\n", "\n\n\n", "\n\n\n\n", "\r\n", "\r\n\r\n")
_SPECIAL_NAMES = (
    *("bos_token", "eos_token", "pad_token", "unk_token"),
    *("sep_token", "cls_token", "mask_token"),
)


class Text:
    """The tokenizer and the chat template of one model: encodes, decodes, and renders conversations.

    Only templates write special tokens; text never contains them.

    Attributes: `spell` returns the bytes of one token; `end_ids` are the tokens with which the model ends an
    answer, ascending; `vocabulary` is the number of ids that the tokenizer knows.
    """

    def __init__(self, directory: str | Path, limit: int | None = None) -> None:
        """Read the tokenizer and the chat template of a Hugging Face model directory.

        directory: the model's directory.
        limit: the number of token ids that the model has, which may be smaller than the tokenizer's; None if
            every id of the tokenizer is valid.

        Raises ModelError if there is no tokenizer, or if a file cannot be read.
        """
        folder = Path(directory)
        config = _read_json(folder / "tokenizer_config.json")
        names = _special_names(config)
        self._tokenizer = _load_tokenizer(folder)
        templates = _find_templates(folder, config)
        self._template = ChatTemplate(templates.get("default", PLAIN), names, templates.get("tool_use"))
        self.spell = TokenBytes(self._tokenizer)
        self._decode_known = lru_cache(MAX_CACHED_TOKENS)(self._tokenizer.decode)
        self._decode_alone = lru_cache(MAX_CACHED_TOKENS)(partial(self._text_alone, True))
        self._decode_alone_with_special = lru_cache(MAX_CACHED_TOKENS)(partial(self._text_alone, False))
        self._beginnings = lru_cache(MAX_CACHED_TOKENS)(self._find_beginnings)
        self.end_ids = tuple(sorted(_find_end_ids(folder, self._tokenizer, names)))
        self.vocabulary = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        self._limit = None if limit is None or self.largest < limit else limit

    @cached_property
    def announcing_tokens(self) -> tuple[int, ...]:
        """The tokens that consist of a colon and the end of its line, ascending. Such a token announces a
        list. Empty if the tokenizer separates colons and line ends.

        Qwen2: 510 is ":\\n" and 1447 is ":\\n\\n"; "):\\n", which ends a line of code, does not count.
        """
        texts = [colon + end for colon, end in product(_COLONS, _LINE_ENDS)]
        encoded = [(text.encode(), self.encode(text)) for text in texts]
        # A text without a token of its own may become a single token for unknown texts.
        return tuple(sorted(ids[0] for text, ids in encoded if len(ids) == 1 and self.spell(ids[0]) == text))

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of exactly this text, without a bos or other token around it.

        text: a rendering, in which marked control tokens become ordinary text (`ControlTokens`), or any other
            text.

        Raises InvalidRequest for a token that the model does not have.
        """
        return self._check(
            self._control.encode(text) if BREAK_MARK in text else self._token_ids(text, add_bos=False)
        )

    def beginnings(self, word: str) -> tuple[int, ...]:
        """Return the ids of the tokens with which a text may begin that begins with this word or mark: those
        of the word and of its beginnings of two characters or more, with or without a space before them. A
        single character is left out, since many words begin with it. Return () for "".

            "Compare" -> the ids of "Co", "Com", "Comp", "Compare", " Co", ..., as far as they are tokens

        word: the first word of a text, or a mark such as a line end. The results for the last words are kept,
            since the branches of every plan ask for the same marks.
        """
        return self._beginnings(word)

    def _find_beginnings(self, word: str) -> tuple[int, ...]:
        """Return what `beginnings` returns, found anew.

        word: the first word of a text, or a mark.
        """
        begun = [word[:length] for length in range(2, len(word))] + [word] * bool(word)
        encoded = [(text, self.encode(space + text)) for space in ("", " ") for text in begun]
        # A text without a token of its own may become a single token for unknown texts.
        own = [(text, ids[0]) for text, ids in encoded if len(ids) == 1]
        return tuple(dict.fromkeys(id for text, id in own if self.spell(id).strip() == text.strip().encode()))

    def encode_prompt(self, text: str, max_positions: int | None = None) -> tuple[int, ...]:
        """Return the token ids of a text that the model shall continue, with the tokenizer's own additions,
        usually a bos token. Control tokens that the text spells become control tokens. The text must be free
        of marks.

        text: the client's prompt.
        max_positions: the model's context in tokens; if given, `check_fits` is called first, so that a far
            too long text is refused quickly. None to tokenize any text.

        Raises InvalidRequest for a token that the model does not have and for half of a surrogate pair, and
        ContextLengthExceeded if the first part of the text alone fills the context.
        """
        if max_positions is not None:
            self.check_fits(text, max_positions)
        return self._check(self._token_ids(text, add_bos=True))

    def check_fits(self, text: str, max_positions: int) -> None:
        """Raise ContextLengthExceeded if the first part of a long text alone fills the context. A text of at
        most that many characters always passes.

        Only the first CHARACTERS_PER_POSITION characters per position are tokenized, because a whole text may
        take seconds. A text that passes this check may still be too long.

        text: a client's text, not rendered yet.
        max_positions: the model's context, in tokens.
        """
        first = text[: CHARACTERS_PER_POSITION * max_positions]
        if len(first) < len(text) and len(self._token_ids(first, add_bos=False)) >= max_positions:
            raise ContextLengthExceeded.of_text(max_positions, len(text))

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of these tokens; "" for no tokens. Bytes that are not a whole character become
        U+FFFD.

        tokens: token ids.
        skip_special: True to leave out special tokens, such as the end of a turn.
        """
        decode = self._tokenizer.decode if len(tokens) > 1 else self._decode_known
        return decode(tuple(tokens), skip_special_tokens=skip_special)

    def _text_alone(self, skip_special: bool, token: int) -> str | None:
        """Return the text of a token that is the same after any whole character; None if it may depend on the
        tokens before it: that of a decoder which is not byte-level, and a part of a character. A byte-level
        decoder joins the bytes of all tokens.

        skip_special: True to return "" for a special token.
        token: a token id.
        """
        text = self.decode((token,), skip_special)
        return text if self._is_byte_level and BROKEN not in text else None

    @cached_property
    def _is_byte_level(self) -> bool:
        """True if the decoder does nothing but join the bytes of the tokens."""
        decoder = self._tokenizer.decoder
        return decoder is not None and json.loads(decoder.__getstate__())["type"] == "ByteLevel"

    def detokenizer(self, skip_special: bool = True, preceding_tokens: Sequence[int] = ()) -> Detokenizer:
        """Return a detokenizer for the tokens that the model will generate. Its first text continues those
        tokens; their own text is not returned.

        skip_special: True to leave out special tokens, such as the end of a turn.
        preceding_tokens: tokens of the prompt that the answer continues, which are the context of the first
            generated token. Only the last MAX_PENDING_TOKENS of them are used, and of these only those after
            the last special token, since a new text begins there. Empty if the answer is a text of its own.
        """
        near = preceding_tokens[-MAX_PENDING_TOKENS:]
        cut = max((n + 1 for n, token in enumerate(near) if token in self.special_ids), default=0)
        decode_alone = self._decode_alone if skip_special else self._decode_alone_with_special
        return Detokenizer(partial(self.decode, skip_special=skip_special), near[cut:], decode_alone)

    def render(self, messages: Sequence[Message], for_answer: bool = True) -> str:
        """Render a conversation by the chat template, with marks in control tokens that its contents spell.
        Text that is marked stays marked until it is encoded.

        messages: the turns, oldest first.
        for_answer: True to end with the head of the assistant's turn, with any thinking block closed; False
            to end after the last turn.

        Raises TemplateRefused if the template does not take this conversation, and InvalidRequest if a text
        contains half of a surrogate pair.
        """
        marked = [Message(message.role, self.mark(message.content)) for message in messages]
        rendering = self._template.render(marked, for_answer)
        return self._skip_thinking(rendering) if for_answer else rendering

    @cached_property
    def thinking(self) -> Thinking:
        """Whether the model thinks before it answers, as its template shows.

        "never": the template knows no thinking. "always": the template opens a thinking block although
        thinking was turned off. "asked": the template knows the tags, and thinks only if asked to.
        """
        if self.style is None:
            return "never"
        return (
            "always" if self.style.opens_thought(self._template.render([Message("user", "-")])) else "asked"
        )

    @cached_property
    def style(self) -> ThinkingStyle | None:
        """The tags of the model's thinking, or None if the template shows none."""
        return style_of(self._template.source)

    @cached_property
    def call_form(self) -> CallForm | None:
        """How the model writes tool calls, derived from its template. None if the template offers tools, but
        does not show how.
        """
        return form_of_template(self._template.tool_source, self._render_calls)

    @cached_property
    def call_example(self) -> str | None:
        """A call as the template writes it, for a prompt that shows the model how; None if the template has
        no form of its own.
        """
        form = self.call_form
        return None if form is None or form is HERMES else example_call(self._render_calls, form)

    @cached_property
    def writes_special_calls(self) -> bool:
        """True if special tokens are a part of the model's calls, so that its text must show them."""
        return any(id in self.special_ids for id in self.call_tokens)

    @cached_property
    def call_tokens(self) -> Mapping[int, str]:
        """Special and added tokens that are a part of the model's calls: their texts by token id. Empty if
        there are none. It is also empty if the form of calls is unknown.
        """
        form = self.call_form
        added = self._tokenizer.get_added_tokens_decoder()
        return {
            id: one.content for id, one in added.items() if form is not None and form.contains(one.content)
        }

    @cached_property
    def end_texts(self) -> tuple[str, ...]:
        """The texts of the tokens that end an answer, in the order of `end_ids`; an end token that the
        tokenizer did not add to its vocabulary is left out.
        """
        added = self._tokenizer.get_added_tokens_decoder()
        return tuple(added[id].content for id in self.end_ids if id in added)

    def _render_calls(
        self, turns: Sequence[Mapping[str, Any]], functions: Sequence[Mapping[str, Any]], answer: bool
    ) -> str:
        """Render a conversation in which invented functions are offered and called; `form_of_template`
        derives from such samples how the model writes tool calls. An open thinking block is closed.

        turns: the turns in OpenAI's format, with `tool_calls` in them.
        functions: the functions that are offered, in OpenAI's format.
        answer: True to end with the head of the assistant's turn, False to end after the last turn.

        Raises TemplateRefused if the template does not take this conversation.
        """
        tools = [{"type": "function", "function": one} for one in functions]
        return self._skip_thinking(self._template.render_turns(turns, answer, tools=tools), answer)

    @property
    def reads_effort(self) -> bool:
        """True if the chat template uses a reasoning effort."""
        return "reasoning_effort" in self._template.source

    @property
    def has_template(self) -> bool:
        """True if the model's files hold a chat template; False if conversations are written as "user: ...
        assistant: ...".
        """
        return self._template.source != PLAIN

    @property
    def has_tools(self) -> bool:
        """True if the template has a place for the tools that a request offers."""
        return offers_functions(self._template.tool_source)

    def render_turns(
        self,
        turns: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        with_thinking: bool = False,
        effort: str | None = None,
    ) -> str:
        """Render a conversation with tools and tool calls, with marks in all texts, as `render` does. If
        tools are offered, the rendering does not contain the header of the answer's channel, because the
        model chooses it. OpenAI's efforts that templates do not know are replaced by the nearest that they
        know (EFFORTS).

        turns: the turns in OpenAI's format, oldest first.
        tools: the tools that the model may call, in OpenAI's format; empty for none.
        with_thinking: True to end where the model begins to think, if it can think; False to close any
            thinking block.
        effort: OpenAI's reasoning effort, for templates that use it; None or "" for the template's default.

        Raises TemplateRefused if the template does not take this conversation, and InvalidRequest if a text
        contains half of a surrogate pair.
        """
        more: dict[str, Any] = {"tools": self._mark_all(tools)} if tools else {}
        if effort:
            more["reasoning_effort"] = EFFORTS.get(effort, effort)
        if not (with_thinking and self.style):
            return self._skip_thinking(
                self._template.render_turns(self._mark_all(turns), **more), bool(tools)
            )
        rendering = self._template.render_turns(
            self._mark_all(turns), **more, **dict.fromkeys(THINKING_OFF, True)
        )
        return rendering if self.style.opens_thought(rendering) else f"{rendering}{self.style.begin}"

    def _skip_thinking(self, rendering: str, may_call: bool = False) -> str:
        """Return the rendering with any open thinking block closed, so that the answer follows directly. If
        the model has no thinking tags, return it unchanged. The header of the answer, if the style has one,
        is appended.

        rendering: a conversation that ends with the head of the assistant's turn.
        may_call: True to leave out the header of the answer, because the model may begin a tool call instead.
        """
        if self.style is None:
            return rendering
        return f"{self.style.skipped(rendering)}{'' if may_call else self.style.header}"

    def _mark_all(self, value: Any) -> Any:
        """Return a JSON value in which every text is marked, names of objects too. Numbers, booleans and None
        are returned unchanged. Tuples become lists.

        value: a decoded JSON value from a client.

        Raises InvalidRequest if a text contains half of a surrogate pair.
        """
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, Mapping):
            return {self.mark(str(name)): self._mark_all(part) for name, part in value.items()}
        return [self._mark_all(part) for part in value] if isinstance(value, (list, tuple)) else value

    def mark(self, text: str) -> str:
        """Return a client's text with BREAK_MARK in each control token that it spells, so that `encode` makes
        ordinary text of them. A text that spells none is returned unchanged.

        text: text from a client, not rendered yet.

        Raises InvalidRequest if the text contains half of a surrogate pair.
        """
        return self._control.mark(text)

    def cut(self, rendering: str, end: int) -> tuple[int, int]:
        """Return (begin, end), in characters, of the last control token at which a rendering can be cut. The
        tokens of the parts before and from `begin`, joined, are the tokens of the whole rendering:

            # the token found is "<|im_start|>" -> "...<|im_end|>" and "<|im_start|>user..." encode separately

        Return (0, 0) if there is no such token.

        rendering: a rendered conversation, with marks.
        end: characters; the control token must end at or before this position.
        """
        return self._control.last(rendering, end)

    def _token_ids(self, text: str, add_bos: bool) -> tuple[int, ...]:
        """Return the token ids of a text. Releases the GIL meanwhile.

        text: any text without marks.
        add_bos: True to add the tokenizer's own tokens, usually a bos token; False for the text alone.

        Raises InvalidRequest if the text contains half of a surrogate pair.
        """
        try:
            return tuple(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_bos)[0].ids)
        except TypeError as error:
            # The tokenizers library raises TypeError for a string that UTF-8 cannot encode.
            raise InvalidRequest("the text holds half of a surrogate pair", field="prompt") from error

    def _check(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens unchanged. No tokens, or a model as large as its tokenizer, always pass.

        tokens: token ids of the tokenizer, which may have more tokens than the model.

        Raises InvalidRequest if one of them is beyond the model's vocabulary.
        """
        if self._limit is not None and (last := max(tokens, default=0)) >= self._limit:
            name = self._tokenizer.id_to_token(last)
            raise InvalidRequest(
                f"{name!r} is token {last} of the tokenizer, the model's are 0 .. {self._limit - 1}",
                field="prompt",
            )
        return tokens

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which `decode` leaves out if it skips special tokens."""
        return frozenset(id for id, one in self._tokenizer.get_added_tokens_decoder().items() if one.special)

    @property
    def largest(self) -> int:
        """The largest token id of the tokenizer."""
        added = max(self._tokenizer.get_added_tokens_decoder(), default=0)
        return max(added, self._tokenizer.get_vocab_size(with_added_tokens=False) - 1)

    @cached_property
    def _control(self) -> ControlTokens:
        """Added tokens that are special, that end an answer, or that the template itself writes."""
        added = self._tokenizer.get_added_tokens_decoder()
        sample = self._sample_rendering()
        ids = (id for id, one in added.items() if one.special or id in self.end_ids or one.content in sample)
        return ControlTokens(self._tokenizer, ids)

    def _sample_rendering(self) -> str:
        """Render a short conversation, which shows how the template begins and ends its turns. Return "" if
        the template refuses it.
        """
        roles = ("user", "assistant", "user")
        try:
            return self._template.render([Message(role, "-") for role in roles], for_answer=False)
        except SpecsotError:
            return ""


def _load_tokenizer(folder: Path) -> Any:
    """Return the model's `tokenizers.Tokenizer`, which neither truncates nor pads. tokenizer.json is read
    within milliseconds; if there is no such file, Transformers converts an older format. Truncation and
    padding that the file turns on are turned off.

    folder: the model's directory.

    Raises ModelError if the file cannot be read, or if there is nothing to convert.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        return _convert_tokenizer(folder)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # The tokenizers library raises Exception itself.
        raise ModelError(f"{path}: not a readable tokenizer ({error})") from error
    # Some files were saved with truncation or padding turned on.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _convert_tokenizer(folder: Path) -> Any:
    """Return the `tokenizers.Tokenizer` that Transformers converts from a tokenizer of an older format, from
    local files only.

    folder: the model's directory.

    Raises ModelError with the first line of the reason if there is nothing to convert, or if it cannot be
    converted.
    """
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        return loaded.backend_tokenizer
    except Exception as error:  # A converter may raise anything for a damaged directory.
        line = str(error).strip().partition("\n")[0]
        raise ModelError(f"{folder}: no tokenizer.json, and no tokenizer to convert ({line})") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if there is no file.

    path: the file, which need not exist.

    Raises ModelError for a file that is not a JSON object.
    """
    return read_json(path) if path.is_file() else {}


def _special_names(config: dict[str, Any]) -> dict[str, str]:
    """Return the texts of bos_token, eos_token and so on by these names. A token that the configuration does
    not name is left out. Values of other types are left out, too.

    config: the contents of tokenizer_config.json; older files hold {"content": text} instead of the text.
    """
    found = {name: config.get(name) for name in _SPECIAL_NAMES}
    plain = {name: value["content"] if isinstance(value, dict) else value for name, value in found.items()}
    return {name: value for name, value in plain.items() if isinstance(value, str)}


def _find_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the model's chat templates by name. A model with one template has only "default"; a template
    named "tool_use" renders requests with tools, as in Transformers. Empty if the model has no template.
    Entries that are no texts are left out; chat_template.json replaces the template of tokenizer_config.json.

    Templates in files of their own replace those of the configuration.

    folder: the model's directory.
    config: the contents of tokenizer_config.json.
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
    """Return the ids with which the model ends an answer; an empty set if no source names such a token.

    These are the eos ids of the generation config, of the model config and of the tokenizer, which may all
    differ, and the tokenizer's end tokens of fill-in-the-middle (FIM_ENDS). An eos token whose text the
    tokenizer does not know is left out.

    folder: the model's directory.
    tokenizer: the model's `tokenizers.Tokenizer`.
    names: texts of the special tokens by name, as `_special_names` returns them.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = text_fields(_read_json(folder / name), folder / name).get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    written = tokenizer.token_to_id(names["eos_token"]) if "eos_token" in names else None
    added = tokenizer.get_added_tokens_decoder().items()
    found.update(id for id, token in added if token.content in FIM_ENDS)
    return found if written is None else found | {int(written)}
