"""A head learns from what its base writes, goes on exactly, and drafts as well as its trainer says."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specsot.checkpoint.config import read_config
from specsot.eagle import Eagle, EagleConfig
from specsot.errors import InvalidRequest, ModelError
from specsot.members import Range, TreeShape
from specsot_drafter.heads import HeadRows
from specsot_drafter.heads.loading import load_head
from specsot_drafter.heads.mtp import load_mtp
from specsot_lab.bench import ranks
from specsot_lab.train import answers, trainer
from specsot_lab.train import rows as stock
from specsot_lab.train.answers import Writer
from specsot_lab.train.mtp import LearningMtp, check_trainable, initialise_mtp, write_mtp
from specsot_lab.train.packing import pack_head, quantize_rows
from specsot_lab.train.running import train
from specsot_lab.train.settings import AnswerOptions, HeadPlan, Learning, TrainOptions
from specsot_model.attention import RowSpan
from specsot_model.decoder import Decoder
from specsot_model.published import open_weights
from tests.conftest import some
from tests.laws.ring import Setup, ring_of
from tests.model.test_families import LINEAR
from tests.model.tiny import write_model
from tests.models import Shape, write_base

SHAPE = Shape(hidden=32, heads=2, kv_heads=1, head_dim=16, inner=48, vocabulary=60)
DEPTH = 3
LEARNING = Learning(
    steps=40, batch_tokens=512, rate=3e-3, warmup=2, depth=DEPTH, length=64, held_out=0.2, every=20
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"), SHAPE)


@pytest.fixture(scope="module")
def rows(base: Path) -> list[stock.Row]:
    """The base's own greedy texts."""
    decoder = Decoder.load(base, Range(0, SHAPE.layers), torch.float32, "cpu")
    dice = np.random.default_rng(3)
    prompts = [dice.integers(2, 60, size).tolist() for size in dice.integers(3, 9, 24)]
    written = Writer(decoder, (), 8).write(prompts, 24)
    return [stock.row_of(((a, False), (b, True)), n) for n, (a, b) in enumerate(zip(prompts, written))]


PLANS = {
    "eagle3": HeadPlan(vocabulary=50),
    "dflash": HeadPlan("dflash", layers=2),
    "causal": HeadPlan("dflash", layers=1, causal_head=True, taps=(1, 3)),
    "p-eagle": HeadPlan("p-eagle", layers=2, vocabulary=50),
    "narrow, by the base's lm_head": HeadPlan(vocabulary=50, width=16, shared_lm_head=True),
    "narrow, with its own lm_head": HeadPlan(vocabulary=50, width=16),
    "by the base's lm_head": HeadPlan(vocabulary=50, shared_lm_head=True),
    "dspark": HeadPlan("dspark", layers=1),
}
MTP = HeadPlan("mtp")


@pytest.fixture(scope="module", params=some(PLANS, 0, 1, 3, 4, 7))
def plan(request: pytest.FixtureRequest) -> HeadPlan:
    return PLANS.get(request.param, MTP)


def wanted(
    base: Path, output: Path, rows: list[stock.Row], plan: HeadPlan, learning: Learning = LEARNING
) -> TrainOptions:
    if not (output / "training").exists():
        stock.save(rows, output / "training" / "rows.npz")
    return TrainOptions(base, output, (), (), (), None, plan, learning, AnswerOptions(), "fp32", "cpu")


def run(asked: TrainOptions) -> str:
    out = io.StringIO()
    assert train(asked, out, io.StringIO()) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def trained(
    base: Path, rows: list[stock.Row], plan: HeadPlan, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    output = tmp_path_factory.mktemp("trained")
    run(wanted(base, output, rows, plan))
    return output


def log_of(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "training" / "log.jsonl").read_text().splitlines()]


def test_the_loss_falls(trained: Path) -> None:
    _, early, late = log_of(trained)
    assert late["loss"] < 0.9 * early["loss"]


@pytest.mark.parametrize("plan", some(PLANS, 1), indirect=True, scope="module")
def test_what_goes_on_ends_with_the_weights_of_an_unbroken_run(
    trained: Path,
    base: Path,
    rows: list[stock.Row],
    plan: HeadPlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, save = wanted(base, tmp_path, rows, plan), trainer.save

    def save_and_break(*given: object) -> None:
        save(*given)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(trainer, "save", save_and_break)
        with pytest.raises(KeyboardInterrupt):
            run(asked)
    run(asked)
    whole, resumed = (load_file(each / "model.safetensors") for each in (trained, tmp_path))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("plan", some(PLANS, 1), indirect=True, scope="module")
def test_a_checkpoint_of_another_run_is_refused(
    trained: Path, base: Path, rows: list[stock.Row], plan: HeadPlan
) -> None:
    with pytest.raises(ModelError, match="asked for something else"):
        run(wanted(base, trained, rows, plan, replace(LEARNING, rate=1e-4)))


@pytest.mark.parametrize("plan", some(PLANS, 1), indirect=True, scope="module")
def test_a_checkpoint_made_with_another_base_is_refused(
    trained: Path, rows: list[stock.Row], plan: HeadPlan, tmp_path: Path
) -> None:
    other = write_base(tmp_path, SHAPE, seed=5)
    with pytest.raises(ModelError, match="asked for something else"):
        run(wanted(other, trained, rows, plan))


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    head = torch.nn.Linear(2, 2)
    optimiser = torch.optim.AdamW(head.parameters())
    head(torch.ones(2)).sum().backward()
    optimiser.step()
    trainer.save(tmp_path, head, optimiser, 1, {})
    assert trainer.restore(tmp_path, head, optimiser, {}) == 1
    file = tmp_path / trainer.CHECKPOINT_FILE
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match="not a whole checkpoint"):
        trainer.restore(tmp_path, head, optimiser, {})


def test_the_written_head_drafts_as_its_trainer_measured(
    trained: Path, base: Path, rows: list[stock.Row], plan: HeadPlan
) -> None:
    says = json.loads((trained / "config.json").read_text())
    assert says.get("para_depths") == (DEPTH if plan.kind == "p-eagle" else None)
    _, measured = stock.split(rows, LEARNING.held_out, LEARNING.seed)
    config = EagleConfig(topk=1, num_steps=DEPTH, num_draft_tokens=DEPTH + 1)
    product = Eagle(trained, base, config, dtype="fp32")
    accepted = steps = 0
    for row in measured:
        prompt = row.tokens[~row.learned].tolist()
        written, stats = product.generate([prompt], len(row.tokens) - len(prompt), eos_token_id=())
        assert written[0] == row.tokens.tolist()
        lengths = stats.sequences[0].accept_lengths
        steps += len(lengths)
        accepted += sum(lengths)
    told = log_of(trained)[-1]
    # The last token of a limited text counts as its chain's bonus there, and as a draft here.
    assert accepted / steps + 1 == pytest.approx(told["tokens_per_step"], abs=len(measured) / steps)
    assert accepted > 0


@pytest.mark.parametrize("plan", some(PLANS, 0, 7), indirect=True, scope="module")
def test_replayed_chains_and_trees_accept_what_decoding_accepts(
    trained: Path, base: Path, rows: list[stock.Row]
) -> None:
    """`specsot bench ranks --shapes` reads texts that exist, and never decodes."""
    decoder = Decoder.load(base, None, torch.float32, "cpu")
    counts = ranks.ShapeSteps(DEPTH, (5, 12))
    ranks.record_trees(decoder, load_head(trained, base, torch.float32, "cpu"), rows[:3], counts, 24)
    chain = EagleConfig(topk=1, num_steps=DEPTH, num_draft_tokens=DEPTH + 1)
    trees = [EagleConfig(topk=ranks.TOP_K, num_steps=ranks.LEVELS, num_draft_tokens=n + 1) for n in (5, 12)]
    for row, config in zip(counts.rows(), [chain, *trees], strict=True):
        product = Eagle(trained, base, config, dtype="fp32")
        steps = tokens = 0
        for text in rows[:3]:
            prompt = text.tokens[~text.learned].tolist()
            _, stats = product.generate([prompt], 24 + ranks.LEVELS, eos_token_id=())
            written = 0
            for length in stats.sequences[0].accept_lengths:
                if written >= 24 - ranks.LEVELS:  # the replay ends where the tokens after a tree are unknown
                    break
                written += length + 1
                steps += 1
            tokens += written
        assert (row["steps"], row["tokens a step"]) == (steps, round(tokens / steps, 3))


@pytest.mark.parametrize("plan", ["mtp"], indirect=True, scope="module")
async def test_a_trained_mtp_layer_drafts_in_a_ring_as_its_trainer_measured(
    trained: Path, base: Path, rows: list[stock.Row], plan: HeadPlan
) -> None:
    """Its own outputs in place of the base's states, several tokens deep; prompts reach it, too."""
    _, early, late = log_of(trained)
    assert late["loss"] < 0.9 * early["loss"]
    _, measured = stock.split(rows, LEARNING.held_out, LEARNING.seed)
    chain = TreeShape(DEPTH - 1, 1, DEPTH + 1, fixed=True)
    setup = Setup(base, trained, 2, "packed", chain, method="mtp")
    texts, per_step = list[list[int]](), list[int]()
    async with ring_of(setup) as ring:
        for row in measured:
            prompt = row.tokens[~row.learned].tolist()
            texts += await ring.write_all([prompt], len(row.tokens) - len(prompt))
        per_step = [tokens for text in ring.texts.values() for tokens in text.draft_rounds[1:]]
    assert texts == [row.tokens[row.learned].tolist() for row in measured]
    told = log_of(trained)[-1]["tokens_per_step"]
    assert sum(per_step) / len(per_step) == pytest.approx(told, abs=len(measured) / len(per_step))
    assert told > 1.3


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("gemma3_text", {}), ("llama", {"attention_bias": True}), ("llama", {"rope_parameters": LINEAR})],
)
def test_a_base_whose_layers_are_not_trained_is_refused(
    tmp_path: Path, kind: str, changes: dict[str, object]
) -> None:
    write_model(tmp_path / "base", kind, **changes)
    with pytest.raises(InvalidRequest, match="an MTP layer is trained for Llama, Qwen2 and Qwen3"):
        check_trainable(read_config(tmp_path / "base"))


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_an_untrained_mtp_layer_computes_what_its_file_does(tmp_path: Path, kind: str) -> None:
    """With biases or norms of heads, as the base's layers have them."""
    write_model(tmp_path / "base", kind, tie_word_embeddings=True)
    config, files = read_config(tmp_path / "base"), open_weights(tmp_path / "base")
    table, norm = (
        files.tensor(f"model.{one}.weight", torch.float32, "cpu") for one in ("embed_tokens", "norm")
    )
    layer = LearningMtp(config, table, norm)
    initialise_mtp(layer, files, config, 3)
    write_mtp(tmp_path / "mtp", layer, tmp_path / "base", torch.float32)
    head = load_mtp(tmp_path / "mtp", tmp_path / "base", torch.float32, "cpu")
    dice = torch.Generator().manual_seed(4)
    states, tokens = torch.randn(9, 32, generator=dice), torch.arange(20, 29)
    with torch.inference_mode():
        expected = layer.forward_step(table[tokens][None], layer.features(states)[None], layer.empty_kv())[0]
        at = torch.arange(9)
        plan = head.plan([RowSpan(9, 0, 9, (0,))], 16)
        outputs = head.forward(tokens, head.features(states), HeadRows(at, at, plan, head.make_kv(1, 16)))
        torch.testing.assert_close(outputs, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(head.logits(outputs), layer.logits(expected), atol=1e-4, rtol=0)


def test_generated_training_rows_equal_plain_decoding(base: Path, rows: list[stock.Row]) -> None:
    plain = Eagle(None, base, dtype="fp32")
    row = rows[0]
    prompt = row.tokens[~row.learned].tolist()
    written, _ = plain.generate([prompt], len(row.tokens) - len(prompt), eos_token_id=())
    assert written[0] == row.tokens.tolist()


def test_prompts_read_in_parts_are_answered_alike(
    base: Path, rows: list[stock.Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = Decoder.load(base, None, torch.float32, "cpu")
    prompts = [row.tokens[~row.learned].tolist() for row in rows]
    whole = Writer(decoder, (), len(prompts)).write(prompts, 12)
    monkeypatch.setattr(answers, "MAX_PREFILL_TOKENS", 20)
    assert Writer(decoder, (), len(prompts)).write(prompts, 12) == whole


@pytest.mark.parametrize("plan", some(PLANS, 0, 4), indirect=True, scope="module")
def test_a_head_packed_in_8_bits_is_loaded_as_its_codes_say(
    trained: Path, base: Path, plan: HeadPlan, tmp_path: Path
) -> None:
    pack_head(trained, tmp_path)
    head = load_head(tmp_path, base, torch.float32, "cpu")
    codes, scales = quantize_rows(load_file(trained / "model.safetensors")["midlayer.mlp.down_proj.weight"])
    weight = head.decoder.first.down.weight
    assert weight is not None
    assert torch.equal(weight, codes.float() * scales.float())
    assert (tmp_path / "model.safetensors").stat().st_size < (
        trained / "model.safetensors"
    ).stat().st_size / 2
