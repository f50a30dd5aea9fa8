"""Reference vectors: recorded cases hold whole, every variant of a head does, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specsot.core.tree import Tree
from tests.conftest import is_full, some
from tests.vectors.checks import check_close, check_same, check_tree
from tests.vectors.comparing import checks
from tests.vectors.making import HERE, SMALL, Kind, write_case

Json = dict[str, Any]
REFERENCE_CASES = (
    "llama31-eagle2-nobias",
    "llama31-eagle3",
    "llama31-eagle3-narrow",
    "mixtral-eagle2",
    "qwen2-eagle2",
    "qwen3-eagle3",
    "qwen3-eagle3-headdim32",
    "vicuna-eagle2",
    "vicuna-eagle3-fullvocab",
)


def differs(case: Path) -> bool:
    """Whether anything does; what comes behind the first difference is not looked at."""
    return any(one.difference is not None for one in checks(case))


def failures(case: Path) -> list[str]:
    """A line for each difference."""
    return [f"{one.name}: {one.difference}" for one in checks(case) if one.difference is not None]


@pytest.mark.parametrize("name", some(REFERENCE_CASES, 2))
def test_a_recorded_case_holds(name: str, reference: Path, tmp_path: Path) -> None:
    """Whole by `make test-all`, else its first prompt."""
    case = reference / "golden" / "eagle" / name
    if not is_full():
        case = begin_of(case, tmp_path / name)
    assert failures(case) == []


def begin_of(case: Path, copy: Path) -> Path:
    """The same case with its first prompt alone."""
    copy.mkdir()
    for each in case.iterdir():
        (copy / each.name).symlink_to(each)
    record = json.loads((case / "vectors.json").read_text())
    record["base"] = str((case / record["base"]).resolve())
    record["prompts"] = record["prompts"][:1]
    record["sampling"] = [one for one in record["sampling"] if one["prompt"] == 0]
    (copy / "vectors.json").unlink()
    (copy / "vectors.json").write_text(json.dumps(record))
    return copy


def test_no_recorded_case_is_left_out(reference: Path) -> None:
    found = {file.parent.name for file in (reference / "golden" / "eagle").glob("*/vectors.json")}
    assert found == set(REFERENCE_CASES)


@pytest.mark.parametrize("name", SMALL)
def test_a_case_of_our_own_holds_whole(name: str) -> None:
    assert failures(HERE / name) == []
    assert sum(file.stat().st_size for file in (HERE / name).rglob("*") if file.is_file()) < 300_000


VARIANTS = {
    "as published": Kind(),
    "speculators": Kind(layout="layers", ids=(2, 4, 5)),
    "residual": Kind(layout="layers", norm_before_residual=True),
    "joint norm": Kind(fusion="joint"),
    "joint norm, wide taps": Kind(fusion="joint", ids=(1, 3, 5, 7), taps=(2, 4, 6, 8)),
    "norm per state": Kind(layout="layers", fusion="each", norm_output=True),
    "normed output": Kind(norm_output=True),
    "no states, no fc": Kind(fusion="none"),
    "whole vocabulary": Kind(drafts=None),
    "the base's lm_head": Kind(drafts=None, own_lm_head=False, config={"draft_vocab_size": None}),
    "narrow": Kind(hidden=12, own_embedding=True, config={"target_hidden_size": 16}),
    "wide heads": Kind(head_dim=10),
    "fc bias": Kind(fc_bias=True),
    "qwen3 layer": Kind(layout="layers", qk_norm=True, qkv_bias=True),
    "two layers": Kind(layout="layers", layers=2),
    "own theta": Kind(theta=777.0),
    "embeddings of its own": Kind(own_embedding=True),
    "outputs of layers": Kind(ids=(1, 3, 4)),
    "two states": Kind(ids=(3, 6), taps=(3, 6)),
    "last output": Kind(ids=(2, 4, 8), taps=(2, 4, 8)),
    "shallow base": Kind(base_layers=4, ids=(1, 2, 3), taps=(2, 3, 4)),
    "eagle 1": Kind(kind="eagle1", drafts=None),
    "eagle 1, biases": Kind(kind="eagle1", drafts=None, fc_bias=True, qkv_bias=True),
    "eagle 1, hass": Kind(kind="eagle1", drafts=None, hass=True, base_layers=3),
    "eagle 1, two layers": Kind(kind="eagle1", drafts=None, layers=2),
}


# Traits together, so that a few heads have all of them; one by one they are left to `make test-all`.
TOGETHER = {
    "speculators, residual, qwen3 layer, two layers": Kind(
        layout="layers", ids=(2, 4, 5), norm_before_residual=True, layers=2, qk_norm=True, qkv_bias=True
    ),
    "norm per state, own theta, shallow base": Kind(
        layout="layers", fusion="each", norm_output=True, theta=777.0,
        base_layers=4, ids=(1, 2, 3), taps=(2, 3, 4),
    ),
    "joint norm, wide taps, wide heads": Kind(
        fusion="joint", ids=(1, 3, 5, 7), taps=(2, 4, 6, 8), head_dim=10
    ),
    "the base's lm_head, fc bias": Kind(
        drafts=None, own_lm_head=False, fc_bias=True, config={"draft_vocab_size": None}
    ),
}  # fmt: skip
KINDS = TOGETHER | VARIANTS
COVER = (*TOGETHER, "no states, no fc", "narrow", "eagle 1, biases", "eagle 1, hass")


@pytest.mark.parametrize("name", some(KINDS, *(list(KINDS).index(name) for name in COVER)))
def test_every_variant_of_a_head_holds(name: str, tmp_path: Path) -> None:
    """The record is made by plain torch; trees of other shapes are in those that lie here."""
    write_case(tmp_path, KINDS[name], prompts=1, steps=4, most=6, settings="A")
    assert failures(tmp_path) == []


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(HERE / name, tmp_path / name))


def keep(case: Path, *runs: str, replays: bool = True) -> None:
    """Of what was generated these runs alone, such as "p0 B": nothing looks at the others."""

    def edit(record: Json) -> None:
        for number, prompt in enumerate(record["prompts"]):
            prompt["runs"] = {
                name: run for name, run in prompt["runs"].items() if f"p{number} {name}" in runs
            }
        record["sampling"] = record["sampling"] if replays else []

    edit_json(case / "vectors.json", edit)


def edit_json(file: Path, edit: Callable[[Json], object]) -> None:
    record = json.loads(file.read_text())
    edit(record)
    file.write_text(json.dumps(record))


def edit_tensors(file: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def set_to(*way: Any, value: Any) -> Callable[[Any], None]:
    """Puts a value at the end of a way of keys and numbers."""

    def edit(record: Any) -> None:
        for step in way[:-1]:
            record = record[step]
        record[way[-1]] = value

    return edit


RUN = ("prompts", 0, "runs", "B")
TREE = ("prompts", 1, "runs", "A", "trees", 0)


# Those of one list are in nobody's way, and are made in one copy of a record.
DIFFERENCES: list[list[tuple[Callable[[Json], None], str]]] = [
    [
        (set_to("prompts", 0, "base_greedy_ids", 3, value=39), "p0 base_greedy_ids: first at [3]: ours "),
        (set_to(*TREE, "tokens", 2, value=39), "p1 A tree 1: node [2]: ours ("),
        (set_to(*TREE, "committed_len", value=99), "p1 A tree 1 committed_len: first at [0]: ours "),
        (set_to(*RUN, "accept_lengths", 1, value=9), "p0 B accept_lengths: first at [1]: ours "),
        (set_to(*RUN, "generated_ids", 9, value=39), "p0 B generated_ids: first at [9]: ours "),
        (set_to(*RUN, "bonus_tokens", 0, value=39), "p0 B bonus_tokens: first at [0]: ours "),
        (set_to(*RUN, "best_candidate", 0, value=99), "p0 B best_candidate: first at [0]: ours "),
        (set_to(*RUN, "tau", value=1.0), "p0 B tau: first at []"),
        (set_to("sampling", 0, "temperature", value=0.5), "s0 round 1 sample_p: first at "),
        (set_to("sampling", 1, "rounds", 1, "tokens", 3, value=39), "s1 round 2 tree: node [3]: ours "),
        (set_to("algo", value="eagle3"), "head is eagle3: first at [0]: ours eagle1, recorded eagle3"),
        (set_to("aux_layers", value=[2, 4, 5]), "aux_layers: first at [0]: ours 8, recorded 2"),
    ],
    [
        (set_to(*TREE, "position_ids", value=[0]), "p1 A tree 1 position_ids: first at [0]: ours "),
        (set_to("sampling", 0, "rounds", 0, "uniforms", value=[0.0] * 9), "s0 round 1 uniforms used: "),
    ],
    [
        (set_to(*TREE, "retrieve_indices", 0, value=[0, 1]), "p1 A tree 1 retrieve_indices: first at [0]"),
        (set_to("sampling", 0, "rounds", 0, "uniforms", value=[]), "s0 round 1 walk: fewer uniforms"),
    ],
]


@pytest.mark.parametrize("made", DIFFERENCES, ids=len)
def test_a_record_that_differs_fails_and_says_where(
    made: list[tuple[Callable[[Json], None], str]], copy_of: Callable[[str], Path]
) -> None:
    case = copy_of("eagle2-small")
    keep(case, "p0 B", "p1 A")
    for edit, _ in made:
        edit_json(case / "vectors.json", edit)
    told = failures(case)
    assert [line for _, line in made if not any(one.startswith(line) for one in told)] == []


def test_a_number_that_differs_fails(copy_of: Callable[[str], Path]) -> None:
    """Each of them, and nothing else."""
    names = {
        "p0.prompt_features": "p0 prompt_features",
        "p1.base_logits": "p1 base_logits",
        "p0.head_hidden": "p0 head_hidden",
        "p1.head_logits_last": "p1 head_logits_last",
        "p0.A.draft2_hidden": "p0 A draft2_hidden",
        "s0.r0.node_logits": "s0 round 1 node_logits",
        "s1.r1.sample_p": "s1 round 2 sample_p",
        "p0.A.draft1_input_ids": "p0 A draft1_input_ids",
        "p0.head_input_ids": "p0 head_input_ids",
    }

    def shift(tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            tensors[name].view(-1)[-1] += 1 if tensors[name].dtype == torch.int64 else 2e-4

    case = copy_of("eagle3-small")
    keep(case)
    edit_tensors(case / "vectors.safetensors", shift)
    assert {line.partition(":")[0] for line in failures(case)} == {*names.values()}


@pytest.mark.parametrize(
    ("edit", "status"),
    some(
        [
            (set_to("norm_before_residual", value=False), 1),
            (set_to("norm_output", value=False), 1),
            (set_to("transformer_layer_config", "rms_norm_eps", value=1e-2), 1),
            (set_to("transformer_layer_config", "rope_theta", value=12000.0), 1),
            (set_to("eagle_aux_hidden_state_layer_ids", value=[2, 4, 7]), 0),
            (set_to("eagle_aux_hidden_state_layer_ids", value=[2, 4, 6]), 1),
            (set_to("eagle_aux_hidden_state_layer_ids", value=None), 1),
            (set_to("num_hidden_layers", value=9), 0),
        ],
        *(0, 5, 7),
    ),
)
def test_a_head_of_another_make_fails(edit: Callable[[Json], None], status: int, copy_of: Any) -> None:
    case = copy_of("eagle3-small")
    edit_json(case / "head" / "config.json", edit)
    assert differs(case) == bool(status)


def test_one_row_may_differ_if_the_margin_of_the_last_node_was_not_recorded(
    copy_of: Callable[[str], Path],
) -> None:
    """As in a tree that was cut between two nodes of nearly the same score; twice is a difference."""
    case, late = copy_of("eagle2-small"), (*RUN, "best_candidate", 3)
    keep(case, "p0 B", replays=False)
    edit_json(case / "vectors.json", set_to(*late, value=6))
    assert failures(case) == []
    assert any("round 4: ours 3, recorded 6; its tree" in one.note for one in checks(case))
    edit_json(case / "vectors.json", set_to(*RUN, "best_candidate", 4, value=6))
    assert "p0 B best_candidate: first at [3]: ours 3, recorded 6" in failures(case)


def test_no_row_may_differ_where_every_decision_was_clear(copy_of: Callable[[str], Path]) -> None:
    case = copy_of("eagle2-small")
    keep(case, "p0 B", replays=False)
    edit_json(case / "vectors.json", set_to(*RUN, "best_candidate", 3, value=6))
    edit_json(case / "vectors.json", set_to(*RUN, "min_select_gap_all_rounds", value=1e-3))
    assert differs(case)


def test_a_bonus_that_cannot_be_drawn_fails(copy_of: Any) -> None:
    case = copy_of("eagle2-small")
    keep(case)
    never = int(load_file(case / "vectors.safetensors")["s2.r1.sample_p"].argmin())  # cut by top-k
    edit_json(case / "vectors.json", set_to("sampling", 2, "rounds", 1, "bonus_token", value=never))
    assert any(one.startswith(f"s2 round 2 bonus_token: {never} has no chance") for one in failures(case))


def test_embedding_and_state_swapped_fails(copy_of: Callable[[str], Path]) -> None:
    case = copy_of("eagle2-small")
    swap = lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].roll(16, 1)})  # noqa: E731
    edit_tensors(case / "head" / "model.safetensors", swap)
    assert differs(case)


def test_numbers_that_are_none_are_never_close() -> None:
    one = torch.tensor([1.0, float("nan")])
    assert (
        check_close("x", one, one).difference
        == "first at [1]: ours nan, recorded nan, gap nan (allowed 0.0001)"
    )
    assert check_close("x", one, one[:1]).difference == "shape: ours [2], recorded [1]"
    assert check_same("x", [1, 2], [1]).difference == "length: ours 2, recorded 1"


def test_an_order_counts_unless_scores_nearly_tie() -> None:
    ours, theirs = Tree((0, 1, 2), (0, 0, 0)), Tree((0, 2, 1), (0, 0, 0))
    assert check_tree("x", ours, theirs, 1e-3).difference is not None
    assert check_tree("x", ours, theirs, 1e-5).difference is None
    assert check_tree("x", ours, theirs, None).difference is None
    other = Tree((0, 2, 3), (0, 0, 0))
    assert "path [0, 3] is missing" in str(check_tree("x", ours, other, None))
    assert "path [0, 3] is missing" in str(check_tree("x", ours, other, 1e-7))  # one of three


def test_a_few_paths_may_differ_where_scores_tie() -> None:
    ours, theirs = Tree((0, 1, 2, 3, 4), (0, 0, 0, 1, 1)), Tree((0, 1, 2, 3, 5), (0, 0, 0, 1, 1))
    assert check_tree("x", ours, theirs, 1e-5).difference is None
    assert check_tree("x", ours, theirs, 1e-4).difference is not None
    assert check_tree("x", ours, theirs, None).difference is not None
    shorter = Tree((0, 1, 2, 3), (0, 0, 0, 1))
    assert check_tree("x", shorter, theirs, 1e-7).difference is not None
