"""A layer of the base model's checkpoint that predicts a further token (MTP), as a draft head.

The layer's block is an ordinary layer of the base model's family, so it runs as a `Decoder` of one layer:
with the family's experts, norms and gates, in the same kernels, and in graphs where those layers do. Around
the block this file adds what `specsot.checkpoint.mtp` describes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specsot.checkpoint.config import ModelConfig, read_config
from specsot.checkpoint.mtp import MtpNames, block_config, require_mtp
from specsot.members import Quantization, Range
from specsot_drafter.heads import HeadRows
from specsot_drafter.heads.decoder import DecoderHead
from specsot_drafter.heads.eagle import FinalHidden
from specsot_model.decoder import Decoder
from specsot_model.layers import AnyNorm, fetch_final_norm, fetch_norm, unchanged
from specsot_model.linear import Linear
from specsot_model.packed import best_tokens
from specsot_model.projections import fuse_projections
from specsot_model.published import open_weights
from specsot_model.weights import Fetch, Weights


@dataclass(frozen=True, slots=True)
class MtpParts:
    """What an MTP layer has in addition to its block.

    enorm: Norm of the token's embedding.
    hnorm: Norm of the feature.
    eh_proj: Maps both, one after the other, [2 * hidden], to the block's input, [hidden].
    """

    enorm: AnyNorm
    hnorm: AnyNorm
    eh_proj: Linear

    @classmethod
    def fetch(cls, fetch: Fetch, names: MtpNames, config: ModelConfig) -> MtpParts:
        """Load the parts and return them. Raises ModelError if one is missing or has another shape.

        fetch: Loads the layer's tensors.
        names: Names of the layer's modules.
        config: Config of the base model.
        """
        enorm, hnorm = (fetch_norm(fetch, name, config) for name in (names.enorm, names.hnorm))
        shape = config.hidden, 2 * config.hidden
        return cls(enorm, hnorm, fuse_projections(fetch, [names.eh_proj], shape, False))


class MtpHead(DecoderHead):
    """An MTP layer as a `DraftHead`, and as a `GraphHead` if it is `capturable`.

    An output of the head is the block's output after the norm that precedes the lm_head. It is also the
    feature of the next token. Features are the base model's last hidden states after its final norm.
    """

    def __init__(self, block: Decoder, parts: MtpParts, base: ModelConfig, final_norm: AnyNorm) -> None:
        """Wrap a layer.

        block: The layer's block, with the base model's embedding and lm_head, and with the layer's norm.
        parts: The other parts of the layer.
        base: Config of the base model.
        final_norm: The base model's final norm.
        """
        super().__init__(block, base.vocab, base.max_positions)
        self._parts = parts
        self._fusion = FinalHidden((base.layers,), base.hidden, [final_norm], unchanged, block.dtype)
        self._norm = block.edges.final_norm()
        self._lm_head = block.edges.lm_head()
        self.taps = self._fusion.taps
        self.width = self._fusion.width

    def tap_slices(self) -> dict[int, Tensor]:
        """Return the identity matrix, [hidden, hidden], for the output of the base model's last layer."""
        return self._fusion.slices()

    def features(self, fused: Tensor) -> Tensor:
        """Return the base model's hidden states after its final norm, [rows, hidden].

        fused: The base model's last hidden states, [rows, hidden].
        """
        return self._fusion.features(fused)

    def step(self, tokens: Tensor, features: Tensor, origins: Tensor, rows: HeadRows) -> Tensor:
        """Run one forward pass like `forward`, but gather the features (`GraphHead.step`). Return the outputs
        of the asked rows, [asked, hidden], or of all rows if `rows.asked` is None.

        tokens: Token ids, [rows].
        features: Features from which those of the rows are gathered, [n, hidden].
        origins: Index into `features` for each row, [rows].
        rows: Positions, slots and attention of the rows.
        """
        return self.forward(tokens, features[origins], rows)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, features: Tensor, rows: HeadRows) -> Tensor:
        """Run one forward pass, and return the outputs of the asked rows, [asked, hidden]; see
        `DraftHead.forward`.

        tokens: Token ids, [rows].
        features: Feature of the position before each token, [rows, hidden].
        rows: Positions, slots and attention. The plan must have a query row for every row, not only for asked
            rows.
        """
        assert rows.plan is not None
        parts = self._parts
        embedded = parts.enorm(self.decoder.embed(tokens))
        inputs = parts.eh_proj(torch.cat((embedded, parts.hnorm(features)), 1))
        hidden, _ = self.decoder.forward(inputs, rows.positions, rows.slots, rows.plan, rows.kv)
        return self._norm(hidden if rows.asked is None else hidden[rows.asked])

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the logits of outputs, [rows, vocabulary]. The outputs are normed already.

        outputs: Outputs of `forward`, [rows, hidden].
        """
        return self._lm_head(outputs)

    def choose(self, outputs: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
        """Return log-probabilities and ids of the likeliest tokens of each row, [rows, count] each, best
        first. Return None if no CPU kernel computes logits and selection together.

        outputs: Outputs of `forward`, [rows, hidden].
        count: Number of tokens per row.
        """
        return best_tokens(self._lm_head, None, outputs, count, None)


@torch.inference_mode()
def load_mtp(
    directory: Path,
    base_directory: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    allow_pickle_bin: bool = False,
    allow_pickle_base: bool = False,
    quantization: Quantization | None = None,
) -> MtpHead:
    """Load the MTP layer of a checkpoint, and return it.

    directory: The checkpoint with the layer: that of the base model, or one that holds the layer alone.
    base_directory: The base model, whose embedding, final norm and lm_head are loaded as well.
    dtype: Type of the numbers.
    device: Where the layer computes.
    allow_pickle_bin: True if pickled weight files of `directory` may be read, see `WeightFiles`. It has no
        effect if `directory` is `base_directory`; `allow_pickle_base` decides then.
    allow_pickle_base: The same for the base model.
    quantization: The form in which matrices are held. None: not quantized.

    Raises ModelError if the checkpoint has no MTP layer, or one of other sizes than the base model.
    """
    config = read_config(base_directory)
    base = open_weights(base_directory, allow_pickle_base)
    own = base if directory == base_directory else open_weights(directory, allow_pickle_bin)
    names = require_mtp(own.names(), config, directory)
    weights = LayerWeights(own, base)
    block = block_config(config, names, own.names())
    decoder = Decoder(block, weights, Range(0, 1), dtype, torch.device(device), quantization=quantization)
    parts = MtpParts.fetch(Fetch(weights, dtype, device, quantization), names, config)
    return MtpHead(decoder, parts, config, fetch_final_norm(Fetch(base, dtype, device), config))


class LayerWeights(Weights):
    """The tensors of an MTP layer's checkpoint, and those of its base model that this checkpoint lacks.

    Matrices that are published quantized are decoded, and rounded again where the drafter quantizes. This
    rounding only changes drafts.
    """

    def __init__(self, own: Weights, base: Weights) -> None:
        """Keep the sources.

        own: Tensors of the checkpoint with the MTP layer.
        base: Tensors of the base model.
        """
        self._sources = dict.fromkeys(base.names(), base) | dict.fromkeys(own.names(), own)
        self._own = own

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors."""
        return tuple(self._sources)

    def where(self, name: str) -> str:
        """Return the place of a tensor, for messages.

        name: Name of the tensor.
        """
        return self._source(name).where(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises ModelError if neither checkpoint has the tensor.

        name: Name of the tensor.
        """
        return self._source(name).shape(name)

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Return a tensor, converted to a dtype and copied to a device. Raises ModelError if it cannot be
        read.

        name: Name of the tensor.
        dtype: Type of the result.
        device: Device of the result.
        """
        return self._source(name).tensor(name, dtype, device)

    def _source(self, name: str) -> Weights:
        """Return the checkpoint with a tensor; the layer's, whose error names it, if neither has the tensor.

        name: Name of the tensor.
        """
        return self._sources.get(name, self._own)
