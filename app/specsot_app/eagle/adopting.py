"""A Transformers model in memory as a `Decoder`: its own tensors, shared wherever no conversion is needed.

Refuses to know drafts and generation. Nothing is written to the model or to disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specsot.errors import ModelError
from specsot.members import Range
from specsot.model.config import ModelConfig, make_config
from specsot.model.decoder import Decoder
from specsot.model.weights import HeldWeights


@torch.inference_mode()
def decoder_from_transformers(model: Any) -> Decoder:
    """All layers of a causal language model of a supported family, in its dtype, on its device.

    Embeddings, norms and single projections are the model's own storage; projections that are fused (and
    on CPUs all that are packed) are copies. Raises ModelError for what is not supported.
    """
    config = config_of(model)
    weights = HeldWeights(_on_one_device(_published(model), model), _name(model))
    return Decoder(config, weights, Range(0, config.layers), model.dtype, torch.device(model.device))


def config_of(model: Any) -> ModelConfig:
    """What its config.json would say."""
    generation = getattr(model, "generation_config", None)
    said = generation.to_dict() if generation is not None else {}
    return make_config(model.config.to_dict(), said, Path(_name(model)))


def _published(model: Any) -> Mapping[str, Tensor]:
    """Tensors by the names under which such models are published; some are held under others."""
    held: dict[str, Tensor] = model.state_dict()
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # older ones hold them under their published names
        return held
    return revert_weight_conversion(model, held)


def _on_one_device(held: Mapping[str, Tensor], model: Any) -> Mapping[str, Tensor]:
    devices = sorted({str(tensor.device) for tensor in held.values()})
    if len(devices) > 1:
        raise ModelError(f"{_name(model)} is spread over {', '.join(devices)}; it must be on one device")
    return held


def _name(model: Any) -> str:
    return type(model).__name__
