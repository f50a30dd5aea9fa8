"""Trees that grow in one graph are those that grow level by level."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from specsot.core.device_verification import DeviceVerification
from specsot.core.frames import TreeSegment
from specsot.core.overlap import OverlapState
from specsot.core.tree import Tree
from specsot.members import TreeShape
from specsot_drafter.eagle_kv import DraftPages, DueRows, compute_rows
from specsot_drafter.growth import TreeGrowth
from specsot_drafter.heads import DraftHead
from specsot_drafter.heads import eagle as heads_of_eagle
from specsot_drafter.heads.fused import FusedHead, can_fuse
from specsot_drafter.heads.loading import load_head
from specsot_drafter.overlap import graph_growth
from specsot_drafter.overlap.graph_growth import GraphInput, TreeGraphs
from specsot_drafter.proposers import eagle, trees
from specsot_model.cuda_graphs import Captured, GraphCapture, Work
from tests.conftest import some
from tests.drafter.heads import turn_to_eagle_1
from tests.there import there

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
from specsot_kernels.gpu.growing import grow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
K, LEVELS, PAGE, TREES = (3, 3, 16, 3) if DEVICE == "cuda" else (2, 2, 16, 2)
KIND = torch.float16  # what no library packs on a CPU
TEXTS = {1: (19, 3), 2: (12, 1)}  # rows in all, of which so many are due


def later(work: Work) -> Captured:
    """What a graph does, when it is told to."""
    return work, (torch.empty(0), None)


def remembering(
    head: object, texts: dict[int, tuple[int, int]], skipped: int = 0
) -> tuple[DraftPages, list[DueRows]]:
    """Features of all texts, rows of all but what is due; and that. Before what is due, the first text skips
    so many rows.
    """
    memory = DraftPages(head, 12, PAGE)  # type: ignore[arg-type]
    seeded, due = torch.Generator().manual_seed(3), list[DueRows]()
    for sequence, (rows, late) in texts.items():
        memory.table.open(sequence)
        memory.table.reserve(sequence, rows)
        slots = memory.table.slots(sequence, 0, rows)
        memory.store_features(
            slots, torch.randn(rows, memory.features.shape[1], generator=seeded).to(DEVICE, KIND)
        )
        tokens = torch.randint(90, (rows,), generator=seeded).tolist()
        compute_rows(head, memory, [DueRows(sequence, 0, tuple(tokens[:-late]), False)])  # type: ignore[arg-type]
        first = rows - late + (skipped if sequence == 1 else 0)
        memory.table.skip(sequence, first - rows + late)
        due.append(DueRows(sequence, first, tuple(tokens[-late:]), True))
    return memory, due


@pytest.mark.parametrize(("window", "skipped"), some([(None, 21), (None, 0), (7, 0)], 0))
@torch.inference_mode()
def test_one_graph_grows_what_levels_grow(
    folder: Path, window: int | None, skipped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if window is not None:
        path = folder / "head" / "config.json"
        near = {"layer_types": ["sliding_attention"], "sliding_window": window, "use_sliding_window": True}
        path.write_text(json.dumps({**json.loads(path.read_text()), **near}))
    head = load_head(folder / "head", folder / "base", KIND, DEVICE)
    (memory, due), (other, same) = (remembering(head, TEXTS, skipped) for _ in range(2))
    capture = GraphCapture() if DEVICE == "cuda" else later
    fused = FusedHead(head)  # type: ignore[arg-type]
    assert fused.window == window
    monkeypatch.setattr(graph_growth, "GRAPH_LEVELS", ())
    graphs = TreeGraphs(fused, memory, K, LEVELS, capture, grow, (TREES,))
    grounds = [memory.reserve_tree(each.sequence, each.stop, (LEVELS - 1) * K) for each in due]
    other_grounds = [other.reserve_tree(each.sequence, each.stop, (LEVELS - 1) * K) for each in same]
    wanted = TreeGrowth(head, other.kv, other_grounds, K).run(compute_rows(head, other, same), LEVELS)  # type: ignore[arg-type]
    for _ in range(
        2 if DEVICE == "cuda" else 1
    ):  # a graph leaves nothing behind that its next run could feel
        found = there(graphs.run([GraphInput(*each) for each in zip(due, grounds)], LEVELS))  # type: ignore[arg-type]
        assert found.depths.tolist() == wanted.depths.tolist()
        # scores below are near; which of two that are as near comes first may differ in fp16
        assert (found.tokens == wanted.tokens).mean() > (0.9 if window else 0.999)
        assert found.parents.tolist() == wanted.parents.tolist()
        torch.testing.assert_close(
            torch.tensor(found.scores), torch.tensor(wanted.scores), atol=2e-2, rtol=2e-2
        )
    seeds = [GraphInput(*each) for each in zip(due * 2, grounds * 2)]  # type: ignore[arg-type]
    twice = there(graphs.run(seeds, LEVELS - 1))
    assert twice.levels == LEVELS, "no graph has fewer: what was grown is offered, and booked"
    assert twice.tokens.tolist() == found.tokens.tolist() * 2, "more than a graph has room for"
    assert twice.parents.tolist() == found.parents.tolist() * 2
    assert twice.scores.shape == twice.tokens.shape


@torch.inference_mode()
def test_of_many_trees_fewer_nodes_are_fed(folder: Path) -> None:
    """So that a level has no more than so many rows; of more than a graph has room for as well."""
    head = load_head(folder / "head", folder / "base", KIND, DEVICE)
    (memory, due), (other, same) = remembering(head, TEXTS), remembering(head, TEXTS)
    capture = GraphCapture() if DEVICE == "cuda" else later
    graphs = TreeGraphs(FusedHead(head), memory, 2, 2, capture, grow, (1, 2), level_rows=3)  # type: ignore[arg-type]
    grounds = [memory.reserve_tree(each.sequence, each.stop, 2) for each in due]
    other_grounds = [other.reserve_tree(each.sequence, each.stop, 1) for each in same]
    wanted = TreeGrowth(head, other.kv, other_grounds, 2, widths=(1,)).run(  # type: ignore[arg-type]
        compute_rows(head, other, same), 2
    )
    seeds = [GraphInput(*each) for each in zip(due, grounds)]  # type: ignore[arg-type]
    found = there(graphs.run([*seeds, seeds[0]], 2))
    assert found.tokens[:2].tolist() == wanted.tokens.tolist()
    assert found.parents[:2].tolist() == wanted.parents.tolist()
    assert found.tokens[2].tolist() == found.tokens[0].tolist()
    alone = there(graphs.run(seeds[:1], 2))
    assert alone.tokens.shape[1] == 2 + 2 * 2, "both of its nodes are fed"
    assert found.tokens.shape[1] == 2 + 2


@torch.inference_mode()
def test_graphs_have_room_for_all_rows_that_a_tree_brings(folder: Path) -> None:
    """A tree accepted to its last level brings one token more than it has levels, however narrow it is."""
    head = load_head(folder / "head", folder / "base", KIND, DEVICE)
    due = LEVELS + 1
    memory, stretches = remembering(head, {1: (19, due), 2: (12, due + 1)})
    capture = GraphCapture() if DEVICE == "cuda" else later
    graphs = TreeGraphs(FusedHead(head), memory, K, LEVELS, capture, grow, (1,))  # type: ignore[arg-type]
    all_due, one_more = (
        GraphInput(each, memory.reserve_tree(each.sequence, each.stop, (LEVELS - 1) * K))  # type: ignore[arg-type]
        for each in stretches
    )
    assert graphs.due == due > K
    assert graphs.run([all_due], 1) is not None
    assert graphs.run([one_more], 1) is None


def test_prompts_of_all_sizes_and_their_trees_were_seen_before_anybody_asks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Level by level and in graphs; and nothing of it stays."""
    caught, grown = list[int](), list[int]()

    class Recorded:
        due = 6

        def begin(self, seeds: Sequence[GraphInput], levels: int) -> None:
            grown.append(len(seeds[0].due.tokens))

    def recorded(head: DraftHead, memory: DraftPages, stretches: Sequence[DueRows]) -> torch.Tensor:
        caught.append(len(stretches[0].tokens))
        return compute_rows(head, memory, stretches)

    monkeypatch.setattr(eagle, "_graphs", lambda *_: Recorded())
    monkeypatch.setattr(eagle, "compute_rows", recorded)
    monkeypatch.setattr(trees, "compute_rows", recorded)
    head = load_head(folder / "head", folder / "base", torch.float32, "cpu")
    pages = eagle.PROMPT_ROWS // PAGE + 8
    drafter = eagle.EagleProposer(head, TreeShape(), pages, PAGE)
    assert set(caught) >= set(eagle.WARMUP_ROWS)
    assert grown, "by graphs, too"
    assert max(grown) <= Recorded.due
    assert drafter.start_growth(DeviceVerification(1, (), torch.zeros(0), None), 9, 1) is None, "no features"
    assert drafter.free_pages == pages
    assert eagle.EagleProposer(head, TreeShape(), 2, PAGE).free_pages == 2, (
        "where there is no room for such prompts"
    )


@pytest.mark.skipif(DEVICE == "cuda", reason="heads on a GPU always store by kernels")
@torch.inference_mode()
def test_kernels_store_the_rows_of_prompts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV rows that the kernels store are those that torch stores, within the rounding of 16-bit numbers.
    The features of a prompt's rows are read by slot in both cases.
    """
    # KV rows stored by torch, then by the kernels.
    found = list[torch.Tensor]()
    for runs in (False, True):
        monkeypatch.setattr(heads_of_eagle, "runs_kernels", lambda device, runs=runs: runs)
        head = load_head(folder / "head", folder / "base", KIND, DEVICE)
        memory, due = remembering(head, {1: (19, 3), 2: (12, 2)})
        assert compute_rows(head, memory, [one._replace(asked=0) for one in due]).shape == (0, head.hidden)
        slots = [slot for one in due for slot in memory.table.slots(one.sequence, 0, one.stop)]
        found.append(memory.kv.rows_at(0, slots))
    assert found[0].abs().sum(1).min() > 0, "every row was stored"
    torch.testing.assert_close(*found, rtol=0, atol=4 * torch.finfo(KIND).eps)


def test_only_heads_as_published_are_fused(folder: Path) -> None:
    assert can_fuse(load_head(folder / "head", folder / "base", KIND, "cpu"))
    turn_to_eagle_1(folder)
    assert not can_fuse(load_head(folder / "head", folder / "base", KIND, "cpu"))


@pytest.mark.parametrize(("wrong", "skipped"), some([(False, 21), (True, 0), (False, 0)], 0, 1))
@torch.inference_mode()
def test_the_device_grows_trees_after_a_verification_result_that_the_host_has_not_read(
    folder: Path, wrong: bool, skipped: int
) -> None:
    """What grows is what grows once the host knows; features are stored; who is over is left out."""
    head = load_head(folder / "head", folder / "base", KIND, DEVICE)
    (memory, due), (other, _) = (remembering(head, TEXTS, skipped) for _ in range(2))
    committed = {one.sequence: one.stop for one in due}
    capture = GraphCapture() if DEVICE == "cuda" else later
    fused = FusedHead(head)  # type: ignore[arg-type]
    graphs = [TreeGraphs(fused, one, K, LEVELS, capture, grow, (TREES,)) for one in (memory, other)]
    trees = [Tree((7, 8, 9, 8), (0, 0, 0, 1)), Tree((5, 6), (0, 0))]
    # the first text goes on by the second child of its root, whose target has no child; the other by the root
    targets = torch.tensor([9, 1, 4, 2, 11, 3], dtype=torch.int32, device=DEVICE)
    after = {1: (9, 4), 2: (11,)}
    fresh = torch.randn(6, memory.features.shape[1], generator=torch.Generator().manual_seed(5))
    fresh = fresh.to(DEVICE, KIND)
    accepted = {1: [0, 2], 2: [4]}
    segments = [TreeSegment(at, 2, committed[at], (0,), tree) for at, tree in zip(TEXTS, trees)]
    told = there(memory.cover_trees(segments, graphs[0].async_rows, 0))
    early = there(graphs[0].begin_async(told, targets, fresh, 90, LEVELS))
    inputs = list[GraphInput]()
    for sequence, tokens in after.items():
        first = committed[sequence]
        room = other.reserve_tree(sequence, first + len(tokens), (LEVELS - 1) * K)
        slots = other.table.slots(sequence, first, first + len(tokens))
        other.store_features(slots, fresh[accepted[sequence]])
        same = memory.table.slots(sequence, first, first + len(tokens))
        assert memory.features[list(same)].equal(other.features[list(slots)])
        inputs.append(GraphInput(DueRows(sequence, first, tokens, 1), room))  # type: ignore[arg-type]
    wanted = there(graphs[1].run(inputs, LEVELS))
    due = [one.due for one in reversed(inputs)]
    if wrong:
        due[0] = due[0]._replace(tokens=(12,))
    found = early.candidates_for(due)
    if wrong:
        assert found is None, "the device said something else"
        assert early.state is OverlapState.DISCARDED
        return
    assert found is not None
    assert found.tokens.tolist() == wanted.tokens[::-1].tolist()
    assert found.parents.tolist() == wanted.parents[::-1].tolist()
    assert found.scores.tolist() == wanted.scores[::-1].tolist()
    alone = there(early.candidates_for(due[:1]))
    assert alone.tokens.tolist() == wanted.tokens[1:].tolist()
