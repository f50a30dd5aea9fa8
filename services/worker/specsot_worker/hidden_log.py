"""Logs the hidden states that a stage passes on, so that the next stage's KV can be computed again if it is
lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specsot.core.frames import Frame
from specsot.errors import WireError
from specsot_model.core.kv_plan import KvPlan
from specsot_model.kv import indices, untouched_zeros


class HiddenLog:
    """Log of the hidden states after a stage's last layer: one row for each KV slot of the stage.

    The log follows the KV pages: forks copy its rows, and the rows of accepted nodes move down as their KV
    does. So whatever has final KV has a final hidden state in the same slot, and the log is as long as the
    KV. On a CPU, memory is used only for slots that were written to.
    """

    def __init__(
        self, pages: int, page_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Start with nothing logged.

        pages: Number of KV pages of the stage.
        page_rows: Number of KV slots of a page.
        hidden_size: Number of elements of a hidden state.
        dtype: Type in which the stage passes hidden states on.
        device: Device of the stage.
        """
        self._page_rows = page_rows
        self._rows = untouched_zeros((pages * page_rows, hidden_size), dtype, device)
        # Ids of open sequences some of whose hidden states were not logged.
        self._incomplete = set[int]()

    def record(self, frame: Frame, plan: KvPlan, hidden: Tensor | None) -> None:
        """Log the hidden states of a frame that the stage has run, after the copies and moves of the frame.

        frame: The frame, of which the openings and closings are read.
        plan: What the frame did to the KV pages.
        hidden: [num_tokens, hidden_size], which the stage passes on. None: nothing is logged.

        A fork of a sequence whose log is incomplete is incomplete, too.
        """
        for opening in frame.openings:
            if opening.fork and opening.fork.sequence in self._incomplete:
                self._incomplete.add(opening.sequence)
        self._incomplete.difference_update(frame.closings)
        for copy in plan.copies:
            source, target = copy.source * self._page_rows, copy.target * self._page_rows
            self._rows[target : target + copy.rows] = self._rows[source : source + copy.rows]
        if plan.moves:
            sources, targets = (indices(slots, self._rows.device) for slots in zip(*plan.moves))
            self._rows[targets] = self._rows[sources]
        if hidden is not None:
            self._rows[indices(plan.slots, self._rows.device)] = hidden.to(self._rows.dtype)

    def rows_at(self, sequence: int, slots: Sequence[int]) -> Tensor | None:
        """Return a copy of a sequence's rows on the host, [num_slots, hidden_size]. None if its log is
        incomplete.

        sequence: Id of an open sequence.
        slots: The KV slots of some of its positions.
        """
        if sequence in self._incomplete:
            return None
        return self._rows[indices(slots, self._rows.device)].cpu()

    def put_rows_at(self, sequence: int, slots: Sequence[int], rows: Tensor | None) -> None:
        """Log rows of a sequence that another stage has logged before.

        sequence: Id of an open sequence.
        slots: The KV slots of some of its positions.
        rows: [num_slots, hidden_size], as `rows_at` has returned them. None: they are not known, so the log
            of this sequence is incomplete from now on.

        Raises WireError if the rows do not fit this log.
        """
        if rows is None:
            self._incomplete.add(sequence)
            return
        if rows.shape[1:] != self._rows.shape[1:] or rows.dtype != self._rows.dtype:
            raise WireError(
                f"hidden states of {rows.shape[-1]} elements in {rows.dtype} do not fit this log, which has"
                f" {self._rows.shape[-1]} in {self._rows.dtype}"
            )
        self._rows[indices(slots, self._rows.device)] = rows.to(self._rows.device)
