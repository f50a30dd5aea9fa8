"""The backends a drafter can be started with: what each loads, and what the ring must know of it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path

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
from specsot_drafter.proposers.lm import DecoderHead, LanguageModelProposer, beam_shape
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
    pairs = zip_longest(read_vocabulary(base).bytes, read_vocabulary(draft).bytes)
    for token, (there, here) in enumerate(pairs):
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


class DraftBackend(ABC):
    """One way to draft, and what the ring must know of it. Without a model it drafts from the text.

    shape: how large its trees may be, where that differs from what the ring would choose.
    """

    def __init__(self, options: DraftModelOptions, shape: TreeShape | None) -> None:
        """Who decides nothing sends whole trees."""
        fixed = options.drafting.tuner == "fixed"
        self.options, self.shape = options, replace(shape or TreeShape(), fixed=True) if fixed else shape

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
        return measure_levels(self.model) if self.model else NGRAM_CURVE

    @property
    def row_bytes(self) -> int:
        """Of KV and features, per position; 0 where it keeps none."""
        return self.model.row_bytes if self.model else 0

    @property
    def head(self) -> Head | None:
        """What the stages must fuse for it."""
        return Head(self.model.taps, self.model.width) if self.model and self.model.taps else None

    def tap_slices(self) -> dict[int, Tensor]:
        """For each tapped layer the slice of its fc."""
        return self.model.tap_slices() if self.model else {}

    def graph_bytes(self, configuration: Configuration) -> int:
        """Memory that its captured graphs take at most."""
        fused, shape = fuse_head(self.model) if self.model else None, configuration.shape
        return tree_graph_bytes(fused, shape.top_k, shape.depth + 1) if fused else 0


class EagleBackend(DraftBackend):
    """With an EAGLE head."""

    def __init__(self, options: DraftModelOptions) -> None:
        super().__init__(options, options.drafting.shape())

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
            options.draft_quantization,
        )

    def make_proposer(self, configuration: Configuration) -> Proposer:
        assert self.model is not None
        return EagleProposer(self.model, configuration.shape, configuration.pages, configuration.page_rows)


class LanguageModelBackend(DraftBackend):
    """With a small language model that has the base's tokenizer."""

    def __init__(self, options: DraftModelOptions) -> None:
        self._beam = beam_shape(options.drafting)
        super().__init__(options, self._beam.tree_shape)

    def load(self) -> DraftHead:
        options = self.options
        base, small = read_config(options.base), read_config(options.draft)
        check_tokenizers(options.base, base.vocab, options.draft, small.vocab)
        pickled, whole = options.draft_format == "bin", Range(0, small.layers)
        numbers, kind = numbers_of(options), options.draft_quantization
        decoder = Decoder.load(options.draft, whole, numbers, options.device, pickled, quantization=kind)
        return DecoderHead(decoder, base.vocab, base.max_positions)

    def make_proposer(self, configuration: Configuration) -> Proposer:
        assert self.model is not None
        return LanguageModelProposer(self.model, self._beam, configuration.pages, configuration.page_rows)


class NgramBackend(DraftBackend):
    """With nothing but the text."""

    def __init__(self, options: DraftModelOptions) -> None:
        self._tokens = options.drafting.tokens or NGRAM_TOKENS
        super().__init__(options, TreeShape(self._tokens - 1, 1, self._tokens + 1))

    def make_proposer(self, configuration: Configuration) -> Proposer:
        """Its chains are no longer than there is room for, whoever's trees that was counted for."""
        most = max(min(self._tokens, configuration.shape.nodes - 1), 1)
        return NgramProposer(most, configuration.pages)


def make_backends(options: DraftModelOptions) -> dict[DrafterName, DraftBackend]:
    """What a drafter offers, its own way first; a look into the text costs nothing and is always there."""
    ngram: dict[DrafterName, DraftBackend] = {"ngram": NgramBackend(options)}
    match options.drafts:
        case "eagle":
            return {"eagle": EagleBackend(options), **ngram}
        case "model":
            return {"model": LanguageModelBackend(options), **ngram}
        case "ngram":
            return ngram
        case other:
            raise InvalidRequest(f"drafter must be eagle, model or ngram, got {other!r}", "drafter")
