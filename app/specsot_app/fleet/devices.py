"""Finds the GPUs that torch can use, and chooses the device of a fleet that is started with `--device auto`.

NVIDIA's management library is asked instead of CUDA: this process may only start other processes, and a CUDA
context would take hundreds of megabytes of each GPU as long as the process lives.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Final, TextIO

from specsot.core.info import memory_in_words
from specsot.errors import SpecsotError
from specsot.service.host_memory import free_memory
from specsot.service.options import SERVICE_KV_MEMORY
from specsot_app.core.device_choice import (
    AUTO,
    ChosenDevice,
    FoundGpu,
    FoundGpus,
    KvMemory,
    choose_device,
    shared_gpus,
    visible_gpus,
)
from specsot_app.fleet.options import EMBEDDED_KV_MEMORY, FleetOptions, local_hosts, parts_of_list, places_of

# Fraction. How much KV pages take by default of a machine's free memory. Untuned.
CPU_SHARE: Final = 0.25
# Positions. If so few fit, the KV memory is not chosen here, and loading reports what is missing. Two pages.
MIN_POSITIONS: Final = 128
# Default and help of the device option, for commands that start a fleet.
CHOSEN_DEVICE = {"device": AUTO}
# Help of the device option, by option.
DEVICE_HELP = {
    "device": "Torch device, such as cpu, cuda or cuda:0; `auto`: an NVIDIA GPU with room for the model."
}


def with_device(options: FleetOptions, out: TextIO) -> FleetOptions:
    """Return options that name a device, unchanged if they do already, and the KV memory on a GPU.

    The line is printed only if a choice was made and it is notable, that is, if this machine has an NVIDIA
    GPU, whether it is used or not.

    options: Options of a fleet.
    out: Stream that gets the line which says which device was chosen and why, if this machine has a GPU.
    """
    options_with_device, choice = choose_for(options)
    if choice and choice.notable:
        print_choice(choice, out)
    return with_kv_memory(options_with_device, out)


def choose_for(
    options: FleetOptions,
    rings: int = 1,
    find_gpus_here: Callable[[], FoundGpus] | None = None,
    count_bytes: Callable[[FleetOptions], int] | None = None,
) -> tuple[FleetOptions, ChosenDevice | None]:
    """Return (options that name a device, the choice).

    The choice is None if there was none to make: the fleet is elsewhere, --device or --devices are given, or
    torch is missing. If --device names a device, the options are returned unchanged; in the other two cases
    they name the CPU.

    The number of stages that is compared with the GPUs is `options.stages`, else the number of layer ranges,
    else 1, each times `rings`. If this machine has no usable GPU, the model's size is not counted, and the
    choice is the CPU. A model whose size cannot be read is taken to fit.

    options: Options of a fleet.
    rings: Number of complete rings, at least 1.
    find_gpus_here: Finds this machine's GPUs; None: `find_gpus`.
    count_bytes: Counts the memory that the model needs; None: `count_memory`.
    """
    if options.device != AUTO:
        return options, None
    chosen_elsewhere = options.master is not None or options.devices
    # Without torch, loading the model fails with its own message.
    torch_missing = find_gpus_here is None and find_spec("torch") is None
    if chosen_elsewhere or torch_missing:
        return replace(options, device="cpu"), None
    gpus_found = (find_gpus_here or find_gpus)()
    needed_bytes = _needed_bytes(options, count_bytes or count_memory) if gpus_found.gpus else None
    ranges = options.layers.split(",") if isinstance(options.layers, str) else options.layers
    stages = options.stages or len(ranges or ()) or 1
    bytes_of_all_rings = None if needed_bytes is None else needed_bytes * rings
    choice = choose_device(gpus_found, bytes_of_all_rings, stages * rings, options.tensor_parallel)
    return replace(options, device=choice.device), choice


def with_kv_memory(
    options: FleetOptions,
    out: TextIO,
    rings: int = 1,
    requests: int = 64,
    find_gpus_here: Callable[[], FoundGpus] | None = None,
    count_kv: Callable[[FleetOptions, int, int, int, int], KvMemory] | None = None,
) -> FleetOptions:
    """Return options with the KV memory of workers and drafter, if it was not given: on GPUs what the free
    memory allows and the requests can use (`fitting.kv_memory_on_gpus`); on a CPU the usual amount, but at
    most CPU_SHARE of the free memory.

    Options are returned unchanged if a member is on another machine or the fleet is elsewhere, if members run
    on CPUs and on GPUs, if the free memory is unknown, and if the model cannot be read or leaves no room:
    loading it then reports why.

    options: Options of a fleet, which name a device.
    out: Stream that gets a line which says how much memory the KV pages of a worker take.
    rings: Number of rings.
    requests: Maximum number of requests in a ring at once.
    find_gpus_here: Finds this machine's GPUs; None: `find_gpus`.
    count_kv: Counts the KV memory; None: `fitting.kv_memory_on_gpus`, with the same arguments.
    """
    places = places_of(options)
    is_elsewhere = options.master is not None or {place.host for place in places} - local_hosts(
        place.host for place in places
    )
    # Without torch, loading the model fails with its own message.
    torch_missing = find_gpus_here is None and find_spec("torch") is None
    if options.kv_memory is not None or is_elsewhere or torch_missing:
        return options
    devices = {place.device for place in places} or {options.device}
    if devices == {"cpu"}:
        return _with_cpu_kv_memory(options, out)
    if "cpu" in devices:
        return options
    gpus = [gpu for gpu in (find_gpus_here or find_gpus)().gpus if devices & {"cuda", f"cuda:{gpu.number}"}]
    free = [gpu.free for gpu in gpus if gpu.free is not None]
    if not free or len(free) < len(gpus):
        return options
    # With several GPUs, each stage may have one of its own. All sizes are those of one GPU if it shares each
    # layer with others.
    num_gpus = min(len(gpus), num_stages(options, rings) * rings) if options.tensor_parallel == 1 else 1
    try:
        kv = (count_kv or _count_kv)(options, min(free), num_gpus, rings, requests)
    except (SpecsotError, OSError):
        return options
    if kv.positions < MIN_POSITIONS:
        return options
    amounts = f"{memory_in_words(kv.worker)} of {memory_in_words(min(free))} free"
    line = f"specsot: KV memory {amounts}, for {kv.positions:,} tokens; --kv-memory sets it"
    print(line, file=out, flush=True)
    return replace(
        options, kv_memory=kv.worker, draft_kv_memory=options.draft_kv_memory or kv.drafter or None
    )


def _with_cpu_kv_memory(options: FleetOptions, out: TextIO) -> FleetOptions:
    """Return options with a KV memory of CPU_SHARE of the free memory if that is less than the usual amount;
    unchanged otherwise, and if the free memory is unknown.

    options: Options of a fleet on the CPU.
    out: Stream that gets a line if the amount is less than usual.
    """
    free = free_memory()
    usual = EMBEDDED_KV_MEMORY if options.kind == "embedded" else SERVICE_KV_MEMORY
    if free is None or CPU_SHARE * free >= usual:
        return options
    words = f"KV memory {memory_in_words(CPU_SHARE * free)}, because {memory_in_words(free)} are free"
    print(f"specsot: {words}; --kv-memory sets it", file=out, flush=True)
    return replace(options, kv_memory=int(CPU_SHARE * free))


def print_shared_gpus(
    options: FleetOptions,
    out: TextIO,
    rings: int = 1,
    find_gpus_here: Callable[[], FoundGpus] | None = None,
) -> None:
    """Print one line if several stages of a ring share a GPU of this machine, which says what that costs.

    options: Options of a fleet, which name a device. With places, or on a CPU, nothing is printed.
    out: Stream to print to.
    rings: Number of rings.
    find_gpus_here: Finds this machine's GPUs; None: `find_gpus`.
    """
    stages = num_stages(options, rings)
    if stages == 1 or options.device == "cpu" or places_of(options) or options.master is not None:
        return
    gpus = (find_gpus_here or find_gpus)().gpus
    if options.device != "cuda" or len(gpus) == 1:
        name = options.device if options.device != "cuda" else f"cuda:{gpus[0].number}"
        print(f"specsot: {shared_gpus([name] * stages)}", file=out, flush=True)


def num_stages(options: FleetOptions, rings: int = 1) -> int:
    """Return the number of layer ranges of a ring: `stages`, else the number of ranges, else that of the
    places of one ring, else 1.

    options: Options of a fleet.
    rings: Number of rings.
    """
    return options.stages or len(parts_of_list(options.layers)) or len(places_of(options)) // rings or 1


def _count_kv(options: FleetOptions, free: int, num_gpus: int, rings: int, requests: int) -> KvMemory:
    """Return the KV memory of each member; see `fitting.kv_memory_on_gpus`, which has the same arguments."""
    from specsot_app.fleet.fitting import kv_memory_on_gpus

    return kv_memory_on_gpus(options, num_stages(options, rings), free, num_gpus, rings, requests)


def print_choice(choice: ChosenDevice, out: TextIO) -> None:
    """Print the reason of a choice in one line.

    choice: The device that was chosen, with the reason.
    out: Stream to print to.
    """
    print(f"specsot: {choice.reason}", file=out, flush=True)


def local_device(device: str, out: TextIO) -> str:
    """Return the device of a machine that joins another one's fleet, whose model's size it does not know yet.

    The choice is made as if the model fits on any GPU.

    device: A torch device, which is returned as it is, or AUTO.
    out: Stream that gets the reason of a choice, if this machine has a GPU.
    """
    if device != AUTO:
        return device
    choice = choose_device(find_gpus())
    if choice.notable:
        print_choice(choice, out)
    return choice.device


def _needed_bytes(options: FleetOptions, count_bytes: Callable[[FleetOptions], int]) -> int | None:
    """Return the bytes that the model needs, or None if it cannot be read: loading it then reports why.

    options: Options of the fleet.
    count_bytes: Counts the bytes that a fleet with these options needs.
    """
    try:
        return count_bytes(options)
    except (SpecsotError, OSError):
        return None


def count_memory(options: FleetOptions) -> int:
    """Return the bytes that a GPU needs for all layers, KV pages and the drafter.

    options: Options of the fleet.
    Raises ModelError, InvalidRequest.
    """
    from specsot_app.fleet.fitting import count_on_gpu

    return count_on_gpu(options)


def find_gpus() -> FoundGpus:
    """Return the GPUs that torch can use and that the driver knows, without making a CUDA context. On a
    machine without a GPU, the result has no GPUs and does not name torch, which takes seconds to import.

    GPUs beyond those that torch counts are left out. `hidden` is also True if no GPU is installed. Without a
    GPU, the kernels for CPUs begin to be compiled, if they never were.
    """
    installed = _installed_gpus()
    if not installed:
        from specsot_kernels.cpu.compiling import start_compiling

        start_compiling()
        return FoundGpus(hidden=True)
    import torch

    visible = visible_gpus(installed, os.environ.get("CUDA_VISIBLE_DEVICES"))
    usable = torch.cuda.device_count() if torch.version.cuda else 0
    return FoundGpus(
        gpus=visible[:usable],
        installed=len(installed),
        torch_version=str(torch.__version__),
        torch_cuda=torch.version.cuda is not None,
        hidden=not visible,
    )


def may_use_gpu(options: FleetOptions) -> bool:
    """Return whether the fleet may use a GPU of this machine, so that `choose_for` or `with_kv_memory`
    imports torch. Torch is not imported here.

    options: Options of a fleet on this machine.
    """
    return options.device != "cpu" and find_spec("torch") is not None and bool(_installed_gpus())


def _installed_gpus() -> list[tuple[str, FoundGpu]]:
    """Return (UUID, GPU) of all GPUs that the driver knows; empty without the library, a driver or
    permission.

    Any other failure of the library also gives an empty list.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        return [_read_gpu(number) for number in range(pynvml.nvmlDeviceGetCount())]
    # Without the library, the driver or permission, no GPU can be used.
    except Exception:
        return []


def _read_gpu(number: int) -> tuple[str, FoundGpu]:
    """Return one GPU's UUID, name and free memory.

    Free memory is in bytes. Raises what NVIDIA's library raises.

    number: Number of the GPU as nvidia-smi counts.
    """
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    uuid, name = (_text(query(handle)) for query in (pynvml.nvmlDeviceGetUUID, pynvml.nvmlDeviceGetName))
    return uuid, FoundGpu(number, name, int(pynvml.nvmlDeviceGetMemoryInfo(handle).free))


def _text(value: str | bytes) -> str:
    """Return a string as it is, and bytes, which older versions of the library return, decoded.

    value: A value that NVIDIA's library returned.
    """
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
