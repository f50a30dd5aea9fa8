"""Builds a tokenizer of the `tokenizers` library, its config and end tokens from a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from specsot.checkpoint.gguf.header import Header
from specsot.core.vocabulary import FIM_ENDS

# llama.cpp's numbers of the types of tokens. CONTROL: a special token that is no text.
CONTROL = 3
# An added token that is text.
USER_DEFINED = 4
# A token that no text yields, such as padding.
UNUSED = 5
# The character that stands for a space in sentencepiece vocabularies.
SPACE = "\u2581"

# How text is split before the merges of a byte-level vocabulary apply, by tokenizer.ggml.pre, as in
# llama.cpp.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The beginning of the patterns of Llama 3 and Qwen2: contractions, words and a digit.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
# The end of the same patterns: punctuation and white space.
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = _WORDS + "{1,3}" + _REST
QWEN2 = _WORDS + _REST
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# An English contraction, which GPT-4o splits together with the word before it.
_CUT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_CUT}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_CUT}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The regular expressions that split text, in the order in which they apply, by tokenizer.ggml.pre.
SPLITS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("default", "gpt-2", "mpt", "olmo", "jais", "phi-2", "trillion", "roberta-bpe"), (GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", GPT2)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), (LLAMA3,)),
    **dict.fromkeys(("smaug-bpe", "dbrx", "midm-2.0", "glm4", "chatglm-bpe"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan"), (QWEN2,)),
    "tekken": (TEKKEN,),
    **dict.fromkeys(("gpt-4o", "minimax-m2"), (GPT4O,)),
}
# Splits in which a piece that is a token is not merged from its parts.
IGNORE_MERGES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken")
# If a vocabulary has both, <|end|> only ends one of several messages (gpt-oss) and is no end token.
HARMONY = ("<|return|>", "<|call|>")
# Control tokens that end an answer, in addition to those that a file names; as in llama.cpp.
ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<|eom_id|>"),
    *("<end_of_turn>", *HARMONY, *FIM_ENDS),
)
# GGUF's name of each special token, by its field in tokenizer_config.json.
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


class StoredTokenizer:
    """The tokenizer that a GGUF file's metadata describe.

    template: The chat template, or None.
    """

    def __init__(self, header: Header) -> None:
        """Read the tokens and their types from the metadata.

        header: the header of the GGUF file.

        Raises ModelError if the metadata are incomplete, or of an unsupported kind of tokenizer.

        Tokens without types in the file count as ordinary ones. In Gemma's files, tokens of several spaces
        are replaced by tokens of as many SPACE characters. Unsupported is every kind but gpt2 and llama.
        """
        self._header = header
        self._kind = self._get("model")
        # Gemma 4's kind is that of sentencepiece with merges.
        self._kind = "llama" if self._kind == "gemma4" else self._kind
        self._header.require(
            self._kind in ("gpt2", "llama"), f"tokenizer {self._kind!r} is not one of gpt2, llama"
        )
        self._tokens: list[str] = self._get("tokens", [])
        self._types: list[int] = self._get("token_type", [1] * len(self._tokens))
        self._gemma = self._kind == "llama" and header.architecture.startswith("gemma")
        # Gemma's files store tokens of several spaces as plain spaces.
        if self._gemma:
            self._tokens = [SPACE * len(one) if one and not one.strip(" ") else one for one in self._tokens]
        self._header.require(
            len(self._types) == len(self._tokens) > 0,
            f"{len(self._tokens)} tokens of {len(self._types)} types make no vocabulary",
        )

    def build(self) -> Tokenizer:
        """Build the tokenizer, and return it. Raises ModelError if merges, scores or splits are missing or
        unknown.

        Control tokens and user-defined tokens are recognized before text is split; user-defined tokens of
        spaces only are not added. The begin token is put in front of every text if the file asks for it or,
        without a setting in the file, if its kind does so by default.
        """
        tokenizer = self._byte_level() if self._kind == "gpt2" else self._sentencepiece()
        tokenizer.add_special_tokens([AddedToken(one, normalized=False) for one in self._special()])
        defined = [one for one in self._of_type(USER_DEFINED) if one.strip(SPACE)]
        tokenizer.add_tokens([AddedToken(one, normalized=False) for one in defined])
        bos = self._name("bos")
        if bos and self._get("add_bos_token", self._kind == "llama" or self._pre in IGNORE_MERGES[:4]):
            names = [(bos, self._get("bos_token_id"))]
            tokenizer.post_processor = processors.TemplateProcessing(f"{bos}:0 $A:0", None, names)
        return tokenizer

    def config(self) -> dict[str, Any]:
        """Return the fields of tokenizer_config.json. Special tokens that the file does not name are left
        out.

        Raises ModelError if a special id is outside of the vocabulary.
        """
        names = {field: self._name(stored) for field, stored in SPECIAL.items()}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{k: v for k, v in names.items() if v is not None},
        }

    def ends(self) -> list[int]:
        """Return the ids of all tokens that end an answer, ascending; empty if the file names none and has no
        known ones.

        These are the ids that the file names for the end of a text, a turn, a message or a completed gap, and
        all tokens with a name in ENDS that are control or user-defined tokens. In a vocabulary of the harmony
        format, which has all tokens in HARMONY, <|end|> only ends a part of an answer, so that it is left
        out.
        """
        stored = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
        ids = {self._get(f"{one}_token_id") for one in stored} - {None}
        kinds = (CONTROL, USER_DEFINED)
        named = {
            token: id for id, token in enumerate(self._tokens) if token in ENDS and self._types[id] in kinds
        }
        if named.keys() >= {*HARMONY}:
            ids.discard(named.pop("<|end|>", None))
        return sorted({*ids, *named.values()})

    @property
    def template(self) -> str | None:
        """The chat template, or None if the file has none."""
        return self._header.metadata.get("tokenizer.chat_template")

    @property
    def _pre(self) -> str:
        """The name of the rule by which text is split before merges apply."""
        return self._get("pre", "default")

    def _byte_level(self) -> Tokenizer:
        """Return a byte-level BPE tokenizer, as in GPT-2, Llama 3 and Qwen.

        Raises ModelError if the file's rule of splitting text is not known.

        Raises an exception of the tokenizers library if a merge has a part that is no token.
        """
        self._header.require(self._pre in SPLITS, f"tokenizer.ggml.pre {self._pre!r} is not known here")
        merges = [tuple(one.split(" ", 1)) for one in self._get("merges", [])]
        tokenizer = Tokenizer(BPE(self._ids(), merges, ignore_merges=self._pre in IGNORE_MERGES))
        parts = [pre_tokenizers.Split(Regex(one), "isolated") for one in SPLITS[self._pre]]
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, whole])
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentencepiece(self) -> Tokenizer:
        """Return a sentencepiece BPE tokenizer, as in Llama 2 and Gemma. Without merges, those that the
        scores imply are used.

        Raises ModelError if there are neither merges nor scores.

        A space is put before the text unless the file says that it is not. Characters without a token become
        their bytes. Without a name in the file, the unknown token is "<unk>".
        """
        merges = [tuple(one.split(" ", 1)) for one in self._get("merges", [])] or list(self._implied_merges())
        unknown = self._name("unknown") or "<unk>"
        tokenizer = Tokenizer(BPE(self._ids(), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
        before = bool(self._get("add_space_prefix", True))
        # Phi-3 puts a space before the text even if the text begins with a space.
        if self._header.architecture == "phi3":
            tokenizer.normalizer = normalizers.Sequence(
                [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
            )
        else:
            scheme = "first" if before else "never"
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme, split=False)
        parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if before else [])])
        return tokenizer

    def _implied_merges(self) -> Iterator[tuple[str, str]]:
        """Return the merges that a sentencepiece vocabulary without merges implies, the first one first.

        Sentencepiece joins the pair that makes the token with the best score. Gemma's scores are replaced by
        the order of its tokens: the first token is the best.

        Raises ModelError if there are no scores.

        Of pairs with the same score, those with the longer left part, then those with the longer right part
        are first. Tokens that no two tokens make up imply no merge.
        """
        ids = self._ids()
        scores = self._get("scores", [])
        if self._gemma:
            scores = [-float(id) for id in range(len(self._tokens))]
        self._header.require(
            len(scores) == len(self._tokens),
            f"{len(self._tokens)} tokens have {len(scores)} scores, and no merges",
        )
        pairs = [
            (-scores[id], -len(token[:cut]), -len(token[cut:]), token[:cut], token[cut:])
            for token, id in ids.items()
            for cut in range(1, len(token))
            if token[:cut] in ids and token[cut:] in ids
        ]
        return ((left, right) for *_, left, right in sorted(pairs, key=lambda pair: pair[:3]))

    def _ids(self) -> dict[str, int]:
        """Return the vocabulary as token id by token, without the tokens that only pad the lm_head."""
        return {token: id for id, token in enumerate(self._tokens) if not self._is_padding(id)}

    def _is_padding(self, id: int) -> bool:
        """Return whether a token only pads the lm_head; converters name such tokens "[PAD151935]", for
        example.

        id: the token's id.
        """
        return self._types[id] == UNUSED and self._tokens[id] == f"[PAD{id}]"

    def _special(self) -> list[str]:
        """Return the special tokens: all control tokens, and those that have a special id.

        Each token is named once. Raises ModelError if a special id is outside of the vocabulary.
        """
        named = [name for one in SPECIAL.values() if (name := self._name(one)) is not None]
        return list(dict.fromkeys([*self._of_type(CONTROL), *named]))

    def _of_type(self, kind: int) -> list[str]:
        """Return the tokens of one type, by ascending id; empty if there are none.

        kind: llama.cpp's number of the type.
        """
        return [token for token, one in zip(self._tokens, self._types) if one == kind]

    def _name(self, special: str) -> str | None:
        """Return the token of a special id, or None if the file does not name the id or if the token is
        padding.

        special: GGUF's name of the special token, such as "bos".

        Raises ModelError if the id is outside of the vocabulary.
        """
        id = self._get(f"{special}_token_id")
        if id is None:
            return None
        self._header.require(
            0 <= id < len(self._tokens), f"{special} token {id} is none of {len(self._tokens)}"
        )
        return None if self._is_padding(id) else self._tokens[id]

    def _get(self, name: str, default: Any = None) -> Any:
        """Return the metadata value "tokenizer.ggml.<name>", or the default if the file has no such key.

        name: the key without "tokenizer.ggml.".
        default: the result if the file has no such key.
        """
        return self._header.metadata.get(f"tokenizer.ggml.{name}", default)
