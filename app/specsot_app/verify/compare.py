"""One comparison with a recorded value: it holds, or where it first does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specsot.core.tree import Tree, path

STATE_TOLERANCE = 1e-4  # absolute, states and logits in fp32
CHANCE_TOLERANCE = 1e-5  # absolute, probabilities
# Scores nearer than this may be ordered otherwise, and at the final cut another node may be kept. Of 8,544
# trees that EAGLE's published code and ours grew from the same text one differed, by one node, at a gap of
# 5.7e-6; of 1,443 with tied tokens 372 did, all of them below this.
SCORE_TIE = 2e-5
TIED_PATHS = 4  # one path of so many


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was compared, and its first difference, or None where it holds."""

    name: str
    difference: str | None = None
    note: str = ""

    def __str__(self) -> str:
        if self.difference is not None:
            return f"FAIL {self.name}: {self.difference}"
        return f"ok   {self.name} ({self.note})" if self.note else f"ok   {self.name}"


def check_close(name: str, ours: Tensor, recorded: Tensor, within: float = STATE_TOLERANCE) -> Check:
    """Numbers, element by element; what is not a number is never close."""
    if ours.shape != recorded.shape:
        return Check(name, f"shape: ours {list(ours.shape)}, recorded {list(recorded.shape)}")
    gaps = (ours.double() - recorded.double()).abs()
    far = (~(gaps <= within)).nonzero()
    if not len(far):
        return Check(name, note=f"largest gap {gaps.max().item():.1e}" if gaps.numel() else "empty")
    first = tuple(far[0].tolist())
    values = f"ours {ours[first].item():.7g}, recorded {recorded[first].item():.7g}"
    return Check(name, f"first at {list(first)}: {values}, gap {gaps[first].item():.1e} (allowed {within:g})")


def check_same(name: str, ours: Sequence[object], recorded: Sequence[object]) -> Check:
    """Ids and counts, one by one."""
    for index, (mine, theirs) in enumerate(zip(ours, recorded)):
        if mine != theirs:
            return Check(name, f"first at [{index}]: ours {mine}, recorded {theirs}")
    if len(ours) != len(recorded):
        return Check(name, f"length: ours {len(ours)}, recorded {len(recorded)}")
    return Check(name)


def check_tree(name: str, ours: Tree, recorded: Tree, gap: float | None) -> Check:
    """Node by node, except where the reference's own scores nearly tie.

    gap: the smallest difference of scores that decided about the recorded tree; None where unknown. Below
    SHAKY the order of nodes does not count, and a few paths may differ, as they would between two machines
    that both run the reference.
    """
    nodes = [list(zip(tree.tokens, tree.parents)) for tree in (ours, recorded)]
    exact = check_same(name, *nodes)
    if exact.difference is None:
        return exact
    missing = sorted(token_paths(recorded) - token_paths(ours))
    tie = "scores of unknown distance" if gap is None else f"scores that differ by {gap:.1e}"
    if len(ours) == len(recorded) and not missing and (gap is None or gap < SCORE_TIE):
        return Check(name, note=f"the same paths in another order, at {tie}")
    if (
        len(ours) == len(recorded)
        and len(missing) * TIED_PATHS <= len(recorded)
        and gap is not None
        and gap < SCORE_TIE
    ):
        return Check(name, note=f"all but {len(missing)} of {len(recorded)} paths, at {tie}")
    lost = f"; path {list(missing[0])} is missing" if missing else ""
    return Check(name, f"node {exact.difference.removeprefix('first at ')}{lost}; decided at {tie}")


def token_paths(tree: Tree) -> frozenset[tuple[int, ...]]:
    """The tree without the order of its nodes."""
    return frozenset(tuple(tree.tokens[i] for i in path(tree.parents, node)) for node in range(len(tree)))


def likeliest(rows: Tensor) -> list[int]:
    """The most likely token of each row [rows, V]."""
    return torch.argmax(rows, dim=-1).tolist()
