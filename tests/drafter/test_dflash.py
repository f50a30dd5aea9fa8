"""DFlash and P-EAGLE heads: what the published code computes, both layouts, trees of the likeliest paths."""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specsot.core.frames import FeatureBatch, Features
from specsot.errors import HeadMismatch, ModelError
from specsot.members import TreeShape
from specsot.service.options import DraftModelOptions
from specsot_drafter.core.selection import likeliest_paths
from specsot_drafter.core.sequences import DraftSequences
from specsot_drafter.heads import DraftHead
from specsot_drafter.heads.dflash import BlockHead
from specsot_drafter.heads.eagle import HeadWindow
from specsot_drafter.heads.loading import load_head
from specsot_drafter.loader import head_tree, propose_with
from tests.conftest import seeds
from tests.drafter.ring import opening
from tests.models import Shape, write_base

# What dflash/model.py of github.com/z-lab/dflash (commit 44947fb; SHA-256 6dfb12d0eeebe085d78d23fc816a481a
# 8b25257fd76891e939a41423c29c697b) computes with a tiny head: make.py has the command.
PUBLISHED = Path(__file__).parent / "dflash"
SPECULATORS = Path(__file__).parent / "speculators"  # of vLLM; make.py has the commit and the command
PAIRS = TreeShape(1, 24, 24 * 25)  # of all tokens
SHAPE = Shape(layers=6, hidden=16, heads=2, kv_heads=1, head_dim=8, inner=24, vocabulary=24, positions=64)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its embeddings and lm_head are those that the published code was given."""
    folder, vectors = (
        write_base(tmp_path_factory.mktemp("base"), SHAPE),
        load_file(PUBLISHED / "vectors.safetensors"),
    )
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"model.embed_tokens.weight": vectors["embed"], "lm_head.weight": vectors["lm_head"]}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def loaded(folder: Path, base: Path) -> BlockHead:
    head = load_head(folder, base, torch.float32, "cpu")
    assert isinstance(head, BlockHead)
    return head


def copied(folder: Path, **fields: object) -> Path:
    """The published head with other fields; None takes one out."""
    config = json.loads((PUBLISHED / "config.json").read_text()) | fields
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((PUBLISHED / "model.safetensors").read_bytes())
    return folder


def drafted(
    head: DraftHead, told: tuple[int, ...], folder: Path = PUBLISHED, shape: TreeShape = PAIRS
) -> list[dict[tuple[int, ...], float]]:
    """By path the log-probability of its tokens, behind so many tokens of the vectors' text."""
    vectors = load_file(folder / "vectors.safetensors")
    tokens, fused = (
        vectors["tokens"].tolist(),
        vectors["states"] @ torch.cat([*head.tap_slices().values()], 1).T,
    )
    texts, found, start = DraftSequences(None), [], 0
    drafter = propose_with(head, shape, pages=4, page_rows=8)
    drafter.open(texts.open(opening(1, told[0], limit=40)))
    for stop in told:
        feature_batch = FeatureBatch(1, start, tuple(tokens[start:stop]), tokens[stop], 1)
        texts.observe([feature_batch])
        drafter.observe(Features(1, 0, feature_batches=(feature_batch,), rows=fused[start:stop]))
        text = texts.find(1)
        assert text is not None
        offer = drafter.propose([text], shape.depth + 1)
        assert offer is not None
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(offer.tokens[0].tolist(), offer.parents[0].tolist()):
            paths.append((*paths[parent], token))
        found.append(dict(zip(paths[1:], offer.scores[0].tolist())))
        start = stop
    drafter.close(1)
    assert drafter.free_pages == 4
    return found


def test_a_block_is_what_the_published_code_computes(base: Path) -> None:
    """Behind 9 tokens and then 12: the block of before is overwritten. Row 0 is the committed token's."""
    vectors, head = load_file(PUBLISHED / "vectors.safetensors"), loaded(PUBLISHED, base)
    assert head.taps == (2, 4)
    for length, paths in zip((9, 12), drafted(head, (9, 12))):
        wanted = vectors[f"logits_{length}"].log_softmax(-1)
        for first, second in product(range(24), range(24)):
            assert paths[first,] == pytest.approx(float(wanted[1, first]), abs=1e-4)
            if (first, second) in paths:
                both = float(wanted[1, first] + wanted[2, second])
                assert paths[first, second] == pytest.approx(both, abs=1e-4)


@pytest.mark.parametrize("name", ["dflash", "peagle"])
def test_masks_windows_and_yarn_are_what_speculators_computes(base: Path, name: str) -> None:
    """Of the two layers the second sees 4 positions. P-EAGLE's text passes through both of them."""
    folder = SPECULATORS / name
    vectors = load_file(folder / "vectors.safetensors")
    head = load_head(folder, base, torch.float32, "cpu")
    assert (head.decoder.window, head.decoder.first.rotary.stretch > 1) == (
        HeadWindow(4, frozenset({1})),
        True,
    )
    for length, paths in zip((9, 12), drafted(head, (9, 12), folder, TreeShape(3, 2, 31))):
        wanted = vectors[f"logits_{length}"].log_softmax(-1)
        best = wanted.topk(2, -1).indices.tolist()
        assert set(paths) == {path for deep in range(1, 5) for path in product(*best[:deep])}
        for path, score in paths.items():
            assert score == pytest.approx(float(wanted[range(len(path)), path].sum()), abs=1e-4)


@pytest.mark.parametrize(
    "said",
    [{"para_depths": 3}, {"speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]}}, {}],
)
def test_a_p_eagle_head_drafts_no_deeper_than_it_learned(base: Path, tmp_path: Path, said: Any) -> None:
    """As deep as is asked where its config does not say; the first levels are the same."""
    config = json.loads((SPECULATORS / "peagle" / "config.json").read_text()) | said
    (tmp_path / "config.json").write_text(json.dumps(config))
    for file in ("model", "vectors"):
        (tmp_path / f"{file}.safetensors").symlink_to(SPECULATORS / "peagle" / f"{file}.safetensors")
    shape, options = TreeShape(4, 2, 63), DraftModelOptions(base, draft_model=tmp_path)
    head, whole = (load_head(one, base, torch.float32, "cpu") for one in (tmp_path, SPECULATORS / "peagle"))
    (paths,), (deep,) = drafted(head, (9,), tmp_path, shape), drafted(whole, (9,), tmp_path, shape)
    first = {path: score for path, score in deep.items() if len(path) <= (3 if said else 5)}
    assert paths == pytest.approx(first, abs=1e-5)
    assert len(propose_with(head, shape, 4, 8).widths) + 1 == (3 if said else 5)
    assert head_tree(options) == (TreeShape(2) if said else None)


def test_the_layout_of_speculators_is_the_same_head(base: Path, tmp_path: Path) -> None:
    fields = dict(dflash_config=None, mask_token_id=23, aux_hidden_state_layer_ids=[2, 4])
    assert drafted(loaded(copied(tmp_path, **fields), base), (9,)) == drafted(loaded(PUBLISHED, base), (9,))


def test_a_causal_block_sees_no_later_mask(base: Path, tmp_path: Path) -> None:
    """So the first places draft the same whatever the block's size; of others they do not."""
    config = json.loads((PUBLISHED / "config.json").read_text())["dflash_config"]
    for causal in (True, False):
        found = []
        for rows in (3, 5):
            fields = dict(block_size=rows, dflash_config=config | {"causal_head": causal})
            found += drafted(loaded(copied(tmp_path, **fields), base), (9,))
        near = [
            found[0][path] == pytest.approx(found[1][path], abs=1e-5) for path in found[0] if path in found[1]
        ]
        assert all(near) is causal


@pytest.mark.parametrize(
    ("fields", "kind", "said"),
    [
        ({"block_size": 1}, ModelError, "block_size must be in 2 .. 64"),
        ({"dflash_config": {"target_layer_ids": [1, 3]}}, HeadMismatch, "mask_token_id None"),
        ({"dflash_config": {"mask_token_id": 23}}, HeadMismatch, "target_layer_ids must be layer numbers"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ModelError, "sliding_window must be"),
    ],
)
def test_what_no_pass_here_drafts_is_refused(
    base: Path, tmp_path: Path, fields: dict[str, object], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        loaded(copied(tmp_path, **fields), base)


@pytest.mark.parametrize("seed", seeds(8, quick=3))
def test_the_tree_is_the_likeliest_beginnings_of_all(seed: int) -> None:
    dice = random.Random(seed)
    places, breadth = dice.randrange(1, 5), dice.randrange(1, 4)
    scores = [sorted((-dice.random() * 3 for _ in range(breadth)), reverse=True) for _ in range(places)]
    tokens = [dice.sample(range(100), breadth) for _ in range(places)]
    every = sorted(
        (
            sum(scores[place][rank] for place, rank in enumerate(ranks))
            for depth in range(1, places + 1)
            for ranks in product(range(breadth), repeat=depth)
        ),
        reverse=True,
    )
    for nodes in (1, 3, 8, 100):
        tree = likeliest_paths(scores, tokens, nodes)
        assert tree.scores == pytest.approx(every[:nodes])
        assert np.all(np.diff(tree.scores) <= 1e-12)
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.tokens, tree.parents):
            paths.append((*paths[parent], token))
        assert len(set(paths)) == len(paths)
        for path, score in zip(paths[1:], tree.scores):
            assert score == pytest.approx(
                sum(scores[place][tokens[place].index(token)] for place, token in enumerate(path))
            )
