"""The base as a teacher: its features and targets for whole rows, without pages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.model.attention import AttentionPlan
from specsot.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Lesson:
    """A batch as the base sees it.

    states: [batch, length, taps * hidden], the tapped layers' inputs side by side.
    hidden: [batch, length, hidden] behind the last layer.
    """

    states: Tensor
    hidden: Tensor


class Teacher:
    """A base with all its layers, and where it is tapped."""

    def __init__(self, decoder: Decoder, taps: tuple[int, ...]) -> None:
        self.decoder, self.taps = decoder, taps
        self._side_by_side = _side_by_side(decoder, taps)

    @property
    def embedding(self) -> Tensor:
        return self.decoder.edges.embedding()

    def read(self, tokens: Tensor) -> Lesson:
        """tokens: [batch, length], padded behind: no row sees what comes after it."""
        batch, length = tokens.shape
        hidden, states = self._forward(tokens.reshape(-1), batch, length)
        # Copies: what was made in inference mode may not be kept for a gradient.
        return Lesson(states.clone().view(batch, length, -1), hidden.clone().view(batch, length, -1))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocabulary]."""
        return self.decoder.logits(hidden)

    @torch.inference_mode()
    def _forward(self, tokens: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
        decoder, device = self.decoder, self.decoder.device
        positions = torch.arange(length, device=device).repeat(batch)
        slots = torch.arange(batch * length, device=device)
        kv = decoder.make_kv(batch, length)
        hidden, states = decoder.forward(
            decoder.embed(tokens), positions, slots, causal_plan(batch), kv, self._side_by_side
        )
        assert states is not None, "every head taps at least one layer"
        return hidden, states


@torch.inference_mode()
def _side_by_side(decoder: Decoder, taps: tuple[int, ...]) -> dict[int, Tensor]:
    """For each tap the matrix that puts its state into a place of its own: their sum is all of them."""
    hidden = decoder.config.hidden
    whole = torch.eye(len(taps) * hidden, dtype=decoder.dtype, device=decoder.device)
    return {tap: part.contiguous() for tap, part in zip(taps, whole.split(hidden, 1))}


def causal_plan(batch: int) -> AttentionPlan:
    """Rows are `batch` whole sequences, one behind the other, each over a page that it fills."""
    return AttentionPlan((), (), None, None, partial(_causal, batch=batch))


def next_plan(lengths: Tensor, columns: int) -> AttentionPlan:
    """One row a sequence, which sees the first `lengths` [batch] rows of its page: `columns` at most."""
    seen = torch.arange(columns, device=lengths.device) < lengths[:, None]
    return AttentionPlan((), (), None, None, partial(_next, seen=seen[:, None, None]))


def _causal(q: Tensor, kv_layer: Tensor, batch: int) -> Tensor:
    rows, kv_heads, group, dim = q.shape
    keys, values = (part[:batch, :, : rows // batch] for part in kv_layer)
    queries = q.reshape(batch, -1, kv_heads * group, dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=1.0, enable_gqa=True)
    return out.transpose(1, 2).reshape(rows, -1)


def _next(q: Tensor, kv_layer: Tensor, seen: Tensor) -> Tensor:
    """A KV head's queries are rows of one product: they see the same.

    Spelled out, since torch's own may build a plan for every new number of columns, which takes longer.
    """
    batch, columns = q.shape[0], seen.shape[-1]
    keys, values = (part[:batch, :, :columns] for part in kv_layer)
    scores = (q @ keys.transpose(-1, -2)).float().masked_fill(~seen, -torch.inf)
    return (torch.softmax(scores, -1).to(q.dtype) @ values).reshape(batch, -1)
