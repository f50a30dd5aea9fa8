"""An MTP layer in training, for a base model whose checkpoint has none.

The layer has Qwen's published names (`specsot.checkpoint.mtp`). It is written to a directory of its own, with
the config of its base model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specsot.checkpoint.config import ModelConfig
from specsot.checkpoint.fields import read_json
from specsot.checkpoint.rope import Rope
from specsot.errors import InvalidRequest
from specsot_lab.train.head import (
    HeadSizes,
    OrdinaryLayer,
    RmsNorm,
    StepKV,
    initialise_small,
    write_directory,
)
from specsot_model.weights import Weights


class LearningMtp(nn.Module):
    """An MTP layer in training, whose parameters have their published names without the prefix "mtp.".

    The layer reads and returns the base model's hidden states after the final norm. It has the attention and
    the MLP of the base model's layers. The base model's embedding, final norm and lm_head are not learned.

    lm_head: [num_ids, hidden] rows of the base model's lm_head. They move with the layer and are in no file.
    base_norm: [hidden] weight of the base model's final norm, likewise.
    """

    lm_head: Tensor
    base_norm: Tensor

    def __init__(self, config: ModelConfig, lm_head: Tensor, base_norm: Tensor) -> None:
        """Make the layer. Its weights mean nothing until `initialise_mtp` sets them.

        config: Config of the base model, which `check_trainable` accepts.
        lm_head: [num_ids, hidden] rows of the base model's lm_head, of the token ids that are learned.
        base_norm: [hidden] weight of the base model's final norm.
        """
        super().__init__()
        self.sizes = mtp_sizes(config, len(lm_head))
        hidden, eps = self.sizes.hidden, self.sizes.eps
        self.pre_fc_norm_embedding = RmsNorm(hidden, eps)
        self.pre_fc_norm_hidden = RmsNorm(hidden, eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([OrdinaryLayer(self.sizes, config.qkv_bias, config.qk_norm)])
        self.norm = RmsNorm(hidden, eps)
        # Tensors that were made in inference mode cannot be saved for a gradient; their copies can.
        self.register_buffer("lm_head", lm_head.clone(), persistent=False)
        self.register_buffer("base_norm", base_norm.float().clone(), persistent=False)

    def features(self, states: Tensor) -> Tensor:
        """Return the base model's hidden states after its final norm, [.., hidden].

        states: [.., hidden] the output of the base model's last layer.
        """
        return F.rms_norm(states, self.base_norm.shape, self.base_norm, self.sizes.eps)

    def empty_kv(self) -> list[StepKV]:
        """Return an empty `StepKV` for the layer, with which the steps of a batch begin."""
        return [StepKV()]

    def mask_inputs(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens and features that a step after the first one reads: unchanged.

        tokens: [batch, length] token ids.
        features: [batch, length, hidden] outputs of the step before.
        """
        return tokens, features

    def forward_step(self, embeddings: Tensor, features: Tensor, kv_by_layer: list[StepKV]) -> Tensor:
        """Compute one step of the training-time test for all rows, and return the features that follow,
        [batch, length, hidden].

        embeddings: [batch, length, hidden] entries of the base model's embedding table.
        features: [batch, length, hidden] features that the step reads.
        kv_by_layer: Keys and values of the earlier steps. Those of this step are appended.
        """
        inputs = torch.cat((self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(features)), -1)
        return self.norm(self.layers[0](self.fc(inputs), kv_by_layer[0]))

    def logits(self, outputs: Tensor) -> Tensor:
        """Return logits [.., num_ids] by the base model's lm_head. If that is in bf16, autocast must be
        enabled.

        outputs: [.., hidden] features that `forward_step` returned.
        """
        return F.linear(outputs, self.lm_head)


def mtp_sizes(config: ModelConfig, num_ids: int) -> HeadSizes:
    """Return the sizes of an MTP layer, which are those of its base model.

    config: Config of the base model.
    num_ids: Number of token ids that are learned.
    """
    return HeadSizes(
        hidden=config.hidden,
        base_hidden=config.hidden,
        states=config.hidden,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate,
        vocab=num_ids,
        theta=config.rope.theta,
        eps=config.eps,
        shares_lm_head=True,
    )


def check_trainable(config: ModelConfig) -> None:
    """Raise InvalidRequest unless an MTP layer can be trained for a base model: its layers must be those of
    Llama, Qwen2 or Qwen3, with rotary positions that are not scaled.

    config: Config of the base model.
    """
    known = config.model_type in ("llama", "qwen2", "qwen3")
    biased = config.out_bias or config.mlp_bias
    if not known or biased or config.activation != "silu" or config.rope != Rope(config.rope.theta):
        raise InvalidRequest(
            "an MTP layer is trained for Llama, Qwen2 and Qwen3 without scaled rotary positions and without "
            f"biases after attention; the base is {config.model_type}",
            field="kind",
        )


@torch.no_grad()
def initialise_mtp(layer: LearningMtp, base: Weights, config: ModelConfig, seed: int) -> None:
    """Set the first weights: the block is the base model's last layer, the last norm is the base model's, and
    `fc` passes the features on, with a little noise of both inputs.

    layer: The MTP layer.
    base: Tensors of the base model.
    config: Config of the base model.
    seed: Seed of the noise.
    """
    initialise_small(layer, layer.norm, layer.base_norm, seed)
    hidden = config.hidden
    layer.fc.weight[:, hidden:] += torch.eye(hidden)
    prefix = config.names.layer.format(config.layers - 1)
    block = layer.layers[0]
    tensors = {name: base.tensor(f"{prefix}.{name}", torch.float32, "cpu") for name in block.state_dict()}
    block.load_state_dict(tensors)


def write_mtp(directory: Path, layer: LearningMtp, base: Path, dtype: torch.dtype) -> None:
    """Write config.json and model.safetensors of an MTP layer, each whole or not at all.

    directory: Directory of the layer; it is created if missing.
    layer: The layer.
    base: Directory of the base model, whose config is copied.
    dtype: Data type of the weights in the file.
    """
    fields = {
        name: value
        for name, value in read_json(base / "config.json").items()
        if name != "quantization_config"
    }
    weights: Mapping[str, Tensor] = {f"mtp.{name}": tensor for name, tensor in layer.state_dict().items()}
    config = fields | {"mtp_num_hidden_layers": 1, "torch_dtype": str(dtype).removeprefix("torch.")}
    write_directory(directory, weights, config, dtype)
