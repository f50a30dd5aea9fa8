"""KV pages of a layer range on one device, int8 rows, and the staging buffer for what is sent there."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from specsot.core.info import memory_in_words
from specsot.errors import ModelError, WireError
from specsot.members import KvDtype

Moves = Sequence[tuple[int, int]]  # of rows: source and target slot
Places = tuple[Tensor, Tensor]  # (page, offset) of each row, both LongTensor [rows]


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros of this shape. On a CPU their memory is only reserved: what nobody writes to costs none.

    Raises ModelError where the system does not even reserve it (`ulimit -v`, `vm.overcommit_memory=2`).
    """
    count = math.prod(shape)
    if torch.device(device).type != "cpu" or not count:
        return torch.zeros(*shape, dtype=dtype, device=device)
    size = count * dtype.itemsize
    try:
        held = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ModelError(
            f"{memory_in_words(size)} of pages: {error.strerror}; --kv-memory sets less"
        ) from None
    return torch.frombuffer(held, dtype=dtype, count=count).view(*shape)


class KVPages:
    """`pages` pages of `page_rows` rows in each of `layers` layers.

    One tensor for all, so that what is done to every layer is done in one go; of each layer a view
    [2, pages, kv_heads, page_rows, head_dim]: keys first, values second. With heads outside rows, the
    first m rows of a page are a strided view [kv_heads, m, head_dim], and so are those of n consecutive
    pages: [n * kv_heads, m, head_dim].
    A slot is the flat number page * page_rows + offset. Rows start as zeros and are never uninitialised:
    a masked row still meets a zero weight, and zero times NaN is NaN. Pages that are never used take no
    memory on a CPU; the lowest free number goes out first, so few are.
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
        kept: KvDtype = "auto",
    ) -> None:
        """kept: int8 makes rows of int8, which `rows8.as_numbers` reads."""
        width = head_dim + SCALE_BYTES if kept == "int8" else head_dim
        shape = (layers, 2, pages, kv_heads, page_rows, width)
        self._whole = untouched_zeros(shape, torch.int8 if kept == "int8" else dtype, device)
        self.layers = self._whole.unbind()
        self.pages = pages
        self.page_rows = page_rows
        self.shared: Callable[[int], bool] = lambda page: False  # whether several sequences hold a page
        self._rows = self._whole.permute(
            2, 4, 0, 1, 3, 5
        )  # [pages, page_rows, layers, 2, kv_heads, head_dim]

    @property
    def bytes(self) -> int:
        """Memory of all layers, in bytes."""
        return self._whole.nbytes

    def locate(self, slots: Tensor) -> Places:
        """Page and offset of each slot [rows]; once a frame, shared by its layers."""
        page = torch.div(slots, self.page_rows, rounding_mode="floor")
        return page, slots - page * self.page_rows

    def put(self, layer: int, places: Places, kv: Tensor) -> None:
        """Write rows [rows, 2, kv_heads, head_dim] at located places."""
        self._put_kept(layer, places, round_rows(kv) if self._whole.dtype == torch.int8 else kv)

    def _put_kept(self, layer: int, places: Places, rows: Tensor) -> None:
        self._rows[:, :, layer].index_put_(places, rows)

    @torch.inference_mode()
    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Write rows [rows, 2, kv_heads, head_dim] at flat slots [rows]."""
        self.put(layer, self.locate(slots), kv)

    @torch.inference_mode()
    def move(self, moves: Moves) -> None:
        """Copy rows from slots to slots in every layer; gathered first, so the two may overlap."""
        if not moves:
            return
        page, offset = self.locate(indices(moves, self._whole.device).T)
        self._rows.index_put_((page[1], offset[1]), self._rows[page[0], offset[0]])

    def move_on_device(self, moves: Tensor) -> None:
        """The same of [2, many] slots that are there already, on a GPU; negative ones move nothing."""
        from specsot_kernels.gpu.rows import move_rows

        move_rows(self._whole, moves)

    @torch.inference_mode()
    def keep_least(
        self,
        layer: int,
        sources: Tensor,
        targets: Tensor,
        own: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> None:
        """Move those rows of each head whose keys have the least L2 norm, in their order, from `sources`
        [rows] to `targets` [kept]; gathered first, so the two may overlap.

        own: bool [rows, kv_heads], the sources that are rows of each head; None: all are rows of every head.
        counts: [kv_heads], how many rows each head keeps, in the first targets; the targets after those get
        some finite row, which the head never sees. None: every head keeps as many as there are targets.

        Norms are compared in bfloat16, and of equal ones the later row's counts as less: in a first layer a
        token's key has the same norm at any position, and rounding must not decide which one stays.
        """
        rows = self._rows[:, :, layer][self.locate(sources)]  # [rows, 2, kv_heads, head_dim]
        keys = as_numbers(rows[:, 0], torch.float32).float()
        norms = keys.norm(dim=-1).bfloat16()
        if own is not None:
            norms = norms.masked_fill(~own, float("inf"))
        least = norms.flip(0).argsort(dim=0, stable=True)[: len(targets)]  # the last row first
        last = len(sources) - 1
        best = last - least  # [kept, kv_heads]
        if counts is not None:  # rows beyond a head's count sort behind those that it keeps
            ranks = torch.arange(len(targets), device=best.device)[:, None]
            best = best.masked_fill(ranks >= counts, len(sources))
        best = best.sort(dim=0).values.clamp_max(last)
        chosen = rows.gather(0, best[:, None, :, None].expand(-1, *rows.shape[1:]))
        self._put_kept(layer, self.locate(targets), chosen)

    @torch.inference_mode()
    def rows_at(self, layer: int, slots: Sequence[int]) -> Tensor:
        """A copy, on the host, of rows as they are kept, int8 as float16: [rows, numbers of a row]."""
        rows = self._rows[:, :, layer][self.locate(indices(slots, self._whole.device))].flatten(1).cpu()
        return rows.view(torch.float16) if rows.dtype == torch.int8 else rows

    @torch.inference_mode()
    def put_rows_at(self, layer: int, slots: Sequence[int], rows: Tensor) -> None:
        """What `rows_at` gave. Raises WireError where rows are kept in another way here."""
        here = self._rows[:, :, layer]
        kept = torch.float16 if self._whole.dtype == torch.int8 else self._whole.dtype
        if rows.dtype != kept or rows[0].nbytes != here[0, 0].nbytes:
            raise WireError(f"KV rows of {rows[0].nbytes} bytes in {rows.dtype} came, {kept} is kept here")
        held = rows.view(here.dtype).view(-1, *here.shape[2:]).to(here.device)
        here.index_put_(self.locate(indices(slots, here.device)), held)

    @torch.inference_mode()
    def copy_page(self, source: int, target: int, rows: int) -> None:
        self._whole[:, :, target, :, :rows] = self._whole[:, :, source, :, :rows]

    @torch.inference_mode()
    def clear_rows(self, slots: Sequence[int]) -> None:
        page, offset = self.locate(indices(slots, self._whole.device))
        self._rows[page, offset] = 0

    @torch.inference_mode()
    def clear_page(self, page: int) -> None:
        """Zero a page in every layer: for rows that are not finite, before somebody else gets them."""
        self._whole[:, :, page].zero_()


# Of a row, for its scale in fp16: kernels read as many bytes at a time, and rows begin where a read does.
SCALE_BYTES = 16
MIN_SCALE = 2.0**-24  # least scale, fp16's smallest positive number: a row of zeros stays one


def round_rows(rows: Tensor) -> Tensor:
    """[..., head_dim] to int8 [..., head_dim + SCALE_BYTES]. What is not finite comes back as NaN."""
    return F.pad(round_to_int8(rows), (0, SCALE_BYTES - torch.half.itemsize))


def round_to_int8(rows: Tensor) -> Tensor:
    """[..., n] to int8 [..., n + 2], of which the last two are a scale in fp16. See `round_rows`."""
    wide = rows.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 127).clamp_min(MIN_SCALE).half()
    scale += scale - scale  # infinity becomes NaN
    whole = (wide / scale).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((whole, scale.view(torch.int8)), -1)


def as_numbers(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows as they are kept, whichever way that is, as numbers [..., head_dim]."""
    if rows.dtype != torch.int8:
        return rows
    scale = rows[..., -SCALE_BYTES:].view(torch.float16)[..., :1]
    return rows[..., :-SCALE_BYTES].to(dtype).mul_(scale)


def row_bytes(head_dim: int, itemsize: int, kept: KvDtype) -> int:
    """Of one key or value of one head."""
    return head_dim + SCALE_BYTES if kept == "int8" else head_dim * itemsize


Numbers = NDArray[np.int32]
Shapes = Sequence[tuple[int, ...]]
ALIGNED = 4  # numbers: where a tensor in a buffer begins; for other addresses kernels are compiled once more


class Staging:
    """Host memory that a copy engine reads: not to be written again before it did."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.empty(size, dtype=torch.int32, pin_memory=on_gpu)
        self._numbers: Numbers = self._host.numpy()
        self._sent = torch.cuda.Event() if on_gpu else None

    def send(self, parts: Sequence[Numbers], target: Tensor) -> None:
        """One copy of all parts, one behind the other; what is behind them in `target` stays."""
        if self._sent:
            self._sent.synchronize()
        start = 0
        for part in parts:
            self._numbers[start : start + part.size] = part.reshape(-1)
            start += aligned(part.size)
        target[:start].copy_(self._host[:start], non_blocking=True)
        if self._sent:
            self._sent.record()


def indices(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Whole numbers on a device. From pinned memory: else the host waits for all that runs there."""
    found = torch.tensor(np.asarray(numbers, np.int64))  # of long lists torch makes one much more slowly
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


def aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


def size_of(shapes: Shapes) -> int:
    """How many numbers tensors of these shapes take together, each from an aligned place on."""
    return sum(aligned(prod(shape)) for shape in shapes)


def views(flat: Tensor, shapes: Shapes) -> list[Tensor]:
    """Tensors of these shapes, one behind the other in `flat`."""
    parts = flat.split([aligned(prod(shape)) for shape in shapes])
    return [part[: prod(shape)].view(shape) for part, shape in zip(parts, shapes)]
