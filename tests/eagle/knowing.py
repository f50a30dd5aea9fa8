"""A head that knows what will be written, up to slips: trees get deep where random weights never agree.

Stands where an EAGLE head stands, behind the same interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specsot_bench.eagle.generation import PAGE_ROWS
from specsot_drafter.heads import DraftHead, HeadRows


class KnowingHead(DraftHead):
    """texts: what sequences will be, prompts included. Each has one KV page; its first rows say whose it is.

    An output is (page, position of the token after the one fed). Every `slip`-th position the likeliest
    token is a wrong one, and the right one comes second.
    """

    taps, width, hidden = (0,), 1, 2
    layers, kv_heads, head_dim, group = 1, 1, 2, 1
    dtype, device = torch.float32, torch.device("cpu")

    def __init__(
        self, texts: Mapping[int, Sequence[int]], base_hidden: int, vocabulary: int, slip: int
    ) -> None:
        self.texts, self.slip = texts, slip
        self._pages: dict[int, Sequence[int]] = {}
        self._base_hidden, self.draft_vocab, self.positions = base_hidden, vocabulary, 512

    def tap_slices(self) -> dict[int, Tensor]:
        return {0: torch.ones(1, self._base_hidden)}

    def features(self, fused: Tensor) -> Tensor:
        assert fused.shape[1] == self.width
        return fused.expand(-1, self.hidden)

    def forward(self, tokens: Tensor, features: Tensor, rows: HeadRows) -> Tensor:
        positions, slots, asked = rows.positions, rows.slots, rows.asked
        assert len(tokens) == len(features) == len(positions) == len(slots)
        pages = slots // PAGE_ROWS
        for page in set(pages[positions == 0].tolist()):
            self._pages[page] = self._owner(tokens[pages == page].tolist())
        outputs = torch.stack((pages, positions + 2), 1).float()
        return outputs if asked is None else outputs[asked]

    def _owner(self, prompt: list[int]) -> Sequence[int]:
        """A draft row is fed the token behind its own."""
        return next(text for text in self.texts.values() if list(text[1 : 1 + len(prompt)]) == prompt)

    def logits(self, outputs: Tensor) -> Tensor:
        logits = torch.zeros(len(outputs), self.draft_vocab)
        for row, (page, place) in enumerate(outputs.long().tolist()):
            text = self._pages[page]
            right = text[place] if place < len(text) else 0
            logits[row, right] = 4.0
            if place % self.slip == 0:
                logits[row, (right + 1) % self.draft_vocab] = 5.0
        return logits

    def to_target(self, ids: Tensor) -> Tensor:
        return ids
