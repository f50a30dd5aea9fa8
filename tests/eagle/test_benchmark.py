"""The demo pair: drafts that help, proposals verified by hand, and a benchmark that tells the truth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from specsot.eagle import Eagle, EagleConfig, TreeMaskMode, verify_tree_greedy
from specsot.errors import InvalidRequest
from specsot_bench.eagle.generation import EagleStats, SequenceStats, measure
from specsot_kernels.contract import summarize
from tests.conftest import some
from tests.laws.plain import load

TOPICS = ("Explain Photosynthesis.", "Give an overview of Stages of Sleep.", "Tell me about Social Norms.")


@pytest.fixture(scope="module")
def prompts(demo_model: Path) -> list[list[int]]:
    """Plan turns, as the demo model was trained on them."""
    tokenizer: Any = AutoTokenizer.from_pretrained(demo_model / "base")
    words = ("Plan first, then write each point.", "{}", "Write the plan.")
    turns = [
        [
            {"role": role, "content": word.format(topic)}
            for role, word in zip(("system", "user", "user"), words)
        ]
        for topic in TOPICS
    ]
    return [
        tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False) for one in turns
    ]


def test_the_demo_head_is_accepted_and_changes_nothing(demo_model: Path, prompts: list[list[int]]) -> None:
    target = load(demo_model / "base")
    speculated, stats = Eagle(demo_model / "eagle3", target, EagleConfig(4, 4, 12)).generate(prompts, 80)
    plain, _ = Eagle(None, target).generate(prompts, 80)
    assert speculated == plain
    assert stats.mean_accept_length > 1
    assert stats.acceptance_rate == stats.trees.total_accepted / stats.trees.total_proposed
    assert stats.trees.depth_rates == tuple(sorted(stats.trees.depth_rates, reverse=True))


@pytest.mark.parametrize("mode", some(TreeMaskMode, 1))
def test_what_is_proposed_can_be_verified_by_hand(
    demo_model: Path, prompts: list[list[int]], mode: TreeMaskMode
) -> None:
    """Transformers, fed each path alone, accepts as much of the proposed trees as `generate` does."""
    config = EagleConfig(4, 3, 8, tree_mask_mode=mode)
    target = load(demo_model / "base")
    eagle = Eagle(demo_model / "eagle3", target, config)
    arrays = eagle.propose(prompts)
    tokens, n = arrays.draft_tokens.view(len(prompts), -1), config.num_draft_tokens
    seen = _seen(arrays.tree_mask, [len(prompt) for prompt in prompts], n, mode)
    predict = torch.zeros_like(tokens)
    with torch.inference_mode():
        for b, prompt in enumerate(prompts):
            for node in range(n):
                path = tokens[b][seen[b, node]].tolist()
                assert arrays.positions[b * n + node] == len(prompt) + len(path) - 1
                predict[b, node] = target(torch.tensor([[*prompt, *path]])).logits[0, -1].argmax()
    found = verify_tree_greedy(tokens, predict, *arrays[2:5], num_steps=config.num_steps)
    ids, stats = eagle.generate(prompts, 2 + config.num_steps, eos_token_id=())
    assert found.accept_token_num.tolist() == [one.accept_lengths[0] for one in stats.sequences]
    assert sum(found.accept_token_num.tolist()) > 0
    for b, (prompt, whole) in enumerate(zip(prompts, ids)):
        rows = found.accept_index[b, : found.accept_token_num[b] + 1]
        written = [int(tokens[b, 0]), *found.predicts[rows.long()].tolist()]
        assert whole[len(prompt) :][: len(written)] == written


def _seen(mask: torch.Tensor, lengths: list[int], n: int, mode: TreeMaskMode) -> torch.Tensor:
    """bool [sequences, n, n] of any layout."""
    if mode == TreeMaskMode.QLEN_ONLY:
        return mask.view(-1, n, n)
    if mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        return (mask.long()[:, None] >> torch.arange(n) & 1).bool().view(-1, n, n)
    parts = mask.split([n * (length + n) for length in lengths])
    return torch.stack([part.view(n, -1)[:, -n:] for part in parts])


def test_a_benchmark_runs_both_and_compares_what_they_wrote(
    demo_model: Path, prompts: list[list[int]]
) -> None:
    eagle = Eagle(demo_model / "eagle3", demo_model / "base", EagleConfig(2, 3, 6), dtype="fp32")
    told = eagle.benchmark(prompts, 24, batch_size=2)
    assert (told.identical, told.sequences, len(told.comparison.ratios)) == (3, 3, 2)
    assert told.trees.mean_accept_length > 0.5
    assert told.ratio > 0
    assert "identical            3 of 3" in str(told)
    with pytest.raises(InvalidRequest, match="data must hold prompts"):
        eagle.benchmark([], 24)


def test_ratios_are_those_of_the_seconds_and_differences_are_counted() -> None:
    """Speculation twice as fast in the first batch, half as fast in the second, where it writes otherwise."""
    order: list[str] = []

    def figures(tokens: tuple[int, ...], seconds: float) -> EagleStats:
        one = SequenceStats(tokens, None, (2, 0))
        return EagleStats((one,), 0, 3, seconds, summarize([2, 0], 8, 4))

    def speculate(batch: Any) -> EagleStats:
        order.append(f"s{batch}")
        return figures((1, 2, 3, 4), 1.0 if batch == 0 else 4.0)

    def decode(batch: Any) -> EagleStats:
        order.append(f"d{batch}")
        return figures((1, 2, 3, 4 + batch), 2.0)

    told = measure([0, 1], speculate, decode, num_steps=4)  # type: ignore[list-item]
    assert order == ["s0", "d0", "s0", "d0", "d1", "s1"]
    assert told.comparison.ratios == [2.0, 0.5]
    assert (told.identical, told.sequences) == (1, 2)
    assert told.trees.acceptance_rate == 4 / 16
