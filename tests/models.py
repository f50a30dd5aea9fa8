"""Tiny random models on disk: a base in the Hugging Face layout, draft heads in the published ones.

Fixed seeds. The weights are wide enough apart that greedy text varies and near ties are rare.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from specsot.checkpoint.config import read_config
from specsot_drafter.heads.eagle import MIN_LAYERS, TAPS_FIELD
from specsot_lab.train import head as head_files
from specsot_lab.train.block import LearningBlockHead, block_format, write_block_head
from specsot_lab.train.head import LearningHead, initialise, initialise_small, new_format
from specsot_lab.train.settings import HeadPlan


@dataclass(frozen=True)
class Shape:
    """Of a tiny base model."""

    layers: int = 8
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    inner: int = 96
    vocabulary: int = 200
    positions: int = 512


# Half the time, where depth does not matter. A test of experts has few and small ones for the same reason.
SHALLOW = Shape(layers=4)


def write_base(directory: Path, shape: Shape = Shape(), seed: int = 1, poison: int | None = None) -> Path:
    """A Llama with random weights; tied embeddings, unless one token's embedding is `poison`ed."""
    draw = _draws(seed)
    width = shape.heads * shape.head_dim
    narrow = shape.kv_heads * shape.head_dim
    tensors = {"model.embed_tokens.weight": draw(shape.vocabulary, shape.hidden, scale=1.0)}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        tensors |= {
            at + "self_attn.q_proj.weight": draw(width, shape.hidden),
            at + "self_attn.k_proj.weight": draw(narrow, shape.hidden),
            at + "self_attn.v_proj.weight": draw(narrow, shape.hidden),
            at + "self_attn.o_proj.weight": draw(shape.hidden, width),
            at + "mlp.gate_proj.weight": draw(shape.inner, shape.hidden),
            at + "mlp.up_proj.weight": draw(shape.inner, shape.hidden),
            at + "mlp.down_proj.weight": draw(shape.hidden, shape.inner),
            at + "input_layernorm.weight": 1 + draw(shape.hidden, scale=0.1),
            at + "post_attention_layernorm.weight": 1 + draw(shape.hidden, scale=0.1),
        }
    tensors["model.norm.weight"] = 1 + draw(shape.hidden, scale=0.1)
    if poison is not None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.embed_tokens.weight"][poison] = float("nan")
    config = base_config(shape) | {"tie_word_embeddings": poison is None}
    return _write(directory, config, tensors)


def write_dflash(directory: Path, base: Path, causal: bool = False, seed: int = 4) -> Path:
    """A random DFlash head for this base."""
    config, plan = read_config(base), HeadPlan("dflash", layers=2, causal_head=causal, taps=(1, 2))
    head = LearningBlockHead(block_format(config, plan, depth=5, mask_id=config.vocab - 1))
    initialise_small(head, head.norm, None, seed)
    write_block_head(directory, head, config, torch.float32)
    return directory


def write_dspark(directory: Path, base: Path, kind: str = "vanilla", seed: int = 5) -> Path:
    """A random DSpark head for this base, in DeepSeek's layout: a random DFlash head, and a Markov head."""
    write_dflash(directory, base, seed=seed)
    draw, ids, rank = _draws(seed), read_config(base).vocab, 8
    tensors = load_file(directory / "model.safetensors")
    hidden = len(tensors["norm.weight"])
    tensors |= {f"markov_head.markov_w{one}.weight": draw(ids, rank, scale=1.0) for one in (1, 2)}
    shape = {"gated": (rank, hidden + rank), "rnn": (3 * rank, hidden + 2 * rank)}.get(kind)
    if shape:
        name = f"markov_head.{'gate' if kind == 'gated' else 'joint'}_proj"
        tensors |= {f"{name}.weight": draw(*shape), f"{name}.bias": draw(shape[0], scale=0.1)}
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["Qwen3DSparkModel"], "markov_rank": rank, "markov_head_type": kind}
    config |= config.pop("dflash_config")
    return _write(directory, config, tensors)


def write_p_eagle(directory: Path, base: Path, seed: int = 4, depth: int | None = None) -> Path:
    """A random P-EAGLE head for this base."""
    config, plan = read_config(base), HeadPlan("p-eagle", taps=(2, 3))
    drafted = torch.arange(0, config.vocab, 2)
    frame = replace(new_format(config, drafted, plan), layers=2, mask=config.vocab - 1, depth=depth)
    head = LearningHead(frame.sizes, frame.layers, frame.mask)
    initialise(head, _draws(seed)(config.vocab // 2, config.hidden, scale=1.0), None, seed)
    head_files.write_head(directory, head, frame, config, torch.float32)
    return directory


def write_head(directory: Path, shape: Shape = Shape(), drafts: int = 120, seed: int = 2) -> Path:
    """A random EAGLE-3 head for a base of this shape: as a drafter it is nearly always wrong."""
    draw = _draws(seed)
    hidden, width = shape.hidden, shape.heads * shape.head_dim
    narrow = shape.kv_heads * shape.head_dim
    kept = (
        torch.randperm(shape.vocabulary, generator=torch.Generator().manual_seed(seed))[:drafts].sort().values
    )
    tensors = {
        "fc.weight": draw(hidden, 3 * hidden),
        "midlayer.input_layernorm.weight": 1 + draw(hidden, scale=0.1),
        "midlayer.hidden_norm.weight": 1 + draw(hidden, scale=0.1),
        "midlayer.post_attention_layernorm.weight": 1 + draw(hidden, scale=0.1),
        "midlayer.self_attn.q_proj.weight": draw(width, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": draw(narrow, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": draw(narrow, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": draw(hidden, width),
        "midlayer.mlp.gate_proj.weight": draw(shape.inner, hidden),
        "midlayer.mlp.up_proj.weight": draw(shape.inner, hidden),
        "midlayer.mlp.down_proj.weight": draw(hidden, shape.inner),
        "norm.weight": 1 + draw(hidden, scale=0.1),
        "lm_head.weight": draw(drafts, hidden, scale=1.0),
        "d2t": kept - torch.arange(drafts),
        "t2d": torch.isin(torch.arange(shape.vocabulary), kept),
    }
    config = base_config(shape) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": drafts,
        "tie_word_embeddings": False,
    }
    if shape.layers < MIN_LAYERS:
        config[TAPS_FIELD] = [0, 2, 3]
    return _write(directory, config, tensors)


def base_config(shape: Shape) -> dict[str, object]:
    """config.json of a tiny Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def _draws(seed: int):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float | None = None) -> torch.Tensor:
        spread = shape[-1] ** -0.5 * 1.6 if scale is None else scale
        return torch.randn(*shape, generator=generator) * spread

    return draw


def _write(directory: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors"
    )
    return directory
