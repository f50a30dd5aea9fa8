"""MTP layers inside checkpoints, against other code of the same layers, in fp32 on tiny random models."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from shutil import copytree

import pytest
import torch
from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map
from safetensors.torch import load_file

from specsot.checkpoint.config import read_config
from specsot.checkpoint.mtp import has_mtp
from specsot.checkpoint.resolving import resolve_model
from specsot.core.frames import FeatureBatch, Features, Fork, Opening
from specsot.errors import ModelError
from specsot.members import TreeShape
from specsot_drafter.core.selection import Candidates
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.heads import HeadRows
from specsot_drafter.heads.mtp import MtpHead, load_mtp
from specsot_drafter.loader import propose_with
from specsot_drafter.memory import mtp_memory
from specsot_drafter.proposers import Proposer
from specsot_model.attention import RowSpan
from specsot_model.memory_fit import WeightForm
from tests.conftest import some
from tests.drafter.mtp import KINDS, LAYERS, Pair, split_pair, write_pair
from tests.model.gguf_files import ARCHS, DELTA, write_gguf
from tests.model.tiny import Ring, load

TEXT = [7, 99, 3, 50, 21, 21, 64, 8, 15, 30, 77, 41, 5, 90, 13, 2, 66, 38, 4, 19, 55, 71, 6, 28]
NEAR = 1e-4
SHAPE = TreeShape(depth=3, top_k=3, nodes=16, fixed=True)
LEVELS = SHAPE.depth + 1


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair of each kind; no test changes its files."""
    return write_pair(tmp_path_factory.mktemp("base"), request.param)


def load_layer(directory: Path, base: Path) -> MtpHead:
    return load_mtp(directory, base, torch.float32, "cpu")


def fused_rows(pair: Pair, head: MtpHead, cuts: tuple[int, ...], tokens: list[int]) -> torch.Tensor:
    """What the stages send of a text, cut into these ranges."""
    _, fused = Ring.of(load(pair.directory, cuts)).feed(tokens, 0, taps=head.tap_slices())
    assert fused is not None
    return fused


@torch.inference_mode()
def outputs_of(head: MtpHead, tokens: list[int], features: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(len(tokens))
    plan = head.plan([RowSpan(len(tokens), 0, len(tokens), (0,))], 64)
    return head.forward(torch.tensor(tokens), features, HeadRows(rows, rows, plan, head.make_kv(1, 64)))


@pytest.mark.parametrize("cuts", some([((LAYERS,),), ((1, LAYERS),), ((1, 2, LAYERS),)], 2))
def test_logits_are_those_of_the_reference_over_layer_ranges(pair: Pair, cuts: tuple[int, ...]) -> None:
    head = load_layer(pair.directory, pair.directory)
    features = head.features(fused_rows(pair, head, cuts, TEXT[:-1]))
    torch.testing.assert_close(features, pair.features(TEXT[:-1]), atol=NEAR, rtol=0)
    logits = head.logits(outputs_of(head, TEXT[1:], features))
    expected = pair.logits(pair.outputs(TEXT))
    torch.testing.assert_close(logits, expected, atol=NEAR, rtol=0)
    best = expected.topk(2).values
    assert (best[:, 0] - best[:, 1]).median() > 0.1, "else agreement would mean little"


def test_a_layer_in_a_checkpoint_of_its_own_is_the_same(pair: Pair, tmp_path: Path) -> None:
    whole = load_layer(pair.directory, pair.directory)
    own = replace(pair, directory=copytree(pair.directory, tmp_path / "base"))
    alone = split_pair(own, tmp_path / "alone")
    apart = load_layer(alone, own.directory)
    features = pair.features(TEXT[:-1])
    expected = outputs_of(whole, TEXT[1:], features)
    torch.testing.assert_close(outputs_of(apart, TEXT[1:], features), expected, atol=1e-5, rtol=0)
    with pytest.raises(ModelError, match="no MTP layer for a base of 3 layers"):
        load_layer(own.directory, own.directory)


def test_the_memory_of_a_layer_is_known_before_it_is_loaded(pair: Pair) -> None:
    config = read_config(pair.directory)
    memory = mtp_memory(pair.directory, config, WeightForm(4, shared=config.tied), SHAPE, kernels=False)
    stored = load_file(pair.directory / "model.safetensors")
    own = sum(one.nbytes for name, one in stored.items() if name.startswith(("mtp.", "model.layers.3.")))
    norm = config.hidden * 4  # the layer has three of its own around its block
    assert own - 3 * norm <= memory.own <= own
    tables = (1 if config.tied else 2) * stored["model.embed_tokens.weight"].nbytes
    assert tables <= memory.borrowed <= tables + norm
    head = load_layer(pair.directory, pair.directory)
    assert (memory.row, memory.head.taps, memory.head.width) == (head.row_bytes, head.taps, head.width)


@pytest.mark.parametrize("kind", ["qwen2", "glm4_moe"])
def test_in_8_bits_the_likeliest_drafts_stay_the_same(kind: str, tmp_path: Path) -> None:
    """In kernels for whole layers, where these take the family's, and with the lm_head's own."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "vocab_size": 128}
    pair = write_pair(tmp_path, kind, **sizes)
    head = load_mtp(tmp_path, tmp_path, torch.float32, "cpu", quantization="int8")
    outputs = outputs_of(head, TEXT[1:], pair.features(TEXT[:-1]))
    found = head.choose(outputs, 3)
    assert found is not None
    expected = pair.logits(pair.outputs(TEXT)).log_softmax(-1).topk(3)
    assert (found[1] == expected.indices).float().mean() > 0.9
    assert (found[0] - expected.values).abs().mean() < 0.2


# What llama.cpp's converter calls the modules of Qwen's layer, within the layer.
OF_QWEN = {
    "mtp.fc": "eh_proj",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head.norm",
}


def own_tensors(pair: Pair) -> dict[str, torch.Tensor]:
    """The layer's tensors by their names within it, in DeepSeek's layout, experts stacked."""
    stored = load_file(pair.directory / "model.safetensors")
    own = dict[str, torch.Tensor]()
    experts = defaultdict[str, list[torch.Tensor]](list)
    for published, tensor in stored.items():
        stem, _, suffix = published.rpartition(".")
        prefix = next((one for one in (f"model.layers.{LAYERS}.", "mtp.layers.0.") if one in published), "")
        if not prefix and stem not in OF_QWEN:
            continue
        name = published.removeprefix(prefix) if prefix else f"{OF_QWEN[stem]}.{suffix}"
        if match := re.fullmatch(r"mlp\.experts\.\d+\.(.*)", name):
            experts[f"mlp.experts.{match[1]}"].append(tensor)
        else:
            own[name] = tensor
    return own | {name: torch.stack(parts) for name, parts in experts.items()}


def add_layer(pair: Pair, writer: GGUFWriter, alone: bool) -> None:
    """As llama.cpp's converter writes the layer, by the names of the package gguf.

    Beside GLM's layer it writes copies of the base's tables; a file of Qwen's layer alone has the base's own.
    Of the architectures of the package, GLM alone has names of the further modules, which are those of all.
    """
    kind = pair.base.config.model_type
    names, further = (get_tensor_name_map(arch, LAYERS + 1) for arch in (ARCHS[kind], MODEL_ARCH.GLM4_MOE))
    stored = load_file(pair.directory / "model.safetensors")
    own = own_tensors(pair)
    if kind == "glm4_moe":
        own["mlp.gate.e_score_correction.bias"] = own.pop("mlp.gate.e_score_correction_bias")
        own["embed_tokens.weight"] = own["shared_head.head.weight"] = stored["lm_head.weight"]
    tensors = {f"model.layers.{LAYERS}.{name}": tensor for name, tensor in own.items()}
    if alone and kind != "glm4_moe":
        tables = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
        tensors |= {name: stored[name] for name in tables if name in stored}
    writer.add_nextn_predict_layers(1)
    writer.add_block_count(LAYERS + 1)
    for name, tensor in tensors.items():
        stem, _, suffix = name.rpartition(".")
        raised = tensor + 1 if kind in DELTA and name.endswith("norm.weight") else tensor
        writer.add_tensor(f"{names.get_name(stem) or further.get_name(stem)}.{suffix}", raised.numpy())


# In GGUF files. Experts are small, so that a file is.
GGUF_KINDS = ("glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


@pytest.mark.parametrize(("kind", "alone"), some([*product(GGUF_KINDS, (False, True))], 1, 2, 4, 5, 6))
def test_a_layer_in_a_gguf_file_is_the_same(
    kind: str, alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the layers of its base, or in a file without these."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    changes = {"head_dim": 16} if kind == "glm4_moe" else {}
    pair = write_pair(tmp_path / "base", kind, **changes)
    add = partial(add_layer, pair, alone=alone)
    whole = write_gguf(tmp_path / "base.gguf", pair.base, also=lambda writer: None if alone else add(writer))
    base = resolve_model(whole)
    own = write_gguf(tmp_path / "mtp-base.gguf", pair.base, also=add, tensors=False) if alone else whole
    assert read_config(base).layers == LAYERS
    assert has_mtp(base, read_config(base)) != alone
    head = load_layer(resolve_model(own), base)
    logits = head.logits(outputs_of(head, TEXT[1:], pair.features(TEXT[:-1])))
    torch.testing.assert_close(logits, pair.logits(pair.outputs(TEXT)), atol=NEAR, rtol=0)


class Drafting:
    """A proposer that is fed a text as a ring would do it."""

    def __init__(self, pair: Pair, page_rows: int = 5) -> None:
        self.pair = pair
        self.head = load_layer(pair.directory, pair.directory)
        self.proposer: Proposer = propose_with(self.head, SHAPE, 40, page_rows)
        self.sequences: dict[int, DraftSequence] = {}

    def open(self, sequence: int, prompt: int, fork: Fork | None = None) -> DraftSequence:
        opened = DraftSequence(Opening(sequence, prompt, fork=fork, limit=200))
        if fork:
            opened.tokens = self.sequences[fork.sequence].tokens[: fork.length]
            opened.committed = fork.length
        self.sequences[sequence] = opened
        self.proposer.open(opened)
        return opened

    def feed(self, sequence: int, tokens: list[int], bonus: int | None) -> None:
        """The next committed tokens, with the true features."""
        known = self.sequences[sequence]
        start = known.committed
        text = [*known.tokens[:start], *tokens]
        _, fused = Ring.of(load(self.pair.directory)).feed(text, 0, taps=self.head.tap_slices())
        batch = FeatureBatch(sequence, start, tuple(tokens), bonus, None if bonus is None else 1)
        known.observe(batch)
        self.proposer.observe(Features(1, 0, feature_batches=(batch,), rows=fused[start:]))

    def check(self, *sequences: int) -> None:
        """Every candidate's score is the reference's along its path of drafts."""
        own = [self.sequences[sequence] for sequence in sequences]
        offer = self.proposer.propose(own, LEVELS)
        assert offer is not None
        for tree, sequence in enumerate(own):
            check_tree(self.pair, list(sequence.tokens), offer, tree)


def check_tree(pair: Pair, text: list[int], offer: Candidates, tree: int) -> None:
    tokens, scores, parents = (part[tree].tolist() for part in (offer.tokens, offer.scores, offer.parents))
    best = pair.along(text, tokens[:1])[0].topk(SHAPE.top_k)
    assert tokens[: SHAPE.top_k] == best.indices.tolist()
    assert scores[: SHAPE.top_k] == pytest.approx(best.values.tolist(), abs=NEAR)
    paths = list[list[int]]()
    for token, parent in zip(tokens, parents):
        paths.append([*(paths[parent - 1] if parent else []), token])
    leaves = [(path, score) for path, score in zip(paths, scores) if len(path) == LEVELS]
    assert len(leaves) == SHAPE.top_k**2
    for path, score in leaves:
        chances = pair.along(text, path)
        assert score == pytest.approx(float(sum(one[draft] for one, draft in zip(chances, path))), abs=NEAR)


def test_trees_and_branches_are_those_of_the_reference(pair: Pair) -> None:
    """Also after a prompt in chunks, after accepted drafts, and of branches that share a prefix."""
    drafting = Drafting(pair)
    drafting.open(1, 13)
    drafting.feed(1, TEXT[:6], None)
    drafting.feed(1, TEXT[6:13], 90)
    drafting.check(1)
    drafting.feed(1, [90, 17, 5], 44)
    drafting.check(1)
    for branch, own in ((2, [9, 31]), (3, [60])):
        drafting.open(branch, 8 + len(own), Fork(1, 8))
        drafting.feed(branch, own, 33 + branch)
    drafting.check(3, 1, 2)
