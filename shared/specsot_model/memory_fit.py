"""Checks that weights, KV pages and graphs fit in memory, from weight files' headers, before loading any."""

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

# Bytes that libraries take for the stream on which graphs are captured; no measurement recorded.
LIBRARY_BYTES = 64 << 20
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Need:
    """weights, pages, graphs: bytes."""

    weights: int
    pages: int
    graphs: int = 0

    @property
    def whole(self) -> int:
        return self.weights + self.pages + self.graphs

    def __str__(self) -> str:
        kept = f"{memory_in_words(self.weights)} of weights and {memory_in_words(self.pages)} of KV pages"
        return f"{kept}, and {memory_in_words(self.graphs)} for captured graphs" if self.graphs else kept


def check_fit(what: str, need: Need, device: str, free: int | None) -> None:
    """Tell in one line what it takes and what there is. Raises ModelError where that is too little.

    free: bytes; None: nobody knows.
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
    """How weights are held once loaded: in numbers of so many bytes, matrices perhaps in fewer bits.

    packed: for a CPU's kernels, whose embedding is in 8 bits. shared: a tied model has one table for both
    ends; what a CPU's library packs for products is a second one, where it is not small. parts: devices that
    share each layer.
    """

    itemsize: int
    quantization: Quantization | None = None
    packed: bool = False
    shared: bool = False
    parts: int = 1

    @classmethod
    def on(cls, device: str, itemsize: int, quantization: Quantization | None) -> WeightForm:
        packed = packs(quantization, device)
        plain = quantization is None
        return cls(itemsize, quantization, packed, packed or (plain and torch.device(device).type == "cuda"))

    def bytes(self, files: Weights, names: Iterable[str]) -> int:
        """Of these tensors; nothing is read but shapes."""
        return sum(
            size_of(files.shape(name), self.itemsize, files.form(name, self.quantization)) for name in names
        )

    @property
    def whole(self) -> WeightForm:
        """As norms are."""
        return WeightForm(self.itemsize)

    @property
    def first(self) -> WeightForm:
        """As an embedding is."""
        return WeightForm(self.itemsize, "int8" if self.packed else None)

    @property
    def last(self) -> WeightForm:
        """As an lm_head is."""
        return WeightForm(self.itemsize, of_lm_head(self.quantization))


def tensors_of(files: Weights, config: ModelConfig, layers: Range) -> list[str]:
    """Names of all that a range reads."""
    names = config.names
    parts = [names.layer.format(layer) for layer in range(layers.first, layers.last)]
    if layers.first == 0 or layers.last == config.layers:  # tied models have one table for both ends
        parts += names.embedding, names.norm, names.head
    return [name for part in parts for name in files.under(part)]


def weights_of(files: Weights, config: ModelConfig, layers: Range, held: WeightForm) -> int:
    """Bytes a range takes: its layers, the embedding with the first, norm and lm_head with the last."""
    inner = sum(_layer(files, config, layer, held) for layer in range(layers.first, layers.last))
    before = _before(files, config, held) if layers.first == 0 else 0
    behind = _behind(files, config, held) if layers.last == config.layers else 0
    small = (held.itemsize, held.quantization) == (4, None) and before <= 4 * SMALL
    once = before and behind and (held.shared or small) and not _has_lm_head(files, config)
    return inner + behind + (0 if once else before)


def read_of(files: Weights, config: ModelConfig, layers: Range, held: WeightForm) -> float:
    """Bytes that one row reads of a range: of experts those it chooses, of the embedding nothing."""
    whole = weights_of(files, config, layers, held)
    inner = (files.under(config.names.layer.format(layer)) for layer in range(layers.first, layers.last))
    experts = sum(
        _size(files, config, name, held) for names in inner for name in names if ".experts." in name
    )
    left = experts * (1 - config.routing.chosen / config.routing.experts) if config.routing else 0
    return whole - left - (_before(files, config, held) if layers.first == 0 else 0)


def bytes_of(files: Weights, config: ModelConfig, held: WeightForm) -> WeightBytes:
    """What weights_of counts, by parts: of the largest layer, before the first one, behind the last one."""
    layer = max(_layer(files, config, layer, held) for layer in range(config.layers))
    return WeightBytes(layer, _before(files, config, held), _behind(files, config, held))


def drafts_of(files: Weights, held: WeightForm) -> int:
    """Bytes that what drafts takes. Of a head, fc, which the stages apply, is held whole."""
    names = set(files.names())
    inner = {name for name in names if name.endswith("_proj.weight")}
    last = {name for name in names if name.endswith("lm_head.weight")}
    first = {name for name in names if name.endswith("embed_tokens.weight")}
    rest = names - inner - last - first
    parts = (held, inner), (held.last, last), (held.first, first), (held.whole, rest)
    return sum(each.bytes(files, named) for each, named in parts)


def _layer(files: Weights, config: ModelConfig, layer: int, held: WeightForm) -> int:
    names = files.under(config.names.layer.format(layer))
    return sum(_size(files, config, name, held) for name in names) // held.parts


def _size(files: Weights, config: ModelConfig, name: str, held: WeightForm) -> int:
    """Bytes of a layer's tensor. A router is never rounded, and in fp32 where scores are sigmoids; of experts
    in one tensor each is a matrix.
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
    return held.first.bytes(files, files.under(config.names.embedding))


def _behind(files: Weights, config: ModelConfig, held: WeightForm) -> int:
    names = config.names
    table = names.head if _has_lm_head(files, config) else names.embedding
    return held.whole.bytes(files, files.under(names.norm)) + held.last.bytes(files, files.under(table))


def _has_lm_head(files: Weights, config: ModelConfig) -> bool:
    """Beside the embedding; a tied model has none."""
    return bool(files.under(config.names.head))


def pages_of(config: ModelConfig, layers: Range, rows: int, itemsize: int, kept: KvDtype = "auto") -> int:
    """Bytes of pages of so many rows: keys and values, or what gated delta layers read, and their states."""
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
    """Of a device's memory that captured graphs take at most while they are made, of `rows` rows and fewer.

    All live in the memory of the largest, whose layers use the same again; what is to be captured runs once
    before, beside that. Parts are attention's, one for each row and piece that a frame may have.

    heads:   of queries, of keys, and numbers of each. columns: numbers of a row that are there at once.
    """
    many, kv_heads, dim = heads
    room = line_room(rows, 0, 1)
    if not invariant:
        room = room_for(rows, 0, many // kv_heads, anchored=True, kv_heads=kv_heads)
    parts = 4 * room.slots * many * (dim + 1 + invariant)
    return 2 * (parts + rows * columns * itemsize) + LIBRARY_BYTES


def laps_of(
    config: ModelConfig, itemsize: int, width: int, wide: bool = True, invariant: bool = False
) -> int:
    """The same of a range's laps, which sum up features of `width` columns; and of prompts alone. wide: those
    have more rows than other frames, see `cuda_graphs.prompt_rows`.
    """
    heads = config.heads, config.kv_heads, config.head_dim
    stream = 8 * config.hidden + 6 * width + 3 * config.intermediate
    if config.routing is not None:  # each chosen expert has a row of its own
        stream += config.routing.chosen * (4 * config.hidden + 10 * config.routing.width)
    columns = stream + 2 * (heads[0] + heads[1]) * heads[2]
    prompts = PROMPT_ROWS if wide else 0
    walks = _walk_bytes(config.delta, itemsize, prompts) if config.delta else 0
    graphs = graph_bytes(max(BUCKETS), heads, columns, itemsize, invariant)
    return walks + graphs + prompts * columns * itemsize


def _walk_bytes(delta: Delta, itemsize: int, prompts: int) -> int:
    """What gated delta layers take of it: rows as they are read, and states that trees set aside. prompts:
    rows of a frame of those; where no graph has room, a frame is walked in blocks, however long its texts.
    """
    room = WalkRoom(max(BUCKETS), delta.kernel - 1)
    read = 4 * (delta.mixed + 3 * delta.value_heads)
    solved = 4 * delta.value_heads * (delta.key_dim + CHUNK)
    own = 4 * delta.values + itemsize * (delta.row + 2 * delta.values)
    aside = 4 * delta.state * (room.aside + CARRIED)
    captured = (read + own) * room.lines + solved * room.chunks * CHUNK + aside
    return 2 * captured + (read + solved) * BLOCK_ROWS + own * prompts


def room_on(device: str) -> int | None:
    """Free bytes of a device's memory, as far as this process may use it; None where nobody tells.

    Raises InvalidRequest: no such device.
    """
    check_device(device)
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_memory() if torch.device(device).type == "cpu" else None


def gpus_on(device: str) -> dict[str, str]:
    """Ids of the GPUs that `device` may mean, and each one's own name as a device: of "cuda" all that this
    process sees. By torch, not by NVIDIA's library, whose numbers know nothing of CUDA_VISIBLE_DEVICES.
    Raises InvalidRequest: no such device.
    """
    check_device(device)
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return {}
    numbers = [int(number)] if number else range(torch.cuda.device_count())
    return {str(torch.cuda.get_device_properties(number).uuid): f"cuda:{number}" for number in numbers}


def free_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """What the machine has, or what is left of this container's limit, whichever is less."""
    found = [one for one in (_of_machine(meminfo), _of_container(cgroup)) if one is not None]
    return min(found, default=None)


def _of_machine(meminfo: Path) -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _of_container(cgroup: Path) -> int | None:
    """cgroup 2; file pages that nobody uses are given back before a limit bites."""
    try:
        limit = int((cgroup / "memory.max").read_text())  # "max" is no number: no limit
        used = int((cgroup / "memory.current").read_text())
        told = dict(line.split(" ", 1) for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(limit - used + int(told.get("inactive_file", "0")), 0)
    except (OSError, ValueError):
        return None
