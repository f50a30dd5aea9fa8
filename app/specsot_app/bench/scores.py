"""Perplexities for the tables: of what a method wrote, and of a reference text read as it reads.

All are scored by the base itself, through the stage that serves.
"""

from __future__ import annotations

from functools import cache, cached_property

from specsot.errors import InvalidRequest
from specsot.model.config import read_config
from specsot.model.decoder import Decoder
from specsot.params import Window
from specsot_app.bench.core.aggregate import Perplexities, Runs, perplexity
from specsot_app.bench.perplexity import load_whole, losses
from specsot_app.bench.runners import ModelSet
from specsot_master.text import Text

READ = 1536  # tokens of the reference text


class Scores:
    """Remembers what was scored: lossless methods write the same."""

    def __init__(self, models: ModelSet, reference: str) -> None:
        """Raises InvalidRequest for a text without anything to foresee."""
        self._models = models
        most = min(READ, read_config(models.base).max_positions)  # windows read no farther than the others
        self._reference = Text(models.base).encode_bare(reference)[:most]
        if len(self._reference) < 2:
            raise InvalidRequest("text: it has fewer than two tokens", field="text")
        self._loss = cache(self._losses)

    @cached_property
    def _decoder(self) -> Decoder:
        models = self._models
        return load_whole(models.base, models.dtype, models.device, models.quantization, models.kv_dtype)

    def quality(self, runs: Runs) -> Perplexities:
        """own: without a window, as far as the base's context goes. reference: with the method's window."""
        written = [one.text for one in runs.readings]
        own = [self._loss((*prompt, *text), len(prompt), None) for prompt, text in zip(runs.prompts, written)]
        sight = None if runs.method.rival else runs.method.window
        return Perplexities(perplexity(own), perplexity([self._loss(self._reference, 1, sight)]))

    def _losses(self, tokens: tuple[int, ...], first: int, window: Window | None) -> tuple[float, ...]:
        most = self._decoder.config.max_positions
        seen = tokens[:most] if window is None else tokens
        return tuple(losses(self._decoder, seen, window, first))
