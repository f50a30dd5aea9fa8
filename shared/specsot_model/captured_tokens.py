"""CUDA graphs that choose the token after each hidden state, one graph per bucket of rows.

Final norm, lm_head and argmax are always the same few kernels, and launching them one by one takes the host
longer than launching a graph. A *row* in this file is a hidden state. A call runs in the graph of the next
larger bucket. Surplus rows of the graph hold hidden states of earlier calls, and their tokens are cut off.

    # 20 rows -> bucket 32; the tokens of rows 20..31 are cut off
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor

from specsot_model.cuda_graphs import BUCKETS, SHORT_BUCKETS, Capture, bucket_of
from specsot_model.inference import inference_mode

# Rows. Sizes of the graphs: those of the graphs that compute the hidden states, except for graphs of prompts
# alone. Sizes that occur twice count once.
TOKEN_BUCKETS = (*BUCKETS, *SHORT_BUCKETS)

# Returns the token after each row of hidden states [rows, hidden_size]: int32 [rows] on the same device. The
# function must not make the host wait for the device.
Choose = Callable[[Tensor], Tensor]
# What a call with some number of rows needs: the tensor from which the graph reads these rows, the function
# that launches the graph, and the tensor to which the graph writes their tokens.
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
        """Capture the graphs, the largest one first. Its logits take the most memory, which the other graphs
        reuse.

        choose: The function that is captured. This object keeps it, because the graphs read tensors that the
            function owns.
        hidden_size: Number of elements of a hidden state.
        dtype: Type of the hidden states.
        device: Device of the hidden states.
        capture: Captures work as a CUDA graph, such as `GraphCapture`. It must not capture graphs for any
            other object: all its graphs share memory, and those of another object may run at the same time,
            on another thread.
        sizes: Sizes of the graphs, in rows. At least one; repeated sizes count once.
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
            """Return what a call with this number of rows needs. The result is cached, because making a view
            takes half as long as a copy.

            count: Number of rows, at most the size of the largest graph.
            """
            replay, (tokens, _) = graphs[bucket_of(count, sizes) or 0]
            return rows[:count], replay, tokens[:count]

        self._prepared = prepared

    @inference_mode
    def __call__(self, hidden: Tensor) -> Tensor | None:
        """Return the token after each row as `choose` chooses it, int32 [rows] on the device. Return None if
        there are more rows than the largest graph has.

        The host does not wait for the device. The next call overwrites the returned tensor: work that reads
        it must be launched on the same stream before the next call, or must read a copy.

        hidden: [rows, hidden_size], at least one row.
        """
        if len(hidden) > self._max_rows:
            return None
        rows, replay, tokens = self._prepared(len(hidden))
        rows.copy_(hidden)
        replay()
        return tokens
