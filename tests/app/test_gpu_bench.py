"""`specsot bench gpu`: what its floors count, and what it refuses. What it measures needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specsot.errors import InvalidRequest
from specsot.members import Range
from specsot.model.config import make_config
from specsot.model.decoder import Decoder
from specsot.tree import Tree
from specsot_app.bench.gpu import ROWS
from specsot_app.bench.gpu_drafts import bytes_of_a_pass, head_shape
from specsot_app.bench.gpu_laps import parents_of
from specsot_app.bench.gpu_replay import Telling, grown, rates_of
from specsot_app.bench.shapes import SHAPES, MadeUp, bytes_of_a_token, bytes_of_kv, config_of

pytestmark = pytest.mark.torch


def test_a_token_reads_all_of_a_model_but_its_embeddings() -> None:
    llama = config_of("Llama-3.1-8B")
    embedding = 128256 * 4096
    assert bytes_of_a_token(llama, 2) == 2 * (8_030_261_248 - embedding), "as published, without its table"
    assert bytes_of_kv(llama, 1024, 2) == 1024 * 128 * 1024, "128 KiB a row"
    qwen = config_of("Qwen3-4B")
    norms = 36 * 2 * 128  # over heads, which the floor leaves out
    assert bytes_of_a_token(qwen, 2) == 2 * (4_022_468_096 - norms), "tied: the table is its head"
    assert bytes_of_a_pass(head_shape(llama)) == pytest.approx(0.75e9, rel=0.01)


def test_a_shape_nobody_knows_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="only Llama"):
        config_of("Llama")


@pytest.mark.parametrize("rows", ROWS)
def test_measured_trees_are_trees(rows: int) -> None:
    assert len(Tree(tuple(range(rows)), parents_of(rows))) == rows


def test_made_up_weights_have_the_shape_that_is_asked_for() -> None:
    made = MadeUp()
    assert made.expect("layers.0.mlp.down_proj.weight", (3, 5), torch.float32, "cpu").shape == (3, 5)
    assert made.expect("norm.weight", (4,), torch.float32, "cpu").tolist() == [1, 1, 1, 1]


def test_weights_that_tell_say_the_next_token() -> None:
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    more = {"head_dim": 32, "intermediate_size": 96, "vocab_size": 200}
    config = make_config({**SHAPES["Llama-3.1-8B"], **small, **more}, {}, Path("small"))
    decoder = Decoder(config, Telling(), Range(0, 2), torch.float32, torch.device("cpu"))
    tokens = torch.tensor([0, 7, 199])
    assert decoder.logits(decoder.embed(tokens)).argmax(-1).tolist() == [1, 8, 0]


def test_rates_bring_as_many_tokens_as_were_published() -> None:
    rates = rates_of(6.13, 8)
    assert 1 + sum(rates[0] ** n for n in range(1, 9)) == pytest.approx(6.13)


def test_a_replayed_bush_is_one_and_its_path_the_likeliest() -> None:
    bush = grown(10, 8)
    assert len(bush.scores) == 10 + 7 * 100
    above = [0.0, *bush.scores.tolist()]
    assert all(score <= above[parent] for score, parent in zip(bush.scores.tolist(), bush.parents.tolist()))
    assert [bush.parents[node] for node in bush.path] == [0, *(node + 1 for node in bush.path[:-1])]
    assert all(
        bush.scores[node] == bush.scores[bush.depths == depth].max()
        for depth, node in enumerate(bush.path, 1)
    )
