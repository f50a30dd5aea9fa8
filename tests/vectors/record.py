"""Reads a directory of reference vectors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from safetensors.torch import load_file
from torch import Tensor

from specsot.core.tree import Tree
from specsot.members import TreeShape

VECTORS, TENSORS = "vectors.json", "vectors.safetensors"

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShapeRecord:
    """total_token counts the root, as our nodes do."""

    depth: int
    top_k: int
    total_token: int

    @property
    def shape(self) -> TreeShape:
        return TreeShape(self.depth, self.top_k, self.total_token, fixed=True)


@dataclass(frozen=True, slots=True)
class TreeRecord:
    """One recorded tree, its root's parent -1. What is None was not recorded.

    retrieve_indices: root-to-leaf paths in the reference's order, padded with -1.
    depth, position_ids: of its nodes. committed_len: of the text in front.
    min_rank_gap, min_select_gap: the smallest difference of scores that decided order, or membership.
    """

    tokens: Ids
    parents: Ids
    retrieve_indices: tuple[Ids, ...] | None = None
    depth: Ids | None = None
    position_ids: Ids | None = None
    committed_len: int | None = None
    min_rank_gap: float | None = None
    min_select_gap: float | None = None

    @property
    def tree(self) -> Tree:
        return Tree(self.tokens, (0, *self.parents[1:]))

    @property
    def rows(self) -> tuple[Ids, ...] | None:
        """The paths without padding."""
        rows = self.retrieve_indices
        return None if rows is None else tuple(tuple(node for node in row if node >= 0) for row in rows)

    @property
    def gap(self) -> float | None:
        """The smaller of the two."""
        return min((gap for gap in (self.min_rank_gap, self.min_select_gap) if gap is not None), default=None)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One greedy generation. accept_lengths: accepted drafts of every round; trees: of the first rounds.

    min_*_gap_all_rounds: the smallest difference of scores that decided about the order of candidates, and
    about the last node of a tree, in any round; 0.0 where it was not recorded.
    """

    accept_lengths: Ids
    generated_ids: Ids
    trees: tuple[TreeRecord, ...] = ()
    bonus_tokens: Ids | None = None
    best_candidate: Ids | None = None
    tau: float | None = None
    min_rank_gap_all_rounds: float = 0.0
    min_select_gap_all_rounds: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """A prompt, plain greedy text behind it, and one run per setting."""

    prompt_ids: Ids
    base_greedy_ids: Ids
    runs: Mapping[str, RunRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord(TreeRecord):
    """One round of a sampled generation. accepted_path_tokens: of the accepted nodes, root first."""

    uniforms: tuple[float, ...]
    accept_length: int
    accepted_path_tokens: Ids
    bonus_token: int
    best_candidate: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingRecord:
    """The first rounds of a sampled generation. accept_lengths: accepted drafts of all of its rounds."""

    prompt: int
    setting: str
    temperature: float
    rounds: tuple[RoundRecord, ...]
    top_p: float = 1.0
    top_k: int = 0
    accept_lengths: Ids = ()


@dataclass(frozen=True, slots=True)
class VectorsRecord:
    """vectors.json. algo: eagle1, eagle2, eagle3, or None where the record does not say."""

    base: str
    head: str
    settings: Mapping[str, ShapeRecord]
    prompts: tuple[PromptRecord, ...]
    algo: str | None = None
    aux_layers: Ids | None = None
    sampling: tuple[SamplingRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class ReferenceCase:
    """All of one directory."""

    directory: Path
    record: VectorsRecord
    tensors: Mapping[str, Tensor]

    @property
    def base(self) -> Path:
        return self.directory / self.record.base

    @property
    def head(self) -> Path:
        return self.directory / self.record.head

    @property
    def prompts(self) -> tuple[PromptRecord, ...]:
        return self.record.prompts

    @property
    def shapes(self) -> dict[str, TreeShape]:
        return {name: one.shape for name, one in self.record.settings.items()}


def read_case(directory: Path) -> ReferenceCase:
    record = _read(VectorsRecord, json.loads((directory / VECTORS).read_text()))
    return ReferenceCase(directory, record, load_file(directory / TENSORS))


def _read(kind: Any, value: Any) -> Any:
    """The value as `kind` has it: a record, or several of one kind. What is null is left out."""
    inner = get_args(kind)
    if NoneType in inner:
        return _read(inner[0], value)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        given = {name: one for name, one in value.items() if name in hints and one is not None}
        return kind(**{name: _read(hints[name], one) for name, one in given.items()})
    if get_origin(kind) is Mapping:
        return {name: _read(inner[1], one) for name, one in value.items()}
    return tuple(_read(inner[0], one) for one in value) if get_origin(kind) is tuple else value
