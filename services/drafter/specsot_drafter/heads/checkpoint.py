"""A published head under one set of names, its shape, and whether it fits a base.

The names are those of EAGLE-1 (`layers.0.*`, `fc.*`) plus EAGLE-3's (`norm.weight`, `lm_head.weight`,
`d2t`); a nested config becomes a flat one. The config is asked only for what no tensor tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from specsot.checkpoint.config import ModelConfig, require_model_directory
from specsot.checkpoint.fields import Fields, read_json
from specsot.checkpoint.quantization_config import read_published
from specsot.errors import HeadMismatch, ModelError
from specsot_model.published import PublishedWeights
from specsot_model.weights import HeldWeights, WeightFiles, Weights

# How published names begin, and what they mean here: EAGLE-3 as its authors save it, and the names
# that vLLM's speculators give to EAGLE-1.
PREFIXES = (
    ("model.", ""),
    ("midlayer.", "layers.0."),
    ("transformer.", "layers.0."),
    ("fusion_fc.", "fc."),
    ("pre_lm_head_layernorm.", "hidden_states_layernorm."),
)
# every decoder layer has one of these
FIRST = "layers.0."
PROBE = "self_attn.q_proj.weight"
NESTED = (
    "transformer_layer_config",
    "eagle_config",
    "dflash_config",
)  # parts of a config that speak of the head itself


class Checkpoint(Weights):
    """Tensors by their one name, and the config's fields. Every failure is a ModelError of one line.

    directory, source: where the head and its config are, for people.
    settings: the config's fields, flat. layers: how many decoder layers there are tensors of.
    """

    def __init__(self, published: Weights, fields: Mapping[str, Any], directory: Path, source: Path) -> None:
        self.directory = directory
        self.source = source
        self.settings = flatten(fields, source)
        self._published = published
        self._names = _renamed(published.names(), directory)
        self.layers = self._count_layers()

    @classmethod
    def open(cls, directory: Path, allow_pickle_bin: bool = False) -> Checkpoint:
        """A directory's head; matrices that `quantization_config` describes are decoded.

        allow_pickle_bin: see `WeightFiles`. Raises ModelError for a quantization that is not read here.
        """
        source = require_model_directory(directory) / "config.json"
        fields = read_json(source)
        files = WeightFiles(directory, allow_pickle_bin)
        quantized = read_published(fields, source)
        weights = files if quantized is None else PublishedWeights(files, quantized)
        return cls(weights, fields, directory, source)

    @classmethod
    def held(cls, tensors: Mapping[str, Tensor], fields: Mapping[str, Any], owner: str) -> Checkpoint:
        """A head that is in memory under its published names."""
        return cls(HeldWeights(tensors, owner), fields, Path(owner), Path(owner))

    @property
    def decodes(self) -> bool:
        """Whether the files hold quantized matrices, which are decoded as they are read."""
        return isinstance(self._published, PublishedWeights)

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


Kind = Literal["eagle1", "eagle3", "dflash"]  # EAGLE-2 is EAGLE-1's head: only the tree is another

BLOCK = "layers.0"
SHARES_LM_HEAD = (
    "shares_lm_head"  # Config field: the head drafts by the base's lm_head rows of its draft ids.
)
ATTENTION = "self_attn"
MLP = "mlp"


@dataclass(frozen=True, slots=True)
class HeadShape:
    """hidden: its own width; vocab: ids it can draft; layers: decoder layers.

    inputs: columns the first layer's projections read; the layers behind it read `hidden`.
    """

    hidden: int
    inputs: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    layers: int


def kind_of(checkpoint: Checkpoint) -> Kind:
    """EAGLE-3's first layer norms the feature and reads the token's embedding beside it; DFlash's layers read
    no feature, which is normed once for all of them.
    """
    if checkpoint.layers == 0:
        raise ModelError(
            f"{checkpoint.directory}: no EAGLE head, as there is no tensor {BLOCK}.{ATTENTION}.q_proj.weight"
        )
    hidden = _hidden(checkpoint)
    columns = _matrix(checkpoint, f"{BLOCK}.{ATTENTION}.q_proj.weight")[1]
    if f"{BLOCK}.hidden_norm.weight" in checkpoint or columns == 2 * hidden:
        return "eagle3"
    if "hidden_norm.weight" in checkpoint:
        return "dflash"
    if "fc.weight" not in checkpoint:
        raise ModelError(
            f"{checkpoint.directory}: no EAGLE head, as there is no tensor fc.weight; a small language model "
            "drafts by --drafter model"
        )
    return "eagle1"


def read_shape(checkpoint: Checkpoint, base: ModelConfig) -> HeadShape:
    """The shape of a head whose decoder layers and vocabulary are whole and fit together and the base.

    Raises HeadMismatch with both shapes, ModelError for a tensor that is missing.
    """
    shape = _read(checkpoint, base)
    for layer in range(shape.layers):
        for name, wanted in _layer_shapes(shape, layer).items():
            checkpoint.check(f"layers.{layer}.{name}", wanted)
    return shape


def _read(checkpoint: Checkpoint, base: ModelConfig) -> HeadShape:
    kind = kind_of(checkpoint)
    hidden = _hidden(checkpoint)
    queries, _ = _matrix(checkpoint, f"{BLOCK}.{ATTENTION}.q_proj.weight")
    keys, _ = _matrix(checkpoint, f"{BLOCK}.{ATTENTION}.k_proj.weight")
    intermediate, _ = _matrix(checkpoint, f"{BLOCK}.{MLP}.gate_proj.weight")
    heads = checkpoint.settings.get("num_attention_heads")
    if not isinstance(heads, int) or isinstance(heads, bool) or heads <= 0 or queries % heads:
        raise HeadMismatch(
            f"{checkpoint.directory}: q_proj has {queries} rows, the config says {heads!r} heads"
        )
    dim = queries // heads
    if dim % 2 or keys % dim or heads % max(keys // dim, 1):
        raise HeadMismatch(
            f"{checkpoint.directory}: q_proj has {queries} rows for {heads} heads, k_proj has {keys}"
        )
    inputs = 2 * hidden if kind == "eagle3" else hidden
    vocab = base.vocab if kind == "eagle1" else _vocabulary(checkpoint, base)
    return HeadShape(hidden, inputs, heads, keys // dim, dim, intermediate, vocab, checkpoint.layers)


def _hidden(checkpoint: Checkpoint) -> int:
    """The width that attention's output projection writes."""
    return _matrix(checkpoint, f"{BLOCK}.{ATTENTION}.o_proj.weight")[0]


def _matrix(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    found = checkpoint.shape(name)
    if len(found) != 2 or 0 in found:
        name = checkpoint.published(name)
        raise HeadMismatch(f"{checkpoint.directory}: {name} is {list(found)}, which is no matrix")
    return found[0], found[1]


def _vocabulary(checkpoint: Checkpoint, base: ModelConfig) -> int:
    """Ids an EAGLE-3 head can draft: those of its own lm_head, of its map d2t, or all that the base has."""
    if checkpoint.flag(SHARES_LM_HEAD) and "d2t" in checkpoint:
        return checkpoint.shape("d2t")[0]
    if "lm_head.weight" in checkpoint or "d2t" in checkpoint:
        return _matrix(checkpoint, "lm_head.weight")[0]
    named = checkpoint.settings.get("draft_vocab_size")
    if named not in (None, base.vocab):
        raise ModelError(
            f"{checkpoint.directory}: no tensor lm_head.weight, and draft_vocab_size {named!r} is not the "
            f"base's {base.vocab}, whose lm_head could be shared"
        )
    return base.vocab


def _layer_shapes(shape: HeadShape, layer: int) -> Mapping[str, tuple[int, ...]]:
    """Every tensor that each decoder layer has."""
    hidden = shape.hidden
    keys = shape.kv_heads * shape.head_dim
    queries = shape.heads * shape.head_dim
    inner = shape.intermediate
    inputs = hidden if layer else shape.inputs
    return {
        f"{ATTENTION}.q_proj.weight": (queries, inputs),
        f"{ATTENTION}.k_proj.weight": (keys, inputs),
        f"{ATTENTION}.v_proj.weight": (keys, inputs),
        f"{ATTENTION}.o_proj.weight": (hidden, queries),
        f"{MLP}.gate_proj.weight": (inner, hidden),
        f"{MLP}.up_proj.weight": (inner, hidden),
        f"{MLP}.down_proj.weight": (hidden, inner),
        "post_attention_layernorm.weight": (hidden,),
    } | ({"input_layernorm.weight": (hidden,)} if layer else {})


def read_offsets(
    checkpoint: Checkpoint, shape: HeadShape, base: ModelConfig, device: torch.device | str
) -> torch.Tensor | None:
    """d2t [draft vocabulary]: base id = draft id + d2t[draft id]. None: the ids are the base's own.

    Every draft id must be another id of the base. A head that drafts the whole vocabulary has no map,
    and one that comes along with it all the same says nothing (the reference drops it).
    """
    if shape.vocab == base.vocab:
        return None
    if "d2t" not in checkpoint:
        checkpoint.check("lm_head.weight", (base.vocab, shape.hidden))
    checkpoint.check("d2t", (shape.vocab,))
    offsets = checkpoint.tensor("d2t", torch.long, "cpu")
    targets = offsets + torch.arange(shape.vocab)
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= base.vocab:
        raise HeadMismatch(f"{checkpoint.directory}: d2t names ids {low}..{high}, the base has {base.vocab}")
    if len(targets.unique()) != shape.vocab:
        raise ModelError(f"{checkpoint.directory}: d2t names an id twice")
    return offsets.to(device)


def check_supported(checkpoint: Checkpoint) -> None:
    """What a config says, no tensor would show, and no head here computes. Raises ModelError."""
    settings: Mapping[str, Any] = checkpoint.settings
    activation = settings.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{checkpoint.source}: hidden_act {activation!r} is not supported, only silu")
    if "quantization_config" in settings and not checkpoint.decodes:
        raise ModelError(f"{checkpoint.source}: quantized weights of a head in memory are not supported")
