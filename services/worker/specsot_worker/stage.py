"""A layer range at work: applies a frame's operations to its KV and runs its rows.

Refuses to know what the rows mean: tokens are embedded on the first stage and judged on the last.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from specsot.arrange import Arrangement, arrange
from specsot.errors import WireError
from specsot.frames import Frame, tokens_of
from specsot.members import Layout, Range
from specsot.model.attention import AttentionPlan, Span, plan_attention
from specsot.model.decoder import Decoder
from specsot.pages import PageTable


class Stage:
    """One layer range with its pages. `run` takes frames strictly in order."""

    def __init__(self, decoder: Decoder, pages: int, page_rows: int, layout: Layout = "batched") -> None:
        self._decoder = decoder
        self._layout: Layout = layout
        self._table = PageTable(pages, page_rows)
        self._kv = decoder.make_kv(pages, page_rows)
        self._taps: dict[int, torch.Tensor] = {}

    @property
    def table(self) -> PageTable:
        return self._table

    @property
    def layers(self) -> Range:
        return self._decoder.layers

    def tap(self, layer: int, weight: torch.Tensor) -> None:
        """Fuse the input of `layer` through `weight` [Hd, H] into every frame from now on."""
        self._taps[layer] = weight.to(self._decoder.device, self._decoder.dtype)

    @torch.inference_mode()
    def run(self, frame: Frame) -> Frame:
        """Apply the header, run the rows; returns the frame with this stage's hidden and fused rows.

        Raises WireError when the rows that came do not match the header.
        """
        begun = time.perf_counter()
        arrangement = arrange(self._table, frame)
        self._move(arrangement)
        if not arrangement.slots:
            self._wipe(arrangement)
            return self._leave(frame, None, None, begun)
        hidden, fused = self._decoder.forward(
            self._enter(frame, len(arrangement.slots)),
            torch.tensor(arrangement.positions, device=self._decoder.device),
            torch.tensor(arrangement.slots, device=self._decoder.device),
            self._plan(arrangement),
            self._kv,
            self._taps,
            frame.fused,
        )
        self._wipe(arrangement)
        return self._leave(frame, hidden, fused, begun)

    def _leave(
        self, frame: Frame, hidden: torch.Tensor | None, fused: torch.Tensor | None, begun: float
    ) -> Frame:
        seconds = (*frame.seconds, time.perf_counter() - begun)
        return replace(frame, hidden=hidden, fused=fused, seconds=seconds)

    def _enter(self, frame: Frame, rows: int) -> torch.Tensor:
        """The rows at this stage's door: embedded tokens on the first stage, else what came."""
        if self._decoder.layers.first == 0:
            tokens = [token for segment in frame.segments for token in tokens_of(segment)]
            return self._decoder.embed(torch.tensor(tokens, device=self._decoder.device))
        hidden = frame.hidden
        if hidden is None or tuple(hidden.shape) != (rows, self._decoder.config.hidden):
            shape = None if hidden is None else tuple(hidden.shape)
            raise WireError(f"frame {frame.number} has {rows} rows but hidden rows of shape {shape}")
        return hidden.to(self._decoder.device, self._decoder.dtype)

    def _move(self, arrangement: Arrangement) -> None:
        for copy in arrangement.copies:
            self._kv.copy_page(copy.source, copy.target, copy.rows)
        if arrangement.moves:
            sources, targets = zip(*arrangement.moves)
            device = self._decoder.device
            self._kv.move(torch.tensor(sources, device=device), torch.tensor(targets, device=device))

    def _wipe(self, arrangement: Arrangement) -> None:
        """Last: the closing frame itself may still have written there."""
        for page in arrangement.freed:
            self._kv.clear_page(page)

    def _plan(self, arrangement: Arrangement) -> AttentionPlan:
        spans = [
            Span(place.rows, place.base, place.rows, place.pages, place.visible)
            for place in arrangement.places
        ]
        config = self._decoder.config
        groups = config.heads // config.kv_heads
        return plan_attention(
            spans,
            self._table.page_rows,
            groups,
            self._layout,
            self._decoder.dtype,
            self._decoder.device,
        )
