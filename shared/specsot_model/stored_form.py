"""Decides in which form a model's weight matrices are kept in memory: floats, int8, int4 or fp8.

The form follows from the options, the model's files and the processor. Importing this module does not import
torch, so that a process that only starts other processes can use it. Only `as_published` may import torch: if
the files are quantized in a form that the packed CPU kernels do not compute (fp8, or any form on a GPU).
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

# Bits. The weights of GGUF files with more bits per weight are decoded to floats and not rounded to int8.
# Chosen to include Q8_0, which has 8.5 bits per weight: 8, and an fp16 scale for each block of 32 weights.
MAX_GGUF_BITS: Final = 9
# The instruction sets, by LLVM's names, that a processor must have before weights are rounded to int8 without
# being asked to. On an x86 processor that lacks one of them, the packed kernels do not run. On processors of
# other architectures they run, but slowly, and they were not tested there.
NEEDED_INSTRUCTIONS: Final = ("avx2", "fma", "f16c")

# `ModelOptions` or a subclass: `as_published` returns options of the class that it received.
Options = TypeVar("Options", bound=ModelOptions)


def is_cpu(device: object) -> bool:
    """Return whether a device is the CPU.

    device: A `torch.device` or its name, such as "cpu" or "cuda:0".
    """
    return str(device).partition(":")[0] == "cpu"


def published_of(directory: Path, quantization: Quantization | None = None) -> Published | None:
    """Return how a model's files are quantized. Return None if they are not quantized, or if the folder has
    no config.json.

    directory: Folder of the model.
    quantization: The form that the user asked for; None if the user asked for none.

    Raises InvalidRequest if the files are quantized in another form than `quantization`, because their
    weights would be rounded twice. Raises ModelError if the config cannot be read.
    """
    config = directory / "config.json"
    published = read_published(text_fields(read_json(config), config), config) if config.is_file() else None
    if published and quantization not in (None, published.form):
        hint = f" or say {published.form}" if published.form else ""
        raise InvalidRequest(
            f"{directory} is quantized already ({published}): leave out --quantization{hint}", "quantization"
        )
    return published


def as_published(options: Options, base: Path) -> Options:
    """Return the options with the quantization that follows from the model's files.

    Files that are quantized as int8, int4 or fp8 give that form, so that their integers or 8-bit floats are
    kept as they are, if this machine has kernels for the form:

    * On a CPU, int8 and int4 need what `missing_for_packed_kernels` names: Numba, and instructions.
    * On a GPU, int8 needs Triton, and fp8 a GPU that multiplies fp8. int4 has no kernels there. Neither form
      is kept if the model has experts; fp8 is not kept either if the model is to be batch-invariant or
      draft-invariant.

    A GGUF file of at most MAX_GGUF_BITS bits per weight gives int8, if the device is a CPU, the layers are
    not split (`tensor_parallel`), and `missing_for_packed_kernels` returns None.

    In all other cases the options are returned unchanged, and the weights are decoded to floats. This
    includes options in which the user gave a quantization (also "none") or a dtype, and models that run
    through Transformers' own code.

        # AWQ files (int4), device cpu, with Numba -> quantization="int4"
        # AWQ files (int4), device cuda            -> unchanged: decoded to floats

    options: The model options, with device and dtype.
    base: Folder of the base model.

    Raises ModelError if the model's config cannot be read.
    """
    config = read_config(base)
    form = config.published.form if config.published else None
    if options.quantization or options.dtype != "auto" or config.transformers is not None:
        return options
    if form is None:
        fits_int8 = is_cpu(options.device) and options.tensor_parallel == 1 and is_quantized_gguf(base)
        has_kernels = fits_int8 and not missing_for_packed_kernels()
        return replace(options, quantization="int8") if has_kernels else options
    if uses_packed_kernels(form, options.device):
        has_kernels = not missing_for_packed_kernels()
    else:
        # Imported here, because the modules import torch.
        import torch

        from specsot_model.fp8 import multiplies_fp8, runs_kernels

        # Experts run as one grouped product of floats, and batch-invariant or draft-invariant layers run in
        # int8 or floats. Weights of other forms are decoded to --dtype.
        invariant = options.batch_invariant or options.draft_invariant
        is_decoded = config.routing or (invariant and form != "int8")
        kernel_check = {"fp8": multiplies_fp8, "int8": runs_kernels}.get(form)
        has_kernels = (
            not is_decoded and kernel_check is not None and kernel_check(torch.device(options.device))
        )
    return replace(options, quantization=form) if has_kernels else options


def is_quantized_gguf(base: Path) -> bool:
    """Return whether a model was made of a GGUF file whose matrices have at most MAX_GGUF_BITS bits per
    weight on average.

    base: Folder of the model.

    Raises ModelError if the folder's list of the GGUF file's tensors cannot be read.
    """
    bits = bits_per_weight(base)
    return bits is not None and bits <= MAX_GGUF_BITS


def uses_packed_kernels(form: Quantization | None, device: object) -> bool:
    """Return whether the packed CPU kernels compute a model's products, which they do for int8 and int4 on a
    CPU. The embeddings are int8 then, too.

    form: Form of the matrices; None: they are not quantized.
    device: Device of the model, a `torch.device` or its name, such as "cuda:0".
    """
    return form in ("int8", "int4") and is_cpu(device)


def missing_for_packed_kernels() -> str | None:
    """Return what this machine is missing for the packed CPU kernels: "Numba", or the processor's missing
    instructions, such as "a processor with AVX2, FMA". Return None if nothing is missing.
    """
    if find_spec("numba") is None:
        return "Numba"
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    missing = [name for name in NEEDED_INSTRUCTIONS if not features.get(name)]
    return f"a processor with {', '.join(missing).upper()}" if missing else None


def lm_head_quantization(form: Quantization | None) -> Quantization | None:
    """Return the form of the lm_head. It is that of the other matrices, but int8 instead of int4, because an
    lm_head of 4 bits would change the generated text too much.

    form: Form of the other matrices; None: they are not quantized.
    """
    return "int8" if form == "int4" else form
