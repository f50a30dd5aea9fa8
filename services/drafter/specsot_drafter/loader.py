"""Loads a drafter's models by backend, measures them, and makes the engine of every epoch."""

from __future__ import annotations

import hashlib
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from specsot.checkpoint.borrowed import borrowed_of
from specsot.checkpoint.config import read_config
from specsot.checkpoint.fingerprint import fingerprint
from specsot.checkpoint.resolving import name_of_model
from specsot.core.frames import FeatureBatch, Features, Opening
from specsot.core.vocabulary import Vocabulary, read_vocabulary
from specsot.drafting import PAST_TOKENS
from specsot.errors import HeadMismatch, InvalidRequest
from specsot.grammar import prebuild
from specsot.members import Configuration, Curve, Head, Registration, TreeShape
from specsot.params import DrafterName
from specsot.service.options import DraftModelOptions
from specsot.transport.pending_rows import use_device
from specsot_drafter.block_graphs import block_graph_bytes, captured_blocks
from specsot_drafter.core.budget import BudgetPolicy
from specsot_drafter.core.control import make_budget
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.eagle_kv import DraftPages, DueRows
from specsot_drafter.engine import DraftEngine
from specsot_drafter.graph_growth import GraphInput, TreeGraphs, tree_graph_bytes
from specsot_drafter.growth import TreeGrowth, TreeRoom
from specsot_drafter.heads import DraftHead
from specsot_drafter.heads.checkpoint import Checkpoint, kind_of
from specsot_drafter.heads.decoder import DecoderHead
from specsot_drafter.heads.dflash import MASK, MOST_BLOCK, BlockHead, block_plan, depth_of
from specsot_drafter.heads.eagle import Eagle3Head
from specsot_drafter.heads.fused import fuse_head, graph_head
from specsot_drafter.heads.loading import load_head
from specsot_drafter.memory import beam_graph_bytes
from specsot_drafter.proposers import Proposer
from specsot_drafter.proposers.block import BlockProposer
from specsot_drafter.proposers.eagle import EagleProposer
from specsot_drafter.proposers.lm import LanguageModelProposer, beam_shape, read_small
from specsot_drafter.proposers.parallel import ParallelProposer
from specsot_drafter.proposers.suffix import SuffixProposer, SuffixShape
from specsot_drafter.speculator import Clock
from specsot_model.cuda_graphs import GraphCapture, measure_curve
from specsot_model.decoder import Decoder
from specsot_model.linear import check_quantization, resolve_dtype
from specsot_model.memory_fit import Need, WeightForm, check_fit, drafts_of, room_on
from specsot_model.published import open_weights


class DraftLoader:
    """Loads everything once; every epoch gets a fresh engine over the same weights."""

    def __init__(
        self,
        options: DraftModelOptions,
        name: str,
        address: str | None = None,
        free_memory: Callable[[str], int | None] = room_on,
    ) -> None:
        """address: where peers reach it; None: by its name. free_memory: free bytes of a device."""
        self._options = options
        self._name = name
        self._address = address or name
        self._free_memory = free_memory
        self._loaded = False
        self._config = read_config(options.base)
        check_quantization(options.drafter_quantization, options.device)
        self._fingerprint = fingerprint(options.base)
        use_device(options.device)
        self._backends = make_backends(options)

    @property
    def name(self) -> str:
        return self._name

    @property
    def _first(self) -> DraftBackend:
        return next(iter(self._backends.values()))

    @property
    def _ids(self) -> int:
        """Token ids that all backends accept; a small model may have fewer than the base."""
        options = self._options
        own = self._config.vocab
        return min(own, read_config(options.draft).vocab) if options.drafts == "model" else own

    def tap_slices(self) -> dict[int, torch.Tensor]:
        return self._first.tap_slices()

    def registration(self) -> Registration:
        """Loads and measures what drafts; a fraction of a second. Raises ModelError: no room for it."""
        config = self._config
        way = self._first
        self._check_fit()
        if borrowed := borrowed_of(self._options.base):
            _ = way.model
            borrowed.tell("what the drafter takes of its base")
        _ = self._vocabulary  # now, not while somebody is being answered
        return Registration(
            kind="drafter",
            name=self._name,
            address=self._address,
            fingerprint=self._fingerprint,
            host=socket.gethostname(),
            model_layers=config.layers,
            max_positions=config.max_positions,
            kv_bytes=self._options.page_bytes,
            row_bytes=way.row_bytes,
            curve=way.curve,
            head=way.head,
            drafters=tuple(self._backends),
            shape=way.shape,
        )

    def make_engine(self, configuration: Configuration) -> DraftEngine:
        """The engine for one epoch, with empty pages. Raises ModelError: there is no room for it."""
        vocabulary = self._vocabulary
        if vocabulary:
            prebuild(vocabulary)
        self._check_graphs(configuration)
        backends: dict[DrafterName, tuple[Proposer, BudgetPolicy]] = {}
        for name, backend in self._backends.items():
            drafter = backend.make_proposer(configuration)
            backends[name] = drafter, self._make_budget(name, drafter, configuration)
        looking = backends.get("suffix", backends["ngram"])[0]
        blend = looking if self._options.drafting.blend else None
        return DraftEngine(backends, configuration, vocabulary, blend, ids=self._ids)

    @cached_property
    def _vocabulary(self) -> Vocabulary | None:
        """Read once: half a second for 50,000 tokens."""
        has_text = (self._options.base / "tokenizer.json").exists()
        return read_vocabulary(self._options.base, self._config.vocab) if has_text else None

    def _check_fit(self) -> None:
        """Before anything is loaded. What a head borrows of its base comes on top."""
        options = self._options
        if self._loaded or options.draft_model is None:
            return
        self._loaded = True
        files = open_weights(options.draft, options.draft_format == "bin")
        held = WeightForm.on(options.device, numbers_of(options).itemsize, options.drafter_quantization)
        need = Need(drafts_of(files, held), options.page_bytes)
        check_fit(f"{options.drafts} drafts", need, options.device, self._free_memory(options.device))

    def _check_graphs(self, configuration: Configuration) -> None:
        """Before they are captured, where there are any."""
        options = self._options
        way = self._first
        pages = configuration.pages * configuration.page_rows * way.row_bytes
        if graphs := way.graph_bytes(configuration):
            need = Need(0, pages, graphs)
            check_fit(f"{options.drafts} drafts", need, options.device, self._free_memory(options.device))

    def _make_budget(
        self, name: DrafterName, drafter: Proposer, configuration: Configuration
    ) -> BudgetPolicy:
        shape = configuration.shape
        levels = len(drafter.widths)
        looks = name in ("ngram", "suffix")
        own = TreeShape(levels, 1, min(SUFFIX_NODES + 1, shape.nodes), shape.fixed) if looks else shape
        tuner = self._options.drafting.tuner
        curve = self._backends[name].curve
        return make_budget(tuner, own, configuration.curve, curve, drafter.widths, drafter.at_once)


def make_engine(
    head: DraftHead,
    configuration: Configuration,
    vocabulary: Vocabulary | None = None,
    curve: Curve | None = None,
    clock: Clock = time.perf_counter,
) -> DraftEngine:
    """curve: seconds per rows of one level of growth; measured here when absent and needed."""
    shape = configuration.shape
    if curve is None:
        curve = () if shape.fixed else measure_head(head)
    drafter = propose_with(head, shape, configuration.pages, configuration.page_rows)
    rule = make_budget("measured", shape, configuration.curve, curve, drafter.widths, drafter.at_once)
    return DraftEngine({"eagle": (drafter, rule)}, configuration, vocabulary, clock=clock)


def propose_with(head: DraftHead, shape: TreeShape, pages: int, page_rows: int) -> Proposer:
    """By what the head is, for one epoch, with empty pages."""
    if isinstance(head, BlockHead):
        return BlockProposer(head, shape, pages, page_rows, GraphCapture() if captured_blocks(head) else None)
    if isinstance(head, Eagle3Head) and head.mask:
        return ParallelProposer(head, head.mask, shape, pages, page_rows)
    return EagleProposer(head, shape, pages, page_rows)


TOKENIZER = "tokenizer.json"


def check_tokenizers(base: Path, base_ids: int, draft: Path, draft_ids: int) -> None:
    """Raise HeadMismatch unless every id that both models have means the same in both.

    base_ids, draft_ids: how many ids each has logits for; padding may differ. Equal files are equal at
    once, and without any file only the numbers of ids can be compared.
    """
    files = [directory / TOKENIZER for directory in (base, draft)]
    there = [file for file in files if file.exists()]
    if not there:
        _require(base_ids == draft_ids, draft, f"it has {draft_ids} token ids, the base {base_ids}")
        return
    for file in files:
        _require(file in there, draft, f"{file} is missing, so its tokens cannot be compared")
    if _digest(files[0]) != _digest(files[1]):
        _compare(base, draft)


def _compare(base: Path, draft: Path) -> None:
    """Token by token, as bytes."""
    pairs = zip_longest(read_vocabulary(base).bytes, read_vocabulary(draft).bytes)
    for token, (there, here) in enumerate(pairs):
        _require(here == there, draft, f"its token {token} is {here!r}, the base's {there!r}")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _require(holds: bool, draft: Path, reason: str) -> None:
    if not holds:
        raise HeadMismatch(f"{draft}: not the base's tokenizer: {reason}")


NGRAM_TOKENS = 8  # tokens that an n-gram drafter suggests at most by default; not measured
# Levels and nodes of a suffix drafter's trees by default, and places that it looks at: 8 to 128 draft
# SmolLM2's answers equally well.
SUFFIX_TOKENS = 16
SUFFIX_NODES = 24
SUFFIX_PLACES = 16
NGRAM_CURVE: Curve = ((1, 2e-5), (64, 1e-3))  # seconds of looking into so many texts, before they are known


def numbers_of(options: DraftModelOptions) -> torch.dtype:
    """What drafts computes in these, whatever the base does."""
    return resolve_dtype(options.drafter_dtype, options.device, options.drafter_quantization)


class DraftBackend(ABC):
    """One way to draft, and what the ring must know of it. Without a model it drafts from the text.

    shape: how large its trees may be, where that differs from what the ring would choose.
    """

    def __init__(self, options: DraftModelOptions, shape: TreeShape | None) -> None:
        """Who decides nothing sends whole trees."""
        fixed = options.drafting.tuner == "fixed"
        self.options = options
        self.shape = replace(shape or TreeShape(), fixed=True) if fixed else shape

    @abstractmethod
    def make_proposer(self, configuration: Configuration) -> Proposer:
        """For one epoch, with empty pages."""

    def load(self) -> DraftHead | None:
        return None

    @cached_property
    def model(self) -> DraftHead | None:
        """What drafts, loaded once it is asked for."""
        return self.load()

    @cached_property
    def curve(self) -> Curve:
        """Seconds per rows of one level."""
        return measure_head(self.model) if self.model else NGRAM_CURVE

    @property
    def row_bytes(self) -> int:
        """Of KV and features, per position; 0 where it keeps none."""
        return self.model.row_bytes if self.model else 0

    @property
    def head(self) -> Head | None:
        """What the stages must fuse for it."""
        if self.model is None or not self.model.taps:
            return None
        return Head(self.model.taps, self.model.width, name_of_model(self.options.draft))

    def tap_slices(self) -> dict[int, Tensor]:
        """For each tapped layer the slice of its fc."""
        return self.model.tap_slices() if self.model else {}

    def graph_bytes(self, configuration: Configuration) -> int:
        """Memory that its captured graphs take at most."""
        if self.model is None:
            return 0
        if (blocks := captured_blocks(self.model)) is not None:
            return block_graph_bytes(blocks)
        fused = fuse_head(self.model)
        shape = configuration.shape
        if fused is None:
            return 0
        return tree_graph_bytes(fused.shape, fused.dtype.itemsize, shape.top_k, shape.depth + 1)


class EagleBackend(DraftBackend):
    """With an EAGLE head, or one that drafts in one pass, whose trees are as deep as it learned to draft."""

    def __init__(self, options: DraftModelOptions) -> None:
        super().__init__(options, head_tree(options))

    def load(self) -> DraftHead:
        options = self.options
        return load_head(
            options.draft,
            options.base,
            numbers_of(options),
            options.device,
            options.draft_format == "bin",
            options.model_format == "bin",
            options.overrides,
            options.drafter_quantization,
        )

    def make_proposer(self, configuration: Configuration) -> Proposer:
        assert self.model is not None
        shape = configuration.shape
        pages = configuration.pages
        page_rows = configuration.page_rows
        return propose_with(self.model, shape, pages, page_rows)


def head_tree(options: DraftModelOptions) -> TreeShape | None:
    """The largest tree of a draft head, where that differs from what the ring would choose."""
    wanted = options.drafting.shape()
    if options.draft_model is None or options.drafting.depth is not None:
        return wanted
    head = Checkpoint.open(options.draft, options.draft_format == "bin")
    if kind_of(head) == "dflash":
        drafts = block_plan(head, read_config(options.base).vocab).drafts
    else:
        drafts = depth_of(head) if MASK in head else None
    return replace(wanted or TreeShape(), depth=drafts - 1) if drafts else wanted


class LanguageModelBackend(DraftBackend):
    """With a small language model that has the base's tokenizer."""

    def __init__(self, options: DraftModelOptions) -> None:
        self._beam = beam_shape(options.drafting)
        super().__init__(options, self._beam.tree_shape)

    def load(self) -> DraftHead:
        options = self.options
        base = read_config(options.base)
        small = read_small(options.draft)
        check_tokenizers(options.base, base.vocab, options.draft, small.vocab)
        numbers = numbers_of(options)
        kind = options.drafter_quantization
        pickled = options.draft_format == "bin"
        decoder = Decoder.load(options.draft, None, numbers, options.device, pickled, quantization=kind)
        return DecoderHead(decoder, base.vocab, base.max_positions)

    def make_proposer(self, configuration: Configuration) -> Proposer:
        assert isinstance(self.model, DecoderHead)
        pages = configuration.pages
        page_rows = configuration.page_rows
        capture = GraphCapture() if self.model.capturable else None
        return LanguageModelProposer(self.model, self._beam, pages, page_rows, capture)

    def graph_bytes(self, configuration: Configuration) -> int:
        small = read_config(self.options.draft)
        numbers = numbers_of(self.options)
        captured = isinstance(self.model, DecoderHead) and self.model.capturable
        return beam_graph_bytes(small, numbers.itemsize, self._beam) if captured else 0


class SuffixBackend(DraftBackend):
    """With nothing but texts: its own, and past ones where `past` says so."""

    def __init__(self, options: DraftModelOptions, past: int = 0) -> None:
        tokens = options.drafting.depth or (SUFFIX_TOKENS if past else NGRAM_TOKENS)
        nodes = options.drafting.nodes or SUFFIX_NODES
        self._suffixes = (
            SuffixShape(tokens, nodes, SUFFIX_PLACES, 1, past) if past else SuffixShape(tokens, tokens)
        )
        super().__init__(options, TreeShape(tokens - 1, 1, self._suffixes.nodes + 1))

    def make_proposer(self, configuration: Configuration) -> Proposer:
        """Its trees are no larger than there is room for, whoever's trees that was counted for."""
        most = max(configuration.shape.nodes - 1, 1)
        own = self._suffixes
        shape = replace(own, levels=min(own.levels, most), nodes=min(own.nodes, most))
        return SuffixProposer(shape, configuration.pages)


def make_backends(options: DraftModelOptions) -> dict[DrafterName, DraftBackend]:
    """What a drafter offers, its own way first; a look into the text costs nothing and is always there."""
    ngram: dict[DrafterName, DraftBackend] = {"ngram": SuffixBackend(options)}
    if past := options.drafting.past or (PAST_TOKENS if options.drafts == "suffix" else 0):
        ngram = {"suffix": SuffixBackend(options, past), **ngram}
    match options.drafts:
        case "eagle":
            return {"eagle": EagleBackend(options), **ngram}
        case "model":
            return {"model": LanguageModelBackend(options), **ngram}
        case "ngram" | "suffix":
            return {options.drafts: ngram[options.drafts], **ngram}
        case other:
            raise InvalidRequest(f"drafter must be eagle, model, suffix or ngram, got {other!r}", "drafter")


MEASURED_ROWS = (1, 4, 16, 64)  # rows at which a drafter's curve is measured
CONTEXT_ROWS = 256  # committed rows in front of each measured tree; a short answer
MEASURED_LEVELS = 3  # levels of a measured tree
MIN_TURNS = 5  # timed runs per size at least; their median counts
MAX_SECONDS = 0.3  # seconds for measuring, roughly: a start should not wait for it; not measured

Grow = Callable[[int], object]  # grows so many levels


@torch.inference_mode()
def measure_levels(head: DraftHead, clock: Callable[[], float] = time.perf_counter) -> Curve:
    """(rows, seconds) of one level of growth, everything included; a fraction of a second in all."""

    def level_seconds(grow: Grow) -> float:
        """Per level behind the first."""
        one, many = (_time(grow, levels, clock) for levels in (1, MEASURED_LEVELS))
        return max(many - one, many / MEASURED_LEVELS) / (MEASURED_LEVELS - 1)

    growers = {rows: _graphs(head, rows) or _grower(head, rows) for rows in MEASURED_ROWS}
    timers = {rows: partial(level_seconds, grow) for rows, grow in growers.items()}
    return measure_curve(timers, MAX_SECONDS, MIN_TURNS, head.device, clock)


def measure_head(head: DraftHead) -> Curve:
    """What the tuner must know of its speed."""
    at_once = isinstance(head, BlockHead) or (isinstance(head, Eagle3Head) and head.mask)
    return measure_blocks(head) if at_once else measure_levels(head)


@torch.inference_mode()
def measure_blocks(head: DraftHead, clock: Callable[[], float] = time.perf_counter) -> Curve:
    """(trees, seconds) of drafting all places of each, everything included; levels cost nothing more."""
    timers = {trees: partial(_time, _blocks(head, trees), 0, clock) for trees in MEASURED_ROWS}
    return (0, 0.0), *measure_curve(timers, MAX_SECONDS, MIN_TURNS, head.device, clock)


def _blocks(head: DraftHead, trees: int) -> Grow:
    """Drafts blocks for so many texts, each behind its own context."""
    shape = TreeShape(head.block.drafts - 1) if isinstance(head, BlockHead) else TreeShape()
    page_rows = CONTEXT_ROWS + MOST_BLOCK
    proposer = propose_with(head, shape, trees, page_rows)
    texts = [DraftSequence(Opening(number, CONTEXT_ROWS, limit=page_rows)) for number in range(trees)]
    for text in texts:
        proposer.open(text)
        lesson = FeatureBatch(text.id, 0, (0,) * CONTEXT_ROWS, 0, 1)
        text.observe(lesson)
        rows = torch.zeros(CONTEXT_ROWS, head.width, dtype=head.dtype)
        proposer.observe(Features(0, 0, lessons=(lesson,), rows=rows))
    return lambda _: proposer.propose(texts, shape.depth + 1)


def _time(grow: Grow, levels: int, clock: Callable[[], float]) -> float:
    began = clock()
    grow(levels)
    return clock() - began


def _grower(head: DraftHead, rows: int) -> Grow:
    """Grows trees whose levels have so many rows in all, each behind its own context."""
    trees, top_k = _shape(rows)
    page_rows = CONTEXT_ROWS + MEASURED_LEVELS * top_k
    kv = head.make_kv(trees, page_rows)
    grounds = [_room_of(tree, page_rows) for tree in range(trees)]
    last = torch.ones(trees, head.hidden, dtype=head.dtype, device=head.device)
    return lambda levels: TreeGrowth(head, kv, grounds, top_k).run(last, levels)


def _room_of(tree: int, page_rows: int) -> TreeRoom:
    """A page of its own."""
    first = tree * page_rows
    return TreeRoom(CONTEXT_ROWS, (tree,), range(first + CONTEXT_ROWS, first + page_rows), CONTEXT_ROWS)


def _graphs(head: DraftHead, rows: int) -> Grow | None:
    """The same by graphs, where this head has them."""
    fused = graph_head(head)
    (trees, top_k) = _shape(rows)
    if fused is None:
        return None
    from specsot_kernels.gpu.growing import grow

    memory = DraftPages(head, trees, CONTEXT_ROWS + MEASURED_LEVELS * top_k)
    seeds = [_graph_input(memory, tree, top_k) for tree in range(trees)]
    graphs = TreeGraphs(fused, memory, top_k, MEASURED_LEVELS, GraphCapture(), grow, (trees,))
    return lambda levels: graphs.run(seeds, levels)


def _graph_input(pages: DraftPages, tree: int, top_k: int) -> GraphInput:
    pages.table.open(tree)
    ground = pages.reserve_tree(tree, CONTEXT_ROWS, MEASURED_LEVELS * top_k)
    assert ground is not None, "a page of its own"
    return GraphInput(DueRows(tree, CONTEXT_ROWS - 1, (0,), True), ground)


def _shape(rows: int) -> tuple[int, int]:
    """Trees, and nodes of a level of each."""
    top_k = min(rows, 4)
    return rows // top_k, top_k
