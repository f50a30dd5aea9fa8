"""`specsot bench gpu`: what its floors count, and what it refuses. What it measures needs a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specsot.checkpoint.config import make_config
from specsot.core.tree import Tree
from specsot.errors import InvalidRequest
from specsot.grammar import TokenAutomaton
from specsot.members import Range, TreeShape
from specsot_drafter.proposers.eagle import EagleProposer
from specsot_lab.bench.acceptance import chance_of, even_ranks, even_runs
from specsot_lab.bench.clock import RowLog
from specsot_lab.bench.gpu import NAME_KEYS, ROWS, GpuRun, measure
from specsot_lab.bench.gpu_drafts import head_shape, made_up_head
from specsot_lab.bench.gpu_loop import Drafting, GpuLoop, RequestPart
from specsot_lab.bench.gpu_product import RULES, list_pieces, plan_pieces, vocabulary_with
from specsot_lab.bench.gpu_replay import (
    LEVEL_CHANCES,
    RECORDED_RANKS,
    Ranks,
    Replay,
    grow_tree,
    scaled_ranks,
    tau_of,
)
from specsot_lab.bench.gpu_speculation import PLANS, SKELETON, scaled_lengths
from specsot_lab.bench.gpu_steps import (
    MAX_KERNELS,
    Speeds,
    bytes_of_a_pass,
    exclusive_times,
    floor_of_draft,
    floor_of_step,
    longest_kernels,
    random_parents,
)
from specsot_lab.bench.synthetic_models import (
    SHAPES,
    MadeUp,
    NextTokenWeights,
    bytes_of_a_token,
    bytes_of_kv,
    config_of,
)
from specsot_model.decoder import Decoder


def test_a_token_reads_all_of_a_model_but_its_embeddings() -> None:
    llama = config_of("Llama-3.1-8B")
    embedding = 128256 * 4096
    assert bytes_of_a_token(llama, 2) == 2 * (8_030_261_248 - embedding), "as published, without its table"
    assert bytes_of_kv(llama, 1024, 2) == 1024 * 128 * 1024, "128 KiB a row"
    qwen = config_of("Qwen3-4B")
    norms = 36 * 2 * 128  # over heads, which the floor leaves out
    assert bytes_of_a_token(qwen, 2) == 2 * (4_022_468_096 - norms), "tied: the table is its head"
    assert bytes_of_a_pass(head_shape(llama)) == pytest.approx(0.75e9, rel=0.01)


def test_what_is_measured_in_turns_has_names_of_its_own_and_is_kept_as_it_comes(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    log = RowLog("gpu", {}, file, *NAME_KEYS)
    for number, row in enumerate([{"what": "a", "rows": 1}, {"what": "b"}, {"what": "a", "rows": 1}], 1):
        log.add(row)
        assert len(json.loads(file.read_text())["rows"]) == number
    assert [row["name"] for row in log.rows] == ["a, rows 1", "b", "a, rows 1, turn 2"]


def test_an_unknown_part_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(InvalidRequest, match="got tides"):
        measure(GpuRun(("Qwen3-4B",), only=("steps", "tides")), None)


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="only Llama"):
        config_of("Llama")


@pytest.mark.parametrize("rows", ROWS)
def test_measured_trees_are_trees(rows: int) -> None:
    assert len(Tree(tuple(range(rows)), random_parents(rows))) == rows


def test_made_up_weights_have_the_shape_that_is_asked_for() -> None:
    made = MadeUp()
    assert made.expect("layers.0.mlp.down_proj.weight", (3, 5), torch.float32, "cpu").shape == (3, 5)
    assert made.expect("norm.weight", (4,), torch.float32, "cpu").tolist() == [1, 1, 1, 1]


SMALL: dict[str, Any] = {
    **SHAPES["Llama-3.1-8B"],
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 2000,
}


def small_decoder() -> Decoder:
    config = make_config(SMALL, {}, Path("small"))
    return Decoder(config, NextTokenWeights(), Range(0, 8), torch.float32, torch.device("cpu"))


def test_weights_that_tell_say_the_next_token() -> None:
    decoder, tokens = small_decoder(), torch.tensor([0, 7, 1999])
    assert decoder.logits(decoder.embed(tokens)).argmax(-1).tolist() == [1, 8, 0]


def test_a_chance_brings_as_many_tokens_as_were_published() -> None:
    chance = chance_of(6.13, 8)
    assert 1 + sum(chance**n for n in range(1, 9)) == pytest.approx(6.13)
    brought = [1 + min(run, 8) for run in islice(even_runs(chance), 150)]
    assert sum(brought) / 150 == pytest.approx(6.13, rel=0.01), "few steps have the mean already"
    assert set(brought) == set(range(1, 10))


def test_shares_of_a_plan_make_up_the_whole() -> None:
    assert scaled_lengths((1, 1, 2), 10) == (2, 3, 5)
    assert all(sum(scaled_lengths(plan, 900)) == 900 and min(scaled_lengths(plan, 900)) > 0 for plan in PLANS)


def test_a_step_takes_at_least_its_bytes_or_its_products() -> None:
    llama, speeds = config_of("Llama-3.1-8B"), Speeds(copy_speed=4e12, multiply_speed=800e12)
    weights = bytes_of_a_token(llama, 2)
    read = (weights + 1024 * 128 * 1024) / 4e12
    assert (
        floor_of_step(llama, speeds, 1, 1024) == floor_of_step(llama, speeds, 64, 1024) == pytest.approx(read)
    )
    assert floor_of_step(llama, speeds, 512, 1024) == pytest.approx(512 * weights / 800e12)
    shape = head_shape(llama)
    assert floor_of_draft(shape, speeds, 8, 1) == pytest.approx(8 * bytes_of_a_pass(shape) / 2 / 4e12)


def test_a_profile_names_what_takes_longest() -> None:
    spent = {f"kernel_{number}": 1.0 + number for number in range(MAX_KERNELS + 2)}
    told = longest_kernels(spent | {"void gemm<3, float>(int)": 50.0, "void gemm<4, float>(int)": 50.0})
    assert next(iter(told.items())) == ("gemm", 100.0)
    assert told["others"] == 1 + 2 + 3
    assert len(told) == MAX_KERNELS + 1


def test_what_kernels_overlap_counts_once() -> None:
    spans = [(8.0, 12.0, "early"), (0.0, 10.0, "long"), (20.0, 21.0, "early"), (2.0, 4.0, "hidden")]
    assert exclusive_times(spans) == {"long": 10.0, "hidden": 0.0, "early": 2.0 + 1.0}


@torch.inference_mode()
def test_a_replayed_request_writes_all_its_branches() -> None:
    """Six branches of different lengths behind one skeleton, drafted and plain."""
    decoder = small_decoder()
    head = made_up_head(decoder, replace(head_shape(decoder.config), vocab=decoder.config.vocab))
    drafting = Drafting(head, TreeShape(3, 4, 12, fixed=True), 0.8, 30)
    lengths = (3, 40, 7, 1, 12, 5)
    for drafted in (drafting, None):
        clock = GpuLoop(decoder, 40, 64, drafted).write(100, (RequestPart(3, (9,)), RequestPart(5, lengths)))
        assert clock.tokens == 9 + sum(lengths)
        assert max(clock.step_rows) == 6 * 5, "the branches' own prompts, and later 30 rows for all trees"
        assert 0 < clock.prompt_seconds < clock.total_seconds
        if drafted is None:
            assert clock.steps == 9 + 40
            continue
        assert clock.steps < 30
        assert 12 in clock.step_rows[-3:], "the last one has a whole tree, until its text is about to end"


@torch.inference_mode()
def test_paused_steps_have_no_drafts() -> None:
    decoder = small_decoder()
    head = made_up_head(decoder, replace(head_shape(decoder.config), vocab=decoder.config.vocab))
    loop = GpuLoop(decoder, 40, 64, Drafting(head, TreeShape(3, 4, 12, fixed=True), 0.8, 30))
    assert set(loop.run(20, 3, 10, paused=True).step_rows) == {3}
    assert max(loop.run(20, 3, 10).step_rows) > 3


@pytest.mark.parametrize("at_once", [False, True])
def test_a_replay_has_the_tuner_of_its_head(at_once: bool) -> None:
    """Where all levels grow at once that is another one than where somebody is asked between them."""
    decoder = small_decoder()
    inner = EagleProposer(made_up_head(decoder, head_shape(decoder.config)), TreeShape(2, 2, 4), 4, 16)
    inner.at_once = at_once
    assert Replay(inner, 0.5, decoder.config.vocab, 2, 3).at_once == at_once


@pytest.mark.parametrize("ranks", [LEVEL_CHANCES, RECORDED_RANKS], ids=["tau told", "by node rank"])
def test_a_replayed_bush_is_one_and_its_first_path_the_likeliest(ranks: Ranks) -> None:
    bush = grow_tree(10, 8, ranks)
    path = bush.follow((0,) * 8)
    assert len(bush.scores) == 10 + 7 * 100
    above = [0.0, *bush.scores.tolist()]
    assert all(score <= above[parent] for score, parent in zip(bush.scores.tolist(), bush.parents.tolist()))
    assert [bush.parents[node] for node in path] == [0, *(node + 1 for node in path[:-1])]
    assert all(
        bush.scores[node] == bush.scores[bush.depths == depth].max() for depth, node in enumerate(path, 1)
    )
    other = bush.follow((1, 0, None, 0))
    assert [bush.parents[node] for node in other] == [0, other[0] + 1]
    assert bush.scores[other[1]] == pytest.approx(np.log(ranks[1] * ranks[0]))
    assert bush.follow((9, 9, 9)) == [9, 109], "all of the first level are fed, the best of the others"


def test_a_node_is_worth_what_it_adds() -> None:
    """By node rank 60 nodes bring what was published, fewer bring less, and draws say so, too."""
    ranks = scaled_ranks(6.13, 10, 8, 60)
    bush = grow_tree(10, 8, ranks)
    for nodes, tau in ((60, 6.13), (16, 5.51), (8, 4.99)):
        assert tau_of(ranks, 10, 8, nodes) == pytest.approx(tau, rel=0.02)
        kept = set(np.argsort(-bush.scores, kind="stable")[: nodes - 1].tolist())
        draws = zip(*(even_ranks(ranks, level) for level in range(8)))
        brought = [
            1 + len(list(takewhile(kept.__contains__, bush.follow(draw)))) for draw in islice(draws, 400)
        ]
        assert sum(brought) / 400 == pytest.approx(tau, rel=0.03)


def test_the_given_text_is_a_plan_and_a_list() -> None:
    """Token for token what the grammars allow, from the first on."""
    vocabulary = vocabulary_with(4000, 300, plan_pieces())
    rules, state = TokenAutomaton(vocabulary, RULES), TokenAutomaton(vocabulary, RULES).start()
    for place in range(len(plan_pieces())):
        after = rules.advance(state, 300 + place)
        assert after is not None
        state = after
    assert rules.finished(state)
    assert abs(len(plan_pieces()) - SKELETON) < 10
    written = b"".join(islice(list_pieces(), 500)).decode()
    words = json.loads(written[: written.rindex('",') + 1] + "]")
    assert len(words) > 30
