"""Decodes matrices of published quantization formats, to floats or to this project's forms.

Each format has one function, which returns a `StoredMatrix`. If one of this project's forms (int8, int4, fp8)
can hold the same codes, the weights are used as they are, without rounding them a second time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specsot.checkpoint.quantization_config import GROUP, Method, Numbers, Published
from specsot.errors import ModelError, one_line
from specsot.members import Quantization

# AWQ packs eight neighbouring numbers into an int32: number i is in nibble AWQ_PLACES[i].
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
# What the codes 0..7 of fp4 (e2m1) stand for; codes 8..15 stand for the same numbers with a minus sign.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Numbers. How many are fp32 at a time; bounds the extra memory. Untuned.
FLOATS_AT_A_TIME = 1 << 24

# Returns a tensor of the matrix by its suffix; raises ModelError if it is missing.
Part = Callable[[str], Tensor]
# Returns whether the matrix has a tensor with this suffix.
Has = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A quantized matrix [out, in] as files store it: weight = (code - zero) * scale.

    codes: [out, in], integers or 8-bit floats.
    scale: [out, groups], one scale per output and group of inputs.
    group: Inputs per group: input i belongs to group i // group.
    zero: Zero points [out, groups], or one number for all.
    table: [16], the number that each code stands for; None: codes are numbers themselves.
    order: [in], the group of each input, if inputs of a group are not adjacent; None: see `group`.
    """

    codes: Tensor
    scale: Tensor
    group: int
    zero: Tensor | int = 0
    table: Tensor | None = None
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return (out, in) of the matrix."""
        return self.codes.shape[0], self.codes.shape[1]

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix [out, in] in `dtype`; it is computed in fp32.

        Codes are looked up in `table` if there is one; then zero points are subtracted and scales multiplied.

        dtype: Type of the result.
        """
        outputs, inputs = self.shape
        columns = self.order
        if columns is None:
            columns = torch.arange(inputs, device=self.codes.device) // self.group
        matrix = torch.empty(outputs, inputs, dtype=dtype, device=self.codes.device)
        rows_at_a_time = max(FLOATS_AT_A_TIME // inputs, 1)
        for first in range(0, outputs, rows_at_a_time):
            rows = slice(first, first + rows_at_a_time)
            numbers = self.codes[rows].float() if self.table is None else self.table[self.codes[rows].int()]
            if isinstance(self.zero, Tensor):
                numbers = numbers - self.zero[rows].float()[:, columns]
            elif self.zero:
                numbers = numbers - self.zero
            matrix[rows] = numbers.mul_(self.scale[rows].float()[:, columns])
        return matrix


class Codes(NamedTuple):
    """A matrix that was published quantized, in one of this project's forms: weight = values * scale +
    offset.

    values: [out, in]: int8 for int8; uint8 below 16 for int4; uint8 with the bytes of the floats for fp8.
    scale: fp32 [out, 1], or [out, in / 32] for int4.
    offset: fp32, with the shape of `scale`.
    """

    values: Tensor
    scale: Tensor
    offset: Tensor

    @property
    def shape(self) -> torch.Size:
        """Return (out, in) of the matrix."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Return the device of the matrix."""
        return self.values.device

    def split(self, max_outputs: int) -> list[Codes]:
        """Split the matrix into parts of some outputs, in order; the last part may be smaller.

        max_outputs: Number of outputs of every part but the last.
        """
        return [Codes(*part) for part in zip(*(tensor.split(max_outputs) for tensor in self))]


def codes_of(matrix: StoredMatrix, form: Quantization) -> Codes:
    """Return the codes of a stored matrix in the form `form`, without rounding.

    Raises ValueError if the form cannot hold the codes. int8 and fp8 need one scale and the same zero point
    for every output; fp8 also needs codes of float8_e4m3fn without zero points, and int8 codes that fit 8
    signed bits after their zero point is subtracted. A matrix with a table of numbers, or whose inputs of a
    group are not adjacent, has no such form.

    matrix: The matrix as files store it.
    form: "int8", "int4" or "fp8".
    """
    if matrix.order is not None or matrix.table is not None:
        raise ValueError("the inputs that share a scale are not adjacent")
    codes = matrix.codes
    scale = matrix.scale.float().contiguous()
    zero = matrix.zero + torch.zeros_like(scale)
    if form == "int4":
        return _int4_codes(codes, scale, zero, matrix.group)
    if scale.shape[1] > 1 or (zero != zero[0, 0]).any():
        raise ValueError("an output has several scales, or a zero of its own")
    if form == "fp8":
        if codes.dtype != torch.float8_e4m3fn or zero.any():
            raise ValueError(f"the codes are {codes.dtype}, or have zero points")
        values = codes.contiguous().view(torch.uint8)
    else:
        centered = codes.to(torch.int16) - int(zero[0, 0])
        if codes.is_floating_point() or centered.min() < -128 or centered.max() > 127:
            raise ValueError("the codes are not signed 8-bit integers")
        values = centered.to(torch.int8).contiguous()
    return Codes(values, scale, torch.zeros_like(scale))


def _int4_codes(codes: Tensor, scale: Tensor, zero: Tensor, group: int) -> Codes:
    """Return int4 codes. A stored group of 64 or 128 inputs becomes groups of 32 with equal scales.

    The inputs must be a multiple of 32, and stored groups too; codes beyond 4 bits and floats are refused.

    codes: [out, in], integers of 4 bits; int8 codes are signed and are shifted by 8.
    scale: fp32 [out, groups], the scales.
    zero: fp32 [out, groups], the code that stands for 0.
    group: Inputs per stored group.

    Raises ValueError if int4 cannot hold the codes.
    """
    if codes.is_floating_point() or codes.shape[1] % GROUP or group % GROUP:
        raise ValueError(f"the codes are not integers in groups of a multiple of {GROUP} inputs")
    sign_offset = 8 if codes.dtype == torch.int8 else 0
    groups = codes.shape[1] // GROUP
    values = (codes + sign_offset).to(torch.uint8).contiguous()
    if values.max() > 15:
        raise ValueError("the codes have more than 4 bits")
    parts = scale, -(zero + sign_offset) * scale
    return Codes(values, *(part.repeat_interleave(group // GROUP, 1)[:, :groups] for part in parts))


def unpack(packed: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Unpack int32 [..., n] to uint8 [..., n * 32 / bits], the lowest bits first.

    places: The place (in units of `bits`) of each number within an int32; None: in order.
    packed: int32 [..., n], the packed numbers.
    bits: Bits of a number: 2, 4 or 8.

    # bits 4: [0x76543210] -> [0 1 2 3 4 5 6 7], with AWQ_PLACES -> [0 4 1 5 2 6 3 7]
    """
    shifts = torch.tensor(places or range(32 // bits), dtype=torch.int32, device=packed.device) * bits
    return (packed[..., None] >> shifts).bitwise_and(2**bits - 1).to(torch.uint8).flatten(-2)


def halves(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the low and the high four bits of each byte, two tensors of the shape of `packed`.

    packed: uint8, two codes per byte.
    """
    return packed & 15, packed >> 4


def _awq(part: Part, has: Has, numbers: Numbers, published: Published) -> StoredMatrix:
    """Return an AWQ matrix from qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out].

    part: Returns a tensor of the matrix by its suffix; raises ModelError if it is missing.
    has: Returns whether the matrix has a tensor with this suffix.
    numbers: The group size.
    published: How the model's files are quantized, as its config says.
    """
    codes, zero = (unpack(part(name), 4, AWQ_PLACES).t() for name in (".qweight", ".qzeros"))
    return StoredMatrix(codes, part(".scales").t(), numbers.group or codes.shape[1], zero)


def _gptq(part: Part, has: Has, numbers: Numbers, published: Published) -> StoredMatrix:
    """Return a GPTQ matrix from qweight [in / n, out], qzeros [groups, out / n], scales [groups, out], g_idx
    [in].

    n is the number of codes in an int32. g_idx may be missing. Zero points that exceed the bits after the
    offset is added wrap around to 0.

    part: Returns a tensor of the matrix by its suffix; raises ModelError if it is missing.
    has: Returns whether the matrix has a tensor with this suffix.
    numbers: Bits, group size and kind of the matrix's numbers, as the config says.
    published: Its `zero_offset` is added to the stored zero points.
    """
    codes = unpack(part(".qweight").t().contiguous(), numbers.bits)
    zero = unpack(part(".qzeros"), numbers.bits).t() + published.zero_offset
    group = numbers.group or codes.shape[1]
    order = part(".g_idx").long() if has(".g_idx") else None
    return StoredMatrix(
        codes,
        part(".scales").t(),
        group,
        zero & (2**numbers.bits - 1),
        order=_unless_sequential(order, group),
    )


def _compressed_tensors(part: Part, has: Has, numbers: Numbers, published: Published) -> StoredMatrix:
    """Return a compressed-tensors matrix from weight_packed or weight [out, in], weight_scale,
    weight_zero_point.

    A scale belongs to a group of inputs, a row, a block, or the whole matrix. For fp4, weight_packed has two
    codes per byte, and bytes in weight_scale are powers of two. Without weight_zero_point the zero point is
    the middle of the range for packed integers, and 0 for others. weight_g_idx may be missing.

    part: Returns a tensor of the matrix by its suffix; raises ModelError if it is missing.
    has: Returns whether the matrix has a tensor with this suffix.
    numbers: Bits, group size and kind of the matrix's numbers, as the config says.
    published: How the model's files are quantized, as its config says.
    """
    zero: Tensor | int = 0
    if numbers.kind == "fp4":
        lower, upper = halves(part(".weight_packed"))
        codes = torch.stack((lower, upper), -1).flatten(1)
        exponents = part(".weight_scale")
        scale = exponents.float() if exponents.is_floating_point() else _powers(exponents)
        return StoredMatrix(codes, scale, GROUP, table=fp4_table(codes.device))
    if has(".weight_packed"):
        outputs, inputs = part(".weight_shape").tolist()
        codes = unpack(part(".weight_packed"), numbers.bits)[:, :inputs]
        zero = 1 << (numbers.bits - 1)
        if has(".weight_zero_point"):
            zero = unpack(part(".weight_zero_point").t().contiguous(), numbers.bits).t()[:outputs]
    else:
        codes = part(".weight")
        if has(".weight_zero_point"):
            zero = part(".weight_zero_point")
    scale, group = _scale_by_group(part(".weight_scale"), codes, numbers)
    if isinstance(zero, Tensor):
        zero, _ = _scale_by_group(zero, codes, numbers)
    order = part(".weight_g_idx").long() if has(".weight_g_idx") else None
    return StoredMatrix(codes, scale, group, zero, order=_unless_sequential(order, group))


def _powers(exponents: Tensor) -> Tensor:
    """Return the powers of two that bytes stand for, 2 ** (byte - 127), fp32 in the shape of `exponents`.

    exponents: uint8, the exponents plus 127.
    """
    return torch.exp2(exponents.float() - 127)


def _mxfp4(part: Part, has: Has, numbers: Numbers, published: Published) -> StoredMatrix:
    """Return MXFP4 weights of all experts as one matrix, [experts * out, in].

    _blocks is [experts, out, groups, 16] with two codes per byte, the low half first; _scales is
    [experts, out, groups].

    part: Returns a tensor of the matrix by its suffix; raises ModelError if it is missing.
    has: Returns whether the matrix has a tensor with this suffix.
    numbers: Bits, group size and kind of the matrix's numbers, as the config says.
    published: How the model's files are quantized, as its config says.
    """
    codes = torch.stack(halves(part("_blocks").flatten(0, 1).flatten(1)), -1).flatten(1)
    scale = _powers(part("_scales").flatten(0, 1))
    return StoredMatrix(codes, scale, GROUP, table=fp4_table(codes.device))


def _fp8(part: Part, has: Has, numbers: Numbers, published: Published) -> StoredMatrix:
    """Return an fp8 matrix from weight [out, in] in 8-bit floats, and weight_scale_inv of a block or of all.

    Despite its name, weight_scale_inv is multiplied with the weight.

    part: Returns a tensor of the matrix by its suffix; raises ModelError if it is missing.
    has: Returns whether the matrix has a tensor with this suffix.
    numbers: The size of a block, if scales belong to blocks.
    published: How the model's files are quantized, as its config says.
    """
    codes = part(".weight")
    return StoredMatrix(codes, *_scale_by_group(part(".weight_scale_inv"), codes, numbers))


def _bitsandbytes(part: Part, has: Has, numbers: Numbers, published: Published) -> StoredMatrix:
    """Return a bitsandbytes matrix, in 8 bits if it has a tensor SCB, and otherwise in 4 bits (nf4 or fp4).

    In 4 bits: weight [out * in / 2, 1], and absmax of every `blocksize` numbers, which may be quantized to 8
    bits itself. In 8 bits: weight [out, in] and SCB [out], 127 times the scale. StopIteration is raised for a
    matrix without SCB or state; `decode` turns it into ModelError.

    part: Returns a tensor of the matrix by its suffix; raises ModelError if it is missing.
    has: Returns whether the matrix has a tensor with this suffix.
    numbers: Bits, group size and kind of the matrix's numbers, as the config says.
    published: How the model's files are quantized, as its config says.
    """
    if has(".SCB"):
        codes = part(".weight")
        return StoredMatrix(codes, part(".SCB").float()[:, None] / 127, codes.shape[1])
    kind = next(name for name in ("nf4", "fp4") if has(f".weight.quant_state.bitsandbytes__{name}"))
    state = quant_state(part(f".weight.quant_state.bitsandbytes__{kind}"))
    (outputs, inputs) = state["shape"]
    size = state["blocksize"]
    lower, upper = halves(part(".weight").flatten())
    codes = torch.stack((upper, lower), -1).flatten()[: outputs * inputs].view(outputs, inputs)
    scale = part(".weight.absmax")
    if has(".weight.nested_absmax"):
        scale_of_scales = part(".weight.nested_absmax").repeat_interleave(state["nested_blocksize"])[
            : len(scale)
        ]
        scale = part(".weight.nested_quant_map")[scale.int()] * scale_of_scales + state["nested_offset"]
    # If blocks do not end with a row, each number gets a scale of its own.
    if inputs % size:
        scale = scale.repeat_interleave(size)[: outputs * inputs]
        size = 1
    return StoredMatrix(codes, scale.view(outputs, -1), size, table=part(".weight.quant_map").float())


def quant_state(stored: Tensor) -> Mapping[str, Any]:
    """Return bitsandbytes' JSON description of a matrix: its shape, block sizes and offset.

    stored: uint8 [bytes], the JSON text as a tensor.
    """
    return json.loads(bytes(stored.tolist()))


def fp4_table(device: torch.device) -> Tensor:
    """Return the numbers that the 16 codes of fp4 stand for, fp32 [16].

    device: Device of the result.
    """
    return torch.tensor((*FP4, *(-number for number in FP4)), device=device)


def _scale_by_group(scale: Tensor, codes: Tensor, numbers: Numbers) -> tuple[Tensor, int]:
    """Return scales of the whole matrix, of rows, groups or blocks in the shape [out, groups], and the group
    size.

    The second result is the number of inputs of a group.

    # block (128, 128), weight [256, 256], scale [2, 2] -> scale [256, 2], group 128

    One scale for the whole matrix gives one group of all inputs. Scales of rows give one group too, scales of
    groups `numbers.group` inputs, and scales of blocks the block's inputs.

    scale: One number, [out] or [out, 1] for rows, [out, groups] for groups, or [blocks, blocks].
    codes: [out, in], for its shape.
    numbers: Size of blocks or groups, as the config says.
    """
    outputs, inputs = codes.shape
    scale = scale.reshape(1, 1) if scale.numel() == 1 else scale.view(len(scale), -1)
    rows_per_block, inputs_per_group = numbers.block or (1, numbers.group or inputs)
    if len(scale) == 1:
        return scale.expand(outputs, -1), inputs if scale.numel() == 1 else inputs_per_group
    return scale.repeat_interleave(rows_per_block, 0)[:outputs], inputs_per_group


def _unless_sequential(order: Tensor | None, group: int) -> Tensor | None:
    """Return the group of each input, or None if input i is in group i // group anyway.

    order: [in], the group of each input; None: no order is stored.
    group: Inputs per group.
    """
    if order is None or torch.equal(order, torch.arange(len(order), device=order.device) // group):
        return None
    return order


# The function that reads the matrices of each format.
DECODERS: Mapping[Method, Callable[[Part, Has, Numbers, Published], StoredMatrix]] = {
    "awq": _awq,
    "gptq": _gptq,
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": _mxfp4,
}


def decode(module: str, part: Part, has: Has, published: Published) -> StoredMatrix:
    """Return the quantized matrix `module`, read as the format `published` describes it.

    The matrix has one scale per output and group of inputs; ModelError is also raised if it does not.

    part: Returns a tensor of the module by its suffix.
    has: Returns whether the module has a tensor with this suffix.
    module: Name of the module, for errors.
    published: How the model's files are quantized, as its config says.

    Raises ModelError if a tensor is missing, or if the tensors do not fit each other.
    """
    try:
        matrix = DECODERS[published.method](part, has, published.numbers(module), published)
        groups = -(-matrix.shape[1] // matrix.group)
        if tuple(matrix.scale.shape) != (matrix.shape[0], groups):
            raise ValueError(f"scales {list(matrix.scale.shape)} do not fit {list(matrix.shape)}")
    except (RuntimeError, ValueError, KeyError, StopIteration, IndexError) as error:
        raise ModelError(f"{module}: its tensors are not {published}: {one_line(error)}") from None
    return matrix
