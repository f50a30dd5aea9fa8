"""Per-layer inputs, which each layer gets of each token besides the hidden states (Gemma 4 E2B and E4B).

The input of layer l for a token with the id t is

    (norm(P_l e / sqrt(H)) + sqrt(size) T_l[t]) / sqrt(2)

where e is the token's scaled embedding, H the hidden size, `size` the number of elements of the input, T_l
the layer's part of an embedding, and P_l its part of a projection. At the end of the layer,
norm(project(act(gate(h)) * input)) is added to the hidden states h; see `LayerGate`. So every stage needs the
token ids, which all frames carry, and the model's embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.checkpoint.config import ModelConfig
from specsot.members import Range
from specsot_model.linear import Table, hold_table, look_up, pack_table
from specsot_model.norms import Norm
from specsot_model.stored_form import uses_packed_kernels
from specsot_model.weights import Fetch

# Rows of the embedding that are in floats at a time while it is packed. Bounds the memory. Untuned.
PACKED_AT_ONCE: Final = 4096


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Computes the per-layer inputs of a range of layers.

    layers: The range of layers.
    size: Number of elements of the input of one layer.
    embedding: The model's embedding, [vocab, hidden].
    scale: Factor of the model's embeddings.
    table: The layers' part of the embedding of the per-layer inputs, [rows * layers, size]. The rows of a
        token's layers follow each other, so that 8-bit rows do not depend on which layers the range has.
    projection: Their part of the projection, [layers * size, hidden].
    norm: Norm over the `size` projected numbers of a layer.
    """

    layers: Range
    size: int
    embedding: Table
    scale: float
    table: Table
    projection: Tensor
    norm: Norm

    @classmethod
    def fetch(cls, fetch: Fetch, config: ModelConfig, layers: Range, embedding: Table) -> LayerInputs:
        """Load the parts of a range of layers.

        fetch: Reads tensors from the model's files, in the dtype and on the device of the range.
        config: The model's config, which must have a `layer_input_size`.
        layers: The range of layers.
        embedding: The model's embedding, [vocab, hidden].

        Raises ModelError if a tensor is missing or has another shape.
        """
        names = config.names.layer_tables
        assert names is not None, "families with per-layer inputs name their tables"
        size = config.layer_input_size
        table_name, projection_name, norm_name = (f"{name}.weight" for name in names)
        part = slice(layers.first * size, layers.last * size)
        projection = fetch(projection_name, (config.layers * size, config.hidden))[part]
        return cls(
            layers,
            size,
            embedding,
            config.embedding_scale,
            _fetch_table(fetch, table_name, (config.layer_input_vocab, config.layers * size), part, size),
            projection.contiguous() if len(layers) == config.layers else projection.clone(),
            Norm(fetch(norm_name, (size,)), config.eps),
        )

    def of_tokens(self, tokens: Tensor) -> Tensor:
        """Return the per-layer inputs of all layers of the range, [rows, layers, size].

        tokens: LongTensor [rows], token ids.
        """
        embedded = look_up(self.embedding, tokens)
        embedded = embedded * torch.tensor(self.scale, dtype=embedded.dtype)
        hidden = embedded.shape[1]
        projected = F.linear(embedded.to(self.projection.dtype), self.projection) * hidden**-0.5
        projected = self.norm(projected.unflatten(1, (-1, self.size)))
        count = len(self.layers)
        rows = tokens.long()[:, None] * count + torch.arange(count, device=tokens.device)
        looked_up = look_up(self.table, rows.flatten()).unflatten(0, (-1, count))
        looked_up = looked_up * torch.tensor(self.size**0.5, dtype=looked_up.dtype)
        return (projected + looked_up.to(projected.dtype)) * 2**-0.5


def _fetch_table(fetch: Fetch, name: str, shape: tuple[int, int], part: slice, size: int) -> Table:
    """Load the columns of some layers of the embedding of the per-layer inputs, [rows * layers, size], in the
    form in which embeddings are stored. At most PACKED_AT_ONCE rows of a GGUF file are in floats at a time
    while they are packed.

    fetch: Reads tensors from the model's files.
    name: Name of the tensor.
    shape: Its shape, [rows, layers of the model * size].
    part: The columns.
    size: Columns of one layer.
    """
    whole = part.stop - part.start == shape[1]
    if not uses_packed_kernels(fetch.quantization, fetch.device):
        table = fetch(name, shape)
        table = table if whole else table[:, part].clone()
        return hold_table(table.view(-1, size), fetch.quantization)
    fetch.files.check(name, shape)
    stored = fetch.files.blocks(name)
    decode = fetch(name, shape).__getitem__ if stored is None else stored.decode

    def parts() -> Iterator[Tensor]:
        """Yield the columns of consecutive rows, in floats."""
        for numbers in torch.arange(shape[0]).split(PACKED_AT_ONCE):
            yield decode(numbers)[:, part].reshape(-1, size)

    return pack_table(parts(), (shape[0] * (part.stop - part.start) // size, size))
