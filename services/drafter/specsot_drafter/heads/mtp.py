"""A layer of the base model's checkpoint that predicts a further token (MTP), as a draft head.

The layer's block is an ordinary layer of the base model's family, so it runs as a `Decoder` of one layer:
with the family's experts, norms and gates, in the same kernels, and in graphs where those layers do. Around
the block this file adds what `specsot.checkpoint.mtp` describes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
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
from specsot_model.decoding import Codes
from specsot_model.layers import AnyNorm, fetch_final_norm, fetch_norm
from specsot_model.linear import Linear
from specsot_model.packed import best_tokens
from specsot_model.projections import fuse_projections
from specsot_model.published import PublishedWeights, open_weights
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
        self._fusion = FinalHidden(base.layers, base.hidden, final_norm, block.dtype)
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
        of the asked rows, [asked, hidden].

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
        embedded = parts.enorm(self._decoder.embed(tokens))
        inputs = parts.eh_proj(torch.cat((embedded, parts.hnorm(features)), 1))
        hidden, _ = self._decoder.forward(inputs, rows.positions, rows.slots, rows.plan, rows.kv)
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
    allow_pickle_bin: True if pickled weight files of `directory` may be read, see `WeightFiles`.
    allow_pickle_base: The same for the base model.
    quantization: The form in which matrices are held. None: not quantized.

    Raises ModelError if the checkpoint has no MTP layer, or one of other sizes than the base model.
    """
    config = read_config(base_directory)
    base = open_weights(base_directory, allow_pickle_base)
    own = base if directory == base_directory else open_weights(directory, allow_pickle_bin)
    names = require_mtp(own.names(), config, directory)
    weights = MtpWeights(own, base, names, config)
    block = block_config(config, names, own.names())
    decoder = Decoder(block, weights, Range(0, 1), dtype, torch.device(device), quantization=quantization)
    parts = MtpParts.fetch(Fetch(weights, dtype, device, quantization), names, config)
    return MtpHead(decoder, parts, config, fetch_final_norm(Fetch(base, dtype, device), config))


class MtpWeights(Weights):
    """The tensors of an MTP layer under the names of a model whose only layer is the layer's block.

    "model.layers.0.mlp.up_proj.weight" is read as "mtp.layers.0.mlp.up_proj.weight", "model.norm.weight" as
    "mtp.norm.weight". Embedding and lm_head are the base model's. The layer's other tensors keep their names.
    """

    def __init__(self, own: Weights, base: Weights, names: MtpNames, config: ModelConfig) -> None:
        """Keep the sources.

        own: Tensors of the checkpoint with the MTP layer.
        base: Tensors of the base model; the same object if the layer is in the base model's checkpoint.
        names: Names of the MTP layer.
        config: Config of the base model.
        """
        model = config.names
        self._own = own
        self._base = base
        # Prefixes of the one-layer model's tensors that are the layer's, by the prefix in its checkpoint.
        self._renamed = {
            f"{names.block}.": f"{model.layer.format(0)}.",
            f"{names.norm}.": f"{model.norm}.",
            **{f"{name}.": f"{name}." for name in (names.enorm, names.hnorm, names.eh_proj)},
        }
        self._shared = (f"{model.embedding}.", f"{model.head}.")

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors of the one-layer model, and of the layer's other tensors."""
        return tuple(self._places)

    def where(self, name: str) -> str:
        """Return the place of a tensor, for messages.

        name: Name of the tensor in the one-layer model.
        """
        weights, stored = self._find(name)
        return weights.where(stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises ModelError if there is no such tensor.

        name: Name of the tensor in the one-layer model.
        """
        weights, stored = self._find(name)
        return weights.shape(stored)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise a ModelError that names both shapes, and the tensor as its file names it, if a tensor has
        another shape than the base model needs.

        name: Name of the tensor in the one-layer model.
        shape: The shape that the base model's config asks for.
        """
        weights, stored = self._find(name)
        weights.check(stored, shape)

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Return a tensor, converted to a dtype and copied to a device. Raises ModelError if it cannot be
        read.

        name: Name of the tensor in the one-layer model.
        dtype: Type of the result.
        device: Device of the result.
        """
        weights, stored = self._find(name)
        return weights.tensor(stored, dtype, device)

    def rounded(self, name: str, form: Quantization, device: torch.device | str) -> Codes | None:
        """Return a matrix that is published quantized in this form as its own codes. Return None for any
        other matrix: it is decoded, and rounded to the form, which only changes drafts.

        name: Name of the tensor in the one-layer model.
        form: The form: "int8", "int4" or "fp8".
        device: Device of the result.
        """
        weights, stored = self._find(name)
        as_published = isinstance(weights, PublishedWeights) and weights.published.form == form
        return weights.rounded(stored, form, device) if as_published else None

    def _find(self, name: str) -> tuple[Weights, str]:
        """Return the source of a tensor, and the tensor's name there. A name that the layer's checkpoint
        lacks is looked for in that checkpoint, whose error names it.

        name: Name of the tensor in the one-layer model.
        """
        if name in self._places:
            return self._places[name]
        stored = next(
            (a + name.removeprefix(b) for a, b in self._renamed.items() if name.startswith(b)), name
        )
        return self._own, stored

    @cached_property
    def _places(self) -> dict[str, tuple[Weights, str]]:
        """The source of each tensor and its name there, by its name in the one-layer model."""
        found = {name: (self._base, name) for name in self._base.names() if name.startswith(self._shared)}
        for stored in self._own.names():
            for prefix, renamed in self._renamed.items():
                # The parts of DeepSeek's layout have names that begin with that of the block, too; under the
                # block's new prefix they are never asked for.
                if stored.startswith(prefix):
                    found[renamed + stored.removeprefix(prefix)] = (self._own, stored)
        return found
