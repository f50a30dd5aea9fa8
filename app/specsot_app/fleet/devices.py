"""Finds the GPUs that torch can use, and chooses the device of a fleet that is started with `--device auto`.

NVIDIA's management library is asked instead of CUDA: this process may only start other processes, and a CUDA
context would take hundreds of megabytes of each GPU as long as the process lives.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TextIO

from specsot.errors import SpecsotError
from specsot_app.core.device_choice import (
    AUTO,
    ChosenDevice,
    FoundGpu,
    FoundGpus,
    choose_device,
    visible_gpus,
)
from specsot_app.fleet.options import FleetOptions

# Default and help of the device option, for commands that start a fleet.
CHOSEN_DEVICE = {"device": AUTO}
# Help of the device option, by option.
DEVICE_HELP = {
    "device": "Torch device, such as cpu, cuda or cuda:0; `auto`: an NVIDIA GPU with room for the model."
}


def with_device(options: FleetOptions, out: TextIO) -> FleetOptions:
    """Return options that name a device; unchanged if they do already.

    The line is printed only if a choice was made and it is notable, that is, if this machine has an NVIDIA
    GPU, whether it is used or not.

    options: Options of a fleet.
    out: Stream that gets the line which says which device was chosen and why, if this machine has a GPU.
    """
    options_with_device, choice = choose_for(options)
    if choice and choice.notable:
        print_choice(choice, out)
    return options_with_device


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
    machine without a GPU, the result has no GPUs.

    GPUs beyond those that torch counts are left out. `hidden` is also True if no GPU is installed.
    """
    import torch

    installed = _installed_gpus()
    visible = visible_gpus(installed, os.environ.get("CUDA_VISIBLE_DEVICES"))
    usable = torch.cuda.device_count() if torch.version.cuda else 0
    return FoundGpus(
        gpus=visible[:usable],
        installed=len(installed),
        torch_version=str(torch.__version__),
        torch_cuda=torch.version.cuda is not None,
        hidden=not visible,
    )


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
