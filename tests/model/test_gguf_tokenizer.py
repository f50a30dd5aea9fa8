"""Tokenizers out of GGUF files: the ids, special tokens and chat template that Transformers gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoTokenizer

from specsot.checkpoint.resolving import resolve_model
from specsot.core.vocabulary import read_vocabulary
from specsot.params import Message
from specsot_master.text import Text
from tests.conftest import REPOSITORY
from tests.model.gguf_files import Words, write_gguf
from tests.model.tiny import write_model

pytestmark = pytest.mark.torch

TEXTS = (
    "Hello, world! I'll say it's 2024, or 12345 + 67.89?",
    "  two spaces,\n\n\ttabs  and\r\n ends   ",
    "Straße über Größe, naïve café",
    "你好，世界！今天是2024年。",
    "日本語のテキスト、한국어 문장",
    "Привет, мир 123; مرحبا بالعالم",
    "def f(x):\n    return x**2  # emoji 😀👨‍👩‍👧",
    "<|im_start|>user\nHi <think>no<|im_end|> <|im_end|>",
)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def trained(
    pre: pre_tokenizers.PreTokenizer, first: list[str], alphabet: list[str]
) -> tuple[list[str], list[str]]:
    """Tokens and merges, learned from the texts above and a page of the documents."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=first, initial_alphabet=alphabet, show_progress=False
    )
    page = (REPOSITORY / "docs" / "models.md").read_text()
    tokenizer.train_from_iterator([*TEXTS, page], trainer)
    learned = BPE_of(tokenizer)
    ids = learned["vocab"]
    return sorted(ids, key=ids.__getitem__), [" ".join(merge) for merge in learned["merges"]]


def BPE_of(tokenizer: Tokenizer) -> dict[str, Any]:
    import json

    return json.loads(tokenizer.to_str())["model"]


def byte_level(pre: str | None, **more: Any) -> Words:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens, merges = trained(pre_tokenizers.ByteLevel(add_prefix_space=False), SPECIAL, alphabet)
    types = [3 if token in SPECIAL else 1 for token in tokens]
    named = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "padding_token_id": 2}
    return Words("gpt2", pre, [*tokens, "<think>"], [*types, 4], merges, None, named | more, TEMPLATE)


def sentencepiece(merges: bool, **more: Any) -> Words:
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    first = ["<unk>", "<s>", "</s>", *pieces]
    tokens, learned = trained(pre_tokenizers.Metaspace(), first, [])
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    scores = [0.0] * 259 + [float(-rank) for rank in range(len(tokens) - 259)]
    named = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return Words(
        "llama", "default", tokens, types, learned if merges else None, scores, named | more, TEMPLATE
    )


def gemma() -> Words:
    """Merges in the order of tokens, whatever their scores; spaces in a row are stored as such."""
    words = sentencepiece(merges=False, add_space_prefix=False)
    spaces = ["  ", "    "]
    words.tokens[259:259], words.types[259:259] = spaces, [4, 4]
    words.scores = [0.0] * len(words.tokens)
    return words


WORDS = {
    "gemma3": gemma(),
    "phi3": sentencepiece(merges=False),
    "gpt-4o": byte_level("gpt-4o"),
    "gpt-2": byte_level("gpt-2"),
    "llama-bpe": byte_level("llama-bpe", add_bos_token=True),
    "qwen2": byte_level("qwen2", add_bos_token=False),
    "tekken": byte_level("tekken", add_bos_token=True),
    "none said": byte_level(None),
    "sentencepiece": sentencepiece(merges=False),
    "sentencepiece with merges": sentencepiece(merges=True, add_bos_token=False),
}


def made_of(words: Words, folder: Path, kind: str = "llama") -> Path:
    model = write_model(folder / "hf", kind, vocab_size=len(words.tokens))
    return resolve_model(write_gguf(folder / "m.gguf", model, words=words))


@pytest.mark.parametrize("name", WORDS)
def test_ids_names_and_templates_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    made = made_of(WORDS[name], tmp_path, {"gemma3": "gemma3_text", "phi3": "phi3"}.get(name, "llama"))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf"), Text(made)
    for text in TEXTS:
        assert ours.encode_prompt(text) == tuple(theirs.encode(text)), text
        tokens = ours.encode(text)
        assert tokens == tuple(theirs.encode(text, add_special_tokens=False)), text
        assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True), text
    again = AutoTokenizer.from_pretrained(made)  # what SpecSoT.tokenizer is
    for special in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert getattr(again, special) == getattr(theirs, special), special
    turns = [{"role": "user", "content": "Hi"}]
    rendered = ours.render([Message("user", "Hi")], for_answer=False)
    assert rendered == theirs.apply_chat_template(turns, tokenize=False)
    spelled = b"".join(ours.spell(token) for token in ours.encode(TEXTS[3]))
    assert spelled.strip().decode() == TEXTS[3]
    assert len(read_vocabulary(made, len(WORDS[name].tokens))) == len(WORDS[name].tokens)


def test_digits_of_smollm_stand_alone_as_in_its_own_tokenizer(tmp_path: Path) -> None:
    """Transformers' reading of GGUF files does not know of that."""
    words = byte_level("smollm")
    own = Tokenizer(BPE({token: id for id, token in enumerate(words.tokens)}, pairs(words)))
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    own.pre_tokenizer = pre_tokenizers.Sequence(parts)
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens(SPECIAL)
    own.add_tokens(["<think>"])
    text = Text(made_of(words, tmp_path))
    for one in (*TEXTS, "a  7 \n 12½"):
        assert text.encode(one) == tuple(own.encode(one).ids)


def pairs(words: Words) -> list[tuple[str, str]]:
    split = (merge.split(" ") for merge in words.merges or ())
    return [(left, right) for left, right in split]
