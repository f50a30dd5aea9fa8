"""KV pages of a layer range on one device, int8 KV rows, and the buffers for host-to-device copies."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from itertools import accumulate, cycle
from math import prod

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from specsot.core.info import memory_in_words
from specsot.errors import ModelError, WireError
from specsot.members import KvDtype
from specsot_kernels.device_waits import record_on
from specsot_model.inference import inference_mode

# Pairs of source and target slot.
Moves = Sequence[tuple[int, int]]
# Page and offset within the page of each row, both LongTensor [rows].
Places = tuple[Tensor, Tensor]


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return zeros of this shape. On a CPU, memory is used only once it is written to.

    Raises ModelError if the system does not even reserve it (`ulimit -v`, `vm.overcommit_memory=2`).

    shape: Size of each dimension; an empty tensor if any size is 0.
    dtype: Type of the numbers.
    device: Device of the tensor.
    """
    count = math.prod(shape)
    if torch.device(device).type != "cpu" or not count:
        return torch.zeros(*shape, dtype=dtype, device=device)
    size = count * dtype.itemsize
    try:
        reserved = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ModelError(
            f"cannot reserve {memory_in_words(size)} for KV pages: {error.strerror};"
            " set a smaller --kv-memory"
        ) from None
    return torch.frombuffer(reserved, dtype=dtype, count=count).view(*shape)


class KVPages:
    """A paged KV cache: `pages` pages of `page_rows` rows in each of `layers` layers.

    All layers share one tensor, so that moving a slot or copying a page is one operation for all layers.
    `layers[i]` is the view of one layer, [tensors, pages, kv_heads, page_rows, head_dim]: keys first, values
    second, or one tensor of rows that are both (latent attention). Because heads come before rows, the first
    m rows of a page are a strided view [kv_heads, m, head_dim], and those of n consecutive pages are [n *
    kv_heads, m, head_dim].

    A slot is the flat number of a row, the same in every layer: page * page_rows + offset.

        # page_rows 8: slot 19 -> page 2, offset 3

    The cache starts as zeros and never holds uninitialised memory: a masked row is still multiplied by a
    zero weight, and zero times NaN is NaN. Pages that were never used take no memory on a CPU. The allocator
    gives out the lowest free page first, so few pages are ever touched.

    page_rows: Number of rows (tokens) of a page.
    pages: Number of pages of every layer.
    layers: By layer, the view of its keys and values.
    shared: Function that returns whether several sequences hold a page, given its number.
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        page_rows: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        form: KvDtype = "auto",
        tensors: int = 2,
    ) -> None:
        """Reserve the cache, filled with zeros.

        ModelError is raised if the memory cannot be reserved.

        layers: Number of layers.
        pages: Number of pages of every layer.
        page_rows: Number of rows (tokens) of a page.
        kv_heads: Number of KV heads.
        head_dim: Numbers of a head.
        dtype: Type of the rows, unless `form` says int8.
        device: Device of the cache. On a CPU, pages take memory only once they are written to.
        form: "int8" stores rows in int8 with a scale, which `as_numbers` reads; "auto" stores `dtype`.
        tensors: 2 for a key and a value of each row, 1 for rows that are both.
        """
        width = head_dim + SCALE_BYTES if form == "int8" else head_dim
        shape = (layers, tensors, pages, kv_heads, page_rows, width)
        self._whole = untouched_zeros(shape, torch.int8 if form == "int8" else dtype, device)
        self.layers = self._whole.unbind()
        self.pages = pages
        self.page_rows = page_rows
        # Returns whether several sequences hold a page; the owner of the page table replaces it.
        self.shared: Callable[[int], bool] = lambda page: False
        # A view [pages, page_rows, layers, tensors, kv_heads, head_dim], indexed by page and offset.
        self._rows = self._whole.permute(2, 4, 0, 1, 3, 5)

    @property
    def bytes(self) -> int:
        """Return the memory of all layers, in bytes."""
        return self._whole.nbytes

    def locate(self, slots: Tensor) -> Places:
        """Return the page and the offset within the page of each slot, both LongTensor [rows].

        Call it once per frame; the layers share the result.

        slots: LongTensor [rows], flat slot numbers, page * page_rows + offset.
        """
        page = torch.div(slots, self.page_rows, rounding_mode="floor")
        return page, slots - page * self.page_rows

    def put(self, layer: int, places: Places, kv: Tensor) -> None:
        """Write keys and values of one layer at located places, in the form in which this cache stores them.

        layer: Index of the layer within the cache.
        places: Page and offset of each row, as `locate` returns them.
        kv: [rows, tensors, kv_heads, head_dim], keys first, in floats.
        """
        self._put_stored(layer, places, round_rows(kv) if self._whole.dtype == torch.int8 else kv)

    def _put_stored(self, layer: int, places: Places, rows: Tensor) -> None:
        """Write rows of one layer that are in the stored form already.

        layer: Index of the layer within the cache.
        places: Page and offset of each row, as `locate` returns them.
        rows: [rows, tensors, kv_heads, numbers of a stored row], the rows.
        """
        self._rows[:, :, layer].index_put_(places, rows)

    @inference_mode
    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Write keys and values of one layer at flat slots.

        layer: Index of the layer within the cache.
        slots: LongTensor [rows], page * page_rows + offset.
        kv: [rows, tensors, kv_heads, head_dim], keys first, in floats.
        """
        self.put(layer, self.locate(slots), kv)

    @inference_mode
    def move(self, moves: Moves) -> None:
        """Copy rows from source to target slots in every layer.

        All sources are gathered before any target is written, so sources and targets may overlap.

        moves: Pairs (source slot, target slot); empty: nothing is done.
        """
        if not moves:
            return
        # Pages and offsets are computed on the host, so that one copy brings all of them to the device.
        numbers = np.array(moves, np.int64).T
        places = np.stack((numbers // self.page_rows, numbers % self.page_rows))
        page, offset = indices(places, self._whole.device)
        self._rows.index_put_((page[1], offset[1]), self._rows[page[0], offset[0]])

    def move_on_device(self, moves: Tensor) -> None:
        """Copy rows from source to target slots in every layer, for slots that are on the GPU already.

        moves: int32 [2, num_moves], source slots, then target slots; a negative slot moves nothing.
        """
        from specsot_kernels.gpu.rows import move_rows

        move_rows(self._whole, moves)

    @inference_mode
    def keep_smallest_keys(
        self,
        layer: int,
        sources: Tensor,
        targets: Tensor,
        holds_row: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> None:
        """Prune by key norm: move the rows of each head whose keys have the smallest L2 norm to `targets`.

        The rows keep their order. All sources are gathered first, so sources and targets may overlap.

        sources: LongTensor [rows], slots to choose from.
        targets: LongTensor [kept], slots that receive the chosen rows; at most as many as sources.
        holds_row: bool [rows, kv_heads], which sources hold a row of each head; None: every source does.
        counts: [kv_heads], how many rows each head keeps, in the first targets. The remaining targets receive
            some finite row that the head never sees. None: every head fills all targets.
        layer: Index of the layer within the cache.

            # slots [0 1 2 3], key norms of one head [5 1 4 2], targets [0 1] -> slots 1 and 3 move to 0 and 1

        Norms are compared in bfloat16, and among equal norms the later row counts as smaller. In a first
        layer a token's key has the same norm at every position, and rounding must not decide which row
        stays.
        """
        rows = self._rows[:, :, layer][self.locate(sources)]  # [rows, 2, kv_heads, head_dim]
        keys = as_numbers(rows[:, 0], torch.float32).float()
        norms = keys.norm(dim=-1).bfloat16()
        if holds_row is not None:
            norms = norms.masked_fill(~holds_row, float("inf"))
        # The stable sort runs over reversed rows, so that among equal norms the later row comes first.
        smallest = norms.flip(0).argsort(dim=0, stable=True)[: len(targets)]
        last = len(sources) - 1
        chosen_rows = last - smallest  # [kept, kv_heads]
        # Rows beyond a head's count get an index that sorts after all rows that the head keeps.
        if counts is not None:
            ranks = torch.arange(len(targets), device=chosen_rows.device)[:, None]
            chosen_rows = chosen_rows.masked_fill(ranks >= counts, len(sources))
        chosen_rows = chosen_rows.sort(dim=0).values.clamp_max(last)
        chosen = rows.gather(0, chosen_rows[:, None, :, None].expand(-1, *rows.shape[1:]))
        self._put_stored(layer, self.locate(targets), chosen)

    @inference_mode
    def rows_at(self, layer: int, slots: Sequence[int]) -> Tensor:
        """Return a host copy of rows of one layer in their stored form, [rows, numbers of a row].

        The bytes of int8 rows are viewed as float16. It is used to migrate KV to another stage.

        layer: Index of the layer within the cache.
        slots: Slots to read, page * page_rows + offset.
        """
        rows = self._rows[:, :, layer][self.locate(indices(slots, self._whole.device))].flatten(1).cpu()
        return rows.view(torch.float16) if rows.dtype == torch.int8 else rows

    @inference_mode
    def put_rows_at(self, layer: int, slots: Sequence[int], rows: Tensor) -> None:
        """Store rows of one layer that `rows_at` returned, perhaps on another stage.

        layer: Index of the layer within the cache.
        slots: Slots to write, one per row.
        rows: [rows, numbers of a row], as `rows_at` returns them; at least one row.

        Raises WireError if this cache stores rows in another form.
        """
        stored_rows = self._rows[:, :, layer]
        stored_dtype = torch.float16 if self._whole.dtype == torch.int8 else self._whole.dtype
        if rows.dtype != stored_dtype or rows[0].nbytes != stored_rows[0, 0].nbytes:
            raise WireError(
                f"KV rows of {rows[0].nbytes} bytes in {rows.dtype} do not fit this cache, which stores"
                f" {stored_rows[0, 0].nbytes} bytes in {stored_dtype}"
            )
        converted = rows.view(stored_rows.dtype).view(-1, *stored_rows.shape[2:]).to(stored_rows.device)
        stored_rows.index_put_(self.locate(indices(slots, stored_rows.device)), converted)

    @inference_mode
    def copy_page(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of a page to another page, in every layer.

        source: Number of the page that is read.
        target: Number of the page that is written.
        rows: Number of rows to copy, from the page's first row on.
        """
        self._whole[:, :, target, :, :rows] = self._whole[:, :, source, :, :rows]

    @inference_mode
    def clear_rows(self, slots: Sequence[int]) -> None:
        """Zero rows in every layer.

        slots: Slots of the rows, page * page_rows + offset; empty: nothing is done.
        """
        page, offset = self.locate(indices(slots, self._whole.device))
        self._rows[page, offset] = 0

    @inference_mode
    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zero pages in every layer, so that NaN or infinity never reaches the next owners of the pages. On a
        GPU, one kernel zeroes all of them, because closed sequences free many pages at once.

        pages: Numbers of the pages. Empty: nothing happens.
        """
        if self._whole.device.type == "cpu":
            for page in pages:
                self._whole[:, :, page].zero_()
        elif pages:
            self._whole.index_fill_(2, indices(pages, self._whole.device), 0)


# Bytes. Size of the field after the numbers of an int8 row, which holds the row's scale in fp16. Kernels read
# 16 bytes at a time, and rows must begin where a read begins.
SCALE_BYTES = 16
# Smallest scale of an int8 row: the smallest positive number of fp16, so that a row of zeros stays zero.
MIN_SCALE = 2.0**-24


def round_rows(rows: Tensor) -> Tensor:
    """Return rows quantized to int8 in the stored form: [..., head_dim + SCALE_BYTES].

    A row that holds a value that is not finite becomes a row of NaN when it is read.

    rows: [..., head_dim], in floats.
    """
    return F.pad(round_to_int8(rows), (0, SCALE_BYTES - torch.half.itemsize))


def round_to_int8(rows: Tensor) -> Tensor:
    """Return rows quantized to int8 [..., n + 2]; the last two bytes of a row are its scale in fp16.

    The scale is max|x| / 127, and the numbers are round(x / scale). A row that holds a value that is not
    finite gets the scale NaN. A row whose scale would be below MIN_SCALE gets MIN_SCALE, so that a row of
    zeros stays zero. A scale beyond the range of fp16 becomes NaN as well.

    rows: [..., n], in floats.
    """
    wide = rows.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 127).clamp_min(MIN_SCALE).half()
    # Infinity minus infinity is NaN, so an infinite scale becomes NaN.
    scale += scale - scale
    rounded = (wide / scale).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((rounded, scale.view(torch.int8)), -1)


def as_numbers(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return stored rows as numbers [..., head_dim]; int8 rows are dequantized, others are returned as they
    are.

    rows: [..., head_dim] in floats, or int8 [..., head_dim + SCALE_BYTES] as `round_rows` makes them.
    dtype: Type of dequantized rows.
    """
    if rows.dtype != torch.int8:
        return rows
    scale = rows[..., -SCALE_BYTES:].view(torch.float16)[..., :1]
    return rows[..., :-SCALE_BYTES].to(dtype).mul_(scale)


def row_bytes(head_dim: int, itemsize: int, form: KvDtype) -> int:
    """Return the bytes of one key or one value of one head in a cache.

    head_dim: Numbers of a head.
    itemsize: Bytes of a number, if the form is not int8.
    form: Form of the cache's rows: "int8", or "auto" for the model's dtype.
    """
    return head_dim + SCALE_BYTES if form == "int8" else head_dim * itemsize


# A table of int32 numbers.
Numbers = NDArray[np.int32]
# Shape of each tensor in a shared buffer.
Shapes = Sequence[tuple[int, ...]]
# int32 numbers. Tensors in a shared buffer begin at multiples of this. Chosen by Triton, which compiles a
# kernel once more for addresses with another alignment.
ALIGNED = 4

# Buffers. How many a `Staging` has for a GPU. While the numbers of one buffer are copied to the device, the
# host fills the other one. Untuned.
STAGING_BUFFERS = 2


class Staging:
    """Host buffers for asynchronous copies to a device. Successive copies use the buffers in turns.

    A buffer is not written again before the copy of its previous contents has finished.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocate the buffers: STAGING_BUFFERS in pinned memory if the device is a GPU, and one if not.

        size: How many int32 numbers each buffer holds.
        device: Device to which the numbers are copied.
        """
        buffers = STAGING_BUFFERS if device.type == "cuda" else 1
        self._turns = cycle([_StagingBuffer(size, device) for _ in range(buffers)])

    def send(self, parts: Sequence[Numbers], target: Tensor) -> None:
        """Copy arrays to a device in one transfer, one after another, each from an aligned place on.

        Numbers of `target` after the last part keep their values. The host waits only until the previous
        transfer from the same buffer has finished. ValueError is raised if the parts are longer than a
        buffer.

        parts: int32 arrays; together they fit a buffer.
        target: int32 [n], a flat tensor on the device, at least as long as the aligned parts.
        """
        next(self._turns).send(parts, target)


class _StagingBuffer:
    """One buffer of a `Staging`."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocate the buffer; see `Staging`.

        size: How many int32 numbers the buffer holds.
        device: Device to which the numbers are copied.
        """
        on_gpu = device.type == "cuda"
        self._host = torch.empty(size, dtype=torch.int32, pin_memory=on_gpu)
        self._numbers: Numbers = self._host.numpy()
        self._sent = torch.Event(device, enable_timing=False) if on_gpu else None
        # The target of the last transfer, and the parts of the target and of the buffer between which numbers
        # were copied. Most transfers have the same target and length as the one before, so these views need
        # not be made again.
        self._target: Tensor | None = None
        self._target_part = self._host_part = self._host

    def send(self, parts: Sequence[Numbers], target: Tensor) -> None:
        """Copy arrays to a device; see `Staging.send`.

        parts: int32 arrays; together they fit the buffer.
        target: int32 [n], a flat tensor on the device, at least as long as the aligned parts.
        """
        # Waiting gives other threads the interpreter, even if there is nothing to wait for.
        if self._sent and not self._sent.query():
            self._sent.synchronize()
        numbers = self._numbers
        start = 0
        for part in parts:
            stop = start + part.size
            numbers[start:stop] = part.reshape(-1)
            start = -(-stop // ALIGNED) * ALIGNED
        if target is not self._target or start != len(self._target_part):
            self._target = target
            self._target_part = target[:start]
            self._host_part = self._host[:start]
        self._target_part.copy_(self._host_part, non_blocking=True)
        if self._sent:
            record_on(self._sent, target.device)


def indices(
    numbers: Sequence[int] | Sequence[Sequence[int]] | NDArray[np.int64], device: torch.device
) -> Tensor:
    """Return integers as an int64 tensor of the same shape on a device.

    The copy starts from pinned memory, because otherwise the host would wait for all work on the device.

    numbers: A list of integers, or of equally long lists of integers, or an array. The result may share the
        memory of an array.
    device: Device of the result.
    """
    # For long lists, NumPy converts much faster than torch.
    tensor = torch.from_numpy(np.ascontiguousarray(numbers, np.int64))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def aligned(count: int) -> int:
    """Return a count rounded up to a multiple of ALIGNED; 0 for 0.

    count: How many int32 numbers.
    """
    return -(-count // ALIGNED) * ALIGNED


def joined(parts: Sequence[Numbers]) -> Numbers:
    """Return arrays as one flat array, each from an aligned place on, as `Staging.send` lays them out. The
    numbers between two arrays are 0.

    parts: int32 arrays of any shape. At least one.

    # ALIGNED 4, arrays of 3 and 2 numbers -> [a a a 0 b b 0 0]
    """
    starts = [*accumulate((aligned(part.size) for part in parts), initial=0)]
    flat = np.zeros(starts[-1], np.int32)
    for part, start in zip(parts, starts):
        flat[start : start + part.size] = part.reshape(-1)
    return flat


def size_of(shapes: Shapes) -> int:
    """Return how many int32 numbers tensors of these shapes take in one buffer, each from an aligned place
    on.

    shapes: Shape of each tensor.
    """
    return sum(aligned(prod(shape)) for shape in shapes)


def views(flat: Tensor, shapes: Shapes) -> list[Tensor]:
    """Return views of a buffer with these shapes, one after another, each from an aligned place on.

    flat: [n], a contiguous buffer of at least `size_of(shapes)` numbers.
    shapes: Shape of each view.

    # shapes [(3,), (2, 2)] -> numbers 0..2 and 4..7 of the buffer
    """
    starts = accumulate((aligned(prod(shape)) for shape in shapes), initial=flat.storage_offset())
    return [
        flat.as_strided(shape, [prod(shape[axis + 1 :]) for axis in range(len(shape))], start)
        for shape, start in zip(shapes, starts)
    ]
