"""Presets: settings for short answers, long answers, or little memory.

What is given besides a preset wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specsot.errors import InvalidRequest
from specsot_app.core.ask import PRUNING

Preset = Literal["short", "long", "small"]

OTHER_POLICIES = (*PRUNING, "head_aware")  # than a window


@dataclass(frozen=True, slots=True)
class Settings:
    """fleet: of what is loaded and how is drafted. request: of every request."""

    fleet: Mapping[str, Any]
    request: Mapping[str, Any] = field(default_factory=dict[str, Any])


PRESETS: Mapping[str, Settings] = {
    "short": Settings({"draft_tokens": 5}),
    "long": Settings({"draft_tokens": 4}, {"sinks": 4, "recent": 1020}),
    "small": Settings(
        {"draft_tokens": 3, "quantization": "int8", "draft_dtype": "fp16"}, {"sinks": 4, "recent": 252}
    ),
}


def fleet_with(preset: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given of a fleet, and the preset's where nothing is. Raises InvalidRequest."""
    return _filled(given, settings_of(preset).fleet)


def request_with(preset: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a request. Another KV policy is given besides the preset's window, and wins as a whole."""
    settings = settings_of(preset).request
    other = any(given.get(name) is not None and given[name] is not False for name in OTHER_POLICIES)
    return dict(given) if other else _filled(given, settings)


def settings_of(preset: str | None) -> Settings:
    """None: nothing is set. Raises InvalidRequest."""
    if preset is None:
        return Settings({})
    if preset not in PRESETS:
        known = ", ".join(PRESETS)
        raise InvalidRequest(f"preset must be one of {known}, got {preset!r}", field="preset")
    return PRESETS[preset]


def filled(preset: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a command is given, by flag, and the preset's of fleet and request where nothing is."""
    named = {flag.replace("-", "_"): value for flag, value in given.items()}
    whole = request_with(preset, fleet_with(preset, named))
    return {name.replace("_", "-"): value for name, value in whole.items()}


def _filled(given: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**given, **{name: value for name, value in settings.items() if given.get(name) is None}}
