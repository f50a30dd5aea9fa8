"""Rotary settings of a config.json, spelled the old way or the new one. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from pathlib import Path

from specsot.errors import ModelError
from specsot.model.families import LLAMA, Family
from specsot.model.fields import Fields, Json


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. kind: default, linear (positions / factor), llama3 or yarn (both by wavelength).

    low, high, original: llama3's low_freq_factor, high_freq_factor, original_max_position_embeddings; or
    yarn's beta_slow, beta_fast and the latter. truncate: yarn's range ends at whole pairs.
    stretch: what queries and keys are multiplied with.
    share: the part of each head that turns, its first dimensions; the rest stays as it is.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192
    share: float = 1.0
    truncate: bool = True
    stretch: float = 1.0

    def rotated(self, head_dim: int) -> int:
        """Dimensions of a head that turn."""
        return int(head_dim * self.share)


def read_rope(fields: Json, source: Path, family: Family = LLAMA) -> Rope:
    """Rotary settings from `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old).

    ModelError names what is wrong, and a kind that is not supported.
    """
    settings = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(settings, dict):
        raise ModelError(f"{source}: rope settings must be an object, got {settings!r}")
    old = {
        "rope_theta": fields.get(family.theta_field),
        "partial_rotary_factor": fields.get(family.share_field),
    }
    reader = Fields(source, {**old, **settings})
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ModelError(f"{source}: rope type {kind!r} is not one of default, linear, llama3, yarn")
    share, theta = _share(reader, family), reader.number("rope_theta", family.theta)
    if kind == "default":
        return Rope(theta, share=share)
    factor = reader.number("factor")
    if kind == "linear":
        return Rope(theta, kind, factor, share=share)
    original = reader.count("original_max_position_embeddings", fields.get("max_position_embeddings"))
    if kind == "llama3":
        low, high = reader.number("low_freq_factor"), reader.number("high_freq_factor")
        return Rope(theta, kind, factor, low, high, original, share)
    if share < 1:
        raise ModelError(f"{source}: yarn with partial_rotary_factor {share} is not supported")
    low, high = reader.number("beta_slow", 1.0), reader.number("beta_fast", 32.0)
    return Rope(
        theta, kind, factor, low, high, original, share, reader.flag("truncate", True), _stretch(reader)
    )


def _stretch(reader: Fields) -> float:
    """Yarn's attention_factor, or what Transformers takes where none is given."""

    def grown(scale: float) -> float:
        return max(0.1 * scale * log(reader.number("factor")) + 1.0, 1.0)

    both = [reader.values.get(name) for name in ("mscale", "mscale_all_dim")]
    usual = grown(reader.number("mscale")) / grown(reader.number("mscale_all_dim")) if all(both) else grown(1)
    return reader.number("attention_factor", usual)


def _share(reader: Fields, family: Family) -> float:
    share = reader.number("partial_rotary_factor", family.share)
    if share > 1 or (share < 1 and not family.partial):
        raise ModelError(f"{reader.source}: partial_rotary_factor {share!r} is not supported")
    return share
