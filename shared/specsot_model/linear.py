"""Matrix products of a layer: how weights are stored (dtypes, int8, int4, fp8), and their kernels."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.checkpoint.config import require_quantizer
from specsot.checkpoint.quantization_config import GROUP, LONG_GROUP
from specsot.errors import InvalidRequest, ModelError
from specsot.members import QUANTIZATIONS, Quantization
from specsot_kernels.errors import UnsupportedProcessor
from specsot_model.decoding import Codes
from specsot_model.fp8 import Fp8, NormedRows, NormWeight, ShortRows, Unscaled, multiplies_fp8
from specsot_model.gguf_tensors import StoredPart, StoredRows, decode_rows
from specsot_model.inference import inference_mode
from specsot_model.int8 import Int8
from specsot_model.stored_form import uses_packed_kernels

if TYPE_CHECKING:
    from specsot_kernels.cpu.running import PackedArrays, PackedWeight

# Numbers. fp32 weights up to this size are not packed for oneDNN. Chosen by measurement on a Xeon with
# AVX-512 and one thread: with 1, 4, 16 rows, a weight of 64 thousand numbers takes 42, 46, 78 us packed and
# 7, 10, 79 us plain; one of 128 thousand takes 105, 115, 164 us and 39, 51, 167 us. The packed product also
# spends up to a millisecond more on the first batch of each size.
SMALL = 1 << 17
# Rows. The batch size that oneDNN is given when it packs a weight. The packed weight works for every batch
# size; `_product_for` checks that. Untuned.
PACKED_FOR = 64

# A product, [rows, in] -> [rows, out].
Multiply = Callable[[Tensor], Tensor]


class Linear:
    """A product y = x W^T + b: x [rows, in] -> [rows, out], with weight [out, in] and bias [out] or None.

    weight: The weight [out, in]; None if it is packed or quantized, because then only `__call__` can use it.
    bias: The bias [out]; None if there is none, or if the weight is packed or quantized.
    shape: (out, in).
    multiply: The product in the chosen form.
    """

    __slots__ = ("bias", "multiply", "shape", "weight")

    multiply: Multiply

    def __init__(
        self,
        weight: Table | Codes | StoredRows,
        bias: Tensor | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        """Store the weight in the chosen form.

        On a CPU, fp32 weights of more than SMALL numbers and bf16 weights are packed for oneDNN if its
        products are correct on this machine. AssertionError is raised for `Codes` without `quantization`;
        ModelError if the form cannot hold the weight.

        weight: [out, in]; `Codes` if the files hold it quantized in the form `quantization` already; `Packed`
            if it is packed for the CPU kernels already; the blocks of a GGUF file only for int8 on a CPU.
        bias: [out]; None: no bias is added. Ignored for a `Packed` weight, which has its own.
        quantization: Form in which to store the weight; None keeps its dtype.
        """
        self.shape = weight.shape
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        if isinstance(weight, Packed):
            self.multiply = weight
        elif quantization:
            self.multiply = _quantized_product(weight, bias, quantization)
        else:
            assert isinstance(weight, Tensor), "codes need the quantization that they are stored in"
            is_small = weight.dtype == torch.float32 and weight.numel() <= SMALL
            choice = _torch_product if is_small else _product_for(weight.dtype, weight.device.type)
            self.multiply = choice(weight, bias)
            if choice is _torch_product:
                self.weight = weight
                self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [rows, in] -> [rows, out].

        x: [rows, in], in the dtype of the range.
        """
        return self.multiply(x)


def _torch_product(weight: Tensor, bias: Tensor | None) -> Multiply:
    """Return PyTorch's own product with a weight.

    weight: [out, in], the weight.
    bias: [out]; None: no bias is added.
    """
    return lambda x: F.linear(x, weight, bias)


def _onednn_product(weight: Tensor, bias: Tensor | None) -> Multiply:
    """Return oneDNN's product with a weight, which is packed here.

    weight: [out, in], fp32 or bf16, on a CPU.
    bias: [out]; None: no bias is added.
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)  # noqa: SLF001
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # noqa: SLF001


def _quantized_product(
    weight: Tensor | Codes | StoredRows, bias: Tensor | None, kind: Quantization
) -> Multiply:
    """Return the product with a weight in a quantized form.

    weight: [out, in]: floats, `Codes` if the files hold it quantized in this form already, or the blocks of a
        GGUF file for int8 on a CPU.
    bias: [out]; None: no bias is added. It is added here if the form does not add it.
    kind: The quantized form.
    """
    rounded = quantize(weight, kind, bias)
    return (
        rounded
        if bias is None or isinstance(rounded, Packed | Fp8 | Int8)
        else lambda x: rounded(x).add_(bias)
    )


@cache
def _product_for(dtype: torch.dtype, device: str) -> Callable[[Tensor, Tensor | None], Multiply]:
    """Return oneDNN's packed product for this dtype if this machine has it and computes correctly with it;
    else PyTorch's own product.

    It is tried on small shapes instead of trusted, because a weight is packed for one batch size but used for
    all. PyTorch's own product is returned for other dtypes than fp32 and bf16, and for other devices than the
    CPU. The result is remembered for each pair of dtype and device.

    dtype: Type of the weights.
    device: Type of device, such as "cpu" or "cuda".
    """
    if dtype not in (torch.float32, torch.bfloat16) or device != "cpu":
        return _torch_product
    try:
        shapes = ((640, 384), (96, 1000), (33, 7))
        return _onednn_product if all(_onednn_agrees(dtype, shape) for shape in shapes) else _torch_product
    except (RuntimeError, AttributeError):
        return _torch_product


@inference_mode
def _onednn_agrees(dtype: torch.dtype, shape: tuple[int, int]) -> bool:
    """Tell whether the packed product of a random weight agrees with the plain one.

    They agree if, for five batch sizes from 1 to 130 rows, no output differs by more than a fraction of the
    largest output: 1e-5 for fp32, and 0.02 for bf16.

    dtype: Type of the weight.
    shape: (out, in) of the weight.
    """
    seeded = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=seeded).to(dtype)
    bias = torch.randn(shape[0], generator=seeded).to(dtype)
    ours, plain = _onednn_product(weight, bias), _torch_product(weight, bias)
    inputs = (torch.randn(rows, shape[1], generator=seeded).to(dtype) for rows in (1, 2, 5, 17, 130))
    # Fraction of the largest output. The library may add up products in another order.
    allowed = 1e-5 if dtype == torch.float32 else 0.02
    pairs = ((ours(x).float(), plain(x).float()) for x in inputs)
    return all((a - b).abs().max() <= allowed * b.abs().max() for a, b in pairs)


def multiply_wide(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias in fp32, as it is summed, if the library can; else in x's dtype.

    The library can on NVIDIA GPUs with PyTorch 2.8 or later. The result is [rows, out].

    x: [rows, in], the input.
    weight: [out, in], the weight.
    bias: [out]; None: no bias is added.
    """
    if x.dtype == torch.float32 or not _can_return_sums(x.device):
        return F.linear(x, weight, bias)
    sums = torch.mm(x, weight.t(), out_dtype=torch.float32)
    return sums if bias is None else sums.add_(bias)


@cache
def _can_return_sums(device: torch.device) -> bool:
    """Tell whether products can return fp32 sums: PyTorch 2.8 and later, with cuBLAS.

    device: Device of the product.
    """
    return (
        device.type == "cuda" and torch.version.cuda is not None and "dtype" in torch.ops.aten.mm.overloads()
    )


class PartSums(NamedTuple):
    """A product of a small step, or the sum of several products, before the sums over the parts of the inputs
    are added up. The kernel that reads it adds up the parts, then the bias, and rounds once.

    sums: fp32 [parts, rows, out], the sums over each part; see `small_products.sum_in_parts`.
    bias: [out], still to be added; None: there is no bias.
    dtype: Type to which the product is to be rounded.
    """

    sums: Tensor
    bias: Tensor | None
    dtype: torch.dtype

    def total(self) -> Tensor:
        """Return the product [rows, out] in `dtype`: the parts and the bias are added up by one kernel."""
        from specsot_kernels.gpu.small_products import add_up

        return add_up(self.sums, self.sums.new_empty(self.sums.shape[1:], dtype=self.dtype), self.bias)


@dataclass(frozen=True, slots=True)
class RowProduct:
    """A product for CUDA graphs in floats, which chooses its kernel by the number of rows.

    weight: [out, in], the weight.
    bias: [out]; None: no bias is added.
    """

    weight: Tensor
    bias: Tensor | None = None

    def heads(
        self, x: Tensor, norm: NormWeight | None = None, rows: NormedRows | None = None
    ) -> Tensor | Unscaled | PartSums:
        """Return the product that is queries, keys and values, [rows, out], after an RMSNorm if one is given.

        In a small step, if the inputs of this weight are divided into parts, the result is `PartSums`, and
        `turn_and_store` adds up the parts. It cannot do so for heads with norms: call `normed` for those.

        x: [rows, in], the input, not changed.
        norm: Weight [in] and epsilon of the RMSNorm; None: x is normalized already.
        rows: The normed x. It is used if it is in floats, in place of x and `norm`; rows in 8 bits and None
            are ignored.
        """
        from specsot_kernels.gpu import small_products

        if isinstance(rows, Tensor):
            x, norm = rows, None
        if self._is_small(x) and small_products.has_parts(self.weight):
            return PartSums(small_products.sum_in_parts(x, self.weight, norm), self.bias, x.dtype)
        return self._multiply(x, norm)

    def normed(self, hidden: Tensor, norm: NormWeight, rows: NormedRows | None = None) -> Tensor:
        """Return the product of the RMSNorm of the hidden states, [rows, out].

        A bias is added if there is one.

        hidden: [rows, in], not changed.
        norm: Weight [in] and epsilon of the RMSNorm.
        rows: The normed hidden states. They are used if they are in floats; rows in 8 bits and None are
            ignored, and `hidden` is normed here.
        """
        if isinstance(rows, Tensor):
            return self._multiply(rows)
        return self._multiply(hidden, norm)

    def gated(self, hidden: Tensor, norm: NormWeight, rows: NormedRows | None = None) -> Tensor | ShortRows:
        """Return silu(first half) * second half of what `normed` returns: [rows, out / 2].

        The product must have no bias. A single row runs in a kernel of its own, except in a small step.

        hidden: [rows, in], not changed.
        norm: Weight [in] and epsilon of the RMSNorm.
        rows: The normed hidden states, as for `normed`.
        """
        if isinstance(rows, Tensor):
            return self._multiply(rows, gated=True)
        return self._multiply(hidden, norm, gated=True)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product of x [rows, in] -> [rows, out].

        A bias is added if there is one.

        x: [rows, in], the input.
        """
        return self._multiply(x)

    def _multiply(self, x: Tensor, norm: NormWeight | None = None, gated: bool = False) -> Tensor:
        """Return the product of x [rows, in] -> [rows, out], after an RMSNorm if one is given.

        A bias is added if there is one.

        x: [rows, in], the input.
        norm: Weight [in] and epsilon of the RMSNorm; None: x is normalized already.
        gated: If true, return silu(first half) * second half of the product, [rows, out / 2].
        """
        from specsot_kernels.gpu import ordered, products, rows, small_products

        if self._is_small(x):
            return small_products.multiply_small(x, self.weight, norm, self.bias, gated)
        if self._is_single_row(x):
            return products.multiply_row(x, self.weight, norm, self.bias, gated)
        x = x if norm is None else rows.norm_rows(x, *norm)
        if self._runs_ordered(x, gated):
            return ordered.multiply_ordered(x, self.weight, self.bias, gated)
        product = F.linear(x, self.weight, self.bias)
        return rows.gate(product) if gated else product

    def wide(self, hidden: Tensor, norm: NormWeight) -> Tensor:
        """Return the product of the RMSNorm of the hidden states in fp32, as it is summed: [rows, out].

        It is used for logits: rounded to fewer bits, large logits that differ would become equal. A bias is
        added if there is one. Where the library cannot return fp32 sums, the result has the type of `hidden`.

        hidden: [rows, in], not changed.
        norm: Weight [in] and epsilon of the RMSNorm.
        """
        from specsot_kernels.gpu import ordered, products, rows, small_products

        if self._is_small(hidden):
            return small_products.multiply_small(hidden, self.weight, norm, self.bias, dtype=torch.float32)
        if self._is_single_row(hidden):
            out = hidden.new_empty((1, len(self.weight)), dtype=torch.float32)
            return products.multiply_row(hidden, self.weight, norm, self.bias, into=out)
        x = rows.norm_rows(hidden, *norm)
        if self._runs_ordered(x):
            return ordered.multiply_ordered(x, self.weight, self.bias, dtype=torch.float32)
        return multiply_wide(x, self.weight, self.bias)

    def add_to(
        self, hidden: Tensor, x: Tensor | ShortRows, next_norm: NormWeight | None = None
    ) -> NormedRows | None:
        """Add the product of x to the hidden states, in place. A bias is not added.

        Return the RMSNorm of the result, [rows, out] in floats, if `next_norm` is given, x is a small step,
        and the inputs of this weight are divided into parts: then one kernel adds up the parts and norms the
        rows. Return None in all other cases.

        hidden: [rows, out], contiguous, the residual stream.
        x: [rows, in], in floats. AssertionError is raised for rows in 8 bits.
        next_norm: Weight [out] and epsilon of the RMSNorm before the next product; None: nothing is normed.
        """
        from specsot_kernels.gpu import ordered, products, small_products

        assert isinstance(x, Tensor), "rows in 8 bits are only multiplied with weights in 8 bits"
        if self._is_small(x):
            if next_norm and small_products.has_parts(self.weight):
                sums = small_products.sum_in_parts(x, self.weight)
                return small_products.add_and_norm(sums, hidden, next_norm)
            small_products.multiply_small(x, self.weight, into=hidden)
        elif self._is_single_row(x):
            products.multiply_row(x, self.weight, add=hidden, into=hidden)
        elif self._runs_ordered(x):
            ordered.multiply_ordered(x, self.weight, into=hidden)
        else:
            hidden.addmm_(x, self.weight.t())
        return None

    def plus(self, earlier: Tensor | PartSums | None, x: Tensor) -> Tensor | PartSums:
        """Return the sum of the product of x and of earlier products, each [rows, out]. This object must have
        no bias.

        In a small step, if the inputs of this weight are divided into parts, and `earlier` is no tensor, the
        result is `PartSums`. Then one kernel adds up the parts of all products at the end (`PartSums.total`).

        earlier: The sum of the earlier products: what this method has returned for a weight of the same shape
            and for the same number of rows, or a contiguous tensor [rows, out]. It is changed in place. None:
            there are no earlier products.
        x: [rows, in], in floats.
        """
        from specsot_kernels.gpu import small_products

        if isinstance(earlier, Tensor):
            self.add_to(earlier, x)
            return earlier
        if not (self._is_small(x) and small_products.has_parts(self.weight)):
            return self._multiply(x)
        sums = small_products.sum_in_parts(x, self.weight, into=earlier.sums if earlier else None)
        return PartSums(sums, None, x.dtype)

    def _is_small(self, x: Tensor) -> bool:
        """Tell whether x runs in the kernel of small steps, which only `SmallStepProduct` uses: False.

        x: [rows, in], the input.
        """
        return False

    def _is_single_row(self, x: Tensor) -> bool:
        """Tell whether x has a single row, for which there is a kernel of its own.

        x: [rows, in], the input.
        """
        return len(x) == 1

    def _runs_ordered(self, x: Tensor, gated: bool = False) -> bool:
        """Tell whether the kernel with a fixed order of sums is faster for so many rows.

        x: [rows, in], the input.
        gated: Whether the kernel also combines the two halves of the product.
        """
        from specsot_kernels.gpu.ordered import is_faster

        return is_faster(x, len(self.weight), gated)


class SmallStepProduct(RowProduct):  # pyrefly: ignore[bad-class-definition]
    """A product that computes a row with the same bits in every step of at most MAX_SMALL_ROWS rows.

    For so few rows of 16-bit numbers, a row's sums always run in one order. One kernel adds up the products
    of each part of the inputs, and if there are several parts, the next kernel adds up their sums; see
    `specsot_kernels.gpu.small_products`. Other inputs run as in `RowProduct`.
    """

    __slots__ = ()

    def _is_small(self, x: Tensor) -> bool:
        """Tell whether x has so few rows that they run in the kernel of small steps.

        x: [rows, in], the input.
        """
        from specsot_kernels.gpu.small_products import suits

        return suits(x)


class InvariantRowProduct(RowProduct):  # pyrefly: ignore[bad-class-definition]
    """A product whose sums always run in the same order, so a row's result is the same in any batch."""

    __slots__ = ()

    def _is_single_row(self, x: Tensor) -> bool:
        """Return False: a single row runs in the same kernel as many rows, so that its sums keep their order.

        x: [rows, in], the input.
        """
        return False

    def _runs_ordered(self, x: Tensor, gated: bool = False) -> bool:
        """Return True: every batch runs in the kernel with a fixed order of sums.

        x: [rows, in], the input.
        gated: Whether the kernel also combines the two halves of the product.
        """
        return True


# A product that a CUDA graph can capture.
CapturedProduct = RowProduct | Fp8 | Int8


def captured_product(
    linear: Linear, invariant: bool = False, small_steps: bool = False
) -> CapturedProduct | None:
    """Return the form of a product for CUDA graphs, or None if it cannot be captured.

    None is returned for packed CPU weights, for int4, for products in 8 bits whose sizes or device their
    kernels do not support, and for fp8 if `invariant` is true. Products in int8 are always batch-invariant.

    linear: The product.
    invariant: True if the product must be batch-invariant; fp8 products are not.
    small_steps: True if a product in floats must be a `SmallStepProduct`. Not used if `invariant` is true.
    """
    if isinstance(linear.multiply, Fp8 | Int8):
        exact = isinstance(linear.multiply, Int8) or not invariant
        return linear.multiply if linear.multiply.capturable and exact else None
    if linear.weight is None:
        return None
    return row_product(linear.weight, linear.bias, invariant, small_steps)


def row_product(
    weight: Tensor, bias: Tensor | None = None, invariant: bool = False, small_steps: bool = False
) -> RowProduct:
    """Return the product of a weight in floats, in the form that CUDA graphs capture: an
    `InvariantRowProduct` if `invariant`, else a `SmallStepProduct` if `small_steps`, else a `RowProduct`.

    weight: [out, in], contiguous.
    bias: [out]; None: no bias is added.
    invariant: True if the product must be batch-invariant.
    small_steps: True if the product must keep the bits of a row in small steps.
    """
    if invariant:
        return InvariantRowProduct(weight, bias)
    return (SmallStepProduct if small_steps else RowProduct)(weight, bias)


# The dtypes that --dtype names.
NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_dtype(
    name: str, device: torch.device | str, quantization: Quantization | None = None
) -> torch.dtype:
    """Return the dtype of the name "fp32", "bf16", "fp16" or "auto".

    "auto" means fp32 with packed CPU weights, whose kernels compute in fp32; else bf16 on CUDA and on CPUs
    that multiply bf16; else fp32. Raises InvalidRequest for any other name.

    name: The value of the option --dtype.
    device: Device of the model. Only "auto" looks at it.
    quantization: Form of the matrices; None: they are not quantized.
    """
    if name == "auto":
        if uses_packed_kernels(quantization, device):
            return torch.float32
        return torch.bfloat16 if _multiplies_bf16(torch.device(device)) else torch.float32
    if name not in NAMES:
        raise InvalidRequest(f"dtype must be one of auto, {', '.join(NAMES)}, got {name!r}", field="dtype")
    return NAMES[name]


def check_device(device: str) -> None:
    """Raise InvalidRequest if torch does not know the device's name, or does not see that GPU.

    "cuda" without a number means the first GPU. Device types other than "cuda" pass if torch knows their
    name.

    device: The value of the option --device, such as "cpu" or "cuda:0".
    """
    try:
        parsed = torch.device(device)
    except RuntimeError:
        raise InvalidRequest(
            f"unknown device {device!r}; use a name such as cpu or cuda:0", field="device"
        ) from None
    num_gpus = torch.cuda.device_count() if parsed.type == "cuda" else 0
    if parsed.type == "cuda" and (parsed.index or 0) >= num_gpus:
        raise InvalidRequest(
            f"there is no device {device}: PyTorch {torch.__version__} finds {num_gpus} GPUs", field="device"
        )


def _multiplies_bf16(device: torch.device) -> bool:
    """Tell whether a device multiplies bf16 natively: every CUDA device, and CPUs with AVX-512 BF16 or AMX
    BF16.

    False for all other types of devices.

    device: The torch device that is asked about.
    """
    if device.type != "cpu":
        return device.type == "cuda"
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


# Bytes. Size of an int4 scale, and of an int4 zero point.
SCALE = 2
# Outputs. Packed CPU weights are padded to multiples of this, and their inputs to whole groups.
LANES = 16
# Bytes of a weight that packed int8 keeps as it is, by ggml's number of its type: Q4_0, Q4_1, Q4_K and Q6_K;
# see `layout.GROUP_BYTES`.
LOSSLESS_BYTES = {2: 0.625, 3: 0.625, 12: 0.578125, 14: 0.8203125}
# Weights. How many int4 weights a GPU converts to floats at a time. Untuned.
FLOATS_AT_A_TIME = 1 << 24


def check_quantization(kind: str | None, device: str = "cpu") -> None:
    """Raise InvalidRequest for an unknown quantization, ModelError if the packages it needs are missing.

    kind: The value of the option --quantization; None: nothing is quantized and nothing is checked.
    device: Device of the model.
    """
    if kind is None:
        return
    if kind not in QUANTIZATIONS:
        choices = ", ".join(QUANTIZATIONS)
        raise InvalidRequest(f"quantization must be one of {choices}, got {kind!r}", field="quantization")
    require_quantizer(kind, device)


def describe_rounding(kind: Quantization | None, device: str) -> str:
    """Describe in words what is rounded and how, which all members of a ring must share.

    Return "" if nothing is rounded. On a CPU, int8 and int4 name the packed kernels' rounding; fp8 names its
    activations only if the device multiplies fp8; int4 on a GPU is the string "int4".

    kind: Form of the matrices; None: they are not quantized.
    device: Device of the model, such as "cpu" or "cuda:0".
    """
    if kind == "fp8":
        rounds_activations = multiplies_fp8(torch.device(device))
        return "fp8 weights, a scale an output" + (
            ", and activations, a scale a row" if rounds_activations else ""
        )
    if kind == "int8" and not uses_packed_kernels(kind, device):
        return f"int8 weights, {LONG_GROUP} activations a scale"
    if not uses_packed_kernels(kind, device):
        return kind or ""
    if kind == "int4":
        return f"int4 weights, int8 embedding, {GROUP} ({LONG_GROUP} for 8-bit weights) activations a scale"
    kept = (
        f" ({GROUP} for weights of 4 and 6 bits, kept as in the file)"
        if cpu_layout().ENABLED_LOSSLESS_TYPES
        else ""
    )
    return f"int8 weights, int8 embedding, {LONG_GROUP}{kept} activations a scale"


def _is_lossless(ggml_type: int) -> bool:
    """Return whether packed int8 weights keep the numbers of a type of a GGUF file on this processor.

    ggml_type: ggml's number of the type.
    """
    return ggml_type in cpu_layout().ENABLED_LOSSLESS_TYPES


def quantize(weight: Tensor | Codes | StoredRows, kind: Quantization, bias: Tensor | None = None) -> Multiply:
    """Return a product with a weight [out, in] that is stored in the form `kind`.

    The result is an `Fp8` for "fp8", a `Packed` for int8 and int4 on a CPU, an `Int8` for "int8" on other
    devices, and for "int4" there PyTorch's kernel for NVIDIA GPUs, which computes in bf16, if the weight is
    bf16, and otherwise an `Int4`, in parts if it is large. ModelError is also raised if the processor lacks
    instructions that packed kernels need.

    weight: Floats, `Codes` if the files hold the weight quantized to this form already, or the blocks of a
        GGUF file for int8 on a CPU.
    bias: [out]; None: no bias is added. Added by every form except int4 on a GPU, whose caller adds it.
    kind: The quantized form.

    Raises ModelError if int4 cannot hold the shape.
    """
    if isinstance(weight, StoredRows):
        assert kind == "int8", "blocks of a GGUF file are packed for int8 only"
        return Packed(weight, bias, kind)
    if kind == "fp8":
        return Fp8(weight, bias)
    if kind == "int4" and weight.shape[1] % GROUP:
        raise ModelError(f"int4 weights need a number of inputs that {GROUP} divides, got {weight.shape[1]}")
    if uses_packed_kernels(kind, weight.device):
        return Packed(weight, bias, kind)
    if kind == "int8":
        return Int8(weight, bias)
    if isinstance(weight, Tensor) and weight.dtype == torch.bfloat16:
        held = _import_torchao().Int4TilePackedTo4dTensor.from_hp(weight, [1, GROUP])
        return lambda x: F.linear(x, held)
    return _quantize_int4(weight)


def stored_bytes(
    shape: tuple[int, ...], itemsize: int, kind: Quantization | None, ggml_type: int | None = None
) -> int:
    """Return the bytes of a tensor of `itemsize` bytes per number, if matrices are stored as `kind`.

    A tensor that is not a matrix, or every tensor with `kind` None, takes `itemsize` bytes per number. fp8
    takes 1 byte per weight and 4 per output. int8 and int4 are counted as packed for a CPU, with sizes padded
    to whole groups.

    shape: Shape of the tensor; only tensors of two dimensions are quantized.
    itemsize: Bytes of a number that is not quantized.
    kind: Form of the matrices; None: they are not quantized.
    ggml_type: ggml's number of the tensor's type in a GGUF file that is packed for a CPU; else None.
    """
    if kind is None or len(shape) != 2:
        return math.prod(shape) * itemsize
    if kind == "fp8":
        return math.prod(shape) + 4 * shape[0]
    # This is the size of the packed CPU form; other devices need a little less.
    groups = LONG_GROUP if kind == "int8" else GROUP
    outputs, inputs = (-(-size // multiple) * multiple for size, multiple in zip(shape, (LANES, groups)))
    if kind == "int8" and ggml_type is not None and _is_lossless(ggml_type):
        return outputs * int(shape[1] * LOSSLESS_BYTES[ggml_type] + 4)
    if kind == "int8":
        return outputs * (inputs + 8)
    return outputs * (inputs // 2 + 2 * SCALE * (inputs // GROUP) + 4)


class Packed:
    """An int8 or int4 weight packed for the CPU kernels.

    Activations are rounded to 8 bits, each row by itself, so a row's result does not depend on the batch
    (docs/models.md).

    weight: The packed weight [out, in], with its bias.
    dtype: Type of the rows that `rows` returns: that of the floats that were packed, otherwise fp32.
    device: Where the weight was before it was packed; it is packed in the memory of the CPU.
    """

    __slots__ = ("device", "dtype", "weight")

    def __init__(self, weight: Tensor | Codes | StoredRows, bias: Tensor | None, kind: Quantization) -> None:
        """Pack the weight for the CPU kernels. Raises ModelError if the processor lacks instructions that
        they need.

        weight: [out, in], floats, which are rounded, or `Codes` of this kind. Blocks of a GGUF file are
            packed without loss if all have the same type, and `layout.ENABLED_LOSSLESS_TYPES` has it; all
            others are rounded to int8.
        bias: [out]; None: no bias is added.
        kind: "int8" or "int4"; "int8" for the blocks of a GGUF file.
        """
        packed_weight = _packed_weight_class()
        if isinstance(weight, StoredRows):
            bits = packed_weight.bits_of([part.kind for part in weight.parts])
            self.weight = packed_weight.of_blocks(weight.shape, weight.parts, bias, decode_rows, bits)
        else:
            self.weight = packed_weight(weight, bias, 8 if kind == "int8" else 4)
        self.dtype = weight.dtype if isinstance(weight, Tensor) else torch.float32
        self.device = weight.device

    @classmethod
    def of_arrays(cls, shape: Sequence[int], arrays: PackedArrays, bits: int) -> Packed:
        """Return a weight that was packed before. Its arrays are not copied.

        shape: (out, in) of the weight.
        arrays: The arrays of the packed weight.
        bits: The weight's format; see `layout.FORMAT`.

        Raises ModelError if the processor lacks instructions that the kernels need.
        """
        packed = cls.__new__(cls)
        packed.weight = _packed_weight_class().of_arrays(shape, arrays, bits)
        packed.dtype = torch.float32
        packed.device = torch.device("cpu")
        return packed

    @property
    def shape(self) -> torch.Size:
        """Return (out, in) of the weight."""
        return self.weight.shape

    def rows(self, numbers: Tensor) -> Tensor:
        """Return rows of the weight, [n, in] in `dtype`.

        numbers: LongTensor [n], numbers of outputs (token ids of an embedding).
        """
        return self.weight.rows(numbers).to(self.dtype)

    def in_4_bits(self) -> Packed:
        """Return this int8 weight rounded to int4, as a copy. Its bias, if it has one, is dropped."""
        return Packed.of_arrays(self.shape, self.weight.in_4_bits().arrays, 4)

    def __call__(self, x: Tensor, norm: tuple[Tensor, float] | None = None) -> Tensor:
        """Multiply x [rows, in] -> [rows, out].

        x: [rows, in], in floats.
        norm: Weight [in] and epsilon of an RMSNorm that is applied to x first; None: no norm.
        """
        from specsot_kernels.cpu.running import multiply

        return multiply(x, self.weight, norm).to(x.dtype)


def cpu_layout() -> ModuleType:
    """Return the module `specsot_kernels.cpu.layout`. It is imported when it is used, because it imports
    llvmlite and examines the processor.

    Raises ModelError if the processor lacks instructions that the kernels need.
    """
    try:
        from specsot_kernels.cpu import layout
    except UnsupportedProcessor as error:
        raise ModelError(str(error)) from error
    return layout


def _packed_weight_class() -> type[PackedWeight]:
    """Return the class of packed weights. Raises ModelError as `cpu_layout` does."""
    cpu_layout()
    from specsot_kernels.cpu.running import PackedWeight

    return PackedWeight


# An embedding [vocab, hidden].
Table = Tensor | Packed
# ggml's number of the type of fp32 numbers.
FP32_KIND = 0
# Scale. The smallest divisor of a row that is rounded to int8: a row of zeros has the scale 0. Untuned.
TINY = 1e-30


class ProjectedTable:
    """The embedding of a draft head that is narrower than its base model: the rows of the base model's
    embedding, multiplied with a matrix, and rounded to int8 with a scale for each row.

    A row is computed when it is first looked up, because a text has only a few tokens of a vocabulary. Until
    then, the operating system gives no memory to the row.

    dtype: Type of the rows that `rows` returns: that of the projection.
    device: The CPU.
    shape: [vocab, hidden].
    """

    def __init__(self, embedding: Table, projection: Tensor) -> None:
        """Compute no row yet.

        embedding: The base model's embedding [vocab, columns], on a CPU.
        projection: The matrix [hidden, columns], on a CPU, in floats.
        """
        self.dtype: torch.dtype = projection.dtype
        self.device: torch.device = projection.device
        self._embedding = embedding
        self._projection = projection
        self.shape = torch.Size((embedding.shape[0], len(projection)))
        self._codes: Tensor = torch.empty(self.shape, dtype=torch.int8)
        self._scales: Tensor = torch.empty(self.shape[0], 1)
        self._known: Tensor = torch.zeros(self.shape[0], dtype=torch.bool)

    @inference_mode
    def rows(self, numbers: Tensor) -> Tensor:
        """Return rows of the table, [n, hidden] in `dtype`, after computing those that were never looked up
        before.

        numbers: LongTensor [n], token ids; an id may occur several times.
        """
        missing = numbers[~self._known[numbers]]
        if len(missing):
            missing = missing.unique()
            made = F.linear(look_up(self._embedding, missing), self._projection).float()
            scales = made.abs().amax(1, keepdim=True) / 127
            self._codes[missing] = (made / scales.clamp_min(TINY)).round_().to(torch.int8)
            self._scales[missing] = scales
            self._known[missing] = True
        return (self._codes[numbers] * self._scales[numbers]).to(self.dtype)


def hold_table(table: Tensor | StoredRows, quantization: Quantization | None) -> Table:
    """Return an embedding in the form in which it is stored: int8 with packed CPU weights, else as it is.

    ModelError is raised if the processor lacks instructions that packed tables need.

    table: [vocab, hidden], in floats, or as the blocks of a GGUF file, which only packed tables can be.
    quantization: Form of the matrices; None: they are not quantized.
    """
    if isinstance(table, Tensor) and not uses_packed_kernels(quantization, table.device):
        return table
    packed = quantize(table, "int8")
    assert isinstance(packed, Packed)
    return packed


def pack_table(parts: Iterable[Tensor], shape: tuple[int, int]) -> Packed:
    """Return a table in packed int8 whose rows are computed some at a time, so that no more are in floats.

    parts: Consecutive rows [rows, in], in any type of floats.
    shape: (out, in) of the table.

    Raises ModelError if the processor lacks instructions that packed tables need.
    """

    def stored_parts() -> Iterator[StoredPart]:
        """Yield each part as rows of fp32 numbers, in which GGUF files may store them as well."""
        first = 0
        for part in parts:
            rows = part.float().contiguous().numpy().view(np.uint8)
            yield StoredPart(rows, FP32_KIND, np.arange(first, first + len(rows)))
            first += len(rows)

    weight = _packed_weight_class().of_blocks(shape, stored_parts(), None, decode_rows, 8)
    return Packed.of_arrays(shape, weight.arrays, 8)


def look_up(table: Table | ProjectedTable, tokens: Tensor) -> Tensor:
    """Return the embeddings [rows, hidden] of token ids.

    table: The embedding [vocab, hidden].
    tokens: LongTensor [rows], token ids.
    """
    return F.embedding(tokens, table) if isinstance(table, Tensor) else table.rows(tokens)


class Int4:
    """An int4 weight for any device: w = q * scale + offset, with 16-bit scale and offset per group.

    A byte holds two weights: the low half of byte i is input i, the high half is input i + in / 2.

    weight: [out, in], floats or `Codes`.

    # inputs [q0 q1 q2 q3] -> bytes [q0 | q2 << 4, q1 | q3 << 4]
    """

    __slots__ = ("_offset", "_pairs", "_scale")

    def __init__(self, weight: Tensor | Codes) -> None:
        """Quantize the weight, or take codes as they are, and pack two codes into each byte.

        Scales and offsets are kept in the weight's type if it has 16 bits, and otherwise in fp16.

        weight: [out, in], floats or `Codes`; GROUP must divide the number of inputs.
        """
        codes, scale, offset = weight if isinstance(weight, Codes) else _int4_codes(weight)
        lower, upper = codes.chunk(2, 1)
        self._pairs: Tensor = lower | (upper << 4)
        short = weight.dtype if isinstance(weight, Tensor) and weight.itemsize == SCALE else torch.float16
        self._scale: Tensor = scale.to(short)[..., None]
        self._offset: Tensor = offset.to(short)[..., None]

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [rows, in] -> [rows, out].

        x: [rows, in], in floats.
        """
        return x @ self._floats(x.dtype).t()

    def _floats(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] in floats.

        dtype: Type of the result.
        """
        outputs, half = self._pairs.shape
        floats = torch.empty((outputs, 2, half), dtype=dtype, device=self._pairs.device)
        floats[:, 0] = self._pairs & 15
        floats[:, 1] = self._pairs >> 4
        grouped = floats.view(outputs, -1, GROUP)
        torch.addcmul(self._offset.to(dtype), grouped, self._scale.to(dtype), out=grouped)
        return floats.view(outputs, -1)


def _int4_codes(weight: Tensor) -> Codes:
    """Return a weight quantized to int4 codes with torchao's asymmetric rounding.

    The result has codes from 0 to 15, and a scale and an offset for each group of GROUP inputs.

    weight: [out, in], in floats; GROUP must divide its number of inputs.
    """
    ao = _import_torchao()
    block = (1, GROUP)
    bounds = (torch.uint8, 0, 15)
    scale, zero = ao.choose_qparams_affine(
        weight, ao.MappingType.ASYMMETRIC, block, *bounds, zero_point_dtype=torch.uint8
    )
    return Codes(ao.quantize_affine(weight, block, scale, zero, *bounds), scale, -(zero * scale))


def _quantize_int4(weight: Tensor | Codes) -> Multiply:
    """Return the product with a weight as one or several `Int4`, so that at most FLOATS_AT_A_TIME numbers are
    in floats at a time, or one output if it has more.

    weight: [out, in], floats or `Codes`.
    """
    outputs = max(FLOATS_AT_A_TIME // weight.shape[1], 1)
    parts = [Int4(part) for part in weight.split(outputs)]
    return parts[0] if len(parts) == 1 else lambda x: torch.cat([part(x) for part in parts], 1)


def _import_torchao() -> ModuleType:
    """Return the module torchao.quantization, which is imported when it is used, because that takes seconds.

    Its warnings while it is imported are silenced: they are about kernels that this project does not call.
    The level of logging is restored afterwards. ImportError is raised if torchao is not installed.
    """
    logging_level = logging.root.manager.disable
    logging.disable(max(logging_level, logging.WARNING))
    try:
        import torchao.quantization
    finally:
        logging.disable(logging_level)
    return torchao.quantization
