"""Rows that pad an lm_head beyond the tokenizer are never chosen, whatever their logits and biases are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specsot import SpecSoT
from specsot.core.frames import Opening
from specsot.core.tree import Tree
from specsot.core.vocabulary import read_vocabulary
from specsot.params import Sampling
from specsot_worker.core.accept import DecodeState
from specsot_worker.logprobs import MIN_LOGPROB, token_logprobs
from specsot_worker.penalties import without_tokens
from specsot_worker.sampling import TargetQuery, find_targets

pytestmark = [pytest.mark.slow, pytest.mark.torch]

PADDED, QUESTION = 64, "What are the benefits of exercise?"


@pytest.fixture(scope="module")
def padded(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with padding rows, each of which is three times the row that begins its answers."""
    folder = shutil.copytree(demo_model / "small", tmp_path_factory.mktemp("padded") / "base")
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            rows = 3 * tensors[name][:PADDED]
            tensors[name] = torch.cat((tensors[name], rows))
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + PADDED}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_the_vocabulary_tells_which_rows_are_padding(padded: Path) -> None:
    width = json.loads((padded / "config.json").read_text())["vocab_size"]
    assert read_vocabulary(padded, width).unnamed == tuple(range(width - PADDED, width))


@pytest.mark.parametrize(
    ("temperature", "drafter", "quantization"),
    [(0.0, "ngram", None), (1.0, "ngram", None), (1.0, "none", "int8")],
)
def test_an_answer_is_the_one_of_the_model_without_padding(
    padded: Path, demo_model: Path, temperature: float, drafter: str, quantization: str | None
) -> None:
    width = json.loads((padded / "config.json").read_text())["vocab_size"]
    bias = {width - 1: 100, width - 2: 50}
    asked = {"mode": "direct", "max_new_tokens": 24, "temperature": temperature, "seed": 7, "logprobs": 20}
    options = {"drafter": drafter, "quantization": quantization, "dtype": "fp32"}
    with SpecSoT.from_pretrained(str(demo_model / "small"), **options) as model:
        plain = model.generate_sync(QUESTION, **asked)
    with SpecSoT.from_pretrained(str(padded), **options) as model:
        free, biased = (
            model.generate_sync(QUESTION, **asked),
            model.generate_sync(QUESTION, logit_bias=bias, **asked),
        )
    assert free.tokens == biased.tokens == plain.tokens
    shown = {other.token for one in biased.logprobs for other in one.top}
    assert max(shown) < width - PADDED
    assert [one.chosen.logprob for one in free.logprobs] == pytest.approx(
        [one.chosen.logprob for one in plain.logprobs], abs=1e-3
    )


@pytest.mark.parametrize("barred", [(6, 7), (0, 3, 7)], ids=["last", "holes"])
@pytest.mark.parametrize("bias", [(), ((7, 100.0),)], ids=["", "biased"])
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}, {"temperature": 1e30}]
)
def test_no_node_of_a_tree_chooses_one(barred: tuple[int, ...], bias, sampling) -> None:
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    logits[:, list(barred)] = 90.0
    masked = without_tokens(lambda hidden: hidden.clone(), barred)(logits)
    for seed in range(40):
        opening = Opening(1, 1, sampling=Sampling(logit_bias=bias, **sampling), seed=seed, limit=9)
        tree = Tree((1, 7, 2, 7), (0, 0, 1, 2))
        ((*targets,),) = find_targets(
            masked, [TargetQuery(DecodeState(opening), 0, tree, 1, ())], at_once=True
        )
        assert targets[0] not in barred
        assert not set(targets) & set(barred)


def test_log_probabilities_do_not_count_them() -> None:
    logits = torch.zeros(1, 8)
    (one,) = token_logprobs(without_tokens(lambda hidden: hidden.clone(), (6, 7))(logits), [2], 6)
    assert one.logprob == pytest.approx(-torch.log(torch.tensor(6.0)).item())
    assert {token for token, _ in one.top} == set(range(6))
    (other,) = token_logprobs(without_tokens(lambda hidden: hidden.clone(), (6, 7))(logits), [7], 0)
    assert other.logprob == MIN_LOGPROB, "a prompt may hold one, and JSON has no infinity"
