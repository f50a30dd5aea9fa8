"""A published head under one set of names, whatever layout it was published in.

Refuses to know what heads compute. The names it gives are those of EAGLE-1 (`layers.0.*`, `fc.*`) plus
EAGLE-3's (`norm.weight`, `lm_head.weight`, `d2t`); a nested config becomes a flat one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specsot.errors import HeadMismatch, ModelError
from specsot.model.hf_config import Fields, read_json, require_model_directory
from specsot.model.weights import HeldWeights, WeightFiles, Weights

# How published names begin, and what they mean here: EAGLE-3 as its authors save it, and the names
# that vLLM's speculators give to EAGLE-1.
PREFIXES = (
    ("model.", ""),
    ("midlayer.", "layers.0."),
    ("transformer.", "layers.0."),
    ("fusion_fc.", "fc."),
    ("pre_lm_head_layernorm.", "hidden_states_layernorm."),
)
FIRST, PROBE = "layers.0.", "self_attn.q_proj.weight"  # every decoder layer has one of these
NESTED = ("transformer_layer_config", "eagle_config")  # parts of a config that speak of the head itself


class Checkpoint(Weights):
    """Tensors by their one name, and the config's fields. Every failure is a ModelError of one line.

    directory, source: where the head and its config are, for people.
    settings: the config's fields, flat. layers: how many decoder layers there are tensors of.
    """

    def __init__(self, published: Weights, fields: Mapping[str, Any], directory: Path, source: Path) -> None:
        self.directory, self.source = directory, source
        self.settings = flatten(fields, source)
        self._published = published
        self._names = _renamed(published.names(), directory)
        self.layers = self._count_layers()

    @classmethod
    def open(cls, directory: Path, allow_pickle_bin: bool = False) -> Checkpoint:
        """A directory's. allow_pickle_bin: see `WeightFiles`."""
        source = require_model_directory(directory) / "config.json"
        fields = read_json(source)
        return cls(WeightFiles(directory, allow_pickle_bin), fields, directory, source)

    @classmethod
    def held(cls, tensors: Mapping[str, Tensor], fields: Mapping[str, Any], owner: str) -> Checkpoint:
        """A head that is in memory under its published names."""
        return cls(HeldWeights(tensors, owner), fields, Path(owner), Path(owner))

    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def published(self, name: str) -> str:
        """What the file calls a tensor, or would call it."""
        known = self._names.get(f"{FIRST}{PROBE}")
        if name in self._names or known is None or not name.startswith(FIRST):
            return self._names.get(name, name)
        return known.removesuffix(PROBE) + name.removeprefix(FIRST)

    def where(self, name: str) -> str:
        return str(self.directory)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._published.shape(self.published(name))

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        return self._published.tensor(self.published(name), dtype, device)

    def expect(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """A tensor that must have this shape; HeadMismatch names both shapes."""
        self.check(name, shape)
        return self.tensor(name, dtype, device)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """HeadMismatch where a tensor has another shape, ModelError where there is none."""
        found = self.shape(name)
        if found != shape:
            raise HeadMismatch(
                f"{self.directory}: {self.published(name)} is {list(found)}, "
                f"this base and head need {list(shape)}"
            )

    def flag(self, name: str) -> bool:
        """A field that says yes or no; no, where it is absent."""
        return Fields(self.source, self.settings).flag(name)

    def _count_layers(self) -> int:
        layers = 0
        while f"layers.{layers}.{PROBE}" in self._names:
            layers += 1
        return layers


def flatten(fields: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """One level of fields: what a nested part says of the head wins; null says nothing."""
    flat = {name: value for name, value in fields.items() if value is not None}
    for part in NESTED:
        inner = flat.pop(part, {})
        if not isinstance(inner, dict):
            raise ModelError(f"{source}: {part} must be an object, got {inner!r}")
        flat |= {name: value for name, value in inner.items() if value is not None}
    return flat


def _renamed(names: Iterable[str], directory: Path) -> dict[str, str]:
    """File names of tensors by their names here."""
    found: dict[str, str] = {}
    for published in names:
        name = published
        for begins, means in PREFIXES:
            if name.startswith(begins):
                name = means + name.removeprefix(begins)
        if name in found:
            raise ModelError(f"{directory}: {found[name]} and {published} are both {name}")
        found[name] = published
    return found
