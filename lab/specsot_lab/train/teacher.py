"""The base as a head's teacher: the states it taps, and what it would write, for whole batches.

Refuses to know heads and where texts come from. The forward is the product's own decoder with its taps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specsot.model.decoder import Decoder
from specsot_lab.train.dense import causal_plan


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
