"""Checks that weights, KV pages and CUDA graphs fit in memory, from the headers of weight files only.

Nothing is loaded. In this file, `weight_form` is the form in which weights are stored once they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import structlog
import torch

from specsot.checkpoint.config import ModelConfig
from specsot.checkpoint.families import Delta
from specsot.core.info import memory_in_words
from specsot.errors import ModelError
from specsot.members import KvDtype, Quantization, Range, WeightBytes
from specsot.service.host_memory import free_memory
from specsot_kernels.attention_tables import room_for
from specsot_kernels.line_tables import MAX_SMALL_SLOTS, line_room
from specsot_model.captured_tokens import TOKEN_BUCKETS
from specsot_model.core.replays import CHUNK, states_for
from specsot_model.core.walks import BLOCK_ROWS, CARRIED, WalkRoom
from specsot_model.cuda_graphs import BUCKETS, PROMPT_ROWS
from specsot_model.kv import row_bytes
from specsot_model.linear import SMALL, check_device, stored_bytes
from specsot_model.stored_form import lm_head_quantization, uses_packed_kernels
from specsot_model.transformers_layers.layers import page_row_bytes
from specsot_model.weights import Weights

log = structlog.get_logger()

# Bytes. What libraries allocate for the stream on which graphs are captured. Untuned.
LIBRARY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a process needs on a device.

    weights: Bytes of weights.
    pages: Bytes of KV pages.
    graphs: Bytes of captured CUDA graphs; 0 if there are none.
    """

    weights: int
    pages: int
    graphs: int = 0

    @property
    def total(self) -> int:
        """Return the sum of all bytes."""
        return self.weights + self.pages + self.graphs

    def __str__(self) -> str:
        """Return the bytes in words: "2.0 GiB of weights and 1.0 GiB of KV pages", and the graphs if there
        are any.
        """
        parts = f"{memory_in_words(self.weights)} of weights and {memory_in_words(self.pages)} of KV pages"
        return f"{parts}, and {memory_in_words(self.graphs)} for captured graphs" if self.graphs else parts


def check_fit(subject: str, need: Need, device: str, free: int | None) -> None:
    """Log in one line what is needed and what is free.

    subject: What needs the memory, as the plural subject of messages, such as "layers 0..15".
    need: Bytes that are needed.
    device: Name of the device, for messages.
    free: Free bytes; None: unknown, and the check passes.

    Raises ModelError if too little is free.
    """
    free_in_words = "an unknown amount" if free is None else memory_in_words(free)
    if free is not None and need.total > free:
        raise ModelError(
            f"{subject} need {need}, {device} has {free_in_words} free: "
            "fewer layers, a smaller --kv-memory, a --dtype of fewer bytes or --quantization would fit"
        )
    parts = {"graphs": memory_in_words(need.graphs)} if need.graphs else {}
    log.info(
        "memory checked",
        what=subject,
        weights=memory_in_words(need.weights),
        pages=memory_in_words(need.pages),
        **parts,
        free=free_in_words,
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
    def on_device(cls, device: str, itemsize: int, quantization: Quantization | None) -> WeightForm:
        """Return the form of weights on a device.

        int8 and int4 are packed on a CPU. Embedding and lm_head of a tied model share one table if weights
        are packed, and on a GPU if nothing is quantized. `parts` is 1.

        device: Name of the device, such as "cpu" or "cuda:0".
        itemsize: Bytes of a number that is not quantized.
        quantization: Form of the matrices; None: they are not quantized.
        """
        packed = uses_packed_kernels(quantization, device)
        unquantized = quantization is None
        return cls(
            itemsize, quantization, packed, packed or (unquantized and torch.device(device).type == "cuda")
        )

    def bytes(self, files: Weights, names: Iterable[str]) -> int:
        """Return the bytes that some tensors take once they are loaded; only their shapes are read.

        files: Source of the tensors; only their names and shapes are read.
        names: Names of the tensors; 0 is returned for none.
        """
        return sum(
            self.bytes_of(files, name, files.shape(name), files.form(name, self.quantization))
            for name in names
        )

    def bytes_of(self, files: Weights, name: str, shape: tuple[int, ...], form: Quantization | None) -> int:
        """Return the bytes that a tensor takes once it is loaded.

        Projections of different types in a GGUF file that run as one product are rounded to 8 bits, but
        counted as if each was kept as it is.

        files: Source of the tensor, which is not read.
        name: Name of the tensor.
        shape: Shape of the tensor, or of a part of it.
        form: Form of the tensor; None: it is not quantized.
        """
        return stored_bytes(shape, self.itemsize, form, files.ggml_type(name) if self.packed else None)

    @property
    def of_norms(self) -> WeightForm:
        """Return the form of norms: not quantized."""
        return WeightForm(self.itemsize)

    @property
    def of_embedding(self) -> WeightForm:
        """Return the form of the embedding: int8 with packed CPU weights, else not quantized."""
        return WeightForm(self.itemsize, "int8" if self.packed else None, self.packed)

    @property
    def of_lm_head(self) -> WeightForm:
        """Return the form of the lm_head: that of the other matrices, but int8 where those are int4."""
        return WeightForm(self.itemsize, lm_head_quantization(self.quantization), self.packed)


def tensors_of(files: Weights, config: ModelConfig, layers: Range) -> list[str]:
    """Return the names of all tensors that a range of layers reads.

    The embedding, final norm and lm_head are named as well if the range has the first or the last layer. If
    layers have per-layer inputs, every range reads the embedding and the tables of these inputs.

    files: Source of the tensors; only their names are read.
    config: The model's config: sizes, tensor names, and kinds of norm, MLP and so on.
    layers: The range of layers, first (included) to last (excluded).
    """
    names = config.names
    parts = [names.layer.format(layer) for layer in range(layers.first, layers.last)]
    # A tied model has one table for embedding and lm_head, so both ends of the model may read either.
    if layers.first == 0 or layers.last == config.layers:
        parts += names.embedding, names.norm, names.head
    elif config.layer_input_size:
        parts.append(names.embedding)
    parts += _layer_tables(config)
    return [name for part in parts for name in files.under(part)]


def weights_of(files: Weights, config: ModelConfig, layers: Range, weight_form: WeightForm) -> int:
    """Return the bytes of weights that a range of layers takes on a device.

    The first layer brings the embedding, the last one the final norm and the lm_head. If layers have
    per-layer inputs, every range has the embedding. A tied model's table counts once if the range has both
    embedding and lm_head and they share it, or if the packed copy of the table is left out because it is
    small.

    files: Source of the tensors; only their names and shapes are read.
    config: The model's config: sizes, tensor names, and kinds of norm, MLP and so on.
    layers: The range of layers, first (included) to last (excluded).
    weight_form: The form in which weights are stored once they are loaded.
    """
    in_layers = sum(
        _layer_bytes(files, config, layer, weight_form) for layer in range(layers.first, layers.last)
    )
    embeds = layers.first == 0 or config.layer_input_size
    embedding = _embedding_bytes(files, config, weight_form) if embeds else 0
    lm_head = _lm_head_bytes(files, config, weight_form) if layers.last == config.layers else 0
    copy_is_small = (weight_form.itemsize, weight_form.quantization) == (4, None) and embedding <= 4 * SMALL
    counted_once = (
        embedding and lm_head and (weight_form.shared or copy_is_small) and not _has_lm_head(files, config)
    )
    return in_layers + lm_head + (0 if counted_once else embedding)


def bytes_read_per_token(
    files: Weights, config: ModelConfig, layers: Range, weight_form: WeightForm
) -> float:
    """Return the bytes of weights that one token reads in a range.

    Of the experts, only the chosen ones are read; of the embedding, nothing is counted. Experts are the
    tensors with ".experts." in their name, and the fraction of them that is read is chosen / experts. The
    embedding is subtracted if the range has it, and so is that of the per-layer inputs.

    files: Source of the tensors; only their names and shapes are read.
    config: The model's config: sizes, tensor names, and kinds of norm, MLP and so on.
    layers: The range of layers, first (included) to last (excluded).
    weight_form: The form in which weights are stored once they are loaded.
    """
    total = weights_of(files, config, layers, weight_form)
    names_by_layer = (
        files.under(config.names.layer.format(layer)) for layer in range(layers.first, layers.last)
    )
    experts = sum(
        _tensor_bytes(files, config, name, weight_form)
        for names in names_by_layer
        for name in names
        if ".experts." in name
    )
    not_read = experts * (1 - config.routing.chosen / config.routing.experts) if config.routing else 0
    if config.layer_input_size:
        not_read += len(layers) * _input_table_bytes(files, config, weight_form)
    embeds = layers.first == 0 or config.layer_input_size
    return total - not_read - (_embedding_bytes(files, config, weight_form) if embeds else 0)


def weight_bytes_of(files: Weights, config: ModelConfig, weight_form: WeightForm) -> WeightBytes:
    """Return the bytes of the largest layer, of the embedding, and of final norm and lm_head.

    A layer counts with the bytes on one of the devices that share it. A tied model's table counts twice: for
    the embedding and for the lm_head.

    files: Source of the tensors; only their names and shapes are read.
    config: The model's config: sizes, tensor names, and kinds of norm, MLP and so on.
    weight_form: The form in which weights are stored once they are loaded.
    """
    layer = max(_layer_bytes(files, config, layer, weight_form) for layer in range(config.layers))
    return WeightBytes(
        layer, _embedding_bytes(files, config, weight_form), _lm_head_bytes(files, config, weight_form)
    )


def drafter_bytes(files: Weights, weight_form: WeightForm) -> int:
    """Return the bytes that a draft head or draft model takes.

    A head's `fc`, which the stages apply, is not quantized. Projections have the form `weight_form`, the
    lm_head int8 instead of int4, and the embedding int8 with packed CPU weights.

    files: Source of the drafter's tensors; only their names and shapes are read.
    weight_form: The form in which weights are stored once they are loaded.
    """
    names = set(files.names())
    projections = {name for name in names if name.endswith("_proj.weight")}
    of_lm_head = {name for name in names if name.endswith("lm_head.weight")}
    of_embedding = {name for name in names if name.endswith("embed_tokens.weight")}
    others = names - projections - of_lm_head - of_embedding
    parts = (
        (weight_form, projections),
        (weight_form.of_lm_head, of_lm_head),
        (weight_form.of_embedding, of_embedding),
        (weight_form.of_norms, others),
    )
    return sum(form.bytes(files, tensor_names) for form, tensor_names in parts)


def _layer_bytes(files: Weights, config: ModelConfig, layer: int, weight_form: WeightForm) -> int:
    """Return the bytes of one layer on each of the devices that share it: an equal part of the layer's own
    tensors, rounded down. Its tables of per-layer inputs count in full on each device.

    files: Source of the tensors; only their names and shapes are read.
    config: The model's config: sizes, tensor names, and kinds of norm, MLP and so on.
    layer: Index of the layer in the whole model.
    weight_form: The form in which weights are stored once they are loaded.
    """
    names = files.under(config.names.layer.format(layer))
    own = sum(_tensor_bytes(files, config, name, weight_form) for name in names) // weight_form.parts
    if not config.layer_input_size:
        return own
    projection = [name for module in _layer_tables(config)[1:] for name in files.under(module)]
    return (
        own
        + _input_table_bytes(files, config, weight_form)
        + weight_form.of_norms.bytes(files, projection) // config.layers
    )


def _layer_tables(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the modules that make the per-layer inputs: embedding, projection, norm. Empty if
    layers have no such inputs.

    config: The model's config.
    """
    return (config.names.layer_tables or ()) if config.layer_input_size else ()


def _input_table_bytes(files: Weights, config: ModelConfig, weight_form: WeightForm) -> int:
    """Return the bytes of one layer's part of the embedding of the per-layer inputs.

    files: Source of the tensors; only their names and shapes are read.
    config: The model's config, which must have a `layer_input_size`.
    weight_form: The form in which weights are stored once they are loaded.
    """
    return weight_form.of_embedding.bytes(files, files.under(_layer_tables(config)[0])) // config.layers


def _tensor_bytes(files: Weights, config: ModelConfig, name: str, weight_form: WeightForm) -> int:
    """Return the bytes of one tensor of a layer, on one device.

    A router is never quantized, and is fp32 if scores are sigmoids. The expansion of latent vectors is never
    quantized, and what selects tokens for sparse attention is not loaded. If one tensor holds all experts,
    each expert counts as a matrix. Biases are never quantized, nor are tensors that are neither a matrix nor
    hold all experts.

    files: Source of the tensors; only their names and shapes are read.
    config: The model's config: sizes, tensor names, and kinds of norm, MLP and so on.
    name: Name of the tensor in the model, such as "model.layers.3.mlp.up_proj.weight".
    weight_form: The form in which weights are stored once they are loaded.
    """
    routing = config.routing
    shape = files.shape(name)
    form = None if name.endswith("bias") else files.form(name, weight_form.quantization)
    if routing and f".{config.names.router}." in name:
        exact = routing.score == "sigmoid" or config.names.router_scale
        return stored_bytes(shape, 4 if exact else weight_form.itemsize, None)
    if config.latent and ".self_attn.indexer." in name:
        return 0
    if config.latent and name.endswith(("kv_b_proj.weight", ".k_b_proj.weight", ".v_b_proj.weight")):
        form = None
    if name.endswith(config.names.stacked or ()):
        return shape[0] * stored_bytes((shape[2], shape[1]), weight_form.itemsize, form)
    if name.endswith(config.names.whole_experts or ()):
        return shape[0] * stored_bytes((shape[1], shape[2]), weight_form.itemsize, form)
    return weight_form.bytes_of(files, name, shape, form)


def _embedding_bytes(files: Weights, config: ModelConfig, weight_form: WeightForm) -> int:
    """Return the bytes of the embedding.

    files: Source of the tensors; only their names and shapes are read.
    config: The model's config: sizes, tensor names, and kinds of norm, MLP and so on.
    weight_form: The form in which weights are stored once they are loaded.
    """
    return weight_form.of_embedding.bytes(files, files.under(config.names.embedding))


def _lm_head_bytes(files: Weights, config: ModelConfig, weight_form: WeightForm) -> int:
    """Return the bytes of the final norm and the lm_head.

    If the files hold no lm_head, the embedding's table counts instead, in the lm_head's form.

    files: Source of the tensors; only their names and shapes are read.
    config: The model's config: sizes, tensor names, and kinds of norm, MLP and so on.
    weight_form: The form in which weights are stored once they are loaded.
    """
    names = config.names
    table = names.head if _has_lm_head(files, config) else names.embedding
    return weight_form.of_norms.bytes(files, files.under(names.norm)) + weight_form.of_lm_head.bytes(
        files, files.under(table)
    )


def _has_lm_head(files: Weights, config: ModelConfig) -> bool:
    """Tell whether the files hold an lm_head in addition to the embedding; a tied model's do not.

    files: Source of the tensors; only their names and shapes are read.
    config: The model's config: sizes, tensor names, and kinds of norm, MLP and so on.
    """
    return bool(files.under(config.names.head))


def kv_page_bytes(
    config: ModelConfig, layers: Range, rows: int, itemsize: int, kv_dtype: KvDtype = "auto"
) -> int:
    """Return the bytes of KV pages of `rows` rows in all layers of a range.

    For gated delta layers these are the stored inputs and the stored states. All other layers store a key and
    a value of every KV head per row, or one row for all heads with latent attention. Layers that read the
    keys and values of another one store nothing.

    config: The model's config: sizes, tensor names, and kinds of norm, MLP and so on.
    layers: The range of layers, first (included) to last (excluded).
    rows: Number of rows (tokens) of all pages together.
    itemsize: Bytes of a number of the KV cache, unless `kv_dtype` is int8.
    kv_dtype: Type of the KV cache: "int8", or "auto" for `itemsize` bytes per number. Stored inputs are never
        int8.
    """
    if config.transformers is not None:
        return rows * page_row_bytes(config, layers, itemsize, kv_dtype)
    attending = [config.of_layer(n) for n in range(layers.first, layers.last) if not config.recurrent(n)]
    row_sizes = (
        one.stored_tensors * one.kv_heads * row_bytes(one.head_dim, itemsize, kv_dtype)
        for one in attending
        if one.stores_kv
    )
    total = rows * sum(row_sizes)
    if config.delta:
        total += (len(layers) - len(attending)) * (
            2 * config.delta.half * itemsize * rows + 4 * config.delta.state * states_for(rows)
        )
    return total


def graph_bytes(
    rows: int,
    heads: tuple[int, int, int],
    columns: int,
    itemsize: int,
    invariant: bool = False,
    small_steps: bool = False,
) -> int:
    """Return the maximum number of bytes that CUDA graphs take while they are captured.

    All graphs live in the memory of the largest one, and its layers reuse the same memory. The work runs once
    before it is captured, in memory of its own; hence the factor two. Attention needs memory for one partial
    result per row and piece of its KV.

    rows: Rows of the largest graph.
    heads: Number of query heads, number of KV heads, and numbers (values) per head.
    columns: How many numbers per row are in memory at the same time.
    itemsize: Bytes of a number.
    invariant: True if the range is batch-invariant.
    small_steps: True if graphs of few rows have the tables of small steps.
    """
    num_heads, kv_heads, head_dim = heads
    room = line_room(rows, 0, 1)
    if not invariant:
        room = room_for(rows, 0, num_heads // kv_heads, anchored=True, kv_heads=kv_heads)
    slots = max(room.slots, MAX_SMALL_SLOTS) if small_steps else room.slots
    partial_results = 4 * slots * num_heads * (head_dim + 1 + (invariant or small_steps))
    return 2 * (partial_results + rows * columns * itemsize) + LIBRARY_BYTES


def step_bytes(
    config: ModelConfig,
    itemsize: int,
    feature_size: int,
    long_prompt_frames: bool = True,
    invariant: bool = False,
    small_steps: bool = False,
) -> int:
    """Return the maximum number of bytes that the CUDA graphs of a layer range take, and frames of prompts
    alone.

    They are those of the largest graph, of the tables of gated delta layers if the model has any, and of
    PROMPT_ROWS rows without a graph if `long_prompt_frames`.

    config: The model's config: sizes, tensor names, and kinds of norm, MLP and so on.
    itemsize: Bytes of a number of the activations.
    feature_size: Size of the features that the range sums up; 0: none.
    long_prompt_frames: True if frames of prompts alone have more rows than other frames; see
        `cuda_graphs.prompt_rows`.
    invariant: True if the range is batch-invariant.
    small_steps: True if graphs of few rows have the tables of small steps; see `Decoder.runs_small_steps`.
    """
    heads = config.heads, config.kv_heads, config.head_dim
    numbers_per_row = 8 * config.hidden + 6 * feature_size + 3 * config.intermediate
    # Every row is copied for each of its chosen experts.
    if config.routing is not None:
        numbers_per_row += config.routing.chosen * (4 * config.hidden + 10 * config.routing.width)
    columns = numbers_per_row + 2 * (heads[0] + heads[1]) * heads[2]
    prompts = PROMPT_ROWS if long_prompt_frames else 0
    delta_bytes = _walk_bytes(config.delta, itemsize, prompts) if config.delta else 0
    graphs = graph_bytes(max(BUCKETS), heads, columns, itemsize, invariant, small_steps)
    return delta_bytes + graphs + prompts * columns * itemsize


def token_bytes(vocab: int) -> int:
    """Return the maximum number of bytes that the CUDA graphs of `CapturedTokens` take: twice the fp32 logits
    of the largest graph, whose memory the other graphs reuse, and what libraries allocate. The factor two is
    there because the work runs once before it is captured, in memory of its own.

    vocab: Number of token ids.
    """
    return 2 * 4 * max(TOKEN_BUCKETS) * vocab + LIBRARY_BYTES


def _walk_bytes(delta: Delta, itemsize: int, prompts: int) -> int:
    """Return the bytes that gated delta layers need in graphs and for frames of prompts.

    These are the inputs as they are read, and the states that trees set aside.

    delta: Sizes of the gated delta layers.
    itemsize: Bytes of a number of the activations.
    prompts: Rows of a frame of prompts alone. Without a graph, a frame is walked in blocks of bounded size,
        however long its sequences are.
    """
    room = WalkRoom(max(BUCKETS), delta.kernel - 1)
    read_bytes = 4 * (delta.mixed + 3 * delta.value_heads)
    solved_bytes = 4 * delta.value_heads * (delta.key_dim + CHUNK)
    result_bytes = 4 * delta.values + itemsize * (delta.row + 2 * delta.values)
    set_aside_bytes = 4 * delta.state * (room.aside + CARRIED)
    captured = (read_bytes + result_bytes) * room.lines + solved_bytes * room.chunks * CHUNK + set_aside_bytes
    return 2 * captured + (read_bytes + solved_bytes) * BLOCK_ROWS + result_bytes * prompts


def free_on(device: str) -> int | None:
    """Return the free bytes of a device's memory that this process may use, or None if they are unknown.

    The bytes are unknown for devices that are neither "cpu" nor "cuda", and for a CPU whose system does not
    tell them. On a GPU, memory that PyTorch has reserved and does not use counts as free.

    device: Name of the device, such as "cpu" or "cuda:0".

    Raises InvalidRequest if there is no such device.
    """
    check_device(device)
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_memory() if torch.device(device).type == "cpu" else None


def gpus_on(device: str) -> dict[str, str]:
    """Return the GPUs that a device name may mean, as device name by GPU id; empty if it is no GPU.

    "cuda" means all GPUs that this process sees. Torch is asked, not NVIDIA's library, whose numbering
    ignores CUDA_VISIBLE_DEVICES.

    device: Name of the device, such as "cpu", "cuda" or "cuda:0".

    Raises InvalidRequest if there is no such device.

    # "cuda:1" -> {"<uuid of GPU 1>": "cuda:1"}
    """
    check_device(device)
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return {}
    numbers = [int(number)] if number else range(torch.cuda.device_count())
    return {str(torch.cuda.get_device_properties(number).uuid): f"cuda:{number}" for number in numbers}
