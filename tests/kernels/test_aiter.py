"""AITER's and SGLang's calls as they print them, against the same functions in plain NumPy."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import specsot_kernels as kernels
from specsot.aiter import (
    EAGLEInference,
    TreeMaskMode,
    build_tree_efficient_triton,
    build_tree_kernel_efficient,
    calculate_acceptance_rate,
    fast_topk_torch,
    generate_token_bitmask,
    next_power_of_2,
    pad_to_alignment,
    sample_from_logits,
    select_top_k_tokens,
    sgl_build_tree_kernel_efficient,
    sgl_verify_tree_greedy,
    tree_speculative_sampling_target_only,
    verify_tree_greedy_func,
    verify_tree_greedy_triton,
)
from specsot.errors import InvalidRequest
from specsot_compat import aiter
from specsot_kernels import trees
from tests.conftest import seeds
from tests.kernels.drafting import draft, lists_of, tree_of
from tests.kernels.test_sampling import Scene
from tests.kernels.test_trees import likely_targets

K, STEPS, NODES = 4, 3, 8
MODES = list(TreeMaskMode)


class Drafted:
    """Two requests' draftings as tensors, and what NumPy makes of them."""

    def __init__(self, seed: int = 0, k: int = K, steps: int = STEPS, nodes: int = NODES) -> None:
        rng = random.Random(seed)
        draftings = [draft(rng, k, steps) for _ in range(2)]
        self.trees = [tree_of(one, nodes) for one in draftings]
        self.roots, self.lengths = np.array([one.root.token for one in draftings]), np.array([5, 10])
        self.chosen = kernels.organize_draft_results(*lists_of(draftings), nodes)
        self.predict = np.array([likely_targets(rng, tree) for tree in self.trees])

    def given(self) -> dict[str, Any]:
        parents, best, tokens = organize_draft_results_as_tensors(self.chosen)
        return {
            "verified_id": torch.from_numpy(self.roots),
            "parent_list": parents,
            "top_scores_index": best,
            "draft_tokens": tokens,
            "seq_lens": torch.from_numpy(self.lengths),
            "seq_lens_sum": int(self.lengths.sum()),
        }

    def reference(self, mode: int, k: int = K, steps: int = STEPS, nodes: int = NODES) -> Any:
        return kernels.build_tree_structure(self.roots, *self.chosen, self.lengths, k, steps, nodes, mode)


def organize_draft_results_as_tensors(chosen: Any) -> list[torch.Tensor]:
    return [torch.from_numpy(one) for one in chosen]


def same(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted):
        assert one.tolist() == other.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_the_snippet_of_the_kernels_as_printed(mode: TreeMaskMode) -> None:
    """Seed 002: build, then verify, with its keywords."""
    drafted = Drafted()
    tree_mask, positions, retrive_index, retrive_next_token, retrive_next_sibling, draft_tokens = (
        build_tree_efficient_triton(
            **drafted.given(), topk=4, spec_steps=3, num_verify_tokens=8, tree_mask_mode=mode
        )
    )
    wanted = drafted.reference(mode)
    same((tree_mask, positions, retrive_index, retrive_next_token), wanted)
    candidates = draft_tokens.view(2, 8)
    predicts = torch.full((16,), 77, dtype=torch.int32)
    accept_index = torch.full((2, 4), -1, dtype=torch.int32)
    accept_length = torch.zeros(2, dtype=torch.int32)
    told = verify_tree_greedy_triton(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=accept_length,
        candidates=candidates,
        retrive_index=retrive_index,
        retrive_next_token=retrive_next_token,
        retrive_next_sibling=retrive_next_sibling,
        target_predict=torch.from_numpy(drafted.predict),
    )
    assert all(one is out for one, out in zip(told, (predicts, accept_index, accept_length)))
    found = kernels.verify_tree_greedy(
        wanted.draft_tokens.reshape(2, 8), drafted.predict, *wanted[2:5], STEPS
    )
    same(told[1:], found[1:])
    assert predicts.tolist() == [77 if one < 0 else one for one in found.predicts]
    assert sum(accept_length.tolist()) > 0


@pytest.mark.parametrize("mode", MODES)
def test_the_kernels_of_sglang_write_into_given_arrays(mode: TreeMaskMode) -> None:
    drafted = Drafted(1)
    wanted, given = drafted.reference(mode), drafted.given()
    mask = torch.zeros(len(wanted.tree_mask) + 3, dtype=torch.as_tensor(wanted.tree_mask).dtype)
    positions = torch.zeros(16, dtype=torch.long)
    links = [torch.full((2, 8), -1) for _ in range(3)]
    sgl_build_tree_kernel_efficient(
        given["parent_list"], given["top_scores_index"], given["seq_lens"],
        mask, positions, *links, K, STEPS, NODES, mode,
    )  # fmt: skip
    same((mask[:-3], positions, *links), wanted[:5])
    assert not mask[-3:].any()
    buffers = {"tree_mask_buf": torch.zeros_like(mask), "position_buf": torch.zeros_like(positions)}
    made = build_tree_kernel_efficient(**given, topk=K, spec_steps=STEPS, num_verify_tokens=NODES,
                                       tree_mask_mode=mode, **buffers)  # fmt: skip
    assert made.tree_mask is buffers["tree_mask_buf"]
    same((made.tree_mask[:-3], *made[1:]), wanted)
    outputs = [torch.full((16,), -1).int(), torch.full((2, 4), -1).int(), torch.zeros(2).int()]
    others = [one.clone() for one in outputs]
    walked = (made.draft_tokens.view(2, 8), *links, torch.from_numpy(drafted.predict))
    names = ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
    said = dict(zip(names, walked[1:4]))
    longer = torch.full((17,), -1).int()  # as SGLang's own caller makes it
    sgl_verify_tree_greedy(longer, *outputs[1:], *walked)
    outputs[0], rest = longer[:16], longer[16:]
    assert rest.tolist() == [-1]
    verify_tree_greedy_func(*others, walked[0], **said, target_predict=walked[4], topk=K)
    same(outputs, others)
    same(outputs, kernels.verify_tree_greedy(
        wanted.draft_tokens.reshape(2, 8), drafted.predict, *wanted[2:5], STEPS
    ))  # fmt: skip


def test_a_mask_from_the_caller_gives_the_lengths_of_the_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a device's lengths are read on the host, which no captured graph allows."""
    drafted, told = Drafted(1), list[Any]()
    made = aiter.build_tree_structure

    def build(*given: Any) -> Any:
        told.append(given[-1])
        return made(*given)

    monkeypatch.setattr(aiter, "build_tree_structure", build)
    wanted = drafted.reference(TreeMaskMode.FULL_MASK)
    for more in (0, 3):
        build_in_place(drafted, torch.zeros(len(wanted.tree_mask) + more, dtype=torch.bool))
    assert told == [15, 15] == [int(drafted.lengths.sum())] * 2


@pytest.mark.parametrize("mode", MODES)
def test_a_gpu_writes_trees_straight_into_given_arrays(
    mode: TreeMaskMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No array is made to be copied; what of a longer full mask is no tree's is true, as in SGLang."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    monkeypatch.setattr(trees, "has_kernels", lambda _: True)
    drafted, copied = Drafted(1), aiter.build_tree_structure
    wanted = drafted.reference(mode)
    monkeypatch.setattr(aiter, "build_tree_structure", None)
    size = len(wanted.tree_mask)
    mask = torch.zeros(size + 3, dtype=torch.as_tensor(wanted.tree_mask).dtype, device=device)
    arrays = build_in_place(drafted, mask, mode)
    same((mask[:size], *arrays[1:]), wanted[:5])
    assert mask[size:].tolist() == [mode == TreeMaskMode.FULL_MASK] * 3
    monkeypatch.setattr(aiter, "build_tree_structure", copied)
    with_gaps = torch.zeros(2 * size, dtype=mask.dtype, device=device)[::2]
    same(build_in_place(drafted, with_gaps, mode), wanted[:5])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", MODES)
def test_building_in_place_is_captured_and_replayed(mode: TreeMaskMode) -> None:
    drafted = Drafted(1)
    wanted = drafted.reference(mode)
    mask, seen = torch.as_tensor(wanted.tree_mask).cuda(), given_on_device(drafted)
    build_in_place(drafted, mask, mode, seen)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arrays = build_in_place(drafted, mask, mode, seen)
    for one in arrays:
        one.zero_()
    seen["seq_lens"].copy_(seen["seq_lens"].flip(0))
    drafted.lengths = drafted.lengths[::-1].copy()
    graph.replay()
    same(arrays, drafted.reference(mode)[:5])


def given_on_device(drafted: Drafted, device: str = "cuda") -> dict[str, torch.Tensor]:
    names = ("parent_list", "top_scores_index", "seq_lens")
    given = drafted.given()
    return {name: given[name].to(device) for name in names}


def build_in_place(
    drafted: Drafted,
    mask: torch.Tensor,
    mode: int = TreeMaskMode.FULL_MASK,
    given: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, ...]:
    """The mask, and what is written beside it."""
    given = given or given_on_device(drafted, mask.device.type)
    positions = torch.zeros(2 * NODES, dtype=torch.long, device=mask.device)
    links = [torch.full((2, NODES), -1, device=mask.device) for _ in range(3)]
    sgl_build_tree_kernel_efficient(*given.values(), mask, positions, *links, K, STEPS, NODES, mode)
    return (mask, positions, *links)


class Walked:
    """Trees, what the target says of them, and arrays to write walks into, on a device."""

    def __init__(self, device: str, seed: int = 0) -> None:
        self.scene, rng = Scene(seed, 4, 3, 16), random.Random(seed)
        batch, nodes = self.scene.coins.shape
        predict = np.array([likely_targets(rng, tree) for tree in self.scene.trees])
        self.tree = (self.scene.arrays.draft_tokens.reshape(batch, nodes), *self.scene.arrays[2:5])
        self.greedy_of = kernels.verify_tree_greedy(self.tree[0], predict, *self.tree[1:], 3)
        self.sampled_of = self.scene.run(num_steps=3)
        given = (*self.tree, predict, self.scene.coins, self.scene.last, self.scene.chances)
        *self.given, self.chances = (torch.from_numpy(each).to(device) for each in given)
        self.drafts = torch.zeros_like(self.chances)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """As SGLang's caller makes them, but for what they hold."""
        (batch, nodes), device = self.scene.coins.shape, self.chances.device
        sizes = ((batch * nodes + 1,), (batch, 4), (batch,))
        return tuple(torch.full(size, 77, dtype=torch.int32, device=device) for size in sizes)

    def greedy(self, *outputs: torch.Tensor) -> None:
        sgl_verify_tree_greedy(*outputs, *self.given[:5])

    def sample(self, *outputs: torch.Tensor) -> None:
        coins = self.given[5:7]
        tree_speculative_sampling_target_only(
            *outputs, *self.given[:4], *coins, self.chances, self.drafts, 1.0, 1.0
        )


def same_but_kept(outputs: tuple[torch.Tensor, ...], wanted: Any) -> None:
    """Where nothing was accepted the arrays hold what they held."""
    held = [np.where(one < 0, 77, one).tolist() for one in wanted]
    assert [one.tolist() for one in outputs] == [[*held[0], 77], *held[1:]]


def test_a_gpu_writes_walks_straight_into_given_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(trees, "has_kernels", lambda _: True)
    walked = Walked("cuda" if torch.cuda.is_available() else "cpu")
    outputs, others = walked.outputs(), walked.outputs()
    with monkeypatch.context() as nothing_is_copied:
        nothing_is_copied.setattr(aiter, "_copy", None)
        walked.greedy(*outputs)
        walked.sample(*others)
    same_but_kept(outputs, walked.greedy_of)
    same_but_kept(others, walked.sampled_of)
    for call, wanted in ((walked.greedy, walked.greedy_of), (walked.sample, walked.sampled_of)):
        for number in range(3):  # what cannot be written to directly is copied into
            outputs = list(walked.outputs())
            gaps = torch.stack((outputs[number], outputs[number]), -1)
            outputs[number] = gaps.long()[..., 0] if number else gaps[..., 0]
            call(*outputs)
            same_but_kept(tuple(outputs), wanted)


@pytest.mark.parametrize("number", range(3))
def test_given_arrays_elsewhere_are_refused(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(trees, "has_kernels", lambda _: True)
    walked = Walked("cpu")
    outputs = list(walked.outputs())
    outputs[number] = outputs[number].to("meta")
    for call in (walked.greedy, walked.sample):
        with pytest.raises(InvalidRequest, match="on one device, got cpu, meta"):
            call(*outputs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_walks_in_place_are_captured_and_replayed() -> None:
    walked, other = Walked("cuda", 0), Walked("cuda", 1)
    outputs = (walked.outputs(), walked.outputs())

    def both() -> None:
        walked.greedy(*outputs[0])
        walked.sample(*outputs[1])

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    for case in (walked, other):  # the arrays' next contents are read by the same graph
        for one, new in zip((*walked.given, walked.chances), (*case.given, case.chances)):
            one.copy_(new)
        for one in (*outputs[0], *outputs[1]):
            one.fill_(77)
        graph.replay()
        same_but_kept(outputs[0], case.greedy_of)
        same_but_kept(outputs[1], case.sampled_of)


def test_a_single_level_has_no_parents_in_sglang() -> None:
    drafted = Drafted(2, k=3, steps=1, nodes=3)
    given = drafted.given() | {"parent_list": torch.empty(2, 0)}
    found = build_tree_kernel_efficient(**given, topk=3, spec_steps=1, num_verify_tokens=3)
    same(found, drafted.reference(TreeMaskMode.FULL_MASK, 3, 1, 3))


@pytest.mark.parametrize("seed", seeds(4, quick=2))
def test_sampling_of_targets_alone_is_that_of_the_reference(seed: int) -> None:
    scene = Scene(seed, 4, 3, 16)
    batch, nodes, _ = scene.chances.shape
    walked = (scene.arrays.draft_tokens.reshape(batch, nodes), *scene.arrays[2:5])
    chances = torch.from_numpy(scene.chances)
    outputs = [
        torch.full((batch * nodes,), -1).int(), torch.full((batch, 4), -1).int(), torch.zeros(batch).int(),
    ]  # fmt: skip
    tree_speculative_sampling_target_only(
        *outputs, *map(torch.from_numpy, (*walked, scene.coins, scene.last)), chances,
        torch.zeros_like(chances), threshold_single=1.0, threshold_acc=1.0, deterministic=True,
    )  # fmt: skip
    same(outputs, scene.run(num_steps=3))


def test_the_utilities_of_the_seed() -> None:
    logits = torch.tensor([[0.1, 3.0, 2.0, -1.0], [4.0, 0.0, 5.0, 1.0]])
    assert fast_topk_torch(logits, 2)[1].tolist() == [[1, 2], [2, 0]]
    assert fast_topk_torch(logits, 1, dim=0)[1].tolist() == [[1, 0, 1, 1]]
    scores, ids = select_top_k_tokens(logits.view(1, 2, 4), 2)
    assert (scores.tolist(), ids.tolist()) == ([[[3.0, 2.0], [5.0, 4.0]]], [[[1, 2], [2, 0]]])
    assert generate_token_bitmask(torch.tensor([[0, 2], [1, 1]]), 3).tolist() == [
        [True, False, True],
        [False, True, False],
    ]
    assert calculate_acceptance_rate(torch.tensor([1, 3]), 8) == 4 / 16
    assert calculate_acceptance_rate(torch.tensor([]), 8) == 0
    assert [next_power_of_2(n) for n in (0, 1, 2, 3, 8, 9)] == [1, 1, 2, 4, 8, 16]
    for dim in (0, 1, -1):
        padded = pad_to_alignment(torch.ones(3, 5), 4, dim, value=7.0)
        assert padded.shape == ((4, 5) if dim == 0 else (3, 8))
        assert (padded.sum(), padded[-1, -1]) == (15 + 7 * (padded.numel() - 15), 7)
    whole = torch.ones(4)
    assert pad_to_alignment(whole, 4) is whole


def test_sampling_draws_what_is_left_as_often_as_it_is_likely() -> None:
    torch.manual_seed(0)
    chances = torch.tensor([0.4, 0.3, 0.2, 0.1])
    many = chances.log().expand(4000, 4)

    def shares(**cut: Any) -> list[float]:
        drawn = sample_from_logits(many, **cut)
        return [(drawn == token).float().mean().item() for token in range(4)]

    assert shares() == pytest.approx(chances.tolist(), abs=0.04)
    assert shares(top_k=2) == pytest.approx([4 / 7, 3 / 7, 0, 0], abs=0.04)
    assert shares(top_p=0.75) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0], abs=0.04)
    assert shares(top_p=0.5, top_k=2) == [1, 0, 0, 0]
    assert shares(top_p=0.01) == [1, 0, 0, 0]
    assert shares(temperature=0) == [1, 0, 0, 0]
    assert shares(temperature=0.5) == pytest.approx([16 / 30, 9 / 30, 4 / 30, 1 / 30], abs=0.04)


def test_the_snippets_of_inference_as_printed(demo_model: Path) -> None:
    """Seed 002: generate with figures, then a benchmark for each width; models and lengths are ours."""
    from specsot.aiter import EAGLEConfig

    config = EAGLEConfig(topk=4, num_steps=3, num_draft_tokens=8, temperature=0.0)
    eagle = EAGLEInference(
        draft_model=demo_model / "eagle3", target_model=demo_model / "base", config=config, device="cpu"
    )
    input_ids = torch.tensor([[1, 2, 3, 4]], device="cpu")
    output_ids, stats = eagle.generate(input_ids=input_ids, max_new_tokens=12)
    assert stats is not None
    assert f"{stats['acceptance_rate']:.2%} {stats['speedup']:.2f}x"
    assert output_ids.shape == (1, 16)
    assert stats["speedup"] == stats["total_tokens_generated"] / stats["total_target_forward"]
    assert eagle.generate(input_ids, 2, temperature=0.7, top_p=0.9, top_k=5, return_stats=False)[1] is None
    assert eagle.config is config
    for topk in [2, 4]:
        config = EAGLEConfig(topk=topk, num_steps=3)
        stats = EAGLEInference(demo_model / "eagle3", demo_model / "base", config).benchmark([[1, 2, 3]], 4)
        assert 0 <= stats["acceptance_rate"] <= 1
        assert stats["identical"] == stats["sequences"] == 1
        assert stats["speedup"] > 0


class HeldTarget:
    """A loaded model, as far as `device=` is concerned."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def to(self, device: str) -> Path:
        assert device == "cpu"
        return self._directory


def test_a_target_in_memory_is_moved(demo_model: Path) -> None:
    target = HeldTarget(demo_model / "base")
    found = EAGLEInference(draft_model=None, target_model=target, device="cpu").generate([1, 2, 3, 4], 3)
    assert len(found[0]) == 7
