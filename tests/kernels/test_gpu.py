"""The Triton kernels against the plain rules: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import random
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specsot_kernels import TreeMaskMode, organize_draft_results, reference, trees
from tests.conftest import some
from tests.kernels.drafting import VOCABULARY, draft, lists_of
from tests.kernels.test_sampling import Scene
from tests.kernels.test_trees import likely_targets

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAUNCHES = 2 if torch.cuda.is_available() else 1  # the second is by what the first one compiled
import triton  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402

from specsot_kernels import gpu  # noqa: E402
from specsot_kernels.gpu import launching  # noqa: E402

SHAPES = [  # k, steps, nodes, requests
    (1, 1, 2, 1), (1, 5, 6, 2), (3, 2, 1, 2), (3, 2, 7, 8),
    (4, 4, 17, 3), (5, 2, 31, 2), (8, 5, 63, 1), (10, 5, 131, 1),
]  # fmt: skip
OTHERS = (torch.float16, torch.bfloat16, torch.float64)  # than fp32: one shape tells how they are read


def on_device(*arrays: Any) -> list[Any]:
    return [torch.from_numpy(each).to(DEVICE) if isinstance(each, np.ndarray) else each for each in arrays]


def check_same(found: Any, wanted: Any) -> None:
    for name, ours, theirs in zip(wanted._fields, found, wanted):
        assert str(ours.dtype).removeprefix("torch.") == str(theirs.dtype), name
        assert ours.cpu().tolist() == theirs.tolist(), name


def chosen_of(seed: int, k: int, steps: int, nodes: int, batch: int) -> tuple[Any, ...]:
    rng = random.Random(seed)
    draftings = [draft(rng, k, steps) for _ in range(batch)]
    roots = np.array([one.root.token for one in draftings])
    lengths = np.array([rng.randrange(200) for _ in draftings], np.int32)
    return roots, *organize_draft_results(*lists_of(draftings), nodes), lengths


@pytest.mark.parametrize(
    ("shape", "coarse", "kind"),
    some(
        [
            *((shape, coarse, torch.float32) for shape in SHAPES for coarse in (False, True)),
            *((SHAPES[4], True, kind) for kind in OTHERS),
        ],
        *(0, 3, 4, 7, 8, 11, 12, 15, 16, 17, 18),
    ),
)
def test_the_best_are_the_rules(shape: tuple[int, int, int, int], coarse: bool, kind: torch.dtype) -> None:
    """Products of chances, or their logarithms, some of which are not numbers, or nothing at all."""
    k, steps, nodes, batch = shape
    rng = random.Random(k)
    scores, tokens, parents = lists_of([draft(rng, k, steps, coarse) for _ in range(batch)])
    scores = [np.log(each) if k % 2 else each for each in scores]
    scores[-1][0, 0, 0] = np.nan
    scores[-1][-1, -1, -1] = -np.inf if k % 2 else -0.0
    rounded = [torch.from_numpy(each).to(kind) for each in scores]
    wanted = reference.organize_draft_results(
        [each.double().numpy() for each in rounded], tokens, parents, nodes
    )
    lists = ([each.to(DEVICE) for each in rounded], on_device(*tokens), on_device(*parents))
    check_same(gpu.organize_draft_results(*lists, nodes), wanted)


@pytest.mark.parametrize(
    ("k", "steps", "nodes", "batch", "mode"),
    some([(*SHAPES[n // 3], list(TreeMaskMode)[n % 3]) for n in range(3 * len(SHAPES))], *range(0, 24, 2)),
)
def test_trees_are_the_rules(k: int, steps: int, nodes: int, batch: int, mode: TreeMaskMode) -> None:
    if mode == TreeMaskMode.QLEN_ONLY_BITPACKING and nodes > 32:
        nodes = 32
    given = chosen_of(k, k, steps, nodes, batch)
    for _ in range(LAUNCHES):
        check_same(
            gpu.build_trees(*on_device(*given), k, mode, None), reference.build_trees(*given, k, mode, None)
        )


@pytest.mark.parametrize("told", [True, False], ids=["sum told", "sum not told"])
def test_known_parents_and_orphans(told: bool) -> None:
    parents = np.array([[-1, 0, 0, 1, 2, 4], [-1, -1, 1, 2, 0, -1]])
    given = (np.arange(12).reshape(2, 6), parents, np.array([300, 0]))
    found = gpu.arrange_trees(*on_device(*given), TreeMaskMode.FULL_MASK, 300 if told else None)
    check_same(found, reference.arrange_trees(*given, TreeMaskMode.FULL_MASK, None))


def test_a_parent_that_was_not_chosen_leaves_an_orphan() -> None:
    parents, selected = np.array([[-1, 0, 1]]), np.array([[1, 2]])
    given = (np.array([7]), parents, selected, np.array([[5, 6]]), np.array([4]), 2)
    found = gpu.build_trees(*on_device(*given), TreeMaskMode.QLEN_ONLY, None)
    check_same(found, reference.build_trees(*given, TreeMaskMode.QLEN_ONLY, None))


@pytest.mark.parametrize(("k", "steps", "nodes", "batch"), SHAPES)
def test_greedy_walks_are_the_rules(k: int, steps: int, nodes: int, batch: int) -> None:
    deepest = 0
    for seed in range(3):
        scene = Scene(seed, k, steps, nodes, batch)
        predict = np.array([likely_targets(random.Random(seed), tree) for tree in scene.trees])
        given = (scene.arrays.draft_tokens.reshape(batch, nodes), predict, *scene.arrays[2:5])
        wanted = reference.verify_tree_greedy(*given, steps)
        check_same(gpu.verify_tree_greedy(*on_device(*given), steps), wanted)
        deepest = max(deepest, wanted.accept_token_num.max())
    assert nodes == 1 or deepest > 0, "something must have been accepted"


def test_rows_may_lie_anywhere_and_children_in_any_order() -> None:
    tokens = np.array([[1, 2, 3], [4, 6, 6]], np.int32)
    index = np.array([[5, 3, 1], [0, 2, 4]], np.int32)
    first, following = np.array([[1, 2, -1], [2, -1, -1]]), np.array([[-1, -1, -1], [-1, -1, 1]])
    given = (tokens, np.array([[6, 30, 0], [3, 6, 2]]), index, first, following)
    check_same(gpu.verify_tree_greedy(*on_device(*given), 2), reference.verify_tree_greedy(*given, 2))


def test_broken_links_end_and_stay_inside() -> None:
    """Siblings in a circle, links and rows that lead outside: nothing hangs, nothing outside is touched."""
    given = on_device(
        np.array([[1, 2, 3]] * 3),
        np.full((3, 3), 9),
        np.array([[0, 1, 2], [3, 4, 5], [99, -7, 8]]),
        np.array([[1, -1, -1], [77, -1, -1], [1, -1, -1]]),
        np.array([[-1, 2, 1], [-1, -1, -1], [-1, -1, -1]]),
    )
    assert gpu.verify_tree_greedy(*given, 2).accept_token_num.tolist() == [0, 0, 0]
    chances = torch.zeros(3, 3, 4, device=DEVICE)
    chances[..., 0] = 1
    coins = (torch.full((3, 3), 0.5, device=DEVICE), torch.full((3,), 0.5, device=DEVICE))
    found = gpu.tree_speculative_sampling(given[0], *given[2:], *coins, chances, None, 1.0, 1.0, 2)
    assert found.accept_token_num.tolist() == [0, 0, 0]
    assert found.predicts.tolist()[:6] == [0, -1, -1, 0, -1, -1]


def sample(
    scene: Scene, kind: torch.dtype, draft_probs: np.ndarray | None, single: float, acc: float
) -> None:
    """Both, on the same rounded chances."""
    batch, nodes, _ = scene.chances.shape
    tree = (scene.arrays.draft_tokens.reshape(batch, nodes), *scene.arrays[2:5], scene.coins, scene.last)
    rounded = [
        None if each is None else torch.from_numpy(each).to(kind) for each in (scene.chances, draft_probs)
    ]
    plain = [None if each is None else each.double().numpy() for each in rounded]
    ours = [None if each is None else each.to(DEVICE) for each in rounded]
    wanted = reference.tree_speculative_sampling(*tree, *plain, single, acc, scene.steps)
    for _ in range(LAUNCHES):
        found = gpu.tree_speculative_sampling(*on_device(*tree), *ours, single, acc, scene.steps)
    check_same(found, wanted)


@pytest.mark.parametrize(("single", "acc"), [(1.0, 1.0), (0.6, 0.5), (0.0, 0.0)])
@pytest.mark.parametrize(
    ("shape", "kind"),
    some(
        [*((SHAPES[each], torch.float32) for each in (1, 2, 4, 6)), *((SHAPES[4], kind) for kind in OTHERS)],
        *(0, 1, 3, 5),
    ),
)
def test_walks_by_chance_are_the_rules(
    shape: tuple[int, int, int, int], single: float, acc: float, kind: torch.dtype
) -> None:
    k, steps, nodes, batch = shape
    sample(Scene(batch, k, steps, nodes, batch), kind, None, single, acc)


@pytest.mark.parametrize("refuse", [False, True])
def test_draws_from_a_vocabulary_of_many_parts(refuse: bool) -> None:
    """Five thousand tokens, most without a chance; draft chances are taken off where they are told."""
    for seed in range(2):
        scene, rng = Scene(seed, 4, 3, 9, 2), np.random.default_rng(seed)
        wide = rng.random((2, 9, 5000)) * (rng.random((2, 9, 5000)) < 0.1)
        wide[..., :VOCABULARY] += 40 * scene.chances
        scene.chances = wide / wide.sum(-1, keepdims=True)
        if refuse:
            scene.coins[:] = 1 - 1e-12
        drafts = scene.chances * rng.random((2, 9, 1)) if seed % 2 else None
        sample(scene, torch.float32, drafts, 1.0, 1.0)


@pytest.mark.parametrize("coin", [0.0, 0.5, 1.0])
def test_nothing_left_is_drawn_from_the_target(coin: float) -> None:
    scene = Scene(2, 2, 1, 3, batch=1)
    tokens = [child.token for child in scene.trees[0][0].children]
    scene.chances[0, 0] = 0.0
    scene.chances[0, 0, tokens] = (0.25, 0.5)
    scene.coins[:], scene.last[:] = 1 - 1e-12, coin
    sample(scene, torch.float64, None, 1.0, 1.0)


def test_kernels_are_for_gpus() -> None:
    assert not trees.has_kernels("cpu")
    assert trees.has_kernels("cuda")


class Compiled(CompiledKernel):
    """Tells what it is launched with, after the name of what was compiled."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, name: str, told: list[Any]) -> None:
        self.name, self.told = name, told

    def run(self, *given: Any) -> None:
        self.told.append((self.name, *given))


class Source:
    """A kernel that Triton has not compiled yet."""

    def __init__(self, told: list[Any]) -> None:
        self.fn, self.told = object(), told

    def __getitem__(self, grid: Any) -> Any:
        def launched(*given: Any, **options: Any) -> Any:
            self.told.append(("source", grid, given, options))
            return Compiled(f"compiled for {given}", self.told)

        return launched


def test_a_kernel_of_the_same_kind_is_launched_as_it_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the current stream, and without hooks."""
    streams = {3: 77}
    active = SimpleNamespace(get_current_device=lambda: 3, get_current_stream=streams.__getitem__)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    told = list[Any]()
    kernel, grid = Source(told), (2, 1, 1)
    for given in (1, 2):
        launching.launch(kernel, grid, ("fp32",), (given,), num_warps=1)
    launching.launch(kernel, grid, ("fp16",), (3,))
    launching.launch(Source(told), grid, ("fp32",), (4,))
    assert told == [
        ("source", grid, (1,), {"num_warps": 1}),
        ("compiled for (1,)", *grid, 77, "function", "metadata", None, None, None, 2),
        ("source", grid, (3,), {}),
        ("source", grid, (4,), {}),
    ]
