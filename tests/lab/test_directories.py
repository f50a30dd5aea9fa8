"""Model directories with made-up weights: what follows what, to Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specsot_app.fleet.demo import small_pair
from specsot_lab.bench.synthetic_models import next_token_table, write_directory


def test_all_words_are_one_circle_and_others_follow_themselves():
    after, seen, token = next_token_table(12, 9, 1.0), set[int](), 0
    while token not in seen:
        seen.add(token)
        token = int(after[token])
    assert seen == set(range(9))
    assert after[9:].tolist() == [9, 10, 11]


def test_so_many_words_have_another_follower_and_none_has_two():
    after, other = next_token_table(5000, 4000, 1.0), next_token_table(5000, 4000, 0.7)
    assert float((after == other)[:4000].float().mean()) == pytest.approx(0.7, abs=0.03)
    assert sorted(other.tolist()) == list(range(5000))


def test_a_model_says_what_follows_whatever_came_before(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    write_directory(shape, tmp_path, small_pair() / "base", 0.8)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(8192, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        said = model(tokens).logits[0].argmax(-1)
    assert said.tolist() == next_token_table(50304, 8192, 0.8)[tokens[0]].tolist()
