"""Where the draft head comes from: loads it against its base, measures it, says who it is.

Refuses to know the ring, features and links.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from specsot.members import AS_PUBLISHED, Configuration, Curve, Head, Overrides, Registration, WeightFormat
from specsot.model.config import read_config
from specsot.model.fingerprint import fingerprint
from specsot.model.precision import resolve_dtype
from specsot.vocabulary import read_vocabulary
from specsot_drafter.engine import DraftEngine
from specsot_drafter.heads import DraftHead
from specsot_drafter.heads.loading import load_head
from specsot_drafter.measure import measure_levels


@dataclass(frozen=True, slots=True)
class Supply:
    """What a drafter is started with: its head, and the base it was trained on. kv_memory in bytes."""

    name: str
    address: str
    model: Path
    draft_model: Path
    dtype: str = "auto"
    device: str = "cpu"
    kv_memory: int = 1 << 28
    draft_format: WeightFormat = "safetensors"
    model_format: WeightFormat = "safetensors"
    overrides: Overrides = AS_PUBLISHED


class Source:
    """Loads the head once; every epoch gets a fresh engine over the same weights."""

    def __init__(self, supply: Supply) -> None:
        self._supply = supply
        self._config = read_config(supply.model)
        self._fingerprint = fingerprint(supply.model)

    @property
    def name(self) -> str:
        return self._supply.name

    @cached_property
    def head(self) -> DraftHead:
        supply = self._supply
        dtype = resolve_dtype(supply.dtype, supply.device)
        pickled, base = supply.draft_format == "bin", supply.model_format == "bin"
        models = supply.draft_model, supply.model
        return load_head(*models, dtype, supply.device, pickled, base, supply.overrides)

    def tap_slices(self) -> dict[int, torch.Tensor]:
        return self.head.tap_slices()

    def registration(self) -> Registration:
        """Loads and measures the head; a fraction of a second."""
        supply, config = self._supply, self._config
        return Registration(
            kind="drafter",
            name=supply.name,
            address=supply.address,
            fingerprint=self._fingerprint,
            model_layers=config.layers,
            max_positions=config.max_positions,
            kv_bytes=supply.kv_memory,
            row_bytes=self.head.row_bytes,
            curve=self._curve,
            head=Head(self.head.taps, self.head.width),
        )

    def engine(self, configuration: Configuration) -> DraftEngine:
        """The engine for one epoch, with empty pages."""
        has_text = (self._supply.model / "tokenizer.json").exists()
        vocabulary = read_vocabulary(self._supply.model, self._config.vocab) if has_text else None
        return DraftEngine(self.head, configuration, vocabulary, self._curve)

    @cached_property
    def _curve(self) -> Curve:
        return measure_levels(self.head)
