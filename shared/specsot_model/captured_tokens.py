"""Captures the choice of the tokens after hidden states as CUDA graphs, one per bucket of rows.

Final norm, lm_head and argmax are always the same few kernels, and launching them one by one takes the host
longer than launching a graph. A *row* in this file is a hidden state. Surplus rows of a graph hold hidden
states of earlier calls, and their tokens are cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor

from specsot_model.cuda_graphs import BUCKETS, SHORT_BUCKETS, Capture, bucket_of
from specsot_model.inference import inference_mode

# Rows. Sizes of the graphs: those of the graphs that compute the hidden states.
TOKEN_BUCKETS = (*BUCKETS, *SHORT_BUCKETS)

# Returns the token after each row of hidden states [rows, hidden]: int32 [rows] on the same device. The host
# must not wait for the device.
Choose = Callable[[Tensor], Tensor]
# Where a graph reads its rows, the function that runs it, and the tokens that it writes.
Prepared = tuple[Tensor, Callable[[], object], Tensor]


class CapturedTokens:
    """CUDA graphs that choose the tokens after hidden states."""

    @inference_mode
    def __init__(
        self,
        choose: Choose,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        capture: Capture,
        sizes: Iterable[int] = TOKEN_BUCKETS,
    ) -> None:
        """Capture the graphs. The logits of the largest one take the most memory; the others reuse it.

        choose: What is captured. It is kept as long as the graphs, which read the tensors that it owns.
        hidden_size: Numbers of a row.
        dtype: Type of the rows.
        device: Device of the rows.
        capture: Captures work as a CUDA graph, such as `GraphCapture`. No graph of another object may be
            captured with it, because that may run at the same time, on another thread.
        sizes: Sizes of the graphs, in rows. At least one.
        """
        self._choose = choose
        self._max_rows = max(sizes := {*sizes})
        rows = torch.zeros(self._max_rows, hidden_size, dtype=dtype, device=device)
        graphs = {
            size: capture(lambda size=size: (choose(rows[:size]), None))
            for size in sorted(sizes, reverse=True)
        }

        @cache
        def prepared(count: int) -> Prepared:
            """Return what a call with so many rows needs. The views are cached, because making a view takes
            half as long as a copy.

            count: Number of rows.
            """
            replay, (tokens, _) = graphs[bucket_of(count, sizes) or 0]
            return rows[:count], replay, tokens[:count]

        self._prepared = prepared

    @inference_mode
    def __call__(self, hidden: Tensor) -> Tensor | None:
        """Return the token after each row, int32 [rows] on the device. Return None if there are more rows
        than the largest graph has.

        The next call overwrites the tokens. So what reads them must be launched on the same stream before the
        next call, or read a copy.

        hidden: [rows, hidden], at least one row.
        """
        if len(hidden) > self._max_rows:
            return None
        rows, replay, tokens = self._prepared(len(hidden))
        rows.copy_(hidden)
        replay()
        return tokens
