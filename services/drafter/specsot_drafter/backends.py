"""The backends a drafter can be started with: what each loads, and what the ring must know of it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from specsot.core.vocabulary import read_vocabulary
from specsot.errors import HeadMismatch, InvalidRequest
from specsot.members import Configuration, Curve, Head, Range, TreeShape
from specsot.model.config import read_config
from specsot.model.decoder import Decoder
from specsot.model.precision import resolve_dtype
from specsot.params import DrafterName
from specsot.service.options import DraftModelOptions
from specsot_drafter.graph_growth import tree_graph_bytes
from specsot_drafter.heads import DraftHead
from specsot_drafter.heads.fused import fuse_head
from specsot_drafter.heads.loading import load_head
from specsot_drafter.measure import measure_levels
from specsot_drafter.proposers import Proposer
from specsot_drafter.proposers.eagle import EagleProposer
from specsot_drafter.proposers.lm import BeamShape, DecoderHead, LanguageModelProposer, beam_shape
from specsot_drafter.proposers.ngram import NgramProposer

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
    theirs, ours = read_vocabulary(base).bytes, read_vocabulary(draft).bytes
    for token in range(max(len(theirs), len(ours))):
        here = ours[token] if token < len(ours) else None
        there = theirs[token] if token < len(theirs) else None
        _require(here == there, draft, f"its token {token} is {here!r}, the base's {there!r}")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _require(holds: bool, draft: Path, reason: str) -> None:
    if not holds:
        raise HeadMismatch(f"{draft}: not the base's tokenizer: {reason}")


NGRAM_TOKENS = 8  # tokens that an n-gram drafter suggests at most, where nothing is said
NGRAM_CURVE: Curve = ((1, 2e-5), (64, 1e-3))  # seconds of looking into so many texts, before they are known


def numbers_of(options: DraftModelOptions) -> torch.dtype:
    """What drafts computes in these, whatever the base does."""
    return resolve_dtype(options.drafter_dtype, options.device)


class DraftBackend(Protocol):
    """One way to draft, loaded.

    shape:     how large its trees may be, where that differs from what the ring would choose.
    row_bytes: of KV and features, per position; 0 where it keeps none.
    curve:     seconds per rows of one level.
    """

    @property
    def shape(self) -> TreeShape | None: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def curve(self) -> Curve: ...
    @property
    def head(self) -> Head | None:
        """What the stages must fuse for it."""
        ...

    def tap_slices(self) -> dict[int, Tensor]:
        """For each tapped layer the slice of its fc."""
        ...

    def graph_bytes(self, configuration: Configuration) -> int:
        """Memory that its captured graphs take at most."""
        ...

    def make_proposer(self, configuration: Configuration) -> Proposer:
        """For one epoch, with empty pages."""
        ...


class EagleBackend:
    """With an EAGLE head."""

    def __init__(self, options: DraftModelOptions) -> None:
        self._options, self.shape = options, _fixed(options, options.drafting.shape())

    @cached_property
    def _head(self) -> DraftHead:
        options = self._options
        pickled, base = options.draft_format == "bin", options.model_format == "bin"
        return load_head(
            options.draft,
            options.base,
            numbers_of(options),
            options.device,
            pickled,
            base,
            options.overrides,
            options.draft_quantization,
        )

    @property
    def row_bytes(self) -> int:
        return self._head.row_bytes

    @property
    def curve(self) -> Curve:
        return self._curve

    @cached_property
    def _curve(self) -> Curve:
        return measure_levels(self._head)

    @property
    def head(self) -> Head:
        return Head(self._head.taps, self._head.width)

    def tap_slices(self) -> dict[int, Tensor]:
        return self._head.tap_slices()

    def graph_bytes(self, configuration: Configuration) -> int:
        fused = fuse_head(self._head)
        shape = configuration.shape
        return tree_graph_bytes(fused, shape.top_k, shape.depth + 1) if fused else 0

    def make_proposer(self, configuration: Configuration) -> Proposer:
        return EagleProposer(self._head, configuration.shape, configuration.pages, configuration.page_rows)


class LanguageModelBackend:
    """With a small language model that has the base's tokenizer."""

    def __init__(self, options: DraftModelOptions) -> None:
        self._options, self._beam = options, beam_shape(options.drafting)
        self.shape = _fixed(options, self._beam.tree_shape)

    @cached_property
    def _head(self) -> DecoderHead:
        options = self._options
        base, small = read_config(options.base), read_config(options.draft)
        check_tokenizers(options.base, base.vocab, options.draft, small.vocab)
        pickled, whole = options.draft_format == "bin", Range(0, small.layers)
        numbers, kind = numbers_of(options), options.draft_quantization
        decoder = Decoder.load(options.draft, whole, numbers, options.device, pickled, quantization=kind)
        return DecoderHead(decoder, base.vocab, base.max_positions)

    @property
    def row_bytes(self) -> int:
        return self._head.row_bytes

    @property
    def curve(self) -> Curve:
        return self._curve

    @cached_property
    def _curve(self) -> Curve:
        return measure_levels(self._head)

    @property
    def head(self) -> None:
        return None

    def tap_slices(self) -> dict[int, Tensor]:
        return {}

    def graph_bytes(self, configuration: Configuration) -> int:
        return 0

    def make_proposer(self, configuration: Configuration) -> Proposer:
        return LanguageModelProposer(self._head, self._beam, configuration.pages, configuration.page_rows)


class NgramBackend:
    """With nothing but the text."""

    row_bytes: int = 0
    curve: Curve = NGRAM_CURVE
    head: Head | None = None

    def __init__(self, options: DraftModelOptions) -> None:
        self._tokens = options.drafting.tokens or NGRAM_TOKENS
        self.shape = _fixed(
            options, BeamShape(1, (1,) * (self._tokens - 1), 0.0, self._tokens + 1).tree_shape
        )

    def tap_slices(self) -> dict[int, Tensor]:
        return {}

    def graph_bytes(self, configuration: Configuration) -> int:
        return 0

    def make_proposer(self, configuration: Configuration) -> Proposer:
        """Its chains are no longer than there is room for, whoever's trees that was counted for."""
        most = max(min(self._tokens, configuration.shape.nodes - 1), 1)
        return NgramProposer(most, configuration.pages)


def make_backends(options: DraftModelOptions) -> dict[DrafterName, DraftBackend]:
    """What a drafter offers, its own way first; a look into the text costs nothing and is always there."""
    ways: dict[DrafterName, DraftBackend] = {}
    if options.drafts == "eagle":
        ways["eagle"] = EagleBackend(options)
    elif options.drafts == "model":
        ways["model"] = LanguageModelBackend(options)
    elif options.drafts != "ngram":
        raise InvalidRequest(f"drafter must be eagle, model or ngram, got {options.drafts!r}", "drafter")
    return {**ways, "ngram": NgramBackend(options)}


def _fixed(options: DraftModelOptions, shape: TreeShape | None) -> TreeShape | None:
    """Who decides nothing sends whole trees."""
    if options.drafting.tuner != "fixed":
        return shape
    return replace(shape or TreeShape(), fixed=True)
