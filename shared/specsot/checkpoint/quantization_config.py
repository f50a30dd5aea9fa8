"""Reads how a model's weights are published quantized: `quantization_config` of its config.json.

Which matrices are quantized is not read from the config: the names of their tensors say so.
It needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from specsot.checkpoint.families import names_of
from specsot.errors import ModelError
from specsot.members import Quantization

Method = Literal["awq", "gptq", "bitsandbytes", "fp8", "compressed-tensors", "mxfp4"]

# Suffixes of the tensors of a quantized matrix. A tensor with a suffix in MARKS says that the matrix is
# quantized; those in PARTS are its further tensors.
MARKS: Mapping[Method, tuple[str, ...]] = {
    "awq": (".qweight",),
    "gptq": (".qweight",),
    "bitsandbytes": (".weight.absmax", ".SCB"),
    "fp8": (".weight_scale_inv",),
    "compressed-tensors": (".weight_packed", ".weight_scale"),
    "mxfp4": ("_blocks",),
}
# Suffixes of the further tensors of a quantized matrix, see MARKS.
PARTS: Mapping[Method, tuple[str, ...]] = {
    "awq": (".qzeros", ".scales"),
    "gptq": (".qzeros", ".scales", ".g_idx"),
    "bitsandbytes": (
        ".weight.quant_map",
        ".weight.nested_absmax",
        ".weight.nested_quant_map",
        ".weight.quant_state.bitsandbytes__nf4",
        ".weight.quant_state.bitsandbytes__fp4",
        ".weight_format",
    ),
    "fp8": (".input_scale", ".activation_scale"),
    "compressed-tensors": (
        ".weight_zero_point",
        ".weight_shape",
        ".weight_g_idx",
        ".input_scale",
        ".input_zero_point",
        ".output_scale",
        ".output_zero_point",
    ),
    "mxfp4": ("_scales",),
}
# Bits. The sizes of packed integers that can be read.
PACKED_BITS = (4, 8)
# Inputs that share a scale: int4 weights, and a CPU's int8 activations that multiply int4 weights.
GROUP = 32
# Inputs that share a scale: activations that multiply int8 weights.
LONG_GROUP = 64


@dataclass(frozen=True, slots=True)
class Numbers:
    """The number format of one quantized matrix.

    kind: "int" for integers, "fp8" for 8-bit floats, "fp4" for 4-bit floats, "table" for 4-bit indices into a
        table.
    bits: Bits of a number.
    group: Number of inputs that share a scale; None: a whole row.
    block: Numbers of (outputs, inputs) that share a scale; None: scales are not by block.
    centred: True if zero is in the middle of the range, so that there are no zero points.
    ordered: True if the inputs of a group are adjacent.
    """

    kind: Literal["int", "fp8", "fp4", "table"]
    bits: int
    group: int | None = None
    block: tuple[int, int] | None = None
    centred: bool = True
    ordered: bool = True

    @property
    def form(self) -> Quantization | None:
        """This project's form of quantized weights that can hold the published codes as they are, or None if
        there is none: "int4" for 4-bit integers in adjacent groups of a multiple of GROUP inputs; "int8" or
        "fp8" for integers or 8-bit floats with one scale per row and no zero points; None for all others.
        """
        if (self.kind, self.bits) == ("int", 4):
            return "int4" if self.ordered and self.group and self.group % GROUP == 0 else None
        if self.group or self.block or not self.centred:
            return None
        return "int8" if self.kind == "int" else "fp8" if self.kind == "fp8" else None

    def __str__(self) -> str:
        """Return the format in words, such as "4 bit in groups of 128", "fp8 in blocks of 128x128", or "8
        bit" if a scale covers a whole row.
        """
        text = f"{self.bits} bit" if self.kind in ("int", "table") else self.kind
        if self.block:
            return f"{text} in blocks of {self.block[0]}x{self.block[1]}"
        return f"{text} in groups of {self.group}" if self.group else text


@dataclass(frozen=True, slots=True)
class Targets:
    """Some matrices of a model that is published quantized, and their number format.

    names: Which matrices: names of modules, names of module classes, or "re:" followed by a pattern.
    numbers: Their number format.
    """

    names: tuple[str, ...]
    numbers: Numbers

    def name_module(self, module: str) -> bool:
        """Return whether `names` has this module, by its name or a pattern; names of classes do not count.

        module: the module's name in a model of text alone. Its names in models with images are tried too.
        """
        candidates = names_of(module)
        return any(
            any(re.match(target[3:], name) for name in candidates)
            if target.startswith("re:")
            else target in candidates
            for target in self.names
        )


@dataclass(frozen=True, slots=True)
class Published:
    """The way in which a model's matrices are published quantized.

    method: The quantization method.
    targets: Number formats, and which matrices have them; the first one is the default.
    zero_offset: Number that is added to stored zero points; GPTQ stores them minus one.
    """

    method: Method
    targets: tuple[Targets, ...]
    zero_offset: int = 0

    def __str__(self) -> str:
        """Return the method and the number formats in words.

        The method is left out if the number formats begin with its name.
        """
        numbers = ", ".join(dict.fromkeys(str(one.numbers) for one in self.targets))
        return numbers if numbers.startswith(self.method) else f"{self.method} {numbers}"

    @property
    def form(self) -> Quantization | None:
        """Return this project's form that can hold the codes of all matrices; see `Numbers.form`. None if
        there is none, or if matrices have different forms.
        """
        forms: set[Quantization | None] = {one.numbers.form for one in self.targets}
        return forms.pop() if len(forms) == 1 else None

    def numbers(self, module: str) -> Numbers:
        """Return the number format of a matrix: by its module's name, else by the class Linear, else that of
        the first target.

        module: name of the matrix's module.
        """
        named = (one for one in self.targets if one.name_module(module))
        classed = (one for one in self.targets if "Linear" in one.names)
        return next(chain(named, classed, self.targets)).numbers

    def modules(self, names: Iterable[str]) -> frozenset[str]:
        """Return the modules whose matrix is quantized, of those with tensors of these names; empty if none
        is.

        names: names of tensors in the files.

            # AWQ: "a.qweight", "a.scales", "b.weight" -> {"a"}
        """
        marks = MARKS[self.method]
        return frozenset(name.removesuffix(mark) for name in names for mark in marks if name.endswith(mark))

    def logical(self, name: str, modules: frozenset[str]) -> str:
        """Return the name of the matrix that tensor `name` is a part of; for other tensors, `name` itself.

        name: name of a tensor in the files.
        modules: the modules whose matrix is quantized, see `modules`.

            # AWQ: "a.qweight" -> "a.weight", "b.weight" -> "b.weight"

        Also returns `name` itself if the module that it would belong to is not in `modules`.
        """
        for part in (*MARKS[self.method], *PARTS[self.method]):
            if name.endswith(part) and (module := name.removesuffix(part)) in modules:
                return f"{module}{self.suffix}"
        return name

    @property
    def suffix(self) -> str:
        """The suffix of a matrix's name; gpt-oss names all experts of a layer without a suffix."""
        return "" if self.method == "mxfp4" else ".weight"


def read_published(values: Mapping[str, Any], source: Path) -> Published | None:
    """Return how a model's weights are published quantized, or None if they are not.

    values: The fields of config.json.
    source: The file, for messages.

    Raises ModelError, in one line, for a method or a variant that is not supported.

    `quantization_config` has precedence over `compression_config`. A null in the former counts as not
    quantized. Raises ModelError also if the value is no object, or if a field that the method needs is
    missing.
    """
    found = values.get("quantization_config", values.get("compression_config"))
    if found is None:
        return None
    if not isinstance(found, dict):
        raise ModelError(f"{source}: quantization_config must be an object, got {found!r}")
    method = found.get("quant_method")
    if method not in READERS:
        raise ModelError(f"{source}: quant_method {method!r} is not one of {', '.join(READERS)}")
    try:
        return READERS[method](found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{source}: quantization_config of {method}: {error}") from None


def _awq(config: Mapping[str, Any]) -> Published:
    """Return how a model is published in the format of AWQ. Raises ValueError for another version than gemm,
    and for other bits than 4 and 8.

    config: the fields of quantization_config.

    Raises KeyError if bits or group_size is missing. Without a version, gemm is assumed.
    """
    _expect(config.get("version", "gemm").lower(), "version", "gemm")
    return Published("awq", (Targets((), _grouped(config)),))


def _gptq(config: Mapping[str, Any]) -> Published:
    """Return how a model is published in the format of GPTQ. Raises ValueError for an unknown layout, for
    modules of other bits, and for other bits than 4 and 8.

    config: the fields of quantization_config.

    Without `checkpoint_format`, "gptq" applies, whose stored zero points are minus one. Raises KeyError if
    bits or group_size is missing.
    """
    layout = config.get("checkpoint_format") or "gptq"
    _expect(layout, "checkpoint_format", "gptq", "gptq_v2")
    if config.get("dynamic"):
        raise ValueError("modules of other bits (dynamic) are not supported")
    return Published("gptq", (Targets((), _grouped(config)),), 0 if layout == "gptq_v2" else 1)


def _grouped(config: Mapping[str, Any]) -> Numbers:
    """Return the number format of the matrices of an AWQ or GPTQ model. Raises ValueError for other bits than
    4 and 8.

    config: the fields of quantization_config.

    A group size that is not above 0 means that a whole row shares a scale, which is None in the result.
    Without `sym`, the numbers are centred; with `desc_act`, the inputs of a group are not adjacent. Raises
    KeyError if bits or group_size is missing.
    """
    bits = int(config["bits"])
    group = int(config["group_size"])
    _expect(bits, "bits", *PACKED_BITS)
    centred = bool(config.get("sym", True))
    ordered = not config.get("desc_act")
    return Numbers("int", bits, group if group > 0 else None, None, centred, ordered)


def _bitsandbytes(config: Mapping[str, Any]) -> Published:
    """Return how a model is published in the format of bitsandbytes: indices into a table of 16 numbers if
    the weights have 4 bits, otherwise 8-bit integers.

    config: the fields of quantization_config.
    """
    four = bool(config.get("load_in_4bit", config.get("_load_in_4bit")))
    return Published("bitsandbytes", (Targets((), Numbers("table", 4) if four else Numbers("int", 8)),))


def _fp8(config: Mapping[str, Any]) -> Published:
    """Return how a model is published in 8-bit floats, with scales by block, or by tensor if the config names
    no block.

    config: the fields of quantization_config.

    Raises ValueError or TypeError if the block is no pair of numbers.
    """
    block = config.get("weight_block_size")
    return Published("fp8", (Targets((), Numbers("fp8", 8, block=_pair(block))),))


def _mxfp4(config: Mapping[str, Any]) -> Published:
    """Read MXFP4, whose format is fixed: 4-bit floats in groups of 32.

    config: the fields of quantization_config, which are not needed.
    """
    return Published("mxfp4", (Targets((), Numbers("fp4", 4, GROUP)),))


def _compressed(config: Mapping[str, Any]) -> Published:
    """Return how a model is published in the format of compressed-tensors, with one entry of targets for each
    config group, in their order.

    config: the fields of quantization_config.

    Raises ValueError for sparsity and transforms, and if there are no config groups.

    Raises ValueError also for an unsupported number format of a group, and KeyError if a field is missing.
    """
    for name in ("sparsity_config", "transform_config"):
        if config.get(name):
            raise ValueError(f"{name} is not supported")
    groups = config["config_groups"].values()
    if not groups:
        raise ValueError("config_groups is empty")
    return Published(
        "compressed-tensors",
        tuple(Targets(tuple(group["targets"]), _compressed_numbers(group["weights"])) for group in groups),
    )


def _compressed_numbers(weights: Mapping[str, Any]) -> Numbers:
    """Return the number format of one config group. Raises ValueError for an unsupported one.

    weights: the `weights` of the group.

    Supported are integers of 4 or 8 bits, floats of 8 bits, and floats of 4 bits in groups of 32. Without a
    strategy, groups apply if a group size is given, otherwise one scale for the tensor, whose `group` is
    None. Raises KeyError if num_bits is missing.
    """
    bits = int(weights["num_bits"])
    group = weights.get("group_size")
    kind = weights.get("type", "int")
    strategy = weights.get("strategy") or ("group" if group else "tensor")
    _expect(strategy, "strategy", "tensor", "channel", "group", "block")
    block = _pair(weights.get("block_structure")) if strategy == "block" else None
    group = int(group) if group and strategy == "group" else None
    if kind == "int":
        _expect(bits, "num_bits", *PACKED_BITS)
        centred = bool(weights.get("symmetric", True))
        ordered = weights.get("actorder") in (None, False, "static", "weight")
        return Numbers("int", bits, group, block, centred, ordered)
    if bits == 8:
        return Numbers("fp8", 8, group, block)
    _expect((kind, bits, group), "type, num_bits and group_size", ("float", 4, 32))
    return Numbers("fp4", 4, 32)


def _pair(block: Any) -> tuple[int, int] | None:
    """Return a block's numbers of outputs and inputs, or None if there is no block.

    block: a list of two numbers, or None.

    Raises TypeError or ValueError for anything but two numbers.
    """
    if block is None:
        return None
    outputs, inputs = block
    return int(outputs), int(inputs)


def _expect(value: object, name: str, *known: object) -> None:
    """Raise ValueError if `value` is not one of `known`.

    value: the value of a field.
    name: name of the field.
    known: the supported values.
    """
    if value not in known:
        raise ValueError(f"{name} {value!r} is not one of {', '.join(map(str, known))}")


# The reader of quantization_config by quant_method.
READERS: Mapping[Any, Any] = {
    "awq": _awq,
    "gptq": _gptq,
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "mxfp4": _mxfp4,
}
