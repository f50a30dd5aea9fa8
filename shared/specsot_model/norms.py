"""The norms of a model's layers, over the last dimension."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


class Norm:
    """RMSNorm over the last dimension: x / sqrt(mean(x^2) + eps) * weight, computed in fp32.

    weight: [size], the factor of each number.
    eps: Added to the mean square.

    torch has no fused RMSNorm for the CPU. There, the norm is computed as
    x / hypot(||x||, sqrt(n * eps)) * (weight * sqrt(n)), in four short passes instead of seven.
    """

    __slots__ = ("_floor", "_scaled", "_shape", "eps", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        """Keep the weight, and prepare what the CPU's form of the norm needs.

        weight: [size], the factor of each number.
        eps: Added to the mean square.
        """
        size = weight.shape[0]
        self.weight = weight
        self.eps = eps
        self._shape = (size,)
        self._scaled = weight.float() * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps))

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalized x, in the shape and type of x.

        On a GPU, PyTorch's own RMSNorm runs if the weight is fp32 or has the type of x.

        x: [..., size], in floats.
        """
        if x.is_cuda and self.weight.dtype in (x.dtype, torch.float32):
            return F.rms_norm(x.to(self.weight.dtype), self._shape, self.weight, self.eps).to(x.dtype)
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return wide.div(torch.hypot(length, self._floor)).mul_(self._scaled).to(x.dtype)
