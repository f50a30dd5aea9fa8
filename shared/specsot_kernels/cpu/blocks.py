"""Packs the blocks of a GGUF file for the kernels, row by row, on several threads.

Blocks of some types (`layout.LOSSLESS_TYPES`) keep their numbers, which are laid out in another order. Of
others, a row is decoded to fp32 as the package `gguf` decodes it, operation by operation, and rounded as
`running.PackedWeight` rounds floats to 8 bits. Both results are the same, bit for bit; only the time differs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numba
import numpy as np
from numpy.typing import NDArray

from specsot_kernels.cpu.layout import (
    BYTES,
    GROUP_BYTES,
    HEAD_BYTES,
    LANES,
    Q4_K,
    Q6_K,
)

# Bytes of rows as the file stores them, [rows, bytes of a row].
Rows = NDArray[np.uint8]
# Decodes rows [rows, bytes of a row] of a ggml type, given by its number, to fp32 [rows, inputs].
Decode = Callable[[Rows, int], NDArray[np.float32]]
# Rows of a matrix as the blocks of a GGUF file: uint8 [rows, bytes of a row], ggml's number of their type,
# and int64 [rows], the output of the packed weight that each row becomes.
BlockRows = tuple[Rows, int, NDArray[np.int64]]

# Numbers. How many are decoded at a time; they stay in the second-level cache. Untuned.
DECODED_AT_ONCE = 1 << 17
# Replaces a scale of zero in divisions.
TINY = np.float32(1e-30)
# Bytes of a group of 4-bit weights of 16 outputs, of one of Q4_K, and of one of Q6_K.
GROUP4, GROUP4_K, GROUP6_K = (GROUP_BYTES[bits] for bits in (4, Q4_K, Q6_K))
# Bytes that precede 8 groups in Q4_K, and in Q6_K.
HEAD4_K, HEAD6_K = HEAD_BYTES[Q4_K], HEAD_BYTES[Q6_K]
# The fp32 number of each fp16 number, by its 16 bits.
HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
# The 16 bits of -8 times each fp16 number: the minimum value of a block Q4_0, by the bits of its scale. It is
# infinite for scales beyond 8,188, which no model is known to have.
with np.errstate(over="ignore", invalid="ignore"):
    MINIMUMS = (HALVES * np.float32(-8)).astype(np.float16).view(np.uint16)


def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function that Numba compiles at its first call, and keeps compiled for later processes.

    It is not kept if there is no folder to which Numba can write. It releases the GIL.

    function: the function to compile.
    """
    try:
        return numba.njit(cache=True, nogil=True)(function)
    # Numba finds no folder that it can write a cache to.
    except RuntimeError:
        return numba.njit(nogil=True)(function)


@numba.njit(inline="always")
def _half(halves, block, at):
    """Return the fp16 number in two bytes of a block, as fp32.

    halves: HALVES.
    block: uint8 [bytes of a block].
    at: index of the lower byte.
    """
    return halves[np.uint32(block[at]) | (np.uint32(block[at + 1]) << np.uint32(8))]


def _decode_fp32(rows, halves, out):
    """Decode rows of fp32 numbers; see `DECODERS`. NumPy copies them faster than a loop of Numba's."""
    out[:] = rows.view(np.float32)


def _decode_fp16(rows, halves, out):
    """Decode rows of fp16 numbers; see `DECODERS`."""
    _look_up(rows.view(np.uint16), halves, out)


def _decode_bf16(rows, halves, out):
    """Decode rows of bf16 numbers; see `DECODERS`."""
    _widen_bf16(rows.view(np.uint16), out.view(np.uint32))


@_compiled
def _look_up(shorts, halves, out):
    """Store the fp32 number of each fp16 number; NumPy takes five times as long.

    shorts: uint16 [rows, inputs], the bits of the fp16 numbers. Arrays are viewed in other types by the
        caller, because compiling a view takes Numba half a second.
    halves: HALVES.
    out: fp32 [rows, inputs], which is written.
    """
    for row in range(shorts.shape[0]):
        for i in range(shorts.shape[1]):
            out[row, i] = halves[shorts[row, i]]


@_compiled
def _widen_bf16(shorts, words):
    """Store the bits of the fp32 number of each bf16 number; NumPy takes twice as long.

    shorts: uint16 [rows, inputs], the bits of the bf16 numbers.
    words: uint32 [rows, inputs], which is written.
    """
    for row in range(shorts.shape[0]):
        for i in range(shorts.shape[1]):
            words[row, i] = np.uint32(shorts[row, i]) << np.uint32(16)


def _decoder_of_32(size: int, upper: int, half: int) -> Callable[..., None]:
    """Return a function that decodes rows of blocks Q4_0, Q4_1, Q5_0 or Q5_1, 32 codes each; see `DECODERS`.

    A block has a scale, perhaps a minimum, perhaps the 32 upper bits, and 16 bytes, of which byte i has the
    lower 4 bits of codes i and 16 + i.

    size: bytes of a block.
    upper: the byte in which the upper bits begin; 0 if codes have 4 bits.
    half: half of the range of codes, which is subtracted from them; 0 for blocks with a minimum, which is
        added.
    """

    @_compiled
    def decode(rows, halves, out):
        """Decode rows of these blocks; see `DECODERS`."""
        for row in range(rows.shape[0]):
            for number in range(out.shape[1] // 32):
                block = rows[row, size * number : size * number + size]
                to = out[row, 32 * number : 32 * number + 32]
                scale = _half(halves, block, 0)
                minimum = _half(halves, block, 2)
                for i in range(16):
                    first = np.int32(block[size - 16 + i] & 15)
                    second = np.int32(block[size - 16 + i] >> 4)
                    if upper:
                        first |= np.int32((block[upper + i // 8] >> (i % 8)) & 1) << 4
                        second |= np.int32((block[upper + 2 + i // 8] >> (i % 8)) & 1) << 4
                    low = scale * np.float32(first - half)
                    high = scale * np.float32(second - half)
                    to[i] = low if half else low + minimum
                    to[16 + i] = high if half else high + minimum

    return decode


@_compiled
def _decode_q8_0(rows, halves, out):
    """Decode rows of blocks Q8_0: a scale, and 32 codes of 8 bits; see `DECODERS`."""
    for row in range(rows.shape[0]):
        for number in range(out.shape[1] // 32):
            block = rows[row, 34 * number : 34 * number + 34]
            to = out[row, 32 * number : 32 * number + 32]
            scale = _half(halves, block, 0)
            for i in range(32):
                to[i] = scale * np.float32(np.int8(block[2 + i]))


@numba.njit(inline="always")
def _scale_and_minimum(scales, group):
    """Return the 6-bit scale and the 6-bit minimum of one of the 8 groups of a block Q4_K or Q5_K.

    scales: uint8 [12]. Bytes 0..3 and 4..7 have the scales and the minimums of groups 0..3 in their lower 6
        bits, and the upper 2 bits of those of groups 4..7, whose lower 4 bits are in bytes 8..11.
    group: number of the group.
    """
    if group < 4:
        return np.float32(scales[group] & 63), np.float32(scales[group + 4] & 63)
    lower = scales[group + 4]
    scale = (lower & 15) | ((scales[group - 4] >> 2) & 48)
    minimum = (lower >> 4) | ((scales[group] >> 2) & 48)
    return np.float32(scale), np.float32(minimum)


def _decoder_of_256(size: int) -> Callable[..., None]:
    """Return a function that decodes rows of blocks Q4_K or Q5_K, 256 codes of 4 or 5 bits in 8 groups; see
    `DECODERS`.

    Byte i of the codes of groups 2 * p and 2 * p + 1 has the lower 4 bits of their codes i in its lower and
    its upper half. In Q5_K, bit g of upper byte i is the upper bit of code i of group g.

    size: bytes of a block.
    """
    has_upper = size == 176

    @_compiled
    def decode(rows, halves, out):
        """Decode rows of these blocks; see `DECODERS`."""
        for row in range(rows.shape[0]):
            for number in range(out.shape[1] // 256):
                block = rows[row, size * number : size * number + size]
                scale_of_all = _half(halves, block, 0)
                minimum_of_all = _half(halves, block, 2)
                for group in range(8):
                    codes = block[size - 128 + 32 * (group // 2) : size - 96 + 32 * (group // 2)]
                    to = out[row, 256 * number + 32 * group : 256 * number + 32 * group + 32]
                    scale, minimum = _scale_and_minimum(block[4:16], group)
                    scale = scale_of_all * scale
                    minimum = minimum_of_all * minimum
                    shift = np.uint32(4 * (group % 2))
                    for i in range(32):
                        code = (np.uint32(codes[i]) >> shift) & np.uint32(15)
                        if has_upper:
                            upper = (np.uint32(block[16 + i]) >> np.uint32(group)) & np.uint32(1)
                            code |= upper << np.uint32(4)
                        to[i] = scale * np.float32(np.int32(code)) - minimum

    return decode


@_compiled
def _decode_q6_k(rows, halves, out):
    """Decode rows of blocks Q6_K: 256 codes of 6 bits, with a scale for each 16; see `DECODERS`.

    Of each half of a block, the lower 4 bits of quarters 0 and 1 are the lower halves of 64 bytes, and those
    of quarters 2 and 3 the upper halves; bits 2 * q and 2 * q + 1 of 32 further bytes are the upper bits of
    quarter q.
    """
    for row in range(rows.shape[0]):
        for number in range(out.shape[1] // 256):
            block = rows[row, 210 * number : 210 * number + 210]
            scale_of_all = _half(halves, block, 208)
            for quarter in range(8):
                half = quarter // 4
                shift = 4 * (quarter % 4 // 2)
                upper_shift = 2 * (quarter % 4)
                lower = block[64 * half + 32 * (quarter % 2) : 64 * half + 32 * (quarter % 2) + 32]
                upper = block[128 + 32 * half : 160 + 32 * half]
                to = out[row, 256 * number + 32 * quarter : 256 * number + 32 * quarter + 32]
                for part in range(2):
                    scale = scale_of_all * np.float32(np.int8(block[192 + 2 * quarter + part]))
                    for i in range(16 * part, 16 * part + 16):
                        code = ((lower[i] >> shift) & 15) | (((upper[i] >> upper_shift) & 3) << 4)
                        to[i] = scale * np.float32(np.int32(code) - 32)


# The functions that decode rows, by ggml's number of the type. Each takes uint8 [rows, bytes of a row],
# HALVES, and fp32 [rows, inputs], which is written.
DECODERS: dict[int, Callable[[Rows, NDArray[np.float32], NDArray[np.float32]], None]] = {
    0: _decode_fp32,
    1: _decode_fp16,
    2: _decoder_of_32(18, 0, 8),
    3: _decoder_of_32(20, 0, 0),
    6: _decoder_of_32(22, 2, 16),
    7: _decoder_of_32(24, 4, 0),
    8: _decode_q8_0,
    12: _decoder_of_256(144),
    13: _decoder_of_256(176),
    14: _decode_q6_k,
    30: _decode_bf16,
}


@_compiled
def _round_rows(floats, bits, outputs, codes, scales, short, words, largest, largest_bits):
    """Round rows to 8 bits with a scale for each, and store them among the packed codes.

    Arrays whose bits are read are passed a second time as arrays of integers, because compiling a view of an
    array takes Numba half a second.

    floats: fp32 [rows, inputs], the rows.
    bits: uint32 [rows, inputs], the same memory as `floats`.
    outputs: int64 [rows], the output of the packed weight that each row is.
    codes: uint32 [outputs / 16, steps, 16], the packed codes, which are written: the 4 codes of a step and
        an output, plus 128 each.
    scales: fp32 [outputs], which is written.
    short: int8 [4 * steps], scratch memory; zeros after the inputs.
    words: uint32 [steps], the same memory as `short`.
    largest: fp32 [1], scratch memory.
    largest_bits: uint32 [1], the same memory as `largest`.
    """
    for row in range(floats.shape[0]):
        # Without their signs, floats are in the order of their bits, and the largest integer is found by
        # vector instructions.
        peak = np.uint32(0)
        for i in range(bits.shape[1]):
            size = np.uint32(bits[row, i] & np.uint32(0x7FFFFFFF))
            peak = size if size > peak else peak
        largest_bits[0] = peak
        scale = largest[0] / np.float32(127)
        divisor = scale if scale > TINY else TINY
        for i in range(floats.shape[1]):
            short[i] = np.int8(np.rint(floats[row, i] / divisor))
        output = outputs[row]
        scales[output] = scale
        to = codes[output // 16, :, output % 16]
        for step in range(len(words)):
            to[step] = words[step] ^ np.uint32(0x80808080)


def pack_rows(
    part: BlockRows,
    inputs: int,
    codes: NDArray[np.uint32],
    scales: NDArray[np.float32],
    threads: int,
    decode_other: Decode,
) -> None:
    """Round rows of GGUF blocks to 8 bits, and store them in a packed weight.

    part: the rows; see `BlockRows`.
    inputs: number of weights of a row.
    codes: uint32 [padded outputs / 16, steps, 16], the codes of the packed weight, which are written; see
        `running.PackedWeight`. A step has 4 inputs; inputs after the last one become zeros (128).
    scales: fp32 [padded outputs], the scales of the packed weight, which are written.
    threads: number of threads, at least 1.
    decode_other: decodes rows of the types that DECODERS lacks.
    """
    at_once = max(DECODED_AT_ONCE // inputs, 1)
    rows, kind, outputs = part
    decode = DECODERS.get(kind)
    count = len(rows)

    def pack_range(begin: int, end: int) -> None:
        """Pack the rows from `begin` to `end`."""
        short = np.zeros(4 * codes.shape[1], np.int8)
        largest = np.zeros(1, np.float32)
        floats = np.empty((min(at_once, end - begin), inputs), np.float32)
        for first in range(begin, end, at_once):
            some = slice(first, min(first + at_once, end))
            decoded = floats[: some.stop - first]
            if decode is None:
                decoded[:] = decode_other(rows[some], kind)
            else:
                decode(rows[some], HALVES, decoded)
            bits = decoded.view(np.uint32)
            _round_rows(
                decoded, bits, outputs[some], codes, scales, short, short.view(np.uint32),
                largest, largest.view(np.uint32),
            )  # fmt: skip

    _on_threads(pack_range, count, threads)


@numba.njit(inline="always")
def _word(shorts, at):
    """Return 4 bytes of a block as a 32-bit number.

    shorts: uint16 [16-bit numbers of a block].
    at: number of the first byte, which is even.
    """
    return np.uint32(shorts[at // 2]) | (np.uint32(shorts[at // 2 + 1]) << np.uint32(16))


@_compiled
def _repack_q4_k(rows, outputs, codes, words):
    """Lay out rows of blocks Q4_K for the kernels; see `running.PackedWeight`. No number changes.

    rows: uint32 [rows, 4-byte words of a row], the blocks: both fp16 numbers, 12 bytes of scales and minimum
        values (`_scale_and_minimum`), and 8 words of codes for each two groups (`_decode_q4_k`).
    outputs: int64 [rows], the output of the packed weight that each row is.
    codes: uint8 [bytes of the packed weight], which are written.
    words: uint32 [words of the packed weight], the same memory as `codes`.
    """
    few = np.uint32(0x0F0F0F0F)
    four = np.uint32(4)
    scales = np.empty(12, np.uint8)
    num_blocks = rows.shape[1] // 36
    for row in range(rows.shape[0]):
        lane = outputs[row] % LANES
        first = outputs[row] // LANES * num_blocks
        for number in range(num_blocks):
            block = rows[row, 36 * number : 36 * number + 36]
            head = (first + number) * (HEAD4_K + 8 * GROUP4_K)
            for half in range(2):
                # The minimum value is subtracted in a block, and added by the kernels.
                bits = (block[0] >> np.uint32(16 * half)) ^ np.uint32(0x8000 * half)
                at = head + 2 * LANES * half + 2 * lane
                codes[at] = bits & np.uint32(255)
                codes[at + 1] = (bits >> np.uint32(8)) & np.uint32(255)
            for i in range(12):
                scales[i] = (block[1 + i // 4] >> np.uint32(8 * (i % 4))) & np.uint32(255)
            for group in range(8):
                at = head + HEAD4_K + group * GROUP4_K
                scale, minimum = _scale_and_minimum(scales, group)
                codes[at + GROUP4_K - 2 * LANES + lane] = scale
                codes[at + GROUP4_K - LANES + lane] = minimum
                source = block[4 + 8 * (group // 2) : 12 + 8 * (group // 2)]
                shift = np.uint32(4 * (group % 2))
                to = at // 4 + lane
                for pair in range(4):
                    even = (source[2 * pair] >> shift) & few
                    odd = (source[2 * pair + 1] >> shift) & few
                    words[to + LANES * pair] = even | (odd << four)


@_compiled
def _repack_q4(rows, size, outputs, minimums, shorts, words):
    """Lay out rows of blocks Q4_0 or Q4_1 for the kernels; see `running.PackedWeight`. No number changes.

    rows: uint16 [rows, 16-bit numbers of a row], the blocks: a scale, a minimum value in Q4_1 alone, and the
        codes; see `_decode_q4_0`.
    size: 16-bit numbers of a block: 9 (Q4_0) or 10 (Q4_1).
    outputs: int64 [rows], the output of the packed weight that each row is.
    minimums: MINIMUMS.
    shorts: uint16 [bytes of the packed weight / 2], which are written.
    words: uint32 [bytes of the packed weight / 4], the same memory as `shorts`.
    """
    few = np.uint32(0x0F0F0F0F)
    four = np.uint32(4)
    num_blocks = rows.shape[1] // size
    for row in range(rows.shape[0]):
        lane = outputs[row] % LANES
        first = outputs[row] // LANES * num_blocks
        for number in range(num_blocks):
            block = rows[row, size * number : size * number + size]
            at = (first + number) * GROUP4
            factors = (at + 4 * BYTES) // 2 + lane
            shorts[factors] = block[0]
            shorts[factors + LANES] = minimums[block[0]] if size == 9 else block[1]
            for pair in range(4):
                source = size - 8 + 4 * (pair % 2)
                shift = np.uint32(4 * (pair // 2))
                even = _word(block, 2 * source)
                odd = _word(block, 2 * source + 4)
                together = ((even >> shift) & few) | (((odd >> shift) & few) << four)
                words[at // 4 + LANES * pair + lane] = together


@_compiled
def _repack_q6_k(rows, outputs, codes, shorts, words):
    """Lay out rows of blocks Q6_K for the kernels; see `running.PackedWeight`. No number changes.

    rows: uint16 [rows, 16-bit numbers of a row], the blocks; see `_decode_q6_k`.
    outputs: int64 [rows], the output of the packed weight that each row is.
    codes: uint8 [bytes of the packed weight], which are written.
    shorts: uint16 [bytes of the packed weight / 2], the same memory as `codes`.
    words: uint32 [bytes of the packed weight / 4], the same memory as `codes`.
    """
    few = np.uint32(0x0F0F0F0F)
    two = np.uint32(0x03030303)
    num_blocks = rows.shape[1] // 105
    for row in range(rows.shape[0]):
        lane = outputs[row] % LANES
        first = outputs[row] // LANES * num_blocks
        for number in range(num_blocks):
            block = rows[row, 105 * number : 105 * number + 105]
            head = (first + number) * (HEAD6_K + 8 * GROUP6_K)
            shorts[head // 2 + lane] = block[104]
            for group in range(8):
                at = head + HEAD6_K + group * GROUP6_K
                scales = block[96 + group]
                codes[at + GROUP6_K - 2 * LANES + lane] = scales & np.uint16(255)
                codes[at + GROUP6_K - LANES + lane] = scales >> np.uint16(8)
                lower = 64 * (group // 4) + 32 * (group % 2)
                upper = 128 + 32 * (group // 4)
                shift = np.uint32(4 * (group % 4 // 2))
                upper_shift = np.uint32(2 * (group % 4))
                to = at // 4 + lane
                for pair in range(4):
                    even = (_word(block, lower + 8 * pair) >> shift) & few
                    odd = (_word(block, lower + 8 * pair + 4) >> shift) & few
                    words[to + LANES * pair] = even | (odd << np.uint32(4))
                for half in range(2):
                    together = np.uint32(0)
                    for step in range(4):
                        bits = (_word(block, upper + 16 * half + 4 * step) >> upper_shift) & two
                        together |= bits << np.uint32(2 * step)
                    words[to + LANES * (4 + half)] = together


def repack_rows(part: BlockRows, codes: NDArray[np.uint8], threads: int) -> None:
    """Store rows of 4- or 6-bit blocks in a packed weight, with all their numbers.

    part: the rows, of a type in `layout.LOSSLESS_TYPES`; see `BlockRows`.
    codes: uint8 [bytes of the packed weight], which are written; see `running.PackedWeight`.
    threads: number of threads, at least 1.
    """
    rows, kind, outputs = part
    stored = rows.view(np.uint32 if kind == Q4_K else np.uint16)
    shorts, words = codes.view(np.uint16), codes.view(np.uint32)

    def repack_range(begin: int, end: int) -> None:
        """Lay out the rows from `begin` to `end`."""
        some = slice(begin, end)
        if kind == Q4_K:
            _repack_q4_k(stored[some], outputs[some], codes, words)
        elif kind == Q6_K:
            _repack_q6_k(stored[some], outputs[some], codes, shorts, words)
        else:
            _repack_q4(stored[some], 9 if kind == 2 else 10, outputs[some], MINIMUMS, shorts, words)

    _on_threads(repack_range, len(rows), threads)


def _on_threads(work: Callable[[int, int], None], count: int, threads: int) -> None:
    """Call `work(begin, end)` for parts of the range from 0 to `count`, one part on each thread.

    work: what is called; it releases the GIL.
    count: end of the range. If it is less than the number of threads, there is one call by this thread.
    threads: number of threads, at least 1.
    """
    if threads == 1 or count < threads:
        work(0, count)
        return
    bounds = [count * number // threads for number in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, *ends) for ends in pairwise(bounds)]:
            done.result()
