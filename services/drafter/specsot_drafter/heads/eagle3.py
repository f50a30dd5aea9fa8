"""EAGLE-3's head: one decoder layer over token embeddings and fused features of the base.

Refuses to know trees and sequences. Published layout (`midlayer.*`, `fc`, `norm`, `lm_head`, `d2t`);
shapes come from the tensors, since published configs are wrong about several of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.errors import HeadMismatch
from specsot.model.attention import AttentionPlan, attend
from specsot.model.config import ModelConfig, read_config, read_json, read_rope
from specsot.model.kv import KVPages
from specsot.model.linear import Linear
from specsot.model.mlp import gate
from specsot.model.norms import Norm
from specsot.model.rotary import Rotary, interleave, rotate
from specsot.model.weights import WeightFiles
from specsot_drafter.heads.shapes import HeadShape, fit_shape

EPS = 1e-6  # of the reference's config class, where a head's config names none


class Eagle3Head:
    """A head loaded against its base; see `DraftHead` for what the attributes mean."""

    layers = 1

    def __init__(
        self,
        shape: HeadShape,
        base: ModelConfig,
        files: WeightFiles,
        table: Tensor,
        settings: dict[str, Any],
        source: Path,
    ) -> None:
        """table: embeddings [V, hidden], whose dtype and device the whole head takes."""
        dtype, device = table.dtype, table.device

        def fetch(name: str) -> Tensor:
            return files.tensor(name, dtype, device)

        self.taps = (2, base.layers // 2, base.layers - 3)
        self.width = self.hidden = shape.hidden
        self.kv_heads, self.head_dim = shape.kv_heads, shape.head_dim
        self.group = shape.heads // shape.kv_heads
        self.draft_vocab, self.positions = shape.vocab, base.max_positions
        self.dtype, self.device = dtype, device
        self._shape, self._table = shape, table
        self._slices = tuple(part.contiguous() for part in fetch("fc.weight").chunk(3, dim=1))
        self._rotary = Rotary(
            read_rope(settings, source), shape.heads, shape.kv_heads, shape.head_dim, device
        )
        self._load_layer(fetch, float(settings.get("rms_norm_eps") or EPS))
        self._lm_head = Linear(fetch("lm_head.weight"))
        self._offsets = files.tensor("d2t", torch.long, device) if "d2t" in files else None

    def _load_layer(self, fetch: Any, eps: float) -> None:
        dim, attention, mlp = self.head_dim, "midlayer.self_attn", "midlayer.mlp"
        q, k = (interleave(fetch(f"{attention}.{name}.weight"), dim) for name in ("q_proj", "k_proj"))
        v = fetch(f"{attention}.v_proj.weight")
        self._qkv, self._kv = Linear(torch.cat((q, k, v))), Linear(torch.cat((k, v)))
        self._out = Linear(fetch(f"{attention}.o_proj.weight"))
        self._gate_up = Linear(
            torch.cat([fetch(f"{mlp}.{name}.weight") for name in ("gate_proj", "up_proj")])
        )
        self._down = Linear(fetch(f"{mlp}.down_proj.weight"))
        self._token_norm = Norm(fetch("midlayer.input_layernorm.weight"), eps)
        self._feature_norm = Norm(fetch("midlayer.hidden_norm.weight"), eps)
        self._mlp_norm = Norm(fetch("midlayer.post_attention_layernorm.weight"), eps)
        self._norm = Norm(fetch("norm.weight"), eps)

    @classmethod
    @torch.inference_mode()
    def load(
        cls,
        directory: Path,
        base_directory: Path,
        dtype: torch.dtype,
        device: torch.device | str,
        allow_pickle_bin: bool = False,
    ) -> Eagle3Head:
        """Read a head and fit it to its base; embeddings of its own win over the base's.

        Raises ModelError for either directory, HeadMismatch with both shapes where they do not fit.
        """
        source = directory / "config.json"
        settings, base = read_json(source), read_config(base_directory)
        files = WeightFiles(directory, allow_pickle_bin)
        shape = fit_shape(files, settings, base, directory)
        own = "embed_tokens.weight" in files
        borrowed = WeightFiles(base_directory), f"{base.names.embedding}.weight"
        tables, name = (files, "embed_tokens.weight") if own else borrowed
        table = tables.tensor(name, dtype, device)
        if tuple(table.shape) != (base.vocab, shape.hidden):
            raise HeadMismatch(
                f"{directory}: its embeddings must be [{base.vocab}, {shape.hidden}], "
                f"{name} is {list(table.shape)}"
            )
        return cls(shape, base, files, table, settings, source)

    @property
    def row_bytes(self) -> int:
        """KV and feature bytes of one position."""
        return (2 * self.kv_heads * self.head_dim + self.hidden) * self.dtype.itemsize

    def tap_slices(self) -> dict[int, Tensor]:
        """fc's three parts [width, base hidden]: fc(concat[l, m, h]) = W1 l + W2 m + W3 h."""
        return dict(zip(self.taps, self._slices))

    def features(self, fused: Tensor) -> Tensor:
        """The fused row is the feature: fc was applied where the taps are."""
        return fused

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        slots: Tensor,
        plan: AttentionPlan | None,
        kv: KVPages,
        asked: Tensor | None = None,
    ) -> Tensor:
        """The reference's layer: q, k, v read [normed embedding, normed feature]; the un-normed feature
        is the residual. Returns the un-normed output, which is the next feature. See `DraftHead`.
        """
        inputs = torch.cat(
            (self._token_norm(F.embedding(tokens, self._table)), self._feature_norm(features)), 1
        )
        if asked is not None and len(asked) < len(tokens):
            self._write(inputs, positions, slots, kv)
            inputs, features = inputs[asked], features[asked]
            positions, slots = positions[asked], slots[asked]
        if plan is None:
            return features
        x = features + self._out(attend(self._project(inputs, positions, slots, kv), kv.layers[0], plan))
        return x.add_(self._down(gate(self._gate_up(self._mlp_norm(x)))))

    def _project(self, inputs: Tensor, positions: Tensor, slots: Tensor, kv: KVPages) -> Tensor:
        """Queries [rows, kv_heads, group, head_dim]; keys and values go to their slots."""
        heads, pairs = self._shape.heads, self.kv_heads
        parts = self._qkv(inputs).view(inputs.shape[0], -1, self.head_dim)
        rotate(parts.narrow(1, 0, heads + pairs), self._rotary.table(positions))
        kv.write(0, slots, parts.narrow(1, heads, 2 * pairs).unflatten(1, (2, pairs)))
        return parts.narrow(1, 0, heads).unflatten(1, (pairs, self.group))

    def _write(self, inputs: Tensor, positions: Tensor, slots: Tensor, kv: KVPages) -> None:
        """Keys and values alone: a row whose output nobody asks for needs no more."""
        pairs = self.kv_heads
        parts = self._kv(inputs).view(inputs.shape[0], -1, self.head_dim)
        rotate(parts.narrow(1, 0, pairs), self._rotary.table(positions)[:, -pairs:])
        kv.write(0, slots, parts.unflatten(1, (2, pairs)))

    def log_probs(self, outputs: Tensor) -> Tensor:
        """[rows, hidden] to [rows, draft vocabulary], over the draft vocabulary alone, in fp32."""
        return torch.log_softmax(self.logits(outputs).float(), dim=-1)

    def logits(self, outputs: Tensor) -> Tensor:
        """[rows, hidden] to [rows, draft vocabulary]."""
        return self._lm_head(self._norm(outputs))

    def to_target(self, ids: Tensor) -> Tensor:
        """d2t holds offsets: base id = draft id + d2t[draft id]."""
        return ids if self._offsets is None else ids + self._offsets[ids]
