"""Caches loaded layers across ranges and epochs, and stands in for weights that are not present yet.

With `LoadedParts`, a new range or another epoch loads no layer twice. `AbsentWeights` has the shapes that a
config asks for, so that a model can be counted and timed before its files are fetched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from specsot.checkpoint.config import ModelConfig
from specsot.members import Quantization, Range
from specsot_model.delta import DeltaBlock
from specsot_model.layer_inputs import LayerInputs
from specsot_model.layers import AnyNorm, Block, fetch_embedding, fetch_final_norm, fetch_lm_head
from specsot_model.linear import Linear, Table
from specsot_model.published import open_weights
from specsot_model.stored_form import published_of
from specsot_model.tensor_parallel import MakeBlock
from specsot_model.transformers_layers.loading import TransformersBlock
from specsot_model.weights import Fetch, Weights, has_files


@dataclass(slots=True)
class LoadedParts:
    """What is loaded of one model, in one form, on one device.

    blocks: Layers by index.
    embedding: The embedding; None: not loaded.
    norm: The final norm; None: not loaded.
    head: The lm_head; None: not loaded.
    layer_inputs: Per-layer inputs of the range loaded last. None: not loaded.
    """

    blocks: dict[int, Block] = field(default_factory=dict[int, Block])
    embedding: Table | None = None
    norm: AnyNorm | None = None
    head: Linear | None = None
    layer_inputs: LayerInputs | None = None

    def fetch(self, fetch: Fetch, config: ModelConfig, index: int, make: MakeBlock = Block) -> Block:
        """Return a layer; load it if it is not loaded.

        The first layer also loads the embedding, the last one the final norm and the lm_head. A part that is
        loaded already is not loaded again. An embedding or lm_head that is tied to the other is shared with
        it. ModelError is raised if a tensor is missing or has another shape.

        make: Loads the layer, unless it is a gated delta layer, or one that runs through Transformers.
        fetch: Reads tensors from the model's files, in the dtype and on the device of the range.
        config: The model's config: sizes, tensor names, and kinds of norm, MLP and so on.
        index: Index of the layer in the whole model.
        """
        if index not in self.blocks:
            delta = config.delta if config.recurrent(index) else None
            make = make if config.transformers is None else TransformersBlock
            self.blocks[index] = (
                DeltaBlock(fetch, index, config, delta) if delta else make(fetch, index, config)
            )
        if index == 0 and self.embedding is None:
            self.embedding = fetch_embedding(fetch, config, self.head)
        if index == config.layers - 1 and self.head is None:
            # Transformers' own forward has the final norm, whose formula only its family knows.
            self.norm = fetch_final_norm(fetch, config) if config.transformers is None else None
            self.head = fetch_lm_head(fetch, config, self.embedding)
        return self.blocks[index]

    def fetch_layer_inputs(self, fetch: Fetch, config: ModelConfig, layers: Range) -> LayerInputs:
        """Return what computes the per-layer inputs of a range; load it, and the model's embedding, if they
        are not loaded. The per-layer inputs of another range are dropped.

        fetch: Reads tensors from the model's files, in the dtype and on the device of the range.
        config: The model's config, which must have a `layer_input_size`.
        layers: The range of layers.

        Raises ModelError if a tensor is missing or has another shape.
        """
        if self.layer_inputs is None or self.layer_inputs.layers != layers:
            self.layer_inputs = None
            if self.embedding is None:
                self.embedding = fetch_embedding(fetch, config, self.head)
            self.layer_inputs = LayerInputs.fetch(fetch, config, layers, self.embedding)
        return self.layer_inputs

    def drop_all_but(self, layers: Range, config: ModelConfig) -> None:
        """Drop everything that a range of layers does not need.

        The embedding is dropped unless the range has the first layer, or layers have per-layer inputs; the
        final norm and the lm_head are dropped unless the range has the last layer. The per-layer inputs stay
        until `fetch_layer_inputs` replaces them.

        layers: The range whose layers, and embedding or lm_head if it is an end of the model, stay loaded.
        config: The model's config, which has the number of layers.
        """
        needed = range(layers.first, layers.last)
        self.blocks = {index: block for index, block in self.blocks.items() if index in needed}
        if layers.first and not config.layer_input_size:
            self.embedding = None
        if layers.last < config.layers:
            self.norm = self.head = None


# Standard deviation of random weights, so that no product overflows. Precedent: initialized models, 0.02.
SPREAD = 0.02


class AbsentWeights(Weights):
    """Random tensors in the shapes that a config asks for; `shape` knows every tensor that a model reads."""

    def __init__(self, names: tuple[str, ...], config: ModelConfig) -> None:
        """Record the shape of every tensor that the model reads.

        names: The tensors that `in` reports as present; they decide which layout of tensors is read.
        config: The model's config, from which all shapes follow.
        """
        self._names = frozenset(names)
        self._shapes = dict[str, tuple[int, ...]]()
        parts = LoadedParts()
        fetch = Fetch(self, torch.float32, "meta")
        for layer in range(config.layers):
            parts.fetch(fetch, config, layer)
        if config.layer_input_size:
            parts.fetch_layer_inputs(fetch, config, Range(0, config.layers))

    def names(self) -> tuple[str, ...]:
        """Return the names of the tensors that the model reads; its files may hold further ones."""
        return tuple(self._shapes)

    def __contains__(self, name: str) -> bool:
        """Tell whether the tensor counts as present.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        """
        return name in self._names

    def where(self, name: str) -> str:
        """Return what messages call the source; the same for every tensor.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        """
        return "weights that are not here"

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that the model asks for. Raises KeyError for a tensor that the model does not
        read.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        """
        return self._shapes[name]

    def expect(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """Record the shape that the model asks for, and return a tensor of that shape.

        name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
        shape: Shape that the model asks for.
        dtype: Type of the result.
        device: Device of the result; on "meta" the tensor has no numbers.
        """
        self._shapes[name] = shape
        return self.tensor(name, dtype, device)

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Return a random tensor in the recorded shape; on the device "meta", a tensor without numbers.

        name: Name of a tensor that the model reads.
        dtype: Type of the result.
        device: Device of the result.
        """
        tensor = torch.empty(self._shapes[name], dtype=dtype, device=device)
        # On the meta device only shapes are asked for; filling them would take 2 ms each.
        return tensor if tensor.is_meta else tensor.normal_(std=SPREAD)


def open_shapes(
    directory: Path,
    config: ModelConfig,
    allow_pickle_bin: bool = False,
    quantization: Quantization | None = None,
) -> Weights:
    """Return a source of a base model's tensor shapes, without fetching anything.

    The shapes come from the model's files if all are present, else from its config. Raises like
    `open_weights`.

    directory: Folder with `config.json` and perhaps the weight files.
    config: The model's config.
    allow_pickle_bin: Whether pickled weight files (`*.bin`) may be read.
    quantization: Form in which matrices are to be stored; None: as the files have them.
    """
    published_of(directory, quantization)
    if has_files(directory, allow_pickle_bin):
        return open_weights(directory, allow_pickle_bin, quantization)
    # The embedding counts as present; a tied model has no other table.
    return AbsentWeights((f"{config.names.embedding}.weight",), config)


def measured_range(config: ModelConfig) -> Range:
    """Return the range of one layer to time: a layer with experts if the model has any.

    The first and the last layer are avoided if possible, because they bring the embedding and the lm_head,
    and so are layers that read the keys and values of another one. A model of one or two layers gives its
    first layer, or its first one with experts.

    config: The model's config.
    """
    own = [
        layer
        for layer in (*range(1, config.layers - 1), *range(config.layers))
        if config.kv_source(layer) == layer
    ]
    layer = next(filter(config.sparse, own), own[0])
    return Range(layer, layer + 1)
