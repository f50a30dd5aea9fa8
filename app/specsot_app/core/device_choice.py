"""Decides what `--device auto` means, from the GPUs that were found, and says why in one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specsot.core.info import memory_in_words

AUTO = "auto"
CUDA_INDEX = "https://download.pytorch.org/whl/cu130"
CPU_TORCH_REMEDY = f"pip install --force-reinstall torch --index-url {CUDA_INDEX} installs one with CUDA"


@dataclass(frozen=True, slots=True)
class FoundGpu:
    """One NVIDIA GPU that this process may use.

    number: number of its torch device, such as 1 for cuda:1.
    name: the GPU's name.
    free: free bytes of its memory; None if unknown.
    """

    number: int
    name: str
    free: int | None = None

    def __str__(self) -> str:
        free = "" if self.free is None else f" ({memory_in_words(self.free)} free)"
        return f"cuda:{self.number}, {self.name}{free}"


@dataclass(frozen=True, slots=True)
class FoundGpus:
    """What was found of NVIDIA GPUs and of torch.

    gpus: the GPUs that torch can use, in torch's order.
    installed: number of GPUs of the machine, whether or not this process may use them.
    torch_version: such as "2.13.0+cpu".
    torch_cuda: torch was built with CUDA.
    hidden: CUDA_VISIBLE_DEVICES names none of the GPUs.
    """

    gpus: tuple[FoundGpu, ...] = ()
    installed: int = 0
    torch_version: str = ""
    torch_cuda: bool = False
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class ChosenDevice:
    """The device that was chosen.

    device: a torch device; "cuda" if any of the GPUs will do, which the master then assigns.
    reason: one line for the user.
    notable: the line is also shown to a user who did not ask: the machine has a GPU, whether it is used or
        not.
    """

    device: str
    reason: str
    notable: bool = True


def choose_device(
    found: FoundGpus, need: int | None = None, stages: int = 1, shards: int = 1
) -> ChosenDevice:
    """Choose GPUs if the model fits on them, and the CPU otherwise.

    need: bytes that weights, KV pages and drafter take together; None if unknown: then any GPU is large
        enough.
    stages: number of layer ranges; each may have a GPU of its own.
    shards: number of GPUs over which each layer is split (--tensor-parallel); the first ones are used.

    Two GPUs with 20 and 70 GiB free: a model of 60 GiB -> cuda:1; the same in 2 stages -> cuda:1, as half of
    it does not fit on the first GPU; of 30 GiB in 2 stages -> cuda, and each stage gets its own GPU; of 80
    GiB in 2 stages -> cuda, as the master gives the second GPU more layers; of 80 GiB in one stage -> cpu.
    """
    if not found.gpus:
        return _without_gpu(found)
    if shards > 1:
        return _sharded(found.gpus, need, shards)
    each = None if need is None else -(-need // min(stages, len(found.gpus)))
    shared = len(found.gpus) == 1 or stages > 1
    if shared and all(_holds(gpu, each) for gpu in found.gpus):
        return ChosenDevice("cuda", _used(found.gpus, need))
    if able := [gpu for gpu in found.gpus if _holds(gpu, need)]:
        best = max(able, key=_free)
        return ChosenDevice(f"cuda:{best.number}", _used([best], need))
    assert need is not None
    if stages >= len(found.gpus) and need <= sum(map(_free, found.gpus)):
        return ChosenDevice("cuda", _used(found.gpus, need))
    best = max(found.gpus, key=_free)
    wants = f"the model needs {memory_in_words(need)}"
    return ChosenDevice("cpu", f"device cpu: {wants}, the most that a GPU has free is {best}")


def _holds(gpu: FoundGpu, need: int | None) -> bool:
    """Return whether so many bytes fit on the GPU, or may do so."""
    return need is None or gpu.free is None or gpu.free >= need


def _free(gpu: FoundGpu) -> int:
    """Return the GPU's free bytes; 0 if unknown."""
    return gpu.free or 0


def _used(gpus: Sequence[FoundGpu], need: int | None) -> str:
    """Return the reason for using these GPUs."""
    wants = "" if need is None else f"; {memory_in_words(need)} needed"
    return f"device {' and '.join(map(str, gpus))}{wants}"


def _sharded(gpus: Sequence[FoundGpu], need: int | None, shards: int) -> ChosenDevice:
    """Choose the first `shards` GPUs.

    If they are too few or too small, they are chosen anyway: loading the model then refuses what was asked
    for.
    """
    used = gpus[:shards]
    each = None if need is None else -(-need // shards)
    short = [gpu for gpu in used if not _holds(gpu, each)]
    reason = _used(used, need)
    if short and each is not None:
        reason += f"; {memory_in_words(each)} of it on each, for which there is not room on {short[0]}"
    return ChosenDevice("cuda:0", reason)


def _without_gpu(found: FoundGpus) -> ChosenDevice:
    """Choose the CPU, and say why no GPU can be used."""
    if not found.installed:
        return ChosenDevice("cpu", "device cpu: no NVIDIA GPU is here", notable=False)
    here = "an NVIDIA GPU is here" if found.installed == 1 else f"{found.installed} NVIDIA GPUs are here"
    if not found.torch_cuda:
        why = f"but torch {found.torch_version} is built for CPUs; {CPU_TORCH_REMEDY}"
    elif found.hidden:
        why = "but CUDA_VISIBLE_DEVICES hides them all"
    else:
        why = (
            f"but torch {found.torch_version} cannot use them; its CUDA may need a newer driver (nvidia-smi)"
        )
    return ChosenDevice("cpu", f"device cpu: {here}, {why}")


def visible_gpus(installed: Sequence[tuple[str, FoundGpu]], visible: str | None) -> tuple[FoundGpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, in its order, with the numbers that torch gives them.

    installed: (UUID, GPU), numbered as nvidia-smi does.
    visible: the variable's value; None: all GPUs are visible.
    As in CUDA, a name that fits no GPU ends the list. A part of a GPU (MIG) has an unknown amount of free
    memory.

    GPUs 0 and 1, "1,0" -> 1 as cuda:0, 0 as cuda:1; "1,7,0" -> 1 as cuda:0 alone; "" -> none.
    """
    if visible is None:
        return tuple(gpu for _, gpu in installed)
    found: list[FoundGpu] = []
    for name in (part.strip() for part in visible.split(",")):
        number = len(found)
        gpu = _named(installed, name)
        if gpu:
            found.append(FoundGpu(number, gpu.name, gpu.free))
        elif name.startswith("MIG-"):
            found.append(FoundGpu(number, "a part of a GPU"))
        else:
            break
    return tuple(found)


def _named(installed: Sequence[tuple[str, FoundGpu]], name: str) -> FoundGpu | None:
    """Return the GPU with this number, or whose UUID begins with this name; None if there is none."""
    for uuid, gpu in installed:
        if name == str(gpu.number) or (name.startswith("GPU-") and uuid.startswith(name)):
            return gpu
    return None
