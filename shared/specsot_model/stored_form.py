"""Decides in which form the matrices of a model are held: floats, int8, int4 or fp8.

The form follows from the options, the model's files and the processor. Nothing here imports torch unless the
device is a GPU, so that a process which only starts others can ask.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final, TypeVar

from specsot.checkpoint.config import read_config, text_fields
from specsot.checkpoint.fields import read_json
from specsot.checkpoint.gguf.directory import bits_per_weight
from specsot.checkpoint.quantization_config import Published, read_published
from specsot.errors import InvalidRequest
from specsot.members import Quantization
from specsot.service.options import ModelOptions

# Bits. GGUF files of more bits per weight keep their floats. Q8_0, whose blocks of 32 have an fp16 scale, has
# 8.5 bits.
MAX_GGUF_BITS: Final = 9
# Instructions without which the packed kernels do not run, or run slowly on untested processors, by LLVM's
# names.
NEEDED_INSTRUCTIONS: Final = ("avx2", "fma", "f16c")

# A kind of model options; `as_published` returns the kind that it was given.
Given = TypeVar("Given", bound=ModelOptions)


def is_cpu(device: object) -> bool:
    """Return whether a device is the CPU.

    device: A `torch.device` or its name, such as "cpu" or "cuda:0".
    """
    return str(device).partition(":")[0] == "cpu"


def published_of(directory: Path, quantization: Quantization | None = None) -> Published | None:
    """Return how a model's files are quantized, or None if they are not, or if there is no config.

    directory: Folder of the model.
    quantization: The form that is asked for; None: any. Another form than that of the files raises
        InvalidRequest, because weights would be rounded twice.

    Raises ModelError if the config cannot be read.
    """
    config = directory / "config.json"
    published = read_published(text_fields(read_json(config), config), config) if config.is_file() else None
    if published and quantization not in (None, published.form):
        hint = f" or say {published.form}" if published.form else ""
        raise InvalidRequest(
            f"{directory} is quantized already ({published}): leave out --quantization{hint}", "quantization"
        )
    return published


def as_published(options: Given, base: Path) -> Given:
    """Return the options with the quantization that can hold the codes of a quantized model as they are, or,
    of a GGUF file of few bits on a CPU, with int8.

    The options are returned unchanged if the user gave a quantization (such as "none") or a dtype, if the
    model is not quantized, or if no kernels of this machine run that form. A form runs on a CPU, for int8 and
    int4, if Numba is installed. A GGUF file is decoded and rounded to int8, whose sums are exact, if this
    machine has all that `lacks_for_packed_kernels` asks for. Elsewhere fp8 and int8 run on GPUs that multiply
    them, unless the model has experts or, for other forms than int8, is batch-invariant or draft-invariant.

    options: The model options, with device and dtype.
    base: Folder of the base model. Raises ModelError if its config cannot be read.
    """
    config = read_config(base)
    form = config.published.form if config.published else None
    if options.quantization or options.dtype != "auto" or config.transformers is not None:
        return options
    if form is None:
        packs = is_cpu(options.device) and options.tensor_parallel == 1 and is_quantized_gguf(base)
        runs = packs and not lacks_for_packed_kernels()
        return replace(options, quantization="int8") if runs else options
    if uses_packed_kernels(form, options.device):
        runs = find_spec("numba") is not None
    else:
        # Imported here, because the modules import torch.
        import torch

        from specsot_model.fp8 import multiplies_fp8, runs_kernels

        # Experts run as one grouped product, and batch-invariant or draft-invariant layers in int8 or floats;
        # other forms are decoded to --dtype.
        invariant = options.batch_invariant or options.draft_invariant
        decoded = config.routing or (invariant and form != "int8")
        multiplied = {"fp8": multiplies_fp8, "int8": runs_kernels}.get(form)
        runs = not decoded and multiplied is not None and multiplied(torch.device(options.device))
    return replace(options, quantization=form) if runs else options


def is_quantized_gguf(base: Path) -> bool:
    """Tell whether a model was made of a GGUF file whose weights have about 8 bits or fewer.

    base: Folder of the model. Raises ModelError if it cannot be read.
    """
    bits = bits_per_weight(base)
    return bits is not None and bits <= MAX_GGUF_BITS


def uses_packed_kernels(kind: Quantization | None, device: object) -> bool:
    """Tell whether the packed CPU kernels are used: int8 and int4 on a CPU. Embeddings are int8 then.

    kind: Form of the matrices; None: they are not quantized.
    device: Device of the model, a `torch.device` or its name, such as "cuda:0".
    """
    return kind in ("int8", "int4") and is_cpu(device)


def lacks_for_packed_kernels() -> str | None:
    """Return in words what this machine lacks for the packed CPU kernels, such as "Numba". Return None if
    they run here.
    """
    if find_spec("numba") is None:
        return "Numba"
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    missing = [name for name in NEEDED_INSTRUCTIONS if not features.get(name)]
    return f"a processor with {', '.join(missing).upper()}" if missing else None


def lm_head_quantization(kind: Quantization | None) -> Quantization | None:
    """Return the form of the lm_head: int8 instead of int4, which would change the text too much.

    kind: Form of the other matrices; None: they are not quantized.
    """
    return "int8" if kind == "int4" else kind
