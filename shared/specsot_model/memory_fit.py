"""Checks that weights, KV pages and CUDA graphs fit in memory, from the headers of weight files only.

Nothing is loaded. In this file, `held` describes the form in which weights are stored once they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from specsot.checkpoint.config import ModelConfig
from specsot.checkpoint.families import Delta
from specsot.core.info import memory_in_words
from specsot.errors import ModelError
from specsot.members import KvDtype, Quantization, Range, WeightBytes
from specsot_kernels.attention_tables import room_for
from specsot_kernels.line_tables import line_room
from specsot_model.core.replays import CHUNK, states_for
from specsot_model.core.walks import BLOCK_ROWS, CARRIED, WalkRoom
from specsot_model.cuda_graphs import BUCKETS, PROMPT_ROWS
from specsot_model.kv import row_bytes
from specsot_model.linear import SMALL, check_device, of_lm_head, packs, size_of
from specsot_model.weights import Weights

log = structlog.get_logger()

# Bytes. What libraries allocate for the stream on which graphs are captured. Untuned.
LIBRARY_BYTES = 64 << 20
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a process needs on a device.

    weights: Bytes of weights.
    pages: Bytes of KV pages.
    graphs: Bytes of captured CUDA graphs.
    """

    weights: int
    pages: int
    graphs: int = 0

    @property
    def whole(self) -> int:
        """Bytes in all."""
        return self.weights + self.pages + self.graphs

    def __str__(self) -> str:
        kept = f"{memory_in_words(self.weights)} of weights and {memory_in_words(self.pages)} of KV pages"
        return f"{kept}, and {memory_in_words(self.graphs)} for captured graphs" if self.graphs else kept


def check_fit(what: str, need: Need, device: str, free: int | None) -> None:
    """Log in one line what is needed and what is free. Raises ModelError if too little is free.

    what: What needs the memory, for messages.
    free: Free bytes; None: unknown, and the check passes.
    """
    has = "an unknown amount" if free is None else memory_in_words(free)
    if free is not None and need.whole > free:
        raise ModelError(
            f"{what} need {need}, {device} has {has} free: "
            "fewer layers, a smaller --kv-memory, a --dtype of fewer bytes or --quantization would fit"
        )
    parts = {"graphs": memory_in_words(need.graphs)} if need.graphs else {}
    log.info(
        "fits",
        what=what,
        weights=memory_in_words(need.weights),
        pages=memory_in_words(need.pages),
        **parts,
        free=has,
    )


@dataclass(frozen=True, slots=True)
class WeightForm:
    """The form in which weights are stored once they are loaded.

    itemsize: Bytes of a number that is not quantized.
    quantization: Form of the matrices; None: they are not quantized.
    packed: Weights are packed for the CPU kernels; the embedding is int8 then.
    shared: A tied model has one table for embedding and lm_head. Otherwise the copy that a CPU library packs
        for products is a second table, unless the table is small.
    parts: Number of devices that share each layer.
    """

    itemsize: int
    quantization: Quantization | None = None
    packed: bool = False
    shared: bool = False
    parts: int = 1

    @classmethod
    def on(cls, device: str, itemsize: int, quantization: Quantization | None) -> WeightForm:
        """Return the form of weights on a device."""
        packed = packs(quantization, device)
        plain = quantization is None
        return cls(itemsize, quantization, packed, packed or (plain and torch.device(device).type == "cuda"))

    def bytes(self, files: Weights, names: Iterable[str]) -> int:
        """Return the bytes that these tensors take once they are loaded; only their shapes are read."""
        return sum(
            size_of(files.shape(name), self.itemsize, files.form(name, self.quantization)) for name in names
        )

    @property
    def whole(self) -> WeightForm:
        """The form of norms: not quantized."""
        return WeightForm(self.itemsize)

    @property
    def first(self) -> WeightForm:
        """The form of the embedding."""
        return WeightForm(self.itemsize, "int8" if self.packed else None)

    @property
    def last(self) -> WeightForm:
        """The form of the lm_head."""
        return WeightForm(self.itemsize, of_lm_head(self.quantization))


def tensors_of(files: Weights, config: ModelConfig, layers: Range) -> list[str]:
    """Return the names of all tensors that a range of layers reads."""
    names = config.names
    parts = [names.layer.format(layer) for layer in range(layers.first, layers.last)]
    # A tied model has one table for embedding and lm_head, so both ends of the model may read either.
    if layers.first == 0 or layers.last == config.layers:
        parts += names.embedding, names.norm, names.head
    return [name for part in parts for name in files.under(part)]


def weights_of(files: Weights, config: ModelConfig, layers: Range, held: WeightForm) -> int:
    """Return the bytes that a range of layers takes.

    The first layer brings the embedding, the last one the final norm and the lm_head.
    """
    inner = sum(_layer(files, config, layer, held) for layer in range(layers.first, layers.last))
    before = _before(files, config, held) if layers.first == 0 else 0
    behind = _behind(files, config, held) if layers.last == config.layers else 0
    small = (held.itemsize, held.quantization) == (4, None) and before <= 4 * SMALL
    once = before and behind and (held.shared or small) and not _has_lm_head(files, config)
    return inner + behind + (0 if once else before)


def read_of(files: Weights, config: ModelConfig, layers: Range, held: WeightForm) -> float:
    """Return the bytes of weights that one token reads in a range.

    Of the experts, only the chosen ones are read; of the embedding, nothing is counted.
    """
    whole = weights_of(files, config, layers, held)
    inner = (files.under(config.names.layer.format(layer)) for layer in range(layers.first, layers.last))
    experts = sum(
        _size(files, config, name, held) for names in inner for name in names if ".experts." in name
    )
    left = experts * (1 - config.routing.chosen / config.routing.experts) if config.routing else 0
    return whole - left - (_before(files, config, held) if layers.first == 0 else 0)


def bytes_of(files: Weights, config: ModelConfig, held: WeightForm) -> WeightBytes:
    """Return the bytes of the largest layer, of the embedding, and of final norm and lm_head."""
    layer = max(_layer(files, config, layer, held) for layer in range(config.layers))
    return WeightBytes(layer, _before(files, config, held), _behind(files, config, held))


def drafts_of(files: Weights, held: WeightForm) -> int:
    """Return the bytes that a draft head or draft model takes.

    A head's `fc`, which the stages apply, is not quantized.
    """
    names = set(files.names())
    inner = {name for name in names if name.endswith("_proj.weight")}
    last = {name for name in names if name.endswith("lm_head.weight")}
    first = {name for name in names if name.endswith("embed_tokens.weight")}
    rest = names - inner - last - first
    parts = (held, inner), (held.last, last), (held.first, first), (held.whole, rest)
    return sum(each.bytes(files, named) for each, named in parts)


def _layer(files: Weights, config: ModelConfig, layer: int, held: WeightForm) -> int:
    """Return the bytes of one layer on each of the devices that share it."""
    names = files.under(config.names.layer.format(layer))
    return sum(_size(files, config, name, held) for name in names) // held.parts


def _size(files: Weights, config: ModelConfig, name: str, held: WeightForm) -> int:
    """Return the bytes of one tensor of a layer.

    A router is never quantized, and is fp32 if scores are sigmoids. If one tensor holds all experts, each
    expert counts as a matrix.
    """
    routing = config.routing
    shape = files.shape(name)
    form = None if name.endswith("bias") else files.form(name, held.quantization)
    if routing and f".{config.names.router}." in name:
        return size_of(shape, 4 if routing.score == "sigmoid" else held.itemsize, None)
    if name.endswith(config.names.stacked or ()):
        return shape[0] * size_of((shape[2], shape[1]), held.itemsize, form)
    if name.endswith(config.names.whole_experts or ()):
        return shape[0] * size_of((shape[1], shape[2]), held.itemsize, form)
    return size_of(shape, held.itemsize, form)


def _before(files: Weights, config: ModelConfig, held: WeightForm) -> int:
    """Return the bytes of the embedding."""
    return held.first.bytes(files, files.under(config.names.embedding))


def _behind(files: Weights, config: ModelConfig, held: WeightForm) -> int:
    """Return the bytes of the final norm and the lm_head."""
    names = config.names
    table = names.head if _has_lm_head(files, config) else names.embedding
    return held.whole.bytes(files, files.under(names.norm)) + held.last.bytes(files, files.under(table))


def _has_lm_head(files: Weights, config: ModelConfig) -> bool:
    """Tell whether the files hold an lm_head in addition to the embedding; a tied model's do not."""
    return bool(files.under(config.names.head))


def pages_of(config: ModelConfig, layers: Range, rows: int, itemsize: int, kept: KvDtype = "auto") -> int:
    """Return the bytes of KV pages of `rows` rows in all layers of a range.

    For gated delta layers these are the stored inputs and the stored states.

    itemsize: Bytes of a number of the KV cache, unless `kept` is int8.
    kept: Type of the KV cache.
    """
    recurrent = sum(map(config.recurrent, range(layers.first, layers.last)))
    each = 2 * config.kv_heads * row_bytes(config.head_dim, itemsize, kept)
    found = (len(layers) - recurrent) * rows * each
    if config.delta:
        found += recurrent * (
            2 * config.delta.half * itemsize * rows + 4 * config.delta.state * states_for(rows)
        )
    return found


def graph_bytes(
    rows: int, heads: tuple[int, int, int], columns: int, itemsize: int, invariant: bool = False
) -> int:
    """Return the most bytes that CUDA graphs of at most `rows` rows take while they are captured.

    All graphs live in the memory of the largest one, and its layers reuse the same memory. The work runs once
    before it is captured, in memory of its own; hence the factor two. Attention needs memory for one partial
    result per row and piece of its KV.

    heads: Number of query heads, number of KV heads, and numbers of a head.
    columns: How many numbers per row are in memory at the same time.
    itemsize: Bytes of a number.
    invariant: The range is batch-invariant.
    """
    many, kv_heads, dim = heads
    room = line_room(rows, 0, 1)
    if not invariant:
        room = room_for(rows, 0, many // kv_heads, anchored=True, kv_heads=kv_heads)
    parts = 4 * room.slots * many * (dim + 1 + invariant)
    return 2 * (parts + rows * columns * itemsize) + LIBRARY_BYTES


def steps_of(
    config: ModelConfig, itemsize: int, width: int, wide: bool = True, invariant: bool = False
) -> int:
    """Return the most bytes that the CUDA graphs of a layer range take, and frames of prompts alone.

    width: Size of the features that the range sums up; 0: none.
    wide: Frames of prompts alone have more rows than other frames; see `cuda_graphs.prompt_rows`.
    invariant: The range is batch-invariant.
    """
    heads = config.heads, config.kv_heads, config.head_dim
    stream = 8 * config.hidden + 6 * width + 3 * config.intermediate
    # Every row is copied for each of its chosen experts.
    if config.routing is not None:
        stream += config.routing.chosen * (4 * config.hidden + 10 * config.routing.width)
    columns = stream + 2 * (heads[0] + heads[1]) * heads[2]
    prompts = PROMPT_ROWS if wide else 0
    walks = _walk_bytes(config.delta, itemsize, prompts) if config.delta else 0
    graphs = graph_bytes(max(BUCKETS), heads, columns, itemsize, invariant)
    return walks + graphs + prompts * columns * itemsize


def _walk_bytes(delta: Delta, itemsize: int, prompts: int) -> int:
    """Return the bytes that gated delta layers need in graphs and for frames of prompts.

    These are the inputs as they are read, and the states that trees set aside.

    prompts: Rows of a frame of prompts alone. Without a graph, a frame is walked in blocks of bounded size,
        however long its sequences are.
    """
    room = WalkRoom(max(BUCKETS), delta.kernel - 1)
    read = 4 * (delta.mixed + 3 * delta.value_heads)
    solved = 4 * delta.value_heads * (delta.key_dim + CHUNK)
    own = 4 * delta.values + itemsize * (delta.row + 2 * delta.values)
    aside = 4 * delta.state * (room.aside + CARRIED)
    captured = (read + own) * room.lines + solved * room.chunks * CHUNK + aside
    return 2 * captured + (read + solved) * BLOCK_ROWS + own * prompts


def room_on(device: str) -> int | None:
    """Return the free bytes of a device's memory that this process may use, or None if they are unknown.

    Raises InvalidRequest if there is no such device.
    """
    check_device(device)
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_memory() if torch.device(device).type == "cpu" else None


def gpus_on(device: str) -> dict[str, str]:
    """Return the GPUs that `device` may mean, as device name by GPU id; empty if it is no GPU.

    "cuda" means all GPUs that this process sees. Torch is asked, not NVIDIA's library, whose numbering
    ignores CUDA_VISIBLE_DEVICES. Raises InvalidRequest if there is no such device.

    # "cuda:1" -> {"<uuid of GPU 1>": "cuda:1"}
    """
    check_device(device)
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return {}
    numbers = [int(number)] if number else range(torch.cuda.device_count())
    return {str(torch.cuda.get_device_properties(number).uuid): f"cuda:{number}" for number in numbers}


def free_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Return the machine's free memory in bytes, or what is left of the container's limit if that is less.

    Return None if neither is known.
    """
    found = [one for one in (_of_machine(meminfo), _of_container(cgroup)) if one is not None]
    return min(found, default=None)


def _of_machine(meminfo: Path) -> int | None:
    """Return the available bytes of the machine, or None if they are unknown."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _of_container(cgroup: Path) -> int | None:
    """Return the bytes that are left of a cgroup 2 limit, or None if there is no limit.

    Inactive file pages count as free, because the kernel drops them before it enforces the limit.
    """
    try:
        # Without a limit the file says "max", which raises ValueError.
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        told = dict(line.split(" ", 1) for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(limit - used + int(told.get("inactive_file", "0")), 0)
    except (OSError, ValueError):
        return None
