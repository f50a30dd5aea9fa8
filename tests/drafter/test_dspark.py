"""DSpark heads: what the published code computes, the layouts, best-first trees of conditional chances."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import wait
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specsot.core.frames import FeatureBatch, Features
from specsot.core.skeleton import PlanRules
from specsot.core.vocabulary import read_vocabulary
from specsot.errors import HeadMismatch, ModelError
from specsot.grammar import TokenAutomaton, grammar_of
from specsot.members import TreeShape
from specsot.service.options import DraftModelOptions
from specsot_drafter.core.selection import Candidates, best_each
from specsot_drafter.core.sequences import DraftSequences
from specsot_drafter.heads.checkpoint import Checkpoint
from specsot_drafter.heads.dflash import first_of
from specsot_drafter.heads.dspark import DSparkHead
from specsot_drafter.heads.loading import load_head
from specsot_drafter.loader import head_tree, propose_with
from specsot_drafter.markov_growth import CAPTURED_FRONTIER, MarkovGrowth, frontier_widths
from specsot_drafter.proposers.block import MarkovProposer
from tests.drafter.ring import opening
from tests.drafter.test_dflash import drafted
from tests.models import Shape, write_base, write_dspark

# What the published code computes with tiny heads: make.py has the command.
# DeepSeek's DeepSpec, commit afdfa7c; SHA-256 of deepspec/modeling/dspark/qwen3/modeling.py
#   9ad90bcb926b32b5144e8a27816ef18b51e9e5ee083108c5fbd8f63bc92b3953
# and of markov_head.py beside that folder
#   6659bcdc12d923d4fc16cc2280c03078c2110a4792305e1f3f42b5468f75ef46
# speculators 0.9.0, SHA-256 of its wheel
#   f0de7571274ce996d769ce81240379728dcb38701f77d2d34cfd0d670d1b4481
PUBLISHED = Path(__file__).parent / "dspark"
TEXTS = {"deepseek": (9, 12), "gated": (12,), "rnn": (12,)}
IDS, DEPTH = 12, 3
SHAPE = Shape(layers=6, hidden=16, heads=2, kv_heads=1, head_dim=8, inner=16, vocabulary=IDS, positions=64)
DRAFTED = {"deepseek": range(IDS), "gated": (0, 1, 3, 4, 6, 7, 9, 10), "rnn": range(IDS)}
NEAR = 1e-4
W1, W2 = (f"markov_head.markov_w{one}.weight" for one in (1, 2))
CODEBOOK = "candidate_selector.predecessor_codebook"  # of DFlash2
SPECFORGE = {"target_layer_ids": None, "dflash_config": {"target_layer_ids": [0, 3]}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its embeddings and lm_head are those that the published code was given."""
    folder = write_base(tmp_path_factory.mktemp("base"), SHAPE)
    given = load_file(PUBLISHED / "deepseek/model.safetensors")
    own = {
        "model.embed_tokens.weight": given["embed_tokens.weight"],
        "lm_head.weight": given["lm_head.weight"],
    }
    tensors = load_file(folder / "model.safetensors") | own
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def loaded(folder: Path, base: Path) -> DSparkHead:
    head = load_head(folder, base, torch.float32, "cpu")
    assert isinstance(head, DSparkHead)
    return head


def chances(name: str, length: int) -> dict[tuple[int, ...], list[float]]:
    """What was published: by path, the log-probabilities of the drafted ids after it."""
    vectors, ids = load_file(PUBLISHED / name / "vectors.safetensors"), DRAFTED[name]
    return {
        path: row.tolist()
        for depth in range(DEPTH)
        for path, row in zip(
            product(ids, repeat=depth), vectors[f"{length}_after_{depth}"].log_softmax(-1), strict=True
        )
    }


def best_first(name: str, length: int, top_k: int, nodes: int) -> dict[tuple[int, ...], float]:
    """The likeliest paths of which each token is one of the likeliest after the path before it, falling."""
    ids, scores = DRAFTED[name], {(): 0.0}
    for path, row in chances(name, length).items():
        if path in scores:
            best = np.argsort(row)[::-1][:top_k].tolist()
            scores |= {(*path, ids[rank]): scores[path] + row[rank] for rank in best}
    del scores[()]
    return dict(sorted(scores.items(), key=lambda item: -item[1])[:nodes])


def chosen(candidates: Candidates, nodes: int) -> dict[tuple[int, ...], float]:
    """What the selection takes of the first tree's candidates, best first, by path."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(candidates.tokens[0].tolist(), candidates.parents[0].tolist()):
        paths.append((*paths[parent], token))
    taken = np.flatnonzero(best_each(candidates.scores, nodes)[0]).tolist()
    found = {paths[column + 1]: float(candidates.scores[0, column]) for column in taken}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


@pytest.mark.parametrize("name", TEXTS)
def test_every_path_has_the_published_chance(base: Path, name: str) -> None:
    """Of 9 tokens and then 12: the first block is overwritten. A score is a sum of conditional ones."""
    head, size = loaded(PUBLISHED / name, base), len(DRAFTED[name])
    every = TreeShape(DEPTH - 1, size, 1 + sum(size**depth for depth in range(1, DEPTH + 1)))
    assert (head.markov.kind, head.draft_vocab) == ("vanilla" if name == "deepseek" else name, size)
    lengths = TEXTS[name]
    for length, paths in zip(lengths, drafted(head, lengths, PUBLISHED / name, every), strict=True):
        wanted = chances(name, length)
        assert len(paths) == every.nodes - 1
        for path, score in paths.items():
            steps = (wanted[path[:depth]][DRAFTED[name].index(one)] for depth, one in enumerate(path))
            assert score == pytest.approx(sum(steps), abs=NEAR)
        gaps = [sorted(row)[-1] - sorted(row)[-2] for row in wanted.values()]
        assert np.median(gaps) > 0.1, "else agreement would mean little"


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize(("top_k", "nodes"), [(1, 3), (2, 8), (4, 9), (4, 30), (8, 60)])
def test_a_tree_is_the_likeliest_paths_of_all(base: Path, name: str, top_k: int, nodes: int) -> None:
    """Parents precede their children, as no path is likelier than its beginning. A chain is greedy. Captured
    graphs grow the same trees while no level has more nodes with children than they feed.
    """
    length, head = TEXTS[name][-1], loaded(PUBLISHED / name, base)
    vectors = load_file(PUBLISHED / name / "vectors.safetensors")
    shape = TreeShape(DEPTH - 1, top_k, nodes + 1)
    wanted = best_first(name, length, top_k, nodes)
    for captured in (False, True)[: 1 + (nodes <= CAPTURED_FRONTIER + 1)]:
        found = chosen(grown(head, vectors, length, shape, captured), nodes)
        assert list(found) == list(wanted)
        assert list(found.values()) == pytest.approx(list(wanted.values()), abs=NEAR)


def grown(
    head: DSparkHead, vectors: dict[str, torch.Tensor], length: int, shape: TreeShape, captured: bool
) -> Candidates:
    """Candidates after so many tokens of the vectors' text, grown as in a captured graph or as without."""
    tokens = vectors["tokens"].tolist()
    texts, drafter = DraftSequences(None), propose_with(head, shape, pages=4, page_rows=8)
    assert isinstance(drafter, MarkovProposer)
    drafter.open(texts.open(opening(1, length, limit=40)))
    batch = FeatureBatch(1, 0, tuple(tokens[:length]), tokens[length], 1)
    texts.observe([batch])
    fused = vectors["states"][:length] @ torch.cat([*head.tap_slices().values()], 1).T
    drafter.observe(Features(1, 0, feature_batches=(batch,), rows=fused))
    text = texts.find(1)
    assert text is not None
    room = drafter._reserve(text)
    assert room is not None
    root, levels = tokens[length : length + 1], shape.depth + 1
    outputs = drafter._draft(root, [room])
    growth = MarkovGrowth(
        head, outputs, torch.tensor(root), levels, shape.top_k, shape.nodes - 1, captured=captured
    )
    return growth.run(growth.last, levels)


def test_a_head_that_adds_nothing_drafts_the_trees_of_dflash(base: Path, tmp_path: Path) -> None:
    """With W2 = 0 a place does not depend on the one before it."""
    vectors, shape = load_file(PUBLISHED / "deepseek/vectors.safetensors"), TreeShape(3, 3, 21)
    nothing = {"markov_head.markov_w2.weight": torch.zeros(IDS, 6)}
    found = chosen(grown(loaded(copied(tmp_path, "deepseek", nothing), base), vectors, 12, shape, False), 20)
    body = {f"markov_head.markov_w{one}.weight": None for one in (1, 2)}
    head = load_head(copied(tmp_path, "deepseek", body, sample_from_anchor=True), base, torch.float32, "cpu")
    assert head.kind == "dflash"
    (unordered,) = drafted(head, (12,), PUBLISHED / "deepseek", shape)
    wanted = dict(sorted(unordered.items(), key=lambda item: -item[1]))
    assert list(found) == list(wanted)
    assert list(found.values()) == pytest.approx(list(wanted.values()), abs=1e-5)


def copied(
    folder: Path, name: str, change: Mapping[str, torch.Tensor | None] | None = None, **fields: object
) -> Path:
    """A published head with other tensors and fields; None takes one out."""
    tensors = load_file(PUBLISHED / name / "model.safetensors") | (change or {})
    config = json.loads((PUBLISHED / name / "config.json").read_text()) | fields
    config = {field: value for field, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    kept = {one: tensor for one, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("name", "fields", "first"),
    [
        ("deepseek", {}, 0),
        ("deepseek", {"sample_from_anchor": False}, 1),
        ("deepseek", SPECFORGE, 0),
        ("gated", {}, 0),
        ("gated", {"sample_from_anchor": None}, 1),
        ("rnn", {}, 1),
    ],
)
def test_whether_the_first_row_drafts(
    base: Path, tmp_path: Path, name: str, fields: dict[str, object], first: int
) -> None:
    """DeepSeek's config does not say, that of speculators does. Trees are as deep as the block drafts."""
    copied(tmp_path, name, **fields)
    assert first_of(Checkpoint.open(tmp_path)) == first
    assert loaded(tmp_path, base).block.drafts == 4 - first
    assert head_tree(DraftModelOptions(base, draft_model=tmp_path)) == TreeShape(3 - first)


@pytest.mark.parametrize(
    ("name", "change", "fields", "kind", "said"),
    [
        ("deepseek", {}, {"markov_head_type": "lattice"}, ModelError, "'lattice' is not vanilla, gated"),
        ("deepseek", {}, {"markov_head_type": "gated"}, ModelError, "markov_head.gate_proj"),
        ("gated", {W1: torch.zeros(8, 6)}, {}, HeadMismatch, r"\[8, 6\].*\[12, 6\]"),
        ("gated", {W2: torch.zeros(12, 6)}, {}, HeadMismatch, r"\[12, 6\].*\[8, 6\]"),
        ("deepseek", {W2: None}, {}, ModelError, "markov_w2"),
        (
            "deepseek",
            {CODEBOOK: torch.zeros(2)},
            {},
            ModelError,
            f"not supported: it has the tensor {CODEBOOK}",
        ),
        (
            "deepseek",
            {"layers.0.layer_scalar": torch.ones(1)},
            {},
            ModelError,
            "tensor layers.0.layer_scalar",
        ),
        ("deepseek", {}, {"dflash_config": {"use_swa": True}}, ModelError, "it has use_swa True"),
        ("deepseek", {}, {"is_neox_style": False}, ModelError, "it has is_neox_style False"),
    ],
)
def test_what_no_head_here_computes_is_refused_in_one_line(
    base: Path,
    tmp_path: Path,
    name: str,
    change: Mapping[str, torch.Tensor | None],
    fields: dict[str, object],
    kind: type[Exception],
    said: str,
) -> None:
    with pytest.raises(kind, match=said) as refused:
        loaded(copied(tmp_path, name, change, **fields), base)
    assert "\n" not in str(refused.value)


@pytest.mark.full
def test_in_8_bits_the_likeliest_drafts_stay_the_same(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", Shape(positions=64))
    folder = write_dspark(tmp_path / "head", base, "gated")
    plain, rounded = (
        load_head(folder, base, torch.float32, "cpu", quantization=kind) for kind in (None, "int8")
    )
    assert isinstance(plain, DSparkHead)
    assert isinstance(rounded, DSparkHead)
    outputs, roots = torch.randn(32, 5, plain.hidden), torch.arange(32)
    first = [
        growth.run(growth.last, 2)
        for growth in (MarkovGrowth(head, outputs, roots, 2, 3, 12) for head in (plain, rounded))
    ]
    same = first[0].tokens[:, :3] == first[1].tokens[:, :3]
    assert same.mean() > 0.9
    assert np.abs(first[0].scores - first[1].scores)[:, :3][same].mean() < 0.2


@pytest.mark.parametrize(
    ("levels", "top_k", "nodes", "widths"),
    [(4, 4, 24, (4, 16, 21)), (3, 1, 9, (1, 1)), (4, 3, 2, (1, 0, 0)), (1, 4, 24, ())],
)
def test_as_many_nodes_are_fed_as_can_have_children(
    levels: int, top_k: int, nodes: int, widths: tuple[int, ...]
) -> None:
    assert frontier_widths(levels, top_k, nodes) == widths


def test_nothing_that_a_grammar_forbids_is_drafted(demo_model: Path, tmp_path: Path) -> None:
    """While trees grow, not afterwards: so the best allowed tokens are found, however unlikely."""
    vocabulary, rules = read_vocabulary(demo_model / "base", 8192), PlanRules(direct=False)
    head = load_head(write_dspark(tmp_path, demo_model / "base"), demo_model / "base", torch.float32, "cpu")
    texts, shape = DraftSequences(vocabulary), TreeShape(3, 4, 25)
    drafter = propose_with(head, shape, 4, 16)
    opened = opening(1, 5, limit=400, plan=rules)
    wait([grammar_of(vocabulary, opened)])
    automaton = TokenAutomaton(vocabulary, rules)
    drafter.open(texts.open(opened))
    root = int(automaton.mask(automaton.start(), 400).argmax())
    batch = FeatureBatch(1, 0, (100, 101, 102, 103, 104), root, 1)
    texts.observe([batch])
    drafter.observe(Features(1, 0, (opened,), (batch,), rows=torch.randn(5, head.width)))
    text = texts.find(1)
    assert text is not None
    offer = drafter.propose([text], 4)
    assert offer is not None
    states = [automaton.advance(automaton.start(), root)]
    for token, parent, score in zip(offer.tokens[0].tolist(), offer.parents[0].tolist(), offer.scores[0]):
        before = states[parent]
        states.append(automaton.advance(before, token) if before is not None and np.isfinite(score) else None)
        assert not np.isfinite(score) or states[-1] is not None
    assert np.isfinite(offer.scores).sum() > 4
