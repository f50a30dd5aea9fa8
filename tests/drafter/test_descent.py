"""Trees that grow in one graph are those that grow level by level."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from specsot.model.laps import Captured, Graphs, Work
from specsot_drafter.descent import Descents, Seed
from specsot_drafter.extension import Stretch, extend
from specsot_drafter.growth import Growth
from specsot_drafter.heads.fused import FusedHead, can_fuse
from specsot_drafter.heads.loading import load_head
from specsot_drafter.memory import Memory
from tests.drafter.heads import turn_to_eagle_1

if find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
from specsot.kernels.gpu.growing import grow

pytestmark = pytest.mark.torch
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
K, LEVELS, PAGE, TREES = (3, 3, 16, 3) if DEVICE == "cuda" else (2, 2, 16, 2)
KIND = torch.float16  # what no library packs on a CPU
TEXTS = {1: (19, 2), 2: (12, 1)}  # rows in all, of which so many are due


def later(work: Work) -> Captured:
    """What a graph does, when it is told to."""
    return work, (torch.empty(0), None)


def remembering(head: object, texts: dict[int, tuple[int, int]]) -> tuple[Memory, list[Stretch]]:
    """Features of all texts, rows of all but what is due; and that."""
    memory = Memory(head, 12, PAGE)  # type: ignore[arg-type]
    seeded, due = torch.Generator().manual_seed(3), list[Stretch]()
    for sequence, (rows, late) in texts.items():
        memory.table.open(sequence)
        memory.table.reserve(sequence, rows)
        slots = memory.table.slots(sequence, 0, rows)
        memory.remember(slots, torch.randn(rows, memory.features.shape[1], generator=seeded).to(DEVICE, KIND))
        tokens = torch.randint(90, (rows,), generator=seeded).tolist()
        extend(head, memory, [Stretch(sequence, 0, tuple(tokens[:-late]), False)])  # type: ignore[arg-type]
        due.append(Stretch(sequence, rows - late, tuple(tokens[-late:]), True))
    return memory, due


@torch.inference_mode()
def test_one_graph_grows_what_levels_grow(folder: Path) -> None:
    head = load_head(folder / "head", folder / "base", KIND, DEVICE)
    (memory, due), (other, same) = remembering(head, TEXTS), remembering(head, TEXTS)
    capture = Graphs() if DEVICE == "cuda" else later
    graphs = Descents(FusedHead(head), memory, K, LEVELS, capture, grow, (TREES,))  # type: ignore[arg-type]
    grounds = [memory.ground(each.sequence, each.stop, (LEVELS - 1) * K) for each in due]
    other_grounds = [other.ground(each.sequence, each.stop, (LEVELS - 1) * K) for each in same]
    wanted = Growth(head, other.kv, other_grounds, K).run(extend(head, other, same), LEVELS)  # type: ignore[arg-type]
    for _ in range(
        2 if DEVICE == "cuda" else 1
    ):  # a graph leaves nothing behind that its next run could feel
        found = graphs.run([Seed(*each) for each in zip(due, grounds)], LEVELS)  # type: ignore[arg-type]
        assert found is not None
        assert found.depths.tolist() == wanted.depths.tolist()
        assert found.tokens.tolist() == wanted.tokens.tolist()
        assert found.parents.tolist() == wanted.parents.tolist()
        torch.testing.assert_close(
            torch.tensor(found.scores), torch.tensor(wanted.scores), atol=2e-2, rtol=2e-2
        )
    assert graphs.run([Seed(*each) for each in zip(due * 2, grounds * 2)], LEVELS) is None, "too many"  # type: ignore[arg-type]


def test_only_heads_as_published_are_fused(folder: Path) -> None:
    assert can_fuse(load_head(folder / "head", folder / "base", KIND, "cpu"))
    turn_to_eagle_1(folder)
    assert not can_fuse(load_head(folder / "head", folder / "base", KIND, "cpu"))
