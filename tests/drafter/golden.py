"""A case directory of EAGLE reference vectors as values: settings, prompts, recorded rounds.

Refuses to know heads and engines; whatever family a case is of, its records look alike.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from specsot.members import TreeShape
from specsot.tree import Tree, path

CLOSE = 1e-4  # absolute, hidden states and logits in fp32
SHAKY = 2e-5  # below this gap of scores the order of candidates may flip between machines


@dataclass(frozen=True)
class Case:
    """One directory: a head, its base, and what the reference did with them."""

    directory: Path

    @cached_property
    def record(self) -> dict[str, Any]:
        return json.loads((self.directory / "vectors.json").read_text())

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.directory / "vectors.safetensors")

    @property
    def base(self) -> Path:
        return self.directory / self.record["base"]

    @property
    def head(self) -> Path:
        return self.directory / self.record["head"]

    @property
    def prompts(self) -> list[dict[str, Any]]:
        return self.record["prompts"]

    @property
    def sampling(self) -> list[dict[str, Any]]:
        return self.record.get("sampling", [])

    def shape(self, setting: str) -> TreeShape:
        """total_token counts the root, as our nodes do."""
        wanted = self.record["settings"][setting]
        return TreeShape(wanted["depth"], wanted["top_k"], wanted["total_token"], fixed=True)


def recorded_tree(record: dict[str, Any]) -> Tree:
    """The reference's tree; its root has parent -1 there."""
    return Tree(tuple(record["tokens"]), (0, *record["parents"][1:]))


def paths(tree: Tree) -> frozenset[tuple[int, ...]]:
    """The tree as a set of token paths: what is left of it when the order of equals does not count."""
    return frozenset(tuple(tree.tokens[i] for i in path(tree.parents, node)) for node in range(len(tree)))


def same_tree(tree: Tree, record: dict[str, Any]) -> bool:
    """Exactly the recorded tree; as a set of paths where the reference's own scores nearly tie."""
    wanted = recorded_tree(record)
    if record.get("min_rank_gap", 0.0) < SHAKY:
        return paths(tree) == paths(wanted)
    return tree == wanted


def leaf_rows(record: dict[str, Any]) -> Sequence[Sequence[int]]:
    """retrieve_indices without their padding."""
    return [[node for node in row if node >= 0] for row in record["retrieve_indices"]]
