"""What runs frames as graphs do, but kernel by kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from specsot.core.device_verification import DeviceTrees
from specsot_model.decoder import Decoder
from specsot_model.kv import KVPages
from specsot_model.step_rows import FilledStep, Outputs, StepRows, device_tree_entry


class EagerSteps:
    """Runs steps kernel by kernel; see `specsot_worker.overlap.next_step.Steps`.

    launched: number of steps.
    unread: number of those that were launched with trees that the host had not read.
    accepts_device_tokens: whether the device may choose the tokens of further passes.
    """

    accepts_device_tokens = False

    def __init__(
        self,
        decoder: Decoder,
        kv: KVPages,
        taps: Mapping[int, Any] | None = None,
        accepts_device_trees: bool = False,
    ) -> None:
        self._decoder, self._kv, self._taps, self.accepts_device_trees = (
            decoder,
            kv,
            taps or {},
            accepts_device_trees,
        )
        self.launched = self.unread = 0

    def run(self, rows: StepRows) -> Outputs | None:
        return self.launch(self.fill(rows), rows.entry)

    def fill(self, rows: StepRows) -> FilledStep:
        return FilledStep(rows, (), ())

    def launch(self, filled: FilledStep, entry: Any) -> Outputs:
        self.launched += 1
        decoder, rows = self._decoder, filled.rows
        self._kv.move(rows.moves)
        plan, device = decoder.plan(rows.spans, self._kv.page_rows, "packed"), decoder.device
        entry, at, slots = (
            torch.as_tensor(each, device=device) for each in (entry, rows.positions, rows.slots)
        )
        return decoder.forward(decoder.embed(entry), at, slots, plan, self._kv, self._taps)

    def launch_device_trees(self, filled: FilledStep, roots: Sequence[int], trees: DeviceTrees) -> Outputs:
        self.unread += 1
        assert not any(span.sight for span in filled.rows.spans), "whose tables no device writes"
        rows, device, nodes = filled.rows, self._decoder.device, trees.nodes
        tokens, at = (torch.zeros(len(rows.positions), dtype=torch.int32, device=device) for _ in range(2))
        bits = tokens.new_ones((len(tokens), 1))
        tokens[:] = torch.from_numpy(device_tree_entry(len(tokens), roots, nodes))
        at[:] = torch.tensor(rows.positions)
        trees.choose(tokens, at, bits, self._decoder.config.vocab)
        seen = bits[:, 0].tolist()
        firsts = accumulate((one.rows for one in rows.spans), initial=0)
        spans = [
            replace(one, visible=tuple(seen[first : first + one.rows])) if one.rows == nodes else one
            for first, one in zip(firsts, rows.spans)
        ]
        told = replace(rows, positions=at.tolist(), spans=spans)
        return self.launch(replace(filled, rows=told), tokens)
