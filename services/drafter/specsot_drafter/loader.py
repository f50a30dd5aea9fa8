"""Loads what a drafter drafts with, measures it, and makes the engine of every epoch."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property

import torch

from specsot.core.vocabulary import Vocabulary, read_vocabulary
from specsot.grammar import prebuild
from specsot.members import Configuration, Curve, Registration, TreeShape
from specsot.model.config import read_config
from specsot.model.fingerprint import fingerprint
from specsot.model.memory_fit import Need, WeightForm, check_fit, drafts_of, room_on
from specsot.model.precision import check_quantization
from specsot.model.weights import WeightFiles
from specsot.params import DrafterName
from specsot.service.options import DraftModelOptions
from specsot.transport.pending_rows import use_device
from specsot_drafter.backends import DraftBackend, make_backends, numbers_of
from specsot_drafter.core.tree_budget import BudgetPolicy, make_budget
from specsot_drafter.engine import Clock, DraftEngine
from specsot_drafter.heads import DraftHead
from specsot_drafter.measure import measure_levels
from specsot_drafter.proposers import Proposer
from specsot_drafter.proposers.eagle import EagleProposer


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
        self._options, self._name, self._address = options, name, address or name
        self._free_memory, self._loaded = free_memory, False
        self._config = read_config(options.base)
        check_quantization(options.draft_quantization)
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
        """Token ids that all ways can be fed; a small model may have fewer than the base."""
        options, own = self._options, self._config.vocab
        return min(own, read_config(options.draft).vocab) if options.drafts == "model" else own

    def tap_slices(self) -> dict[int, torch.Tensor]:
        return self._first.tap_slices()

    def registration(self) -> Registration:
        """Loads and measures what drafts; a fraction of a second. Raises ModelError: no room for it."""
        config, way = self._config, self._first
        self._check_fit()
        _ = self._vocabulary  # now, not while somebody is being answered
        return Registration(
            kind="drafter",
            name=self._name,
            address=self._address,
            fingerprint=self._fingerprint,
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
        ways: dict[DrafterName, tuple[Proposer, BudgetPolicy]] = {}
        for name, way in self._backends.items():
            drafter = way.make_proposer(configuration)
            ways[name] = drafter, self._make_budget(name, drafter, configuration)
        blend = ways["ngram"][0] if self._options.drafting.blend else None
        return DraftEngine(ways, configuration, vocabulary, blend, ids=self._ids)

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
        files = WeightFiles(options.draft, options.draft_format == "bin")
        held = WeightForm(numbers_of(options).itemsize, options.draft_quantization)
        need = Need(drafts_of(files, held), options.page_bytes)
        check_fit(f"{options.drafts} drafts", need, options.device, self._free_memory(options.device))

    def _check_graphs(self, configuration: Configuration) -> None:
        """Before they are captured, where there are any."""
        options, way = self._options, self._first
        pages = configuration.pages * configuration.page_rows * way.row_bytes
        if graphs := way.graph_bytes(configuration):
            need = Need(0, pages, graphs)
            check_fit(f"{options.drafts} drafts", need, options.device, self._free_memory(options.device))

    def _make_budget(
        self, name: DrafterName, drafter: Proposer, configuration: Configuration
    ) -> BudgetPolicy:
        shape, levels = configuration.shape, len(drafter.widths)
        own = TreeShape(levels, 1, levels + 2, shape.fixed) if name == "ngram" else shape
        tuner, curve = self._options.drafting.tuner, self._backends[name].curve
        return make_budget(tuner, own, configuration.curve, curve, drafter.widths)


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
        curve = () if shape.fixed else measure_levels(head)
    drafter = EagleProposer(head, shape, configuration.pages, configuration.page_rows)
    rule = make_budget("measured", shape, configuration.curve, curve, drafter.widths)
    return DraftEngine({"eagle": (drafter, rule)}, configuration, vocabulary, clock=clock)
