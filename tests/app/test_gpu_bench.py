"""`specsot bench gpu`: what its floors count, and what it refuses. What it measures needs a GPU."""

from __future__ import annotations

import pytest
import torch

from specsot.errors import InvalidRequest
from specsot.tree import Tree
from specsot_app.bench.gpu import ROWS, parents_of
from specsot_app.bench.gpu_drafts import bytes_of_a_pass, head_shape
from specsot_app.bench.shapes import MadeUp, bytes_of_a_token, bytes_of_kv, config_of

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
