"""Settings of rotary positions, read from a config's old or new spelling.

Refuses to know angles and tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specsot.errors import ModelError
from specsot.model.families import LLAMA, Family
from specsot.model.fields import Fields, Json


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. kind: default, linear (positions / factor) or llama3 (by wavelength).

    low, high, original: llama3's low_freq_factor, high_freq_factor, original_max_position_embeddings.
    share: the part of each head that turns, its first dimensions; the rest stays as it is.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192
    share: float = 1.0

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
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(f"{source}: rope type {kind!r} is not one of default, linear, llama3")
    share, theta = _share(reader, family), reader.number("rope_theta", family.theta)
    if kind == "default":
        return Rope(theta, share=share)
    if kind == "linear":
        return Rope(theta, kind, reader.number("factor"), share=share)
    return Rope(
        theta,
        kind,
        reader.number("factor"),
        reader.number("low_freq_factor"),
        reader.number("high_freq_factor"),
        reader.count("original_max_position_embeddings", fields.get("max_position_embeddings")),
        share,
    )


def _share(reader: Fields, family: Family) -> float:
    share = reader.number("partial_rotary_factor", family.share)
    if share > 1 or (share < 1 and not family.partial):
        raise ModelError(f"{reader.source}: partial_rotary_factor {share!r} is not supported")
    return share
