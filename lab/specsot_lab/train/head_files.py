"""A head's directory: written in the published EAGLE-3 layout, read back to go on from.

`specsot_drafter.heads.loading` reads what is written here; so do others.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specsot.errors import HeadMismatch, InvalidRequest
from specsot.model.config import ModelConfig
from specsot_drafter.heads.checkpoint import Checkpoint, check_supported, kind_of, read_offsets, read_shape
from specsot_drafter.heads.eagle import MIN_LAYERS, TAPS_FIELD, choose_taps
from specsot_lab.train.head import LAYER, NAMES, HeadSizes, LearningHead
from specsot_lab.train.settings import HeadPlan

EPS = 1e-6  # where a head's config names none, as in the loader
IGNORED = {"d2t", "t2d", "embed_tokens.weight"}


@dataclass(frozen=True, slots=True)
class HeadFormat:
    """What of a head is not learned. drafted: its vocabulary, ascending ids of the base."""

    sizes: HeadSizes
    taps: tuple[int, ...]
    drafted: Tensor


def frame_new(base: ModelConfig, drafted: Tensor, plan: HeadPlan) -> HeadFormat:
    """A new head, shaped like one layer of its base. Raises InvalidRequest for taps that cannot be."""
    chosen = plan.taps or _usual(base.layers)
    if chosen is None:
        raise InvalidRequest(
            f"the base has only {base.layers} layers: name those to tap with --aux-layers", field="aux_layers"
        )
    if (
        list(chosen) != sorted(set(chosen))
        or not 0 <= chosen[0] <= chosen[-1] <= base.layers
        or chosen[0] == 1
    ):
        # A published list that begins with 1 means outputs, so that taps from 1 on cannot be written.
        raise InvalidRequest(
            f"aux_layers must ascend within 0..{base.layers} and not begin with 1, got {list(chosen)}",
            field="aux_layers",
        )
    sizes = HeadSizes(
        base.hidden,
        len(chosen) * base.hidden,
        base.heads,
        base.kv_heads,
        base.head_dim,
        plan.intermediate or base.intermediate,
        len(drafted),
        base.rope.theta,
        base.eps,
    )
    return HeadFormat(sizes, chosen, drafted)


def frame_like(given: HeadFormat, drafted: Tensor, plan: HeadPlan) -> HeadFormat:
    """The same, with this vocabulary, and as wide as planned. Raises InvalidRequest for a narrower one."""
    had = given.sizes.intermediate
    width = plan.intermediate or had
    if width < had or plan.taps not in (None, given.taps):
        raise InvalidRequest(
            f"a head to start from keeps its taps {list(given.taps)} and its MLP's {had} at least",
            field="start",
        )
    return HeadFormat(replace(given.sizes, intermediate=width, vocab=len(drafted)), given.taps, drafted)


def write_head(
    directory: Path, head: LearningHead, frame: HeadFormat, base: ModelConfig, dtype: torch.dtype
) -> None:
    """config.json and model.safetensors, each whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    drafted = frame.drafted.cpu()
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in head.state_dict().items()
    }
    tensors["d2t"] = drafted - torch.arange(len(drafted))
    tensors["t2d"] = torch.isin(torch.arange(base.vocab), drafted)
    fresh = directory / "model.safetensors.new"
    save_file(tensors, fresh, metadata={"format": "pt"})
    fresh.replace(directory / "model.safetensors")
    fresh = directory / "config.json.new"
    fresh.write_text(json.dumps(_config(frame, base, dtype), indent=2) + "\n", encoding="utf-8")
    fresh.replace(directory / "config.json")


def _config(frame: HeadFormat, base: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    sizes = frame.sizes
    usual = {} if frame.taps == _usual(base.layers) else {TAPS_FIELD: list(frame.taps)}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": base.vocab,
        "draft_vocab_size": sizes.vocab,
        "max_position_embeddings": base.max_positions,
        "rms_norm_eps": sizes.eps,
        "rope_theta": sizes.theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    } | usual


def read_head(directory: Path, base: ModelConfig) -> tuple[HeadFormat, dict[str, Tensor]]:
    """A head to go on from, and its weights by their published names.

    Raises HeadMismatch for one that is built otherwise than those written here.
    """
    found = Checkpoint.open(directory)
    check_supported(found)
    shape = read_shape(found, base)
    fields = found.settings
    names = {name: name.replace(f"{LAYER}.", "layers.0.") for name in NAMES}
    plain = kind_of(found) == "eagle3" and set(found.names()) - IGNORED == set(names.values())
    if (
        not plain
        or shape.hidden != base.hidden
        or fields.get("rope_scaling")
        or found.flag("norm_before_residual")
    ):
        raise HeadMismatch(f"{directory}: only heads as `specsot train` writes them can be gone on from")
    taps = choose_taps(found, base.layers, None)
    offsets = read_offsets(found, shape, base, "cpu")
    drafted = torch.arange(shape.vocab) + (0 if offsets is None else offsets)
    sizes = HeadSizes(
        shape.hidden,
        len(taps) * base.hidden,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.intermediate,
        shape.vocab,
        float(fields.get("rope_theta", 10000.0)),
        float(fields.get("rms_norm_eps", EPS)),
    )
    tensors = {name: found.tensor(there, torch.float32, "cpu") for name, there in names.items()}
    return HeadFormat(sizes, taps, drafted), tensors


def _usual(layers: int) -> tuple[int, ...] | None:
    """The reference's taps, for bases that are deep enough."""
    return (2, layers // 2, layers - 3) if layers >= MIN_LAYERS else None
