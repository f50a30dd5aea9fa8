"""Loads the drafter's models by backend, measures their speed, and makes the engine of every epoch."""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from specsot.checkpoint.borrowed import borrowed_of
from specsot.checkpoint.config import read_config
from specsot.checkpoint.fingerprint import fingerprint
from specsot.checkpoint.kept_vocabulary import vocabulary_of
from specsot.checkpoint.resolving import address_of_model, name_of_model
from specsot.core.frames import FeatureBatch, Features, Opening
from specsot.core.vocabulary import Vocabulary
from specsot.drafting import PAST_TOKENS
from specsot.errors import HeadMismatch, InvalidRequest
from specsot.grammar import prebuild
from specsot.members import Configuration, Curve, Head, Registration, TreeShape
from specsot.params import MODELLESS, DrafterName
from specsot.phases import timed_phase
from specsot.service.compute import idle_seconds
from specsot.service.options import DraftModelOptions
from specsot.transport.pending_rows import use_device
from specsot_drafter.block_graphs import block_graph_bytes, captured_blocks
from specsot_drafter.core.budget import BudgetPolicy
from specsot_drafter.core.control import make_budget
from specsot_drafter.core.sequences import DraftSequence
from specsot_drafter.core.suffixes import MAX_MATCH
from specsot_drafter.eagle_kv import DraftPages, DueRows
from specsot_drafter.engine import DraftEngine
from specsot_drafter.growth import TreeGrowth, TreeRoom
from specsot_drafter.heads import DraftHead
from specsot_drafter.heads.checkpoint import BLOCK_KINDS, Checkpoint, kind_of
from specsot_drafter.heads.decoder import DecoderHead, small_quantization
from specsot_drafter.heads.dflash import MASK, MAX_BLOCK_ROWS, BlockHead, block_plan, depth_of
from specsot_drafter.heads.dspark import DSparkHead
from specsot_drafter.heads.eagle import Eagle3Head
from specsot_drafter.heads.fused import fuse_head, graph_head
from specsot_drafter.heads.loading import load_head
from specsot_drafter.heads.mtp import MtpHead, load_mtp
from specsot_drafter.memory import beam_graph_bytes, mtp_graph_bytes, mtp_memory, small_model_bytes
from specsot_drafter.overlap.graph_growth import GraphInput, TreeGraphs, tree_graph_bytes
from specsot_drafter.proposers import Proposer
from specsot_drafter.proposers.block import BlockProposer, MarkovProposer
from specsot_drafter.proposers.eagle import EagleProposer, compile_eagle
from specsot_drafter.proposers.lm import LanguageModelProposer, beam_shape, read_small
from specsot_drafter.proposers.parallel import ParallelProposer
from specsot_drafter.proposers.suffix import SuffixProposer, SuffixShape
from specsot_drafter.speculator import Clock
from specsot_kernels.cpu.compiling import is_compiling
from specsot_model.cuda_graphs import BUCKETS, Capture, GraphCapture, compile_steps, measure_curve, run_once
from specsot_model.decoder import Decoder
from specsot_model.inference import inference_mode
from specsot_model.kept_speeds import KeptSpeeds, MeasuredSpeeds
from specsot_model.linear import check_quantization, resolve_dtype
from specsot_model.memory_fit import Need, WeightForm, check_fit, drafter_bytes, free_on
from specsot_model.published import open_weights


class DraftLoader:
    """Loader of the drafter's models: loads all weights once, and makes a fresh engine over them for every
    epoch.
    """

    def __init__(
        self,
        options: DraftModelOptions,
        name: str,
        address: str | None = None,
        free_memory: Callable[[str], int | None] = free_on,
    ) -> None:
        """Read the base model's config, and choose the backends. Weights are loaded later, except in two
        cases: on a GPU, and on a CPU for which another process compiles the kernel now. In these cases, the
        first backend's model is loaded here, while kernels are compiled, and errors of loading are raised
        here. On a GPU, compiling the head's kernels begins here, too.

        options: Draft model, base model and device.
        name: The drafter's name in the ring.
        address: Where other members reach the drafter. None: by its name.
        free_memory: Maps the name of a device, such as cuda:0, to its free bytes, or to None if unknown.

        Raises InvalidRequest for an unknown drafter or quantization, and ModelError if the packages
        that the quantization needs are missing.
        """
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
        # Later, this loader may wait for a worker of this process, which waits for kernels. So load the model
        # now.
        if options.drafts not in MODELLESS and (options.device != "cpu" or is_compiling()):
            self._check_fit()
            self._first.begin_compiling()

    @property
    def name(self) -> str:
        """The drafter's name in the ring."""
        return self._name

    @property
    def _first(self) -> DraftBackend:
        """The backend that the options name."""
        return next(iter(self._backends.values()))

    @property
    def _ids(self) -> int:
        """The number of token ids that all backends accept; a small model may have fewer ids than the base
        model.
        """
        options = self._options
        own = self._config.vocab
        return min(own, read_config(options.draft).vocab) if options.drafts == "model" else own

    def tap_slices(self) -> dict[int, torch.Tensor]:
        """Return the slice of the head's weights `fc` for each tapped layer, [feature_size, hidden_size], by
        layer number. Return {} without a head that reads features.
        """
        return self._first.tap_slices()

    def registration(self) -> Registration:
        """Load the first backend's model, measure its speed, and return what the drafter registers with.

        Raises ModelError if the device has too little memory.

        If the base model's tensors are borrowed from elsewhere, what was fetched of them is logged. The
        curve is measured at the first call, see `DraftBackend.curve`.
        """
        config = self._config
        backend = self._first
        self._check_fit()
        if borrowed := borrowed_of(self._options.base):
            _ = backend.model
            borrowed.log_fetched("what the drafter takes of its base")
        _ = self._vocabulary  # Read the vocabulary now, so that no request waits for that.
        return Registration(
            kind="drafter",
            name=self._name,
            address=self._address,
            fingerprint=self._fingerprint,
            host=socket.gethostname(),
            model_layers=config.layers,
            max_positions=config.max_positions,
            kv_bytes=self._options.page_bytes,
            row_bytes=backend.row_bytes,
            curve=backend.curve,
            head=backend.head,
            drafters=tuple(self._backends),
            shape=backend.shape,
        )

    def make_engine(self, configuration: Configuration) -> DraftEngine:
        """Return an engine for one epoch, with empty pages.

        configuration: The epoch as the master has configured it.

        Raises ModelError if the device has too little memory for the pages and the captured graphs.

        The engine has all backends of `make_backends`. With the option `blend`, trees of a model are blended
        with those of the `suffix` backend, or of `ngram` if there is no `suffix`. Where the model's levels
        are launched at once, only long matches join; see `SuffixBackend.make_proposer`.
        """
        vocabulary = self._vocabulary
        if vocabulary:
            prebuild(vocabulary, idle_seconds)
        self._check_graphs(configuration)
        backends: dict[DrafterName, tuple[Proposer, BudgetPolicy]] = {}
        for name, backend in self._backends.items():
            with timed_phase("made a proposer", drafter=name):
                drafter = backend.make_proposer(configuration)
            backends[name] = drafter, self._make_budget(name, drafter, configuration)
        blend = self._make_blend(backends, configuration) if self._options.drafting.blend else None
        return DraftEngine(backends, configuration, vocabulary, blend, ids=self._ids)

    def _make_blend(
        self, proposers: Mapping[DrafterName, tuple[Proposer, BudgetPolicy]], configuration: Configuration
    ) -> Proposer:
        """Return the proposer whose candidates may join the trees of the first backend.

        proposers: The proposers of all backends, by name, the first backend's first.
        configuration: The epoch as the master has configured it.

        It is one of `proposers`, unless the first backend launches all levels at once: then it is a proposer
        of its own that looks for long matches.
        """
        name: DrafterName = "suffix" if "suffix" in proposers else "ngram"
        first, _ = next(iter(proposers.values()))
        backend = self._backends[name]
        if first.at_once and isinstance(backend, SuffixBackend):
            return backend.make_proposer(configuration, MAX_MATCH)
        return proposers[name][0]

    @cached_property
    def _vocabulary(self) -> Vocabulary | None:
        """The bytes of all tokens of the base model. None if it has no tokenizer. Read once: half a second
        for 50,000 tokens.
        """
        has_text = (self._options.base / "tokenizer.json").exists()
        return vocabulary_of(self._options.base, self._config.vocab) if has_text else None

    def _check_fit(self) -> None:
        """Check, before anything is loaded, that the weights and pages fit on the device. Raises ModelError
        if they do not. Nothing is checked for a drafter without a model, or a second time.

        What a head shares with its base model is not counted.

        The check passes if the device's free memory is unknown.
        """
        options = self._options
        if self._loaded or options.drafts in MODELLESS:
            return
        self._loaded = True
        held = WeightForm.on_device(
            options.device, numbers_of(options).itemsize, options.drafter_quantization
        )
        need = Need(self._first.weight_bytes(held), options.page_bytes)
        check_fit(f"{options.drafts} drafts", need, options.device, self._free_memory(options.device))

    def _check_graphs(self, configuration: Configuration) -> None:
        """Check, before graphs are captured, that they and the pages fit on the device. Raises ModelError if
        they do not. Nothing is checked if no graphs are captured.

        configuration: The epoch as the master has configured it.

        The bytes of KV pages are counted as well, the weights are not, because they are loaded already.
        """
        options = self._options
        backend = self._first
        pages = configuration.pages * configuration.page_rows * backend.row_bytes
        if graphs := backend.graph_bytes(configuration):
            need = Need(0, pages, graphs)
            check_fit(f"{options.drafts} drafts", need, options.device, self._free_memory(options.device))

    def _make_budget(
        self, name: DrafterName, drafter: Proposer, configuration: Configuration
    ) -> BudgetPolicy:
        """Return the policy of one backend.

        name: Name of the backend.
        drafter: Its proposer in this epoch.
        configuration: The epoch as the master has configured it.

        A backend without a model gets a tree shape of its own: one child per node, and as many levels as the
        proposer has. If the proposer launches all levels at once, the policy assumes that the stages run
        steps in captured graphs of BUCKETS rows, too.

        The own shape has at most SUFFIX_NODES nodes below the root, and at most the ring's number of nodes.
        """
        shape = configuration.shape
        levels = len(drafter.widths)
        looks = name in ("ngram", "suffix")
        own = TreeShape(levels, 1, min(SUFFIX_NODES + 1, shape.nodes), shape.fixed) if looks else shape
        tuner = self._options.drafting.tuner
        curve = self._backends[name].curve
        step, stages = configuration.curve, configuration.overlapping_stages
        sizes = BUCKETS if drafter.at_once else ()
        return make_budget(
            tuner, own, step, curve, drafter.widths, drafter.at_once, stages, sizes, configuration.rows
        )


def make_engine(
    head: DraftHead,
    configuration: Configuration,
    vocabulary: Vocabulary | None = None,
    curve: Curve | None = None,
    clock: Clock = time.perf_counter,
) -> DraftEngine:
    """Return an engine for one epoch that drafts with one head.

    head: The draft head.
    configuration: The epoch as the master has configured it.
    vocabulary: Bytes of each token, to follow grammars with. None: grammars are ignored.
    curve: (rows, seconds) of one level of growth. None: measured here unless the tree shape is fixed.
    clock: Returns the time in seconds.

    The engine has this one backend, named eagle, with the measured budget policy.
    """
    shape = configuration.shape
    if curve is None:
        curve = () if shape.fixed else measure_head(head)
    drafter = propose_with(head, shape, configuration.pages, configuration.page_rows)
    rule = make_budget("measured", shape, configuration.curve, curve, drafter.widths, drafter.at_once)
    return DraftEngine({"eagle": (drafter, rule)}, configuration, vocabulary, clock=clock)


def propose_with(head: DraftHead, shape: TreeShape, pages: int, page_rows: int) -> Proposer:
    """Return the proposer for a kind of head, with empty pages, for one epoch.

    head: The draft head.
    shape: The largest tree.
    pages: Number of KV pages.
    page_rows: Number of KV slots of a page.

    A DSpark head gets a MarkovProposer, a DFlash head a BlockProposer, a P-EAGLE head (one with a mask) a
    ParallelProposer, every other head an EagleProposer.
    """
    if isinstance(head, BlockHead):
        capture = GraphCapture() if captured_blocks(head) else None
        if isinstance(head, DSparkHead):
            return MarkovProposer(head, shape, pages, page_rows, capture)
        return BlockProposer(head, shape, pages, page_rows, capture)
    if isinstance(head, Eagle3Head) and head.mask:
        return ParallelProposer(head, head.mask, shape, pages, page_rows)
    return EagleProposer(head, shape, pages, page_rows)


TOKENIZER = "tokenizer.json"


def check_tokenizers(base: Path, base_ids: int, draft: Path, draft_ids: int) -> None:
    """Check that every token id means the same in both models. Raises HeadMismatch if not.

    base: Directory of the base model.
    base_ids: Number of ids for which the base model has logits.
    draft: Directory of the draft model.
    draft_ids: Number of ids for which the draft model has logits.

    Equal tokenizer files are accepted at once; different files are compared token by token. If neither model
    has a tokenizer file, only the numbers of ids are compared. If only one has a file, HeadMismatch is
    raised.

    Raises HeadMismatch with the first token that differs, with the number of ids, or with the name of the
    missing file.
    """
    files = [directory / TOKENIZER for directory in (base, draft)]
    present = [file for file in files if file.exists()]
    if not present:
        _require(base_ids == draft_ids, draft, f"it has {draft_ids} token ids, the base {base_ids}")
        return
    for file in files:
        _require(file in present, draft, f"{file} is missing, so its tokens cannot be compared")
    if files[0].read_bytes() != files[1].read_bytes():
        _compare(base, draft)


def _compare(base: Path, draft: Path) -> None:
    """Compare two vocabularies token by token, as bytes. Raises HeadMismatch if they differ.

    base: Directory of the base model.
    draft: Directory of the draft model.

    A vocabulary with fewer tokens differs: its missing tokens count as None.
    """
    pairs = zip_longest(vocabulary_of(base).bytes, vocabulary_of(draft).bytes)
    for token, (base_bytes, draft_bytes) in enumerate(pairs):
        _require(
            draft_bytes == base_bytes,
            draft,
            f"its token {token} is {draft_bytes!r}, the base's {base_bytes!r}",
        )


def _require(holds: bool, draft: Path, reason: str) -> None:
    """Raise HeadMismatch unless a condition holds.

    holds: The condition.
    draft: Directory of the draft model, for the message.
    reason: Why the tokenizers differ, for the message.
    """
    if not holds:
        raise HeadMismatch(f"{address_of_model(draft)}: not the base's tokenizer: {reason}")


# Tokens. The most that an n-gram drafter suggests by default. Untuned.
NGRAM_TOKENS = 8
# Levels and nodes. The default size of a suffix drafter's trees. Untuned.
SUFFIX_TOKENS = 16
SUFFIX_NODES = 24
# Occurrences. The number of earlier occurrences that a suffix drafter uses. Chosen by SmolLM2's answers: 8 to
# 128 draft equally well.
SUFFIX_PLACES = 16
# (sequences, seconds) of looking for earlier occurrences. The assumption before anything is measured.
NGRAM_CURVE: Curve = ((1, 2e-5), (64, 1e-3))


def numbers_of(options: DraftModelOptions) -> torch.dtype:
    """Return the type of the draft model's numbers, which does not depend on the base model's.

    options: The drafter's options.
    """
    return resolve_dtype(options.drafter_dtype, options.device, options.drafter_quantization)


class DraftBackend(ABC):
    """One way to draft, and what the ring must know of it. The base class has no model.

    options: The options of the drafter.
    shape: The largest tree. None: the ring's default.
    """

    def __init__(self, options: DraftModelOptions, shape: TreeShape | None) -> None:
        """Mark the tree shape as fixed if the tuner is `fixed`, which always sends whole trees.

        options: The drafter's options.
        shape: The largest tree. None: the ring's default.
        """
        fixed = options.drafting.tuner == "fixed"
        self.options = options
        self.shape = replace(shape or TreeShape(), fixed=True) if fixed else shape

    @abstractmethod
    def make_proposer(self, configuration: Configuration) -> Proposer:
        """Return a proposer for one epoch, with empty pages.

        configuration: The epoch as the master has configured it.
        """

    def load(self) -> DraftHead | None:
        """Load the model and return it. Return None if this backend has none."""
        return None

    def weight_bytes(self, held: WeightForm) -> int:
        """Return the bytes of the draft model's own weights, without what it shares with its base model.

        held: The form in which weights are held.
        """
        return drafter_bytes(open_weights(self.options.draft, self.options.draft_format == "bin"), held)

    @cached_property
    def model(self) -> DraftHead | None:
        """The draft model, loaded at the first access; None: this backend has none."""
        return self.load()

    def begin_compiling(self) -> None:
        """Load the model. If its trees grow in graphs, begin to compile the kernels that a start needs; see
        `compile_ahead`. `measure_head` waits for these kernels, on the same thread. Without graphs, the model
        is only loaded.
        """
        with timed_phase("loaded the draft model"):
            model = self.model
        if model is None or graph_head(model) is None:
            return
        from specsot_kernels.gpu.launching import compile_ahead

        with timed_phase("began to compile kernels", what="drafts"):
            compile_ahead(inference_mode(partial(self._run_all, model)))

    def _run_all(self, model: DraftHead) -> None:
        """Run once all work whose kernels a start needs, as far as that is known before the ring is formed:
        the work that graphs capture, and the work that runs without a graph. The base class runs the trees
        whose growth is measured.

        model: The draft model, which grows trees in graphs.
        """
        for rows in MEASURED_ROWS:
            _graphs(model, rows, run_once)

    @cached_property
    def curve(self) -> Curve:
        """The measured (rows, seconds) of one level of growth, or of one block for heads that draft in one
        pass. It is that of an earlier start, if a few runs confirm it. Without a model, it is an assumption,
        NGRAM_CURVE.
        """
        if self.model is None:
            return NGRAM_CURVE
        options = self.options
        kept = KeptSpeeds(
            options.device,
            base=fingerprint(options.base),
            base_form=(options.dtype, options.stored_form),
            draft=fingerprint(options.draft),
            dtype=self.model.dtype,
            form=options.drafter_quantization,
        )
        known = kept.read() or MeasuredSpeeds(())
        with timed_phase("measured", what="the draft model") as facts:
            curve = measure_head(self.model, known.curve)
            facts["as_before"] = curve is known.curve
        if curve is not known.curve:
            kept.write(MeasuredSpeeds(curve))
        return curve

    @property
    def row_bytes(self) -> int:
        """The bytes of keys, values and features per position; 0 if nothing is stored."""
        return self.model.row_bytes if self.model else 0

    @property
    def head(self) -> Head | None:
        """Which hidden states the stages must fuse for the head. None: the model reads none."""
        if self.model is None or not self.model.taps:
            return None
        return Head(self.model.taps, self.model.width, self.model_name)

    @property
    def model_name(self) -> str:
        """The draft model's directory, or its name on the hub, for members and users."""
        return name_of_model(self.options.draft)

    def tap_slices(self) -> dict[int, Tensor]:
        """Return the slice of the head's weights `fc` for each tapped layer, [feature_size, hidden_size], by
        layer number. Return {} if the backend has no head that reads features.
        """
        return self.model.tap_slices() if self.model else {}

    def graph_bytes(self, configuration: Configuration) -> int:
        """Return an upper bound of the bytes of the captured graphs; 0 if there are none.

        configuration: The epoch as the master has configured it.

        0 also if there is no model, or if the head cannot be captured.
        """
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
    """Backend that drafts with an EAGLE, P-EAGLE, DFlash or DSpark head.

    By default, trees of heads that draft in one pass are as deep as the head learned to draft.
    """

    def __init__(self, options: DraftModelOptions) -> None:
        """Choose the shape of the trees from the head's config.

        options: The drafter's options.
        """
        super().__init__(options, head_tree(options))

    def load(self) -> DraftHead:
        """Load the head and return it. Raises HeadMismatch if the head does not fit the base model.

        Raises ModelError for an unusable directory, and InvalidRequest for an impossible override.
        """
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

    def _run_all(self, model: DraftHead) -> None:
        """Run also what the trees of an EAGLE head launch, with and without graphs.

        model: The head.
        """
        super()._run_all(model)
        if fuse_head(model):
            compile_eagle(model, self.shape or TreeShape())

    def make_proposer(self, configuration: Configuration) -> Proposer:
        """Return the proposer for this kind of head, with empty pages.

        configuration: The epoch as the master has configured it.

        See `propose_with` for which proposer that is.
        """
        assert self.model is not None
        return propose_with(self.model, configuration.shape, configuration.pages, configuration.page_rows)


class MtpBackend(EagleBackend):
    """Backend that drafts with an MTP layer, of the base model's own checkpoint or of a checkpoint that holds
    the layer alone.
    """

    @property
    def model_name(self) -> str:
        """The checkpoint's name, as that of an MTP layer."""
        return f"the MTP layer of {super().model_name}"

    def load(self) -> DraftHead:
        """Load the layer and return it. Raises ModelError if the checkpoint has none, or one that does not
        fit the base model.
        """
        options = self.options
        return load_mtp(
            options.draft,
            options.base,
            numbers_of(options),
            options.device,
            options.draft_format == "bin",
            options.model_format == "bin",
            options.drafter_quantization,
        )

    def weight_bytes(self, held: WeightForm) -> int:
        """Return the bytes of the layer, without embedding and lm_head. Raises ModelError if the checkpoint
        has no MTP layer.

        held: The form in which weights are held.
        """
        config = read_config(self.options.base)
        return mtp_memory(self.options.draft, config, held, TreeShape(), kernels=False).own

    def graph_bytes(self, configuration: Configuration) -> int:
        """Return an upper bound of the bytes of the captured graphs; 0 if the layer cannot be captured.

        configuration: The epoch as the master has configured it.
        """
        config = read_config(self.options.base)
        captured = isinstance(self.model, MtpHead) and self.model.capturable
        itemsize = numbers_of(self.options).itemsize
        return mtp_graph_bytes(config, itemsize, configuration.shape) if captured else 0


def head_tree(options: DraftModelOptions) -> TreeShape | None:
    """Return the largest tree of a draft head. Return None, which stands for the ring's default, if neither
    the options nor the head say anything about it.

    options: The drafter's options. A depth that the user asked for takes precedence over the depth that the
        head learned.

    If the drafter has no draft model, or the user asked for a depth, only the options count. A DFlash or
    DSpark head has learned one block of drafts, and a head with a mask as many drafts as its config says; for
    other heads only the options count.
    """
    wanted = options.drafting.shape()
    if options.drafts != "eagle" or options.draft_model is None or options.drafting.depth is not None:
        return wanted
    head = Checkpoint.open(options.draft, options.draft_format == "bin")
    if kind_of(head) in BLOCK_KINDS:
        drafts = block_plan(head, read_config(options.base).vocab).drafts
    else:
        drafts = depth_of(head) if MASK in head else None
    return replace(wanted or TreeShape(), depth=drafts - 1) if drafts else wanted


class LanguageModelBackend(DraftBackend):
    """Backend that drafts with a small language model that has the base model's tokenizer."""

    def __init__(self, options: DraftModelOptions) -> None:
        """Choose the shape of the trees.

        options: The drafter's options.
        """
        self._beam = beam_shape(options.drafting)
        super().__init__(options, self._beam.tree_shape)

    def load(self) -> DraftHead:
        """Load the small model and return it. Raises HeadMismatch if its tokens are not those of the base
        model.

        Also raises HeadMismatch for a model with gated delta layers, and ModelError for an unreadable
        config.

        With int4 on a CPU, the lm_head is stored in int4, too, unlike that of a base model. A model with
        sizes that int4 cannot hold is stored in int8 there; see `small_quantization`.
        """
        options = self.options
        base = read_config(options.base)
        small = read_small(options.draft)
        check_tokenizers(options.base, base.vocab, options.draft, small.vocab)
        numbers = numbers_of(options)
        kind = small_quantization(small, options.drafter_quantization, options.device == "cpu")
        pickled = options.draft_format == "bin"
        decoder = Decoder.load(
            options.draft, None, numbers, options.device, pickled, quantization=kind, short_lm_head=True
        )
        has_text = (options.base / TOKENIZER).exists()
        spelled = vocabulary_of(options.base, base.vocab).bytes if has_text else None
        return DecoderHead(decoder, base.vocab, base.max_positions, spelled)

    def weight_bytes(self, held: WeightForm) -> int:
        """Return the bytes of the small model's weights.

        held: The form in which weights are held.
        """
        options = self.options
        files = open_weights(options.draft, options.draft_format == "bin")
        return small_model_bytes(files, read_config(options.draft), held)

    def _run_all(self, model: DraftHead) -> None:
        """Run also the small model's steps, and what its trees launch.

        model: The small model.
        """
        super()._run_all(model)
        assert isinstance(model, DecoderHead)
        compile_steps(model.decoder)
        LanguageModelProposer(model, self._beam, 1, CONTEXT_ROWS, run_once)

    def make_proposer(self, configuration: Configuration) -> Proposer:
        """Return a proposer that drafts with the small model, with empty pages.

        configuration: The epoch as the master has configured it.

        Graphs are captured if the model is capturable. The tree shape is that of the options, not of the
        configuration.
        """
        assert isinstance(self.model, DecoderHead)
        capture = GraphCapture() if self.model.capturable else None
        return LanguageModelProposer(
            self.model, self._beam, configuration.pages, configuration.page_rows, capture
        )

    def graph_bytes(self, configuration: Configuration) -> int:
        """Return an upper bound of the bytes of the captured graphs; 0 if the model cannot be captured.

        configuration: Ignored.
        """
        small = read_config(self.options.draft)
        numbers = numbers_of(self.options)
        captured = isinstance(self.model, DecoderHead) and self.model.capturable
        return beam_graph_bytes(small, numbers.itemsize, self._beam) if captured else 0


class SuffixBackend(DraftBackend):
    """Backend that drafts without a model, from earlier occurrences of a sequence's last tokens."""

    def __init__(self, options: DraftModelOptions, past: int = 0) -> None:
        """Choose the shape of the trees.

        options: The drafter's options.
        past: Number of tokens of past requests that are kept. 0: only n-grams of the sequence itself.

        A depth and a number of nodes in the options replace the defaults: SUFFIX_TOKENS levels with past
        tokens, else NGRAM_TOKENS, and SUFFIX_NODES nodes. Without past tokens, a tree is a chain of its
        levels.
        """
        tokens = options.drafting.depth or (SUFFIX_TOKENS if past else NGRAM_TOKENS)
        nodes = options.drafting.nodes or SUFFIX_NODES
        self._suffixes = (
            SuffixShape(tokens, nodes, SUFFIX_PLACES, 1, past) if past else SuffixShape(tokens, tokens)
        )
        super().__init__(options, TreeShape(tokens - 1, 1, self._suffixes.nodes + 1))

    def make_proposer(self, configuration: Configuration, min_match: int = 0) -> Proposer:
        """Return a proposer whose trees are no larger than the node slots that the ring reserves.

        configuration: The epoch as the master has configured it.
        min_match: Number of a sequence's last tokens that an earlier occurrence must have at least, if that
            is more than the backend's own number. MAX_MATCH finds copied text. With 64 sequences, looking
            for matches of 2 tokens takes the host 3.9 ms, and 0.5 ms for MAX_MATCH (one CPU core).

        At least one level and one node remain.
        """
        max_nodes = max(configuration.shape.nodes - 1, 1)
        own = self._suffixes
        shape = replace(
            own,
            levels=min(own.levels, max_nodes),
            nodes=min(own.nodes, max_nodes),
            min_match=max(own.min_match, min_match),
        )
        return SuffixProposer(shape, configuration.pages)


def make_backends(options: DraftModelOptions) -> dict[DrafterName, DraftBackend]:
    """Return the backends of a drafter by name; the first one is the drafter that the options name.

    options: The drafter's options.

    `ngram` is always available, because it needs no model. `suffix` is available if the options name it, or
    if tokens of past requests are kept. Raises InvalidRequest for an unknown drafter.

    The order is the order of registration: the named backend, then `suffix` if available, then `ngram`.
    """
    ngram: dict[DrafterName, DraftBackend] = {"ngram": SuffixBackend(options)}
    if past := options.drafting.past or (PAST_TOKENS if options.drafts == "suffix" else 0):
        ngram = {"suffix": SuffixBackend(options, past), **ngram}
    match options.drafts:
        case "eagle":
            return {"eagle": EagleBackend(options), **ngram}
        case "mtp":
            return {"mtp": MtpBackend(options), **ngram}
        case "model":
            return {"model": LanguageModelBackend(options), **ngram}
        case "ngram" | "suffix":
            return {options.drafts: ngram[options.drafts], **ngram}
        case other:
            raise InvalidRequest(
                f"drafter must be eagle, mtp, model, suffix or ngram, got {other!r}", "drafter"
            )


# Rows of a level. The sizes at which a drafter's speed is measured.
MEASURED_ROWS = (1, 4, 16, 64)
# Rows. The committed rows before each measured tree: the length of a short answer.
CONTEXT_ROWS = 256
# Levels. The depth of a measured tree.
MEASURED_LEVELS = 3
# Runs. The minimum number of timed runs per size; their median counts.
MIN_TURNS = 5
# Seconds. About how long measuring may take, so that it does not delay a start. Untuned.
MAX_SECONDS = 0.3

# Grows trees of the given number of levels.
Grow = Callable[[int], object]


@inference_mode
def measure_levels(
    head: DraftHead, clock: Callable[[], float] = time.perf_counter, known: Curve = ()
) -> Curve:
    """Measure and return the (rows, seconds) of one level of growth, everything included, in a fraction of a
    second.

    head: The draft head.
    clock: Returns the time in seconds.
    known: What this function returned in an earlier process, or (); it is returned if it is confirmed.

    Heads that can be captured are measured in graphs, others kernel by kernel. The sizes are MEASURED_ROWS.
    """

    def level_seconds(grow: Grow) -> float:
        """Return the seconds of each level after the first.

        grow: Grows trees of a given number of levels.
        """
        one, many = (_time(grow, levels, clock) for levels in (1, MEASURED_LEVELS))
        return max(many - one, many / MEASURED_LEVELS) / (MEASURED_LEVELS - 1)

    @cache
    def grower_of(rows: int) -> Grow:
        """Return a function that grows the trees of one measured size. Graphs are captured by the first call
        for a size.

        rows: Number of rows of a level over all trees.
        """
        return _graphs(head, rows) or _grower(head, rows)

    def rows_seconds(rows: int) -> float:
        """Return the seconds of one level of growth.

        rows: Number of rows of a level over all trees.
        """
        return level_seconds(grower_of(rows))

    timers = {rows: partial(rows_seconds, rows) for rows in MEASURED_ROWS}
    return measure_curve(timers, MAX_SECONDS, MIN_TURNS, head.device, clock, known)


def measure_head(head: DraftHead, known: Curve = ()) -> Curve:
    """Return the measured speed of a head, in the form that the head's policy needs: per level, or per block
    for heads that draft in one pass.

    head: The draft head.
    known: What this function returned in an earlier process, or (); it is returned if it is confirmed.
    """
    at_once = isinstance(head, BlockHead) or (isinstance(head, Eagle3Head) and head.mask)
    return (measure_blocks if at_once else measure_levels)(head, known=known)


@inference_mode
def measure_blocks(
    head: DraftHead, clock: Callable[[], float] = time.perf_counter, known: Curve = ()
) -> Curve:
    """Measure and return the (trees, seconds) of drafting whole blocks. More levels of a block cost nothing.

    head: A head that drafts in one pass.
    clock: Returns the time in seconds.
    known: What this function returned in an earlier process, or (); it is returned if it is confirmed.

    The curve begins with (0, 0.0), and its other sizes are MEASURED_ROWS.
    """
    timers = {trees: partial(_time, _blocks(head, trees), 0, clock) for trees in MEASURED_ROWS}
    earlier = known[1:]
    curve = measure_curve(timers, MAX_SECONDS, MIN_TURNS, head.device, clock, earlier)
    return known if curve is earlier and known else ((0, 0.0), *curve)


def _blocks(head: DraftHead, trees: int) -> Grow:
    """Return a function that drafts blocks for made-up sequences, each with its own context. The function
    ignores its argument, because one pass drafts all levels.

    head: A head that drafts in one pass.
    trees: Number of sequences.

    Each sequence has CONTEXT_ROWS committed tokens, whose features are zeros.
    """
    shape = TreeShape(head.block.drafts - 1) if isinstance(head, BlockHead) else TreeShape()
    page_rows = CONTEXT_ROWS + MAX_BLOCK_ROWS
    proposer = propose_with(head, shape, trees, page_rows)
    sequences = [DraftSequence(Opening(number, CONTEXT_ROWS, limit=page_rows)) for number in range(trees)]
    for sequence in sequences:
        proposer.open(sequence)
        feature_batch = FeatureBatch(sequence.id, 0, (0,) * CONTEXT_ROWS, 0, 1)
        sequence.observe(feature_batch)
        rows = torch.zeros(CONTEXT_ROWS, head.width, dtype=head.dtype)
        proposer.observe(Features(0, 0, feature_batches=(feature_batch,), rows=rows))
    return lambda _: proposer.propose(sequences, shape.depth + 1)


def _time(grow: Grow, levels: int, clock: Callable[[], float]) -> float:
    """Return the seconds that growing trees takes.

    grow: Grows trees of a given number of levels.
    levels: The number of levels.
    clock: Returns the time in seconds.

    One call of `grow` is timed.
    """
    began = clock()
    grow(levels)
    return clock() - began


def _grower(head: DraftHead, rows: int) -> Grow:
    """Return a function that grows trees, each after its own context.

    head: The draft head.
    rows: Number of rows of a level over all trees.

    The returned function takes the number of levels.
    """
    trees, top_k = _shape(rows)
    page_rows = CONTEXT_ROWS + MEASURED_LEVELS * top_k
    kv = head.make_kv(trees, page_rows)
    grounds = [_room_of(tree, page_rows) for tree in range(trees)]
    last = torch.ones(trees, head.hidden, dtype=head.dtype, device=head.device)
    return lambda levels: TreeGrowth(head, kv, grounds, top_k).run(last, levels)


def _room_of(tree: int, page_rows: int) -> TreeRoom:
    """Return the reserved rows of a measured tree, which has a page of its own.

    tree: Number of the tree.
    page_rows: Number of KV slots of a page.
    """
    first = tree * page_rows
    return TreeRoom(CONTEXT_ROWS, (tree,), range(first + CONTEXT_ROWS, first + page_rows), CONTEXT_ROWS)


def _graphs(head: DraftHead, rows: int, capture: Capture | None = None) -> Grow | None:
    """Return a function that grows trees in captured graphs. Return None if this head cannot be captured.

    head: The draft head.
    rows: Number of rows of a level over all trees.
    capture: Captures functions as graphs. None: as CUDA graphs.

    The returned function takes the number of levels, at most MEASURED_LEVELS.
    """
    fused = graph_head(head)
    (trees, top_k) = _shape(rows)
    if fused is None:
        return None
    from specsot_kernels.gpu.growing import grow

    memory = DraftPages(head, trees, CONTEXT_ROWS + MEASURED_LEVELS * top_k)
    seeds = [_graph_input(memory, tree, top_k) for tree in range(trees)]
    capture = capture or GraphCapture()
    graphs = TreeGraphs(fused, memory, top_k, MEASURED_LEVELS, capture, grow, (trees,))
    return lambda levels: graphs.run(seeds, levels)


def _graph_input(pages: DraftPages, tree: int, top_k: int) -> GraphInput:
    """Return what a measured tree grows from, after opening its sequence.

    pages: The KV pages of the head.
    tree: Number of the tree.
    top_k: Number of children of every node.

    Asserts that the page has room for the tree.
    """
    pages.table.open(tree)
    ground = pages.reserve_tree(tree, CONTEXT_ROWS, MEASURED_LEVELS * top_k)
    assert ground is not None, "a page of its own"
    return GraphInput(DueRows(tree, CONTEXT_ROWS - 1, (0,), True), ground)


def _shape(rows: int) -> tuple[int, int]:
    """Return the number of trees, and the nodes per level of each: 16 -> 4 trees of 4.

    rows: Number of rows of a level over all trees.
    """
    top_k = min(rows, 4)
    return rows // top_k, top_k
