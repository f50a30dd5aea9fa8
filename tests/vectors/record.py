"""Reads a directory of reference vectors, with one-line errors for missing or invalid entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from safetensors.torch import load_file
from torch import Tensor

from specsot.core.tree import Tree
from specsot.errors import ModelError, WireError
from specsot.members import TreeShape
from specsot.model.fields import read_json

VECTORS, TENSORS = "vectors.json", "vectors.safetensors"
NAMES = {str: "a string", int: "an integer", float: "a number", list: "a list", dict: "an object"}

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShapeRecord:
    """total_token counts the root, as our nodes do."""

    depth: int
    top_k: int
    total_token: int

    def __post_init__(self) -> None:
        if self.depth < 0 or self.top_k < 1 or self.total_token < 1:
            raise ValueError("no shape of a tree")

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

    def __post_init__(self) -> None:
        _ = self.tree

    @property
    def tree(self) -> Tree:
        """Raises WireError where it is none."""
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

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.base_greedy_ids:
            raise ValueError("prompt_ids and base_greedy_ids must not be empty")


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

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError("temperature must be > 0")


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

    def tensor(self, name: str) -> Tensor:
        """A recorded tensor. ModelError where there is none."""
        if name not in self.tensors:
            raise ModelError(f"{self.directory / TENSORS}: no tensor {name}")
        return self.tensors[name]


def read_case(directory: Path) -> ReferenceCase:
    """Raises ModelError with the file and the field."""
    source = directory / VECTORS
    record = _read(VectorsRecord, read_json(source), f"{source}:")
    return ReferenceCase(directory, record, _tensors(directory / TENSORS))


def _tensors(source: Path) -> dict[str, Tensor]:
    try:
        return load_file(source)
    except FileNotFoundError:
        raise ModelError(f"{source}: no such file") from None
    except Exception as error:  # safetensors raises many kinds for a broken file
        raise ModelError(f"{source}: {' '.join(str(error).split())[:200]}") from None


def _read(kind: Any, value: Any, where: str) -> Any:
    """The value as `kind` has it: a record, a number, text, or several of one kind.

    where: the file and the way to the value. Raises ModelError where it is of another kind.
    """
    inner = get_args(kind)
    if NoneType in inner:
        return _read(inner[0], value, where)
    if is_dataclass(kind):
        return _read_record(kind, _checked(dict, value, where), where)
    if get_origin(kind) is Mapping:
        found = _checked(dict, value, where)
        return {name: _read(inner[1], one, _below(where, name)) for name, one in found.items()}
    if get_origin(kind) is not tuple:
        return _checked(kind, float(value) if kind is float and type(value) is int else value, where)
    listed = _checked(list, value, where)
    if kind == Ids and not all(type(one) is int for one in listed):
        _refuse("a list of integers", value, where)
    return tuple(_read(inner[0], one, f"{where}[{number}]") for number, one in enumerate(listed))


def _read_record(kind: Any, value: dict[str, Any], where: str) -> Any:
    """A field that is null is as one that is not there."""
    hints, given = get_type_hints(kind), dict[str, Any]()
    for one in fields(kind):
        if value.get(one.name) is not None:
            given[one.name] = _read(hints[one.name], value[one.name], _below(where, one.name))
        elif one.default is MISSING:
            raise ModelError(f"{_below(where, one.name)} is missing")
    try:
        return kind(**given)
    except (ValueError, WireError) as error:
        raise ModelError(f"{where}: {error}") from None


def _checked(kind: type, value: Any, where: str) -> Any:
    return value if type(value) is kind else _refuse(NAMES[kind], value, where)


def _refuse(wanted: str, value: Any, where: str) -> NoReturn:
    raise ModelError(f"{where} must be {wanted}, got {str(value)[:60]!r}")


def _below(where: str, name: str) -> str:
    """The file's name is followed by a colon, a field by a dot."""
    return f"{where} {name}" if where.endswith(":") else f"{where}.{name}"
