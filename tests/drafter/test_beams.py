"""Chains, trees of fixed breadth and pruned trees, against the same grown one text at a time by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from specsot.core.frames import FeatureBatch, Features
from specsot.drafting import DraftOptions
from specsot.errors import InvalidRequest
from specsot.members import Range, TreeShape
from specsot.service.options import DraftModelOptions
from specsot_drafter.core.selection import Candidates, best_each, build_trees
from specsot_drafter.core.sequences import DraftSequence, DraftSequences
from specsot_drafter.heads.decoder import DecoderHead
from specsot_drafter.loader import make_backends
from specsot_drafter.proposers.lm import BeamShape, LanguageModelProposer, beam_shape
from specsot_model.attention import RowSpan, plan_attention
from specsot_model.decoder import Decoder
from tests.drafter.ring import opening
from tests.models import Shape, write_base

SMALL = Shape(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, inner=48)
PAGES, PAGE_ROWS = 40, 16
FORMS = {
    "linear": DraftOptions("linear", depth=5),
    "tree": DraftOptions("tree", depth=3, breadth=3, nodes=39),
    "pruned": DraftOptions("pruned", depth=4, breadth=3, nodes=120, threshold=0.05),
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = write_base(tmp_path_factory.mktemp("models") / "small", SMALL, seed=9)
    return Decoder.load(folder, Range(0, 2), torch.float32, "cpu")


def make(decoder: Decoder, options: DraftOptions, vocabulary: int = 200) -> LanguageModelProposer:
    return LanguageModelProposer(DecoderHead(decoder, vocabulary, 512), beam_shape(options), PAGES, PAGE_ROWS)


def log_probs(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    """What follows a whole text, computed from scratch."""
    with torch.inference_mode():
        kv, rows = decoder.make_kv(1, 128), torch.arange(len(tokens))
        plan = plan_attention(
            [RowSpan(len(tokens), 0, len(tokens), (0,))], 128, 2, "packed", torch.float32, "cpu"
        )
        hidden, _ = decoder.forward(decoder.embed(torch.tensor(tokens)), rows, rows, plan, kv)
        return torch.log_softmax(decoder.logits(hidden[-1:])[0], -1)


def grown_by_hand(decoder: Decoder, tokens: list[int], beam: BeamShape) -> dict[tuple[int, ...], float]:
    """Every path from the root with its log-probability, level by level, each from scratch."""
    found: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for width in (*beam.widths, 0):
        level: list[tuple[tuple[int, ...], float]] = []
        for path, score in frontier:
            best = log_probs(decoder, [*tokens, *path]).topk(beam.breadth)
            level += [((*path, t), score + s) for s, t in zip(best.values.tolist(), best.indices.tolist())]
        found |= dict(level)
        level.sort(key=lambda one: -one[1])
        frontier = [one for one in level[:width] if one[1] >= beam.floor]
        if not frontier:
            break
    return found


def paths(offer: Candidates, row: int = 0) -> dict[tuple[int, ...], float]:
    known: list[tuple[int, ...]] = [()]
    found: dict[tuple[int, ...], float] = {}
    for token, parent, score in zip(offer.tokens[row], offer.parents[row], offer.scores[row]):
        known.append((*known[parent], int(token)))
        if score > -float("inf"):
            found[known[-1]] = float(score)
    return found


def follow(
    texts: DraftSequences, drafter: LanguageModelProposer, sequence: int, tokens: list[int], **more: object
) -> DraftSequence:
    text = texts.open(opening(sequence, len(tokens) - 1, limit=200, **more))  # type: ignore[arg-type]
    drafter.open(text)
    hear(texts, drafter, sequence, 0, tokens)
    return text


def hear(
    texts: DraftSequences, drafter: LanguageModelProposer, sequence: int, start: int, tokens: list[int]
) -> None:
    feature_batch = FeatureBatch(sequence, start, tuple(tokens[:-1]), tokens[-1], 1)
    texts.observe([feature_batch])
    drafter.observe(Features(1, 0, feature_batches=(feature_batch,)))


def check(offer: Candidates | None, decoder: Decoder, texts: list[DraftSequence], beam: BeamShape) -> None:
    assert offer is not None
    for row, text in enumerate(texts):
        wanted, found = grown_by_hand(decoder, text.tokens, beam), paths(offer, row)
        assert found.keys() == wanted.keys()
        assert all(abs(found[path] - wanted[path]) < 1e-4 for path in wanted)


@pytest.mark.parametrize("form", FORMS)
def test_round_after_round_what_grows_is_what_grows_from_scratch(decoder: Decoder, form: str) -> None:
    """Whatever was accepted in between: rows that agree stay, the others are fed anew."""
    texts, drafter = DraftSequences(None), make(decoder, FORMS[form])
    pair = [follow(texts, drafter, 1, [3, 1, 4, 1, 5]), follow(texts, drafter, 2, list(range(40, 75)))]
    with torch.inference_mode():
        for accepted in (0, 2, 1, 9, 0):
            offer = drafter.propose(pair, 5)
            check(offer, decoder, pair, beam_shape(FORMS[form]))
            assert offer is not None
            for row, text in enumerate(pair):
                best = next((path for path in paths(offer, row) if len(path) >= accepted), ())
                more = [*best[:accepted], 7, 8][: accepted + 1]
                hear(texts, drafter, text.id, text.committed, [text.tokens[-1], *more])
    for sequence in (1, 2):
        drafter.close(sequence)
    assert drafter.free_pages == PAGES


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_forks_share_their_common_prefix_and_change_no_other_sequence(decoder: Decoder, length: int) -> None:
    texts, drafter = DraftSequences(None), make(decoder, FORMS["linear"])
    prefix = [(n * 37) % 200 for n in range(40)]
    drafter.open(texts.open(opening(1, 40, decodes=False)))
    texts.observe([FeatureBatch(1, 0, tuple(prefix), None, None)])
    forks: list[DraftSequence] = []
    for sequence in (2, 3):
        text = texts.open(opening(sequence, length + 2, limit=99, fork=(1, length)))
        drafter.open(text)
        hear(texts, drafter, sequence, length, [sequence, 9, sequence + 100])
        forks.append(text)
    with torch.inference_mode():
        check(drafter.propose(forks, 5), decoder, forks, beam_shape(FORMS["linear"]))
        check(drafter.propose(forks[::-1], 5), decoder, forks[::-1], beam_shape(FORMS["linear"]))
    for sequence in (1, 2, 3):
        drafter.close(sequence)
    assert drafter.free_pages == PAGES


def test_without_room_a_sequence_runs_undrafted(decoder: Decoder) -> None:
    texts, drafter = (
        DraftSequences(None),
        LanguageModelProposer(DecoderHead(decoder, 200, 512), beam_shape(FORMS["linear"]), 2, 16),
    )
    one, two = follow(texts, drafter, 1, list(range(10))), follow(texts, drafter, 2, list(range(30)))
    with torch.inference_mode():
        offer = drafter.propose([one, two], 3)
    assert offer is not None
    assert len(paths(offer, 0)) == 3
    assert not paths(offer, 1)


def test_ids_that_the_base_has_not_are_never_drafted(decoder: Decoder) -> None:
    texts, drafter = DraftSequences(None), make(decoder, FORMS["tree"], vocabulary=20)
    text = follow(texts, drafter, 1, [3, 1, 4, 1, 5])
    with torch.inference_mode():
        offer = drafter.propose([text], 3)
    assert offer is not None
    assert offer.tokens.max() < 20


@pytest.mark.parametrize(
    ("options", "widths", "shape"),
    [
        (DraftOptions("linear", depth=4), (1, 1, 1), TreeShape(3, 1, 5)),
        (DraftOptions(depth=1), (), TreeShape(0, 1, 2)),
        (DraftOptions("tree", depth=4, breadth=2, nodes=99), (2, 4, 8), TreeShape(3, 2, 100)),
        (DraftOptions("tree", depth=6, breadth=2, nodes=10), (2, 4, 4), TreeShape(3, 2, 11)),
        (DraftOptions("pruned", depth=3, breadth=3, nodes=99), (3, 9), TreeShape(2, 3, 100)),
    ],
)
def test_how_wide_each_level_may_be(options: DraftOptions, widths: tuple[int, ...], shape: TreeShape) -> None:
    beam = beam_shape(options)
    assert (beam.widths, beam.tree_shape) == (widths, shape)
    assert sum(widths) < shape.slots


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"mode": "bush"}, "draft_mode"),
        ({"depth": 0}, "draft_depth"),
        ({"depth": 65}, "draft_depth"),
        ({"breadth": 0}, "draft_breadth"),
        ({"nodes": 5000}, "draft_nodes"),
        ({"threshold": 1.0}, "draft_threshold"),
        ({"threshold": -0.1}, "draft_threshold"),
        ({"threshold": float("nan")}, "draft_threshold"),
        ({"tuner": "guess"}, "tuner"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(wrong: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest, match=field) as refused:
        DraftOptions(**wrong)  # type: ignore[arg-type]
    assert refused.value.field == field


def test_a_heads_trees_as_they_are_asked_for() -> None:
    assert DraftOptions().shape() is None
    assert DraftOptions("linear", depth=3).shape() == TreeShape(2, 1, 4)
    assert DraftOptions(depth=4, breadth=3, nodes=20).shape() == TreeShape(3, 3, 21)
    with pytest.raises(InvalidRequest, match="pruned"):
        DraftOptions("pruned").shape()


def test_the_tree_that_is_sent_is_the_likeliest_part(decoder: Decoder) -> None:
    texts, drafter = DraftSequences(None), make(decoder, FORMS["tree"])
    text = follow(texts, drafter, 1, [3, 1, 4, 1, 5])
    with torch.inference_mode():
        offer = drafter.propose([text], 3)
    assert offer is not None
    (tree,) = build_trees(offer, [5], best_each(offer.scores, 6))
    wanted = sorted(
        grown_by_hand(decoder, text.tokens, beam_shape(FORMS["tree"])).items(), key=lambda one: -one[1]
    )
    below: list[tuple[int, ...]] = [()]
    for token, parent in itertools.islice(zip(tree.tokens, tree.parents), 1, None):
        below.append((*below[parent], token))
    assert set(below[1:]) == {path for path, _ in wanted[:6]}


def test_a_way_that_is_not_there_or_lacks_its_model_is_refused(demo_model: Path) -> None:
    base = demo_model / "base"
    for drafter in ("eagle", "model"):
        way = make_backends(DraftModelOptions(base, drafter=drafter))[drafter]
        with pytest.raises(InvalidRequest, match=f"drafter {drafter} needs a draft_model"):
            _ = way.row_bytes
    with pytest.raises(InvalidRequest, match="drafter must be"):
        make_backends(DraftModelOptions(base, drafter="none"))
