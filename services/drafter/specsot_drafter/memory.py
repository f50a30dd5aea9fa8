"""Computes the memory that a draft head or a small draft model needs, from tensor shapes alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from specsot.checkpoint.config import ModelConfig
from specsot.checkpoint.mtp import block_config, require_mtp, stored_names
from specsot.members import AS_PUBLISHED, Head, Overrides, Range, TreeShape
from specsot_drafter.heads.checkpoint import BLOCK_KINDS, Checkpoint, HeadShape, kind_of, read_shape
from specsot_drafter.heads.decoder import small_quantization
from specsot_drafter.heads.eagle import can_pack
from specsot_drafter.heads.loading import EMBEDDING, MASK, fusion_norms, rope_of, taps_of
from specsot_drafter.overlap.graph_growth import max_due_rows, tree_graph_bytes
from specsot_drafter.proposers.lm import MODEL_TREES, PREFILL_ROWS, BeamShape, can_capture_beam
from specsot_model.fused import can_capture
from specsot_model.linear import stored_bytes
from specsot_model.loaded_parts import AbsentWeights
from specsot_model.memory_fit import (
    WeightForm,
    drafter_bytes,
    kv_page_bytes,
    weight_bytes_of,
    weights_of,
)
from specsot_model.packed import ROWS_IN, row_itemsize
from specsot_model.weights import Weights


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """The memory of a drafter, in bytes.

    own: Bytes of the weights in the drafter's own files.
    borrowed: Bytes of the drafter's copies of parts of the base model: embedding and lm_head.
    row: Bytes of the keys, values and feature of one position.
    graphs: Upper bound of the bytes of captured graphs. 0 if nothing is captured.
    head: The layers that the stages tap for the head, and the size of a fused feature. None for a model that
        reads no features.
    """

    own: int = 0
    borrowed: int = 0
    row: int = 0
    graphs: int = 0
    head: Head | None = None

    @property
    def weights(self) -> int:
        """Bytes of all weights that the drafter holds."""
        return self.own + self.borrowed


def eagle_memory(
    head: Checkpoint,
    base: Weights,
    config: ModelConfig,
    held: WeightForm,
    tree: TreeShape,
    kernels: bool,
    overrides: Overrides = AS_PUBLISHED,
) -> DraftMemory:
    """Return the memory of a draft head.

    head: The head's checkpoint.
    base: Weights of the base model.
    config: Config of the base model.
    held: The form in which weights are held.
    tree: The largest tree.
    kernels: True if the device has GPU kernels, so that graphs are captured.
    overrides: Settings that replace those of the head's config.

    Raises HeadMismatch or ModelError if head and base model do not fit together.

    Parts of the base model are counted as borrowed if the head has no embeddings of its own, or no lm_head.
    Graphs are counted only for an EAGLE-3 head with one layer and no mask. A DFlash or DSpark head stores no
    features.
    """
    shape = read_shape(head, config)
    kind = kind_of(head)
    edges = weight_bytes_of(base, config, held)
    borrowed = 0 if EMBEDDING in head else edges.first
    if kind == "eagle1" or "lm_head.weight" not in head:
        borrowed += edges.last
    graphs = 0
    if kernels and kind == "eagle3" and shape.layers == 1 and MASK not in head:
        graphs = tree_graph_bytes(shape, held.itemsize, tree.top_k, tree.depth + 1)
    packed = held.packed and held.itemsize == 4 and can_pack(shape, rope_of(head, overrides).stretch)
    kv_itemsize = ROWS_IN.itemsize if packed else held.itemsize
    feature = 0 if kind in BLOCK_KINDS else shape.hidden
    row = 2 * shape.layers * shape.kv_heads * shape.head_dim * kv_itemsize + feature * held.itemsize
    return DraftMemory(drafter_bytes(head, held), borrowed, row, graphs, _fused(head, config, overrides))


def model_memory(
    files: Weights, config: ModelConfig, held: WeightForm, beam: BeamShape, kernels: bool
) -> DraftMemory:
    """Return the memory of a small language model that drafts.

    files: Weights of the model.
    config: Its config.
    held: The form in which weights are held.
    beam: The shape of its trees.
    kernels: True if the device has GPU kernels, so that graphs are captured.

    The graphs are 0 if the model cannot be captured, which includes models with attention windows. There is
    no borrowed part.
    """
    kv_itemsize = row_itemsize(config, held.itemsize, held.packed)
    row = kv_page_bytes(config, Range(0, config.layers), 1, kv_itemsize)
    kind = held.quantization
    captured = can_capture(config, kernels, kind is not None, kind in ("fp8", "int8"))
    graphs = beam_graph_bytes(config, held.itemsize, beam) if captured and not config.windowed else 0
    return DraftMemory(small_model_bytes(files, config, held), row=row, graphs=graphs)


def small_model_bytes(files: Weights, config: ModelConfig, held: WeightForm) -> int:
    """Return the bytes of the weights of a small language model that drafts. If embedding and lm_head share
    one table and weights are int4 on a CPU, the table counts twice: as int8 for the embedding, and as int4
    for the lm_head. A model whose sizes int4 cannot hold is counted as int8 there; see `small_quantization`.

    files: Weights of the model.
    config: Its config.
    held: The form of weights that the options name.
    """
    held = replace(held, quantization=small_quantization(config, held.quantization, held.packed))
    copied = config.tied and held.packed and held.quantization == "int4"
    copy = stored_bytes((config.vocab, config.hidden), held.itemsize, "int4") if copied else 0
    return drafter_bytes(files, held) + copy


def mtp_memory(
    directory: Path, config: ModelConfig, held: WeightForm, tree: TreeShape, kernels: bool
) -> DraftMemory:
    """Return the memory of an MTP layer of a base model.

    directory: The checkpoint with the layer, of which no tensor is read.
    config: Config of the base model.
    held: The form in which weights are held.
    tree: The largest tree.
    kernels: True if the device has GPU kernels, so that graphs are captured.

    Raises ModelError if there is no such layer.
    """
    stored = stored_names(directory)
    block = block_config(config, require_mtp(stored, config, directory), stored)
    shapes = AbsentWeights((f"{config.names.embedding}.weight",), block)
    layer = weight_bytes_of(shapes, block, held).layer
    borrowed = weights_of(shapes, block, Range(0, 1), held) - layer
    form = held.quantization
    projection = stored_bytes((config.hidden, 2 * config.hidden), held.itemsize, form)
    kv_itemsize = row_itemsize(block, held.itemsize, held.packed)
    row = kv_page_bytes(block, Range(0, 1), 1, kv_itemsize) + config.hidden * held.itemsize
    captured = can_capture(block, kernels, form is not None, form in ("fp8", "int8"))
    graphs = mtp_graph_bytes(config, held.itemsize, tree) if captured else 0
    return DraftMemory(layer + projection, borrowed, row, graphs, Head((config.layers,), config.hidden))


def mtp_graph_bytes(config: ModelConfig, itemsize: int, tree: TreeShape) -> int:
    """Return an upper bound of the bytes of the graphs of an MTP layer.

    config: Config of the base model.
    itemsize: Bytes of one number of the computation.
    tree: The largest tree.
    """
    heads = config.heads, config.kv_heads, config.head_dim
    shape = HeadShape(config.hidden, 2 * config.hidden, *heads, config.intermediate, config.vocab, 1)
    return tree_graph_bytes(shape, itemsize, tree.top_k, tree.depth + 1)


def beam_graph_bytes(config: ModelConfig, itemsize: int, beam: BeamShape) -> int:
    """Return an upper bound of the bytes of a small model's graphs: those for trees, and those for prompts.

    config: Config of the model.
    itemsize: Bytes of one number of the computation.
    beam: The shape of its trees.

    If a level of the trees has too many candidates for a graph (`can_capture_beam`), there are only graphs
    for prompts.
    """
    heads = config.heads, config.kv_heads, config.head_dim
    shape = HeadShape(config.hidden, config.hidden, *heads, config.intermediate, config.vocab, config.layers)
    levels = len(beam.widths) + 1
    # Graphs for prompts compute no logits, so that their rows count without a vocabulary.
    prompts = tree_graph_bytes(replace(shape, vocab=0), itemsize, PREFILL_ROWS, levels, trees=1)
    if not can_capture_beam(beam):
        return prompts
    rows = max((max_due_rows(beam.breadth, levels), *beam.widths))
    # All graphs share one memory pool, whose size is that of the larger kind.
    return max(tree_graph_bytes(shape, itemsize, rows, levels, max(MODEL_TREES)), prompts)


def _fused(head: Checkpoint, config: ModelConfig, overrides: Overrides) -> Head:
    """Return what the stages fuse for a head: the tapped layers, and the columns of a fused row.

    head: The head's checkpoint.
    config: Config of the base model.
    overrides: Settings that replace those of the head's config.

    An EAGLE-1 head, and a head that uses no auxiliary hidden states, taps the last hidden state only. With
    norms before fc, a fused row has the columns of fc, otherwise its rows.
    """
    if kind_of(head) == "eagle1" or not head.settings.get("use_aux_hidden_state", True):
        return Head((config.layers,), config.hidden)
    taps = taps_of(head, config.layers, overrides)
    return Head(taps, head.shape("fc.weight")[any(fusion_norms(head))])
