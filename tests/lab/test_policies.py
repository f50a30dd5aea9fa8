"""Texts scored under KV policies, and what heads look at: against plain passes and rules by hand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from specsot.errors import InvalidRequest
from specsot.params import MAX_TOKENS, HeadPruning, HeadWindows, Pruning, Window
from specsot.service.options import ModelOptions
from specsot_bench.perplexity import Policy, losses
from specsot_bench.reference_model import load_decoder
from specsot_lab.bench.policies import HeadAttention, keep_by_head, measure_heads, rows_seen
from specsot_model.decoder import Decoder
from tests.models import Shape, write_base

TEXT = tuple(random.Random(5).choices(range(200), k=300))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory):
    base = write_base(tmp_path_factory.mktemp("scored") / "base", Shape(layers=2))
    return load_decoder(ModelOptions(base, dtype="fp32"))


def test_losses_are_those_of_one_plain_pass(decoder) -> None:
    from specsot_model.attention import AttentionPlan

    def attend(q: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
        keys, values = layer.transpose(2, 3).flatten(1, 2)[:, : len(q)]
        keys, values = (part.transpose(0, 1).repeat_interleave(q.shape[2], 0) for part in (keys, values))
        done = torch.nn.functional.scaled_dot_product_attention(
            q.flatten(1, 2).transpose(0, 1), keys, values, is_causal=True, scale=1.0
        )
        return done.transpose(0, 1).flatten(1)

    at = torch.arange(len(TEXT))
    plan = AttentionPlan((), (), None, None, attend)
    hidden, _ = decoder.forward(decoder.embed(torch.tensor(TEXT)), at, at, plan, decoder.make_kv(2, 256))
    plain = torch.nn.functional.cross_entropy(
        decoder.logits(hidden)[:-1], torch.tensor(TEXT[1:]), reduction="none"
    )
    torch.testing.assert_close(torch.tensor(losses(decoder, TEXT)), plain, atol=1e-3, rtol=1e-3)
    found = torch.tensor(losses(decoder, TEXT, first_scored=200))
    torch.testing.assert_close(found, plain[199:], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("length", "policy"), [(257, None), (33, Pruning(1, 16, 0))], ids=str)
def test_a_last_token_that_is_read_alone_has_none_to_predict(
    decoder: Decoder, length: int, policy: Policy
) -> None:
    assert len(losses(decoder, TEXT[:length], policy)) == length - 1


@pytest.mark.parametrize(
    "policy", [Window(0, 400), Pruning(1, 16, 0), HeadWindows((((0, MAX_TOKENS),) * 2,) * 2)], ids=str
)
def test_what_hides_nothing_changes_nothing(decoder, policy) -> None:
    found = torch.tensor(losses(decoder, TEXT, policy))
    torch.testing.assert_close(found, torch.tensor(losses(decoder, TEXT)), atol=1e-3, rtol=1e-3)


def test_rows_that_the_last_token_sees(decoder) -> None:
    config = decoder.config
    assert rows_seen(config, 300, None) == 300
    assert rows_seen(config, 300, Window(4, 95)) == 100
    assert rows_seen(config, 300, Pruning(0.5, 100, 0)) == 75 + 100  # 50, then 75 were left
    assert rows_seen(config, 300, Pruning(0.5, 100, 1)) == (300 + 175) / 2
    assert rows_seen(config, 300, HeadWindows((((4, 95), (0, MAX_TOKENS)),) * 2)) == 200
    shares = ((0.0, 1.0), (0.0, 1.0))  # the first head keeps half of its rows, the second all
    assert rows_seen(config, 300, HeadPruning(1.0, 100, 0, shares)) == (175 + 300) / 2
    assert rows_seen(config, 300, HeadPruning(1.0, 100, 1, shares)) == (300 + (175 + 300) / 2) / 2


def test_what_cannot_be_scored_is_refused(decoder, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="first must be in"):
        losses(decoder, TEXT, first_scored=300)
    with pytest.raises(InvalidRequest, match="600 tokens, the model has 512 positions"):
        losses(decoder, TEXT * 2, Pruning())
    assert len(losses(decoder, TEXT * 2, Window(4, 60))) == 599


def test_classes_of_heads_and_what_a_group_keeps() -> None:
    even, wide = HeadAttention(0.01, 0.02, 5, 0.95), HeadAttention(0.1, 0.1, 4, 0.7)
    first, near = HeadAttention(0.8, 0.9, 1, 0.2), HeadAttention(0.1, 0.7, 1, 0.2)
    both, other = HeadAttention(0.4, 0.2, 2, 0.4), HeadAttention(0.1, 0.3, 2, 0.4)
    kinds = [one.kind for one in (even, wide, first, near, both, other)]
    assert kinds == ["dead", "gathering", "sink_positional", "positional", "sink_mixed", "mixed"]
    heads = [even, near, first, other, near, wide]
    kept = [(one["sinks"], one["recent"]) for one in keep_by_head(heads, 3, None)]
    assert kept == [(4, 8), (4, 64), (0, None)]
    assert keep_by_head(heads, 3, 256)[2]["recent"] == 256


def test_importance_is_the_attention_that_pruning_may_take_away() -> None:
    """A KV head has the importance of the query head that reads most of the rows between sinks and newest."""
    sink, near, far = (
        HeadAttention(0.9, 0.5, 1, 0.2),
        HeadAttention(0, 1, 1, 0.2),
        HeadAttention(0.1, 0, 4, 0.7),
    )
    found = [one["importance"] for one in keep_by_head([sink, near, near, far, near, near], 3, None)]
    assert found == [pytest.approx(0.05), pytest.approx(0.9), 0]


def test_heads_of_a_model_without_weights_look_at_all_alike(decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in decoder._blocks:
        monkeypatch.setattr(block, "qkv", lambda x: torch.zeros(len(x), (4 + 2 * 2) * 16))
    looks = measure_heads(decoder, [TEXT])
    assert [len(layer) for layer in looks] == [4, 4]
    for one in looks[0]:
        mean = sum(4 / (row + 1) for row in range(64, 300)) / 236
        assert (one.even, one.kind) == (pytest.approx(1, abs=1e-4), "dead")
        assert one.sink == pytest.approx(mean, rel=1e-3)
