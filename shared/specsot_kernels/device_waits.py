"""Records events on GPUs, and counts the seconds for which each thread of this process waits for events.

More work for the GPU makes a step longer only if the host waits for that work. So the draft policy must know
for how many seconds of a step the host waited. Only waits by `wait_for` are counted. A wait within
`Tensor.tolist` or `Tensor.cpu` looks like the host's own work.
"""

from __future__ import annotations

import threading
import time

import torch

# The attribute `seconds` is the calling thread's total. It is missing before the thread's first wait.
_waits = threading.local()


def record_on(event: torch.Event, device: torch.device) -> None:
    """Record an event on the calling thread's current stream of a GPU.

    Asking torch for the current stream makes a Python object, which takes the host longer than recording the
    event. For the current GPU, torch finds the stream without such an object.

    event: An event of the device type "cuda". It must not have been recorded on another GPU.
    device: The GPU, with its index.
    """
    if device.index == torch.cuda.current_device():
        event.record()
    else:
        event.record(torch.cuda.current_stream(device))


def wait_for(event: torch.Event) -> None:
    """Wait until the GPU has reached an event, and add the seconds of the wait to this thread's total.

    event: An event that was recorded on a stream. If it was never recorded, the call returns at once.
    """
    began = time.perf_counter()
    event.synchronize()
    _waits.seconds = waited_seconds() + time.perf_counter() - began


def waited_seconds() -> float:
    """Return the total seconds that the calling thread has spent in `wait_for`; 0 before its first wait. The
    waits of other threads are not included.
    """
    return getattr(_waits, "seconds", 0.0)
