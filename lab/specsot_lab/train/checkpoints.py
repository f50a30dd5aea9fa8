"""A run's state on disk: weights, the optimiser's memory, and how far it has come; never a pickle.

A run that goes on from here ends with the weights of an unbroken one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import AdamW

from specsot.errors import ModelError

FILE = "state.safetensors"
MEMORY = ("exp_avg", "exp_avg_sq", "step")  # of AdamW, for every parameter


def save(folder: Path, head: nn.Module, optimiser: AdamW, step: int, asked: Mapping[str, Any]) -> None:
    """One file, whole or not at all. asked: what the run was asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, parameter in head.named_parameters():
        tensors[f"weights.{name}"] = parameter.detach().cpu().contiguous()
        for kind in MEMORY:
            tensors[f"{kind}.{name}"] = optimiser.state[parameter][kind].detach().cpu().contiguous()
    fresh = folder / f"{FILE}.new"
    save_file(tensors, fresh, metadata={"step": str(step), "asked": json.dumps(asked, sort_keys=True)})
    fresh.replace(folder / FILE)


def restore(folder: Path, head: nn.Module, optimiser: AdamW, asked: Mapping[str, Any]) -> int:
    """Steps done; 0 where there is no checkpoint. Raises ModelError for one of another run, or damaged."""
    file = folder / FILE
    if not file.exists():
        return 0
    try:
        return _restore(file, head, optimiser, asked)
    except SafetensorError as error:
        raise ModelError(
            f"{file}: not a whole checkpoint ({error}); name another --output, or remove it"
        ) from None


@torch.no_grad()
def _restore(file: Path, head: nn.Module, optimiser: AdamW, asked: Mapping[str, Any]) -> int:
    with safe_open(file, framework="pt") as held:
        about: Mapping[str, str] = held.metadata() or {}
        if about.get("asked") != json.dumps(asked, sort_keys=True):
            raise ModelError(
                f"{file} is of a run that was asked for something else; name another --output, or remove it"
            )
        for name, parameter in head.named_parameters():
            parameter.copy_(held.get_tensor(f"weights.{name}"))
            optimiser.state[parameter] = {
                kind: _place(held.get_tensor(f"{kind}.{name}"), kind, parameter) for kind in MEMORY
            }
    return int(about["step"])


def _place(tensor: Tensor, kind: str, parameter: Tensor) -> Tensor:
    """AdamW counts its steps on the CPU, unless fused."""
    return tensor if kind == "step" else tensor.to(parameter.device)
