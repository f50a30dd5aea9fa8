"""Chooses the target token of each row of logits in one launch: argmax, or a sample after top-k, top-p and
min-p.

A row's token depends only on the row and its own settings: one program reads one row alone, always in the
same parts, and sums in float64. So the token is the same in any tree and any batch.
"""

# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from threading import get_ident

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from specsot_kernels.device_waits import record_on, wait_for
from specsot_kernels.gpu.launching import array_specialization, kernel, launch, on_device_of, power_of_two

# Tokens. A program reads at most WIDE tokens at a time. To find the drawn token among them, it first draws
# one of the lines of LINE tokens, then a token of that line.
WIDE = 8192
LINE = 128
# Bits. The highest bits of a float32 in which values of these types can differ, rounded up to an even number:
# for float16 the sign, 8 bits of the exponent and 10 of the mantissa. The binary search over values decides
# two bits in each turn, and needs to decide no others.
BITS = {torch.bfloat16: 16, torch.float16: 20}

# The settings of one row: temperature (0: argmax), top_k (0: none), top_p, min_p, 53-bit key.
Setting = tuple[float, float, float, float, float]
# The settings that choose the token of the largest logit.
ARGMAX: Setting = (0.0, 0.0, 1.0, 0.0, 0.0)


def choose_tokens(
    logits: Tensor, settings: Sequence[Setting], meanwhile: Callable[[Tensor], None] | None = None
) -> list[int | None]:
    """Return a token for each row of logits [rows, V]; None if a row holds NaN, infinity, or nothing but
    -infinity.

    The host waits for the device once. Of equal largest logits, argmax takes the lower token id.

    logits: [rows, V], the logits of each row.
    settings: the settings of each row: temperature (0: argmax), top_k (0: none), top_p, min_p, and a 53-bit
        key. A top_p of 1 and a min_p of 0 cut nothing, and neither does a top_k of at least V. Empty: argmax
        in every row.
    meanwhile: work that the host does while the device computes. On a GPU, it is called before the wait, with
        the tokens on the device: int32 [rows], negative for None; it must not call `choose_tokens` or
        `read_tokens` itself, because the tokens that these copy to the host could overwrite the present ones.
        On a CPU it is not called. None: nothing is called.
    """
    return read_tokens(choose_on_device(logits, settings), meanwhile)


def read_tokens(tokens: Tensor, meanwhile: Callable[[Tensor], None] | None = None) -> list[int | None]:
    """Return tokens that `choose_on_device` has chosen; None in place of negative numbers. The host waits for
    the device once.

    tokens: int32 [rows], on any device.
    meanwhile: work that the host does while the device computes; see `choose_tokens`.
    """
    if meanwhile is not None and tokens.is_cuda:
        memory = _host_tokens(tokens.device, get_ident())
        memory.start_copy(tokens)
        meanwhile(tokens)
        numbers = memory.read()
    else:
        numbers = tokens.cpu().numpy()
    chosen = numbers.tolist()
    if numbers.min(initial=0) >= 0:
        return chosen
    return [None if token < 0 else token for token in chosen]


class _HostTokens:
    """Pinned memory into which the tokens of one GPU are copied, and the event after which they can be read.
    All calls of `read_tokens` with a `meanwhile` on one thread use the same memory and event, because making
    them takes the host longer than a copy. The tokens of one copy must be read before the next copy starts.
    """

    def __init__(self, device: torch.device) -> None:
        """Start without memory for tokens.

        device: the GPU.
        """
        self._copied = torch.Event(device, enable_timing=False)
        # The memory, and the part of it that the newest copy fills.
        self._memory = self._tokens = torch.empty(0, dtype=torch.int32)

    def start_copy(self, tokens: Tensor) -> None:
        """Start to copy tokens to the host. What was copied before is overwritten.

        tokens: int32 [rows] on the GPU.
        """
        rows = len(tokens)
        if len(self._memory) < rows:
            # A tensor that is made in inference mode cannot be written outside of it, and later calls may be
            # outside.
            with torch.inference_mode(False):
                self._memory = torch.empty(power_of_two(rows), dtype=torch.int32, pin_memory=True)
        if len(self._tokens) != rows:
            self._tokens = self._memory[:rows]
        self._tokens.copy_(tokens, non_blocking=True)
        record_on(self._copied, tokens.device)

    def read(self) -> np.ndarray:
        """Wait for the copy, and return its tokens, int32 [rows], which the next copy overwrites."""
        wait_for(self._copied)
        return self._tokens.numpy()


@cache
def _host_tokens(device: torch.device, thread: int) -> _HostTokens:
    """Return the memory into which the tokens of a device are copied for a thread. Every thread has its own,
    so that threads do not overwrite each other's tokens. It is kept until the process ends.

    device: a GPU.
    thread: identifier of the thread, from `get_ident`.
    """
    return _HostTokens(device)


def choose_on_device(logits: Tensor, settings: Sequence[Setting]) -> Tensor:
    """Return a token for each row of logits, int32 [rows] on their device; -1 if a row holds NaN, infinity,
    or nothing but -infinity. The host does not wait for the device.

    logits: [rows, V], the logits of each row.
    settings: the settings of each row, see `choose_tokens`. Empty: argmax in every row.
    """
    rows, columns = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    drawn = any(setting[0] > 0 for setting in settings)
    cut = any(setting[1] or setting[2] < 1 for setting in settings)
    tokens = logits.new_empty(rows, dtype=torch.int32)
    # If every row takes its argmax, the kernel does not read the settings, and any array can stand in.
    device_settings = logits
    if drawn:
        host_settings = torch.tensor(settings, dtype=torch.float64, pin_memory=logits.is_cuda)
        device_settings = host_settings.to(logits.device, non_blocking=True)
    wide = min(power_of_two(columns), WIDE)
    parts = power_of_two(-(-columns // wide))
    line = min(wide, LINE)
    arrays = (logits, device_settings, tokens)
    constants = (BITS.get(logits.dtype, 32) // 2, wide, parts, line, drawn, cut)
    numbers = (columns, logits.stride(0))
    with on_device_of(logits):
        launch(
            _choose, (rows, 1, 1), (*array_specialization(*arrays), *numbers, *constants),
            (*arrays, *numbers, *constants), num_warps=32 if wide == WIDE else 4,
        )  # fmt: skip
    return tokens


@kernel
def _choose(
    logits, settings, tokens, columns, row_stride, turns: tl.constexpr, wide: tl.constexpr,
    parts: tl.constexpr, line: tl.constexpr, drawn: tl.constexpr, cut: tl.constexpr,
):  # fmt: skip
    """Choose the token of one row.

    After a maximum pass, each cut raises `lowest`, the order of the smallest logit that stays; then the token
    is drawn by descending a binary tree of probability masses: first over parts of `wide` tokens, then within
    one part. A row with a temperature of 0 gets the token of its largest logit.

    logits: [rows, columns].
    settings: float64 [rows, 5]; see `Setting`. Read if `drawn`.
    tokens: int32 [rows], receives the tokens; -1 if the row holds NaN, infinity, or nothing but -infinity.
    columns: number of tokens of the vocabulary.
    row_stride: elements from one row of logits to the next.
    turns: number of turns of the binary search.
    wide: number of tokens of a part.
    parts: number of parts of the vocabulary, rounded up to a power of two.
    line: number of tokens of a line.
    drawn: whether any row has a temperature above 0.
    cut: whether any row has top_k or top_p.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    place = tl.arange(0, wide)
    highest = tl.full((wide,), float("-inf"), tl.float32)
    first = tl.zeros((wide,), tl.int32)
    odd = tl.zeros((wide,), tl.int32)
    for start in range(0, columns, wide):
        values = _values(logits, start + place, columns)
        odd |= ((values != values) | (values == float("inf"))).to(tl.int32)
        first = tl.where(values > highest, start + place, first)
        highest = tl.where(values > highest, values, highest)
    top = tl.max(highest, 0)
    is_valid = (tl.max(odd, 0) == 0) & (top > float("-inf"))
    token = tl.min(tl.where(highest == top, first, columns), 0)
    if drawn:
        temperature = tl.load(settings + row * 5).to(tl.float32)
        if is_valid & (temperature > 0):
            min_p = tl.load(settings + row * 5 + 3).to(tl.float32)
            lowest = tl.full((), -2147483648, tl.int64)
            if cut:
                top_k = tl.load(settings + row * 5 + 1)
                top_p = tl.load(settings + row * 5 + 2)
                if (top_k > 0) & (top_k < columns):
                    lowest = _lowest(logits, columns, top, temperature, lowest, top_k, turns, wide, True)
                if top_p < 1:
                    whole = tl.zeros((wide,), tl.float64)
                    for start in range(0, columns, wide):
                        whole += _weights(logits, start + place, columns, top, temperature, lowest, 0.0)
                    goal = top_p * tl.sum(whole, 0)
                    nucleus = _lowest(logits, columns, top, temperature, lowest, goal, turns, wide, False)
                    lowest = tl.maximum(lowest, nucleus)
            part = tl.arange(0, parts)
            masses = tl.zeros((parts,), tl.float64)
            for start in range(0, columns, wide):
                weights = _weights(logits, start + place, columns, top, temperature, lowest, min_p)
                masses = tl.where(part == start // wide, tl.sum(weights, 0), masses)
            key = tl.load(settings + row * 5 + 4).to(tl.int64)
            number = _descend(masses, key, wide, parts)
            inside = _weights(logits, number * wide + place, columns, top, temperature, lowest, min_p)
            token = number * wide + _descend_far(inside, key, wide, line)
    tl.store(tokens + row, tl.where(is_valid, token, -1))


@kernel
def _descend_far(weights, key, wide: tl.constexpr, line: tl.constexpr):
    """Return the token drawn within a part: first one of its lines is drawn, then a token of that line, so
    that each sum has few terms.

    weights: float64 [wide], the weights of a part's tokens.
    key: the row's key.
    wide: tokens of the part.
    line: tokens of a line.
    """
    table = tl.reshape(weights, (wide // line, line))
    number = _descend(tl.sum(table, 1), key, line, wide // line)
    own = tl.arange(0, wide // line)[:, None] == number
    return number * line + _descend(tl.sum(tl.where(own, table, 0.0), 0), key, 1, line)


@kernel
def _descend(weights, key, each, size: tl.constexpr):
    """Return the number of the weight [size] that is drawn, deciding its highest bit first.

    A half without weight is never taken. If all weights are 0, the result is 0.

    weights: float64 [size], not negative.
    key: the row's key.
    each: number of tokens that one weight stands for, a power of two. It makes the random numbers of
        different decisions of a row independent of each other; see `_uniform`.
    size: number of weights, a power of two.

    With weights [1, 3, 0, 4], the first decision takes the right half with probability 4/8.
    """
    number = tl.arange(0, size)
    first = (key * 0).to(tl.int32)
    step = first + size // 2
    while step > 0:
        half = first + step
        left = tl.sum(tl.where((number >= first) & (number < half), weights, 0.0), 0)
        right = tl.sum(tl.where((number >= half) & (number < half + step), weights, 0.0), 0)
        goes = (right > 0) & (_uniform(key, step * each) * (left + right) >= left)
        first = tl.where(goes, half, first)
        step = step >> 1
    return first


@kernel
def _uniform(key, half):
    """Return the random number that decides between two halves, as `specsot_worker.core.accept.uniform`
    computes it: a float64 in [0, 1).

    The masks make the shifts fill with zeros, as the shifts of that function do.

    key: the row's key.
    half: number of tokens of each half, which is the value of the bit of the token id that is decided. A
        row decides each bit once, so that all its decisions have different random numbers.
    """
    word = key + half.to(tl.int64) * -7046029254386353131
    word = (word ^ ((word >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    word = (word ^ ((word >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return (((word ^ ((word >> 31) & 0x1FFFFFFFF)) >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 2.0**-53


@kernel
def _lowest(
    logits, columns, top, temperature, above, goal, turns: tl.constexpr, wide: tl.constexpr,
    counted: tl.constexpr,
):  # fmt: skip
    """Return the greatest order such that the tokens of at least that order reach the goal: `goal` of them
    (top-k), or tokens with a total weight of `goal` (top-p). The result is int64. If no order reaches the
    goal, it is the smallest int32.

    The weight of tokens below the order `above` is 0. Each turn of the binary search decides two bits.

    logits: address of the row's logits.
    columns: tokens of the vocabulary.
    top: the largest logit.
    temperature: the row's temperature.
    above: order of the smallest logit that stays.
    goal: the number of tokens, or their weight, that is to be reached.
    turns: number of turns of the binary search.
    wide: number of tokens that are read at a time.
    counted: count tokens (top-k) instead of adding up their weights (top-p).
    """
    place = tl.arange(0, wide)
    found = tl.full((), -2147483648, tl.int64)
    for turn in range(turns):
        step = tl.full((), 1, tl.int64) << (30 - 2 * turn)
        one = (found + step).to(tl.int32)
        two = (found + 2 * step).to(tl.int32)
        three = (found + 3 * step).to(tl.int32)
        low = tl.zeros((wide,), tl.float64)
        middle = tl.zeros((wide,), tl.float64)
        high = tl.zeros((wide,), tl.float64)
        for start in range(0, columns, wide):
            column = start + place
            order = _order(_values(logits, column, columns))
            if counted:
                gain = (column < columns).to(tl.float64)
            else:
                gain = _weights(logits, column, columns, top, temperature, above, 0.0)
            low += tl.where(order >= one, gain, 0.0)
            middle += tl.where(order >= two, gain, 0.0)
            high += tl.where(order >= three, gain, 0.0)
        enough = (tl.sum(low, 0) >= goal).to(tl.int64) + (tl.sum(middle, 0) >= goal).to(tl.int64)
        found += step * (enough + (tl.sum(high, 0) >= goal).to(tl.int64))
    return found


@kernel
def _values(logits, column, columns):
    """Load logits as fp32. Adding 0.0 turns negative zero into zero, which must not be ordered below it.

    logits: address of the row's logits.
    column: [wide], token ids.
    columns: tokens of the vocabulary; ids beyond it become -infinity.
    """
    return tl.load(logits + column, mask=column < columns, other=float("-inf")).to(tl.float32) + 0.0


@kernel
def _order(values):
    """Map floats to int32 numbers of the same order.

    values: fp32, any shape.
    """
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@kernel
def _weights(logits, column, columns, top, temperature, lowest, min_p):
    """Return exp((logit - top) / temperature) of these tokens in float64, and 0 for tokens that were cut.

    logits: address of the row's logits.
    column: [wide], token ids.
    columns: tokens of the vocabulary.
    top: the largest logit.
    temperature: the row's temperature.
    lowest: order of the smallest logit that stays.
    min_p: smallest weight that stays, relative to the largest token's weight of 1.
    """
    values = _values(logits, column, columns)
    weights = tl.exp((values - top) / temperature)
    stays = (_order(values) >= lowest) & (weights >= min_p)
    return tl.where(stays, weights, 0.0).to(tl.float64)
