"""The tree functions against trees of linked nodes, in every mask mode; tensors against NumPy."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from specsot_kernels import (
    TreeMaskMode,
    Verified,
    arrange_trees,
    build_tree_structure,
    organize_draft_results,
    verify_tree_greedy,
)
from specsot_kernels.errors import InvalidArguments
from tests.kernels.drafting import (
    VOCABULARY,
    Drafting,
    Node,
    draft,
    greedy_walk,
    links_of,
    lists_of,
    mask_of,
    tree_of,
)

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SHAPES = [  # k, steps, nodes
    (1, 1, 2), (1, 5, 6), (1, 7, 4), (2, 1, 3), (2, 3, 11), (3, 2, 1), (3, 2, 7), (3, 2, 13),
    (4, 3, 8), (4, 4, 16), (4, 4, 17), (5, 2, 31), (6, 5, 40), (8, 5, 63), (10, 8, 60),
]  # fmt: skip


def batch_of(seed: int, k: int, steps: int, coarse: bool = False) -> list[Drafting]:
    rng = random.Random(seed)
    return [draft(rng, k, steps, coarse) for _ in range(1 + seed % 3)]


def built(draftings: list[Drafting], k: int, steps: int, nodes: int, mode: int) -> Any:
    chosen = organize_draft_results(*lists_of(draftings), nodes)
    verified = np.array([one.root.token for one in draftings])
    lengths = np.array([3 + 5 * b for b in range(len(draftings))], dtype=np.int32)
    arrays = build_tree_structure(verified, *chosen, lengths, k, steps, nodes, mode)
    return chosen, arrays, lengths


@pytest.mark.parametrize("coarse", [False, True], ids=["distinct", "tied"])
@pytest.mark.parametrize(("k", "steps", "nodes"), SHAPES)
def test_trees_are_those_of_linked_nodes(coarse: bool, k: int, steps: int, nodes: int) -> None:
    for seed in range(4):
        draftings = batch_of(seed, k, steps, coarse)
        trees = [tree_of(one, nodes) for one in draftings]
        chosen, arrays, lengths = built(draftings, k, steps, nodes, TreeMaskMode.QLEN_ONLY)
        assert [chosen.parent_list.shape, chosen.draft_tokens.shape] == [
            (len(trees), k * (steps - 1) + 1),
            (len(trees), nodes - 1),
        ]
        assert chosen.top_scores_index.tolist() == [[node.flat for node in tree[1:]] for tree in trees]
        assert arrays.draft_tokens.tolist() == [node.token for tree in trees for node in tree]
        assert arrays.positions.tolist() == [
            int(length) + len(node.line) - 1 for tree, length in zip(trees, lengths) for node in tree
        ]
        rows = len(trees) * nodes
        assert arrays.retrieve_index.tolist() == np.arange(rows).reshape(-1, nodes).tolist()
        wanted = [links_of(tree) for tree in trees]
        assert arrays.retrieve_next_token.tolist() == [first for first, _ in wanted]
        assert arrays.retrieve_next_sibling.tolist() == [following for _, following in wanted]
        flat = [seen for tree in trees for row in mask_of(tree) for seen in row]
        assert arrays.tree_mask.tolist() == flat
        whole = [each.dtype for each in (*chosen, *arrays[1:])]
        assert whole == [np.int64] * len(whole)
        assert arrays.tree_mask.dtype == np.bool_


@pytest.mark.parametrize(("k", "steps", "nodes"), SHAPES)
def test_a_full_mask_has_every_column_of_the_preceding_sequence(k: int, steps: int, nodes: int) -> None:
    draftings = batch_of(2, k, steps)
    _, arrays, lengths = built(draftings, k, steps, nodes, TreeMaskMode.FULL_MASK)
    mask = arrays.tree_mask
    assert mask.dtype == np.bool_
    assert mask.shape == (nodes * int(lengths.sum()) + len(draftings) * nodes * nodes,)
    for b, one in enumerate(draftings):
        tree = mask_of(tree_of(one, nodes))
        for row in range(nodes):
            start = nodes * nodes * b + nodes * int(lengths[:b].sum()) + row * (int(lengths[b]) + nodes)
            assert mask[start : start + lengths[b]].all()
            assert mask[start + lengths[b] : start + lengths[b] + nodes].tolist() == tree[row]


@pytest.mark.parametrize(
    ("nodes", "word"),
    [(7, np.uint8), (8, np.uint8), (9, np.uint16), (16, np.uint16), (17, np.uint32), (32, np.uint32)],
)
def test_a_packed_mask_has_one_word_a_row(nodes: int, word: Any) -> None:
    draftings = batch_of(1, 4, 4)
    _, arrays, _ = built(draftings, 4, 4, nodes, TreeMaskMode.QLEN_ONLY_BITPACKING)
    packed = arrays.tree_mask
    assert (packed.dtype, packed.shape) == (word, (len(draftings) * nodes,))
    rows = [row for one in draftings for row in mask_of(tree_of(one, nodes))]
    for got, row in zip(packed.tolist(), rows):
        assert [bool(got >> bit & 1) for bit in range(nodes)] == row
        assert got & 1


@pytest.mark.parametrize(("k", "steps", "nodes"), SHAPES)
def test_greedy_walks_are_those_of_linked_nodes(k: int, steps: int, nodes: int) -> None:
    reached = 0
    for seed in range(5):
        draftings = batch_of(seed, k, steps)
        trees = [tree_of(one, nodes) for one in draftings]
        _, arrays, _ = built(draftings, k, steps, nodes, TreeMaskMode.QLEN_ONLY)
        predict = [likely_targets(random.Random(seed), tree) for tree in trees]
        depth = steps if seed % 2 else max(steps - 1, 0)
        found = verify_tree_greedy(
            arrays.draft_tokens.reshape(len(trees), nodes),
            np.array(predict),
            *arrays[2:5],
            num_steps=depth,
        )
        walks = [greedy_walk(tree, wanted, depth) for tree, wanted in zip(trees, predict)]
        bonus = [wanted[walk[-1]] for wanted, walk in zip(predict, walks)]
        check_found(found, trees, walks, bonus, depth)
        reached = max(reached, *(len(walk) for walk in walks))
    assert nodes == 1 or reached > 1, "something must have been accepted"


def likely_targets(rng: random.Random, tree: list[Node]) -> list[int]:
    """Mostly one of the node's own children, sometimes anything."""
    return [
        rng.choice(node.children).token if node.children and rng.random() < 0.8 else rng.randrange(VOCABULARY)
        for node in tree
    ]


def check_found(
    found: Verified, trees: list[list[Node]], walks: list[list[int]], bonus: list[int], steps: int
) -> None:
    nodes = len(trees[0])
    assert [each.dtype for each in found] == [np.int32] * 3
    assert found.accept_token_num.tolist() == [len(walk) - 1 for walk in walks]
    predicts = [-1] * (nodes * len(trees))
    for b, (tree, walk) in enumerate(zip(trees, walks)):
        rows = [b * nodes + node for node in walk]
        assert found.accept_index.tolist()[b] == rows + [-1] * (steps - len(walk) + 1)
        for row, behind in zip(rows, [*(tree[node].token for node in walk[1:]), bonus[b]]):
            predicts[row] = behind
        new = [found.predicts.tolist()[row] for row in found.accept_index.tolist()[b][: len(walk)]]
        assert new == [*(tree[node].token for node in walk[1:]), bonus[b]]
    assert found.predicts.tolist() == predicts


def test_lists_of_children_may_come_in_any_order() -> None:
    """Next siblings need not ascend, and of equal tokens the first in the list counts."""
    tokens = np.array([[9, 5, 6, 5, 8]])
    first, following = np.array([[3, -1, -1, 4, -1]]), np.array([[-1, -1, 1, 2, -1]])
    predict = np.array([[5, 0, 0, 8, 7]])
    index = np.arange(5).reshape(1, 5)
    found = verify_tree_greedy(tokens, predict, index, first, following)
    assert found.accept_index.tolist() == [[0, 3, 4, -1, -1]]
    assert found.predicts.tolist() == [5, -1, -1, 8, 7]


def test_rows_of_a_batch_may_lie_anywhere() -> None:
    """Targets and predictions go by the rows that retrieve_index names, not by the nodes' numbers."""
    tokens = np.array([[1, 2, 3], [4, 5, 6]])
    index = np.array([[5, 3, 1], [0, 2, 4]])
    first, following = np.array([[1, 2, -1]] * 2), np.full((2, 3), -1)
    predict = np.array([[5, 30, 0], [3, 6, 2]])  # flat: rows 0 .. 5
    found = verify_tree_greedy(tokens, predict, index, first, following, num_steps=2)
    assert found.accept_index.tolist() == [[5, 3, 1], [0, 2, -1]]
    assert found.predicts.tolist() == [5, 30, 0, 3, -1, 2]


def test_the_published_example() -> None:
    """The two trees of SGLang's own test: bs 2, k 4, 4 steps, 8 nodes, sequences of 5 and 10."""
    selected = np.array([[0, 1, 4, 8, 20, 24, 36], [0, 4, 5, 6, 7, 24, 36]])
    parents = np.array(
        [[-1, 0, 1, 2, 3, 4, 8, 9, 10, 20, 24, 21, 28], [-1, 0, 1, 2, 3, 4, 5, 6, 7, 24, 28, 20, 21]]
    )
    drafts = np.zeros((2, 7), dtype=np.int64)
    given = (np.array([7, 8]), parents, selected, drafts, np.array([5, 10]))
    arrays = build_tree_structure(*given, 4, 4, 8)
    assert arrays.positions.tolist() == [5, 6, 6, 7, 7, 8, 8, 9, 10, 11, 12, 12, 12, 12, 13, 14]
    assert arrays.retrieve_next_token.tolist() == [[1, 3, 4, 5, 6, 7, -1, -1], [1, 2, -1, 6, -1, -1, 7, -1]]
    assert arrays.retrieve_next_sibling.tolist() == [[-1, 2] + [-1] * 6, [-1, -1, 3, 4, 5, -1, -1, -1]]


def test_an_orphan_is_linked_to_no_parent() -> None:
    """Candidate 4 (below candidate 0, which was not chosen) hangs on nothing."""
    parents, selected = np.array([[-1, 0, 1]]), np.array([[1, 2]])
    given = (np.array([7]), parents, selected, np.array([[5, 6]]), np.array([4]))
    arrays = build_tree_structure(*given, 2, 2, 3, 1)
    assert arrays.retrieve_next_token.tolist() == [[1, -1, -1]]
    assert arrays.retrieve_next_sibling.tolist() == [[-1, -1, -1]]
    assert arrays.positions.tolist() == [4, 5, 5]
    assert arrays.tree_mask.tolist() == [True, False, False, True, True, False, True, False, True]


def test_trees_with_known_parents_need_no_scores() -> None:
    draftings = batch_of(2, 4, 3)
    trees = [tree_of(one, 12) for one in draftings]
    _, wanted, lengths = built(draftings, 4, 3, 12, TreeMaskMode.FULL_MASK)
    tokens = np.array([[node.token for node in tree] for tree in trees])
    parents = np.array([[tree.index(node.parent) if node.parent else -1 for node in tree] for tree in trees])
    arrays = arrange_trees(tokens, parents, lengths)
    assert [each.tolist() for each in arrays] == [each.tolist() for each in wanted]


def test_scores_that_are_not_numbers_are_the_worst() -> None:
    scores = [np.array([[[0.1, np.nan, 0.3]]])]
    lists = (scores, [np.array([[4, 5, 6]])], [np.array([[-1, 0, 1, 2]])])
    chosen = organize_draft_results(*lists, 3)
    assert chosen.top_scores_index.tolist() == [[0, 2]]
    assert chosen.draft_tokens.tolist() == [[4, 6]]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (dict(nodes=22), "num_draft_tokens"),
        (dict(nodes=0), "num_draft_tokens"),
        (dict(mode=3), "tree_mask_mode"),
        (dict(seq_lens=np.zeros(2)), "seq_lens"),
        (dict(topk=3), "parent_list"),
        (dict(steps=3), "parent_list"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], field: str) -> None:
    wish: dict[str, Any] = dict(nodes=5, mode=0, topk=4, steps=2, seq_lens=np.array([4])) | change
    made = draft(random.Random(1), 4, 2)
    lists = lists_of([made])
    verified, lengths = np.array([1]), wish["seq_lens"]

    def build() -> None:
        chosen = organize_draft_results(*lists, wish["nodes"])
        build_tree_structure(
            verified, *chosen, lengths, wish["topk"], wish["steps"], wish["nodes"], wish["mode"]
        )

    with pytest.raises(InvalidArguments) as told:
        build()
    assert told.value.field == field


def test_more_than_32_nodes_do_not_fit_a_word() -> None:
    made = [draft(random.Random(1), 4, 4)]
    with pytest.raises(InvalidArguments, match="QLEN_ONLY_BITPACKING holds 32 nodes, the trees have 33"):
        built(made, 4, 4, 33, TreeMaskMode.QLEN_ONLY_BITPACKING)


def test_lists_that_do_not_fit_each_other_are_refused() -> None:
    scores, tokens, parents = lists_of([draft(random.Random(1), 4, 2)])
    with pytest.raises(InvalidArguments, match="one entry per drafting step"):
        organize_draft_results(scores, tokens[:1], parents, 4)
    with pytest.raises(InvalidArguments, match=r"token_list\[1\] must have shape \[1, 16\], got \[1, 15\]"):
        organize_draft_results(scores, [tokens[0], tokens[1][:, :15]], parents, 4)


@pytest.mark.parametrize("mode", list(TreeMaskMode))
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])])
def test_tensors_give_what_numpy_gives(mode: TreeMaskMode, device: str) -> None:
    draftings = batch_of(2, 4, 4)
    best, wanted, lengths = built(draftings, 4, 4, 20, mode)
    scores, *others = ([torch.from_numpy(each).to(device) for each in one] for one in lists_of(draftings))
    chosen = organize_draft_results(scores, *others, 20)
    roots = torch.tensor([one.root.token for one in draftings], device=device)
    arrays = build_tree_structure(roots, *chosen, torch.from_numpy(lengths).to(device), 4, 4, 20, mode)
    for ours, theirs in zip((*chosen, *arrays), (*best, *wanted)):
        assert (ours.device.type, ours.tolist()) == (device, theirs.tolist())
        assert str(ours.dtype).removeprefix("torch.") == str(theirs.dtype)


def test_tensors_of_16_bits_are_read_and_those_of_several_devices_refused() -> None:
    lists = lists_of(batch_of(1, 4, 2))
    scores, tokens, parents = ([torch.from_numpy(each) for each in one] for one in lists)
    rounded = [each.bfloat16() for each in scores]
    wanted = organize_draft_results([each.double().numpy() for each in rounded], *lists[1:], 9)
    assert organize_draft_results(rounded, tokens, parents, 9).top_scores_index.tolist() == (
        wanted.top_scores_index.tolist()
    )
    with pytest.raises(InvalidArguments, match="one device, got cpu, meta"):
        organize_draft_results(scores, [each.to("meta") for each in tokens], parents, 9)


@pytest.mark.parametrize("tensors", [False, True])
def test_links_in_a_circle_end(tensors: bool) -> None:
    arrays = [np.array([one]) for one in ([1, 2, 3], [9, 9, 9], [0, 1, 2], [1, -1, -1], [-1, 2, 1])]
    given = map(torch.from_numpy, arrays) if tensors else arrays
    assert verify_tree_greedy(*given).accept_token_num.tolist() == [0]
