"""All-reduces rows among the GPUs of one host by reads over NVLink.

Each GPU leaves its part in its own memory, writes its count to the memory of the others, waits until their
counts are as high, and adds all parts in the same order, so that all GPUs get the same bits. The host is not
involved, so a sum can be captured in a CUDA graph. Every GPU must launch the same sums in the same order; a
sum ends when all have launched it.
"""

# Triton reads the annotations of kernels itself, and knows constexpr alone.
from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import permutations
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from specsot_kernels.gpu.launching import (
    await_preceding_kernel,
    kernel,
    let_next_begin,
    on_device_of,
    pdl_options,
    power_of_two,
)

# Buffers of each GPU. A buffer may be written again once the next sum has ended: all GPUs have read it by
# then.
PLACES = 3
# A count so high that no GPU waits.
OPEN = 1 << 30
# CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of CUDA's driver.
NATIVE_ATOMICS = 3


def reach_each_other(
    devices: Sequence[torch.device],
    can_read: Callable[[torch.device, torch.device], bool] = torch.cuda.can_device_access_peer,
    driver: Callable[[], Any] = lambda: ctypes.CDLL("libcuda.so.1"),
) -> bool:
    """Return whether each GPU can read, and do atomic operations in, the memory of all others: over NVLink,
    not PCIe. Return False without CUDA's driver.

    Fewer than two devices reach each other if the driver can be loaded. False also if one GPU cannot read
    another one's memory.

    devices: the GPUs of one host.
    can_read: returns whether one GPU can read the memory of another one; replaced by tests.
    driver: returns CUDA's driver library, or raises OSError; replaced by tests.
    """
    pairs = list(permutations(devices, 2))
    if not all(can_read(*pair) for pair in pairs):
        return False
    try:
        asked = driver()
    except OSError:  # no CUDA
        return False
    return all(_can_count(asked, *pair) for pair in pairs)


def _can_count(driver: Any, source: torch.device, target: torch.device) -> bool:
    """Return whether CUDA's driver supports native atomics between the two GPUs; False if it gives no answer.

    The driver numbers GPUs as PyTorch does.

    driver: CUDA's driver library.
    source: the GPU that counts.
    target: the GPU whose memory it counts in.
    """
    numbers = [ctypes.c_int() for _ in range(2)]
    found = [
        driver.cuDeviceGet(ctypes.byref(ordinal), device.index)
        for ordinal, device in zip(numbers, (source, target))
    ]
    able = ctypes.c_int()
    found.append(driver.cuDeviceGetP2PAttribute(ctypes.byref(able), NATIVE_ATOMICS, *numbers))
    return not any(found) and bool(able.value)


class PeerSums:
    """Buffers and counters for sums of at most `rows` rows of `size` numbers, one set for each GPU.

    counts: for each GPU int32 [1, rows], the number of sums of each row so far.
    peer_counts: for each GPU int32 [GPUs, rows], the counts that the other GPUs wrote into its memory.
    devices: the GPUs, in order.
    rows: largest number of rows of a sum.
    size: numbers of a row.
    dtype: type of the numbers.
    """

    def __init__(self, devices: Sequence[torch.device], rows: int, size: int, dtype: torch.dtype) -> None:
        """Allocate zeroed buffers and counters on every GPU, and enable access between the GPUs.

        devices: the GPUs, in order.
        rows: largest number of rows of a sum.
        size: numbers of a row.
        dtype: type of the numbers.
        """
        self._devices = tuple(devices)
        shape = PLACES, rows, size
        self._buffers = [torch.zeros(shape, dtype=dtype, device=device) for device in devices]
        self.peer_counts, self.counts = (
            [torch.zeros(count, rows, dtype=torch.int32, device=device) for device in devices]
            for count in (len(devices), 1)
        )
        places = [[tensor.data_ptr() for tensor in tensors] for tensors in (self._buffers, self.peer_counts)]
        self._places = [torch.tensor(places, device=device) for device in devices]
        for source, target in permutations(self._buffers, 2):
            if source.is_cuda:
                # PyTorch enables peer access between two GPUs at their first copy.
                target[0, 0].copy_(source[0, 0])

    def own(self, part: int, place: int, rows: int) -> Tensor:
        """Return the buffer [rows, size] into which a GPU writes its part before `add`.

        part: number of the GPU.
        place: number of the buffer, below PLACES; must differ from that of the preceding sum.
        rows: number of rows of the sum.
        """
        return self._buffers[part][place, :rows]

    def add(self, part: int, place: int, hidden: Tensor) -> None:
        """Add all parts of a sum to the rows of a GPU, in place.

        `hidden` counts as well: the result is hidden plus all parts, summed in fp32. The GPU waits until all
        other GPUs have launched the same sum.

        part: number of the GPU.
        place: number of the buffer that holds the parts.
        hidden: [rows, size], on the GPU; at most as many rows as a buffer has.
        """
        rows, size = hidden.shape
        places = self._places[part]
        buffer = self._buffers[part]
        with on_device_of(hidden):
            _add_parts[(rows,)](
                hidden, *places, self.peer_counts[part], self.counts[part], place * buffer.stride(0), size,
                buffer.shape[1], part, len(places[0]), power_of_two(size), num_warps=8, **pdl_options(hidden),
            )  # fmt: skip

    @contextmanager
    def alone(self, part: int) -> Generator[None]:
        """Let a GPU run without waiting for the others; sums are wrong meanwhile. Nothing else may run.

        Afterwards all counts are zero. Counts are also reset if the body raises.

        part: number of the GPU.
        """
        with on_device_of(self._buffers[part]):
            self.peer_counts[part].fill_(OPEN)
            try:
                yield
            finally:
                self._wait()
                for counters in (*self.peer_counts, *self.counts):
                    counters.zero_()
                self._wait()

    def _wait(self) -> None:
        """Wait for this thread's streams alone: a wait for a whole device would break the capture of another
        thread.
        """
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()


@kernel
def _add_parts(
    hidden, buffers, peer_counters, peer_counts, counts, buffer_offset, size, max_rows,
    own_part: tl.constexpr, parts: tl.constexpr, room: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Sum one row over all GPUs.

    buffers: int64 [parts], the address of each GPU's buffers.
    peer_counters: int64 [parts], the address of the counts in each GPU's memory that the other GPUs write.
    hidden: [rows, size], this GPU's rows, to which the sum is added, in place.
    peer_counts: int32 [parts, rows], the counts that the other GPUs wrote into this GPU's memory.
    counts: int32 [1, rows], the number of sums of each row so far.
    buffer_offset: numbers from the beginning of a GPU's buffers to the buffer of this sum.
    size: numbers of a row.
    room: `size`, rounded up to a power of two.
    max_rows: rows of a buffer.
    own_part: number of this GPU.
    parts: number of GPUs.
    early: whether the device starts kernels early (see `launching`).
    """
    let_next_begin(early)
    row, column = tl.program_id(0), tl.arange(0, room)
    there = column < size
    await_preceding_kernel(early)
    count = tl.load(counts + row) + 1
    for part in tl.static_range(parts):
        if part != own_part:
            other = tl.load(peer_counters + part).to(peer_counts.dtype)
            tl.atomic_xchg(other + own_part * max_rows + row, count, sem="release", scope="sys")
    for part in tl.static_range(parts):
        if part != own_part:
            # The difference is compared because counts may wrap around.
            while (
                tl.atomic_add(peer_counts + part * max_rows + row, 0, sem="acquire", scope="sys") - count < 0
            ):
                pass
    tl.debug_barrier()
    tl.store(counts + row, count)
    place = row.to(tl.int64) * size + column
    total = tl.zeros((room,), tl.float32)
    for part in tl.static_range(parts):
        # PyTorch's tensors begin at multiples of 512 bytes, so that 16 bytes can be loaded at a time.
        buffer = tl.multiple_of(tl.load(buffers + part).to(hidden.dtype), 16) + buffer_offset
        total += tl.load(buffer + place, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
    total += tl.load(hidden + place, mask=there, other=0.0).to(tl.float32)
    tl.store(hidden + place, total.to(hidden.dtype.element_ty), mask=there)
