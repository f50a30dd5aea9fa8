"""Every family of base models behind the whole system: two stages write what Transformers writes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from specsot import SpecSoT
from specsot.errors import ModelError
from specsot.params import Message
from specsot_bench.eagle.models import unnamed_ids_of
from specsot_master.prompts import Prompts
from specsot_master.text import Text
from tests.conftest import some
from tests.model.tiny import pickle_weights, write_model

QUESTION = "Give an overview of Stages of Sleep."
WRITTEN = 24
NEAR = 1e-4  # a top-2 gap below this may be decided either way by rounding
WIDE = {"hidden_size": 64, "initializer_range": 0.1, "max_position_embeddings": 2048}


def give_demo_text(directory: Path, demo: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / "base" / name, directory / name)


def give_neox_text(directory: Path) -> int:
    """A tokenizer made and configured as GPT-NeoX's is: byte-level, no chat template. Returns its size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|padding|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [QUESTION, "user assistant plan point [PLAN] [END] 1.<80><None>[-]"], trainer
    )
    tokenizer.add_tokens([" " * run for run in range(24, 1, -1)])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    settings = {"tokenizer_class": "GPTNeoXTokenizer", "add_prefix_space": False, **names}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer.get_vocab_size()


@pytest.mark.parametrize(
    "kind",
    some(["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "qwen3_next"], 2, 6, 7),
)
def test_two_stages_write_what_transformers_writes(kind: str, tmp_path: Path, demo_model: Path) -> None:
    changes = {"sliding_window": None} if kind == "mistral" else {}
    model = write_model(tmp_path, kind, vocab_size=8192, **{**WIDE, **changes})
    give_demo_text(tmp_path, demo_model)
    expect_plain(tmp_path, model)


def test_a_neox_directory_needs_nothing_else(tmp_path: Path) -> None:
    """Its own kind of tokenizer, no chat template, more logits than tokens, pickled weights."""
    text = give_neox_text(tmp_path)
    model = write_model(tmp_path, "gpt_neox", vocab_size=text + 50, **WIDE)
    pickle_weights(tmp_path)
    with (
        SpecSoT.from_pretrained(str(tmp_path), dtype="fp32", stages=2) as refused,
        pytest.raises(ModelError, match="--model-format bin"),
    ):
        refused.generate_sync(QUESTION)
    expect_plain(tmp_path, model, model_format="bin")


def test_a_neox_plan_holds_to_the_grammar(tmp_path: Path) -> None:
    text = give_neox_text(tmp_path)
    write_model(tmp_path, "gpt_neox", vocab_size=text + 50, **WIDE)
    with SpecSoT.from_pretrained(str(tmp_path), dtype="fp32") as model:
        answer = model.generate_sync(QUESTION, mode="sot", max_new_tokens=128)
    assert re.fullmatch(r"(?:[1-8]\..+\n)+", answer.skeleton)
    assert answer.text


def test_without_a_template_turns_are_written_plainly(tmp_path: Path) -> None:
    give_neox_text(tmp_path)
    text = Text(tmp_path)
    turns = [Message("system", "Be brief."), Message("user", "Two  spaces, 睡眠?")]
    said = "system: Be brief.\n\nuser: Two  spaces, 睡眠?\n\nassistant:"
    assert text.render(turns) == "<|endoftext|>" + said
    assert text.encode(text.render(turns))[0] == 0  # the token, not its letters
    assert text.decode(text.encode(said)) == said
    assert text.end_ids == (0,)


def expect_plain(directory: Path, model: torch.nn.Module, **options: str) -> None:
    """Greedy tokens of an embedded fleet of two stages, each the argmax of Transformers' logits there."""
    with SpecSoT.from_pretrained(str(directory), dtype="fp32", stages=2, **options) as fleet:
        written = fleet.generate_sync(QUESTION, mode="direct", max_new_tokens=WRITTEN, ignore_eos=True).tokens
    prompt = Prompts(directory, Text(directory)).chat((Message("user", QUESTION),))
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *written[:-1]]])).logits[0, len(prompt) - 1 :]
        logits[:, list(unnamed_ids_of(directory, logits.shape[1]))] = -torch.inf  # padding is never written
    first, second = logits.topk(2).values.unbind(-1)
    wrong = (torch.tensor(written) != logits.argmax(-1)) & (first - second >= NEAR)
    assert len(written) == WRITTEN
    assert not wrong.any()
