"""`specsot verify` on a model pair: what counts as the same, whether a head fits, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from specsot.errors import InvalidRequest
from specsot.events import Finished, Reason, Statistics
from specsot.members import AS_PUBLISHED, Overrides, Quantization
from specsot.service.options import DraftModelOptions
from specsot_app.cli import main
from specsot_app.fleet.demo import small_pair
from specsot_app.fleet.options import FleetOptions
from specsot_bench.core.verify_report import (
    Acceptance,
    CheckedAnswer,
    HeadFit,
    Report,
    TokenDifference,
    as_flags,
    as_json,
    choose_trial,
    lines_of,
    settings_to_try,
)
from specsot_bench.verify.pair import QUESTIONS, choose_questions
from tests.app.stories import StoryFleet
from tests.conftest import some

BASES = {  # of golden cases that have none of their own
    "llama31-eagle3-narrow": "llama31-eagle3",
    "llama31-eagle2-nobias": "llama31-eagle3",
    "vicuna-eagle3-fullvocab": "vicuna-eagle2",
    "qwen3-eagle3-headdim32": "qwen3-eagle3",
}
GOOD, POOR = Acceptance((3, 2, 0, 1)), Acceptance((0, 0, 0, 0, 1))
THETA = Overrides(rope_theta=1e4)


def test_acceptance_by_depth() -> None:
    assert GOOD.by_depth == (0.75, 0.5, 0.25)
    assert GOOD.per_step == 2.5
    assert (Acceptance(()).by_depth, Acceptance(()).per_step) == ((), 1.0)


@pytest.mark.parametrize(
    ("fit", "verdict"),
    [
        (HeadFit(GOOD), "fits"),
        (HeadFit(POOR), "fits"),  # one step of five
        (HeadFit(Acceptance((0,) * 9 + (1,))), "unfit"),
        (HeadFit(GOOD, THETA, GOOD), "fits"),  # explains more, brings nothing
        (HeadFit(POOR, THETA, GOOD), "off"),
        (HeadFit(Acceptance((0,) * 9), THETA, Acceptance((0,) * 9)), "unfit"),
    ],
)
def test_a_head_fits_is_off_or_does_not_fit(fit: HeadFit, verdict: str) -> None:
    assert fit.verdict == verdict


def test_what_is_tried() -> None:
    trials = settings_to_try(Overrides(), (0, 4, 8), 8, 1e6)
    assert [as_flags(trial) for trial in trials] == [
        f"--drafter-rope-theta {theta}" for theta in ("10000", "1000000", "500000")
    ]  # no tap may leave the base
    own = Overrides(rope_theta=7.0)
    assert as_flags(settings_to_try(own, (2, 4, 5), 8, 1e4)[0]) == "--aux-layers 1,3,4 --drafter-rope-theta 7"
    assert all(trial.aux_layers is None for trial in settings_to_try(Overrides(), None, 8, 1e4))


def test_only_a_setting_that_is_better_beyond_doubt_is_chosen() -> None:
    own, other = [-1.0, -2.0, -1.5, -3.0] * 20, Overrides(aux_layers=(1, 3, 4))
    gains = {
        THETA: [value + 0.3 + 0.1 * (at % 3) for at, value in enumerate(own)],
        other: [value + 0.2 for value in own],
    }
    assert choose_trial(own, gains) == THETA
    assert choose_trial(own, {other: [value + 0.01 for value in own]}) is None
    wild = [value + (9.0 if at % 2 else -8.5) for at, value in enumerate(own)]
    assert choose_trial(own, {other: wild}) is None
    assert choose_trial([], {other: []}) is None


def report(*differences: TokenDifference, tokens: int = 100, **more: Any) -> Report:
    answers = (CheckedAnswer("Why?", tokens, 2.0, differences), CheckedAnswer("How?", tokens, 1.0, ()))
    return Report(answers, near=1e-4, drafter="eagle", **more)


def test_a_difference_counts_unless_the_reference_nearly_tied() -> None:
    assert report().holds
    tie, real = TokenDifference(5, 7, 8, 1e-5), TokenDifference(9, 7, 8, 0.5)
    assert report(tie).holds
    assert not report(tie, real).holds
    assert not report(*[replace(tie, at=at) for at in range(3)]).holds  # 3 of 200 are no accident
    lines = list(lines_of(report(tie, real), spell=str))
    assert lines[0].startswith("DIFFERS  100 tokens  2.00 a step  Why?")
    named = "at token 9: wrote 7 '7', Transformers 8 '8'; its two best logits are 5.0e-01 apart"
    assert lines[1].strip() == named
    assert lines[2].startswith("same")
    assert lines[3].startswith("1 of 2 answers are what Transformers writes, token for token (200 tok")


def test_the_assessment_of_the_head_is_stated_plainly() -> None:
    assert list(lines_of(report(fit=HeadFit(GOOD)), str))[-1] == "the head fits"
    off = report(fit=HeadFit(POOR, THETA, GOOD))
    advice = "the head is OFF by one setting: run it with --drafter-rope-theta 10000"
    assert list(lines_of(off, str))[-1] == advice
    assert not off.holds
    unfit = report(fit=HeadFit(Acceptance((0,) * 9)))
    assert list(lines_of(unfit, str))[-1].startswith("the head does NOT FIT this base")
    assert not unfit.holds
    told = as_json(off)
    assert (told["holds"], told["identical"], told["head"]["verdict"]) == (False, True, "off")
    assert told["head"]["better"]["rope_theta"] == 1e4
    assert told["head"]["accepted_by_depth"] == [0.2]


def test_a_fleet_that_never_drafted_is_reported() -> None:
    idle = Report((CheckedAnswer("Why?", 9, 1.0, ()),), 1e-4, "eagle")
    assert "only the split into stages was tested" in list(lines_of(idle, str))[-1]
    assert not replace(idle, drafter="none").idle


def test_a_report_names_the_base_and_what_drafts() -> None:
    told = report(model="models/llama", draft_model="owner/head@main")
    assert list(lines_of(told, str))[:2] == ["model     models/llama", "drafts    owner/head@main"]
    assert (as_json(told)["model"], as_json(told)["draft_model"]) == ("models/llama", "owner/head@main")
    assert as_json(report())["draft_model"] is None


def test_a_rounded_base_is_its_own_reference() -> None:
    told = report(TokenDifference(9, 7, 8, 0.5), rounding="int4, int8 KV")
    lines = list(lines_of(told, spell=str))
    assert "the base in int4, int8 KV by itself 8 '8'" in lines[1]
    assert "answers are what the base in int4, int8 KV by itself writes" in lines[3]
    assert as_json(told)["reference"] == "the base in int4, int8 KV by itself"
    assert as_json(report())["reference"] == "Transformers"


def test_questions_come_from_a_file_or_are_our_own(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("Why?\n\n  And 睡眠?  \n", encoding="utf-8")
    assert choose_questions(file, is_demo=True) == ("Why?", "And 睡眠?")
    assert choose_questions(None, is_demo=False) == QUESTIONS
    assert len(set(choose_questions(None, is_demo=True))) == len(QUESTIONS)
    for content, said in ((b"", "no prompt in it"), (b"\xff", "not UTF-8 text")):
        file.write_bytes(content)
        with pytest.raises(InvalidRequest, match=said):
            choose_questions(file, is_demo=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no/such/file"], "prompts: no/such/file: No such file or directory"),
        (["--max-new-tokens", "0"], "'--max-new-tokens'"),
        (["--near", "-1"], "'--near'"),
        (["--model", "no/such/where"], "no/such/where: no such file or directory"),
        (["--draft-model", "no/such/where"], "no/such/where: no such file or directory"),
        (["--stages", "0"], "stages must be > 0"),
        (["--layers", "0:2,3:8"], "layers"),
        (["--aux-layers", "5,2"], "'--aux-layers'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_clear_line(arguments: list[str], said: str, capsys: Any) -> None:
    assert main(["verify", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.torch
def test_what_works_with_a_head_is_on_one_screen(tmp_path: Path) -> None:
    from specsot.service.options import DraftModelOptions
    from specsot_bench.verify.pair import describe, load_trial
    from tests.models import Shape, write_base, write_dflash, write_dspark, write_head, write_p_eagle

    base = write_base(tmp_path / "base", Shape(positions=64))
    heads = (
        write_dflash(tmp_path / "dflash", base),
        write_p_eagle(tmp_path / "p", base),
        write_p_eagle(tmp_path / "p4", base, depth=4),
        write_head(tmp_path / "eagle3"),
        write_dspark(tmp_path / "dspark", base),
    )
    told = [describe(load_trial(DraftModelOptions(base, draft_model=head), AS_PUBLISHED)) for head in heads]
    assert [lines[:2] for lines in told] == [
        ("DFlash", "one pass for 5 tokens, from what enters layers 1, 2 of the base"),
        ("P-EAGLE", "one pass for all levels of a tree, from what enters layers 2, 3 of the base"),
        ("P-EAGLE", "one pass for 4 tokens, from what enters layers 2, 3 of the base"),
        ("EAGLE-3", "a pass for every level of a tree, from what enters layers 2, 4, 5 of the base"),
        ("DSpark", "one pass for 6 tokens, from what enters layers 1, 2 of the base"),
    ]
    assert told[0][2] == "layers: 2; ids: 200; positions: 64"
    assert [lines[3].rpartition("; ")[2] for lines in told] == [
        "on GPUs with CUDA graphs",
        "on GPUs without CUDA graphs",
        "on GPUs without CUDA graphs",
        "on GPUs with CUDA graphs",
        "on GPUs with CUDA graphs",
    ]
    lines = list(lines_of(report(fit=HeadFit(GOOD, about=told[0]), about="llama: 8 layers"), str))
    assert lines[3:5] == ["base      llama: 8 layers", "head      DFlash"]
    assert len(lines) == 10


@pytest.mark.torch
def test_the_demo_pair_holds(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "prompts"
    file.write_text("Give an overview of Stages of Sleep.\nExplain tides.\n")
    assert main(["verify", str(file), "--max-new-tokens", "24", "--layers", "0:2,2:3,3:8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["identical"], told["tokens"], told["drafter"], told["idle"]) == (True, 48, "eagle", False)
    assert told["head"]["verdict"] == "fits"
    assert told["draft_model"] == str(small_pair() / "eagle3")
    assert told["head"]["accepted_by_depth"][0] > 0.3


@pytest.mark.torch
def test_a_gguf_file_writes_what_transformers_reads_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """SmolLM2's own file is in `test_smollm2.py`: there Transformers takes half a minute to open it."""
    from tests.model.gguf_files import KINDS, write_gguf
    from tests.model.test_gguf_tokenizer import WORDS
    from tests.model.tiny import write_model

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = WORDS["gpt-2"]
    model = write_model(tmp_path / "hf", vocab_size=len(words.tokens), hidden_size=128, intermediate_size=128)
    made = write_gguf(tmp_path / "m.gguf", model, KINDS, words)
    file = tmp_path / "prompts"
    file.write_text("Explain tides.\nWhy is the sky blue?\n")
    given = ["--model", str(made), "--drafter", "none", "--stages", "2", "--dtype", "fp32"]
    assert main(["verify", str(file), *given, "--max-new-tokens", "16", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["holds"], told["reference"]) == (True, "Transformers")
    assert 0 < told["tokens"] <= 32


@pytest.mark.full  # fleets of processes answer in tests/laws and tests/endpoints, and are asked as any other
@pytest.mark.torch
@pytest.mark.processes
def test_a_fleet_of_processes_is_verified_the_same_way(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "prompts"
    file.write_text("Explain tides.\n")
    assert main(["verify", str(file), "--fleet", "processes", "--stages", "1", "--max-new-tokens", "12"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["model", "drafts"]
    assert lines[2].startswith("same      12 tokens")
    assert lines[-1] == "the head fits"


@pytest.mark.torch
@pytest.mark.parametrize(
    ("rounding", "reference"), [(None, "Transformers"), ("fp8", "the base in fp8 by itself")]
)
def test_a_fleet_that_lies_is_found_out(
    rounding: Quantization | None, reference: str, capsys: Any, tmp_path: Path
) -> None:
    from specsot_bench.verify import pair

    told = Finished(Reason.STOP, "x", (5, 6, 7), Statistics(mean_accepted=1.5))

    async def opener(wanted: FleetOptions) -> StoryFleet:
        return StoryFleet([told])

    file = tmp_path / "prompts"
    file.write_text("Explain tides.\n")
    wanted = FleetOptions(dtype="fp32", drafter="none", quantization=rounding)
    assert pair.verify(wanted, file, 8, 1e-4, as_one_object=False, opener=opener) == 1
    named, *lines = capsys.readouterr().out.splitlines()
    assert named.split() == ["model", str(small_pair() / "base")]
    assert lines[0].startswith("DIFFERS    3 tokens")
    assert lines[1].strip().startswith("at token 0: wrote 5 ")
    assert lines[-2].startswith(f"0 of 1 answers are what {reference} writes")
    assert lines[-1].startswith("base      llama: 8 layers, any ranges of them, ")


@pytest.mark.torch
def test_the_reference_names_every_token_it_would_not_have_written(demo_model: Path) -> None:
    import torch

    from specsot.service.options import ModelOptions
    from specsot_bench.reference_model import compare, load_decoder, of_base, of_transformers

    reference, prompt = of_transformers(demo_model / "base", torch.float32, "cpu"), list(range(300, 310))
    written: list[int] = []
    for _ in range(6):
        (wish,) = compare(reference, prompt, written, end_ids=[])
        assert (wish.at, wish.ours) == (len(written), None)
        written.append(wish.theirs)
    assert compare(reference, prompt, written, end_ids=None) == []
    itself = of_base(load_decoder(ModelOptions(demo_model / "base", dtype="fp32")))
    assert compare(itself, prompt, written, end_ids=None) == []
    (own,), (theirs,) = (compare(one, prompt, written, end_ids=[]) for one in (itself, reference))
    assert (own.at, own.theirs, own.gap) == (6, theirs.theirs, pytest.approx(theirs.gap, abs=1e-3))
    changed = [*written[:3], written[3] + 1]
    (found,) = compare(reference, prompt, changed, end_ids=None)
    assert (found.at, found.ours, found.theirs) == (3, changed[3], written[3])
    assert found.gap > 0


@pytest.mark.torch
@pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")
def test_a_base_in_few_bits_gives_a_head_its_states_as_in_a_ring(demo_model: Path) -> None:
    import torch

    from specsot.service.options import ModelOptions
    from specsot_bench.reference_model import feed_base, load_decoder

    torch.manual_seed(1)
    tokens, taps = torch.arange(300, 306), {layer: torch.randn(16, 128) for layer in (2, 8)}
    options = ModelOptions(demo_model / "base", dtype="fp32")
    whole, packed = (load_decoder(one) for one in (options, replace(options, quantization="int8")))
    (_, wanted), (_, found) = (feed_base(one, tokens, taps) for one in (whole, packed))
    assert wanted is not None
    assert found is not None
    assert (found - wanted).norm() < 0.1 * wanted.norm()


@pytest.mark.torch
@pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")
def test_a_head_in_few_bits_is_tried_on_its_base(demo_model: Path) -> None:
    """One kernel runs its layer, over columns that it has planned itself."""
    import torch

    from specsot_bench.reference_model import load_decoder
    from specsot_bench.verify.pair import load_trial, log_probs_of

    spoken = [(tuple(range(300, 308)), tuple(range(308, 324)))]
    options = DraftModelOptions(demo_model / "base", dtype="fp32", draft_model=demo_model / "eagle3")
    wanted, found = (
        torch.tensor(log_probs_of(load_decoder(one), load_trial(one, AS_PUBLISHED), spoken))
        for one in (options, replace(options, quantization="int8"))
    )
    assert len(found) == len(wanted) > 0
    assert 0 < (found - wanted).norm() < 0.1 * wanted.norm()


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "base", "overrides", "verdict", "flags"),
    some(
        [
            *(
                (name, None, Overrides(), "fits", "")
                for name in ("llama31-eagle3", "qwen3-eagle3", "mixtral-eagle2")
            ),
            ("llama31-eagle3", None, Overrides(aux_layers=(3, 5, 6)), "off", "--aux-layers 2,4,5"),
            ("llama31-eagle3", "vicuna-eagle2", Overrides(), "unfit", ""),
        ],
        *(0, 3),
    ),
)
def test_heads_on_their_bases_and_on_others(
    name: str, base: str | None, overrides: Overrides, verdict: str, flags: str, reference: Path
) -> None:

    from specsot_bench.verify.pair import measure_fit

    golden = reference / "golden" / "eagle"
    owner = golden / (base or BASES.get(name, name))
    prompts = json.loads((owner / "vectors.json").read_text())["prompts"]
    spoken = [(tuple(one["prompt_ids"]), tuple(one["base_greedy_ids"])) for one in prompts]
    pair = DraftModelOptions(
        owner / "base",
        "bin",
        "fp32",
        draft_model=golden / name / "head",
        draft_format="bin",
        overrides=overrides,
    )
    fit = measure_fit(pair, spoken)
    assert fit.verdict == verdict
    if verdict == "off":
        assert fit.trial is not None
        assert as_flags(fit.trial) == flags
