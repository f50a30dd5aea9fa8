"""Reads a directory of reference vectors; what a file lacks or says wrongly is one clear line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from safetensors.torch import load_file
from torch import Tensor

from specsot.core.tree import Tree
from specsot.errors import ModelError, WireError
from specsot.members import TreeShape
from specsot.model.hf_config import read_json


class JsonField:
    """where: the file and the way to the value, such as `vectors.json: prompts[0].prompt_ids`.

    Each question raises ModelError where the value is of another kind.
    """

    __slots__ = ("_value", "where")

    def __init__(self, value: Any, where: str) -> None:
        self._value, self.where = value, where

    def at(self, name: str) -> JsonField:
        """A field that must be there."""
        found = self.find(name)
        if found is None:
            raise ModelError(f"{self._way(name)} is missing")
        return found

    def find(self, name: str) -> JsonField | None:
        """A field; None where it is absent or null."""
        value = self._object().get(name)
        return None if value is None else JsonField(value, self._way(name))

    def items(self) -> Iterator[tuple[str, JsonField]]:
        """The fields of an object."""
        for name, value in self._object().items():
            yield name, JsonField(value, self._way(name))

    def parts(self) -> list[JsonField]:
        """The elements of a list."""
        return [JsonField(value, f"{self.where}[{i}]") for i, value in enumerate(self._list())]

    def text(self) -> str:
        return self._value if isinstance(self._value, str) else self._refuse("a string")

    def integer(self) -> int:
        return self._value if type(self._value) is int else self._refuse("an integer")

    def number(self) -> float:
        return float(self._value) if type(self._value) in (int, float) else self._refuse("a number")

    def integers(self) -> tuple[int, ...]:
        whole = all(type(value) is int for value in self._list())
        return tuple(self._list()) if whole else self._refuse("a list of integers")

    def numbers(self) -> tuple[float, ...]:
        return tuple(part.number() for part in self.parts())

    def _object(self) -> dict[str, Any]:
        return self._value if isinstance(self._value, dict) else self._refuse("an object")

    def _list(self) -> list[Any]:
        return self._value if isinstance(self._value, list) else self._refuse("a list")

    def _way(self, name: str) -> str:
        """The file's name is followed by a colon, a field by a dot."""
        return f"{self.where}.{name}" if ": " in self.where else f"{self.where}: {name}"

    def _refuse(self, wanted: str) -> NoReturn:
        raise ModelError(f"{self.where} must be {wanted}, got {str(self._value)[:60]!r}")


GAPS = ("min_rank_gap", "min_select_gap")
VECTORS, TENSORS = "vectors.json", "vectors.safetensors"


@dataclass(frozen=True, slots=True)
class TreeRecord:
    """One recorded tree.

    rows:    root-to-leaf paths in the reference's order, or None where they were not recorded.
    depths, positions, committed: of its nodes, and of the text in front; None where not recorded.
    gap: the smallest difference of scores that decided order or membership; None where not recorded.
    """

    tree: Tree
    rows: tuple[tuple[int, ...], ...] | None
    depths: tuple[int, ...] | None
    positions: tuple[int, ...] | None
    committed: int | None
    gap: float | None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One greedy generation. lengths: accepted drafts of every round; trees: of the first rounds.

    rank_gap, cut_gap: the smallest difference of scores that decided about the order of candidates, and about
    the last node of a tree, in any round; 0.0 where it was not recorded.
    """

    lengths: tuple[int, ...]
    generated: tuple[int, ...]
    trees: tuple[TreeRecord, ...]
    bonus: tuple[int, ...] | None
    best: tuple[int, ...] | None
    tau: float | None
    rank_gap: float
    cut_gap: float


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """A prompt, plain greedy text behind it, and one run per setting."""

    tokens: tuple[int, ...]
    greedy: tuple[int, ...]
    runs: Mapping[str, RunRecord]


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round of a sampled generation. path: tokens of the accepted nodes, root first."""

    tree: TreeRecord
    uniforms: tuple[float, ...]
    accepted: int
    path: tuple[int, ...]
    bonus: int
    best: int | None


@dataclass(frozen=True, slots=True)
class SamplingRecord:
    """The first rounds of a sampled generation. lengths: accepted drafts of all of its rounds."""

    prompt: int
    setting: str
    temperature: float
    top_p: float
    top_k: int
    rounds: tuple[RoundRecord, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReferenceCase:
    """All of one directory. algo: eagle1, eagle2, eagle3, or None where the record does not say."""

    directory: Path
    base: Path
    head: Path
    algo: str | None
    taps: tuple[int, ...] | None
    shapes: Mapping[str, TreeShape]
    prompts: tuple[PromptRecord, ...]
    sampling: tuple[SamplingRecord, ...]
    tensors: Mapping[str, Tensor]

    def tensor(self, name: str) -> Tensor:
        """A recorded tensor. ModelError where there is none."""
        if name not in self.tensors:
            raise ModelError(f"{self.directory / TENSORS}: no tensor {name}")
        return self.tensors[name]


def read_case(directory: Path) -> ReferenceCase:
    """Raises ModelError with the file and the field."""
    source = directory / VECTORS
    record = JsonField(read_json(source), str(source))
    return ReferenceCase(
        directory=directory,
        base=directory / record.at("base").text(),
        head=directory / record.at("head").text(),
        algo=algo.text() if (algo := record.find("algo")) else None,
        taps=taps.integers() if (taps := record.find("aux_layers")) else None,
        shapes={name: _shape(part) for name, part in record.at("settings").items()},
        prompts=tuple(_prompt(part) for part in record.at("prompts").parts()),
        sampling=tuple(_sampling(part) for part in runs.parts()) if (runs := record.find("sampling")) else (),
        tensors=_tensors(directory / TENSORS),
    )


def _tensors(source: Path) -> dict[str, Tensor]:
    try:
        return load_file(source)
    except FileNotFoundError:
        raise ModelError(f"{source}: no such file") from None
    except Exception as error:  # safetensors raises many kinds for a broken file
        raise ModelError(f"{source}: {' '.join(str(error).split())[:200]}") from None


def _shape(part: JsonField) -> TreeShape:
    """total_token counts the root, as our nodes do."""
    depth, top_k, nodes = (part.at(name).integer() for name in ("depth", "top_k", "total_token"))
    if depth < 0 or top_k < 1 or nodes < 1:
        raise ModelError(f"{part.where} is no shape of a tree")
    return TreeShape(depth, top_k, nodes, fixed=True)


def _prompt(part: JsonField) -> PromptRecord:
    tokens = part.at("prompt_ids").integers()
    greedy = part.at("base_greedy_ids").integers()
    if not tokens or not greedy:
        raise ModelError(f"{part.where}: prompt_ids and base_greedy_ids must not be empty")
    return PromptRecord(tokens, greedy, {name: _run(run) for name, run in part.at("runs").items()})


def _run(part: JsonField) -> RunRecord:
    trees = part.find("trees")
    return RunRecord(
        lengths=part.at("accept_lengths").integers(),
        generated=part.at("generated_ids").integers(),
        trees=tuple(_tree(tree) for tree in trees.parts()) if trees else (),
        bonus=bonus.integers() if (bonus := part.find("bonus_tokens")) else None,
        best=best.integers() if (best := part.find("best_candidate")) else None,
        tau=tau.number() if (tau := part.find("tau")) else None,
        rank_gap=_number(part, "min_rank_gap_all_rounds", 0.0),
        cut_gap=_number(part, "min_select_gap_all_rounds", 0.0),
    )


def _tree(part: JsonField) -> TreeRecord:
    """The reference says -1 for the root's parent, and pads its rows with it."""
    tokens, parents = part.at("tokens").integers(), part.at("parents").integers()
    rows = part.find("retrieve_indices")
    try:
        tree = Tree(tokens, (0, *parents[1:]))
    except WireError as error:
        raise ModelError(f"{part.where}: {error}") from None
    return TreeRecord(
        tree=tree,
        rows=tuple(_unpadded(row.integers()) for row in rows.parts()) if rows else None,
        depths=depths.integers() if (depths := part.find("depth")) else None,
        positions=positions.integers() if (positions := part.find("position_ids")) else None,
        committed=committed.integer() if (committed := part.find("committed_len")) else None,
        gap=min((gap.number() for name in GAPS if (gap := part.find(name))), default=None),
    )


def _unpadded(row: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(node for node in row if node >= 0)


def _sampling(part: JsonField) -> SamplingRecord:
    if part.at("temperature").number() <= 0:
        raise ModelError(f"{part.where}.temperature must be > 0")
    return SamplingRecord(
        prompt=part.at("prompt").integer(),
        setting=part.at("setting").text(),
        temperature=part.at("temperature").number(),
        top_p=_number(part, "top_p", 1.0),
        top_k=int(_number(part, "top_k", 0)),
        rounds=tuple(_round(each) for each in part.at("rounds").parts()),
        lengths=lengths.integers() if (lengths := part.find("accept_lengths")) else (),
    )


def _round(part: JsonField) -> RoundRecord:
    return RoundRecord(
        tree=_tree(part),
        uniforms=part.at("uniforms").numbers(),
        accepted=part.at("accept_length").integer(),
        path=part.at("accepted_path_tokens").integers(),
        bonus=part.at("bonus_token").integer(),
        best=best.integer() if (best := part.find("best_candidate")) else None,
    )


def _number(part: JsonField, name: str, default: float) -> float:
    found = part.find(name)
    return found.number() if found else default
