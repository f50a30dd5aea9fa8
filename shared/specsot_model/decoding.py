"""Decodes matrices quantized in published formats, to floats or to a form of ours with the same codes: a
function for each format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specsot.checkpoint.quantization_config import GROUP, Method, Numbers, Published
from specsot.errors import ModelError
from specsot.members import Quantization

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in which nibble of an int32 each of eight neighbours is
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1; then the same below zero
FLOATS_AT_A_TIME = 1 << 24  # numbers that are fp32 at a time

Part = Callable[[str], Tensor]  # a tensor of the matrix, by its suffix; ModelError where it is missing
Has = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """[out, in] as (code - zero) * scale, codes perhaps by a table.

    codes: [out, in], integers or 8-bit floats. scale: [out, groups]; input i belongs to group i // group.
    zero: [out, groups], or one number. table: [16], what codes stand for.
    order: [in], the group of each input, where they are not in order.
    """

    codes: Tensor
    scale: Tensor
    group: int
    zero: Tensor | int = 0
    table: Tensor | None = None
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[out, in] in `dtype`; computed in fp32."""
        outputs, inputs = self.shape
        columns = self.order
        if columns is None:
            columns = torch.arange(inputs, device=self.codes.device) // self.group
        made = torch.empty(outputs, inputs, dtype=dtype, device=self.codes.device)
        step = max(FLOATS_AT_A_TIME // inputs, 1)
        for first in range(0, outputs, step):
            rows = slice(first, first + step)
            numbers = self.codes[rows].float() if self.table is None else self.table[self.codes[rows].int()]
            if isinstance(self.zero, Tensor):
                numbers = numbers - self.zero[rows].float()[:, columns]
            elif self.zero:
                numbers = numbers - self.zero
            made[rows] = numbers.mul_(self.scale[rows].float()[:, columns])
        return made


class Codes(NamedTuple):
    """A matrix that others rounded, [out, in] = whole * scale + least, in a form of ours.

    whole: [out, in], int8; of int4 uint8 below 16; of fp8 the bytes of 8-bit floats, uint8.
    scale, least: fp32, [out, 1], or [out, in / 32] of int4.
    """

    whole: Tensor
    scale: Tensor
    least: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.whole.shape

    @property
    def device(self) -> torch.device:
        return self.whole.device

    def split(self, rows: int) -> list[Codes]:
        return [Codes(*part) for part in zip(*(each.split(rows) for each in self))]


def codes_of(matrix: StoredMatrix, form: Quantization) -> Codes:
    """Its codes as they are. Raises ValueError where this form cannot hold them."""
    if matrix.order is not None or matrix.table is not None:
        raise ValueError("inputs that share a scale do not lie side by side")
    codes = matrix.codes
    scale = matrix.scale.float().contiguous()
    zero = matrix.zero + torch.zeros_like(scale)
    if form == "int4":
        return _fours(codes, scale, zero, matrix.group)
    if scale.shape[1] > 1 or (zero != zero[0, 0]).any():
        raise ValueError("an output has several scales, or a zero of its own")
    if form == "fp8":
        if codes.dtype != torch.float8_e4m3fn or zero.any():
            raise ValueError(f"they are {codes.dtype}")
        whole = codes.contiguous().view(torch.uint8)
    else:
        centred = codes.to(torch.int16) - int(zero[0, 0])
        if codes.is_floating_point() or centred.min() < -128 or centred.max() > 127:
            raise ValueError("they are not whole numbers of 8 bits about zero")
        whole = centred.to(torch.int8).contiguous()
    return Codes(whole, scale, torch.zeros_like(scale))


def _fours(codes: Tensor, scale: Tensor, zero: Tensor, group: int) -> Codes:
    """Ours are groups of 32; one of theirs is several of those, alike."""
    if codes.is_floating_point() or codes.shape[1] % GROUP or group % GROUP:
        raise ValueError(f"they are not whole numbers in groups that {GROUP} divides")
    signed = 8 if codes.dtype == torch.int8 else 0
    groups = codes.shape[1] // GROUP
    whole = (codes + signed).to(torch.uint8).contiguous()
    if whole.max() > 15:
        raise ValueError("they have more than 4 bits")
    parts = scale, -(zero + signed) * scale
    return Codes(whole, *(each.repeat_interleave(group // GROUP, 1)[:, :groups] for each in parts))


def unpack(packed: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """int32 [..., n] -> uint8 [..., n * 32 / bits], the lowest bits first, or from these places of each."""
    shifts = torch.tensor(places or range(32 // bits), dtype=torch.int32, device=packed.device) * bits
    return (packed[..., None] >> shifts).bitwise_and(2**bits - 1).to(torch.uint8).flatten(-2)


def halves(packed: Tensor) -> tuple[Tensor, Tensor]:
    return packed & 15, packed >> 4


def _awq(part: Part, has: Has, numbers: Numbers, published: Published) -> StoredMatrix:
    """qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]."""
    codes, zero = (unpack(part(name), 4, AWQ_PLACES).t() for name in (".qweight", ".qzeros"))
    return StoredMatrix(codes, part(".scales").t(), numbers.group or codes.shape[1], zero)


def _gptq(part: Part, has: Has, numbers: Numbers, published: Published) -> StoredMatrix:
    """qweight [in / n, out], qzeros [groups, out / n], scales [groups, out], g_idx [in]."""
    codes = unpack(part(".qweight").t().contiguous(), numbers.bits)
    zero = unpack(part(".qzeros"), numbers.bits).t() + published.zero_offset
    group = numbers.group or codes.shape[1]
    order = part(".g_idx").long() if has(".g_idx") else None
    return StoredMatrix(
        codes, part(".scales").t(), group, zero & (2**numbers.bits - 1), order=_unless_plain(order, group)
    )


def _compressed(part: Part, has: Has, numbers: Numbers, published: Published) -> StoredMatrix:
    """weight_packed or weight [out, in], weight_scale, weight_zero_point: of a group, row, block or all."""
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
    scale, group = _by_rows(part(".weight_scale"), codes, numbers)
    if isinstance(zero, Tensor):
        zero, _ = _by_rows(zero, codes, numbers)
    order = part(".weight_g_idx").long() if has(".weight_g_idx") else None
    return StoredMatrix(codes, scale, group, zero, order=_unless_plain(order, group))


def _powers(exponents: Tensor) -> Tensor:
    """2 to the stored bytes, of which 127 is 0."""
    return torch.exp2(exponents.float() - 127)


def _mxfp4(part: Part, has: Has, numbers: Numbers, published: Published) -> StoredMatrix:
    """Of all experts, one below the other: _blocks [experts, out, groups, 16], two codes a byte, the lower
    first; _scales [experts, out, groups].
    """
    codes = torch.stack(halves(part("_blocks").flatten(0, 1).flatten(1)), -1).flatten(1)
    scale = _powers(part("_scales").flatten(0, 1))
    return StoredMatrix(codes, scale, GROUP, table=fp4_table(codes.device))


def _fp8(part: Part, has: Has, numbers: Numbers, published: Published) -> StoredMatrix:
    """weight [out, in] of 8-bit floats; weight_scale_inv, of a block or all, multiplies."""
    codes = part(".weight")
    return StoredMatrix(codes, *_by_rows(part(".weight_scale_inv"), codes, numbers))


def _bitsandbytes(part: Part, has: Has, numbers: Numbers, published: Published) -> StoredMatrix:
    """4 bit: weight [out * in / 2, 1], and absmax of every so many numbers, perhaps in 8 bits itself.
    8 bit: weight [out, in] and SCB [out], 127 times the scale.
    """
    if has(".SCB"):
        codes = part(".weight")
        return StoredMatrix(codes, part(".SCB").float()[:, None] / 127, codes.shape[1])
    kind = next(one for one in ("nf4", "fp4") if has(f".weight.quant_state.bitsandbytes__{one}"))
    state = quant_state(part(f".weight.quant_state.bitsandbytes__{kind}"))
    (outputs, inputs) = state["shape"]
    size = state["blocksize"]
    lower, upper = halves(part(".weight").flatten())
    codes = torch.stack((upper, lower), -1).flatten()[: outputs * inputs].view(outputs, inputs)
    scale = part(".weight.absmax")
    if has(".weight.nested_absmax"):
        wide = part(".weight.nested_absmax").repeat_interleave(state["nested_blocksize"])[: len(scale)]
        scale = part(".weight.nested_quant_map")[scale.int()] * wide + state["nested_offset"]
    if inputs % size:  # scales run on from row to row
        scale = scale.repeat_interleave(size)[: outputs * inputs]
        size = 1
    return StoredMatrix(codes, scale.view(outputs, -1), size, table=part(".weight.quant_map").float())


def quant_state(stored: Tensor) -> Mapping[str, Any]:
    """bitsandbytes' JSON about a matrix, stored as bytes."""
    return json.loads(bytes(stored.tolist()))


def fp4_table(device: torch.device) -> Tensor:
    return torch.tensor((*FP4, *(-one for one in FP4)), device=device)


def _by_rows(scale: Tensor, codes: Tensor, numbers: Numbers) -> tuple[Tensor, int]:
    """A scale of everything, rows, groups or blocks as [out, groups]; and how many inputs a group has."""
    outputs, inputs = codes.shape
    scale = scale.reshape(1, 1) if scale.numel() == 1 else scale.view(len(scale), -1)
    tall, wide = numbers.block or (1, numbers.group or inputs)
    if len(scale) == 1:
        return scale.expand(outputs, -1), inputs if scale.numel() == 1 else wide
    return scale.repeat_interleave(tall, 0)[:outputs], wide


def _unless_plain(order: Tensor | None, group: int) -> Tensor | None:
    if order is None or torch.equal(order, torch.arange(len(order), device=order.device) // group):
        return None
    return order


DECODERS: Mapping[Method, Callable[[Part, Has, Numbers, Published], StoredMatrix]] = {
    "awq": _awq,
    "gptq": _gptq,
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "mxfp4": _mxfp4,
}


def decode(module: str, part: Part, has: Has, published: Published) -> StoredMatrix:
    """Raises ModelError, also where its tensors do not fit one another."""
    try:
        made = DECODERS[published.method](part, has, published.numbers(module), published)
        groups = -(-made.shape[1] // made.group)
        if tuple(made.scale.shape) != (made.shape[0], groups):
            raise ValueError(f"scales {list(made.scale.shape)} do not fit {list(made.shape)}")
    except (RuntimeError, ValueError, KeyError, StopIteration, IndexError) as error:
        line = " ".join(str(error).split())[:200]
        raise ModelError(f"{module}: its tensors are not {published}: {line}") from None
    return made
