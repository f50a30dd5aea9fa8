"""Pairs of a base and a head on disk, to load, to spoil and to ask."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specsot.members import Overrides
from specsot_drafter.heads import HeadRows
from specsot_drafter.heads.loading import load_head
from specsot_model.attention import RowSpan, plan_attention
from tests.models import Shape, write_base, write_head

Tensors = dict[str, torch.Tensor]
Edit = Callable[[Tensors], object]
BASE = Shape(layers=9)
SPECULATORS_1 = (("layers.0.", "transformer."), ("fc.", "fusion_fc."))
IDS = "eagle_aux_hidden_state_layer_ids"


def write_pair(folder: Path) -> Path:
    """A base and an EAGLE-3 head."""
    write_base(folder / "base", BASE)
    write_head(folder / "head", BASE)
    return folder


def turn_to_eagle_1(folder: Path) -> Path:
    """The same base and an EAGLE-1 head."""

    def turn(tensors: Tensors) -> None:
        kept = {name: tensors[name] for name in tensors if "mlp" in name or "o_proj" in name}
        kept |= {f"midlayer.self_attn.{n}_proj.weight": torch.randn(s, 64) * 0.1 for n, s in SIZES.items()}
        kept["midlayer.post_attention_layernorm.weight"] = torch.ones(64)
        tensors.clear()
        tensors |= {name.replace("midlayer.", "layers.0."): tensor for name, tensor in kept.items()}
        tensors |= {"fc.weight": torch.randn(64, 128) * 0.1, "fc.bias": torch.randn(64)}

    change(folder, turn)
    return folder


SIZES = {"q": 64, "k": 32, "v": 32}


def load(folder: Path, *overrides: Any, **more: Any) -> Any:
    theta, layers = overrides or (None, None)
    told = Overrides(theta, layers)
    return load_head(folder / "head", folder / "base", torch.float32, "cpu", **more, overrides=told)


def change(folder: Path, edit: Edit) -> None:
    file = folder / "head" / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


def configure(folder: Path, *without: str, **fields: object) -> None:
    file = folder / "head" / "config.json"
    known = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in known.items() if name not in without}))


@torch.inference_mode()
def answer(head: Any) -> torch.Tensor:
    """Log-probabilities behind a text of 9 rows, the same text for every head."""
    tokens = torch.arange(30, 39)
    features = torch.randn(9, head.hidden, generator=torch.Generator().manual_seed(5))
    kv = head.make_kv(1, 9)
    plan = plan_attention([RowSpan(9, 0, 9, (0,))], 9, head.group, "packed", head.dtype, "cpu")
    rows = torch.arange(9)
    return head.log_probs(head.forward(tokens, features, HeadRows(rows, rows, plan, kv)))


def drop(*names: str) -> Edit:
    return lambda tensors: [tensors.pop(name) for name in names]


def put(name: str, *shape: int) -> Edit:
    return lambda tensors: tensors.update({name: torch.zeros(*shape)})
