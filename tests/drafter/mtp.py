"""Tiny bases whose checkpoints hold an MTP layer, and what that layer computes by other code than ours.

The layer of GLM and of DeepSeek V3 is Transformers' own `MtpModel`, over its model of the base. Transformers
ignore the layer of Qwen's models, so that one is written out here in plain torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from specsot.checkpoint.config import read_config
from tests.model.tiny import write_model

LAYERS = 3  # of the base
WIDE = {"initializer_range": 0.3}
KINDS: dict[str, dict[str, Any]] = {
    "glm4_moe": {"use_qk_norm": True, "routed_scaling_factor": 1.5, "n_shared_experts": 1},
    "deepseek_v3": {"initializer_range": 0.3},
    "qwen3_next": {},
    "qwen3_5_text": {"tie_word_embeddings": True},
    "qwen3_5_moe_text": {},
    "qwen2": {"tie_word_embeddings": True},
}
# Computes the layer's outputs [rows, hidden] of token ids [rows], features [rows, hidden], positions [rows]
# and which rows each row sees, bool [rows, rows].
Layer = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Pair:
    """A base on disk with an MTP layer in its checkpoint."""

    directory: Path
    base: torch.nn.Module
    layer: Layer

    @torch.inference_mode()
    def features(self, tokens: list[int]) -> Tensor:
        """What the layer reads of the base: its last hidden states after the final norm."""
        return self.base.model(torch.tensor([tokens])).last_hidden_state[0]

    @torch.inference_mode()
    def logits(self, outputs: Tensor) -> Tensor:
        return self.base.lm_head(outputs)

    @torch.inference_mode()
    def outputs(self, tokens: list[int]) -> Tensor:
        """The layer's outputs of a whole text: row p reads the base at p and token p + 1."""
        rows = torch.arange(len(tokens) - 1)
        seen = rows[:, None] >= rows
        return self.layer(torch.tensor(tokens[1:]), self.features(tokens[:-1]), rows, seen)

    @torch.inference_mode()
    def along(self, tokens: list[int], path: list[int]) -> Tensor:
        """Log-probabilities [len(path), vocabulary] after a text, and after each token but the last of a path
        of drafts, for which the layer reads its own outputs."""
        text, features = tokens[1:], self.features(tokens[:-1])
        found = []
        for draft in path:
            rows = torch.arange(len(text))
            outputs = self.layer(torch.tensor(text), features, rows, rows[:, None] >= rows)
            found.append(self.logits(outputs[-1]).log_softmax(-1))
            text, features = [*text, draft], torch.cat((features, outputs[-1:]))
        return torch.stack(found)


def write_pair(directory: Path, kind: str, **changes: Any) -> Pair:
    """A random base of this kind with a random MTP layer, in the family's published layout."""
    base = write_model(directory, kind, **{"num_hidden_layers": LAYERS, **KINDS[kind], **changes})
    torch.manual_seed(11)
    if kind in ("glm4_moe", "deepseek_v3"):
        tensors, layer = _of_deepseek(base)
    else:
        tensors, layer = _qwen(base, json.loads((directory / "config.json").read_text()))
    save_file(load_file(directory / "model.safetensors") | tensors, directory / "model.safetensors")
    assert read_config(directory).layers == LAYERS
    return Pair(directory, base, layer)


def split_pair(pair: Pair, alone: Path) -> Path:
    """Move the layer into a directory of its own, as `mtp-NAME.gguf` and `specsot train` have it."""
    stored = load_file(pair.directory / "model.safetensors")
    own = {name: tensor for name, tensor in stored.items() if name.startswith(("mtp.", "model.layers.3."))}
    save_file({n: t for n, t in stored.items() if n not in own}, pair.directory / "model.safetensors")
    alone.mkdir()
    (alone / "config.json").write_text((pair.directory / "config.json").read_text())
    save_file(own, alone / "model.safetensors")
    return alone


def _of_deepseek(base: torch.nn.Module) -> tuple[dict[str, Tensor], Layer]:
    """The tensors of a random layer in DeepSeek's layout, and Transformers' forward of it."""
    mtp = MtpModel(base, 1).eval()
    own = dict(mtp.layers[0].named_parameters()) | dict(mtp.layers[0].named_buffers())
    for name, tensor in own.items():
        is_norm = name.endswith("norm.weight")
        torch.nn.init.normal_(tensor, 1.0 if is_norm else 0.0, 0.2 if is_norm else 0.3)
    tensors = dict[str, Tensor]()
    for name, tensor in own.items():
        published = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        tensors |= _experts_apart(f"model.layers.{LAYERS}.{published}", tensor.detach())

    def forward(tokens: Tensor, features: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        embedded = mtp.embed_tokens(tokens)[None]
        rotary = mtp.rotary_emb(embedded, position_ids=positions[None])
        mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]
        return mtp.layers[0](embedded, features[None], rotary, mask, positions[None], None)[0]

    return tensors, forward


def _experts_apart(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor as checkpoints hold it: one of all experts becomes one or two for each."""
    prefix, _, part = name.rpartition(".experts.")
    if part not in ("gate_up_proj", "down_proj"):
        return {name: tensor.clone()}
    names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
    return {
        f"{prefix}.experts.{expert}.{one}.weight": half.clone()
        for expert, weight in enumerate(tensor)
        for one, half in zip(names, weight.chunk(len(names)))
    }


def _qwen(base: torch.nn.Module, config: dict[str, Any]) -> tuple[dict[str, Tensor], Layer]:
    """The tensors of a random layer in Qwen's layout, and its formulas in plain torch.

    Qwen3-Next and Qwen3.5 gate each query head, rotate a quarter of a head, and have norms of weight 1 + w. A
    layer for Qwen2, as `specsot train` makes it, has Qwen2's biases and plain norms.
    """
    gated = config["model_type"] != "qwen2"
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, pairs = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // heads
    experts, chosen = config.get("num_experts", 0), config.get("num_experts_per_tok", 0)
    rope = config.get("rope_parameters") or {}
    turned = int(dim * rope.get("partial_rotary_factor", 1.0))
    eps, theta = config["rms_norm_eps"], rope.get("rope_theta", 10000.0)
    at, sizes = "mtp.layers.0", dict[str, tuple[int, ...]]()
    sizes["mtp.fc"] = (hidden, 2 * hidden)
    sizes[f"{at}.self_attn.q_proj"] = (heads * dim * (2 if gated else 1), hidden)
    sizes |= {f"{at}.self_attn.{one}_proj": (pairs * dim, hidden) for one in "kv"}
    sizes[f"{at}.self_attn.o_proj"] = (hidden, heads * dim)
    mlps = {"": inner}
    if experts:
        sizes[f"{at}.mlp.gate"] = (experts, hidden)
        sizes[f"{at}.mlp.shared_expert_gate"] = (1, hidden)
        mlps = {f"experts.{n}.": config["moe_intermediate_size"] for n in range(experts)}
        mlps["shared_expert."] = config["shared_expert_intermediate_size"]
    for mlp, width in mlps.items():
        sizes |= {f"{at}.mlp.{mlp}{one}_proj": (width, hidden) for one in ("gate", "up")}
        sizes[f"{at}.mlp.{mlp}down_proj"] = (hidden, width)
    norms = dict.fromkeys(("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"), hidden)
    norms |= {f"{at}.input_layernorm": hidden, f"{at}.post_attention_layernorm": hidden}
    if gated:
        norms |= {f"{at}.self_attn.{one}_norm": dim for one in "qk"}
    w = {f"{name}.weight": torch.randn(size) * 0.3 for name, size in sizes.items()}
    offset = 1.0 if gated else 0.0
    w |= {f"{name}.weight": torch.randn(size) * 0.2 + 1 - offset for name, size in norms.items()}
    if not gated:
        w |= {
            f"{at}.self_attn.{one}_proj.bias": torch.randn(len(w[f"{at}.self_attn.{one}_proj.weight"]))
            for one in "qkv"
        }

    def norm(name: str, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * (w[f"{name}.weight"] + offset)

    def product(name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def turn(x: Tensor, positions: Tensor) -> Tensor:
        frequencies = theta ** (-torch.arange(0, turned, 2) / turned)
        angles = (positions[:, None] * frequencies)[:, None]
        a, b = x[..., : turned // 2], x[..., turned // 2 : turned]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., turned:]), -1)

    def mlp(name: str, x: Tensor) -> Tensor:
        return product(
            f"{name}down_proj", F.silu(product(f"{name}gate_proj", x)) * product(f"{name}up_proj", x)
        )

    def mixture(x: Tensor) -> Tensor:
        weights, ids = product(f"{at}.mlp.gate", x).softmax(-1).topk(chosen, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.sigmoid(product(f"{at}.mlp.shared_expert_gate", x)) * mlp(f"{at}.mlp.shared_expert.", x)
        for row in range(len(x)):
            for weight, expert in zip(weights[row], ids[row]):
                out[row] += weight * mlp(f"{at}.mlp.experts.{expert}.", x[row])
        return out

    def attention(x: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        q = product(f"{at}.self_attn.q_proj", x).view(len(x), heads, -1)
        k, v = (product(f"{at}.self_attn.{one}_proj", x).view(len(x), pairs, dim) for one in "kv")
        gate = torch.sigmoid(q[..., dim:]) if gated else torch.ones(())
        q = q[..., :dim]
        if gated:
            q, k = norm(f"{at}.self_attn.q_norm", q), norm(f"{at}.self_attn.k_norm", k)
        q, k = turn(q, positions), turn(k, positions)
        k, v = (one.repeat_interleave(heads // pairs, 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, v) * gate
        return product(f"{at}.self_attn.o_proj", out.flatten(1))

    def forward(tokens: Tensor, features: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        embedded = norm("mtp.pre_fc_norm_embedding", base.model.embed_tokens(tokens))
        z = product("mtp.fc", torch.cat((embedded, norm("mtp.pre_fc_norm_hidden", features)), 1))
        z = z + attention(norm(f"{at}.input_layernorm", z), positions, seen)
        z = z + (mixture if experts else lambda x: mlp(f"{at}.mlp.", x))(
            norm(f"{at}.post_attention_layernorm", z)
        )
        return norm("mtp.norm", z)

    return w, forward
