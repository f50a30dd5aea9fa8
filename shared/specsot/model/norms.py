"""RMSNorm and LayerNorm, in as few passes as eager torch allows.

Refuses to know layers and where weights come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.model.config import ModelConfig
from specsot.model.weights import Fetch

AnyNorm = Callable[[Tensor], Tensor]  # [rows, ..., size] -> the same shape


class Norm:
    """RMSNorm: x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32 inside.

    torch has no fused one for the CPU; there ||x|| and hypot(||x||, sqrt(n eps)) do it in four short
    passes instead of seven.
    """

    __slots__ = ("_floor", "_scaled", "_shape", "eps", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[0]
        self.weight, self.eps, self._shape = weight, eps, (size,)
        self._scaled = weight.float() * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps))

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, self._shape, self.weight, self.eps)
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return wide.div(torch.hypot(length, self._floor)).mul_(self._scaled).to(x.dtype)


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension."""

    __slots__ = ("_bias", "_eps", "_shape", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        self._weight, self._bias, self._eps, self._shape = weight, bias, eps, tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._shape, self._weight, self._bias, self._eps)


def fetch_norm(fetch: Fetch, name: str, config: ModelConfig) -> AnyNorm:
    """The norm called `name` over the hidden width, of the model's kind."""
    weight = fetch(f"{name}.weight", (config.hidden,))
    if config.norm == "rms":
        return Norm(weight, config.eps)
    return LayerNorm(weight, fetch(f"{name}.bias", (config.hidden,)), config.eps)
