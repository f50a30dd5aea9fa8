"""Reads a published draft head under one set of tensor names, and checks whether it fits a base model.

The names are those of EAGLE-1 (`layers.0.*`, `fc.*`) and of EAGLE-3 (`norm.weight`, `lm_head.weight`,
`d2t`); a nested config is flattened. The config is used only for what the tensors do not show.
"""

from __future__ import annotations

import re
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

# Prefixes of published names, and their replacements: the names of EAGLE-3's authors, and those that vLLM's
# speculators give to EAGLE-1.
PREFIXES = (
    ("model.", ""),
    ("midlayer.", "layers.0."),
    ("transformer.", "layers.0."),
    ("fusion_fc.", "fc."),
    ("pre_lm_head_layernorm.", "hidden_states_layernorm."),
)
FIRST = "layers.0."
# A tensor that every decoder layer has.
PROBE = "self_attn.q_proj.weight"
# Nested objects of a config that describe the head itself.
NESTED = (
    "transformer_layer_config",
    "eagle_config",
    "dflash_config",
)


class Checkpoint(Weights):
    """The tensors of a head by their uniform names, and the fields of its config.

    Every failure is a ModelError of one line.

    directory: Where the head is, for messages.
    source: Where the head's config is, for messages.
    settings: The fields of the config, flattened.
    layers: Number of decoder layers for which there are tensors. 0 if the tensors are those of no head.
    """

    def __init__(self, published: Weights, fields: Mapping[str, Any], directory: Path, source: Path) -> None:
        """Rename the tensors and flatten the config.

        published: The tensors under their published names.
        fields: The fields of the config.
        directory: Where the head is, for messages.
        source: Where the config is, for messages.

        Raises ModelError if two tensors get the same uniform name, or if a nested part of the config is no
        object.
        """
        self.directory = directory
        self.source = source
        self.settings = flatten(fields, source)
        self._published = published
        self._names = _renamed(published.names(), directory)
        self.layers = self._count_layers()

    @classmethod
    def open(cls, directory: Path, allow_pickle_bin: bool = False) -> Checkpoint:
        """Open the head in a directory, and return it. Matrices that `quantization_config` describes are
        dequantized.

        directory: Where the head is.
        allow_pickle_bin: True if pickled weight files may be read, see `WeightFiles`.

        Raises ModelError for a format of quantization that is not supported.

        Raises ModelError also if the directory is no model's, or if its config cannot be read.
        """
        source = require_model_directory(directory) / "config.json"
        fields = read_json(source)
        files = WeightFiles(directory, allow_pickle_bin)
        quantized = read_published(fields, source)
        weights = files if quantized is None else PublishedWeights(files, quantized)
        return cls(weights, fields, directory, source)

    @classmethod
    def held(cls, tensors: Mapping[str, Tensor], fields: Mapping[str, Any], owner: str) -> Checkpoint:
        """Wrap a head that is in memory, and return it.

        tensors: The tensors by their published names.
        fields: The fields of its config.
        owner: Its name in messages.
        """
        return cls(HeldWeights(tensors, owner), fields, Path(owner), Path(owner))

    @property
    def decodes(self) -> bool:
        """True if the files hold quantized matrices, which are dequantized when they are read."""
        return isinstance(self._published, PublishedWeights)

    def names(self) -> tuple[str, ...]:
        """Return the uniform names of all tensors."""
        return tuple(self._names)

    def __contains__(self, name: str) -> bool:
        """Return whether there is a tensor of this name. Return False for a published name that differs from
        the uniform one.

        name: Uniform name of the tensor.
        """
        return name in self._names

    def published(self, name: str) -> str:
        """Return the name that the file gives to a tensor, or would give to it if the file had it.

        name: Uniform name of the tensor.

        A missing tensor of the first layer gets the prefix under which the file holds that layer; any other
        missing name is returned unchanged.
        """
        known = self._names.get(f"{FIRST}{PROBE}")
        if name in self._names or known is None or not name.startswith(FIRST):
            return self._names.get(name, name)
        return known.removesuffix(PROBE) + name.removeprefix(FIRST)

    def where(self, name: str) -> str:
        """Return the place of a tensor, for messages: the head's directory.

        name: Uniform name of the tensor.
        """
        return str(self.directory)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises ModelError if there is no tensor of this name.

        name: Uniform name of the tensor.
        """
        return self._published.shape(self.published(name))

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Load a tensor and return it, in the shape that it has in the file. Raises ModelError if there is no
        tensor of this name.

        name: Uniform name of the tensor.
        dtype: Type to which it is converted.
        device: Where it is loaded to.
        """
        return self._published.tensor(self.published(name), dtype, device)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Check the shape of a tensor. Raises HeadMismatch if it has another shape, and ModelError if there
        is no such tensor.

        name: Uniform name of the tensor.
        shape: The shape that this base model and head need.
        """
        found = self.shape(name)
        if found != shape:
            raise HeadMismatch(
                f"{self.directory}: {self.published(name)} is {list(found)}, "
                f"this base and head need {list(shape)}"
            )

    def flag(self, name: str) -> bool:
        """Return the value of a boolean field of the config; False if it is absent.

        name: Name of the field.
        """
        return Fields(self.source, self.settings).flag(name)

    def _count_layers(self) -> int:
        """Return the number of consecutive layers, from the first, for which there are tensors. Return 0 if
        there are none for the first layer.
        """
        layers = 0
        while f"layers.{layers}.{PROBE}" in self._names:
            layers += 1
        return layers


def flatten(fields: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Return the fields of a config as one level. Nested fields override outer ones; nulls are dropped.

    fields: The fields of the config.
    source: The config's path, for messages.

    {"a": 1, "eagle_config": {"a": 2, "b": null}} -> {"a": 2}. Raises ModelError if a nested part is not an
    object.

    The nested parts are those named in NESTED; a missing part counts as empty. Other nested objects stay as
    values.
    """
    flat = {name: value for name, value in fields.items() if value is not None}
    for part in NESTED:
        inner = flat.pop(part, {})
        if not isinstance(inner, dict):
            raise ModelError(f"{source}: {part} must be an object, got {inner!r}")
        flat |= {name: value for name, value in inner.items() if value is not None}
    return flat


def _renamed(names: Iterable[str], directory: Path) -> dict[str, str]:
    """Return the published name of each tensor by its uniform name.

    names: Published names.
    directory: Where the head is, for messages.

    "model.midlayer.mlp.up_proj.weight" is found as "layers.0.mlp.up_proj.weight". Raises ModelError if two
    tensors have the same uniform name.

    A name may have several of the prefixes, which are replaced in the order of PREFIXES. A name without one
    of them stays.
    """
    found: dict[str, str] = {}
    for published in names:
        name = published
        for prefix, replacement in PREFIXES:
            if name.startswith(prefix):
                name = replacement + name.removeprefix(prefix)
        if name in found:
            raise ModelError(f"{directory}: {found[name]} and {published} are both {name}")
        found[name] = published
    return found


# EAGLE-2 uses the head of EAGLE-1 with another tree.
Kind = Literal["eagle1", "eagle3", "dflash", "dspark"]
# The kinds that draft a block in one pass.
BLOCK_KINDS: tuple[Kind, ...] = ("dflash", "dspark")

BLOCK = "layers.0"
# Prefix of the tensors that only a DSpark head has.
MARKOV = "markov_head"
# Config field. If true, the rows of the base model's lm_head that belong to the draft ids are the head's
# lm_head.
SHARES_LM_HEAD = "shares_lm_head"
ATTENTION = "self_attn"
MLP = "mlp"


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The sizes of a head.

    hidden: Columns of a hidden state.
    inputs: Columns that the first layer's projections read; later layers read `hidden` columns.
    heads: Number of query heads.
    kv_heads: Number of KV heads.
    head_dim: Columns of an attention head.
    intermediate: Columns inside the MLP.
    vocab: Number of token ids that the head can draft.
    layers: Number of decoder layers.
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
    """Return the family of a head, by its tensors.

    checkpoint: The head.

    The first layer of EAGLE-3 norms the feature, and reads it together with the token's embedding. The layers
    of DFlash read no feature; one norm outside the layers serves all of them. DSpark is DFlash with a Markov
    head. Raises ModelError if the tensors are those of no draft head.

    Returns "eagle3" if the first layer has a norm of the feature or its query projection reads twice the
    hidden size, "dflash" or "dspark" if there is one such norm outside the layers, and otherwise "eagle1", if
    there is an fc.
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
        return "dspark" if f"{MARKOV}.markov_w1.weight" in checkpoint else "dflash"
    if "fc.weight" not in checkpoint:
        raise ModelError(
            f"{checkpoint.directory}: no EAGLE head, as there is no tensor fc.weight; a small language model "
            "drafts by --drafter model"
        )
    return "eagle1"


def read_shape(checkpoint: Checkpoint, base: ModelConfig) -> HeadShape:
    """Return the sizes of a head, after checking every tensor of its decoder layers and its vocabulary.

    checkpoint: The head.
    base: Config of the base model.

    Raises HeadMismatch, with both shapes, if tensors do not fit each other or the base model, and ModelError
    if a tensor is missing.

    Also raises what `kind_of` raises for a checkpoint that is no draft head.
    """
    shape = _read(checkpoint, base)
    for layer in range(shape.layers):
        for name, wanted in _layer_shapes(shape, layer).items():
            checkpoint.check(f"layers.{layer}.{name}", wanted)
    return shape


def _read(checkpoint: Checkpoint, base: ModelConfig) -> HeadShape:
    """Return the sizes that the tensors and the number of heads in the config imply, unchecked by layer.

    checkpoint: The head.
    base: Config of the base model.

    Raises HeadMismatch if the number of heads does not divide the projections.

    Raises HeadMismatch also if the number of heads is missing, no integer or not positive, if the head
    dimension is odd, or if query and KV heads do not divide each other; and ModelError for a tensor that is
    missing.
    """
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
    """Return the hidden size: the rows of the attention's output projection.

    checkpoint: The head.
    """
    return _matrix(checkpoint, f"{BLOCK}.{ATTENTION}.o_proj.weight")[0]


def _matrix(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    """Return the rows and columns of a tensor. Raises HeadMismatch if it is no matrix, or empty.

    checkpoint: The head.
    name: Uniform name of the tensor.

    Raises ModelError if there is no such tensor.
    """
    found = checkpoint.shape(name)
    if len(found) != 2 or 0 in found:
        name = checkpoint.published(name)
        raise HeadMismatch(f"{checkpoint.directory}: {name} is {list(found)}, which is no matrix")
    return found[0], found[1]


def _vocabulary(checkpoint: Checkpoint, base: ModelConfig) -> int:
    """Return the number of ids that the head can draft: rows of its lm_head or d2t, else all of the base's.

    checkpoint: The head.
    base: Config of the base model.

    Raises ModelError if the head has neither, and its config names a draft vocabulary of another size.

    A head that shares the base model's lm_head has as many ids as d2t has. A head with a d2t but no lm_head
    of its own that does not share raises ModelError.
    """
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
    """Return the shapes of the tensors that a decoder layer must have, by name within the layer.

    shape: Sizes of the head.
    layer: Number of the layer. The first one has other inputs, and no norm of its own before them.

    Layers after the first also have an `input_layernorm`. Biases and norms of heads are not listed.
    """
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
    """Return d2t, [draft vocabulary]: base id = draft id + d2t[draft id]. Return None if the draft ids are
    the base model's ids.

    checkpoint: The head.
    shape: Its sizes.
    base: Config of the base model.
    device: Where the offsets are loaded to.

    A head that drafts the whole vocabulary needs no map; if it has a map, the map is ignored, as in the
    reference. Raises HeadMismatch if the map names an id that the base model does not have, and ModelError if
    two draft ids have the same base id.

    A head that drafts fewer ids and has no d2t raises HeadMismatch or ModelError as well. A d2t of another
    length raises HeadMismatch.
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


# The tensors of DFlash and DSpark heads, by their uniform names. Those in the last line are not read here:
# the confidence head, copies of the base model's tensors, and tables that follow from others.
KNOWN_OF_BLOCKS = re.compile(
    r"(fc|norm|hidden_norm|embed_tokens|lm_head|embed_proj|lm_proj|d2t)(\.weight|\.bias)?"
    r"|layers\.\d+\.(input|post_attention)_layernorm\.weight"
    r"|layers\.\d+\.self_attn\.([qkvo]_proj\.(weight|bias)|[qk]_norm\.weight)"
    r"|layers\.\d+\.mlp\.(gate|up|down)_proj\.(weight|bias)"
    r"|markov_head\.(markov_w[12]\.weight|(gate|joint)_proj\.(weight|bias))"
    r"|confidence_head\..*|verifier_.*|t2d|.*inv_freq|.*_scale"
)
# Config fields of DFlash and DSpark heads that change what the layers compute in a way that is not supported,
# and the value with which they change nothing.
NEUTRAL_IN_BLOCKS: Mapping[str, object] = {
    "use_swa": False,
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "logit_scale": 1.0,
}


def check_supported(checkpoint: Checkpoint) -> None:
    """Check that the head has nothing that is not supported here. Raises ModelError if it has.

    checkpoint: The head.

    The activation must be silu (also called swish; the default). A head in memory with a
    `quantization_config` is not supported. A DFlash or DSpark head with tensors of another layout, such as
    DFlash2's or that of a Gemma 4 body, is not supported, because it would draft badly without them.

    Also raises what `kind_of` raises for a checkpoint that is no draft head.
    """
    settings: Mapping[str, Any] = checkpoint.settings
    activation = settings.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{checkpoint.source}: hidden_act {activation!r} is not supported, only silu")
    if "quantization_config" in settings and not checkpoint.decodes:
        raise ModelError(f"{checkpoint.source}: quantized weights of a head in memory are not supported")
    if kind_of(checkpoint) in BLOCK_KINDS:
        _check_block_layout(checkpoint)


def _check_block_layout(checkpoint: Checkpoint) -> None:
    """Check that a DFlash or DSpark head has no tensor and no config field of a layout that is not supported.
    Raises ModelError, which names the first of them, if it has.

    checkpoint: The head.
    """
    tensors = [
        f"the tensor {checkpoint.published(name)}"
        for name in checkpoint.names()
        if not KNOWN_OF_BLOCKS.fullmatch(name)
    ]
    fields = [
        f"{name} {checkpoint.settings[name]!r}"
        for name, neutral in NEUTRAL_IN_BLOCKS.items()
        if checkpoint.settings.get(name, neutral) != neutral
    ]
    if found := [*fields, *tensors]:
        raise ModelError(
            f"{checkpoint.directory}: a DFlash or DSpark head of a layout that is not supported: "
            f"it has {found[0]}"
        )
