"""Decides what `--device auto` means, from the GPUs that were found, and says why in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from specsot.core.info import memory_in_words

# The value of `--device` that lets this module choose.
AUTO = "auto"
# What it costs if stages share a GPU. Measured: Qwen2.5-Coder-1.5B, one H200, 1 and 64 clients.
SHARED_COST = (
    "one stage would be faster, because a step waits for each stage in turn "
    "(with two, 0.5 of its tokens/s for one client and 0.7 for 64)"
)
# Package index with builds of torch for CUDA.
CUDA_INDEX = "https://download.pytorch.org/whl/cu130"
# What a user can do whose GPU is too small.
ROOM_REMEDY = "--quantization int8 or a smaller --kv-memory needs less, and --device cuda tries it anyway"
# What a user with an NVIDIA GPU and a torch built for CPUs can do.
CPU_TORCH_REMEDY = f"pip install --force-reinstall torch --index-url {CUDA_INDEX} installs one with CUDA"


@dataclass(frozen=True, slots=True)
class FoundGpu:
    """One NVIDIA GPU that this process may use.

    number: Number of its torch device, such as 1 for cuda:1.
    name: The GPU's name.
    free: Free bytes of its memory; None if unknown.
    """

    number: int
    name: str
    free: int | None = None

    def __str__(self) -> str:
        """Return the GPU in words, such as "cuda:1, NVIDIA H100 (79 GiB free)"; without the size if it is
        unknown.
        """
        free = "" if self.free is None else f" ({memory_in_words(self.free)} free)"
        return f"cuda:{self.number}, {self.name}{free}"


@dataclass(frozen=True, slots=True)
class FoundGpus:
    """The NVIDIA GPUs of this machine, and the installed torch.

    gpus: The GPUs that torch can use, in torch's order.
    installed: Number of GPUs of the machine, whether or not this process may use them.
    torch_version: Version of the installed torch, such as "2.13.0+cpu".
    torch_cuda: True if torch was built with CUDA.
    hidden: True if CUDA_VISIBLE_DEVICES names none of the GPUs.
    """

    gpus: tuple[FoundGpu, ...] = ()
    installed: int = 0
    torch_version: str = ""
    torch_cuda: bool = False
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class ChosenDevice:
    """The device that was chosen.

    device: Name of a torch device; "cuda" if any of the GPUs will do, which the master then assigns.
    reason: One line for the user that says why.
    notable: True if the line is also shown to a user who did not ask: the machine has a GPU, whether it is
        used or not.
    """

    device: str
    reason: str
    notable: bool = True


@dataclass(frozen=True, slots=True)
class KvMemory:
    """How much memory each member of a fleet gives to KV pages.

    worker: Bytes of each worker.
    drafter: Bytes of the drafter; 0 without a drafter that is a model.
    positions: KV positions of all sequences of a ring together.
    """

    worker: int
    drafter: int
    positions: int


def shared_gpus(places: Sequence[str]) -> str:
    """Return one line that says which GPUs several stages share, and what that costs; "" if none is shared.

    places: The device of each stage, such as "cuda:0" or "127.0.0.1#0"; CPUs end with "cpu".
    """
    counts = Counter(place for place in places if not place.endswith("cpu"))
    shared = [f"{count} stages share {place}" for place, count in counts.items() if count > 1]
    return f"{', '.join(shared)}: {SHARED_COST}" if shared else ""


def choose_device(
    gpus_found: FoundGpus, needed_bytes: int | None = None, stages: int = 1, shards: int = 1
) -> ChosenDevice:
    """Choose GPUs if the model fits on them, and the CPU otherwise.

    gpus_found: GPUs of this machine, and the installed torch.
    needed_bytes: Bytes that weights, KV pages and drafter take together; None if unknown: then any GPU is
        large enough.
    stages: Number of layer ranges; each may have a GPU of its own.
    shards: Number of GPUs over which each layer is split (--tensor-parallel); the first ones are used.

    Two GPUs with 20 and 70 GiB free: a model of 60 GiB -> cuda:1; the same in 2 stages -> cuda:1, as half of
    it does not fit on the first GPU; of 30 GiB in 2 stages -> cuda, and each stage gets its own GPU; of 80
    GiB in 2 stages -> cuda, as the master gives the second GPU more layers; of 80 GiB in one stage -> cpu.

    Without a usable GPU, the CPU is chosen and the reason says why. With several shards, GPUs are chosen
    even if the model does not fit. With one stage, the GPU with the most free memory of those that hold the
    model is chosen; a GPU whose free memory is unknown counts as large enough, but as the smallest.
    """
    if not gpus_found.gpus:
        return _without_gpu(gpus_found)
    if shards > 1:
        return _sharded(gpus_found.gpus, needed_bytes, shards)
    bytes_per_gpu = None if needed_bytes is None else -(-needed_bytes // min(stages, len(gpus_found.gpus)))
    uses_all = len(gpus_found.gpus) == 1 or stages > 1
    if uses_all and all(_holds(gpu, bytes_per_gpu) for gpu in gpus_found.gpus):
        return ChosenDevice("cuda", _used(gpus_found.gpus, needed_bytes))
    if large_enough := [gpu for gpu in gpus_found.gpus if _holds(gpu, needed_bytes)]:
        largest = max(large_enough, key=_free)
        return ChosenDevice(f"cuda:{largest.number}", _used([largest], needed_bytes))
    assert needed_bytes is not None
    if stages >= len(gpus_found.gpus) and needed_bytes <= sum(map(_free, gpus_found.gpus)):
        return ChosenDevice("cuda", _used(gpus_found.gpus, needed_bytes))
    return ChosenDevice("cpu", _too_small(gpus_found.gpus, needed_bytes, stages))


def _holds(gpu: FoundGpu, needed_bytes: int | None) -> bool:
    """Return whether so many bytes fit on the GPU; True also if either number is unknown.

    gpu: The GPU, with its free bytes.
    needed_bytes: Bytes to hold; None if unknown.
    """
    return needed_bytes is None or gpu.free is None or gpu.free >= needed_bytes


def _free(gpu: FoundGpu) -> int:
    """Return a GPU's free bytes; 0 if unknown.

    gpu: The GPU.
    """
    return gpu.free or 0


def _used(gpus: Sequence[FoundGpu], needed_bytes: int | None) -> str:
    """Return the line that says which GPUs are used, and how many bytes are needed if that is known.

    gpus: The chosen GPUs.
    needed_bytes: Bytes of the whole model; None if unknown.
    """
    requirement = "" if needed_bytes is None else f"; {memory_in_words(needed_bytes)} needed"
    return f"device {' and '.join(map(str, gpus))}{requirement}"


def _too_small(gpus: Sequence[FoundGpu], needed_bytes: int, stages: int) -> str:
    """Return the line that says why no GPU is used: how much is needed, how much is free, and what to do.

    With fewer stages than GPUs, or with a single GPU, the line names the GPU with the most free memory;
    otherwise the free memory of all together.

    gpus: All usable GPUs, at least one.
    needed_bytes: Bytes of the whole model.
    stages: Number of layer ranges. If there are several, the GPUs could have held the model together.
    """
    free = f"the GPU with the most free memory is {max(gpus, key=_free)}"
    if stages >= len(gpus) > 1:
        free = f"{len(gpus)} GPUs have {memory_in_words(sum(map(_free, gpus)))} free together"
    return f"device cpu: the model needs {memory_in_words(needed_bytes)}, {free}; {ROOM_REMEDY}"


def _sharded(gpus: Sequence[FoundGpu], needed_bytes: int | None, shards: int) -> ChosenDevice:
    """Choose the first `shards` GPUs, for a model whose layers are split over them.

    If they are too few or too small, they are chosen anyway: loading the model then refuses what was asked
    for.

    The device is always "cuda:0". If a GPU is too small, the reason names the first such GPU.

    gpus: All usable GPUs, at least one.
    needed_bytes: Bytes of the whole model; None if unknown.
    shards: Number of GPUs that share each layer, at least 2.
    """
    chosen = gpus[:shards]
    bytes_per_gpu = None if needed_bytes is None else -(-needed_bytes // shards)
    too_small = [gpu for gpu in chosen if not _holds(gpu, bytes_per_gpu)]
    reason = _used(chosen, needed_bytes)
    if too_small and bytes_per_gpu is not None:
        reason += f"; {memory_in_words(bytes_per_gpu)} of it on each, which does not fit on {too_small[0]}"
    return ChosenDevice("cuda:0", reason)


def _without_gpu(gpus_found: FoundGpus) -> ChosenDevice:
    """Choose the CPU, and say why no GPU can be used: none exists, torch is built for CPUs,
    CUDA_VISIBLE_DEVICES hides them, or torch cannot use them.

    Only without any NVIDIA GPU the line is not notable.

    gpus_found: GPUs of this machine, and the installed torch, which can use none of them.
    """
    if not gpus_found.installed:
        return ChosenDevice("cpu", "device cpu: this machine has no NVIDIA GPU", notable=False)
    gpus_here = (
        "this machine has an NVIDIA GPU"
        if gpus_found.installed == 1
        else f"this machine has {gpus_found.installed} NVIDIA GPUs"
    )
    if not gpus_found.torch_cuda:
        obstacle = f"but torch {gpus_found.torch_version} is built for CPUs; {CPU_TORCH_REMEDY}"
    elif gpus_found.hidden:
        obstacle = "but CUDA_VISIBLE_DEVICES hides them all"
    else:
        torch = f"torch {gpus_found.torch_version}"
        obstacle = f"but {torch} cannot use them; its CUDA may need a newer driver (nvidia-smi)"
    return ChosenDevice("cpu", f"device cpu: {gpus_here}, {obstacle}")


def visible_gpus(installed: Sequence[tuple[str, FoundGpu]], visible: str | None) -> tuple[FoundGpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, in its order, with the numbers that torch gives them.

    installed: UUID and description of each GPU of the machine, numbered as nvidia-smi does.
    visible: The variable's value; None: all GPUs are visible.
    As in CUDA, a name that fits no GPU ends the list. A part of a GPU (MIG) has an unknown amount of free
    memory.

    GPUs 0 and 1, "1,0" -> 1 as cuda:0, 0 as cuda:1; "1,7,0" -> 1 as cuda:0 alone; "" -> none.

    Spaces around a name are ignored. A name that is repeated is counted again.
    """
    if visible is None:
        return tuple(gpu for _, gpu in installed)
    result: list[FoundGpu] = []
    for name in (part.strip() for part in visible.split(",")):
        number = len(result)
        gpu = _named(installed, name)
        if gpu:
            result.append(FoundGpu(number, gpu.name, gpu.free))
        elif name.startswith("MIG-"):
            result.append(FoundGpu(number, "a part of a GPU"))
        else:
            break
    return tuple(result)


def _named(installed: Sequence[tuple[str, FoundGpu]], name: str) -> FoundGpu | None:
    """Return the GPU with this name; None if there is none.

    Numbers are those of nvidia-smi; "GPU-" and the beginning of a UUID name the first GPU that fits.

    installed: UUID and description of each GPU of the machine.
    name: One part of CUDA_VISIBLE_DEVICES: a number, or the beginning of a UUID.
    """
    for uuid, gpu in installed:
        if name == str(gpu.number) or (name.startswith("GPU-") and uuid.startswith(name)):
            return gpu
    return None
