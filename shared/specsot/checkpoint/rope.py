"""Reads the rotary settings of a config.json, in the old or the new spelling, without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log, sqrt
from pathlib import Path
from typing import Any

from specsot.checkpoint.families import LLAMA, Family
from specsot.checkpoint.fields import Fields, Json
from specsot.errors import ModelError

# The kinds of rotary settings that are supported.
KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary settings of a model's layers: how queries and keys are rotated by their positions.

    theta: Base of the frequencies.
    kind: "default", "linear" (positions / factor), "llama3" or "yarn" (scaled by wavelength), or "longrope"
        (each pair slowed by its own factor), or "proportional" (only the first pairs rotate, with the
        frequencies that they have if all rotate). "dynamic" configs are read as "default".
    factor: Factor of the context extension, for linear, llama3, yarn and proportional.
    low: low_freq_factor of llama3, or beta_slow of yarn.
    high: high_freq_factor of llama3, or beta_fast of yarn.
    original: Context length in tokens before the extension.
    share: Fraction of each head that rotates, its first dimensions.
    truncate: True if the range that yarn blends ends at whole pairs.
    stretch: Factor of rotated queries and keys.
    factors: For longrope, the divisor of each pair's frequency; empty for other kinds.
    proportion: For proportional, the fraction of a head's pairs that rotate.
    slope: Queries are multiplied by 1 + slope * log(1 + floor(position / original)), as in Llama 4; 0: they
        are not.
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
    factors: tuple[float, ...] = ()
    proportion: float = 1.0
    slope: float = 0.0

    def rotated(self, head_dim: int) -> int:
        """Return how many dimensions of a head rotate: its first ones, rounded down; all if `share` is 1.

        head_dim: number of elements of a head.
        """
        return int(head_dim * self.share)


# Rotary settings of a layer without rotary positions.
UNROTATED = Rope(share=0.0)


def read_rope(fields: Json, source: Path, family: Family = LLAMA) -> Rope:
    """Return rotary settings from `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old).

    Without any of them, the family's defaults are returned.

    fields: The fields of config.json.
    source: The file, for messages.
    family: Defaults of the model's family.

    Raises a ModelError that names what is wrong, or the kind that is not supported.

    `rope_scaling` has precedence over `rope_parameters` unless it is null or empty. Of settings by kind of
    layer, those of "full_attention" are read. Base and fraction in the settings have precedence over those
    outside of them. The kind "su" is read as "longrope".
    """
    settings = _settings(fields, source)
    old = {
        "rope_theta": fields.get(family.theta_field),
        "partial_rotary_factor": fields.get(family.share_field),
    }
    reader = Fields(source, {**old, **settings})
    kind = settings.get("rope_type", settings.get("type", family.rope_kind))
    kind = "longrope" if kind == "su" else kind
    reader.require(kind in KINDS, f"rope type {kind!r} is not one of {', '.join(KINDS)}")
    share = _share(reader, family)
    theta = reader.number("rope_theta", family.theta)
    rope = _of_kind(kind, reader, fields, theta, share)
    if reader.values.get("llama_4_scaling_beta") is None:
        return rope
    original = reader.count("original_max_position_embeddings")
    return replace(rope, slope=reader.number("llama_4_scaling_beta"), original=original)


def read_score_factor(fields: Json, source: Path) -> float:
    """Return the factor of attention scores in models with latent attention: the square of yarn's factor for
    `mscale_all_dim`, or 1 if the rotary settings name no scaling or no such field.

    fields: The fields of config.json.
    source: The file, for messages.

    Raises ModelError if `mscale_all_dim`, or `factor` with it, is no number above 0.
    """
    settings = _settings(fields, source)
    scaled = settings.get("rope_type", settings.get("type", "default")) != "default"
    if not scaled or not settings.get("mscale_all_dim"):
        return 1.0
    reader = Fields(source, settings)
    return _yarn_factor(reader, reader.number("mscale_all_dim")) ** 2


def _settings(fields: Json, source: Path) -> Json:
    """Return the rotary settings of a config, in the new or the old spelling; see `read_rope`.

    fields: The fields of config.json.
    source: The file, for messages.

    Raises ModelError if they are no object.
    """
    settings = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if isinstance(settings, dict) and "full_attention" in settings:
        settings = settings["full_attention"]
    if not isinstance(settings, dict):
        raise ModelError(f"{source}: rope settings must be an object, got {settings!r}")
    return settings


def _yarn_factor(reader: Fields, scale: float) -> float:
    """Return yarn's factor for a scale, at least 1: 0.1 * scale * log(factor) + 1.

    reader: the rotary settings, which have the `factor` of the context extension.
    scale: the value of `mscale` or `mscale_all_dim`.

    Raises ModelError if the `factor` is no number above 0.
    """
    return max(0.1 * scale * log(reader.number("factor")) + 1.0, 1.0)


def _of_kind(kind: str, reader: Fields, fields: Json, theta: float, share: float) -> Rope:
    """Return the rotary settings for one kind of scaling.

    kind: one of `KINDS`.
    reader: the rotary settings.
    fields: the whole config.
    theta: base of the frequencies.
    share: fraction of each head that rotates.

    Raises ModelError if a setting is missing or wrong.

    The kind "dynamic" is read as "default". llama3 and yarn use `max_position_embeddings` if the settings
    have no original length; for yarn, beta_slow is 1 and beta_fast 32 if they are missing.
    """
    # "dynamic" differs from "default" only beyond max_position_embeddings.
    if kind in ("default", "dynamic"):
        return Rope(theta, share=share)
    if kind == "longrope":
        return _longrope(Fields(reader.source, {**fields, **reader.values}), theta, share)
    if kind == "proportional":
        return Rope(theta, kind, reader.number("factor", 1.0), proportion=share)
    factor = reader.number("factor")
    if kind == "linear":
        return Rope(theta, kind, factor, share=share)
    original = reader.count("original_max_position_embeddings", fields.get("max_position_embeddings"))
    if kind == "llama3":
        low, high = reader.number("low_freq_factor"), reader.number("high_freq_factor")
        return Rope(theta, kind, factor, low, high, original, share)
    low, high = reader.number("beta_slow", 1.0), reader.number("beta_fast", 32.0)
    return Rope(
        theta, kind, factor, low, high, original, share, reader.flag("truncate", True), _stretch(reader)
    )


def read_sliding_rope(fields: Fields, default_theta: float) -> Rope:
    """Return the rotary settings of sliding-window layers, of the kind "default": their base is `rope_theta`
    of "sliding_attention" in `rope_parameters`, else `rope_local_base_freq`, else `default_theta`.

    fields: The fields of config.json.
    default_theta: The base of the frequencies if the config has none.

    Raises ModelError if the config asks for a scaling in these layers.

    Raises ModelError also for a base that is no number above 0.
    """
    settings = fields.values.get("rope_parameters") or {}
    settings_of_sliding = settings.get("sliding_attention") or {} if isinstance(settings, dict) else {}
    kind = settings_of_sliding.get("rope_type", "default")
    fields.require(kind == "default", f"rope type {kind!r} in layers with a window")
    return Rope(
        Fields(fields.source, {**fields.values, **settings_of_sliding}).number(
            "rope_theta" if "rope_theta" in settings_of_sliding else "rope_local_base_freq", default_theta
        )
    )


def _longrope(reader: Fields, theta: float, share: float) -> Rope:
    """Return the rotary settings of the kind longrope. If the model's context is longer than the original
    one, the long factors are used.

    They are used for every sequence, short ones too: switching within a sequence would change the keys that
    are in the KV cache already.

    reader: the rotary settings, and the fields of the whole config.
    theta: base of the frequencies.
    share: fraction of each head that rotates.

    Raises ModelError if the factors are missing or no numbers > 0.

    Without an original length in the config, the two lengths are equal, so that the short factors are used.
    The factor of queries and keys is `attention_factor`, else the one that Transformers derives from
    `factor`, which by default is the ratio of the two lengths; 1 if `factor` is at most 1.
    """
    positions = reader.count("max_position_embeddings")
    original = reader.count("original_max_position_embeddings", positions)
    name = "long_factor" if positions > original else "short_factor"
    factors: Any = reader.values.get(name)
    reader.require(
        isinstance(factors, list) and all(isinstance(one, int | float) and one > 0 for one in factors),
        f"{name} must be numbers > 0, got {factors!r}",
    )
    factor = reader.number("factor", positions / original)
    usual = sqrt(1 + log(factor) / log(original)) if factor > 1 else 1.0
    stretch = reader.number("attention_factor", usual)
    return Rope(theta, "longrope", share=share, stretch=stretch, factors=tuple(map(float, factors)))


def _stretch(reader: Fields) -> float:
    """Return yarn's factor of rotated queries and keys: `attention_factor` of the config or, if the config
    has none, the value that Transformers derives.

    reader: the rotary settings.

    The derived value is the ratio of the factors for `mscale` and `mscale_all_dim` if both are given and not
    0, otherwise 0.1 * log(factor) + 1, at least 1. Raises ModelError for a number that is not above 0.
    """
    if all(reader.values.get(name) for name in ("mscale", "mscale_all_dim")):
        factors = (_yarn_factor(reader, reader.number(name)) for name in ("mscale", "mscale_all_dim"))
        default = next(factors) / next(factors)
    else:
        default = _yarn_factor(reader, 1.0)
    return reader.number("attention_factor", default)


def _share(reader: Fields, family: Family) -> float:
    """Return the fraction of a head that rotates, above 0 and at most 1: `partial_rotary_factor` of the
    config, else the family's default.

    reader: the rotary settings.
    family: the model's family, which has the default.

    Raises ModelError if the fraction is above 1, or below 1 in a family that does not support it.
    """
    share = reader.number("partial_rotary_factor", family.share)
    reader.require(
        share == 1 or (share < 1 and family.partial), f"partial_rotary_factor {share!r} is not supported"
    )
    return share
