"""Packs weights for the CPU kernels, tabulates which columns rows see, and runs kernels on a team
of threads.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from specsot_kernels.cpu import kernel, layout
from specsot_kernels.cpu.layout import (
    BARRIER_BYTES,
    BYTES,
    GROUP,
    GROUP_BYTES,
    HEAD_BYTES,
    K_INPUTS,
    LANES,
    LONG_GROUP,
    Q6_K,
    TILE_ROWS,
)
from specsot_kernels.segments import HeadColumns, RowSpan, VisibleColumns, hidden_by_head, tail_seen

if TYPE_CHECKING:
    from specsot_kernels.cpu.blocks import BlockRows, Decode

# Addresses, offsets and sizes.
Numbers = NDArray[np.int64]
# Weights. How many are packed at a time; bounds the extra memory. Untuned.
PACKED_AT_ONCE = 1 << 22
# Replaces a scale of zero in divisions.
TINY = 1e-30

# Quantized weights [out, in], scales and minimum values, [out, 1] or [out, in / 32].
Codes = tuple[Tensor, Tensor, Tensor]


class PackedArrays(NamedTuple):
    """The arrays of a packed weight, as `PackedWeight` describes them.

    codes: uint8, in fewer than 8 bits with the scales and the minimum values of each group.
    scales: fp32 [padded outputs], the scale of each output in 8 bits; empty in fewer bits.
    bias: fp32 [padded outputs], zeros if there is no bias.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor


class PackedWeight:
    """A weight [out, in] in 8 or fewer bits with its bias, and the table by which kernels find its arrays.

    In 8 bits, each output has a symmetric scale. In 4 bits, each 32 inputs have a scale and a minimum value
    in fp16, so that GGUF blocks Q4_0 and Q4_1 are stored without loss. Blocks Q4_K and Q6_K of 256 inputs are
    stored without loss as well: scales and minimum values of each 32 inputs, or scales of each 16 inputs in
    Q6_K, are bytes, which the block's fp16 numbers multiply.

    Panels of 16 outputs follow one another. Within a panel, a step holds 4 inputs of each of the 16 outputs
    (64 numbers). In 8 bits, byte 4 * o + i of step s is the code of output o and input 4 * s + i, plus 128.
    In 4 bits, a byte holds step 2 * p in its lower and step 2 * p + 1 in its upper half, and the 32 inputs of
    a group, 4 * 64 bytes, are followed by the group's 16 scales and 16 minimum values. In Q4_K the fp16
    numbers of 16 outputs (scales first, minimum values negated) precede 8 such groups. Q6_K is like it, but
    after the lower 4 bits of a group 2 * 64 bytes have the upper 2 bits, of four steps each, and the scales
    are those of the group's first and second 16 inputs. Sizes are padded to whole panels and groups with
    weights of zero, in 8 bits the byte 128.
    """

    __slots__ = ("arrays", "inputs", "outputs", "shape", "table")

    def __init__(self, weight: Tensor | Codes, bias: Tensor | None, bits: int) -> None:
        """Pack a weight.

        weight: numbers [out, in], which are rounded; or codes [out, in] (int8, or uint8 below 16) that must
            not be rounded again, with their scales and minimum values, fp32 [out, 1] or [out, in / 32].
        bias: [out]; None: no bias is added. It is filled up with zeros to the padded number of outputs.
        bits: 8 or 4.
        """
        codes_of = (weight,) if isinstance(weight, Tensor) else weight
        self.shape = codes_of[0].shape
        rows = max(PACKED_AT_ONCE // padded_shape(self.shape)[1] // LANES, 1) * LANES
        parts = [self._pack_part(part, bits) for part in zip(*(each.split(rows) for each in codes_of))]
        held = torch.cat([held for held, _ in parts])
        factors = torch.cat([factors for _, factors in parts])
        self._set_arrays(PackedArrays(held, factors, _padded_bias(bias, self.shape)), bits)

    @classmethod
    def of_arrays(cls, shape: Sequence[int], arrays: PackedArrays, bits: int) -> PackedWeight:
        """Return a weight whose arrays exist already, such as those of a mapped file. They are not copied.

        shape: (out, in) of the weight.
        arrays: the arrays, in the sizes of `array_sizes`.
        bits: the weight's format; see `layout.FORMAT`.
        """
        weight = cls.__new__(cls)
        weight.shape = torch.Size(shape)
        weight._set_arrays(arrays, bits)  # noqa: SLF001 - of this class
        return weight

    @classmethod
    def of_blocks(
        cls, shape: Sequence[int], parts: Iterable[BlockRows], bias: Tensor | None, decode: Decode, bits: int
    ) -> PackedWeight:
        """Pack the blocks of a GGUF file on all of PyTorch's threads: without loss, or rounded to 8 bits.

        shape: (out, in) of the weight.
        parts: the rows of the weight, each output once.
        bias: [out]; None: no bias is added.
        decode: decodes the rows of a part whose type has no kernel; see `blocks.pack_rows`.
        bits: what `bits_of` returns for the types of the parts, or 8.
        """
        from specsot_kernels.cpu.blocks import pack_rows, repack_rows

        num_codes, num_scales, _ = array_sizes(shape, bits)
        if bits != 8:
            packed = torch.zeros(num_codes, dtype=torch.uint8)
            for part in parts:
                repack_rows(part, packed.numpy(), torch.get_num_threads())
            return cls.of_arrays(shape, PackedArrays(packed, torch.empty(0), _padded_bias(bias, shape)), bits)
        codes = torch.full((num_codes,), 128, dtype=torch.uint8)
        scales = torch.zeros(num_scales)
        by_step = codes.numpy().view(np.uint32).reshape(num_scales // LANES, -1, LANES)
        for part in parts:
            pack_rows(part, shape[1], by_step, scales.numpy(), torch.get_num_threads(), decode)
        return cls.of_arrays(shape, PackedArrays(codes, scales, _padded_bias(bias, shape)), 8)

    @staticmethod
    def bits_of(kinds: Collection[int]) -> int:
        """Return the format of a weight that is made of blocks of these types: their own format if all have
        the same one and it is supported without loss on this processor, else 8.

        kinds: ggml's numbers of the types; at least one.
        """
        found = {layout.ENABLED_LOSSLESS_TYPES.get(kind, 8) for kind in kinds}
        return found.pop() if len(found) == 1 else 8

    def _set_arrays(self, arrays: PackedArrays, bits: int) -> None:
        """Keep the arrays, and tabulate where they are.

        arrays: the arrays of the weight.
        bits: the weight's format; see `layout.FORMAT`.
        """
        self.outputs, self.inputs = padded_shape(self.shape)
        self.arrays = arrays
        places = (each.data_ptr() for each in arrays)
        apart = len(arrays.codes) // (self.outputs // LANES)
        self.table = np.array([*places, self.inputs, self.outputs, bits, apart], dtype=np.int64)

    @property
    def bits(self) -> int:
        """Return the entry FORMAT of the table; see `layout.FORMAT`."""
        return int(self.table[layout.FORMAT // 8])

    def rows(self, numbers: Tensor) -> Tensor:
        """Return rows as fp32, [n, in].

        numbers: LongTensor [n], numbers of outputs.

        Row 19 is output 3 of panel 1: in 8 bits, its codes are the bytes 4 * 3 .. 4 * 3 + 3 of every step of
        that panel.
        """
        if self.bits != 8:
            return self._rows_of_groups(numbers)
        blocks = self.arrays.codes.view(self.outputs // LANES, -1, LANES, 4)
        whole = blocks[numbers // LANES, :, numbers % LANES].flatten(1)[:, : self.shape[1]]
        return (whole.float() - 128) * self.arrays.scales[numbers, None]

    def _rows_of_groups(self, numbers: Tensor) -> Tensor:
        """Return rows of a 4- or 6-bit weight as fp32, [n, in].

        numbers: LongTensor [n], numbers of outputs.
        """
        each, lanes, bits = torch.arange(len(numbers)), numbers % LANES, self.bits
        num_groups = K_INPUTS // GROUP if HEAD_BYTES[bits] else 1
        size = HEAD_BYTES[bits] + num_groups * GROUP_BYTES[bits]
        # [n, blocks of 256 inputs or groups, bytes] -> [n, blocks, groups, bytes]
        blocks = self.arrays.codes.view(self.outputs // LANES, -1, size)[numbers // LANES]
        groups = blocks[..., HEAD_BYTES[bits] :].unflatten(-1, (num_groups, -1))
        # [n, blocks, groups, pairs of steps, 4] -> [n, blocks, groups, inputs]
        pairs = groups[..., : 4 * BYTES].unflatten(-1, (4, LANES, 4))[each, :, :, :, lanes]
        codes = torch.stack((pairs & 15, pairs >> 4), -2).flatten(-3)
        # The two numbers of each group; see `layout.GROUP_BYTES`.
        ends = groups[..., 4 * BYTES :].contiguous()
        if bits == 4:
            halves = ends.view(torch.float16).unflatten(-1, (2, LANES))
            scale, minimum = halves[each, :, :, :, lanes].float().unbind(-1)
            return (codes * scale[..., None] + minimum[..., None]).flatten(1)
        heads = blocks[..., : HEAD_BYTES[bits]].contiguous().view(torch.float16).unflatten(-1, (-1, LANES))
        factors = heads[each, :, :, lanes].float()[:, :, None]
        own = ends[..., -2 * LANES :].unflatten(-1, (2, LANES))[each, :, :, :, lanes]
        if bits != Q6_K:
            scale, minimum = (factors * own).unbind(-1)
            return (codes * scale[..., None] + minimum[..., None]).flatten(1)
        upper = ends[..., : 2 * BYTES].unflatten(-1, (2, LANES, 4))[each, :, :, :, lanes]
        upper = torch.stack([upper >> shift & 3 for shift in (0, 2, 4, 6)], -2).flatten(-3)
        signed = (codes + 16 * upper).float() - 32
        return (signed.unflatten(-1, (2, -1)) * (factors * own.view(torch.int8))[..., None]).flatten(1)

    def first(self, outputs: int) -> PackedWeight:
        """Return the first outputs as a weight of their own, with their bias. It shares this weight's memory.

        outputs: number of outputs of the result: a multiple of 16, at most `self.outputs`.

            # weight of 100 outputs, padded to 112: first(48) -> the outputs 0..47
        """
        codes, scales, bias = self.arrays
        part = PackedArrays(codes[: len(codes) // self.outputs * outputs], scales[:outputs], bias[:outputs])
        return PackedWeight.of_arrays((outputs, self.shape[1]), part, self.bits)

    def in_4_bits(self) -> PackedWeight:
        """Return this 8-bit weight rounded to 4 bits, as a copy whose bias is zeros. The number of inputs
        must be a multiple of GROUP. It is converted to floats in parts, because the whole weight would take
        eight times the memory of the result.
        """
        rows = max(PACKED_AT_ONCE // self.inputs // LANES, 1) * LANES
        parts = [PackedWeight(self.rows(part), None, 4) for part in torch.arange(self.shape[0]).split(rows)]
        codes = torch.cat([part.arrays.codes for part in parts])
        return PackedWeight.of_arrays(
            self.shape, PackedArrays(codes, torch.empty(0), _padded_bias(None, self.shape)), 4
        )

    def _pack_part(self, part: tuple[Tensor, ...], bits: int) -> tuple[Tensor, Tensor]:
        """Round and reorder some outputs; return codes (in 4 bits with their scales), and the scales (in 8
        bits).

        part: (weight,), or codes, scales and minimum values, of these outputs.
        bits: 8 or 4.
        """
        round_, pack = (_round8, _pack8) if bits == 8 else (_round4, _pack4)
        codes, scale, minimum = round_(part[0].float()) if len(part) == 1 else part
        below = -len(codes) % LANES
        missing_inputs = -self.shape[1] % (LONG_GROUP if bits == 8 else GROUP)
        padded_codes = F.pad(codes, (0, missing_inputs, 0, below))
        return pack(padded_codes, *(F.pad(each, (0, 0, 0, below)) for each in (scale, minimum)))

    @property
    def nbytes(self) -> int:
        """Return the bytes that the packed weight takes."""
        return sum(each.nbytes for each in self.arrays)


def padded_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of outputs and inputs that kernels compute with: multiples of 16 and 32. 8-bit codes
    are stored for whole groups of 64 inputs.

    shape: (out, in) of a weight.
    """
    return -(-shape[0] // LANES) * LANES, -(-shape[1] // GROUP) * GROUP


def array_sizes(shape: Sequence[int], bits: int) -> tuple[int, int, int]:
    """Return how many numbers the arrays of a packed weight have: codes (bytes), scales and bias.

    shape: (out, in) of the weight.
    bits: the weight's format; see `layout.FORMAT`.

    A weight [20, 100] has 32 padded outputs. In 8 bits these are 32 * 128 codes and 32 scales, in 4 bits 2
    panels of 4 groups of GROUP_BYTES[4], and no scales apart from those.
    """
    outputs, inputs = padded_shape(shape)
    groups = -(-inputs // LONG_GROUP) if bits == 8 else inputs // GROUP
    of_panel = groups * GROUP_BYTES[bits] + inputs // K_INPUTS * HEAD_BYTES[bits]
    return outputs // LANES * of_panel, outputs if bits == 8 else 0, outputs


def _padded_bias(bias: Tensor | None, shape: Sequence[int]) -> Tensor:
    """Return a bias in fp32, filled up with zeros to the padded number of outputs.

    bias: [out] or shorter; None: there is no bias, and the result is zeros.
    shape: (out, in) of the weight.
    """
    result = torch.zeros(padded_shape(shape)[0])
    if bias is not None:
        result[: len(bias)] = bias
    return result


def _round8(weight: Tensor) -> Codes:
    """Round to int8 with a symmetric scale for each output: return codes [out, in], scales [out, 1], and
    zeros [out, 1].

    weight: fp32 [out, in], the weight.
    """
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale.clamp_min(TINY)).round_().to(torch.int8), scale, torch.zeros_like(scale)


def _pack8(codes: Tensor, scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
    """Return 8-bit codes reordered into panels and steps, and the scales [out]; codes become unsigned by
    adding 128.

    codes: int8 [out, in], of whole panels and groups.
    scale: fp32 [out, 1], the scales.
    minimum: not used; 8-bit codes are symmetric.
    """
    whole = codes.view(torch.uint8) ^ 128  # 128 more
    return whole.view(-1, LANES, codes.shape[1] // 4, 4).transpose(1, 2).flatten(), scale.flatten()


def _round4(weight: Tensor) -> Codes:
    """Round to 4 bits with a scale and a minimum value for each 32 inputs: return codes [out, in], scales and
    minimum values.

    weight: fp32 [out, in]; 32 divides its number of inputs.
    """
    grouped = weight.view(len(weight), -1, GROUP)
    minimum = grouped.amin(-1).half()
    scale = ((grouped.amax(-1) - minimum.float()) / 15).half()
    steps = (grouped - minimum.float()[..., None]) / scale.float().clamp_min(TINY)[..., None]
    return steps.round_().clamp_(0, 15).to(torch.uint8).flatten(1), scale, minimum


def _pack4(codes: Tensor, scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
    """Return 4-bit codes reordered into panels and groups, with the fp16 scales and minimum values after each
    group.

    The second result is empty: 8-bit weights have their scales there.

    codes: uint8 [out, in], of whole panels and groups.
    scale: [out, in / 32], the scale of each group of inputs.
    minimum: [out, in / 32], the minimum value of each group of inputs.
    """
    groups = codes.shape[1] // GROUP
    # [panels, outputs, groups, pairs of steps, lower or upper, inputs]
    ordered = codes.view(-1, LANES, groups, 4, 2, 4).permute(0, 2, 3, 1, 5, 4)
    pairs = (ordered[..., 0] | (ordered[..., 1] << 4)).flatten(2)
    of_groups = (
        each.half().view(-1, LANES, groups).transpose(1, 2).contiguous() for each in (scale, minimum)
    )
    held = torch.cat((pairs, *(each.view(torch.uint8) for each in of_groups)), -1).flatten()
    return held, torch.empty(0)


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """Which columns each row of a frame sees, in order.

    sight: int64 [rows, 1 or kv_heads, 5], see `layout.VISIBLE_COLUMNS`.
    longest: largest number of columns that a row sees.
    held: arrays into which `sight` points.
    """

    sight: Numbers
    longest: int
    held: tuple[Numbers, ...]


def plan_columns(spans: Sequence[RowSpan], page_rows: int, row_bytes: int, kv_heads: int) -> ColumnPlan:
    """Return which columns the rows of a frame see, as byte offsets from the first key of the first page.

    row_bytes: bytes of one key of one head.
    spans: one span per segment of the frame, in row order; at least one.
    page_rows: rows of a KV page.
    kv_heads: number of KV heads.

    Pages of 4 rows (2, 0) and 2 KV heads give the columns 0..7 the offsets 16, 17, 18, 19, 0, 1, 2, 3 times
    row_bytes.
    """
    heads_apart = kv_heads if any(isinstance(span.sight, HeadColumns) for span in spans) else 1
    depths = [span.num_pages(page_rows) for span in spans]
    pages = np.array([page for span, depth in zip(spans, depths) for page in span.pages[:depth]], np.int64)
    offsets = ((pages * (kv_heads * page_rows))[:, None] + np.arange(page_rows)) * row_bytes
    held = [_padded_offsets(offsets.reshape(-1))]
    counts, begins = (np.array(each) for each in ([span.rows for span in spans], depths))
    firsts = np.cumsum(counts) - counts
    begins = (np.cumsum(begins) - begins) * page_rows
    sight = np.zeros((counts.sum(), heads_apart, 5), dtype=np.int64)
    sight[..., 0] = np.repeat(held[0].ctypes.data + 8 * begins, counts)[:, None]
    before = np.array([span.base + 1 for span in spans]) - firsts
    sight[..., 1] = (np.arange(len(sight)) + np.repeat(before, counts))[:, None]
    for span, first, begin in zip(spans, firsts, begins):
        if span.sight is not None or (span.visible is not None and span.tail > 1):  # else it sees itself last
            own_offsets = held[0][begin : begin + span.total]
            held.append(_fill_sights(span, sight[first : first + span.rows], own_offsets))
    return ColumnPlan(sight, max(span.total for span in spans), tuple(held))


def _fill_sights(span: RowSpan, rows: Numbers, offsets: Numbers) -> Numbers:
    """Fill in the sights of rows [rows, heads, 5] that see other columns than all up to themselves.

    The result is the array of byte offsets into which they point, in addition to `offsets`; the caller keeps
    it alive. Sinks of `VisibleColumns` come first, the rest of what a row sees after them; `HeadColumns` give
    each head a list of its own; without a policy every column before the base comes first.

    span: the rows of one segment.
    rows: the rows' part of `ColumnPlan.sight`, which is written.
    offsets: byte offsets of all columns of the span's sequence.
    """
    match span.sight:
        case VisibleColumns(sinks, since, turns):
            rows[..., 1], rows[..., 4] = np.array(sinks)[:, None], np.array(turns)[:, None]
            recent = np.arange(span.base) >= np.array(since)[:, None]
            seen = np.concatenate((recent, tail_seen(span)), 1)[:, None]
            start = 0
        case HeadColumns() as sight:
            rows[..., 1], seen, start = 0, ~hidden_by_head(span, sight), 0
        case None:
            rows[..., 1], seen, start = span.base, tail_seen(span)[:, None], span.base
    tail = _padded_offsets(offsets[start + np.nonzero(seen)[-1]])
    counts = np.broadcast_to(seen.sum(-1), rows.shape[:2])
    ends = np.cumsum(seen.sum(-1)).reshape(seen.shape[:2])
    rows[..., 2], rows[..., 3] = tail.ctypes.data + 8 * (ends - seen.sum(-1)), counts
    return tail


def _padded_offsets(offsets: Numbers) -> Numbers:
    """Pad the offsets with zeros, since kernels read and prefetch a fixed number of columns at a time.

    offsets: byte offsets of columns.
    """
    return np.concatenate((offsets, np.zeros(layout.COLUMNS_AT_ONCE, dtype=np.int64)))


class _Scratch(threading.local):
    """Memory that this thread's newest frame works in.

    memory: the memory, reused by all frames of the thread.
    needed_bytes: bytes that the newest frame needed.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.needed_bytes = 0


# The scratch memory of each thread.
_scratch = _Scratch()


class KernelFrame:
    """The table of a frame, the memory it points to, and the threads that work on it.

    Only the newest frame of a thread may be run, since all of them share its scratch memory.
    """

    def __init__(self, rows: int, widest: int, eps: float = 0.0) -> None:
        """Prepare a frame.

        A frame of several threads is prepared if PyTorch computes with GNU's OpenMP; otherwise one thread
        runs.

        rows: number of rows.
        widest: largest number of inputs of a product.
        eps: epsilon of the RMSNorms.
        """
        self.rows = rows
        self._numbers = np.zeros(layout.FRAME_FIELDS, dtype=np.int64)
        self._tables = np.zeros(3, dtype=np.int64)
        self._tables[0] = self._numbers.ctypes.data
        self._held: list[object] = []
        if _scratch.needed_bytes > len(_scratch.memory):
            _scratch.memory = torch.empty(_scratch.needed_bytes, dtype=torch.uint8)
        self._free = _scratch.memory.data_ptr()
        self._scratch = _scratch.memory
        self._used = 0
        self._threads = torch.get_num_threads() if _openmp() else 1
        self.put(layout.ROWS, rows)
        self.put_float(layout.EPS, eps)
        if self._threads > 1:
            for field, entry in zip((layout.THREAD, layout.THREADS, layout.SYSTEM), _entries()):
                self.put(field, entry)
            self.point(layout.BARRIER, torch.zeros(BARRIER_BYTES, dtype=torch.uint8))
        # AMX reads whole tiles of rows, and discards those after the last row: the memory must exist.
        self.make(layout.QUANTIZED, (rows + TILE_ROWS) * (widest + LONG_GROUP) * layout.STEP_BYTES // 4)
        for field in (layout.ROW_SCALES, layout.CORRECTIONS):
            # Two numbers a group in Q6_K.
            self.make(field, (rows * (2 * widest // GROUP + 1) + TILE_ROWS) * 4)
        self.make(layout.NORMED_ROW, self._threads * widest * 4)

    def put(self, field: int, number: int) -> None:
        """Write a number into a field of the table.

        field: offset of the field in bytes; see `layout`.
        number: an integer or an address.
        """
        self._numbers[field // 8] = number

    def put_float(self, field: int, number: float) -> None:
        """Write a number into a field of the table, as fp32.

        field: offset of the field in bytes; see `layout`.
        number: the number, which is rounded.
        """
        self._numbers[field // 8] = np.float32(number).view(np.int32)

    def point(self, field: int, tensor: Tensor) -> None:
        """Let a field point to a tensor, which is kept alive as long as the frame.

        field: offset of the field in bytes; see `layout`.
        tensor: a contiguous tensor.
        """
        assert tensor.is_contiguous()
        self._held.append(tensor)
        self.put(field, tensor.data_ptr())

    def make(self, field: int, size: int) -> None:
        """Let a field point to scratch memory.

        If the thread's scratch memory is too small, new memory is allocated for this field, and the thread's
        next frame allocates enough for all.

        field: offset of the field in bytes; see `layout`.
        size: bytes that are needed.
        """
        first = self._used
        self._used = self._used + size + -size % BYTES
        if self._used <= len(self._scratch):
            self.put(field, self._free + first)
        else:
            _scratch.needed_bytes = self._used
            self.point(field, torch.empty(size, dtype=torch.uint8))

    def make_attention(self, longest: int, head_dim: int, group: int) -> None:
        """Allocate what each thread needs for attention.

        The fields SCORES_APART, SCORES, QUERY_TABLES, ROTATED and VALUE_SUMS are set.

        longest: largest number of columns of a row.
        head_dim: numbers of a head.
        group: query heads of each KV head.
        """
        queries = self._threads * layout.ROWS_AT_ONCE * group
        apart = longest + LANES + 1
        self.put(layout.SCORES_APART, 4 * apart)
        self.make(layout.SCORES, queries * apart * 4)
        self.make(layout.QUERY_TABLES, queries * layout.QUERY_TABLE_BYTES)
        for field in (layout.ROTATED, layout.VALUE_SUMS):
            self.make(field, queries * head_dim * 4)

    def run(self, table: Numbers, work: int) -> None:
        """Run the kernel on all threads, and return when all have finished.

        table: int64, the tables of layers, or of a product.
        work: what is computed; see `layout.MULTIPLY`.
        """
        self._tables[1], self._tables[2] = table.ctypes.data, work
        library = _openmp()
        if library is None or self._threads == 1:
            kernel.kernel_function()(self._tables.ctypes.data)
        else:
            library.GOMP_parallel(kernel.kernel_address(), self._tables.ctypes.data, self._threads, 0)


# Weight [in] and epsilon of an RMSNorm that is applied before a product.
Normed = tuple[Tensor, float]


def multiply(x: Tensor, weight: PackedWeight, norm: Normed | None = None) -> Tensor:
    """Return the product of x [rows, in] with a packed weight, fp32 [rows, out].

    A bias is added. No rows give an empty result.

    x: [rows, in], the input, in any type of floats.
    weight: the packed weight.
    norm: weight [in] and epsilon of an RMSNorm that is applied first; None: no norm.
    """
    rows = len(x)
    (count, size) = weight.shape
    if not rows:
        return torch.empty(0, count)
    whole = x.float() if size == weight.inputs else F.pad(x.float(), (0, weight.inputs - size))
    frame = _product_frame(whole, weight, norm)
    out = torch.empty(rows, weight.outputs)
    frame.point(layout.OUTPUT, out)
    frame.run(weight.table, layout.MULTIPLY)
    return out[:, :count]


def choose(
    x: Tensor, weight: PackedWeight, norm: Normed | None, count: int, offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the best outputs of each row: log-probabilities and token ids, [rows, count] each, best first.

    x: fp32 [rows, in], the input.
    weight: the packed weight; its outputs must be a multiple of 16, since padding would compete.
    norm: weight [in] and epsilon of an RMSNorm that is applied first; None: no norm.
    count: how many outputs to return, at most the number of outputs.
    offsets: int64 [out], added to each output's number to get its token id; None adds nothing.
    """
    frame = _product_frame(x, weight, norm)
    shape = (len(x), count)
    chances = torch.empty(shape)
    tokens = torch.empty(shape, dtype=torch.long)
    frame.make(layout.OUTPUT, len(x) * weight.outputs * 4)
    for field, held in (
        (layout.LOG_PROBABILITIES, chances),
        (layout.TOKENS, tokens),
        (layout.OFFSETS, offsets),
    ):
        if held is not None:
            frame.point(field, held)
    frame.put(layout.BEST, weight.outputs)
    frame.put(layout.COUNT, count)
    frame.run(weight.table, layout.TOP_K)
    return chances, tokens


def _product_frame(x: Tensor, weight: PackedWeight, norm: Normed | None) -> KernelFrame:
    """Return a frame for one product.

    Its output is not set yet.

    x: fp32 [rows, in], the input.
    weight: the packed weight.
    norm: weight [in] and epsilon of an RMSNorm that is applied first; None: no norm.
    """
    frame = KernelFrame(len(x), weight.inputs, norm[1] if norm else 0.0)
    frame.point(layout.X, x.contiguous())
    if norm is not None:
        frame.point(layout.NORM, norm[0])
    return frame


@cache
def _openmp() -> ctypes.CDLL | None:
    """Return GNU's OpenMP library, whose threads PyTorch computes with; None if PyTorch has another one (then
    one thread runs).

    If there are several such libraries, the first by name is taken.
    """
    lib = Path(torch.__file__).parent / "lib"
    found = sorted((*lib.glob("libgomp*.so*"), *(lib.parent.parent / "torch.libs").glob("libgomp*.so*")))
    if not found:
        return None
    library = ctypes.CDLL(str(found[0]))
    library.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    library.GOMP_parallel.restype = None
    return library


@cache
def _entries() -> tuple[int, ...]:
    """Return the addresses of three functions: the thread's number, the number of threads, and the system
    call.
    """
    named = (
        (_openmp(), "omp_get_thread_num"),
        (_openmp(), "omp_get_num_threads"),
        (ctypes.CDLL(None), "syscall"),
    )
    return tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for library, name in named)
